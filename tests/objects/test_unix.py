"""Unix sockets."""

from __future__ import annotations

import pytest

from deltabox import Sandbox, UnsupportedState
from tests.probe import Probe, check

_HELP = """
import array, socket, stat
from socket import AF_UNIX, SOCK_DGRAM, SOCK_SEQPACKET, SOCK_STREAM, SOL_SOCKET
def peek(s, size=1 << 20):
    if s.fileno() < 0:
        return 'closed'
    before = s.getsockopt(SOL_SOCKET, 42)
    s.setsockopt(SOL_SOCKET, 42, 0)
    out = []
    try:
        while True:
            data, anc, flags, who = s.recvmsg(size, 4096, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            rights = []
            for level, kind, content in anc:
                if kind == socket.SCM_RIGHTS:
                    for fd in array.array('i', content):
                        rights.append(os.readlink('/proc/self/fd/%d' % fd).split(':')[0])
                        os.close(fd)
                else:
                    rights.append(list(struct.unpack('3i', content)))
            out.append([data.decode('latin1') if len(data) < 99 else len(data), rights, str(who)])
            if not data:
                return out + ['end']
    except BlockingIOError:
        return out
    except OSError as e:
        return out + [e.errno]
    finally:
        s.setsockopt(SOL_SOCKET, 42, before)
def who(s):
    try:
        return list(struct.unpack('3i', s.getsockopt(SOL_SOCKET, socket.SO_PEERCRED, 12)))
    except OSError as e:
        return e.errno
def names(s):
    try:
        peer = s.getpeername()
    except OSError as e:
        peer = e.errno
    return [str(s.getsockname()) if s.fileno() >= 0 else None, str(peer)]
def polled(s):
    if s.fileno() < 0:
        return 'closed'
    p = select.poll(); p.register(s, 0xffff)
    return [e for _, e in p.poll(0)]
def facts(s):
    return [names(s), who(s), polled(s), s.fileno() >= 0 and s.getsockopt(SOL_SOCKET, 16), peek(s)]
"""


@pytest.mark.parametrize("kind", ["SOCK_STREAM", "SOCK_SEQPACKET", "SOCK_DGRAM"])
def test_pairs(sandbox: Sandbox, kind: str) -> None:
    check(
        sandbox,
        setup=_HELP
        + f"""
a, b = socket.socketpair(AF_UNIX, {kind})
a.send(b'one'); a.send(b'two'); b.send(b'back')
c, d = socket.socketpair(AF_UNIX, {kind})
c.send(b'last words'); c.close()
e, f = socket.socketpair(AF_UNIX, {kind})
e.send(b'x'); e.shutdown(socket.SHUT_WR)
b.setblocking(False)
""",
        report="[facts(s) for s in (a, b, d, e, f)] + [b.getblocking()]",
        change="a.recv(2); b.recv(3); d.recv(100); f.close()",
    )


def test_descriptors_in_flight(sandbox: Sandbox) -> None:
    """Files, pipes, and a socket with a queue of its own that nobody has open any more."""
    check(
        sandbox,
        setup=_HELP
        + """
a, b = socket.socketpair()
r, w = os.pipe()
os.write(w, b'through the pipe')
x, y = socket.socketpair()
x.send(b'deep')
f = open('/etc/services'); f.seek(100)
a.send(b'plain')
socket.send_fds(a, [b'with'], [r, f.fileno()])
socket.send_fds(a, [b'more'], [y.fileno(), r])
a.send(b'rest')
os.close(r); f.close(); y.close()
def unpack():
    first = b.recv(5)
    data, fds, *_ = socket.recv_fds(b, 100, 9)
    data2, fds2, *_ = socket.recv_fds(b, 100, 9)
    inner = socket.socket(fileno=fds2[0])
    out = [first.decode(), data.decode(), os.read(fds[0], 99).decode(), os.lseek(fds[1], 0, 1),
           data2.decode(), inner.recv(9).decode(), os.path.sameopenfile(fds[0], fds2[1]),
           b.recv(9).decode()]
    inner.send(b'answer')
    return out + [x.recv(9).decode()]
""",
        report="peek(b)",
        change="unpack() == ['plain', 'with', 'through the pipe', 100, 'more', 'deep', True,"
        " 'rest', 'answer'] or 1/0",
    )


@pytest.mark.parametrize("kind", ["SOCK_STREAM", "SOCK_SEQPACKET"])
@pytest.mark.parametrize("name", ["'/root/s'", "'\\0abstract'", "'relative/s'", "''"])
def test_served(sandbox: Sandbox, kind: str, name: str) -> None:
    """Listening, connected, waiting to be accepted, closed on one side."""
    check(
        sandbox,
        setup=_HELP
        + f"""
os.makedirs('/root/relative'); os.chdir('/root')
server = socket.socket(AF_UNIX, {kind})
server.bind({name}); name = server.getsockname()
if isinstance(name, str):
    os.chmod(name, 0o640); os.chown(name, 7, 8); os.utime(name, (1e9, 1e9))
    os.utime('/root', (2e9, 2e9))
server.listen(7)
def client():
    s = socket.socket(AF_UNIX, {kind})
    s.connect(name)
    return s
clients = [client() for _ in range(4)]
served = [server.accept()[0] for _ in clients]
clients[0].send(b'question'); served[1].send(b'answer')
clients[2].send(b'gone'); clients[2].close()
served[3].send(b'bye'); served[3].close()
waiting = [client(), client()]
def place():
    i = os.stat(name) if isinstance(name, str) else os.stat('/')
    return [oct(i.st_mode), i.st_uid, i.st_gid, i.st_mtime, os.stat('/root').st_mtime]
live = [server, *clients[:2], clients[3], *served[:3], *waiting]
def accept():
    c, _ = server.accept(); c.send(b'hello')
    return waiting[0].recv(9) == b'hello' and who(c)
""",
        report="[[names(s), who(s), polled(s)] for s in live] + [peek(s) for s in live[1:]]"
        " + [place()]",
        change="accept() == [os.getpid(), 0, 0] or 1/0; served[0].recv(9); clients[1].recv(9);"
        " served[2].recv(9); clients[3].recv(9)",
    )


def test_a_new_client_after_each_rollback(sandbox: Sandbox) -> None:
    probe = Probe.start(sandbox)
    probe.do(
        _HELP
        + """
server = socket.socket(AF_UNIX)
server.bind('/run/serve'); server.listen()
def serve():
    while True:
        c, _ = server.accept()
        c.send(c.recv(99)[::-1]); c.close()
threading.Thread(target=serve, daemon=True).start()
"""
    )
    ask = (
        "import socket; s = socket.socket(socket.AF_UNIX); s.connect('/run/serve');"
        "s.send(b'abc'); print(s.recv(9).decode())"
    )
    checkpoint = sandbox.checkpoint()
    for _ in range(4):
        assert sandbox.run(["python3", "-c", ask]).stdout == "cba\n"
        sandbox.rollback(checkpoint)
    for fork in sandbox.fork_many(2, at=checkpoint):
        with fork:
            assert fork.run(["python3", "-c", ask]).stdout == "cba\n"


def test_listener_closed_file_deleted_and_replaced(sandbox: Sandbox) -> None:
    check(
        sandbox,
        setup=_HELP
        + """
def serve(path):
    s = socket.socket(AF_UNIX); s.bind(path); s.listen(3)
    c = socket.socket(AF_UNIX); c.connect(path)
    return s, c, s.accept()[0]
one = serve('/root/one'); one[0].close()
two = serve('/root/two'); os.unlink('/root/two')
three = serve('/root/three'); os.unlink('/root/three'); four = serve('/root/three')
five = serve('/root/five'); five[0].close(); os.unlink('/root/five')
open('/root/five', 'w').write('a file')
six = serve('\\0six'); six[0].close(); seven = serve('\\0six')
every = [*one[1:], *two, *three, *four, *five[1:], *six[1:], *seven]
for s in every[::3]:
    try: s.send(b'data')
    except OSError: pass
def files():
    return [[n, oct(os.stat('/root/' + n).st_mode)] for n in sorted(os.listdir('/root'))
            if not n.startswith('.')] + [open('/root/five').read()]
""",
        report="[[names(s), who(s), polled(s)] for s in every] + [files()]",
        change="one[1].close(); six[2].close(); four[1].send(b'x')",
    )


def test_datagrams(sandbox: Sandbox) -> None:
    check(
        sandbox,
        setup=_HELP
        + """
def bound(name):
    s = socket.socket(AF_UNIX, SOCK_DGRAM)
    s.bind(name)
    return s
server = bound('/run/log'); named = bound('\\0sender'); filed = bound('/run/sender')
nameless = socket.socket(AF_UNIX, SOCK_DGRAM)
connected = socket.socket(AF_UNIX, SOCK_DGRAM); connected.connect('/run/log')
named.sendto(b'1', '/run/log'); filed.sendto(b'2', '/run/log'); nameless.sendto(b'3', '/run/log')
connected.send(b'4'); named.sendto(b'5', '/run/log')
only = bound('\\0only'); only.connect('\\0sender'); named.sendto(b'to only', '\\0only')
every = (server, named, filed, nameless, connected, only)
""",
        report="[[names(s), polled(s), peek(s)] for s in every]",
        change="server.recv(9); connected.send(b'6'); only.recv(9)",
    )


def test_credentials(sandbox: Sandbox) -> None:
    """Of makers with other ids, of one that has ended, and in messages."""
    check(
        sandbox,
        setup=_HELP
        + """
os.chmod('/root', 0o777)
server = socket.socket(AF_UNIX); server.bind('/root/s'); server.listen(5)
os.chmod('/root/s', 0o777)
r, w = os.pipe(); hold_r, hold_w = os.pipe()
child = os.fork()
if not child:
    os.setresgid(33, 33, 33); os.setresuid(33, 33, 33)
    c = socket.socket(AF_UNIX); c.connect('/root/s')
    c.setsockopt(SOL_SOCKET, 16, 1)
    os.write(w, b'x'); time.sleep(1000)
os.read(r, 1)
accepted = server.accept()[0]
accepted.send(b'to the child')
pair = socket.socketpair()
gone = os.fork()
if not gone:
    left, right = socket.socketpair()
    socket.send_fds(pair[0], [b't'], [left.fileno(), right.fileno()])
    os._exit(0)
os.waitpid(gone, 0)
left, right = map(lambda fd: socket.socket(fileno=fd), socket.recv_fds(pair[1], 9, 2)[1])
asking = socket.socketpair()
asking[0].setsockopt(SOL_SOCKET, 16, 1)
asking[1].send(b'who am I'); asking[1].send(b'still me')
every = [server, accepted, left, right, *asking]
""",
        report="[facts(s)[:4] for s in every]"
        " + [peek(s) for s in every[1:]] + [child, gone, os.getpid()]",
        change="asking[0].recv(3); left.close()",
    )


def test_broken_connection_and_full_queues(sandbox: Sandbox) -> None:
    check(
        sandbox,
        setup=_HELP
        + """
a, b = socket.socketpair(); b.send(b'unread'); b.close()
c, d = socket.socketpair(); e, f = socket.socketpair(); f.close(); g, h = socket.socketpair()
g.send(b'never read'); h.close()
def fill(s, size):
    s.setblocking(False); n = 0
    try:
        while True: n += s.send(b'z' * size)
    except BlockingIOError:
        return n
sent = [fill(c, 60000), fill(d, 1)]
def room(s):
    try: return s.send(b'y')
    except OSError as x: return x.errno
def total(s):
    return sum(n if isinstance(n, int) else len(n) for n, *_ in peek(s))
""",
        report="[facts(e), polled(g), total(c), total(d), sent]",
        change="d.recv(1000); g.getsockopt(SOL_SOCKET, socket.SO_ERROR)",
    )


def test_a_connection_with_data_that_nobody_has_accepted(sandbox: Sandbox) -> None:
    probe = Probe.start(sandbox)
    probe.do(
        _HELP + "s = socket.socket(AF_UNIX); s.bind('\\0s'); s.listen();"
        "c = socket.socket(AF_UNIX); c.connect('\\0s'); c.send(b'x')"
    )
    with pytest.raises(UnsupportedState, match="sent to a connection nobody has accepted"):
        sandbox.checkpoint()
    probe.do("a, _ = s.accept()")
    checkpoint = sandbox.checkpoint()
    sandbox.rollback(checkpoint)
    assert probe.ask("peek(a)") == [["x", [], "None"]]
