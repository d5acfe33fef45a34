"""Unix sockets made again, in PID 1, and connected as they were (unix(7)).

An end of a connection takes its name from how it was made, so connections are made as they were:
by socketpair(2), or by listening, connecting and accepting under the same name.  What the kernel
notes of the maker for SO_PEERCRED are its ids and its pid at that moment, so a short-lived task
with that very pid and those ids makes them; the number is free again when the real process is
cloned.  Then the queues are filled by sending from the other end, and what was shut or closed is
shut or closed again.

A socket that is bound to a path is bound to a *new* file, because only bind(2) makes one that leads
to a socket: the old one, which leads nowhere in the rebuilt root, gives its place, owner, mode and
times to it.  Its inode number and ctime differ.  Rejected: giving every socket pair the name of
its listener by other means (there are none).
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace

from ...linux import numbers as nr
from ..rebuild import ROOT, Entry, Kind, Rebuild, Who
from ..records import Ref, Sequence
from .unix import DGRAM, Message, Place, Unix

_AF_UNIX, _SOL_SOCKET = 1, 1
_SO_PASSCRED, _SO_SNDBUF = 16, 7
_CLOEXEC = 0o2000000
_ROOM = 8 << 20  # bytes of send buffer while a queue is filled; the kernel gives what it may
_MUCH = 16384
_MANY = 4096
_NOFOLLOW = 0x100


@dataclass
class End:
    """A socket to be made: its descriptor number in PID 1, and what it shall be."""

    number: int
    state: Unix
    peer: int = -1  # the descriptor number that sends to it
    passing: bool = False  # made for the restore alone


@dataclass
class Station:
    """A name that is listened at: what connects there, and who accepts."""

    name: bytes
    place: Place | None
    maker: Who
    listener: End | None = None  # None: it has been closed since
    pairs: list[tuple[End, End]] = field(default_factory=list)  # (client, server)
    waiting: list[End] = field(default_factory=list)


def _open(rebuild: Rebuild, entries: Items[Entry]) -> None:
    wiring = Wiring(rebuild, [End(number, d.state) for number, d in entries])
    wiring.make()
    for number, description in entries:
        rebuild.set_status(number, description.flags)
    rebuild.notes["unix"] = wiring


def _link(rebuild: Rebuild, entries: Items[Entry]) -> None:
    wiring: Wiring = rebuild.notes["unix"]
    if not wiring.needs_pids():
        wiring.fill()


def _joined(rebuild: Rebuild, entries: Items[Entry]) -> None:
    wiring: Wiring = rebuild.notes["unix"]
    if wiring.needs_pids():
        wiring.fill()


class Wiring:
    """All unix sockets of a tree."""

    def __init__(self, rebuild: Rebuild, ends: list[End]) -> None:
        self.rebuild = rebuild
        self.ends = ends
        self.by_inode = {end.state.inode: end for end in ends}
        self.unaccepted = {inode for end in ends for inode in end.state.waiting}
        self.passing: list[End] = []
        self.made: set[int] = set()
        self.directories: dict[str, tuple[int, int]] = {}

    # -- making and connecting ----------------------------------------------------------------

    def make(self) -> None:
        pairs = list(self._pairs())
        nameless = [(a, b) for a, b in pairs if b.state.type == DGRAM or not b.state.name]
        for maker, group in _by_maker(nameless):
            with self._as(maker, "socket pairs") as do:
                for one, other in group:
                    self._pair(do, one, other)
        stations = self._stations([pair for pair in pairs if pair not in nameless])
        served = {server.number for s in stations for _, server in s.pairs}
        for end in self.ends:
            if end.number not in self.made | served:
                self._socket(self.rebuild.init, end)
        for end in [e for s in stations for e, _ in s.pairs if e.passing]:
            self._socket(self.rebuild.init, end)
        for end in [*self.ends, *self.passing]:
            if end.state.name and end.number not in served and not end.state.listening:
                self._bind(self.rebuild.init, end)
                self._leave_name(self.rebuild.init, end.state.place)
        # a name can be bound once: those that are closed in the end come first
        for station in sorted(stations, key=lambda s: s.listener is not None):
            self._serve(station)
        for path, times in self.directories.items():
            self._set_times(path, times)

    def _pairs(self) -> Iterator[tuple[End, End]]:
        """Both ends of every connection, the accepting one second."""
        seen: set[int] = set()
        for end in self.ends:
            state = end.state
            if state.peer is None or state.inode in self.unaccepted or state.inode in seen:
                continue
            if state.peer:
                other = self.by_inode[state.peer]
                if state.type == DGRAM and not _are_a_pair(state, other.state):
                    continue  # connected by name; see _connect_datagrams
            else:
                other = self._lost_peer(end)
            seen |= {state.inode, other.state.inode}
            end.peer, other.peer = other.number, end.number
            yield (other, end) if self._accepted(state, other.state) else (end, other)

    def _accepted(self, state: Unix, other: Unix) -> bool:
        """Whether the first of two ends was made by accept(2)."""
        if not state.name or not other.name:
            return bool(state.name)
        return any(e.state.listening and e.state.name == state.name for e in self.ends)

    def _lost_peer(self, end: End) -> End:
        """A stand-in for a peer that has been closed; it is closed again when all is sent."""
        state = end.state
        lost = Unix(
            type=state.type,
            inode=-end.number,
            name=state.peer_name,
            peer_name=state.name,
            peer=state.inode,
            waiting=(),
            listening=False,
            backlog=0,
            shutdown=0,
            place=state.peer_place,
            peer_place=None,
            peer_credentials=None,
            broken=False,
            passes_credentials=False,
            send_buffer=0,
        )
        made = End(self.rebuild.reserve(), lost, passing=True)
        self.passing.append(made)
        return made

    def _stations(self, pairs: list[tuple[End, End]]) -> list[Station]:
        found: list[Station] = []
        for end in self.ends:
            if end.state.listening:
                maker = end.state.peer_credentials or ROOT
                waiting = [self.by_inode[inode] for inode in end.state.waiting]
                found.append(Station(end.state.name, end.state.place, maker, end, [], waiting))
        for client, server in pairs:
            station = next((s for s in found if _serves(s, client, server)), None)
            if station is None:
                maker = client.state.peer_credentials or ROOT
                station = Station(server.state.name, server.state.place, maker)
                found.append(station)
            station.pairs.append((client, server))
        return found

    def _serve(self, station: Station) -> None:
        """Listen, connect everybody, accept those who were accepted."""
        init = self.rebuild.init
        listener = station.listener
        if listener is None:
            pattern = replace(station.pairs[0][1].state, passes_credentials=False)
            listener = End(self.rebuild.reserve(), pattern, passing=True)
            self._socket(init, listener)
        self._bind(init, listener, for_good=station.listener is not None)
        count = len(station.pairs) + len(station.waiting)
        backlog = station.listener.state.backlog if station.listener else _MANY
        with self._as(station.maker, "listen") as do:
            do.call(nr.LISTEN, listener.number, max(backlog, min(count, _MANY)), what="listen")
        for maker, group in _by_maker([(server, client) for client, server in station.pairs]):
            with self._as(maker, "connections") as do:
                for _, client in group:
                    self._connect(do, client, listener)
            for server, _ in group:
                self._accept(listener, server)
        for client in station.waiting:
            # whoever accepts it gets its credentials; they are noted when it connects
            with self._as(client.state.maker or ROOT, "waiting connections") as do:
                self._connect(do, client, listener)
        if station.listener is None:
            init.call(nr.CLOSE, listener.number)
        elif backlog < count:
            with self._as(station.maker, "listen") as do:
                do.call(nr.LISTEN, listener.number, backlog, what="listen")
        self._leave_name(init, listener.state.place, for_good=station.listener is not None)

    def _socket(self, do: Sequence, end: End) -> None:
        kind = end.state.type | _CLOEXEC
        do.call(nr.SOCKET, _AF_UNIX, kind, 0, save=self.rebuild.opened, what="unix socket")
        self._place(do, end)

    def _pair(self, do: Sequence, one: End, other: End) -> None:
        program = self.rebuild.program
        both = program.data(bytes(8))
        kind = one.state.type | _CLOEXEC
        do.call(nr.SOCKETPAIR, _AF_UNIX, kind, 0, both, what="socketpair")
        for end, at in ((one, both), (other, both + 4)):
            do.load(at, self.rebuild.opened)
            self._place(do, end)

    def _place(self, do: Sequence, end: End) -> None:
        do.call(nr.DUP3, self.rebuild.opened, end.number, _CLOEXEC)
        do.call(nr.CLOSE, self.rebuild.opened)
        self.made.add(end.number)

    def _accept(self, listener: End, server: End) -> None:
        do = self.rebuild.init
        opened = self.rebuild.opened
        do.call(nr.ACCEPT4, listener.number, 0, 0, _CLOEXEC, save=opened, what="accept")
        self._place(do, server)

    def _connect(self, do: Sequence, client: End, listener: End) -> None:
        place = listener.state.place
        address, size = self._address(listener.state.name)
        if place is not None:
            do.call(nr.CHDIR, self.rebuild.program.text(os.fsencode(place.directory)))
        do.call(nr.CONNECT, client.number, address, size, what="connect a unix socket")
        if place is not None:
            do.call(nr.CHDIR, self.rebuild.program.text("/"))

    def _address(self, name: bytes) -> tuple[Ref, int]:
        content = struct.pack("<H", _AF_UNIX) + name
        if name[:1] != b"\0":
            content += b"\0"
        return self.rebuild.program.data(content), len(content)

    # -- names --------------------------------------------------------------------------------

    def _bind(self, do: Sequence, end: End, *, for_good: bool = True) -> None:
        place = end.state.place
        address, size = self._address(end.state.name)
        if place is None:
            do.call(nr.BIND, end.number, address, size, what="bind an abstract name")
            return
        text = self.rebuild.program.text
        path = text(os.fsencode(place.path))
        self.directories.setdefault(os.path.dirname(place.path), place.directory_times)
        keeps = place.exists and for_good
        if place.exists or place.taken:
            if keeps:
                do.call(nr.UNLINK, path, what=f"unlink {place.path}")
            else:
                aside = text(os.fsencode(place.path + _ASIDE))
                do.call(nr.RENAME, path, aside, what=f"put {place.path} aside")
        do.call(nr.CHDIR, text(os.fsencode(place.directory)), what=f"chdir {place.directory}")
        do.call(nr.BIND, end.number, address, size, what=f"bind {place.path}")
        do.call(nr.CHDIR, text("/"))

    def _leave_name(self, do: Sequence, place: Place | None, *, for_good: bool = True) -> None:
        """Give the new file what the old one had; or take it away and bring back what was there."""
        if place is None:
            return
        text = self.rebuild.program.text
        path = text(os.fsencode(place.path))
        if place.exists and for_good:
            do.call(nr.FCHMODAT, -100, path, place.mode)
            do.call(nr.FCHOWNAT, -100, path, place.uid, place.gid, _NOFOLLOW)
            self._set_times(place.path, place.times)
            return
        do.call(nr.UNLINK, path, what=f"unlink {place.path}")
        if place.exists or place.taken:
            aside = text(os.fsencode(place.path + _ASIDE))
            do.call(nr.RENAME, aside, path, what=f"put {place.path} back")

    def _set_times(self, path: str, times: tuple[int, int]) -> None:
        program = self.rebuild.program
        packed = struct.pack("<4q", *divmod(times[0], 10**9), *divmod(times[1], 10**9))
        self.rebuild.init.call(
            nr.UTIMENSAT,
            -100,
            program.text(os.fsencode(path)),
            program.data(packed),
            _NOFOLLOW,
            what=f"times of {path}",
        )

    @contextlib.contextmanager
    def _as(self, maker: Who, label: str) -> Iterator[Sequence]:
        if maker == ROOT:
            yield self.rebuild.init
            return
        with self.rebuild.aside(f"{label} of pid {maker.pid}", who=maker, shared=True) as do:
            yield do

    # -- queues -------------------------------------------------------------------------------

    def needs_pids(self) -> bool:
        """Whether messages name processes, which must exist when they are sent."""
        return any(m.credentials for end in self.ends for m in end.state.queue)

    def fill(self) -> None:
        """Put the messages into the queues, then shut and close what was shut and closed."""
        for end in self.ends:
            # only while it is sent to: a sender that asks for credentials is given a name
            self._pass_credentials(end, 1)
            if end.state.type == DGRAM:
                self._send_datagrams(end)
            elif end.state.queue:
                self._send_all(end.peer, end.state.queue)
            self._pass_credentials(end, 0)
        self._connect_datagrams()
        for end in self.ends:
            self._pass_credentials(end, 1)
        init = self.rebuild.init
        for end in self.ends:
            if end.state.broken and end.peer >= 0:
                byte = self.rebuild.program.data(b"?")
                init.call(nr.WRITE, end.number, byte, 1, what="leave a byte unread")
        for end in self.passing:
            init.call(nr.CLOSE, end.number)
        for end in self.ends:
            if end.state.shutdown and not end.state.listening and end.state.peer != 0:
                init.call(
                    nr.SHUTDOWN, end.number, end.state.shutdown - 1, may_fail=True, what="shutdown"
                )

    def _pass_credentials(self, end: End, value: int) -> None:
        if end.state.passes_credentials:
            wanted = self.rebuild.program.data(struct.pack("<i", value))
            do = self.rebuild.init
            do.call(nr.SETSOCKOPT, end.number, _SOL_SOCKET, _SO_PASSCRED, wanted, 4)

    def _send_all(self, number: int, queue: tuple[Message, ...]) -> None:
        """All at once, without waiting, so the sender is given room for the moment."""
        buffer = next((e.state.send_buffer for e in self.ends if e.number == number), 0)
        much = sum(len(m.data) for m in queue) > _MUCH
        if much:
            self._set_buffer(number, _ROOM)
        for message in queue:
            self._send(number, message, b"")
        if much and buffer:
            self._set_buffer(number, buffer // 2)

    def _set_buffer(self, number: int, size: int) -> None:
        value = self.rebuild.program.data(struct.pack("<i", size))
        self.rebuild.init.call(
            nr.SETSOCKOPT, number, _SOL_SOCKET, _SO_SNDBUF, value, 4, what="SO_SNDBUF"
        )

    def _send(self, number: int, message: Message, name: bytes) -> None:
        who = message.credentials
        header = self.rebuild.message(
            message.data,
            name=name,
            fds=tuple(self.rebuild.number(index) for index in message.descriptions),
            credentials=None if who is None else (who.pid, who.uid, who.gid),
        )
        self.rebuild.sent(number, header, len(message.data), "fill the queue of a unix socket")

    def _send_datagrams(self, end: End) -> None:
        state = end.state
        target = b""
        if state.name:
            target = struct.pack("<H", _AF_UNIX) + state.name
            target += b"" if state.name[:1] == b"\0" else b"\0"
            if state.place is not None:
                target = struct.pack("<H", _AF_UNIX) + os.fsencode(state.place.path) + b"\0"
        temporary = -1
        for message in state.queue:
            sender = end.peer
            if message.sender:
                sender = next(e.number for e in self.ends if e.state.name == message.sender)
            elif sender < 0:
                if temporary < 0:
                    temporary = self.rebuild.reserve()
                    self._socket(self.rebuild.init, End(temporary, state, passing=True))
                sender = temporary
            self._send(sender, message, b"" if sender == end.peer else target)
        if temporary >= 0:
            self.rebuild.init.call(nr.CLOSE, temporary)

    def _connect_datagrams(self) -> None:
        for end in self.ends:
            state = end.state
            if state.type == DGRAM and state.peer and end.peer < 0:
                self._connect(self.rebuild.init, end, self.by_inode[state.peer])


_ASIDE = ".deltabox-aside"

KIND = Kind(("unix socket",), _open, _link, _joined)


def _are_a_pair(one: Unix, other: Unix) -> bool:
    """Datagram sockets of a socketpair: connected to each other, and by no name."""
    return other.peer == one.inode and not (one.name and other.name)


def _serves(station: Station, client: End, server: End) -> bool:
    """Whether a connection can have been made at that station, by all that can be told of it."""
    if station.name != server.state.name:
        return False
    if not client.passing and station.maker != (client.state.peer_credentials or ROOT):
        return False
    place = server.state.place
    if server.passing or place is None or station.place is None:
        return True
    return station.place.file == place.file


def _by_maker(pairs: list[tuple[End, End]]) -> list[tuple[Who, list[tuple[End, End]]]]:
    """Grouped by who is noted at the first end."""
    grouped: dict[Who, list[tuple[End, End]]] = {}
    for pair in pairs:
        grouped.setdefault(pair[0].state.peer_credentials or ROOT, []).append(pair)
    return list(grouped.items())
