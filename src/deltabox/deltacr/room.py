"""Whether there is room for a process: what the limits of a tree of sandboxes are at a moment.

Where the limits are the tree's (see groups.py) they are a sum, of the shares of those that run, of
what the templates take, and of what waits.  So programs that are not held back by their own share
can take what was meant for a template, or for a tree that is being restored.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import TypeVar

from ..errors import CheckpointError, DeltaBoxError
from .checkpoint import still
from .groups import Groups
from .live import Live
from .peer import ProgramFailed, lacks_tasks

log = logging.getLogger(__name__)
T = TypeVar("T")


class Room:
    """Keeps the limits of one tree of sandboxes at their sum. Thread-safe."""

    def __init__(self, groups: Groups, templates: Callable[[], tuple[int, int]]) -> None:
        """`templates` tells how many there are, and how many bytes they take."""
        self._groups = groups
        self._templates = templates
        self._lives: set[Live] = set()
        self._starting = 0  # trees that will be used at once
        self._opening = 0  # tasks of those that will wait
        self._more = 0  # tasks that there is room for while those who would take it stand still
        self._lock = threading.Lock()
        self._settling = threading.Lock()

    @property
    def lives(self) -> list[Live]:
        """Every process tree that there is."""
        with self._lock:
            return list(self._lives)

    def begin(self, tasks: int) -> None:
        """One is being made: to be used at once, or (`tasks`) to wait with so many tasks."""
        with self._lock:
            self._count(1, tasks)
        self.settle()

    def give_up(self, tasks: int) -> None:
        """It will not come."""
        with self._lock:
            self._count(-1, tasks)
        self.settle()

    def add(self, live: Live, tasks: int) -> None:
        """It is there."""
        live.tasks = tasks
        with self._lock:
            self._count(-1, tasks)
            self._lives.add(live)
        self.settle()

    def remove(self, live: Live) -> None:
        """It has ended."""
        with self._lock:
            self._lives.discard(live)
        self.settle()

    def let_wait(self, live: Live, tasks: int) -> None:
        """A restored tree with so many tasks will wait: it needs no sandbox's share."""
        live.tasks = tasks
        self.settle()

    def use(self, live: Live) -> None:
        """Make room for what a tree that has waited will need when it runs."""
        self.let_wait(live, 0)

    def settle(self) -> None:
        """Make the limits what they should be."""
        with self._settling:  # or an older sum might be written over a newer one
            templates, held = self._templates()
            with self._lock:
                running = sum(not live.tasks for live in self._lives) + self._starting
                tasks = sum(live.tasks for live in self._lives) + self._opening
                more = self._more
            self._groups.scale(
                lives=max(1, running), templates=templates, held=held, waiting=tasks, more=more
            )

    def given(self, live: Live, work: Callable[[], T]) -> T:
        """Do something that makes processes, which all or none remain of; again if it lacked room.

        The second time the programs of `live` stand still, and there is room beside all that they
        have taken. Others of the tree of sandboxes run on, and may take it in their place.
        """
        try:
            return work()
        except (OSError, ProgramFailed, DeltaBoxError) as error:
            if not (self._groups.share_tasks and lacks_tasks(error)):
                raise
            first = error
        log.info("%s; trying again while the programs stand still", first)
        with ExitStack() as stack:
            try:
                stack.enter_context(live.ahead.excluded())
                stack.enter_context(still(live))
            except CheckpointError as error:
                raise first from error
            taken = self._groups.tasks()
            self._make(taken)
            try:
                return work()
            finally:
                self._make(-taken)

    # -- inner --------------------------------------------------------------------------------

    def _count(self, by: int, tasks: int) -> None:
        if tasks:
            self._opening += by * tasks
        else:
            self._starting += by

    def _make(self, tasks: int) -> None:
        with self._lock:
            self._more += tasks
        self.settle()
