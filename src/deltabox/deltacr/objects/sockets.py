"""Sockets: which file of this directory knows which, and what all of them need.

A descriptor's link says only `socket:[inode]`; what it is, the socket itself tells (SO_DOMAIN,
SO_TYPE, SO_PROTOCOL).  A `Network` is one capture's view of the sandbox's network namespace: a
fresh socket of each kind to compare options with, and what sock_diag(7) lists.

A restored tree gets a network namespace that nobody has used, so every name is free there.  With
the host's own network none is, so anything with a name is refused.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ...linux import namespace as ns
from ...linux import numbers as nr
from ...linux import sock_diag
from ...linux.sock_diag import Endpoint, plain
from ..model import Description
from ..rebuild import Rebuild
from ..records import Argument, Ref
from ..subject import Refused, Subject
from .options import Defaults

if TYPE_CHECKING:
    from ..descriptors import DescriptorTable

SOCK_CLOEXEC = 0o2000000
_SO_NETNS_COOKIE = 71
_FAMILIES = {
    socket.AF_PACKET: "a packet socket",
    socket.AF_VSOCK: "a vsock socket",
    socket.AF_ALG: "a socket of the kernel's cryptography",
    socket.AF_KEY: "an IPsec key socket",
    44: "an XDP socket",
}


class Network:
    """The network namespace of a captured tree, during the capture."""

    def __init__(self, init: int, on_external: str) -> None:
        self.on_external = on_external
        self.init = init
        self.path = f"/proc/{init}/ns/net"
        self.is_host = os.stat(self.path).st_ino == os.stat("/proc/self/ns/net").st_ino
        self.tcp: dict[int, object] = {}  # tcp.py's, by index of the description
        self._fresh: dict[tuple[int, int, int], Defaults] = {}
        self._taken: dict[tuple[int, int], socket.socket] = {}
        self._listed: list[sock_diag.Tcp] | None = None

    def close(self) -> None:
        for made in self._fresh.values():
            made.fresh.close()
        self._fresh.clear()
        self._taken.clear()

    def take(self, subject: Subject) -> socket.socket:
        """The captured socket, until the capture ends."""
        key = subject.host, subject.number
        if key not in self._taken:
            self._taken[key] = subject.table.hold(_opened(subject))
        return self._taken[key]

    def fresh(self, like: socket.socket) -> Defaults:
        """A socket of the same kind that nobody has touched."""
        key = (int(like.family), int(like.type), like.proto)
        if key not in self._fresh:
            self._fresh[key] = Defaults(self._within(lambda: socket.socket(*key)))
        return self._fresh[key]

    def listed(self) -> list[sock_diag.Tcp]:
        """All TCP sockets of the namespace."""
        if self._listed is None:
            with self._within(sock_diag.open_socket) as asked:
                self._listed = list(sock_diag.tcp_sockets(asked))
        return self._listed

    def _within(self, make: Callable[[], socket.socket]) -> socket.socket:
        return ns.within(self.path, ns.CLONE_NEWNET, make)


@contextmanager
def _opened(subject: Subject) -> Iterator[socket.socket]:
    """A captured socket, for the length of the block."""
    with subject.taken() as fd:
        sock = socket.socket(fileno=fd)
        try:
            yield sock
        finally:
            sock.detach()


def capture(subject: Subject) -> Description:
    from . import netlink, tcp, udp, unix

    sock = subject.table.network.take(subject)
    family, kind, protocol = sock.family, sock.type, sock.proto
    if family == socket.AF_UNIX:
        return unix.capture(subject, sock)
    if family in (socket.AF_INET, socket.AF_INET6):
        if (kind, protocol) == (socket.SOCK_STREAM, socket.IPPROTO_TCP):
            _check_namespace(subject, sock)
            return tcp.capture(subject, sock)
        if (kind, protocol) == (socket.SOCK_DGRAM, socket.IPPROTO_UDP):
            _check_namespace(subject, sock)
            return udp.capture(subject, sock)
        if kind == socket.SOCK_RAW:
            raise Refused("a raw socket")
        if kind == socket.SOCK_DGRAM and protocol in (1, 58):
            raise Refused("a ping socket")
        raise Refused(f"a socket of internet protocol {protocol}")
    if family == socket.AF_NETLINK:
        _check_namespace(subject, sock)
        return netlink.capture(subject, sock)
    raise Refused(_FAMILIES.get(family, f"a socket of family {int(family)}"))


def finish(table: DescriptorTable) -> None:
    """Whom sockets tell of urgent data (SIGURG), which needs no O_ASYNC (fcntl(2), F_SETOWN)."""
    for index, description in enumerate(table.descriptions):
        if description.kind in ("tcp", "udp", "netlink") and description.owner is None:
            taken = table.network.take(table.subject(index))
            owner = table.owner_of(taken.fileno())
            if owner.target or owner.signal:
                found = replace(description, owner=replace(owner, enabled=False))
                table.descriptions[index] = found


def _check_namespace(subject: Subject, sock: socket.socket) -> None:
    fresh = subject.table.network.fresh(sock).fresh
    cookies = [s.getsockopt(socket.SOL_SOCKET, _SO_NETNS_COOKIE, 8) for s in (sock, fresh)]
    if cookies[0] != cookies[1]:
        raise Refused("a socket of another network namespace")


# -- addresses ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Address:
    """IPv4 within IPv6 is kept as IPv4; which of the two a socket speaks is its domain."""

    host: bytes
    port: int
    scope: int = 0

    @property
    def key(self) -> Endpoint:
        return self.host, self.port

    @property
    def is_any(self) -> bool:
        return not any(self.host)

    def __str__(self) -> str:
        if len(self.host) == 4:
            return f"{socket.inet_ntop(socket.AF_INET, self.host)}:{self.port}"
        return f"[{socket.inet_ntop(socket.AF_INET6, self.host)}]:{self.port}"

    def sockaddr(self, domain: int) -> bytes:
        port = struct.pack(">H", self.port)
        if domain == socket.AF_INET:
            return struct.pack("=H", domain) + port + self.host + bytes(8)
        host = self.host if len(self.host) == 16 else bytes(10) + b"\xff\xff" + self.host
        return struct.pack("=H2sI16sI", domain, port, 0, host, self.scope)


def address(name: tuple[str, int] | tuple[str, int, int, int]) -> Address:
    """What getsockname(2) and getpeername(2) return in Python."""
    host, port, *more = name
    host, _, _ = host.partition("%")
    family = socket.AF_INET6 if more else socket.AF_INET
    return Address(plain(socket.inet_pton(family, host)), port, more[1] if more else 0)


def loopback(domain: int, port: int = 0) -> Address:
    if domain == socket.AF_INET:
        return Address(b"\x7f\0\0\1", port)
    return Address(bytes(15) + b"\1", port)


def owner_of(subject: Subject, sock: socket.socket) -> tuple[int, int]:
    """Whom the socket belongs to (/proc/net, SO_REUSEPORT), as seen inside."""
    info = os.fstat(sock.fileno())
    owner = subject.table.owner
    found = info.st_uid - owner, info.st_gid - owner
    if all(0 <= number < 65536 for number in found):
        return found
    return 0, 0  # made by the keeper or another, from outside


# -- records ------------------------------------------------------------------------------------


def make(
    rebuild: Rebuild,
    number: int,
    domain: int,
    kind: int,
    protocol: int = 0,
    owner: tuple[int, int] = (0, 0),
) -> None:
    rebuild.init.call(
        nr.SOCKET, domain, kind | SOCK_CLOEXEC, protocol, save=rebuild.opened, what="socket"
    )
    rebuild.place(number)
    chown(rebuild, number, owner)


def chown(rebuild: Rebuild, number: int, owner: tuple[int, int]) -> None:
    if owner != (0, 0):
        rebuild.init.call(nr.FCHOWN, number, *owner, what="owner of a socket")


def name(rebuild: Rebuild, address: Address, domain: int) -> tuple[Ref, int]:
    content = address.sockaddr(domain)
    return rebuild.program.data(content), len(content)


def bind(rebuild: Rebuild, number: Argument, address: Address, domain: int) -> None:
    rebuild.init.call(nr.BIND, number, *name(rebuild, address, domain), what=f"bind to {address}")


def connect(rebuild: Rebuild, number: Argument, address: Address, domain: int) -> None:
    rebuild.init.call(
        nr.CONNECT, number, *name(rebuild, address, domain), what=f"connect to {address}"
    )
