"""A branch of a running PostgreSQL, beside what PostgreSQL itself has for that.

A server with a database of 1 GB, 128 MB of it in its shared memory, an open connection, and a row
that is written before each fork. Its branches, one after the other:

- "fork": `Sandbox.fork` of the running server, until the fork's copy of the open connection has
  answered `SELECT 1`. A checkpoint of the present state is part of it, whose pause is given too.
  The copy has everything: connections, transactions, all databases. "from a checkpoint" is the same
  with `at=`, when the state that is branched has been captured before.
- "CREATE DATABASE": a copy of the database in the same server, by `STRATEGY = FILE_COPY` from it as
  a template, until a new connection to the copy has answered. Nobody may be connected to the
  template meanwhile, so for that the open connection is another database's.
- "pg_basebackup": a copy of the whole cluster from the running server (`--checkpoint fast`, no
  wait for the disk), and a second server started on it, until that has answered.

The rivals run in a fork of the same server, so on the same disk image, where fsync(2) does not
wait for the host's disk (docs/deltafs.md); they are the faster for it. Each copy of theirs is
removed before the next, outside the clock.

Memory of a fork is how much less MemAvailable is while several forks are open and have answered,
divided by their number; disk is how much more the tree's image takes, likewise. The rivals' is what
their files take.

    python bench/postgres.py [--size MB] --json out.json
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import click
from report import Recorder, Wrong, finish, meminfo, options, quantile

from deltabox import KeepLast, Process, Sandbox

HOME = "/srv/postgres"
COPY = f"{HOME}/copy"
USER = "postgres"
ENVIRONMENT = {"PGHOST": HOME, "PGUSER": USER, "PGDATABASE": "postgres"}
WITHIN = 600.0
FORKS, QUICK_FORKS = 40, 10
RIVALS, QUICK_RIVALS = 6, 2
TOGETHER = 16  # forks that are open at the same time when memory and disk are measured
ROUNDS, QUICK_ROUNDS = 5, 2
SETTLED = 1.0  # seconds after which nothing moves any more that a fork has left behind
SIZE, QUICK_SIZE = 1024, 100  # MB

FORK = "fork of the running server, first answer"
AT = "fork from a checkpoint, first answer"
CREATE = "CREATE DATABASE (FILE_COPY), first answer"
BACKUP = "pg_basebackup and start, first answer"


def programs() -> Path:
    """Where the programs of the newest installed version are."""
    found = Path("/usr/lib/postgresql").glob("*/bin/postgres")
    versions = sorted((path.parent for path in found), key=lambda path: int(path.parent.name))
    if not versions:
        raise click.ClickException("PostgreSQL is not installed; tools/system-packages does it")
    return versions[-1]


class Server:
    """The server of a sandbox, as its user sees it from inside."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox

    def run(self, program: str, *arguments: str) -> str:
        command = [str(programs() / program), *arguments]
        done = self.sandbox.run(
            command, user=USER, env=ENVIRONMENT, cwd=HOME, timeout=WITHIN, check=True
        )
        return done.stdout.strip()

    def ask(self, sql: str, *, database: str = "postgres", port: int = 5432) -> str:
        where = ["-p", str(port), "-d", database]
        return self.run("psql", "-X", "-q", "-A", "-t", *where, "-c", sql)

    def start(self, data: str, port: int) -> None:
        """Start a server, and wait until it lets somebody in."""
        log = f"{data}.log"
        command = f"exec {programs()}/postgres -D {data} -k {HOME} -p {port} >{log} 2>&1"
        self.sandbox.spawn(["sh", "-c", command], user=USER, cwd=HOME)
        ready = f"until {programs()}/pg_isready -q -p {port}; do sleep 0.01; done"
        self.sandbox.run(ready, user=USER, env=ENVIRONMENT, timeout=WITHIN, check=True)

    def create(self, megabytes: int) -> None:
        self.sandbox.run(["install", "-d", "-o", USER, HOME], check=True)
        self.run("initdb", "--no-sync", "--auth", "trust", "--no-locale", "-D", f"{HOME}/data")
        self.start(f"{HOME}/data", 5432)
        self.ask("CREATE DATABASE big")
        self.ask(
            "CREATE TABLE ballast AS SELECT id, repeat(md5(id::text), 30) AS what"
            f" FROM generate_series(1, {megabytes} * 1024) AS id",
            database="big",
        )
        self.ask("CREATE EXTENSION pg_prewarm", database="big")
        self.ask("VACUUM ANALYZE ballast", database="big")
        self.ask("SELECT pg_prewarm('ballast')", database="big")
        self.ask("CREATE TABLE tick (n int)")
        self.ask("CHECKPOINT")

    def connect(self) -> Process:
        """A psql that stays; it says what its input asks for."""
        command = [str(programs() / "psql"), "-X", "-q", "-A", "-t"]
        return self.sandbox.spawn(command, user=USER, env=ENVIRONMENT)


def answer(connection: Process, sql: str) -> str:
    connection.stdin.write(f"{sql};\n")
    said = connection.stdout.readline(timeout=WITHIN).strip()
    if not said:
        raise Wrong(f"psql ended: {connection.stderr.read_available()}")
    return said


class Branches:
    """The server, its open connection, and branches of it of every kind."""

    def __init__(self, recorder: Recorder, opened: ExitStack, megabytes: int) -> None:
        self.recorder = recorder
        self.sandbox = opened.enter_context(Sandbox.create(keep=KeepLast(1)))
        self.server = Server(self.sandbox)
        self.server.create(megabytes)
        self.connection = self.server.connect()
        self.rows = 0
        with self.sandbox.fork():  # the first one captures everything, once
            pass
        fork = opened.enter_context(self.sandbox.fork())
        self.rival = Server(fork)
        used = int(self.server.ask("SELECT pg_database_size('big')"))
        recorder.note(f"the database takes {used / 1e6:.0f} MB")

    def write(self) -> None:
        self.rows += 1
        sql = f"INSERT INTO tick VALUES ({self.rows}) RETURNING n"
        if answer(self.connection, sql) != str(self.rows):
            raise Wrong("a row was not written")

    def _check(self, fork: Sandbox) -> None:
        found = answer(fork.counterpart(self.connection), "SELECT count(*) FROM tick")
        if found != str(self.rows):
            raise Wrong(f"a fork has {found} rows of {self.rows}")

    def _timed(self, name: str, make: Callable[[], Sandbox]) -> None:
        began = time.perf_counter()
        with make() as fork:
            made = time.perf_counter()
            said = answer(fork.counterpart(self.connection), "SELECT 1")
            answered = time.perf_counter()
            if said != "1":
                raise Wrong(f"a fork answered {said}")
            self._check(fork)
        self.recorder.add(name, (answered - began) * 1e3)
        self.recorder.add(name.replace("first answer", "call"), (made - began) * 1e3)

    def forks(self, count: int) -> None:
        for _ in range(count):
            self.write()
            self._timed(FORK, self.sandbox.fork)
            head = self.sandbox.head
            if head is not None:
                self.recorder.add("pause of the running server", head.stats.pause_ms)

    def forks_at(self, count: int) -> None:
        self.write()
        checkpoint = self.sandbox.checkpoint()
        checkpoint.hold()
        for _ in range(count):
            self._timed(AT, partial(self.sandbox.fork, at=checkpoint))
        checkpoint.release()

    def rollbacks(self, count: int) -> None:
        checkpoint = self.sandbox.checkpoint()
        for _ in range(count):
            answer(self.connection, "INSERT INTO tick VALUES (0) RETURNING n")
            began = time.perf_counter()
            self.sandbox.rollback(checkpoint)
            said = answer(self.connection, "SELECT count(*) FROM tick")
            self.recorder.add("rollback, first answer", (time.perf_counter() - began) * 1e3)
            if said != str(self.rows):
                raise Wrong(f"after a rollback there are {said} rows of {self.rows}")

    def taken(self, rounds: int) -> None:
        """Memory and disk of forks that have answered."""
        for _ in range(rounds):
            self.write()
            checkpoint = self.sandbox.checkpoint()
            time.sleep(SETTLED)
            memory, disk = meminfo("MemAvailable"), self.sandbox.usage.disk
            with ExitStack() as opened:
                for fork in self.sandbox.fork_many(TOGETHER, at=checkpoint):
                    opened.enter_context(fork)
                    self._check(fork)
                time.sleep(SETTLED)
                used = (memory - meminfo("MemAvailable")) / 1024 / TOGETHER
                self.recorder.add("memory of a fork", used)
                grown = (self.sandbox.usage.disk - disk) / (1 << 20) / TOGETHER
                self.recorder.add("disk of a fork", grown)

    # -- the rivals ----------------------------------------------------------------------------

    def create_database(self, count: int) -> None:
        for _ in range(count):
            began = time.perf_counter()
            self.rival.ask("CREATE DATABASE branch STRATEGY = FILE_COPY TEMPLATE big")
            said = self.rival.ask("SELECT 1", database="branch")
            self.recorder.add(CREATE, (time.perf_counter() - began) * 1e3)
            if said != "1":
                raise Wrong(f"the copy answered {said}")
            used = int(self.rival.ask("SELECT pg_database_size('branch')"))
            self.recorder.add("disk of CREATE DATABASE", used / (1 << 20))
            self.rival.ask("DROP DATABASE branch")

    def base_backup(self, count: int) -> None:
        for _ in range(count):
            began = time.perf_counter()
            self.rival.run("pg_basebackup", "--no-sync", "--checkpoint", "fast", "-D", COPY)
            self.rival.start(COPY, 5433)
            said = self.rival.ask("SELECT 1", port=5433)
            self.recorder.add(BACKUP, (time.perf_counter() - began) * 1e3)
            if said != "1":
                raise Wrong(f"the copy answered {said}")
            kilobytes = self.rival.sandbox.run(["du", "-sk", COPY], check=True).stdout.split()[0]
            self.recorder.add("disk of pg_basebackup", int(kilobytes) / 1024)
            self.rival.run("pg_ctl", "stop", "-D", COPY, "-m", "immediate")
            self.rival.sandbox.run(["rm", "-rf", COPY], check=True)


def compare(recorder: Recorder) -> None:
    """How many times as long the rivals take, by medians."""
    ours = recorder.values(FORK)
    for name, rival in (("CREATE DATABASE : fork", CREATE), ("pg_basebackup : fork", BACKUP)):
        theirs = recorder.values(rival)
        if ours and theirs:
            recorder.add(name, quantile(theirs, 0.5) / quantile(ours, 0.5))


def expect(recorder: Recorder) -> None:
    for name in ("memory of a fork", "disk of a fork"):
        recorder.expect(name, unit="MB")
    for name in ("CREATE DATABASE", "pg_basebackup"):
        recorder.expect(f"disk of {name}", unit="MB")
    for name in ("CREATE DATABASE : fork", "pg_basebackup : fork"):
        recorder.expect(name, unit="times")


@click.command()
@options
@click.option("--size", type=click.IntRange(min=1), help="MB of data; 1024, or 100 with --quick.")
@click.option("--forks", type=click.IntRange(min=1), help="How many; 40, or 10 with --quick.")
@click.option("--rivals", type=click.IntRange(min=1), help="Of each; 6, or 2 with --quick.")
def main(
    *,
    output: Path | None,
    quick: bool,
    budget: float | None,
    size: int | None,
    forks: int | None,
    rivals: int | None,
) -> None:
    """Measure branches of a running PostgreSQL."""
    recorder = Recorder("postgres", what=__doc__, budget=budget, quick=quick)
    expect(recorder)
    megabytes = size or (QUICK_SIZE if quick else SIZE)
    many = forks or (QUICK_FORKS if quick else FORKS)
    few = rivals or (QUICK_RIVALS if quick else RIVALS)
    made: list[Branches] = []
    with ExitStack() as opened:

        def start() -> None:
            made.append(Branches(recorder, opened, megabytes))

        recorder.attempt("the server", start, limit=WITHIN)
        for branches in made:
            recorder.attempt(FORK, partial(branches.forks, many), limit=WITHIN)
            recorder.attempt(AT, partial(branches.forks_at, many), limit=WITHIN)
            recorder.attempt("rollbacks", partial(branches.rollbacks, many), limit=WITHIN)
            taken = partial(branches.taken, QUICK_ROUNDS if quick else ROUNDS)
            recorder.attempt("memory and disk", taken, limit=WITHIN)
            recorder.attempt(CREATE, partial(branches.create_database, few), limit=WITHIN)
            recorder.attempt(BACKUP, partial(branches.base_backup, few), limit=WITHIN)
    compare(recorder)
    finish(recorder, output)


if __name__ == "__main__":
    main()
