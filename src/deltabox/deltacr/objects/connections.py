"""TCP sockets are made again: real handshakes over `lo` in a namespace where every name is free.

PID 1 does all of it before any process exists, in an order in which no bind(2) meets a conflict:

1. Pairs.  A temporary listener on the accepting end's address takes one connection and is closed; a
   name in use by a connection alone keeps nobody from binding it with SO_REUSEADDR, which all have
   until their own value comes last.  Then each direction is written and, where it was, shut.
2. Ends without a partner talk to a temporary one, which closes or resets.
3. Names without a connection, then listeners, then who waits for them in the order of their coming.

Nothing here may wait for ever, nor may a byte get lost without an error: calls that block have a
timeout, and what they have done is compared with what they should (`expect`).

A queue fits its buffer again because the buffers are made large before it is written and small
afterwards; where the writer still held data for a full reader, they are from the start as they
were, so the same flow control stops it at about the same point.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence as Items
from dataclasses import replace

from ...linux import numbers as nr
from ..model import Description
from ..rebuild import Entry, Kind, Rebuild
from ..records import Argument, Var
from . import options, sockets
from .sockets import Address
from .tcp import Tcp

_F_SETFL, _O_NONBLOCK = 4, 0o4000
_MSG_PEEK, _MSG_TRUNC, _MSG_WAITALL, _MSG_NOSIGNAL = 2, 0x20, 0x100, 0x4000
_SHUT_RD, _SHUT_WR = 0, 1
_POLLRDHUP, _POLLHUP = 0x2000, 0x10
_PATIENCE = 10  # seconds
_WINDOW = 32768  # what a fresh socket takes without more room


def restore(rebuild: Rebuild, entries: Items[Entry]) -> None:
    _Restore(rebuild, entries).all()


class _Restore:
    def __init__(self, rebuild: Rebuild, entries: Items[Entry]) -> None:
        self.rebuild = rebuild
        self.do = rebuild.init
        self.entries = entries
        self.listener = rebuild.program.variable()
        self.other = rebuild.program.variable()
        self.count = rebuild.program.variable()

    def all(self) -> None:
        phases: dict[str, list[tuple[int, Description, Tcp]]] = {}
        for number, description in self.entries:
            phases.setdefault(description.state.phase, []).append(
                (number, description, description.state)
            )
        for number, _, state in phases.get("pair", ()):
            if state.calls:
                partner: Tcp = self.rebuild.capture.descriptions[state.partner].state
                self._pair(number, state, self.rebuild.number(state.partner), partner)
        for phase in ("ended", "reset", "refused"):
            for number, _, state in phases.get(phase, ()):
                self._alone(number, state)
        for number, _, state in (*phases.get("fresh", ()), *phases.get("listening", ())):
            self._make(number, state)
        for number, _, state in phases.get("listening", ()):
            self._listen(number, state)
        waiting = phases.get("unaccepted", [])
        for number, _, state in sorted(waiting, key=lambda found: found[2].turn):
            self._make(number, state)
            self._patience(number)
            assert state.peer is not None
            sockets.connect(self.rebuild, number, state.peer, state.domain)
            self._shut(number, state)
        for number, _, state in phases.get("connecting", ()):
            self._make(number, state)
            self._connect_later(number, state.domain, state.peer)
        for number, description in self.entries:
            options.restore_late(self.rebuild, number, description.state.options)
            self.rebuild.set_status(number, description.flags)
            begun = description.state.phase in ("refused", "connecting")  # without waiting
            if begun and not description.flags & _O_NONBLOCK:
                self.do.call(nr.FCNTL, number, _F_SETFL, description.flags & ~3, what="F_SETFL")

    # -- one socket ---------------------------------------------------------------------------

    def _make(self, number: int, state: Tcp, *, receive: int = 0) -> None:
        """A socket with its name."""
        sockets.make(self.rebuild, number, state.domain, socket.SOCK_STREAM, owner=state.owner)
        self._prepare(number, state, receive)
        if state.local is not None:
            sockets.bind(self.rebuild, number, state.local, state.domain)

    def _prepare(self, number: Argument, state: Tcp, receive: int) -> None:
        options.put(self.rebuild, number, options.SOCKET, options.SO_REUSEADDR, 1)
        options.restore_early(self.rebuild, number, state.options)
        if receive:
            self._resize(number, options.SO_RCVBUF, receive)

    def _resize(self, number: Argument, which: int, size: int) -> None:
        """Change a buffer, and leave it to the kernel's tuning as it was."""
        options.put(self.rebuild, number, options.SOCKET, which, size // 2)
        options.put(self.rebuild, number, options.SOCKET, options.SO_BUF_LOCK, 0)

    def _patience(self, number: Argument) -> None:
        limit = struct.pack("<qq", _PATIENCE, 0)
        for which in (options.SO_RCVTIMEO, options.SO_SNDTIMEO):
            options.put(self.rebuild, number, options.SOCKET, which, limit)

    def _shut(self, number: int, state: Tcp) -> None:
        if state.shut_write:
            self.do.call(nr.SHUTDOWN, number, _SHUT_WR, what="shutdown for writing")
        if state.shut_read:
            self.do.call(nr.SHUTDOWN, number, _SHUT_RD, what="shutdown for reading")

    # -- pairs --------------------------------------------------------------------------------

    def _pair(self, caller: int, calling: Tcp, taker: int, taking: Tcp) -> None:
        assert taking.local is not None
        self._open_listener(taking, taking.local, _room(taking))
        self._make(caller, calling, receive=_room(calling))
        self._patience(caller)
        sockets.connect(self.rebuild, caller, taking.local, calling.domain)
        self._accept(self.rebuild.opened)
        self.rebuild.place(taker)
        sockets.chown(self.rebuild, taker, taking.owner)
        self.do.call(nr.CLOSE, self.listener)
        self._fill(caller, calling, taker, taking)
        self._fill(taker, taking, caller, calling)
        self._finish(caller, calling, taker, taking)
        self._finish(taker, taking, caller, calling)

    def _fill(self, writer: int, writing: Tcp, reader: int, reading: Tcp) -> None:
        """One direction's data; `reading` says what it is."""
        self._send(writer, reading.content + reading.coming, bool(reading.coming))
        # with more coming than fits, how much exactly fits is the kernel's to decide
        there = len(reading.content) // (2 if reading.coming else 1)
        self._await_data(reader, there)

    def _send(self, writer: Argument, content: bytes, large: bool) -> None:
        if not content:
            return
        if large or len(content) > 1 << 20:
            self._resize(writer, options.SO_SNDBUF, 4 * len(content) + (1 << 20))
        data = self.rebuild.program.data(content)
        self.do.call(
            nr.SENDTO, writer, data, len(content), _MSG_NOSIGNAL, 0, 0, save=self.count, what="send"
        )
        self.do.expect(self.count, len(content), what="refill a TCP connection")

    def _await_data(self, reader: Argument, size: int) -> None:
        if size:
            flags = _MSG_PEEK | _MSG_TRUNC | _MSG_WAITALL
            self.do.call(
                nr.RECVFROM, reader, 0, size, flags, 0, 0, save=self.count, what="wait for data"
            )
            self.do.expect(self.count, size, what="data of a TCP connection arrived")

    def _finish(self, number: int, state: Tcp, other: int, partner: Tcp) -> None:
        """Shut what was shut; give buffers back to the kernel in the size that they had."""
        self._shut(number, state)
        if state.shut_write and not partner.coming:
            self._await_events(other, _POLLRDHUP)
        kept = state.options
        if _room(state) and not state.coming:
            self._resize(number, options.SO_RCVBUF, kept.receive_buffer)
        if partner.coming or len(partner.content) > 1 << 20:
            self._resize(number, options.SO_SNDBUF, kept.send_buffer)

    def _await_events(self, number: int, events: int) -> None:
        """poll(2) until one of the events, or an end."""
        asked = self.rebuild.program.data(struct.pack("<iHH", number, events, 0))
        self.do.call(nr.POLL, asked, 1, _PATIENCE * 1000, save=self.count, what="poll")
        self.do.expect(self.count, 1, what="a TCP connection's end arrived")

    # -- ends without a partner ------------------------------------------------------------------

    def _open_listener(self, state: Tcp, at: Address, receive: int = 0) -> None:
        """A temporary listener for one connection, which inherits from it."""
        self.do.call(
            nr.SOCKET,
            state.domain,
            socket.SOCK_STREAM | sockets.SOCK_CLOEXEC,
            0,
            save=self.listener,
            what="socket",
        )
        self._prepare(self.listener, state, receive)
        self._patience(self.listener)
        sockets.bind(self.rebuild, self.listener, at, state.domain)
        self.do.call(nr.LISTEN, self.listener, 1, what="listen")

    def _accept(self, save: Var) -> None:
        self.do.call(
            nr.ACCEPT4, self.listener, 0, 0, sockets.SOCK_CLOEXEC, save=save, what="accept"
        )

    def _alone(self, number: int, state: Tcp) -> None:
        """Connect to a temporary peer, which does what the lost one did."""
        ended = state.phase == "ended"
        plain = replace(state, options=replace(state.options, early=()))
        at = state.peer if ended else None
        if at is None:
            at = sockets.loopback(state.domain)
            if state.local is not None and not state.local.is_any:
                at = replace(state.local, port=0)
        room = _room(replace(state, coming=b""))
        self._make(number, state, receive=room)
        self._patience(number)
        self._open_listener(plain, at)
        name, size = sockets.name(self.rebuild, at, state.domain)
        if not at.port:
            length = self.rebuild.program.data(struct.pack("<Q", size))
            self.do.call(nr.GETSOCKNAME, self.listener, name, length, what="getsockname")
        if state.phase == "refused":
            self.do.call(nr.CLOSE, self.listener)
            self.do.call(nr.FCNTL, number, _F_SETFL, _O_NONBLOCK, what="F_SETFL")
            self.do.call(nr.CONNECT, number, name, size, may_fail=True)
        else:
            self.do.call(nr.CONNECT, number, name, size, what="connect to a temporary peer")
            self._accept(self.other)
            self.do.call(nr.CLOSE, self.listener)
            self._send(self.other, state.content + state.coming, bool(state.coming))
            self._await_data(number, len(state.content))
            if not ended:
                linger = struct.pack("<ii", 1, 0)
                options.put(self.rebuild, self.other, options.SOCKET, options.SO_LINGER, linger)
            self.do.call(nr.CLOSE, self.other)
        if not state.coming:
            self._await_events(number, _POLLRDHUP if ended else 0)
        if ended:
            self._shut(number, state)
        elif not state.error:
            error = self.rebuild.program.data(struct.pack("<iii", 0, 4, 0))
            self.do.call(nr.GETSOCKOPT, number, options.SOCKET, 4, error, error + 4)  # SO_ERROR
        if room:
            self._resize(number, options.SO_RCVBUF, state.options.receive_buffer)

    # -- listeners ------------------------------------------------------------------------------

    def _listen(self, number: int, state: Tcp) -> None:
        self.do.call(nr.LISTEN, number, state.backlog, what="listen")
        for origin, target in state.lone:
            caller = replace(state, local=origin, owner=(0, 0))
            domain = socket.AF_INET if len(origin.host) == 4 else socket.AF_INET6
            self.do.call(
                nr.SOCKET, domain, socket.SOCK_STREAM | sockets.SOCK_CLOEXEC, 0, save=self.other
            )
            self._prepare(self.other, replace(caller, options=_bare(state)), 0)
            self._patience(self.other)
            sockets.bind(self.rebuild, self.other, origin, domain)
            sockets.connect(self.rebuild, self.other, target, domain)
            self.do.call(nr.CLOSE, self.other)

    def _connect_later(self, number: int, domain: int, target: Address | None) -> None:
        """Begin to connect; its answer comes when the listener has room again."""
        assert target is not None
        self.do.call(nr.FCNTL, number, _F_SETFL, _O_NONBLOCK, what="F_SETFL")
        name, size = sockets.name(self.rebuild, target, domain)
        self.do.call(nr.CONNECT, number, name, size, may_fail=True)


def _bare(state: Tcp) -> options.Options:
    return replace(state.options, early=(), late=())


def _room(state: Tcp) -> int:
    """The receive buffer to start with; 0: the default's."""
    if state.coming:
        return state.options.receive_buffer
    if len(state.content) > _WINDOW:
        return max(state.options.receive_buffer, 4 * len(state.content) + 65536)
    return 0


KIND = Kind(("tcp",), restore)
