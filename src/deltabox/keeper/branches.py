"""A branch takes its parent's place.

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
from collections.abc import Callable

from ..errors import BranchError
from . import operations, taking
from .box import Box

log = logging.getLogger(__name__)

Exchange = Callable[[Box, Box], None]


def commit(branch: Box, exchange: Exchange) -> None:
    """Make the sandbox that `branch` was made of be it; `exchange` swaps two sandboxes' numbers.

    Raises BranchStale if that sandbox is another state by now, by a rollback or because another
    branch was committed; BranchError if its programs could not be ended. Both run on then.
    """
    origin = branch.origin
    if origin is None:
        raise ValueError("the sandbox is no branch; Sandbox.branch() makes one")
    parent, tree = origin.box, branch.tree
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
                parent.cut_off()
            exchange(parent, branch)
            branch.authors |= parent.authors
            branch.origin, branch.identity = parent.origin, parent.identity
            taking.forget(parent)
        except BaseException:
            tree.dying.release()
            raise
        tree.background.submit(_end, parent)
    tree.touch(branch)


def _end(parent: Box) -> None:
    try:
        operations.close(parent)
    finally:
        parent.tree.dying.release()
