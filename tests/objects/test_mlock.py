"""Locked memory, guard regions, sealed and droppable mappings, every flag that smaps shows."""

from __future__ import annotations

import pytest

from deltabox import Sandbox
from tests.probe import check

_TOOLS = """
def call(*a):
    r = libc.syscall(*[ctypes.c_long(x) if isinstance(x, int) else x for x in a])
    return r if r >= 0 else -ctypes.get_errno()
def room(pages, protection=3, flags=0x22):
    # between two holes, so that it merges with nothing
    at = call(9, 0, (pages + 2) * 4096, 0, 0x22, -1, 0)
    assert at > 0
    call(11, at, 4096); call(11, at + (pages + 1) * 4096, 4096)
    got = call(9, at + 4096, pages * 4096, protection, flags | 0x10, -1, 0)
    assert got == at + 4096, got
    return got
def seen(at):
    out, inside = [], False
    for line in open('/proc/self/smaps'):
        head = line.split()[0]
        if '-' in head and head[0] in '0123456789abcdef':
            low, high = (int(v, 16) for v in head.split('-'))
            inside = at[0] <= low and high <= at[0] + at[1] * 4096
            if inside: out.append([low - at[0], high - at[0], line.split()[1]])
        elif inside and head == 'VmFlags:':
            out[-1].append(line.strip().replace(' uw', ''))  # the engine's watching
    return out
def locked():
    lines = open('/proc/self/status').read().splitlines()
    return [l for l in lines if l.startswith('VmLck')]
def bytes_at(at, size=4):
    return ctypes.string_at(at, size).hex()
x = 0
"""


def test_locked_memory(sandbox: Sandbox) -> None:
    check(
        sandbox,
        setup=_TOOLS
        + """
a, b, c = room(8), room(8), room(8)
ctypes.memmove(a, b'abcd', 4)
assert call(149, a, 8 * 4096) == 0
assert call(325, b, 4 * 4096, 1) == 0
ctypes.memmove(b + 4096, b'efgh', 4)
assert call(149, c + 4096, 4096) == 0
assert libc.mprotect(ctypes.c_void_p(c), 3 * 4096, 1) == 0
resource.setrlimit(resource.RLIMIT_MEMLOCK, (8192, 16384))
""",
        report="[seen((a, 8)), seen((b, 8)), seen((c, 8)), locked(), bytes_at(a),"
        "bytes_at(b + 4096), resource.getrlimit(resource.RLIMIT_MEMLOCK), x]",
        change="x += 1; call(150, a, 4096)",
    )


@pytest.mark.parametrize("flags", [2, 2 | 4])
def test_all_memory(sandbox: Sandbox, flags: int) -> None:
    """What is mapped later is locked when mlockall said so, and only then."""
    check(
        sandbox,
        setup=_TOOLS
        + f"""
assert call(151, {flags}) == 0
def later():
    at = room(4)
    found = seen((at, 4))
    call(11, at, 4 * 4096)
    return found
""",
        report="[later(), locked(), x]",
        change="x += 1; call(152)",
    )


def test_locked_by_another_user(sandbox: Sandbox) -> None:
    check(
        sandbox,
        user="daemon",
        setup=_TOOLS + "a = room(4); assert call(149, a, 4 * 4096) == 0; call(151, 6)",
        report="[seen((a, 4)), locked(), x]",
        change="x += 1; call(150, a, 4096)",
    )


def test_guard_regions(sandbox: Sandbox) -> None:
    check(
        sandbox,
        setup=_TOOLS
        + """
a, b = room(16), room(8)
ctypes.memset(a, 65, 16 * 4096)
assert call(28, a + 4096, 2 * 4096, 102) == 0
assert call(28, a + 9 * 4096, 4096, 102) == 0
assert call(28, b, 8 * 4096, 102) == 0
f = open('/usr/bin/python3', 'rb')
m = call(9, 0, 4 * 4096, 1, 2, f.fileno(), 0); assert call(28, m + 4096, 4096, 102) == 0
s = call(9, 0, 4 * 4096, 1, 1, f.fileno(), 0); assert call(28, s + 8192, 4096, 102) == 0
r, w = os.pipe()
def guarded(at, pages):
    # write(2) says EFAULT for what cannot be read
    out = ''
    for n in range(pages):
        got = call(1, w, at + n * 4096, 1)
        if got == 1: os.read(r, 1)
        out += '.' if got == 1 else '#'
    return out
assert guarded(a, 16) == '.##......#......', guarded(a, 16)
""",
        report="[guarded(a, 16), guarded(b, 8), guarded(m, 4), guarded(s, 4), bytes_at(a),"
        "bytes_at(a + 4 * 4096), x]",
        change="x += 1; call(28, a + 4096, 4096, 103)",
    )


def test_sealed_memory(sandbox: Sandbox) -> None:
    check(
        sandbox,
        setup=_TOOLS
        + """
a = room(8)
ctypes.memmove(a, b'seal', 4)
assert call(462, a + 4096 * 2, 4096 * 2, 0) == 0
assert libc.mprotect(ctypes.c_void_p(a), 4096, 1) == 0
""",
        report="[seen((a, 8)), call(10, a + 2 * 4096, 4096, 1), call(11, a + 3 * 4096, 4096),"
        "bytes_at(a), x]",
        change="x += 1",
    )


def test_droppable_memory(sandbox: Sandbox) -> None:
    """The mapping comes back; its content is never saved, see docs/hazards.md."""
    check(
        sandbox,
        setup=_TOOLS + "a = room(4, 3, 0x28 & ~2)",
        report="[seen((a, 4)), bytes_at(a), bytes_at(a + 4096), x]",
        change="x += 1; ctypes.memmove(a + 4096, b'else', 4)",
    )


def test_advice(sandbox: Sandbox) -> None:
    """Every advice that leaves a flag, on anonymous memory and mappings of files."""
    check(
        sandbox,
        setup=_TOOLS
        + """
at = []
for advice in (1, 2, 10, 12, 14, 15, 16, 18):
    where = room(4)
    if advice != 18:  # what is wiped in a child is never saved, see docs/hazards.md
        ctypes.memmove(where, b'%4d' % advice, 4)
    assert call(28, where, 2 * 4096, advice) == 0, advice
    at.append((where, 4))
f = open('/usr/bin/python3', 'rb')
for kind in (1, 2):
    for advice in (1, 2, 10, 16):
        where = room(4)
        assert call(9, where, 4 * 4096, 1, 0x10 | kind, f.fileno(), 0) == where
        assert call(28, where + 4096, 2 * 4096, advice) == 0, advice
        at.append((where, 4))
none = room(4, 0)
at.append((none, 4))
reserve = room(4, 3, 0x4022)
at.append((reserve, 4))
""",
        report="[[seen(a) for a in at], [bytes_at(a) for a, _ in at[:8]], x]",
        change="x += 1; call(28, at[0][0], 4096, 0)",
    )
