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
    return count(sock, 0x541b) if state(sock) != 10 else 0
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
    found = sock.getsockopt(6, 11, 8)[0]
    return {4: 5}.get(found, found)  # FIN_WAIT1 becomes 2 when the peer's kernel acknowledges
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


def test_connection_between_families(sandbox: Sandbox) -> None:
    """IPv4 addresses that one end, or both, write as IPv6."""
    check(
        sandbox,
        setup=PREPARE
        + """
wide = socket.socket(socket.AF_INET6); wide.bind(('::', 0)); wide.listen()
port = wide.getsockname()[1]
def call(family, address):
    client = socket.socket(family); client.connect(address)
    return client, wide.accept()[0]
everyone = [s for found in (call(socket.AF_INET, ('127.0.0.1', port)),
    call(socket.AF_INET6, ('::ffff:127.0.0.1', port)), call(socket.AF_INET6, ('::1', port)))
    for s in found]
for i, s in enumerate(everyone): s.send(b'%d' % i)
""",
        report="[facts(s) for s in everyone]",
        change="everyone[0].recv(9)",
    )


def test_unaccepted_whose_callers_have_closed(sandbox: Sandbox) -> None:
    check(
        sandbox,
        setup=PREPARE
        + """
listener = socket.socket(); listener.bind(('127.0.0.1', 0)); listener.listen()
names = []
for _ in range(2):
    with socket.create_connection(listener.getsockname()) as s:
        names.append(s.getsockname())
    time.sleep(0.05)
taken = []
def take():
    found = [listener.accept() for _ in names]
    taken.extend(s for s, _ in found)
    return [name for _, name in found] == names and not any(s.recv(9) for s in taken)
""",
        report="[select.select([listener], [], [], 0)[0] == [listener], len(taken)]",
        change="assert take()",
    )


def test_owner(sandbox: Sandbox) -> None:
    check(
        sandbox,
        setup=PREPARE
        + """
listener, client, server = pair()
got = []
signal.signal(signal.SIGURG, lambda *_: got.append('urgent'))
signal.signal(signal.SIGIO, lambda *_: got.append('io'))
fcntl.fcntl(server, fcntl.F_SETOWN, os.getpid())
fcntl.fcntl(client, fcntl.F_SETOWN, os.getpid())
fcntl.fcntl(client, fcntl.F_SETFL, os.O_ASYNC)
def owner(s):
    return fcntl.fcntl(s, fcntl.F_GETOWN) == os.getpid()
""",
        report="[owner(client), owner(server), owner(listener), got]",
        change="""
client.send(b'!', socket.MSG_OOB); server.send(b'x')
while not {'urgent', 'io'} <= set(got): time.sleep(0.01)
""",
    )


def test_listening(sandbox: Sandbox) -> None:
    check(
        sandbox,
        setup=PREPARE
        + """
plain = socket.socket(); plain.bind(('127.0.0.1', 0)); plain.listen(3)
wide = socket.socket(socket.AF_INET6); wide.bind(('::', 8080)); wide.listen(200)
narrow = socket.socket(socket.AF_INET6); narrow.setsockopt(41, 26, 1)
narrow.bind(('::', 8081)); narrow.listen()
group = [socket.socket() for _ in range(3)]
for s in group:
    s.setsockopt(1, 15, 1)
    s.bind(('0.0.0.0', 9000))
    s.listen(4)
bound = socket.socket(); bound.bind(('127.0.0.1', 0))
unbound = socket.socket(); unbound.setblocking(False)
twice = [socket.socket() for _ in range(2)]
for s in twice:
    s.setsockopt(1, 2, 1)
    s.bind(('127.0.0.1', 7000))
twice[1].listen(9)
everyone = [plain, wide, narrow, *group, bound, unbound, *twice]
def backlog(sock):
    return struct.unpack('I', sock.getsockopt(6, 11, 32)[28:])[0]
def works(address):
    with socket.create_connection(address) as caller:
        taken, _, _ = select.select(everyone[:6] + twice[1:], [], [], 5)
        with taken[0].accept()[0] as server:
            caller.sendall(b'hello')
            return server.recv(5).decode()
""",
        report="""[[facts(s) for s in everyone], [backlog(s) for s in everyone[1:6] + twice[1:]],
[works(a) for a in (plain.getsockname(), ('127.0.0.1', 8080), ('::1', 8081),
   ('127.0.0.1', 9000), ('127.0.0.1', 7000))],
[s.getsockopt(1, o) for s in everyone for o in (2, 15)]]""",
        change="unbound.bind(('127.0.0.1', 0))",
    )


def test_half_closed(sandbox: Sandbox) -> None:
    check(
        sandbox,
        setup=PREPARE
        + """
a, b, c = pair(), pair(), pair()
a[1].send(b'last words'); a[1].shutdown(socket.SHUT_WR)
b[2].send(b'answer'); b[2].shutdown(socket.SHUT_WR); b[1].send(b'still')
c[1].shutdown(socket.SHUT_RD)
select.select([a[2], b[1]], [], [])
everyone = [*a, *b, *c]
""",
        report="[facts(s) for s in everyone]",
        change="a[2].send(b'reply'); b[1].send(b'more')",
    )


def test_both_ends_shut(sandbox: Sandbox) -> None:
    """Nothing is under way any more, but what has arrived can be read."""
    check(
        sandbox,
        setup=PREPARE
        + """
listener, client, server = pair()
client.send(b'to the server'); server.send(b'to the client')
client.shutdown(socket.SHUT_WR); server.shutdown(socket.SHUT_WR)
select.select([client], [], []); select.select([server], [], [])
time.sleep(0.1)
def error(s):
    return s.getsockopt(1, 4)
""",
        report="[[facts(s), error(s)] for s in (client, server)]",
        change="client.recv(99)",
    )


def test_other_end_closed(sandbox: Sandbox) -> None:
    """A closed end is nobody's: its partner has all its data, and is told when it writes."""
    probe = Probe.start(sandbox)
    probe.do(
        PREPARE
        + """
a, b = pair(), pair()
a[1].send(b'bye'); a[1].close(); b[2].close()
select.select([a[2]], [], []); select.select([b[1]], [], [])
"""
    )
    report = "[facts(a[2]), facts(b[1])]"
    before = probe.ask(report)
    checkpoint = sandbox.checkpoint()
    for _ in range(3):
        assert probe.ask(report) == before
        assert probe.ask("[a[2].recv(9).decode(), a[2].recv(9).decode()]") == ["bye", ""]
        assert probe.ask("a[2].send(b'x')") == 1
        probe.do("time.sleep(0.05)")
        probe.do(
            """
try:
    a[2].send(b'y'); raise AssertionError
except (BrokenPipeError, ConnectionResetError) as error:
    pass
"""
        )
        sandbox.rollback(checkpoint)


@pytest.mark.parametrize(
    ("size", "more"),
    [
        (300_000, ""),
        (3_000_000, ""),
        (3_000_000, "client.shutdown(0)"),
        (300_000, "client.shutdown(1)"),
    ],
)
def test_closed_with_data_unsent(sandbox: Sandbox, size: int, more: str) -> None:
    """Its kernel still has what does not fit: all of that comes, and then the end."""
    probe = Probe.start(sandbox)
    probe.do(
        PREPARE
        + f"""
listener, client, server = pair()
server.setsockopt(1, 7, {2 * size}); server.setblocking(False)
data = os.urandom({size})
wrote = server.send(data)
assert wrote > unread(client)
server.close()
{more}
def sizes():
    return [client.getsockopt(1, o) for o in (2, 8, 72)] + [client.getsockname()]
def rest():
    got = b''
    while more := client.recv(1 << 20):
        got += more
    return got == data[:wrote], client.recv(9).decode()
"""
    )
    before = probe.ask("sizes()")
    checkpoint = sandbox.checkpoint()
    for _ in range(2):
        assert probe.ask("sizes()") == before
        assert probe.ask("rest()") == [True, ""]
        sandbox.rollback(checkpoint)
    again = sandbox.checkpoint()
    with sandbox.fork(at=again) as fork:
        assert probe.within(fork).ask("sizes()") == before
        assert probe.within(fork).ask("rest()") == [True, ""]


@pytest.mark.parametrize("size", [0, 65536])
def test_full_in_both_directions(sandbox: Sandbox, size: int) -> None:
    """Writers that were stopped by full buffers stay so; every byte arrives in order."""
    probe = Probe.start(sandbox)
    probe.do(
        PREPARE
        + f"""
listener, client, server = pair()
client.setsockopt(1, 2, 1)
for s in (client, server):
    if {size}:
        s.setsockopt(1, 7, {size}); s.setsockopt(1, 8, {size})
    s.setblocking(False)
def fill(sock, start=0):
    total = start
    try:
        while True:
            total += sock.send(b''.join(b'%07d' % i for i in range(total // 7, total // 7 + 1000))
                               [total % 7:])
    except BlockingIOError:
        return total - start
wrote = [fill(client), fill(server)]
time.sleep(0.5)
wrote[0] += fill(client, wrote[0]); wrote[1] += fill(server, wrote[1])
def drain(sock, size):
    got = b''
    while len(got) < size:
        select.select([sock], [], [], 10)
        got += sock.recv(1 << 20)
    return got == b''.join(b'%07d' % i for i in range(size // 7 + 1))[:size]
def sizes(sock):
    return [sock.getsockopt(1, o) for o in (2, 7, 8, 72)]
"""
    )
    report = """[[s.getsockname(), s.getpeername(), state(s), events(s), sizes(s)]
                for s in (client, server)]"""
    before = probe.ask(report)
    held = probe.ask("[unread(client), unread(server)]")
    assert all(held)
    checkpoint = sandbox.checkpoint()
    assert probe.ask(report) == before
    for _ in range(3):
        probe.do("assert drain(server, wrote[0]) and drain(client, wrote[1])")
        assert probe.ask("[unread(client), unread(server)]") == [0, 0]
        probe.do("client.send(b'z' * 10); server.send(b'z' * 10)")
        sandbox.rollback(checkpoint)
        assert probe.ask(report) == before
    with sandbox.fork(at=checkpoint) as fork:
        probe.within(fork).do("assert drain(server, wrote[0]) and drain(client, wrote[1])")


@pytest.mark.parametrize("size", [100_000, 400_000])
def test_large_receive_queue(sandbox: Sandbox, size: int) -> None:
    check(
        sandbox,
        setup=PREPARE
        + f"""
listener = socket.socket(); listener.setsockopt(1, 8, 1 << 20); listener.bind(('127.0.0.1', 0))
listener.listen()
client = socket.create_connection(listener.getsockname())
server, _ = listener.accept()
data = os.urandom({size})
client.sendall(data)
while unread(server) < {size}: time.sleep(0.01)
""",
        report=f"""[unread(server), server.recv({size}, socket.MSG_PEEK) == data, state(server),
server.getsockopt(1, 8), server.getsockopt(1, 72)]""",
        change="server.recv(1000)",
    )


def test_reset_and_refused(sandbox: Sandbox) -> None:
    probe = Probe.start(sandbox)
    probe.do(
        PREPARE
        + """
reset, told, refused = pair(), pair(), socket.socket()
for p in (reset, told):
    p[1].send(b'data'); select.select([p[2]], [], [])
    p[1].setsockopt(1, 13, struct.pack('ii', 1, 0)); p[1].close()
time.sleep(0.05)
try:
    told[2].recv(4); told[2].recv(1)
except ConnectionResetError:
    pass
free = socket.socket(); free.bind(('127.0.0.1', 0)); port = free.getsockname(); free.close()
refused.setblocking(False)
try:
    refused.connect(port)
except BlockingIOError:
    pass
time.sleep(0.05)
def outcome(call):
    try:
        return call().decode()
    except OSError as error:
        return errno.errorcode[error.errno]
"""
    )
    report = "[facts(s) for s in (reset[2], told[2])] + [state(refused), events(refused)]"
    before = probe.ask(report)
    end = """[outcome(lambda: s.recv(10)) for s in (reset[2], reset[2], reset[2], told[2], refused,
        refused)] + [outcome(lambda: b'%d' % s.send(b'x')) for s in (reset[2], told[2], refused)]"""
    checkpoint = sandbox.checkpoint()
    results = []
    for _ in range(3):
        assert probe.ask(report) == before
        results.append(probe.ask(end))
        sandbox.rollback(checkpoint)
    assert results[0][:4] == ["data", "ECONNRESET", "", ""]
    assert results[0] == results[1] == results[2]


def test_unaccepted(sandbox: Sandbox) -> None:
    check(
        sandbox,
        setup=PREPARE
        + """
listener = socket.socket(); listener.bind(('127.0.0.1', 0)); listener.listen(2)
callers = [socket.create_connection(listener.getsockname()) for _ in range(3)]
late = socket.socket(); late.setblocking(False)
try:
    late.connect(listener.getsockname())
except BlockingIOError:
    pass
names = [s.getsockname() for s in (*callers, late)]
taken = []
def take():
    found = [listener.accept() for _ in range(3)]
    select.select([], [late], [], 10)
    taken.extend([*found, listener.accept()])
    return [address for _, address in taken] == names
""",
        report="[[state(s), s.getsockname(), peer(s)] for s in (*callers, late, listener)]"
        "+ [len(taken)]",
        change="assert take()",
        rollbacks=3,
    )


def test_unaccepted_with_data_is_refused(sandbox: Sandbox) -> None:
    probe = Probe.start(sandbox)
    probe.do(
        PREPARE
        + """
listener = socket.socket(); listener.bind(('127.0.0.1', 0)); listener.listen(2)
caller = socket.create_connection(listener.getsockname())
caller.send(b'early')
"""
    )
    with pytest.raises(UnsupportedState, match="has not accepted it, with data"):
        sandbox.checkpoint()
    probe.do("server, _ = listener.accept(); assert server.recv(9) == b'early'")
    sandbox.checkpoint()


@pytest.mark.parametrize(
    ("what", "setup"),
    [
        ("urgent data", "s.send(b'!', socket.MSG_OOB)"),
        (
            "connected to itself",
            "s = socket.socket(); s.bind(('127.0.0.1', 0)); s.connect(s.getsockname())",
        ),
        ("a raw socket", "r = socket.socket(socket.AF_INET, socket.SOCK_RAW, 255)"),
        ("a packet socket", "r = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)"),
        ("a vsock socket", "r = socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)"),
        ("protocol 262", "r = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 262)"),
    ],
)
def test_refused_by_name(sandbox: Sandbox, what: str, setup: str) -> None:
    probe = Probe.start(sandbox)
    probe.do(PREPARE + "l, s, t = pair()\n" + setup)
    with pytest.raises(UnsupportedState, match=what):
        sandbox.checkpoint()
    assert probe.ask("1 + 1") == 2


def test_blocked_calls_go_on(sandbox: Sandbox) -> None:
    """accept, recv and a send into a full connection are in the middle of their calls."""
    probe = Probe.start(sandbox)
    probe.do(
        PREPARE
        + """
a, b, c = pair(), pair(), pair()
results = {}
def run(name, call):
    def body():
        results[name] = call()
    thread = threading.Thread(target=body, daemon=True); thread.start(); return thread
large = os.urandom(12_000_000)
threads = [run('accept', a[0].accept), run('recv', lambda: b[1].recv(10)),
           run('send', lambda: c[1].sendall(large))]
time.sleep(0.5)
"""
    )
    checkpoint = sandbox.checkpoint()
    finish = """
assert not results, results
with socket.create_connection(a[0].getsockname()) as caller:
    b[2].send(b'woken')
    got = bytearray()
    while len(got) < len(large):
        got += c[2].recv(1 << 20)
    for thread in threads: thread.join(10)
    assert got == large
    assert results['recv'] == b'woken' and results['accept'][1] == caller.getsockname()
"""
    for _ in range(3):
        probe.do(finish)
        sandbox.rollback(checkpoint)
    probe.do(finish)


@pytest.mark.parametrize("accepted", [True, False])
def test_connect_that_nobody_has_told_yet(sandbox: Sandbox, accepted: bool) -> None:
    """connect(2) of a stopped job whose connection has come to stand meanwhile: it says so."""
    probe = Probe.start(sandbox)
    probe.do(f"""
import socket
listener = socket.socket()
listener.bind(('127.0.0.1', 0))
listener.listen(0)  # one fits
first = socket.create_connection(listener.getsockname())
told, tell = os.pipe()
pid = os.fork()
if pid == 0:
    caller = socket.socket()
    try:
        caller.connect(listener.getsockname())
        os.write(tell, b'connected')
    except OSError as error:
        os.write(tell, repr(error).encode())
    os._exit(0)
def await_state(state):  # of the caller, tcp_states.h
    port = '%04X' % listener.getsockname()[1]
    mine = '%04X' % first.getsockname()[1]
    until = time.monotonic() + 20
    while True:
        lines = [line.split() for line in open('/proc/net/tcp')][1:]
        if any(l[2].endswith(port) and not l[1].endswith(mine) and l[3] == state for l in lines):
            return
        assert time.monotonic() < until, lines
        time.sleep(0.01)
def go_on():
    os.kill(pid, signal.SIGCONT)
    answer = os.read(told, 100).decode()
    os.waitpid(pid, 0)
    return answer
await_state('02')
os.kill(pid, signal.SIGSTOP)
os.waitpid(pid, os.WUNTRACED)
taken = [listener.accept()]
await_state('01')
if {accepted}:
    taken.append(listener.accept())
""")
    checkpoint = sandbox.checkpoint()
    assert probe.ask("go_on()") == "connected"
    for _ in range(5):
        sandbox.rollback(checkpoint)
        assert probe.ask("go_on()") == "connected"
    with sandbox.fork(at=checkpoint) as fork, fork.fork() as again:
        assert probe.within(again).ask("go_on()") == "connected"


def test_an_http_server_with_a_kept_connection(sandbox: Sandbox) -> None:
    """Server and client are processes of their own, in the middle of a kept-alive connection."""
    sandbox.run("mkdir -p /srv/www && echo one > /srv/www/page", check=True)
    server = sandbox.spawn(
        ["python3", "-m", "http.server", "-p", "HTTP/1.1", "--directory", "/srv/www", "8000"]
    )
    probe = Probe.start(sandbox)
    probe.do(
        """
import http.client
for _ in range(200):
    try:
        kept = http.client.HTTPConnection('127.0.0.1', 8000, timeout=10); kept.connect(); break
    except ConnectionRefusedError:
        time.sleep(0.05)
def get():
    kept.request('GET', '/page')
    return kept.getresponse().read().decode()
"""
    )
    assert probe.ask("get()") == "one\n"
    name = probe.ask("kept.sock.getsockname()")
    checkpoint = sandbox.checkpoint()
    for _ in range(5):
        sandbox.run("echo two > /srv/www/page", check=True)
        assert probe.ask("get()") == "two\n"
        sandbox.rollback(checkpoint)
        assert probe.ask("get()") == "one\n"
        assert probe.ask("kept.sock.getsockname()") == name
        sandbox.rollback(checkpoint)
    assert server.exit_code is None
    with sandbox.fork(at=checkpoint) as fork:
        assert probe.within(fork).ask("get()") == "one\n"
