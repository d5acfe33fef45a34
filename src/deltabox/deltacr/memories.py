"""The memory of all processes of a stopped tree, looked at beside everything else.

What is mapped, which pages there are, which may have been written, and whether names still lead to
the files: all of that is asked from outside and needs no tracer, so another thread does it while
the tracer asks registers and injects calls.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..errors import UnsupportedState
from ..linux import beside, bulk, proc, userfaultfd
from ..linux.ask import Answers
from ..linux.bulk import Regions
from . import memory, verify
from .live import Live
from .look import Look
from .model import Mapping as Vma
from .names import Names
from .space import Known, Space
from .stash import Changes
from .subject import Refuse
from .template import Template

_AT_ONCE = 4


@dataclass(frozen=True)
class _Looking:
    """A look at some processes that another thread takes."""

    hosts: list[int]
    look: bulk.Memories
    job: beside.Job


@dataclass(frozen=True)
class Memory:
    """What was seen of one process."""

    known: Known
    present: Regions
    names: Answers  # what the names of mapped files lead to
    found: tuple[Vma, ...] | None  # the mappings, if nothing has to be found out anew


class Memories:
    """What was written is looked at from the beginning, the map and the pages of each process when
    it has been asked (its injected page is gone by then, and nobody waits for a lock). Used by one
    capture.

    What is known of a process is taken to be true still when it is asked for its pages, and looked
    at again afterwards, so that one call into C is enough, which another thread makes
    (linux/beside.c).
    """

    def __init__(self, live: Live, hosts: Iterable[int], names: Names, template: Template) -> None:
        """`hosts` are those to look at, of whom `meet` tells more; `template` will be fed."""
        self._live = live
        self._template = template
        self._names = names
        self._spaces = {host: live.spaces[host] for host in hosts if host in live.spaces}
        self._assumed: dict[int, Known] = {}
        self._maps: dict[int, Known] = {}
        self._memories: dict[int, Memory] = {}
        self._answers: dict[int, Answers] = {}  # to the names of the assumed map
        self._present: dict[int, Regions] = {}  # their pages, in the assumed map
        self._looks: dict[int, _Looking] = {}
        self._writes: _Looking | None = None
        ready = [host for host, space in self._spaces.items() if space.ready]
        if ready:
            self._writes = self._begin(ready, bulk.WRITES)

    def __enter__(self) -> Memories:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        # nobody may look at a process that runs again
        try:
            self._collect_writes()
        finally:
            for look in self._looks.values():
                look.job.wait()

    def meet(self, inside: Mapping[int, int]) -> None:
        """The pids inside, by host pid, of all of them."""
        if any(space.pid != inside[host] for host, space in self._spaces.items()):
            self._collect_writes()  # of one who has ended, and another has its number
        self._spaces = {host: self._live.space(host, pid) for host, pid in inside.items()}
        self._assumed = {h: s.known for h, s in self._spaces.items() if s.known is not None}

    def space(self, host: int) -> Space:
        return self._spaces[host]

    def assumed(self, host: int) -> Known:
        """What is known of the map, perhaps from an earlier time."""
        return self._assumed.get(host) or self.map(host)

    def map(self, host: int) -> Known:
        """What is known of the map, true now."""
        self._collect(host)
        if host not in self._maps:
            space = self._spaces[host]
            self._maps[host] = space.map(refusing(host, space.pid))
        return self._maps[host]

    def is_still(self, host: int, look: Look, tids: Sequence[int], memory_fd: int) -> bool:
        """Whether a process has not moved since it was asked; nothing is to be looked at then."""
        self._collect_writes()
        space = self._spaces[host]
        if host not in self._answers or not space.is_still(look, tids, memory_fd):
            return False
        known = space.known
        assert known is not None and known.present is not None
        answers = self._answers[host]
        found = same_mappings(space, known, known.present, answers, self._names)
        if found is not None:
            self._maps[host] = known
            self._memories[host] = Memory(known, known.present, answers, found)
        return True

    def verify(self, host: int) -> None:
        """In test mode: what is known of a process that is still, its map and pages, is so."""
        space = self._spaces[host]
        known = space.known
        assert known is not None and known.present is not None
        found = space.map(refusing(host, space.pid))
        verify.same_map(f"the map of pid {space.pid}", known.text, found.text)
        # joined, because whether they are watched may have been found out later
        before, after = (
            bulk.union([pages, pages]).packed
            for pages in (known.present, space.present(known.bare))
        )
        verify.same(f"the pages of pid {space.pid}", before, after)

    def is_mapped(self, host: int) -> bool:
        """Whether its map has been read since it was stopped."""
        return host in self._maps

    def begin(self, host: int) -> None:
        """A process has been asked: look at its map and its pages meanwhile."""
        space = self._spaces[host]
        if space.watched and space.known is not None and not self.is_mapped(host):
            if len(self._looks) == _AT_ONCE:  # each has a large buffer
                self._collect(next(iter(self._looks)))
            self._looks[host] = self._begin([host], bulk.MAP)

    def of(self, host: int) -> Memory:
        self._collect_writes()
        self._collect(host)
        if host not in self._memories:
            self._memories[host] = self._look(host, self._spaces[host])
        return self._memories[host]

    def _begin(self, hosts: list[int], what: int) -> _Looking:
        wanted = [self._spaces[host].wanted(self._names, what) for host in hosts]
        look = bulk.Memories(wanted)
        return _Looking(hosts, look, beside.memories(*look.arguments, keep=look))

    def _collect_writes(self) -> None:
        """Take what the look for writes has brought, once."""
        if self._writes is None:
            return
        looking, self._writes = self._writes, None
        looking.job.wait()
        seen_all = dict(zip(looking.hosts, looking.look.seen(), strict=True))
        spaces = self._live.spaces  # but for those of whom another has the number now
        for host, seen in seen_all.items():
            if host in spaces:  # of all, before anything can fail: asking forgets it
                spaces[host].note(seen.written)
        for host, seen in seen_all.items():
            if seen.error:
                raise OSError(seen.error, os.strerror(seen.error))
            if seen.names is not None and host in spaces:
                known = spaces[host].known
                assert known is not None
                self._answers[host] = self._names.learn(known.paths, *seen.names)

    def _collect(self, host: int) -> None:
        """Take what the look at one process's map has brought, once."""
        looking = self._looks.pop(host, None)
        if looking is None:
            return
        looking.job.wait()
        (seen,) = looking.look.seen()
        space = self._spaces[host]
        old = space.known
        known = self._maps[host] = space.map(refusing(host, space.pid), seen.text)
        answers = self._answers.get(host)
        if seen.present is None or known is not old:
            return
        self._present[host] = seen.present
        if answers is None or seen.present.unwatched:
            return
        if known.names is not None:
            found = same_mappings(space, known, seen.present, answers, self._names)
            self._memories[host] = Memory(known, seen.present, answers, found)

    def _look(self, host: int, space: Space) -> Memory:
        known = self.map(host)
        present = self._present.get(host)
        if present is None:
            present = space.present(known.bare)
        names = self._names.look(known.paths)
        found = same_mappings(space, known, present, names, self._names)
        seen = Memory(known, present, names, found)
        if space.watched or not userfaultfd.supported():
            self.look_for_writes(host, seen)
        return seen

    def look_for_writes(self, host: int, seen: Memory) -> None:
        """Find out what may have changed; once for each process, when it is watched if it can."""
        base, space = self._live.base, self._spaces[host]
        held = base.stash.of(space.pid) if base is not None and base.stash is not None else {}
        space.look(seen.known.bare, seen.present, held, base)

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
    if known.names is None or not names.lead_alike(known.paths, known.names, answers):
        return None
    if known.present is not None and known.present.packed == present.packed:
        space.confirm()
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
