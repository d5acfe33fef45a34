"""PostgreSQL inside a sandbox: a cluster of our own, its server, sessions that stay open.

Nothing of the host's clusters or configuration is used: only the programs, which Debian keeps
outside of PATH, by version. Page checksums are on, so that pg_checksums and every read of a page
tell what a file lost. Everything is done as the user postgres: the server refuses root.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from deltabox import Process, Sandbox

HOME: Final = "/srv/postgres"
DATA: Final = f"{HOME}/data"
LOG: Final = f"{HOME}/log"
USER: Final = "postgres"
TCP: Final = "127.0.0.1"
WITHIN: Final = 60.0  # seconds, for what takes a few, however loaded the machine
ENVIRONMENT: Final = {"PGHOST": HOME, "PGUSER": USER, "PGDATABASE": "postgres"}
_END: Final = "-- that was all"


def programs() -> Path:
    """Where the programs of the newest installed version are."""
    found = Path("/usr/lib/postgresql").glob("*/bin/postgres")
    versions = sorted((path.parent for path in found), key=lambda path: int(path.parent.name))
    assert versions, "PostgreSQL is not installed; tools/system-packages does it"
    return versions[-1]


def until(reached: Callable[[], bool], what: str, *, within: float = WITHIN) -> None:
    deadline = time.monotonic() + within
    while not reached():
        assert time.monotonic() < deadline, f"{what}: not within {within:.0f} s"
        time.sleep(0.02)


@dataclass
class Session:
    """A psql, and so a connection, that stays open; a fork has its own copy."""

    process: Process

    def tell(self, sql: str) -> None:
        self.process.stdin.write(f"{sql};\n\\echo {_END}\n")

    def hear(self) -> list[str]:
        """The rows of the answer to what was told, columns separated by `|`."""
        try:
            return self.process.stdout.read_until(f"{_END}\n", timeout=WITHIN).splitlines()[:-1]
        except EOFError:
            said = self.process.stderr.read_available()
            raise AssertionError(f"psql ended: {said}") from None

    def ask(self, sql: str) -> list[str]:
        self.tell(sql)
        return self.hear()

    def close(self) -> None:
        self.process.stdin.close()
        assert self.process.wait(timeout=WITHIN) == 0

    def within(self, fork: Sandbox) -> Session:
        return Session(fork.counterpart(self.process))


@dataclass(frozen=True)
class Server:
    """The server of a sandbox; `within` is the same in a fork."""

    sandbox: Sandbox

    @classmethod
    def create(cls, sandbox: Sandbox, *settings: str) -> Server:
        """A new cluster, with lines added to its postgresql.conf, and its server, ready."""
        server = cls(sandbox)
        sandbox.run(["install", "-d", "-o", USER, HOME], check=True)
        options = ["--no-sync", "--data-checksums", "--auth", "trust", "--encoding", "UTF8"]
        server.run("initdb", *options, "--no-locale", "-D", DATA)
        configuration = sandbox.files.read_text(f"{DATA}/postgresql.conf")
        ours = [f"unix_socket_directories = '{HOME}'", *settings]
        sandbox.files.write_text(f"{DATA}/postgresql.conf", "\n".join([configuration, *ours, ""]))
        server.start()
        return server

    def within(self, fork: Sandbox) -> Server:
        return Server(fork)

    def run(self, program: str, *arguments: str, within: float = WITHIN) -> str:
        """A program of PostgreSQL, to its end, which must be a good one; what it said."""
        command = [str(programs() / program), *arguments]
        done = self.sandbox.run(command, user=USER, env=ENVIRONMENT, cwd=HOME, timeout=within)
        said = done.stdout + done.stderr
        assert done.exit_code == 0, f"{program} ended with {done.exit_code}:\n{said}\n{self.log()}"
        return said

    def spawn(self, program: str, *arguments: str) -> Process:
        command = [str(programs() / program), *arguments]
        return self.sandbox.spawn(command, user=USER, env=ENVIRONMENT, cwd=HOME)

    def start(self) -> None:
        """Start the server, whose log goes on in the same file."""
        command = f"exec {programs()}/postgres -D {DATA} >>{LOG} 2>&1"
        self.sandbox.spawn(["sh", "-c", command], user=USER, cwd=HOME)
        ready = [str(programs() / "pg_isready"), "--quiet"]

        def answers() -> bool:
            done = self.sandbox.run(ready, user=USER, env=ENVIRONMENT)
            return done.exit_code == 0

        until(answers, "the server is ready")

    def stop(self, mode: str) -> None:
        """Shut the server down: `fast` is in good order, `immediate` a crash."""
        self.run("pg_ctl", "stop", "-D", DATA, "-m", mode)

    def session(self, host: str = HOME) -> Session:
        """A new connection, over the unix socket or (`TCP`) over the loopback interface."""
        options = ["-X", "-q", "-A", "-t", "-v", "ON_ERROR_STOP=1", "-h", host]
        return Session(self.spawn("psql", *options))

    def ask(self, sql: str) -> list[str]:
        """The rows of an answer, in a connection for this question only."""
        return self.run_sql(sql, within=WITHIN).splitlines()

    def log(self) -> str:
        return self.sandbox.run(["cat", LOG]).stdout

    def grow(self, megabytes: int) -> None:
        """Make a table of that size, and have as much of it in shared memory as fits."""
        rows = megabytes * 1024  # of one KiB each
        self.run_sql(
            "CREATE TABLE ballast AS SELECT id, repeat(md5(id::text), 30) AS what"
            f" FROM generate_series(1, {rows}) AS id",
            "CREATE EXTENSION pg_prewarm",
            "SELECT pg_prewarm('ballast')",
            "CHECKPOINT",
        )

    def run_sql(self, *statements: str, within: float = 1000) -> str:
        """Statements of any duration, each a transaction of its own."""
        commands = [part for statement in statements for part in ("-c", statement)]
        return self.run("psql", "-X", "-q", "-A", "-t", *commands, within=within)

    # -- whether all is well -------------------------------------------------------------------

    def check_pages(self) -> None:
        """Every table and index of all databases, read through the server."""
        said = self.run("pg_amcheck", "--all", "--install-missing", "--heapallindexed", within=600)
        assert not said.strip(), said

    def check_log(self, *, starts: int = 1, recoveries: int = 0) -> None:
        """How often the server was started and had to recover; nothing worse is in its log."""
        log = self.log()
        assert log.count("starting PostgreSQL") == starts, log
        assert log.count("was not properly shut down") == recoveries, log
        bad = re.findall(r"(?:ERROR|FATAL|PANIC|WARNING): +(.*)", log)
        early = {"the database system is starting up"}  # what we are told when we ask for it
        early.add("the database system is not yet accepting connections")
        assert not set(bad) - early, log
        assert not re.search(r"terminated by signal|reinitializing", log), log
