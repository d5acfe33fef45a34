"""What is done for the next checkpoint while nobody waits: watch, look for writes, copy them.

But for the moment of a rehearsal, all of it is done to a tree that runs.  In a rehearsal a tree of
which everybody waits is stopped, and processes are watched that were not, and asked what only they
can tell; if they go on waiting the checkpoint need not ask again (told.py).

Looking protects the pages that it finds written, and what is written again is found again: so a
page that was copied at any moment is either as it was then or found by the next look (space.py).
Names of files, pages and mappings may change meanwhile as well; the checkpoint looks at all of that
again, and reads what is not as it was.

A checkpoint that begins takes over at once: it has to wait for one look at one process, or for one
piece of copying, at the most.
"""

from __future__ import annotations

import functools
import os
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import replace

from ..linux import bulk, proc, stop, userfaultfd
from ..linux.bulk import Regions
from . import memory
from .checkpoint import undisturbed
from .freeze import freeze
from .improve import reserve
from .inject import NoRoom
from .live import Live
from .look import CommonLook, Look, questions
from .memories import refusing, same_mappings
from .model import PAGE, Mapping, Process
from .names import Names
from .objects import attributes, seccomp
from .space import Space
from .stash import Changes, Held, Pull, feed, plan
from .subject import Refused
from .survey import Around
from .template import Template
from .told import Witness, activities, ask

_PIECE = 8 << 20  # bytes copied in one go
_YOUNG = 0.1  # seconds


class _NoGhosts:
    """Files without a name are left for the checkpoint."""

    def enter(self, path: str, target: str, *, unnamed: bool = False) -> int:
        raise Refused(target)

    def enter_older(self, file: int, path: str) -> int:
        raise Refused(path)


def work(
    live: Live,
    *,
    base: int,
    born: float,
    reference: int,
    has_room: Callable[[int], bool],
    unused: Callable[[], bool],
    rested: bool,
) -> bool:
    """Get as far as possible; whether there will be more to do soon, when processes are older.

    Raises what a checkpoint would; nothing depends on it. A sandbox of which no checkpoint was
    taken yet is copied whole, if `has_room` for so many bytes. Nobody is stopped when it is not
    `unused` by a caller. `rested`: nobody has wanted anything for a while, or is likely to now.
    """
    if not userfaultfd.supported():
        return False
    calm = live.ahead.undisturbed()
    with live.ahead.step() as may:
        if not may:
            return False
        threads = _warm(live)
        spaces = {pid: live.space(host, pid) for pid, host in live.hosts().items()}
        young = any(not s.watched and not _settled(s.host) for s in spaces.values())
        if _news(spaces, threads, rested=rested and not young):
            _ask_all(live, spaces, unused)
    names = Names(live.root, base, born, _NoGhosts(), live.shared)
    found: dict[int, tuple[Mapping, ...]] = {}
    present: dict[int, Regions] = {}
    for pid, space in spaces.items():
        with live.ahead.step() as may:
            if not may or not space.watched or not calm():
                return young
            looked = None if rested else _glance(space, names)
            found[pid], present[pid] = looked or _look(live, space, pid, names)
    live.sharing.release_others({m.memory for mappings in found.values() for m in mappings})
    for look_at in live.sharing.pieces(has_room):
        with live.ahead.step() as may:
            if not may or not calm():
                return young
            look_at()
    _copy(live, spaces, found, present, reference, calm, has_room)
    return young


def _settled(host: int) -> bool:
    """Whether a process has lived for a while: what a build starts is not worth stopping for."""
    try:
        began = proc.start_time(host) / os.sysconf("SC_CLK_TCK")
    except (FileNotFoundError, ProcessLookupError):
        return False
    return time.clock_gettime(time.CLOCK_BOOTTIME) - began > _YOUNG


def _warm(live: Live) -> dict[int, list[int]]:
    """Ask what does not change, and have the kernel make its entries of /proc for new processes.

    The threads by their process, all by host ids, leaders first.
    """
    live.common()
    live.prepare_survey()
    with live.world_now() as world:
        world()
    found: dict[int, list[int]] = {}
    for pid, tid in stop.tasks(live.group):
        found.setdefault(pid, []).append(tid)
    threads = {pid: [pid, *(tid for tid in tids if tid != pid)] for pid, tids in found.items()}
    for tids in threads.values():
        questions(len(tids)).ask(tids)
    return threads


def _news(spaces: dict[int, Space], threads: dict[int, list[int]], *, rested: bool) -> bool:
    """Whether it is worth stopping the tree, and nobody's call would last longer for it.

    It is for a process that is not watched, and has lived for a while. When the tree has rested,
    and goes on to, it is for one that has moved since it was asked.
    """
    now = activities([tid for tids in threads.values() for tid in tids])
    if any(one.may_be_late for one in now.values()):
        return False
    if any(not space.watched and _settled(space.host) for space in spaces.values()):
        return True
    if not rested or not all(one.waits for one in now.values()):
        return False
    counts = {
        host: {tid: now[tid].switches for tid in tids if tid in now}
        for host, tids in threads.items()
    }
    return not all(space.is_asleep(counts.get(space.host, {})) for space in spaces.values())


def _ask_all(live: Live, spaces: dict[int, Space], unused: Callable[[], bool]) -> None:
    """Stop the tree for a moment, to have those who have moved be watched and asked.

    A call that begins after `unused` was looked at waits for `live.lock` before it starts anybody.
    """
    common = live.common()
    put_back = functools.partial(undisturbed, waits=live.waits)
    with ExitStack() as stack:
        stack.enter_context(live.lock)
        if not unused():
            return
        frozen = stack.enter_context(freeze(live, put_back, limit=0))
        hosts = frozenset(frozen.threads)
        with live.surveying() as survey, live.world_now() as world:
            live.around = live.rested = None
            for pid, space in spaces.items():
                tids = frozen.threads.get(space.host, [])
                if space.host in tids and not any(frozen.stops[tid] for tid in tids):
                    _ask(live, space, pid, tids, common)
            if hosts == {space.host for space in spaces.values()}:
                live.around = Around(hosts, world(), survey())


def _ask(live: Live, space: Space, pid: int, threads: list[int], common: CommonLook) -> None:
    host = space.host
    tids = [host, *(tid for tid in threads if tid != host)]
    look, refuse = Look(tids), refusing(host, pid)
    space.drain()
    memory_fd = os.open(f"/proc/{host}/mem", os.O_RDWR | os.O_CLOEXEC)
    try:
        if space.is_still(look, tids, memory_fd):
            return
        attributes.check_before_asking(host, tids, look, common, refuse)
        for tid in tids:
            if seccomp.is_under(look.thread(tid).status, common.filters):
                seccomp.suspend(tid)
        known = space.known
        if known is None or known.vdso != look.vdso:
            known = space.map(refuse)
        try:
            told = ask(known, host, look, tids, [], memory_fd, space.watch)
        except NoRoom:
            told = ask(space.map(refuse), host, look, tids, [], memory_fd, space.watch)
        if not space.seen:  # everything counts as written, and must not seem to have been so since
            bare = space.map(refuse).bare
            space.look(bare, space.present(bare), *_base(live, pid))
        space.remember(told, Witness.of(look, tids, memory_fd))
    finally:
        os.close(memory_fd)


def _glance(space: Space, names: Names) -> tuple[tuple[Mapping, ...], Regions] | None:
    """What `_look` finds out, if the process seems to have the same map as when it was read.

    Only good for copying pages ahead: if it is another map after all, a page may be missing, or
    one be read that is gone, which the next look finds out.
    """
    known = space.known
    if known is None or known.names is None or not space.seems_mapped_alike():
        return None
    if not names.lead_alike(known.paths, known.names, names.look(known.paths)):
        return None
    present = space.present(known.bare)
    space.drain()
    pages = present.unguarded() if present.guarded else present
    return memory.repaged(known.found, present, names.is_of_base), pages


def _look(live: Live, space: Space, pid: int, names: Names) -> tuple[tuple[Mapping, ...], Regions]:
    """Find out what the process has mapped, and what it has written; protect that."""
    refuse = refusing(space.host, pid)
    known = space.map(refuse)
    present = space.present(known.bare)
    space.look(known.bare, present, *_base(live, pid))
    answers = names.look(known.paths)
    found = same_mappings(space, known, present, answers, names)
    if found is None:
        checked = names.mapped(space.host, memory.with_pages(known.bare, present), refuse)
        found = names.with_base([_shared(live, space.host, m) for m in checked])
        if all(names.is_settled(m) for m in found):
            space.learn(present, answers, found)
    return found, present.unguarded() if present.guarded else present


def _shared(live: Live, host: int, mapping: Mapping) -> Mapping:
    if mapping.kind != "memory":
        return mapping
    return replace(mapping, memory=live.sharing.of_mapping(host, mapping).number)


def _base(live: Live, pid: int) -> tuple[dict[int, Held], Template | None]:
    """What the last checkpoint's template holds of a process, and that template."""
    base = live.base
    return base.stash.of(pid) if base is not None and base.stash is not None else {}, base


def _copy(
    live: Live,
    spaces: dict[int, Space],
    found: dict[int, tuple[Mapping, ...]],
    present: dict[int, Regions],
    reference: int,
    calm: Callable[[], bool],
    has_room: Callable[[int], bool],
) -> None:
    """Have the next checkpoint's template read what was written."""
    with live.ahead.step() as may:
        template = live.successor
        if not may or template is None:
            return
        changes = {}
        for pid, space in spaces.items():
            pages = space.changes(template)
            # a page that came while it was looked at is found to be written, and not to be present
            changes[pid] = Changes(pages, bulk.union([present[pid], pages]))
        same = template.mappings.keys() == found.keys() and all(
            template.mappings[pid] is mappings for pid, mappings in found.items()
        )
        if same and not any(len(one.pages) for one in changes.values()):
            return
        processes = [
            Process(pid, spaces[pid].host, 0, 0, 0, 0, b"", mappings=mappings)
            for pid, mappings in found.items()
        ]
        looks = {pid: len(space.pending) for pid, space in spaces.items()}
        stash = plan(processes, template.stash)
        feeding = feed(processes, stash, template.stash, reference, changes)
        try:
            whole = sum(stash.sizes().values())
            own = feeding.most(template.read_ahead, whole)
            if not has_room(whole if template.stash is None else own - template.read_ahead):
                feeding.close()
                return
            template.resize(own=own, whole=whole)
            run = template.peer.run(feeding.program.seal(), 0, feeding.fds)
        except BaseException:
            # nobody knows what it holds now
            feeding.close()
            if live.take_successor() is template:
                template.close()
            raise
        template.read_ahead += run.variable(feeding.copied) * PAGE
        empty = template.stash is None
        template.stash, template.mappings = stash, {}
        pieces = deque(piece for pull in feeding.pulls for piece in pull.pieces(_PIECE))
        _mark(template, spaces, looks, pieces)
    try:
        for program in reserve(stash) if empty else ():
            with live.ahead.step() as may:
                if not may or live.successor is not template or not calm():
                    return
                template.peer.run(program.seal(), 0)
        while pieces:
            with live.ahead.step() as may:
                if not may or live.successor is not template or not calm():
                    return
                template.peer.run(feeding.reading([pieces[0]]).seal(), 0, feeding.fds)
                template.read_ahead += pieces.popleft().total
                _mark(template, spaces, looks, pieces)
        with live.ahead.step() as may:
            if may and live.successor is template:
                template.mappings = found
                template.resize(own=template.read_ahead, whole=whole)
    finally:
        feeding.close()


def _mark(
    template: Template, spaces: dict[int, Space], looks: dict[int, int], pieces: Iterable[Pull]
) -> None:
    """Note what the template still has to read of what had been found by then."""
    left: dict[int, list[Regions]] = {}
    for piece in pieces:
        left.setdefault(piece.pid, []).append(piece.regions())
    for pid, space in spaces.items():
        space.copied(template, looks[pid], bulk.union(left.get(pid, [])))
