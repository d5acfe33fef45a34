"""Sockets that have no descriptor, as the kernel lists them (sock_diag(7), NETLINK_SOCK_DIAG).

A listener's unaccepted connections and the ends that programs have closed already have no inode, so
/proc/PID/fd never shows them.  The socket asked must have been made in the network namespace.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass

_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_NLM_F_REQUEST, _NLM_F_DUMP = 1, 0x300
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_INET_DIAG_INFO = 2
_HEADER = struct.Struct("=IHHII")
_MESSAGE = struct.Struct("=BBBB2s2s16s16sIIIIIIII")
_LAST_DATA_SENT = 44  # offset of tcpi_last_data_sent in struct tcp_info

Endpoint = tuple[bytes, int]  # (address of 4 or 16 bytes, port); IPv4 in IPv6 as IPv4


@dataclass(frozen=True)
class Tcp:
    """One TCP socket; see tcp(7) and include/net/tcp_states.h for the state."""

    family: int
    state: int
    local: Endpoint
    peer: Endpoint
    receive: int  # bytes not read; for a listener, connections not accepted
    send: int  # bytes not acknowledged
    inode: int  # 0: nobody has it open
    idle: int  # milliseconds since it last sent data, or since it was made


def plain(address: bytes) -> bytes:
    """An IPv4 address that is written as an IPv6 one is the same address."""
    if len(address) == 16 and address.startswith(bytes(10) + b"\xff\xff"):
        return address[12:]
    return address


def tcp_sockets(asked: socket.socket) -> Iterator[Tcp]:
    """All of the namespace that `asked`, from `open_socket`, was made in."""
    for family in (socket.AF_INET, socket.AF_INET6):
        request = struct.pack(
            "=BBBBI48s", family, socket.IPPROTO_TCP, 1 << (_INET_DIAG_INFO - 1), 0, 0xFFFFFFFF, b""
        )
        header = _HEADER.pack(
            _HEADER.size + len(request), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST | _NLM_F_DUMP, 1, 0
        )
        asked.send(header + request)
        yield from _answers(asked)


def open_socket() -> socket.socket:
    return socket.socket(
        socket.AF_NETLINK, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC, _NETLINK_SOCK_DIAG
    )


def _answers(asked: socket.socket) -> Iterator[Tcp]:
    while True:
        data = asked.recv(1 << 18)
        while data:
            size, kind, *_ = _HEADER.unpack_from(data)
            if kind == _NLMSG_DONE:
                return
            if kind == _NLMSG_ERROR:
                code = -struct.unpack_from("=i", data, _HEADER.size)[0]
                raise OSError(code, "the kernel does not list sockets (CONFIG_INET_TCP_DIAG)")
            yield _one(data[_HEADER.size : size])
            data = data[(size + 3) & ~3 :]


def _one(data: bytes) -> Tcp:
    (family, state, _, _, sport, dport, source, target, *rest) = _MESSAGE.unpack_from(data)
    _, _, _, _, receive, send, _, inode = rest
    width = 4 if family == socket.AF_INET else 16
    idle = 0
    at = _MESSAGE.size
    while at + 4 <= len(data):
        size, kind = struct.unpack_from("=HH", data, at)
        if kind == _INET_DIAG_INFO and size >= 4 + _LAST_DATA_SENT + 4:
            idle = struct.unpack_from("=I", data, at + 4 + _LAST_DATA_SENT)[0]
        at += (max(size, 4) + 3) & ~3
    return Tcp(
        family,
        state,
        (plain(source[:width]), int.from_bytes(sport, "big")),
        (plain(target[:width]), int.from_bytes(dport, "big")),
        receive,
        send,
        inode,
        idle,
    )
