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

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass

from ..linux import namespace as ns
from ..linux import numbers as nr
from .model import Capture, Description, Process
from .records import Program, Sequence, Var

O_CLOEXEC = 0o2000000
_F_SETFL = 4
_WALL = 0x40000000


class Rebuild:
    """One restore program under construction, as far as descriptors go."""

    def __init__(self, program: Program, init: Sequence, capture: Capture, base: int) -> None:
        self.program = program
        self.init = init  # what PID 1 does
        self.capture = capture
        self.base = base
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

    def aside(self, label: str) -> Aside:
        """A short-lived task of PID 1 with a copy of its descriptors, where any number is free."""
        return Aside(self, label)


class Aside:
    """`with rebuild.aside("what for") as do:` adds to what the task does; PID 1 waits for it."""

    def __init__(self, rebuild: Rebuild, label: str) -> None:
        self._rebuild = rebuild
        self._do = rebuild.program.sequence(label)

    def __enter__(self) -> Sequence:
        return self._do

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        program, init = self._rebuild.program, self._rebuild.init
        self._do.call(nr.EXIT, 0)
        # CLONE_VM: no page tables are copied; the task writes only where PID 1 does not
        arguments = program.clone_args(flags=ns.CLONE_VM, stack=program.stack())
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
