"""POSIX message queues: with a name or without, open or not."""

from __future__ import annotations

import pytest

from deltabox import Sandbox, UnsupportedState
from tests.probe import Probe, check

CALLS = """
def call(number, *arguments):
    result = libc.syscall(number, *arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
def mq_open(name, flags, mode=0o600, longest=10, size=64):
    attributes = struct.pack('8q', 0, longest, size, 0, 0, 0, 0, 0)
    return call(240, name.encode(), flags, mode, attributes)
def mq_unlink(name):
    call(241, name.encode())
def send(fd, text, priority=0):
    call(242, fd, text.encode(), len(text), priority, None)
def receive(fd):
    buffer, priority = ctypes.create_string_buffer(9000), ctypes.c_uint()
    size = call(243, fd, buffer, 9000, ctypes.byref(priority), None)
    return [buffer.raw[:size].decode(), priority.value]
def attributes(fd):
    out = ctypes.create_string_buffer(64)
    call(245, fd, None, out)
    return struct.unpack_from('4q', out)
def contents(name):
    fd = mq_open(name, os.O_RDWR | os.O_NONBLOCK)
    return drained(fd)
def drained(fd):
    # what is in a queue, by a copy of it: it is put back
    found = []
    try:
        while True:
            found.append(receive(fd))
    except BlockingIOError:
        pass
    for text, priority in found:
        send(fd, text, priority)
    return found
def shown(fd):
    info = os.fstat(fd)
    facts = [l for l in open('/proc/self/fdinfo/%d' % fd) if l.startswith(('pos', 'flags'))]
    return [os.readlink('/proc/self/fd/%d' % fd), facts, attributes(fd), info.st_mode, info.st_uid,
            info.st_gid, info.st_nlink]
def listed():
    out = {}
    for name in os.listdir('/dev/mqueue'):
        info = os.stat('/dev/mqueue/' + name)
        out[name] = [info.st_mode, info.st_uid, info.st_gid, open('/dev/mqueue/' + name).read()]
    return out
"""


def test_queues_and_their_descriptors(sandbox: Sandbox) -> None:
    check(
        sandbox,
        setup=CALLS
        + """
a = mq_open('a', os.O_CREAT | os.O_RDWR | os.O_NONBLOCK, 0o640, 7, 100)
for text, priority in [('one', 1), ('low', 0), ('two', 1), ('high', 32767), ('', 1), ('three', 1)]:
    send(a, text, priority)
twin = os.dup(a)
reader = mq_open('a', os.O_RDONLY)
by_path = os.open('/dev/mqueue/a', os.O_WRONLY)
os.close(mq_open('nobody has it open', os.O_CREAT | os.O_RDWR, 0o200))
os.chown('/dev/mqueue/nobody has it open', 1000, 1001)
empty = mq_open('empty', os.O_CREAT | os.O_WRONLY | os.O_EXCL)
os.set_inheritable(empty, True)
gone = mq_open('again', os.O_CREAT | os.O_RDWR | os.O_NONBLOCK)
send(gone, 'of the first')
mq_unlink('again')
again = mq_open('again', os.O_CREAT | os.O_RDWR | os.O_NONBLOCK)
send(again, 'of the second')
""",
        report="""[[shown(fd) for fd in (a, twin, reader, by_path, empty, gone, again)], listed(),
drained(a), drained(gone), contents('again'), os.get_inheritable(empty), os.get_inheritable(a)]""",
        change="""
receive(a); send(gone, 'x', 5); mq_unlink('empty'); mq_unlink('nobody has it open')
os.close(mq_open('new', os.O_CREAT)); fcntl.fcntl(reader, fcntl.F_SETFL, os.O_NONBLOCK)
""",
    )


def test_a_shared_description_stays_shared(sandbox: Sandbox) -> None:
    probe = Probe.start(sandbox)
    probe.do(
        CALLS
        + """
q = mq_open('q', os.O_CREAT | os.O_RDWR)
order, reply = os.pipe(), os.pipe()
if not os.fork():
    while os.read(order[0], 1):
        os.write(reply[1], b'%d' % bool(fcntl.fcntl(q, fcntl.F_GETFL) & os.O_NONBLOCK))
    os._exit(0)
os.close(order[0])
def others():
    os.write(order[1], b'?')
    return os.read(reply[0], 1)
assert others() == b'0'
"""
    )
    checkpoint = sandbox.checkpoint()
    for _ in range(2):
        sandbox.rollback(checkpoint)
        probe.do("assert others() == b'0'; fcntl.fcntl(q, fcntl.F_SETFL, os.O_NONBLOCK)")
        probe.do("assert others() == b'1'")


def test_times_and_limits(sandbox: Sandbox) -> None:
    probe = Probe.start(sandbox)
    probe.do(
        CALLS
        + """
def limit(name, value=None):
    with open('/proc/sys/fs/mqueue/' + name, 'r' if value is None else 'w') as file:
        return int(file.read()) if value is None else file.write(str(value))
limit('msg_max', 40); limit('msgsize_max', 9000)
big = mq_open('big', os.O_CREAT | os.O_RDWR, 0o600, 40, 9000)
send(big, 'x' * 9000, 3)
limit('msg_max', 11); limit('queues_max', 300)
os.utime('/dev/mqueue/big', ns=(10 ** 18, 2 * 10 ** 18 + 5))
"""
    )
    look = """[[limit(n) for n in sorted(os.listdir('/proc/sys/fs/mqueue'))], attributes(big),
        [os.stat('/dev/mqueue/big').st_mtime_ns, os.stat('/dev/mqueue/big').st_atime_ns]]"""
    before = probe.ask(look)
    assert before[0] == [10, 11, 8192, 9000, 300]
    checkpoint = sandbox.checkpoint()
    assert probe.ask(look) == before
    for _ in range(2):
        probe.do("limit('msg_max', 12); receive(big)")
        sandbox.rollback(checkpoint)
        assert probe.ask(look) == before
        with pytest.raises(AssertionError, match="Invalid argument"):
            probe.do("mq_open('other', os.O_CREAT | os.O_RDWR, 0o600, 12, 64)")


def test_who_waits_goes_on_waiting(sandbox: Sandbox) -> None:
    """One for a message, one for room."""
    waiting = """
import sys
exec(sys.argv[1])
if sys.argv[2] == 'receive':
    q = mq_open('in', os.O_CREAT | os.O_RDWR)
    print('waits', flush=True)
    print(*receive(q), flush=True)
else:
    q = mq_open('out', os.O_CREAT | os.O_RDWR, 0o600, 1)
    send(q, 'first')
    print('waits', flush=True)
    send(q, 'second')
    print('sent', flush=True)
"""
    calls = "import ctypes, os, struct\nlibc = ctypes.CDLL(None, use_errno=True)\n" + CALLS
    processes = [
        sandbox.spawn(["python3", "-c", waiting, calls, role]) for role in ("receive", "send")
    ]
    for process in processes:
        assert process.stdout.readline(timeout=20) == "waits\n"
    probe = Probe.start(sandbox)
    probe.do(CALLS)
    checkpoint = sandbox.checkpoint()
    sandbox.checkpoint()
    for turn in range(3):
        if turn:
            sandbox.rollback(checkpoint)
        probe.do("send(mq_open('in', os.O_RDWR), 'hello', 4)")
        assert processes[0].stdout.readline(timeout=10) == "hello 4\n"
        assert probe.ask("receive(mq_open('out', os.O_RDWR))") == ["first", 0]
        assert processes[1].stdout.readline(timeout=10) == "sent\n"
        assert probe.ask("receive(mq_open('out', os.O_RDWR))") == ["second", 0]


def test_looking_leaves_no_trace(sandbox: Sandbox) -> None:
    """An empty queue has the times that its users have left, after any number of checkpoints."""
    probe = Probe.start(sandbox)
    probe.do(CALLS + "q = mq_open('empty', os.O_CREAT | os.O_RDWR)\n")
    probe.do("os.utime(q, (1e9, 1e9))")
    for _ in range(3):
        checkpoint = sandbox.checkpoint()
        assert probe.ask("[os.fstat(q).st_atime, os.fstat(q).st_mtime]") == [1e9, 1e9]
    sandbox.rollback(checkpoint)
    assert probe.ask("[os.fstat(q).st_atime, os.fstat(q).st_mtime]") == [1e9, 1e9]


def test_a_notification_is_refused(sandbox: Sandbox) -> None:
    probe = Probe.start(sandbox)
    probe.do(
        CALLS
        + """
q = mq_open('told', os.O_CREAT | os.O_RDWR | os.O_NONBLOCK)
event = struct.pack('<QiiI', 0, signal.SIGUSR1, 0, 0).ljust(64, b'\\0')
signal.signal(signal.SIGUSR1, lambda *_: fired.append(1))
fired = []
call(244, q, event)
"""
    )
    with pytest.raises(UnsupportedState, match=r"message queue /told, which notifies a process"):
        sandbox.checkpoint()
    assert probe.ask("fired") == []
    probe.do("send(q, 'x')")
    assert probe.ask("fired") == [1]
    sandbox.checkpoint()


def test_many_copies_of_a_large_queue(sandbox: Sandbox) -> None:
    """The kernel lets one user have nine queues of the default size, everywhere together."""
    probe = Probe.start(sandbox)
    probe.do(
        CALLS
        + """
for n in range(3):
    send(mq_open('q%d' % n, os.O_CREAT | os.O_RDWR, 0o600, 10, 8192), 'kept %d' % n)
"""
    )
    checkpoint = sandbox.checkpoint()
    for _ in range(20):
        sandbox.rollback(checkpoint)
    forks = sandbox.fork_many(6, at=checkpoint)
    for one in (probe, *map(probe.within, forks)):
        assert one.ask("receive(mq_open('q2', os.O_RDWR))") == ["kept 2", 0]
    for fork in forks:
        fork.close()


def test_more_than_could_come_back_is_refused(sandbox: Sandbox) -> None:
    probe = Probe.start(sandbox)
    probe.do(
        CALLS
        + """
queues = []
for n in range(5):
    queues.append(mq_open('q', os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600, 10, 8192))
    send(queues[-1], 'kept %d' % n)
    mq_unlink('q')
"""
    )
    with pytest.raises(UnsupportedState, match="more room than RLIMIT_MSGQUEUE"):
        sandbox.checkpoint()
    assert probe.ask("[receive(q)[0] for q in queues]") == [f"kept {n}" for n in range(5)]
    probe.do("os.close(queues.pop())")
    sandbox.checkpoint()
