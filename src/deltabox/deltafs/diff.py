"""What changed between two states of a sandbox's files, as its programs would see it.

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

import difflib
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

_PATCH_LIMIT: Final = 1 << 20  # bytes; larger files are reported like binary ones
_CHUNK: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Change:
    """One difference. `path` is absolute, as seen inside.

    `mode` stands for permissions, owner or extended attributes with the same contents. A path
    that was renamed *and* changed appears twice. Of a renamed directory only what differs below
    it is listed; `deleted` names the path as it was, everything else as it is.
    """

    kind: ChangeKind
    path: str
    old_path: str | None = None


@dataclass(frozen=True, slots=True)
class _Directory:
    """A merged directory: relative to the upper's root, and to the base's."""

    upper: str | None
    lower: str | None


@dataclass(frozen=True, slots=True)
class _Entry:
    """What a name leads to: where its attributes are and where its data are."""

    status: os.stat_result
    attributes: str  # a host path
    data: str  # a host path
    directory: _Directory | None
    upper_inode: int | None
    lower: str | None  # the file or directory of the base it is, or was made of

    @property
    def kind(self) -> int:
        return stat.S_IFMT(self.status.st_mode)


@dataclass(frozen=True, slots=True)
class _Delta:
    """A change with what is needed to show it."""

    kind: ChangeKind
    path: str
    old_path: str
    old: _Entry | None
    new: _Entry | None


@dataclass(frozen=True, slots=True)
class _Side:
    """One state: its upper and the base as host paths, its inodes changed since the parting."""

    upper: str
    base: str
    changed: dict[int, btrfs.Inode]

    def listing(self, directory: _Directory) -> dict[str, tuple[int, bool]]:
        """The names in a directory's upper: inode number, whether it is a directory."""
        if directory.upper is None:
            return {}
        with os.scandir(os.path.join(self.upper, directory.upper)) as entries:
            return {
                entry.name: (entry.inode(), entry.is_dir(follow_symlinks=False))
                for entry in entries
            }

    def names(self, directory: _Directory) -> set[str]:
        """All names a merged directory may have; some may be whiteouts."""
        found = set(self.listing(directory))
        if directory.lower is not None:
            found.update(os.listdir(os.path.join(self.base, directory.lower)))
        return found

    def children(self, directory: _Directory) -> Iterator[tuple[str, _Entry]]:
        """What a merged directory shows."""
        for name in sorted(self.names(directory)):
            entry = self.look_up(directory, name)
            if entry is not None:
                yield name, entry

    def look_up(self, directory: _Directory, name: str) -> _Entry | None:
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
        below = _Directory(None, relative) if stat.S_ISDIR(status.st_mode) else None
        return _Entry(status, path, path, below, None, relative)

    def _upper_entry(
        self, directory: _Directory, name: str, relative: str, path: str, status: os.stat_result
    ) -> _Entry | None:
        if _is_whiteout(status):
            return None
        lower: str | None = None
        data = path
        below: _Directory | None = None
        if stat.S_ISDIR(status.st_mode):
            if _overlay_attribute(path, "opaque") != b"y":
                lower = self._origin(directory, name, path)
                if lower is not None:
                    there = _lstat(os.path.join(self.base, lower))
                    if there is None or not stat.S_ISDIR(there.st_mode):
                        lower = None
            below = _Directory(relative, lower)
        elif stat.S_ISREG(status.st_mode) and _overlay_attribute(path, "metacopy") is not None:
            lower = self._origin(directory, name, path)
            if lower is not None:
                data = os.path.join(self.base, lower)
        return _Entry(status, path, data, below, status.st_ino, lower)

    def _origin(self, directory: _Directory, name: str, path: str) -> str | None:
        redirect = _overlay_attribute(path, "redirect")
        if redirect is None:
            origin = name
        else:
            origin = os.fsdecode(redirect)
            if origin.startswith("/"):
                return origin.lstrip("/")
        return None if directory.lower is None else os.path.join(directory.lower, origin)

    def identities(self, entry: _Entry, parted: int | None) -> list[tuple[str, int | str]]:
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


def _is_whiteout(status: os.stat_result) -> bool:
    return stat.S_ISCHR(status.st_mode) and status.st_rdev == 0


def _overlay_attribute(path: str, name: str) -> bytes | None:
    try:
        return os.getxattr(path, f"trusted.overlay.{name}", follow_symlinks=False)
    except OSError:
        return None


def _attributes(entry: _Entry) -> dict[str, bytes]:
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


def _same_bytes(one: str, other: str) -> bool:
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
class _Comparison:
    """The walk over two sides; `deltas` is its result."""

    old: _Side
    new: _Side
    parted: int | None  # the transaction up to which the two states are one; None: they never were
    contents: bool = True  # False: a file that may have changed counts as changed
    deltas: list[_Delta] = field(default_factory=list)
    _deleted: dict[str, _Entry] = field(default_factory=dict)
    _added: dict[str, _Entry] = field(default_factory=dict)
    _moved_away: set[str] = field(default_factory=set)
    _unindexed: list[str] = field(default_factory=list)
    _unopened: list[str] = field(default_factory=list)
    _known: dict[tuple[str, int | str], list[str]] = field(default_factory=dict)

    def run(self) -> list[_Delta]:
        root = _Directory("", "")
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
    def _root_entry(side: _Side, root: _Directory) -> _Entry:
        return _Entry(os.lstat(side.upper), side.upper, side.upper, root, None, "")

    def _untouched(self, old: int | None, new: int | None) -> bool:
        return (
            old is not None
            and old == new
            and self.parted is not None
            and old not in self.old.changed
            and old not in self.new.changed
        )

    def _compare_directories(
        self, old_path: str, path: str, old: _Directory, new: _Directory
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

    def _compare_entries(self, old_path: str, path: str, old: _Entry, new: _Entry) -> None:
        kind = self._difference(old, new)
        if kind is not None:
            self.deltas.append(_Delta(kind, path, old_path, old, new))
        if old.directory is not None and new.directory is not None:
            self._compare_directories(old_path, path, old.directory, new.directory)
        elif old.directory is not None:
            for name, child in self.old.children(old.directory):
                self._delete(os.path.join(old_path, name), child)
        elif new.directory is not None:
            for name, child in self.new.children(new.directory):
                self._added[os.path.join(path, name)] = child

    def _difference(self, old: _Entry, new: _Entry) -> Literal["modified", "mode"] | None:
        if old.kind != new.kind:
            return "modified"
        if old.kind == stat.S_IFREG:
            if not self.contents:
                return "modified"
            same_data = self._untouched(old.upper_inode, new.upper_inode)
            if old.status.st_size != new.status.st_size or not (
                (same_data and old.lower == new.lower) or _same_bytes(old.data, new.data)
            ):
                return "modified"
        elif old.kind == stat.S_IFLNK:
            if os.readlink(old.data) != os.readlink(new.data):
                return "modified"
        elif old.kind in (stat.S_IFCHR, stat.S_IFBLK) and old.status.st_rdev != new.status.st_rdev:
            return "modified"
        if old.attributes == new.attributes or self._untouched(old.upper_inode, new.upper_inode):
            return None
        before, after = old.status, new.status
        if (before.st_mode, before.st_uid, before.st_gid) != (
            after.st_mode, after.st_uid, after.st_gid,
        ) or _attributes(old) != _attributes(new):  # fmt: skip
            return "mode"
        return None

    def _delete(self, path: str, entry: _Entry) -> None:
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
        pending: dict[str, _Entry] = {}
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
            self.deltas.append(_Delta("deleted", path, path, entry, None))

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

    def _open_added(self, pending: dict[str, _Entry]) -> dict[str, _Entry]:
        """Report what is new; what is in new directories is pending next."""
        below: dict[str, _Entry] = {}
        for path, entry in pending.items():
            self.deltas.append(_Delta("added", path, path, None, entry))
            if entry.directory is not None:
                for name, child in self.new.children(entry.directory):
                    below[os.path.join(path, name)] = child
        return below

    def _pair(self, path: str, new: _Entry) -> bool:
        """Find where an added entry was before, and compare the two."""
        for identity in self.new.identities(new, self.parted):
            for old_path in self._known.get(identity, ()):
                old = self._deleted.get(old_path)
                if old is None or old.kind != new.kind:
                    continue
                # what was below it is not deleted, unless it had left by itself before
                for gone in [p for p in self._deleted if self._goes_with(p, old_path)]:
                    del self._deleted[gone]
                self._moved_away.add(old_path)
                self.deltas.append(_Delta("renamed", path, old_path, old, new))
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
def _comparison(old: State, new: State, base: Path) -> Iterator[_Comparison]:
    ancestor = common_ancestor(old, new)
    with ExitStack() as stack:
        # A clone shows the base as the overlay has it: without what is mounted on it.
        tree = mount.open_tree(
            mount.AT_FDCWD, base, mount.OPEN_TREE_CLONE | mount.OPEN_TREE_CLOEXEC
        )
        stack.callback(os.close, tree)

        def side(state: State) -> _Side:
            still = _still(state, stack)
            changed = {}
            if ancestor is not None and still is not ancestor:
                fd = os.open(still.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                try:
                    changed = btrfs.changed_inodes(fd, ancestor.generation)
                finally:
                    os.close(fd)
            return _Side(str(still.upper), f"/proc/self/fd/{tree}", changed)

        before = side(old)
        after = before if new is old else side(new)
        yield _Comparison(before, after, None if ancestor is None else ancestor.generation)


def _still(state: State, stack: ExitStack) -> Snapshot:
    """A state that holds still: a layer may be written to while we look."""
    if isinstance(state, Snapshot):
        return state
    assert isinstance(state, Layer)
    snapshot = state.image.snapshot(state)
    stack.callback(state.image.delete, snapshot)
    return snapshot


def _compare(old: State, new: State, base: Path) -> list[Change]:
    with _comparison(old, new, base) as comparison:
        return [
            Change(delta.kind, delta.path, delta.old_path if delta.kind == "renamed" else None)
            for delta in comparison.run()
        ]


def diff(old: State, new: State, base: Path) -> list[Change]:
    """What a program would find changed in `new` against `old`, sorted by path."""
    return _compare(old, new, base)


def count_changes(old: State, new: State, base: Path) -> int:
    """How many files and directories differ at most: contents are not compared."""
    with _comparison(old, new, base) as comparison:
        comparison.contents = False
        return len({delta.path for delta in comparison.run()})


def patch(old: State, new: State, base: Path, under: str = "/") -> str:
    """The changes of text files below `under` as a unified diff (git's dialect).

    `git apply` and, but for renames and modes, `patch -p1` understand it. Binary files, and those
    above 1 MiB, are named without their contents.
    """
    inside = "/" + under.strip("/")
    said: list[str] = []
    with _comparison(old, new, base) as comparison:
        moved: dict[str, _Delta] = {}
        deltas = comparison.run()
        for delta in deltas:
            if delta.kind == "renamed":
                moved[delta.path] = delta
        for delta in deltas:
            if inside not in ("/", delta.path) and not delta.path.startswith(inside + "/"):
                continue
            if delta.kind != "renamed" and delta.path in moved:
                continue  # told together with the move
            said.append(_file_patch(delta))
    return "".join(said)


def _text(entry: _Entry | None) -> str | None:
    """The contents as text; None when they are not."""
    if entry is None or entry.kind == stat.S_IFDIR:
        return ""
    if entry.kind == stat.S_IFLNK:
        return os.readlink(entry.data)
    if entry.kind != stat.S_IFREG or entry.status.st_size > _PATCH_LIMIT:
        return None
    data = Path(entry.data).read_bytes()
    if b"\0" in data:
        return None
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


def _git_mode(entry: _Entry) -> str:
    if entry.kind == stat.S_IFLNK:
        return "120000"
    return "100755" if entry.status.st_mode & 0o100 else "100644"


def _quoted(prefix: str, path: str) -> str:
    raw = os.fsencode(prefix + path)
    if all(0x20 <= byte < 0x7F and byte not in b'"\\' for byte in raw):
        return raw.decode()
    shown = (
        chr(byte) if 0x20 <= byte < 0x7F and byte not in b'"\\' else f"\\{byte:03o}" for byte in raw
    )
    return '"' + "".join(shown) + '"'


_SHOWN: Final = (stat.S_IFREG, stat.S_IFLNK)


def _file_patch(delta: _Delta) -> str:
    old = delta.old if delta.old is not None and delta.old.kind in _SHOWN else None
    new = delta.new if delta.new is not None and delta.new.kind in _SHOWN else None
    if old is None and new is None:
        return ""  # directories and special files: a patch has no word for them
    if old is not None and new is not None and old.kind != new.kind:
        # git has no diff between a file and a symlink either
        return _sections(delta, old, None) + _sections(delta, None, new)
    return _sections(delta, old, new)


def _sections(delta: _Delta, old: _Entry | None, new: _Entry | None) -> str:
    # "modified" keeps one name: below a renamed directory, too, the move is told elsewhere
    old_path = delta.old_path.lstrip("/")
    path = delta.path.lstrip("/")
    renamed = old is not None and new is not None and old_path != path
    head = [f"diff --git {_quoted('a/', old_path)} {_quoted('b/', path)}\n"]
    if old is None and new is not None:
        head.append(f"new file mode {_git_mode(new)}\n")
    elif new is None and old is not None:
        head.append(f"deleted file mode {_git_mode(old)}\n")
    elif old is not None and new is not None and _git_mode(old) != _git_mode(new):
        head.append(f"old mode {_git_mode(old)}\nnew mode {_git_mode(new)}\n")
    if renamed:
        head.append(f"rename from {_quoted('', old_path)}\nrename to {_quoted('', path)}\n")
    before, after = _text(old), _text(new)
    old_name = "/dev/null" if old is None else _quoted("a/", old_path)
    new_name = "/dev/null" if new is None else _quoted("b/", path)
    if before is None or after is None:
        if old is not None and new is not None and _same_bytes(old.data, new.data):
            return "".join(head) if len(head) > 1 else ""
        return "".join(head) + f"Binary files {old_name} and {new_name} differ\n"
    hunks = _hunks(before, after)
    if not hunks:
        return "".join(head) if len(head) > 1 else ""
    return "".join(head) + f"--- {old_name}\n+++ {new_name}\n" + hunks


def _hunks(before: str, after: str) -> str:
    lines = difflib.unified_diff(_lines(before), _lines(after))
    shown: list[str] = []
    for number, line in enumerate(lines):
        if number < 2:
            continue  # the names are ours to write
        shown.append(line)
        if not line.endswith("\n"):
            shown.append("\n\\ No newline at end of file\n")
    return "".join(shown)


def _lines(text: str) -> list[str]:
    """Lines as diff(1) counts them; str.splitlines knows more separators."""
    lines = text.split("\n")
    last = lines.pop()
    return [line + "\n" for line in lines] + ([last] if last else [])
