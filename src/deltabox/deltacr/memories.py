"""The memory of all processes of a stopped tree, looked at beside everything else.

What is mapped, which pages there are, which may have been written, and whether names still lead to
the files: all of that is asked from outside and needs no tracer, so another thread does it while
the tracer asks registers and injects calls.  The interpreter lock is free during both, because
nearly all of it are long calls into C.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import Executor, Future
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from ..errors import UnsupportedState
from ..linux import proc, userfaultfd
from ..linux.ask import Answers
from ..linux.bulk import Regions
from . import memory
from .live import Live
from .model import Mapping as Vma
from .names import Names
from .space import Known, Space
from .stash import Changes
from .subject import Refuse


@dataclass(frozen=True)
class Memory:
    """What was seen of one process."""

    known: Known
    pagemap: int  # /proc/PID/pagemap, open as long as the capture
    present: Regions
    names: Answers  # what the names of mapped files lead to
    found: tuple[Vma, ...] | None  # the mappings, if nothing has to be found out anew


class Memories:
    """Begins to look at once; the answers are waited for. Used by one capture."""

    def __init__(self, live: Live, inside: Mapping[int, int], names: Names, beside: Executor):
        """`inside` are the pids by host pid of those to look at."""
        self._live = live
        self._names = names
        self._pids = dict(inside)
        self._spaces = {host: live.space(host, pid) for host, pid in inside.items()}
        self._maps: dict[int, Future[Known]] = {host: Future() for host in inside}
        self._memories: dict[int, Future[Memory]] = {host: Future() for host in inside}
        self._resources = ExitStack()
        self._job = beside.submit(self._run)

    def __enter__(self) -> Memories:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._job.exception()  # wait: nobody may look at a process that runs again
        self._resources.close()

    def space(self, host: int) -> Space:
        return self._spaces[host]

    def map(self, host: int) -> Known:
        return self._maps[host].result()

    def of(self, host: int) -> Memory:
        return self._memories[host].result()

    def _run(self) -> None:
        try:
            for host, space in self._spaces.items():
                self._maps[host].set_result(space.map(refusing(host, self._pids[host])))
            for host, space in self._spaces.items():
                self._memories[host].set_result(self._look(host, space))
        except BaseException as error:
            futures: list[Future[Any]] = [*self._maps.values(), *self._memories.values()]
            for future in futures:
                if not future.done():
                    future.set_exception(error)

    def _look(self, host: int, space: Space) -> Memory:
        known = self._maps[host].result()
        pagemap = os.open(f"/proc/{host}/pagemap", os.O_RDONLY | os.O_CLOEXEC)
        self._resources.callback(os.close, pagemap)
        present = space.present(pagemap, known.bare)
        names = self._names.look(m.path for m in known.bare if m.kind == "file")
        seen = Memory(known, pagemap, present, names, self._same(space, known, present, names))
        if space.watched or not userfaultfd.supported():
            self.look_for_writes(host, seen)
        return seen

    def _same(
        self, space: Space, known: Known, present: Regions, names: Answers
    ) -> tuple[Vma, ...] | None:
        """The mappings as they were found once, with the pages of now, if their files are same."""
        if known.names is None or not known.names.same(names):
            return None
        if known.present is not None and known.present.packed == present.packed:
            return known.found
        found = memory.repaged(known.found, present, self._names.is_of_base)
        space.learn(present, names, found)
        return found

    def look_for_writes(self, host: int, seen: Memory) -> None:
        """Find out what may have changed; once for each process, when it is watched if it can."""
        base, pid = self._live.base, self._pids[host]
        held = base.stash.of(pid) if base is not None and base.stash is not None else {}
        self._spaces[host].look(seen.pagemap, seen.known.bare, seen.present, held, base)

    def changes(self, host: int) -> Changes:
        """What the template has to read."""
        space, present = self._spaces[host], self.of(host).present
        whole = present.unguarded() if present.guarded else present
        return Changes(space.changes(), whole, space.compared)


def refusing(host: int, pid: int) -> Refuse:
    """Refusals of what a process has mapped; its name is read when there is one."""

    def refuse(what: str, kind: str) -> UnsupportedState:
        comm = proc.stat(host).comm
        return UnsupportedState(f"pid {pid} ({comm}) {what}", pid=pid, process=comm, object=kind)

    return refuse
