"""getsockopt(2) where the answer's length is a number of its own, which Python hides."""

from __future__ import annotations

import ctypes

from ._libc import syscall

_GETSOCKOPT = 55


def getsockopt(
    fd: int, level: int, name: int, length: int, room: int, asked: bytes = b""
) -> tuple[int, bytes]:
    """(the length the kernel returns, `room` bytes of the answer); `asked` is there before."""
    value = ctypes.create_string_buffer(asked, max(room, 1))
    size = ctypes.create_string_buffer(length.to_bytes(4, "little"), 4)
    syscall(_GETSOCKOPT, fd, level, name, value, size)
    return int.from_bytes(size.raw, "little"), value.raw[:room]
