/*
 * Lists of questions about processes, answered by the kernel one after the other without Python in
 * between: files of /proc, links, stats, and what ptrace(2) and its like tell.  See bulk.c for why.
 *
 * A question that cannot be answered has its errno as the answer; what that means, and what any of
 * the answers means, is decided in Python.
 */

#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/openat2.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

typedef uint64_t u64;
typedef int64_t s64;
typedef uint32_t u32;
typedef int32_t s32;

/* bulk.py has the same numbers */
enum { READ, LINK, STAT, IN_ROOT, DESCRIPTORS, REGISTERS, SIGNAL_MASK, SIGNALS, RSEQ, DISPATCH,
       ROBUST_LIST, SCHEDULING, AFFINITY, IO_PRIORITY, FLAGS, NAMESPACES };

/*
 * Whom a question is about is an index into the `ids` that come with each call, so that one list
 * serves all processes of the same shape.  A path of /proc is a format of ids[0] and ids[who].
 */
struct question { u32 kind; s32 who; u64 more; const char *path; };
struct answer { s64 result; u64 at; };      /* bytes from `at` on in the output, or -errno */

struct output { char *bytes; u64 room, used; };

/* Files of /proc are read to the end: some give a page at a time. */
static s64 read_all(int fd, struct output *out)
{
	u64 start = out->used;

	for (;;) {
		if (out->used == out->room)
			return -E2BIG;
		ssize_t got = read(fd, out->bytes + out->used, out->room - out->used);

		if (got < 0)
			return -errno;
		if (!got)
			return out->used - start;
		out->used += got;
	}
}

static s64 read_file(int directory, const char *path, struct output *out)
{
	int fd = openat(directory, path, O_RDONLY | O_CLOEXEC);

	if (fd < 0)
		return -errno;
	s64 size = read_all(fd, out);

	close(fd);
	return size;
}

static s64 put(struct output *out, const void *bytes, u64 size)
{
	if (out->room - out->used < size)
		return -E2BIG;
	memcpy(out->bytes + out->used, bytes, size);
	out->used += size;
	return size;
}

static s64 put_stat(const struct stat *found, dev_t own, struct output *out)
{
	u64 facts[] = { found->st_dev == own ? 0 : found->st_dev, found->st_ino, found->st_mode, found->st_rdev,
			found->st_nlink, found->st_size,
			found->st_ctim.tv_sec * 1000000000UL + found->st_ctim.tv_nsec };

	return put(out, facts, sizeof facts);
}

static s64 link_target(int directory, const char *path, struct output *out)
{
	ssize_t got = readlinkat(directory, path, out->bytes + out->used, out->room - out->used);

	if (got < 0)
		return -errno;
	if ((u64)got == out->room - out->used)
		return -E2BIG;
	out->used += got;
	return got;
}

/*
 * What a path leads to inside a root that it may not leave (openat2(2)).  A device of 0 stands for
 * the root's own, which has another number after every rollback.
 */
static s64 in_root(int root, const char *path, u64 flags, struct output *out)
{
	struct open_how how = { .flags = flags | O_CLOEXEC,
				.resolve = RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS };
	struct stat found, own;
	int fd;

	if (fstat(root, &own))
		return -errno;
	do
		fd = syscall(SYS_openat2, root, path, &how, sizeof how);
	while (fd < 0 && errno == EAGAIN);
	if (fd < 0)
		return -errno;
	s64 result = fstat(fd, &found) ? -errno : put_stat(&found, own.st_dev, out);

	close(fd);
	return result;
}

/*
 * Every open descriptor of a process: its number, the length of its link and of its fdinfo, the
 * facts of its stat; then link and fdinfo, and padding to eight bytes.
 */
struct descriptor { u32 number; s32 link, info; u32 pad; u64 stat[7]; };

static s64 one_descriptor(int links, int infos, const char *name, struct output *out)
{
	struct descriptor one = { .number = atoi(name) };
	u64 start = out->used;
	struct stat found;
	s64 got;

	if (out->room - out->used < sizeof one)
		return -E2BIG;
	out->used += sizeof one;
	if ((got = link_target(links, name, out)) < 0)
		return got;
	one.link = got;
	if ((got = read_file(infos, name, out)) < 0)
		return got;
	one.info = got;
	u64 end = out->used;

	if (fstatat(links, name, &found, 0))
		return -errno;
	if ((got = put_stat(&found, 0, out)) < 0)
		return got;
	memcpy(one.stat, out->bytes + end, sizeof one.stat);
	out->used = end + (-end & 7);
	memcpy(out->bytes + start, &one, sizeof one);
	return 0;
}

static s64 descriptors(s32 pid, struct output *out)
{
	char path[64];
	u64 start;
	s64 result = 0;

	out->used += -out->used & 7;
	start = out->used;
	snprintf(path, sizeof path, "/proc/%d/fdinfo", pid);
	int infos = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);

	if (infos < 0)
		return -errno;
	snprintf(path, sizeof path, "/proc/%d/fd", pid);
	DIR *links = opendir(path);

	if (!links) {
		result = -errno;
		close(infos);
		return result;
	}
	struct dirent *entry;

	while (!result && (entry = readdir(links)))
		if (entry->d_name[0] != '.')
			result = one_descriptor(dirfd(links), infos, entry->d_name, out);
	closedir(links);
	close(infos);
	return result < 0 ? result : (s64)(out->used - start);
}

/*
 * Our own mappings in a restored process: records.py has the same numbers.  One that is stopped has
 * not left the interpreter yet, and has the control memory as well.  Anything else in the range
 * that we need is refused by memory.py, which has to see it.
 */
#define CODE 0x420000000000UL
#define STACKS (CODE + 0x200000UL)
#define FRAMES (CODE + 0x40000000UL)
#define CONTROL_END (CODE + 0x80000000UL + 2048 * 0x2000000UL)
#define INJECTED 0x6000UL /* inject.py */

static int is_ours(u64 start, u64 end)
{
	return (start >= CODE && end <= STACKS) || (start >= FRAMES && end <= CONTROL_END);
}

/*
 * One header of smaps without what differs between two restores of the same process: the device of
 * a file in its root, and the padding.  `own` says that the mapping is one of ours.
 */
static char *put_header(char *to, const char *line, u64 length, u64 gap, int *own)
{
	const char *end = line + length, *field = line, *device = 0, *rest;
	char *dash;
	u64 start = strtoul(line, &dash, 16), stop = strtoul(dash + 1, 0, 16);

	*own = is_ours(start, stop) || (start >= gap && start < gap + INJECTED);
	for (int i = 0; i < 3 && field; i++)
		if ((field = memchr(field, ' ', end - field)))
			field++;
	device = field;
	rest = device ? memchr(device, ' ', end - device) : 0;
	const char *path = memchr(line, '/', length);

	if (!rest || !path || !strncmp(path, "/memfd:", 7) || !strncmp(path, "/dev/zero (", 11) ||
	    !strncmp(path, "/SYSV", 5)) {
		memmove(to, line, length);
		return to + length;
	}
	const char *inode = rest + 1, *after = memchr(inode, ' ', end - inode);

	if (!after)
		after = end;
	memmove(to, line, device - line);
	to += device - line;
	memmove(to, "0:0 ", 4); /* never longer than what was there */
	to += 4;
	memmove(to, inode, after - inode);
	to += after - inode;
	*to++ = ' ';
	memmove(to, path, end - path);
	return to + (end - path);
}

/* The flags without what we have set ourselves: soft-dirty, and `uw` where it is us who watch. */
static char *put_flags(char *to, const char *line, u64 length, int watched)
{
	const char *end = line + length;

	memmove(to, line, 8);
	to += 8;
	for (const char *at = line + 8; at < end && *at != '\n';) {
		const char *stop = at;

		while (stop < end && *stop != ' ' && *stop != '\n')
			stop++;
		if (stop - at == 2 && strncmp(at, "sd", 2) && !(watched && !strncmp(at, "uw", 2))) {
			*to++ = ' ';
			memmove(to, at, 2);
			to += 2;
		}
		at = stop < end && *stop == ' ' ? stop + 1 : stop;
	}
	*to++ = '\n';
	return to;
}

/*
 * Of /proc/PID/smaps the lines that do not change with every page: headers, keys and flags.  They
 * are the same for a process and for its restored copy.  What is injected at `gap` at the same time
 * is left out.  Written over the text itself.
 */
static s64 flags_of(const char *path, u64 gap, int watched, struct output *out)
{
	u64 start = out->used;
	s64 size = read_file(AT_FDCWD, path, out);

	if (size < 0)
		return size;
	char *from = out->bytes + start, *end = from + size, *to = from;
	int own = 0;

	while (from < end) {
		char *line = memchr(from, '\n', end - from);
		u64 length = (line ? line + 1 : end) - from;

		if (*from < 'A' || *from > 'Z') {
			char *begun = to;

			to = put_header(to, from, length, gap, &own);
			if (own)
				to = begun;
		} else if (!own && !strncmp(from, "VmFlags:", 8)) {
			to = put_flags(to, from, length, watched);
		} else if (!own && !strncmp(from, "Protec", 6)) {
			memmove(to, from, length);
			to += length;
		}
		from += length;
	}
	out->used = to - out->bytes;
	return out->used - start;
}

/*
 * The inode numbers of the namespaces of a process, in this order; 0 for one in which nobody has
 * been born yet.  The links tell them, and cost half of what following them does.
 */
static const char *const namespaces[] = { "mnt", "pid", "net", "ipc", "uts", "user", "cgroup",
					  "time", "pid_for_children", "time_for_children" };

static s64 namespaces_of(const char *path, struct output *out)
{
	u64 numbers[sizeof namespaces / sizeof *namespaces] = { 0 };
	int directory = open(path, O_PATH | O_DIRECTORY | O_CLOEXEC);

	if (directory < 0)
		return -errno;
	for (u64 i = 0; i < sizeof namespaces / sizeof *namespaces; i++) {
		char text[64];
		ssize_t got = readlinkat(directory, namespaces[i], text, sizeof text - 1);
		char *number = got > 0 ? memchr(text, '[', got) : 0;

		if (number) {
			text[got] = 0;
			numbers[i] = strtoul(number + 1, 0, 10);
		}
	}
	close(directory);
	return put(out, numbers, sizeof numbers);
}

static s64 registers(s32 tid, u64 kind, struct output *out)
{
	struct iovec vector = { out->bytes + out->used, out->room - out->used };

	if (ptrace(PTRACE_GETREGSET, tid, kind, &vector))
		return -errno;
	out->used += vector.iov_len;
	return vector.iov_len;
}

/* All queued siginfo_t of a thread, or of its process (PTRACE_PEEKSIGINFO). */
static s64 signals(s32 tid, u64 shared, struct output *out)
{
	u64 start = out->used;

	for (;;) {
		struct { u64 offset; u32 flags; s32 count; } ask = {
			(out->used - start) / 128, shared, 32 };

		if (out->room - out->used < 32 * 128)
			return -E2BIG;
		long got = ptrace(0x4209, tid, &ask, out->bytes + out->used);

		if (got < 0)
			return -errno;
		out->used += got * 128;
		if (got < ask.count)
			return out->used - start;
	}
}

static s64 by_call(const struct question *q, s32 who, struct output *out)
{
	u64 values[16] = { 0 };
	s64 size;

	switch (q->kind) {
	case SIGNAL_MASK:
		size = ptrace(0x420a, who, 8, values) ? -errno : 8;
		break;
	case RSEQ:
		size = ptrace(0x420f, who, 24, values) < 0 ? -errno : 24;
		break;
	case DISPATCH:
		size = ptrace(0x4211, who, 32, values) ? -errno : 8;
		break;
	case ROBUST_LIST:
		size = syscall(SYS_get_robust_list, who, values, values + 1) ? -errno : 16;
		break;
	case SCHEDULING:
		size = syscall(SYS_sched_getattr, who, values, 56, 0) ? -errno : 56;
		break;
	case AFFINITY:
		size = syscall(SYS_sched_getaffinity, who, sizeof values, values);
		size = size < 0 ? -errno : (s64)sizeof values;
		break;
	case IO_PRIORITY:
		size = syscall(SYS_ioprio_get, 1, who);
		values[0] = size;
		size = size < 0 ? -errno : 8;
		break;
	default:
		size = -ENOSYS;
	}
	return size < 0 ? size : put(out, values, size);
}

static s64 one_answer(const struct question *q, const s32 *ids, struct output *out)
{
	s32 who = ids[q->who];
	struct stat found;
	char path[128];

	switch (q->kind) {
	case READ:
	case LINK:
	case STAT:
	case FLAGS:
	case NAMESPACES:
		snprintf(path, sizeof path, q->path, ids[0], who);
		break;
	}
	switch (q->kind) {
	case READ:
		return read_file(AT_FDCWD, path, out);
	case LINK:
		return link_target(AT_FDCWD, path, out);
	case STAT:
		return stat(path, &found) ? -errno : put_stat(&found, 0, out);
	case IN_ROOT:
		return in_root(who, q->path, q->more, out);
	case DESCRIPTORS:
		return descriptors(who, out);
	case FLAGS:
		return flags_of(path, q->more & ~1UL, q->more & 1, out);
	case NAMESPACES:
		return namespaces_of(path, out);
	case REGISTERS:
		return registers(who, q->more, out);
	case SIGNALS:
		return signals(who, q->more, out);
	default:
		return by_call(q, who, out);
	}
}

/* Answer all of them; the bytes used, or -E2BIG when there was no room for everything. */
long bulk_ask(const struct question *questions, long count, const s32 *ids, char *bytes, u64 room,
	      struct answer *answers)
{
	struct output out = { bytes, room, 0 };

	for (long i = 0; i < count; i++) {
		out.used += -out.used & 7;
		u64 start = out.used;

		answers[i].result = one_answer(questions + i, ids, &out);
		answers[i].at = start;
		if (answers[i].result == -E2BIG)
			return -E2BIG;
		if (answers[i].result < 0)
			out.used = start;
	}
	return out.used;
}

/* -- the memory of several processes, looked at in one call --------------------------------------- */

struct area;
struct region;
struct cursor { u64 area, at; };

long bulk_present(int, struct cursor *, const struct area *, long, u64, struct region *, long);
long bulk_written(int, struct cursor *, const struct area *, long, struct region *, long);

/* What is wanted of a process; bulk.py has the same numbers and the same structure. */
enum { WATCHED = 1, MAP = 2, WRITES = 4 };

struct memory {
	s32 pid, root;
	u64 flags;                              /* the gap as FLAGS wants it, and what is wanted */
	const struct question *questions;       /* about names, in the root */
	u64 name_count;
	struct answer *answers;                 /* room for as many */
	const struct area *areas, *watched;     /* where to look for pages, and for writes */
	u64 area_count, watched_count, guard;
	/* answers: bytes from `at` on in the output */
	u64 text_at, names_at, present_at, written_at;
	s64 text, names, present, written;      /* sizes; regions for the last two; or -errno */
	struct cursor next;                     /* where `written` has to be gone on with */
};

/*
 * Look at all of them.  What is not wanted is -ENODATA.  Whatever has no room is -E2BIG and asked again by the caller; `written`
 * gives what there was room for, because asking forgets it.
 */
void bulk_memories(struct memory *memories, long count, char *bytes, u64 room)
{
	struct output out = { bytes, room, 0 };

	for (long i = 0; i < count; i++) {
		struct memory *m = memories + i;
		struct cursor begin = { 0, 0 };
		char path[64];

		m->text_at = out.used;
		m->text = m->names = m->present = m->written = -ENODATA;
		if (m->flags & MAP) {
			snprintf(path, sizeof path, "/proc/%d/smaps", m->pid);
			m->text = flags_of(path, m->flags & ~4095UL, m->flags & WATCHED, &out);
			out.used = m->text_at + (m->text < 0 ? 0 : m->text);
			out.used += -out.used & 7;
		}
		m->names_at = out.used;
		if (m->flags & WRITES) {
			m->names = bulk_ask(m->questions, m->name_count, &m->root,
					    out.bytes + out.used, out.room - out.used, m->answers);
			out.used += m->names < 0 ? 0 : m->names;
			out.used += -out.used & 7;
		}
		snprintf(path, sizeof path, "/proc/%d/pagemap", m->pid);
		int fd = open(path, O_RDONLY | O_CLOEXEC);

		m->present_at = m->written_at = out.used;
		if (fd < 0) {
			m->present = m->written = -errno;
			continue;
		}
		if (m->flags & MAP) {
			m->present = bulk_present(fd, &begin, m->areas, m->area_count, m->guard,
						  (struct region *)(out.bytes + out.used),
						  (out.room - out.used) / 24);
			if (m->present >= 0 && begin.area < m->area_count)
				m->present = -E2BIG;
			out.used += m->present < 0 ? 0 : m->present * 24;
		}
		m->written_at = out.used;
		m->next = (struct cursor){ 0, 0 };
		if (m->flags & WRITES) {
			m->written = bulk_written(fd, &m->next, m->watched, m->watched_count,
						  (struct region *)(out.bytes + out.used),
						  (out.room - out.used) / 24);
			out.used += m->written < 0 ? 0 : m->written * 24;
		}
		close(fd);
	}
}
