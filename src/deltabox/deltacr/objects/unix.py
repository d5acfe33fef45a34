"""Unix sockets as they are captured (unix(7)): names, peers, backlogs, queues.

Names are told by getsockname, peers and backlogs by sock_diag(7), the file that a name was bound to
by SIOCUNIXFILE.  Queues are peeked at (SO_PEEK_OFF walks them without taking anything); descriptors
in flight in them are described like all others.  unix_wiring.py makes the sockets again.
"""

from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import os
import select
import socket
import stat
import struct
import termios
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace

from ...linux import proc
from ...linux.openat2 import openat2
from ..model import Description
from ..rebuild import Who
from ..subject import Refused, Subject
from . import files, options
from .options import Options

STREAM, DGRAM, SEQPACKET = socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET
_SIOCUNIXFILE = 0x89E0
_SIOCOUTQ = 0x5411
_SO_PEEK_OFF = 42
_DELETED = " (deleted)"
_MOST_RIGHTS = 253  # SCM_MAX_FD


@dataclass(frozen=True)
class Message:
    """What one send put into a queue; of a stream, all that one read could get."""

    data: bytes
    descriptions: tuple[int, ...] = ()  # of descriptors in flight
    sender: bytes = b""  # the name of a datagram's sender
    credentials: Who | None = None  # for a receiver that asks for them


@dataclass(frozen=True)
class Place:
    """The file that a name was bound to."""

    path: str  # absolute
    directory: str  # to be in when binding the name
    file: tuple[int, int]  # device and inode number
    mode: int
    uid: int
    gid: int
    times: tuple[int, int]  # of access and modification, in nanoseconds
    directory_times: tuple[int, int]
    exists: bool  # the path still leads to that file
    taken: bool  # it leads to another


@dataclass(frozen=True)
class Unix:
    """`name` and `peer_name` are sun_path; abstract ones begin with a zero byte, b"" is none."""

    type: int
    inode: int
    name: bytes
    peer_name: bytes
    peer: int | None  # inode of the peer, 0 if it has been closed, None if there never was one
    waiting: tuple[int, ...]  # inodes of what has connected and is not accepted, in order
    listening: bool
    backlog: int
    shutdown: int  # 1: receives no more, 2: sends no more
    place: Place | None
    peer_place: Place | None  # of a peer that has been closed
    peer_credentials: Who | None  # as SO_PEERCRED gives them
    broken: bool  # an error is pending: the peer has closed with bytes unread
    options: Options
    maker: Who | None = None  # of one that waits to be accepted
    queue: tuple[Message, ...] = ()

    @property
    def passes_credentials(self) -> bool:
        return any(self.options.value(options.SOCKET, socket.SO_PASSCRED) or b"")


def capture(subject: Subject, sock: socket.socket) -> Description:
    """All but the queue, which may hold descriptors that others have too."""
    inode = int(subject.target[8:-1])
    info = subject.table.unix_sockets.get(inode)
    if info is None:
        raise Refused("a unix socket of another network namespace")
    name, peer_name = _name(sock.getsockname()), b""
    with contextlib.suppress(OSError):
        peer_name = _name(sock.getpeername())
    subject.table.unix_holders[inode] = subject
    level = socket.SOL_SOCKET
    listening = bool(sock.getsockopt(level, socket.SO_ACCEPTCONN))
    if 0 in info.waiting:
        raise Refused("a unix socket with a waiting connection whose other end has been closed")
    if sock.type == DGRAM and info.peer == 0 and peer_name:
        raise Refused(f"a unix socket connected to {_shown(peer_name)}, which has been closed")
    if listening or info.peer is not None:
        subject.table.will_ask(subject)
    return Description(
        "unix socket",
        subject.flags,
        state=Unix(
            type=sock.type,
            inode=inode,
            name=name,
            peer_name=peer_name,
            peer=info.peer,
            waiting=info.waiting,
            listening=listening,
            backlog=info.backlog,
            shutdown=info.shutdown,
            place=_place(subject, sock, name) if name and name[0] else None,
            peer_place=_lost_place(subject, peer_name) if info.peer == 0 else None,
            peer_credentials=None,
            broken=_is_broken(sock),
            options=options.capture(
                sock, subject.table.network.fresh(sock), unconnected=info.peer is None
            ),
        ),
    )


def _name(value: object) -> bytes:
    return value if isinstance(value, bytes) else os.fsencode(str(value or ""))


def _shown(name: bytes) -> str:
    return os.fsdecode(name.replace(b"\0", b"@"))


def _place(subject: Subject, sock: socket.socket, name: bytes) -> Place:
    """Whatever the name means now, the socket knows its file."""
    text = os.fsdecode(name)
    try:
        fd = fcntl.ioctl(sock, _SIOCUNIXFILE)
    except OSError as error:
        raise Refused(f"a unix socket whose file cannot be told: {error.strerror}") from None
    try:
        info = os.fstat(fd)
        path = os.readlink(f"/proc/self/fd/{fd}").removesuffix(_DELETED)
    finally:
        os.close(fd)
    files.check_own(path, subject.table.shared_directories)
    plain = text.removeprefix("./")
    if plain.startswith("/"):
        directory = "/"
    elif path.endswith(f"/{plain}"):
        directory = path[: -len(plain)]
    else:
        raise Refused(f"a unix socket bound as {text}, whose file is {path}")
    try:
        parent = openat2(subject.table.root, os.path.dirname(path), os.O_PATH | os.O_DIRECTORY)
    except OSError:
        raise Refused(f"a unix socket bound to {path}, whose directory is gone") from None
    try:
        above = os.fstat(parent)
        _check_same_directory(subject, os.path.join(directory, text), path, above)
        file = (info.st_dev, info.st_ino)
        now: tuple[int, int] | None = None
        with contextlib.suppress(FileNotFoundError):
            found = os.stat(os.path.basename(path), dir_fd=parent, follow_symlinks=False)
            now = (found.st_dev, found.st_ino)
    finally:
        os.close(parent)
    owner = subject.table.owner
    return Place(
        path,
        directory,
        file,
        stat.S_IMODE(info.st_mode),
        info.st_uid - owner,
        info.st_gid - owner,
        (info.st_atime_ns, info.st_mtime_ns),
        (above.st_atime_ns, above.st_mtime_ns),
        exists=now == file,
        taken=now is not None and now != file,
    )


def _lost_place(subject: Subject, name: bytes) -> Place | None:
    """Where a socket was bound that nobody has any more, as far as its name tells."""
    if not name or not name[0] or int(subject.target[8:-1]) in subject.table.unaccepted:
        return None
    path = os.fsdecode(name)
    if not path.startswith("/"):
        return None  # only whoever listens there still could tell; see `check`
    try:
        parent = openat2(subject.table.root, os.path.dirname(path), os.O_PATH | os.O_DIRECTORY)
    except OSError:
        raise Refused(f"a unix socket connected to {path}, whose directory is gone") from None
    try:
        above = os.fstat(parent)
        taken = False
        with contextlib.suppress(FileNotFoundError):
            os.stat(os.path.basename(path), dir_fd=parent, follow_symlinks=False)
            taken = True
    finally:
        os.close(parent)
    times = (above.st_atime_ns, above.st_mtime_ns)
    return Place(path, "/", (0, 0), 0, 0, 0, times, times, exists=False, taken=taken)


def _check_same_directory(subject: Subject, bound: str, path: str, above: os.stat_result) -> None:
    """What is bound to the name in the rebuilt root must come to lie where it lies now."""
    try:
        fd = openat2(subject.table.root, os.path.dirname(bound), os.O_PATH | os.O_DIRECTORY)
    except OSError:
        raise Refused(f"a unix socket bound as {bound}, whose file is {path}") from None
    try:
        info = os.fstat(fd)
    finally:
        os.close(fd)
    same = (info.st_dev, info.st_ino) == (above.st_dev, above.st_ino)
    if not same or os.path.basename(bound) != os.path.basename(path):
        raise Refused(f"a unix socket bound as {bound}, whose file is {path}")


def _is_broken(sock: socket.socket) -> bool:
    poller = select.poll()
    poller.register(sock, 0)
    return any(events & select.POLLERR for _, events in poller.poll(0))


# -- when all processes have been seen --------------------------------------------------------


def settle(subject: Subject, description: Description) -> Description:
    """Who made the peer, and what is in the queue."""
    state: Unix = description.state
    maker = None
    with subject.taken() as fd, socket.socket(fileno=os.dup(fd)) as sock:
        credentials = None
        if state.listening or state.peer is not None:
            credentials = _credentials(subject, sock)
        queue: tuple[Message, ...] = ()
        if not state.listening:
            try:
                queue = tuple(_messages(subject, sock, state))
            except _Unclear:
                queue = _messages_read(subject, sock, state)
        if state.inode in subject.table.unaccepted:
            sent = array.array("i", [0])
            fcntl.ioctl(fd, _SIOCOUTQ, sent)
            if sent[0]:
                raise Refused("a unix socket that has sent to a connection nobody has accepted")
            maker = _holder(subject)
    return replace(
        description,
        state=replace(state, peer_credentials=credentials, maker=maker, queue=queue),
    )


def _holder(subject: Subject) -> Who | None:
    """Who holds it, and so has most likely connected it: the kernel tells only who accepts."""
    table = subject.table
    if subject.host not in table.inside:
        return None
    status = proc.status(subject.host)
    uid, gid = int(status["Uid"].split()[1]), int(status["Gid"].split()[1])
    return Who(table.inside[subject.host], uid - table.owner, gid - table.owner)


def _credentials(subject: Subject, sock: socket.socket) -> Who | None:
    """SO_PEERCRED with the pid as seen inside; None where the kernel has noted nobody."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    pid, uid, gid = struct.unpack("<iII", raw)
    if not pid:
        return None
    table = subject.table
    inside = table.peer_pid(subject, pid)
    if not inside:
        raise Refused("a unix socket whose other end was made outside the sandbox")
    return Who(inside, uid - table.owner, gid - table.owner)


def _messages(subject: Subject, sock: socket.socket, state: Unix) -> Iterator[Message]:
    """Everything in the receive queue, which stays there."""
    left = array.array("i", [0])
    if state.broken:
        # at the end of the queue, a peek too would take the error that waits there
        fcntl.ioctl(sock, termios.FIONREAD, left)
        if left[0] and state.type != STREAM:
            raise Refused("a unix socket with datagrams in its queue and an error behind them")
    with _Peek(sock) as peek:
        pending: Message | None = None
        while not state.broken or left[0] > 0:
            found = peek.next(1 << 20)
            if found is None or (not found.data and state.type != DGRAM):
                break  # empty, or the end of the stream
            if not found.data:
                # a peek offset cannot go past it: what comes after it would be lost
                raise Refused("a unix socket with an empty datagram in its queue")
            if found.has_rights and state.type == STREAM and len(found.data) > 1:
                found.drop()
                raise _Unclear
            left[0] -= len(found.data)
            message = _message(subject, found)
            if pending is not None and state.type == STREAM and _reads_as_one(pending, message):
                pending = replace(pending, data=pending.data + message.data)
                continue
            if pending is not None:
                yield pending
            pending = message
        if pending is not None:
            yield pending


@dataclass(frozen=True)
class _Peeked:
    data: bytes
    ancillary: list[tuple[int, int, bytes]]
    sender: bytes

    @property
    def has_rights(self) -> bool:
        return any(kind == socket.SCM_RIGHTS for _, kind, _ in self.ancillary)

    def drop(self) -> None:
        """Close the descriptors that came with it."""
        for _, kind, content in self.ancillary:
            if kind == socket.SCM_RIGHTS:
                for fd in array.array("i", content):
                    os.close(fd)


class _Peek:
    """Looks at a queue piece by piece; its peek offset is put back in the end."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def __enter__(self) -> _Peek:
        self._before = self._sock.getsockopt(socket.SOL_SOCKET, _SO_PEEK_OFF)
        self._sock.setsockopt(socket.SOL_SOCKET, _SO_PEEK_OFF, 0)
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._sock.setsockopt(socket.SOL_SOCKET, _SO_PEEK_OFF, self._before)

    def next(self, size: int) -> _Peeked | None:
        """What comes next, at most `size` bytes; None when there is no more."""
        flags = socket.MSG_PEEK | socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
        room = socket.CMSG_SPACE(4 * _MOST_RIGHTS) + socket.CMSG_SPACE(12) + 512
        try:
            data, ancillary, _, sender = self._sock.recvmsg(size, room, flags)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.ECONNRESET, errno.ENOTCONN, errno.EINVAL):
                return None
            raise
        return _Peeked(data, ancillary, _name(sender))


class _Unclear(Exception):
    """A peek at a stream does not tell with which byte the descriptors come that it shows."""


def _messages_read(subject: Subject, sock: socket.socket, state: Unix) -> tuple[Message, ...]:
    """Take the queue out byte by byte, which tells all, and send it again from the other end.

    The kernel's peek attaches the descriptors of the next send to whatever was asked for
    (unix_stream_read_generic in net/unix/af_unix.c), so there is no other way. Nobody sees it: both
    ends are stopped, and the queue is as it was afterwards.
    """
    holder = subject.table.unix_holders.get(state.peer or 0)
    peer = next((s for s in subject.table.unix_states if s.inode == state.peer), None)
    if holder is None or peer is None or peer.shutdown & 2:
        raise Refused("a unix socket with descriptors in its queue whose sender has closed it")
    if state.passes_credentials or peer.passes_credentials:
        raise Refused("a unix socket with descriptors and credentials in its queue")
    found: list[Message] = []
    before = sock.getsockopt(socket.SOL_SOCKET, _SO_PEEK_OFF)
    with holder.taken() as fd, socket.socket(fileno=os.dup(fd)) as sender, ExitStack() as taken:
        ends = _ends_of_rights(sock)
        sock.setsockopt(socket.SOL_SOCKET, _SO_PEEK_OFF, -1)
        try:
            pieces: list[tuple[bytes, list[int]]] = []
            done = 0
            try:
                while piece := _one_byte(sock):
                    taken.callback(_close_all, piece[1])
                    if piece[1] or done in ends or not pieces:
                        pieces.append(piece)
                    else:
                        pieces[-1] = (pieces[-1][0] + piece[0], pieces[-1][1])
                    done += 1
            finally:
                for data, fds in pieces:
                    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
                    sender.sendmsg([data], rights if fds else [], socket.MSG_DONTWAIT)
        finally:
            sock.setsockopt(socket.SOL_SOCKET, _SO_PEEK_OFF, before)
        for data, fds in pieces:
            indexes = tuple(subject.table.adopt(os.dup(fd), subject) for fd in fds)
            found.append(Message(data, indexes))
    return tuple(found)


def _ends_of_rights(sock: socket.socket) -> set[int]:
    """Where sends with descriptors end: a peek goes no further."""
    ends: set[int] = set()
    done = 0
    with _Peek(sock) as peek:
        while (found := peek.next(1 << 20)) is not None and found.data:
            found.drop()
            done += len(found.data)
            if found.has_rights:
                ends.add(done)
    return ends


def _one_byte(sock: socket.socket) -> tuple[bytes, list[int]] | None:
    flags = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
    try:
        data, ancillary, _, _ = sock.recvmsg(1, socket.CMSG_SPACE(4 * _MOST_RIGHTS), flags)
    except BlockingIOError:
        return None
    fds: list[int] = []
    for _, kind, content in ancillary:
        if kind == socket.SCM_RIGHTS:
            fds += array.array("i", content)
    return (data, fds) if data else None


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


def _message(subject: Subject, found: _Peeked) -> Message:
    credentials = None
    fds: list[int] = []
    strange = ""
    for level, kind, content in found.ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds += array.array("i", content)
        elif (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
            pid, uid, gid = struct.unpack("<iII", content)
            owner = subject.table.owner
            credentials = Who(subject.table.inside.get(pid, 0), uid - owner, gid - owner)
        else:
            strange = f"{level}/{kind}"
    descriptions = tuple(subject.table.adopt(fd, subject) for fd in fds)
    if strange:
        raise Refused(f"a unix socket with ancillary data of kind {strange} in its queue")
    if credentials is not None and not credentials.pid:
        raise Refused("a unix socket with credentials of a process that has ended in its queue")
    if any(subject.table.is_own(index) for index in descriptions):
        raise Refused("a unix socket with a descriptor in its queue that only a process can open")
    return Message(found.data, descriptions, found.sender, credentials)


def _reads_as_one(first: Message, second: Message) -> bool:
    """Whether one read(2) of a stream would get both."""
    return not (first.descriptions or second.descriptions) and (
        first.credentials == second.credentials
    )


def check(subject: Subject, description: Description) -> None:
    """When all sockets are known, also those in flight: the peers must be among them."""
    state: Unix = description.state
    known = subject.table.unix_known
    if state.peer and state.peer not in known:
        raise Refused("a unix socket whose other end is outside the sandbox")
    if not known.issuperset(state.waiting):
        raise Refused("a unix socket that somebody outside the sandbox waits to be accepted by")
    lost = state.peer == 0 and state.inode not in subject.table.unaccepted
    if lost and state.peer_name[:1] not in (b"", b"\0") and state.peer_place is None:
        served = {other.name for other in subject.table.unix_states if other.listening}
        if state.peer_name not in served:
            raise Refused(f"a unix socket connected to {_shown(state.peer_name)}, which is closed")
    if state.type != DGRAM:
        return
    by_inode = {other.inode: other for other in subject.table.unix_states}
    for other in (state if state.queue else None, by_inode.get(state.peer or 0)):
        if other is not None and other.place is not None and not other.place.exists:
            raise Refused(f"a datagram socket bound to {other.place.path}, which has been deleted")
    names = {other.name for other in by_inode.values()}
    for message in state.queue:
        if message.sender and message.sender not in names:
            raise Refused(
                f"a unix socket with a datagram from {_shown(message.sender)}, which is closed"
            )
