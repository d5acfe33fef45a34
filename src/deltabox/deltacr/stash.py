"""The stash: what a template holds of a tree's memory, where, and how it gets there.

Where a page goes.  The template holds every private page of the tree in a range of addresses far
from anything a program uses.  A private mapping is stashed whole, at its final address modulo
1 GiB, so that the mremap(2) which puts it in place in a clone moves page tables instead of entries.
A small one that lies alone is kept modulo 2 MiB: V8 scatters thousands of those over 64 TiB.
So is a written private mapping of a *file of the base*: that never changes, and the template maps
it through a root of its own which shows the base alone.  Pages written in a mapping of any other
file are copied over a fresh mapping of it, opened by name in the rebuilt root: neither later edits
by the live tree nor the old overlay can show through.

What a checkpoint costs.  A template is a fork of the one before it, so it shares all its pages,
and only those that may have changed since (space.py) are read: time and memory grow with the
change.

Rejected: keeping all file mappings in the template (those of changed files would pin the old
overlay and read through to the live tree's edits), and final addresses in the template (two Debian
pythons collide already).
"""

from __future__ import annotations

import os
import struct
from array import array
from collections import Counter
from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace

from ..errors import UnsupportedState
from ..linux import numbers as nr
from ..linux.bulk import Regions, Row, translate
from ..linux.openat2 import openat2
from .model import Mapping, Process
from .records import (
    CONTROL,
    OURS_END,
    SCRATCH,
    SLOT,
    SLOTS,
    STASH,
    Argument,
    Program,
    Var,
)

_GIB = 1 << 30
_AT_ONCE = 4 << 20  # bytes in one piece of a copy of a template
_SMALL = 2 << 20  # what one page of the lowest page table maps
_FEW = 2  # in one GiB
_IOV_MAX = 1024
_MAP_GROWSDOWN, _MAP_NORESERVE = 0x100, 0x4000
_MADV_DONTNEED = 4


@dataclass(frozen=True)
class Window:
    """Where a stretch of a process's addresses is kept: at address + shift."""

    low: int
    high: int
    shift: int

    def covers(self, mapping: Mapping) -> bool:
        return self.low <= mapping.start and mapping.end <= self.high


@dataclass(frozen=True)
class Held:
    """What the stash holds of one mapping."""

    address: int
    size: int
    flags: int
    shift: int
    pages: tuple[tuple[int, int], ...]  # addresses in the process
    file: tuple[str, int] | None = None  # a private mapping of this file of the base, from offset

    def same_place(self, other: Held) -> bool:
        """What is there can stay, but for its size and pages."""
        return (self.shift, self.flags, self.file) == (other.shift, other.flags, other.file)

    def covers(self, other: Held) -> bool:
        """There is room for the other one in the same place."""
        return self.same_place(other) and self.size >= other.size


@dataclass
class Stash:
    """What a template holds, and where: by the pid and the start of each mapping."""

    held: dict[tuple[int, int], Held] = field(default_factory=dict)
    # by pid and GiB, then by shift
    windows: dict[tuple[int, int], dict[int, Window]] = field(default_factory=dict)
    next: int = STASH
    laid: dict[int, tuple[Mapping, ...]] = field(default_factory=dict)  # for these, by pid
    _of: dict[int, dict[int, Held]] = field(default_factory=dict)

    def shift_for(
        self, pid: int, mapping: Mapping, *, avoid: int | None, prefer: int | None, alone: bool
    ) -> int:
        """The shift of a window of this process that covers the mapping; a new one if need be."""
        there = self.windows.get((pid, mapping.start // _GIB), {})
        same = there.get(prefer) if prefer is not None and prefer != avoid else None
        if same is not None and same.covers(mapping):
            return same.shift
        for window in there.values():
            if window.shift != avoid and window.covers(mapping):
                return window.shift
        unit = _SMALL if alone and mapping.size < _SMALL else _GIB
        low, high = mapping.start & -unit, (mapping.end + unit - 1) & -unit
        start = self.next + (low - self.next) % unit
        self.next = start + high - low + unit
        if self.next > OURS_END:
            raise UnsupportedState(
                f"pid {pid} has {mapping.size >> 20} MiB at {mapping.start:#x}, for which are "
                "no addresses left to keep them at: the tree reserves too much memory",
                object="mapping",
            )
        window = Window(low, high, start - low)
        for gib in range(low // _GIB, (high + _GIB - 1) // _GIB):
            self.windows.setdefault((pid, gib), {})[window.shift] = window
        return window.shift

    def has_file(self, pid: int, mapping: Mapping) -> bool:
        """True when a clone inherits this file mapping from the template."""
        held = self.held.get((pid, mapping.start))
        return held is not None and held.file is not None

    def extents(self) -> dict[int, list[tuple[int, int]]]:
        """The stash's address ranges of each process, one for each window that is used."""
        found: dict[int, dict[int, tuple[int, int]]] = {}
        for (pid, _), held in self.held.items():
            ranges = found.setdefault(pid, {})
            low, high = ranges.get(held.shift, (held.address, 0))
            ranges[held.shift] = (min(low, held.address), max(high, held.address + held.size))
        return {pid: list(ranges.values()) for pid, ranges in found.items()}

    def of(self, pid: int) -> dict[int, Held]:
        """What is held of one process, by the start of each mapping."""
        if not self._of:
            for (owner, start), held in self.held.items():
                self._of.setdefault(owner, {})[start] = held
        return self._of.get(pid, {})

    def full(self) -> list[tuple[int, int]]:
        """Ranges of whole huge pages of anonymous memory in which every page is held."""
        found = []
        for held in self.held.values():
            for low, high in held.pages if held.file is None else ():
                first = (low + held.shift + _SMALL - 1) & -_SMALL
                last = (high + held.shift) & -_SMALL
                if first < last:
                    found.append((first, last))
        return found

    def sizes(self) -> dict[int, int]:
        """Bytes held for each process."""
        sizes: dict[int, int] = {}
        for (pid, _), held in self.held.items():
            sizes[pid] = sizes.get(pid, 0) + sum(high - low for low, high in held.pages)
        return sizes


def plan(processes: Items[Process], base: Stash | None) -> Stash:
    """Lay out the stash for a whole tree; what `base` holds already stays where it is.

    Neighbours that the kernel had kept apart must not become mergeable, so two of the same
    protection that touch are given different shifts.
    """
    stash = Stash(next=base.next if base else STASH)
    pids = {process.pid for process in processes}
    if base:
        stash.windows = {key: dict(found) for key, found in base.windows.items() if key[0] in pids}
    for process in processes:
        pid, mappings = process.pid, process.mappings
        stash.laid[pid] = mappings
        if base and base.laid.get(pid) is mappings:
            # most of a large tree: nothing has to be looked at mapping by mapping
            stash.held |= {(pid, start): held for start, held in base.of(pid).items()}
            continue
        neighbours = Counter(m.start // _GIB for m in mappings if m.pages)
        previous: Mapping | None = None
        shift = 0
        for mapping in mappings:
            if not mapping.pages:
                continue
            key = (pid, mapping.start)
            touches = (
                previous is not None
                and previous.kind == mapping.kind == "anonymous"
                and previous.end == mapping.start
                and previous.prot == mapping.prot
            )
            avoid = shift if touches else None
            known = base.held.get(key) if base else None
            shift = stash.shift_for(
                pid,
                mapping,
                avoid=avoid,
                prefer=known.shift if known else None,
                alone=neighbours[mapping.start // _GIB] <= _FEW,
            )
            previous = mapping
            stash.held[key] = Held(
                mapping.start + shift,
                mapping.size,
                map_flags(mapping),
                shift,
                mapping.pages,
                (mapping.path, mapping.offset) if mapping.of_base else None,
            )
    return stash


@dataclass(frozen=True)
class Changes:
    """What may have changed in one process since the template's base, and all that it has."""

    pages: Regions
    present: Regions
    compare: bool = False  # some of `pages` may be as they were: compare before writing


@dataclass(frozen=True)
class Pull:
    """Ranges to read from one process, as iovecs: where they are, and where they are kept."""

    pid: int
    source: int | str  # its host pid, or the input that brings its memory file
    remote: bytes
    local: bytes
    count: int
    total: int
    what: str

    def pieces(self, most: int) -> Iterator[Pull]:
        """The same in parts of about so many bytes."""
        sizes = array("Q", self.remote)[1::2]
        first = total = 0
        for index, size in enumerate(sizes, 1):
            total += size
            if total >= most or index == self.count:
                where = slice(16 * first, 16 * index)
                yield replace(
                    self,
                    remote=self.remote[where],
                    local=self.local[where],
                    count=index - first,
                    total=total,
                )
                first, total = index, 0

    def regions(self) -> Regions:
        """Where they are, in the process."""
        return Regions.of([(at, at + size) for at, size in struct.iter_unpack("<QQ", self.remote)])


@dataclass
class Feeding:
    """What a template has to run to hold a new stash: `program`, and then all of `pulls`."""

    program: Program
    fds: dict[str, int]
    copied: Var  # pages that were merged
    pulls: list[Pull] = field(default_factory=list)
    compares: bool = False  # some pages are compared, and copied if they differ

    @property
    def pulled(self) -> int:
        """Bytes that are read without comparing."""
        return sum(pull.total for pull in self.pulls)

    def most(self, before: int, whole: int) -> int:
        """Bytes of its own that the template may have afterwards, of so many `before`."""
        return whole if self.compares else min(whole, before + self.pulled)

    def reading(self, pulls: Items[Pull]) -> Program:
        """A program of its own for some of the pulls."""
        program = Program(*self.fds)
        for pull in pulls:
            _add(program, pull)
        return program

    def whole(self) -> Program:
        """All in one."""
        for pull in self.pulls:
            _add(self.program, pull)
        return self.program

    def close(self) -> None:
        for fd in self.fds.values():
            os.close(fd)
        self.fds.clear()


def _add(program: Program, pull: Pull) -> None:
    is_file = isinstance(pull.source, str)
    program.root.pull(
        program.inputs[pull.source] if isinstance(pull.source, str) else pull.source,
        pull.remote,
        pull.local,
        pull.count,
        pull.total,
        is_file=is_file,
        what=pull.what,
    )


def feed(
    processes: Items[Process],
    stash: Stash,
    base: Stash | None,
    reference: int,
    changes: dict[int, Changes],
) -> Feeding:
    """Make a template that holds `base` hold `stash`, reading from the stopped processes.

    `changes` are by pid. process_vm_readv(2) respects PROT_NONE, so such pages come through
    /proc/PID/mem instead. `reference` is a root that shows the base as it is, for mappings of its
    files. The caller closes what is returned.
    """
    processes = [p for p in processes if not _is_held(p, stash, base, changes)]
    names = dict.fromkeys(
        held.file[0]
        for process in processes
        for start, held in stash.of(process.pid).items()
        if held.file and not _covered(base, (process.pid, start), held)
    )
    hidden = {p.pid: p for p in processes for m in p.mappings if m.pages and not m.prot & 1}
    program = Program(*(f"mem{pid}" for pid in hidden), *names)
    feeding = Feeding(program, {}, program.variable())
    try:
        for pid, process in hidden.items():
            path = f"/proc/{process.host_pid}/mem"
            feeding.fds[f"mem{pid}"] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        for path in names:
            feeding.fds[path] = openat2(reference, path, os.O_RDONLY)
        old = base.held if base else {}
        if base:
            _shrink(program, old, stash)
        for process in processes:
            _feed_process(feeding, process, stash, old, changes.get(process.pid))
    except BaseException:
        feeding.close()
        raise
    return feeding


def _is_held(
    process: Process, stash: Stash, base: Stash | None, changes: dict[int, Changes]
) -> bool:
    """Whether the base has all of a process, where it is to be."""
    if base is None or base.laid.get(process.pid) is not stash.laid[process.pid]:
        return False
    changed = changes.get(process.pid)
    return changed is None or not len(changed.pages)


def _covered(base: Stash | None, key: tuple[int, int], held: Held) -> bool:
    was = base.held.get(key) if base is not None else None
    return was is not None and was.covers(held)


def _shrink(program: Program, old: dict[tuple[int, int], Held], stash: Stash) -> None:
    """Drop what the template holds and the tree no longer has."""
    do = program.root
    # what it inherited of the control memories of trees restored from its origin
    do.call(nr.MUNMAP, CONTROL + SLOT, (SLOTS - 1) * SLOT)
    for key, was in old.items():
        now = stash.held.get(key)
        if now is was:
            continue
        kept = now is not None and now.same_place(was)
        keep = min(was.size, now.size) if kept and now is not None else 0
        if keep < was.size:
            do.call(nr.MUNMAP, was.address + keep, was.size - keep, what="unmap stash")
        if kept and now is not None and was.pages is not now.pages:
            for low, high in _without(was.pages, now.pages):
                if low + was.shift < was.address + keep:
                    size = min(high + was.shift, was.address + keep) - low - was.shift
                    do.call(nr.MADVISE, low + was.shift, size, _MADV_DONTNEED, what="drop pages")


def _feed_process(
    feeding: Feeding,
    process: Process,
    stash: Stash,
    old: dict[tuple[int, int], Held],
    changes: Changes | None,
) -> None:
    known: list[Row] = []  # where the template has a copy, and where it has none yet
    fresh: list[Row] = []
    hidden_known: list[Row] = []
    hidden_fresh: list[Row] = []
    for mapping in process.mappings:
        now = stash.held.get((process.pid, mapping.start))
        if now is None:
            continue
        was = old.get((process.pid, mapping.start))
        has = min(was.size, now.size) if was and was.same_place(now) else 0
        if has < now.size:
            _reserve(feeding.program, now, has)
        border = mapping.start + has
        readable = bool(mapping.prot & 1)
        if has:
            (known if readable else hidden_known).append((mapping.start, border, now.shift))
        if border < mapping.end:
            (fresh if readable else hidden_fresh).append((border, mapping.end, now.shift))
    if changes is None:
        return
    if changes.compare:
        _merge(feeding, process, known, changes.pages, is_file=False)
        _merge(feeding, process, hidden_known, changes.pages, is_file=True)
    else:
        _pull(feeding, process, known, changes.pages, is_file=False)
        _pull(feeding, process, hidden_known, changes.pages, is_file=True)
    _pull(feeding, process, fresh, changes.present, is_file=False)
    _pull(feeding, process, hidden_fresh, changes.present, is_file=True)


def _pull(
    feeding: Feeding, process: Process, rows: list[Row], regions: Regions, *, is_file: bool
) -> None:
    remote, local, count, total = translate(rows, regions)
    if count:
        source = f"mem{process.pid}" if is_file else process.host_pid
        what = f"read the memory of pid {process.pid}"
        feeding.pulls.append(Pull(process.pid, source, remote, local, count, total, what))


def _merge(
    feeding: Feeding, process: Process, rows: list[Row], regions: Regions, *, is_file: bool
) -> None:
    """Compare, and write only what differs: the rest stays shared with the base."""
    remote, local, count, _ = translate(rows, regions)
    program = feeding.program
    feeding.compares = feeding.compares or bool(count)
    scratch = program.data(bytes(SCRATCH), 4096) if count else None
    for (origin, size), (target, _) in zip(
        struct.iter_unpack("<QQ", remote), struct.iter_unpack("<QQ", local), strict=True
    ):
        assert scratch is not None
        program.root.merge(
            program.inputs[f"mem{process.pid}"] if is_file else process.host_pid,
            origin,
            target,
            size,
            scratch=scratch,
            is_file=is_file,
            copied=feeding.copied,
            what=f"read the memory of pid {process.pid}",
        )


def _reserve(program: Program, held: Held, known: int) -> None:
    """Map a place in the stash, but for its first `known` bytes that are there already."""
    fd: Argument = -1
    flags, offset = 0x100022, 0  # MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE
    if held.file is not None:
        fd, flags, offset = program.inputs[held.file[0]], 0x100002, held.file[1] + known
    program.root.call(
        nr.MMAP,
        held.address + known,
        held.size - known,
        3,
        flags | held.flags,
        fd,
        offset,
        what="reserve stash",
    )


def duplicate(old: Stash, new: Stash, template: int, reference: int) -> Feeding:
    """Fill a blank template with all that another one (a host pid) holds, page by page.

    The copy begins a new line, because forks of forks of templates get slower with every
    generation; and a new layout, because a line of templates never uses an address range again.
    It is read through /proc/PID/mem: process_vm_readv(2) pins what it reads, for which the kernel
    first gives a forked process pages of its own (FAULT_FLAG_UNSHARE, since Linux 5.19), and the
    template that is read would hold everything a second time.
    """
    names = dict.fromkeys(held.file[0] for held in new.held.values() if held.file)
    program = Program("memory", *names)
    fds = {path: openat2(reference, path, os.O_RDONLY) for path in names}
    fds["memory"] = os.open(f"/proc/{template}/mem", os.O_RDONLY | os.O_CLOEXEC)
    feeding = Feeding(program, fds, program.variable())
    remote, local = array("Q"), array("Q")
    for key, held in new.held.items():
        _reserve(program, held, 0)
        origin = old.held[key].shift
        for first, end in held.pages:
            for low in range(first, end, _AT_ONCE):  # nothing smaller can be told apart later
                size = min(end - low, _AT_ONCE)
                remote.extend((low + origin, size))
                local.extend((low + held.shift, size))
    if remote:
        what = f"read the memory of host process {template}"
        packed = remote.tobytes(), local.tobytes()
        size = sum(remote[1::2])
        feeding.pulls.append(Pull(0, "memory", *packed, len(remote) // 2, size, what))
    return feeding


def _without(
    ranges: tuple[tuple[int, int], ...], others: tuple[tuple[int, int], ...]
) -> list[tuple[int, int]]:
    """The parts of sorted ranges that none of the other sorted ranges covers."""
    left = []
    index = 0
    for low, high in ranges:
        while index < len(others) and others[index][1] <= low:
            index += 1
        at = index
        while low < high:
            if at == len(others) or others[at][0] >= high:
                left.append((low, high))
                break
            start, end = others[at]
            if start > low:
                left.append((low, start))
            low = max(low, end)
            at += 1
    return left


def map_flags(mapping: Mapping) -> int:
    return (_MAP_GROWSDOWN if "gd" in mapping.flags else 0) | (
        _MAP_NORESERVE if "nr" in mapping.flags else 0
    )
