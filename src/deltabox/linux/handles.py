"""open_by_handle_at(2): open a file by what identifies it within its file system."""

from __future__ import annotations

import ctypes
import os
import struct

from ._libc import syscall

_OPEN_BY_HANDLE_AT = 304


def open_by_handle_at(mount: int, kind: int, handle: bytes, flags: int = os.O_PATH) -> int:
    """`mount` is any descriptor on the file system. Raises OSError (ESTALE: no such file)."""
    packed = struct.pack("Ii", len(handle), kind) + handle
    buffer = ctypes.create_string_buffer(packed, len(packed))
    return syscall(_OPEN_BY_HANDLE_AT, mount, buffer, flags | os.O_CLOEXEC)
