"""Process descriptors."""

from __future__ import annotations

from deltabox import Sandbox
from tests.probe import Probe, check


def test_alive_zombie_and_reaped(sandbox: Sandbox) -> None:
    check(
        sandbox,
        setup="""
def child(status=None):
    pid = os.fork()
    if not pid:
        if status is None:
            time.sleep(1000)
        os._exit(status)
    return pid
alive = child(); zombie = child(3); reaped = child(4)
fds = [os.pidfd_open(p) for p in (alive, zombie, reaped, os.getpid(), 1)]
os.set_blocking(fds[0], False)
thread = libc.syscall(434, threading.get_native_id(), os.O_EXCL)
os.waitpid(reaped, 0)
os.waitid(os.P_PID, zombie, os.WEXITED | os.WNOWAIT)
def info(fd):
    text = open('/proc/self/fdinfo/%d' % fd).read().splitlines()
    return [l for l in text if l.startswith(('flags', 'Pid', 'NSpid'))]
def ended():
    return [bool(select.select([f], [], [], 0)[0]) for f in fds]
""",
        report="[[info(f) for f in [*fds, thread]], ended()]",
        change="os.kill(alive, 9); os.waitid(os.P_PID, alive, os.WEXITED | os.WNOWAIT)",
    )


def test_signals_reach_the_rebuilt_process(sandbox: Sandbox) -> None:
    probe = Probe.start(sandbox)
    probe.do(
        """
pid = os.fork()
if not pid:
    time.sleep(1000)
fd = os.pidfd_open(pid)
"""
    )
    checkpoint = sandbox.checkpoint()
    for _ in range(3):
        probe.do("signal.pidfd_send_signal(fd, 15)")
        assert probe.ask("os.waitid(os.P_PIDFD, fd, os.WEXITED).si_status") == 15
        sandbox.rollback(checkpoint)


def test_held_by_several(sandbox: Sandbox) -> None:
    check(
        sandbox,
        setup="""
sleeper = os.fork()
if not sleeper:
    time.sleep(1000)
fd = os.pidfd_open(sleeper)
again = os.dup(fd)
r, w = os.pipe(); ask_r, ask_w = os.pipe()
if not os.fork():
    while os.read(ask_r, 1):
        os.write(w, os.readlink('/proc/self/fd/%d' % fd).encode()[:12])
def other():
    os.write(ask_w, b'?')
    return os.read(r, 99).decode()
""",
        report="[other(), os.path.samestat(os.fstat(fd), os.fstat(again)),"
        " select.select([fd], [], [], 0)[0]]",
        change="os.kill(sleeper, 9); select.select([fd], [], [])",
    )
