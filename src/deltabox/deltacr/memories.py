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
from dataclasses import dataclass
from typing import Any

from ..errors import UnsupportedState
from ..linux import bulk, proc, userfaultfd
from ..linux.ask import Answers
from ..linux.bulk import Regions
from . import memory
from .live import Live
from .model import Mapping as Vma
from .names import Names
from .space import Known, Space
from .stash import Changes
from .subject import Refuse
from .template import Template


@dataclass(frozen=True)
class Memory:
    """What was seen of one process."""

    known: Known
    present: Regions
    names: Answers  # what the names of mapped files lead to
    found: tuple[Vma, ...] | None  # the mappings, if nothing has to be found out anew


class Memories:
    """Begins to look at once; the answers are waited for. Used by one capture.

    What is known of a process is taken to be true still when it is asked for its pages, and looked
    at again afterwards, so that one call into C is enough for all processes.
    """

    def __init__(
        self,
        live: Live,
        inside: Mapping[int, int],
        names: Names,
        template: Template,
        beside: Executor,
    ):
        """`inside` are the pids by host pid of those to look at; `template` will be fed."""
        self._live = live
        self._template = template
        self._names = names
        self._pids = dict(inside)
        self._spaces = {host: live.space(host, pid) for host, pid in inside.items()}
        self._assumed = {h: s.known for h, s in self._spaces.items() if s.known is not None}
        self._maps: dict[int, Future[Known]] = {host: Future() for host in inside}
        self._memories: dict[int, Future[Memory]] = {host: Future() for host in inside}
        self._job = beside.submit(self._run)

    def __enter__(self) -> Memories:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._job.exception()  # wait: nobody may look at a process that runs again

    def space(self, host: int) -> Space:
        return self._spaces[host]

    def assumed(self, host: int) -> Known:
        """What is known of the map, perhaps from an earlier time."""
        return self._assumed.get(host) or self.map(host)

    def map(self, host: int) -> Known:
        """What is known of the map, true now."""
        return self._maps[host].result()

    def of(self, host: int) -> Memory:
        return self._memories[host].result()

    def _run(self) -> None:
        try:
            self._ask()
        except BaseException as error:
            futures: list[Future[Any]] = [*self._maps.values(), *self._memories.values()]
            for future in futures:
                if not future.done():
                    future.set_exception(error)

    def _ask(self) -> None:
        ready = {h: s for h, s in self._spaces.items() if s.ready}
        wanted = [space.wanted(self._names) for space in ready.values()]
        found_all = bulk.memories(wanted) if wanted else []
        for space, seen in zip(ready.values(), found_all, strict=True):
            space.note(seen.written)  # of all, before anything can fail: asking forgets it
        for host, seen in zip(ready, found_all, strict=True):
            if seen.error:
                raise OSError(seen.error, os.strerror(seen.error))
            space = ready[host]
            known, old = space.map(refusing(host, self._pids[host]), seen.text), space.known
            self._maps[host].set_result(known)
            if seen.present is None or seen.names is None or seen.present.unwatched:
                continue
            if known is old and known.names is not None:
                answers = self._names.learn(known.paths, *seen.names)
                found = same_mappings(space, known, seen.present, answers, self._names)
                self._memories[host].set_result(Memory(known, seen.present, answers, found))
        for host, space in self._spaces.items():
            if not self._maps[host].done():
                self._maps[host].set_result(space.map(refusing(host, self._pids[host])))
            if not self._memories[host].done():
                self._memories[host].set_result(self._look(host, space))

    def _look(self, host: int, space: Space) -> Memory:
        known = self._maps[host].result()
        present = space.present(known.bare)
        names = self._names.look(known.paths)
        found = same_mappings(space, known, present, names, self._names)
        seen = Memory(known, present, names, found)
        if space.watched or not userfaultfd.supported():
            self.look_for_writes(host, seen)
        return seen

    def look_for_writes(self, host: int, seen: Memory) -> None:
        """Find out what may have changed; once for each process, when it is watched if it can."""
        base, pid = self._live.base, self._pids[host]
        held = base.stash.of(pid) if base is not None and base.stash is not None else {}
        self._spaces[host].look(seen.known.bare, seen.present, held, base)

    def changes(self, host: int) -> Changes:
        """What the template has to read."""
        space, present = self._spaces[host], self.of(host).present
        whole = present.unguarded() if present.guarded else present
        return Changes(space.changes(self._template), whole, space.compared)


def same_mappings(
    space: Space, known: Known, present: Regions, answers: Answers, names: Names
) -> tuple[Vma, ...] | None:
    """The mappings as they were found once, with the pages of now; None if a file is another."""
    if known.names is None or not known.names.same(answers):
        return None
    if known.present is not None and known.present.packed == present.packed:
        return known.found
    found = memory.repaged(known.found, present, names.is_of_base)
    space.learn(present, answers, found)
    return found


def refusing(host: int, pid: int) -> Refuse:
    """Refusals of what a process has mapped; its name is read when there is one."""

    def refuse(what: str, kind: str) -> UnsupportedState:
        comm = proc.stat(host).comm
        return UnsupportedState(f"pid {pid} ({comm}) {what}", pid=pid, process=comm, object=kind)

    return refuse
