/* The floors: what the kernel alone needs for the least that a checkpoint or a copy must do.
 *
 * No checkpoint system on this kernel that copies processes by fork, pages by reading them and files
 * by btrfs snapshots can be faster. Prints microseconds, one number a round.
 *
 *   floor fork ROUNDS MEGABYTES HUGE        a fork of this size, until a byte of it has arrived;
 *                                           HUGE: with huge pages
 *   floor namespaces ROUNDS MEGABYTES       the same into five new namespaces
 *   floor overlay ROUNDS MEGABYTES LOWER UPPER WORK MERGED    and an overlay mount
 *   floor pages ROUNDS COUNT                read so many scattered pages of another process
 *   floor tree ROUNDS COUNT                 so many processes into new namespaces
 *   floor descriptors ROUNDS COUNT          a fork that opens so many files
 *   floor snapshot ROUNDS COUNT SYNC KEEP SUBVOLUME DIRECTORY    snapshot it after so many files of
 *                                           it have changed; SYNC: written back before, unmeasured;
 *                                           KEEP: and never delete one
 *   floor star ROUNDS COUNT MEGABYTES WORKERS LOWER IMAGE     so many copies at once: a writable
 *                                           snapshot of IMAGE/source, namespaces, an overlay mount on
 *                                           it, three processes, a byte from each of them. Prints
 *                                           microseconds and KiB of memory for a copy, in turns
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/btrfs.h>
#include <linux/sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define FIVE (CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS)
#define PAGE 4096

static void check(int good, const char *what)
{
	if (!good) {
		fprintf(stderr, "floor: %s: %s\n", what, strerror(errno));
		exit(1);
	}
}

static double now(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1e6 + t.tv_nsec / 1e3;
}

static char *held; /* of a copy's first process; its others are small */
static size_t held_size;

static char *memory_of(size_t size, int huge)
{
	if (size == 0)
		return NULL;
	char *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	check(memory != MAP_FAILED, "mmap");
	madvise(memory, size, huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
	memset(memory, 1, size);
	return memory;
}

static pid_t clone_with(uint64_t flags)
{
	struct clone_args args = { .flags = flags, .exit_signal = SIGCHLD };
	return syscall(SYS_clone3, &args, sizeof args);
}

/* -- one copy -------------------------------------------------------------------------------- */

struct copy {
	uint64_t flags;
	const char *lower, *upper, *work, *merged; /* an overlay, if merged */
	const char *options; /* of the overlay; "volatile" can be mounted once only */
	int processes;
	int descriptors;
};

static void mount_overlay(const struct copy *copy)
{
	char options[4096];
	if (mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL))
		_exit(4);
	snprintf(options, sizeof options, "lowerdir=%s,upperdir=%s,workdir=%s%s", copy->lower,
		 copy->upper, copy->work, copy->options);
	if (mount("overlay", copy->merged, "overlay", 0, options))
		_exit(5);
}

/* What a copy does: become what it is to be, and answer; its children answer too. */
static void live(const struct copy *copy, int answers)
{
	if (copy->merged)
		mount_overlay(copy);
	for (int i = 0; i < copy->descriptors; i++)
		if (open("/proc/self/exe", O_RDONLY) < 0)
			_exit(6);
	if (copy->processes > 1 && held)
		madvise(held, held_size, MADV_DONTFORK);
	for (int i = 1; i < copy->processes; i++)
		if (fork() == 0)
			break;
	if (write(answers, "x", 1) != 1)
		_exit(7);
}

static double once(const struct copy *copy)
{
	int fds[2];
	check(pipe(fds) == 0, "pipe");
	double began = now();
	pid_t child = clone_with(copy->flags);
	check(child >= 0, "clone3");
	if (child == 0) {
		pid_t self = getpid();
		live(copy, fds[1]);
		if (copy->processes > 1)
			pause(); /* as PID 1 it takes the others with it */
		_exit(self != getpid());
	}
	close(fds[1]);
	char byte;
	for (int i = 0; i < copy->processes; i++)
		if (read(fds[0], &byte, 1) != 1) {
			fprintf(stderr, "floor: the child did not answer\n");
			exit(1);
		}
	double took = now() - began;
	if (copy->processes > 1)
		kill(child, SIGKILL);
	waitpid(child, NULL, 0);
	close(fds[0]);
	return took;
}

static void copies(int rounds, struct copy copy)
{
	for (int i = 0; i < rounds; i++) {
		printf("%.1f\n", once(&copy));
		usleep(5000);
	}
}

/* -- pages of another process ---------------------------------------------------------------- */

static void pages(int rounds, size_t count)
{
	enum { VECTOR = 512 };
	char *theirs = memory_of(count * 2 * PAGE, 0), *ours = memory_of(count * PAGE, 0);
	pid_t child = fork();
	check(child >= 0, "fork");
	if (child == 0) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		memset(theirs, 2, count * 2 * PAGE);
		raise(SIGSTOP);
		_exit(0);
	}
	waitpid(child, NULL, WUNTRACED);
	for (int i = 0; i < rounds; i++) {
		double began = now();
		for (size_t done = 0; done < count; done += VECTOR) {
			struct iovec from[VECTOR], to = { ours + done * PAGE, 0 };
			size_t here = count - done < VECTOR ? count - done : VECTOR;
			for (size_t j = 0; j < here; j++)
				from[j] = (struct iovec){ theirs + (done + j) * 2 * PAGE, PAGE };
			to.iov_len = here * PAGE;
			check(process_vm_readv(child, &to, 1, from, here, 0) == (ssize_t)to.iov_len,
			      "process_vm_readv");
		}
		printf("%.1f\n", now() - began);
	}
	kill(child, SIGKILL);
	waitpid(child, NULL, 0);
}

/* -- files ----------------------------------------------------------------------------------- */

static void snapshot(int source, int directory, const char *name, uint64_t flags)
{
	struct btrfs_ioctl_vol_args_v2 args = { .fd = source, .flags = flags };
	strncpy(args.name, name, sizeof args.name - 1);
	check(ioctl(directory, BTRFS_IOC_SNAP_CREATE_V2, &args) == 0, "BTRFS_IOC_SNAP_CREATE_V2");
}

static void destroy(int directory, const char *name)
{
	struct btrfs_ioctl_vol_args args = { 0 };
	strncpy(args.name, name, sizeof args.name - 1);
	check(ioctl(directory, BTRFS_IOC_SNAP_DESTROY, &args) == 0, "BTRFS_IOC_SNAP_DESTROY");
}

static int opened(const char *path)
{
	int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	check(fd >= 0, path);
	return fd;
}

static void snapshots(int rounds, int count, int sync, int keep, const char *subvolume,
		      const char *where)
{
	int source = opened(subvolume), directory = opened(where);
	char name[64], block[PAGE];
	for (int i = 0; i < rounds; i++) {
		memset(block, i + 1, sizeof block);
		for (int j = 0; j < count; j++) {
			snprintf(name, sizeof name, "%d", j);
			int fd = openat(source, name, O_WRONLY | O_CREAT | O_TRUNC, 0600);
			check(fd >= 0 && write(fd, block, sizeof block) == sizeof block, name);
			close(fd);
		}
		if (sync)
			check(syncfs(source) == 0, "syncfs");
		snprintf(name, sizeof name, "floor-%d", i);
		double began = now();
		snapshot(source, directory, name, BTRFS_SUBVOL_RDONLY);
		printf("%.1f\n", now() - began);
		if (!keep)
			destroy(directory, name);
	}
}

/* -- many copies at once --------------------------------------------------------------------- */

static long available(void)
{
	char text[4096];
	int fd = open("/proc/meminfo", O_RDONLY);
	ssize_t length = read(fd, text, sizeof text - 1);
	check(length > 0, "/proc/meminfo");
	close(fd);
	text[length] = 0;
	char *line = strstr(text, "MemAvailable:");
	return line ? atol(line + strlen("MemAvailable:")) : 0;
}

static void work(int first, int last, int go, int done, int answers, char **argv)
{
	const char *image = argv[7];
	char name[64], upper[2048], inner[2048], merged[2048], byte;
	int directory = opened(image);
	pid_t *made = calloc(last - first + 1, sizeof *made);
	snprintf(upper, sizeof upper, "%s/source", image);
	int source = opened(upper);
	snprintf(merged, sizeof merged, "%s/merged", image);
	while (read(go, &byte, 1) == 1) {
		for (int i = first; i < last; i++) {
			snprintf(name, sizeof name, "copy-%d", i);
			snapshot(source, directory, name, 0);
			snprintf(upper, sizeof upper, "%s/%s/upper", image, name);
			snprintf(inner, sizeof inner, "%s/%s/work", image, name);
			struct copy copy = { FIVE, argv[6], upper, inner, merged, ",volatile", 3, 0 };
			made[i - first] = clone_with(FIVE);
			check(made[i - first] >= 0, "clone3");
			if (made[i - first] == 0) {
				prctl(PR_SET_PDEATHSIG, SIGKILL);
				live(&copy, answers);
				pause();
			}
		}
		check(read(go, &byte, 1) == 1, "the word to end them");
		for (int i = first; i < last; i++) {
			kill(made[i - first], SIGKILL);
			waitpid(made[i - first], NULL, 0);
			snprintf(name, sizeof name, "copy-%d", i);
			destroy(directory, name);
		}
		check(write(done, "x", 1) == 1, "done");
	}
	_exit(0);
}

static void star(char **argv)
{
	int rounds = atoi(argv[2]), count = atoi(argv[3]), workers = atoi(argv[5]);
	held_size = (size_t)atoi(argv[4]) << 20;
	held = memory_of(held_size, 0);
	int go[64][2], done[2], answers[2];
	char byte;
	check(workers > 0 && workers <= 64 && !pipe(done) && !pipe(answers), "pipe");
	for (int w = 0; w < workers; w++) {
		check(pipe(go[w]) == 0, "pipe");
		pid_t worker = fork();
		check(worker >= 0, "fork");
		if (worker == 0) {
			prctl(PR_SET_PDEATHSIG, SIGKILL);
			for (int i = 0; i <= w; i++)
				close(go[i][1]); /* or it would never see the end */
			work(count * w / workers, count * (w + 1) / workers, go[w][0], done[1], answers[1],
			     argv);
		}
	}
	for (int i = 0; i < rounds; i++) {
		long before = available();
		double began = now();
		for (int w = 0; w < workers; w++)
			check(write(go[w][1], "x", 1) == 1, "go");
		for (int j = 0; j < count * 3; j++)
			check(read(answers[0], &byte, 1) == 1, "an answer");
		double took = now() - began;
		printf("%.1f\n%.1f\n", took, (double)(before - available()) / count);
		for (int w = 0; w < workers; w++)
			check(write(go[w][1], "x", 1) == 1, "end");
		for (int w = 0; w < workers; w++)
			check(read(done[0], &byte, 1) == 1, "done");
		usleep(500000); /* what they leave is freed late */
	}
	for (int w = 0; w < workers; w++)
		close(go[w][1]);
	while (wait(NULL) > 0)
		;
}

int main(int argc, char **argv)
{
	const char *what = argc > 3 ? argv[1] : "";
	int rounds = argc > 3 ? atoi(argv[2]) : 0, size = argc > 3 ? atoi(argv[3]) : 0;
	struct copy copy = { .processes = 1 };

	prctl(PR_SET_PDEATHSIG, SIGKILL);
	setlinebuf(stdout); /* or a child that fails would print it all again */
	if (!strcmp(what, "fork") && argc == 5) {
		memory_of((size_t)size << 20, atoi(argv[4]));
	} else if (!strcmp(what, "namespaces") && argc == 4) {
		memory_of((size_t)size << 20, 0);
		copy.flags = FIVE;
	} else if (!strcmp(what, "overlay") && argc == 8) {
		memory_of((size_t)size << 20, 0);
		copy = (struct copy){ FIVE, argv[4], argv[5], argv[6], argv[7], "", 1, 0 };
	} else if (!strcmp(what, "tree") && argc == 4) {
		copy.flags = FIVE;
		copy.processes = size;
	} else if (!strcmp(what, "descriptors") && argc == 4) {
		copy.descriptors = size;
	} else if (!strcmp(what, "pages") && argc == 4) {
		pages(rounds, size);
		return 0;
	} else if (!strcmp(what, "snapshot") && argc == 8) {
		snapshots(rounds, size, atoi(argv[4]), atoi(argv[5]), argv[6], argv[7]);
		return 0;
	} else if (!strcmp(what, "star") && argc == 8) {
		star(argv);
		return 0;
	} else {
		fprintf(stderr, "floor: see the head of floor.c for the arguments\n");
		return 2;
	}
	copies(rounds, copy);
	return 0;
}
