"""The control groups of one sandbox tree: one for each process tree, one for the templates.

Groups are kept and used again: making or removing one waits for the kernel's RCU, several
milliseconds when it happens often.

Where version 1 has the controllers, limits can only be the tree's: the first template joins the
tree's version 1 groups and everybody else is born in them, so a limit is every live sandbox's share
with what the templates take on top, and follows when their number changes.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path

from ..linux import cgroup

_CONTROLLERS = ("memory", "pids")
_WAITING = 1 << 20  # bytes a task that waits takes of its own: page tables, a stack, the kernel's


class Groups:
    """Made by the engine's `Tree`, and removed with it."""

    def __init__(
        self,
        parent: Path,
        name: str,
        *,
        owner: int,
        memory: int | None,
        pids: int | None,
        on_made: Callable[[str, str], None],
        on_gone: Callable[[str, str], None],
    ) -> None:
        """`owner` is the host uid of the tree's root; limits in bytes and tasks, for a sandbox."""
        self.group = parent / name
        self.templates = self.group / "templates"
        self._owner = owner
        self._memory = memory
        self._pids = pids
        self._on_made = on_made
        self._on_gone = on_gone
        self._free: deque[Path] = deque()
        self._count = 0
        self._legacy: list[Path] = []
        self._tasks: Path | None = None  # where version 1 counts them
        self._lock = threading.Lock()
        with contextlib.ExitStack() as undo:
            undo.callback(self.remove)
            on_made("cgroup", str(self.group))
            cgroup.make(self.group, controllers=True)
            # The door clones into groups of this tree, so the tree's root must own the two files
            # the kernel checks (cgroups(7), delegation): the target's and the common ancestor's.
            os.chown(self.group / "cgroup.procs", owner, owner)
            cgroup.make(self.templates, controllers=False)
            for controller in _CONTROLLERS:
                self._make_legacy(controller, parent.name, name)
            undo.pop_all()

    def take(self) -> Path:
        """An empty group for one process tree."""
        with self._lock:
            if self._free:
                return self._free.popleft()
        return self._new()

    def give(self, group: Path) -> None:
        """Take a group back that is empty again."""
        with self._lock:
            self._free.append(group)

    def stock(self) -> None:
        """Make one more, ahead of need."""
        self.give(self._new())

    @property
    def spare(self) -> int:
        return len(self._free)

    def _new(self) -> Path:
        with self._lock:
            self._count += 1
            group = self.group / f"box-{self._count}"
        self._on_made("cgroup", str(group))
        group.mkdir()
        os.chown(group / "cgroup.procs", self._owner, self._owner)
        cgroup.set_limits(group, memory=self._memory, pids=self._pids, version=2)
        return group

    # -- version 1 ------------------------------------------------------------------------------

    def _make_legacy(self, controller: str, engine: str, name: str) -> None:
        """Limits through version 1, for the whole tree, where version 2 lacks the controller."""
        root = cgroup.hierarchies().get(controller)
        if root is None or cgroup.in_version_2(controller):
            return
        group = root / engine / name
        for made in (group.parent, group):
            self._on_made("cgroup", str(made))
        group.mkdir(parents=True, exist_ok=True)
        self._legacy.append(group)
        if controller == "pids" and self._pids is not None:
            self._tasks = group / "pids.current"

    def join(self, pid: int) -> None:
        """The tree's first template joins; what is forked of it is born inside."""
        for group in self._legacy:
            (group / "cgroup.procs").write_text(str(pid))

    @property
    def share_tasks(self) -> bool:
        """Whether one limit of tasks is for all sandboxes and templates of the tree."""
        return self._tasks is not None

    def tasks(self) -> int:
        """How many there are, where they share one limit; else 0."""
        return 0 if self._tasks is None else int(self._tasks.read_text())

    def scale(self, *, lives: int, templates: int, held: int, waiting: int, more: int) -> None:
        """Room for so many sandboxes, with templates that hold `held` bytes of memory.

        For so many tasks of trees that wait, which share nearly all memory with a template; and for
        so many tasks `more`.
        """
        held += waiting * _WAITING
        tasks = 2 * templates + 2 + waiting + more
        for group in self._legacy:
            with contextlib.suppress(FileNotFoundError):
                cgroup.set_limits(
                    group,
                    memory=self._memory and self._memory * lives + held,
                    pids=self._pids and (self._pids + 1) * lives + tasks,
                    version=1,
                )

    def remove(self) -> None:
        """End whoever is left in them, after an error, and remove as many as can be.

        What cannot stays in the journal, and the first error is raised.
        """
        errors: list[OSError] = []
        with contextlib.suppress(OSError):
            cgroup.kill(self.group)
        for group in [*self._legacy, self.group]:
            try:
                cgroup.remove(group)
            except FileNotFoundError:
                pass
            except OSError as error:
                errors.append(error)
                continue
            self._on_gone("cgroup", str(group))
        for number in range(1, self._count + 1):
            self._on_gone("cgroup", str(self.group / f"box-{number}"))
        for group in self._legacy:
            # the engine's own group in that hierarchy goes with its last tree
            with contextlib.suppress(OSError):
                group.parent.rmdir()
        if errors:
            raise errors[0]
