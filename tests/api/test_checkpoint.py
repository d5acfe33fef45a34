"""Checkpoints and rollback: what comes back, and the tree of states."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from deltabox import (
    Change,
    Sandbox,
    StaleHandle,
    UnknownCheckpoint,
)


def test_files_and_processes_go_back_together(sandbox: Sandbox) -> None:
    sh = sandbox.shell()
    python = sandbox.spawn(["python3", "-i", "-q"])
    sh.run("x=1; cd /tmp; echo one > f")
    python.stdin.write("y = [1]; print('set')\n")
    python.stdout.readline(timeout=10)
    before = [replace(p, state="") for p in sandbox.processes()]
    checkpoint = sandbox.checkpoint("ready")
    for turn in range(5):
        sh.run("x=2; cd /; rm /tmp/f; sleep 1000 & echo two > /tmp/g")
        python.stdin.write("y.append(2); print('set')\n")
        python.stdout.readline(timeout=10)
        sandbox.rollback(checkpoint if turn % 2 else ("ready", checkpoint.id)[turn // 2 % 2])
        assert [replace(p, state="") for p in sandbox.processes()] == before
        assert sh.run("echo $x $PWD; cat f; ls g").stdout == "1 /tmp\none\n"
        python.stdin.write("print(y)\n")
        assert python.stdout.readline(timeout=10) == "[1]\n"


def test_description(sandbox: Sandbox) -> None:
    sh = sandbox.shell()
    assert sandbox.head is None
    sh.run("echo 1 > /tmp/a; echo 2 > /tmp/b")
    checkpoint = sandbox.checkpoint("first")
    assert (checkpoint.name, checkpoint.parent, checkpoint.children) == ("first", None, [])
    assert abs((datetime.now(UTC) - checkpoint.created_at).total_seconds()) < 10
    stats = checkpoint.stats
    assert 0 < stats.pause_ms <= stats.total_ms < 5000
    assert stats.dirty_bytes > 0
    assert stats.processes == 1
    assert stats.changed_files == 2
    second = sandbox.checkpoint()
    assert second.name is None
    assert second.parent == checkpoint == sandbox.checkpoints[0]
    assert checkpoint.children == [second]
    assert sandbox.head == second
    assert second.stats.changed_files == 0
    assert hash(second) == hash(sandbox.head)


def test_names(sandbox: Sandbox) -> None:
    sandbox.checkpoint("a")
    with pytest.raises(ValueError, match="named 'a'"):
        sandbox.checkpoint("a")
    child = sandbox.fork(at="a")
    with pytest.raises(ValueError, match="named 'a'"):
        child.checkpoint("a")
    child.checkpoint("b").delete()
    child.checkpoint("b")
    child.close()
    with pytest.raises(ValueError, match="not empty"):
        sandbox.checkpoint("")


def test_unknown_checkpoint(sandbox: Sandbox) -> None:
    with pytest.raises(UnknownCheckpoint, match="no checkpoint 'x' in this") as caught:
        sandbox.rollback("x")
    assert isinstance(caught.value, KeyError)
    with Sandbox.create() as other:
        foreign = other.checkpoint("theirs")
        with pytest.raises(UnknownCheckpoint, match="another tree"):
            sandbox.rollback(foreign)
    with pytest.raises(TypeError, match="name or its id"):
        sandbox.rollback(7)  # type: ignore[arg-type]


def test_branches(sandbox: Sandbox) -> None:
    sh = sandbox.shell()
    states = {}
    sandbox.checkpoint("root")
    for left in ("a", "b"):
        sandbox.rollback("root")
        sh.run(f"x=${{x}}{left}; echo $x > /tmp/{left}")
        sandbox.checkpoint(left)
        for right in ("c", "d"):
            sandbox.rollback(left)
            sh.run(f"x=${{x}}{right}; echo $x > /tmp/{right}")
            sandbox.checkpoint(left + right)
    for name in ("ad", "bc", "a", "bd", "root", "ac", "b"):
        sandbox.rollback(name)
        states[name] = sh.run("echo $x $(cat /tmp/[abcd] 2>/dev/null)").stdout.split()
    assert states["ad"] == ["ad", "a", "ad"]
    assert states["bc"] == ["bc", "b", "bc"]
    assert states["b"] == ["b", "b"]
    assert states["root"] == []
    parents = {c.name: c.parent.name for c in sandbox.checkpoints if c.parent is not None}
    assert parents == {"a": "root", "b": "root", "ac": "a", "ad": "a", "bc": "b", "bd": "b"}


def test_deleting_harms_no_other(sandbox: Sandbox) -> None:
    sh = sandbox.shell()
    made = []
    for number in range(4):
        sh.run(f"x={number}; echo {number} > /tmp/{number}")
        made.append(sandbox.checkpoint(str(number)))
    made[1].delete()
    assert made[2].parent == made[0]
    assert made[0].children == [made[2]]
    made[3].delete()
    assert sandbox.head == made[2]
    with pytest.raises(UnknownCheckpoint):
        sandbox.rollback("1")
    with pytest.raises(UnknownCheckpoint):
        made[1].delete()
    made[0].delete()
    assert [left.parent for left in made[2:3]] == [None]
    sh.run("x=9; rm /tmp/*")
    sandbox.rollback(made[2])
    assert sh.run("echo $x; ls /tmp").stdout == "2\n0\n1\n2\n"


def test_handles_born_later_are_stale(sandbox: Sandbox) -> None:
    checkpoint = sandbox.checkpoint()
    sh = sandbox.shell()
    p = sandbox.spawn("cat")
    later = sandbox.checkpoint()
    sandbox.rollback(checkpoint)
    for call in (
        lambda: sh.run("true"),
        lambda: p.stdout.read_available(),
        lambda: p.stdin.write("x"),
        lambda: p.kill(),
        lambda: p.exit_code,
    ):
        with pytest.raises(StaleHandle, match="started after the state"):
            call()
    assert sandbox.processes() == []
    sandbox.rollback(later)
    assert sh.run("echo back").stdout == "back\n"
    p.stdin.write("echo\n")
    assert p.stdout.readline(timeout=10) == "echo\n"


def test_unread_and_unsent_bytes_belong_to_the_state(sandbox: Sandbox) -> None:
    writer = sandbox.spawn("echo read; echo unread; exec sleep 1000")
    reader = sandbox.spawn("read go; head -c 300000 | wc -c; cat", text=False)
    assert writer.stdout.readline(timeout=10) == "read\n"
    time.sleep(0.1)
    reader.stdin.write(b"x" * 200_000)  # more than a pipe holds
    checkpoint = sandbox.checkpoint()
    for _ in range(3):
        assert writer.stdout.readline(timeout=10) == "unread\n"
        reader.stdin.write(b"x\n" + b"y" * 300_000 + b"tail")
        reader.stdin.close()
        assert reader.stdout.read(timeout=10) == b"300000\ntail"
        assert reader.wait(timeout=10) == 0
        sandbox.rollback(checkpoint)
        assert reader.exit_code is None


def test_exits_belong_to_the_state(sandbox: Sandbox) -> None:
    first = sandbox.spawn("echo last words; exit 3")
    second = sandbox.spawn("read line; exit 4")
    assert first.wait(timeout=10) == 3
    checkpoint = sandbox.checkpoint()
    for _ in range(2):
        assert first.exit_code == 3
        assert first.stdout.read(timeout=10) == "last words\n"
        assert second.exit_code is None
        second.stdin.write("go\n")
        assert second.wait(timeout=10) == 4
        sandbox.rollback(checkpoint)


def test_output_is_exact_through_checkpoints(sandbox: Sandbox) -> None:
    """A program answers and appends as fast as it can while checkpoints are taken."""
    p = sandbox.spawn(
        ["python3", "-u", "-c", "for n in range(20000): print(n)"],
    )
    stop = threading.Event()
    taken = 0

    def checkpoints() -> None:
        nonlocal taken
        while not stop.is_set():
            sandbox.checkpoint().delete()
            taken += 1

    thread = threading.Thread(target=checkpoints)
    thread.start()
    numbers = [int(line) for line in p.stdout]
    stop.set()
    thread.join()
    assert numbers == list(range(20000))
    assert taken >= 3


def test_output_is_exact_through_rollbacks(sandbox: Sandbox) -> None:
    p = sandbox.spawn(["python3", "-u", "-c", "for n in range(300000): print(n)"])
    p.stdout.read_until("\n999\n", timeout=10)
    checkpoint = sandbox.checkpoint()
    for turn in range(5):
        found = p.stdout.read_until(f"\n{2000 + 20000 * turn}\n", timeout=20)
        numbers = [int(line) for line in found.split()]
        assert numbers == list(range(1000, 2001 + 20000 * turn))
        sandbox.rollback(checkpoint)


def test_diff_and_patch(sandbox: Sandbox) -> None:
    sandbox.files.write_text("/tmp/t/same", "same\n")
    sandbox.files.write_text("/tmp/t/edit", "one\ntwo\n")
    sandbox.files.write_text("/tmp/t/gone", "x\n")
    old = sandbox.checkpoint()
    assert sandbox.diff(old) == []
    sandbox.run("cd /tmp/t; echo three >> edit; rm gone; echo n > new; chmod 700 same")
    expected = [
        Change("modified", "/tmp/t/edit"),
        Change("deleted", "/tmp/t/gone"),
        Change("added", "/tmp/t/new"),
        Change("mode", "/tmp/t/same"),
    ]
    assert sandbox.diff(old) == expected
    new = sandbox.checkpoint()
    sandbox.run("rm -r /tmp/t")
    assert sandbox.diff(old, new) == expected
    patch = sandbox.patch(old, new, under="/tmp/t/edit")
    assert "--- a/tmp/t/edit\n+++ b/tmp/t/edit\n" in patch
    assert "+three\n" in patch
    assert new.stats.changed_files == 4


def test_the_end_of_a_restored_process_is_seen(sandbox: Sandbox) -> None:
    """Nobody else holds its end of a pipe: neither PID 1 nor a copy that waits."""
    cat = sandbox.spawn(["cat"])
    home = sandbox.checkpoint()
    for _ in range(3):
        sandbox.rollback(home)
        cat.stdin.write("x\n")
        assert cat.stdout.readline(timeout=10) == "x\n"
        cat.kill()
        assert cat.stdout.read(timeout=10) == ""
        assert cat.wait(timeout=10) == -9
