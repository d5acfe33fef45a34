"""UDP sockets: names, waiting datagrams, groups."""

from __future__ import annotations

import pytest

from deltabox import Sandbox, UnsupportedState
from tests.objects.test_tcp import PREPARE
from tests.probe import Probe, check

_PREPARE = (
    PREPARE
    + """
def waiting(sock):
    found = []
    sock.setsockopt(1, 42, 0)
    try:
        while True:
            data, source = sock.recvfrom(65536, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            found.append([len(data), data[:20].decode(errors='replace'), source])
    except BlockingIOError:
        return found
    finally:
        sock.setsockopt(1, 42, -1)
def udp(address=None, family=socket.AF_INET):
    s = socket.socket(family, socket.SOCK_DGRAM)
    if address:
        s.bind(address)
    return s
def info(s):
    return [s.getsockname(), peer(s), waiting(s), fcntl.fcntl(s, fcntl.F_GETFL)]
"""
)


def test_datagrams(sandbox: Sandbox) -> None:
    check(
        sandbox,
        setup=_PREPARE
        + """
plain, wide, six = udp(('127.0.0.1', 5000)), udp(('', 5001)), udp(('::', 5002), socket.AF_INET6)
only, unbound, linked = udp(('::1', 5003), socket.AF_INET6), udp(), udp()
unbound.setblocking(False)
linked.connect(plain.getsockname())
source, gone = udp(('127.0.0.9', 0)), udp()
for text in (b'one', b'two', b'x' * 60000, b'three'):
    source.sendto(text, plain.getsockname())
    gone.sendto(text, plain.getsockname())
source.sendto(b'wide', ('127.0.0.77', 5001))
wide.sendto(b'self', ('127.0.0.1', 5001))
gone.sendto(b'mapped', ('127.0.0.1', 5002))
only.sendto(b'six', ('::1', 5002))
only.sendto(b'own', ('::1', 5003))
linked.send(b'from a linked one')
plain.sendto(b'answer', linked.getsockname())
gone.close()
everyone = [plain, wide, six, only, unbound, linked, source]
time.sleep(0.1)
""",
        report="[info(s) for s in everyone]",
        change="plain.recv(10); linked.send(b'more')",
    )


def test_the_address_a_datagram_was_sent_to(sandbox: Sandbox) -> None:
    check(
        sandbox,
        setup=_PREPARE
        + """
s, t = udp(('', 6000)), udp()
s.setsockopt(0, 8, 1)
t.sendto(b'x', ('127.0.0.42', 6000))
""",
        report="s.recvmsg(9, 99, socket.MSG_PEEK)[1][0][2][-4:].hex()",
        change="t.sendto(b'y', ('127.0.0.43', 6000)); s.recv(9)",
    )


def test_groups(sandbox: Sandbox) -> None:
    check(
        sandbox,
        setup=_PREPARE
        + """
lo = socket.if_nametoindex('lo')
four, six, none = udp(('', 7000)), udp(('::', 7001), socket.AF_INET6), udp(('', 7002))
four.setsockopt(0, 35, struct.pack('4s4si', socket.inet_aton('239.1.2.3'), bytes(4), lo))
six.setsockopt(41, 20, struct.pack('16si', socket.inet_pton(10, 'ff15::77'), lo))
sender = udp()
sender.setsockopt(0, 32, struct.pack('4s4si', bytes(4), socket.inet_aton('127.0.0.1'), lo))
def groups():
    return [open('/proc/net/igmp').read().split()[8:], open('/proc/net/igmp6').read()]
def reach():
    found = []
    sender.sendto(b'hello', ('239.1.2.3', 7000))
    found.append(select.select([four], [], [], 0.2)[0] and four.recv(9).decode())
    sender.sendto(b'hello', ('239.1.2.3', 7002))
    found.append(select.select([none], [], [], 0)[0] and none.recv(9).decode())
    return found
""",
        report="[reach(), 'EF' in str(groups()), '0302' in str(groups()), "
        "'ff150000000000000000000000000077' in str(groups())]",
        change="four.setsockopt(0, 36, struct.pack('4s4si', socket.inet_aton('239.1.2.3'), "
        "bytes(4), lo))",
    )


@pytest.mark.parametrize(
    ("what", "setup"),
    [
        ("a ping socket", "open('/proc/sys/net/ipv4/ping_group_range', 'w').write('0 0'); "
         "s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM, 1)"),
        ("an error or notice", "s = udp(); s.connect(('127.0.0.1', 1)); s.send(b'x'); "
         "time.sleep(0.1)"),
        ("an empty datagram", "s, t = udp(('', 801)), udp(); t.sendto(b'x', ('127.0.0.1', 801)); "
         "t.sendto(b'', ('127.0.0.1', 801)); time.sleep(0.1)"),
        ("UDP_CORK", "s = udp(); s.setsockopt(17, 1, 1)"),
        ("whose port others have", "s, t = udp(), udp(); s.setsockopt(1, 15, 1); "
         "t.setsockopt(1, 15, 1); s.bind(('', 800)); t.bind(('', 800)); "
         "udp().sendto(b'x', ('127.0.0.1', 800)); time.sleep(0.1)"),
    ],
)  # fmt: skip
def test_refused_by_name(sandbox: Sandbox, what: str, setup: str) -> None:
    probe = Probe.start(sandbox)
    probe.do(_PREPARE + setup)
    with pytest.raises(UnsupportedState, match=what):
        sandbox.checkpoint()
    with pytest.raises(UnsupportedState, match=what):
        sandbox.checkpoint()
    assert probe.ask("1 + 1") == 2
