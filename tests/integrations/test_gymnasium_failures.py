"""What goes wrong inside, and outside, and what is left of it."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from gymnasium.error import ClosedEnvironmentError

from deltabox import CommandTimeout, DeltaBoxError, Sandbox, SandboxClosed
from deltabox.integrations import _program
from deltabox.integrations.gymnasium import EnvironmentDied, EnvironmentFailed, LiveEnv, NotData

from ..tools.packages import PYTHON
from .conftest import Make, Place

WAITED = 20.0  # seconds; for what takes a fraction of one


@pytest.fixture
def sandbox_of_ours(place: Place) -> Iterator[Sandbox]:
    """A sandbox that is given to an environment."""
    with place.sandbox.fork() as sandbox:
        yield sandbox


def wait_for(sandbox: Sandbox, path: str) -> None:
    deadline = time.monotonic() + WAITED
    while not sandbox.files.exists(path):
        assert time.monotonic() < deadline, f"{path} has not come"
        time.sleep(0.01)


def test_what_is_printed_stays_out_of_the_way(make: Make) -> None:
    env = make(entry_point="environments:Talker")
    env.reset()
    assert env.step(3)[4] == {"read": ""}
    said = env.output
    assert said.count("printed 3\n") == 1
    assert "to stderr\n" in said
    assert "by a shell\n" in said
    assert said.count("by a child\n") == 1
    state = env.clone_state()
    assert env.step(7)[0][0] == 2  # three megabytes, which nobody reads
    assert 0 < len(env.output) < 200_000
    env.step(2)
    assert "printed 2\n" in env.output
    env.restore_state(state)
    assert env.output == said


def test_what_is_raised_inside_is_told(make: Make) -> None:
    env = make(entry_point="environments:Broken")
    env.reset()
    with pytest.raises(EnvironmentFailed, match=r"step\(\) raised ValueError inside") as caught:
        env.step(1)
    assert caught.value.kind == "ValueError"
    assert caught.value.traceback is not None
    assert "environments.py" in caught.value.traceback and "in act" in caught.value.traceback
    assert caught.value.__notes__ == [f"Inside the sandbox:\n{caught.value.traceback.rstrip()}"]
    with pytest.raises(EnvironmentFailed, match="raised SystemExit inside"):
        env.step(2)
    with pytest.raises(EnvironmentFailed, match=r"info\['inner'\]\[1\]\['it'\]: a builtins.object"):
        env.step(3)
    for action in (4, 5):
        with pytest.raises(EnvironmentFailed, match=r"no answer to step\(\) .* writes to the"):
            env.step(action)
    assert env.step(0)[0][0] == 6  # it lives on
    with pytest.raises(EnvironmentFailed) as caught:
        env.call("nothing_of_the_kind")
    assert caught.value.kind == "AttributeError"


def test_what_cannot_be_told_is_not_sent(make: Make) -> None:
    env = make(entry_point="environments:Broken")
    env.reset()
    with pytest.raises(NotData, match=r"a builtins\.object cannot be told"):
        env.step(object())
    with pytest.raises(NotData, match="dtype object"):
        env.step(np.array([None]))
    assert env.step(0)[0][0] == 1


def test_gymnasiums_own_errors_are_told_by_name(make: Make) -> None:
    env = make("CartPole-v1")
    with pytest.raises(EnvironmentFailed) as caught:
        env.step(0)
    assert caught.value.kind == "gymnasium.error.ResetNeeded"
    with pytest.raises(EnvironmentFailed, match=r"make\(\) raised gymnasium\.error\.NameNotFound"):
        make("Nothing-v0")
    with pytest.raises(EnvironmentFailed, match=r"Odd\.Space is no space that can be told"):
        make(entry_point="environments:Odd")


@pytest.mark.parametrize(
    ("action", "code", "how"),
    [
        (1, 3, "exited with 3"),
        (2, -signal.SIGSEGV, "was killed by signal 11"),
        (3, 4, "exited with 4"),
    ],
)
def test_a_dead_environment_comes_back(
    make: Make, monkeypatch: pytest.MonkeyPatch, action: int, code: int, how: str
) -> None:
    monkeypatch.setattr(_program, "LOOK", 0.05)
    env = make(entry_point="environments:Mortal")
    env.reset()
    env.step(0)
    state = env.clone_state()
    with pytest.raises(EnvironmentDied, match=rf"its process {how} in step\(\)") as caught:
        env.step(action)
    assert caught.value.exit_code == code
    assert "last words" in caught.value.__notes__[0]
    with pytest.raises(EnvironmentDied):
        env.step(0)
    with env.fork(at=state)[0] as child:
        assert child.step(0)[0][0] == 2
    env.restore_state(state)
    assert env.step(0)[0][0] == 2


@contextmanager
def an_interrupt(env: LiveEnv) -> Iterator[None]:
    """Ctrl-C as soon as the environment is in the middle of a step."""

    def interrupt() -> None:
        wait_for(env.sandbox, "/tmp/began")
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def test_an_interrupted_step_is_finished_before_the_next(make: Make) -> None:
    env = make(entry_point="environments:Slow")
    env.reset()
    start = env.clone_state()
    with pytest.raises(KeyboardInterrupt), an_interrupt(env):
        env.step(1)
    env.sandbox.files.write("/tmp/go", b"")
    assert env.step(0)[0][0] == 2  # its own answer, not the one that had been left behind
    env.restore_state(start)
    with pytest.raises(KeyboardInterrupt), an_interrupt(env):
        env.step(1)
    env.sandbox.files.write("/tmp/go", b"")
    state = env.clone_state()  # of what is after that step
    env.restore_state(start)
    env.restore_state(state)
    assert env.step(0)[0][0] == 2
    env.restore_state(start)
    with pytest.raises(KeyboardInterrupt), an_interrupt(env):
        env.step(1)
    env.restore_state(start)  # back out of the middle of it
    assert env.step(0)[0][0] == 1


def test_a_step_that_takes_too_long(make: Make) -> None:
    env = make(entry_point="environments:Slow", timeout=20)
    env._timeout = 0.1  # of what follows: to be made takes longer
    env.reset()
    with pytest.raises(CommandTimeout, match=r"no answer to step\(\) in time"):
        env.step(1)
    with pytest.raises(CommandTimeout):  # a state is that between two calls only
        env.clone_state()
    env._timeout = 20
    env.sandbox.files.write("/tmp/go", b"")
    assert env.step(0)[0][0] == 2


@pytest.mark.parametrize("own", [True, False], ids=["own", "given"])
def test_close_cuts_off_a_call(sandbox_of_ours: Sandbox, make: Make, own: bool) -> None:
    where = {} if own else {"sandbox": sandbox_of_ours}
    env = make(entry_point="environments:Slow", **where)
    env.reset()
    caught: list[BaseException] = []

    def step() -> None:
        try:
            env.step(1)
        except DeltaBoxError as error:
            caught.append(error)

    thread = threading.Thread(target=step)
    thread.start()
    wait_for(env.sandbox, "/tmp/began")
    env.close()
    thread.join(timeout=WAITED)
    assert not thread.is_alive()
    assert isinstance(caught[0], SandboxClosed if own else EnvironmentDied)


def test_after_close(sandbox_of_ours: Sandbox, make: Make) -> None:
    env = make("CartPole-v1", sandbox=sandbox_of_ours)
    env.reset()
    state = env.clone_state()
    child = env.fork()[0]
    env.close()
    env.close()
    assert env.sandbox.processes() == []
    assert not env.sandbox.closed  # it was given
    assert env.sandbox.run("ls /tmp").stdout == ""
    with pytest.raises(ClosedEnvironmentError, match="CartPole-v1 is closed"):
        env.step(0)
    with pytest.raises(ClosedEnvironmentError):
        env.clone_state()
    with pytest.raises(ClosedEnvironmentError):
        env.restore_state(state)
    with pytest.raises(ClosedEnvironmentError):
        env.fork(2, at=state)
    child.step(0)  # not of the fork
    child.close()
    with pytest.raises(ClosedEnvironmentError):
        child.reset()


def test_an_environment_is_asked_to_close_what_it_has(sandbox_of_ours: Sandbox, make: Make) -> None:
    env = make(entry_point="environments:Accounts", sandbox=sandbox_of_ours)
    env.reset()
    assert len(sandbox_of_ours.processes()) == 2
    env.close()
    assert sandbox_of_ours.processes() == []


def test_nothing_is_left_of_forks_that_failed(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    env = make("CartPole-v1")
    env.reset()
    count = 0

    def copied(*_: object) -> None:
        nonlocal count
        count += 1
        if count == 2:
            raise MemoryError("of the test")

    monkeypatch.setattr(LiveEnv, "_recall", copied)
    with pytest.raises(MemoryError):
        env.fork(3)
    gc.collect()  # none was left to be closed by its end: that would be a ResourceWarning
    monkeypatch.undo()
    env.step(0)


def test_no_python_and_no_gymnasium_inside(sandbox_of_ours: Sandbox, make: Make) -> None:
    with pytest.raises(FileNotFoundError, match=r"'/nowhere/python'.*Pass python="):
        make("CartPole-v1", python="/nowhere/python", sandbox=sandbox_of_ours)
    bare = f'#!/bin/sh\nexec {PYTHON} -I -S "$@"\n'
    sandbox_of_ours.files.write("/opt/bare", bare.encode(), mode=0o755)
    with pytest.raises(ModuleNotFoundError, match=r"has no (numpy|gymnasium)\. .*Pass python="):
        make("CartPole-v1", python="/opt/bare", sandbox=sandbox_of_ours)
    assert sandbox_of_ours.processes() == []


def test_wrong_arguments(make: Make) -> None:
    with pytest.raises(TypeError, match="either an id or an entry_point"):
        LiveEnv()
    with pytest.raises(TypeError, match="either an id or an entry_point"):
        LiveEnv("CartPole-v1", entry_point="a:b")
    with pytest.raises(ValueError, match="'module:callable', not 'module'"):
        LiveEnv(entry_point="module")
    with pytest.raises(ValueError, match="needs a screen"):
        LiveEnv("CartPole-v1", render_mode="human")
    env = make("CartPole-v1")
    with pytest.raises(ValueError, match="at least 1"):
        env.fork(0)
