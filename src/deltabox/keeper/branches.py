"""A branch takes its parent's place, or brings its files there.

A branch is a fork that remembers the sandbox it was made of, and how often that had turned into
another state by then. Committed, it does not copy anything into its parent: the parent's programs
are ended, and the branch gets the parent's number, by which callers know it. So nothing has to be
captured, what cannot be captured is no obstacle, and every handle on the branch's programs, every
call that waits for one of them, goes on.

The locks of two sandboxes are taken here, the parent's first. No fork is its own ancestor, so
nobody waits for anybody in a circle.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Final

from ..deltacr.checkpoint import still
from ..deltafs.merge import merging
from ..errors import BranchError, MergeConflict
from . import operations, taking
from .box import Box, Origin

log = logging.getLogger(__name__)

_SHOWN: Final = 5  # paths in a message
Exchange = Callable[[Box, Box], None]


def commit(branch: Box, exchange: Exchange) -> None:
    """Make the sandbox that `branch` was made of be it; `exchange` swaps two sandboxes' numbers.

    Raises BranchStale if that sandbox is another state by now, by a rollback or because another
    branch was committed; BranchError if its programs could not be ended. Both run on then.
    """
    origin, tree = _origin(branch), branch.tree
    parent = origin.box
    with parent.present(origin.turns), branch.operating("commit"):
        with branch.changed:
            branch.check_open()
        tree.dying.acquire()
        try:
            with parent.steady:
                with parent.changed:
                    parent.silence()
                try:
                    if not parent.dead:
                        parent.live.stop()
                except Exception as error:
                    with parent.changed:
                        parent.listen()
                    raise BranchError(f"nothing was committed: {error}") from error
                parent.cut_off(branch)
            exchange(parent, branch)
            branch.authors |= parent.authors
            branch.origin, branch.identity = parent.origin, parent.identity
            taking.forget(parent)
        except BaseException:
            tree.dying.release()
            raise
        tree.background.submit(_end, parent)
    tree.touch(branch)


def merge(branch: Box, under: Sequence[str]) -> list[str]:
    """Bring what has changed in the branch's files, at or below the paths `under`, into those of
    its parent, whatever that has become since; the paths that have changed there by that.

    MergeConflict if some of it has been changed there as well. Nothing has changed then.
    """
    origin, tree = _origin(branch), branch.tree
    parent = origin.box
    while parent.successor is not None:
        parent = parent.successor
    with ExitStack() as stack:
        stack.enter_context(parent.operating("merge files"))
        stack.enter_context(branch.operating("merge files"))
        node = stack.enter_context(tree.pinned(origin.node))
        tree.image.presync()
        ours = tree.image.snapshot(branch.layer)
        stack.callback(tree.background.submit, tree.image.delete, ours)
        stack.enter_context(parent.touching())
        stack.enter_context(parent.steady)
        with parent.changed:
            parent.check_open()
        # from here on nothing changes there but by us, and nobody sees a half of it
        stack.enter_context(still(parent.live))
        theirs = tree.image.snapshot(parent.layer)
        stack.callback(tree.background.submit, tree.image.delete, theirs)
        merge = stack.enter_context(merging(node.snapshot, ours, theirs, tree.base, under))
        if merge.conflicts:
            shown = ", ".join(merge.conflicts[:_SHOWN])
            more = len(merge.conflicts) - _SHOWN
            raise MergeConflict(
                f"both the branch and its parent have changed {shown}"
                + (f" and {more} other paths" if more > 0 else ""),
                paths=list(merge.conflicts),
            )
        try:
            merge.apply(parent.live.root, tree.owner)
        except OSError as error:
            raise BranchError(f"nothing was merged: {error}") from error
        return merge.paths


def _origin(branch: Box) -> Origin:
    if branch.origin is None:
        raise ValueError("the sandbox is no branch; Sandbox.branch() makes one")
    return branch.origin


def _end(parent: Box) -> None:
    try:
        operations.close(parent)
    finally:
        parent.tree.dying.release()
