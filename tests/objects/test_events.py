"""eventfd, timerfd, signalfd."""

from __future__ import annotations

import time

from deltabox import Sandbox
from tests.probe import Probe, check


def test_eventfd(sandbox: Sandbox) -> None:
    check(
        sandbox,
        setup="""
plain = os.eventfd(7)
semaphore = os.eventfd(3, os.EFD_SEMAPHORE | os.EFD_NONBLOCK)
huge = os.eventfd(0)
os.eventfd_write(huge, 1 << 40)
def info(fd):
    lines = open('/proc/self/fdinfo/%d' % fd).read().splitlines()
    return [l for l in lines if not l.startswith(('eventfd-id', 'ino', 'mnt_id'))]
""",
        report="[info(plain), info(semaphore), info(huge), select.select([plain], [], [], 0)[0]]",
        change="os.eventfd_read(plain); os.eventfd_read(semaphore); os.eventfd_write(huge, 1)",
    )


def test_signalfd(sandbox: Sandbox) -> None:
    check(
        sandbox,
        setup="""
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1, signal.SIGUSR2])
mask = struct.pack('Q', 1 << signal.SIGUSR1 - 1 | 1 << signal.SIGUSR2 - 1)
fd = libc.syscall(289, -1, mask, 8, os.O_NONBLOCK | os.O_CLOEXEC)
os.kill(os.getpid(), signal.SIGUSR2)
""",
        report="""[select.select([fd], [], [], 0)[0], os.get_inheritable(fd),
[l for l in open('/proc/self/fdinfo/%d' % fd) if l.startswith(('flags', 'sigmask'))]]""",
        change="assert os.read(fd, 128)[0] == signal.SIGUSR2",
    )


_TIMERFD = """
def timerfd(clock, flags, value, interval):
    fd = libc.syscall(283, clock, os.O_NONBLOCK)
    ns = lambda x: (int(x), int(x % 1 * 1e9))
    assert libc.syscall(286, fd, flags, struct.pack('4q', *ns(interval), *ns(value)), None) == 0
    return fd
def left(fd):
    data = ctypes.create_string_buffer(32)
    assert libc.syscall(287, fd, data) == 0
    a, b, c, d = struct.unpack('4q', data.raw)
    return [a + b / 1e9, c + d / 1e9]
def info(fd):
    lines = open('/proc/self/fdinfo/%d' % fd).read().splitlines()
    return [l for l in lines if l.startswith(('flags', 'clockid', 'ticks', 'settime', 'it_int'))]
"""


def test_timerfd(sandbox: Sandbox) -> None:
    check(
        sandbox,
        setup=_TIMERFD
        + """
off = timerfd(1, 0, 0, 0)
far = timerfd(1, 0, 1000, 0)
often = timerfd(0, 0, 900, 0.125)
absolute = timerfd(0, 1, time.time() + 5000, 0)
fired = timerfd(1, 0, 0.001, 0)
time.sleep(0.05)
""",
        report="""[[info(t) for t in (off, far, often, absolute, fired)]
+ [round(left(far)[1], -2), round(left(absolute)[1], -2), left(off), left(fired)[1]]
+ [select.select([fired], [], [], 0)[0], select.select([far], [], [], 0)[0]]]""",
        change="os.read(fired, 8); timerfd(1, 0, 1, 1); libc.syscall(286, far, 0, bytes(32), None)",
    )


def test_a_timer_goes_on_with_what_remained(sandbox: Sandbox) -> None:
    probe = Probe.start(sandbox)
    probe.do(_TIMERFD + "t = timerfd(1, 0, 2, 0)")
    checkpoint = sandbox.checkpoint()
    time.sleep(2.5)
    assert probe.ask("select.select([t], [], [], 0)[0] == [t]")
    sandbox.rollback(checkpoint)
    assert 1.0 < probe.ask("left(t)[1]") < 2.0
    assert probe.ask("select.select([t], [], [], 3)[0] == [t]")
