"""File handles (open_by_handle_at(2)), and the one that overlayfs gives of the file behind its own.

With AT_HANDLE_FID a handle may identify a file without being good for opening it again.  The one
of overlayfs wraps the handle that the *real* file has in its own file system (struct ovl_fb in
fs/overlayfs/overlayfs.h), and says whether that is the upper one.  So a file that nothing but an
open descriptor leads to can be reached below the overlay, and be cloned there.
"""

from __future__ import annotations

import ctypes
import os
import struct
from dataclasses import dataclass
from typing import Final

from deltabox.linux._libc import syscall

_NAME_TO_HANDLE_AT: Final = 303
_OPEN_BY_HANDLE_AT: Final = 304
_AT_EMPTY_PATH: Final = 0x1000  # linux/fcntl.h
_AT_HANDLE_FID: Final = 0x200
_MAX_HANDLE: Final = 128  # MAX_HANDLE_SZ, linux/exportfs.h
_OVL_FILEID_V1: Final = 0xF8
_OVL_MAGIC: Final = 0xFB
_OVL_PATH_UPPER: Final = 1 << 2
_OVL_START: Final = 3  # struct ovl_fh: padding before the header
_OVL_HEADER: Final = struct.Struct("<BBBBB16s")  # version, magic, length, flags, type, uuid


@dataclass(frozen=True, slots=True)
class Handle:
    """What identifies a file in its file system; `kind` is that file system's own."""

    kind: int
    identifier: bytes


def of_file(fd: int) -> Handle:
    """The handle of an open file (O_PATH will do), perhaps not one to open it by."""
    block = ctypes.create_string_buffer(struct.pack("=Ii", _MAX_HANDLE, 0), 8 + _MAX_HANDLE)
    mount = ctypes.create_string_buffer(4)
    syscall(_NAME_TO_HANDLE_AT, fd, b"", block, mount, _AT_EMPTY_PATH | _AT_HANDLE_FID)
    size, kind = struct.unpack_from("=Ii", block)
    return Handle(kind, block.raw[8 : 8 + size])


def within_overlay(handle: Handle) -> tuple[Handle, bool] | None:
    """The real file's handle that one of overlayfs wraps, and whether it is of the upper layer."""
    if handle.kind != _OVL_FILEID_V1 or len(handle.identifier) < _OVL_START + _OVL_HEADER.size:
        return None
    version, magic, length, flags, kind, _ = _OVL_HEADER.unpack_from(handle.identifier, _OVL_START)
    if version or magic != _OVL_MAGIC:
        return None
    real = handle.identifier[_OVL_START + _OVL_HEADER.size : _OVL_START + int(length)]
    return Handle(kind, real), bool(flags & _OVL_PATH_UPPER)


def upper_of(fd: int) -> Handle | None:
    """The handle, in the upper layer, of a file of an overlay; None when it is not one there."""
    try:
        found = within_overlay(of_file(fd))
    except OSError:
        return None  # a file system without handles, or a kernel that tells only real ones
    return found[0] if found is not None and found[1] else None


def open_handle(mount: int, handle: Handle, flags: int) -> int:
    """Open a file by its handle; `mount` is any descriptor in its file system. Close-on-exec."""
    block = struct.pack("=Ii", len(handle.identifier), handle.kind) + handle.identifier
    return syscall(_OPEN_BY_HANDLE_AT, mount, block, flags | os.O_CLOEXEC)
