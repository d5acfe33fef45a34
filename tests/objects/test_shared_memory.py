"""Shared memory: anonymous mappings and memfds."""

from __future__ import annotations

import pytest

from deltabox import Sandbox, UnsupportedState
from tests.probe import Probe, check

_HELP = """
def maps(word):
    lines = [l.split(None, 5) for l in open('/proc/self/maps')]
    return sorted([l[0], l[1], l[2], l[5].strip()] for l in lines if word in l[-1])
"""


def test_shared_by_parent_and_children(sandbox: Sandbox) -> None:
    check(
        sandbox,
        setup=_HELP
        + """
m = mmap.mmap(-1, 1 << 20)
big = mmap.mmap(-1, 64 << 20)
m[:5] = b'hello'; m[-3:] = b'end'; big[40 << 20] = 7
ask_r, ask_w = os.pipe(); r, w = os.pipe()
if not os.fork():
    while True:
        command = os.read(ask_r, 1)
        if command == b'+':
            m[100] += 1
        os.write(w, bytes([m[100]]) + m[:5])
def child(command):
    os.write(ask_w, command)
    return list(os.read(r, 6))
""",
        report="[maps('zero'), m[:5].decode(), m[-3:].decode(), m[100], big[40 << 20], big[5],"
        " child(b'?')]",
        change="child(b'+'); assert m[100] == child(b'?')[0]; m[:5] = b'other'; big[5] = 1",
    )


def test_parts_of_it(sandbox: Sandbox) -> None:
    """Unmapped in the middle, protected, and mapped twice in one process."""
    check(
        sandbox,
        setup=_HELP
        + """
libc.mmap.restype = libc.mremap.restype = ctypes.c_void_p
size = 16 * 4096
at = libc.mmap(None, size, 3, 0x21, -1, 0)
for page in range(16):
    ctypes.memset(at + page * 4096, 65 + page, 4096)
libc.munmap(ctypes.c_void_p(at + 4 * 4096), 4096)
libc.mprotect(ctypes.c_void_p(at + 8 * 4096), 4096, 1)
libc.mprotect(ctypes.c_void_p(at + 10 * 4096), 4096, 0)
twice = libc.mremap(ctypes.c_void_p(at + 12 * 4096), 0, 2 * 4096, 1)
def read(address):
    return ctypes.string_at(address, 3).decode()
""",
        report="[maps('zero'), [read(at + p * 4096) for p in (0, 3, 5, 8, 9, 11, 12, 15)],"
        " read(twice), read(twice + 4096)]",
        change="ctypes.memset(twice, 90, 4096); assert read(at + 12 * 4096) == 'ZZZ'",
    )


def test_memfd(sandbox: Sandbox) -> None:
    check(
        sandbox,
        setup=_HELP
        + """
fd = os.memfd_create('things', 3)
os.ftruncate(fd, 10 << 20); os.pwrite(fd, b'start', 0); os.pwrite(fd, b'far', 9 << 20)
os.lseek(fd, 77, 0); os.fchmod(fd, 0o640)
m = mmap.mmap(fd, 8192); private = mmap.mmap(fd, 8192, flags=mmap.MAP_PRIVATE)
private[:3] = b'own'
again = os.open('/proc/self/fd/%d' % fd, os.O_RDONLY)
reader = mmap.mmap(again, 4096, prot=1)
sealed = os.memfd_create('sealed', 3); os.write(sealed, b'for ever')
fcntl.fcntl(sealed, 1033, 2 | 4 | 8)
plain = os.memfd_create('plain', 0)
def refused(call):
    try: call()
    except OSError as e: return e.errno
def facts(f):
    i = os.fstat(f)
    return [os.readlink('/proc/self/fd/%d' % f), oct(i.st_mode), i.st_size, i.st_blocks,
            os.lseek(f, 0, 1), fcntl.fcntl(f, 1034), fcntl.fcntl(f, fcntl.F_GETFL)]
""",
        report="[maps('memfd'), [facts(f) for f in (fd, again, sealed, plain)], m[:5].decode(),"
        " private[:5].decode(), reader[:5].decode(), os.pread(fd, 3, 9 << 20).decode(),"
        " refused(lambda: os.write(sealed, b'x')), os.path.sameopenfile(fd, again)]",
        change="m[:5] = b'later'; private[3:5] = b'XX'; os.ftruncate(fd, 5 << 20)",
    )


def test_a_memfd_nobody_has_open(sandbox: Sandbox) -> None:
    check(
        sandbox,
        setup=_HELP
        + """
fd = os.memfd_create('closed'); os.ftruncate(fd, 8192)
m = mmap.mmap(fd, 8192); os.close(fd)
m[4096] = 5
if not os.fork():
    while True: time.sleep(1000)
""",
        report="[maps('memfd'), m[4096]]",
        change="m[4096] = 6",
    )


def test_semaphores_between_processes(sandbox: Sandbox) -> None:
    """A lock of multiprocessing in shared memory that a child waits for."""
    probe = Probe.start(sandbox)
    probe.do(
        """
m = mmap.mmap(-1, 4096)
libpthread = ctypes.CDLL(None)
at = ctypes.addressof(ctypes.c_char.from_buffer(m))
assert libpthread.sem_init(ctypes.c_void_p(at), 1, 0) == 0
r, w = os.pipe()
if not os.fork():
    while True:
        libpthread.sem_wait(ctypes.c_void_p(at))
        os.write(w, b'got it')
time.sleep(0.1)
"""
    )
    checkpoint = sandbox.checkpoint()
    for _ in range(3):
        probe.do("libpthread.sem_post(ctypes.c_void_p(at))")
        assert probe.ask("os.read(r, 9).decode()") == "got it"
        sandbox.rollback(checkpoint)
    assert probe.ask("select.select([r], [], [], 0)[0]") == []


def test_system_v_is_refused(sandbox: Sandbox) -> None:
    probe = Probe.start(sandbox)
    probe.do("i = libc.shmget(0, 4096, 0o1600); libc.shmat.restype = ctypes.c_void_p")
    probe.do("at = libc.shmat(i, None, 0)")
    with pytest.raises(UnsupportedState, match="shared memory"):
        sandbox.checkpoint()
