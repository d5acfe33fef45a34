"""What a checkpoint, a rollback and a fork of a real program cost: the table of docs/fidelity.md.

The programs are those of tests/servers, as they are there when they have been started: with their
clients connected, their transactions open, their workers at work. For each, by turns:

- a request that changes something, 0.3 s of thought, a checkpoint: its pause;
- a request, 0.3 s of thought, a rollback to the checkpoint until the request is answered again;
- a fork of that checkpoint until its copy of the client has got an answer.

Memory of a fork is how much less MemAvailable is while four of them are open and have answered,
divided by four. `python bench/postgres.py` compares branches of a database with its own means.

    python bench/servers.py [--rounds N] [NAME]...
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import click
from report import meminfo, wide_console
from rich.table import Table

from deltabox import KeepLast, Sandbox

sys.path.insert(0, str(Path(__file__).parent.parent))
os.environ.setdefault("DELTABOX_STATE", tempfile.mkdtemp(prefix="deltabox-servers-"))

THOUGHT = 0.3  # seconds
FORKS = 4
SETTLED = 1.0  # seconds

Ask = Callable[[Sandbox], object]


def postgres(sandbox: Sandbox) -> Ask:
    from tests.servers.postgres import TCP, Server

    server = Server.create(sandbox)
    server.grow(150)
    server.run_sql("CREATE TABLE kept (what int)")
    sessions = [server.session(*([TCP] if n % 2 else [])) for n in range(8)]
    for session in sessions:
        session.ask("BEGIN")
        session.ask("INSERT INTO kept VALUES (1)")
    return lambda box: sessions[0].within(box).ask("INSERT INTO kept VALUES (2)")


def redis(sandbox: Sandbox) -> Ask:
    from tests.servers.redis_client import start

    probe = start(sandbox, save="1 20")
    probe.do("for n in range(1000): kept('SET', f'key:{n}', 'v' * n)")
    probe.do("pops, listens = Client(), Client()")
    probe.do("pops.send('BLPOP', 'queue', '0'); listens('SUBSCRIBE', 'news')")
    return lambda box: probe.within(box).ask("kept('INCR', 'counter')")


def sqlite(sandbox: Sandbox) -> Ask:
    from tests.servers.test_sqlite import start

    programs = start(sandbox)
    return lambda box: programs.within(box).writer.do("insert('more', 1)")


def cpython(sandbox: Sandbox) -> Ask:
    from tests.servers import test_cpython

    test_cpython.prepare(sandbox)
    owner = test_cpython.start(sandbox, "fork")
    return lambda box: owner.within(box).do("shared.array[-1] = 7; matrix[-1] += 1")


def mariadb(sandbox: Sandbox) -> Ask:
    from tests.servers.test_mariadb import start

    probe = start(sandbox)
    change = "first('UPDATE bank.accounts SET balance = balance + 1 WHERE id = 0')"
    return lambda box: probe.within(box).do(change)


def duckdb(sandbox: Sandbox) -> Ask:
    from tests.servers import test_duckdb

    program = test_duckdb.start(sandbox)
    return lambda box: program.within(box).ask("keep 7")


def jvm(sandbox: Sandbox) -> Ask:
    from tests.servers import test_jvm

    program = test_jvm.start(sandbox)
    return lambda box: program.within(box).ask("send 1")


def node(sandbox: Sandbox) -> Ask:
    from tests.servers import test_node

    program = test_node.start(sandbox)
    return lambda box: program.within(box).ask("keep 7")


def go(sandbox: Sandbox) -> Ask:
    from tests.servers import test_go

    built = Path(tempfile.mkdtemp()) / "goroutines"
    settings = {"CGO_ENABLED": "0", "GO111MODULE": "off", "GOFLAGS": ""}
    source = Path(test_go.__file__).with_name("goroutines.go")
    subprocess.run(["go", "build", "-o", built, source], check=True, env=os.environ | settings)
    program = test_go.start(sandbox, built)
    return lambda box: program.within(box).ask("keep 7")


def ruby(sandbox: Sandbox) -> Ask:
    from tests.servers import test_ruby

    program = test_ruby.start(sandbox)
    return lambda box: program.within(box).ask("keep 7")


def php_fpm(sandbox: Sandbox) -> Ask:
    from tests.servers.test_php_fpm import start

    _, probe = start(sandbox)
    return lambda box: probe.within(box).ask("ask('/page.php', '0')")


def chromium(sandbox: Sandbox) -> Ask:
    from tests.servers.test_chromium import start

    _, probe = start(sandbox)
    return lambda box: probe.within(box).ask("client.run('add(1)')")


PROGRAMS: dict[str, Callable[[Sandbox], Ask]] = {
    made.__name__: made
    for made in (
        *(postgres, redis, sqlite, cpython, mariadb, duckdb),
        *(jvm, node, go, ruby, php_fpm, chromium),
    )
}


def milliseconds(since: float) -> float:
    return (time.perf_counter() - since) * 1e3


def measure(name: str, rounds: int) -> list[str]:
    """A row of the table; milliseconds and MB."""
    with ExitStack() as opened:
        sandbox = opened.enter_context(Sandbox.create(keep=KeepLast(2)))
        ask = PROGRAMS[name](sandbox)
        pauses, rollbacks, forks = [], [], []
        first = sandbox.checkpoint().stats.pause_ms
        for _ in range(rounds):
            ask(sandbox)
            time.sleep(THOUGHT)
            checkpoint = sandbox.checkpoint()
            pauses.append(checkpoint.stats.pause_ms)
        for _ in range(rounds):
            ask(sandbox)
            time.sleep(THOUGHT)
            began = time.perf_counter()
            sandbox.rollback(checkpoint)
            ask(sandbox)
            rollbacks.append(milliseconds(began))
        sandbox.rollback(checkpoint)
        for _ in range(rounds):
            time.sleep(THOUGHT)
            began = time.perf_counter()
            with sandbox.fork(at=checkpoint) as fork:
                ask(fork)
                forks.append(milliseconds(began))
        time.sleep(SETTLED)
        before = meminfo("MemAvailable")
        for fork in sandbox.fork_many(FORKS, at=checkpoint):
            ask(opened.enter_context(fork))
        time.sleep(SETTLED)
        memory = (before - meminfo("MemAvailable")) / 1024 / FORKS
        processes = len(sandbox.processes())
    times = (first, *(statistics.median(one) for one in (pauses, rollbacks, forks)))
    return [name, str(processes), *(f"{one:.1f}" for one in times), f"{memory:.0f}"]


@click.command()
@click.argument("names", nargs=-1, type=click.Choice(list(PROGRAMS)))
@click.option("--rounds", default=30, show_default=True, help="Of which the median is told.")
def main(names: tuple[str, ...], rounds: int) -> None:
    """Measure programs; milliseconds, and MB for each of four forks."""
    columns = ("processes", "first pause", "pause", "rollback", "fork", "MB a fork")
    table = Table("program", *columns)
    for name in names or PROGRAMS:
        table.add_row(*measure(name, rounds))
        print(f"{name}: done", file=sys.stderr)
    wide_console().print(table)


if __name__ == "__main__":
    main()
