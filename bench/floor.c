/* The floor: what the kernel alone needs for a fresh copy of a process in namespaces of its own.
 *
 * Prints three medians and 99th percentiles in microseconds, from the call until a byte of the
 * child has arrived: a bare fork; a fork into five new namespaces; that and an overlay mount.
 * No checkpoint system on this kernel that copies a process by fork can be faster.
 *
 * usage: floor MEGABYTES ROUNDS LOWER UPPER WORK MERGED
 */
#define _GNU_SOURCE
#include <linux/sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define FIVE (CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS)

static double now(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1e6 + t.tv_nsec / 1e3;
}

static int ascending(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;
	return (x > y) - (x < y);
}

static double once(uint64_t flags, const char *options, const char *merged)
{
	struct clone_args args = { .flags = flags, .exit_signal = SIGCHLD };
	int fds[2];
	char byte = 0;

	if (pipe(fds))
		exit(2);
	double began = now();
	long child = syscall(SYS_clone3, &args, sizeof args);
	if (child < 0)
		exit(3);
	if (child == 0) {
		if (options) {
			if (mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL))
				_exit(4);
			if (mount("overlay", merged, "overlay", 0, options))
				_exit(5);
		}
		if (write(fds[1], "x", 1) != 1)
			_exit(6);
		_exit(0);
	}
	close(fds[1]);
	if (read(fds[0], &byte, 1) != 1)
		byte = 0;
	double took = now() - began;
	int status;
	waitpid(child, &status, 0);
	close(fds[0]);
	if (byte != 'x' || status) {
		fprintf(stderr, "floor: the child failed with status %d\n", status);
		exit(7);
	}
	return took;
}

static void series(const char *name, int rounds, uint64_t flags, const char *options, const char *merged)
{
	double *took = malloc(rounds * sizeof *took);
	for (int i = 0; i < rounds; i++) {
		took[i] = once(flags, options, merged);
		usleep(5000);
	}
	qsort(took, rounds, sizeof *took, ascending);
	printf("%s %.1f %.1f\n", name, took[rounds / 2], took[(rounds * 99) / 100 < rounds ? (rounds * 99) / 100 : rounds - 1]);
	free(took);
}

int main(int argc, char **argv)
{
	if (argc != 7)
		return 1;
	size_t size = (size_t)atoi(argv[1]) << 20;
	int rounds = atoi(argv[2]);
	char options[4096];
	char *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (memory == MAP_FAILED)
		return 1;
	madvise(memory, size, MADV_NOHUGEPAGE);
	memset(memory, 1, size);
	snprintf(options, sizeof options, "lowerdir=%s,upperdir=%s,workdir=%s", argv[3], argv[4], argv[5]);
	series("fork", rounds, 0, NULL, NULL);
	series("fork_namespaces", rounds, FIVE, NULL, NULL);
	series("fork_namespaces_overlay", rounds, FIVE, options, argv[6]);
	return 0;
}
