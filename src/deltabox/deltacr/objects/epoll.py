"""Epoll sets: what they watch, for what, and what has been reported already.

fdinfo lists the watches with the descriptor number they were added under, which need not mean the
watched description any more (the number may be closed, or another file's by now); kcmp(2) with
KCMP_EPOLL_TFD finds it among all that is open.  The kernel keys a watch by description and number,
so a short-lived task with a table of its own adds each under its number.  Watches on what only its
owner can open (a pidfd), and on a signalfd, which tells of its adder's signals, are added by that
process.

Two things have to be put right afterwards.  An edge-triggered watch reports what is ready when it
is added, though the program may have seen that edge: when the set had nothing to report, what it
reports is taken out of the new one.  (When it had something, which of its edges were still to come
cannot be told; then all are reported, which the interface allows: epoll(7).  A set is not asked
whether it has when the answer could be another one for its owner, which is so for a signalfd in it:
the kernel, fs/eventpoll.c, forgets a report that turns out to be none for whoever asks, so the
question alone would cost the owner a wake-up.)  And a one-shot watch that has fired is there, but
off; the new one is made to fire once.
"""

from __future__ import annotations

import re
import select
import struct
from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace

from ...linux import numbers as nr
from ...linux import pidfd
from ..model import Description
from ..rebuild import Entry, Kind, Rebuild
from ..records import Sequence
from ..subject import Refused, Subject

_ADD = 1
_ONESHOT = 1 << 30
_EDGE = 1 << 31
_PRIVATE = _ONESHOT | _EDGE | 1 << 29 | 1 << 28  # EPOLLWAKEUP, EPOLLEXCLUSIVE
_EVERYTHING = 0x1 | 0x2 | 0x4 | 0x2000 | 0x40 | 0x80 | 0x100 | 0x200
_EVENT_SIZE = 12
_ENTRY = re.compile(
    r"tfd: +(\d+) events: +([0-9a-f]+) data: +([0-9a-f]+) +pos:(-?\d+) ino:([0-9a-f]+)"
)


@dataclass(frozen=True)
class Watch:
    number: int  # the descriptor it was added under
    events: int
    data: int
    inode: int
    nth: int  # among those added under the same number
    target: int = -1  # index of the description
    owner: int = 0  # the pid inside that adds it; 0: PID 1

    @property
    def spent(self) -> bool:
        """A one-shot watch that has fired."""
        return not self.events & ~_PRIVATE


@dataclass(frozen=True)
class Epoll:
    watches: tuple[Watch, ...]
    quiet: bool = False  # it watches for edges, and all that it had to report are seen


def capture(subject: Subject) -> Description:
    """Without the targets: they are found when everything has been seen."""
    watches: list[Watch] = []
    for line in subject.lines("tfd:"):
        found = _ENTRY.match(line)
        if found is None:
            raise Refused(f"an epoll instance this kernel describes as {line}")
        number, events, data, _, inode = found.groups()
        nth = sum(w.number == int(number) for w in watches)
        watches.append(Watch(int(number), int(events, 16), int(data, 16), int(inode, 16), nth))
    return Description("epoll", subject.flags, state=Epoll(tuple(watches)))


def settle(subject: Subject, description: Description) -> Description:
    """Find the targets, and whether there is something to report."""
    state: Epoll = description.state
    watches = tuple(_found(subject, watch) for watch in state.watches)
    kinds = {subject.table.descriptions[watch.target].kind for watch in watches}
    # a set in this one may hold anything: it is not looked into if there is any signalfd at all
    everywhere = {d.kind for d in subject.table.descriptions} if "epoll" in kinds else kinds
    edges = any(watch.events & _EDGE for watch in watches)
    quiet = edges and "signalfd" not in everywhere and not _is_ready(subject, select.POLLIN)
    return replace(description, state=Epoll(watches, quiet))


def _found(subject: Subject, watch: Watch) -> Watch:
    for candidate in subject.table.candidates(subject.host, watch.number, watch.inode):
        if _is_target(candidate, subject, watch):
            index = subject.table.index_of(candidate)
            owner = _owner(subject, watch, candidate, index)
            if watch.spent and not _is_ready(candidate):
                raise Refused(
                    f"an epoll instance with a one-shot watch of {candidate.target} that has "
                    "fired and cannot be made to fire again"
                )
            return replace(watch, target=index, owner=owner)
    raise Refused(
        f"an epoll instance that watches something no process has open any more "
        f"(once its descriptor {watch.number})"
    )


def _owner(subject: Subject, watch: Watch, target: Subject, index: int) -> int:
    """The pid inside of the process that has to add the watch itself; 0 if PID 1 may."""
    table = subject.table
    if table.is_own(index):
        adders = [subject.host]
    elif table.descriptions[index].kind == "signalfd":
        # It wakes the set for signals to whoever has added it. Nothing tells who that was among
        # processes that share both; a child inherits them, so it was the first.
        adders = table.holders(table.index_of(subject))
    else:
        return 0
    pids = [table.inside[host] for host in adders if table.find(host, watch.number) == index]
    if not pids:
        raise Refused(
            f"an epoll instance that watches {target.target} by the number "
            f"{watch.number}, which its process has closed"
        )
    return min(pids)


def _is_target(candidate: Subject, subject: Subject, watch: Watch) -> bool:
    return not pidfd.kcmp_epoll(
        candidate.host, candidate.number, subject.host, subject.number, watch.number, watch.nth
    )


def _is_ready(target: Subject, events: int = _EVERYTHING) -> bool:
    with target.taken() as fd:
        poller = select.poll()
        poller.register(fd, events)
        return bool(poller.poll(0))


def highest(description: Description) -> int:
    """The highest descriptor number that a watch was added under."""
    state: Epoll = description.state
    return max((w.number for w in state.watches), default=0)


def _open(rebuild: Rebuild, entries: Items[Entry]) -> None:
    for number, description in entries:
        rebuild.init.call(nr.EPOLL_CREATE1, 0, save=rebuild.opened, what="epoll_create1")
        rebuild.place(number)
        rebuild.set_status(number, description.flags)


def _link(rebuild: Rebuild, entries: Items[Entry]) -> None:
    with rebuild.aside("epoll") as do:
        for number, description in entries:
            state: Epoll = description.state
            watches = [w for w in state.watches if not w.owner]
            for watch in sorted(watches, key=lambda w: not w.spent):  # fired alone, or not told
                target = rebuild.number(watch.target)
                do.call(nr.DUP3, target, watch.number, 0, what="a watched descriptor")
                add(rebuild, do, number, watch)


def add(rebuild: Rebuild, do: Sequence, number: int, watch: Watch) -> None:
    """Add a watch to the set that is open as `number`; the target is open as `watch.number`."""
    events = watch.events | (_EVERYTHING if watch.spent else 0)
    event = rebuild.program.data(struct.pack("<IQ", events, watch.data))
    do.call(nr.EPOLL_CTL, number, _ADD, watch.number, event, what=f"watch fd {watch.number}")
    if watch.spent:
        do.call(nr.EPOLL_WAIT, number, rebuild.program.data(bytes(16)), 1, 0, what="epoll_wait")


def _joined(rebuild: Rebuild, entries: Items[Entry]) -> None:
    """Everything is as it was by now: take out the reports that are news to nobody."""
    for number, description in entries:
        state: Epoll = description.state
        if state.quiet:
            count = len(state.watches)
            buffer = rebuild.program.data(bytes(_EVENT_SIZE * count))
            rebuild.init.call(nr.EPOLL_WAIT, number, buffer, count, 0, what="epoll_wait")


def own_watches(description: Description, pid: int) -> Iterable[Watch]:
    """Watches that a process itself has to add, when its descriptors are in place."""
    state: Epoll = description.state
    return (w for w in state.watches if w.owner == pid)


KIND = Kind(("epoll",), _open, _link, _joined)
