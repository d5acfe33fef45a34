"""Bring what one state of a sandbox's files has changed into another: three ways, all or nothing.

Both have come from a common state. What only one of them has changed is as it made it; what both
have changed in the same way is no question; anything else is a conflict, named by its path, and
then nothing is done at all. Whole files are compared: two changes to different lines of one file
are a conflict too, because nobody but its author can say whether they go together.

A moved file or directory counts as deleted and added, so a file that one side has moved and the
other has changed is in conflict under its old name. Names of one file (hard links) become files of
their own. Sockets are programs' and stay where they are.

The files are written into the mounted root, for programs go on with it: each is prepared beside its
place and renamed into it. Who calls keeps the programs from running meanwhile; an error takes back
what has been done.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import stat
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from deltabox.deltafs.comparison import Delta, Entry, attributes_of, comparing, is_same
from deltabox.deltafs.layers import Snapshot
from deltabox.linux.fsuid import file_owner
from deltabox.linux.mount import OVERLAYFS_SUPER_MAGIC, TMPFS_MAGIC, filesystem_type
from deltabox.linux.openat2 import (
    RESOLVE_IN_ROOT,
    RESOLVE_NO_MAGICLINKS,
    RESOLVE_NO_SYMLINKS,
    openat2,
)

_RESOLVE: Final = RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS | RESOLVE_NO_SYMLINKS
_CARRIED: Final = (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK, stat.S_IFIFO)
_IDS: Final = 65536  # ids of a sandbox
_NOBODY: Final = 65534
_ACL_HEADER: Final = 4
_ACL_ENTRY: Final = struct.Struct("<HHI")  # tag, permissions, id
_ACL_WITH_ID: Final = (0x02, 0x08)  # ACL_USER, ACL_GROUP


@dataclass(frozen=True, slots=True)
class _Step:
    """What a path is to become, and what it is."""

    path: str
    new: Entry | None
    old: Entry | None


@dataclass(frozen=True, slots=True)
class Merge:
    """What has to be done, or why it cannot be: the paths that are in conflict, sorted."""

    steps: tuple[_Step, ...]
    conflicts: tuple[str, ...]

    @property
    def paths(self) -> list[str]:
        """What changes, sorted."""
        return sorted(step.path for step in self.steps)

    def apply(self, root: int, owner: int) -> None:
        """Do it in the root that is open as `root`; `owner` is the host uid of its root user.

        An error leaves everything as it was.
        """
        assert not self.conflicts
        done: list[_Step] = []
        with file_owner(owner):
            try:
                for step in _in_order(self.steps):
                    done.append(step)  # before: it may fail half-way
                    _put(root, step.path, step.new, owner)
            except BaseException:
                for step in _in_order([_Step(s.path, s.old, s.new) for s in done]):
                    with contextlib.suppress(FileNotFoundError):  # where it had not come so far
                        _put(root, step.path, step.new, owner)
                raise


@contextmanager
def merging(
    ancestor: Snapshot, ours: Snapshot, theirs: Snapshot, base: Path, under: Sequence[str]
) -> Iterator[Merge]:
    """What it takes to bring the changes from `ancestor` to `ours`, at or below the paths `under`,
    into `theirs`. To be used within the block.
    """
    with comparing(ancestor, ours, base) as mine, comparing(ancestor, theirs, base) as other:
        mine.renames = other.renames = False
        changed = {delta.path: delta for delta in mine.run() if _is_carried(delta)}
        there = {delta.path: delta for delta in other.run()}
        wanted = _selected(changed, under)
        steps, conflicts = [], set()
        for path, delta in wanted.items():
            before = there[path].new if path in there else delta.old
            if is_same(delta.new, before):
                continue
            both = path in there and not _are_directories(delta.new, before)
            if both or (delta.new is not None and _is_cut_off(path, there)):
                conflicts.add(path)
            else:
                steps.append(_Step(path, delta.new, before))
        for path, delta in there.items():
            if delta.new is not None and path not in wanted and _is_cut_off(path, wanted):
                conflicts.add(path)
        yield Merge(tuple(steps), tuple(sorted(conflicts)))


def _is_carried(delta: Delta) -> bool:
    return all(entry is None or entry.kind in _CARRIED for entry in (delta.old, delta.new))


def _are_directories(one: Entry | None, other: Entry | None) -> bool:
    """A directory that both have made or changed is no conflict; ours tells its attributes."""
    return one is not None and other is not None and one.kind == other.kind == stat.S_IFDIR


def _selected(changed: dict[str, Delta], under: Sequence[str]) -> dict[str, Delta]:
    """The changes at or below these paths, with new directories that lead there."""
    tops = ["/" + path.strip("/") for path in under]

    def leads(path: str, delta: Delta) -> bool:
        made = delta.old is None and delta.new is not None and delta.new.kind == stat.S_IFDIR
        return made and any(top.startswith(path + "/") for top in tops)

    return {
        path: delta
        for path, delta in changed.items()
        if any(top in ("/", path) or path.startswith(top + "/") for top in tops)
        or leads(path, delta)
    }


def _is_cut_off(path: str, by: dict[str, Delta]) -> bool:
    """Whether one of these changes leaves no directory where the path would be."""
    above = os.path.dirname(path)
    while above != "/":
        if above in by:
            new = by[above].new
            if new is None or new.kind != stat.S_IFDIR:
                return True
        above = os.path.dirname(above)
    return False


# -- doing it -------------------------------------------------------------------------------------


def _in_order(steps: Sequence[_Step]) -> list[_Step]:
    """First what goes, from below; then what comes, from above."""
    going = [s for s in steps if s.new is None]
    coming = [s for s in steps if s.new is not None]
    return [
        *sorted(going, key=lambda s: s.path, reverse=True),
        *sorted(coming, key=lambda s: s.path),
    ]


def _put(root: int, path: str, entry: Entry | None, owner: int) -> None:
    """Make a path be this, whatever it is now."""
    above, name = os.path.split(path)
    if not name:
        assert entry is not None
        _dress(root, ".", entry, owner)
        return
    parent = openat2(root, above, os.O_RDONLY | os.O_DIRECTORY, resolve=_RESOLVE)
    try:
        if filesystem_type(parent) not in (OVERLAYFS_SUPER_MAGIC, TMPFS_MAGIC):
            raise OSError(errno.EPERM, "a file of the kernel", path)
        there = _kind(parent, name)
        if entry is None:
            _remove(parent, name, there)
        elif entry.kind == stat.S_IFDIR:
            if there != stat.S_IFDIR:
                _remove(parent, name, there)
                os.mkdir(name, 0o700, dir_fd=parent)
            _dress(parent, name, entry, owner)
        else:
            if there == stat.S_IFDIR:
                os.rmdir(name, dir_fd=parent)
            _replace(parent, name, entry, owner)
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from error
    finally:
        os.close(parent)


def _kind(parent: int, name: str) -> int | None:
    try:
        return stat.S_IFMT(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return None


def _remove(parent: int, name: str, kind: int | None) -> None:
    if kind == stat.S_IFDIR:
        os.rmdir(name, dir_fd=parent)
    elif kind is not None:
        os.unlink(name, dir_fd=parent)


def _replace(parent: int, name: str, entry: Entry, owner: int) -> None:
    beside = f".deltabox-{secrets.token_hex(8)}"
    try:
        if entry.kind == stat.S_IFLNK:
            os.symlink(os.readlink(entry.data), beside, dir_fd=parent)
        elif entry.kind == stat.S_IFIFO:
            os.mkfifo(beside, 0o600, dir_fd=parent)
        else:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            fd = os.open(beside, flags, 0o600, dir_fd=parent)
            with open(entry.data, "rb") as source, open(fd, "wb") as target:
                shutil.copyfileobj(source, target, 1 << 20)
        _dress(parent, beside, entry, owner)
        os.rename(beside, name, src_dir_fd=parent, dst_dir_fd=parent)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(beside, dir_fd=parent)
        raise


def _dress(parent: int, name: str, entry: Entry, owner: int) -> None:
    """Owner, permissions, attributes and times, in the order in which none undoes another."""
    status = entry.status
    uid, gid = (owner + (n if n < _IDS else _NOBODY) for n in (status.st_uid, status.st_gid))
    os.chown(name, uid, gid, dir_fd=parent, follow_symlinks=False)
    path = f"/proc/self/fd/{parent}/{name}"
    wanted = {k: _shifted(k, v, owner) for k, v in attributes_of(entry).items()}
    for attribute in os.listxattr(path, follow_symlinks=False):
        if not attribute.startswith(("trusted.", "system.")) and attribute not in wanted:
            os.removexattr(path, attribute, follow_symlinks=False)
    for attribute, value in wanted.items():
        os.setxattr(path, attribute, value, follow_symlinks=False)
    if entry.kind != stat.S_IFLNK:
        os.chmod(name, stat.S_IMODE(status.st_mode), dir_fd=parent)
    times = (status.st_atime_ns, status.st_mtime_ns)
    os.utime(name, ns=times, dir_fd=parent, follow_symlinks=False)


def _shifted(attribute: str, value: bytes, owner: int) -> bytes:
    """An attribute as it has to be written: those of access lists hold ids, too.

    Their format is that of include/uapi/linux/posix_acl_xattr.h.
    """
    if not attribute.startswith("system.posix_acl_"):
        return value
    shifted = bytearray(value)
    for at in range(_ACL_HEADER, len(value), _ACL_ENTRY.size):
        tag, permissions, number = _ACL_ENTRY.unpack_from(value, at)
        if tag in _ACL_WITH_ID:
            number = owner + (number if number < _IDS else _NOBODY)
        _ACL_ENTRY.pack_into(shifted, at, tag, permissions, number)
    return bytes(shifted)
