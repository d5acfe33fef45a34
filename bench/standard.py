"""The standard step, by which every release is measured.

A bash shell and a Python REPL with 30 MB of anonymous memory. A step dirties 250 pages of
Python and 20 of bash and changes 5 files of 12 KB, takes a checkpoint, does the same once more
with other contents (the wrong branch), and rolls back. 100 steps with 150 ms of idle time before
each checkpoint and each rollback, as when an agent thinks, and 100 back to back.

After every rollback all contents are verified, outside the clock: Python's memory by its CRC,
bash's variable, the files. The clock of a rollback stops when the call returns, by which time
the old tree has been stopped; the clock of the first result when a command of the live shell,
sent at once after it, has answered. Beside the figures stands the floor (floor.c) of the run.

    python bench/standard.py --json out.json
"""

from __future__ import annotations

import json
import math
import os
import platform
import time
from pathlib import Path

import click
import floor
from rich.console import Console
from rich.table import Table

from deltabox import Process, Sandbox, Shell

MEGABYTES = 30
PYTHON_PAGES = 250
BASH_PAGES = 20
FILES = 5
FILE_BYTES = 12 * 1024
IDLE = 0.150
FORKS = 8
KEPT = 4  # older checkpoints are deleted, outside the clock

GOALS = {  # milliseconds, medians
    "rollback": 4.0,
    "first result": 8.0,
    "checkpoint pause": 40.0,
    f"fork_many({FORKS}), an answer from each": 80.0,
}

SETUP = f"""
import random, zlib
memory, source = bytearray({MEGABYTES} << 20), random.Random(7)
for at in range(0, len(memory), 1 << 16):  # in pieces: nothing big is left over on the heap
    memory[at:at + (1 << 16)] = source.randbytes(1 << 16)

def dirty(n):
    for page in range({PYTHON_PAGES}):
        at = (page * 29 + n * 7) % ({MEGABYTES} << 8)
        memory[at * 4096:at * 4096 + 8] = n.to_bytes(8, "little")
    for number in range({FILES}):
        with open(f"/bench/{{number}}", "wb") as file:
            file.write(bytes([n % 251 + number]) * {FILE_BYTES})
    print("=", zlib.crc32(memory), flush=True)

def state():
    files = [open(f"/bench/{{number}}", "rb").read() for number in range({FILES})]
    print("=", zlib.crc32(memory), zlib.crc32(b"".join(files)), flush=True)

"""


class Bench:
    """The sandbox under test and what was measured, milliseconds by name."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox
        self.measured: dict[str, list[float]] = {}
        sandbox.files.mkdir("/bench")
        self.shell: Shell = sandbox.shell()
        self.python: Process = sandbox.spawn(["python3", "-i", "-q"])
        self.python.stdin.write(SETUP)
        self.number = 0
        self.dirty()

    def record(self, name: str, milliseconds: float) -> None:
        self.measured.setdefault(name, []).append(milliseconds)

    def ask(self, python: Process, line: str) -> str:
        python.stdin.write(line + "\n")
        python.stderr.read_available()  # the prompts
        while True:
            printed = python.stdout.readline()
            if not printed:
                raise SystemExit(f"the REPL ended: {python.stderr.read_available()}")
            if printed.startswith("="):
                return printed

    def dirty(self) -> None:
        self.number += 1
        self.ask(self.python, f"dirty({self.number})")
        self.shell.run(f"n={self.number}; printf -v pages %0{BASH_PAGES * 4096}d $n")

    def state(self) -> str:
        shell = self.shell.run('echo "$n ${#pages} $((10#$pages))"').stdout
        return self.ask(self.python, "state()") + shell

    def step(self, label: str, idle: float) -> None:
        self.dirty()
        expected = self.state()
        number = self.number
        time.sleep(idle)
        began = time.perf_counter()
        checkpoint = self.sandbox.checkpoint()
        self.record(f"checkpoint call, {label}", (time.perf_counter() - began) * 1e3)
        self.record(f"checkpoint pause, {label}", checkpoint.stats.pause_ms)
        self.dirty()
        time.sleep(idle)
        began = time.perf_counter()
        self.sandbox.rollback(checkpoint)
        back = time.perf_counter()
        answer = self.shell.run("echo $n").stdout
        answered = time.perf_counter()
        self.record(f"rollback, {label}", (back - began) * 1e3)
        self.record(f"first result, {label}", (answered - began) * 1e3)
        if answer.strip() != str(number) or self.state() != expected:
            raise SystemExit(f"step {number} came back as {answer!r}: the contents are wrong")
        for old in self.sandbox.checkpoints[:-KEPT]:
            old.delete()

    def forks(self, rounds: int) -> None:
        self.dirty()
        checkpoint = self.sandbox.checkpoint()
        name = f"fork_many({FORKS}), an answer from each"
        for _ in range(rounds):
            time.sleep(IDLE)
            began = time.perf_counter()
            children = self.sandbox.fork_many(FORKS, at=checkpoint)
            made = time.perf_counter()
            answers = {child.counterpart(self.shell).run("echo $n").stdout for child in children}
            answered = time.perf_counter()
            self.record(f"fork_many({FORKS}) call", (made - began) * 1e3)
            self.record(name, (answered - began) * 1e3)
            if answers != {f"{self.number}\n"}:
                raise SystemExit(f"the forks answered {answers}")
            for child in children:
                child.close()


def quantile(values: list[float], q: float) -> float:
    """The smallest value that is not below a share `q` of all (nearest rank)."""
    ranked = sorted(values)
    return ranked[max(0, math.ceil(q * len(ranked)) - 1)]


def goal(name: str) -> float | None:
    return next((limit for start, limit in GOALS.items() if name.startswith(start)), None)


def show(console: Console, figures: dict[str, dict[str, float]], steps: int) -> None:
    table = Table(title=f"the standard step, {steps} steps; milliseconds", title_justify="left")
    for column in ("what", "median", "p99", "goal (median)"):
        table.add_column(column, justify="left" if column == "what" else "right")
    for name, found in figures.items():
        limit = goal(name)
        style = "red" if limit is not None and found["median"] > limit else ""
        aim = "" if limit is None else f"{limit:.0f}"
        table.add_row(name, f"{found['median']:.2f}", f"{found['p99']:.2f}", aim, style=style)
    console.print(table)


@click.command()
@click.option("--json", "output", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--steps", default=100, show_default=True, help="Steps of each of the two kinds.")
@click.option("--forks", default=20, show_default=True, help="Rounds of fork_many.")
def main(*, output: Path | None, steps: int, forks: int) -> None:
    """Measure the standard step."""
    console = Console()
    figures: dict[str, dict[str, float]] = {}
    for name, found in floor.measure(MEGABYTES, rounds=max(steps, 20)).items():
        figures[f"floor: {name.replace('_', ' + ')}"] = found
    with Sandbox.create() as sandbox:
        bench = Bench(sandbox)
        for _ in range(steps):
            bench.step("idle", IDLE)
        for _ in range(steps):
            bench.step("back to back", 0.0)
        bench.forks(forks)
    for name, values in sorted(bench.measured.items()):
        figures[name] = {"median": quantile(values, 0.5), "p99": quantile(values, 0.99)}
    show(console, figures, steps)
    if output is not None:
        answer = {
            "what": __doc__,
            "unit": "ms",
            "host": {
                "kernel": platform.release(),
                "cpus": os.cpu_count(),
                "python": platform.python_version(),
            },
            "steps": steps,
            "figures": figures,
            "samples": bench.measured,
        }
        output.write_text(json.dumps(answer, indent=2) + "\n")
        console.print(f"written to {output}")


if __name__ == "__main__":
    main()
