"""Files that are open at a checkpoint but have no name left: kept beside its snapshot.

A snapshot has what can be reached by name.  What only a descriptor or a mapping holds is put away
here, in the same image but in no subvolume that a sandbox sees: as a clone that shares all blocks,
when the file is one of the layer's own (its handle leads to it, under the overlay); as a copy when
it is the base's, or so small that waiting for its blocks would take longer.  In every layer made
of the snapshot the copies lie ready under names in the root directory, for the process half to
move them where they belong before anything of the sandbox runs.

Rejected: linkat(2) of the nameless inode, which the kernel allows for O_TMPFILE files only; and
the bytes as part of the restore program, which limits their size and copies them at each restore.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from deltabox.linux import btrfs, handles

if TYPE_CHECKING:
    from deltabox.deltafs.layers import Layer, Snapshot

Key = tuple[int, int, int]
PREFIX: Final = ".deltabox-ghost-"
LIMIT: Final = 256 << 20
"""The most that is copied, byte by byte, while the programs stand still."""
_SMALL: Final = 64 << 10


class Attic:
    """What one checkpoint keeps. Nothing exists on disk before the first file does."""

    def __init__(self, directory: Path, top: int, owner: int, shelf: dict[Key, Path]) -> None:
        """`owner` is the host uid (and gid) that the overlay shows for uid 0 on disk.

        `shelf` has copies of files of the base, which never change, made for earlier snapshots.
        """
        self._shelf = shelf
        self._directory = directory
        self._top = top
        self._owner = owner
        self._count = 0

    def keep(self, file: int) -> str:
        """Put away what is open as `file` (O_PATH will do); its path in the root of every restore.

        Raises OSError: EFBIG for a file that cannot be cloned and is too large to copy.
        """
        if not self._count:
            self._directory.mkdir(mode=0o700)
        number, self._count = self._count, self._count + 1
        with _opened(self._top, file) as (source, real):
            info = os.fstat(source)
            place = self._directory / str(number)
            key = (info.st_ino, info.st_ctime_ns, info.st_size)
            if key in self._shelf:
                os.link(self._shelf[key], place)
                return f"/{PREFIX}{number}"
            target = os.open(place, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC)
            try:
                if real and info.st_size > _SMALL:
                    btrfs.clone(source, target)
                elif info.st_blocks * 512 > LIMIT:
                    raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
                else:
                    _copy(source, target, info.st_size)
                uid, gid = info.st_uid, info.st_gid
                if not real:
                    uid, gid = uid - self._owner, gid - self._owner
                _dress(source, target, info, uid, gid)
            finally:
                os.close(target)
            if not real and info.st_nlink:  # the base's own, as overlayfs shows it
                shelved = self._directory.parent / f"base-{len(self._shelf)}"
                os.link(place, shelved)
                self._shelf[key] = shelved
        return f"/{PREFIX}{number}"

    def names(self, file: int) -> list[str]:
        """The names, in the sandbox, that an open file of the layer still has."""
        handle = handles.upper_of(file)
        if handle is None:
            return []
        real = handles.open_handle(self._top, handle, os.O_RDONLY | os.O_NONBLOCK)
        try:
            found = btrfs.names(real, os.fstat(real).st_ino)
        finally:
            os.close(real)
        return [
            os.fsdecode(name.removeprefix(b"upper")) for name in found if name.startswith(b"upper/")
        ]

    def belong(self, snapshot: Snapshot) -> None:
        """The snapshot has been taken: what was kept is part of it, and goes with it."""
        if self._count:
            self._directory.rename(snapshot.ghosts)

    def discard(self) -> None:
        """There is no checkpoint: take back what was kept."""
        shutil.rmtree(self._directory, ignore_errors=True)


@contextmanager
def _opened(top: int, file: int) -> Iterator[tuple[int, bool]]:
    """(the file to read, whether it is the layer's own file under the overlay)."""
    handle = handles.upper_of(file)
    source = -1
    if handle is not None:
        # a file whose last trace went this moment is read through the overlay
        with contextlib.suppress(OSError):
            source = handles.open_handle(top, handle, os.O_RDONLY | os.O_NOATIME)
    real = source >= 0
    if not real:
        source = os.open(f"/proc/self/fd/{file}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield source, real
    finally:
        os.close(source)


def _copy(source: int, target: int, size: int) -> None:
    """Copy what is not a hole."""
    os.ftruncate(target, size)
    position = 0
    while position < size:
        try:
            start = os.lseek(source, position, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # nothing but a hole is left
                return
            raise
        end = os.lseek(source, start, os.SEEK_HOLE)
        os.lseek(target, start, os.SEEK_SET)
        while start < end:
            done = os.sendfile(target, source, start, end - start)
            if not done:
                return
            start += done
        position = end


def _dress(source: int, target: int, info: os.stat_result, uid: int, gid: int) -> None:
    """Give a copy its owner, mode, times and extended attributes."""
    os.fchown(target, uid, gid)
    os.fchmod(target, stat.S_IMODE(info.st_mode))
    for name in os.listxattr(source):
        if not name.startswith("trusted.overlay."):
            os.setxattr(target, name, os.getxattr(source, name))
    os.utime(target, ns=(info.st_atime_ns, info.st_mtime_ns))


def lay_out(snapshot: Snapshot, layer: Layer) -> None:
    """Put copies of what the snapshot keeps into the root directory of a layer made of it."""
    try:
        kept = os.listdir(snapshot.ghosts)
    except FileNotFoundError:
        return
    before = os.stat(layer.upper)
    for number in kept:
        source = os.open(snapshot.ghosts / number, os.O_RDONLY | os.O_CLOEXEC)
        try:
            target = os.open(
                layer.upper / (PREFIX + number),
                os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC,
                0o600,
            )
            try:
                btrfs.clone(source, target)
                info = os.fstat(source)
                _dress(source, target, info, info.st_uid, info.st_gid)
            finally:
                os.close(target)
        finally:
            os.close(source)
    os.utime(layer.upper, ns=(before.st_atime_ns, before.st_mtime_ns))
