"""Regular files, directories and the harmless devices, open in a process.

A file is opened again by name in the rebuilt root, which shows the snapshot taken at the same
instant, so name, flags and position are all there is to keep.  Whether the name still means the
open file is checked at capture, by device and inode; a file without any name left becomes a
`Ghost`: its bytes are saved and put back under its old name just long enough to be opened.

A descriptor opened before overlayfs copied its file up reads the copy afterwards (ovl_real_file in
fs/overlayfs/file.c), so names are enough.  A *mapping* made before does not: see memory.py.

What has no honest way back yet is refused by name: locks, and files that were renamed over.
"""

from __future__ import annotations

import os
import stat

from ...linux import numbers as nr
from ...linux.openat2 import openat2
from ..model import Description, Ghost
from ..records import Program, Sequence

_O_CLOEXEC = 0o2000000
_O_PATH = 0o10000000
_O_CREAT, _O_EXCL, _O_TRUNC, _O_NOCTTY, _O_ASYNC = 0o100, 0o200, 0o1000, 0o400, 0o20000
_O_TMPFILE_BIT = 0o20000000
_O_NOFOLLOW = 0o400000
_GHOST_LIMIT = 256 << 20
DEVICES = {(1, 3), (1, 5), (1, 7), (1, 8), (1, 9)}
PROC_ROOTS = ("/proc/", "/sys/")
_DELETED = " (deleted)"


class Refused(Exception):
    """The sentence's second half: what the descriptor is."""


def open_flags(flags: int) -> int:
    """Flags to open again with: those that create or that belong to the descriptor go."""
    return flags & ~(_O_CREAT | _O_EXCL | _O_TRUNC | _O_NOCTTY | _O_CLOEXEC)


def capture(
    *,
    root: int,
    fd_path: str,
    target: str,
    flags: int,
    position: int,
    owner: int,
) -> Description:
    """Describe what `fd_path` (/proc/PID/fd/N) points to; `target` is its link text."""
    info = os.stat(fd_path)
    if flags & _O_ASYNC:
        raise Refused("a file that sends SIGIO")
    if flags & _O_PATH:
        check_name(root, target, info, follow=False)
        return Description("path", flags & ~_O_CLOEXEC, 0, target)
    if stat.S_ISCHR(info.st_mode):
        device = (os.major(info.st_rdev), os.minor(info.st_rdev))
        if device not in DEVICES:
            raise Refused(f"the device {target} ({device[0]}:{device[1]})")
        check_name(root, target, info)
        return Description("device", open_flags(flags), position, target)
    if stat.S_ISDIR(info.st_mode):
        if target.endswith(_DELETED) and info.st_nlink == 0:
            raise Refused(f"a deleted directory, {target}")
        check_name(root, target, info)
        return Description("directory", open_flags(flags), position, target)
    if not stat.S_ISREG(info.st_mode):
        raise Refused(f"of a kind that cannot be captured, {target}")
    if target.startswith(PROC_ROOTS):
        raise Refused(f"a kernel file, {target}")
    if info.st_nlink == 0:
        return Description(
            "file",
            open_flags(flags) & ~_O_TMPFILE_BIT,
            position,
            target.removesuffix(_DELETED),
            _ghost(root, fd_path, target, info, owner),
        )
    check_name(root, target, info)
    return Description("file", open_flags(flags), position, target)


def check_name(root: int, target: str, info: os.stat_result, *, follow: bool = True) -> None:
    """The name must still lead to the same inode inside `root`, or there is no way back."""
    flags = _O_PATH | (0 if follow else _O_NOFOLLOW)
    try:
        fd = openat2(root, target, flags)
    except OSError as error:
        raise Refused(f"{target}, which can no longer be opened: {error.strerror}") from None
    try:
        now = os.fstat(fd)
    finally:
        os.close(fd)
    if (now.st_dev, now.st_ino) != (info.st_dev, info.st_ino):
        raise Refused(f"an earlier {target}, which has been replaced since")


def _ghost(root: int, fd_path: str, target: str, info: os.stat_result, owner: int) -> Ghost:
    if info.st_size > _GHOST_LIMIT:
        raise Refused(f"a deleted file of {info.st_size >> 20} MiB, {target}")
    fd = os.open(fd_path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        parts = []
        position = 0
        while part := os.pread(fd, 1 << 20, position):
            parts.append(part)
            position += len(part)
    finally:
        os.close(fd)
    return Ghost(
        b"".join(parts),
        stat.S_IMODE(info.st_mode),
        info.st_uid - owner,
        info.st_gid - owner,
        target.removesuffix(_DELETED) if _is_free(root, target.removesuffix(_DELETED)) else "",
    )


def _is_free(root: int, path: str) -> bool:
    """Nothing has that name, and its directory still exists."""
    try:
        os.close(openat2(root, os.path.dirname(path), _O_PATH | os.O_DIRECTORY))
    except OSError:
        return False
    try:
        os.close(openat2(root, path, _O_PATH | _O_NOFOLLOW))
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return False


def restore(program: Program, do: Sequence, number: int, description: Description) -> None:
    """Open in PID 1, as descriptor `number` that every process will inherit."""
    opened = program.variable()
    path = program.text(os.fsencode(description.path))
    if description.ghost is not None:
        _restore_ghost(program, do, number, description, description.ghost)
        return
    do.call(nr.OPENAT, -100, path, description.flags, save=opened, what=f"open {description.path}")
    if description.position and description.kind in ("file", "directory"):
        do.call(nr.LSEEK, opened, description.position, 0, what="lseek")
    do.call(nr.DUP3, opened, number, _O_CLOEXEC)
    do.call(nr.CLOSE, opened)


def restore_again(
    program: Program, do: Sequence, number: int, original: int, description: Description
) -> None:
    """Another description of a nameless file, through the link of the first."""
    opened = program.variable()
    path = program.text(f"/proc/self/fd/{original}")
    flags = description.flags & ~_O_TMPFILE_BIT
    do.call(nr.OPENAT, -100, path, flags, save=opened, what="open a deleted file again")
    if description.position:
        do.call(nr.LSEEK, opened, description.position, 0)
    do.call(nr.DUP3, opened, number, _O_CLOEXEC)
    do.call(nr.CLOSE, opened)


_GHOST_PREFIX = "/.deltabox-ghost-"


def _restore_ghost(
    program: Program, do: Sequence, number: int, description: Description, ghost: Ghost
) -> None:
    """Write the bytes to a file of the old name, open it as it was open, take its name away.

    Where another file has the name by now, one of ours is used, and the descriptor's link differs.
    """
    name = program.text(os.fsencode(ghost.name or f"{_GHOST_PREFIX}{number}"))
    made, opened = program.variable(), program.variable()
    do.call(nr.OPENAT, -100, name, 2 | _O_CREAT | _O_EXCL, 0o600, save=made, what="make ghost")
    position = 0
    while position < len(ghost.content):
        part = ghost.content[position : position + (1 << 20)]
        do.call(nr.WRITE, made, program.data(part), len(part))
        position += len(part)
    do.call(93, made, ghost.uid, ghost.gid)  # fchown
    do.call(91, made, ghost.mode)  # fchmod
    do.call(nr.OPENAT, -100, name, description.flags, save=opened, what="open ghost")
    if description.position:
        do.call(nr.LSEEK, opened, description.position, 0)
    do.call(nr.DUP3, opened, number, _O_CLOEXEC)
    do.call(nr.CLOSE, opened)
    do.call(nr.CLOSE, made)
    do.call(nr.UNLINK, name)
