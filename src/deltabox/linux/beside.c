/*
 * A few threads that do long calls beside the thread that asked, without the interpreter.
 *
 * Why no Python threads: each of them would hold the interpreter lock between its calls, and while
 * a tree stands still the one thread that has the most to do would wait for it again and again; a
 * profile showed 2.5 ms of that in a pause of 8.
 */

#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

typedef uint64_t u64;
typedef int64_t s64;

struct memory;
void bulk_memories(struct memory *, long, char *, u64);

long bulk_ask(const void *, long, const void *, char *, u64, void *);

struct store;
long pages_read(struct store *, int, u64, u64, const uint32_t *, uint32_t *, long);
long pages_write(struct store *, int, u64, u64, const uint32_t *, const uint32_t *, u64);

enum { IOCTL, MEMORIES, ASK, READ_PAGES, WRITE_PAGES };

struct job {                    /* beside.py has the same */
	u64 kind, arguments[7];
	s64 result;             /* of calls that have one: 0, a count, or -errno */
	s64 nice;               /* of who asked, where he waits for much work */
	u64 done;
	struct job *next;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t work = PTHREAD_COND_INITIALIZER, done = PTHREAD_COND_INITIALIZER;
static struct job *first, **last = &first;
static long idle, threads;

#define MOST 32
#define LESS 10 /* nice value of those that nobody has to wait for long */

static void set_nice(s64 nice)
{
	setpriority(PRIO_PROCESS, syscall(SYS_gettid), (int)nice);
}

static void perform(struct job *job)
{
	u64 *a = job->arguments;

	if (job->kind == IOCTL)
		job->result = ioctl((int)a[0], a[1], (void *)a[2]) < 0 ? -errno : 0;
	else if (job->kind == ASK)
		job->result = bulk_ask((void *)a[0], a[1], (void *)a[2], (char *)a[3], a[4],
				       (void *)a[5]);
	else if (job->kind == READ_PAGES)
		job->result = pages_read((struct store *)a[0], a[1], a[2], a[3],
					 (uint32_t *)a[4], (uint32_t *)a[5], a[6]);
	else if (job->kind == WRITE_PAGES)
		job->result = pages_write((struct store *)a[0], a[1], a[2], a[3],
					  (uint32_t *)a[4], (uint32_t *)a[5], a[6]);
	else
		bulk_memories((struct memory *)a[0], a[1], (char *)a[2], a[3]);
}

static void *serve(void *unused)
{
	(void)unused;
	/* who asked, and whom it waits for, come first where processors are few */
	set_nice(LESS);
	pthread_mutex_lock(&lock);
	for (;;) {
		while (!first) {
			idle++;
			pthread_cond_wait(&work, &lock);
			idle--;
		}
		struct job *job = first;

		first = job->next;
		if (!first)
			last = &first;
		pthread_mutex_unlock(&lock);
		if (job->kind >= READ_PAGES)
			set_nice(job->nice);
		perform(job);
		if (job->kind >= READ_PAGES)
			set_nice(LESS);
		pthread_mutex_lock(&lock);
		job->done = 1;
		pthread_cond_broadcast(&done);
	}
	return 0;
}

/* Begin a job; it must stay where it is until it is done.  0, or -errno when nothing was begun. */
long beside_begin(struct job *job)
{
	long bad = 0;

	job->done = 0;
	job->next = 0;
	job->nice = getpriority(PRIO_PROCESS, syscall(SYS_gettid));
	pthread_mutex_lock(&lock);
	long queued = 1;

	for (struct job *one = first; one; one = one->next)
		queued++;
	if (queued > idle && threads < MOST) {
		pthread_t thread;
		sigset_t all, before;

		/* signals are the business of the interpreter's threads */
		sigfillset(&all);
		pthread_sigmask(SIG_SETMASK, &all, &before);
		bad = -pthread_create(&thread, 0, serve, 0);
		pthread_sigmask(SIG_SETMASK, &before, 0);
		if (!bad) {
			pthread_detach(thread);
			threads++;
		}
	}
	if (!bad || threads) {
		bad = 0;
		*last = job;
		last = &job->next;
		pthread_cond_signal(&work);
	}
	pthread_mutex_unlock(&lock);
	return bad;
}

/* Wait for a job that was begun. */
void beside_wait(struct job *job)
{
	pthread_mutex_lock(&lock);
	while (!job->done)
		pthread_cond_wait(&done, &lock);
	pthread_mutex_unlock(&lock);
}
