"""Handlers, masks, pending signals and alternate stacks."""

from __future__ import annotations

import signal

from deltabox import Sandbox
from tests.probe import check


def test_handlers_and_mask(sandbox: Sandbox) -> None:
    check(
        sandbox,
        setup="""
hits = []
signal.signal(signal.SIGUSR1, lambda n, f: hits.append(n))
signal.signal(signal.SIGUSR2, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, 40])
def fields():
    lines = open('/proc/self/status').read().splitlines()
    return [l for l in lines if l.startswith(('SigBlk', 'SigIgn', 'SigCgt', 'SigPnd', 'ShdPnd'))]
def poke():
    os.kill(os.getpid(), signal.SIGUSR1)
    return len(hits)
""",
        report="fields()",
        change="signal.signal(signal.SIGUSR2, signal.SIG_DFL); poke()",
    )


def test_pending_signals_with_their_values(sandbox: Sandbox) -> None:
    check(
        sandbox,
        setup="""
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1, 41, 42])
me = os.getpid()
os.kill(me, signal.SIGUSR1)
for value in (7, 8, 9):
    assert libc.sigqueue(me, 41, ctypes.c_void_p(value)) == 0
libc.syscall(234, me, me, 42)
def drain():
    got = []
    while (info := signal.sigtimedwait([signal.SIGUSR1, 41, 42], 0)) is not None:
        got.append([info.si_signo, info.si_code])
    return got
""",
        report="[l for l in open('/proc/self/status').read().splitlines() if 'Pnd' in l]",
        change="got = drain(); assert sorted(s for s, _ in got) == [10, 41, 41, 41, 42], got",
    )


def test_alternate_stack(sandbox: Sandbox) -> None:
    check(
        sandbox,
        setup="""
class stack_t(ctypes.Structure):
    _fields_ = [('sp', ctypes.c_void_p), ('flags', ctypes.c_int), ('size', ctypes.c_size_t)]
area = ctypes.create_string_buffer(65536)
libc.sigaltstack(ctypes.byref(stack_t(ctypes.addressof(area), 0, 65536)), None)
def current():
    s = stack_t()
    libc.sigaltstack(None, ctypes.byref(s))
    return [s.sp == ctypes.addressof(area), s.flags, s.size]
""",
        report="current()",
        change="libc.sigaltstack(ctypes.byref(stack_t(0, 2, 0)), None)",
    )


def test_a_handler_runs_once_for_a_signal_at_the_instant(sandbox: Sandbox) -> None:
    """A signal that arrived while the process was stopped is delivered once it goes on."""
    check(
        sandbox,
        setup="""
hits = []
signal.signal(signal.SIGUSR1, lambda n, f: hits.append(n))
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
os.kill(os.getpid(), signal.SIGUSR1)
""",
        report="len(hits)",
        change="signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1]); assert hits == [10]",
    )


def _states(sandbox: Sandbox, pids: list[int]) -> list[str]:
    return [p.state for p in sandbox.processes() if p.pid in pids]


def test_stopped_twice(sandbox: Sandbox) -> None:
    """The second SIGSTOP stays pending: the one signal that no mask holds back from our calls."""
    programs = [
        sandbox.spawn("exec sleep 1000"),
        sandbox.spawn(
            ["python3", "-c", "import threading as t; t.Thread(target=input).start(); input()"]
        ),
    ]
    pids = [p.pid for p in programs]
    for _ in range(3):
        for program in programs:
            program.kill(signal.SIGSTOP)
        while _states(sandbox, pids) != ["T", "T"]:
            pass
        for program in programs:
            program.kill(signal.SIGSTOP)
        checkpoint = sandbox.checkpoint()
        for pid in pids:
            status = sandbox.run(["cat", f"/proc/{pid}/status"]).stdout
            assert "ShdPnd:\t0000000000040000" in status, "nothing was to be taken from it"
        sandbox.rollback(checkpoint)
        assert _states(sandbox, pids) == ["T", "T"]
        for program in programs:
            program.kill(signal.SIGCONT)
        while _states(sandbox, pids) != ["S", "S"]:
            pass


def test_a_stop_on_its_way(sandbox: Sandbox) -> None:
    """Whoever is about to stop when a checkpoint comes is stopped in it."""
    for _ in range(6):
        sandbox.spawn(["python3", "-c", "while True: pass"])
    program = sandbox.spawn("exec sleep 1000")
    for _ in range(20):
        program.kill(signal.SIGSTOP)
        checkpoint = sandbox.checkpoint()
        sandbox.rollback(checkpoint)
        assert _states(sandbox, [program.pid]) == ["T"]
        program.kill(signal.SIGCONT)
        checkpoint.delete()
