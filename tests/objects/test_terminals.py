"""Pseudo-terminals that live inside the sandbox, both sides."""

from __future__ import annotations

import pytest

from deltabox import Sandbox, UnsupportedState
from tests.probe import Probe, check

# What is visible of a terminal and of the processes around it, from inside.
_LOOK = """
import array, pty, subprocess, termios, tty
def number(fd, request):
    return struct.unpack('i', fcntl.ioctl(fd, request, bytes(4)))[0]
def settings(fd):
    return fcntl.ioctl(fd, 0x802C542A, bytes(44)).hex()
def size(fd):
    return struct.unpack('4H', fcntl.ioctl(fd, 0x5413, bytes(8)))
def flags(fd):
    return [fcntl.fcntl(fd, fcntl.F_GETFL), fcntl.fcntl(fd, fcntl.F_GETFD)]
def look(fd):
    try:
        return [os.readlink('/proc/self/fd/%d' % fd), flags(fd), settings(fd), size(fd),
                number(fd, 0x80045432), number(fd, 0x80045440)]
    except OSError as error:
        return [os.readlink('/proc/self/fd/%d' % fd), flags(fd), error.errno]
def master(fd):
    p = select.poll(); p.register(fd, select.POLLIN | select.POLLPRI)
    return look(fd) + [number(fd, 0x80045430), number(fd, 0x80045438), number(fd, 0x80045439),
                       p.poll(0)]
def stat(pid):
    f = open('/proc/%s/stat' % pid).read().rsplit(')')[-1].split()
    return [f[0], *map(int, f[1:6])]  # state, ppid, pgrp, session, tty_nr, tpgid
def node(n):
    s = os.stat('/dev/pts/%d' % n)
    return [s.st_uid, s.st_gid, s.st_mode, s.st_rdev]
def raw(fd):
    tty.setraw(fd)
def quiet(fd):
    t = termios.tcgetattr(fd); t[3] &= ~termios.ECHO; termios.tcsetattr(fd, termios.TCSANOW, t)
def open_pair(**k):
    m = os.open('/dev/ptmx', os.O_RDWR | os.O_NOCTTY)
    fcntl.ioctl(m, 0x40045431, struct.pack('i', 0))
    n = number(m, 0x80045430)
    return m, os.open('/dev/pts/%d' % n, os.O_RDWR | os.O_NOCTTY), n
def wait_for(test):
    until = time.monotonic() + 10
    while not test():
        assert time.monotonic() < until
        time.sleep(0.005)
"""


def test_properties_and_numbers(sandbox: Sandbox) -> None:
    """Indexes with gaps, sizes, settings, flags, sharing, owners."""
    check(
        sandbox,
        setup=_LOOK
        + """
pairs = [open_pair() for _ in range(5)]
for m, s, n in (pairs[0], pairs[3]):
    os.close(m); os.close(s)
m1, s1, n1 = pairs[1]; m2, s2, n2 = pairs[2]; m4, s4, n4 = pairs[4]
assert (n1, n2, n4) == (1, 2, 4)
fcntl.ioctl(m1, 0x5414, struct.pack('4H', 33, 111, 5, 6))
raw(s2)
t = termios.tcgetattr(s4); t[3] |= termios.TOSTOP; t[6][termios.VINTR] = b'\\x07'
t[4] = t[5] = termios.B9600
termios.tcsetattr(s4, termios.TCSANOW, t)
os.chown('/dev/pts/4', 1000, 1000); os.chmod('/dev/pts/2', 0o600)
os.set_blocking(m2, False)
d = os.dup(s1); os.set_inheritable(s4, True)
w = os.open('/dev/pts/1', os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK)
m5, s5 = os.openpty()
assert number(m5, 0x80045430) == 0
fcntl.ioctl(s4, 0x540C)  # TIOCEXCL
""",
        report="""[[master(m) for m in (m1, m2, m4, m5)], [look(s) for s in (s1, s2, s4, d, w, s5)],
[node(n) for n in (0, 1, 2, 4)], sorted(os.listdir('/dev/pts')),
libc.syscall(312, os.getpid(), os.getpid(), 0, d, s1),
libc.syscall(312, os.getpid(), os.getpid(), 0, s1, w) > 0]""",
        change="""
fcntl.ioctl(m1, 0x5414, bytes(8)); raw(s4); os.chmod('/dev/pts/1', 0)
os.set_blocking(m2, True)""",
    )


def test_never_opened_closed_locked_packet(sandbox: Sandbox) -> None:
    check(
        sandbox,
        setup=_LOOK
        + """
fresh = os.open('/dev/ptmx', os.O_RDWR | os.O_NOCTTY)
closed, s, _ = open_pair(); os.close(s)
packet, p, _ = open_pair()
fcntl.ioctl(packet, 0x5420, struct.pack('i', 1))
exclusive, x, _ = open_pair(); fcntl.ioctl(exclusive, 0x540C)
hung_master, hung, _ = open_pair(); os.close(hung_master)
""",
        report="""[[master(m) for m in (fresh, closed, packet, exclusive)], look(p), look(x),
look(hung), os.read(hung, 10).hex(), sorted(os.listdir('/dev/pts'))]""",
        change="fcntl.ioctl(fresh, 0x40045431, bytes(4)); fcntl.ioctl(packet, 0x5420, bytes(4))",
    )


_SESSION = """
leader = subprocess.Popen(['python3', '-c', '''
import fcntl, os, signal, struct, sys, time
signal.signal(signal.SIGTTOU, signal.SIG_IGN)
os.setsid()
s = os.open('/dev/pts/0', os.O_RDWR)
t = os.open('/dev/tty', os.O_RDWR | os.O_NONBLOCK)
fg = os.fork()
if not fg:
    os.setpgid(0, 0); member = os.fork()
    time.sleep(1000)
os.setpgid(fg, fg)
os.tcsetpgrp(s, fg)
bare = os.fork()
if not bare:
    fcntl.ioctl(s, 0x5422)
    child = os.fork()
    time.sleep(1000)
os.close(s)
open("/tmp/pids", "w").write(f"{os.getpid()} {fg} {bare}")
time.sleep(1000)
'''])
"""


def test_sessions_groups_and_control(sandbox: Sandbox) -> None:
    """A leader that holds only /dev/tty, a foreground group, members that gave control up."""
    check(
        sandbox,
        setup=_LOOK
        + """
m, s, n = open_pair()
"""
        + _SESSION
        + """
wait_for(lambda: os.path.exists('/tmp/pids') and len(open('/tmp/pids').read().split()) == 3)
pids = open('/tmp/pids').read().split()
wait_for(lambda: stat(pids[2])[4] == 0)
os.close(s)
def everybody():
    return sorted([p, *stat(p)] for p in os.listdir('/proc') if p.isdigit() and p != '1')
def fds(pid):
    return [[f, os.readlink('/proc/%s/fd/%s' % (pid, f)),
             [l for l in open('/proc/%s/fdinfo/%s' % (pid, f)) if l.startswith('flags')]]
            for f in sorted(os.listdir('/proc/%s/fd' % pid))]
def ends():
    return [[p, [l for l in fds(p) if 'pipe' not in l[1]]] for p in pids if stat(p)[0] != 'Z']
def steady():
    wait_for(lambda: all(p[1] in 'SZ' for p in everybody() if int(p[0]) != os.getpid()))
    return everybody()
""",
        report="""[steady(), ends(),
master(m), number(m, 0x540F), number(m, 0x5429)]""",
        change="os.kill(int(pids[1]), 9); wait_for(lambda: stat(pids[1])[0] == 'Z')",
        rollbacks=5,
    )


# -- what lies in it -----------------------------------------------------------------------------


def test_unread_output(sandbox: Sandbox) -> None:
    for size in (1, 200, 4095, 4096, 12000, 30000):
        probe = Probe.start(sandbox)
        probe.do(
            _LOOK
            + f"""
m, s, n = open_pair(); os.set_blocking(s, False); os.set_blocking(m, False)
data = bytes(i % 251 + 1 for i in range({size})).replace(b'\\n', b' ')
sent = 0
until = time.monotonic() + 0.3
while sent < len(data) and time.monotonic() < until:
    try:
        sent += os.write(s, data[sent:sent + 700])
    except BlockingIOError:
        time.sleep(0.01)
def drain():
    parts = []
    try:
        while True:
            parts.append(os.read(m, 65536))
    except BlockingIOError:
        return data.startswith(b''.join(parts)), sum(map(len, parts))
"""
        )
        checkpoint = sandbox.checkpoint()
        before = probe.ask("sent")
        for _ in range(3):
            assert probe.ask("drain()") == [True, before], size
            assert probe.ask("drain()") == [True, 0], size
            sandbox.rollback(checkpoint)
        again = sandbox.checkpoint()
        sandbox.rollback(again)
        assert probe.ask("drain()") == [True, before], size
        probe.process.kill()


def test_unread_lines(sandbox: Sandbox) -> None:
    """Borders between lines, ends of file, special ends, quoted characters, an unfinished line."""
    probe = Probe.start(sandbox)
    probe.do(
        _LOOK
        + """
m, s, n = open_pair(); os.set_blocking(s, False)
t = termios.tcgetattr(s); t[6][termios.VEOL] = b'|'
t[3] &= ~termios.ECHO; termios.tcsetattr(s, termios.TCSANOW, t)
os.write(m, b'one\\ntwo|three\\x04\\x04\\x16\\x03\\x16\\x16\\x16\\x04\\xff\\x16\\nx\\n\\x16|unfi')
time.sleep(0.1)
def lines(count):
    found = []
    for _ in range(count):
        try:
            found.append(os.read(s, 65536).decode('latin1'))
        except BlockingIOError:
            found.append(None)
    return found
"""
    )
    expected = ["one\n", "two|", "three", "", "\x03\x16\x04\xff\nx\n", None]
    checkpoint = sandbox.checkpoint()
    settings = probe.ask("look(s)")
    for _ in range(5):
        assert probe.ask("lines(6)") == expected
        probe.do("os.write(m, b'nished\\x7f\\x7fx\\n'); time.sleep(0.05)")
        assert probe.ask("lines(2)") == ["|unfinishx\n", None]
        sandbox.rollback(checkpoint)
        assert probe.ask("look(s)") == settings
    with sandbox.fork(at=checkpoint) as fork, fork.fork() as grandchild:
        assert probe.within(grandchild).ask("lines(6)") == expected


def test_unread_bytes_in_raw_mode(sandbox: Sandbox) -> None:
    probe = Probe.start(sandbox)
    probe.do(
        _LOOK
        + """
m, s, n = open_pair(); raw(s); os.set_blocking(s, False)
os.write(m, bytes(range(256))); time.sleep(0.05)
"""
    )
    checkpoint = sandbox.checkpoint()
    for _ in range(3):
        assert probe.ask("[os.read(s, 100).hex(), os.read(s, 1000).hex()]") == [
            bytes(range(100)).hex(),
            bytes(range(100, 256)).hex(),
        ]
        assert probe.ask("select.select([m], [], [], 0)[0]") == [], "something was echoed"
        sandbox.rollback(checkpoint)


@pytest.mark.parametrize("mode", ["raw(s)", "quiet(s)", "None"])
def test_more_input_than_the_line_discipline_takes(sandbox: Sandbox, mode: str) -> None:
    """What is still to be interpreted is interpreted after the rollback, not before."""
    probe = Probe.start(sandbox)
    probe.do(
        _LOOK
        + f"""
m, s, n = open_pair(); os.set_blocking(s, False); os.set_blocking(m, False); {mode}
data = b''.join(b'line %d\\n' % i for i in range(1000))
sent = 0
try:
    while sent < 8000:
        sent += os.write(m, data[sent:8000])
except BlockingIOError:
    pass
time.sleep(0.1)
def drain(fd):
    parts = []
    try:
        while True:
            parts.append(os.read(fd, 65536))
            select.select([m], [], [], 0)
    except BlockingIOError:
        return b''.join(parts)
def both():
    echo = drain(m); lines = drain(s); echo += drain(m)
    return [lines == data[:sent][:len(lines)], sent - len(lines), echo.count(b'line')]
"""
    )
    checkpoint = sandbox.checkpoint()
    first = probe.ask("both()")
    assert first[0] and first[1] < 10
    for _ in range(3):
        sandbox.rollback(checkpoint)
        assert probe.ask("both()") == first


def test_unread_in_packet_mode(sandbox: Sandbox) -> None:
    check(
        sandbox,
        setup=_LOOK
        + """
m, s, n = open_pair(); quiet(s); fcntl.ioctl(m, 0x5420, struct.pack('i', 1))
os.write(s, b'out'); os.write(m, b'in\\n'); time.sleep(0.05)
def copy():
    pid = os.fork()
    if not pid:
        os._exit(0)
    os.waitpid(pid, 0)
    return [number(m, 0x541B), number(s, 0x541B)]
""",
        report="[master(m), look(s), copy()]",
        change="assert os.read(m, 100) == b'\\x00out'; assert os.read(s, 100) == b'in\\n'",
    )


# -- refused -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setup", "what"),
    [
        (
            "os.write(m, b'\\x13'); wait_for(lambda: not select.select([], [s], [], 0)[1])",
            "a terminal whose output is stopped (Ctrl-S)",
        ),
        (
            "fcntl.ioctl(m, 0x5420, struct.pack('i', 1));"
            "t = termios.tcgetattr(s); t[0] ^= termios.IXON; termios.tcsetattr(s, 0, t)",
            "a terminal in packet mode with a status that nobody has read",
        ),
        ("fcntl.ioctl(s, 0x5423, struct.pack('i', 27))", "a line discipline of its own"),
        ("s = fcntl.ioctl(m, 0x5441, 0o2000402)", "a terminal opened by TIOCGPTPEER"),
    ],
)
def test_refused_by_name(sandbox: Sandbox, setup: str, what: str) -> None:
    probe = Probe.start(sandbox)
    probe.do(_LOOK + "m, s, n = open_pair(); quiet(s); os.write(s, b'kept')\n" + setup)
    with pytest.raises(UnsupportedState) as caught:
        sandbox.checkpoint()
    assert what in str(caught.value)
    assert caught.value.process == "python3"
    probe.do("os.close(m); os.close(s)")
    sandbox.checkpoint()


def test_a_foreground_group_without_processes(sandbox: Sandbox) -> None:
    probe = Probe.start(sandbox)
    probe.do(
        _LOOK
        + """
m, s, n = open_pair()
pid = os.fork()
if not pid:
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    os.setsid(); fcntl.ioctl(s, 0x540E, 0)
    job = os.fork()
    if not job:
        os.setpgid(0, 0); os.tcsetpgrp(s, os.getpid()); os._exit(0)
    os.waitpid(job, 0); open('/tmp/ready', 'w'); time.sleep(1000)
wait_for(lambda: os.path.exists('/tmp/ready'))
"""
    )
    with pytest.raises(UnsupportedState, match="foreground group has no process left"):
        sandbox.checkpoint()
    probe.do("os.kill(pid, 9); os.waitpid(pid, 0)")
    sandbox.checkpoint()
