"""Shared mappings of files that have a name."""

from __future__ import annotations

from deltabox import Sandbox
from tests.probe import Probe, check

_MAP = """
MAP_FAILED = ctypes.c_void_p(-1).value
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int,
                      ctypes.c_long]
def mapped(path, size, offset=0, prot=3, mode=os.O_RDWR, flags=1):
    fd = os.open(path, mode)
    address = libc.mmap(None, size, prot, flags, fd, offset)
    assert address != MAP_FAILED, os.strerror(ctypes.get_errno())
    os.close(fd)
    return address
def peek(address, size=8):
    return ctypes.string_at(address, size).decode()
def poke(address, text):
    ctypes.memmove(address, text.encode(), len(text))
def row(address):
    for l in open('/proc/self/maps'):
        low, rest = l.split('-', 1)
        if int(low, 16) == address:
            words = rest.split()
            return [words[1], words[2], words[-1]]
def make(path, size, text=''):
    with open(path, 'w') as f:
        f.write(text); f.truncate(size)
"""


def test_written_through_and_read_by_others(sandbox: Sandbox) -> None:
    check(
        sandbox,
        setup=_MAP
        + """
make('/root/shared', 20000, 'old text')
m = mapped('/root/shared', 20000)
poke(m, 'new text'); poke(m + 16384, 'far')
again = mapped('/root/shared', 4096, 16384)
ask, go = os.pipe(); done, tell = os.pipe()
if not os.fork():
    mine = mapped('/root/shared', 20000)
    while True:
        os.read(ask, 1)
        os.write(tell, (peek(mine) + '|' + peek(m)).encode())
def other():
    os.write(go, b'x')
    return os.read(done, 99).decode()
""",
        report="""[peek(m), peek(m + 16384, 3), peek(again, 3), other(), row(m), row(again),
open('/root/shared').read(8), os.stat('/root/shared').st_blocks]""",
        change="poke(m, 'CHANGED!'); poke(again, 'FAR'); assert other() == 'CHANGED!|CHANGED!'",
    )


def test_kinds_of_shared_mappings(sandbox: Sandbox) -> None:
    check(
        sandbox,
        setup=_MAP
        + """
make('/root/a', 12288, 'aaaaaaaa')
reader = mapped('/root/a', 4096, prot=1, mode=os.O_RDONLY)
later = mapped('/root/a', 4096, prot=1)
none = mapped('/root/a', 4096, prot=0)
private = mapped('/root/a', 4096, flags=2)
poke(private, 'mine')
poke(mapped('/root/a', 4096), 'through!')
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
shm = mapped('/root/a', 4096)
with open('/root/b', 'w') as f: f.truncate(40960)
long = mapped('/root/b', 40960)
poke(long + 32768, 'end'); poke(long, 'start')
os.truncate('/root/b', 8192)
def fault(address):
    child = os.fork()
    if not child:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        peek(address); os._exit(0)
    return os.waitpid(child, 0)[1]
def opened(address):
    'Whether the mapping may be made writable.'
    answer = libc.mprotect(address, 4096, 3)
    libc.mprotect(address, 4096, 1)
    return answer
""",
        report="""[peek(reader), peek(later), peek(private), peek(shm), row(reader), row(later),
row(none), row(private), row(long), opened(reader), opened(later), fault(none),
fault(long + 32768), peek(long, 5)]""",
        change="poke(shm, 'ANOTHER!'); os.truncate('/root/b', 40960)",
    )


def test_many_dirty_pages_at_the_instant(sandbox: Sandbox) -> None:
    """What was stored through a mapping a moment ago is in the snapshot, page by page."""
    probe = Probe.start(sandbox)
    probe.do(
        _MAP
        + """
import hashlib
SIZE = 16 << 20
make('/root/big', SIZE)
m = mapped('/root/big', SIZE)
view = (ctypes.c_char * SIZE).from_address(m)
def fill(seed):
    for at in range(0, SIZE, 4096):
        struct.pack_into('QQ', view, at, seed, at)
def digest():
    return hashlib.sha256(view).hexdigest()
def file_digest():
    return hashlib.sha256(open('/root/big', 'rb').read()).hexdigest()
"""
    )
    points = []
    for seed in range(4):
        probe.do(f"fill({seed})")
        points.append(sandbox.checkpoint())
    digests = []
    for point in points:
        sandbox.rollback(point)
        digests.append(probe.ask("digest()"))
        assert probe.ask("file_digest()") == digests[-1]
    assert len(set(digests)) == 4
    with sandbox.fork(at=points[1]) as fork:
        copy = probe.within(fork)
        assert copy.ask("digest()") == digests[1]
        copy.do("fill(9)")
        assert probe.ask("digest()") == digests[3]
        assert copy.ask("file_digest()") == copy.ask("digest()") not in digests


def test_shared_memory_with_a_name(sandbox: Sandbox) -> None:
    check(
        sandbox,
        setup="""
from multiprocessing import shared_memory
s = shared_memory.SharedMemory('named', create=True, size=10000)
s.buf[:5] = b'hello'
""",
        report="[bytes(s.buf[:5]).decode(), open('/dev/shm/named').read(5)]",
        change="s.buf[:5] = b'HELLO'",
    )


def test_a_file_of_the_base_written_through(sandbox: Sandbox) -> None:
    check(
        sandbox,
        setup=_MAP + "m = mapped('/etc/services', 8192); poke(m, 'mapped!!')",
        report="[peek(m), open('/etc/services').read(8), row(m)]",
        change="poke(m, 'again...')",
    )
