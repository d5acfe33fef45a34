"""What the files in `objects/` are given to make their kind of kernel object again.

PID 1 makes every description once, as a descriptor that all processes inherit and duplicate into
place.  Not everything can be made at the same moment, so a kind may have a part in several steps:

    open     in PID 1, before any process exists: make the objects
    link     in PID 1, when all of them are open: what refers from one to another
    joined   in PID 1, when every pid, group and session exists
    each     in a process that holds it, in place of inheriting it: what depends on who opens it
    start    in PID 1, after the release, when nothing may fail any more: set clocks going
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Any

from ..linux import namespace as ns
from ..linux import numbers as nr
from .boot import CAPABILITIES
from .model import Capture, Description, Process
from .records import Program, Ref, Sequence, Var

O_CLOEXEC = 0o2000000
_F_SETFL = 4
_WALL = 0x40000000
_DONTWAIT = 0x40
_SCM_RIGHTS, _SCM_CREDENTIALS = 1, 2


class Rebuild:
    """One restore program under construction, as far as descriptors go."""

    def __init__(self, program: Program, init: Sequence, capture: Capture, base: int) -> None:
        self.program = program
        self.init = init  # what PID 1 does
        self.capture = capture
        self.base = base
        self.control = Ref(0)  # what belongs to the last message with ancillary data
        self.notes: dict[str, Any] = {}  # what a kind hands from one step to the next
        self.opened = program.variable()  # what the last record of PID 1's has opened
        self._next = base + len(capture.descriptions)
        self.terminals: dict[int, int] = {}  # index -> a descriptor of the slave side

    def number(self, index: int) -> int:
        """The descriptor in PID 1 of the description with this index."""
        return self.base + index

    def reserve(self) -> int:
        """One more descriptor number in PID 1, inherited by all, behind those of descriptions."""
        self._next += 1
        return self._next - 1

    @property
    def numbers(self) -> int:
        """The first descriptor number that nobody uses."""
        return self._next

    def place(self, number: int, opened: Var | None = None) -> None:
        """Give what has just been opened its descriptor number."""
        opened = opened or self.opened
        self.init.call(nr.DUP3, opened, number, O_CLOEXEC)
        self.init.call(nr.CLOSE, opened)

    def set_status(self, number: int, flags: int) -> None:
        """The status flags that a maker does not take (F_SETFL, fcntl(2))."""
        if flags & ~(3 | 0o100000):
            self.init.call(nr.FCNTL, number, _F_SETFL, flags & ~3, what="F_SETFL")

    def aside(self, label: str, *, who: Who | None = None, shared: bool = False) -> Aside:
        """A short-lived task of PID 1, with descriptors of its own unless they are `shared`.

        With `who` it has the ids of another process, even its pid, which must be free still:
        what the kernel notes of the maker of a socket.
        """
        return Aside(self, label, who, shared)

    def sent(self, number: int, message: Ref, size: int, what: str) -> None:
        """sendmsg(2) of a struct msghdr with `size` bytes, all of them, without waiting."""
        self.init.call(nr.SENDMSG, number, message, _DONTWAIT, what=what, expect=size)

    def message(
        self,
        data: bytes,
        *,
        name: bytes = b"",
        fds: tuple[int, ...] = (),
        credentials: tuple[int, int, int] | None = None,
    ) -> Ref:
        """A struct msghdr. `fds` are descriptor numbers of PID 1 (SCM_RIGHTS, unix(7))."""
        program = self.program
        control = b""
        if fds:
            control += _control(_SCM_RIGHTS, struct.pack(f"<{len(fds)}i", *fds))
        if credentials is not None:
            control += _control(_SCM_CREDENTIALS, struct.pack("<iII", *credentials))
        vector = program.data(struct.pack("<QQ", 0, len(data)))
        program.pointer(vector, program.data(data or b"\0"))
        header = program.data(
            struct.pack("<QIxxxxQQQQIxxxx", 0, len(name), 0, 1, 0, len(control), 0)
        )
        program.pointer(header + 16, vector)
        if name:
            program.pointer(header, program.data(name))
        if control:
            self.control = program.data(control)
            program.pointer(header + 32, self.control)
        return header


def _control(kind: int, content: bytes) -> bytes:
    """A struct cmsghdr of level SOL_SOCKET, padded."""
    return struct.pack("<QII", 16 + len(content), 1, kind) + content + bytes(-len(content) % 8)


@dataclass(frozen=True)
class Who:
    """A process as the kernel notes it for its peers (SO_PEERCRED, unix(7)); ids inside."""

    pid: int
    uid: int
    gid: int


ROOT = Who(1, 0, 0)


class Aside:
    """`with rebuild.aside("what for") as do:` adds to what the task does; PID 1 waits for it."""

    def __init__(self, rebuild: Rebuild, label: str, who: Who | None, shared: bool) -> None:
        self._rebuild = rebuild
        self._who = who
        self._shared = shared
        self._do = rebuild.program.sequence(label)

    def __enter__(self) -> Sequence:
        if self._who is not None and (self._who.uid, self._who.gid) != (0, 0):
            self._become(self._who)
        return self._do

    def _become(self, who: Who) -> None:
        """Effective ids alone, and the capabilities back that changing them takes away."""
        keep = (1 << 32) - 1
        self._do.call(nr.SETRESGID, keep, who.gid, keep, what=f"become group {who.gid}")
        self._do.call(nr.SETRESUID, keep, who.uid, keep, what=f"become user {who.uid}")
        data = self._rebuild.program.data
        full = sum(1 << number for number in CAPABILITIES.values())
        header = data(struct.pack("<II", 0x20080522, 0))
        sets = struct.pack("<6I", full, full, 0, 0, 0, 0)
        self._do.call(nr.CAPSET, header, data(sets), what="capset")

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        program, init = self._rebuild.program, self._rebuild.init
        self._do.call(nr.EXIT, 0)
        # CLONE_VM: no page tables are copied; the task writes only where PID 1 does not
        flags = ns.CLONE_VM | (ns.CLONE_FILES if self._shared else 0)
        wanted = 0 if self._who is None else self._who.pid
        arguments = program.clone_args(flags=flags, pid=wanted, stack=program.stack())
        pid = program.variable()
        init.clone(arguments, self._do, save=pid)
        init.call(nr.WAIT4, pid, 0, _WALL, 0, what="wait for a helper")


Entry = tuple[int, Description]  # the descriptor number in PID 1, and what it shall be
Step = Callable[[Rebuild, Items[Entry]], None]
Own = Callable[[Rebuild, Sequence, Process, int, Description], None]


def nothing(rebuild: Rebuild, entries: Items[Entry]) -> None:
    """A step that a kind has no part in."""


@dataclass(frozen=True)
class Kind:
    """How descriptions of these names come back; steps get all of them at once."""

    names: tuple[str, ...]
    open: Step = nothing
    link: Step = nothing
    joined: Step = nothing
    start: Step = nothing
    each: Own | None = None
