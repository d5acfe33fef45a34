/*
 * Stopping threads, letting them go, and having a stopped one make system calls: ptrace(2) without
 * Python between one step and the next.  See bulk.c for why, freeze.py and inject.py for the rules.
 */

#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

typedef uint64_t u64;
typedef int64_t s64;
typedef int32_t s32;

#define GETSIGMASK 0x420a
#define SETSIGMASK 0x420b
#define PRSTATUS ((void *)1)

/* struct user_regs_struct, as numbers */
enum { R10 = 7, R9, R8, RAX, RDX = 12, RSI, RDI, ORIG_RAX, RIP, RBX = 5, REGISTERS = 27 };

struct saved { u64 registers[REGISTERS]; u64 mask; };

/*
 * All threads of the processes in a control group, as pairs of pid and tid, main threads first; how
 * many, or -errno.  Who ends meanwhile is left out.
 */
long bulk_tasks(const char *procs, s32 *pairs, long room)
{
	char text[65536], path[64];
	long found = 0;
	FILE *file = fopen(procs, "re");

	if (!file)
		return -errno;
	while (fgets(text, sizeof text, file)) {
		s32 pid = atoi(text);

		snprintf(path, sizeof path, "/proc/%d/task", pid);
		DIR *tasks = opendir(path);
		struct dirent *entry;

		while (tasks && (entry = readdir(tasks))) {
			if (entry->d_name[0] == '.')
				continue;
			if (found == room) {
				closedir(tasks);
				fclose(file);
				return -E2BIG;
			}
			pairs[2 * found] = pid;
			pairs[2 * found++ + 1] = atoi(entry->d_name);
		}
		if (tasks)
			closedir(tasks);
	}
	fclose(file);
	return found;
}

/*
 * Seize all, and only then interrupt them: a thread that was interrupted takes no more signals, so
 * the next one, not ours yet, would be woken for them, and its call would end with EINTR.  Results
 * are 0 or -errno of a seize that failed (the thread is not ours).
 */
void bulk_seize(const s32 *tids, long count, u64 options, s32 *results)
{
	for (long i = 0; i < count; i++)
		results[i] = ptrace(PTRACE_SEIZE, tids[i], 0, options) ? -errno : 0;
	for (long i = 0; i < count; i++)
		if (!results[i])
			ptrace(PTRACE_INTERRUPT, tids[i], 0, 0);
}

/*
 * Wait for all of them at most `patience` ns; statuses are those of wait(2), -1 for who has not
 * stopped yet, -ECHILD - 1 for who is gone.  How many are still missing.
 */
long bulk_await(const s32 *tids, long count, s32 *statuses, u64 patience)
{
	struct timespec began, now, moment = { 0, 20000 };
	long missing, rounds = 0;

	clock_gettime(CLOCK_MONOTONIC, &began);
	for (;;) {
		missing = 0;
		for (long i = 0; i < count; i++) {
			int status;

			if (statuses[i] != -1)
				continue;
			pid_t got = waitpid(tids[i], &status, __WALL | WNOHANG);

			if (got == tids[i])
				statuses[i] = status;
			else if (got < 0)
				statuses[i] = -ECHILD - 1;
			else
				missing++;
		}
		clock_gettime(CLOCK_MONOTONIC, &now);
		if (!missing || (now.tv_sec - began.tv_sec) * 1000000000UL + now.tv_nsec -
					began.tv_nsec > patience)
			return missing;
		/* most stop at once; what sleeps has to be woken on another processor first */
		if (rounds++ < 200)
			sched_yield();
		else
			nanosleep(&moment, 0);
	}
}

/* Whether each of them is stopped for us: 1 or 0. */
void bulk_stopped(const s32 *tids, long count, s32 *results)
{
	u64 mask;

	for (long i = 0; i < count; i++)
		results[i] = !ptrace(GETSIGMASK, tids[i], 8, &mask);
}

/* Detach; results are 0 or -errno. */
void bulk_detach(const s32 *tids, long count, s32 *results)
{
	for (long i = 0; i < count; i++)
		results[i] = ptrace(PTRACE_DETACH, tids[i], 0, 0) ? -errno : 0;
}

static int get_registers(s32 tid, u64 *registers)
{
	struct iovec vector = { registers, REGISTERS * 8 };

	return ptrace(PTRACE_GETREGSET, tid, PRSTATUS, &vector) ? -errno : 0;
}

static int set_registers(s32 tid, const u64 *registers)
{
	struct iovec vector = { (void *)registers, REGISTERS * 8 };

	/* a second try: half-way through a call there is no other way out */
	return ptrace(PTRACE_SETREGSET, tid, PRSTATUS, &vector) &&
	       ptrace(PTRACE_SETREGSET, tid, PRSTATUS, &vector) ? -errno : 0;
}

static int set_mask(s32 tid, u64 mask)
{
	return ptrace(SETSIGMASK, tid, 8, &mask) && ptrace(SETSIGMASK, tid, 8, &mask) ? -errno : 0;
}

/* What an injection changes of a thread. */
long bulk_save(s32 tid, struct saved *saved)
{
	int bad = get_registers(tid, saved->registers);

	if (!bad && ptrace(GETSIGMASK, tid, 8, &saved->mask))
		bad = -errno;
	return bad;
}

long bulk_put_back(s32 tid, const struct saved *saved)
{
	int bad = set_registers(tid, saved->registers), worse = set_mask(tid, saved->mask);

	return bad ? bad : worse;
}

/*
 * waitpid(2) for one that will stop at once.  Sleeping and being woken costs more than the whole
 * step where processors are virtual, so it is looked at for a while first.
 */
static pid_t wait_for(s32 tid, int *status)
{
	for (int rounds = 0; rounds < 400; rounds++) {
		pid_t got = waitpid(tid, status, __WALL | WNOHANG);

		if (got)
			return got;
		if (rounds % 8 == 7)
			sched_yield();
	}
	return waitpid(tid, status, __WALL);
}

/*
 * Let the thread run to its next stop; group stops of a stopped job are passed. -ESRCH: killed.
 *
 * SIGSTOP is the one signal that cannot be blocked meanwhile.  One that comes is `taken` from it, to
 * be sent again; who sent it cannot be told by anybody.
 */
static int go(s32 tid, long request, int *status, int *taken)
{
	do {
		if (*status == (SIGSTOP << 8 | 0x7f))
			*taken = 1;
		if (ptrace(request, tid, 0, 0) && ptrace(request, tid, 0, 0))
			return -errno;
		if (wait_for(tid, status) != tid)
			return -errno;
		if (!WIFSTOPPED(*status))
			return -ESRCH;
	} while (*status >> 16 == 128 /* PTRACE_EVENT_STOP */ || *status == (SIGSTOP << 8 | 0x7f));
	return 0;
}

/*
 * One call through a `syscall` instruction.  With `stepped` by one step over it, which ends in a
 * SIGTRAP; else stopped at its entry and exit, so that no signal is involved.  The kernel's result
 * goes to `result`; -EPROTO and `*status` when it stopped elsewhere.
 */
static long make_call(s32 tid, const struct saved *saved, u64 instruction, const s64 *call,
		      int stepped, s64 *result, int *status, int *taken)
{
	u64 registers[REGISTERS];
	int bad;

	memcpy(registers, saved->registers, sizeof registers);
	registers[RAX] = call[0];
	registers[RDI] = call[1];
	registers[RSI] = call[2];
	registers[RDX] = call[3];
	registers[R10] = call[4];
	registers[R8] = call[5];
	registers[R9] = call[6];
	registers[ORIG_RAX] = -1;
	registers[RIP] = instruction;
	if ((bad = set_mask(tid, stepped ? ~(1UL << (SIGTRAP - 1)) : ~0UL)) ||
	    (bad = set_registers(tid, registers)))
		return bad;
	for (int i = stepped ? 1 : 0; i < 2; i++) {
		if ((bad = go(tid, stepped ? PTRACE_SINGLESTEP : PTRACE_SYSCALL, status, taken)))
			return bad;
		if (WSTOPSIG(*status) != (stepped ? SIGTRAP : SIGTRAP | 0x80))
			return -EPROTO;
	}
	if ((bad = get_registers(tid, registers)) && (bad = get_registers(tid, registers)))
		return bad;
	if (stepped && registers[RIP] != instruction + 2)
		return -EPROTO;
	*result = registers[RAX];
	return 0;
}

long bulk_call(s32 tid, const struct saved *saved, u64 instruction, const s64 *call, int stepped,
	       s64 *result, int *status)
{
	int taken = 0;
	long bad = make_call(tid, saved, instruction, call, stepped, result, status, &taken);

	if (taken)
		kill(tid, SIGSTOP);
	return bad;
}

/*
 * Run the code at `code`, which works through the calls at `records` and ends at a breakpoint.
 * `calls` are {number, six arguments, bits}: bit i says that argument i is an offset from `data`.
 */
static long make_calls(s32 tid, const struct saved *saved, int memory, u64 code, u64 records,
		       u64 data, const s64 *calls, long count, s64 *results, int *status, int *taken)
{
	s64 prepared[256 * 8 + 1];
	u64 registers[REGISTERS];
	int bad;

	if (count > 256)
		return -E2BIG;
	memcpy(prepared, calls, count * 64);
	for (long i = 0; i < count; i++) {
		for (int k = 0; k < 6; k++)
			if (prepared[8 * i + 7] >> k & 1)
				prepared[8 * i + 1 + k] += data;
		prepared[8 * i + 7] = 0;
	}
	prepared[8 * count] = -1;
	if (pwrite(memory, prepared, count * 64 + 8, records) != count * 64 + 8)
		return -EIO;
	memcpy(registers, saved->registers, sizeof registers);
	registers[RIP] = code;
	registers[RBX] = records;
	registers[ORIG_RAX] = -1;
	registers[RAX] = 0;
	if ((bad = set_mask(tid, ~(1UL << (SIGTRAP - 1)))) || (bad = set_registers(tid, registers)) ||
	    (bad = go(tid, PTRACE_CONT, status, taken)))
		return bad;
	if (WSTOPSIG(*status) != SIGTRAP)
		return -EPROTO;
	if (pread(memory, prepared, count * 64, records) != count * 64)
		return -EIO;
	for (long i = 0; i < count; i++)
		results[i] = prepared[8 * i + 7];
	return 0;
}

long bulk_batch(s32 tid, const struct saved *saved, int memory, u64 code, u64 records, u64 data,
		const s64 *calls, long count, s64 *results, int *status)
{
	int taken = 0;
	long bad = make_calls(tid, saved, memory, code, records, data, calls, count, results, status,
			      &taken);

	if (taken)
		kill(tid, SIGSTOP);
	return bad;
}
