"""Whose turn it is with a tree: a checkpoint's, a rollback's that stops it, or work's ahead.

A tree that is stopped by the freezer of its control group executes nothing, not even what is
injected; who waits for that would wait for ever.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator


class Ahead:
    """Who may touch a tree: those who work ahead, one step at a time, or one who excludes them."""

    def __init__(self) -> None:
        self._turn = threading.RLock()  # who excludes them may do so again
        self._wanted = 0
        self.over = False  # the tree is stopped: nobody shall work ahead
        self._commands = 0

    def disturb(self) -> None:
        """A command begins: who works ahead shall leave the processors to it."""
        self._commands += 1

    def undisturbed(self) -> Callable[[], bool]:
        """Whether no command has begun since this call."""
        then = self._commands
        return lambda: self._commands == then

    @contextlib.contextmanager
    def excluded(self) -> Iterator[None]:
        """Nobody works ahead within the block."""
        self._wanted += 1
        try:
            with self._turn:
                yield
        finally:
            self._wanted -= 1

    @contextlib.contextmanager
    def step(self) -> Iterator[bool]:
        """One step ahead; False when it must not be taken now."""
        if self._wanted or self.over:
            yield False
            return
        with self._turn:
            yield not (self._wanted or self.over)
