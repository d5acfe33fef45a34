/*
 * A store of pages: the contents of shared memory at many instants, every page of each held once.
 *
 * Why it exists.  Shared memory has no copy-on-write in the kernel (docs/shared-memory.md).  So a
 * state of it is a *table* here, one number for each page: 0 is a hole, any other the slot of the
 * store in which its bytes lie.  Tables of one object share the slots of pages that are the same,
 * so a state takes what it differs in, and two states are compared without looking at their bytes.
 *
 * Objects are read and written by pread(2) and pwrite(2), not through a mapping: reading a hole
 * must not fill it, a program that runs may make its memory shorter at any moment, and memory that
 * is mapped for writing could not be sealed.
 *
 * Results are 0 or a count; errors are negative errno values.  Calls may run side by side.
 */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

typedef uint32_t u32;
typedef uint64_t u64;

#define PAGE 4096UL
#define CHUNK 16UL              /* pages read at once: what fits into the nearest cache */
#define RUN 256UL               /* pages written at once */
#define KEPT 4096UL             /* free slots that keep their memory, to be used again */

enum { HOLE = 0, ZERO = 1, UNKNOWN = 0xffffffff };

struct store {
	unsigned char *memory;
	u32 *references;
	u32 *free;
	u64 free_count, used, slots;
	pthread_mutex_t lock;
};

static void *reserve(u64 size)
{
	void *at = mmap(0, size, PROT_READ | PROT_WRITE,
			MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

	return at == MAP_FAILED ? 0 : at;
}

void pages_close(struct store *store)
{
	if (store->memory)
		munmap(store->memory, store->slots * PAGE);
	if (store->references)
		munmap(store->references, store->slots * sizeof(u32));
	if (store->free)
		munmap(store->free, store->slots * sizeof(u32));
	free(store);
}

/* A store with room for so many pages, of which none takes memory yet; 0 if there is none. */
struct store *pages_open(u64 slots)
{
	struct store *store = calloc(1, sizeof *store);

	if (!store)
		return 0;
	store->slots = slots;
	store->memory = reserve(slots * PAGE);
	store->references = reserve(slots * sizeof(u32));
	store->free = reserve(slots * sizeof(u32));
	if (!store->memory || !store->references || !store->free) {
		pages_close(store);
		return 0;
	}
	/* fewer and faster first touches; and nobody who is forked has to copy its page tables */
	madvise(store->memory, slots * PAGE, MADV_HUGEPAGE);
	madvise(store->memory, slots * PAGE, MADV_DONTFORK);
	pthread_mutex_init(&store->lock, 0);
	store->used = 2;        /* HOLE and ZERO are no one's, and stay */
	store->references[ZERO] = 1;
	return store;
}

/* Pages that are held. */
u64 pages_held(struct store *store)
{
	pthread_mutex_lock(&store->lock);
	u64 held = store->used - 2 - store->free_count;
	pthread_mutex_unlock(&store->lock);
	return held;
}

static unsigned char *at(struct store *store, u32 slot)
{
	return store->memory + slot * PAGE;
}

static void keep(struct store *store, u32 slot)
{
	if (slot > ZERO)
		__atomic_add_fetch(store->references + slot, 1, __ATOMIC_RELAXED);
}

static u32 add(struct store *store, const unsigned char *page)
{
	u32 slot = HOLE;

	pthread_mutex_lock(&store->lock);
	if (store->free_count)
		slot = store->free[--store->free_count];
	else if (store->used < store->slots)
		slot = store->used++;
	pthread_mutex_unlock(&store->lock);
	if (slot) {
		store->references[slot] = 1;
		memcpy(at(store, slot), page, PAGE);
	}
	return slot;
}

/* Forget a table's slots; the memory of those that no other table has is given back. */
void pages_release(struct store *store, const u32 *table, u64 count)
{
	u32 first = 0, end = 0;         /* neighbours to give back together */

	for (u64 i = 0; i <= count; i++) {
		u32 slot = i < count ? table[i] : HOLE;

		if (i < count && slot <= ZERO)
			continue;
		if (i < count && __atomic_sub_fetch(store->references + slot, 1, __ATOMIC_ACQ_REL))
			continue;
		if (i == count || slot != end) {
			if (end > first)
				madvise(at(store, first), (end - first) * PAGE, MADV_DONTNEED);
			first = end = 0;
		}
		if (i == count)
			break;
		pthread_mutex_lock(&store->lock);
		store->free[store->free_count++] = slot;
		int many = store->free_count > KEPT;
		pthread_mutex_unlock(&store->lock);
		if (many) {
			if (end == first)
				first = slot;
			end = slot + 1;
		}
	}
}

/* The same table once more. */
void pages_keep(struct store *store, const u32 *table, u64 count)
{
	for (u64 i = 0; i < count; i++)
		keep(store, table[i]);
}

static int is_zero(const unsigned char *page)
{
	return !*(const u64 *)page && !memcmp(page, page + 8, PAGE - 8);
}

static u32 seen(struct store *store, const unsigned char *page, u32 before, int adds)
{
	if (before > ZERO && before != UNKNOWN && !memcmp(page, at(store, before), PAGE)) {
		if (adds)
			keep(store, before);
		return before;
	}
	if (is_zero(page))
		return ZERO;
	return adds ? add(store, page) : UNKNOWN;
}

static long read_fully(int fd, unsigned char *into, u64 size, u64 from)
{
	for (u64 done = 0; done < size;) {
		ssize_t got = pread(fd, into + done, size - done, from + done);

		if (got < 0 && errno == EINTR)
			continue;
		if (got < 0)
			return -errno;
		if (!got) {             /* it has become shorter, or ends within a page */
			memset(into + done, 0, size - done);
			return 0;
		}
		done += got;
	}
	return 0;
}

/*
 * What the pages [first, first + count) of an object hold, into `now`, in terms of `before` (none:
 * 0), both beginning with the first of them.  With `adds` what differs is added to the store, and
 * `now` has to be released; else it is UNKNOWN.  The number of pages that are not as before; on an
 * error nothing has to be released.
 */
static long look(struct store *store, int fd, u64 first, u64 count, const u32 *before, u32 *now,
		 int adds)
{
	unsigned char buffer[CHUNK * PAGE] __attribute__((aligned(4096)));
	u64 end = first + count, page = first;
	long changed = 0, bad = 0;

	memset(now, 0, count * sizeof *now);
	while (page < end && !bad) {
		off_t data = lseek(fd, page * PAGE, SEEK_DATA);
		off_t hole = data < 0 ? data : lseek(fd, data, SEEK_HOLE);

		if (hole < 0) {
			/* there are only holes behind, or it has become shorter meanwhile */
			bad = errno == ENXIO ? 0 : -errno;
			break;
		}
		u64 until = (hole + PAGE - 1) / PAGE;

		page = data / PAGE > page ? data / PAGE : page;
		until = until < end ? until : end;
		while (page < until && !bad) {
			u64 some = until - page < CHUNK ? until - page : CHUNK;

			bad = read_fully(fd, buffer, some * PAGE, page * PAGE);
			for (u64 i = 0; i < some && !bad; i++) {
				u32 was = before ? before[page + i - first] : HOLE;
				u32 is = seen(store, buffer + i * PAGE, was, adds);

				if (is == HOLE)
					bad = -ENOMEM;
				changed += is != was;
				now[page + i - first] = is;
			}
			page += some;
		}
	}
	if (bad && adds) {
		pages_release(store, now, count);
		memset(now, 0, count * sizeof *now);
	}
	return bad ? bad : changed;
}

/* The same in tables of the whole object. */
long pages_read(struct store *store, int fd, u64 first, u64 count, const u32 *before, u32 *now,
		long adds)
{
	return look(store, fd, first, count, before ? before + first : 0, now + first, adds);
}

/* Look at some pages again: `table` holds what they are now.  0, or what went wrong. */
long pages_renew(struct store *store, int fd, u64 first, u64 count, u32 *table)
{
	u32 now[RUN];

	for (u64 done = 0, some; done < count; done += some) {
		u32 *part = table + first + done;

		some = count - done < RUN ? count - done : RUN;
		long bad = look(store, fd, first + done, some, part, now, 1);

		if (bad < 0)
			return bad;
		pages_release(store, part, some);
		memcpy(part, now, some * sizeof *now);
	}
	return 0;
}

static long write_fully(int fd, const unsigned char *from, u64 size, u64 to)
{
	for (u64 done = 0; done < size;) {
		ssize_t put = pwrite(fd, from + done, size - done, to + done);

		if (put < 0 && errno == EINTR)
			continue;
		if (put <= 0)
			return put ? -errno : -EIO;
		done += put;
	}
	return 0;
}

/*
 * Make the pages [first, first + count) of an object, which are as `have` says (holes: 0), what
 * `want` says.  `size` is the object's in bytes.  The number of pages written.
 */
long pages_write(struct store *store, int fd, u64 first, u64 count, const u32 *have,
		 const u32 *want, u64 size)
{
	static const unsigned char zeros[PAGE];
	long written = 0;

	for (u64 i = first, end = first + count, next; i < end; i = next) {
		u32 slot = want[i], was = have ? have[i] : HOLE;
		long bad = 0;

		next = i + 1;
		if (slot == was)
			continue;
		if (slot == HOLE) {
			while (next < end && want[next] == HOLE && have[next] != HOLE)
				next++;
			if (fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, i * PAGE,
				      (next - i) * PAGE) < 0)
				bad = -errno;
		} else {
			while (slot != ZERO && next < end && next - i < RUN &&
			       want[next] == slot + (next - i) &&
			       (have ? have[next] : HOLE) != want[next])
				next++;
			u64 bytes = (next - i) * PAGE;

			bytes = i * PAGE + bytes > size ? size - i * PAGE : bytes;
			bad = write_fully(fd, slot == ZERO ? zeros : at(store, slot), bytes, i * PAGE);
			written += next - i;
		}
		if (bad)
			return bad;
	}
	return written;
}

/* Pages that a table holds. */
u64 pages_present(const u32 *table, u64 count)
{
	u64 present = 0;

	for (u64 i = 0; i < count; i++)
		present += table[i] != HOLE;
	return present;
}
