"""A template: the frozen process that holds one checkpoint's memory, and the program beside it.

Blank templates come from the seed; `checkpoint.take` fills one.  It stays frozen from then on:
only its door runs, cloning trees that share the memory copy-on-write.  Closing a template frees
what no restored tree still uses; PID 1 of a restored tree shares the address space, so the
template first unmaps its stash, or a deleted checkpoint would live as long as that tree.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass

from ..linux import numbers as nr
from .boot import First
from .model import Capture
from .peer import Peer, PeerGone, ProgramFailed, end_task
from .records import OURS_END, STASH, WORLD_SLOT, Program, Sealed
from .stash import Stash

_FIRST_SLOT = 1  # slot 0 is the template's own


@dataclass
class Stats:
    """What a checkpoint cost; times in milliseconds."""

    pause_ms: float = 0.0
    total_ms: float = 0.0
    dirty_bytes: int = 0
    processes: int = 0


class Template:
    """Memory and program of one checkpoint. Thread-safe."""

    def __init__(self, peer: Peer, door: Peer, task: int, door_task: int, pid: int) -> None:
        self.peer = peer
        self.door = door
        self.pid_outside = pid
        self.memory_bytes = 0
        self.on_size: Callable[[], None] = lambda: None
        self.stats = Stats()
        self.sealed: Sealed | None = None
        self.first: First | None = None  # makes the PID 1 that `sealed` is run by
        self.stash: Stash | None = None  # what it holds, and where
        self.gathered = False  # into huge pages
        self.depth = 0  # generations of forks since the last full copy
        self.capture: Capture | None = None
        self.shared: list[int] = []  # files with the contents of shared memory
        self.externals: list[str] = []  # keys of the pipes a restore must bring
        self.on_close: Callable[[], None] = lambda: None
        self._task = task
        self._door_task = door_task
        self._lock = threading.Lock()
        self.life = threading.RLock()  # held while it is closed, or another is forked from it
        self.cloning = threading.Lock()  # held while somebody decides what its clones inherit
        self._slots = set(range(_FIRST_SLOT, WORLD_SLOT))
        self._closed = False

    def resize(self, size: int) -> None:
        """Say how much memory it takes of its own, or is about to take at the most."""
        self.memory_bytes = size
        self.on_size()

    def take_slot(self) -> int:
        """A place in the template's address space for one restore's control memory."""
        with self._lock:
            if not self._slots:
                raise OSError(11, "too many live trees restored from one checkpoint")
            return self._slots.pop()

    def give_slot(self, slot: int) -> None:
        with self._lock:
            self._slots.add(slot)

    def close(self) -> None:
        """Free the memory and end the two tasks. Idempotent."""
        with self.life:
            self._close()

    @property
    def closed(self) -> bool:
        return self._closed

    def _close(self) -> None:
        if self._closed:
            return
        self._closed = True
        program = Program()
        program.root.call(nr.MUNMAP, STASH, OURS_END - STASH)
        with contextlib.suppress(ProgramFailed, PeerGone, OSError):
            self.peer.run(program.seal(), 0)
        for peer, task in ((self.door, self._door_task), (self.peer, self._task)):
            peer.close()
            end_task(task)
        while self.shared:
            os.close(self.shared.pop())
        self.on_close()
