"""Private memory of every kind comes back byte for byte, with the same map."""

from __future__ import annotations

import pytest

from deltabox import Sandbox, UnsupportedState
from tests.probe import Probe, check

_SHAPE = r"""
def ours(where):
    return 0x4200_0000_0000 <= int(where.split('-')[0], 16) < 0x5500_0000_0000
def shape():
    out = []
    for line in open('/proc/self/maps'):
        where, prot, offset, device, inode, *name = line.split()
        if not ours(where):
            out.append([where, prot, offset, inode, *name])
    return out
def flags():
    out, where = {}, ''
    for line in open('/proc/self/smaps'):
        head = line.split()[0]
        if '-' in head and head[0] in '0123456789abcdef':
            where = head
        elif head == 'VmFlags:' and not ours(where):
            out[where] = ' '.join(f for f in line.split()[1:] if f not in ('sd', 'uw'))
    return out
"""


def test_kinds_of_memory(sandbox: Sandbox) -> None:
    check(
        sandbox,
        setup=_SHAPE
        + r"""
ANON = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
heap = [b'%d' % i * 50 for i in range(20000)]
big = mmap.mmap(-1, 8 << 20, flags=ANON)
big[::4096] = bytes(i % 251 for i in range(2048))
sparse = mmap.mmap(-1, 64 << 20, flags=ANON); sparse[33 << 20] = 9
huge = mmap.mmap(-1, 8 << 20, flags=ANON)
huge.madvise(mmap.MADV_HUGEPAGE); huge[:] = b'h' * (8 << 20)
secret = mmap.mmap(-1, 1 << 16, flags=ANON); secret[:6] = b'secret'
address = ctypes.addressof(ctypes.c_char.from_buffer(secret))
libc.mprotect(ctypes.c_void_p(address), 1 << 16, 0)
data = open('/root/mapped', 'wb+'); data.write(b'file' * 4096); data.flush()
cow = mmap.mmap(data.fileno(), 16384, flags=mmap.MAP_PRIVATE, prot=3); cow[5000:5003] = b'COW'
shown = mmap.mmap(data.fileno(), 16384, flags=mmap.MAP_SHARED, prot=1)
def hidden():
    libc.mprotect(ctypes.c_void_p(address), 1 << 16, 1)
    word = ctypes.string_at(address, 6).decode()
    libc.mprotect(ctypes.c_void_p(address), 1 << 16, 0)
    return word
def total():
    import zlib
    return [zlib.crc32(b''.join(heap)), zlib.crc32(big[:]), sparse[33 << 20], sparse[0],
            zlib.crc32(huge[:]), zlib.crc32(cow[:]), zlib.crc32(shown[:]), hidden()]
total(); shape(); flags()
""",
        report="total()",
        change="big[4096] = (big[4096] + 1) % 251; cow[1] = 7; sparse[33 << 20] = 1",
    )


def test_the_map_has_the_same_shape(sandbox: Sandbox) -> None:
    probe = Probe.start(sandbox)
    probe.do(_SHAPE)
    probe.do(
        "extra = mmap.mmap(-1, 1 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS); extra[5] = 1;"
        "nap = dict(target=time.sleep, args=(999,), daemon=True);"
        "threads = [threading.Thread(**nap) for _ in range(4)];"
        "[t.start() for t in threads]; shape(); flags()"
    )
    probe.do("before = [shape(), flags()]")
    checkpoint = sandbox.checkpoint()
    for _ in range(3):
        sandbox.rollback(checkpoint)
        after = probe.ask("[shape(), flags()]")
        before = probe.ask("before")
        assert after[0] == before[0]
        assert after[1] == before[1]


def test_in_place_overwrite_of_a_mapped_library(sandbox: Sandbox) -> None:
    """What a live tree writes into a library later must not show in restored copies of it."""
    sandbox.run("cp /lib/x86_64-linux-gnu/libz.so.1 /root/mine.so", check=True)
    probe = Probe.start(sandbox)
    probe.do(
        "lib = ctypes.CDLL('/root/mine.so'); lib.zlibVersion.restype = ctypes.c_char_p;"
        "size = os.path.getsize('/root/mine.so')"
    )
    checkpoint = sandbox.checkpoint()
    sandbox.run("dd if=/dev/zero of=/root/mine.so bs=4096 count=30 conv=notrunc", check=True)
    fork = sandbox.fork(at=checkpoint)
    with fork:
        copy = probe.within(fork)
        assert copy.ask("lib.zlibVersion().decode()").startswith("1.")
        assert copy.ask("lib.crc32(0, b'abc', 3) & 0xffffffff") == 0x352441C2
        sandbox.rollback(checkpoint)
        assert probe.ask("lib.crc32(0, b'abc', 3) & 0xffffffff") == 0x352441C2


def test_growing_stack_and_heap(sandbox: Sandbox) -> None:
    check(
        sandbox,
        setup="""
def depth(n):
    return 1 + depth(n - 1) if n else 0
sys.setrecursionlimit(20000)
resource.setrlimit(resource.RLIMIT_STACK, (1 << 26, resource.RLIM_INFINITY))
grown = depth(100)
kept = []
""",
        report="[depth(3000), len(kept), sum(len(k) for k in kept)]",
        change="kept.append(bytearray(1 << 20)); depth(9000)",
    )


def test_many_generations_of_templates(sandbox: Sandbox) -> None:
    """Templates are forks of forks, now and then a full copy; every one keeps its own pages."""
    probe = Probe.start(sandbox)
    probe.do(
        """
import random, zlib
source = random.Random(3)
memory = bytearray(4 << 20)
maps = []
def change(n):
    for _ in range(20):
        at = source.randrange(1024) * 4096
        memory[at:at + 4096] = source.randbytes(4096)
    maps.append(mmap.mmap(-1, 1 << 16, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    maps[-1][:] = bytes([n]) * (1 << 16)
    if len(maps) > 3:
        maps.pop(0).close()
def total():
    return [zlib.crc32(memory), [zlib.crc32(m[:]) for m in maps]]
"""
    )
    taken = []
    for generation in range(24):
        probe.do(f"change({generation})")
        taken.append((sandbox.checkpoint(), probe.ask("total()")))
        sandbox.run("sleep 0.05")
        if generation % 5 == 4:
            checkpoint, expected = taken[generation // 2]
            sandbox.rollback(checkpoint)
            assert probe.ask("total()") == expected
    for checkpoint, expected in reversed(taken):
        sandbox.rollback(checkpoint)
        assert probe.ask("total()") == expected, checkpoint


_PLACED = """
libc.mmap.restype = ctypes.c_size_t
libc.mmap.argtypes = [ctypes.c_size_t] * 3 + [ctypes.c_int] * 2 + [ctypes.c_size_t]
libc.munmap.argtypes = [ctypes.c_size_t] * 2
def place(address, size=4096):
    found = libc.mmap(address, size, 3, 0x100022, -1, 0)  # MAP_FIXED_NOREPLACE
    assert found == address, hex(found)
    return (ctypes.c_uint32 * (size // 4)).from_address(address)
"""


def test_anywhere_a_program_may_choose(sandbox: Sandbox) -> None:
    """V8 takes 256 KiB at a time, at random addresses of 46 bits; some lie close together."""
    check(
        sandbox,
        setup=_PLACED
        + """
import random
source = random.Random(7)
chosen = sorted(source.sample(range(1 << 10, 1 << 28), 1500))
chosen += [chosen[0] + 1, chosen[1] + 7, chosen[1] + 8, (1 << 28) - 1]
parts = [place(n << 18, 1 << 18) for n in chosen]
for n, part in enumerate(parts):
    part[0] = part[40000] = n
""",
        report="[[part[0], part[40000]] for part in parts]",
        change="""
for part in parts[::3]:
    part[0] += 1
libc.munmap(chosen[5] << 18, 1 << 18)
parts[5] = place(source.randrange(1 << 10, 1 << 28) << 18, 1 << 18)
parts[5][0] = 77
""",
    )


@pytest.mark.parametrize("address", [0x4200_1000_0000, 0x4400_0000_0000, 0x54FF_FFFF_F000])
def test_the_addresses_of_the_engine_are_refused(sandbox: Sandbox, address: int) -> None:
    probe = Probe.start(sandbox)
    first = sandbox.checkpoint()
    sandbox.rollback(first)
    probe.do(_PLACED + f"place({address})[0] = 5")
    with pytest.raises(UnsupportedState, match=f"python3.* maps memory at {address:#x}"):
        sandbox.checkpoint()
    probe.do(f"libc.munmap({address}, 4096)")
    sandbox.rollback(sandbox.checkpoint())
    assert probe.ask("1 + 1") == 2
