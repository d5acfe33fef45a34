"""The memory of all processes of a stopped tree, looked at beside everything else.

What is mapped, which pages there are, which may have been written, and whether names still lead to
the files: all of that is asked from outside and needs no tracer, so another thread does it while
the tracer asks registers and injects calls.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import UnsupportedState
from ..linux import beside, bulk, proc, userfaultfd
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
    """Begins to look at once, and is asked later. Used by one capture.

    What is known of a process is taken to be true still when it is asked for its pages, and looked
    at again afterwards, so that one call into C is enough for all processes; another thread makes
    it (linux/beside.c).
    """

    def __init__(
        self, live: Live, inside: Mapping[int, int], names: Names, template: Template
    ) -> None:
        """`inside` are the pids by host pid of those to look at; `template` will be fed."""
        self._live = live
        self._template = template
        self._names = names
        self._pids = dict(inside)
        self._spaces = {host: live.space(host, pid) for host, pid in inside.items()}
        self._assumed = {h: s.known for h, s in self._spaces.items() if s.known is not None}
        self._maps: dict[int, Known] = {}
        self._memories: dict[int, Memory] = {}
        self._ready = {h: s for h, s in self._spaces.items() if s.ready}
        self._look_of_all: bulk.Memories | None = None
        if self._ready:
            wanted = [space.wanted(names) for space in self._ready.values()]
            self._look_of_all = bulk.Memories(wanted)
            self._job = beside.memories(*self._look_of_all.arguments, keep=self._look_of_all)

    def __enter__(self) -> Memories:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._collect()  # nobody may look at a process that runs again

    def space(self, host: int) -> Space:
        return self._spaces[host]

    def assumed(self, host: int) -> Known:
        """What is known of the map, perhaps from an earlier time."""
        return self._assumed.get(host) or self.map(host)

    def map(self, host: int) -> Known:
        """What is known of the map, true now."""
        self._collect()
        if host not in self._maps:
            self._maps[host] = self._spaces[host].map(refusing(host, self._pids[host]))
        return self._maps[host]

    def of(self, host: int) -> Memory:
        self._collect()
        if host not in self._memories:
            self._memories[host] = self._look(host, self._spaces[host])
        return self._memories[host]

    def _collect(self) -> None:
        """Take what the look of all has brought, once."""
        if self._look_of_all is None:
            return
        look, self._look_of_all = self._look_of_all, None
        self._job.wait()
        found_all = look.seen()
        for space, seen in zip(self._ready.values(), found_all, strict=True):
            space.note(seen.written)  # of all, before anything can fail: asking forgets it
        for (host, space), seen in zip(self._ready.items(), found_all, strict=True):
            if seen.error:
                raise OSError(seen.error, os.strerror(seen.error))
            old = space.known
            known = self._maps[host] = space.map(refusing(host, self._pids[host]), seen.text)
            if seen.present is None or seen.names is None or seen.present.unwatched:
                continue
            if known is old and known.names is not None:
                answers = self._names.learn(known.paths, *seen.names)
                found = same_mappings(space, known, seen.present, answers, self._names)
                self._memories[host] = Memory(known, seen.present, answers, found)

    def _look(self, host: int, space: Space) -> Memory:
        known = self.map(host)
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
        # what was written and is gone by now may not even be readable
        pages = space.changes(self._template)
        if len(pages):
            pages = bulk.common(pages, whole)
        return Changes(pages, whole, space.compared)


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
