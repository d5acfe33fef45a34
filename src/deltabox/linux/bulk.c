/*
 * Many small questions to the kernel in one call, and long lists of pages without Python objects.
 *
 * Why it exists.  While a tree of processes stands still, every microsecond is its pause.  A
 * profile of that pause (docs/performance.md) showed some five hundred system calls that the kernel
 * answers within one millisecond, and nine of Python around them.  So what is asked again at every
 * checkpoint is asked here; what the answers mean is decided in Python (bulk.py).  Nothing here
 * keeps state, and the interpreter lock is not held meanwhile.
 *
 * Results are 0 or a count; errors are negative errno values.
 */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/types.h>
#include <unistd.h>

typedef uint64_t u64;

#define PAGE 4096UL

/* -- which pages there are: PAGEMAP_SCAN (linux/fs.h) ------------------------------------------ */

struct region { u64 start, end, categories; };

struct pm_scan_arg {
	u64 size, flags, start, end, walk_end, vec, vec_len, max_pages;
	u64 category_inverted, category_mask, category_anyof_mask, return_mask;
};

#define PAGEMAP_SCAN _IOWR('f', 16, struct pm_scan_arg)
#define PM_SCAN_WP_MATCHING 1

enum { WPALLOWED = 1, WRITTEN = 2, FILE_PAGE = 4, PRESENT = 8, SWAPPED = 16, PFNZERO = 32,
       GUARD = 256 };

struct area { u64 start, end, is_file; };
struct cursor { u64 area, at; };        /* where to go on: in which area, from which address */

/*
 * Scan areas from the cursor on until `out` is full or nothing is left; the number of regions.
 * What has been found is never lost: a full buffer is no error, the caller comes back.
 */
static long scan(int pagemap, struct cursor *next, const struct area *areas, u64 count, u64 flags,
		 u64 mask, u64 any, u64 back, struct region *out, long room)
{
	long found = 0;

	while (next->area < count && found < room) {
		const struct area *area = areas + next->area;
		u64 unwanted = PFNZERO | (area->is_file ? FILE_PAGE : 0);
		struct pm_scan_arg arg = {
			.size = sizeof arg, .flags = flags, .end = area->end,
			.start = next->at > area->start ? next->at : area->start,
			.vec = (u64)(out + found), .vec_len = room - found,
			.category_inverted = unwanted, .category_mask = mask | unwanted,
			.category_anyof_mask = any, .return_mask = back,
		};
		int got = ioctl(pagemap, PAGEMAP_SCAN, &arg);

		if (got < 0)
			return -errno;
		/*
		 * The kernel walks in turns of 512 regions, and where the last of them comes to the
		 * end it says that it has stopped where the one before did. It stops early only
		 * when there is no room left, and never before the end of what it has found.
		 */
		next->at = got < room - found ? area->end : arg.walk_end;
		found += got;
		if (got && next->at < out[found - 1].end)
			next->at = out[found - 1].end;
		if (next->at >= area->end)
			next->area++;
	}
	return found;
}

/*
 * Which pages of some areas a process has for itself, as regions with WPALLOWED where writes to
 * them are watched, GUARD for guard regions.  `guard` is GUARD where the kernel knows it.
 */
long bulk_present(int pagemap, struct cursor *next, const struct area *areas, long count,
		  u64 guard, struct region *out, long room)
{
	return scan(pagemap, next, areas, count, 0, 0, PRESENT | SWAPPED | guard,
		    WPALLOWED | guard, out, room);
}

/*
 * Which pages were written since they were protected last, and protect them again, both at once:
 * what is written from now on will be found by the next call, also in a process that runs.
 */
long bulk_written(int pagemap, struct cursor *next, const struct area *areas, long count,
		  struct region *out, long room)
{
	return scan(pagemap, next, areas, count, PM_SCAN_WP_MATCHING, WRITTEN, PRESENT | SWAPPED,
		    WRITTEN, out, room);
}

/* -- which pages two processes share: /proc/PID/pagemap ------------------------------------------ */

#define CHUNK 4096
#define PM_PRESENT (1UL << 63)
#define PM_FRAME ((1UL << 55) - 1)

static long entries(int pagemap, u64 address, u64 *into, long count)
{
	long got = pread(pagemap, into, count * 8, address / PAGE * 8);

	return got == count * 8 ? 0 : got < 0 ? -errno : -EIO;
}

/*
 * The parts of regions in `mine` that are not the very same physical pages at address + shift in
 * `theirs`.  Pages that are the same were never written by either since they were forked.
 */
long bulk_unshared(int mine, int theirs, const struct region *regions, const int64_t *shifts,
		   long count, struct region *out, long room)
{
	static __thread u64 a[CHUNK], b[CHUNK];
	long found = 0;

	for (long i = 0; i < count; i++) {
		for (u64 at = regions[i].start; at < regions[i].end;) {
			u64 pages = (regions[i].end - at) / PAGE;
			long n = pages < CHUNK ? pages : CHUNK;
			long bad = entries(mine, at, a, n);

			if (!bad)
				bad = entries(theirs, at + shifts[i], b, n);
			if (bad)
				return bad;
			for (long k = 0; k < n; k++, at += PAGE) {
				/* a frame number of 0 only says that it may not be known */
				if (a[k] & b[k] & PM_PRESENT && a[k] & PM_FRAME &&
				    !((a[k] ^ b[k]) & PM_FRAME))
					continue;
				if (found && out[found - 1].end == at && at != regions[i].start) {
					out[found - 1].end = at + PAGE;
					continue;
				}
				if (found == room)
					return -E2BIG;
				out[found++] = (struct region){ at, at + PAGE, regions[i].categories };
			}
		}
	}
	return found;
}

/* What is in both of two sorted lists of regions. */
long bulk_common(const struct region *a, long a_count, const struct region *b, long b_count,
		 struct region *out, long room)
{
	long found = 0;

	for (long i = 0, k = 0; i < a_count && k < b_count;) {
		u64 low = a[i].start > b[k].start ? a[i].start : b[k].start;
		u64 high = a[i].end < b[k].end ? a[i].end : b[k].end;

		if (low < high) {
			if (found == room)
				return -E2BIG;
			out[found++] = (struct region){ low, high, 0 };
		}
		if (a[i].end < b[k].end)
			i++;
		else
			k++;
	}
	return found;
}

/* -- lists of ranges ----------------------------------------------------------------------------- */

struct row { u64 start, end; int64_t shift; };          /* where a stretch of addresses is kept */
struct iovec64 { u64 base, size; };

/*
 * Sorted regions, cut to the sorted rows that they lie in, as iovecs for process_vm_readv(2): from
 * where they are to where they are kept.  Long ones are cut, so that no call is long.
 */
long bulk_translate(const struct row *rows, long row_count, const struct region *regions,
		    long count, u64 longest, struct iovec64 *remote, struct iovec64 *local, long room)
{
	long found = 0, r = 0;

	for (long i = 0; i < count; i++) {
		while (r < row_count && rows[r].end <= regions[i].start)
			r++;
		for (long k = r; k < row_count && rows[k].start < regions[i].end; k++) {
			u64 low = regions[i].start > rows[k].start ? regions[i].start : rows[k].start;
			u64 high = regions[i].end < rows[k].end ? regions[i].end : rows[k].end;

			while (low < high) {
				u64 size = high - low < longest ? high - low : longest;

				if (found == room)
					return -E2BIG;
				remote[found] = (struct iovec64){ low, size };
				local[found++] = (struct iovec64){ low + rows[k].shift, size };
				low += size;
			}
		}
	}
	return found;
}
