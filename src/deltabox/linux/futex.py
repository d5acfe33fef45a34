"""get_robust_list(2): the list of robust futexes of another thread."""

from __future__ import annotations

import ctypes

from ._libc import syscall

_GET_ROBUST_LIST = 274


def get_robust_list(tid: int) -> tuple[int, int]:
    """(address of the head, its size); zeros when the thread has none."""
    both = ctypes.create_string_buffer(16)
    base = ctypes.addressof(both)
    syscall(_GET_ROBUST_LIST, tid, base, base + 8)
    raw = both.raw
    return int.from_bytes(raw[:8], "little"), int.from_bytes(raw[8:], "little")
