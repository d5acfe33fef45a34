"""Shared memory: anonymous mappings and memfds."""

from __future__ import annotations

import time

import pytest

from deltabox import Sandbox
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


def test_a_deleted_file_that_processes_share(sandbox: Sandbox) -> None:
    """As sem_open(3) and POSIX shared memory leave behind, once unlinked."""
    check(
        sandbox,
        setup=_HELP
        + """
f = open('/dev/shm/thing', 'w+b'); f.truncate(1 << 16)
m = mmap.mmap(f.fileno(), 1 << 16)
os.unlink('/dev/shm/thing'); f.close()
m[:4] = b'here'
ask_r, ask_w = os.pipe(); r, w = os.pipe()
if not os.fork():
    while True:
        m[5000] = os.read(ask_r, 1)[0]
        os.write(w, m[:4])
def child(value):
    os.write(ask_w, bytes([value]))
    return os.read(r, 4).decode()
before = child(7)
""",
        report="[maps('thing'), m[5000], m[:4].decode(), os.listdir('/dev/shm')]",
        change="m[:4] = b'gone'; assert child(9) == 'gone' and m[5000] == 9",
    )


def test_multiprocessing(sandbox: Sandbox) -> None:
    """Locks, a queue and a pool of workers."""
    probe = Probe.start(sandbox)
    probe.do(
        """
import multiprocessing
pool = multiprocessing.get_context('fork').Pool(3)
value = multiprocessing.Value('i', 5)
assert pool.map(abs, range(-9, 0)) == list(range(9, 0, -1))
"""
    )
    checkpoint = sandbox.checkpoint()
    for _ in range(3):
        assert probe.ask("pool.map(abs, range(-50, 0)) == list(range(50, 0, -1))")
        probe.do("value.value += 1")
        assert probe.ask("value.value") == 6
        sandbox.rollback(checkpoint)
    with sandbox.fork(at=checkpoint) as fork:
        assert probe.within(fork).ask("sum(pool.map(abs, range(100)))") == 4950
    assert probe.ask("value.value") == 5


_WRITERS = """
m = mmap.mmap(-1, 4 << 20)
fd = os.memfd_create('grows'); os.truncate(fd, 1 << 20)
def by_another(at, text):
    \"\"\"Written by a process that has ended when this returns.\"\"\"
    pid = os.fork()
    if not pid:
        m[at:at + len(text)] = text
        os.pwrite(fd, text, at)
        os._exit(0)
    os.waitpid(pid, 0)
def seen(*places):
    return [[m[at:at + 3].decode(), os.pread(fd, 3, at).decode()] for at in places]
"""


@pytest.mark.parametrize("rest", [0, 0.3])
def test_writers_that_have_ended(sandbox: Sandbox, rest: float) -> None:
    """No page table tells of what they wrote; with and without a look ahead."""
    probe = Probe.start(sandbox)
    probe.do(_WRITERS)
    states = []
    for turn in range(8):
        probe.do(f"by_another({turn * 70_000}, b'{turn:03}')")
        probe.do(f"os.ftruncate(fd, {(turn % 3 + 1) << 20})")
        places = ", ".join(str(n * 70_000) for n in range(9))
        time.sleep(rest)  # not to wait for anything: what is done ahead gets its chance
        states.append((sandbox.checkpoint(), probe.ask(f"seen({places})"), places))
        if rest:
            probe.do(f"by_another({turn * 70_000 + 50_000}, b'new')")
    for checkpoint, expected, places in reversed(states):
        sandbox.rollback(checkpoint)
        assert probe.ask(f"seen({places})") == expected
        probe.do("by_another(0, b'bad'); os.ftruncate(fd, 0)")
    for checkpoint, expected, places in states:
        sandbox.rollback(checkpoint)
        assert probe.ask(f"seen({places})") == expected
        again = sandbox.checkpoint()
        probe.do("by_another(0, b'bad')")
        sandbox.rollback(again)
        assert probe.ask(f"seen({places})") == expected


def test_a_checkpoint_takes_what_has_changed(sandbox: Sandbox) -> None:
    probe = Probe.start(sandbox)
    probe.do("m = mmap.mmap(-1, 64 << 20); m[:] = os.urandom(1 << 20) * 64")
    first = sandbox.checkpoint()
    before = sandbox.usage.memory
    checkpoints = []
    for turn in range(20):
        probe.do(f"m[{turn} << 12] ^= 1")
        checkpoints.append(sandbox.checkpoint())
    # the state of the program's own memory changes too
    assert sandbox.usage.memory - before < 48 << 20
    for turn in reversed(range(20)):
        sandbox.rollback(checkpoints[turn])
        differ = "[i for i in range(256) if m[i << 12] != m[(1 << 20) + (i << 12)]]"
        assert probe.ask(differ) == list(range(turn + 1))
    sandbox.rollback(first)
    assert probe.ask("m[:1 << 20] == m[1 << 20:2 << 20]") is True


def test_forks_share_nothing(sandbox: Sandbox) -> None:
    probe = Probe.start(sandbox)
    probe.do("m = mmap.mmap(-1, 32 << 20); m[:] = os.urandom(1 << 20) * 32")
    probe.do("import hashlib\ndef digest():\n return hashlib.md5(m).hexdigest()")
    before = probe.ask("digest()")
    checkpoint = sandbox.checkpoint()
    forks = sandbox.fork_many(3, at=checkpoint)
    for number, fork in enumerate(forks):
        probe.within(fork).do(f"m[{number} << 20:({number} + 1) << 20] = bytes(1 << 20)")
    found = {probe.within(fork).ask("digest()") for fork in forks}
    assert len(found) == 3 and before not in found
    assert probe.ask("digest()") == before
    grandchild = forks[0].fork()
    probe.within(grandchild).do("m[:3] = b'own'")
    assert probe.within(grandchild).ask("digest()") not in found
    for fork in (grandchild, *forks):
        fork.close()
    for _ in range(3):
        probe.do("m[:5] = b'wrong'")
        sandbox.rollback(checkpoint)
        assert probe.ask("digest()") == before


def test_what_a_program_has_given_back_is_freed() -> None:
    """Nothing of the engine's holds shared memory that nobody inside has any more."""
    with Sandbox.create(memory_limit="300M", standby=0) as sandbox:
        probe = Probe.start(sandbox)
        probe.do("kept = mmap.mmap(-1, 8 << 20); kept[:] = os.urandom(8 << 20)")
        sandbox.rollback(sandbox.checkpoint())
        for turn in range(40):
            probe.do("m = mmap.mmap(-1, 32 << 20); m[:] = bytes(1 << 20) * 32")
            if turn % 10 == 3:
                sandbox.checkpoint().delete()
            sandbox.run(["true"])
            time.sleep(0.06)  # not to wait for anything: what is done ahead gets its chance
            probe.do("m.close()")
        assert probe.ask("len(kept)") == 8 << 20
