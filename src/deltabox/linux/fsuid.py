"""Act on files as another user, in one thread, without giving up a capability.

setfsuid(2) is the right tool: it changes neither who may signal us nor who we are to other
threads, and glibc's `setuid` family would change every thread at once. It has two traps. The
return value is no verdict, so the change is read back. And leaving fsuid 0 silently drops the
file capabilities from the effective set, so they are set again with capset(2).
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from deltabox.linux._libc import syscall

# arch/x86/entry/syscalls/syscall_64.tbl
_CAPGET: Final = 125
_CAPSET: Final = 126
_SETFSUID: Final = 122
_SETFSGID: Final = 123

_CAPABILITY_VERSION_3: Final = 0x20080522  # linux/capability.h


def _capabilities() -> ctypes.Array[ctypes.c_char]:
    header = ctypes.create_string_buffer(_CAPABILITY_VERSION_3.to_bytes(4, "little") + bytes(4), 8)
    data = ctypes.create_string_buffer(24)
    syscall(_CAPGET, header, data)
    return data


def _set_capabilities(data: ctypes.Array[ctypes.c_char]) -> None:
    header = ctypes.create_string_buffer(_CAPABILITY_VERSION_3.to_bytes(4, "little") + bytes(4), 8)
    syscall(_CAPSET, header, data)


_NOBODY = -1 & 0xFFFFFFFF  # no valid id: the call changes nothing and tells the present one


def _set(number: int, value: int) -> None:
    syscall(number, value)
    if syscall(number, _NOBODY) != value:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))


@contextmanager
def file_owner(uid: int, gid: int | None = None) -> Iterator[None]:
    """Within the block this thread makes files, and mounts, as uid:gid."""
    capabilities = _capabilities()
    old_gid, old_uid = syscall(_SETFSGID, _NOBODY), syscall(_SETFSUID, _NOBODY)

    def put_back() -> None:
        _set(_SETFSUID, old_uid)
        _set(_SETFSGID, old_gid)
        _set_capabilities(capabilities)

    try:
        _set(_SETFSGID, uid if gid is None else gid)
        _set(_SETFSUID, uid)
        _set_capabilities(capabilities)
        yield
    finally:
        try:
            put_back()
        except OSError:
            put_back()  # the thread goes on to other work, which must not be done as this user
