"""System V IPC: segments, semaphores and message queues of the sandbox's namespace."""

from __future__ import annotations

import pytest

from deltabox import Sandbox, UnsupportedState
from tests.probe import Probe, check

_HELP = """
libc.shmat.restype = ctypes.c_void_p
libc.shmat.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int]
libc.semop.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t]
libc.msgsnd.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int]
libc.msgrcv.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_long, ctypes.c_int]
CREATE = 0o1000 | 0o2000
def well(result):
    assert result != -1, os.strerror(ctypes.get_errno())
    return result
def attach(number, flags=0, at=None):
    return well(libc.shmat(number, at, flags))
def detach(at):
    well(libc.shmdt(ctypes.c_void_p(at)))
def maps():
    lines = [l.split(None, 5) for l in open('/proc/self/maps')]
    return sorted([l[0], l[1], l[2], l[4], l[5].strip()] for l in lines if 'SYSV' in l[-1])
def listed(kind, *names):
    head, *lines = [l.split() for l in open('/proc/sysvipc/' + kind)]
    return [[line[head.index(n)] for n in names] for line in lines]
OWNED = ('key', 'perms', 'uid', 'gid', 'cuid', 'cgid')
def change(number, which, change, flags=0):
    return libc.semop(number, struct.pack('<Hhh', which, change, flags), 1)
def send(number, kind, text, flags=0):
    return libc.msgsnd(number, struct.pack('<q', kind) + text, len(text), flags)
def receive(number, kind=0, flags=0o4000):
    buffer = ctypes.create_string_buffer(8 + 8192)
    size = libc.msgrcv(number, buffer, 8192, kind, flags)
    if size >= 0:
        return [struct.unpack('<q', buffer.raw[:8])[0], buffer.raw[8:8 + size].decode()]
"""


def test_segments_shared_by_parent_and_child(sandbox: Sandbox) -> None:
    check(
        sandbox,
        setup=_HELP
        + """
number = well(libc.shmget(0x1234, 300000, CREATE | 0o640))
private = well(libc.shmget(0, 4096, CREATE | 0o600))
nobody_has = well(libc.shmget(0x77, 8192, CREATE | 0o600))
at = attach(private); ctypes.memmove(at, b'private', 7)
other = attach(nobody_has); ctypes.memmove(other + 5000, b'left', 4); detach(other)
whole = attach(number)
ctypes.memmove(whole, b'begin', 5); ctypes.memmove(whole + 299990, b'the end', 7)
reads = attach(number, 0o10000)
libc.mprotect(ctypes.c_void_p(whole + 8192), 4096, 1)
doomed = well(libc.shmget(0, 4096, CREATE | 0o600)); last = attach(doomed)
ctypes.memmove(last, b'doomed', 6); well(libc.shmctl(doomed, 0, None))
ask_r, ask_w = os.pipe(); r, w = os.pipe()
if not os.fork():
    while True:
        if os.read(ask_r, 1) == b'+':
            ctypes.memmove(whole, b'child', 5)
        os.write(w, ctypes.string_at(whole, 5) + ctypes.string_at(reads + 299990, 7))
def child(command):
    os.write(ask_w, command)
    return os.read(r, 12).decode()
""",
        report="[maps(), child(b'?'), ctypes.string_at(at, 7).decode(),"
        " ctypes.string_at(last, 6).decode(), listed('shm', 'shmid', 'size', 'nattch', *OWNED)]",
        change="child(b'+'); ctypes.memmove(at, b'changed', 7);"
        " assert ctypes.string_at(reads, 5) == b'child'",
    )


def test_what_nobody_has_attached(sandbox: Sandbox) -> None:
    probe = Probe.start(sandbox)
    probe.do(
        _HELP
        + """
number = well(libc.shmget(0x77, 8192, CREATE | 0o600))
at = attach(number); ctypes.memmove(at + 5000, b'left', 4); detach(at)
def look():
    at = attach(number); text = ctypes.string_at(at + 5000, 4).decode(); detach(at)
    return text
"""
    )
    checkpoint = sandbox.checkpoint()
    for _ in range(3):
        probe.do("at = attach(number); ctypes.memmove(at + 5000, b'else', 4)")
        sandbox.rollback(checkpoint)
        assert probe.ask("look()") == "left"
    probe.do("well(libc.shmctl(number, 0, None))")
    assert sandbox.checkpoint()
    sandbox.rollback(checkpoint)
    assert probe.ask("look()") == "left"


def test_another_owner(sandbox: Sandbox) -> None:
    """Made by an unprivileged user, for whom others have no rights."""
    check(
        sandbox,
        user="nobody",
        setup=_HELP
        + """
number = well(libc.shmget(5, 4096, CREATE | 0o600)); at = attach(number)
ctypes.memmove(at, b'mine', 4)
sem = well(libc.semget(6, 2, CREATE | 0o600)); msg = well(libc.msgget(7, CREATE | 0o600))
send(msg, 1, b'note')
""",
        report="[maps(), ctypes.string_at(at, 4).decode()]"
        " + [listed(*what, *OWNED) for what in (('shm', 'nattch'), ('sem', 'nsems'),"
        " ('msg', 'qnum'))]",
        change="ctypes.memmove(at, b'your', 4); change(sem, 0, 1)",
    )


def test_semaphores(sandbox: Sandbox) -> None:
    check(
        sandbox,
        setup=_HELP
        + """
sem = well(libc.semget(0x99, 3, CREATE | 0o660)); unused = well(libc.semget(0, 1, CREATE | 0o600))
full = well(libc.semget(0, 1, CREATE | 0o600)); well(change(full, 0, 32767))
well(change(sem, 0, 5)); well(change(sem, 2, 7))
r, w = os.pipe()
if not os.fork():
    while True:
        well(change(sem, 1, -1))
        os.write(w, b'x')
def values():
    return [[libc.semctl(sem, n, 12) for n in range(3)], libc.semctl(full, 0, 12)]
def wake():
    well(change(sem, 1, 1))
    return os.read(r, 1).decode()
def used():
    return [[n, t != '0'] for n, t in listed('sem', 'semid', 'otime')]
""",
        report="[values(), wake(), used(), listed('sem', 'semid', 'nsems', *OWNED)]",
        change="change(sem, 0, 1); change(full, 0, -1)",
    )


def test_message_queues(sandbox: Sandbox) -> None:
    check(
        sandbox,
        setup=_HELP
        + """
msg = well(libc.msgget(0x55, CREATE | 0o640)); empty = well(libc.msgget(0, CREATE | 0o600))
for kind, text in ((3, b'three'), (1, b''), (2, b'x' * 5000), (3, b'last')):
    well(send(msg, kind, text))
r, w = os.pipe()
if not os.fork():
    while True:
        os.write(w, receive(empty, 0, 0)[1].encode())
def all():
    found = []
    while (one := receive(msg)) is not None:
        found.append(one)
    for kind, text in found:
        send(msg, kind, text.encode())
    return [[kind, len(text), text[:5]] for kind, text in found]
def through(text):
    well(send(empty, 9, text))
    return os.read(r, 100).decode()
""",
        report="[all(), through(b'hello'), listed('msg', 'msqid', 'cbytes', 'qnum', *OWNED)]",
        change="receive(msg, 3)",
    )


def test_debts_are_refused(sandbox: Sandbox) -> None:
    probe = Probe.start(sandbox)
    probe.do(_HELP + "sem = well(libc.semget(1, 1, CREATE | 0o600)); change(sem, 0, 1, 0o10000)")
    with pytest.raises(UnsupportedState, match=r"pid \d+ \(python3\) may owe .*SEM_UNDO"):
        sandbox.checkpoint()
    probe.do("libc.semctl(sem, 0, 0)")
    assert sandbox.checkpoint()


def test_a_part_is_refused(sandbox: Sandbox) -> None:
    probe = Probe.start(sandbox)
    probe.do(_HELP + "number = well(libc.shmget(1, 8192, CREATE | 0o600)); at = attach(number)")
    probe.do("libc.munmap(ctypes.c_void_p(at), 4096)")
    with pytest.raises(UnsupportedState, match="a part of a System V segment"):
        sandbox.checkpoint()
    probe.do("detach(at)")
    assert sandbox.checkpoint()
