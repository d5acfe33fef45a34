/*
 * The interpreter: a freestanding program that executes arrays of system-call records.
 *
 * Why it exists.  A rollback must not be driven by ptrace round trips or by Python: all decisions
 * are taken when a checkpoint is compiled, and what is left is to perform a few hundred system
 * calls, in several processes, in the right order.  This file does only that.  It knows nothing
 * about what the calls mean.  The same code is the seed that templates are forked from, the
 * template itself, PID 1 of every sandbox, and the last instructions of a restored thread before
 * rt_sigreturn(2) takes it back to the instant it was captured at.
 *
 * Why freestanding.  It lives in the address space that restored programs inherit, so it must not
 * bring a heap, thread-local storage or a loader with it, and it must be able to unmap everything
 * but its own few pages.  Code is position independent, uses no static data, and keeps all of its
 * state on its stack and in the control memory that the keeper passes with each program.
 *
 * The formats here are mirrored by records.py; tests/deltacr/test_records.py compares the two.
 */

typedef unsigned long u64;
typedef long s64;
typedef unsigned int u32;
typedef int s32;
typedef unsigned short u16;
typedef short s16;
typedef unsigned char u8;

/* The address range that is ours in every process; model.py has the same numbers. */
#define OURS 0x420000000000UL
#define CODE (OURS)                     /* this code, as an anonymous read-exec mapping */
#define STACKS (OURS + 0x200000UL)      /* private stacks of the template's two tasks */
#define STACKS_SIZE 0x10000UL
#define TASK_END 0x7ffffffff000UL

enum { SYS_read = 0, SYS_write = 1, SYS_poll = 7, SYS_mmap = 9, SYS_mprotect = 10, SYS_munmap = 11,
       SYS_sendmsg = 46, SYS_recvmsg = 47, SYS_exit = 60, SYS_wait4 = 61, SYS_futex = 202,
       SYS_timer_create = 222, SYS_timer_delete = 226, SYS_exit_group = 231, SYS_clone3 = 435 };

enum op { OP_END, OP_CALL, OP_CLONE, OP_BARRIER, OP_COPY, OP_RESUME, OP_SERVE, OP_TIMER,
          OP_STORE, OP_SKIP_IF_ERROR, OP_LOAD, OP_MERGE, OP_EXPECT,
          OP_PULL };
enum wait { WAIT, PASS, SLEEP };
enum { MAY_FAIL = 1, LATE = 2 /* after the point of no return: no fault is injected */ };

struct record {
        u16 op;
        u16 flags;
        u16 from_variables;      /* bit i: argument i is an index into header.variables */
        s16 save;                /* >= 0: the result is stored in that variable */
        u32 number;              /* system call number */
        u16 from_control;        /* bit i: argument i is an offset into the control memory */
        u16 pad;
        s64 argument[6];
};

#define VARIABLES 2048
#define BARRIERS 128

/* Start of every control memory: shared between the keeper and all processes of one program. */
struct header {
        u32 failed;              /* set once by the first record that fails */
        s32 error;               /* its errno */
        u64 where;               /* offset of that record in the control memory */
        s64 budget;              /* fault injection: the record that takes this to zero fails */
        u32 barrier[BARRIERS];
        s64 variables[VARIABLES];
};

struct message {                 /* what the keeper sends to a serving process */
        u64 address, size, entry;
};

static inline s64 call6(s64 n, s64 a, s64 b, s64 c, s64 d, s64 e, s64 f)
{
        s64 result;
        register s64 r10 __asm__("r10") = d;
        register s64 r8 __asm__("r8") = e;
        register s64 r9 __asm__("r9") = f;
        __asm__ volatile("syscall"
                         : "=a"(result)
                         : "a"(n), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
                         : "rcx", "r11", "memory");
        return result;
}

static inline s64 call3(s64 n, s64 a, s64 b, s64 c)
{
        return call6(n, a, b, c, 0, 0, 0);
}

static inline int is_error(s64 result)
{
        return (u64)result > (u64)-4096;
}

static inline void copy(u8 *to, const u8 *from, u64 size)
{
        __asm__ volatile("rep movsb" : "+D"(to), "+S"(from), "+c"(size) : : "memory");
}

/* FUTEX_WAIT and FUTEX_WAKE without FUTEX_PRIVATE_FLAG: the words are shared between processes. */
static void wake(u32 *word)
{
        call6(SYS_futex, (s64)word, 1, 0x7fffffff, 0, 0, 0);
}

static void fail(struct header *h, u64 where, s32 error)
{
        if (!__sync_lock_test_and_set(&h->failed, 1)) {
                h->error = error;
                h->where = where;
        }
        for (int i = 0; i < BARRIERS; i++)
                wake(&h->barrier[i]);
}

/*
 * All `count` parties arrive before any of those that wait goes on; -1 if one failed instead.
 * A party that passes only says that it has come this far; one that sleeps does not look whether
 * another has failed meanwhile, for it may be there for hours.
 */
static int barrier(struct header *h, u32 *word, u32 count, enum wait mode)
{
        u32 seen = __sync_add_and_fetch(word, 1);
        if (seen >= count)
                wake(word);
        if (mode == PASS)
                return *(volatile u32 *)&h->failed ? -1 : 0;
        while (seen < count) {
                /* looked at again now and then: the keeper sets `failed` when a party was killed */
                s64 moment[2] = { 0, 50000000 };
                if (*(volatile u32 *)&h->failed)
                        return -1;
                call6(SYS_futex, (s64)word, 0, seen, mode == SLEEP ? 0 : (s64)moment, 0, 0);
                seen = *(volatile u32 *)word;
        }
        return *(volatile u32 *)&h->failed ? -1 : 0;
}

static s64 run(struct header *h, u64 entry);
__attribute__((noreturn)) void child(struct header *h, u64 entry);
s64 clone_onto(void *arguments, u64 size, struct header *h, u64 entry);

/*
 * clone3(2) where the child continues on another stack, so nothing of the caller's frame may be
 * used there.  The child's stack is in the clone_args; it needs only the two values kept in
 * callee-saved registers.
 */
__asm__(".globl clone_onto\n"
        ".hidden clone_onto\n"
        "clone_onto:\n"
        "    push %rbx\n"
        "    push %r12\n"
        "    mov %rdx, %rbx\n"
        "    mov %rcx, %r12\n"
        "    mov $435, %eax\n"
        "    syscall\n"
        "    test %rax, %rax\n"
        "    jz 1f\n"
        "    pop %r12\n"
        "    pop %rbx\n"
        "    ret\n"
        "1:  xor %ebp, %ebp\n"
        "    mov %rbx, %rdi\n"
        "    mov %r12, %rsi\n"
        "    and $-16, %rsp\n"
        "    call child\n"
        "    hlt\n");

__attribute__((noreturn, visibility("hidden"))) void child(struct header *h, u64 entry)
{
        s64 status = run(h, entry);
        for (;;)
                call3(SYS_exit_group, status ? 127 : 0, 0, 0);
}

/*
 * Leave the interpreter for good.  The caller's stack lies in the control memory, which the last
 * thread of the process must unmap, so this runs on registers alone: count down the threads of
 * this process, unmap if we are the last, and let rt_sigreturn load everything from `frame`.
 */
__attribute__((noreturn)) static void resume(u64 frame, u32 *threads_left, u64 address, u64 size)
{
        __asm__ volatile("mov %0, %%rsp\n"
                         "lock decl (%1)\n"
                         "jnz 1f\n"
                         "mov $11, %%eax\n"
                         "syscall\n"
                         "1: mov $15, %%eax\n"
                         "syscall\n"
                         "hlt\n"
                         :
                         : "r"(frame + 8), "r"(threads_left), "D"(address), "S"(size)
                         : "memory", "rax", "rcx", "r11");
        __builtin_unreachable();
}

struct iovec { void *base; u64 size; };

#define PAGE 4096UL
#define SCRATCH 65536UL

static int same_page(const u64 *a, const u64 *b)
{
        for (u64 i = 0; i < PAGE / 8; i += 8) {
                u64 d = (a[i] ^ b[i]) | (a[i + 1] ^ b[i + 1]) | (a[i + 2] ^ b[i + 2]) |
                        (a[i + 3] ^ b[i + 3]) | (a[i + 4] ^ b[i + 4]) | (a[i + 5] ^ b[i + 5]) |
                        (a[i + 6] ^ b[i + 6]) | (a[i + 7] ^ b[i + 7]);
                if (d)
                        return 0;
        }
        return 1;
}

/*
 * Bring a range of ours up to date with another process's memory, writing only the pages that
 * differ: the others stay shared with the template we were forked from.  `*copied` counts pages.
 */
static s64 merge(s64 source, u64 from, u64 to, u64 size, u8 *scratch, s64 is_file, s64 *copied)
{
        for (u64 done = 0; done < size; done += SCRATCH) {
                u64 part = size - done < SCRATCH ? size - done : SCRATCH;
                struct iovec local = { scratch, part }, remote = { (void *)(from + done), part };
                s64 got = is_file ? call6(17, source, (s64)scratch, part, from + done, 0, 0)
                                  : call6(310, source, (s64)&local, 1, (s64)&remote, 1, 0);
                if (got != (s64)part)
                        return is_error(got) ? got : -14;
                for (u64 at = 0; at < part; at += PAGE) {
                        u8 *mine = (u8 *)(to + done + at);
                        if (!same_page((u64 *)mine, (u64 *)(scratch + at))) {
                                copy(mine, scratch + at, PAGE);
                                ++*copied;
                        }
                }
        }
        return 0;
}

/* Read what lies scattered in another process, `count` ranges of `total` bytes. */
static s64 pull(s64 source, struct iovec *remote, struct iovec *local, u64 count, u64 total,
                s64 is_file)
{
        u64 done = 0;

        for (u64 at = 0; at < count;) {
                u64 batch = 0, size = 0;

                /* IOV_MAX, and no call moves more than 2 GiB (MAX_RW_COUNT) */
                while (at + batch < count && batch < (is_file ? 1 : 1024) && size < 0x40000000)
                        size += remote[at + batch++].size;
                s64 got = is_file ? call6(17, source, (s64)local[at].base, local[at].size,
                                          (s64)remote[at].base, 0, 0)
                                  : call6(310, source, (s64)(local + at), batch,
                                          (s64)(remote + at), batch, 0);
                if (is_error(got))
                        return got;
                done += got;
                at += batch;
        }
        return done == total ? 0 : -14;
}

/* timer_create(2) hands out identifiers in order; skip until it is the wanted one. */
static s64 create_timer(s64 clock, s64 event, s32 wanted)
{
        for (;;) {
                s32 got = -1;
                s64 result = call3(SYS_timer_create, clock, event, (s64)&got);
                if (is_error(result))
                        return result;
                if (got == wanted)
                        return 0;
                call3(SYS_timer_delete, got, 0, 0);
                if (got > wanted)
                        return -17; /* EEXIST: it can no longer be had */
        }
}

struct msghdr { void *name; u32 name_size, pad; struct iovec *vectors; u64 count;
                void *control; u64 control_size; u32 flags, pad2; };
struct control { u64 size; s32 level, type; s32 fds[252]; };

/* One request: map the control memory it brings, run the program in it, answer with the result. */
static int serve_one(s64 sock)
{
        struct message m;
        struct control c;
        struct iovec v = { &m, sizeof m };
        struct msghdr hdr = { 0, 0, 0, &v, 1, &c, sizeof c, 0, 0 };
        s64 got = call3(SYS_recvmsg, sock, (s64)&hdr, 0x40000000 /* MSG_CMSG_CLOEXEC */);

        if (got == -4)
                return 0;
        if (got != sizeof m)
                return -1; /* the keeper closed its end */
        s64 fds = hdr.control_size >= 16 ? (s64)(c.size - 16) / 4 : 0;
        s64 result = -22;
        if (fds > 0) {
                /* the memory comes first, what the program uses after it */
                result = call6(SYS_mmap, m.address, m.size, 3, 0x11, c.fds[0], 0);
                if (!is_error(result)) {
                        struct header *h = (struct header *)m.address;
                        for (s64 i = 0; i < fds; i++)
                                h->variables[i] = c.fds[i];
                        result = run(h, m.entry);
                }
                for (s64 i = 0; i < fds; i++)
                        call3(3, c.fds[i], 0, 0);
        }
        call3(SYS_write, sock, (s64)&result, 8);
        return 0;
}

struct pollfd { s32 fd; s16 events, revents; };

/*
 * Answer requests for ever; report ended children when `signals` is a signalfd for SIGCHLD.
 * Reports go out before the answer to a request that arrived after the deaths, so a request is
 * also a barrier: once it is answered, every earlier death has been reported.
 */
static s64 serve(s64 sock, s64 signals, s64 reports)
{
        struct pollfd p[2] = { { sock, 1, 0 }, { signals, 1, 0 } };
        for (;;) {
                call3(SYS_poll, (s64)p, signals >= 0 ? 2 : 1, -1);
                if (signals >= 0) {
                        u8 info[128];
                        s32 report[2];
                        if (p[1].revents)
                                call3(SYS_read, signals, (s64)info, sizeof info);
                        for (;;) {
                                s64 pid = call6(SYS_wait4, -1, (s64)&report[1], 1, 0, 0, 0);
                                if (pid <= 0)
                                        break;
                                report[0] = pid;
                                call3(SYS_write, reports, (s64)report, sizeof report);
                        }
                }
                if (p[0].revents && serve_one(sock))
                        return 0;
        }
}

static s64 run(struct header *h, u64 entry)
{
        for (const struct record *r = (const struct record *)((u8 *)h + entry);; r++) {
                s64 a[6], result = 0;
                u64 where = (u64)r - (u64)h;

                if (r->op == OP_END)
                        return 0;
                for (int i = 0; i < 6; i++) {
                        a[i] = r->argument[i];
                        if (r->from_variables & (1 << i))
                                a[i] = h->variables[a[i]];
                        else if (r->from_control & (1 << i))
                                a[i] += (s64)h;
                }
                /* an injected fault takes the place of the record: it is not executed */
                if (!(r->flags & (MAY_FAIL | LATE)) && h->budget > 0 &&
                    __sync_sub_and_fetch(&h->budget, 1) == 0)
                        result = -5;
                else if (r->op == OP_CALL)
                        result = call6(r->number, a[0], a[1], a[2], a[3], a[4], a[5]);
                else if (r->op == OP_CLONE)
                        result = clone_onto((void *)a[0], 88, h, a[1]);
                else if (r->op == OP_BARRIER) {
                        if (barrier(h, &h->barrier[a[0]], a[1], a[2]))
                                return -1;
                } else if (r->op == OP_COPY)
                        copy((u8 *)a[0], (const u8 *)a[1], a[2]);
                else if (r->op == OP_RESUME)
                        resume(a[0], (u32 *)a[1], a[2], a[3]);
                else if (r->op == OP_SERVE)
                        result = serve(a[0], a[1], a[2]);
                else if (r->op == OP_TIMER)
                        result = create_timer(a[0], a[1], a[2]);
                else if (r->op == OP_STORE)
                        *(s64 *)a[0] = a[1];
                else if (r->op == OP_MERGE)
                        result = merge(a[0], a[1], a[2], a[3], (u8 *)a[4], a[5],
                                       &h->variables[r->number]);
                else if (r->op == OP_PULL)
                        result = pull(a[0], (struct iovec *)a[1], (struct iovec *)a[2], a[3],
                                      a[4], a[5]);
                else if (r->op == OP_EXPECT)
                        result = a[0] == a[1] ? 0 : -5;
                else if (r->op == OP_LOAD)
                        result = *(s32 *)a[0];
                else if (r->op == OP_SKIP_IF_ERROR) {
                        if (is_error(a[0]))
                                r += a[1];
                        continue;
                } else
                        result = -38;
                if (r->save >= 0)
                        h->variables[r->save] = result;
                if (is_error(result) && !(r->flags & MAY_FAIL)) {
                        fail(h, where, -result);
                        return -1;
                }
        }
}

/* The seed, once it runs from its anonymous copy on its own stack: drop all else, then serve. */
__attribute__((noreturn, visibility("hidden"))) void settle(void)
{
        call3(SYS_munmap, 0x10000, OURS - 0x10000, 0);
        call3(SYS_munmap, STACKS + STACKS_SIZE, TASK_END - (STACKS + STACKS_SIZE), 0);
        serve(3, -1, -1);
        for (;;)
                call3(SYS_exit_group, 0, 0, 0);
}

extern const u8 __executable_start[] __attribute__((visibility("hidden")));
extern const u8 etext[] __attribute__((visibility("hidden")));
void _start(void);

__attribute__((noreturn, used, visibility("hidden"))) void begin(void)
{
        const u8 *from = __executable_start;
        u64 size = (u64)etext - (u64)from;
        u8 *code = (u8 *)call6(SYS_mmap, CODE, size, 3, 0x100022, -1, 0);
        u64 stacks = call6(SYS_mmap, STACKS, STACKS_SIZE, 3, 0x100022, -1, 0);

        if ((u64)code != CODE || stacks != STACKS)
                call3(SYS_exit_group, 126, 0, 0);
        copy(code, from, size);
        call3(SYS_mprotect, CODE, size, 5);
        u64 target = CODE + ((u64)&settle - (u64)from);
        __asm__ volatile("mov %0, %%rsp\n"
                         "xor %%ebp, %%ebp\n"
                         "call *%1\n"
                         "hlt\n"
                         :
                         : "r"(STACKS + STACKS_SIZE / 2), "r"(target)
                         : "memory");
        __builtin_unreachable();
}

__asm__(".globl _start\n"
        "_start:\n"
        "    and $-16, %rsp\n"
        "    call begin\n"
        "    hlt\n");
