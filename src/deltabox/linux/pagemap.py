"""Which pages of a process hold private data: /proc/PID/pagemap.

PAGEMAP_SCAN (Linux 6.7, Documentation/admin-guide/mm/pagemap.rst) answers in ranges and inside the
kernel; where it is missing the 8-byte entries are read and folded here, which is slower by a
factor of about a hundred on large processes but gives the same answer.
"""

from __future__ import annotations

import array
import ctypes
import errno
import fcntl
import mmap
import os
import struct
from collections.abc import Iterable
from functools import lru_cache

PAGE = 4096
PAGEMAP_SCAN = 0xC0606610

PAGE_IS_WPALLOWED = 1 << 0
PAGE_IS_WRITTEN = 1 << 1
PAGE_IS_FILE = 1 << 2
PAGE_IS_PRESENT = 1 << 3
PAGE_IS_SWAPPED = 1 << 4
PAGE_IS_PFNZERO = 1 << 5
PAGE_IS_GUARD = 1 << 8

_ARGUMENT = struct.Struct("12Q")
_REGIONS = 4096
_REGION = struct.Struct("3Q")


Ranges = list[tuple[int, int]]
_EXCLUSIVE = bytes((byte & 0xA1) == 0x81 for byte in range(256))


@lru_cache(maxsize=1)
def guards() -> int:
    """PAGE_IS_GUARD where the kernel has that category (Linux 6.15), else 0."""
    with mmap.mmap(-1, PAGE) as page, open("/proc/self/pagemap", "rb") as file:
        start = ctypes.addressof(ctypes.c_char.from_buffer(page))
        numbers = (_ARGUMENT.size, 0, start, start + PAGE, 0, 0, 0, 0, 0, 0, PAGE_IS_GUARD, 0)
        try:
            fcntl.ioctl(file, PAGEMAP_SCAN, bytearray(_ARGUMENT.pack(*numbers)))
        except OSError:
            return 0
    return PAGE_IS_GUARD


def private_pages(fd: int, start: int, end: int) -> tuple[Ranges, Ranges]:
    """Address ranges in [start, end) with anonymous pages of the process's own; guard regions.

    `fd` is an open /proc/PID/pagemap. Pages of files and the shared zero page are left out.
    """
    ranges: Ranges = []
    guarded: Ranges = []
    guard = guards()
    vector = ctypes.create_string_buffer(_REGIONS * _REGION.size)
    position = start
    while position < end:
        argument = bytearray(
            _ARGUMENT.pack(
                _ARGUMENT.size,
                0,
                position,
                end,
                0,
                ctypes.addressof(vector),
                _REGIONS,
                0,
                PAGE_IS_FILE | PAGE_IS_PFNZERO,  # category_inverted
                PAGE_IS_FILE | PAGE_IS_PFNZERO,  # category_mask
                PAGE_IS_PRESENT | PAGE_IS_SWAPPED | guard,  # category_anyof_mask
                PAGE_IS_PRESENT | PAGE_IS_SWAPPED | guard,  # return_mask
            )
        )
        try:
            got = fcntl.ioctl(fd, PAGEMAP_SCAN, argument)
        except OSError as error:
            if error.errno in (errno.ENOTTY, errno.EINVAL):
                return _fold(fd, start, end)
            raise
        for low, high, found in _REGION.iter_unpack(vector.raw[: got * _REGION.size]):
            _extend(guarded if found & PAGE_IS_GUARD else ranges, low, high)
        position = _ARGUMENT.unpack(argument)[4]
    return ranges, guarded


def exclusive_bytes(fd: int, ranges: Iterable[tuple[int, int]]) -> int:
    """Bytes of private pages in (start, size) ranges that no other process maps.

    `fd` is an open /proc/PID/pagemap. Of an entry only the highest byte is looked at: bit 63
    present, 61 file page or shared, 56 mapped exclusively. Swapped pages do not count.
    """
    count = 0
    for start, size in ranges:
        entries = os.pread(fd, size // PAGE * 8, start // PAGE * 8)
        count += entries[7::8].translate(_EXCLUSIVE).count(1)
    return count * PAGE


def _extend(ranges: Ranges, low: int, high: int) -> None:
    if ranges and ranges[-1][1] == low:
        ranges[-1] = (ranges[-1][0], high)
    else:
        ranges.append((low, high))


def _fold(fd: int, start: int, end: int) -> tuple[Ranges, Ranges]:
    """The same from plain entries.

    Bit 63 present, 62 swapped, 61 file page or shared, 58 guard region.
    """
    ranges: Ranges = []
    guarded: Ranges = []
    chunk = 1 << 16
    for first in range(start, end, chunk * PAGE):
        count = min(chunk, (end - first) // PAGE)
        entries = array.array("Q", os.pread(fd, count * 8, first // PAGE * 8))
        for index, entry in enumerate(entries):
            low = first + index * PAGE
            if entry >> 58 & 1:
                _extend(guarded, low, low + PAGE)
            elif entry >> 62 and not entry >> 61 & 1:
                _extend(ranges, low, low + PAGE)
    return ranges, guarded
