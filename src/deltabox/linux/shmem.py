"""Anonymous shared memory as an open file (shmem_zero_setup() in the kernel's mm/shmem.c).

mmap(2) makes a file that nobody can open by name; its link in /proc/PID/map_files can be opened by
who may restore checkpoints (proc_pid_map_files(5)), and what maps that is told from the original
by nothing.
"""

from __future__ import annotations

import ctypes
import mmap
import os

_NORESERVE = 0x4000


def anonymous(size: int, *, reserve: bool) -> int:
    """A descriptor of new MAP_SHARED | MAP_ANONYMOUS memory of `size` bytes, whole pages.

    `reserve`: its room is reserved, as without MAP_NORESERVE.
    """
    flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | (0 if reserve else _NORESERVE)
    with mmap.mmap(-1, size, flags=flags) as mapped:
        view = (ctypes.c_char * size).from_buffer(mapped)
        start = ctypes.addressof(view)
        del view
        path = f"/proc/self/map_files/{start:x}-{start + size:x}"
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)
