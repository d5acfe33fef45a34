"""Names that must still lead to what a process has: its executable, directories, mapped files.

Everything that has a name is opened again by it in the rebuilt root, so the name is checked at
capture, by device and inode, each once for a whole tree.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from typing import Protocol

from ..errors import UnsupportedState
from ..linux.ask import Answers, Facts, Kind, Questions
from ..linux.openat2 import openat2
from . import memory
from .look import Look
from .model import Mapping
from .objects import files
from .objects.ghosts import DELETED
from .subject import Refuse, Refused


class Nameless(Protocol):
    """Where files without a name are kept (objects/ghosts.py). Raises Refused."""

    def enter(self, path: str, target: str, *, unnamed: bool = False) -> int: ...

    def enter_older(self, file: int, path: str) -> int: ...


class Names:
    """What the names of one frozen tree have been found to lead to."""

    def __init__(
        self, root_fd: int, base: int, born: float, ghosts: Nameless, shared: tuple[str, ...] = ()
    ) -> None:
        """`base` is a descriptor of the base's root (-1: none); `born` when the tree began;
        `shared` are directories whose files do not go back with it.
        """
        self._shared = shared
        self.root_fd = root_fd
        self.base = base
        self.born = born
        self.ghosts = ghosts
        self._pristine: set[tuple[str, int]] = set()
        self._named: dict[tuple[str, int, int], bool] = {}  # whether it has one version only
        self._ghosts: dict[tuple[str, int, int], int] = {}
        self._found: dict[tuple[str, int, int], int] = {}
        self._facts: dict[str, bytes | None] = {}  # of what paths lead to; None: to nothing
        self._root = os.fstat(root_fd)

    def is_pristine(self, mapping: Mapping) -> bool:
        """Whether a mapped file is the base's own, unchanged."""
        return (mapping.path, mapping.inode) in self._pristine

    def look(self, paths: tuple[str, ...]) -> Answers:
        """Find out at once what these names lead to."""
        return self._note(paths, questions(paths).ask([self.root_fd]))

    def learn(self, paths: tuple[str, ...], raw: bytes, packed: bytes) -> Answers:
        """The same, where C has asked already."""
        return self._note(paths, questions(paths).answers(raw, packed))

    def _note(self, paths: tuple[str, ...], answers: Answers) -> Answers:
        for path in paths:
            self._facts[path] = answers.get(path)
        return answers

    def lead_alike(self, paths: tuple[str, ...], before: Answers, now: Answers) -> bool:
        """Whether names of mapped files lead where they led, as far as that matters.

        What is stored through a mapping changes the file's times, again and again.
        """
        return before.same(now) or all(
            self._gist(before.get(path)) == self._gist(now.get(path)) for path in paths
        )

    def _gist(self, facts: bytes | None) -> tuple[int, int, int] | None:
        if facts is None:
            return None
        found = Facts.unpack(facts)
        return found.device, found.inode, self._age(found)

    def _age(self, facts: Facts) -> int:
        """0: certainly older than the tree, 2: certainly not, 1: one cannot be sure.

        Only a file that is no older than the tree can have come to be another version of the
        base's.
        """
        return (facts.changed >= (self.born - 1) * 1e9) + (facts.changed >= self.born * 1e9)

    def is_settled(self, mapping: Mapping) -> bool:
        """Whether a mapping shows what its name leads to, now and as long as that is the same."""
        key = (mapping.path, mapping.device, mapping.inode)
        return mapping.kind != "file" or (self._named[key] and mapping.ghost < 0)

    def with_base(self, mappings: Iterable[Mapping]) -> tuple[Mapping, ...]:
        """Written private mappings of the base's own files are marked: templates map those."""
        return tuple(
            replace(m, of_base=True) if m.pages and m.kind == "file" and self.is_pristine(m) else m
            for m in mappings
        )

    def is_of_base(self, mapping: Mapping) -> bool:
        """Whether a mapped file, whose name has been looked up, is the base's own, unchanged."""
        facts = self._facts.get(mapping.path)
        return facts is not None and self._age(Facts.unpack(facts)) == 0

    def executable(self, host: int, look: Look, refuse: Refuse) -> tuple[str, int]:
        """(path, index of its ghost or -1) of what a process runs."""
        return self._find(host, look, "exe", "runs", refuse)

    def directory(self, host: int, name: str, look: Look, refuse: Refuse) -> tuple[str, int]:
        """(path, index of its ghost or -1) of a process's directory of this name."""
        return self._find(host, look, name, f"has as its {name}", refuse)

    def root_of(self, host: int, look: Look, refuse: Refuse) -> str:
        info = look.answers.facts("root facts")
        if (info.device, info.inode) == (self._root.st_dev, self._root.st_ino):
            return "/"
        path, ghost = self.directory(host, "root", look, refuse)
        if ghost >= 0:
            raise refuse("has as its root a deleted directory", "file")
        return path

    def _find(self, host: int, look: Look, link: str, verb: str, refuse: Refuse) -> tuple[str, int]:
        path, info = look.answers.text(link), look.answers.facts(f"{link} facts")
        key = (path, info.device, info.inode)
        known = self._facts.get(path)
        if known is not None:
            it = Facts.unpack(known)
            if (it.device or self._root.st_dev, it.inode) == (info.device, info.inode):
                return path, -1
        magic = f"/proc/{host}/{link}"
        if key not in self._found:
            try:
                files.check_name(self.root_fd, path, os.stat(magic))
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
            try:
                files.check_own(mapping.path, self._shared)
            except Refused as refused:
                raise refuse(f"maps {refused}", "mapping") from None
            info, name = self._look(mapping), mapping.path
            if info is None or info.inode != mapping.inode:
                self._ghosts[key] = self._ghost(host, mapping, refuse)
                info = Facts.of(os.stat(_map_file(host, mapping)))
                name = name.removesuffix(DELETED)
            elif self._age(info) == 0:
                self._pristine.add((mapping.path, mapping.inode))
            # only a file of the base that has changed since can have two versions
            self._named[key] = self._age(info) < 2 or not self._in_base(name)
        mapping = replace(mapping, ghost=self._ghosts.get(key, -1))
        # a file that was opened for writing had been copied up before it was mapped
        if not (self._named[key] or (mapping.shared and mapping.may_write)):
            mapping = self._version(host, mapping, refuse)
        return mapping

    def _version(self, host: int, mapping: Mapping, refuse: Refuse) -> Mapping:
        """A mapping may show the file as it is, or as it still is in the base."""
        try:
            self._check_version(host, mapping, self.root_fd, refuse)
        except UnsupportedState:
            if mapping.ghost >= 0 or self.base < 0:
                raise
        else:
            return mapping
        self._check_version(host, mapping, self.base, refuse)
        file = openat2(self.base, mapping.path, os.O_PATH)
        try:
            return replace(mapping, ghost=self.ghosts.enter_older(file, mapping.path))
        except Refused as refused:
            raise refuse(f"maps {refused}", "mapping") from None
        finally:
            os.close(file)

    def _look(self, mapping: Mapping) -> Facts | None:
        """What the mapping's name leads to by now."""
        if mapping.path in self._facts:
            known = self._facts[mapping.path]
            return None if known is None else Facts.unpack(known)
        try:
            fd = openat2(self.root_fd, mapping.path, os.O_PATH)
        except OSError:
            return None
        try:
            return Facts.of(os.fstat(fd))
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

    def _check_version(self, host: int, mapping: Mapping, root: int, refuse: Refuse) -> None:
        memory_fd = os.open(f"/proc/{host}/mem", os.O_RDONLY | os.O_CLOEXEC)
        if mapping.ghost >= 0:
            file = os.open(_map_file(host, mapping), os.O_RDONLY | os.O_CLOEXEC)
        else:
            file = openat2(root, mapping.path, os.O_RDONLY)
        try:
            memory.check_version(memory_fd, mapping, file, refuse)
        finally:
            os.close(file)
            os.close(memory_fd)


@lru_cache(maxsize=256)
def questions(paths: tuple[str, ...]) -> Questions:
    """What names lead to in a root."""
    ask = Questions()
    for path in paths:
        ask.add(path, Kind.IN_ROOT, path, more=os.O_PATH)
    return ask


def _map_file(host: int, mapping: Mapping) -> str:
    """The magic link to a mapped file (proc_pid_map_files(5))."""
    return f"/proc/{host}/map_files/{mapping.start:x}-{mapping.end:x}"
