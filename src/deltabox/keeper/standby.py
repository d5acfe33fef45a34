"""Standbys: restored trees that wait at their barrier for the rollback that is likely to come.

A rollback builds a tree completely before it lets the old one go, and nothing in that has to wait
for the caller.  So while he thinks, the tree of the likely next target is built in the background:
the checkpoint just taken, or the one just rolled back to.  A rollback to it then only stops the old
tree and lets this one run.

What a standby holds was true when it was made: pipes, handles, descriptors of processes.  What may
have changed since is looked at when it is used: whether all its processes live (the host may have
killed one for its memory), whether its network is still carried, and which callers still wait.
A state that would change while it waits gets no standby (deltacr/waiting.py); nor does one
that must be told that it is a fork, because that is written into its files at the moment of it.

A waiting tree shares its memory with the checkpoint.  What it takes besides is estimated and kept
below a limit for each tree of sandboxes; the oldest goes first, and all go when the host has hardly
any memory left.  Whatever is wrong with a standby, the rollback builds a tree instead.

Rejected: a standby for every checkpoint (each one is a tree of processes, and takes CPU time to
make that the next command could use), and to freeze it (it sleeps in futex(2) anyway, and thawing
takes longer than waking).
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..deltacr.waiting import may_wait, waiting_bytes
from ..errors import DeltaBoxError, NoSpace, UnknownCheckpoint
from .box import Box
from .budget import Budget

if TYPE_CHECKING:
    from .nodes import Node, Revived
    from .trees import Tree

log = logging.getLogger(__name__)

PER_BOX = 2
"""Restored trees that wait for one sandbox; the oldest goes first."""
DEFAULT = 256 << 20
"""Bytes that those of one tree of sandboxes may take together."""


class Ends:
    """Whether any of some processes has ended, told by one system call for all of them."""

    def __init__(self, pids: Iterable[int]) -> None:
        self.tasks: list[int] = []
        self._epoll = select.epoll()
        try:
            for pid in pids:
                self.tasks.append(os.pidfd_open(pid))
                self._epoll.register(self.tasks[-1], select.EPOLLIN)
        except BaseException:
            self.close()
            raise

    def any(self) -> bool:
        return bool(self._epoll.poll(0, 1))

    def close(self) -> None:
        self._epoll.close()
        while self.tasks:
            os.close(self.tasks.pop())


@dataclass(frozen=True)
class Waiting:
    """One of them."""

    box: Box
    node: Node
    revived: Revived
    ends: Ends
    size: int

    def stands_for(self, box: Box, node: Node) -> bool:
        """Whether this is what the sandbox gets when it is rolled back to the checkpoint."""
        mine = self.node
        return self.box is box and (
            mine is node or (mine.state is node.state and mine.saved == node.saved)
        )


class Standby:
    """Those of one tree of sandboxes."""

    def __init__(self, tree: Tree, *, limit: int) -> None:
        """`limit`: bytes that they may take besides what the checkpoints hold; 0 for none."""
        self.limit = limit
        self.used = 0  # rollbacks that had one
        self._tree = tree
        self._lock = threading.Lock()
        self._making = threading.Lock()  # held while one is made
        self._target: tuple[Box, Node] | None = None
        self._budget: Budget | None = None
        self._waiting: list[Waiting] = []  # the oldest first

    def want(self, box: Box, node: Node, budget: Budget) -> None:
        """The sandbox is likely to go back to this checkpoint: be ready when there is time."""
        self._budget = budget
        if self.limit and box.is_author(node.saved):
            self._tree.background.quietly(box.number, self._make, box, node)

    def take(self, box: Box, node: Node) -> Revived | None:
        """The tree that waits for this sandbox to go to this checkpoint, fit to be used."""
        found = self._remove(box, node)
        if found is None and self._target == (box, node):
            with self._making:
                found = self._remove(box, node)
        if found is None:
            return None
        try:
            fit = self._fit(found)
            if fit:
                self._tree.engine.room.use(found.revived.live)
        except OSError as error:
            log.warning("%s: a standby could not be used: %s", box.number, error)
            fit = False
        if not fit:
            self._tree.background.submit(self._end, found)
            return None
        self._tree.background.submit(found.ends.close)
        with box.changed:
            box.reconsider(node.saved, found.revived.handles)
        self.used += 1
        return found.revived

    def describe(self) -> dict[str, object]:
        """Sandbox, checkpoint and first process (its host pid) of each; how many were used."""
        with self._lock:
            waiting = [
                (one.box.number, one.node.number, one.revived.live.init) for one in self._waiting
            ]
        return {"waiting": waiting, "used": self.used}

    # -- the end ------------------------------------------------------------------------------

    def drop(self, *, box: Box | None = None, node: Node | None = None) -> None:
        """End those of a sandbox, those of a checkpoint, or all."""
        with self._lock:
            gone = [
                one
                for one in self._waiting
                if (box is None or one.box is box) and (node is None or one.node is node)
            ]
            self._waiting = [one for one in self._waiting if one not in gone]
        for one in gone:
            self._end(one)

    def yield_memory(self) -> bool:
        """Whether the host has memory for a standby; when not, all of them are ended."""
        try:
            if self._budget is not None:
                self._budget.check_host()
        except NoSpace:
            self.drop()
            return False
        return True

    # -- inner --------------------------------------------------------------------------------

    def _end(self, one: Waiting) -> None:
        one.ends.close()
        self._tree.forsake(one.box, one.revived)

    def _remove(self, box: Box, node: Node) -> Waiting | None:
        with self._lock:
            for one in self._waiting:
                if one.stands_for(box, node):
                    self._waiting.remove(one)
                    return one
        return None

    def _fit(self, one: Waiting) -> bool:
        fit = one.revived.live.fit and not one.ends.any()
        if not fit:
            log.info("%s: a process of a standby has died, or its network", one.box.number)
        return fit

    def _make(self, box: Box, node: Node) -> None:
        """In the background, which also has the programs compiled that the size depends on."""
        tree, template = self._tree, node.template
        size = waiting_bytes(template)
        if not 0 < size <= self.limit or not may_wait(template, network=tree.network):
            return
        with self._lock:
            there = next((w for w in self._waiting if w.stands_for(box, node)), None)
            if there is not None:
                self._waiting.remove(there)
                # for as long as the newest of the checkpoints with this state
                self._waiting.append(replace(there, node=node))
                return
        if box.closing or not self.yield_memory():
            return
        try:
            with tree.pinned(node.number) as pinned, self._making:
                self._target = (box, pinned)
                try:
                    self._make_room(box, size)
                    one = self._made(box, pinned, size)
                    with self._lock:
                        late = box.closing or pinned.deleted
                        if not late:
                            self._waiting.append(one)
                finally:
                    self._target = None
        except UnknownCheckpoint:
            return
        except (OSError, DeltaBoxError) as error:
            log.info("%s: no standby: %s", box.number, error)
            return
        if late:
            self._end(one)
        else:
            tree.spares.stock(node)
            with contextlib.suppress(UnknownCheckpoint), tree.pinned(node.number) as pinned:
                tree.engine.prepare_shared(pinned.template)

    def _made(self, box: Box, node: Node, size: int) -> Waiting:
        revived = self._tree.revive(box, node)
        try:
            ends = Ends(revived.live.host_pids())
            self._tree.engine.room.let_wait(revived.live, len(ends.tasks) + 1)
        except BaseException:
            self._tree.forsake(box, revived)
            raise
        return Waiting(box, node, revived, ends, size)

    def _make_room(self, box: Box, size: int) -> None:
        """End the oldest until one more of this size may be made."""
        gone = []
        with self._lock:
            own = [one for one in self._waiting if one.box is box]
            gone += own[: max(0, len(own) + 1 - PER_BOX)]
            held = size + sum(one.size for one in self._waiting if one not in gone)
            for one in self._waiting:
                if held <= self.limit:
                    break
                if one not in gone:
                    gone.append(one)
                    held -= one.size
            self._waiting = [one for one in self._waiting if one not in gone]
        for one in gone:
            self._end(one)
