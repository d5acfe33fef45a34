"""The stash: what a template holds of a tree's memory, where, and how it gets there.

Where a page goes.  The template holds every private page of the tree in a range of addresses far
from anything a program uses.  A private mapping is stashed whole, at its final address modulo
1 GiB, so that the mremap(2) which puts it in place in a clone moves page tables instead of entries.
A small one that lies alone is kept modulo 2 MiB: V8 scatters thousands of those over 64 TiB.
So is a written private mapping of a *file of the base*: that never changes, and the template maps
it through a root of its own which shows the base alone.  Pages written in a mapping of any other
file are copied over a fresh mapping of it, opened by name in the rebuilt root: neither later edits
by the live tree nor the old overlay can show through.

What a checkpoint costs.  A template is a fork of the one before it, so it shares all its pages.
Every page of the tree is read and compared, and only those that differ are written: memory grows
with the change.  (That the reading, too, follows the change is a later issue.)

Rejected: keeping all file mappings in the template (those of changed files would pin the old
overlay and read through to the live tree's edits), and final addresses in the template (two Debian
pythons collide already).
"""

from __future__ import annotations

import os
import struct
from collections import Counter
from dataclasses import dataclass, field

from ..errors import UnsupportedState
from ..linux import numbers as nr
from ..linux.openat2 import openat2
from .model import Capture, Mapping, Process
from .records import (
    CONTROL,
    OURS_END,
    PLACES,
    SCRATCH,
    SLOT,
    SLOTS,
    STASH,
    Argument,
    Program,
    Var,
)

_GIB = 1 << 30
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


@dataclass
class Stash:
    """What a template holds, and where: by the pid and the start of each mapping."""

    held: dict[tuple[int, int], Held] = field(default_factory=dict)
    windows: dict[tuple[int, int], list[Window]] = field(default_factory=dict)  # by pid and GiB
    next: int = STASH

    def shift_for(
        self, pid: int, mapping: Mapping, *, avoid: int | None, prefer: int | None, alone: bool
    ) -> int:
        """The shift of a window of this process that covers the mapping; a new one if need be."""
        found = [
            window.shift
            for window in self.windows.get((pid, mapping.start // _GIB), ())
            if window.low <= mapping.start and mapping.end <= window.high and window.shift != avoid
        ]
        if found:
            return prefer if prefer in found else found[0]
        unit = _SMALL if alone and mapping.size < _SMALL else _GIB
        low, high = mapping.start & -unit, (mapping.end + unit - 1) & -unit
        start = self.next + (low - self.next) % unit
        self.next = start + high - low + unit
        if self.next > PLACES:
            raise UnsupportedState(
                f"pid {pid} has {mapping.size >> 20} MiB at {mapping.start:#x}, for which are "
                "no addresses left to keep them at: the tree reserves too much memory",
                object="mapping",
            )
        window = Window(low, high, start - low)
        for gib in range(low // _GIB, (high + _GIB - 1) // _GIB):
            self.windows.setdefault((pid, gib), []).append(window)
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


def plan(capture: Capture, base: Stash | None) -> Stash:
    """Lay out the stash for a whole tree; what `base` holds already stays where it is.

    Neighbours that the kernel had kept apart must not become mergeable, so two of the same
    protection that touch are given different shifts.
    """
    stash = Stash(next=base.next if base else STASH)
    pids = {process.pid for process in capture.processes}
    if base:
        stash.windows = {key: list(found) for key, found in base.windows.items() if key[0] in pids}
    for process in capture.processes:
        neighbours = Counter(m.start // _GIB for m in process.mappings if m.pages)
        previous: Mapping | None = None
        shift = 0
        for mapping in process.mappings:
            if not mapping.pages:
                continue
            key = (process.pid, mapping.start)
            touches = (
                previous is not None
                and previous.kind == mapping.kind == "anonymous"
                and previous.end == mapping.start
                and previous.prot == mapping.prot
            )
            avoid = shift if touches else None
            known = base.held.get(key) if base else None
            shift = stash.shift_for(
                process.pid,
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


@dataclass
class Feeding:
    """The template's own program, what it needs, and how to tell that all was read."""

    program: Program
    fds: dict[str, int]
    copied: Var  # pages that were merged
    fresh: int = 0  # bytes that were read without comparing
    checks: list[tuple[Var, int]] = field(default_factory=list)


def feed(capture: Capture, stash: Stash, base: Stash | None, reference: int) -> Feeding:
    """Make a template that holds `base` hold `stash`, reading from the stopped processes.

    Pages of mappings that it holds already are compared and copied only when they differ.
    process_vm_readv(2) respects PROT_NONE, so such pages come through /proc/PID/mem instead.
    `reference` is a root that shows the base as it is, for mappings of its files.
    """
    names = dict.fromkeys(
        held.file[0]
        for key, held in stash.held.items()
        if held.file and not (base and key in base.held and base.held[key].same_place(held))
    )
    hidden = {p.pid: p for p in capture.processes for m in p.mappings if m.pages and not m.prot & 1}
    program = Program(*(f"mem{pid}" for pid in hidden), *names)
    fds = {
        f"mem{pid}": os.open(f"/proc/{p.host_pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
        for pid, p in hidden.items()
    }
    fds |= {path: openat2(reference, path, os.O_RDONLY) for path in names}
    feeding = Feeding(program, fds, program.variable())
    do = program.root
    old = base.held if base else {}
    if base:
        # what it inherited of the control memories of trees restored from its origin
        do.call(nr.MUNMAP, CONTROL + SLOT, (SLOTS - 1) * SLOT)
        do.call(nr.MUNMAP, PLACES, OURS_END - PLACES)
    for key, was in old.items():
        now = stash.held.get(key)
        kept = now is not None and now.same_place(was)
        keep = min(was.size, now.size) if kept and now is not None else 0
        if keep < was.size:
            do.call(nr.MUNMAP, was.address + keep, was.size - keep, what="unmap stash")
        if kept and now is not None:
            for low, high in _without(was.pages, now.pages):
                if low + was.shift < was.address + keep:
                    size = min(high + was.shift, was.address + keep) - low - was.shift
                    do.call(nr.MADVISE, low + was.shift, size, _MADV_DONTNEED, what="drop pages")
    scratch = program.data(bytes(SCRATCH), 4096)
    reader = _Reader(feeding)
    for process in capture.processes:
        for mapping in process.mappings:
            now = stash.held.get((process.pid, mapping.start))
            if now is None:
                continue
            was_held = old.get((process.pid, mapping.start))
            known = 0
            if was_held and was_held.same_place(now):
                known = min(was_held.size, now.size)
            if known < now.size:
                _reserve(program, now, known)
            border = mapping.start + known
            for low, high in mapping.pages:
                if low < border:
                    size = min(high, border) - low
                    source = program.inputs.get(f"mem{process.pid}")
                    is_file = not mapping.prot & 1
                    do.merge(
                        source if is_file and source is not None else process.host_pid,
                        low,
                        low + now.shift,
                        size,
                        scratch=scratch,
                        is_file=is_file,
                        copied=feeding.copied,
                        what=f"read the memory of pid {process.pid}",
                    )
                if high > border:
                    first = max(low, border)
                    reader.add(process, mapping, first, first + now.shift, high - first)
    reader.flush()
    return feeding


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


class _Reader:
    """Reads fresh pages in batches of as many ranges as one call takes."""

    def __init__(self, feeding: Feeding) -> None:
        self._feeding = feeding
        self._process: Process | None = None
        self._ranges: list[tuple[int, int, int]] = []

    def add(self, process: Process, mapping: Mapping, origin: int, to: int, size: int) -> None:
        feeding = self._feeding
        feeding.fresh += size
        if not mapping.prot & 1:
            result = feeding.program.variable()
            feeding.program.root.call(  # pread64
                17,
                feeding.program.inputs[f"mem{process.pid}"],
                to,
                size,
                origin,
                save=result,
                what=f"read protected memory of pid {process.pid}",
            )
            feeding.checks.append((result, size))
            return
        if process is not self._process or len(self._ranges) == _IOV_MAX:
            self.flush()
            self._process = process
        self._ranges.append((origin, to, size))

    def flush(self) -> None:
        if self._ranges and self._process is not None:
            feeding = self._feeding
            _read_ranges(feeding.program, self._process.host_pid, self._ranges, feeding.checks)
            self._ranges.clear()


def _read_ranges(
    program: Program,
    pid: int,
    ranges: list[tuple[int, int, int]],
    checks: list[tuple[Var, int]],
) -> None:
    """process_vm_readv(2) of (origin, target, size) ranges, at most IOV_MAX of them."""
    remote = program.data(b"".join(struct.pack("<QQ", a, n) for a, _, n in ranges))
    local = program.data(b"".join(struct.pack("<QQ", a, n) for _, a, n in ranges))
    result = program.variable()
    program.root.call(
        nr.PROCESS_VM_READV,
        pid,
        local,
        len(ranges),
        remote,
        len(ranges),
        0,
        save=result,
        what=f"read the memory of host process {pid}",
    )
    checks.append((result, sum(n for _, _, n in ranges)))


def duplicate(
    old: Stash, new: Stash, template: int, reference: int
) -> tuple[Program, dict[str, int], list[tuple[Var, int]]]:
    """Fill a blank template with all that another one (a host pid) holds, page by page.

    The copy begins a new line, because forks of forks of templates get slower with every
    generation; and a new layout, because a line of templates never uses an address range again.
    """
    names = dict.fromkeys(held.file[0] for held in new.held.values() if held.file)
    program = Program(*names)
    fds = {path: openat2(reference, path, os.O_RDONLY) for path in names}
    checks: list[tuple[Var, int]] = []
    ranges: list[tuple[int, int, int]] = []
    for key, held in new.held.items():
        _reserve(program, held, 0)
        origin = old.held[key].shift
        ranges += [(low + origin, low + held.shift, high - low) for low, high in held.pages]
    for first in range(0, len(ranges), _IOV_MAX):
        _read_ranges(program, template, ranges[first : first + _IOV_MAX], checks)
    return program, fds, checks


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
