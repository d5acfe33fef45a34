"""Capture a sandbox's state, when it is asked for or before.

A checkpoint needs the programs stopped for some milliseconds.  But an agent thinks before he asks
for one, and most programs wait for him meanwhile.  So when a tree has come to rest its state is
captured at once, programs and files, and belongs to nobody.  If a checkpoint is asked for and
nothing has happened since (deltacr/resting.py finds that out without a stop), the state becomes
that checkpoint's.  If something has happened, it is dropped when the next one is captured.

The same for a second checkpoint of one state: it shares everything with the first.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..deltacr import verify
from ..deltacr.engine import Template
from ..deltafs import diff
from ..deltafs.layers import Snapshot
from ..errors import CheckpointError, DeltaBoxError
from .box import Box, Busy, Saved
from .nodes import Node, Rested, State

if TYPE_CHECKING:
    from .trees import Tree

log = logging.getLogger(__name__)

_LARGE, _SLOW = 128 << 20, 30  # bytes; milliseconds
# Capturing a large state for nothing counts so much, and is not done from so much on; each
# checkpoint takes one off. So where it is of no use it is tried once in four checkpoints.
_IN_VAIN, _TOO_MUCH = 4, 12


@dataclass(frozen=True)
class Taken:
    """A state that was captured, and what the keeper had to remember of the same instant."""

    state: State
    saved: Saved
    stats: dict[str, Any]


def unchanged(
    box: Box, *, wait: bool = True, patience: bool = False
) -> tuple[Rested, Saved] | None:
    """The last state that was captured, and what we are to remember, if that is the present one.

    `patience`: some milliseconds for those who are on their way back after it.
    Raises `Busy` if it would have to wait and must not.
    """
    rested = box.rested
    if rested is None or rested.live is not box.live:
        return None
    with box.kept_steady(wait=wait):
        with box.changed:
            box.check_open()
        try:
            found = box.tree.engine.unmoved(box.live, patience=patience)
            if found is not rested.state.template:
                return None
        except OSError as error:
            log.info("%s: a process ends: %s", box.number, error)
            return None
        with box.changed:
            saved = box.save()
            return (rested, saved) if box.traces() == rested.traces else None


def at_head(box: Box, head: Node) -> bool:
    """Whether the present state is the one of the checkpoint that the sandbox stands on.

    True only if that is certain. What the keeper remembers is compared as well: what a caller has
    fetched of a program's output, or has begun to wait for, leaves no trace in the programs.
    """
    saved = _just_arrived(box)
    if saved is None:
        found = unchanged(box, patience=True)
        if found is None or found[0].state is not head.state:
            return False
        saved = found[1]
    return (saved.handles, saved.calls, saved.registered) == (
        head.saved.handles,
        head.saved.calls & saved.calls,  # others have ended since
        head.saved.registered,
    )


def _just_arrived(box: Box) -> Saved | None:
    """What we are to remember, if all is as it was brought here by a rollback or fork."""
    with box.steady:
        with box.changed:
            box.check_open()
            arrived = box.arrived
        if arrived is None or arrived[0] is not box.live:
            return None
        try:
            if not box.tree.engine.never_left(box.live):
                return None
        except OSError as error:
            log.info("%s: a process ends: %s", box.number, error)
            return None
        with box.changed:
            saved = box.save()  # what is in the pipes counts
            return saved if box.traces() == arrived[1] else None


def stats_again(rested: Rested) -> dict[str, Any]:
    """What a checkpoint costs that is given a state which is there already."""
    if rested.foreseen:
        return rested.stats | {"pause_ms": 0.0, "ahead_ms": rested.stats["pause_ms"]}
    return rested.stats | {"pause_ms": 0.0, "ahead_ms": 0.0, "dirty_bytes": 0}


def claimed(box: Box) -> None:
    """A state that was captured ahead has become a checkpoint's."""
    if box.rested is not None:
        box.rested = replace(box.rested, foreseen=False)
    box.in_vain = 0


def came_too_late(box: Box) -> None:
    """A checkpoint had to capture its state itself."""
    box.in_vain = max(0, box.in_vain - 1)


def forget(box: Box) -> None:
    """The sandbox has another tree of processes, or none."""
    rested, box.rested = box.rested, None
    if rested is not None and rested.foreseen:
        box.tree.leave(rested.state)


def take(
    box: Box,
    check: Callable[[], None],
    *,
    go_on: Callable[[], bool] | None = None,
) -> Taken:
    """Capture the present state. `check` may raise at the last moment.

    With `go_on` it is ahead of any request: nothing is waited for, `Busy` is raised if that says no
    when everybody is about to be stopped, and whoever needs room may free the state again.
    """
    tree = box.tree
    believed = unchanged(box, wait=go_on is None) if verify.ENABLED else None
    tree.image.presync()
    snapshots: list[Snapshot] = []
    traces: list[object] = []
    attic = tree.image.attic(box.layer, tree.owner)

    @contextmanager
    def at_instant() -> Iterator[tuple[Callable[[], None], Callable[[], Saved]]]:
        with box.changed:
            saved = box.save()
            traces.append(box.traces())
        with tree.image.snapshotting(box.layer) as snapshotting:

            def finish() -> Saved:
                snapshots.append(snapshotting.finish())
                return saved

            yield snapshotting.wait, finish

    template = None
    try:
        with box.kept_steady(wait=go_on is None):
            if go_on is not None and not go_on():
                raise Busy
            if tree.commons is not None:
                tree.commons.check(box.live.root)
            externals = box.hold()
            try:
                template, saved = tree.engine.checkpoint(
                    box.live, externals=externals, attic=attic, at_instant=at_instant
                )
            finally:
                box.let_go()
        attic.belong(snapshots[0])
        # a request may have come between the two looks
        if believed is not None and believed[0].traces == traces[0]:
            _verify(tree, believed[0].state, template, snapshots[0])
        check()
    except BaseException as error:
        attic.discard()
        if template is not None:
            tree.background.submit(template.close)
        for snapshot in snapshots:
            tree.background.submit(tree.image.delete, snapshot)
        if isinstance(error, (DeltaBoxError, Busy)) or not isinstance(error, Exception):
            raise
        log.exception("%s: checkpoint", box.number)
        raise CheckpointError(f"no checkpoint was taken: {error}") from error
    state, measured = State(snapshots[0], template), template.stats
    stats = {
        "pause_ms": measured.pause_ms,
        "ahead_ms": 0.0,
        "total_ms": measured.total_ms,
        "dirty_bytes": measured.dirty_bytes,
        "processes": measured.processes,
    }
    old = box.rested
    if old is not None and old.foreseen:
        template.succeed(old.state.template)
        tree.leave(old.state)
    box.rested = Rested(box.live, state, traces[0], stats, foreseen=go_on is not None)
    return Taken(state, saved, stats)


def foresee(box: Box, calm: Callable[[], bool]) -> None:
    """Capture the state of a tree that has come to rest, in the background, if that may be of use.

    Not before the first checkpoint, because not everybody takes any; nor in front of a caller.
    """
    tree, base = box.tree, box.live.base
    if box.head is None:
        return
    if base is not None:
        dear = base.whole > _LARGE or base.stats.total_ms > _SLOW
        if not tree.budget.has_room(base.whole) or (dear and box.in_vain >= _TOO_MUCH):
            return
    try:
        if not tree.engine.may_come_to_rest(box.live):
            return
        with box.operating_if_free():
            if not calm() or unchanged(box, wait=False) is not None:
                return
            take(box, lambda: None, go_on=calm)
            box.in_vain += _IN_VAIN
    except Busy:
        return
    except (OSError, DeltaBoxError) as error:
        log.info("%s: nothing was captured ahead: %s", box.number, error)
        return
    tree.engine.prepare(box.live)


def _verify(tree: Tree, believed: State, template: Template, snapshot: Snapshot) -> None:
    """In test mode: what was believed to be the last state is found to be that."""
    verify.same("a tree at rest", believed.template.capture, template.capture)
    try:
        found = list(diff.diff(believed.snapshot, snapshot, tree.base))
    except FileNotFoundError:
        if not believed.freed:  # it would not have been shared, either
            raise
        return
    verify.same("the files of a tree at rest", [], found)
