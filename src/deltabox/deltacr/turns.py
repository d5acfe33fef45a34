"""Whose turn it is to look at a tree: a checkpoint's, or theirs who work ahead for the next one."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class Ahead:
    """Who may look at a tree: those who work ahead, one step at a time, or a checkpoint."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._wanted = 0

    @contextlib.contextmanager
    def checkpoint(self) -> Iterator[None]:
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
        if self._wanted:
            yield False
            return
        with self._turn:
            yield not self._wanted
