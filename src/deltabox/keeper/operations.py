"""Checkpoint, rollback, fork, close: where the file half and the process half meet.

Each of them ends in the old state or in the new one. The order that makes it so:

- *checkpoint*: everything that can fail for lack of room is done or checked before the freeze; the
  snapshot and the buffers are taken at the instant, while the programs are stopped; an error
  before the node is recorded takes back what was made, and the programs run on as if nothing had
  been.
- *rollback*: the checkpoint is restored completely beside the running tree and waits at its
  barrier. Only then the old tree is stopped (so that the two never run at the same time), the
  handles are switched and the new tree is let go. What is left of the old one goes in the
  background.
- *fork*: the same without an old tree. All copies are built before any of them runs.
- *close*: cannot fail; what goes wrong is logged and the next step done.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

from ..deltacr import verify
from ..deltacr.engine import Live
from ..deltafs import diff
from ..deltafs.layers import Layer, Snapshot
from ..errors import (
    DeltaBoxError,
    ForkError,
    RollbackError,
    UnknownCheckpoint,
    UnsupportedState,
)
from . import taking
from .box import Box, Origin, Saved
from .budget import Budget
from .handles import Handle
from .identity import Identity
from .nodes import Node, Revived, State
from .trees import Tree, close_handles

log = logging.getLogger(__name__)

_RETRIES = (0.005, 0.02, 0.05)
Compare = Callable[[Snapshot, Snapshot, Path], Any]


def checkpoint(box: Box, name: str | None, *, reuse: bool, budget: Budget) -> Node:
    """Take a checkpoint of one instant of the whole sandbox.

    With `reuse` it is the one that the sandbox stands on, if nothing has happened since.
    """
    tree = box.tree
    with box.operating("take a checkpoint"):
        if reuse and box.head is not None:
            with tree.lock:
                node = tree.nodes.get(box.head)
            if node is not None and taking.at_head(box, node):
                with tree.lock:
                    if not node.deleted:
                        tree.refer(node)
                        return node
        return _patiently(box, name, budget=budget)


def _patiently(box: Box, name: str | None, *, budget: Budget) -> Node:
    """Take a checkpoint; try again when something stood in the way that may be gone in a moment.

    Many programs hold a socket for a millisecond when they start (libc asks nscd who they are).
    """
    for delay in _RETRIES:
        try:
            return _checkpoint(box, name, budget=budget)
        except UnsupportedState as error:
            log.info("%s: %s; trying again", box.number, error)
            time.sleep(delay)
    return _checkpoint(box, name, budget=budget)


def _checkpoint(box: Box, name: str | None, *, budget: Budget) -> Node:
    tree = box.tree
    started = time.perf_counter()

    def record(state: State, saved: Saved, stats: dict[str, Any]) -> Node:
        total = (time.perf_counter() - started) * 1e3
        return tree.add(
            box=box, name=name, state=state, saved=saved, stats=stats | {"total_ms": total}
        )

    with tree.reserving(name):
        budget.check(tree)
        node = None if verify.ENABLED else _there_already(box, record)
        if node is None:
            taken = taking.take(box, lambda: budget.check(tree))
            node = record(taken.state, taken.saved, taken.stats)
            taking.came_too_late(box)
    tree.background.submit(tree.spares.stock, node)
    tree.background.submit(tree.engine.prepare, box.live)
    tree.background.submit(tree.engine.refill)
    tree.standby.want(box, node, budget)
    return node


def _there_already(box: Box, record: Callable[[State, Saved, dict[str, Any]], Node]) -> Node | None:
    """A checkpoint of a state that has been captured before, if it is the present one."""
    found = taking.unchanged(box)
    if found is None:
        return None
    rested, saved = found
    stats = taking.stats_again(rested)
    try:
        node = record(rested.state, saved, stats)
    except UnknownCheckpoint:
        return None  # it has been deleted meanwhile
    if rested.foreseen:
        taking.claimed(box)
    else:
        node.changed_files = 0
    return node


def rollback(box: Box, reference: str, *, budget: Budget) -> None:
    """Put the sandbox back into the state of a checkpoint."""
    tree = box.tree
    with box.operating("roll back"), tree.pinned(reference) as node:
        tree.dying.acquire()
        try:
            new = tree.engine.room.given(box.live, lambda: _revived(box, node))
        except BaseException as error:
            tree.dying.release()
            if isinstance(error, DeltaBoxError) or not isinstance(error, Exception):
                raise
            log.exception("%s: rollback", box.number)
            raise RollbackError(f"nothing was rolled back: {error}") from error
        with box.steady:
            old_live, old_layer, old_handles = box.live, box.layer, box.handles
            with box.changed:
                box.silence()
            try:
                old_live.stop()
            except Exception as error:
                with box.changed:
                    box.listen()
                tree.dying.release()
                tree.forsake(box, new)
                tree.standby.want(box, node, budget)
                raise RollbackError(f"nothing was rolled back: {error}") from error
            with box.changed:
                box.switch(new.live, new.layer, new.handles, new.registrations, node.saved)
            new.live.release()
        taking.forget(box)
        box.turns += 1
        box.head = node.number
        box.let_go()
        tree.background.submit(tree.spares.stock, node)
        tree.background.submit(tree.engine.prepare, new.live)
        tree.background.submit(_dispose, box, old_live, old_layer, old_handles)
        tree.background.submit(tree.engine.refill)
        tree.standby.want(box, node, budget)
        tree.touch(box, restored=True)


def _revived(box: Box, node: Node) -> Revived:
    """The checkpoint's tree, which has waited or is built now."""
    return box.tree.standby.take(box, node) or box.tree.revive(box, node)


def _dispose(box: Box, live: Live, layer: Layer, handles: dict[int, Handle]) -> None:
    close_handles(box, handles)
    try:
        live.end()
    finally:
        box.tree.dying.release()
        box.tree.image.delete(layer)


def fork(
    box: Box,
    count: int,
    reference: str | None,
    *,
    identity: str,
    budget: Budget,
    executor: Executor,
) -> list[Box]:
    """Live copies of a checkpoint, or of the present state (which becomes a checkpoint)."""
    tree = box.tree
    with box.operating("fork"):
        made = reference is None
        if reference is None:
            reference = _patiently(box, None, budget=budget).number
        budget.check_host()
        with tree.pinned(reference) as node:
            if made:
                tree.released([reference])  # nobody has been told of it
            copies = [tree.new_box(node.number) for _ in range(count)]
            if identity == "new" and node.template.capture is not None:
                for copy in copies:
                    copy.identity = Identity.new(node.template.capture.hostname, copy.number)
            try:
                revived = tree.engine.room.given(
                    box.live, lambda: _all_revived(tree, copies, node, executor)
                )
            except DeltaBoxError as error:
                raise _as_fork_error(error) from error
            except Exception as error:
                log.exception("%s: fork", box.number)
                raise ForkError(f"nothing was forked: {error}") from error
            for copy, new in revived:
                copy.origin = Origin(box, box.turns, node.number) if made else None
                with copy.changed:
                    copy.switch(new.live, new.layer, new.handles, new.registrations, node.saved)
                tree.adopt(copy)
            for copy, new in revived:
                new.live.release()
                copy.let_go()
            tree.engine.expect(count)
            tree.background.submit(tree.spares.stock, node)
            tree.background.submit(tree.engine.refill)
            return copies


def _all_revived(
    tree: Tree, copies: Sequence[Box], node: Node, executor: Executor
) -> list[tuple[Box, Revived]]:
    """Every copy, or none: then the first error is raised."""
    futures = [executor.submit(tree.revive, copy, node) for copy in copies]
    errors = [error for future in futures if (error := future.exception()) is not None]
    if not errors:
        return [(copy, future.result()) for copy, future in zip(copies, futures, strict=True)]
    for copy, future in zip(copies, futures, strict=True):
        if future.exception() is None:
            tree.forsake(copy, future.result())
    raise errors[0]


def _as_fork_error(error: DeltaBoxError) -> DeltaBoxError:
    if isinstance(error, RollbackError):
        return ForkError(f"nothing was forked: {error}", **error.attributes)
    return error


def close(box: Box) -> bool:
    """End a sandbox; whether its tree went with it. Closing twice is no error."""
    box.shut()
    with box._operation:
        if box.closed:
            return False
        box.closed = True
        steps: list[Callable[[], Any]] = []
        with box.steady:
            with box.changed:
                box.unwatch()
                box.registrations.close()
                handles, box.handles = box.handles, {}
            steps = [
                lambda: box.tree.standby.drop(box=box),
                lambda: taking.forget(box),
                lambda: close_handles(box, handles),
                box.live.end,
                lambda: box.tree.image.delete(box.layer),
            ]
            for step in steps:
                try:
                    step()
                except Exception:
                    log.exception("closing %s", box.number)
    last = box.tree.remove(box)
    if last:
        box.tree.close()
    return last


def changes(box: Box, old: str, new: str | None, compare: Compare) -> Any:
    """Compare a checkpoint's files with another's, or with the present ones."""
    tree = box.tree
    with tree.pinned(old) as before:
        if new is not None:
            with tree.pinned(new) as after:
                return compare(before.snapshot, after.snapshot, tree.base)
        with box.operating("compare"):
            tree.image.presync()
            present = tree.image.snapshot(box.layer)
        try:
            return compare(before.snapshot, present, tree.base)
        finally:
            tree.background.submit(tree.image.delete, present)


def changed_files(tree: Tree, reference: str) -> int:
    """How many files differ between a checkpoint and its parent (counted once)."""
    with tree.pinned(reference) as node:
        if node.changed_files is None:
            with tree.pinned_parent(node) as parent:
                before = tree.origin if parent is None else parent.snapshot
                node.changed_files = len(diff.diff(before, node.snapshot, tree.base))
        return node.changed_files
