"""PostgreSQL, Redis, a web server in front of both and its clients, under random operations.

An oracle outside, in plain Python, knows what each checkpoint must be: every sandbox is given
orders with numbers that no other gets, so its state is told by the orders it has had
(`bank.transfers`). Checkpoints fall into the middle of orders mostly. Each return to one ends what
was under way, and must come out as if it had never been interrupted: the same balances, every
transfer that a client was told of there once, Redis' counters and the clients' equal, nothing of
another branch.

Each run is told by its seed, but for the instants, which are as random as the machine is.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from deltabox import Checkpoint, CommandTimeout, KeepReachable, Process, Sandbox
from tests.api.test_standby import waiting
from tests.conftest import cgroups, keepers, loop_devices
from tests.probe import Probe

from . import bank, redis_client
from .postgres import HOME, Server, until

SHORT: Final = 24  # operations
LONG: Final = 600.0  # seconds
ROUND: Final = 60.0  # seconds, then everything goes back to the beginning, and leaks are looked for
CLIENTS: Final = 3
LIVING: Final = 3  # sandboxes at the same time, at most
KEPT: Final = 6  # checkpoints
APART: Final = 0.1  # seconds between two operations, at most
WITHIN: Final = 60.0  # seconds, for what takes one

_SOURCE = Path(__file__).with_name("bank.py")
_COMMAND = ["python3", "/srv/bank/bank.py"]


@dataclass(frozen=True)
class State:
    """Which orders were given, in turn, and whether the last one may be under way."""

    orders: tuple[int, ...] = ()
    busy: bool = False

    def books(self) -> dict[str, Any]:
        """What the databases must have once nothing is under way."""
        balances = [bank.BALANCE] * bank.ACCOUNTS
        for client in range(CLIENTS):
            for order in self.orders:
                for transfer in bank.transfers(client, order):
                    balances[transfer.taken] -= transfer.amount
                    balances[transfer.given] += transfer.amount
        noted = {str(client): self.noted(client) for client in range(CLIENTS) if self.orders}
        served = {client: count for client, (count, _) in noted.items()}
        return {"balances": balances, "transfers": noted, "served": served}

    def noted(self, client: int) -> list[Any]:
        """What a client must have been told is done."""
        notes = [one.note for order in self.orders for one in bank.transfers(client, order)]
        return [len(notes), bank.digest(notes)]


@dataclass
class Copy:
    """A sandbox, and what the oracle knows of it."""

    sandbox: Sandbox
    state: State
    clients: list[Process]  # any sandbox's of the tree

    def _client(self, number: int) -> Process:
        return self.sandbox.counterpart(self.clients[number])

    def _hear(self, number: int) -> str:
        client = self._client(number)
        try:
            said = client.stdout.readline(timeout=WITHIN)
        except CommandTimeout:
            pytest.fail(f"client {number} hangs:\n{self._hanging()}")
        assert said, f"client {number} has ended: {client.stderr.read_available()}"
        return said.rstrip("\n")

    def _hanging(self) -> str:
        """Who waits in what."""
        processes = self.sandbox.run("ps -eo pid,ppid,stat,pending,wchan:30,args", timeout=WITHIN)
        asked = "SELECT pid, state, wait_event, query FROM pg_stat_activity"
        return "\n".join([processes.stdout, *Server(self.sandbox).ask(asked)])

    def _ask(self, number: int, word: str) -> Any:
        self._client(number).stdin.write(f"{word}\n")
        return json.loads(self._hear(number))

    def begin(self, order: int) -> None:
        """Have all clients work, and do not wait for them."""
        self.settle()
        for number in range(CLIENTS):
            self._client(number).stdin.write(f"order {order}\n")
        self.state = State((*self.state.orders, order), busy=True)

    def settle(self) -> None:
        """Wait until nothing is under way."""
        if self.state.busy:
            for number in range(CLIENTS):
                assert self._hear(number) == f"done {self.state.orders[-1]}"
            self.state = State(self.state.orders)

    def check(self) -> None:
        self.settle()
        books = self._ask(0, "books")
        assert sum(books["balances"]) == bank.BALANCE * bank.ACCOUNTS
        assert books == self.state.books()
        for number in range(CLIENTS):
            assert self._ask(number, "noted") == self.state.noted(number)


@dataclass(frozen=True)
class Held:
    """What a leak would make grow: of the keeper, and of all that it has made."""

    processes: int
    mounts: int
    cgroups: int
    loop_devices: int
    descriptors: int
    threads: int
    memory: int  # MiB

    @classmethod
    def now(cls) -> Held:
        (keeper,) = keepers()
        process = Path(f"/proc/{keeper}")
        status = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
        own = [group for group in cgroups() if group.endswith(f"-{keeper}")]
        return cls(
            processes=_descendants(keeper),
            mounts=(process / "mountinfo").read_text().count("\n"),
            cgroups=sum(len(below) for group in own for _, below, _ in os.walk(group)),
            loop_devices=len(loop_devices()),
            descriptors=len(os.listdir(process / "fd")),
            threads=len(os.listdir(process / "task")),
            memory=int(status["RssAnon"].split()[0]) >> 10,
        )

    def grown(self, since: Held) -> dict[str, tuple[int, int]]:
        """What there is more of than what comes and goes: pools and spares, and Python's heap."""
        # groups are used again: there are as many as there ever were trees at the same time
        some = {"processes": 6, "cgroups": 24, "descriptors": 12, "threads": 17, "memory": 12}
        now, then = vars(self), vars(since)
        return {
            what: (then[what], now[what])
            for what in now
            if now[what] > then[what] + some.get(what, 0)
        }


def _descendants(ancestor: int) -> int:
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue  # it has just ended
            children.setdefault(parent, []).append(int(entry.name))
    found, left = 0, [ancestor]
    while left:
        below = children.get(left.pop(), [])
        found += len(below)
        left += below
    return found


class Oracle:
    """Plays operations, and keeps what must come of them."""

    def __init__(self, sandbox: Sandbox, seed: int) -> None:
        self.chance = random.Random(seed)
        self.done: Counter[str] = Counter()
        self.orders = 0
        self.postgres, self.redis, clients = _start(sandbox)
        # what no object here names is dropped, as a search does it
        sandbox.keep(KeepReachable())
        self.living = [Copy(sandbox, State(), clients)]
        self.work(self.living[0])
        self.living[0].check()
        self.kept = [(sandbox.checkpoint(), self.living[0].state)]

    def step(self) -> None:
        time.sleep(self.chance.random() * APART)
        copy = self.chance.choice(self.living)
        operations: list[tuple[Callable[[Copy], None], int]] = [
            (self.work, 6),
            (self.checkpoint, 4),
            (self.rollback, 6),
            (self.fork, 3),
            (self.fork_present, 1),
            (self.close, 2),
            (self.crash, 1),
        ]
        (operation,) = self.chance.choices(*zip(*operations, strict=True))
        operation(copy)
        self.done[operation.__name__] += 1

    def work(self, copy: Copy) -> None:
        self.orders += 1
        copy.begin(self.orders)

    def checkpoint(self, copy: Copy) -> None:
        if not copy.state.busy:
            self.work(copy)
            time.sleep(self.chance.random() * APART)  # any instant of it
        self._keep(copy.sandbox.checkpoint(), copy.state)

    def rollback(self, copy: Copy) -> None:
        checkpoint, copy.state = self._kept()
        copy.sandbox.rollback(checkpoint)
        if self.chance.random() < 0.7:  # else it is given up again, or forked, as it comes
            copy.check()

    def fork(self, copy: Copy) -> None:
        checkpoint, state = self._kept()
        self._add(copy, copy.sandbox.fork_many(2, at=checkpoint), state)

    def fork_present(self, copy: Copy) -> None:
        fork = copy.sandbox.fork()
        head = fork.head
        assert head is not None
        self._keep(head, copy.state)
        self._add(copy, [fork], copy.state)

    def close(self, copy: Copy) -> None:
        """Any of them, the first one too; but one stays."""
        copy.check()
        if len(self.living) > 1:
            self.living.remove(copy)
            copy.sandbox.close()

    def crash(self, copy: Copy) -> None:
        """In a fork both databases are killed: their files are of the same instant as the rest."""
        copy.settle()
        expected = copy.state.books()
        with copy.sandbox.fork() as fork:
            server = self.postgres.within(fork)
            server.stop("immediate")
            server.start()
            balances = server.ask("SELECT balance FROM account ORDER BY id")
            assert [int(balance) for balance in balances] == expected["balances"]
            noted = {}
            for client in expected["transfers"]:
                query = f"SELECT note FROM transfer WHERE client = {client} ORDER BY number"
                notes = server.ask(query)
                noted[client] = [len(notes), bank.digest(notes)]
            assert noted == expected["transfers"]
            redis = self.redis.within(fork)
            redis_client.restart(redis, kill=True)
            served = {
                client: int(redis.ask(f"kept('HGET', 'served', '{client}')"))
                for client in expected["served"]
            }
            assert served == expected["served"]

    def check(self) -> None:
        """All that is alive, and every checkpoint."""
        for copy in self.living:
            copy.check()
        copy = self.living[0]
        for checkpoint, state in self.kept:
            copy.sandbox.rollback(checkpoint)
            copy.state = state
            copy.check()

    def rest(self) -> None:
        """Back to the beginning, with one sandbox, whichever it is, and one checkpoint."""
        self.check()
        while len(self.living) > 1:
            self.living.pop().sandbox.close()
        (copy,) = self.living
        sandbox = copy.sandbox
        sandbox.rollback(self.kept[0][0])
        copy.state = self.kept[0][1]
        copy.check()
        # its own one: only for such a checkpoint a tree waits, which must be there each time
        root = sandbox.checkpoint()
        self.kept = [(root, copy.state)]
        # objects that have gone have their effect with the next call
        until(lambda: sandbox.checkpoints == [root], "the others are dropped")
        until(lambda: root.id in {node for node, _ in waiting(sandbox)}, "a tree waits")

    def _kept(self) -> tuple[Checkpoint, State]:
        """Mostly the last one; else one further back, or of another branch."""
        return self.kept[-1] if self.chance.random() < 0.5 else self.chance.choice(self.kept)

    def _keep(self, checkpoint: Checkpoint, state: State) -> None:
        self.kept.append((checkpoint, state))
        if len(self.kept) > KEPT:
            del self.kept[self.chance.randrange(1, KEPT)]

    def _add(self, origin: Copy, forks: list[Sandbox], state: State) -> None:
        for fork in forks:
            self.living.append(Copy(fork, state, origin.clients))
        while len(self.living) > LIVING:
            self.close(self.chance.choice(self.living))


@contextmanager
def closing_all(oracle: Oracle) -> Iterator[Oracle]:
    try:
        yield oracle
    finally:
        for copy in oracle.living:
            copy.sandbox.close()


def _start(sandbox: Sandbox) -> tuple[Server, Probe, list[Process]]:
    """Both databases, the web server, and its clients, connected."""
    postgres = Server.create(sandbox, "shared_buffers = 32MB")
    for statement in bank.SCHEMA:
        postgres.ask(statement)
    redis = redis_client.start(sandbox, save="10 20")
    sandbox.run("mkdir /srv/bank", check=True)
    sandbox.files.upload(_SOURCE, "/srv/bank/bank.py")
    _up(sandbox.spawn([*_COMMAND, "serve", HOME], user="www-data"))
    clients = [sandbox.spawn([*_COMMAND, "call", str(number)]) for number in range(CLIENTS)]
    for client in clients:
        _up(client)
    return postgres, redis, clients


def _up(process: Process) -> None:
    assert process.stdout.readline(timeout=WITHIN) == "up\n", process.stderr.read_available()


def _level() -> Held:
    """What is held once nothing goes away any more: much is freed in the background."""
    deadline = time.monotonic() + WITHIN
    last, since = Held.now(), time.monotonic()
    while time.monotonic() < min(since + 2, deadline):
        time.sleep(0.1)
        now = Held.now()
        if now != last:
            last, since = now, time.monotonic()
    return last


def test_random_operations(sandbox: Sandbox) -> None:
    with closing_all(Oracle(sandbox, seed=1)) as oracle:
        for _ in range(SHORT):
            oracle.step()
        oracle.check()
        print(oracle.done)


@pytest.mark.full
@pytest.mark.timeout(LONG + 600)
def test_random_operations_for_ten_minutes(sandbox: Sandbox) -> None:
    """Whatever is held is the same after few operations and after many."""
    seed = int(os.environ.get("ORACLE_SEED", random.randrange(1 << 32)))
    print(f"ORACLE_SEED={seed}")
    end = time.monotonic() + LONG
    first: Held | None = None
    with closing_all(Oracle(sandbox, seed)) as oracle:
        while time.monotonic() < end:
            round_end = min(time.monotonic() + ROUND, end)
            while time.monotonic() < round_end:
                oracle.step()
            oracle.rest()
            held = _level()
            print(f"{oracle.done.total()} operations: {held}", flush=True)
            if first is None:
                first = held
            grown = held.grown(first)
            assert not grown, grown
        print(f"{dict(oracle.done)}, {oracle.orders} orders")
