"""Branches: forks that take their parent's place, or leave no trace."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from deltabox import (
    Branch,
    BranchStale,
    RolledBack,
    Sandbox,
    SandboxClosed,
    StaleHandle,
    UnsupportedState,
)
from tests.probe import Probe


def test_a_block_commits_files_and_programs(sandbox: Sandbox) -> None:
    sh = sandbox.shell()
    sh.run("x=before; echo before > /tmp/f")
    with sandbox.branch("try") as branch:
        assert (branch.name, branch.parent) == ("try", sandbox)
        inside = branch.counterpart(sh)
        inside.run("x=after; echo after > /tmp/f; sleep 1000 &")
        assert sh.run("echo $x; cat /tmp/f").stdout == "before\nbefore\n"
        assert [change.path for change in branch.diff()] == ["/tmp/f"]
        assert "+after" in branch.patch()
    assert branch.committed and branch.closed
    assert sh.run("echo $x; cat /tmp/f; jobs -r").stdout.split()[:2] == ["after", "after"]
    # a handle of the branch is one of the sandbox now
    assert inside.sandbox is sandbox and inside.run("echo $x").stdout == "after\n"
    assert len(sandbox.processes()) == 2
    with pytest.raises(SandboxClosed):
        branch.run("true")


def test_an_exception_aborts(sandbox: Sandbox) -> None:
    sh = sandbox.shell()
    sh.run("x=before")
    with pytest.raises(ZeroDivisionError), sandbox.branch() as branch:
        branch.counterpart(sh).run("x=after; rm -rf /usr/lib")
        raise ZeroDivisionError
    assert branch.closed and not branch.committed
    assert sh.run("echo $x; ls -d /usr/lib").stdout == "before\n/usr/lib\n"


def test_nested(sandbox: Sandbox) -> None:
    sh = sandbox.shell()
    sh.run("x=0")
    with sandbox.branch("outer") as outer:
        outer.counterpart(sh).run("x=${x}1")
        with outer.branch("inner") as inner:
            inner.counterpart(sh).run("x=${x}2")
            made = inner.spawn(["cat"])
        assert outer.counterpart(sh).run("echo $x").stdout == "012\n"
        with pytest.raises(ZeroDivisionError), outer.branch("other"):
            raise ZeroDivisionError
        assert made.sandbox is outer and sh.run("echo $x").stdout == "0\n"
    assert made.sandbox is sandbox
    made.stdin.write("still there\n")
    assert made.stdout.readline(timeout=10) == "still there\n"
    assert sh.run("echo $x").stdout == "012\n"


def test_a_branch_of_a_branch_outlives_its_commit(sandbox: Sandbox) -> None:
    """The inner one's parent is the sandbox itself, once the outer one has become that."""
    sh = sandbox.shell()
    outer = sandbox.branch()
    outer.counterpart(sh).run("x=outer")
    inner = outer.branch()
    inner.counterpart(sh).run("x=$x-inner")
    outer.commit()
    assert inner.parent is sandbox and sh.run("echo $x").stdout == "outer\n"
    inner.commit()
    assert sh.run("echo $x").stdout == "outer-inner\n"


def test_the_first_commit_wins(sandbox: Sandbox) -> None:
    sh = sandbox.shell()
    first, second, third = (sandbox.branch(name) for name in "abc")
    second.counterpart(sh).run("x=second")
    third.counterpart(sh).run("x=third")
    second.commit()
    with pytest.raises(BranchStale):
        first.commit()
    with pytest.raises(BranchStale), third:
        third.counterpart(sh).run("x=more")
    assert third.closed and not third.committed
    # a loser runs on until it is closed
    assert first.counterpart(sh).run("echo [$x]").stdout == "[]\n"
    first.abort()
    assert sh.run("echo $x").stdout == "second\n"
    with sandbox.branch() as fourth:
        fourth.counterpart(sh).run("x=fourth")
    assert sh.run("echo $x").stdout == "fourth\n"


def test_a_rollback_makes_stale_a_checkpoint_does_not(sandbox: Sandbox) -> None:
    start = sandbox.checkpoint()
    stale = sandbox.branch()
    sandbox.rollback(start)
    with pytest.raises(BranchStale, match="rollback"):
        stale.commit()
    stale.abort()
    with sandbox.branch() as branch:
        sandbox.checkpoint()
        branch.rollback(branch.checkpoint())
        branch.rollback(start)


def test_checkpoints_stay(sandbox: Sandbox) -> None:
    """Those of the parent and those of the branch: both are the sandbox's own past."""
    sh = sandbox.shell()
    sh.run("x=1")
    before = sandbox.checkpoint()
    with sandbox.branch() as branch:
        assert branch.origin in sandbox.checkpoints
        branch.counterpart(sh).run("x=2")
        within = branch.checkpoint("within")
        branch.counterpart(sh).run("x=3")
    assert sandbox.head == within and sh.run("echo $x; x=4").stdout == "3\n"
    for _ in range(2):
        sandbox.rollback("within")
        assert sh.run("echo $x").stdout == "2\n"
        sandbox.rollback(before)
        assert sh.run("echo $x").stdout == "1\n"
    with sandbox.fork(at="within") as fork:
        assert fork.counterpart(sh).run("echo $x").stdout == "2\n"


def test_calls_and_handles(sandbox: Sandbox) -> None:
    """What waits in the branch goes on, what waits in the parent is cut off."""
    branch = sandbox.branch()
    late = sandbox.spawn(["sleep", "1000"])
    cut: list[BaseException] = []

    def wait() -> None:
        try:
            sandbox.run("sleep 1000")
        except RolledBack as error:
            cut.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    answers: list[str] = []
    goes_on = threading.Thread(
        target=lambda: answers.append(branch.run("sleep 1; echo done").stdout)
    )
    goes_on.start()
    while len(branch.processes()) < 2 or len(sandbox.processes()) < 2:
        pass
    branch.commit()
    waiting.join(10)
    goes_on.join(10)
    assert len(cut) == 1 and answers == ["done\n"]
    with pytest.raises(StaleHandle):
        late.wait(timeout=5)


def test_what_cannot_be_captured_can_be_committed(sandbox: Sandbox) -> None:
    with sandbox.branch() as branch:
        probe = Probe.start(branch)
        probe.do("import socket; s = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)")
        with pytest.raises(UnsupportedState):
            branch.checkpoint()
    assert probe.ask("s.fileno()") > 0
    with pytest.raises(UnsupportedState):
        sandbox.branch()


def test_a_hundred_in_a_row(sandbox: Sandbox) -> None:
    sh = sandbox.shell()
    sh.run("n=0")
    for turn in range(100):
        with sandbox.branch() as branch:
            branch.counterpart(sh).run("n=$((n + 1)); echo $n > /tmp/n")
            if turn % 10 == 9:
                branch.checkpoint()
    assert sh.run("echo $n; cat /tmp/n").stdout == "100\n100\n"
    assert len(sandbox.processes()) == 1


def test_wrong_use(sandbox: Sandbox) -> None:
    branch = sandbox.branch()
    branch.commit()
    for call in (branch.commit, branch.checkpoint, branch.branch):
        with pytest.raises(SandboxClosed):
            call()
    branch.abort()  # no error, and nothing happens
    assert sandbox.run("echo here").stdout == "here\n"
    orphan = sandbox.branch()
    sandbox.close()
    with pytest.raises(SandboxClosed):
        orphan.commit()
    assert orphan.run("echo here").stdout == "here\n"
    orphan.close()


_DATABASE = """
import sqlite3
db = sqlite3.connect('/srv/data', isolation_level=None)
db.execute('PRAGMA journal_mode = WAL')
db.execute('CREATE TABLE t (turn INTEGER, who TEXT)')
"""


def test_two_race_two_hundred_times(sandbox: Sandbox) -> None:
    """With a database open, in the middle of a transaction: one commits, the other is told."""
    probe = Probe.start(sandbox)
    probe.do(_DATABASE)
    winners = []
    with ThreadPoolExecutor(2) as pool:
        for turn in range(200):
            probe.do(f"db.execute('BEGIN'); db.execute('INSERT INTO t VALUES ({turn}, NULL)')")
            branches = [sandbox.branch(name) for name in "ab"]
            ready = threading.Barrier(2)

            def race(branch: Branch, turn: int = turn, ready: threading.Barrier = ready) -> bool:
                inside = probe.within(branch)
                who = f"who = '{branch.name}' WHERE turn = {turn}"
                inside.do(f'db.execute("UPDATE t SET {who}")')
                inside.do("db.execute('COMMIT')")
                ready.wait(30)
                try:
                    branch.commit()
                except BranchStale:
                    branch.abort()
                return branch.committed

            won = list(pool.map(race, branches))
            assert sorted(won) == [False, True]
            winners.append("ab"[won.index(True)])
    rows = [[turn, who] for turn, who in enumerate(winners)]
    assert probe.ask("db.execute('SELECT * FROM t ORDER BY turn').fetchall()") == rows
    assert probe.ask("db.execute('PRAGMA integrity_check').fetchall()") == [["ok"]]
    assert len(sandbox.processes()) == 1
    assert set(winners) == {"a", "b"}
