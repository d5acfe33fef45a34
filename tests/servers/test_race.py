"""Two branches of a running PostgreSQL race, in the middle of a transaction."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from deltabox import Branch, BranchStale, KeepReachable, Sandbox

from .postgres import Server

TURNS = 200


@pytest.mark.full  # the same with SQLite is in tests/api/test_branches.py
def test_two_race_two_hundred_times() -> None:
    """In each turn exactly one commits, the other is told, and the data are the winner's."""
    with Sandbox.create(keep=KeepReachable()) as sandbox, ThreadPoolExecutor(2) as pool:
        server = Server.create(sandbox)
        session = server.session()
        session.ask("CREATE TABLE t (turn int PRIMARY KEY, who text)")
        winners: list[str] = []
        for turn in range(TURNS):
            session.ask("BEGIN")
            session.ask(f"INSERT INTO t VALUES ({turn}, NULL)")
            ready = threading.Barrier(2)

            def race(branch: Branch, turn: int = turn, ready: threading.Barrier = ready) -> bool:
                inside = session.within(branch)
                inside.ask(f"UPDATE t SET who = '{branch.name}' WHERE turn = {turn}")
                inside.ask("COMMIT")
                ready.wait(60)
                try:
                    branch.commit()
                except BranchStale:
                    branch.abort()
                return branch.committed

            won = list(pool.map(race, [sandbox.branch(name) for name in "ab"]))
            assert sorted(won) == [False, True]
            winners.append("ab"[won.index(True)])
            if turn % 10 == 0:  # as other connections see it, too
                assert server.ask(f"SELECT who FROM t WHERE turn = {turn}") == winners[-1:]
        rows = [f"{turn}|{who}" for turn, who in enumerate(winners)]
        assert session.ask("SELECT * FROM t ORDER BY turn") == rows
        server.check_pages()
        server.check_log()
        session.close()
        server.stop("fast")
        server.start()
        assert server.ask("SELECT * FROM t ORDER BY turn") == rows
        server.check_log(starts=2)
