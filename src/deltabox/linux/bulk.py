"""Many small questions to the kernel in one call: the Python side of bulk.c.

The C part is loaded with ctypes, which lets other threads run meanwhile, and so it is bound to no
Python version.  Lists of pages stay packed: a process may have hundreds of thousands of ranges,
and nobody looks at them one by one.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import threading
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from .pagemap import PAGE_IS_GUARD, PAGE_IS_WPALLOWED, guards

LIBRARY = Path(__file__).with_name("_bulk")
_ROOM = 1 << 14
_SETTLED = PAGE_IS_WPALLOWED | PAGE_IS_GUARD
_LONGEST = 4 << 20  # bytes in one entry of an iovec

library = ctypes.CDLL(str(LIBRARY), use_errno=False)
_c = library
for _name in ("bulk_present", "bulk_written", "bulk_unshared", "bulk_translate", "bulk_common"):
    getattr(_c, _name).restype = ctypes.c_long

Area = tuple[int, int, bool]  # start, end, whether a file is mapped there


class Regions:
    """Sorted address ranges with their categories (PAGEMAP_SCAN), packed."""

    __slots__ = ("packed",)

    def __init__(self, packed: array[int] | None = None) -> None:
        self.packed: array[int] = array("Q") if packed is None else packed

    @classmethod
    def of(cls, ranges: Sequence[tuple[int, int]]) -> Regions:
        packed = array("Q")
        for low, high in ranges:
            packed.extend((low, high, 0))
        return cls(packed)

    def __len__(self) -> int:
        return len(self.packed) // 3

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        numbers = iter(self.packed)
        return zip(numbers, numbers, numbers, strict=True)

    @property
    def size(self) -> int:
        """Bytes in all of them."""
        return sum(self.packed[1::3]) - sum(self.packed[0::3])

    @property
    def guarded(self) -> bool:
        """Whether some of them are guard regions."""
        return any(found & PAGE_IS_GUARD for found in self.packed[2::3])

    @property
    def unwatched(self) -> bool:
        """Whether writes to some of them are not watched; guard regions have none."""
        return not all(found & _SETTLED for found in self.packed[2::3])

    def unguarded(self) -> Regions:
        """Without guard regions."""
        packed = array("Q")
        for region in self:
            if not region[2] & PAGE_IS_GUARD:
                packed.extend(region)
        return Regions(packed)

    def watched(self, yes: bool) -> Regions:
        """Those whose writes are watched, or those where they are not; no guard regions."""
        packed = array("Q")
        for low, high, found in self:
            if bool(found & PAGE_IS_WPALLOWED) == yes and not found & PAGE_IS_GUARD:
                packed.extend((low, high, found))
        return Regions(packed)


def union(lists: Sequence[Regions]) -> Regions:
    """All that is in any of them, sorted; neighbours become one."""
    lists = [one for one in lists if one.packed]
    if len(lists) < 2:
        return lists[0] if lists else Regions()
    packed = array("Q")
    start = end = -1
    for low, high in sorted((low, high) for one in lists for low, high, _ in one):
        if low > end:
            if end >= 0:
                packed.extend((start, end, 0))
            start, end = low, high
        else:
            end = max(end, high)
    packed.extend((start, end, 0))
    return Regions(packed)


class Areas:
    """Where to look in a process, packed once for many looks."""

    def __init__(self, areas: Sequence[Area]) -> None:
        self.count = len(areas)
        self._packed = array("Q", [value for area in areas for value in area])
        self.address = self._packed.buffer_info()[0]


def present(pagemap: int, areas: Areas) -> Regions:
    """The pages of a process's own (/proc/PID/pagemap), and its guard regions."""
    return _scan(_c.bulk_present, pagemap, areas, guards())


def written(pagemap: int, areas: Areas) -> Regions:
    """The pages written since the last call, where writes are watched (userfaultfd(2))."""
    return _scan(_c.bulk_written, pagemap, areas)


def _scan(
    function: ctypes._NamedFuncPointer,
    pagemap: int,
    areas: Areas,
    *more: int,
    begin: tuple[int, int] = (0, 0),
) -> Regions:
    cursor = (ctypes.c_uint64 * 2)(*begin)
    found = array("Q")
    buffer = ctypes.create_string_buffer(_ROOM * 24)
    arguments = (ctypes.c_long(n) for n in more)
    extra = tuple(arguments)
    while cursor[0] < areas.count:
        got = function(
            pagemap,
            cursor,
            ctypes.c_void_p(areas.address),
            ctypes.c_long(areas.count),
            *extra,
            buffer,
            ctypes.c_long(_ROOM),
        )
        _check(got)
        found.frombytes(memoryview(buffer)[: 24 * got])
    return Regions(found)


def unshared(mine: int, theirs: int, regions: Regions, shifts: Sequence[int]) -> Regions:
    """What of `regions` is not, `shifts` further on, the same physical memory in another process.

    Both are descriptors of /proc/PID/pagemap. Where frames are not told, nothing is the same.
    """
    packed_shifts = array("q", shifts)
    room = max(_ROOM, len(regions))
    while True:
        buffer = ctypes.create_string_buffer(room * 24)
        got = _c.bulk_unshared(
            mine,
            theirs,
            ctypes.c_void_p(regions.packed.buffer_info()[0]),
            ctypes.c_void_p(packed_shifts.buffer_info()[0]),
            ctypes.c_long(len(regions)),
            buffer,
            ctypes.c_long(room),
        )
        if got == -errno.E2BIG:
            room *= 4
            continue
        _check(got)
        found = array("Q")
        found.frombytes(memoryview(buffer)[: 24 * got])
        return Regions(found)


def common(one: Regions, other: Regions) -> Regions:
    """What is in both."""
    room = len(one) + len(other)
    if not room:
        return one
    buffer = ctypes.create_string_buffer(room * 24)
    got = _c.bulk_common(
        ctypes.c_void_p(one.packed.buffer_info()[0]),
        ctypes.c_long(len(one)),
        ctypes.c_void_p(other.packed.buffer_info()[0]),
        ctypes.c_long(len(other)),
        buffer,
        ctypes.c_long(room),
    )
    _check(got)
    return _regions(memoryview(buffer), 0, got)


Row = tuple[int, int, int]  # start, end, shift to where it is kept


def translate(rows: Sequence[Row], regions: Regions) -> tuple[bytes, bytes, int, int]:
    """(remote iovecs, local iovecs, their number, bytes) to read regions to where they are kept.

    Regions outside of all rows are left out. Rows and regions are sorted.
    """
    if not rows or not len(regions):
        return b"", b"", 0, 0
    packed = array("q", [value for row in rows for value in row])
    room = len(regions) + len(rows) + regions.size // _LONGEST + 1
    remote = ctypes.create_string_buffer(16 * room)
    local = ctypes.create_string_buffer(16 * room)
    got = _c.bulk_translate(
        ctypes.c_void_p(packed.buffer_info()[0]),
        ctypes.c_long(len(rows)),
        ctypes.c_void_p(regions.packed.buffer_info()[0]),
        ctypes.c_long(len(regions)),
        ctypes.c_long(_LONGEST),
        remote,
        local,
        ctypes.c_long(room),
    )
    _check(got)
    first = remote.raw[: 16 * got]
    sizes = array("Q")
    sizes.frombytes(first)
    return first, local.raw[: 16 * got], got, sum(sizes[1::2])


def _check(result: int) -> None:
    if result < 0:
        raise OSError(-result, os.strerror(-result))


ANSWER_SIZE = 16
_MEMORY = struct.Struct("=ii9Q4Q4q2Q")  # struct memory in ask.c


# its writes are watched; look at its map and its pages; look at names and what was written
WATCHED, MAP, WRITES = 1, 2, 4


@dataclass(frozen=True)
class Wanted:
    """What to look at in one process: see struct memory in ask.c."""

    pid: int
    root: int  # a descriptor of the directory that the names are looked up in
    gap: int  # where we may be injecting, which is not part of its map
    wants: int  # WATCHED, MAP, WRITES
    names: int  # address of a list of questions
    name_count: int
    areas: Areas
    watched: Areas


@dataclass(frozen=True)
class Seen:
    """What there was; None where it was not wanted or has to be asked again."""

    text: bytes | None
    names: tuple[bytes, bytes] | None  # the answers' bytes, and the answers
    present: Regions | None
    written: Regions
    error: int  # errno of asking for writes, which has forgotten nothing then; or 0


class Memories:
    """One look at the memory of several processes, packed for `bulk_memories()` in ask.c."""

    def __init__(self, wanted: Sequence[Wanted]) -> None:
        self._wanted = wanted
        self._lists = [
            ctypes.create_string_buffer(max(1, ANSWER_SIZE * w.name_count)) for w in wanted
        ]
        packed = b"".join(
            _MEMORY.pack(
                w.pid,
                w.root,
                w.gap | w.wants,
                w.names,
                w.name_count,
                ctypes.addressof(answers),
                w.areas.address,
                w.watched.address,
                w.areas.count,
                w.watched.count,
                guards(),
                *(0,) * 10,
            )
            for w, answers in zip(wanted, self._lists, strict=True)
        )
        self._jobs = ctypes.create_string_buffer(packed, len(packed))
        self._room = _rooms.take()

    @property
    def arguments(self) -> tuple[int, int, int, int]:
        """What `bulk_memories` takes."""
        room = self._room
        return ctypes.addressof(self._jobs), len(self._wanted), ctypes.addressof(room), len(room)

    def seen(self) -> list[Seen]:
        """When it has been done: what there was. To be called once."""
        out = memoryview(self._room)
        found = []
        full = False
        answers = _MEMORY.iter_unpack(self._jobs.raw)
        for one, names_packed, w in zip(answers, self._lists, self._wanted, strict=True):
            text_at, names_at, present_at, written_at = one[11:15]
            text, names, present_count, written_count, area, at = one[15:]
            full = full or -errno.E2BIG in (text, names, present_count)
            changed = _regions(out, written_at, max(0, written_count))
            if w.wants & WRITES and written_count >= 0 and area < w.watched.count:
                full = True
                pagemap = os.open(f"/proc/{w.pid}/pagemap", os.O_RDONLY | os.O_CLOEXEC)
                try:
                    more = _scan(_c.bulk_written, pagemap, w.watched, begin=(area, at))
                finally:
                    os.close(pagemap)
                changed = union([changed, more])
            said = None
            if names >= 0:
                said = out[names_at : names_at + names].tobytes(), names_packed.raw
            found.append(
                Seen(
                    None if text < 0 else out[text_at : text_at + text].tobytes(),
                    said,
                    None if present_count < 0 else _regions(out, present_at, present_count),
                    changed,
                    max(0, -written_count) if w.wants & WRITES else 0,
                )
            )
        out.release()
        _rooms.give(self._room, grow=full)
        return found


def _regions(out: memoryview[int], at: int, count: int) -> Regions:
    packed = array("Q")
    packed.frombytes(out[at : at + 24 * count])
    return Regions(packed)


class _Rooms:
    """Buffers for answers, used again and again; they grow to what was needed once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._size = 1 << 20
        self._free: list[ctypes.Array[ctypes.c_char]] = []

    def take(self) -> ctypes.Array[ctypes.c_char]:
        with self._lock:
            if self._free:
                return self._free.pop()
        return ctypes.create_string_buffer(self._size)

    def give(self, room: ctypes.Array[ctypes.c_char], *, grow: bool) -> None:
        with self._lock:
            if grow:
                self._size = max(self._size, 4 * len(room))
                self._free.clear()
            elif len(room) == self._size:
                self._free.append(room)


_rooms = _Rooms()
