"""Names that must still lead to what a process has: its executable, directories, mapped files.

Everything that has a name is opened again by it in the rebuilt root, so the name is checked at
capture, by device and inode, each once for a whole tree.
"""

from __future__ import annotations

import os

from ..linux.openat2 import openat2
from . import memory
from .model import Mapping
from .objects import files
from .subject import Refuse, Refused


class Names:
    """What the names of one frozen tree have been found to lead to."""

    def __init__(self, root_fd: int, base: int, born: float) -> None:
        """`base` is a descriptor of the base's root (-1: none); `born` when the tree began."""
        self.root_fd = root_fd
        self.base = base
        self.born = born
        self._pristine: set[tuple[str, int]] = set()
        self._named: dict[tuple[str, int, int], bool] = {}
        self._root = os.fstat(root_fd)

    def is_pristine(self, mapping: Mapping) -> bool:
        """Whether a mapped file is the base's own, unchanged."""
        return (mapping.path, mapping.inode) in self._pristine

    def executable(self, host: int, refuse: Refuse) -> str:
        path = os.readlink(f"/proc/{host}/exe")
        self.check_name(path, os.stat(f"/proc/{host}/exe"), "runs", refuse)
        return path

    def directory(self, host: int, name: str, refuse: Refuse) -> str:
        path = os.readlink(f"/proc/{host}/{name}")
        self.check_name(path, os.stat(f"/proc/{host}/{name}"), f"has as its {name}", refuse)
        return path

    def root_of(self, host: int, refuse: Refuse) -> str:
        info = os.stat(f"/proc/{host}/root")
        if (info.st_dev, info.st_ino) == (self._root.st_dev, self._root.st_ino):
            return "/"
        return self.directory(host, "root", refuse)

    def check_name(
        self,
        path: str,
        info: os.stat_result,
        verb: str,
        refuse: Refuse,
    ) -> None:
        key = (path, info.st_dev, info.st_ino)
        if key in self._named:
            return
        try:
            files.check_name(self.root_fd, path, info)
        except Refused as refused:
            raise refuse(f"{verb} {refused}", "file") from None
        self._named[key] = True

    def mapped(self, host: int, mappings: list[Mapping], refuse: Refuse) -> None:
        """Each mapped file's name must still lead to it: it is mapped again by that name."""
        for mapping in mappings:
            if mapping.kind != "file":
                continue
            device, inode = mapping.device, mapping.inode
            key = (mapping.path, device, inode)
            if key in self._named:
                if not self._named[key]:
                    self._check_version(host, mapping, refuse)
                continue
            try:
                fd = openat2(self.root_fd, mapping.path, os.O_PATH)
            except OSError as error:
                raise refuse(
                    f"maps {mapping.path}, which can no longer be opened: {error.strerror}",
                    "mapping",
                ) from None
            info = os.fstat(fd)
            os.close(fd)
            if info.st_ino != inode:
                raise refuse(
                    f"maps an earlier {mapping.path}, which has been replaced since", "mapping"
                )
            # only a file of the base that has changed since can have two versions
            if info.st_ctime < self.born - 1:
                self._pristine.add((mapping.path, inode))
            self._named[key] = (
                info.st_ctime < self.born
                # a file that was opened for writing had been copied up before it was mapped
                or (mapping.shared and mapping.may_write)
                or not self._in_base(mapping.path)
            )
            if not self._named[key]:
                self._check_version(host, mapping, refuse)

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
        file = openat2(self.root_fd, mapping.path, os.O_RDONLY)
        try:
            memory.check_version(memory_fd, mapping, file, refuse)
        finally:
            os.close(file)
            os.close(memory_fd)
