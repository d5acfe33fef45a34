"""Locks on files: flock(2), fcntl(2) by process and by description, and what waits for them."""

from __future__ import annotations

import pytest

from deltabox import Sandbox, UnsupportedState
from tests.probe import Probe, check

_TOOLS = """
F_OFD_GETLK, F_OFD_SETLK = 36, 37
def flock_of(kind, start, length):
    return struct.pack('hh4xqqi4x', kind, 0, start, length, 0)
def stranger(path, code):
    'What a process that holds nothing finds out about the file.'
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        fd = os.open(path, os.O_RDWR)
        try:
            answer = eval(code, globals(), {'fd': fd})
        except OSError as error:
            answer = error.errno
        os.write(writer, json.dumps(answer).encode())
        os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    answer = json.loads(os.read(reader, 999) or b'null')
    os.close(reader)
    return answer
def held(fd):
    'The conflicting lock, as F_GETLK tells each byte range.'
    out = []
    for start in range(0, 60, 5):
        for kind in (fcntl.F_RDLCK, fcntl.F_WRLCK):
            got = struct.unpack('hh4xqqi4x', fcntl.fcntl(fd, fcntl.F_GETLK,
                                                          flock_of(kind, start, 5)))
            out.append([got[0], got[2], got[3], got[4]])
    return out
def lines():
    'All locks of this process as its own fdinfo tells them.'
    out = []
    for fd in range(3, 40):
        try:
            text = open('/proc/self/fdinfo/%d' % fd).read()
        except OSError:
            continue
        for line in text.splitlines():
            if line.startswith('lock:'):
                words = line.split()
                out.append([fd, words[2], words[4], *words[7:]])
    return out
def locked(fd):
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(fd, fcntl.LOCK_UN)
        return False
    except BlockingIOError:
        return True
"""


def test_flock_belongs_to_the_description(sandbox: Sandbox) -> None:
    check(
        sandbox,
        setup=_TOOLS
        + """
f = os.open('/root/l', os.O_RDWR | os.O_CREAT)
same = os.dup(f)
other = os.open('/root/l', os.O_RDWR)
fcntl.flock(f, fcntl.LOCK_EX)
shared = [os.open('/root/m', os.O_RDWR | os.O_CREAT) for _ in range(2)]
for s in shared: fcntl.flock(s, fcntl.LOCK_SH)
d = os.open('/srv', os.O_RDONLY)
fcntl.flock(d, fcntl.LOCK_EX)
""",
        report="""[lines(), locked(other), stranger('/root/l', 'locked(fd)'),
stranger('/root/m', 'locked(fd)'), stranger('/root/m', 'fcntl.flock(fd, fcntl.LOCK_SH)')]""",
        change="fcntl.flock(same, fcntl.LOCK_UN); fcntl.flock(shared[0], fcntl.LOCK_UN)",
    )


def test_ranges_belong_to_the_process(sandbox: Sandbox) -> None:
    check(
        sandbox,
        setup=_TOOLS
        + """
f = os.open('/root/l', os.O_RDWR | os.O_CREAT)
copy = os.dup(f)
g = os.open('/root/l', os.O_RDONLY)
fcntl.lockf(f, fcntl.LOCK_EX, 10, 5)
fcntl.lockf(g, fcntl.LOCK_SH, 5, 20)
fcntl.lockf(f, fcntl.LOCK_EX, 0, 1 << 33)
fcntl.lockf(f, fcntl.LOCK_SH, 3, 40)
""",
        report="[lines(), stranger('/root/l', 'held(fd)')]",
        change="fcntl.lockf(f, fcntl.LOCK_UN, 10, 5)",
    )


def test_locks_of_several_processes_on_one_file(sandbox: Sandbox) -> None:
    check(
        sandbox,
        setup=_TOOLS
        + """
f = os.open('/root/l', os.O_RDWR | os.O_CREAT)
children = []
for n in range(3):
    ready, tell = os.pipe()
    child = os.fork()
    if not child:
        fcntl.lockf(f, fcntl.LOCK_EX, 5, 10 * n)
        fcntl.lockf(f, fcntl.LOCK_SH, 2, 35 + 5 * n)
        os.write(tell, b'x')
        while True: signal.pause()
    os.read(ready, 1); os.close(ready); os.close(tell)
    children.append(child)
def lift():
    os.kill(children[1], 9)
    os.waitpid(children[1], 0)
""",
        report="[held(f), children]",
        change="lift()",
    )


def test_ranges_of_a_description(sandbox: Sandbox) -> None:
    check(
        sandbox,
        setup=_TOOLS
        + """
f = os.open('/root/l', os.O_RDWR | os.O_CREAT)
g = os.open('/root/l', os.O_RDWR)
fcntl.fcntl(f, F_OFD_SETLK, flock_of(fcntl.F_WRLCK, 10, 5))
fcntl.fcntl(g, F_OFD_SETLK, flock_of(fcntl.F_RDLCK, 30, 0))
child = os.fork()
if not child:
    while True: signal.pause()
""",
        report="[lines(), held(f), stranger('/root/l', 'held(fd)')]",
        change="fcntl.fcntl(f, F_OFD_SETLK, flock_of(fcntl.F_UNLCK, 0, 0))",
    )


def test_a_process_that_waits_for_a_lock_gets_it(sandbox: Sandbox) -> None:
    probe = Probe.start(sandbox)
    probe.do(
        _TOOLS
        + """
f = os.open('/root/l', os.O_RDWR | os.O_CREAT)
fcntl.flock(f, fcntl.LOCK_EX)
fcntl.lockf(f, fcntl.LOCK_EX, 10, 0)
reader, writer = os.pipe()
for n in range(2):
    if not os.fork():
        mine = os.open('/root/l', os.O_RDWR)
        if n: fcntl.flock(mine, fcntl.LOCK_EX)
        else: fcntl.lockf(mine, fcntl.LOCK_EX, 10, 5)
        os.write(writer, b'%d' % n)
        os._exit(0)
time.sleep(0.2)
def got():
    return select.select([reader], [], [], 0.2)[0] and os.read(reader, 9).decode()
"""
    )
    checkpoint = sandbox.checkpoint()
    for _ in range(3):
        assert probe.ask("got()") == []
        probe.do("fcntl.flock(f, fcntl.LOCK_UN)")
        assert probe.ask("got()") == "1"
        probe.do("fcntl.lockf(f, fcntl.LOCK_UN, 10, 0)")
        assert probe.ask("got()") == "0"
        sandbox.rollback(checkpoint)
    with sandbox.fork(at=checkpoint) as fork:
        copy = probe.within(fork)
        copy.do("fcntl.flock(f, fcntl.LOCK_UN)")
        assert copy.ask("got()") == "1"
        assert probe.ask("got()") == []


def test_sqlite_in_a_transaction(sandbox: Sandbox) -> None:
    check(
        sandbox,
        setup="""
import sqlite3
db = sqlite3.connect('/root/db', isolation_level=None, timeout=0)
db.execute('create table t (x)')
db.execute('begin immediate'); db.execute('insert into t values (1)')
other = sqlite3.connect('/root/db', isolation_level=None, timeout=0)
def busy():
    try:
        other.execute('begin immediate'); other.execute('rollback'); return False
    except sqlite3.OperationalError as error:
        return str(error)
""",
        report="[db.in_transaction, db.execute('select * from t').fetchall(), busy()]",
        change="db.execute('commit')",
    )


def test_a_lease_is_refused_by_name(sandbox: Sandbox) -> None:
    probe = Probe.start(sandbox)
    probe.do("f = os.open('/root/l', os.O_RDWR | os.O_CREAT)")
    probe.do("fcntl.fcntl(f, fcntl.F_SETLEASE, fcntl.F_WRLCK)")
    with pytest.raises(UnsupportedState, match="/root/l, with a lease"):
        sandbox.checkpoint()
    probe.do("fcntl.fcntl(f, fcntl.F_SETLEASE, fcntl.F_UNLCK)")
    sandbox.checkpoint()
