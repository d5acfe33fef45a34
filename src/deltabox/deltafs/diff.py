"""What changed between two states of a sandbox's files: a list, a count, a patch.

How the states are compared is told in comparison.py.
"""

from __future__ import annotations

import difflib
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from deltabox.deltafs.comparison import ChangeKind, Delta, Entry, comparing, same_bytes
from deltabox.deltafs.layers import State

_PATCH_LIMIT: Final = 1 << 20  # bytes; larger files are reported like binary ones


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


def _compare(old: State, new: State, base: Path) -> list[Change]:
    with comparing(old, new, base) as comparison:
        return [
            Change(delta.kind, delta.path, delta.old_path if delta.kind == "renamed" else None)
            for delta in comparison.run()
        ]


def diff(old: State, new: State, base: Path) -> list[Change]:
    """What a program would find changed in `new` against `old`, sorted by path."""
    return _compare(old, new, base)


def count_changes(old: State, new: State, base: Path) -> int:
    """How many files and directories differ at most: contents are not compared."""
    with comparing(old, new, base) as comparison:
        comparison.contents = False
        return len({delta.path for delta in comparison.run()})


def patch(old: State, new: State, base: Path, under: str = "/") -> str:
    """The changes of text files below `under` as a unified diff (git's dialect).

    `git apply` and, but for renames and modes, `patch -p1` understand it. Binary files, and those
    above 1 MiB, are named without their contents.
    """
    inside = "/" + under.strip("/")
    said: list[str] = []
    with comparing(old, new, base) as comparison:
        moved: dict[str, Delta] = {}
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


def _text(entry: Entry | None) -> str | None:
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


def _git_mode(entry: Entry) -> str:
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


def _file_patch(delta: Delta) -> str:
    old = delta.old if delta.old is not None and delta.old.kind in _SHOWN else None
    new = delta.new if delta.new is not None and delta.new.kind in _SHOWN else None
    if old is None and new is None:
        return ""  # directories and special files: a patch has no word for them
    if old is not None and new is not None and old.kind != new.kind:
        # git has no diff between a file and a symlink either
        return _sections(delta, old, None) + _sections(delta, None, new)
    return _sections(delta, old, new)


def _sections(delta: Delta, old: Entry | None, new: Entry | None) -> str:
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
        if old is not None and new is not None and same_bytes(old.data, new.data):
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
