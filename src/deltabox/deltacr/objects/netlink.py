"""Netlink sockets: protocol, port id, groups (netlink(7)).

Messages that wait are the kernel's answers and notices of things that have happened; nobody else
could send them again, so a socket with any is refused.  A dump under way would lose its rest.  That
shows as waiting messages too, because the kernel always has the next part ready.
"""

from __future__ import annotations

import select
import socket
import struct
from collections.abc import Sequence as Items
from dataclasses import dataclass

from ...linux import numbers as nr
from ...linux.sockets import getsockopt
from ..model import Description
from ..rebuild import Entry, Kind, Rebuild
from ..subject import Refused, Subject
from . import options, sockets
from .options import Options

_ADD_MEMBERSHIP, _LIST_MEMBERSHIPS = 1, 9
# include/uapi/linux/netlink.h: those whose sockets have no state but this
_PROTOCOLS = {0: "ROUTE", 4: "SOCK_DIAG", 15: "KOBJECT_UEVENT", 16: "GENERIC"}


@dataclass(frozen=True)
class Netlink:
    kind: int
    protocol: int
    owner: tuple[int, int]
    port: int  # 0: none yet
    peer: tuple[int, int]
    groups: tuple[int, ...]
    options: Options


def capture(subject: Subject, sock: socket.socket) -> Description:
    network = subject.table.network
    protocol = sock.proto
    if protocol not in _PROTOCOLS:
        raise Refused(f"a netlink socket of protocol {protocol}")
    poller = select.poll()
    poller.register(sock, select.POLLIN)
    if poller.poll(0):
        raise Refused("a netlink socket with messages that were not read")
    port, _ = sock.getsockname()
    if network.is_host and port:
        raise Refused("a socket in the host's network")
    state = Netlink(
        sock.type,
        protocol,
        sockets.owner_of(subject, sock),
        port,
        sock.getpeername(),
        tuple(_groups(sock)),
        options.capture(sock, network.fresh(sock), unconnected=True),
    )
    return Description("netlink", subject.flags, state=state)


def _groups(sock: socket.socket) -> list[int]:
    size, _ = getsockopt(sock.fileno(), options.NETLINK, _LIST_MEMBERSHIPS, 0, 0)
    room = (size + 3) & ~3
    _, bits = getsockopt(sock.fileno(), options.NETLINK, _LIST_MEMBERSHIPS, room, room)
    words = struct.unpack(f"={room // 4}I", bits)
    return [
        32 * i + bit + 1 for i, word in enumerate(words) for bit in range(32) if word >> bit & 1
    ]


def restore(rebuild: Rebuild, entries: Items[Entry]) -> None:
    for number, description in entries:
        state: Netlink = description.state
        sockets.make(
            rebuild, number, socket.AF_NETLINK, state.kind, state.protocol, owner=state.owner
        )
        options.restore_early(rebuild, number, state.options)
        if state.port:
            name = rebuild.program.data(struct.pack("=HHII", socket.AF_NETLINK, 0, state.port, 0))
            rebuild.init.call(nr.BIND, number, name, 12, what="bind a netlink socket")
        for group in state.groups:
            options.put(rebuild, number, options.NETLINK, _ADD_MEMBERSHIP, group)
        if state.peer != (0, 0):
            name = rebuild.program.data(struct.pack("=HHII", socket.AF_NETLINK, 0, *state.peer))
            rebuild.init.call(nr.CONNECT, number, name, 12, what="connect a netlink socket")
        options.restore_late(rebuild, number, state.options)
        rebuild.set_status(number, description.flags)


KIND = Kind(("netlink",), restore)
