"""Names that must still lead to what a process has: its executable, directories, mapped files.

Everything that has a name is opened again by it in the rebuilt root, so the name is checked at
capture, by device and inode, each once for a whole tree.
"""

from __future__ import annotations

import os
from dataclasses import replace

from ..linux.openat2 import openat2
from . import memory
from .model import Mapping
from .objects import files
from .objects.ghosts import DELETED, Ghosts
from .subject import Refuse, Refused


class Names:
    """What the names of one frozen tree have been found to lead to."""

    def __init__(self, root_fd: int, base: int, born: float, ghosts: Ghosts) -> None:
        """`base` is a descriptor of the base's root (-1: none); `born` when the tree began."""
        self.root_fd = root_fd
        self.base = base
        self.born = born
        self.ghosts = ghosts
        self._pristine: set[tuple[str, int]] = set()
        self._named: dict[tuple[str, int, int], bool] = {}  # whether it has one version only
        self._ghosts: dict[tuple[str, int, int], int] = {}
        self._found: dict[tuple[str, int, int], int] = {}
        self._root = os.fstat(root_fd)

    def is_pristine(self, mapping: Mapping) -> bool:
        """Whether a mapped file is the base's own, unchanged."""
        return (mapping.path, mapping.inode) in self._pristine

    def executable(self, host: int, refuse: Refuse) -> tuple[str, int]:
        """(path, index of its ghost or -1) of what a process runs."""
        return self._find(host, "exe", "runs", refuse)

    def directory(self, host: int, name: str, refuse: Refuse) -> tuple[str, int]:
        """(path, index of its ghost or -1) of a process's directory of this name."""
        return self._find(host, name, f"has as its {name}", refuse)

    def root_of(self, host: int, refuse: Refuse) -> str:
        info = os.stat(f"/proc/{host}/root")
        if (info.st_dev, info.st_ino) == (self._root.st_dev, self._root.st_ino):
            return "/"
        path, ghost = self.directory(host, "root", refuse)
        if ghost >= 0:
            raise refuse("has as its root a deleted directory", "file")
        return path

    def _find(self, host: int, link: str, verb: str, refuse: Refuse) -> tuple[str, int]:
        magic = f"/proc/{host}/{link}"
        path, info = os.readlink(magic), os.stat(magic)
        key = (path, info.st_dev, info.st_ino)
        if key not in self._found:
            try:
                files.check_name(self.root_fd, path, info)
                self._found[key] = -1
            except Refused as refused:
                said = str(refused)
                if path.endswith(DELETED):
                    try:
                        self._found[key] = self.ghosts.enter(magic, path)
                    except Refused as again:
                        said = str(again)
                if key not in self._found:
                    raise refuse(f"{verb} {said}", "file") from None
        return path, self._found[key]

    def mapped(self, host: int, mappings: list[Mapping], refuse: Refuse) -> list[Mapping]:
        """Each mapped file's name must still lead to it, or it is a ghost."""
        return [self._mapped(host, m, refuse) if m.kind == "file" else m for m in mappings]

    def _mapped(self, host: int, mapping: Mapping, refuse: Refuse) -> Mapping:
        key = (mapping.path, mapping.device, mapping.inode)
        if key not in self._named:
            info, name = self._look(mapping), mapping.path
            if info is None or info.st_ino != mapping.inode:
                self._ghosts[key] = self._ghost(host, mapping, refuse)
                info, name = os.stat(_map_file(host, mapping)), name.removesuffix(DELETED)
            elif info.st_ctime < self.born - 1:
                self._pristine.add((mapping.path, mapping.inode))
            # only a file of the base that has changed since can have two versions
            self._named[key] = info.st_ctime < self.born or not self._in_base(name)
        mapping = replace(mapping, ghost=self._ghosts.get(key, -1))
        # a file that was opened for writing had been copied up before it was mapped
        if not (self._named[key] or (mapping.shared and mapping.may_write)):
            self._check_version(host, mapping, refuse)
        return mapping

    def _look(self, mapping: Mapping) -> os.stat_result | None:
        """What the mapping's name leads to by now."""
        try:
            fd = openat2(self.root_fd, mapping.path, os.O_PATH)
        except OSError:
            return None
        try:
            return os.fstat(fd)
        finally:
            os.close(fd)

    def _ghost(self, host: int, mapping: Mapping, refuse: Refuse) -> int:
        try:
            return self.ghosts.enter(_map_file(host, mapping), mapping.path)
        except Refused as refused:
            raise refuse(f"maps {refused}", "mapping") from None

    def _in_base(self, path: str) -> bool:
        if self.base < 0:
            return True
        try:
            os.close(openat2(self.base, path, os.O_PATH))
        except OSError:
            return False
        return True

    def _check_version(self, host: int, mapping: Mapping, refuse: Refuse) -> None:
        memory_fd = os.open(f"/proc/{host}/mem", os.O_RDONLY | os.O_CLOEXEC)
        if mapping.ghost >= 0:
            file = os.open(_map_file(host, mapping), os.O_RDONLY | os.O_CLOEXEC)
        else:
            file = openat2(self.root_fd, mapping.path, os.O_RDONLY)
        try:
            memory.check_version(memory_fd, mapping, file, refuse)
        finally:
            os.close(file)
            os.close(memory_fd)


def _map_file(host: int, mapping: Mapping) -> str:
    """The magic link to a mapped file (proc_pid_map_files(5))."""
    return f"/proc/{host}/map_files/{mapping.start:x}-{mapping.end:x}"
