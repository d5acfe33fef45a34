"""An address space of a live tree, and which of its pages may differ from the last checkpoint's.

Reading and comparing every page of a tree took most of a checkpoint's pause (25 of 42 ms for 30
MB).  So the kernel is asked to note which pages are written: linux/userfaultfd.py.  In order of
preference, each by what the host can do:

- *watched*: the keeper holds a userfaultfd of the process.  A look at 30 MB takes 0.1 ms, at 2 GB
  some 2 ms.  The descriptor is made in the process, by injection at its first checkpoint or by the
  restore program, and never stays in its table; what is mapped later is watched from the next
  look on.
- *shared*: what a restored process has not written is still the very same physical memory as in the
  template it was forked from.  Frame numbers tell (/proc/PID/pagemap), 50 ns a page.  So the first
  look at a restored process needs no earlier one.
- *compared*: everything else is read by the template and compared page by page, 1.4 us each.

Rejected: soft-dirty bits, which are cleared for a whole process, at another moment than they are
read, so that they cannot be used while it runs; and exclusively mapped pages as a sign of a write,
which is wrong as soon as the process forks.

What was seen to be written is *pending* until a checkpoint has succeeded: looking protects the
pages again, so a checkpoint that fails afterwards would forget them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

from ..linux import bulk, pidfd, userfaultfd
from ..linux import numbers as nr
from ..linux.ask import Answers, Kind, Questions
from ..linux.bulk import Areas, Regions
from . import memory
from .model import Mapping
from .names import Names, questions

if TYPE_CHECKING:
    from .inject import Injection
    from .look import Look
    from .stash import Held
    from .subject import Refuse
    from .template import Template
    from .told import Activity, Told, Witness


@lru_cache(maxsize=1024)
def _flags(how: int) -> Questions:
    """`how`: where we may be injecting at the moment, and in bit 0 whether it is watched."""
    ask = Questions()
    ask.add("flags", Kind.FLAGS, "/proc/%d/smaps", more=how)
    return ask


# a line of /proc/PID/maps about shared memory, and where its path begins (show_map_vma)
_SHARED_LINE = re.compile(
    rb"^([0-9a-f]+-[0-9a-f]+ \S+ [0-9a-f]+) ([0-9a-f]+):([0-9a-f]+) (\d+) +"
    rb"(/(?:memfd:|dev/zero \(|SYSV).*)$",
    re.MULTILINE,
)
_PATH_COLUMN = 73


@dataclass(frozen=True)
class Known:
    """What was found out about an address space, and is true again while `text` is the same."""

    text: bytes  # headers and flags of smaps, see linux/ask.c
    bare: list[Mapping]  # without pages
    vdso: int
    gap: int  # a free place for injection
    present: Regions | None = None
    names: Answers | None = None  # what the names of its files led to
    found: tuple[Mapping, ...] = ()  # with pages, and names that were good

    @cached_property
    def paths(self) -> tuple[str, ...]:
        """The names of mapped files."""
        return tuple(dict.fromkeys(m.path for m in self.bare if m.kind == "file"))


def elsewhere(known: Known, places: Callable[[int], tuple[int, int] | None]) -> Known:
    """The same of a restored process, whose shared memory has other inode numbers.

    `places` gives device and inode of shared memory by its number. If a text is not what it would
    be, all of it is found out anew.
    """
    moved: dict[tuple[int, int, str], tuple[int, int]] = {}
    for mapping in known.found:
        place = places(mapping.memory) if mapping.memory >= 0 else None
        if place is not None:
            moved[mapping.device, mapping.inode, mapping.path] = place
    if not moved:
        return known

    def now(mapping: Mapping) -> Mapping:
        place = moved.get((mapping.device, mapping.inode, mapping.path))
        if place is None or mapping.kind != "memory":
            return mapping
        return replace(mapping, device=place[0], inode=place[1])

    def line(found: re.Match[bytes]) -> bytes:
        head, major, minor, inode, path = found.groups()
        key = os.makedev(int(major, 16), int(minor, 16)), int(inode), os.fsdecode(path)
        if key not in moved:
            return found[0]
        device, number = moved[key]
        shown = b"%b %02x:%02x %d " % (head, os.major(device), os.minor(device), number)
        return shown.ljust(_PATH_COLUMN) + path

    return replace(
        known,
        text=_SHARED_LINE.sub(line, known.text),
        bare=[now(m) for m in known.bare],
        found=tuple(now(m) for m in known.found),
    )


class Space:
    """What is known of one process's memory. Used by one thread at a time."""

    def __init__(
        self, host: int, pid: int, origin: Template | None = None, known: Known | None = None
    ) -> None:
        """`origin` is the template it was cloned from, `known` what was known of it then."""
        self.host = host
        self.pid = pid  # inside
        self.pending: list[Regions] = []
        self._copied: tuple[Template, int, Regions] | None = None
        self.compared = False  # pending pages may be unchanged: let the template compare them
        self.known = known
        self._watcher = -1
        self._origin = origin
        self.told: Told | None = None  # what it has said at its last stop
        self._witness: Witness | None = None
        self._confirmed = False  # what is known was found, or found to be so, since
        self._since = 0  # what was noted from here on was written since
        self.seen = False  # its pages have been protected once
        self._areas: tuple[Items[Mapping], Areas, Areas] | None = None
        self._size = ""  # of its map, before that was read

    @property
    def watched(self) -> bool:
        return self._watcher >= 0

    def close(self) -> None:
        """Watch no more."""
        if self._watcher >= 0:
            os.close(self._watcher)
            self._watcher = -1

    def watch(self, injection: Injection) -> None:
        """Have the stopped process make a descriptor for us, if the host can and it may."""
        if self._watcher >= 0 or not userfaultfd.supported():
            return
        number = injection.run(self.host, ((userfaultfd.USERFAULTFD, userfaultfd.FLAGS),))[0]
        if number < 0:
            return  # out of descriptors, or a security module: compared, then
        try:
            process = os.pidfd_open(self.host)
            try:
                self._watcher = pidfd.getfd(process, number)
            finally:
                os.close(process)
        finally:
            injection.run(self.host, ((nr.CLOSE, number),))
        self._introduce()

    def _introduce(self) -> None:
        try:
            fcntl.ioctl(self._watcher, userfaultfd.API_REQUEST, bytearray(userfaultfd.API))
        except OSError:
            self.close()
            raise

    def adopt(self, watcher: int) -> None:
        """Take the descriptor that a restored process has made for us; -1: it has made none."""
        if watcher >= 0:
            self._watcher = watcher
            self._introduce()

    # -- what it is -----------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Whether a look may begin with what is known, see `wanted`."""
        return self.seen and self.watched and self.known is not None

    def wanted(self, names: Names, what: int) -> bulk.Wanted:
        """What a look for MAP or WRITES (linux/bulk.py) needs, if the known map is its map."""
        assert self.known is not None
        asked = questions(self.known.paths)
        return bulk.Wanted(
            self.host,
            names.root_fd,
            self.known.gap,
            what | (bulk.WATCHED if self.watched else 0),
            asked.address,
            len(asked.names),
            *self._where(self.known.bare),
        )

    def note(self, written: Regions) -> None:
        """Add to `pending` what has been found to be written."""
        self.pending.append(written)

    def map(self, refuse: Refuse, text: bytes | None = None) -> Known:
        """Read its map; what is known of it stays known while nothing but pages has changed.

        `text` is what linux/ask.c has made of smaps, if that has been done.
        """
        self._size = self._size_now()
        if text is None:
            gap = 0 if self.known is None else self.known.gap
            text = _flags(gap | int(self.watched)).ask([self.host])["flags"]
        if self.known is None or self.known.text != text:
            self.known = Known(text, *memory.mappings(text, refuse))
        return self.known

    def seems_mapped_alike(self) -> bool:
        """Whether the map has kept its size since it was read: a good guess, and a cheap one.

        At 2 GB in small pages reading it takes 25 ms.
        """
        return self.ready and self._size == self._size_now()

    def _size_now(self) -> str:
        """Pages of memory mapped (proc_pid_statm(5))."""
        with open(f"/proc/{self.host}/statm") as file:
            return file.read().split(" ", 1)[0]

    def learn(
        self, present: Regions, names: Answers | None, found: tuple[Mapping, ...] = ()
    ) -> None:
        """Remember what was found in the present map. Without names: only what depends on none."""
        assert self.known is not None
        self.known = replace(self.known, present=present, names=names, found=found)
        self.confirm()

    def confirm(self) -> None:
        """All that is known has been found to be so again."""
        self._confirmed = True

    # -- whether it has moved since it was asked (told.py) ----------------------------------------

    def remember(self, told: Told, witness: Witness) -> None:
        """It has just been asked, and is stopped yet; map and pages are looked at after this."""
        self.told, self._witness = told, witness
        self._confirmed = False
        self._since = len(self.pending)

    def is_still(self, look: Look, tids: Items[int], memory_fd: int) -> bool:
        """Whether a stopped process is just as it was when it was asked; `look` is of now.

        What was written since has to be noted before. If it is still, nothing of that counts.
        """
        if self.told is None or self._witness is None or not self.watched:
            return False
        told = self.told.now()
        if told is None:
            return False
        known = self.known
        if not self._confirmed or known is None or known.names is None or known.present is None:
            return False
        if not self._witness.holds(look, tids, self._written(), memory_fd):
            self.told = self._witness = None
            return False
        self._witness = self._witness.again(look)
        self.told = told
        # in place: `copied` counts them
        self.pending[self._since :] = [Regions()] * (len(self.pending) - self._since)
        self._since = len(self.pending)
        return True

    def is_asleep(self, counts: dict[int, int]) -> bool:
        """Whether a running process seems only to have fallen asleep since.

        `counts` are of its threads. What it has written since the last look is not known yet.
        """
        if self._witness is None or not self._confirmed or not self._witness.asleep(counts):
            return False
        return self._witness.expects(self._written())

    def is_on_its_way(self, now: dict[int, Activity]) -> bool:
        """Whether a thread has not yet got as far since the last stop as to fall asleep again."""
        return self._witness is not None and any(
            now[tid].switches == count
            for tid, count in self._witness.switches.items()
            if tid in now
        )

    def rests(self, now: dict[int, Activity]) -> bool:
        """Whether a running process is just as it was at its last stop (see resting.py).

        `now` is what its threads are doing.
        """
        if self._witness is None or not self._confirmed or not self.ready:
            return False
        self.drain()
        fd = os.open(f"/proc/{self.host}/mem", os.O_RDONLY | os.O_CLOEXEC)
        try:
            return self._witness.rests(now, self._written(), fd)
        finally:
            os.close(fd)

    def _written(self) -> list[tuple[int, int]]:
        """What is known to have been written since it was asked."""
        return [(low, high) for low, high, _ in bulk.union(self.pending[self._since :])]

    # -- looking at its pages ---------------------------------------------------------------------

    def drain(self) -> None:
        """Note what was written until now, where that is known to be asked for."""
        if self.ready and self.known is not None:
            with self._pagemap() as pagemap:
                self.note(bulk.written(pagemap, self._where(self.known.bare)[1]))

    def present(self, mappings: Items[Mapping]) -> Regions:
        """The private pages and guard regions of these mappings."""
        with self._pagemap() as pagemap:
            return bulk.present(pagemap, self._where(mappings)[0])

    @contextlib.contextmanager
    def _pagemap(self) -> Iterator[int]:
        fd = os.open(f"/proc/{self.host}/pagemap", os.O_RDONLY | os.O_CLOEXEC)
        try:
            yield fd
        finally:
            os.close(fd)

    def look(
        self,
        mappings: Items[Mapping],
        present: Regions,
        base: dict[int, Held],
        template: Template | None,
    ) -> None:
        """Add to `pending` what may have been written since the last look.

        `present` is what `present` has just found, in a process that is stopped, or that runs if
        `mappings` are watched; `base` what `template`, the last checkpoint's, holds of it.
        """
        unknown = present.watched(False)
        if len(unknown) and self.watched:
            self._register(mappings, unknown)
        with self._pagemap() as pagemap:
            self.note(self._changed(pagemap, mappings, unknown, base, template))

    def _changed(
        self,
        pagemap: int,
        mappings: Items[Mapping],
        unknown: Regions,
        base: dict[int, Held],
        template: Template | None,
    ) -> Regions:
        found = Regions()
        if self.watched:
            found = bulk.written(pagemap, self._where(mappings)[1])
        if not self.seen:
            # restored, and never looked at: everything counts as written
            found, unknown = bulk.union([found, unknown]), Regions()
        if self._origin is not None and template is not None and not template.closed:
            if not self.seen:
                found = self._unshared(pagemap, found, base, template)
            elif len(unknown):
                unknown = self._unshared(pagemap, unknown, base, template)
        self.seen = True
        self.compared = self.compared or not self.watched
        return bulk.union([found, unknown])

    def _register(self, mappings: Items[Mapping], unknown: Regions) -> None:
        """Watch what has been mapped since the last look."""
        try:
            for start, end in _runs(mappings, unknown):
                request = bytearray(userfaultfd.register(start, end))
                fcntl.ioctl(self._watcher, userfaultfd.REGISTER_REQUEST, request)
        except OSError:
            # it has called exec: the descriptor is of memory that is gone
            self.close()

    def _unshared(
        self, pagemap: int, regions: Regions, base: dict[int, Held], template: Template
    ) -> Regions:
        """Without the pages that are still the template's own."""
        held = sorted(base.items())
        cut, shifts, rest = Regions(), [], Regions()
        at = 0
        for low, high, found in regions:
            while at < len(held) and held[at][0] + held[at][1].size <= low:
                at += 1
            index = at
            while low < high:
                start = held[index][0] if index < len(held) else high
                if start > low:
                    rest.packed.extend((low, min(start, high), found))
                    low = min(start, high)
                    continue
                one = held[index][1]
                end = min(high, start + one.size)
                if end > low:
                    cut.packed.extend((low, end, found))
                    shifts.append(one.shift)
                    low = end
                index += 1
        theirs = os.open(f"/proc/{template.pid_outside}/pagemap", os.O_RDONLY | os.O_CLOEXEC)
        try:
            return bulk.union([bulk.unshared(pagemap, theirs, cut, shifts), rest])
        finally:
            os.close(theirs)

    def changes(self, template: Template | None = None) -> Regions:
        """All that is pending, but for what this template has read ahead."""
        if self._copied is None or template is not self._copied[0]:
            return bulk.union(self.pending)
        _, looks, rest = self._copied
        return bulk.union([rest, *self.pending[looks:]])

    def copied(self, template: Template, looks: int, rest: Regions) -> None:
        """The template has read what the first so many looks have found, but for the rest."""
        self._copied = template, looks, rest

    def settled(self) -> None:
        """A template holds everything that was pending, and is the last checkpoint's now."""
        self.pending.clear()
        self._since = 0
        self._copied = None

    def _where(self, mappings: Items[Mapping]) -> tuple[Areas, Areas]:
        """(where to look for pages, where for writes)."""
        known = self._areas
        if known is None or known[0] is not mappings:
            known = mappings, Areas(_areas(mappings, False)), Areas(_areas(mappings, True))
            self._areas = known
        return known[1], known[2]


def _watchable(mapping: Mapping) -> bool:
    return mapping.saved and mapping.kind != "vdso"


def _areas(mappings: Items[Mapping], watched: bool) -> list[tuple[int, int, bool]]:
    """Neighbours of one kind together; pages of files are told apart only where there are any."""
    found: list[tuple[int, int, bool]] = []
    for mapping in mappings:
        if mapping.kind == "vdso" or (watched and not _watchable(mapping)):
            continue
        is_file = mapping.kind != "anonymous"
        if found and found[-1][1] == mapping.start and found[-1][2] == is_file:
            found[-1] = found[-1][0], mapping.end, is_file
        else:
            found.append((mapping.start, mapping.end, is_file))
    return found


def _anonymous(*mappings: Mapping) -> bool:
    return all(mapping.kind == "anonymous" for mapping in mappings)


def _runs(mappings: Items[Mapping], unknown: Regions) -> list[tuple[int, int]]:
    """The mappings that some of these regions lie in, neighbours together.

    Of anonymous memory also the neighbours in which there are none: what a program has split by
    mprotect(2) must become one mapping again when it undoes that, or its mremap(2) would fail.
    """
    groups: list[list[Mapping]] = []
    for mapping in mappings:
        if not _watchable(mapping):
            continue
        last = groups[-1][-1] if groups else None
        if last is not None and last.end == mapping.start and _anonymous(last, mapping):
            groups[-1].append(mapping)
        else:
            groups.append([mapping])
    found: list[tuple[int, int]] = []
    regions = list(unknown)
    at = 0
    for group in groups:
        start, end = group[0].start, group[-1].end
        while at < len(regions) and regions[at][1] <= start:
            at += 1
        if at == len(regions):
            break
        if regions[at][0] >= end:
            continue
        if found and found[-1][1] == start:
            found[-1] = found[-1][0], end
        else:
            found.append((start, end))
    return found
