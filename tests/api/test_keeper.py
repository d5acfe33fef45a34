"""The keeper's life: nothing is left, whoever is killed; Ctrl-C leaves the old state or the new."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from deltabox import Sandbox, SandboxClosed
from deltabox.keeper import journal

PRELUDE = """
import os, signal, sys, threading, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job starts with it ignored
from deltabox import *
"""


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A state directory, and so a keeper, of this test alone."""
    directory = tmp_path / "state"
    monkeypatch.setenv("DELTABOX_STATE", str(directory))
    yield directory
    gone(directory)


def client(body: str) -> subprocess.Popen[str]:
    """A process that uses the library."""
    return subprocess.Popen(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(body)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def keeper_pid(state: Path) -> int:
    found = re.findall(r"up: process (\d+)", (state / "keeper.log").read_text())
    return int(found[-1])


def gone(state: Path) -> None:
    """Wait until the keeper has ended and check that it has left nothing."""
    pid = keeper_pid(state)
    for _ in range(400):
        if not os.path.exists(f"/proc/{pid}"):
            break
        time.sleep(0.05)
    assert not os.path.exists(f"/proc/{pid}"), (state / "keeper.log").read_text()[-2000:]
    assert list((state / "trees").iterdir()) == []
    assert journal.outstanding(state) == []
    groups = list(Path("/sys/fs/cgroup").rglob(f"deltabox-{pid}"))
    assert groups == []


def test_a_killed_caller_leaves_nothing(state: Path) -> None:
    process = client(
        """
        sandbox = Sandbox.create()
        sandbox.shell().run("sleep 1000 &")
        sandbox.checkpoint()
        child = sandbox.fork()
        print("up", flush=True)
        sandbox.run("sleep 1000")
        """
    )
    assert said(process) == "up"
    process.kill()
    process.wait()
    gone(state)


def test_a_killed_keeper_leaves_nothing_after_the_next_start(state: Path) -> None:
    sandbox = Sandbox.create()
    sh = sandbox.shell()
    sandbox.checkpoint()
    pid = keeper_pid(state)
    os.kill(pid, signal.SIGKILL)
    while os.path.exists(f"/proc/{pid}/root/proc"):
        time.sleep(0.01)
    with pytest.raises(SandboxClosed, match="engine process has ended"):
        sh.run("true")
    sandbox.close()
    assert journal.outstanding(state) != []
    with Sandbox.create() as fresh:  # the next keeper cleans up
        assert fresh.run("echo fine").stdout == "fine\n"
        assert len(list((state / "trees").iterdir())) == 1
        assert not list(Path("/sys/fs/cgroup").rglob(f"deltabox-{pid}"))


def test_journal_knows_the_living(tmp_path: Path) -> None:
    record = journal.Journal(tmp_path)
    tree = tmp_path / "trees" / "t1"
    tree.mkdir(parents=True)
    record.made("tree", str(tree))
    record.made("tree", str(tmp_path / "trees" / "t2"))
    record.gone("tree", str(tmp_path / "trees" / "t2"))
    record.close()
    assert journal.clean(tmp_path) == []  # its writer lives: this process
    path = tmp_path / journal.NAME
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        line["start"] += 1  # the pid is in use again, by another process
    outside = {"op": "made", "kind": "tree", "value": "/etc", "pid": 1, "start": 0, "boot": ""}
    path.write_text("".join(json.dumps(line) + "\n" for line in [*lines, outside]) + "nonsense\n")
    assert journal.clean(tmp_path) == [f"files of a sandbox: {tree}"]
    assert not tree.exists()
    assert Path("/etc/passwd").exists()


ONLY_THE_SHELL = "[p.pid for p in sandbox.processes()] == [sh.pid]"


@pytest.mark.parametrize(
    ("call", "after"),
    [
        ("sandbox.run('touch /tmp/begun; sleep 1000')", ONLY_THE_SHELL),
        ("sh.run('touch /tmp/begun; sleep 1000')", ONLY_THE_SHELL),
        ("p.stdout.readline()", "p.stdin.write('x') or p.stdout.read_until('x') == 'x'"),
        ("p.wait()", "p.exit_code is None"),
    ],
)
def test_interrupted_calls(state: Path, call: str, after: str) -> None:
    if call.startswith("p."):
        call = f"sandbox.files.write('/tmp/begun', b'') or {call}"
    process = client(
        f"""
        with Sandbox.create() as sandbox:
            sh = sandbox.shell()
            p = sandbox.spawn(["cat"]) if {call.count("p.stdout") + call.count("p.wait")} else None
            me = threading.main_thread().ident

            def interrupt():
                while not sandbox.files.exists("/tmp/begun"):
                    time.sleep(0.01)
                time.sleep(0.1)
                signal.pthread_kill(me, signal.SIGINT)

            threading.Thread(target=interrupt).start()
            try:
                {call}
                print("not interrupted")
            except KeyboardInterrupt:
                time.sleep(0.5)
                print({after}, sh.run("echo fine").stdout.strip())
        """
    )
    out, _ = process.communicate(timeout=60)
    assert out.split() == ["True", "fine"]


def test_interrupts_at_every_moment(state: Path) -> None:
    """SIGINT at ever later moments of each call; afterwards it is the old state or the new one."""
    process = client(
        """
        def interrupted(call, delay):
            try:
                signal.setitimer(signal.ITIMER_REAL, delay)  # it may be over at once
                call()
                signal.setitimer(signal.ITIMER_REAL, 0)
                return False
            except KeyboardInterrupt:
                return True

        def interrupt(*_):
            raise KeyboardInterrupt

        signal.signal(signal.SIGALRM, interrupt)
        with Sandbox.create() as sandbox:
            sh = sandbox.shell()
            sh.run("x=base")
            base = sandbox.checkpoint()
            hit = 0
            for step in range(60):
                delay = 0.0002 + step * 0.0006
                sh.run("x=new; touch /tmp/new")
                hit += interrupted(lambda: sandbox.rollback(base), delay)
                state = sh.run("echo $x $(ls /tmp/new 2>/dev/null)").stdout.split()
                assert state in (["base"], ["new", "/tmp/new"]), state
                before = len(sandbox.checkpoints)
                hit += interrupted(lambda: sandbox.checkpoint(), delay)
                assert sh.run("echo ok").stdout == "ok\\n"
                assert len(sandbox.checkpoints) in (before, before + 1)
                for extra in sandbox.checkpoints[1:]:
                    extra.delete()
                hit += interrupted(lambda: sandbox.fork(at=base).close(), delay)
                sandbox.rollback(base)
            assert hit > 10, hit
        for step in range(20):
            made = []
            interrupted(lambda: made.append(Sandbox.create()), 0.005 + step * 0.015)
            for one in made:
                one.close()
        print("done")
        """
    )
    out, _ = process.communicate(timeout=110)
    assert out.strip() == "done"


def test_a_forgotten_sandbox_is_closed_with_a_warning(state: Path) -> None:
    sandbox = Sandbox.create()
    with pytest.warns(ResourceWarning, match="was never closed"):
        del sandbox
    gone(state)


def test_two_clients_share_a_keeper(state: Path) -> None:
    with Sandbox.create() as mine:
        process = client(
            """
            with Sandbox.create() as sandbox:
                print(sandbox.run("echo theirs").stdout, end="")
            """
        )
        out, _ = process.communicate(timeout=30)
        assert out == "theirs\n"
        assert mine.run("echo mine").stdout == "mine\n"
        assert (state / "keeper.log").read_text().count("up: process") == 1


def open_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def cycle() -> None:
    with Sandbox.create() as sandbox:
        sh = sandbox.shell()
        sh.run("echo a > /tmp/a")
        checkpoint = sandbox.checkpoint()
        sandbox.run("rm /tmp/a")
        sandbox.rollback(checkpoint)
        with sandbox.fork() as child:
            result = child.counterpart(sh).run("cat /tmp/a")
            assert result.stdout == "a\n", result


def cycles(state: Path, count: int) -> None:
    with Sandbox.create():  # keeps the keeper
        for _ in range(3):
            cycle()
        pid = keeper_pid(state)
        time.sleep(1)
        before = open_files(pid), len(os.listdir(f"/proc/{pid}/task"))
        for _ in range(count):
            cycle()
        time.sleep(1)
        after = open_files(pid), len(os.listdir(f"/proc/{pid}/task"))
    assert after[0] <= before[0] + 2, "file descriptors are left open in the keeper"
    assert after[1] <= before[1] + 17, "threads are left in the keeper"  # its pool may have grown


def test_cycles_leave_nothing(state: Path) -> None:
    cycles(state, 20)


@pytest.mark.full
@pytest.mark.timeout(600)
def test_two_hundred_cycles_leave_nothing(state: Path) -> None:
    cycles(state, 200)
