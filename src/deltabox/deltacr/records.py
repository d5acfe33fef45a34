"""Programs for the interpreter: arrays of system-call records, position independent.

A `Program` is built once, when a checkpoint is compiled, and run at every rollback and fork.  It
is one block of *control memory*: a header shared by all parties, data the calls point to, stacks
for the processes that will be cloned, and the record sequences themselves.  Several restores of
one template run at the same time in one address space, each with its control memory elsewhere, so
a program never holds an absolute address of itself: arguments are offsets (`Ref`) that the
interpreter adds its base to, and pointers inside data are stored by records (`pointer`).

The layout mirrors interpreter.c; the test of this module compiles both views and compares them.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from enum import IntEnum

from ..linux import numbers as nr

# The address range that is ours in every process we make; interpreter.c has the same numbers.
# Programs that choose addresses at random stay below: V8 and PartitionAlloc take 46 bits of them,
# and reserve up to 1,440 GiB from there. The kernel puts executables above 0x5555_5555_4000,
# everything else higher still.
OURS = 0x4200_0000_0000
CODE = OURS
STACKS = OURS + 0x20_0000
STACKS_SIZE = 0x1_0000
FRAMES = OURS + 0x4000_0000
CONTROL = OURS + 0x8000_0000
SLOT = 0x1000_0000  # 256 MiB of addresses for each control memory
SLOTS = 2048
# A live tree's PID 1 runs the restore in the tree's slot, its own set-up and later requests in
# those so much further up.
WORLD_SLOT, REQUEST_SLOT = 512, 1024
STASH = OURS + 0x100_0000_0000
OURS_END = 0x5500_0000_0000

VARIABLES = 2048
BARRIERS = 128
_HEADER = struct.Struct("<IiQq")
BUDGET_OFFSET = 16
VARIABLES_OFFSET = _HEADER.size + 4 * BARRIERS
HEADER_SIZE = VARIABLES_OFFSET + 8 * VARIABLES
_RECORD = struct.Struct("<HHHhIHH6Q")
RECORD_SIZE = _RECORD.size
_MASK = (1 << 64) - 1


class Op(IntEnum):
    END = 0
    CALL = 1
    CLONE = 2
    BARRIER = 3
    COPY = 4
    RESUME = 5
    SERVE = 6
    TIMER = 7
    STORE = 8
    SKIP_IF_ERROR = 9
    LOAD = 10
    MERGE = 11
    EXPECT = 12
    PULL = 13


SCRATCH = 65536
_MADV_DONTFORK = 10


MAY_FAIL = 1
LATE = 2


@dataclass(frozen=True)
class Var:
    """An index into the header's variables: file descriptors passed in, results of calls."""

    index: int


@dataclass(frozen=True)
class Ref:
    """An offset into the program's own control memory."""

    offset: int

    def __add__(self, more: int) -> Ref:
        return Ref(self.offset + more)


Argument = int | Var | Ref


@dataclass(frozen=True)
class Entry:
    """Where a sequence starts; resolved when the program is sealed."""

    sequence: Sequence


@dataclass
class Sequence:
    """What one process or thread executes, one record after the other."""

    program: Program
    label: str
    late: bool = False  # from here on records run after the point of no return
    _records: list[tuple[Op, int, int | None, int, tuple[Argument | Entry, ...], str]] = field(
        default_factory=list
    )

    def __hash__(self) -> int:
        return id(self)

    def _add(
        self,
        op: Op,
        *arguments: Argument | Entry,
        number: int = 0,
        save: Var | None = None,
        may_fail: bool = False,
        what: str = "",
    ) -> None:
        flags = (MAY_FAIL if may_fail else 0) | (LATE if self.late else 0)
        slot = None if save is None else save.index
        self._records.append((op, flags, slot, number, arguments, what))

    def call(
        self,
        number: int,
        *arguments: Argument,
        save: Var | None = None,
        may_fail: bool = False,
        expect: int | None = None,
        what: str = "",
    ) -> None:
        """A system call; `what` names it in the error when it fails.

        With `expect` any other result is a failure too (EIO): part of a write is not enough.
        """
        if expect is not None and save is None:
            save = self.program.scratch
        self._add(Op.CALL, *arguments, number=number, save=save, may_fail=may_fail, what=what)
        if expect is not None and save is not None:
            self.expect(save, expect, what=what)

    def keep_to_itself(self) -> None:
        """Let nobody cloned from now on inherit the control memory, unless it shares all memory.

        A template has those of all trees restored from it, and copying each costs every clone.
        """
        self.call(nr.MADVISE, Ref(0), self.program.length, _MADV_DONTFORK, may_fail=True)

    def clone(self, arguments: Ref, body: Sequence, *, save: Var | None = None) -> None:
        """clone3(2); the child runs `body` on the stack named in the clone_args."""
        self._add(Op.CLONE, arguments, Entry(body), save=save, what=f"clone of {body.label}")

    def barrier(self, index: int, parties: int, *, wait: bool = True, sleep: bool = False) -> None:
        """Arrive where all parties do; with `wait=False` go on without the others.

        `sleep` is for a barrier that may take hours and where nothing can fail any more.
        """
        self._add(Op.BARRIER, index, parties, 2 if sleep else int(not wait))

    def copy(self, to: Argument, origin: Argument, size: int) -> None:
        self._add(Op.COPY, to, origin, size)

    def resume(self, frame: int, counter: int, control: Ref, size: Var) -> None:
        """Go back to the captured instant; the last thread unmaps the control memory."""
        self._add(Op.RESUME, frame, counter, control, size)

    def serve(self, sock: Argument, signals: Argument, reports: Argument) -> None:
        self._add(Op.SERVE, sock, signals, reports)

    def timer(self, clock: int, event: Argument, identifier: int) -> None:
        self._add(Op.TIMER, clock, event, identifier, what=f"timer_create({identifier})")

    def store(self, at: Argument, value: Argument) -> None:
        self._add(Op.STORE, at, value)

    def load(self, at: Ref, save: Var) -> None:
        """A 32-bit integer that a call has written, as pipe2(2) does."""
        self._add(Op.LOAD, at, save=save)

    def merge(
        self,
        source: Argument,
        origin: int,
        target: int,
        size: int,
        *,
        scratch: Ref,
        is_file: bool,
        copied: Var,
        what: str,
    ) -> None:
        """Copy the pages that differ from a process (a pid) or its memory file (a descriptor)."""
        self._add(
            Op.MERGE,
            source,
            origin,
            target,
            size,
            scratch,
            int(is_file),
            number=copied.index,
            what=what,
        )

    def pull(
        self,
        source: Argument,
        remote: bytes,
        local: bytes,
        count: int,
        total: int,
        *,
        is_file: bool,
        what: str,
    ) -> None:
        """Read lists of ranges (struct iovec) of a process (a pid), or of its memory file."""
        here, there = self.program.data(local), self.program.data(remote)
        self._add(Op.PULL, source, there, here, count, total, int(is_file), what=what)

    def expect(self, value: Var, wanted: int, *, what: str = "") -> None:
        """Fail unless a call's result was this: a write or a wait that did less is an error."""
        self._add(Op.EXPECT, value, wanted, what=what)

    def skip_if_error(self, value: Var, count: int) -> None:
        self._add(Op.SKIP_IF_ERROR, value, count)

    def must_succeed(self) -> int:
        return sum(not flags & (MAY_FAIL | LATE) for _, flags, *_ in self._records)

    def size(self) -> int:
        return (len(self._records) + 1) * RECORD_SIZE

    def encode(self, entries: dict[Sequence, int]) -> bytes:
        parts = []
        for op, flags, save, number, arguments, _ in self._records:
            variables = control = 0
            values = [0] * 6
            for index, argument in enumerate(arguments):
                if isinstance(argument, Var):
                    variables |= 1 << index
                    values[index] = argument.index
                elif isinstance(argument, Ref):
                    control |= 1 << index
                    values[index] = argument.offset
                elif isinstance(argument, Entry):
                    values[index] = entries[argument.sequence]
                else:
                    values[index] = argument & _MASK
            parts.append(
                _RECORD.pack(
                    op, flags, variables, -1 if save is None else save, number, control, 0, *values
                )
            )
        parts.append(_RECORD.pack(Op.END, 0, 0, -1, 0, 0, 0, 0, 0, 0, 0, 0, 0))
        return b"".join(parts)


class Program:
    """Control memory under construction."""

    def __init__(self, *inputs: str) -> None:
        """`inputs` names the file descriptors that will be passed when the program is run."""
        self._data = bytearray(HEADER_SIZE)
        self._sequences: list[Sequence] = []
        self._pointers: list[tuple[Ref, Ref]] = []
        self._next_variable = 0
        self.memory = self.variable()  # the control memory's own descriptor comes first
        self.inputs = {name: self.variable() for name in inputs}
        self.below = self.variable()  # bytes between CONTROL and this control memory
        self.end = self.variable()  # its end address
        self.above = self.variable()  # bytes from there to the end of our range
        self.length = self.variable()  # its size
        self.result = self.variable()
        self.scratch = self.variable()  # results of PID 1's calls that are only looked at
        self.handed: dict[str, int] = {}  # descriptors that the keeper takes out of PID 1
        self.root = self.sequence("root")

    def variable(self) -> Var:
        if self._next_variable >= VARIABLES:
            raise ValueError("the state needs more variables than a program has")
        self._next_variable += 1
        return Var(self._next_variable - 1)

    def sequence(self, label: str) -> Sequence:
        made = Sequence(self, label)
        self._sequences.append(made)
        return made

    def data(self, content: bytes, align: int = 8) -> Ref:
        self._data += bytes(-len(self._data) % align)
        at = len(self._data)
        self._data += content
        return Ref(at)

    def text(self, content: bytes | str) -> Ref:
        """A C string."""
        return self.data((content.encode() if isinstance(content, str) else content) + b"\0", 1)

    def pointer(self, at: Ref, to: Ref) -> None:
        """Store the address of `to` at `at` before anything else runs."""
        self._pointers.append((at, to))

    def vector(self, strings: Items[bytes]) -> Ref:
        """A NULL-terminated array of C strings, as execve(2) takes."""
        texts = [self.text(s) for s in strings]
        array = self.data(bytes(8 * (len(texts) + 1)))
        for index, text in enumerate(texts):
            self.pointer(array + 8 * index, text)
        return array

    def stack(self, size: int = 4096) -> Ref:
        """Lowest address of a stack."""
        return self.data(bytes(size), 16)

    def clone_args(
        self,
        *,
        flags: int,
        exit_signal: int = 0,
        pid: int = 0,
        stack: Ref | int | None,
        stack_size: int = 4096,
    ) -> Ref:
        """struct clone_args (uapi/linux/sched.h); `pid` is the wanted one, 0 for any."""
        wanted = self.data(struct.pack("<i", pid), 8) if pid else None
        args = self.data(
            struct.pack(
                "<11Q",
                flags,
                0,
                0,
                0,
                exit_signal,
                stack if isinstance(stack, int) else 0,
                stack_size if stack is not None else 0,
                0,
                0,
                1 if pid else 0,
                0,
            )
        )
        if isinstance(stack, Ref):
            self.pointer(args + 40, stack)
        if wanted is not None:
            self.pointer(args + 64, wanted)
        return args

    def seal(self) -> Sealed:
        """The finished bytes."""
        prologue = Sequence(self, "prologue")
        for at, to in self._pointers:
            prologue.store(at, to)
        self._data += bytes(-len(self._data) % 64)
        position = len(self._data)
        entry = position
        position += len(self._pointers) * RECORD_SIZE  # runs into the root sequence
        entries: dict[Sequence, int] = {}
        for sequence in self._sequences:
            entries[sequence] = position
            position += sequence.size()
        body = prologue.encode(entries)[:-RECORD_SIZE]
        body += b"".join(s.encode(entries) for s in self._sequences)
        if position > SLOT - 4096:
            raise ValueError(f"a restore program of {position} bytes is larger than its slot")
        labels = [(entries[s], s.label, [what for *_, what in s._records]) for s in self._sequences]
        return Sealed(
            bytes(self._data) + body,
            entry,
            list(self.inputs),
            (self.below.index, self.end.index, self.above.index, self.length.index),
            labels,
            sum(s.must_succeed() for s in self._sequences),
            dict(self.handed),
        )


@dataclass(frozen=True)
class Sealed:
    """A program ready to run any number of times."""

    content: bytes
    entry: int
    inputs: list[str]
    slot_variables: tuple[int, int, int, int]
    labels: list[tuple[int, str, list[str]]]
    records: int  # those whose failure ends the program
    handed: dict[str, int] = field(default_factory=dict)  # name -> number in PID 1

    def locate(self, where: int) -> str:
        """Words for the record at offset `where`."""
        for start, label, whats in self.labels:
            index = (where - start) // RECORD_SIZE
            if where >= start and index < len(whats):
                return f"{label}: record {index}" + (f" ({whats[index]})" if whats[index] else "")
        return f"record at {where}"

    def place(self, slot: int) -> tuple[int, int, list[tuple[int, int]]]:
        """For one run in the given slot: the control memory's address, its size, and the 64-bit
        words, by offset, in which it differs from `content`.
        """
        # A page of nothing on either side keeps `below` and `above` from ever being zero.
        address = CONTROL + slot * SLOT + 4096
        size = (len(self.content) + 4095) & ~4095
        values = (address - CONTROL, address + size, OURS_END - address - size, size)
        words = list(zip(self.slot_variables, values, strict=True))
        return address, size, [(VARIABLES_OFFSET + 8 * index, value) for index, value in words]
