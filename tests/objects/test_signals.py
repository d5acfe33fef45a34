"""Handlers, masks, pending signals and alternate stacks."""

from __future__ import annotations

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
