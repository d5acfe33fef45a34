"""The mount interface: the classic calls and the file-descriptor based ones of Linux 5.2+.

The engine builds a sandbox's root without ever attaching it anywhere on the host: every
step works on detached mounts held by file descriptors (`open_tree`, `fsmount`), and only the
sandbox's own first process attaches the result inside its own namespace. A crash at any
point therefore leaves nothing in anybody's mount table.

Numbers and structures are from include/uapi/linux/{mount,fs,sched,magic}.h; the manual pages
are open_tree(2), mount_setattr(2), fsopen(2), fsconfig(2), fsmount(2), move_mount(2).
"""

from __future__ import annotations

import ctypes
import os
import struct
from os import PathLike
from typing import Final

from deltabox.linux._libc import libc, syscall

StrPath = str | bytes | PathLike[str]

# asm-generic/unistd.h: calls added after 5.0 have one number on every architecture.
_OPEN_TREE: Final = 428
_MOVE_MOUNT: Final = 429
_FSOPEN: Final = 430
_FSCONFIG: Final = 431
_FSMOUNT: Final = 432
_MOUNT_SETATTR: Final = 442

AT_FDCWD: Final = -100
AT_EMPTY_PATH: Final = 0x1000
AT_RECURSIVE: Final = 0x8000

# linux/mount.h
MS_RDONLY: Final = 1
MS_NOSUID: Final = 2
MS_NODEV: Final = 4
MS_NOEXEC: Final = 8
MS_REMOUNT: Final = 32
MS_NOATIME: Final = 1024
MS_BIND: Final = 4096
MS_REC: Final = 16384
MS_PRIVATE: Final = 1 << 18
MS_SLAVE: Final = 1 << 19
MNT_DETACH: Final = 2
UMOUNT_NOFOLLOW: Final = 8

OPEN_TREE_CLONE: Final = 1
OPEN_TREE_CLOEXEC: Final = os.O_CLOEXEC
MOVE_MOUNT_F_EMPTY_PATH: Final = 0x00000004
MOVE_MOUNT_T_EMPTY_PATH: Final = 0x00000040
FSOPEN_CLOEXEC: Final = 1
FSMOUNT_CLOEXEC: Final = 1
FSCONFIG_SET_FLAG: Final = 0
FSCONFIG_SET_STRING: Final = 1
FSCONFIG_SET_FD: Final = 5
FSCONFIG_CMD_CREATE: Final = 6

MOUNT_ATTR_RDONLY: Final = 0x00000001
MOUNT_ATTR_NOSUID: Final = 0x00000002
MOUNT_ATTR_NODEV: Final = 0x00000004
MOUNT_ATTR_NOEXEC: Final = 0x00000008
MOUNT_ATTR_NOATIME: Final = 0x00000010
MOUNT_ATTR_IDMAP: Final = 0x00100000

CLONE_NEWNS: Final = 0x00020000  # linux/sched.h

# linux/magic.h: what fstatfs says a file system is
BTRFS_SUPER_MAGIC: Final = 0x9123683E
OVERLAYFS_SUPER_MAGIC: Final = 0x794C7630
TMPFS_MAGIC: Final = 0x01021994


def _fail(where: StrPath | None = None) -> OSError:
    code = ctypes.get_errno()
    if where is None:
        return OSError(code, os.strerror(code))
    return OSError(code, os.strerror(code), os.fsdecode(where))


def mount(
    source: StrPath, target: StrPath, fstype: str | None = None, flags: int = 0, data: str = ""
) -> None:
    """mount(2)."""
    if libc.mount(
        os.fsencode(source),
        os.fsencode(target),
        fstype.encode() if fstype else None,
        ctypes.c_ulong(flags),
        data.encode() if data else None,
    ):
        raise _fail(target)


def umount(target: StrPath, flags: int = 0) -> None:
    """umount2(2)."""
    if libc.umount2(os.fsencode(target), ctypes.c_int(flags)):
        raise _fail(target)


def unshare(flags: int) -> None:
    """unshare(2) of the calling thread."""
    if libc.unshare(ctypes.c_int(flags)):
        raise _fail()


def private_namespace() -> None:
    """Give this process its own mount namespace, into which mounts come but never leave.

    Every mount made afterwards disappears with the last process of the namespace. Must be
    called while the process has one thread: the others would stay behind.
    """
    unshare(CLONE_NEWNS)
    mount("none", "/", None, MS_REC | MS_SLAVE)


def open_tree(directory: int, path: StrPath, flags: int) -> int:
    """open_tree(2): a descriptor of a mount, detached and new with `OPEN_TREE_CLONE`."""
    return syscall(_OPEN_TREE, directory, os.fsencode(path), flags)


def move_mount(
    from_directory: int, from_path: StrPath, to_directory: int, to_path: StrPath, flags: int
) -> None:
    """move_mount(2): attach a detached mount."""
    syscall(
        _MOVE_MOUNT,
        from_directory,
        os.fsencode(from_path),
        to_directory,
        os.fsencode(to_path),
        flags,
    )


def mount_setattr(
    mount_fd: int, *, set_: int = 0, clear: int = 0, userns_fd: int = 0, flags: int = 0
) -> None:
    """mount_setattr(2) on the mount of a descriptor; `userns_fd` goes with MOUNT_ATTR_IDMAP."""
    attributes = struct.pack("=QQQQ", set_, clear, 0, userns_fd)
    syscall(_MOUNT_SETATTR, mount_fd, b"", AT_EMPTY_PATH | flags, attributes, len(attributes))


def fsopen(fstype: str) -> int:
    """fsopen(2): a configuration context for a new superblock."""
    return syscall(_FSOPEN, fstype.encode(), FSOPEN_CLOEXEC)


def fsconfig_string(context: int, key: str, value: str) -> None:
    """fsconfig(FSCONFIG_SET_STRING)."""
    syscall(_FSCONFIG, context, FSCONFIG_SET_STRING, key.encode(), value.encode(), 0)


def fsconfig_flag(context: int, key: str) -> None:
    """fsconfig(FSCONFIG_SET_FLAG)."""
    syscall(_FSCONFIG, context, FSCONFIG_SET_FLAG, key.encode(), None, 0)


def fsconfig_fd(context: int, key: str, fd: int) -> None:
    """fsconfig(FSCONFIG_SET_FD)."""
    syscall(_FSCONFIG, context, FSCONFIG_SET_FD, key.encode(), None, fd)


def fsconfig_create(context: int) -> None:
    """fsconfig(FSCONFIG_CMD_CREATE): make the superblock."""
    syscall(_FSCONFIG, context, FSCONFIG_CMD_CREATE, None, None, 0)


def fsmount(context: int, attributes: int = 0) -> int:
    """fsmount(2): a detached mount of the context's superblock."""
    return syscall(_FSMOUNT, context, FSMOUNT_CLOEXEC, attributes)


def messages(context: int) -> str:
    """What the kernel wrote to the context's log: the reason behind a bare EINVAL."""
    said: list[str] = []
    while True:
        try:
            said.append(os.read(context, 4096).decode(errors="replace").strip())
        except OSError:  # ENODATA: nothing more
            return "; ".join(said)


def filesystem_type(fd: int) -> int:
    """The magic number of the file system a descriptor is on (fstatfs(2)); O_PATH will do."""
    buffer = ctypes.create_string_buffer(256)
    if libc.fstatfs(ctypes.c_int(fd), buffer):
        raise _fail()
    (magic,) = struct.unpack_from("=q", buffer)
    return int(magic) & 0xFFFFFFFF


def syncfs(fd: int) -> None:
    """syncfs(2): write back the file system a descriptor is on."""
    if libc.syncfs(ctypes.c_int(fd)):
        raise _fail()
