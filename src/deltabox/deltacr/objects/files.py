"""Regular files, directories and the harmless devices, open in a process.

A file is opened again by name in the rebuilt root, which shows the snapshot taken at the same
instant, so name, flags and position are all there is to keep.  Whether the name still means the
open file is checked at capture, by device and inode; what has lost its name is a ghost: ghosts.py.

A descriptor opened before overlayfs copied its file up reads the copy afterwards (ovl_real_file in
fs/overlayfs/file.c), so names are enough.  A *mapping* made before does not: see memory.py.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence as Items

from ...linux import numbers as nr
from ...linux.openat2 import openat2
from ..model import Description
from ..rebuild import Entry, Kind, Rebuild
from ..subject import Refused, Subject
from . import ghosts, kernel_files

_O_PATH = 0o10000000
_O_NOFOLLOW = 0o400000
DEVICES = {(1, 3), (1, 5), (1, 7), (1, 8), (1, 9)}
PROC_ROOTS = ("/proc/", "/sys/")


def capture(subject: Subject, info: os.stat_result) -> Description:
    """Describe an open file; `info` is its stat."""
    target, flags = subject.target, subject.flags
    if subject.sends_signals:
        raise Refused("a file that sends SIGIO")
    if target.startswith(PROC_ROOTS) or target in ("/proc", "/sys"):
        # what is below /proc/sys depends on the namespaces of who looks, and is never replaced
        if not target.startswith("/proc/sys/") or target.endswith(ghosts.DELETED):
            check_name(subject.table.root, target, info, follow=not flags & _O_PATH)
        return kernel_files.capture(subject)
    if flags & _O_PATH:
        return _named("path", subject, info)
    if stat.S_ISFIFO(info.st_mode):
        return _named("fifo", subject, info)
    position = subject.position
    if stat.S_ISCHR(info.st_mode):
        device = (os.major(info.st_rdev), os.minor(info.st_rdev))
        if device not in DEVICES:
            raise Refused(f"the device {target} ({device[0]}:{device[1]})")
        return _named("device", subject, info, position)
    if stat.S_ISDIR(info.st_mode):
        return _named("directory", subject, info, position)
    if not stat.S_ISREG(info.st_mode):
        raise Refused(f"of a kind that cannot be captured, {target}")
    return _named("file", subject, info, position)


def _named(kind: str, subject: Subject, info: os.stat_result, position: int = 0) -> Description:
    """To be opened by name, or as the ghost of what had this name."""
    target, flags = subject.target, subject.flags
    check_own(target, subject.table.shared_directories)
    try:
        check_name(subject.table.root, target, info, follow=kind != "path")
    except Refused:
        if not target.endswith(ghosts.DELETED):
            raise
        ghost = subject.table.ghosts.enter(
            subject.path, target, unnamed=flags & ghosts.O_TMPFILE == ghosts.O_TMPFILE
        )
        return Description(kind, flags, position, target, ghost)
    if flags & ghosts.O_TMPFILE == ghosts.O_TMPFILE:
        flags &= ~ghosts.O_TMPFILE
    return Description(kind, flags, position, target)


def check_own(path: str, shared: Items[str]) -> None:
    """What is in a shared directory stays as it is when everything else goes back."""
    for directory in shared:
        if path == directory or path.startswith(f"{directory}/"):
            raise Refused(
                f"{path} in the shared directory {directory}, which is no part of the state"
            )


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


def restore(rebuild: Rebuild, entries: Items[Entry]) -> None:
    for number, description in entries:
        if description.ghost < 0:
            _open(rebuild, description.path, description.flags, description.position)
            rebuild.place(number)


KIND = Kind(("file", "directory", "device", "path"), restore)


def _open(rebuild: Rebuild, path: str, flags: int, position: int) -> None:
    name = rebuild.program.text(os.fsencode(path))
    opened = rebuild.opened
    rebuild.init.call(nr.OPENAT, -100, name, flags, save=opened, what=f"open {path}")
    if position and not flags & _O_PATH:
        rebuild.init.call(nr.LSEEK, opened, position, 0, what=f"lseek {path}")
