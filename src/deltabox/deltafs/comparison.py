"""Two states of a sandbox's files side by side, as its programs would see them.

Two overlays over one base differ only where their upper layers do, so both uppers are walked
side by side and nothing else. Where a name is in an upper, overlayfs' artefacts are resolved as
the kernel does: a character device 0:0 is a deletion, `opaque` cuts off the base's directory,
`redirect` says which directory (or, with `metacopy`, which file's data) of the base it is.

Two files are taken for equal without reading them only when that is certain: same inode number,
and by btrfs' own transaction numbers unchanged on both sides since the last snapshot the two
states share (`linux.btrfs.changed_inodes`). Times and sizes would be cheaper to ask for and
prove nothing: a clock tick is 4 ms long, and forks hand out the same inode numbers. Everything
else is compared byte by byte, so a file merely touched or copied up is no change.

`btrfs send --no-data` was tried in the design and sees the same changes, but of the *upper*: its
stream still has to be mapped through all of the above.

Renames are recognised by identity, never by likeness: an inode both states had when they parted,
or a file or directory of the base. A file of the base that was rewritten *and* moved has a new
identity and appears as deleted and added.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from deltabox.deltafs.layers import Layer, Snapshot, State, common_ancestor
from deltabox.deltafs.root import OWN_DIRECTORY
from deltabox.linux import btrfs, mount

ChangeKind = Literal["added", "modified", "deleted", "renamed", "mode"]

_CHUNK: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Directory:
    """A merged directory: relative to the upper's root, and to the base's."""

    upper: str | None
    lower: str | None


@dataclass(frozen=True, slots=True)
class Entry:
    """What a name leads to: where its attributes are and where its data are."""

    status: os.stat_result
    attributes: str  # a host path
    data: str  # a host path
    directory: Directory | None
    upper_inode: int | None
    lower: str | None  # the file or directory of the base it is, or was made of

    @property
    def kind(self) -> int:
        return stat.S_IFMT(self.status.st_mode)


@dataclass(frozen=True, slots=True)
class Delta:
    """A change with what is needed to show it."""

    kind: ChangeKind
    path: str
    old_path: str
    old: Entry | None
    new: Entry | None


@dataclass(frozen=True, slots=True)
class Side:
    """One state: its upper and the base as host paths, its inodes changed since the parting."""

    upper: str
    base: str
    changed: dict[int, btrfs.Inode]

    def listing(self, directory: Directory) -> dict[str, tuple[int, bool]]:
        """The names in a directory's upper: inode number, whether it is a directory."""
        if directory.upper is None:
            return {}
        with os.scandir(os.path.join(self.upper, directory.upper)) as entries:
            return {
                entry.name: (entry.inode(), entry.is_dir(follow_symlinks=False))
                for entry in entries
            }

    def names(self, directory: Directory) -> set[str]:
        """All names a merged directory may have; some may be whiteouts."""
        found = set(self.listing(directory))
        if directory.lower is not None:
            found.update(os.listdir(os.path.join(self.base, directory.lower)))
        return found

    def children(self, directory: Directory) -> Iterator[tuple[str, Entry]]:
        """What a merged directory shows."""
        for name in sorted(self.names(directory)):
            entry = self.look_up(directory, name)
            if entry is not None:
                yield name, entry

    def look_up(self, directory: Directory, name: str) -> Entry | None:
        """What a name of a merged directory leads to, as overlayfs resolves it."""
        if directory.upper is not None:
            relative = os.path.join(directory.upper, name)
            path = os.path.join(self.upper, relative)
            status = _lstat(path)
            if status is not None:
                return self._upper_entry(directory, name, relative, path, status)
        if directory.lower is None:
            return None
        relative = os.path.join(directory.lower, name)
        path = os.path.join(self.base, relative)
        status = _lstat(path)
        if status is None or _is_whiteout(status):
            return None
        below = Directory(None, relative) if stat.S_ISDIR(status.st_mode) else None
        return Entry(status, path, path, below, None, relative)

    def _upper_entry(
        self, directory: Directory, name: str, relative: str, path: str, status: os.stat_result
    ) -> Entry | None:
        if _is_whiteout(status):
            return None
        lower: str | None = None
        data = path
        below: Directory | None = None
        if stat.S_ISDIR(status.st_mode):
            if _overlay_attribute(path, "opaque") != b"y":
                lower = self._origin(directory, name, path)
                if lower is not None:
                    there = _lstat(os.path.join(self.base, lower))
                    if there is None or not stat.S_ISDIR(there.st_mode):
                        lower = None
            below = Directory(relative, lower)
        elif stat.S_ISREG(status.st_mode) and _overlay_attribute(path, "metacopy") is not None:
            lower = self._origin(directory, name, path)
            if lower is not None:
                data = os.path.join(self.base, lower)
        return Entry(status, path, data, below, status.st_ino, lower)

    def _origin(self, directory: Directory, name: str, path: str) -> str | None:
        redirect = _overlay_attribute(path, "redirect")
        if redirect is None:
            origin = name
        else:
            origin = os.fsdecode(redirect)
            if origin.startswith("/"):
                return origin.lstrip("/")
        return None if directory.lower is None else os.path.join(directory.lower, origin)

    def identities(self, entry: Entry, parted: int | None) -> list[tuple[str, int | str]]:
        """What makes an entry the same thing in another state, under whatever name."""
        found: list[tuple[str, int | str]] = []
        if entry.upper_inode is not None and parted is not None:
            inode = self.changed.get(entry.upper_inode)
            if inode is None or inode.born <= parted:
                found.append(("upper", entry.upper_inode))
        if entry.lower is not None:
            found.append(("base", entry.lower))
        return found


def _lstat(path: str) -> os.stat_result | None:
    try:
        return os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None


def is_same(one: Entry | None, other: Entry | None) -> bool:
    """Whether two entries, of any states, are alike: kind, contents, owner, permissions."""
    if one is None or other is None:
        return one is other
    if one.kind != other.kind or owner_and_mode(one) != owner_and_mode(other):
        return False
    if one.kind == stat.S_IFREG:
        alike = one.status.st_size == other.status.st_size and same_bytes(one.data, other.data)
    elif one.kind == stat.S_IFLNK:
        alike = os.readlink(one.data) == os.readlink(other.data)
    else:
        alike = one.kind == stat.S_IFDIR or one.status.st_rdev == other.status.st_rdev
    return alike and attributes_of(one) == attributes_of(other)


def owner_and_mode(entry: Entry) -> tuple[int, int, int]:
    return entry.status.st_mode, entry.status.st_uid, entry.status.st_gid


def _is_whiteout(status: os.stat_result) -> bool:
    return stat.S_ISCHR(status.st_mode) and status.st_rdev == 0


def _overlay_attribute(path: str, name: str) -> bytes | None:
    try:
        return os.getxattr(path, f"trusted.overlay.{name}", follow_symlinks=False)
    except OSError:
        return None


def attributes_of(entry: Entry) -> dict[str, bytes]:
    """The extended attributes a program would see."""
    found: dict[str, bytes] = {}
    try:
        names = os.listxattr(entry.attributes, follow_symlinks=False)
    except OSError:
        return found
    for name in names:
        if not name.startswith("trusted."):
            found[name] = os.getxattr(entry.attributes, name, follow_symlinks=False)
    return found


def same_bytes(one: str, other: str) -> bool:
    if one == other:
        return True
    with open(one, "rb", buffering=0) as first, open(other, "rb", buffering=0) as second:
        while True:
            chunk = first.read(_CHUNK)
            if chunk != second.read(_CHUNK):
                return False
            if not chunk:
                return True


@dataclass(slots=True)
class Comparison:
    """The walk over two sides; `deltas` is its result."""

    old: Side
    new: Side
    parted: int | None  # the transaction up to which the two states are one; None: they never were
    contents: bool = True  # False: a file that may have changed counts as changed
    renames: bool = True  # False: what was moved is deleted and added, with all below it
    deltas: list[Delta] = field(default_factory=list)
    _deleted: dict[str, Entry] = field(default_factory=dict)
    _added: dict[str, Entry] = field(default_factory=dict)
    _moved_away: set[str] = field(default_factory=set)
    _unindexed: list[str] = field(default_factory=list)
    _unopened: list[str] = field(default_factory=list)
    _known: dict[tuple[str, int | str], list[str]] = field(default_factory=dict)

    def run(self) -> list[Delta]:
        root = Directory("", "")
        self._compare_entries(
            "/", "/", self._root_entry(self.old, root), self._root_entry(self.new, root)
        )
        self._match()
        self.deltas = [
            delta
            for delta in self.deltas
            if delta.path != OWN_DIRECTORY and not delta.path.startswith(OWN_DIRECTORY + "/")
        ]
        self.deltas.sort(key=lambda delta: (delta.path, delta.kind))
        return self.deltas

    @staticmethod
    def _root_entry(side: Side, root: Directory) -> Entry:
        return Entry(os.lstat(side.upper), side.upper, side.upper, root, None, "")

    def _untouched(self, old: int | None, new: int | None) -> bool:
        return (
            old is not None
            and old == new
            and self.parted is not None
            and old not in self.old.changed
            and old not in self.new.changed
        )

    def _compare_directories(
        self, old_path: str, path: str, old: Directory, new: Directory
    ) -> None:
        if old.upper is None and new.upper is None and old.lower == new.lower:
            return
        same_base = old.lower == new.lower
        if same_base:
            old_names, new_names = self.old.listing(old), self.new.listing(new)
            names = old_names.keys() | new_names.keys()
        else:
            old_names, new_names = {}, {}
            names = self.old.names(old) | self.new.names(new)
        for name in sorted(names):
            inode, is_directory = old_names.get(name, (None, False))
            if not is_directory and self._untouched(inode, new_names.get(name, (None, False))[0]):
                continue
            old_child, child = os.path.join(old_path, name), os.path.join(path, name)
            before = None if old_child in self._moved_away else self.old.look_up(old, name)
            after = self.new.look_up(new, name)
            if before is None and after is not None:
                self._added[child] = after
            elif before is not None and after is None:
                self._delete(old_child, before)
            elif before is not None and after is not None:
                self._compare_entries(old_child, child, before, after)

    def _compare_entries(self, old_path: str, path: str, old: Entry, new: Entry) -> None:
        kind = self._difference(old, new)
        if kind is not None:
            self.deltas.append(Delta(kind, path, old_path, old, new))
        if old.directory is not None and new.directory is not None:
            self._compare_directories(old_path, path, old.directory, new.directory)
        elif old.directory is not None:
            for name, child in self.old.children(old.directory):
                self._delete(os.path.join(old_path, name), child)
        elif new.directory is not None:
            for name, child in self.new.children(new.directory):
                self._added[os.path.join(path, name)] = child

    def _difference(self, old: Entry, new: Entry) -> Literal["modified", "mode"] | None:
        if old.kind != new.kind:
            return "modified"
        if old.kind == stat.S_IFREG:
            if not self.contents:
                return "modified"
            same_data = self._untouched(old.upper_inode, new.upper_inode)
            if old.status.st_size != new.status.st_size or not (
                (same_data and old.lower == new.lower) or same_bytes(old.data, new.data)
            ):
                return "modified"
        elif old.kind == stat.S_IFLNK:
            if os.readlink(old.data) != os.readlink(new.data):
                return "modified"
        elif old.kind in (stat.S_IFCHR, stat.S_IFBLK) and old.status.st_rdev != new.status.st_rdev:
            return "modified"
        if old.attributes == new.attributes or self._untouched(old.upper_inode, new.upper_inode):
            return None
        if owner_and_mode(old) != owner_and_mode(new) or attributes_of(old) != attributes_of(new):
            return "mode"
        return None

    def _delete(self, path: str, entry: Entry) -> None:
        if path not in self._moved_away:
            self._deleted[path] = entry
            self._unindexed.append(path)
            self._unopened.append(path)

    def _match(self) -> None:
        """Pair what went with what came; list the rest, directories with all below them.

        What was deleted is opened up completely first, since anything in it may have been moved
        out; what was added is opened up level by level, since a directory that is itself a
        renamed one must not be taken apart.
        """
        pending: dict[str, Entry] = {}
        while True:
            pending.update(self._added)
            self._added.clear()
            self._index_deleted()
            unpaired = {
                path: entry
                for path, entry in sorted(pending.items())
                if not self._pair(path, entry)
            }
            paired = len(unpaired) < len(pending)
            pending = unpaired
            if paired or self._open_deleted():
                continue
            if not pending:
                break
            pending = self._open_added(pending)
        for path, entry in self._deleted.items():
            self.deltas.append(Delta("deleted", path, path, entry, None))

    def _index_deleted(self) -> None:
        for path in self._unindexed:
            entry = self._deleted.get(path)
            if entry is not None:
                for identity in self.old.identities(entry, self.parted):
                    self._known.setdefault(identity, []).append(path)
        self._unindexed.clear()

    def _open_deleted(self) -> bool:
        """List what was in the deleted directories, one level further; whether there was any."""
        paths, self._unopened = self._unopened, []
        for path in paths:
            entry = self._deleted.get(path)
            if entry is not None and entry.directory is not None:
                for name, child in self.old.children(entry.directory):
                    self._delete(os.path.join(path, name), child)
        return bool(self._unopened)

    def _open_added(self, pending: dict[str, Entry]) -> dict[str, Entry]:
        """Report what is new; what is in new directories is pending next."""
        below: dict[str, Entry] = {}
        for path, entry in pending.items():
            self.deltas.append(Delta("added", path, path, None, entry))
            if entry.directory is not None:
                for name, child in self.new.children(entry.directory):
                    below[os.path.join(path, name)] = child
        return below

    def _pair(self, path: str, new: Entry) -> bool:
        """Find where an added entry was before, and compare the two."""
        if not self.renames:
            return False
        for identity in self.new.identities(new, self.parted):
            for old_path in self._known.get(identity, ()):
                old = self._deleted.get(old_path)
                if old is None or old.kind != new.kind:
                    continue
                # what was below it is not deleted, unless it had left by itself before
                for gone in [p for p in self._deleted if self._goes_with(p, old_path)]:
                    del self._deleted[gone]
                self._moved_away.add(old_path)
                self.deltas.append(Delta("renamed", path, old_path, old, new))
                self._compare_entries(old_path, path, old, new)
                return True
        return False

    def _goes_with(self, path: str, directory: str) -> bool:
        if path == directory:
            return True
        if not path.startswith(directory + "/"):
            return False
        above = os.path.dirname(path)
        while above != directory:
            if above in self._moved_away:
                return False
            above = os.path.dirname(above)
        return True


@contextmanager
def comparing(old: State, new: State, base: Path) -> Iterator[Comparison]:
    ancestor = common_ancestor(old, new)
    with ExitStack() as stack:
        # A clone shows the base as the overlay has it: without what is mounted on it.
        tree = mount.open_tree(
            mount.AT_FDCWD, base, mount.OPEN_TREE_CLONE | mount.OPEN_TREE_CLOEXEC
        )
        stack.callback(os.close, tree)

        def side(state: State) -> Side:
            still = _still(state, stack)
            changed = {}
            if ancestor is not None and still is not ancestor:
                fd = os.open(still.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                try:
                    changed = btrfs.changed_inodes(fd, ancestor.generation)
                finally:
                    os.close(fd)
            return Side(str(still.upper), f"/proc/self/fd/{tree}", changed)

        before = side(old)
        after = before if new is old else side(new)
        yield Comparison(before, after, None if ancestor is None else ancestor.generation)


def _still(state: State, stack: ExitStack) -> Snapshot:
    """A state that holds still: a layer may be written to while we look."""
    if isinstance(state, Snapshot):
        return state
    assert isinstance(state, Layer)
    snapshot = state.image.snapshot(state)
    stack.callback(state.image.delete, snapshot)
    return snapshot
