"""SQLite with a write-ahead log: processes that share its index, their locks and snapshots.

A connection's lock is a byte range of `-shm`, which all of them map; where its snapshot ends is in
the memory of its process; the rows are in the log or in the database, as the last one who copied
them over has left it. All of that must be of one instant.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

from deltabox import Process, Sandbox

from ..probe import Probe

CONNECT = """
import os, sqlite3, time

def connect(timeout=0.0):
    db = sqlite3.connect("/srv/data.db", timeout=timeout, isolation_level=None)
    db.execute("PRAGMA synchronous=FULL")
    return db

def ask(text, *values):
    return [list(row) for row in db.execute(text, values)]

def insert(owner, count):
    db.executemany("INSERT INTO rows(owner, text) VALUES (?, ?)", [(owner, "x" * 900)] * count)

def refused(text):
    try:
        db.execute(text)
    except sqlite3.OperationalError as error:
        return str(error)
"""

SETUP = """
db = connect()
db.execute("PRAGMA journal_mode=WAL")
db.execute("CREATE TABLE rows(id INTEGER PRIMARY KEY, owner TEXT, text TEXT)")
db.execute("BEGIN")
insert("begin", 200)
db.execute("COMMIT")
db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
"""

# Gets the lock some day: SQLite asks again and again, and sleeps in between
PATIENT = (
    CONNECT
    + """
db = connect(timeout=60)
print("waits", flush=True)
db.execute("BEGIN IMMEDIATE")
insert("patient", 1)
db.execute("COMMIT")
print("done", flush=True)
"""
)
SLEEPS = "230 "  # clock_nanosleep, as /proc/PID/syscall says it

COUNT = "ask('SELECT owner, count(*) FROM rows GROUP BY owner ORDER BY min(id)')"
CURSOR = "[row[0] for row in cursor]"


@dataclass
class Programs:
    """One with a transaction open, one with a snapshot, one that has nothing, one that waits."""

    writer: Probe
    reader: Probe
    other: Probe
    patient: Process

    def within(self, box: Sandbox) -> Programs:
        return Programs(
            self.writer.within(box),
            self.reader.within(box),
            self.other.within(box),
            box.counterpart(self.patient),
        )


def start(sandbox: Sandbox) -> Programs:
    writer, reader, other = (Probe.start(sandbox) for _ in range(3))
    for probe in (writer, reader, other):
        probe.do(CONNECT)
    writer.do(SETUP)
    reader.do("db = connect(); db.execute('PRAGMA mmap_size=16777216')")
    other.do("db = connect()")
    # a snapshot, and a query in it of which some rows were taken
    reader.do("db.execute('BEGIN'); cursor = db.execute('SELECT id FROM rows ORDER BY id')")
    assert reader.ask("[row[0] for row in cursor.fetchmany(10)]") == list(range(1, 11))
    # a commit that the snapshot does not have, and a transaction larger than the writer's cache:
    # pages of it are in the log already
    writer.do("db.execute('BEGIN'); insert('later', 50); db.execute('COMMIT')")
    writer.do("db.execute('PRAGMA cache_size=5'); before = os.stat('/srv/data.db-wal').st_size")
    writer.do("db.execute('BEGIN IMMEDIATE'); insert('open', 100)")
    assert writer.ask("os.stat('/srv/data.db-wal').st_size > before")
    patient = sandbox.spawn(["python3", "-c", PATIENT])
    assert patient.stdout.readline(timeout=20) == "waits\n"
    other.do("end = time.monotonic() + 20")
    other.do(
        f"while not open('/proc/{patient.pid}/syscall').read().startswith({SLEEPS!r}):\n"
        "    assert time.monotonic() < end"
    )
    return Programs(writer, reader, other, patient)


def rows(inside: Programs) -> dict[str, int]:
    """What a connection sees that begins now."""
    return dict(inside.other.ask(COUNT))


def commit(inside: Programs, own: str) -> None:
    """Ends the writer's transaction; `own` is what this copy commits, and no other."""
    for probe in (inside.writer, inside.reader, inside.other):
        assert probe.ask("'/srv/data.db-shm' in open('/proc/self/maps').read()")
    assert inside.reader.ask("'/srv/data.db\\n' in open('/proc/self/maps').read()")
    assert rows(inside) == {"begin": 200, "later": 50}
    assert inside.other.ask("refused('BEGIN IMMEDIATE')") == "database is locked"
    # nobody may copy the log over and begin it anew while it is in use
    assert inside.other.ask("ask('PRAGMA wal_checkpoint(TRUNCATE)')[0][0]") == 1
    inside.writer.do(f"insert({own!r}, 25); db.execute('COMMIT')")


def go_on(inside: Programs, own: str) -> None:
    assert inside.patient.stdout.readline(timeout=20) == "done\n"
    assert inside.patient.wait(timeout=20) == 0
    expected = {"begin": 200, "later": 50, "open": 100, own: 25, "patient": 1}
    assert rows(inside) == expected
    # the lock is free, and excludes the other way round
    inside.other.do("db.execute('BEGIN IMMEDIATE')")
    assert inside.writer.ask("refused('BEGIN IMMEDIATE')") == "database is locked"
    inside.other.do("insert('other', 5)")
    # who reads is kept from nothing, and sees what it saw
    assert dict(inside.reader.ask(COUNT)) == {"begin": 200}
    assert inside.reader.ask("refused('DELETE FROM rows')") == "database is locked"
    inside.other.do("db.execute('ROLLBACK')")
    assert inside.reader.ask(CURSOR) == list(range(11, 201))
    inside.writer.do("db.execute(\"DELETE FROM rows WHERE owner = 'later'\")")


def settle(inside: Programs, own: str) -> None:
    """The snapshot ends, the log is copied into the database, and the file alone is looked at."""
    assert inside.writer.ask("ask('PRAGMA wal_checkpoint(TRUNCATE)')[0][0]") == 1  # the snapshot
    assert inside.reader.ask("ask('SELECT count(*) FROM rows')") == [[200]]
    inside.reader.do("db.execute('COMMIT')")
    expected = {"begin": 200, "open": 100, own: 25, "patient": 1}
    for probe in (inside.writer, inside.reader, inside.other):
        assert dict(probe.ask(COUNT)) == expected
        assert probe.ask("ask('PRAGMA integrity_check')") == [["ok"]]
    assert inside.writer.ask("ask('PRAGMA wal_checkpoint(TRUNCATE)')") == [[0, 0, 0]]
    for probe in (inside.writer, inside.reader, inside.other):
        probe.do("db.close()")
    assert not inside.writer.ask("os.path.exists('/srv/data.db-wal')")
    inside.other.do("db = connect()")
    assert rows(inside) == expected
    ids = [*range(1, 201), *range(251, 377)]
    assert inside.other.ask("[row[0] for row in ask('SELECT id FROM rows ORDER BY id')]") == ids
    assert inside.other.ask("ask('PRAGMA integrity_check')") == [["ok"]]


STEPS = (commit, go_on, settle)


def test_open_transactions(sandbox: Sandbox) -> None:
    programs = start(sandbox)
    checkpoint = sandbox.checkpoint()
    for turn in range(20):
        for step in STEPS[: turn % 3 + 1]:  # left in the middle, too
            step(programs, f"turn {turn}")
        sandbox.rollback(checkpoint)
    with ExitStack() as stack:
        forks = [stack.enter_context(fork) for fork in sandbox.fork_many(4, at=checkpoint)]
        copies = [programs, *(programs.within(fork) for fork in forks)]
        # all do their step before any does its next: they would notice each other's
        for step in STEPS:
            for own, copy in enumerate(copies):
                step(copy, f"copy {own}")


# Moves something from one account to another and notes that it was told that this was done
LOAD = (
    CONNECT
    + """
import random, sys
name = sys.argv[1]
db = connect()
db.execute("PRAGMA wal_autocheckpoint=50")  # pages: the log is begun anew every few commits
noted = os.open(f"/srv/{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
turn = 0
while not os.path.exists("/srv/stop"):
    turn += 1
    one, two = random.sample(range(10), 2)
    while refused("BEGIN IMMEDIATE"):
        time.sleep(0.001)  # SQLite itself would wait ever longer, and the other have it all
    db.execute("UPDATE accounts SET amount = amount - 1 WHERE id = ?", [one])
    db.execute("UPDATE accounts SET amount = amount + 1 WHERE id = ?", [two])
    db.execute("INSERT INTO moves VALUES (?, ?)", [name, turn])
    db.execute("COMMIT")
    os.write(noted, b"%d\\n" % turn)
"""
)
# Each snapshot must be of an instant between two transactions, and look the same twice
LOOK = (
    CONNECT
    + """
db = connect()
while not os.path.exists("/srv/stop"):
    db.execute("BEGIN")
    first = ask("SELECT * FROM accounts"), ask("SELECT count(*) FROM moves")
    assert sum(amount for _, amount in first[0]) == 1000, first
    assert first == (ask("SELECT * FROM accounts"), ask("SELECT count(*) FROM moves"))
    db.execute("COMMIT")
"""
)
LOADED = """
db = connect()
db.execute("PRAGMA journal_mode=WAL")
db.execute("CREATE TABLE accounts(id INTEGER PRIMARY KEY, amount INTEGER)")
db.execute("CREATE TABLE moves(name TEXT, turn INTEGER)")
db.executemany("INSERT INTO accounts VALUES (?, 100)", [(n,) for n in range(10)])

def moves(name):
    return [row[0] for row in ask("SELECT turn FROM moves WHERE name = ? ORDER BY rowid", name)]

def goes_on():
    end = time.monotonic() + 30
    for name in ("one", "two"):
        begin = len(moves(name))
        while len(moves(name)) < begin + 5:
            assert time.monotonic() < end
            time.sleep(0.005)
"""


def test_write_load(sandbox: Sandbox) -> None:
    probe = Probe.start(sandbox)
    probe.do(CONNECT)
    probe.do(LOADED)
    names = ["one", "two"]
    writers = [sandbox.spawn(["python3", "-c", LOAD, name]) for name in names]
    looks = sandbox.spawn(["python3", "-c", LOOK])

    def compare(box: Sandbox) -> tuple[list[list[int]], list[list[int]]]:
        """What was noted and what is there, by writer."""
        inside = probe.within(box)
        assert inside.ask("ask('SELECT sum(amount), count(*) FROM accounts')") == [[1000, 10]]
        assert inside.ask("ask('PRAGMA integrity_check')") == [["ok"]]
        noted = [[int(line) for line in box.files.read_text(f"/srv/{n}").split()] for n in names]
        there = [inside.ask(f"moves({name!r})") for name in names]
        for numbers in there:
            assert numbers == list(range(1, len(numbers) + 1))
        return noted, there

    def verify(box: Sandbox) -> None:
        probe.within(box).do("goes_on()")
        box.files.write_text("/srv/stop", "")
        for process in map(box.counterpart, (*writers, looks)):
            assert process.wait(timeout=20) == 0, process.stderr.read(timeout=20)
        noted, there = compare(box)
        assert noted == there
        assert probe.within(box).ask("ask('PRAGMA wal_checkpoint(TRUNCATE)')") == [[0, 0, 0]]
        assert compare(box) == (noted, there)

    def crash(box: Sandbox) -> None:
        probe.within(box).do("goes_on()")
        for process in map(box.counterpart, (*writers, looks)):
            process.kill()
            process.wait(timeout=20)
        for noted, there in zip(*compare(box), strict=True):
            # one may have been committed that was not noted any more
            assert there in (noted, [*noted, noted[-1] + 1])

    # each state comes from one that was given back, and is of another moment of the load
    for _ in range(20):
        probe.do("goes_on()")
        checkpoint = sandbox.checkpoint()
        verify(sandbox)
        sandbox.rollback(checkpoint)
    for own, fork in enumerate(sandbox.fork_many(4, at=checkpoint)):
        with fork:
            (crash if own % 2 else verify)(fork)
    verify(sandbox)
