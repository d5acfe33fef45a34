"""A template: the frozen process that holds one checkpoint's memory, and the program beside it.

Blank templates come from the seed; `checkpoint.take` fills one.  It stays frozen from then on:
only its door runs, cloning trees that share the memory copy-on-write.  Closing a template frees
what no restored tree still uses; PID 1 of a restored tree shares the address space, so the
template first unmaps its stash, or a deleted checkpoint would live as long as that tree.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass

from ..linux import numbers as nr
from ..linux import pagemap, pidfd
from ..linux.pages import Table
from .boot import First
from .model import Capture, Mapping
from .peer import Peer, PeerGone, ProgramFailed, end_task
from .records import OURS_END, STASH, WORLD_SLOT, Program, Sealed
from .space import Known
from .stash import Stash

log = logging.getLogger(__name__)

_keys = itertools.count(1)
_SLOTS = range(1, WORLD_SLOT)  # slot 0 is the template's own


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
        self.key = next(_keys)
        self.peer = peer
        self.door = door
        self.pid_outside = pid
        self.on_size: Callable[[int, int, int], None] = lambda own, whole, extra: None
        self.stats = Stats()
        self._compiled: tuple[Sealed, First] | None = None
        self._compile: Callable[[], tuple[Sealed, First]] | None = None
        self._compiling = threading.Lock()
        self.stash: Stash | None = None  # what it holds, and where
        self.gathered = False  # into huge pages
        self.depth = 0  # generations of forks since the last full copy
        self.capture: Capture | None = None
        self.read_ahead = 0  # bytes that were copied before the checkpoint
        self.mappings: dict[int, tuple[Mapping, ...]] = {}  # those it was fed for, by pid
        self.known: dict[int, Known] = {}  # of each process's memory, by pid
        self.shared: list[Table] = []  # what shared memory held
        self.externals: list[str] = []  # keys of the pipes a restore must bring
        self.shares: Callable[[], bool] = lambda: False  # pages with other templates
        self.on_close: Callable[[int], None] = lambda freed: None
        self._task = task
        self._door_task = door_task
        self._lock = threading.Lock()
        self.life = threading.RLock()  # held while it is closed, or another is forked from it
        self.cloning = threading.Lock()  # held while somebody decides what its clones inherit
        self._taken: set[int] = set()  # slots; those that are free would be 40 KB a checkpoint
        self._closed = self._killed = False

    @property
    def whole(self) -> int:
        """Bytes of the state that it holds."""
        return 0 if self.stash is None else sum(self.stash.sizes().values())

    def succeed(self, gone: Template) -> None:
        """The template that this may be a fork of will be closed before this is forked.

        The kernel then uses again what it keeps of a generation (anon_vma_clone, mm/rmap.c).
        """
        if self.depth == gone.depth + 1:
            self.depth -= 1

    def resize(self, *, own: int, whole: int, extra: int = 0) -> None:
        """Say how much memory it takes, or is about to take at the most: pages of its own, those
        of the whole state (the others it shares with the one it is a fork of), and what else.
        """
        self.on_size(own, whole, extra)

    def _exclusive_bytes(self) -> int:
        """Memory that its end frees at once: pages that no other template or tree maps."""
        if self.stash is None:
            return 0
        held = ((one.address, one.size) for one in self.stash.held.values())
        try:
            fd = os.open(f"/proc/{self.pid_outside}/pagemap", os.O_RDONLY | os.O_CLOEXEC)
            try:
                return pagemap.exclusive_bytes(fd, held)
            finally:
                os.close(fd)
        except OSError as error:  # it has ended on its own; whatever it is, it has to be closed
            log.warning("what a template's end frees is not known: %s", error)
            return 0

    def compile_later(self, compile: Callable[[], tuple[Sealed, First]]) -> None:
        """Have the programs compiled when somebody wants them first."""
        self._compile = compile

    @property
    def compiled(self) -> bool:
        """Whether it has programs, or can have them: it is a checkpoint's."""
        return self._compiled is not None or self._compile is not None

    @property
    def sealed(self) -> Sealed:
        """The program that rebuilds the tree."""
        return self._programs()[0]

    @property
    def first(self) -> First:
        """The one that makes the PID 1 which `sealed` is run by."""
        return self._programs()[1]

    def _programs(self) -> tuple[Sealed, First]:
        with self._compiling:
            if self._compiled is None:
                if self._compile is None:
                    raise PeerGone("the template holds no checkpoint")
                self._compiled = self._compile()
                self._compile = None
            return self._compiled

    def take_slot(self) -> int:
        """A place in the template's address space for one restore's control memory."""
        with self._lock:
            for slot in _SLOTS:
                if slot not in self._taken:
                    self._taken.add(slot)
                    return slot
        raise OSError(11, "too many live trees restored from one checkpoint")

    def give_slot(self, slot: int) -> None:
        with self._lock:
            self._taken.discard(slot)

    def kill(self) -> None:
        """Have it end without waiting for that: `close` does. Nothing restored from it may run."""
        with self.life:
            if self._closed:
                return
            self._killed = True
            for task in (self._door_task, self._task):
                with contextlib.suppress(ProcessLookupError):
                    pidfd.send_signal(task, signal.SIGKILL)

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
        freed = self._exclusive_bytes() if self.shares() else 0
        if not self._killed:
            program = Program()
            program.root.call(nr.MUNMAP, STASH, OURS_END - STASH)
            with contextlib.suppress(ProgramFailed, PeerGone, OSError):
                self.peer.run(program.seal(), 0)
        for peer, task in ((self.door, self._door_task), (self.peer, self._task)):
            peer.close()
            end_task(task)
        while self.shared:
            self.shared.pop().close()
        self.on_close(freed)
