"""TCP sockets: listening, connected, half closed, full, reset, unaccepted."""

from __future__ import annotations

import pytest

from deltabox import Sandbox, UnsupportedState
from tests.probe import Probe, check

PREPARE = """
import array, errno, socket
def count(sock, request):
    found = array.array('i', [0])
    fcntl.ioctl(sock, request, found)
    return found[0]
def unread(sock):
    return count(sock, 0x541b)
def events(sock):
    poller = select.poll()
    poller.register(sock, select.POLLIN | select.POLLOUT | select.POLLRDHUP | select.POLLPRI)
    found = poller.poll(0)
    return found[0][1] if found else 0
def peer(sock):
    try:
        return sock.getpeername()
    except OSError as error:
        return error.errno
def state(sock):
    return sock.getsockopt(6, 11, 8)[0]
def facts(sock):
    if sock.fileno() < 0:
        return None
    return [sock.getsockname(), peer(sock), state(sock), unread(sock), events(sock),
            fcntl.fcntl(sock, fcntl.F_GETFL), fcntl.fcntl(sock, fcntl.F_GETFD),
            sock.recv(1 << 20, socket.MSG_PEEK | socket.MSG_DONTWAIT).decode() if unread(sock)
            else '']
def pair(family=socket.AF_INET, host='127.0.0.1', port=0):
    listener = socket.socket(family)
    listener.setsockopt(1, 2, 1)
    listener.bind((host, port))
    listener.listen(7)
    client = socket.socket(family)
    client.connect(listener.getsockname())
    server, _ = listener.accept()
    return listener, client, server
"""


@pytest.mark.parametrize(
    ("family", "host"), [("AF_INET", "127.0.0.1"), ("AF_INET6", "::1"), ("AF_INET", "127.3.2.1")]
)
def test_connection_with_data(sandbox: Sandbox, family: str, host: str) -> None:
    check(
        sandbox,
        setup=PREPARE
        + f"""
listener, client, server = pair(socket.{family}, {host!r})
client.send(b'to the server')
server.send(b'to the client')
client.setblocking(False)
os.set_inheritable(server.fileno(), True)
""",
        report="[facts(s) for s in (client, server)] + [listener.getsockname(), state(listener)]",
        change="client.recv(4); server.send(b'more')",
    )
