"""Incremental memory: whatever a program does to its address space, no written page is missed.

The keeper of the tests compares every page at every checkpoint (deltacr/verify.py), so a test only
has to do odd things between checkpoints, and at odd moments.
"""

from __future__ import annotations

import random
import time

import pytest

from deltabox import Sandbox
from tests.probe import Probe

# Regions of memory that are mapped, written, dropped, moved, grown, protected and split; a twin of
# each in ordinary Python bytes says what must be there.
_SHAPES = r"""
import ctypes, mmap, os, random, zlib
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = libc.mremap.restype = ctypes.c_void_p
PAGE = 4096
regions = {}
chance = random.Random(5)
def make(pages, flags=0x22):
    at = libc.mmap(None, ctypes.c_size_t(pages * PAGE), 3, flags, -1, 0)
    regions[at] = bytearray(pages * PAGE)
def write(at, page, text):
    ctypes.memmove(at + page * PAGE, text, len(text))
    regions[at][page * PAGE:page * PAGE + len(text)] = text
def scribble(count):
    for _ in range(count):
        at = chance.choice(list(regions))
        page = chance.randrange(len(regions[at]) // PAGE)
        if (at, page) not in hidden: write(at, page, chance.randbytes(100))
def drop(at):
    libc.munmap(ctypes.c_void_p(at), ctypes.c_size_t(len(regions.pop(at))))
def forget(at, first, pages):
    libc.madvise(ctypes.c_void_p(at + first * PAGE), ctypes.c_size_t(pages * PAGE), 4)
    regions[at][first * PAGE:(first + pages) * PAGE] = bytes(pages * PAGE)
def move(at, pages):
    twin = regions.pop(at)
    to = libc.mremap(ctypes.c_void_p(at), ctypes.c_size_t(len(twin)),
                     ctypes.c_size_t(pages * PAGE), 1)
    regions[to] = (twin + bytes(max(0, pages * PAGE - len(twin))))[:pages * PAGE]
def protect(at, first, pages, how):
    libc.mprotect(ctypes.c_void_p(at + first * PAGE), ctypes.c_size_t(pages * PAGE), how)
def odd():
    at = chance.choice(list(regions))
    pages = len(regions[at]) // PAGE
    what = chance.randrange(7)
    if what == 0: make(chance.randrange(1, 200))
    elif what == 1 and len(regions) > 3: settle(); drop(at)
    elif what == 2: settle(); forget(at, chance.randrange(pages), 1)
    elif what == 3: settle(); move(at, max(1, pages + chance.randrange(-20, 40)))
    elif what == 4:
        settle()
        first = chance.randrange(pages)
        protect(at, first, 1, 1); protect(at, first, 1, 3)
    elif what == 5:
        page = chance.randrange(pages)
        protect(at, page, 1, 0)
        hidden.append((at, page))
    elif what == 6: settle()
def settle():
    while hidden:
        protect(*hidden.pop(), 1, 3)
hidden = []
def right():
    settle()
    return all(ctypes.string_at(at, len(twin)) == bytes(twin) for at, twin in regions.items())
for _ in range(6): make(chance.randrange(1, 200))
"""


def _probe(sandbox: Sandbox) -> Probe:
    probe = Probe.start(sandbox)
    probe.do(_SHAPES)
    return probe


@pytest.mark.parametrize("seed", range(3))
def test_odd_things_between_checkpoints(sandbox: Sandbox, seed: int) -> None:
    """At once, and with time to work ahead; checkpoints of rolled back states among them."""
    probe, chance = _probe(sandbox), random.Random(seed)
    known = []
    for number in range(25):
        probe.do(f"chance.seed({seed * 100 + number}); scribble(30)")
        for _ in range(chance.randrange(4)):
            probe.do("odd(); scribble(5)")
        if chance.random() < 0.4:
            sandbox.run(["true"])  # its end is what sets the work ahead going
            time.sleep(chance.random() * 0.05)  # any moment of it
            probe.do("scribble(10)")
        known.append(sandbox.checkpoint())
        if chance.random() < 0.3:
            probe.do("scribble(200); odd()")
            sandbox.rollback(chance.choice(known))
        assert probe.ask("right()") is True
    for checkpoint in known[::5]:
        sandbox.rollback(checkpoint)
        assert probe.ask("right()") is True


def test_a_busy_program_is_copied_ahead(sandbox: Sandbox) -> None:
    """A program that never rests is looked at and copied while it writes."""
    sandbox.files.write_text(
        "/tmp/busy.py",
        _SHAPES
        + "import sys\nprint('ready', flush=True)\n"
        + "while True:\n    scribble(50)\n    odd()\n"
        + "    if chance.random() < 0.01: assert right()\n",
    )
    busy = sandbox.spawn(["python3", "/tmp/busy.py"])
    assert busy.stdout.readline() == "ready\n"
    known = []
    for number in range(12):
        sandbox.run(["true"])
        time.sleep(0.01 * (number % 4))
        known.append(sandbox.checkpoint())
        if number % 3 == 2:
            sandbox.rollback(known[number // 2])
    assert busy.exit_code is None, busy.stderr.read_available()


def test_exec_and_fork_are_met_anew(sandbox: Sandbox) -> None:
    """A watched process calls exec; a child of a watched process is not watched."""
    probe = Probe.start(sandbox)
    probe.do("x = bytearray(os.urandom(1 << 20)); import zlib")
    shell = sandbox.shell()
    for number in range(4):
        shell.run(f"v={number}; (sleep 1000 & exec sleep 1000) > /dev/null 2>&1 &")
        sandbox.checkpoint()
        probe.do(f"x[{number} << 12] ^= 255; total = zlib.crc32(x)")
        probe.do("child = os.fork()\nif not child:\n import time\n x[0] ^= 1\n time.sleep(1000)")
        checkpoint = sandbox.checkpoint()
        probe.do("x[:] = bytes(len(x)); os.kill(child, 9); os.waitpid(child, 0)")
        sandbox.rollback(checkpoint)
        assert probe.ask("zlib.crc32(x) == total") is True
        assert shell.run("echo $v").stdout == f"{number}\n"
        probe.do("os.kill(child, 9); os.waitpid(child, 0)")


def test_a_long_line_with_rests(sandbox: Sandbox) -> None:
    """Templates are gathered into huge pages, and begun anew after some generations, in the rests;
    some of the checkpoints come in the middle of that.
    """
    probe, chance = _probe(sandbox), random.Random(3)
    probe.do("x = bytearray(os.urandom(40 << 20))")
    known, sums = [], []
    for number in range(24):
        probe.do(f"x[{number} << 20] ^= 1; scribble(20)")
        sums.append(probe.ask("zlib.crc32(x)"))
        time.sleep(chance.choice((0.05, 0.2, 0.5)))
        known.append(sandbox.checkpoint())
    for number in (23, 8, 16, 0, 23):
        sandbox.rollback(known[number])
        assert probe.ask("[zlib.crc32(x), right()]") == [sums[number], True]


def test_what_a_program_splits_it_can_join_again(sandbox: Sandbox) -> None:
    """mremap(2) takes one mapping only, and the kernel joins only what is watched alike."""
    probe = _probe(sandbox)
    probe.do("make(64); at = max(regions); write(at, 0, b'x')")
    probe.do("protect(at, 32, 1, 0)")  # three mappings, and pages in the first
    sandbox.checkpoint()
    probe.do("protect(at, 32, 1, 3)")
    probe.do("old, new = (ctypes.c_size_t(pages * PAGE) for pages in (64, 80))")
    probe.do("to = libc.mremap(ctypes.c_void_p(at), old, new, 1)")
    assert probe.ask("to < 1 << 63 and ctypes.string_at(to, 1) == b'x'") is True


@pytest.mark.parametrize("count", [511, 513, 1023, 1024, 1025, 2000])
def test_scattered_pages(sandbox: Sandbox, count: int) -> None:
    """More separate pages than the kernel looks through in one turn."""
    probe = Probe.start(sandbox)
    probe.do("m = mmap.mmap(-1, 20000 << 12, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)")
    probe.do(f"pages = [8 * n + 2 for n in range({count})]\nfor n in pages: m[n << 12] = 1")
    checkpoint = sandbox.checkpoint()
    for turn in range(4):
        sandbox.rollback(checkpoint)
        probe.do(f"for n in pages[{turn} * 100:][:3]: m[n << 12] += 1; m[(n + 1) << 12] = 9")
        probe.do("last = [m[n << 12] for n in range(20000)]")
        checkpoint = sandbox.checkpoint()
    sandbox.rollback(checkpoint)
    assert probe.ask("last == [m[n << 12] for n in range(20000)]")
    assert probe.ask("min(m[n << 12] for n in pages)") == 1


def test_a_mapping_of_a_file_whose_parts_become_one_again(sandbox: Sandbox) -> None:
    probe = Probe.start(sandbox)
    probe.do(
        """
f = open('/bin/bash', 'rb')
m = mmap.mmap(f.fileno(), 64 << 12, flags=mmap.MAP_PRIVATE, prot=3)
at = ctypes.addressof(ctypes.c_char.from_buffer(m))
for n in (0, 1, 40):
    m[n << 12] = n + 1
def protect(low, high, how):
    assert not libc.mprotect(ctypes.c_void_p(at + (low << 12)), (high - low) << 12, how)
"""
    )
    first = sandbox.checkpoint()
    probe.do("protect(32, 64, 1)")
    second = sandbox.checkpoint()
    probe.do("protect(32, 64, 3); m[50 << 12] = 51")
    third = sandbox.checkpoint()
    for checkpoint, last in ((third, 51), (second, None), (first, None), (third, 51)):
        sandbox.rollback(checkpoint)
        assert probe.ask("[m[n << 12] for n in (0, 1, 40)]") == [1, 2, 41]
        assert last is None or probe.ask("m[50 << 12]") == last
