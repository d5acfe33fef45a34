"""userfaultfd(2) for one purpose: to know which pages a process has written.

With UFFD_FEATURE_WP_ASYNC (Linux 6.7, Documentation/admin-guide/mm/userfaultfd.rst) the kernel
itself resolves write faults on protected pages, by noting that the page was written; nobody has to
answer anything, and PAGEMAP_SCAN tells which they were.  The first write to a page after a look
costs the program one more fault, some 0.9 us.  UFFD_FEATURE_WP_UNPOPULATED is needed for anonymous
memory (pagemap_scan_test_walk() in fs/proc/task_mmu.c skips what lacks it).

The descriptor belongs to the address space of who made it, and watching lasts as long as somebody
holds it.  Constants: linux/userfaultfd.h.
"""

from __future__ import annotations

import fcntl
import os
import struct
from functools import lru_cache

from ._libc import syscall

USERFAULTFD = 323
FLAGS = os.O_CLOEXEC | 1  # UFFD_USER_MODE_ONLY: needs no privilege
API_REQUEST, REGISTER_REQUEST = 0xC018AA3F, 0xC020AA00
_API = 0xAA
_WP_UNPOPULATED, _WP_ASYNC = 1 << 13, 1 << 15
_MODE_WP = 2

API = struct.pack("<QQQ", _API, _WP_UNPOPULATED | _WP_ASYNC, 0)
"""struct uffdio_api"""


def register(start: int, end: int) -> bytes:
    """struct uffdio_register: watch the writes to these addresses, all of them mapped."""
    return struct.pack("<4Q", start, end - start, _MODE_WP, 0)


def probe() -> None:
    """Ask the kernel whether it can; OSError when not."""
    fd = syscall(USERFAULTFD, FLAGS)
    try:
        fcntl.ioctl(fd, API_REQUEST, bytearray(API))
    finally:
        os.close(fd)


@lru_cache(maxsize=1)
def supported() -> bool:
    """Whether writes can be watched on this host."""
    try:
        probe()
    except OSError:
        return False
    return True
