"""A restored tree waits for the likely rollback: nothing but the time it takes may tell."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from deltabox import Checkpoint, Process, RolledBack, Sandbox, Shell, UnknownCheckpoint
from tests.api.test_calls import WAITING, Caller, appears

_SERVER = "import sys\nn = 0\nfor line in sys.stdin:\n n += int(line)\n print(n, flush=True)\n"


def waiting(sandbox: Sandbox) -> list[tuple[str, int]]:
    """Checkpoint and first process (host pid) of each standby of a sandbox."""
    found = sandbox._keeper.call("standby", box=sandbox._box)["waiting"]
    return [(node, init) for box, node, init in found if box == sandbox._box]


def used(sandbox: Sandbox) -> int:
    number = sandbox._keeper.call("standby", box=sandbox._box)["used"]
    assert isinstance(number, int)
    return number


def awaited(sandbox: Sandbox, checkpoint: Checkpoint) -> int:
    """Wait until a standby for this checkpoint exists; its first process."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        for node, init in waiting(sandbox):
            if node == checkpoint.id:
                return init
        time.sleep(0.005)
    raise AssertionError("no standby was made")


def _gone(pid: int) -> bool:
    """Whether a process ends soon."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if not Path(f"/proc/{pid}").exists():
            return True
        time.sleep(0.01)
    return False


def _members(init: int) -> list[int]:
    """Host pids of the processes that a first process has cloned."""
    return [int(pid) for pid in Path(f"/proc/{init}/task/{init}/children").read_text().split()]


def _add(server: Process, number: int) -> int:
    server.stdin.write(f"{number}\n")
    return int(server.stdout.readline(timeout=10))


@pytest.fixture
def programs(sandbox: Sandbox) -> Iterator[tuple[Sandbox, Shell, Process]]:
    yield sandbox, sandbox.shell(), sandbox.spawn(["python3", "-c", _SERVER])


def test_fifty_rollbacks_among_three_checkpoints(
    programs: tuple[Sandbox, Shell, Process],
) -> None:
    sandbox, shell, server = programs
    states = []
    for number in range(1, 4):
        shell.run(f"x={number}; echo {number} > /root/file")
        total = _add(server, number)
        states.append((sandbox.checkpoint(), number, total))
    for turn in range(50):
        checkpoint, number, total = states[(turn // 2) % 3]
        shell.run("x=lost; rm /root/file; sleep 100 & disown")
        _add(server, 1000)
        if turn % 2:
            awaited(sandbox, checkpoint)
        sandbox.rollback(checkpoint)
        assert shell.run("echo $x $(cat /root/file)").stdout == f"{number} {number}\n"
        assert _add(server, 0) == total
        assert sorted(p.cmdline[:1] for p in sandbox.processes()) == [("bash",), ("python3",)]
    assert used(sandbox) >= 25
    assert len(waiting(sandbox)) <= 2


def test_a_call_in_flight_goes_on(sandbox: Sandbox) -> None:
    caller = Caller(lambda: sandbox.run(WAITING))
    appears(sandbox, "/tmp/begun")
    checkpoint = sandbox.checkpoint()
    later = Caller(lambda: sandbox.run("sleep 100"))
    awaited(sandbox, checkpoint)
    sandbox.rollback(checkpoint)
    assert used(sandbox) == 1
    with pytest.raises(RolledBack):
        later.value()
    assert caller.is_alive()
    sandbox.files.write_text("/tmp/go", "restored\n")
    assert caller.value().stdout == "1\nrestored\n"


def test_a_call_that_ended_while_the_standby_waited_is_over(sandbox: Sandbox) -> None:
    """Its caller waited when the standby was made, and waits no more when it is used."""
    shell = sandbox.shell()
    callers = [Caller(lambda: sandbox.run(WAITING)), Caller(lambda: shell.run("x=1; sleep 1; x=2"))]
    appears(sandbox, "/tmp/begun")
    time.sleep(0.2)
    checkpoint = sandbox.checkpoint()
    awaited(sandbox, checkpoint)
    sandbox.files.write_text("/tmp/go", "done\n")
    assert callers[0].value().stdout == "1\ndone\n"
    callers[1].value()
    sandbox.rollback(checkpoint)
    assert used(sandbox) == 1
    assert shell.run("echo $x").stdout == "2\n"  # after the sleep that goes on for nobody
    sandbox.files.write_text("/tmp/go", "again\n")
    for _ in range(500):
        if [p.cmdline[:1] for p in sandbox.processes()] == [("bash",)]:
            break
        time.sleep(0.01)
    assert [p.cmdline[:1] for p in sandbox.processes()] == [("bash",)]


def test_input_and_output_that_waited(sandbox: Sandbox) -> None:
    """What lay in pipes and buffers belongs to the checkpoint, once."""
    cat = sandbox.spawn(["sh", "-c", "echo begun; read line; echo got $line; exec cat"])
    assert cat.stdout.readline(timeout=10) == "begun\n"
    cat.stdin.write("one\n")
    for _ in range(3):
        checkpoint = sandbox.checkpoint()
        awaited(sandbox, checkpoint)
        cat.stdin.write("lost\n")
        sandbox.rollback(checkpoint)
    assert used(sandbox) == 3
    assert cat.stdout.readline(timeout=10) == "got one\n"
    cat.stdin.write("two\n")
    assert cat.stdout.readline(timeout=10) == "two\n"
    cat.stdin.close()
    assert cat.wait(10) == 0


def test_relative_timeouts_do_not_run_while_it_waits(sandbox: Sandbox) -> None:
    alarm = (
        "import signal\n"
        "signal.signal(signal.SIGALRM, lambda *_: print('alarm', flush=True))\n"
        "signal.setitimer(signal.ITIMER_REAL, 2.0)\n"
        "print('set', flush=True)\nsignal.pause()\n"
    )
    programs = [
        sandbox.spawn(["python3", "-c", alarm]),
        sandbox.spawn(["sh", "-c", "echo set; sleep 2; echo slept"]),
    ]
    assert [one.stdout.readline(timeout=10) for one in programs] == ["set\n", "set\n"]
    time.sleep(0.2)
    checkpoint = sandbox.checkpoint()
    awaited(sandbox, checkpoint)
    assert [one.wait(10) for one in programs] == [0, 0]  # both have come, and would have by now
    sandbox.rollback(checkpoint)
    assert used(sandbox) == 1
    began = time.monotonic()
    assert [one.stdout.readline(timeout=10) for one in programs] == ["alarm\n", "slept\n"]
    assert 1.2 < time.monotonic() - began < 3


def test_a_terminal(sandbox: Sandbox) -> None:
    shell = sandbox.shell(tty=True)
    assert shell.run("x=5; tty").stdout.strip() == "/dev/pts/0"
    checkpoint = sandbox.checkpoint()
    awaited(sandbox, checkpoint)
    shell.run("x=6; stty rows 10")
    sandbox.rollback(checkpoint)
    assert used(sandbox) == 1
    assert shell.run("echo $x; stty size").stdout.split() == ["5", "24", "80"]


def test_it_goes_with_its_checkpoint(programs: tuple[Sandbox, Shell, Process]) -> None:
    sandbox, shell, _ = programs
    checkpoint = sandbox.checkpoint()
    init = awaited(sandbox, checkpoint)
    checkpoint.delete()
    assert _gone(init)
    assert waiting(sandbox) == []
    with pytest.raises(UnknownCheckpoint):
        sandbox.rollback(checkpoint)
    assert shell.run("echo alive").stdout == "alive\n"


def test_it_goes_with_its_sandbox() -> None:
    with Sandbox.create() as parent:
        parent.shell()
        checkpoint = parent.checkpoint()
        with parent.fork(at=checkpoint) as child:
            own = child.checkpoint()
            inside = awaited(child, own)
            assert waiting(parent) != waiting(child)
        assert _gone(inside)
        init = awaited(parent, checkpoint)
    assert _gone(init)


def test_a_fork_is_told_that_it_is_one(sandbox: Sandbox) -> None:
    """No standby for a state of another sandbox: who it is must be written at the moment."""
    sandbox.shell()
    checkpoint = sandbox.checkpoint()
    with sandbox.fork(at=checkpoint) as child:
        child.rollback(checkpoint)
        time.sleep(0.3)
        assert waiting(child) == []
        number = child.files.read_text("/run/deltabox/fork.json")
        child.rollback(checkpoint)
        assert child.files.read_text("/run/deltabox/fork.json") != number


@pytest.mark.parametrize("which", ["first process", "member"])
def test_one_that_was_killed_is_not_used(
    programs: tuple[Sandbox, Shell, Process], which: str
) -> None:
    sandbox, shell, server = programs
    shell.run("x=1")
    assert _add(server, 5) == 5
    checkpoint = sandbox.checkpoint()
    for turn in range(2):
        init = awaited(sandbox, checkpoint)
        victim = init if which == "first process" else _members(init)[turn]
        task = os.pidfd_open(victim)
        os.kill(victim, signal.SIGKILL)
        assert select.select([task], [], [], 10)[0]
        os.close(task)
        shell.run("x=lost")
        sandbox.rollback(checkpoint)
        assert shell.run("echo $x").stdout == "1\n"
        assert _add(server, 1) == 6
        assert len(sandbox.processes()) == 2
        assert _gone(init)
    assert used(sandbox) == 0


def test_none_when_there_shall_be_none() -> None:
    for standby in (0, "1M"):  # too little for any
        with Sandbox.create(standby=standby) as sandbox:
            shell = sandbox.shell()
            shell.run("x=1")
            checkpoint = sandbox.checkpoint()
            time.sleep(0.5)
            assert waiting(sandbox) == []
            shell.run("x=2")
            sandbox.rollback(checkpoint)
            time.sleep(0.5)
            assert waiting(sandbox) == []
            assert shell.run("echo $x").stdout == "1\n"


def test_the_budget_is_for_all_of_a_tree() -> None:
    """Enough for some standbys, but not for one of each of five sandboxes."""
    with Sandbox.create(standby="6M") as sandbox:
        sandbox.shell()
        children = sandbox.fork_many(5)
        points = []
        for child in children:
            points.append(child.checkpoint())
            awaited(child, points[-1])
            assert sum(len(waiting(one)) for one in children) <= 4
        assert waiting(children[0]) == []
        for child, point in zip(children, points, strict=True):
            child.rollback(point)
            child.close()


def test_it_does_not_widen_the_limit_of_processes() -> None:
    with Sandbox.create(pids_limit=20) as sandbox:
        shell = sandbox.shell()
        checkpoint = sandbox.checkpoint()
        for _ in range(2):
            awaited(sandbox, checkpoint)
            bomb = "for i in $(seq 60); do sleep 30 & done 2>/dev/null"
            sandbox.run(bomb, timeout=20)
            assert 10 <= len(sandbox.processes()) <= 28
            sandbox.rollback(checkpoint)
            assert shell.run("echo alive").stdout == "alive\n"


def test_few_trees_die_at_once() -> None:
    with Sandbox.create(standby=0) as sandbox:
        name = f"{os.getpid()}.25"
        sandbox.shell().run(f"sleep {name} &")
        checkpoint = sandbox.checkpoint()
        most = 0
        for _ in range(40):
            sandbox.rollback(checkpoint)
            alive = 0
            for path in Path("/proc").glob("[0-9]*/cmdline"):
                try:
                    alive += path.read_bytes() == b"sleep\0" + name.encode() + b"\0"
                except OSError:
                    continue
            most = max(most, alive)
        assert 1 <= most <= 5
        assert len(sandbox.processes()) == 2
