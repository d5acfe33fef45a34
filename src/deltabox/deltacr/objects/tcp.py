"""TCP sockets: listening, connected inside the sandbox, half closed, reset (tcp(7)).

A connection whose ends are both in the tree comes back by a real handshake over `lo`, with the same
addresses and ports.  Its sequence numbers and timestamps are new, and no program can see them.
Cloning them with TCP_REPAIR, as CRIU does, would need a dozen more calls for each end, and would
have to bring every timer of the protocol back; a handshake makes the kernel do that.

What a direction carries is the reader's receive queue and what the writer's kernel still holds.
The first is peeked.  The second can be read in repair mode only, so that is entered when there is
any, for the length of two calls; the program is stopped, and the one thing it changes,
SO_REUSEADDR, is put back.  The restore writes all of it on the writer's end.

Ends that nobody has open are seen by sock_diag alone: a listener's unaccepted connections (made
again by connecting), and ends that are closed already.  What such an end has not sent yet cannot be
read at its place, but it goes to the other end as soon as that one gets room: a larger buffer, for
the length of two calls.  A program would see no more than that the data came early.
A connection to the outside cannot be had twice: after a restore it is as after a reset by the peer,
unless the sandbox was made with on_external="refuse".

A connect(2) may be stopped when its connection already stands.  Its restart would say so, once; of
a socket that is connected anew it says EISCONN.  So what it was about to return is decided here.
Whether the end of a connect without waiting has been asked for by a second one, nobody can tell:
that second one says EISCONN after a restore.

Not told by the kernel: whether a pending error after a reset is ECONNRESET or, because a FIN had
come before, EPIPE.  It comes back as ECONNRESET.
"""

from __future__ import annotations

import array
import fcntl
import select
import socket
import struct
import termios
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ...linux import numbers as nr
from ...linux import sock_diag
from ..model import Description, Process, Thread
from ..subject import Refused, Subject
from . import options
from .options import Options
from .sockets import Address, Network, address, owner_of

if TYPE_CHECKING:
    from ..descriptors import DescriptorTable

# include/net/tcp_states.h
(ESTABLISHED, SYN_SENT, SYN_RECV, FIN_WAIT1, FIN_WAIT2, _TIME_WAIT) = range(1, 7)
(CLOSE, CLOSE_WAIT, LAST_ACK, LISTEN, CLOSING) = range(7, 12)
_CONNECTED = (ESTABLISHED, FIN_WAIT1, FIN_WAIT2, CLOSE_WAIT, LAST_ACK, CLOSING)
_SENT_FIN = (FIN_WAIT1, FIN_WAIT2, LAST_ACK, CLOSING)
_GOT_FIN = (CLOSE_WAIT, LAST_ACK, CLOSING)

_TCP_INFO, _TCP_REPAIR, _TCP_REPAIR_QUEUE, _TCP_QUEUE_SEQ = 11, 19, 20, 21
_REPAIR_ON, _REPAIR_OFF_NO_WP = 1, -1
_RECV_QUEUE, _SEND_QUEUE = 1, 2
_SIOCOUTQ = termios.TIOCOUTQ
_MASK = (1 << 32) - 1
_MOST = (1 << 31) - 1  # what the size of a buffer may be
_RECEIVE_BUFFER = (options.SO_RCVBUF, options.SO_BUF_LOCK)
_STANDS = ("pair", "ended", "unaccepted")
_CHANGED = (
    options.SO_REUSEADDR,
    options.SO_RCVTIMEO,
    options.SO_SNDTIMEO,
    options.SO_LINGER,
)


@dataclass(frozen=True)
class Tcp:
    """One socket. `phase` says how it is made again; see restore in connections.py."""

    phase: str  # fresh, listening, pair, ended, reset, refused, unaccepted, connecting
    domain: int
    owner: tuple[int, int]
    local: Address | None  # None: no port yet
    options: Options
    peer: Address | None = None
    partner: int = -1  # of a pair: the index of the other end's description
    calls: bool = False  # of a pair: the end that connects
    content: bytes = b""  # what it can read
    coming: bytes = b""  # what its peer's kernel still has for it
    shut_read: bool = False
    shut_write: bool = False
    error: bool = False  # reset or refused, and not yet told
    backlog: int = 0
    turn: int = 0  # among the unaccepted
    lone: tuple[tuple[Address, Address], ...] = ()  # unaccepted whose callers have closed: from, to


def finish_calls(process: Process, descriptions: Sequence[Description]) -> Process:
    """Have each connect(2) that was stopped when its connection stood return its success."""
    connected = {
        d.number
        for d in process.descriptors
        if descriptions[d.description].kind == "tcp"
        and descriptions[d.description].state.phase in _STANDS
    }

    def finished(thread: Thread) -> Thread:
        then = thread.blocked
        if then is None or then.orig_rax != nr.CONNECT or then.rdi not in connected:
            return thread
        registers = then.copy()
        registers.rax, registers.orig_rax = 0, -1
        return replace(thread, registers=registers, memory=(), blocked=None)

    return replace(process, threads=tuple(finished(t) for t in process.threads))


@dataclass
class _Seen:
    """A captured socket until all are known."""

    index: int
    subject: Subject
    sock: socket.socket
    inode: int
    state: int
    info: bytes
    events: int
    found: Tcp
    lone: list[tuple[int, Address, Address]] = field(default_factory=list)


def capture(subject: Subject, sock: socket.socket) -> Description:
    """What one socket tells alone; `finish` completes it."""
    network: Network = subject.table.network
    info = sock.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, 256)
    state = info[0]
    local = address(sock.getsockname())
    if network.is_host and local.port:
        raise Refused("a socket in the host's network")
    events = _events(sock)
    if events & select.POLLPRI:
        raise Refused("a TCP socket with urgent data")
    if state == SYN_RECV:
        raise Refused("a TCP socket whose connection is just being made")
    kept = options.capture(
        sock,
        network.fresh(sock),
        unconnected=state == LISTEN or (state == CLOSE and not events & select.POLLRDHUP),
        always=_CHANGED,
    )
    found = Tcp(
        "fresh",
        sock.family,
        owner_of(subject, sock),
        local if local.port else None,
        kept,
    )
    return Description("tcp", subject.flags, state=(found, info, events))


def _events(sock: socket.socket) -> int:
    poller = select.poll()
    poller.register(sock, select.POLLIN | select.POLLPRI | select.POLLRDHUP | select.POLLOUT)
    for _, events in poller.poll(0):
        return events
    return 0


def finish(table: DescriptorTable) -> None:
    """Match the ends of connections when every socket of the tree is known."""
    indexes = [i for i, d in enumerate(table.descriptions) if d.kind == "tcp"]
    if indexes:
        _Finishing(table, indexes).all()


class _Finishing:
    def __init__(self, table: DescriptorTable, indexes: list[int]) -> None:
        self.table = table
        self.network = table.network
        self.seen: dict[int, _Seen] = {}
        for index in indexes:
            subject = table.subject(index)
            found, info, events = table.descriptions[index].state
            sock = self.network.take(subject)
            inode = int(subject.target[8:-1])
            self.seen[index] = _Seen(index, subject, sock, inode, info[0], info, events, found)
        self.listeners = [s for s in self.seen.values() if s.state == LISTEN]

    def all(self) -> None:
        ends: dict[tuple[sock_diag.Endpoint, sock_diag.Endpoint], _Seen] = {}
        for seen in self.seen.values():
            if seen.state in _CONNECTED:
                peer = address(seen.sock.getpeername())
                seen.found = replace(seen.found, peer=peer)
                assert seen.found.local is not None
                ends[seen.found.local.key, peer.key] = seen
        for index, seen in self.seen.items():
            try:
                if seen.state in _CONNECTED:
                    self._connected(seen, ends)
                elif seen.state == LISTEN:
                    self._listening(seen)
                elif seen.state == SYN_SENT:
                    self._connecting(seen)
                else:
                    self._closed(seen)
            except Refused as refused:
                raise self.table.refuse(index, str(refused)) from None
        self._number_unaccepted()
        for index, seen in self.seen.items():
            description = self.table.descriptions[index]
            self.table.descriptions[index] = replace(description, state=seen.found)

    # -- one socket -------------------------------------------------------------------------

    def _connected(
        self, seen: _Seen, ends: dict[tuple[sock_diag.Endpoint, sock_diag.Endpoint], _Seen]
    ) -> None:
        local, peer = seen.found.local, seen.found.peer
        assert local is not None and peer is not None
        if seen.events & select.POLLERR:
            raise Refused("a TCP socket with an error or notice that was not read")
        shut_write = seen.state in _SENT_FIN
        shut_read = seen.state not in _GOT_FIN and bool(seen.events & select.POLLRDHUP)
        seen.found = replace(seen.found, shut_read=shut_read, shut_write=shut_write)
        other = ends.get((peer.key, local.key))
        if other is seen:
            raise Refused("a TCP socket connected to itself")
        if other is not None:
            content, coming = _stream(other, seen)
            self._check_room(content, coming)
            seen.found = replace(
                seen.found,
                phase="pair",
                partner=other.index,
                calls=self._calls(seen, other),
                content=content,
                coming=coming,
            )
            return
        self._without_partner(seen, local, peer)

    def _calls(self, seen: _Seen, other: _Seen) -> bool:
        """Which end connects; no program can tell afterwards."""
        return seen.index < other.index

    def _without_partner(self, seen: _Seen, local: Address, peer: Address) -> None:
        """The other end is nobody's, or somebody's outside."""
        other = next(
            (
                s
                for s in self.network.listed()
                if (s.local, s.peer) == (peer.key, local.key) and s.state != LISTEN
            ),
            None,
        )
        if other is not None and not other.inode:
            if other.state in (ESTABLISHED, CLOSE_WAIT) and self._listener(peer):
                self._unaccepted(seen, other)
                return
            if other.state == SYN_RECV:
                raise Refused("a TCP socket whose listener has not answered it yet")
            if seen.state not in _GOT_FIN:
                _receive_all(seen, other.send)
                seen.events = _events(seen.sock)
            if seen.state == CLOSE:
                seen.found = replace(seen.found, peer=None, shut_write=False)
                self._closed(seen)  # it had been shut before, so that was all
            else:
                self._ended(seen)
            return
        if other is None and seen.state in _GOT_FIN and _is_local(local, peer):
            self._ended(seen)
            return
        if self.network.on_external == "refuse":
            raise Refused(f"a TCP connection to {peer}, outside the sandbox")
        self._check_room(content := _peek(seen), b"")
        seen.found = replace(
            seen.found, phase="reset", content=content, error=True, shut_read=False, peer=None
        )

    def _ended(self, seen: _Seen) -> None:
        received = _peek(seen)
        # what there is no room for at once, a new peer holds when it is closed
        room = _room_for_content()
        content, coming = received[:room], received[room:]
        self._check_room(content, coming)
        seen.found = replace(seen.found, phase="ended", content=content, coming=coming)

    def _unaccepted(self, seen: _Seen, other: sock_diag.Tcp) -> None:
        finished = other.state == CLOSE_WAIT
        if other.receive - finished > 0 or _unsent(seen) - finished > 0:
            raise Refused("a TCP socket whose listener has not accepted it, with data sent already")
        seen.found = replace(seen.found, phase="unaccepted")

    def _listener(self, at: Address) -> _Seen | None:
        for listener in self.listeners:
            local = listener.found.local
            if (
                local is not None
                and local.port == at.port
                and (local.is_any or local.host == at.host)
            ):
                return listener
        return None

    def _listening(self, seen: _Seen) -> None:
        waiting, backlog = struct.unpack_from("=II", seen.info, 24)
        seen.found = replace(seen.found, phase="listening", backlog=backlog)
        if waiting:
            self._waiting(seen, waiting)

    def _waiting(self, listener: _Seen, count: int) -> None:
        """Unaccepted connections: of callers in the tree, or of callers that have closed."""
        local = listener.found.local
        assert local is not None
        callers = {
            (s.found.local.key, s.found.peer.key)
            for s in self.seen.values()
            if s.found.local is not None and s.found.peer is not None
        }
        known = 0
        for child in self.network.listed():
            if child.inode or child.state not in (ESTABLISHED, CLOSE_WAIT):
                continue
            if child.local[1] != local.port or not (local.is_any or local.host == child.local[0]):
                continue
            known += 1
            if (child.peer, child.local) in callers:
                continue
            if child.state != CLOSE_WAIT or not self._closed_caller(child):
                if self.network.on_external == "refuse":
                    raise Refused("a listening TCP socket that is called from outside the sandbox")
                continue  # its caller would be reset: it is not there any more
            if child.receive > 1:
                raise Refused("a listening TCP socket with an unaccepted connection's data")
            listener.lone.append((child.idle, Address(*child.peer), Address(*child.local)))
        groups = [s for s in self.listeners if s.found.local == local]
        if len(groups) > 1:
            raise Refused("one of several listening TCP sockets with unaccepted connections")
        if known < count:
            raise Refused("a listening TCP socket with a connection that is just being made")

    def _closed_caller(self, child: sock_diag.Tcp) -> bool:
        return not any(
            s.inode for s in self.network.listed() if (s.local, s.peer) == (child.peer, child.local)
        )

    def _number_unaccepted(self) -> None:
        """The order of unaccepted connections: by age, then in the order their sockets were made.

        The kernel tells ages to the clock tick.
        """
        ages = {
            (s.peer, s.local): s.idle
            for s in (self.network.listed() if self._any_unaccepted() else ())
        }
        waiting = [s for s in self.seen.values() if s.found.phase == "unaccepted"]

        def turn(seen: _Seen) -> tuple[int, int]:
            assert seen.found.local is not None and seen.found.peer is not None
            return -ages.get((seen.found.local.key, seen.found.peer.key), 0), seen.inode

        for number, seen in enumerate(sorted(waiting, key=turn)):
            seen.found = replace(seen.found, turn=number)
        for listener in self.listeners:
            lone = tuple((a, b) for _, a, b in sorted(listener.lone, key=lambda x: -x[0]))
            if lone and waiting:
                raise self.table.refuse(
                    listener.index, "a listening TCP socket with callers open and closed"
                )
            listener.found = replace(listener.found, lone=lone)

    def _any_unaccepted(self) -> bool:
        return any(s.found.phase == "unaccepted" for s in self.seen.values())

    def _connecting(self, seen: _Seen) -> None:
        own = next((s for s in self.network.listed() if s.inode == seen.inode), None)
        if own is None:
            raise Refused("a TCP socket that is just connecting")
        target = Address(*own.peer)
        if self._listener(target):
            seen.found = replace(seen.found, phase="connecting", peer=target)
        elif self.network.on_external == "refuse":
            raise Refused(f"a TCP connection to {target}, outside the sandbox")
        else:
            seen.found = replace(seen.found, phase="refused", error=True)

    def _closed(self, seen: _Seen) -> None:
        """Never connected, or no longer."""
        over = bool(seen.events & select.POLLRDHUP)
        if not over and seen.events & select.POLLERR:
            raise Refused("a TCP socket with an error or notice that was not read")
        if not over:
            return
        error = bool(seen.events & select.POLLERR)
        acked, received = struct.unpack_from("=QQ", seen.info, 120)
        sent, got = struct.unpack_from("=II", seen.info, 136)
        if not sent and not got:
            raise Refused("a TCP socket that was shut down before it was connected")
        established = bool(acked or received or seen.info[5])
        self._check_room(content := _peek(seen), b"")
        seen.found = replace(
            seen.found,
            phase="reset" if established else "refused",
            content=content,
            error=error,
        )

    @staticmethod
    def _check_room(content: bytes, coming: bytes) -> None:
        """Without CAP_NET_ADMIN on the host, buffers grow up to a limit only (socket(7))."""
        if len(content) > _room_for_content():
            raise Refused(
                f"a TCP socket with {len(content)} unread bytes, which net.core.rmem_max "
                f"({_limit('rmem_max')}) is too small to give back"
            )
        if len(content) + len(coming) > max(1 << 20, _limit("wmem_max")) + len(content):
            raise Refused(
                f"a TCP socket whose peer holds {len(coming)} bytes for it, which "
                "net.core.wmem_max is too small to give back"
            )


def _limit(name: str) -> int:
    return int(Path(f"/proc/sys/net/core/{name}").read_text())


def _room_for_content() -> int:
    """How many unread bytes a receive queue can surely be given."""
    return max(32768, _limit("rmem_max") // 2)


def _is_local(local: Address, peer: Address) -> bool:
    return peer.host == local.host or peer.host[0] == 127 or peer.host == bytes(15) + b"\1"


# -- what a connection carries --------------------------------------------------------------------


def _unread(seen: _Seen) -> int:
    count = array.array("i", [0])
    fcntl.ioctl(seen.sock, termios.FIONREAD, count)
    return count[0]


def _unsent(seen: _Seen) -> int:
    """Bytes, and a FIN, that the peer has not acknowledged."""
    count = array.array("i", [0])
    fcntl.ioctl(seen.sock, _SIOCOUTQ, count)
    return count[0]


def _peek(seen: _Seen) -> bytes:
    """All of the receive queue, left as it is."""
    size = _unread(seen)
    if not size:
        return b""
    offset = seen.found.options.value(options.SOCKET, options.SO_PEEK_OFF)
    if offset is not None:
        seen.sock.setsockopt(options.SOCKET, options.SO_PEEK_OFF, 0)
    try:
        content = seen.sock.recv(size, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    finally:
        if offset is not None:
            seen.sock.setsockopt(options.SOCKET, options.SO_PEEK_OFF, offset)
    if len(content) != size:
        raise Refused("a TCP socket with urgent data")
    return content


def _receive_all(seen: _Seen, unsent: int) -> None:
    """Have a closed peer send all that it holds, and its FIN, to a socket that was full."""
    before, fixed = (seen.sock.getsockopt(options.SOCKET, o) for o in _RECEIVE_BUFFER)
    room = before + 4 * (_unread(seen) + unsent) + 65536
    seen.sock.setsockopt(options.SOCKET, options.SO_RCVBUFFORCE, min(room, _MOST) // 2)
    try:
        for _ in range(100):
            _peek(seen)  # or nobody would look at the buffer, and tell the peer
            seen.info = seen.sock.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, 256)
            seen.state = seen.info[0]
            if seen.state in (CLOSE, *_GOT_FIN):
                return
    finally:
        seen.sock.setsockopt(options.SOCKET, options.SO_RCVBUFFORCE, before // 2)
        seen.sock.setsockopt(options.SOCKET, options.SO_BUF_LOCK, fixed)
    raise Refused("a TCP socket whose peer has been closed with data unsent")


def _stream(writer: _Seen, reader: _Seen) -> tuple[bytes, bytes]:
    """What is in the reader's queue, and what follows in the writer's kernel.

    The writer's queue is read first: it always reaches back to what the reader has got by then, and
    what arrives in between is in both.
    """
    if not _unsent(writer):
        return _peek(reader), b""
    with _repair(writer, _SEND_QUEUE) as position:
        end = position()
        kept = writer.sock.recv(_unsent(writer) + (1 << 20), socket.MSG_PEEK)
    for _ in range(100):
        with _repair(reader, _RECV_QUEUE) as position:
            got = position()
        content = _peek(reader)
        with _repair(reader, _RECV_QUEUE) as position:
            if position() == got:
                break
    else:
        raise Refused("a TCP socket that receives without end")
    missing = (end - got) & _MASK
    if missing and writer.state in _SENT_FIN:
        missing -= 1  # the FIN has a number too
    if missing > len(kept):
        raise Refused("a TCP socket whose peer's data could not be read")
    return content, kept[len(kept) - missing :]


class _repair:
    """Repair mode (TCP_REPAIR) on one of the queues; gives a function of its position."""

    def __init__(self, seen: _Seen, queue: int) -> None:
        self.sock, self.queue = seen.sock, queue
        self.reuse = seen.sock.getsockopt(options.SOCKET, options.SO_REUSEADDR)

    def __enter__(self) -> _repair:
        self._set(_TCP_REPAIR, _REPAIR_ON)
        self._set(_TCP_REPAIR_QUEUE, self.queue)
        return self

    def __call__(self) -> int:
        return self.sock.getsockopt(socket.IPPROTO_TCP, _TCP_QUEUE_SEQ) & _MASK

    def __exit__(self, *error: object) -> None:
        self._set(_TCP_REPAIR, _REPAIR_OFF_NO_WP)
        self.sock.setsockopt(options.SOCKET, options.SO_REUSEADDR, self.reuse)

    def _set(self, name: int, value: int) -> None:
        self.sock.setsockopt(socket.IPPROTO_TCP, name, value)
