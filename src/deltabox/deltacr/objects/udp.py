"""UDP sockets: names, memberships of groups, and the datagrams that wait (udp(7), ip(7)).

Each waiting datagram is peeked (SO_PEEK_OFF walks the queue and leaves it) with where it came from
and where it was sent to.  The restore sends it again over `lo`, from a temporary socket with the
sender's name, and looks at its arrival before the next: UDP drops silently, a restore must not.
What lies beside a datagram (time stamp, TTL, the interface) is new.

A datagram without content, once peeked at, is skipped by every later walk; so it is refused, and
the socket remembered, or the next capture would lose it without a word.

Which groups a socket has joined, /proc does not tell; but each may be asked about every group that
its namespace has joined (IP_MSFILTER's successor MCAST_MSFILTER).
"""

from __future__ import annotations

import errno
import select
import socket
import struct
from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ...linux import numbers as nr
from ...linux import proc
from ...linux.sock_diag import plain
from ...linux.sockets import getsockopt
from ..model import Description
from ..rebuild import Entry, Kind, Rebuild
from ..records import Var
from ..subject import Refused, Subject
from . import options, sockets
from .options import Options
from .sockets import Address, address

if TYPE_CHECKING:
    from ..descriptors import DescriptorTable

_MSG_PEEK, _MSG_TRUNC = 2, 0x20
_PATIENCE = 10  # seconds
_LARGEST = 65536
_IP_PKTINFO, _IPV6_RECVPKTINFO, _IPV6_PKTINFO = 8, 49, 50
_MCAST_JOIN_GROUP, _MCAST_MSFILTER = 42, 48
_MCAST_EXCLUDE = 0
_SO_BROADCAST = 6
_IP_TRANSPARENT, _IPV6_TRANSPARENT = (options.IP, 19), (options.IPV6, 75)
_GROUP_FILTER = 144  # bytes of struct group_filter before its sources
_SO_MEMINFO, _SK_MEMINFO_VARS, _SK_MEMINFO_RMEM_ALLOC = 55, 9, 0
_SO_COOKIE = 57
_holds_empty: set[bytes] = set()  # cookies of sockets in which a walk has met an empty datagram
_CHANGED = (
    options.SO_REUSEADDR,
    options.SO_RCVTIMEO,
    options.SO_PEEK_OFF,
)


@dataclass(frozen=True)
class Datagram:
    origin: Address
    target: Address
    content: bytes


@dataclass(frozen=True)
class Udp:
    domain: int
    owner: tuple[int, int]
    local: Address | None
    peer: Address | None
    options: Options
    queue: tuple[Datagram, ...]
    groups: tuple[tuple[int, int, Address], ...]  # level, interface, group


def capture(subject: Subject, sock: socket.socket) -> Description:
    network = subject.table.network
    poller = select.poll()
    poller.register(sock, select.POLLIN | select.POLLOUT | select.POLLRDHUP)
    events = dict(poller.poll(0)).get(sock.fileno(), 0)
    if events & select.POLLERR:
        raise Refused("a UDP socket with an error or notice that was not read")
    if events & select.POLLRDHUP:
        raise Refused("a UDP socket that was shut down")
    local = address(sock.getsockname())
    if network.is_host and local.port:
        raise Refused("a socket in the host's network")
    try:
        peer = address(sock.getpeername())
    except OSError as error:
        if error.errno != errno.ENOTCONN:
            raise
        peer = None
    kept = options.capture(sock, network.fresh(sock), unconnected=peer is None, always=_CHANGED)
    state = Udp(
        sock.family,
        sockets.owner_of(subject, sock),
        local if local.port else None,
        peer,
        kept,
        tuple(_queue(sock, local)) if local.port else (),
        tuple(_groups(subject.table, sock)),
    )
    return Description("udp", subject.flags, state=state)


def _queue(sock: socket.socket, local: Address) -> Iterator[Datagram]:
    """What waits, in order, and left there."""
    cookie = sock.getsockopt(options.SOCKET, _SO_COOKIE, 8)
    if not _memory(sock):
        _holds_empty.discard(cookie)
        return
    if cookie in _holds_empty:
        raise Refused("a UDP socket with an empty datagram waiting")
    offset = sock.getsockopt(options.SOCKET, options.SO_PEEK_OFF)
    if offset >= 0:
        raise Refused("a UDP socket that is being peeked at (SO_PEEK_OFF)")
    wanted = [(options.IP, _IP_PKTINFO)]
    if sock.family == socket.AF_INET6:
        wanted.append((options.IPV6, _IPV6_RECVPKTINFO))
    before = [sock.getsockopt(*option) for option in wanted]
    try:
        for option in wanted:
            sock.setsockopt(*option, 1)
        sock.setsockopt(options.SOCKET, options.SO_PEEK_OFF, 0)
        while True:
            try:
                content, beside, flags, name = sock.recvmsg(
                    _LARGEST, 1024, socket.MSG_PEEK | socket.MSG_DONTWAIT
                )
            except BlockingIOError:
                return
            if flags & socket.MSG_TRUNC:
                raise Refused("a UDP socket with a datagram larger than any")
            if not content:
                _holds_empty.add(cookie)
                raise Refused("a UDP socket with an empty datagram waiting")
            target = _target(beside, local)
            if target.host[0] >= 224 and (len(target.host) == 4 or target.host[0] == 255):
                raise Refused("a UDP socket with a waiting datagram that was sent to a group")
            yield Datagram(address(name), target, content)
    finally:
        sock.setsockopt(options.SOCKET, options.SO_PEEK_OFF, offset)
        for option, value in zip(wanted, before, strict=True):
            sock.setsockopt(*option, value)


def _target(beside: list[tuple[int, int, bytes]], local: Address) -> Address:
    for level, kind, data in beside:
        if (level, kind) == (options.IP, _IP_PKTINFO):
            return Address(data[8:12], local.port)
        if (level, kind) == (options.IPV6, _IPV6_PKTINFO):
            return Address(plain(data[:16]), local.port)
    raise Refused("a UDP socket with a datagram that does not tell where it was sent to")


def _memory(sock: socket.socket) -> int:
    """Bytes that its receive queue takes."""
    info = sock.getsockopt(options.SOCKET, _SO_MEMINFO, 4 * _SK_MEMINFO_VARS)
    return struct.unpack_from("=I", info, 4 * _SK_MEMINFO_RMEM_ALLOC)[0]  # type: ignore[no-any-return]


def _groups(table: DescriptorTable, sock: socket.socket) -> Iterator[tuple[int, int, Address]]:
    """The groups the socket has joined, of those that its namespace has."""
    for level, interface, group in _joined(table.network.init):
        if level == options.IPV6 and sock.family != socket.AF_INET6:
            continue
        domain = socket.AF_INET if level == options.IP else socket.AF_INET6
        name = group.sockaddr(domain)
        asked = struct.pack("=I4x128sII", interface, name, 0, 0)
        try:
            answer = getsockopt(
                sock.fileno(), level, _MCAST_MSFILTER, _GROUP_FILTER, _GROUP_FILTER, asked
            )[1]
        except OSError as error:
            if error.errno in (errno.EADDRNOTAVAIL, errno.EINVAL, errno.ENOPROTOOPT):
                continue  # not a member
            raise
        mode, sources = struct.unpack_from("=II", answer, 136)
        if mode != _MCAST_EXCLUDE or sources:
            raise Refused("a UDP socket that has joined a group for some sources only")
        yield level, interface, group


def _joined(init: int) -> Iterator[tuple[int, int, Address]]:
    """(level, interface, group) of all memberships in the namespace (proc_net(5): igmp, igmp6)."""
    interface = 0
    for line in proc.read(f"/proc/{init}/net/igmp").decode().splitlines()[1:]:
        fields = line.split()
        if not line[0].isspace():
            interface = int(fields[0])
        else:
            group = int(fields[0], 16).to_bytes(4, "little")
            yield options.IP, interface, Address(group, 0)
    try:
        lines = proc.read(f"/proc/{init}/net/igmp6").decode().splitlines()
    except FileNotFoundError:
        return
    for line in lines:
        fields = line.split()
        yield options.IPV6, int(fields[0]), Address(bytes.fromhex(fields[2]), 0)


def finish(table: DescriptorTable) -> None:
    """A datagram finds its socket by name: two with one name cannot be told apart."""
    found = [(i, d.state) for i, d in enumerate(table.descriptions) if d.kind == "udp"]
    ports: dict[int, int] = {}
    for _, state in found:
        if state.local is not None:
            ports[state.local.port] = ports.get(state.local.port, 0) + 1
    for index, state in found:
        if state.queue and ports[state.local.port] > 1 and not _apart(state, found):
            raise table.refuse(
                index, "a UDP socket with waiting datagrams whose port others have too"
            )


def _apart(state: Udp, found: list[tuple[int, Udp]]) -> bool:
    """Whether nobody else would get its datagrams: all others on its port have other addresses."""
    others = [
        s.local
        for _, s in found
        if s is not state
        and s.local is not None
        and state.local
        and s.local.port == state.local.port
    ]
    targets = {datagram.target.host for datagram in state.queue}
    return all(not other.is_any and other.host not in targets for other in others)


# -- restore --------------------------------------------------------------------------------------


def restore(rebuild: Rebuild, entries: Items[Entry]) -> None:
    for number, description in entries:
        state: Udp = description.state
        sockets.make(rebuild, number, state.domain, socket.SOCK_DGRAM, owner=state.owner)
        options.put(rebuild, number, options.SOCKET, options.SO_REUSEADDR, 1)
        options.restore_early(rebuild, number, state.options)
        options.restore_buffers(rebuild, number, state.options)
        for level, interface, group in state.groups:
            domain = socket.AF_INET if level == options.IP else socket.AF_INET6
            request = struct.pack("=I4x128s", interface, group.sockaddr(domain))
            options.put(rebuild, number, level, _MCAST_JOIN_GROUP, request)
        if state.local is not None:
            sockets.bind(rebuild, number, _first_name(state), state.domain)
    sender, count = rebuild.program.variable(), rebuild.program.variable()
    for number, description in entries:
        if description.state.queue:
            _refill(rebuild, number, description.state, sender, count)
    for number, description in entries:
        state = description.state
        if state.peer is not None:
            sockets.connect(rebuild, number, state.peer, state.domain)
        options.restore_late(rebuild, number, state.options)
        rebuild.set_status(number, description.flags)


def _first_name(state: Udp) -> Address:
    """A datagram for another address came before connect(2) had narrowed this one's."""
    local = state.local
    assert local is not None
    if any(d.target.host != local.host for d in state.queue) and not local.is_any:
        return replace(local, host=bytes(4 if state.domain == socket.AF_INET else 16), scope=0)
    return local


def _refill(rebuild: Rebuild, number: int, state: Udp, sender: Var, count: Var) -> None:
    do, program = rebuild.init, rebuild.program
    patience = struct.pack("<qq", _PATIENCE, 0)
    options.put(rebuild, number, options.SOCKET, options.SO_RCVTIMEO, patience)
    options.put(rebuild, number, options.SOCKET, options.SO_PEEK_OFF, 0)
    for datagram in state.queue:
        origin, target = datagram.origin, datagram.target
        domain = socket.AF_INET if len(target.host) == 4 else socket.AF_INET6
        name, size = sockets.name(rebuild, target, domain)
        own = origin == target  # from itself
        if own:
            name, size = sockets.name(rebuild, target, state.domain)
        else:
            kind = socket.SOCK_DGRAM | sockets.SOCK_CLOEXEC
            do.call(nr.SOCKET, domain, kind, 0, save=sender, what="socket")
            options.put(rebuild, sender, options.SOCKET, options.SO_REUSEADDR, 1)
            options.put(rebuild, sender, options.SOCKET, _SO_BROADCAST, 1)
            # a sender from outside has no address here
            transparent = _IP_TRANSPARENT if domain == socket.AF_INET else _IPV6_TRANSPARENT
            options.put(rebuild, sender, *transparent, 1)
            sockets.bind(rebuild, sender, origin, domain)
        content = program.data(datagram.content)
        length = len(datagram.content)
        do.call(
            nr.SENDTO,
            number if own else sender,
            content,
            length,
            0,
            name,
            size,
            what=f"send a datagram to {target}",
        )
        flags = _MSG_PEEK | _MSG_TRUNC
        do.call(nr.RECVFROM, number, 0, 0, flags, 0, 0, save=count, what="wait for a datagram")
        do.expect(count, length, what="a datagram arrived")
        if not own:
            do.call(nr.CLOSE, sender)


KIND = Kind(("udp",), restore)
