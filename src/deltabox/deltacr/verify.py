"""Test mode: compare every page of a stopped tree with what the checkpoint's template holds.

Incremental memory rests on the kernel having told of every write, and on our bookkeeping of what
was copied when, ahead of the checkpoint or at it.  A page that is missed is a silent difference
after a restore, perhaps hours later.  So in a keeper that was started with DELTABOX_VERIFY=1, as
the tests start theirs, nothing is believed: a difference is an error of the checkpoint, at once.

Nor is it believed that a process has not moved (told.py): it is asked again, and its map and pages
looked at again, and what surrounds the tree.

What the kernel itself writes on the way back from a stop may differ: the area of restartable
sequences (struct rseq), which is registered anew in every restore.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

from ..errors import CheckpointError
from .model import PAGE, Process
from .stash import Stash

ENABLED = os.environ.get("DELTABOX_VERIFY") == "1"
_RSEQ = 64
_CHUNK = 1 << 20


def check(
    template: int, stash: Stash, processes: Iterable[Process], kernels: Mapping[int, set[int]]
) -> None:
    """`template` is its host pid; `kernels` are addresses of struct rseq, by pid.

    Raises CheckpointError for the first difference.
    """
    held = os.open(f"/proc/{template}/mem", os.O_RDONLY | os.O_CLOEXEC)
    try:
        for process in processes:
            own = os.open(f"/proc/{process.host_pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
            try:
                _check(process, own, held, stash, kernels.get(process.pid, set()))
            finally:
                os.close(own)
    finally:
        os.close(held)


def same(what: str, believed: object, found: object) -> None:
    """Raises CheckpointError if something that was believed not to have changed has."""
    if believed != found:
        raise CheckpointError(f"verification: {what} changed unnoticed: {believed} -> {found}")


def same_map(what: str, believed: bytes, found: bytes) -> None:
    """The same of two texts of /proc/PID/smaps, its lines of addresses and VmFlags.

    Adjoining mappings that are alike in everything are one: the kernel joins them when it likes, as
    when we have it watch what is written (vma_merge, mm/vma.c).
    """
    if believed != found:
        same(what, _joined(believed), _joined(found))


def _joined(text: bytes) -> list[tuple[int, int, int, bytes, bytes]]:
    """(start, end, offset, the rest of its line, VmFlags) of each mapping."""
    lines = text.splitlines()
    joined: list[tuple[int, int, int, bytes, bytes]] = []
    for line, flags in zip(lines[::2], lines[1::2], strict=True):
        addresses, access, at, device, inode, *path = line.split(None, 5)
        start, end = (int(part, 16) for part in addresses.split(b"-"))
        rest, offset = b" ".join([access, device, inode, *path]), int(at, 16)
        if joined:
            low, high, first, before, flagged = joined[-1]
            goes_on = inode == b"0" or offset == first + high - low
            if high == start and (before, flagged) == (rest, flags) and goes_on:
                joined[-1] = low, end, first, rest, flags
                continue
        joined.append((start, end, offset, rest, flags))
    return joined


def _check(process: Process, own: int, held: int, stash: Stash, kernels: set[int]) -> None:
    for mapping in process.mappings:
        kept = stash.held.get((process.pid, mapping.start))
        if mapping.pages and kept is None:
            raise CheckpointError(f"verification: nothing is held of {mapping.start:#x}")
        for low, high in mapping.pages if kept is not None else ():
            assert kept is not None
            for at in range(low, high, _CHUNK):
                size = min(_CHUNK, high - at)
                mine, theirs = os.pread(own, size, at), os.pread(held, size, at + kept.shift)
                if mine != theirs:
                    _explain(process, at, mine, theirs, kernels)


def _explain(process: Process, at: int, mine: bytes, theirs: bytes, kernels: set[int]) -> None:
    if len(mine) != len(theirs):
        raise CheckpointError(f"verification: pid {process.pid} at {at:#x} cannot be compared")
    for page in range(0, len(mine), PAGE):
        one, other = mine[page : page + PAGE], theirs[page : page + PAGE]
        for offset in range(PAGE) if one != other else ():
            where = at + page + offset
            if one[offset] != other[offset] and not any(
                area <= where < area + _RSEQ for area in kernels
            ):
                raise CheckpointError(
                    f"verification: pid {process.pid} has written {where:#x}, which was not noticed"
                )
