"""redis-server: clients that wait in several ways, a log of all writes, children that save.

Each write is in the log on disk before it is acknowledged, so memory, log and what a client has
noted must belong to one instant: a server that is started anew from the log knows what the old one
knew, and what the client was told.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest

from deltabox import Process, Sandbox

from ..probe import Probe
from ..tools.returns import returns
from .redis_client import CLIENT, restart, start

# After a second with twenty writes: several times in each test. The clock runs on while a state is
# left, so a state that comes back often begins with saving.
SAVE = "1 20"


@pytest.fixture
def waiting(sandbox: Sandbox) -> Probe:
    """Five clients that wait: for jobs and for news, over both kinds of sockets, one with a
    transaction that it has half sent."""
    probe = start(sandbox, save=SAVE)
    probe.do("for n in range(1000): kept('SET', f'key:{n}', 'v' * n)")
    probe.do("kept('INCR', 'counter'), kept('INCR', 'counter')")
    probe.do("pops, listens = Client(), Client()")
    probe.do("pops_local, listens_local, local = (Client('/srv/data/socket') for _ in range(3))")
    probe.do("pops.send('BLPOP', 'queue', '0'); pops_local.send('BRPOP', 'other', 'stack', '0')")
    probe.do("listens('SUBSCRIBE', 'news'); listens_local('PSUBSCRIBE', 'n*')")
    probe.do("local('WATCH', 'watched'); local('MULTI'); local('INCR', 'counter')")
    probe.do("local.socket.sendall(b'*3\\r\\n$3\\r\\nSET')")
    probe.do("until_true(lambda: info('clients')['blocked_clients'] == '2')")
    return probe


def test_clients_that_wait(sandbox: Sandbox, waiting: Probe) -> None:
    served = int(waiting.ask("info('stats')['total_commands_processed']"))

    def verify(box: Sandbox) -> None:
        inside = waiting.within(box)

        def ask(text: str) -> Any:
            return inside.ask(text)

        assert int(ask("info('stats')['total_commands_processed']")) == served + 1
        assert ask("kept('INCR', 'counter')") == 3
        assert ask("kept('DBSIZE'), kept('STRLEN', 'key:777')") == [1001, 777]
        assert ask("kept('RPUSH', 'queue', 'job'), kept('RPUSH', 'stack', 'task')") == [1, 1]
        assert ask("pops.read(), pops_local.read()") == [["queue", "job"], ["stack", "task"]]
        assert ask("kept('PUBLISH', 'news', 'hello')") == 2
        assert ask("listens.read()") == ["message", "news", "hello"]
        assert ask("listens_local.read()") == ["pmessage", "n*", "news", "hello"]
        inside.do("local.socket.sendall(b'\\r\\n$1\\r\\nx\\r\\n$1\\r\\ny\\r\\n')")
        assert ask("[local.read(), local('EXEC')]") == ["+QUEUED", [4, "+OK"]]
        restart(inside)
        assert ask("kept('GET', 'counter'), kept('DBSIZE'), kept('GET', 'x')") == ["4", 1002, "y"]

    returns(sandbox, verify)


def test_copies_commit_something_else(sandbox: Sandbox, waiting: Probe) -> None:
    """All copies do their step before any does its next: they would notice each other's."""

    def commit(inside: Probe, own: int) -> None:
        if own % 2:  # so the transaction must fail here, and only here
            inside.do("kept('SET', 'watched', 'touched')")
        inside.do(f"kept('RPUSH', 'queue', 'job {own}'); kept('LPUSH', 'stack', 'task {own}')")
        inside.do(f"kept('PUBLISH', 'news', 'from {own}'); kept('INCRBY', 'counter', '{10 * own}')")
        inside.do(f"local.socket.sendall(b'\\r\\n$1\\r\\nx\\r\\n$1\\r\\n{own}\\r\\n')")

    def go_on(inside: Probe, own: int) -> None:
        assert inside.ask("pops.read(), pops_local.read()") == [
            ["queue", f"job {own}"],
            ["stack", f"task {own}"],
        ]
        assert inside.ask("listens.read()") == ["message", "news", f"from {own}"]
        assert inside.ask("listens_local.read()") == ["pmessage", "n*", "news", f"from {own}"]
        done = None if own % 2 else [3 + 10 * own, "+OK"]
        assert inside.ask("[local.read(), local('EXEC')]") == ["+QUEUED", done]

    def compare(inside: Probe, own: int) -> None:
        left = inside.ask("[kept('GET', name) for name in ('counter', 'x', 'watched')]")
        untouched = [str(3 + 10 * own), str(own), None]
        assert left == ([str(2 + 10 * own), None, "touched"] if own % 2 else untouched)

    checkpoint = sandbox.checkpoint()
    with ExitStack() as stack:
        forks = [stack.enter_context(fork) for fork in sandbox.fork_many(4, at=checkpoint)]
        copies = [waiting, *(waiting.within(fork) for fork in forks)]
        for step in (commit, go_on, compare):
            for own, copy in enumerate(copies):
                step(copy, own)
        for own, copy in enumerate(copies):
            restart(copy)
            compare(copy, own)
            # the other way to disk: all in one file, and no log
            assert copy.ask("kept('SAVE')") == "+OK"
            restart(copy, "--appendonly", "no")
            compare(copy, own)


# Notes each number once it was told that it is the server's. A transaction of two writes: none of
# them may be there without the other.
LOAD = (
    CLIENT
    + """
import sys
name, path = sys.argv[1:]
client = Client(path)
noted = os.open(f"/srv/{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
turn = 0
while not os.path.exists("/srv/stop"):
    turn += 1
    client.send("MULTI")
    client.send("INCR", name)
    client.send("RPUSH", f"{name}:all", str(turn))
    client.send("EXEC")
    answers = [client.read() for _ in range(4)]
    assert answers[3] == [turn, turn], answers
    os.write(noted, b"%d\\n" % turn)
"""
)
PATHS = {"tcp": "", "unix": "/srv/data/socket"}


def test_write_load(sandbox: Sandbox) -> None:
    probe = start(sandbox, save=SAVE)
    loads = [sandbox.spawn(["python3", "-c", LOAD, *item]) for item in PATHS.items()]

    def noted(box: Sandbox, name: str) -> list[int]:
        return [int(line) for line in box.files.read_text(f"/srv/{name}").split()]

    def goes_on(inside: Probe) -> None:
        for name in PATHS:
            inside.do(f"get = lambda: int(kept('GET', '{name}') or 0)")
            inside.do("begin = get(); until_true(lambda: get() >= begin + 10)")

    def ended(load: Process) -> str:
        """What it said on its end, in a copy whose server has ended."""
        load.wait(timeout=20)
        return load.stderr.read(timeout=20)

    def knows(inside: Probe) -> dict[str, list[int]]:
        """What the server has, each number as often as it has it."""
        found = {}
        for name in PATHS:
            numbers = [int(word) for word in inside.ask(f"kept('LRANGE', '{name}:all', '0', '-1')")]
            assert inside.ask(f"kept('GET', '{name}')") == str(len(numbers))
            found[name] = numbers
        return found

    def verify(box: Sandbox) -> None:
        inside = probe.within(box)
        goes_on(inside)
        box.files.write_text("/srv/stop", "")
        for load in loads:
            assert ended(box.counterpart(load)) == ""
        told = {name: noted(box, name) for name in PATHS}
        for numbers in told.values():
            assert numbers == list(range(1, len(numbers) + 1))
        assert knows(inside) == told
        restart(inside, "--save", SAVE)
        assert knows(inside) == told

    def crash(box: Sandbox) -> None:
        inside = probe.within(box)
        goes_on(inside)
        restart(inside, kill=True)
        for load in loads:
            assert "Error" in ended(box.counterpart(load))
        for name, numbers in knows(inside).items():
            told = noted(box, name)
            # one may have been written that nobody was told of any more
            assert told == numbers or [*told, told[-1] + 1] == numbers

    # each state comes from one that was given back, and is of another moment of the load
    for _ in range(20):
        goes_on(probe)
        checkpoint = sandbox.checkpoint()
        verify(sandbox)
        sandbox.rollback(checkpoint)
    for own, fork in enumerate(sandbox.fork_many(4, at=checkpoint)):
        with fork:
            (crash if own % 2 else verify)(fork)
    probe.do("until_true(lambda: os.path.exists('/srv/data/dump.rdb'))")
    verify(sandbox)
    sandbox.run("redis-check-rdb /srv/data/dump.rdb", check=True)


def test_in_the_middle_of_saving(sandbox: Sandbox) -> None:
    """The child that saves shares its parent's memory, and never called exec."""
    probe = start(sandbox, save="")
    probe.do("for n in range(60): kept('SET', f'key:{n}', 'value')")
    probe.do("kept('CONFIG', 'SET', 'rdb-key-save-delay', '10000')")  # microseconds
    assert probe.ask("kept('BGSAVE')") == "+Background saving started"
    before = probe.ask("info('persistence')")
    assert (before["rdb_bgsave_in_progress"], before["rdb_last_bgsave_time_sec"]) == ("1", "-1")

    def verify(box: Sandbox) -> None:
        inside = probe.within(box)
        assert inside.ask("kept('DBSIZE')") == 60
        inside.do("kept('SET', 'later', 'not in it')")
        inside.do("until_true(lambda: info('persistence')['rdb_bgsave_in_progress'] == '0')")
        after = inside.ask("info('persistence')")
        assert after["rdb_last_bgsave_status"] == "ok"
        assert int(after["rdb_last_bgsave_time_sec"]) >= 0
        checked = box.run("redis-check-rdb /srv/data/dump.rdb", check=True).stdout
        assert "60 keys read" in checked

    returns(sandbox, verify, rollbacks=4, forks=4)
