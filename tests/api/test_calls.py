"""Calls in flight: a checkpoint does not wait for them, a rollback decides what becomes of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from deltabox import RolledBack, Sandbox, SandboxClosed
from deltabox.keeper.handles import SHELL, Command, Handle, sent


class Caller(threading.Thread):
    """Makes a call in a thread and keeps its result or error."""

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__()
        self._call = call
        self.result: Any = None
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self.result = self._call()
        except BaseException as error:
            self.error = error

    def value(self) -> Any:
        self.join(20)
        assert not self.is_alive(), "the call has not come back"
        if self.error is not None:
            raise self.error
        return self.result


def appears(sandbox: Sandbox, path: str) -> None:
    for _ in range(500):
        if sandbox.files.exists(path):
            return
        time.sleep(0.01)
    raise AssertionError(f"{path} never appeared")


WAITING = (
    "echo $((n + 1)); touch /tmp/begun; until test -e /tmp/go; do sleep 0.02; done; cat /tmp/go"
)


def test_run_resumes_after_a_rollback(sandbox: Sandbox) -> None:
    caller = Caller(lambda: sandbox.run(WAITING))
    appears(sandbox, "/tmp/begun")
    checkpoint = sandbox.checkpoint()
    sandbox.run("rm -rf /usr/share /tmp/begun")
    sandbox.rollback(checkpoint)
    assert caller.is_alive()
    sandbox.files.write_text("/tmp/go", "restored\n")
    result = caller.value()
    assert (result.exit_code, result.stdout) == (0, "1\nrestored\n")
    # its call is history now; the restored command runs again for nobody
    sandbox.rollback(checkpoint)
    assert ("/bin/sh",) in [p.cmdline[:1] for p in sandbox.processes()]
    sandbox.files.write_text("/tmp/go", "again\n")
    for _ in range(200):
        if not sandbox.processes():
            break
        time.sleep(0.02)
    assert sandbox.processes() == []


def test_run_that_began_later_is_rolled_back(sandbox: Sandbox) -> None:
    checkpoint = sandbox.checkpoint()
    caller = Caller(lambda: sandbox.run(WAITING))
    appears(sandbox, "/tmp/begun")
    sandbox.rollback(checkpoint)
    with pytest.raises(RolledBack, match="before this call began"):
        caller.value()
    assert sandbox.processes() == []


def test_shell_command_resumes(sandbox: Sandbox) -> None:
    sh = sandbox.shell()
    sh.run("n=5")
    caller = Caller(lambda: sh.run(WAITING + "; n=7"))
    appears(sandbox, "/tmp/begun")
    checkpoint = sandbox.checkpoint()
    sandbox.rollback(checkpoint)
    sandbox.rollback(checkpoint)
    sandbox.files.write_text("/tmp/go", "restored\n")
    assert caller.value().stdout == "6\nrestored\n"
    assert sh.run("echo $n").stdout == "7\n"
    # the command is part of the state: the shell works on it again, and then takes the next
    sandbox.rollback(checkpoint)
    following = Caller(lambda: sh.run("echo next $n"))
    time.sleep(0.1)
    assert following.is_alive()
    sandbox.files.write_text("/tmp/go", "third\n")
    assert following.value().stdout == "next 7\n"


def test_shell_command_that_began_later(sandbox: Sandbox) -> None:
    sh = sandbox.shell()
    checkpoint = sandbox.checkpoint()
    caller = Caller(lambda: sh.run(WAITING))
    appears(sandbox, "/tmp/begun")
    sandbox.rollback(checkpoint)
    with pytest.raises(RolledBack):
        caller.value()
    assert sh.run("echo fine").stdout == "fine\n"


def test_a_call_that_waited_for_its_turn(sandbox: Sandbox) -> None:
    sh = sandbox.shell()
    first = Caller(lambda: sh.run(WAITING))
    appears(sandbox, "/tmp/begun")
    second = Caller(lambda: sh.run("echo second"))
    time.sleep(0.1)
    checkpoint = sandbox.checkpoint()
    sandbox.rollback(checkpoint)
    sandbox.files.write_text("/tmp/go", "go\n")
    assert first.value().stdout == "1\ngo\n"
    assert second.value().stdout == "second\n"


def test_reads_and_waits(sandbox: Sandbox) -> None:
    p = sandbox.spawn("read a; echo got $a; read b; exit 5")
    line = Caller(lambda: p.stdout.readline())
    end = Caller(lambda: p.wait())
    time.sleep(0.1)
    checkpoint = sandbox.checkpoint()
    later = Caller(lambda: p.stdout.read_until("never"))
    time.sleep(0.1)
    sandbox.rollback(checkpoint)
    with pytest.raises(RolledBack):
        later.value()
    p.stdin.write("x\n")
    assert line.value() == "got x\n"
    p.stdin.write("y\n")
    assert end.value() == 5


def test_many_checkpoints_during_one_run(sandbox: Sandbox) -> None:
    caller = Caller(lambda: sandbox.run("for i in $(seq 200); do echo $i; sleep 0.005; done"))
    while caller.is_alive():
        sandbox.checkpoint().delete()
    assert caller.value().stdout.split() == [str(n) for n in range(1, 201)]


def test_streamed_output_through_a_rollback(sandbox: Sandbox) -> None:
    pieces: list[str] = []
    caller = Caller(lambda: sandbox.run(WAITING, on_stdout=pieces.append))
    appears(sandbox, "/tmp/begun")
    time.sleep(0.1)
    checkpoint = sandbox.checkpoint()
    sandbox.rollback(checkpoint)
    sandbox.files.write_text("/tmp/go", "restored\n")
    assert caller.value().stdout == "1\nrestored\n"
    assert "".join(pieces) == "1\nrestored\n"


def test_timeouts_go_on_over_a_rollback(sandbox: Sandbox) -> None:
    started = time.monotonic()
    caller = Caller(lambda: sandbox.run("sleep 1000", timeout=1.0))
    while not sandbox.processes():
        time.sleep(0.01)
    time.sleep(0.1)
    checkpoint = sandbox.checkpoint()
    sandbox.rollback(checkpoint)
    with pytest.raises(TimeoutError):
        caller.value()
    assert 0.9 < time.monotonic() - started < 3
    assert sandbox.processes() == []


def test_close_ends_every_call() -> None:
    sandbox = Sandbox.create()
    sh = sandbox.shell()
    p = sandbox.spawn("cat")
    callers = [
        Caller(lambda: sandbox.run("sleep 1000")),
        Caller(lambda: sh.run("sleep 1000")),
        Caller(lambda: p.wait()),
        Caller(lambda: p.stdout.readline()),
    ]
    time.sleep(0.3)
    sandbox.close()
    for caller in callers:
        with pytest.raises(SandboxClosed):
            caller.value()


def test_what_a_call_leaves_of_a_handle() -> None:
    """A rollback may bring a command back unsent when its caller has its answer already."""
    changed = threading.Condition()
    pump: Any = None  # it has no pipes
    shell = Handle(
        1, SHELL, "bash", pump=pump, changed=changed, in_flight=lambda call: True, stdin=True
    )
    shell.command = Command(5, call=9)
    assert not shell.forget(8)
    assert shell.forget(9), "the next one would wait for ever"
    shell.command = sent(Command(6, call=9), frozenset())
    assert not shell.forget(9), "it runs"


def test_commands_that_end_as_a_rollback_comes(sandbox: Sandbox) -> None:
    """Each has its answer or was rolled back, and no other error; also where it began before."""
    base = sandbox.checkpoint()
    unknown: list[BaseException] = []
    stop = threading.Event()

    def run() -> None:
        while not stop.is_set():
            try:
                assert sandbox.run("echo a").stdout == "a\n"
            except RolledBack:
                pass
            except BaseException as error:
                unknown.append(error)
                return

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for turn in range(60):
        checkpoint = sandbox.checkpoint() if turn % 2 else base
        sandbox.rollback(checkpoint)
        if turn % 2:
            checkpoint.delete()
    stop.set()
    for thread in threads:
        thread.join(20)
    assert unknown == []


def test_everything_at_once(sandbox: Sandbox) -> None:
    """Threads of all kinds while checkpoints, rollbacks and forks go on: only known errors."""
    root = sandbox.checkpoint("root")
    sh = sandbox.shell()
    sh.run("x=1")
    sandbox.checkpoint("base")
    stop = threading.Event()
    unknown: list[BaseException] = []
    done = dict.fromkeys(("run", "shell", "files"), 0)

    def repeat(what: str, call: Callable[[], Any]) -> None:
        while not stop.is_set():
            try:
                call()
                done[what] += 1
            except RolledBack:
                pass
            except BaseException as error:
                unknown.append(error)
                return

    def run() -> None:
        assert sandbox.run("echo a; sleep 0.01; echo b").stdout == "a\nb\n"

    def shell() -> None:
        assert sh.run("echo $x").stdout == "1\n"

    def files() -> None:
        sandbox.files.write("/tmp/file", b"x" * 10000)
        sandbox.files.list("/tmp")

    threads = [
        threading.Thread(target=repeat, args=pair)
        for pair in (("run", run), ("run", run), ("shell", shell), ("files", files))
    ]
    for thread in threads:
        thread.start()
    for turn in range(25):
        checkpoint = sandbox.checkpoint()
        if turn % 5 == 0:
            child = sandbox.fork()
            assert child.counterpart(sh).run("echo $x").stdout == "1\n"
            child.close()
        sandbox.rollback(checkpoint if turn % 2 else "base")
        checkpoint.delete()
    stop.set()
    for thread in threads:
        thread.join(20)
    assert unknown == []
    assert all(done.values()), done
    sandbox.rollback(root)
    assert sandbox.processes() == []
