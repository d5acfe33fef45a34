"""The engine: one seed for all sandbox trees, and their groups' root.

    seed --fork--> template --clone(VM)--> door --clone(VM, new namespaces)--> PID 1 --clone--> tree

The *seed* is the interpreter freshly executed, with nothing of libc in its memory.  Everything else
is cloned from it: see tree.py.
"""

from __future__ import annotations

import logging
import os
import resource
from collections.abc import Callable
from pathlib import Path

from ..errors import HostUnsupported
from ..linux import cgroup
from ..linux.cgroup import remove as remove_cgroup
from . import boot
from .live import Live
from .peer import Peer, PeerGone, ProgramFailed, end_task, own_task, pair
from .reports import Exit as Exit
from .template import Template
from .tree import Tree

__all__ = ["Engine", "Exit", "Live", "Template", "Tree", "remove_cgroup"]

log = logging.getLogger(__name__)

_INTERPRETER = Path(__file__).with_name("_interpreter")


class Engine:
    """One per keeper; made in the keeper's main thread, whose end would end the seed."""

    def __init__(self, *, directory: Path) -> None:
        self.on_made: Callable[[str, str], None] = lambda kind, value: None
        self.on_gone: Callable[[str, str], None] = lambda kind, value: None
        if not _INTERPRETER.exists():
            raise HostUnsupported(f"{_INTERPRETER} is missing: the package was not built")
        root = cgroup.hierarchies().get("2")
        if root is None:
            raise HostUnsupported("control groups version 2 are not mounted")
        self.name = f"deltabox-{os.getpid()}"
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft < hard:  # PID 1 opens everything that a tree has open, before it clones it
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        # A template holds all memory of a sandbox and must never be dumped. A limit of 1 keeps also
        # a program that core_pattern names from being started (core(5), fs/coredump.c).
        hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
        resource.setrlimit(resource.RLIMIT_CORE, (1 if hard else 0, hard))
        mine, theirs = pair()
        mountpoint = directory / "seed"
        mountpoint.mkdir(parents=True, exist_ok=True)
        # posix_spawn, not fork: the keeper has threads. Everything but number 3 is close-on-exec.
        seed = os.posix_spawn(
            _INTERPRETER, ["deltabox"], {}, file_actions=[(os.POSIX_SPAWN_DUP2, theirs.fileno(), 3)]
        )
        self._task = own_task(seed)
        theirs.close()
        self.seed = Peer(mine)
        try:
            self.seed.run(boot.seed_program(str(mountpoint)).seal(), 0)
        except (ProgramFailed, PeerGone) as error:
            end_task(self._task)
            raise HostUnsupported(f"the engine's seed could not be set up: {error}") from error
        self.group = root / self.name
        cgroup.make(self.group, controllers=True)

    def open_tree(
        self,
        name: str,
        *,
        first_uid: int,
        memory_limit: int | None,
        pids_limit: int | None,
        network: str,
        on_external: str,
        io_uring: bool,
    ) -> Tree:
        """A user namespace and groups for one sandbox tree; `first_uid` maps to uid 0 inside."""
        return Tree(
            name,
            seed=self.seed,
            group=self.group,
            first_uid=first_uid,
            memory_limit=memory_limit,
            pids_limit=pids_limit,
            network=network,
            on_external=on_external,
            io_uring=io_uring,
            on_made=self.on_made,
            on_gone=self.on_gone,
        )

    def close(self) -> None:
        self.seed.close()
        end_task(self._task)
        for root in cgroup.hierarchies().values():
            try:
                cgroup.remove(root / self.name)  # with what an error has left of a tree
            except FileNotFoundError:
                pass
            except OSError as error:
                log.warning("a control group is left: %s", error)
