"""Options and filters of sockets of any family (socket(7), tcp(7), ip(7), ipv6(7), udp(7)).

Capture reads a table of options through the keeper's duplicate and keeps those that differ from a
fresh socket of the same domain, type and protocol in the same network namespace, so defaults that
sysctls change need no care.  Restore is setsockopt(2), in two parts: what bind(2), connect(2) and
listen(2) look at goes first; the rest last, because a rebuild uses timeouts, buffers and
address reuse for its own ends in between.

Buffer sizes that the kernel tunes by itself are not options; those that a program has fixed
(SO_BUF_LOCK) are.  A classic filter is read with SO_GET_FILTER; the kernel answers EACCES for eBPF.

Not readable, so not kept: programs attached to a SO_REUSEPORT group, and TCP_QUICKACK, which the
kernel changes with every segment.
"""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ...linux import numbers as nr
from ...linux.sockets import getsockopt
from ..rebuild import Rebuild
from ..records import Argument, Sequence
from ..subject import Refused

SOCKET, IP, TCP, UDP, IPV6, NETLINK = 1, 0, 6, 17, 41, 270

SO_REUSEADDR, SO_SNDBUF, SO_RCVBUF, SO_LINGER, SO_REUSEPORT = 2, 7, 8, 13, 15
SO_RCVTIMEO, SO_SNDTIMEO, SO_RCVBUFFORCE, SO_PEEK_OFF, SO_BUF_LOCK = 20, 21, 33, 42, 72
_SO_GET_FILTER = _SO_ATTACH_FILTER = 26
_SO_LOCK_FILTER = 44
_SO_PRIORITY = 12
_TCP_ULP, _IP_OPTIONS = 31, 4
_UDP_CORK, _UDP_ENCAP = 1, 100
_SNDBUF_LOCK, _RCVBUF_LOCK = 1, 2

Option = tuple[int, int, bytes]

# (level, name): what bind, connect and listen depend on
_EARLY = {
    (SOCKET, SO_REUSEPORT): 4,
    (SOCKET, 62): 4,  # SO_BINDTOIFINDEX
    (IP, 15): 4,  # IP_FREEBIND
    (IP, 19): 4,  # IP_TRANSPARENT
    (IP, 24): 4,  # IP_BIND_ADDRESS_NO_PORT
    (IP, 51): 4,  # IP_LOCAL_PORT_RANGE
    (IPV6, 26): 4,  # IPV6_V6ONLY
    (IPV6, 75): 4,  # IPV6_TRANSPARENT
    (IPV6, 78): 4,  # IPV6_FREEBIND
    (TCP, 27): 4,  # TCP_SAVE_SYN
}
_LATE = {
    (SOCKET, SO_REUSEADDR): 4,
    (SOCKET, 5): 4,  # SO_DONTROUTE
    (SOCKET, 6): 4,  # SO_BROADCAST
    (SOCKET, 9): 4,  # SO_KEEPALIVE
    (SOCKET, 10): 4,  # SO_OOBINLINE
    (SOCKET, 11): 4,  # SO_NO_CHECK
    (SOCKET, SO_LINGER): 8,
    (SOCKET, 16): 4,  # SO_PASSCRED
    (SOCKET, 18): 4,  # SO_RCVLOWAT
    (SOCKET, SO_RCVTIMEO): 16,
    (SOCKET, SO_SNDTIMEO): 16,
    (SOCKET, 29): 4,  # SO_TIMESTAMP
    (SOCKET, 34): 4,  # SO_PASSSEC
    (SOCKET, 35): 4,  # SO_TIMESTAMPNS
    (SOCKET, 36): 4,  # SO_MARK
    (SOCKET, 37): 4,  # SO_TIMESTAMPING
    (SOCKET, 40): 4,  # SO_RXQ_OVFL
    (SOCKET, SO_PEEK_OFF): 4,
    (SOCKET, 43): 4,  # SO_NOFCS
    (SOCKET, 45): 4,  # SO_SELECT_ERR_QUEUE
    (SOCKET, 46): 4,  # SO_BUSY_POLL
    (SOCKET, 47): 8,  # SO_MAX_PACING_RATE
    (SOCKET, 60): 4,  # SO_ZEROCOPY
    (SOCKET, 61): 8,  # SO_TXTIME
    (SOCKET, 63): 4,  # SO_TIMESTAMP_NEW
    (SOCKET, 64): 4,  # SO_TIMESTAMPNS_NEW
    (SOCKET, 65): 4,  # SO_TIMESTAMPING_NEW
    (SOCKET, 69): 4,  # SO_PREFER_BUSY_POLL
    (SOCKET, 70): 4,  # SO_BUSY_POLL_BUDGET
    (SOCKET, 75): 4,  # SO_RCVMARK
    (SOCKET, 76): 4,  # SO_PASSPIDFD
    (SOCKET, 82): 4,  # SO_RCVPRIORITY
    (SOCKET, 83): 4,  # SO_PASSRIGHTS
    (IP, 1): 4,  # IP_TOS
    (IP, 2): 4,  # IP_TTL
    (IP, 6): 4,  # IP_RECVOPTS
    (IP, 7): 4,  # IP_RETOPTS
    (IP, 8): 4,  # IP_PKTINFO
    (IP, 10): 4,  # IP_MTU_DISCOVER
    (IP, 11): 4,  # IP_RECVERR
    (IP, 12): 4,  # IP_RECVTTL
    (IP, 13): 4,  # IP_RECVTOS
    (IP, 18): 4,  # IP_PASSSEC
    (IP, 20): 4,  # IP_RECVORIGDSTADDR
    (IP, 21): 4,  # IP_MINTTL
    (IP, 23): 4,  # IP_CHECKSUM
    (IP, 26): 4,  # IP_RECVERR_RFC4884
    (IP, 50): 4,  # IP_UNICAST_IF
    (IPV6, 16): 4,  # IPV6_UNICAST_HOPS
    (IPV6, 23): 4,  # IPV6_MTU_DISCOVER
    (IPV6, 25): 4,  # IPV6_RECVERR
    (IPV6, 31): 4,  # IPV6_RECVERR_RFC4884
    (IPV6, 33): 4,  # IPV6_FLOWINFO_SEND
    (IPV6, 49): 4,  # IPV6_RECVPKTINFO
    (IPV6, 51): 4,  # IPV6_RECVHOPLIMIT
    (IPV6, 53): 4,  # IPV6_RECVHOPOPTS
    (IPV6, 56): 4,  # IPV6_RECVRTHDR
    (IPV6, 58): 4,  # IPV6_RECVDSTOPTS
    (IPV6, 60): 4,  # IPV6_RECVPATHMTU
    (IPV6, 62): 4,  # IPV6_DONTFRAG
    (IPV6, 66): 4,  # IPV6_RECVTCLASS
    (IPV6, 67): 4,  # IPV6_TCLASS
    (IPV6, 70): 4,  # IPV6_AUTOFLOWLABEL
    (IPV6, 72): 4,  # IPV6_ADDR_PREFERENCES
    (IPV6, 73): 4,  # IPV6_MINHOPCOUNT
    (IPV6, 74): 4,  # IPV6_RECVORIGDSTADDR
    (IPV6, 76): 4,  # IPV6_UNICAST_IF
    (TCP, 1): 4,  # TCP_NODELAY
    (TCP, 3): 4,  # TCP_CORK
    (TCP, 4): 4,  # TCP_KEEPIDLE
    (TCP, 5): 4,  # TCP_KEEPINTVL
    (TCP, 6): 4,  # TCP_KEEPCNT
    (TCP, 7): 4,  # TCP_SYNCNT
    (TCP, 8): 4,  # TCP_LINGER2
    (TCP, 9): 4,  # TCP_DEFER_ACCEPT
    (TCP, 13): 16,  # TCP_CONGESTION
    (TCP, 16): 4,  # TCP_THIN_LINEAR_TIMEOUTS
    (TCP, 18): 4,  # TCP_USER_TIMEOUT
    (TCP, 23): 4,  # TCP_FASTOPEN
    (TCP, 25): 4,  # TCP_NOTSENT_LOWAT
    (TCP, 30): 4,  # TCP_FASTOPEN_CONNECT
    (TCP, 34): 4,  # TCP_FASTOPEN_NO_COOKIE
    (TCP, 36): 4,  # TCP_INQ
    (TCP, 37): 4,  # TCP_TX_DELAY
    (TCP, 44): 4,  # TCP_RTO_MAX_MS
    (TCP, 45): 4,  # TCP_RTO_MIN_US
    (TCP, 46): 4,  # TCP_DELACK_MAX_US
    (UDP, 101): 4,  # UDP_NO_CHECK6_TX
    (UDP, 102): 4,  # UDP_NO_CHECK6_RX
    (UDP, 103): 4,  # UDP_SEGMENT
    (UDP, 104): 4,  # UDP_GRO
    (NETLINK, 3): 4,  # NETLINK_PKTINFO
    (NETLINK, 4): 4,  # NETLINK_BROADCAST_ERROR
    (NETLINK, 5): 4,  # NETLINK_NO_ENOBUFS
    (NETLINK, 8): 4,  # NETLINK_LISTEN_ALL_NSID
    (NETLINK, 10): 4,  # NETLINK_CAP_ACK
    (NETLINK, 11): 4,  # NETLINK_EXT_ACK
    (NETLINK, 12): 4,  # NETLINK_GET_STRICT_CHK
    (SOCKET, _SO_PRIORITY): 4,  # after IP_TOS, which changes it
}
# not for streams: TCP keeps facts of its own where these are read from
_DATAGRAM = {
    (IP, 25): 4,  # IP_RECVFRAGSIZE
    (IP, 32): 4,  # IP_MULTICAST_IF
    (IP, 33): 4,  # IP_MULTICAST_TTL
    (IP, 34): 4,  # IP_MULTICAST_LOOP
    (IP, 49): 4,  # IP_MULTICAST_ALL
    (IPV6, 17): 4,  # IPV6_MULTICAST_IF
    (IPV6, 18): 4,  # IPV6_MULTICAST_HOPS
    (IPV6, 19): 4,  # IPV6_MULTICAST_LOOP
    (IPV6, 29): 4,  # IPV6_MULTICAST_ALL
    (IPV6, 77): 4,  # IPV6_RECVFRAGSIZE
}
# what a connection's progress changes; a program's own setting shows only before
_UNCONNECTED = {
    (TCP, 2): 4,  # TCP_MAXSEG
    (TCP, 10): 4,  # TCP_WINDOW_CLAMP
}
_NOT_THERE = (errno.ENOPROTOOPT, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOTCONN, errno.EPERM)


@dataclass(frozen=True)
class Options:
    early: tuple[Option, ...]
    late: tuple[Option, ...]
    send_buffer: int
    receive_buffer: int
    fixed: int  # SO_BUF_LOCK
    filter: bytes = b""  # struct sock_filter, one after the other
    locked_filter: bool = False

    def value(self, level: int, name: int) -> bytes | None:
        """What an option was set to; None: left as it is."""
        for found_level, found, value in (*self.early, *self.late):
            if (found_level, found) == (level, name):
                return value
        return None


def levels(domain: int, kind: int, protocol: int) -> tuple[int, ...]:
    if domain == socket.AF_NETLINK:
        return SOCKET, NETLINK
    if domain not in (socket.AF_INET, socket.AF_INET6):
        return (SOCKET,)
    over = {socket.IPPROTO_TCP: (TCP,), socket.IPPROTO_UDP: (UDP,)}.get(protocol, ())
    own = (IP, IPV6) if domain == socket.AF_INET6 else (IP,)
    return SOCKET, *own, *over


class Defaults:
    """What a fresh socket of one kind answers, asked once; None: no such option."""

    def __init__(self, fresh: socket.socket) -> None:
        self.fresh = fresh
        self._values: dict[tuple[int, int], bytes | None] = {}

    def value(self, level: int, name: int, size: int) -> bytes | None:
        key = level, name
        if key not in self._values:
            self._values[key] = _read(self.fresh, level, name, size)
        return self._values[key]


def capture(
    sock: socket.socket, fresh: Defaults, *, unconnected: bool, always: Iterable[int] = ()
) -> Options:
    """`always` names options of SOL_SOCKET that a rebuild changes, so they are always kept."""
    wanted = levels(sock.family, sock.type, sock.proto)
    kept = {_SO_PRIORITY, *always}
    late = dict(_LATE)
    if sock.type != socket.SOCK_STREAM:
        late |= _DATAGRAM
    if unconnected:
        late |= _UNCONNECTED
    _check(sock, wanted)
    return Options(
        tuple(_different(sock, fresh, wanted, _EARLY, kept)),
        tuple(_different(sock, fresh, wanted, late, kept)),
        sock.getsockopt(SOCKET, SO_SNDBUF),
        sock.getsockopt(SOCKET, SO_RCVBUF),
        sock.getsockopt(SOCKET, SO_BUF_LOCK),
        _filter(sock),
        bool(sock.getsockopt(SOCKET, _SO_LOCK_FILTER)),
    )


def _different(
    sock: socket.socket,
    fresh: Defaults,
    wanted: tuple[int, ...],
    table: dict[tuple[int, int], int],
    always: set[int],
) -> Iterator[Option]:
    for (level, name), size in table.items():
        if level in wanted:
            default = fresh.value(level, name, size)
            if default is not None:
                value = sock.getsockopt(level, name, size)
                if value != default or (level == SOCKET and name in always):
                    yield level, name, value


def _read(sock: socket.socket, level: int, name: int, size: int) -> bytes | None:
    try:
        return sock.getsockopt(level, name, size)
    except OSError as error:
        if error.errno in _NOT_THERE:
            return None  # this kernel has no such option, or not for this kind of socket
        raise


def _check(sock: socket.socket, wanted: tuple[int, ...]) -> None:
    """What a program may have set and setsockopt could not bring back."""
    if TCP in wanted:
        attached = _read(sock, TCP, _TCP_ULP, 16)
        if attached:
            raise Refused(f"a TCP socket with {attached.rstrip(bytes(1)).decode()} in the kernel")
    if UDP in wanted:
        if sock.getsockopt(UDP, _UDP_CORK):
            raise Refused("a UDP socket that holds back a datagram (UDP_CORK)")
        if sock.getsockopt(UDP, _UDP_ENCAP):
            raise Refused("a UDP socket that unwraps IPsec (UDP_ENCAP)")
    if IP in wanted and _read(sock, IP, _IP_OPTIONS, 40):
        raise Refused("a socket with IP options")


def _filter(sock: socket.socket) -> bytes:
    try:
        count, _ = getsockopt(sock.fileno(), SOCKET, _SO_GET_FILTER, 0, 0)
        if not count:
            return b""
        _, content = getsockopt(sock.fileno(), SOCKET, _SO_GET_FILTER, count, 8 * count)
        return content
    except OSError as error:
        if error.errno == errno.EACCES:
            raise Refused("a socket with an eBPF filter") from None
        raise


# -- restore ------------------------------------------------------------------------------------


def put(
    rebuild: Rebuild,
    number: Argument,
    level: int,
    name: int,
    value: bytes | int,
    *,
    do: Sequence | None = None,
) -> None:
    """One setsockopt(2)."""
    content = value if isinstance(value, bytes) else struct.pack("i", value)
    (do or rebuild.init).call(
        nr.SETSOCKOPT,
        number,
        level,
        name,
        rebuild.program.data(content),
        len(content),
        what=f"setsockopt({level}, {name})",
    )


def restore_early(rebuild: Rebuild, number: Argument, options: Options) -> None:
    for level, name, value in options.early:
        put(rebuild, number, level, name, value)


def restore_late(rebuild: Rebuild, number: Argument, options: Options) -> None:
    """Everything else; the socket is in its final state but for this."""
    for level, name, value in options.late:
        put(
            rebuild,
            number,
            level,
            name,
            value.rstrip(b"\0") if (level, name) == (TCP, 13) else value,
        )
    restore_buffers(rebuild, number, options)
    if options.filter:
        program = rebuild.program
        filters = program.data(options.filter)
        fprog = program.data(struct.pack("<HxxxxxxQ", len(options.filter) // 8, 0))
        program.pointer(fprog + 8, filters)
        rebuild.init.call(
            nr.SETSOCKOPT, number, SOCKET, _SO_ATTACH_FILTER, fprog, 16, what="attach a filter"
        )
    if options.locked_filter:
        put(rebuild, number, SOCKET, _SO_LOCK_FILTER, 1)


def restore_buffers(rebuild: Rebuild, number: Argument, options: Options) -> None:
    """Sizes that the program has fixed; the kernel doubles what it is given (socket(7))."""
    if options.fixed & _SNDBUF_LOCK:
        put(rebuild, number, SOCKET, SO_SNDBUF, options.send_buffer // 2)
    if options.fixed & _RCVBUF_LOCK:
        put(rebuild, number, SOCKET, SO_RCVBUF, options.receive_buffer // 2)
    if options.fixed:
        put(rebuild, number, SOCKET, SO_BUF_LOCK, options.fixed)
