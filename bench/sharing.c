/* How a copy of shared memory can be had: what was compared before one way was chosen.
 *
 *   sharing MEGABYTES PERCENT ROUNDS DIRECTORY
 *
 * One object of so many megabytes is to be had a second time, and so many percent of the second
 * one's pages, evenly spread, are written afterwards.  Prints for each way its name, and medians of
 * milliseconds: until it can be used, the writes, and until all of it is there.
 *
 *   clone    a file of DIRECTORY, which is on btrfs, by FICLONE; its pages are read when touched
 *   fault    a memfd that userfaultfd(2) fills when touched, and that is filled meanwhile
 *   lazy     the same, and nothing is filled but what is touched
 *   copy     a memfd, written from another process's private memory (a template) by two threads
 *   write    a memfd, written by pwrite(2) from memory of our own
 *   again    an object that was the second one before, of which so many percent differ: compared
 *   known    the same, when it is known what differs
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <linux/userfaultfd.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define PAGE 4096UL
#define PIECE (256UL << 10)

static size_t size, step;
static int rounds;
static char *origin;	/* the object, mapped */
static pid_t holder;	/* another process, with the same bytes in private memory at `held` */
static char *held;

static void check(int good, const char *what)
{
	if (!good) {
		fprintf(stderr, "sharing: %s: %s\n", what, strerror(errno));
		exit(1);
	}
}

static double now(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1e3 + t.tv_nsec / 1e6;
}

static int compare(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;
	return (x > y) - (x < y);
}

struct times { double ready, touched, whole; };

static void report(const char *name, struct times *all)
{
	double found[3][64];

	for (int i = 0; i < rounds; i++) {
		found[0][i] = all[i].ready;
		found[1][i] = all[i].touched;
		found[2][i] = all[i].whole;
	}
	printf("%s", name);
	for (int k = 0; k < 3; k++) {
		qsort(found[k], rounds, sizeof(double), compare);
		printf(" %.3f", found[k][rounds / 2]);
	}
	printf("\n");
	fflush(stdout);
}

static int object(void)
{
	int fd = memfd_create("object", 0);

	check(fd >= 0 && !ftruncate(fd, size), "memfd_create");
	return fd;
}

static char *map(int fd)
{
	char *at = mmap(0, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);

	check(at != MAP_FAILED, "mmap");
	return at;
}

static double touch(char *at)
{
	double began = now();

	for (size_t i = 0; i < size; i += step)
		at[i + 8]++;
	return now() - began;
}

static void done(char *at, int fd)
{
	munmap(at, size);
	close(fd);
}

/* -- a file on btrfs --------------------------------------------------------------------------- */

static struct times by_clone(const char *directory)
{
	static int source = -1;
	char path[4096];
	struct times t = { 0 };

	if (source < 0) {
		snprintf(path, sizeof path, "%s/original", directory);
		source = open(path, O_RDWR | O_CREAT | O_TRUNC, 0600);
		for (size_t i = 0; i < size; i += PIECE)
			check(write(source, origin + i, PIECE) == (ssize_t)PIECE, "write");
		check(!fsync(source), "fsync");
	}
	snprintf(path, sizeof path, "%s/clone", directory);
	unlink(path);
	double began = now();
	int fd = open(path, O_RDWR | O_CREAT | O_TRUNC, 0600);

	check(fd >= 0 && !ioctl(fd, FICLONE, source), "FICLONE");
	char *at = map(fd);

	t.ready = now() - began;
	t.touched = touch(at);
	done(at, fd);
	return t;
}

/* -- userfaultfd ------------------------------------------------------------------------------- */

static int faults;
static char *target;
static volatile int over;

static void *serve(void *unused)
{
	(void)unused;
	while (!over) {
		struct pollfd ready = { faults, POLLIN, 0 };
		struct uffd_msg m;

		if (poll(&ready, 1, 5) < 1 || read(faults, &m, sizeof m) != sizeof m)
			continue;
		size_t at = (m.arg.pagefault.address - (size_t)target) & -PAGE;
		struct uffdio_copy c = { (size_t)target + at, (size_t)origin + at, PAGE, 0, 0 };
		struct uffdio_range woken = { (size_t)target + at, PAGE };

		if (ioctl(faults, UFFDIO_COPY, &c))
			ioctl(faults, UFFDIO_WAKE, &woken);
	}
	return 0;
}

static void *fill(void *unused)
{
	for (size_t at = 0; at < size;) {
		size_t some = size - at < PIECE ? size - at : PIECE;
		struct uffdio_copy c = { (size_t)target + at, (size_t)origin + at, some, 0, 0 };

		if (!ioctl(faults, UFFDIO_COPY, &c))
			at += some;
		else if (c.copy > 0)
			at += c.copy;
		else if (errno == EEXIST)
			at += PAGE;
		else
			check(errno == EAGAIN, "UFFDIO_COPY");
	}
	return unused;
}

static struct times by_fault(int fills)
{
	struct times t = { 0 };
	struct uffdio_api api = { UFFD_API, UFFD_FEATURE_MISSING_SHMEM, 0 };
	pthread_t server, filler;
	double began = now();
	int fd = object();

	target = map(fd);
	faults = syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK);
	check(faults >= 0 && !ioctl(faults, UFFDIO_API, &api), "userfaultfd");
	struct uffdio_register r = { { (size_t)target, size }, UFFDIO_REGISTER_MODE_MISSING, 0 };

	check(!ioctl(faults, UFFDIO_REGISTER, &r), "UFFDIO_REGISTER");
	over = 0;
	pthread_create(&server, 0, serve, 0);
	t.ready = now() - began;
	began = now();
	if (fills)
		pthread_create(&filler, 0, fill, 0);
	t.touched = touch(target);
	if (fills) {
		pthread_join(filler, 0);
		t.whole = now() - began;
	}
	over = 1;
	pthread_join(server, 0);
	close(faults);
	done(target, fd);
	return t;
}

/* -- copies ------------------------------------------------------------------------------------ */

struct part { char *to; size_t from, size; };

static void *pull(void *argument)
{
	struct part *part = argument;

	for (size_t i = 0; i < part->size;) {
		size_t some = part->size - i < (64UL << 20) ? part->size - i : 64UL << 20;
		struct iovec here = { part->to + part->from + i, some };
		struct iovec there = { held + part->from + i, some };
		ssize_t got = process_vm_readv(holder, &here, 1, &there, 1, 0);

		check(got > 0, "process_vm_readv");
		i += got;
	}
	return 0;
}

static void *match(void *argument)
{
	struct part *part = argument;

	for (size_t i = part->from; i < part->from + part->size; i += PAGE)
		if (memcmp(part->to + i, origin + i, PAGE))
			memcpy(part->to + i, origin + i, PAGE);
	return 0;
}

static void by_two(void *(*work)(void *), char *to)
{
	struct part parts[2] = { { to, 0, size / 2 }, { to, size / 2, size / 2 } };
	pthread_t threads[2];

	for (int i = 0; i < 2; i++)
		pthread_create(threads + i, 0, work, parts + i);
	for (int i = 0; i < 2; i++)
		pthread_join(threads[i], 0);
}

static struct times by_copy(void)
{
	double began = now();
	int fd = object();
	char *at = map(fd);

	by_two(pull, at);
	struct times t = { now() - began, touch(at), 0 };

	done(at, fd);
	return t;
}

static struct times by_write(void)
{
	double began = now();
	int fd = object();

	for (size_t i = 0; i < size; i += PIECE)
		check(pwrite(fd, origin + i, PIECE, i) == (ssize_t)PIECE, "pwrite");
	struct times t = { now() - began, 0, 0 };
	char *at = map(fd);

	t.touched = touch(at);
	done(at, fd);
	return t;
}

static struct times again(int known)
{
	static char *at;
	struct times t = { 0 };

	if (!at) {
		at = map(object());
		memcpy(at, origin, size);
	}
	touch(at);
	double began = now();

	if (known)
		for (size_t i = 0; i < size; i += step)
			memcpy(at + i, origin + i, PAGE);
	else
		by_two(match, at);
	t.ready = now() - began;
	t.touched = touch(at);
	return t;
}

int main(int count, char **argument)
{
	struct times all[64];

	if (count != 5)
		return 2;
	size = strtoul(argument[1], 0, 10) << 20;
	step = 100 / atoi(argument[2]) * PAGE;
	rounds = atoi(argument[3]);
	check(rounds > 0 && rounds <= 64, "rounds");
	origin = map(object());
	for (size_t i = 0; i < size; i += 8)
		*(size_t *)(origin + i) = i * 2654435761u;
	held = mmap(0, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	check(held != MAP_FAILED, "mmap");
	memcpy(held, origin, size);
	holder = fork();
	if (!holder) {
		pause();
		_exit(0);
	}
#define WAY(name, call)                         \
	for (int i = 0; i < rounds; i++)        \
		all[i] = call;                  \
	report(name, all)
	WAY("clone", by_clone(argument[4]));
	WAY("fault", by_fault(1));
	WAY("lazy", by_fault(0));
	WAY("copy", by_copy());
	WAY("write", by_write());
	WAY("again", again(0));
	WAY("known", again(1));
	kill(holder, SIGKILL);
	waitpid(holder, 0, 0);
	return 0;
}
