"""What /proc/PID/pagemap tells of pages: the categories of PAGEMAP_SCAN, and its entries.

PAGEMAP_SCAN (Linux 6.7, Documentation/admin-guide/mm/pagemap.rst) answers in ranges and inside the
kernel; bulk.c asks it.
"""

from __future__ import annotations

import ctypes
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
