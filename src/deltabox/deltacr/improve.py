"""Templates made better while nobody waits, one small piece at a time.

Two things make forks of a template slow, and with them checkpoints and rollbacks: many small pages,
each of which has an entry to copy (2 GiB: 50 ms), and many generations, because a fork of a fork is
slower than what it was forked from (0.8 ms at the fifth, 3 ms at the fiftieth, 43 at the
two-hundredth).  So the first of a line is gathered into huge pages, and after some generations a
full copy begins a new line.  Both take seconds where the memory is large (0.4 GB/s to gather, 0.7
to copy), so they are done in pieces; whoever wants to fork the template waits for one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator

from ..linux import numbers as nr
from .live import Live
from .model import PAGE
from .records import Program
from .stash import Stash, duplicate, plan
from .template import Template

GENERATIONS = 8
_PIECE = 8 << 20
_HUGE = 2 << 20
_MADV_POPULATE_WRITE, _MADV_COLLAPSE = 23, 25


def improve(
    live: Live,
    *,
    take_blank: Callable[[], Template],
    reference: int,
    has_room: Callable[[int], bool],
) -> Generator[None, None, bool]:
    """Yields after every piece; returns whether the next checkpoint will have another template.

    Over at once when there is nothing to do, and when a checkpoint is taken meanwhile. Raises
    OSError, ProgramFailed, PeerGone; nothing depends on it.
    """
    base, successor = live.base, live.successor
    if base is None:
        if successor is not None:
            yield from gather(successor, lambda: live.successor is successor)
    elif base.depth >= GENERATIONS and (successor is None or successor.depth):
        return (yield from _copy(live, base, take_blank, reference, has_room))
    return False


def reserve(stash: Stash) -> Iterator[Program]:
    """Programs that give an empty stash huge pages to be filled, where it will be full of pages.

    So nothing has to be gathered later. Memory that is advised to be huge (MADV_HUGEPAGE) would be
    so for ever, also in a restored process.
    """
    for low, high in stash.full():
        for start in range(low, high, _PIECE):
            program = Program()
            end = min(high, start + _PIECE)
            for at in range(start, end, _HUGE):  # where there is no page at all, none is gathered
                program.root.call(nr.MADVISE, at, PAGE, _MADV_POPULATE_WRITE, may_fail=True)
            program.root.call(nr.MADVISE, start, end - start, _MADV_COLLAPSE, may_fail=True)
            yield program


def gather(template: Template, wanted: Callable[[], bool]) -> Iterator[None]:
    """Put pages that a template has to itself into huge ones; before any fork is made of it.

    A fork that was made before would be left with the small pages, and so with all of the memory.
    MADV_COLLAPSE (madvise(2)) leaves no flag behind. Only what is full of pages: none are added.
    """
    if template.gathered or template.depth or template.stash is None:
        return
    template.gathered = True
    for low, high in template.stash.full():
        for start in range(low, high, _PIECE):
            program = Program()
            size = min(high - start, _PIECE)
            program.root.call(nr.MADVISE, start, size, _MADV_COLLAPSE, may_fail=True)
            with template.life:  # not for long: a checkpoint may want to use it
                if template.closed or not wanted():
                    return
                template.peer.run(program.seal(), 0)
            yield


def _copy(
    live: Live,
    base: Template,
    take_blank: Callable[[], Template],
    reference: int,
    has_room: Callable[[int], bool],
) -> Generator[None, None, bool]:
    """Make a template with copies of all pages the one for the next checkpoint."""
    assert base.stash is not None
    whole = base.whole
    if not has_room(whole):
        return False
    made = take_blank()
    used = False
    try:
        with base.life:
            if base.closed or base.capture is None:
                return False
            fresh = plan(base.capture.processes, None)
            made.resize(own=whole, whole=whole)
            feeding = duplicate(base.stash, fresh, base.pid_outside, reference)
        try:
            programs = [feeding.program, *reserve(fresh)]
            for pull in feeding.pulls:
                programs += [feeding.reading([piece]) for piece in pull.pieces(_PIECE)]
            for program in programs:
                with base.life:
                    if base.closed or live.base is not base:
                        return False
                    made.peer.run(program.seal(), 0, feeding.fds)
                yield
        finally:
            feeding.close()
        made.stash = fresh
        yield from gather(made, lambda: live.base is base)
        used = live.replace_successor(base, made)
        return used
    finally:
        if not used:
            made.close()
