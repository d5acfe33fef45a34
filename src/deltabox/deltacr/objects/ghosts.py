"""What has no name any more but is still in use: deleted and replaced files, and directories.

A name alone brings back what still has one.  A *ghost* is what a process has open, mapped, as its
executable or as its directory after its name has gone, or has passed to another file, as after
every package upgrade.  The keeper's attic holds a copy (deltafs/attic.py), which lies in the root
directory of every restore.  There PID 1 raises it: whatever has its old name by now is put aside,
directories that have gone are made, the copy is moved to where it was, everything that is open of
it is opened, and all that is undone.  So links and maps read as before, "(deleted)" and all, and
the kernel frees the file with its last user.

Other ways back, decided at capture: a file with another name left is linked to its old one instead
of being copied; a file of O_TMPFILE is made by O_TMPFILE again, so that it can still be given a
name by linkat(2); a deleted directory is made again, empty as it must have been.

Refused by name: nameless sockets, symbolic links and devices; copies that would take long
(`EFBIG` from the attic); a chroot into a deleted directory.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from ...linux import numbers as nr
from ...linux.openat2 import RESOLVE_IN_ROOT, RESOLVE_NO_SYMLINKS, openat2
from ..memory import open_mode
from ..model import Description, Ghost, Process
from ..rebuild import Rebuild
from ..records import Ref
from ..subject import Refused

DELETED = " (deleted)"
O_TMPFILE = 0o20200000
_O_TMPFILE_BIT = 0o20000000
_O_PATH, _O_NOFOLLOW, _O_CLOEXEC, _O_APPEND = 0o10000000, 0o400000, 0o2000000, 0o2000
_AT_FDCWD = -100
_FICLONE = 0x40049409
_FCHMOD, _FCHOWN, _CHMOD, _CHOWN = 91, 93, 90, 92
_RENAME, _RMDIR, _LINK, _UTIMENSAT, _MKNODAT = 82, 84, 86, 280, 259
_ASIDE = "/.deltabox-aside"
_UNNAMED = re.compile(r"#\d+")


class Attic(Protocol):
    """Where the file half keeps copies; see deltafs/attic.py."""

    def keep(self, file: int) -> str:
        """Put away what is open as `file`; the path of the copy in the root of every restore."""
        ...

    def names(self, file: int) -> list[str]:
        """The names that an open file of the sandbox's own still has."""
        ...


class Ghosts:
    """What the files of one frozen tree without a name have been found to be."""

    def __init__(self, root: int, owner: int, attic: Attic, born: float) -> None:
        self.found: list[Ghost] = []
        self._root = root
        self._owner = owner
        self._attic = attic
        self._born = born  # before which every inode change belongs to the base
        self._device = os.fstat(root).st_dev
        self._index: dict[tuple[int, int], int] = {}

    def enter(self, path: str, target: str, *, unnamed: bool = False) -> int:
        """The index of the ghost behind a magic link of /proc that reads `target`.

        `unnamed` says that it was opened with O_TMPFILE.
        """
        fd = os.open(path, _O_PATH | _O_CLOEXEC)
        try:
            info = os.fstat(fd)
            key = (info.st_dev, info.st_ino)
            if key not in self._index:
                ghost = self._ghost(fd, info, target, unnamed)
                self._index[key] = len(self.found)
                self.found.append(ghost)
        finally:
            os.close(fd)
        return self._index[key]

    def _ghost(self, fd: int, info: os.stat_result, target: str, unnamed: bool) -> Ghost:
        if not target.endswith(DELETED):
            raise Refused(f"an earlier {target}, which has been replaced since")
        if info.st_dev != self._device:
            raise Refused(f"not in the sandbox's root, {target}")
        name = target.removesuffix(DELETED)
        owned = (
            stat.S_IMODE(info.st_mode),
            info.st_uid - self._owner,
            info.st_gid - self._owner,
            (info.st_atime_ns, info.st_mtime_ns),
        )
        aside, missing = self._way(name)
        times = self._times(name, missing)
        if stat.S_ISDIR(info.st_mode):
            return Ghost("directory", name, "", aside, missing, times, *owned)
        if info.st_nlink:
            for other in self._attic.names(fd):
                if self._leads_to(other, info):
                    return Ghost("linked", name, other, aside, missing, times, *owned)
            # of a deleted file of the base, overlayfs shows the link count that it has there
            if info.st_ctime >= self._born - 1:
                raise Refused(f"a file that has lost the name it was opened by, {target}")
        if stat.S_ISFIFO(info.st_mode):
            return Ghost("fifo", name, "", aside, missing, times, *owned)
        if not stat.S_ISREG(info.st_mode):
            raise Refused(f"{_sort(info.st_mode)} without a name, {target}")
        try:
            kept = self._attic.keep(fd)
        except OSError as error:
            if error.errno != errno.EFBIG:
                raise
            raise Refused(
                f"a deleted file of {info.st_blocks >> 11} MiB that came from the base, {target}"
            ) from None
        if unnamed and not missing and _UNNAMED.fullmatch(os.path.basename(name)):
            return Ghost("unnamed", name, kept, "", (), times, *owned)
        return Ghost("moved", name, kept, aside, missing, times, *owned)

    def _way(self, name: str) -> tuple[str, tuple[str, ...]]:
        """(what has to be put aside, directories that have to be made) to have the name."""
        parts = name.split("/")[1:]
        for count in range(1, len(parts)):
            path = "/" + "/".join(parts[:count])
            mode = self._mode(path)
            if not stat.S_ISDIR(mode):
                missing = tuple("/" + "/".join(parts[:n]) for n in range(count, len(parts)))
                return (path if mode else ""), missing
        return (name if self._mode(name) else ""), ()

    def _mode(self, path: str) -> int:
        """What a path without symbolic links leads to; 0 when it leads nowhere."""
        try:
            fd = openat2(
                self._root,
                path,
                _O_PATH | _O_NOFOLLOW,
                resolve=RESOLVE_IN_ROOT | RESOLVE_NO_SYMLINKS,
            )
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                return 0
            raise
        try:
            return os.fstat(fd).st_mode
        finally:
            os.close(fd)

    def _times(self, name: str, missing: tuple[str, ...]) -> tuple[tuple[str, int, int], ...]:
        """The times of the directories that raising it will change."""
        parent = os.path.dirname(missing[0] if missing else name)
        found = []
        for path in dict.fromkeys((parent, "/")):
            fd = openat2(self._root, path, _O_PATH)
            try:
                info = os.fstat(fd)
            finally:
                os.close(fd)
            found.append((path, info.st_atime_ns, info.st_mtime_ns))
        return tuple(found)

    def _leads_to(self, path: str, info: os.stat_result) -> bool:
        try:
            fd = openat2(self._root, path, _O_PATH | _O_NOFOLLOW)
        except OSError:
            return False
        try:
            now = os.fstat(fd)
        finally:
            os.close(fd)
        return (now.st_dev, now.st_ino) == (info.st_dev, info.st_ino)


def _sort(mode: int) -> str:
    if stat.S_ISSOCK(mode):
        return "a socket file"
    return "a symbolic link" if stat.S_ISLNK(mode) else "a device"


# -- and back ---------------------------------------------------------------------------------


@dataclass
class _Users:
    """Who needs a ghost: descriptions by their index, mappings and the like by open(2)'s flags."""

    descriptions: list[int]
    modes: list[int]


def restore(rebuild: Rebuild) -> dict[tuple[str | int, int], int]:
    """Raise each ghost and open all that uses it.

    The descriptors in PID 1 of those that are mapped, executed or a working directory, by the
    ghost's index and the flags they were opened with.
    """
    capture = rebuild.capture
    users = [_Users([], []) for _ in capture.ghosts]
    for index, description in enumerate(capture.descriptions):
        if description.ghost >= 0:
            users[description.ghost].descriptions.append(index)
    for process in capture.processes:
        for used, mode in _of_process(process):
            if mode not in users[used].modes:
                users[used].modes.append(mode)
    opened: dict[tuple[str | int, int], int] = {}
    for index, ghost in enumerate(capture.ghosts):
        numbers = {mode: rebuild.reserve() for mode in users[index].modes}
        opened |= {(index, mode): number for mode, number in numbers.items()}
        found = [capture.descriptions[d] for d in users[index].descriptions]
        if any(d.kind == "fifo" for d in found):
            continue  # pipes.py raises it, to fill it while it has a name
        wanted = [(rebuild.number(d), capture.descriptions[d]) for d in users[index].descriptions]
        if ghost.kind == "unnamed":
            _make_unnamed(rebuild, ghost, wanted, numbers)
            _set_times(rebuild, ghost)
        else:
            with raised(rebuild, ghost) as name:
                _open_all(rebuild, name, wanted, numbers)
    return opened


@contextmanager
def raised(rebuild: Rebuild, ghost: Ghost) -> Iterator[str]:
    """What is added within the block is done while the ghost has its name."""
    _raise(rebuild, ghost)
    yield ghost.name
    _lower(rebuild, ghost)
    _set_times(rebuild, ghost)


def open_others(rebuild: Rebuild, ghost: int) -> None:
    """Open a raised FIFO's descriptions that are no ends of it, but paths."""
    for index, description in enumerate(rebuild.capture.descriptions):
        if description.ghost == ghost and description.kind == "path":
            name = rebuild.capture.ghosts[ghost].name
            _open_all(rebuild, name, [(rebuild.number(index), description)], {})


def _of_process(process: Process) -> list[tuple[int, int]]:
    wanted = [(m.ghost, open_mode(m)) for m in process.mappings if m.ghost >= 0]
    if process.layout is not None and process.layout.ghost >= 0:
        wanted.append((process.layout.ghost, 0))
    if process.cwd_ghost >= 0:
        wanted.append((process.cwd_ghost, _O_PATH))
    return wanted


def _open_all(
    rebuild: Rebuild, path: str, wanted: list[tuple[int, Description]], numbers: dict[int, int]
) -> None:
    for number, description in wanted:
        flags = description.flags
        if flags & _O_TMPFILE_BIT:
            flags &= ~O_TMPFILE
        _open(rebuild, path, flags, description.position)
        rebuild.place(number)
    for mode, number in numbers.items():
        _open(rebuild, path, mode | _O_CLOEXEC, 0)
        rebuild.place(number)


def _open(rebuild: Rebuild, path: str, flags: int, position: int) -> None:
    name = _text(rebuild, path)
    opened = rebuild.opened
    rebuild.init.call(nr.OPENAT, _AT_FDCWD, name, flags, save=opened, what=f"open {path}")
    if position and not flags & _O_PATH:
        rebuild.init.call(nr.LSEEK, opened, position, 0, what=f"lseek {path}")


def _raise(rebuild: Rebuild, ghost: Ghost) -> None:
    do = rebuild.init
    if ghost.aside:
        do.call(
            _RENAME,
            _text(rebuild, ghost.aside),
            _text(rebuild, _ASIDE),
            what=f"put {ghost.aside} aside",
        )
    for path in ghost.missing:
        do.call(nr.MKDIRAT, _AT_FDCWD, _text(rebuild, path), 0o700, what=f"mkdir {path}")
    name = _text(rebuild, ghost.name)
    if ghost.kind == "directory":
        do.call(nr.MKDIRAT, _AT_FDCWD, name, 0o700, what=f"mkdir {ghost.name}")
        do.call(_CHOWN, name, ghost.uid, ghost.gid, what=f"chown {ghost.name}")
        do.call(_CHMOD, name, ghost.mode, what=f"chmod {ghost.name}")
    elif ghost.kind == "fifo":
        do.call(_MKNODAT, _AT_FDCWD, name, stat.S_IFIFO | 0o600, 0, what=f"mkfifo {ghost.name}")
        do.call(_CHOWN, name, ghost.uid, ghost.gid, what=f"chown {ghost.name}")
        do.call(_CHMOD, name, ghost.mode, what=f"chmod {ghost.name}")
    else:
        call = _LINK if ghost.kind == "linked" else _RENAME
        do.call(call, _text(rebuild, ghost.source), name, what=f"raise {ghost.name}")


def _lower(rebuild: Rebuild, ghost: Ghost) -> None:
    do = rebuild.init
    call = _RMDIR if ghost.kind == "directory" else nr.UNLINK
    do.call(call, _text(rebuild, ghost.name), what=f"delete {ghost.name}")
    for path in reversed(ghost.missing):
        do.call(_RMDIR, _text(rebuild, path), what=f"rmdir {path}")
    if ghost.aside:
        do.call(
            _RENAME,
            _text(rebuild, _ASIDE),
            _text(rebuild, ghost.aside),
            what=f"put {ghost.aside} back",
        )


def _make_unnamed(
    rebuild: Rebuild,
    ghost: Ghost,
    wanted: list[tuple[int, Description]],
    numbers: dict[int, int],
) -> None:
    """O_TMPFILE again, with the blocks of the copy; other descriptions go through the first."""
    do, program = rebuild.init, rebuild.program
    first = next(n for n, (_, d) in enumerate(wanted) if d.flags & _O_TMPFILE_BIT)
    number, description = wanted.pop(first)
    source = _text(rebuild, ghost.source)
    directory = _text(rebuild, os.path.dirname(ghost.name) or "/")
    copy, made = program.variable(), rebuild.opened
    do.call(nr.OPENAT, _AT_FDCWD, source, _O_CLOEXEC, save=copy, what="open a kept file")
    # FICLONE refuses a file that is only appended to
    flags = description.flags & ~_O_APPEND
    do.call(nr.OPENAT, _AT_FDCWD, directory, flags, 0o600, save=made, what="O_TMPFILE")
    do.call(nr.IOCTL, made, _FICLONE, copy, what="clone a kept file")
    do.call(nr.CLOSE, copy)
    do.call(nr.UNLINK, source)
    do.call(_FCHOWN, made, ghost.uid, ghost.gid)
    do.call(_FCHMOD, made, ghost.mode)
    do.call(_UTIMENSAT, made, 0, _timespecs(rebuild, *ghost.modified), 0, what="futimens")
    if description.position:
        do.call(nr.LSEEK, made, description.position, 0)
    rebuild.place(number)
    rebuild.set_status(number, description.flags)
    _open_all(rebuild, f"/proc/self/fd/{number}", wanted, numbers)


def _text(rebuild: Rebuild, path: str) -> Ref:
    return rebuild.program.text(os.fsencode(path))


def _set_times(rebuild: Rebuild, ghost: Ghost) -> None:
    for path, accessed, modified in ghost.times:
        name, block = _text(rebuild, path), _timespecs(rebuild, accessed, modified)
        rebuild.init.call(_UTIMENSAT, _AT_FDCWD, name, block, 0, what=f"times of {path}")


def _timespecs(rebuild: Rebuild, accessed: int, modified: int) -> Ref:
    return rebuild.program.data(
        struct.pack("<4q", *divmod(accessed, 10**9), *divmod(modified, 10**9))
    )
