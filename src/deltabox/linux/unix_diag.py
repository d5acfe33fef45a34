"""What the kernel tells of all unix sockets of a network namespace (sock_diag(7), unix_diag.c)."""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass

_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_NLM_F_REQUEST_DUMP = 0x301
_DONE, _ERROR = 3, 2
_HEADER = struct.Struct("<IHHII")
_MESSAGE = struct.Struct("<BBBxIII")
_SHOW_PEER, _SHOW_ICONS, _SHOW_QUEUES = 4, 8, 16
_PEER, _ICONS, _QUEUES, _SHUTDOWN = 2, 3, 4, 6


@dataclass(frozen=True)
class UnixInfo:
    """One socket. `peer` is an inode number, 0 when the peer has been closed, None without one."""

    peer: int | None
    waiting: tuple[int, ...]  # inodes of those that have connected and are not accepted, in order
    backlog: int
    shutdown: int  # 1: receives no more, 2: sends no more


def dump() -> dict[int, UnixInfo]:
    """All unix sockets of the calling thread's network namespace, by inode number."""
    found: dict[int, UnixInfo] = {}
    show = _SHOW_PEER | _SHOW_ICONS | _SHOW_QUEUES
    request = struct.pack("<BBHIII2I", socket.AF_UNIX, 0, 0, 0xFFFFFFFF, 0, show, 0, 0)
    kind = socket.SOCK_RAW | socket.SOCK_CLOEXEC
    with socket.socket(socket.AF_NETLINK, kind, _SOCK_DIAG) as sock:
        header = _HEADER.pack(
            _HEADER.size + len(request), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST_DUMP, 1, 0
        )
        sock.send(header + request)
        while True:
            data = sock.recv(1 << 18)
            while data:
                length, what, _, _, _ = _HEADER.unpack_from(data)
                body, data = data[_HEADER.size : length], data[(length + 3) & ~3 :]
                if what == _DONE:
                    return found
                if what == _ERROR:
                    code = -struct.unpack_from("<i", body)[0]
                    raise OSError(code, "unix_diag")
                inode, info = _parse(body)
                found[inode] = info


def _parse(body: bytes) -> tuple[int, UnixInfo]:
    _, _, _, inode, _, _ = _MESSAGE.unpack_from(body)
    attributes: dict[int, bytes] = {}
    rest = body[_MESSAGE.size :]
    while len(rest) >= 4:
        length, kind = struct.unpack_from("<HH", rest)
        attributes[kind] = rest[4:length]
        rest = rest[(length + 3) & ~3 :]
    peer = attributes.get(_PEER)
    waiting = attributes.get(_ICONS, b"")
    queues = attributes.get(_QUEUES, bytes(8))
    return inode, UnixInfo(
        peer=struct.unpack("<I", peer)[0] if peer else None,
        waiting=struct.unpack(f"<{len(waiting) // 4}I", waiting),
        backlog=struct.unpack("<II", queues)[1],
        shutdown=attributes.get(_SHUTDOWN, b"\0")[0],
    )
