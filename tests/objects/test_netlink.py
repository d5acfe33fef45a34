"""Netlink sockets."""

from __future__ import annotations

import pytest

from deltabox import Sandbox, UnsupportedState
from tests.probe import Probe, check


def test_netlink(sandbox: Sandbox) -> None:
    check(
        sandbox,
        setup="""
import socket
route = socket.socket(16, socket.SOCK_RAW, 0); route.bind((0, 1 | 0x10))
route.setsockopt(270, 1, 33)
route.setsockopt(270, 11, 1)
uevent = socket.socket(16, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK, 15); uevent.bind((4711, 1))
generic = socket.socket(16, socket.SOCK_RAW, 16)
diag = socket.socket(16, socket.SOCK_DGRAM, 4); diag.bind((0, 0))
everyone = [route, uevent, generic, diag]
def groups(s):
    return s.getsockopt(270, 9, 8).hex()
def links():
    route.send(struct.pack('=IHHIIBxHiII', 32, 18, 0x301, 1, 0, 0, 0, 0, 0, 0))
    found = route.recv(1 << 16)
    while struct.unpack_from('=H', found, 4)[0] != 3:
        found = route.recv(1 << 16)
    return True
""",
        report="[[s.getsockname(), s.type, s.proto, groups(s), s.getsockopt(270, 11),"
        "fcntl.fcntl(s, fcntl.F_GETFL)] for s in everyone] + [links()]",
        change="generic.bind((99, 0)); route.setsockopt(270, 2, 33)",
    )


def test_unread_messages_are_refused(sandbox: Sandbox) -> None:
    probe = Probe.start(sandbox)
    probe.do(
        "import socket; s = socket.socket(16, 3, 0); "
        "s.send(struct.pack('=IHHIIBxHiII', 32, 18, 0x301, 1, 0, 0, 0, 0, 0, 0))"
    )
    with pytest.raises(UnsupportedState, match="messages that were not read"):
        sandbox.checkpoint()
    probe.do("s.recv(1 << 16); s.recv(1 << 16)")
    sandbox.checkpoint()
