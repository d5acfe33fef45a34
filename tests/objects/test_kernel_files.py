"""Files of /proc and /sys, namespaces, and directories there."""

from __future__ import annotations

import pytest

from deltabox import Sandbox, UnsupportedState
from tests.probe import Probe, check

_TOOLS = """
def label(fd):
    return os.readlink('/proc/self/fd/%d' % fd)
def flags(fd):
    return [fcntl.fcntl(fd, 3), fcntl.fcntl(fd, 1), os.lseek(fd, 0, 1)]
def again(fd, size=40):
    was = os.lseek(fd, 0, 1)
    got = os.pread(fd, size, was)
    return got.decode()
"""


def test_files_of_the_kernel(sandbox: Sandbox) -> None:
    check(
        sandbox,
        setup=_TOOLS
        + """
opened = [os.open(p, os.O_RDONLY) for p in
          ('/proc/version', '/proc/cpuinfo', '/proc/sys/kernel/hostname', '/sys/devices/system',
           '/proc/sys/kernel', '/proc')]
w = os.open('/proc/sys/net/ipv4/ip_forward', os.O_RDWR)
os.read(opened[0], 7); os.lseek(opened[1], 20, 0)
child = os.fork()
if not child:
    while True: signal.pause()
""",
        report="[[label(f), *flags(f)] for f in [w, *opened]] + [again(f) for f in opened[:3]]",
        change="os.lseek(opened[0], 1, 1)",
    )


def test_files_about_processes(sandbox: Sandbox) -> None:
    check(
        sandbox,
        setup=_TOOLS
        + """
child = os.fork()
if not child:
    signal.pause()
own = [os.open('/proc/self/' + n, os.O_RDONLY | os.O_CLOEXEC) for n in
       ('status', 'comm', 'maps', 'environ', 'fd', 'mounts', '.', 'mem')]
other = [os.open('/proc/%d/%s' % (child, n), os.O_RDONLY) for n in ('comm', 'cmdline', 'task')]
os.read(own[1], 3); os.lseek(own[2], 100, 0)
value = ctypes.create_string_buffer(b'in memory')
def seen():
    return os.pread(own[7], 9, ctypes.addressof(value)).decode()
os.chdir('/proc/%d/task' % child)
""",
        report="""[[[label(f), *flags(f)] for f in own + other], seen(),
[again(f) for f in own[:2]], os.listdir(other[2]), os.getcwd(), os.listdir('.'),
os.pread(other[1], 7, 0).decode(),
again(own[2]) == again(os.open('/proc/self/maps', 0)) is False, os.closerange(30, 60)]""",
        change="value.value = b'IN MEMORY'; os.chdir('/')",
    )


def test_own_namespaces(sandbox: Sandbox) -> None:
    check(
        sandbox,
        setup=_TOOLS
        + """
names = ('net', 'pid', 'mnt', 'uts', 'ipc', 'user')
held = {n: os.open('/proc/self/ns/' + n, os.O_RDONLY) for n in names}
extra = 0
""",
        report="""[[os.fstat(held[n]).st_ino == os.stat('/proc/self/ns/' + n).st_ino
for n in names], libc.setns(held['uts'], 0), extra]""",
        change="extra = 1",
    )


@pytest.mark.parametrize(
    ("setup", "match"),
    [
        ("c = os.fork() or signal.pause(); fd = os.open('/proc/%d/maps' % c, 0)", "its own proc"),
        ("fd = os.open('/proc/self/stat', 0); os.fork() or signal.pause()", "several processes"),
        ("c = os.fork() or os._exit(0); fd = os.open('/proc/%d/stat' % c, 0); os.waitpid(c, 0)",
         "can no longer be opened"),
        ("fd = os.open('/proc/self/task/%d/stat' % os.getpid(), 0)", "its own process"),
        ("fd = os.open('/proc/self/stat', 0); fcntl.flock(fd, fcntl.LOCK_SH)", "with a lock"),
    ],
)  # fmt: skip
def test_refused_by_name(sandbox: Sandbox, setup: str, match: str) -> None:
    probe = Probe.start(sandbox)
    probe.do(setup)
    with pytest.raises(UnsupportedState, match=match):
        sandbox.checkpoint()
    probe.do("os.close(fd)")
    sandbox.checkpoint()
