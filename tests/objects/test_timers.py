"""Interval timers, POSIX timers, and calls that wait for a time."""

from __future__ import annotations

import time

from deltabox import Sandbox
from tests.probe import Probe, check


def test_interval_timers(sandbox: Sandbox) -> None:
    check(
        sandbox,
        setup="""
signal.signal(signal.SIGALRM, signal.SIG_IGN)
signal.setitimer(signal.ITIMER_REAL, 500, 100)
signal.setitimer(signal.ITIMER_PROF, 300, 7)
""",
        report="""[400 < signal.getitimer(signal.ITIMER_REAL)[0] < 501,
signal.getitimer(signal.ITIMER_REAL)[1],
200 < signal.getitimer(signal.ITIMER_PROF)[0] < 301,
signal.getitimer(signal.ITIMER_PROF)[1]]""",
        change="signal.setitimer(signal.ITIMER_REAL, 0)",
    )


def test_posix_timers_keep_their_ids(sandbox: Sandbox) -> None:
    check(
        sandbox,
        setup="""
class event(ctypes.Structure):
    _fields_ = [('value', ctypes.c_void_p), ('signo', ctypes.c_int), ('notify', ctypes.c_int),
                ('pad', ctypes.c_char * 48)]
class spec(ctypes.Structure):
    _fields_ = [(name, ctypes.c_long) for name in ('is_', 'in_', 'vs', 'vn')]
def create():
    t = ctypes.c_int()
    assert libc.syscall(222, 1, ctypes.byref(event(77, 44, 0)), ctypes.byref(t)) == 0
    return t.value
signal.signal(44, signal.SIG_IGN)
first, second, third = create(), create(), create()
libc.syscall(226, second)
libc.syscall(223, third, 0, ctypes.byref(spec(5, 0, 900, 0)), None)
def listed():
    s = spec()
    assert libc.syscall(224, third, ctypes.byref(s)) == 0
    text = open('/proc/self/timers').read()
    return [text.replace(str(os.getpid()), 'me'), s.is_, 800 < s.vs <= 900]
""",
        report="listed()",
        change="libc.syscall(226, first)",
    )


def test_a_sleeper_keeps_its_remaining_time(sandbox: Sandbox) -> None:
    probe = Probe.start(sandbox)
    probe.do(
        """
woke = []
class timespec(ctypes.Structure):
    _fields_ = [('s', ctypes.c_long), ('n', ctypes.c_long)]
def nap():  # time.sleep waits for an absolute time, and clocks run on
    libc.nanosleep(ctypes.byref(timespec(2, 0)), None)
    woke.append(1)
thread = threading.Thread(target=nap); thread.start()
"""
    )
    checkpoint = sandbox.checkpoint()
    for _ in range(2):
        began = time.monotonic()
        sandbox.rollback(checkpoint)
        probe.do("thread.join()")
        assert 0.5 < time.monotonic() - began < 3.0


def test_timed_waits_end_on_time_after_a_rollback(sandbox: Sandbox) -> None:
    probe = Probe.start(sandbox)
    probe.do(
        """
r, w = os.pipe()
ended = {}
def wait(name, call):
    def run():
        began = time.monotonic()
        call()
        ended[name] = time.monotonic() - began
    threading.Thread(target=run).start()
poller = select.poll(); poller.register(r, select.POLLIN)
condition = threading.Condition()
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
def on_condition():
    with condition:
        condition.wait(1.5)
wait('select', lambda: select.select([r], [], [], 1.5))
wait('poll', lambda: poller.poll(1500))
wait('condition', on_condition)
wait('sigtimedwait', lambda: signal.sigtimedwait([signal.SIGUSR1], 1.5))
time.sleep(0.2)
"""
    )
    checkpoint = sandbox.checkpoint()
    for _ in range(2):
        sandbox.rollback(checkpoint)
        deadline = time.monotonic() + 10
        while len(ended := probe.ask("ended")) < 4 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert set(ended) == {"select", "poll", "condition", "sigtimedwait"}
        assert all(1.4 < seconds < 3.5 for seconds in ended.values()), ended
