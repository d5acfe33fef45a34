"""Options and filters of sockets."""

from __future__ import annotations

import pytest

from deltabox import Sandbox, UnsupportedState
from tests.objects.test_tcp import PREPARE
from tests.probe import Probe, check

_PREPARE = (
    PREPARE
    + """
SET = {
    'tcp': [(6, 1, 1), (6, 4, 77), (6, 5, 8), (6, 6, 3), (6, 7, 2), (6, 8, 33), (6, 18, 5000),
            (6, 25, 40000), (6, 13, b'reno'), (6, 3, 1), (1, 9, 1), (1, 18, 9), (1, 10, 1),
            (1, 13, struct.pack('ii', 1, 44)), (1, 20, struct.pack('qq', 7, 500000)),
            (1, 21, struct.pack('qq', 8, 0)), (1, 7, 20000), (1, 8, 30000),
            (1, 47, b'abcd' + bytes(4)),
            (0, 1, 0x10), (0, 2, 55), (0, 21, 3), (1, 12, 5), (1, 36, 1234), (1, 42, 5)],
    'udp': [(1, 6, 1), (0, 8, 1), (0, 10, 2), (0, 11, 1), (0, 12, 1), (0, 13, 1), (0, 20, 1),
            (0, 33, 9), (0, 34, 0), (0, 49, 0), (1, 29, 1), (1, 40, 1), (1, 2, 1), (1, 15, 1),
            (1, 8, 60000), (17, 104, 1), (17, 103, 500), (1, 11, 1)],
    'six': [(41, 16, 12), (41, 18, 13), (41, 19, 0), (41, 23, 2), (41, 25, 1), (41, 26, 1),
            (41, 49, 1), (41, 51, 1), (41, 66, 1), (41, 67, 8), (41, 70, 0), (41, 72, 2),
            (41, 62, 1), (0, 1, 4)],
}
def apply(sock, options):
    for level, name, value in options:
        sock.setsockopt(level, name, value)
def values(sock):
    if sock.fileno() < 0:
        return None
    found = []
    for level, most in ((0, 60), (1, 90), (6, 50), (17, 110), (41, 90)):
        for name in range(1, most):
            # what differs from moment to moment: errors, the accepting flag, TCP's own facts
            if (level, name) in ((1, 4), (1, 26), (1, 31), (1, 49), (1, 55), (1, 56), (1, 57),
                                 (1, 59), (1, 71), (6, 11), (6, 12), (6, 14), (6, 24), (6, 26),
                                 (6, 28), (6, 35), (6, 2), (6, 10), (0, 9), (41, 6)):
                continue
            try:
                found.append([level, name, sock.getsockopt(level, name, 16).hex()])
            except OSError:
                pass
    return found
def attach(sock):
    code = ctypes.create_string_buffer(struct.pack('HBBIHBBI', 0x30, 0, 0, 0, 6, 0, 0, 1 << 16))
    sock.setsockopt(1, 26, struct.pack('HxxxxxxQ', 2, ctypes.addressof(code)))
def filter_of(sock):
    size = ctypes.c_uint32(9)
    code = ctypes.create_string_buffer(72)
    assert libc.getsockopt(sock.fileno(), 1, 26, code, ctypes.byref(size)) == 0
    return [size.value, code.raw.hex()]
"""
)


def test_options(sandbox: Sandbox) -> None:
    check(
        sandbox,
        setup=_PREPARE
        + """
tcp, udp = socket.socket(), socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
six = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
apply(tcp, SET['tcp']); apply(udp, SET['udp']); apply(six, SET['six'])
listener, client, server = pair()
apply(client, SET['tcp'])
apply(listener, SET['tcp'])
small = socket.socket(); small.setsockopt(6, 2, 700); small.setsockopt(6, 10, 9000)
filtered = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); attach(filtered)
locked = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
attach(locked); locked.setsockopt(1, 44, 1)
everyone = [tcp, udp, six, listener, client, server, filtered, locked]
""",
        report="[[values(s) for s in everyone], filter_of(filtered), filter_of(locked), "
        "filter_of(udp), small.getsockopt(6, 2), small.getsockopt(6, 10)]",
        change="client.setsockopt(6, 4, 5); filtered.setsockopt(1, 27, 0)",
    )


def test_defaults_that_sysctls_set(sandbox: Sandbox) -> None:
    """A socket older than a changed default keeps the old one."""
    probe = Probe.start(sandbox)
    probe.do(_PREPARE + "old = socket.socket()")
    before = probe.ask("values(old)")
    checkpoint = sandbox.checkpoint()
    sandbox.rollback(checkpoint)
    assert probe.ask("values(old)") == before


def test_sockets_of_users(sandbox: Sandbox) -> None:
    """Who owns a socket decides who may join its port (SO_REUSEPORT)."""
    check(
        sandbox,
        setup=PREPARE
        + """
def listen():
    s = socket.socket(); s.setsockopt(1, 15, 1); s.bind(('127.0.0.1', 8500)); s.listen()
    return s
first = listen()
def joins():
    try:
        with listen():
            return True
    except OSError as error:
        return errno.errorcode[error.errno]
""",
        report="[os.fstat(first.fileno()).st_uid if first.fileno() >= 0 else -1, joins(), "
        "[l.split()[7] for l in open('/proc/net/tcp').read().splitlines()[1:]]]",
        change="first.close()",
        user="nobody",
    )


@pytest.mark.parametrize(
    ("what", "setup"),
    [
        ("IP options", "s = socket.socket(); s.setsockopt(0, 4, bytes([1, 1, 1, 0]))"),
        ("IPsec", "s = socket.socket(2, 2); s.setsockopt(17, 100, 2)"),
    ],
)
def test_refused_by_name(sandbox: Sandbox, what: str, setup: str) -> None:
    probe = Probe.start(sandbox)
    probe.do("import socket; " + setup)
    with pytest.raises(UnsupportedState, match=what):
        sandbox.checkpoint()
    assert probe.ask("1 + 1") == 2
