"""A tree at rest is captured before it is asked for, and once for several checkpoints.

Most tests here have a keeper of their own that believes what it believes (DELTABOX_VERIFY=0); in
the others' keeper such a checkpoint is taken all the same and compared.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from deltabox import Checkpoint, CommandTimeout, KeepLast, Process, Sandbox
from deltabox.keeper.box import Box
from tests.api.test_growth import until
from tests.conftest import keeper_of_its_own
from tests.probe import Probe


@pytest.fixture(scope="module")
def believing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A keeper of its own, which does not verify."""
    with keeper_of_its_own(tmp_path_factory.mktemp("believing"), DELTABOX_VERIFY="0"):
        yield


@pytest.fixture
def box(believing: None) -> Iterator[Sandbox]:
    with Sandbox.create() as sandbox:
        yield sandbox


def _shared(checkpoint: Checkpoint) -> bool:
    return checkpoint.stats.pause_ms == 0


def _asleep(sandbox: Sandbox) -> bool:
    """Whether all of its processes wait, at last."""
    return until(lambda: all(process.state == "S" for process in sandbox.processes()))


def _settled(sandbox: Sandbox) -> Checkpoint:
    """A checkpoint whose state the tree is seen to be in still."""
    for _ in range(50):
        if _shared(found := sandbox.checkpoint()):
            return found
        time.sleep(0.02)
    raise AssertionError("the tree does not come to rest")


def test_what_is_shared_is_whole(box: Sandbox) -> None:
    """Rollbacks and forks of such states, when the first of them is gone, and the fiftieth."""
    probe, shell = Probe.start(box), box.shell()
    shell.run("x=1")
    probe.do("import zlib; x = bytearray(os.urandom(1 << 20)); total = zlib.crc32(x)")
    first = box.checkpoint()
    before = _settled(box)
    memory = box.usage.memory
    twins = [box.checkpoint() for _ in range(50)]
    assert all(map(_shared, twins))
    probe.ask(
        "1"
    )  # after it the next template is fed to the end, and no longer counts as a whole one
    assert until(lambda: box.usage.memory < memory + (1 << 20))
    assert [twin.parent for twin in twins] == [before, *twins[:-1]]
    assert box.diff(twins[0], twins[-1]) == []
    shell.run("x=2; echo 2 > /tmp/n")
    probe.do("x[5000:5005] = b'other'")
    after = box.checkpoint()
    assert not _shared(after)
    before.delete()
    first.delete()
    for twin in twins[:-2]:
        twin.delete()
    for target in (*twins[-2:], after, twins[-1]):
        box.rollback(target)
        assert shell.run("echo $x").stdout == ("2\n" if target is after else "1\n")
        assert box.files.exists("/tmp/n") is (target is after)
        assert probe.ask("zlib.crc32(x) == total") is (target is not after)
        with box.fork() as fork:
            copy = probe.within(fork)
            assert copy.ask("zlib.crc32(x) == total") is (target is not after)
            shared = _settled(fork)
            copy.do("total += 1")
            fork.rollback(shared)
            assert copy.ask("zlib.crc32(x) == total") is (target is not after)


def _foreseen(sandbox: Sandbox) -> Checkpoint:
    """A checkpoint whose state had been captured before."""
    for _ in range(20):
        sandbox.run(["true"])  # its end is what sets the work ahead going
        time.sleep(0.2)
        if (found := sandbox.checkpoint()).stats.ahead_ms:
            assert _shared(found)
            return found
    raise AssertionError("nothing is captured ahead")


def test_what_is_foreseen_is_whole(box: Sandbox) -> None:
    """States that were captured before they were asked for, and others that never were."""
    probe, shell = Probe.start(box), box.shell()
    box.checkpoint()
    known: list[tuple[Checkpoint, int]] = []
    for number in range(12):
        probe.do(f"x = {number}; open('/tmp/n', 'w').write('{number}')")
        shell.run(f"x={number}")
        if number % 3 == 1:
            time.sleep(0.15)  # captured for nothing
            continue
        known.append((_foreseen(box), number))
        if number % 4 == 0:
            box.rollback(known[-1][0])
    shell.run("x=x")
    for checkpoint, number in (*known, *reversed(known)):
        box.rollback(checkpoint)
        assert probe.ask("[x, open('/tmp/n').read()]") == [number, str(number)]
        assert shell.run("echo $x").stdout == f"{number}\n"
        with box.fork() as fork:
            assert probe.within(fork).ask("x") == number


@pytest.mark.parametrize("how", ["checkpoint", "rollback", "fork"])
def test_one_that_is_there_is_given_again(box: Sandbox, how: str) -> None:
    """With `reuse`, as long as nothing happens; reading files is nothing."""
    probe = Probe.start(box)
    shell = box.shell()
    shell.run("x=1")
    probe.do("n = 1")
    here = _settled(box)
    sandbox = box
    if how == "rollback":
        probe.do("n = 2")
        box.rollback(here)
    elif how == "fork":
        sandbox = box.fork(at=here)

    def given(last: Checkpoint) -> bool:
        return sandbox.checkpoint(reuse=True) == last

    try:
        assert _asleep(sandbox) and given(here)
        sandbox.files.read_text("/etc/passwd")
        assert sandbox.files.exists("/root") and sandbox.files.list("/")
        assert sandbox.processes() and given(here)
        own, live = probe.within(sandbox), sandbox.counterpart(shell)
        doings: list[Callable[[], object]] = [
            lambda: sandbox.run("true"),
            lambda: live.run("true"),
            lambda: own.do("n += 1"),
            lambda: sandbox.files.write_text("/root/a", ""),
            lambda: sandbox.files.remove("/root/a"),
            lambda: own.process.kill(18),
            lambda: sandbox.rollback(here),
        ]
        for do in doings:
            last = sandbox.head
            assert last is not None
            do()
            if do is doings[-1]:
                assert _asleep(sandbox) and given(here)
            else:
                assert not given(last)
        assert own.ask("n") == 1
    finally:
        if sandbox is not box:
            sandbox.close()


@pytest.mark.parametrize(
    "program", ["while True: n += 1", "time.sleep(1000)", "while True: time.sleep(0.01)"]
)
def test_what_goes_on_by_itself_is_never_given_again(box: Sandbox, program: str) -> None:
    process = box.spawn(["python3", "-c", f"import time\nn = 0\nprint(flush=True)\n{program}"])
    process.stdout.readline()
    here = box.checkpoint()
    for _ in range(5):
        box.rollback(here)
        assert box.checkpoint(reuse=True) != here
        time.sleep(0.02)


def test_what_only_the_engine_remembers_is_not_given_again(box: Sandbox) -> None:
    """Output that has been read, somebody who waits, a registration: they belong to the state."""
    process = box.spawn(["python3", "-c", "print('one\\ntwo', flush=True); input()"])
    assert process.stdout.readline(timeout=20) == "one\n"
    here = _settled(box)
    assert _asleep(box) and box.checkpoint(reuse=True) == here
    for how in ("checkpoint", "rollback"):
        if how == "rollback":
            box.rollback(here)
            assert _asleep(box) and box.checkpoint(reuse=True) == here
        assert process.stdout.readline() == "two\n"
        assert box.checkpoint(reuse=True) != here, "the line would come twice"
    box.rollback(here)
    with ThreadPoolExecutor(1) as pool:
        line = pool.submit(process.stdout.read_until, "three", 20)
        try:
            assert until(lambda: box.checkpoint(reuse=True) != here), "nobody seems to wait"
        finally:
            process.kill()
        with pytest.raises(EOFError):
            line.result()
    box.rollback(here)
    box.on_fork(process, 10)
    assert box.checkpoint(reuse=True) != here


def test_one_that_is_there_has_its_name(box: Sandbox) -> None:
    with pytest.raises(ValueError, match="name"):
        box.checkpoint("again", reuse=True)


def test_captured_in_vain(box: Sandbox) -> None:
    """A hundred times: neither memory nor generations of templates grow, nor what a fork takes."""
    probe = Probe.start(box)
    probe.do("x = bytearray(os.urandom(1 << 20) * 8)")
    home = box.checkpoint("home")
    before = box.usage.memory
    for number in range(100):
        probe.do(f"x[{number} << 12] = 1; y = {number}")
        time.sleep(0.06)
    assert box.usage.memory < before + (24 << 20)
    last = box.checkpoint()
    box.rollback(home)
    box.rollback(last)
    assert probe.ask("y") == 99
    last.delete()
    box.rollback(home)


def test_a_large_state_is_not_captured_in_vain_for_ever(box: Sandbox) -> None:
    probe = Probe.start(box)
    probe.do("x = bytearray(os.urandom(1 << 20)) * 140")
    box.checkpoint()
    for number in range(6):
        probe.do(f"x[{number} << 20] = 1")
        time.sleep(0.4)
    assert not box.checkpoint().stats.ahead_ms
    assert _foreseen(box)  # but once in a while it is tried again


def test_few_are_kept(box: Sandbox) -> None:
    """What a policy lets go of takes nothing from those that share its state."""
    box.keep(KeepLast(2))
    probe = Probe.start(box)
    probe.do("x = 1")
    _settled(box)
    for _ in range(20):
        last = box.checkpoint()
    for _ in range(5):  # meanwhile those before it are freed
        probe.do("x = 2")
        box.rollback(last)
        assert probe.ask("x") == 1


def test_believed_to_be_still(box: Sandbox) -> None:
    """A program that only computes when it is asked; what others are still for is not asked."""
    probe, others = Probe.start(box), [Probe.start(box) for _ in range(3)]
    known: list[tuple[Checkpoint, int]] = []
    chance = random.Random(3)
    probe.do("x = 0")
    for number in range(1, 25):
        probe.do(f"x = {number}")
        if number % 6 == 0:
            others[number % 3].do(f"x = {number}")
        time.sleep(chance.choice((0, 0.02, 0.15)))
        known.append((box.checkpoint(), number))
        if number % 5 == 0:
            checkpoint, value = chance.choice(known)
            box.rollback(checkpoint)
            assert probe.ask("x") == value
            with box.fork(at=known[-1][0]) as fork:
                assert probe.within(fork).ask("x") == number
    for checkpoint, value in known:
        box.rollback(checkpoint)
        assert probe.ask("x") == value


# What happens between two checkpoints while everybody sleeps, and how to see it afterwards.
_WAITING = """
import os, signal, struct, sys
got = []
signal.signal(signal.SIGUSR1, lambda *_: got.append(1))
signal.signal(signal.SIGUSR2, lambda *_: None)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
print("ready", flush=True)
signal.pause()
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])
print(got, os.path.exists("/root/new"), flush=True)
print(repr(sys.stdin.readline()), flush=True)
"""


def _waiting(sandbox: Sandbox) -> Process:
    process = sandbox.spawn(["python3", "-c", _WAITING])
    assert process.stdout.readline() == "ready\n"
    return process


def _woken(process: Process) -> str:
    """Its next line. A signal that comes before a restored call is made again does not end it."""
    while True:
        process.kill(12)
        try:
            return process.stdout.readline(timeout=1)
        except CommandTimeout:
            continue


@pytest.mark.parametrize("what", ["signal", "file", "input", "nothing"])
def test_what_we_do_ourselves_is_noticed(box: Sandbox, what: str) -> None:
    """No thread moves for it, but it is a part of the state."""
    process = _waiting(box)
    _settled(box)
    if what == "signal":
        process.kill(10)
    elif what == "file":
        box.files.write("/root/new", b"")
    elif what == "input":
        process.stdin.write("text\n")
    after = box.checkpoint()
    assert _shared(after) is (what == "nothing")
    box.rollback(after)
    expected = "[1]" if what == "signal" else "[]"
    assert _woken(process) == f"{expected} {what == 'file'}\n"
    if what == "input":
        assert process.stdout.readline() == "'text\\n'\n"


@pytest.mark.parametrize(
    "program",
    [
        "time.sleep(1000)",
        "threading.Event().wait(1000)",
        "select.poll().poll(1000_000)",
        "select.select([], [], [], 1000)",
        "select.epoll().poll(1000)",
        "signal.setitimer(signal.ITIMER_REAL, 1000); signal.pause()",
        "signal.sigtimedwait([signal.SIGUSR1], 1000)",
        "libc = ctypes.CDLL(None); fd = libc.timerfd_create(1, 0); "
        "libc.timerfd_settime(fd, 0, (ctypes.c_long * 4)(0, 0, 1000, 0), None); signal.pause()",
    ],
)
def test_time_goes_on(box: Sandbox, program: str) -> None:
    """A state with a timeout is another one every moment."""
    process = box.spawn(
        [
            "python3",
            "-c",
            f"import ctypes, select, signal, threading, time\nprint(flush=True)\n{program}",
        ]
    )
    process.stdout.readline()
    for _ in range(8):
        time.sleep(0.03)
        assert not _shared(box.checkpoint())


def test_what_nobody_has_asked_for_gives_way(box: Sandbox) -> None:
    """Where room is wanted, a state that was captured ahead is freed before anything is refused."""
    probe = Probe.start(box)
    probe.do("x = bytearray(os.urandom(1 << 20)) * 16")
    box.checkpoint("kept")
    before = box.usage.memory
    probe.do("memoryview(x)[:] = os.urandom(len(x))")
    held = before
    for _ in range(100):  # until it has been captured ahead
        time.sleep(0.05)
        if (now := box.usage.memory) > before + (12 << 20) and now == held:
            break
        held = now
    assert held > before + (12 << 20)
    with Sandbox.create(max_memory=held - (8 << 20)):
        assert box.usage.memory < held - (8 << 20)
    with Sandbox.create(max_memory=4 << 30):
        assert [found.name for found in box.checkpoints] == ["kept"]
        probe.do("total = __import__('zlib').crc32(x); y = 1")
        last = box.checkpoint()
        probe.do("x[0] ^= 1; y = 2")
        box.rollback(last)
        assert probe.ask("[y, __import__('zlib').crc32(x) == total]") == [1, True]


def test_what_was_read_ahead_gives_way(box: Sandbox) -> None:
    """Of a program that never rests pages are read ahead, but no state is captured."""
    box.spawn(["python3", "-c", "x = bytearray(16 << 20)\nwhile True:\n x[::4096] = x[1::4096]"])
    box.checkpoint()
    before = box.usage.memory

    def read_ahead() -> bool:
        box.run(["true"])  # its end sets the work ahead going
        return box.usage.memory > before + (8 << 20)

    assert until(read_ahead)
    with Sandbox.create(max_memory=before + (4 << 20)):
        assert box.usage.memory <= before + (4 << 20)
    with Sandbox.create(max_memory=4 << 30):
        assert len(box.checkpoints) == 1


def test_while_we_are_at_it_nothing_is_like_it_was() -> None:
    """Two instants in the middle of two changes of ours, or of the same one."""
    box: Any = SimpleNamespace(
        changed=threading.Condition(threading.Lock()), _touching=0, _touches=0, handles={}
    )
    before = Box.traces(box)
    assert Box.traces(box) == before
    with Box.touching(box):
        during = Box.traces(box)
        assert Box.traces(box) != during != before
    assert Box.traces(box) not in (before, during)


def test_found_out_by_comparing(sandbox: Sandbox) -> None:
    """A keeper that verifies takes every checkpoint that it would share, and compares."""
    probes = [Probe.start(sandbox) for _ in range(3)]
    shell = sandbox.shell()
    chance = random.Random(11)
    for number in range(40):
        what = chance.randrange(6)
        if what == 0:
            chance.choice(probes).do(f"x = {number}")
        elif what == 1:
            shell.run(f"x={number}; echo {number} > /tmp/n")
        elif what == 2:
            sandbox.files.write("/tmp/m", b"%d" % number)
        elif what == 3:
            chance.choice(probes).do("open('/tmp/o', 'a').write('o')")
        time.sleep(chance.choice((0, 0, 0.01, 0.06, 0.12)))
        checkpoint = sandbox.checkpoint()
        if number % 10 == 9:
            sandbox.rollback(checkpoint)
