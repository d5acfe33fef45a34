"""The templates of one sandbox tree: where they come from, and how much memory they hold together.

A template is forked from the engine's seed, or from another template, whose pages it then shares.
It stays in the initial user namespace, so that it can read the memory of any captured process.  Its
*door* shares that memory but lives in the sandbox tree's user namespace; whatever it clones is born
inside.  Templates are made ahead of need, because forking them is not for the critical path.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping

from . import boot
from .groups import Groups
from .ledger import Ledger
from .objects import seccomp
from .peer import Peer, PeerGone, end_task, own_task, pair
from .records import SLOTS, Program
from .template import Template


class Templates:
    """Makes them, and knows all that are open. Thread-safe."""

    def __init__(
        self,
        *,
        seed: Peer,
        groups: Groups,
        userns: int,
        io_uring: bool,
        on_change: Callable[[], None],
    ) -> None:
        """`on_change` is called when there are others, or they hold more or less memory."""
        self.ledger = Ledger()
        self._seed = seed
        self._groups = groups
        self._userns = userns
        self._io_uring = io_uring
        self._on_change = on_change
        self._lock = threading.Lock()
        self._open: set[Template] = set()
        self._blanks: deque[Template] = deque()
        self._first: Template | None = None
        self._closed = False

    def begin(self) -> None:
        """Make the first, which is `origin` from then on. Raises as `blank` does."""
        self._first = self._make()

    @property
    def origin(self) -> Template:
        """The tree's first template, which never holds anything."""
        assert self._first is not None
        return self._first

    @property
    def count(self) -> int:
        """How many are open."""
        return len(self._open)

    @property
    def spare(self) -> int:
        """How many blank ones wait to be taken."""
        return len(self._blanks)

    def stock(self) -> None:
        """Make one more blank one ahead. Raises OSError, ProgramFailed, PeerGone."""
        blank = self._make()
        with self._lock:
            self._blanks.append(blank)

    def blank(self) -> Template:
        """One that holds nothing. Raises OSError, ProgramFailed, PeerGone."""
        with self._lock:
            if self._blanks:
                return self._blanks.popleft()
        return self._make()

    def fork(self, base: Template) -> Template:
        """One that shares all pages of another. Raises OSError, ProgramFailed, PeerGone."""
        made = self._make(base)
        made.stash, made.depth = base.stash, base.depth + 1
        made.mappings = base.mappings
        return made

    def close(self) -> None:
        """Close all of them; nobody makes one any more."""
        with self._lock:
            self._closed = True
            self._blanks.clear()
            templates = list(self._open)
        for template in templates:  # all at once: their memory goes while we collect the first
            template.kill()
        for template in templates:
            template.close()

    def _make(self, base: Template | None = None) -> Template:
        """A template with its door, forked from the seed or from another template."""
        with contextlib.ExitStack() as undo:
            cgroup_fd = os.open(self._groups.templates, os.O_RDONLY | os.O_CLOEXEC)
            try:
                mine, theirs = pair()
                undo.callback(mine.close)
                with theirs:
                    template_pid = self._fork(base, {"sock": theirs.fileno(), "cgroup": cgroup_fd})
            finally:
                os.close(cgroup_fd)
            peer = Peer(mine)
            template_fd = own_task(template_pid)
            undo.callback(end_task, template_fd)
            if self._first is None:
                if not self._io_uring:
                    peer.run(seccomp.our_program().seal(), 0)
                self._groups.join(template_pid)
            door_mine, door_theirs = pair()
            undo.callback(door_mine.close)
            program = boot.door_program()
            with door_theirs:
                run = peer.run(
                    program.seal(), 0, {"sock": door_theirs.fileno(), "userns": self._userns}
                )
            door_pid = run.variable(program.result)
            door_fd = own_task(door_pid)
            undo.callback(end_task, door_fd)
            door = Peer(door_mine)
            # Until the door serves it reads its records from slot 0 of the memory it shares with
            # the template, whose next program will be mapped over them.
            door.run(Program().seal(), SLOTS - 1)
            undo.pop_all()
        made = Template(peer, door, template_fd, door_fd, template_pid)
        with self._lock:
            self._open.add(made)
        self.ledger.opened(made.key, None if base is None else base.key)
        made.on_close = lambda freed: self._closed_template(made, freed)
        made.on_size = lambda own, whole, extra: self._resized(made, own, whole, extra)
        made.shares = lambda: not self._closed and self.ledger.shares(made.key)
        self._on_change()
        return made

    def _fork(self, base: Template | None, fds: Mapping[str, int]) -> int:
        """The host pid of a new template, forked from the seed or from another one."""
        if base is None:
            program = boot.template_program([])
            # The tree's first template has joined its groups; the others are born in them.
            origin = self._seed if self._first is None else self._first.peer
            return origin.run(program.seal(), 0, fds).variable(program.result)
        # A restore decides what of the memory is inherited.
        with base.life, base.cloning:
            if base.closed or base.stash is None:
                raise PeerGone("the template has been closed")
            ranges = [r for found in base.stash.extents().values() for r in found]
            program = boot.template_program(ranges)
            return base.peer.run(program.seal(), 0, fds).variable(program.result)

    def _resized(self, template: Template, own: int, whole: int, extra: int) -> None:
        self.ledger.resize(template.key, own=own, whole=whole, extra=extra)
        self._on_change()

    def _closed_template(self, template: Template, freed: int) -> None:
        self.ledger.closed(template.key, freed)
        with self._lock:
            self._open.discard(template)
        self._on_change()
