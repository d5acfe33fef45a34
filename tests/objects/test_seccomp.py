"""Filters on system calls come back before the program's first instruction does."""

from __future__ import annotations

import ctypes
import os
import random
import struct

import pytest

from deltabox import Process, Sandbox, UnsupportedState
from deltabox.deltacr.objects.seccomp import Filter
from tests.probe import Probe, check

_TOOLS = """
ALLOW, LOG, ERRNO, KILL = 0x7fff0000, 0x7ffc0000, 0x50000, 0x80000000
def call(*a):
    r = libc.syscall(*[ctypes.c_long(x) if isinstance(x, int) else x for x in a])
    return r if r >= 0 else -ctypes.get_errno()
def rules(actions, default=ALLOW):
    code = [(0x20, 0, 0, 0)]
    for number, action in actions.items():
        code += [(0x15, 0, 1, number), (6, 0, 0, action)]
    return struct.pack('<' + 'HBBI' * (len(code) + 1), *sum(code, ()), 6, 0, 0, default)
def install(actions, flags=0, by_prctl=False):
    code = ctypes.create_string_buffer(rules(actions))
    block = struct.pack('QQ', (len(code) - 1) // 8, ctypes.addressof(code))
    if by_prctl:
        return call(157, 22, 2, block)
    return call(317, 1, flags, block)
def mine():
    lines = open('/proc/thread-self/status').read().splitlines()
    return [l for l in lines if l.startswith(('Seccomp', 'NoNewPrivs', 'Speculation'))]
class Worker(threading.Thread):
    def __init__(self):
        super().__init__(daemon=True)
        self.go, self.done = threading.Semaphore(0), threading.Semaphore(0)
        self.start()
    def run(self):
        while True:
            self.go.acquire()
            try: self.answer = eval(self.text, globals())
            except BaseException as e: self.answer = repr(e)
            self.done.release()
    def ask(self, text):
        self.text = text; self.go.release(); self.done.acquire(); return self.answer
NAME = ctypes.create_string_buffer(512)
x = 0
"""


def test_there_is_no_io_uring(sandbox: Sandbox) -> None:
    """Not for root, for nobody else, nor in a restored tree, and it is all that our filter does."""
    check(
        sandbox,
        setup=_TOOLS + "ring = ctypes.create_string_buffer(120)",
        report="[call(425, 4, ring), call(39) == os.getpid(), mine(), x]",
        change="x += 1",
    )
    probe = Probe.start(sandbox, user="nobody")
    probe.do(_TOOLS)
    assert probe.ask("[call(425, 4, bytes(120)), *mine()[:3]]") == [
        -38,
        "NoNewPrivs:\t0",
        "Seccomp:\t2",
        "Seccomp_filters:\t1",
    ]


def test_a_filter(sandbox: Sandbox) -> None:
    check(
        sandbox,
        setup=_TOOLS + "assert install({63: ERRNO | 77}) == 0",
        report="[call(63, NAME), mine(), x]",
        change="x += 1",
    )


def test_a_chain_a_child_and_capabilities(sandbox: Sandbox) -> None:
    """The newest decides last, so what each answers shows that all are there, in their order."""
    check(
        sandbox,
        setup=_TOOLS
        + """
os.setresuid(33, 33, 33)
libc.prctl(38, 1, 0, 0, 0)
assert install({63: ERRNO | 70, 39: LOG}, flags=2) == 0
assert install({63: ERRNO | 71, 102: ERRNO | 5}, by_prctl=True) == 0
r, w = os.pipe(); r2, w2 = os.pipe()
if os.fork() == 0:
    assert install({104: ERRNO | 6}) == 0
    while os.read(r, 1):
        os.write(w2, json.dumps([call(63, NAME), call(102), call(104), mine()]).encode())
assert install({63: ERRNO | 72, 317: ERRNO | 9}) == 0
def of_child():
    os.write(w, b'x'); return json.loads(os.read(r2, 1000))
""",
        report="[call(63, NAME), call(102), call(104), call(39) > 1, mine(), of_child(), x]",
        change="x += 1",
    )


def test_threads_with_different_chains(sandbox: Sandbox) -> None:
    check(
        sandbox,
        setup=_TOOLS
        + """
free, common, own = Worker(), Worker(), Worker()
common.ask('install({63: ERRNO | 70})')
own.ask('install({63: ERRNO | 70}), install({102: ERRNO | 5}), install({104: ERRNO | 6})')
SEEN = '[call(63, NAME), call(102), call(104), mine()]'
""",
        report="[x, eval(SEEN), *(w.ask(SEEN) for w in (free, common, own))]",
        change="x += 1",
    )


def test_threads_that_share_filters_can_still_synchronize(sandbox: Sandbox) -> None:
    """SECCOMP_FILTER_FLAG_TSYNC fails when threads hold equal filters that are not the same."""
    check(
        sandbox,
        setup=_TOOLS
        + """
workers = [Worker() for _ in range(5)]
assert install({63: ERRNO | 70}, flags=1) == 0
assert install({102: ERRNO | 5}, flags=1) == 0
assert workers[0].ask('install({104: ERRNO | 6})') == 0
SEEN = '[call(63, NAME), call(102), call(104), call(107), mine()]'
""",
        report="[x, eval(SEEN), *(w.ask(SEEN) for w in workers)]",
        change="x += 1; assert workers[0].ask('install({107: ERRNO | 3}, flags=1)') == 0;"
        "assert [w.ask('call(107)') for w in workers] == [-3] * 5",
    )


def test_no_signal_handler_runs_without_the_filter(sandbox: Sandbox) -> None:
    probe = Probe.start(sandbox)
    probe.do(
        _TOOLS
        + """
ran = passed = 0
def handler(*a):
    global ran, passed
    ran += 1
    passed += call(63, NAME) != -77
signal.signal(signal.SIGALRM, handler)
assert install({63: ERRNO | 77}) == 0
signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
"""
    )
    checkpoint = sandbox.checkpoint()
    for _ in range(10):
        sandbox.rollback(checkpoint)
        assert probe.ask("[sum(range(1000000)) > 0, ran > 0, passed]") == [True, True, 0]


def test_a_call_that_the_kernel_restarts_by_another(sandbox: Sandbox) -> None:
    """A filter that does not know restart_syscall must not end a wait that we interrupted."""
    probe = Probe.start(sandbox)
    probe.do(
        _TOOLS
        + """
r, w = os.pipe()
poll = select.poll(); poll.register(r, select.POLLIN)
assert install({219: KILL}) == 0
waiting = threading.Thread(target=lambda: globals().update(got=poll.poll(2500)))
waiting.start()
"""
    )
    for _ in range(3):
        checkpoint = sandbox.checkpoint()
    assert probe.ask("waiting.is_alive()")
    sandbox.rollback(checkpoint)
    assert probe.ask(
        "[waiting.is_alive(), os.write(w, b'x'), waiting.join(), got == [(r, 1)]]"
    ) == [
        True,
        1,
        None,
        True,
    ]


# -- programs that forbid nearly everything -----------------------------------------------------

_LONELY = r"""
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

static void caught(int number) { (void)number; }

static unsigned long work(unsigned long n)
{
        unsigned long a = 1, b = 2, c = 3, d = 4, e = 5, f = 6, g = 7, h = 8, i;
        double x = 1.0, y = 2.0;
        for (i = 0; i < n; i++) {
                a = a * 6364136223846793005UL + b; b ^= a >> 7; c += b * 3 + (a < b);
                d = d * 5 + c; e ^= d << 3; f += e ^ (c > d); g = g * 9 + f; h ^= g >> 11;
                a += h; x = x * 1.0000001 + 0.5; y += x / (1.0 + (double)(h & 255));
        }
        memcpy(&i, &y, 8);
        return a ^ b ^ c ^ d ^ e ^ f ^ g ^ h ^ i;
}

int main(int argc, char **argv)
{
        struct sock_filter code[64];
        unsigned short n = 0;
        char line[64], out[64];
        if (atoi(argv[1]))
                signal(SIGUSR1, caught);
        if (argc == 2) {
                if (prctl(PR_SET_SECCOMP, SECCOMP_MODE_STRICT))
                        return 4;
        } else {
                code[n++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS,
                                                         offsetof(struct seccomp_data, nr));
                for (int i = 2; i < argc; i++) {
                        code[n++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K,
                                                                 atoi(argv[i]), 0, 1);
                        code[n++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K,
                                                                 SECCOMP_RET_KILL_PROCESS);
                }
                code[n++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
                struct sock_fprog program = { n, code };
                if (prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program))
                        return 3;
        }
        for (;;) {
                long got = syscall(SYS_read, 0, line, sizeof line);
                if (got <= 0)
                        syscall(SYS_exit, 0);
                if (line[0] == 'm') {
                        syscall(SYS_munmap, 0x10000, 4096);
                        syscall(SYS_write, 1, "unmapped\n", 9);
                        continue;
                }
                if (line[0] == 'b')
                        syscall(SYS_write, 1, "begun\n", 6);
                syscall(SYS_write, 1, out, sprintf(out, "%lx\n", work(200000000)));
        }
}
"""


def _lonely(sandbox: Sandbox, *arguments: str) -> Process:
    if not sandbox.files.exists("/lonely"):
        sandbox.files.write_text("/lonely.c", _LONELY)
        sandbox.run("gcc -O2 -o /lonely /lonely.c", check=True)
    return sandbox.spawn(["/lonely", *arguments])


def _says(program: Process, line: str = "") -> str:
    if line:
        program.stdin.write(line + "\n")
    return program.stdout.readline(timeout=60)


_FORBIDDEN = {
    "a handler, only rt_sigreturn allowed": ("1", "11", "14", "202", "231", "317", "157"),
    "neither rt_sigreturn nor munmap nor futex": ("1", "15", "11", "202", "317", "157"),
    "neither rt_sigreturn nor rt_sigprocmask": ("0", "15", "14", "11", "202", "317", "157"),
}


@pytest.mark.parametrize("what", _FORBIDDEN)
def test_last_steps_that_are_forbidden(sandbox: Sandbox, what: str) -> None:
    """Registers and floating point state are right whichever way it leaves by."""
    _goes_on(sandbox, *_FORBIDDEN[what])


def test_strict_mode() -> None:
    """It cannot be entered under a filter, so only without ours."""
    with Sandbox.create(io_uring=True) as sandbox:
        _goes_on(sandbox, "0")


def _goes_on(sandbox: Sandbox, *arguments: str) -> None:
    program = _lonely(sandbox, *arguments)
    assert _says(program, "b") == "begun\n"
    expected = _says(program)
    waiting = sandbox.checkpoint("waiting")
    assert _says(program, "b") == "begun\n"
    working = sandbox.checkpoint("working")
    for _ in range(4):
        sandbox.rollback(working)
        assert _says(program) == expected
    again = sandbox.checkpoint("again")
    for checkpoint in (waiting, again):
        sandbox.rollback(checkpoint)
        assert _says(program, "b") == "begun\n"
        assert _says(program) == expected
    with sandbox.fork(at=waiting) as fork, fork.fork() as second:
        copy = second.counterpart(program)
        assert _says(copy, "b") == "begun\n"
        copy.stdin.write("m\n")
        assert copy.wait(timeout=20) != 0, "munmap was not forbidden any more"


def test_refused_where_a_handler_could_run_too_early(sandbox: Sandbox) -> None:
    program = _lonely(sandbox, "1", "15", "14")
    assert _says(program, "b") == "begun\n"
    _says(program)
    with pytest.raises(UnsupportedState, match="forbids rt_sigreturn and rt_sigprocmask"):
        sandbox.checkpoint()
    assert _says(program, "b") == "begun\n"


def test_a_stopped_program_under_a_filter(sandbox: Sandbox) -> None:
    program = _lonely(sandbox, "1", "15", "11")
    assert _says(program, "b") == "begun\n"
    expected = _says(program)
    sandbox.run(f"kill -STOP {program.pid}", check=True)
    checkpoint = sandbox.checkpoint()
    for _ in range(2):
        sandbox.rollback(checkpoint)
        checkpoint = sandbox.checkpoint()
    sandbox.run(f"kill -CONT {program.pid}", check=True)
    assert _says(program, "b") == "begun\n"
    assert _says(program) == expected
    program.stdin.write("m\n")
    assert program.wait(timeout=20) != 0


def test_refused_without_the_right_to_install_it_again(sandbox: Sandbox) -> None:
    probe = Probe.start(sandbox)
    probe.do(_TOOLS + "assert install({63: ERRNO | 77}) == 0; os.setresuid(33, 33, 33)")
    with pytest.raises(UnsupportedState, match="seccomp filter that it could not install itself"):
        sandbox.checkpoint()
    assert probe.ask("call(63, NAME)") == -77


def test_refused_when_one_forbids_the_next(sandbox: Sandbox) -> None:
    """The program had a way that the filter let through only because of its arguments."""
    probe = Probe.start(sandbox)
    probe.do(
        _TOOLS
        + """
# prctl is forbidden, and seccomp(2) unless its last argument is odd
code = [(0x20, 0, 0, 0), (0x15, 0, 1, 157), (6, 0, 0, ERRNO | 1), (0x15, 0, 3, 317),
        (0x20, 0, 0, 32), (0x45, 1, 0, 1), (6, 0, 0, ERRNO | 1), (6, 0, 0, ALLOW)]
block = ctypes.create_string_buffer(struct.pack('<' + 'HBBI' * len(code), *sum(code, ())))
assert call(317, 1, 0, struct.pack('QQ', len(code), ctypes.addressof(block))) == 0
assert install({63: ERRNO | 77}) == -1
raw = ctypes.create_string_buffer(64)
keep = ctypes.create_string_buffer(rules({63: ERRNO | 77}))
odd = ctypes.addressof(raw) | 1
ctypes.memmove(odd, struct.pack('QQ', (len(keep) - 1) // 8, ctypes.addressof(keep)), 16)
assert call(317, 1, 0, odd) == 0
"""
    )
    with pytest.raises(UnsupportedState, match="forbids to install the ones"):
        sandbox.checkpoint()
    assert probe.ask("call(63, NAME)") == -77


# -- our reading of filters ---------------------------------------------------------------------


def _random_program(dice: random.Random) -> list[tuple[int, int, int, int]]:
    """Anything the kernel takes, ending in an errno made of what was computed."""
    code = [(0x20, 0, 0, 16), (0x07, 0, 0, 0), (0x20, 0, 0, 24), (0x02, 0, 0, 3), (0x03, 0, 0, 4)]
    for _ in range(dice.randrange(4, 20)):
        k = dice.choice([1, 3, 17, 0x7FFFFFFF, 0xFFFFFFFF, dice.randrange(1, 1 << 32)])
        operation = dice.choice([0x00, 0x10, 0x20, 0x30, 0x40, 0x50, 0x60, 0x70, 0x80, 0xA0])
        code += [
            dice.choice(
                [
                    (
                        0x04 | operation,
                        0,
                        0,
                        dice.randrange(32) if operation in (0x60, 0x70) else k,
                    ),
                    (0x0C | operation, 0, 0, 0) if operation != 0x30 else (0x07, 0, 0, 0),
                    (0x00, 0, 0, k),
                    (0x01, 0, 0, k),
                    (0x60, 0, 0, dice.choice([3, 4])),
                    (0x61, 0, 0, dice.choice([3, 4])),
                    (0x80, 0, 0, 0),
                    (0x20, 0, 0, dice.choice([0, 4, 16, 20, 24, 28, 32])),
                    (0x87, 0, 0, 0),
                ]
            )
        ]
        if dice.random() < 0.4:
            test = dice.choice([0x10, 0x20, 0x30, 0x40]) | dice.choice([0, 8])
            code += [(0x05 | test, dice.randrange(2), dice.randrange(2), k), (0x07, 0, 0, 0)]
    return [*code, (0x54, 0, 0, 0xFFF), (0x44, 0, 0, 0x50000), (0x16, 0, 0, 0)]


def test_the_kernel_and_we_read_a_filter_alike() -> None:
    dice = random.Random(1)
    libc = ctypes.CDLL(None, use_errno=True)
    compared = 0
    for _ in range(150):
        program = _random_program(dice)
        # only getppid is judged by it
        code = [(0x20, 0, 0, 0), (0x15, 1, 0, 110), (6, 0, 0, 0x7FFF0000), *program]
        raw = b"".join(struct.pack("<HBBI", *line) for line in code)
        arguments = [dice.randrange(1 << 32) for _ in range(3)]
        r, w = os.pipe()
        child = os.fork()
        if child == 0:
            block = ctypes.create_string_buffer(raw, len(raw))
            header = struct.pack("QQ", len(code), ctypes.addressof(block))
            ctypes.set_errno(0)
            if libc.syscall(317, 1, 0, header) == 0:
                libc.syscall(110, *[ctypes.c_long(v) for v in arguments])
                os.write(w, struct.pack("i", ctypes.get_errno()))
            os._exit(0)
        os.close(w)
        answer = os.read(r, 4)
        os.close(r)
        os.waitpid(child, 0)
        if answer:
            compared += 1
            ours = Filter(raw, False).judge((110, *arguments)) & 0xFFF
            assert struct.unpack("i", answer)[0] == min(ours, 4095), code
    assert compared > 100
