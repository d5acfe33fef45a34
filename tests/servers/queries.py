"""A program that has a DuckDB database open: a transaction, and queries on several threads.

It takes words from standard input and answers each with a line. Started with `recover`, it opens
what another left behind, and tells what that had committed.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import duckdb
from duckdb import DuckDBPyConnection as Connection

PATH = "/srv/data.duckdb"
PATIENCE = 50.0  # seconds
WRITERS, READERS = 2, 2
ROWS = 400_000
# nothing is written into the database before it is closed: what was committed is in the log only
SETTINGS: dict[str, str | bool | int | float | list[str]] = {
    "threads": 4,
    "memory_limit": "256MB",
    "checkpoint_threshold": "1TB",
}
QUERIES = (
    # each on all of its threads: a table of groups, and sorting
    "SELECT sum(n), bit_xor(x)"
    " FROM (SELECT part, count(*) AS n, bit_xor(h) AS x FROM large GROUP BY part)",
    "SELECT sum(place), bit_xor(h)"
    " FROM (SELECT h, row_number() OVER (PARTITION BY part ORDER BY h) AS place FROM large)",
)


def one(connection: Connection, query: str) -> tuple[Any, ...]:
    row = connection.execute(query).fetchone()
    assert row is not None
    return tuple(row)


def kept(connection: Connection) -> list[int]:
    rows = connection.execute("SELECT number FROM kept ORDER BY rowid").fetchall()
    return [number for (number,) in rows]


def without_gap(connection: Connection, writer: int) -> bool:
    """Whether what a writer has counted is 0, 1, 2, ..., each once."""
    count, different, least, most = one(
        connection,
        "SELECT count(*), count(DISTINCT number), min(number), max(number)"
        f" FROM counted WHERE writer = {writer}",
    )
    return not count or (different, least, most) == (count, 0, count - 1)


class Database:
    """What goes on by itself: writers whose every third transaction is undone, and readers."""

    def __init__(self) -> None:
        self.main = duckdb.connect(PATH, config=SETTINGS)
        self.main.execute("CREATE TABLE kept (number INTEGER)")
        self.main.execute("CREATE TABLE counted (writer INTEGER, number INTEGER)")
        self.main.execute(
            "CREATE TABLE large AS"
            f" SELECT i, hash(i) AS h, i % 1000 AS part FROM range({ROWS}) t(i)"
        )
        self.main.execute("BEGIN")
        self.beside = self.main.cursor()
        self.right = [one(self.beside, query) for query in QUERIES]
        self.broken: list[str] = []
        self.rounds = [0] * (WRITERS + READERS)
        for who in range(WRITERS):
            self.start(who, self.write)
        for who in range(WRITERS, WRITERS + READERS):
            self.start(who, self.read)

    def start(self, who: int, work: Callable[[int, Connection], None]) -> None:
        connection = self.main.cursor()

        def run() -> None:
            try:
                while True:
                    work(who, connection)
                    self.rounds[who] += 1
                    time.sleep(0.005)
            except BaseException as error:
                self.broken.append(f"{who}: {error!r}")

        threading.Thread(target=run, daemon=True).start()

    def write(self, who: int, connection: Connection) -> None:
        connection.execute("BEGIN")
        connection.execute(
            f"INSERT INTO counted SELECT {who}, count(*) FROM counted WHERE writer = {who}"
        )
        connection.execute("COMMIT" if self.rounds[who] % 3 else "ROLLBACK")
        if self.rounds[who] % 10 == 0 and not without_gap(connection, who):
            self.broken.append(f"{who}: what was counted has a gap")

    def read(self, who: int, connection: Connection) -> None:
        number = who % len(QUERIES)
        found = one(connection, QUERIES[number])
        if found != self.right[number]:
            self.broken.append(f"{who}: {found} instead of {self.right[number]}")

    def report(self) -> str:
        then = list(self.rounds)
        until = time.monotonic() + PATIENCE
        while any(now < was + 2 for now, was in zip(self.rounds, then, strict=True)):
            if self.broken:
                return f"broken: {self.broken}"
            if time.monotonic() > until:
                return f"somebody stands still: {then} {self.rounds}"
            time.sleep(0.005)
        size = os.stat(PATH).st_size
        return f"{kept(self.beside)} of {kept(self.main)}, {size} bytes"

    def answer(self, word: str, number: str) -> str:
        if word == "report":
            return self.report()
        if word == "keep":
            self.main.execute(f"INSERT INTO kept VALUES ({int(number)})")
        elif word == "commit":
            self.main.execute("COMMIT")
            self.main.execute("BEGIN")
        elif word == "undo":
            self.main.execute("ROLLBACK")
            self.main.execute("BEGIN")
        elif word == "kept":
            return str(kept(self.beside))
        else:
            raise ValueError(word)
        return "done"


def recover() -> str:
    with duckdb.connect(PATH, config=SETTINGS) as connection:
        for writer in range(WRITERS):
            assert without_gap(connection, writer)
        assert one(connection, "SELECT count(*), sum(i) FROM large") == (
            ROWS,
            ROWS * (ROWS - 1) // 2,
        )
        return str(kept(connection))


def serve() -> None:
    database = Database()
    for line in sys.stdin:
        word, _, number = line.strip().partition(" ")
        print(database.answer(word, number), flush=True)


if __name__ == "__main__":
    if sys.argv[1:] == ["recover"]:
        print(recover())
    else:
        serve()
