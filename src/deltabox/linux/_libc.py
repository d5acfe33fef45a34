"""One door to the C library: a raw `syscall()` that raises `OSError`.

Every module of this package calls the kernel by number, because glibc of the supported
hosts wraps only some of the calls we need (clone3, mount_setattr, pidfd_getfd, ...).
`use_errno` keeps errno per thread, so calls from many threads do not mix their errors.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable

libc = ctypes.CDLL(None, use_errno=True)
_syscall = libc.syscall
_syscall.restype = ctypes.c_long


def syscall(number: int, *args: int | bytes | ctypes.Array[ctypes.c_char] | None) -> int:
    """Call the kernel; the result, or `OSError` with the kernel's errno.

    Integers are passed as 64-bit values, bytes and ctypes buffers as pointers, `None` as NULL.
    """
    converted = [ctypes.c_long(a) if isinstance(a, int) else a for a in args]
    result: int = _syscall(ctypes.c_long(number), *converted)
    if result == -1:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def batch(calls: Callable[[int], list[tuple[int, ...]]], size: int) -> tuple[list[int], bytes]:
    """Make calls that share a buffer, whose address `calls` is given; results as the kernel's.

    (A result below zero is a negative errno.)
    """
    buffer = ctypes.create_string_buffer(size)
    results = []
    for number, *arguments in calls(ctypes.addressof(buffer)):
        try:
            results.append(syscall(number, *arguments))
        except OSError as error:
            results.append(-(error.errno or 0))
    return results, buffer.raw
