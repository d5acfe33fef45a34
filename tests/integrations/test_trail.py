"""An agent's steps: a checkpoint of each, taken while it thinks; back to them, on from there."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial

import pytest

from deltabox import (
    CommandFailed,
    KeepLast,
    RollbackError,
    Sandbox,
    SandboxClosed,
    UnknownCheckpoint,
)
from deltabox.integrations.trail import Step, Trail

RING = """
import ctypes, time
libc = ctypes.CDLL(None)
parameters = (ctypes.c_char * 120)()
ring = libc.syscall(425, 2, parameters)  # io_uring_setup(2)
assert ring >= 0
print(ring, flush=True)
time.sleep(1000)
"""


@pytest.fixture
def trail(sandbox: Sandbox) -> Iterator[Trail]:
    with Trail(sandbox) as made:
        yield made


def do(trail: Trail, command: str) -> str:
    run = partial(trail.sandbox.run, command, check=True, timeout=20)
    return trail.do(command, run).stdout


def test_a_state_for_each_step(trail: Trail) -> None:
    for n in range(1, 4):
        do(trail, f"echo {n} >> /srv/log")
    assert [step.number for step in trail.steps] == [0, 1, 2, 3]
    assert [step.action for step in trail.steps][1:] == [f"echo {n} >> /srv/log" for n in (1, 2, 3)]
    assert trail.steps[2].parent is trail.steps[1]
    assert trail.steps[3].output.exit_code == 0
    ids = [step.checkpoint.id for step in trail.steps]
    assert len(set(ids)) == 4 and all(step.problem is None for step in trail.steps)
    assert "echo 3" in repr(trail.steps[3]) and "echo 2" not in repr(trail.steps[3])
    trail.rollback(2)
    assert do(trail, "cat /srv/log") == "1\n2\n"
    trail.rollback(0)
    assert not trail.sandbox.files.exists("/srv/log") and len(trail.steps) == 1


def test_a_live_program_goes_back(trail: Trail) -> None:
    """One that a step has started in the background, with what it has in memory."""
    counter = "n=0; while read -r line; do n=$((n + 1)); echo $n > /srv/n; done"
    do(trail, "mkfifo /srv/fifo; touch /srv/n")
    do(trail, f"setsid sh -c '{counter}' <> /srv/fifo >/dev/null 2>&1 &")
    count = 'echo x > /srv/fifo; until [ "$(cat /srv/n)" = {} ]; do sleep 0.01; done'
    do(trail, count.format(1))
    kept = trail.steps[-1]
    do(trail, count.format(2))
    do(trail, count.format(3))
    trail.rollback(kept)
    assert do(trail, "cat /srv/n") == "1\n"
    do(trail, count.format(2))


def test_a_left_way_can_be_gone_again(trail: Trail) -> None:
    do(trail, "echo a > /srv/x")
    left = trail.steps[-1]
    trail.rollback(0)
    do(trail, "echo b > /srv/x")
    assert [step.action for step in trail.steps] == [None, "echo b > /srv/x"]
    trail.rollback(left)
    assert do(trail, "cat /srv/x") == "a\n"
    assert [step.action for step in trail.steps] == [None, "echo a > /srv/x", "cat /srv/x"]


def test_forks_go_their_own_ways(trail: Trail) -> None:
    do(trail, "echo a > /srv/x")
    do(trail, "echo b > /srv/x")
    with trail.fork(1) as early, trail.fork() as late:
        assert do(early, "cat /srv/x") == "a\n" and do(late, "cat /srv/x") == "b\n"
        assert [len(one.steps) for one in (trail, early, late)] == [3, 3, 4]
        do(early, "echo c > /srv/x")
        # any trail of the tree may go there
        trail.rollback(early.steps[-1])
        assert do(trail, "cat /srv/x") == "c\n"
        assert do(late, "cat /srv/x") == "b\n"


def test_a_step_that_fails_is_a_step(trail: Trail) -> None:
    with pytest.raises(CommandFailed):
        do(trail, "echo half > /srv/x; false")
    assert trail.steps[1].output is None
    trail.rollback(0)
    assert not trail.sandbox.files.exists("/srv/x")
    do(trail, "true")


def test_what_cannot_be_kept_is_said_at_the_step() -> None:
    with Trail(Sandbox.create(io_uring=True)) as trail:
        do(trail, "echo a > /srv/x")
        trail.sandbox.files.write_text("/srv/ring.py", RING)
        ring = trail.do("ring", lambda: trail.sandbox.spawn(["python3", "/srv/ring.py"]))
        assert ring.stdout.readline(timeout=20)
        do(trail, "echo b > /srv/x")
        _, kept, begun, unkept = trail.steps
        with pytest.raises(RollbackError, match=r"step 3 has no state to go to.*UnsupportedState"):
            trail.rollback(3)
        with pytest.raises(RollbackError, match="io_uring"):
            trail.fork()
        assert unkept.problem is not None and unkept.problem.startswith("UnsupportedState: ")
        assert kept.problem is None
        assert trail.steps[-1] is unkept and do(trail, "cat /srv/x") == "b\n"
        trail.rollback(kept)
        assert do(trail, "cat /srv/x") == "a\n"
        assert do(trail, "true") == "" and trail.steps[-1].checkpoint is not None
        assert begun.parent is kept


def test_what_the_policy_lets_go() -> None:
    with Trail(Sandbox.create(keep=KeepLast(2))) as trail:
        for n in range(6):
            do(trail, f"echo {n} > /srv/x")
        assert trail.steps[-1].checkpoint is not None  # all of them have been taken now
        with pytest.raises(UnknownCheckpoint, match=r"step 2 was deleted, or let go.*KeepLast"):
            trail.rollback(2)
        with pytest.raises(UnknownCheckpoint, match="step 2"):
            trail.fork(2)
        assert do(trail, "cat /srv/x") == "5\n"
        trail.rollback(0)  # the start is held
        assert not trail.sandbox.files.exists("/srv/x")


def test_going_back_waits_for_the_step_in_progress(trail: Trail) -> None:
    begun = threading.Event()

    def work() -> None:
        begun.set()
        trail.sandbox.run("sleep 0.3; echo late > /srv/x")

    worker = threading.Thread(target=trail.do, args=("slow", work))
    worker.start()
    assert begun.wait(20)
    trail.rollback(0)
    worker.join()
    assert len(trail.steps) == 1 and not trail.sandbox.files.exists("/srv/x")


@pytest.mark.parametrize("number", [-1, 2])
def test_wrong_numbers(trail: Trail, number: int) -> None:
    do(trail, "true")
    with pytest.raises(IndexError, match=rf"no step {number} on this way: it has 0 to 1"):
        trail.rollback(number)


def test_wrong_types(trail: Trail) -> None:
    for wrong in ("1", 1.0, True):
        with pytest.raises(TypeError, match="a step is a Step or its number"):
            trail.rollback(wrong)  # type: ignore[arg-type]


def test_the_end(sandbox: Sandbox) -> None:
    trail = Trail(sandbox)
    do(trail, "true")
    trail.close()
    trail.close()
    assert sandbox.closed and isinstance(trail.steps[-1], Step)
    with pytest.raises(SandboxClosed):
        do(trail, "true")
