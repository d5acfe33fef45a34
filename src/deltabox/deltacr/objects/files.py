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
from collections.abc import Sequence as Items

from ...linux import numbers as nr
from ...linux.openat2 import openat2
from ..model import Description, Ghost
from ..rebuild import Entry, Kind, Rebuild
from ..subject import Refused, Subject

_O_PATH = 0o10000000
_O_CREAT, _O_EXCL = 0o100, 0o200
_O_TMPFILE_BIT = 0o20000000
_O_NOFOLLOW = 0o400000
_GHOST_LIMIT = 256 << 20
DEVICES = {(1, 3), (1, 5), (1, 7), (1, 8), (1, 9)}
PROC_ROOTS = ("/proc/", "/sys/")
_DELETED = " (deleted)"


def capture(subject: Subject, info: os.stat_result) -> Description:
    """Describe an open file; `info` is its stat."""
    root, target, flags = subject.table.root, subject.target, subject.flags
    if subject.sends_signals:
        raise Refused("a file that sends SIGIO")
    if flags & _O_PATH:
        check_name(root, target, info, follow=False)
        return Description("path", flags, 0, target)
    position = subject.position
    if stat.S_ISCHR(info.st_mode):
        device = (os.major(info.st_rdev), os.minor(info.st_rdev))
        if device not in DEVICES:
            raise Refused(f"the device {target} ({device[0]}:{device[1]})")
        check_name(root, target, info)
        return Description("device", flags, position, target)
    if stat.S_ISDIR(info.st_mode):
        if target.endswith(_DELETED) and info.st_nlink == 0:
            raise Refused(f"a deleted directory, {target}")
        check_name(root, target, info)
        return Description("directory", flags, position, target)
    if not stat.S_ISREG(info.st_mode):
        raise Refused(f"of a kind that cannot be captured, {target}")
    if target.startswith(PROC_ROOTS):
        raise Refused(f"a kernel file, {target}")
    if info.st_nlink == 0:
        ghost = _ghost(root, subject.path, target, info, subject.table.owner)
        name = target.removesuffix(_DELETED)
        return Description("file", flags & ~_O_TMPFILE_BIT, position, name, ghost)
    check_name(root, target, info)
    return Description("file", flags, position, target)


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


def restore(rebuild: Rebuild, entries: Items[Entry]) -> None:
    for number, description in entries:
        if description.ghost is not None:
            _restore_ghost(rebuild, number, description, description.ghost)
        elif description.ghost_of >= 0:
            # another description of a nameless file, through the link of the first
            path = f"/proc/self/fd/{rebuild.number(description.ghost_of)}"
            _open(rebuild, path, description.flags & ~_O_TMPFILE_BIT, description.position)
            rebuild.place(number)
        else:
            _open(rebuild, description.path, description.flags, description.position)
            rebuild.place(number)


KIND = Kind(("file", "directory", "device", "path"), restore)


def _open(rebuild: Rebuild, path: str, flags: int, position: int) -> None:
    name = rebuild.program.text(os.fsencode(path))
    opened = rebuild.opened
    rebuild.init.call(nr.OPENAT, -100, name, flags, save=opened, what=f"open {path}")
    if position and not flags & _O_PATH:
        rebuild.init.call(nr.LSEEK, opened, position, 0, what=f"lseek {path}")


_GHOST_PREFIX = "/.deltabox-ghost-"


def _restore_ghost(rebuild: Rebuild, number: int, description: Description, ghost: Ghost) -> None:
    """Write the bytes to a file of the old name, open it as it was open, take its name away.

    Where another file has the name by now, one of ours is used, and the descriptor's link differs.
    """
    program, do = rebuild.program, rebuild.init
    path = ghost.name or f"{_GHOST_PREFIX}{number}"
    name = program.text(os.fsencode(path))
    made = program.variable()
    do.call(nr.OPENAT, -100, name, 2 | _O_CREAT | _O_EXCL, 0o600, save=made, what="make ghost")
    position = 0
    while position < len(ghost.content):
        part = ghost.content[position : position + (1 << 20)]
        do.call(nr.WRITE, made, program.data(part), len(part))
        position += len(part)
    do.call(93, made, ghost.uid, ghost.gid)  # fchown
    do.call(91, made, ghost.mode)  # fchmod
    _open(rebuild, path, description.flags, description.position)
    rebuild.place(number)
    do.call(nr.CLOSE, made)
    do.call(nr.UNLINK, name)
