"""Forks: live copies that share history and nothing else."""

from __future__ import annotations

import pytest

from deltabox import ForkError, Process, Sandbox, SandboxClosed, Shell, StaleHandle


def test_eight_copies_diverge(sandbox: Sandbox) -> None:
    sh = sandbox.shell()
    python = sandbox.spawn(["python3", "-i", "-q"])
    sh.run("x=0; echo 0 > /tmp/f")
    python.stdin.write("y = list(range(100000)); print('set')\n")
    python.stdout.readline(timeout=10)
    checkpoint = sandbox.checkpoint()
    sh.run("x=later")
    children = sandbox.fork_many(8, at=checkpoint)
    shells: list[Shell] = [child.counterpart(sh) for child in children]
    pythons: list[Process] = [child.counterpart(python) for child in children]
    for number, (child, shell, repl) in enumerate(zip(children, shells, pythons, strict=True)):
        assert (shell.pid, repl.pid) == (sh.pid, python.pid)
        shell.run(f"x=${{x}}{number}; echo {number} > /tmp/f; sleep 1000 & mkdir /tmp/d{number}")
        repl.stdin.write(f"y[0] = 'child {number}'\n")
        child.spawn(["cat"])
    for number, (child, shell, repl) in enumerate(zip(children, shells, pythons, strict=True)):
        assert shell.run("echo $x; cat /tmp/f; ls -d /tmp/d*").stdout == (
            f"0{number}\n{number}\n/tmp/d{number}\n"
        )
        repl.stdin.write("print(y[0], sum(y[1:]))\n")
        assert repl.stdout.readline(timeout=10) == f"child {number} 4999950000\n"
        assert len(child.processes()) == 4
    assert sh.run("echo $x; cat /tmp/f").stdout == "later\n0\n"
    for child in children:
        child.close()
    assert sh.run("echo $x").stdout == "later\n"


def test_fork_of_the_present_state(sandbox: Sandbox) -> None:
    sh = sandbox.shell()
    sh.run("x=now")
    child = sandbox.fork()
    assert len(sandbox.checkpoints) == 1
    assert child.head == sandbox.head == sandbox.checkpoints[0]
    assert child.counterpart(sh).run("echo $x").stdout == "now\n"
    child.close()


def test_fork_of_a_fork_of_a_rolled_back_state(sandbox: Sandbox) -> None:
    sh = sandbox.shell()
    sh.run("x=1")
    first = sandbox.checkpoint("first")
    sh.run("x=2")
    sandbox.rollback(first)
    child = sandbox.fork()
    child.counterpart(sh).run("x=${x}c")
    child.checkpoint("second")
    grandchild = child.fork(at="second")
    assert grandchild.counterpart(sh).run("echo $x").stdout == "1c\n"
    # any sandbox of a tree may go to any of its checkpoints
    sandbox.rollback("second")
    assert sh.run("echo $x").stdout == "1c\n"
    grandchild.rollback(first)
    assert grandchild.counterpart(sh).run("echo $x").stdout == "1\n"
    child.close()
    assert [c.name for c in grandchild.checkpoints] == ["first", None, "second"]
    grandchild.close()
    assert sh.run("echo $x").stdout == "1c\n"


def test_the_tree_outlives_its_first_sandbox() -> None:
    first = Sandbox.create()
    sh = first.shell()
    sh.run("x=1")
    checkpoint = first.checkpoint("kept")
    with first.fork() as child:
        first.close()
        first.close()
        assert checkpoint.children != []  # reached through the child
        child.rollback(checkpoint)
        assert child.counterpart(sh).run("echo $x").stdout == "1\n"
        with pytest.raises(SandboxClosed, match="the sandbox is closed"):
            sh.run("true")


def test_counterpart(sandbox: Sandbox) -> None:
    before = sandbox.checkpoint()
    sh = sandbox.shell()
    child = sandbox.fork(at=before)
    with pytest.raises(StaleHandle):
        child.counterpart(sh)
    with Sandbox.create() as other, pytest.raises(ValueError, match="another tree"):
        other.counterpart(sh)
    with pytest.raises(TypeError, match="Shell or Process"):
        child.counterpart("sh")  # type: ignore[type-var]
    child.close()


def test_unread_output_is_copied(sandbox: Sandbox) -> None:
    p = sandbox.spawn("echo a; echo b; exec cat")
    assert p.stdout.readline(timeout=10) == "a\n"
    p.stdout.read_until("b")
    p.stdin.write("c\n")
    p.stdin.close()
    p.wait(timeout=10)
    children = sandbox.fork_many(2)
    for one in (sandbox, *children):
        assert one.counterpart(p).stdout.read(timeout=10) == "\nc\n"
        assert one.counterpart(p).exit_code == 0
    for child in children:
        child.close()


def test_wrong_counts(sandbox: Sandbox) -> None:
    for count in (0, -1, True, 1.5):
        with pytest.raises(ValueError, match="at least 1"):
            sandbox.fork_many(count)  # type: ignore[arg-type]


def test_too_many_processes_is_an_error_and_no_copy() -> None:
    with Sandbox.create(pids_limit=40) as sandbox:
        for _ in range(20):
            sandbox.spawn("exec sleep 1000")
        checkpoint = sandbox.checkpoint()
        before = len(sandbox.checkpoints)
        try:
            copies = sandbox.fork_many(3, at=checkpoint)
        except ForkError:
            copies = []
        for copy in copies:
            copy.close()
        assert len(sandbox.processes()) == 20
        assert len(sandbox.checkpoints) == before
