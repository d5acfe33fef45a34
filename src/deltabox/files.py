"""The files of a sandbox, from outside: no process inside is needed, and none can interfere.

Paths are those inside; whatever symlinks say, nothing outside of the sandbox's root is reached.
What is written belongs to the sandbox's root user.
"""

from __future__ import annotations

import os
import stat as stat_bits
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from .sandbox import Sandbox

StrPath = str | os.PathLike[str]


@dataclass(frozen=True)
class FileStat:
    """What stat(2) says, with owners as seen inside. `size` in bytes, `mode`: permission bits."""

    size: int
    mode: int
    uid: int
    gid: int
    mtime_ns: int
    kind: Literal["file", "directory", "symlink", "fifo", "socket", "device"]


class Files:
    """`sandbox.files`. Errors are those of the operating system, such as `FileNotFoundError`."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox

    def _call(self, op: str, path: StrPath, **arguments: Any) -> Any:
        inside = os.fspath(path)
        if not inside.startswith("/"):
            raise ValueError(f"a path inside a sandbox is absolute, {inside!r} is not")
        return self._sandbox._call(f"file_{op}", path=inside, **arguments)

    def read(self, path: StrPath) -> bytes:
        """The contents of a regular file."""
        data: bytes = self._call("read", path)
        return data

    def read_text(self, path: StrPath, encoding: str = "utf-8") -> str:
        """The contents of a regular file as text."""
        return self.read(path).decode(encoding)

    def write(self, path: StrPath, data: bytes, *, mode: int | None = None) -> None:
        """Write a file; directories above are made. `mode` sets its permissions (new: 0o644)."""
        if not isinstance(data, (bytes, bytearray, memoryview)):
            raise TypeError("write() takes bytes; write_text() takes str")
        self._call("write", path, data=bytes(data), mode=mode)

    def write_text(
        self, path: StrPath, text: str, encoding: str = "utf-8", *, mode: int | None = None
    ) -> None:
        """Write a file of text; see `write`."""
        self.write(path, text.encode(encoding), mode=mode)

    def list(self, path: StrPath) -> list[str]:
        """The names in a directory, sorted."""
        names: list[str] = self._call("list", path)
        return names

    def stat(self, path: StrPath) -> FileStat:
        """What a file is. A symlink at the end is followed, within the sandbox."""
        return FileStat(**self._call("stat", path))

    def exists(self, path: StrPath) -> bool:
        """Whether the path leads to something."""
        found: bool = self._call("exists", path)
        return found

    def mkdir(self, path: StrPath, *, parents: bool = False) -> None:
        """Make a directory; with `parents` those above too, and it may exist already."""
        self._call("mkdir", path, parents=parents)

    def remove(self, path: StrPath, *, recursive: bool = False) -> None:
        """Remove a file or an empty directory; with `recursive` whatever is in it as well."""
        self._call("remove", path, recursive=recursive)

    def upload(self, source: StrPath, path: StrPath) -> None:
        """Copy a file or directory of the host to `path` inside, with its permissions.

        Symlinks in a directory are followed as far as files go; other kinds are refused.
        """
        source = Path(source)
        if not source.is_dir():
            mode = stat_bits.S_IMODE(source.stat().st_mode)
            self.write(path, source.read_bytes(), mode=mode & 0o777)
            return
        target = os.fspath(path)
        self.mkdir(target, parents=True)
        for entry in sorted(source.iterdir()):
            self.upload(entry, os.path.join(target, entry.name))

    def download(self, path: StrPath, target: StrPath) -> None:
        """Copy a file or directory inside to `target` on the host.

        Only regular files and directories are copied: a program inside decides what is there, and
        a symlink of its making has no business on the host.
        """
        inside, here = os.fspath(path), Path(target)
        found = self.stat(inside)
        if found.kind != "directory":
            here.write_bytes(self.read(inside))
            here.chmod(found.mode & 0o777)
            return
        here.mkdir(exist_ok=True)
        for name in self.list(inside):
            below = os.path.join(inside, name)
            if self._call("kind", below) in ("file", "directory"):
                self.download(below, here / name)
