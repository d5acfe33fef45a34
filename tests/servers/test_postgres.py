"""PostgreSQL: transactions that are open in several copies, a load that does not notice rollbacks,
forks whose time does not depend on how much data there is, its own regression tests.
"""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack
from operator import gt
from pathlib import Path

import pytest

from deltabox import KeepLast, Process, Sandbox
from tests.conftest import keeper_of_its_own

from . import regression
from .disturbance import disturb
from .postgres import DATA, HOME, TCP, WITHIN, Server, Session, until

SMALL, LARGE = 5, 66  # scale factors of pgbench: 75 MB and 1 GB


@pytest.fixture(
    scope="module",
    params=[pytest.param(SMALL, id="75MB"), pytest.param(LARGE, id="1GB", marks=pytest.mark.full)],
)
def origin(request: pytest.FixtureRequest) -> Iterator[Server]:
    """A running server with the tables of pgbench. Tests work in forks of it."""
    with Sandbox.create() as sandbox:
        server = Server.create(sandbox, "max_wal_size = 4GB")
        server.run("pgbench", "-i", "-q", "-s", str(request.param), within=600)
        yield server


@pytest.fixture
def server(origin: Server) -> Iterator[Server]:
    with origin.sandbox.fork() as fork:
        yield origin.within(fork)


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    """Closes what a test has opened, however it ends."""
    with ExitStack() as stack:
        yield stack


CLIENTS = 8
COPIES = 4


def _open_transactions(server: Server) -> list[Session]:
    """Clients over TCP and over the socket, with rows that nobody else sees yet."""
    server.ask("CREATE TABLE entry (client int, at text, PRIMARY KEY (client, at))")
    sessions = [server.session(TCP if n % 2 else HOME) for n in range(CLIENTS)]
    for n, session in enumerate(sessions):
        session.ask("BEGIN")
        session.ask(f"INSERT INTO entry VALUES ({n}, 'before')")
        session.ask(f"UPDATE pgbench_accounts SET abalance = {n} WHERE aid = {n + 1}")
    # the last one waits, in the server, for a row that the first one has changed
    sessions[-1].tell("UPDATE pgbench_accounts SET abalance = abalance + 100 WHERE aid = 1")
    waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
    until(lambda: server.ask(waiting) == ["1"], "a client waits for another")
    return sessions


def _entries(asker: Server | Session) -> set[str]:
    return set(asker.ask("SELECT client, at FROM entry"))


def test_open_transactions_go_on_in_every_copy(server: Server, opened: ExitStack) -> None:
    """Each copy writes and commits something else, all at the same time; one client of each takes
    back what it did. At the end one copy is stopped and one crashes: what is in its files is what
    its clients were told.
    """
    sessions = _open_transactions(server)
    backends = [session.ask("SELECT pg_backend_pid()") for session in sessions[:-1]]
    checkpoint = server.sandbox.checkpoint()
    forks = server.sandbox.fork_many(COPIES, at=checkpoint)
    for fork in forks:
        opened.enter_context(fork)
    copies = [(server.within(fork), [one.within(fork) for one in sessions]) for fork in forks]
    everybody = [*copies, (server, sessions)]
    for k, (_, inside) in enumerate(everybody):
        assert [one.ask("SELECT pg_backend_pid()") for one in inside[:-1]] == backends
        for n, session in enumerate(inside[:-1]):
            session.ask(f"INSERT INTO entry VALUES ({n}, 'in {k}')")
            assert _entries(session) == {f"{n}|before", f"{n}|in {k}"}
    for k, (copy, inside) in enumerate(everybody):
        assert _entries(copy) == set(), "seen before it was committed"
        for n, session in enumerate(inside[:-1]):
            session.ask("ROLLBACK" if n == k + 1 else "COMMIT")
        assert inside[-1].hear() == []  # it has what it waited for
        inside[-1].ask("COMMIT")
    expected = []
    for k, (copy, _) in enumerate(everybody):
        kept = [n for n in range(CLIENTS - 1) if n != k + 1]
        rows = {f"{n}|{at}" for n in kept for at in ("before", f"in {k}")} | {"7|before"}
        assert _entries(copy) == rows
        balances = {f"{n + 1}|{n}" for n in kept if n} | {"1|100", "8|7"}
        changed = "SELECT aid, abalance FROM pgbench_accounts WHERE abalance <> 0"
        assert set(copy.ask(changed)) == balances
        expected.append((rows, balances))
        copy.check_pages()
        copy.check_log()

    (stopped, clients), (crashed, _) = copies[:2]
    for client in clients:
        client.close()
    stopped.stop("fast")
    stopped.run("pg_checksums", "--check", "-D", DATA)
    crashed.stop("immediate")
    for recoveries, copy in enumerate((stopped, crashed)):
        rows, balances = expected[recoveries]
        copy.start()
        assert _entries(copy) == rows
        assert set(copy.ask(changed)) == balances
        copy.check_log(starts=2, recoveries=recoveries)


TRANSFERS = 2000  # of each client
ACCOUNTS = 1000
ROLLBACKS = 20
# A client counts its own transactions, in a variable that only pgbench has: one that it was told is
# done and that is not there, or is there twice, leaves its number missing or taken.
TRANSFER = f"""
\\set n :n + 1
\\set client :client_id + :first
\\set one random(1, {ACCOUNTS})
\\set other random(1, {ACCOUNTS})
\\set low least(:one, :other)
\\set high greatest(:one, :other)
\\set amount random(-100, 100)
BEGIN;
UPDATE account SET balance = balance - :amount WHERE id = :low;
UPDATE account SET balance = balance + :amount WHERE id = :high;
UPDATE client SET transfers = transfers + 1, total = total + :amount WHERE id = :client;
INSERT INTO transfer VALUES (:client, :n, :low, :high, :amount);
COMMIT;
"""
TABLES = f"""
CREATE TABLE account AS SELECT id, 1000::bigint AS balance FROM generate_series(1, {ACCOUNTS}) id;
ALTER TABLE account ADD PRIMARY KEY (id);
CREATE TABLE client AS
  SELECT id, 0::bigint AS transfers, 0::bigint AS total FROM generate_series(0, {CLIENTS - 1}) id;
ALTER TABLE client ADD PRIMARY KEY (id);
CREATE TABLE transfer (client int, n int, low int, high int, amount int, PRIMARY KEY (client, n));
"""
# nothing may be in the answer to any of these
WRONG = {
    "money was made or lost": f"""
SELECT sum(balance) FROM account HAVING sum(balance) <> {1000 * ACCOUNTS}""",
    "a client's transfers are not those it has counted": """
SELECT id, transfers, total, count(n), sum(amount), max(n)
FROM client LEFT JOIN transfer ON client = id GROUP BY id, transfers, total
HAVING transfers <> count(n) OR total <> coalesce(sum(amount), 0)
    OR transfers <> coalesce(max(n), 0)""",
    "an account is not the sum of its transfers": """
SELECT id, balance, sum(change) FROM account
JOIN (SELECT low AS id, -amount AS change FROM transfer
      UNION ALL SELECT high, amount FROM transfer) changes USING (id)
GROUP BY id, balance HAVING balance <> 1000 + sum(change)""",
}
DONE = "SELECT count(*) FROM transfer"


def _load(server: Server) -> list[Process]:
    """Two pgbench, with half of the clients each, one over TCP and one over the socket."""
    for statement in filter(str.strip, TABLES.split(";")):
        server.ask(statement)
    script = f"{HOME}/transfer.sql"
    server.sandbox.files.write_text(script, TRANSFER)
    half = CLIENTS // 2
    options = ["-n", "-f", script, "-c", str(half), "-j", "2", "-t", str(TRANSFERS), "-D", "n=0"]
    return [
        server.spawn("pgbench", *options, "-h", host, "-D", f"first={first}")
        for host, first in ((TCP, 0), (HOME, half))
    ]


def test_a_load_does_not_notice_rollbacks(server: Server) -> None:
    loads = _load(server)
    asks = server.session()  # stays open, too

    def count() -> int:
        (row,) = asks.ask(DONE)
        return int(row)

    def more_than(least: int) -> None:
        until(lambda: count() > least, "the load goes on")

    def each() -> list[int]:
        return [int(row) for row in asks.ask("SELECT transfers FROM client ORDER BY id")]

    def all_go_on() -> None:
        """No client of the load is left behind."""
        before = each()
        until(lambda: all(map(gt, each(), before)), f"each client goes on from {before}")

    def check() -> None:
        for what, query in WRONG.items():
            assert asks.ask(query) == [], what

    pauses, times = [], []
    more_than(0)
    for turn in range(ROLLBACKS):
        if turn % 5 == 0:  # from then on the state that is kept is of one that came back itself
            checkpoint = server.sandbox.checkpoint()
            pauses.append(checkpoint.stats.pause_ms)
            least = count()
        more_than(least + 20)
        began = time.perf_counter()
        server.sandbox.rollback(checkpoint)
        times.append((time.perf_counter() - began) * 1e3)
        check()
        all_go_on()
    for load in loads:
        assert load.wait(timeout=WITHIN) == 0, load.stderr.read()
        said = load.stdout.read()
        all_of_it = TRANSFERS * CLIENTS // 2
        assert f"actually processed: {all_of_it}/{all_of_it}\n" in said, said
        assert "failed transactions: 0 " in said, said
        assert not re.search("error|abort|fail", load.stderr.read()), said
    assert count() == TRANSFERS * CLIENTS
    check()
    server.check_pages()
    server.check_log()
    print(f"pauses {pauses}, rollbacks {statistics.median(times):.1f} ms")


def _outcome(server: Server, work: Process) -> tuple[dict[str, str], str]:
    work.wait(timeout=1000)
    return regression.outcomes(work.stdout.read()), regression.differences(server)


@pytest.mark.full
@pytest.mark.parametrize("suite", [regression.REGRESS, regression.ISOLATION], ids=lambda s: s.name)
def test_its_own_tests_do_not_notice_us(
    sandbox: Sandbox, opened: ExitStack, suite: regression.Suite
) -> None:
    server = Server.create(sandbox)
    regression.prepare(server)
    undisturbed = server.within(opened.enter_context(sandbox.fork()))
    expected = _outcome(undisturbed, suite.start(undisturbed))
    assert set(expected[0].values()) == {"ok"} and len(expected[0]) > 100, expected
    work = suite.start(server)
    done = disturb(sandbox, work)
    print(f"{len(expected[0])} tests, {done}")
    assert _outcome(server, work) == expected
    assert not done.refused
    assert done.checkpoints >= 5 and done.rollbacks, "they were too fast to say something"


SIZES = (100, 1000, 5000)  # MB
WARM, FORKS = 3, 30
FLAT = 1.3  # times, the largest to the smallest


@pytest.fixture
def believing(tmp_path: Path) -> Iterator[None]:
    """An engine that does not compare each checkpoint with the memory it is of: times count."""
    with keeper_of_its_own(tmp_path, DELTABOX_VERIFY="0"):
        yield


def _fork_ms(server: Server, session: Session, number: int) -> float:
    """From the call until the copy of an open connection has answered, in milliseconds.

    A row is changed before, so that there is something new to be captured each time.
    """
    session.ask(f"INSERT INTO tick VALUES ({number})")
    began = time.perf_counter()
    with server.sandbox.fork() as fork:
        answer = session.within(fork).ask("SELECT count(*) FROM tick")
        took = time.perf_counter() - began
    assert answer == [str(number + 1)]
    return took * 1e3


@pytest.mark.full
def test_the_time_of_a_fork_does_not_depend_on_the_data(believing: None, opened: ExitStack) -> None:
    servers: dict[int, tuple[Server, Session]] = {}
    for size in SIZES:
        sandbox = opened.enter_context(Sandbox.create(keep=KeepLast(1)))
        # faster: what is written into a table in the transaction that made it is not logged
        server = Server.create(
            sandbox, "wal_level = minimal", "max_wal_senders = 0", "autovacuum = off"
        )
        server.grow(size)
        assert int(server.ask("SELECT pg_database_size(current_database())")[0]) > size * 1e6
        session = server.session()
        session.ask("CREATE TABLE tick (n int)")
        servers[size] = server, session
    times: dict[int, list[float]] = {size: [] for size in SIZES}
    for number in range(
        WARM + FORKS
    ):  # by turns: a busy moment of the machine falls on all of them
        for size, (server, session) in servers.items():
            took = _fork_ms(server, session, number)
            if number >= WARM:  # the first one captures everything
                times[size].append(took)
    medians = {size: round(statistics.median(values), 1) for size, values in times.items()}
    print(f"milliseconds for a fork by MB of data: {medians}")
    assert max(medians.values()) <= FLAT * min(medians.values()), medians
