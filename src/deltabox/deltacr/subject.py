"""One open descriptor of a stopped process, as the files in `objects/` see it when they capture.

What a descriptor is, /proc tells twice: its link names the object, its fdinfo has the kernel's own
facts (proc_pid_fdinfo(5)).  What only a system call can tell is asked through a duplicate of the
descriptor (pidfd_getfd(2)), which shares the description, so it must be left as it was.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from ..errors import UnsupportedState
from ..linux import pidfd, proc
from ..linux.ask import Descriptor

if TYPE_CHECKING:
    from .descriptors import DescriptorTable

Refuse = Callable[[str, str], UnsupportedState]

O_CLOEXEC = 0o2000000
_CREATING = 0o100 | 0o200 | 0o1000 | 0o400  # O_CREAT, O_EXCL, O_TRUNC, O_NOCTTY
_O_ASYNC = 0o20000


class Refused(Exception):
    """The sentence's second half: what the descriptor is."""


@dataclass(frozen=True)
class Subject:
    """A descriptor, and the tree it belongs to."""

    host: int  # host pid of the process that holds it
    number: int
    target: str  # the text of its /proc/PID/fd link
    facts: str  # its fdinfo
    table: DescriptorTable  # what else is open in the tree
    refuse: Refuse

    @classmethod
    def look(cls, host: int, number: int, table: DescriptorTable, refuse: Refuse) -> Subject:
        return cls(
            host,
            number,
            os.readlink(f"/proc/{host}/fd/{number}"),
            proc.read(f"/proc/{host}/fdinfo/{number}").decode(errors="surrogateescape"),
            table,
            refuse,
        )

    @classmethod
    def seen(cls, host: int, found: Descriptor, table: DescriptorTable, refuse: Refuse) -> Subject:
        """One that has been looked at with the rest of its process."""
        link, info = (raw.decode(errors="surrogateescape") for raw in (found.link, found.info))
        return cls(host, found.number, link, info, table, refuse)

    @property
    def path(self) -> str:
        """A path that leads to what is open, for the keeper."""
        return f"/proc/{self.host}/fd/{self.number}"

    @cached_property
    def _fields(self) -> dict[str, str]:
        pairs = (line.partition(":") for line in self.facts.splitlines())
        return {key: value.strip() for key, _, value in pairs}

    def fact(self, name: str, default: str | None = None) -> str:
        """The value of a line `name: value` in fdinfo."""
        value = self._fields.get(name, default)
        if value is None:
            raise Refused(f"of a kind this kernel tells too little about, {self.target}")
        return value

    def lines(self, start: str) -> Iterator[str]:
        """The lines of fdinfo that begin so; objects with many parts have one for each."""
        return (line for line in self.facts.splitlines() if line.startswith(start))

    @property
    def raw_flags(self) -> int:
        """The flags of open(2), with close-on-exec, which is the descriptor's."""
        return int(self.fact("flags"), 8)

    @property
    def flags(self) -> int:
        """Flags to make a description with again: access mode and status."""
        return self.raw_flags & ~(O_CLOEXEC | _CREATING | _O_ASYNC)

    @property
    def sends_signals(self) -> bool:
        return bool(self.raw_flags & _O_ASYNC)

    @property
    def position(self) -> int:
        return int(self.fact("pos"))

    @contextmanager
    def taken(self) -> Iterator[int]:
        """A duplicate of the descriptor in the keeper, for the length of the block."""
        if self.host == os.getpid():
            yield self.number
            return
        process = os.pidfd_open(self.host)
        try:
            fd = pidfd.getfd(process, self.number)
        finally:
            os.close(process)
        try:
            yield fd
        finally:
            os.close(fd)

    def is_same_file(self, host: int, number: int) -> bool:
        """Whether another descriptor shares this one's description (kcmp(2))."""
        return not pidfd.kcmp(self.host, host, pidfd.KCMP_FILE, self.number, number)
