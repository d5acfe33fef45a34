"""The standard step, by which every release is measured.

A bash shell and a Python REPL with 30 MB of anonymous memory. A step dirties 250 pages of
Python and 20 of bash and changes 5 files of 12 KB, takes a checkpoint, does the same once more
with other contents (the wrong branch), and rolls back. 100 steps with 150 ms of idle time before
each checkpoint and each rollback, as when an agent thinks, and 100 back to back. The idle steps
are done three times: as a user gets them; with `standby=False`, where no restored tree waits for
the next rollback; and with a `sleep` beside, whose timeout becomes shorter every moment, so that no
state can be captured before it is asked for.

After every rollback all contents are verified, outside the clock: Python's memory by its CRC,
bash's variable, the files. The *pause* is how long the programs stood still for the call; the
*stop* counts as well for how long they had, while they waited, when the state was captured before
anybody had asked for it. The clock of a rollback stops when the call returns, by which time
the old tree has been stopped; the clock of the first result when a command of the live shell,
sent at once after it, has answered. An unchanged checkpoint is taken right after another one, when
nothing has run in between. Beside the figures stands the floor (floor.c) of the run: for a
rollback, a fork of the memory into fresh namespaces with an overlay mount; for a pause, reading
the dirty pages and a snapshot of files that were written back before.

    python bench/standard.py --json out.json
"""

from __future__ import annotations

import inspect
import time
from functools import partial
from pathlib import Path
from typing import Any

import click
import floor
from report import Recorder, Wrong, finish, options

from deltabox import Checkpoint, Process, Sandbox, Shell

MEGABYTES = 30
PYTHON_PAGES = 250
BASH_PAGES = 20
FILES = 5
FILE_BYTES = 12 * 1024
IDLE = 0.150
KEPT = 4  # older checkpoints are deleted, outside the clock
COPY_FLOOR = "fork + namespaces + overlay"
PAUSE_FLOOR = "pages read + snapshot"

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

has_standby = "standby" in inspect.signature(Sandbox.create).parameters


def create(*, standby: bool = True) -> Sandbox:
    """A sandbox, with standby copies or without, also where the engine knows none of them yet."""
    chosen: dict[str, Any] = {} if standby or not has_standby else {"standby": False}
    return Sandbox.create(**chosen)


class Tree:
    """The shell and the REPL of a sandbox, what they have last been told, and what they hold."""

    def __init__(self, sandbox: Sandbox, shell: Shell, python: Process, *, number: int = 0) -> None:
        self.sandbox = sandbox
        self.shell = shell
        self.python = python
        self.number = number

    @classmethod
    def start(cls, sandbox: Sandbox) -> Tree:
        sandbox.files.mkdir("/bench")
        tree = cls(sandbox, sandbox.shell(), sandbox.spawn(["python3", "-i", "-q"]))
        tree.python.stdin.write(SETUP)
        tree.dirty()
        return tree

    def of(self, copy: Sandbox) -> Tree:
        """The same in a fork of the sandbox."""
        shell, python = copy.counterpart(self.shell), copy.counterpart(self.python)
        return Tree(copy, shell, python, number=self.number)

    def tell(self, line: str) -> None:
        self.python.stdin.write(line + "\n")

    def hear(self) -> str:
        while True:
            printed = self.python.stdout.readline()
            if not printed:
                raise Wrong(f"the REPL ended: {self.python.stderr.read_available()}")
            if printed.startswith("="):
                return printed

    def ask(self, line: str) -> str:
        self.tell(line)
        answer = self.hear()
        self.python.stderr.read_available()  # the prompts
        return answer

    def dirty(self) -> None:
        self.number += 1
        self.ask(f"dirty({self.number})")
        self.shell.run(f"n={self.number}; printf -v pages %0{BASH_PAGES * 4096}d $n")

    def state(self) -> str:
        shell = self.shell.run('echo "$n ${#pages} $((10#$pages))"').stdout
        return self.ask("state()") + shell


class Bench:
    """One series of steps in one sandbox."""

    def __init__(self, recorder: Recorder, label: str) -> None:
        self.recorder = recorder
        self.label = label

    def record(self, name: str, milliseconds: float) -> None:
        self.recorder.add(f"{name}, {self.label}", milliseconds)

    def checkpoint(self, tree: Tree, kind: str) -> Checkpoint:
        began = time.perf_counter()
        made = tree.sandbox.checkpoint()
        self.record(f"{kind} call", (time.perf_counter() - began) * 1e3)
        self.record(f"{kind} pause", made.stats.pause_ms)
        self.record(f"{kind} stop", stop_of(made))
        return made

    def steps(
        self, count: int, *, idle: float, standby: bool = True, sleeper: bool = False
    ) -> None:
        with create(standby=standby) as sandbox:
            tree = Tree.start(sandbox)
            if sleeper:
                sandbox.spawn(["sleep", "86400"])
            for _ in range(count):
                self.step(tree, idle)

    def step(self, tree: Tree, idle: float) -> None:
        tree.dirty()
        expected, number = tree.state(), tree.number
        time.sleep(idle)
        checkpoint = self.checkpoint(tree, "checkpoint")
        tree.dirty()
        time.sleep(idle)
        began = time.perf_counter()
        tree.sandbox.rollback(checkpoint)
        back = time.perf_counter()
        answer = tree.shell.run("echo $n").stdout
        answered = time.perf_counter()
        self.record("rollback", (back - began) * 1e3)
        self.record("first result", (answered - began) * 1e3)
        if answer.strip() != str(number) or tree.state() != expected:
            raise Wrong(f"step {number} came back as {answer!r}")
        forget(tree.sandbox)

    def unchanged(self, count: int) -> None:
        with create() as sandbox:
            tree = Tree.start(sandbox)
            for _ in range(count):
                tree.dirty()
                expected = tree.state()
                sandbox.checkpoint()
                time.sleep(IDLE)
                checkpoint = self.checkpoint(tree, "unchanged checkpoint")
                tree.dirty()
                sandbox.rollback(checkpoint)
                if tree.state() != expected:
                    raise Wrong("an unchanged checkpoint came back as another state")
                forget(sandbox)


def stop_of(checkpoint: Checkpoint) -> float:
    """Milliseconds for which the programs stood still for a checkpoint, at its call or before."""
    return checkpoint.stats.pause_ms + checkpoint.stats.ahead_ms


def forget(sandbox: Sandbox) -> None:
    """Delete old checkpoints, as every user has to."""
    for old in sandbox.checkpoints[:-KEPT]:
        old.delete()


def goals(recorder: Recorder) -> None:
    """What issue 4 asks for, in milliseconds."""
    for label in ("idle", "idle, without a standby", "idle, a sleep beside"):
        recorder.expect(f"checkpoint pause, {label}", goal=2.0, goal_p99=6.0, floor=PAUSE_FLOOR)
        recorder.expect(f"checkpoint stop, {label}", floor=PAUSE_FLOOR)
        recorder.expect(f"checkpoint call, {label}", goal=4.0, floor=PAUSE_FLOOR)
        recorder.expect(f"first result, {label}", goal=3.0, floor=COPY_FLOOR)
    recorder.expect("unchanged checkpoint call, idle", goal=1.0)
    recorder.expect("rollback, idle", goal=0.5, floor=COPY_FLOOR)
    recorder.expect("rollback, idle, without a standby", goal=1.5, floor=COPY_FLOOR)
    recorder.expect("rollback, idle, a sleep beside", goal=0.5, floor=COPY_FLOOR)
    recorder.expect("checkpoint pause, back to back", goal=4.0, floor=PAUSE_FLOOR)
    recorder.expect("checkpoint call, back to back", floor=PAUSE_FLOOR)
    recorder.expect("rollback, back to back", goal=3.0, floor=COPY_FLOOR)
    recorder.expect("first result, back to back", floor=COPY_FLOOR)


def floors(recorder: Recorder, rounds: int) -> None:
    with floor.built() as program, floor.image(program.scratch, gigabytes=2) as image:
        recorder.floor("fork", program.fork(MEGABYTES, rounds))
        recorder.floor("fork + namespaces", program.namespaces(MEGABYTES, rounds))
        recorder.floor(COPY_FLOOR, program.overlay(MEGABYTES, rounds))
        read = program.pages(PYTHON_PAGES + BASH_PAGES, rounds)
        snapshot = program.snapshot(image, FILES, rounds, synced=True)
        recorder.floor(PAUSE_FLOOR, [sum(both) for both in zip(read, snapshot, strict=True)])


@click.command()
@options
@click.option("--steps", type=click.IntRange(min=1), help="Of each kind; default 100, quick 15.")
def main(*, output: Path | None, quick: bool, budget: float | None, steps: int | None) -> None:
    """Measure the standard step."""
    count = steps or (15 if quick else 100)
    limit = 60 + 3.0 * count
    recorder = Recorder("standard", what=__doc__, budget=budget, quick=quick)
    goals(recorder)
    recorder.attempt("the floors", partial(floors, recorder, max(20, count)))
    series: list[tuple[str, dict[str, Any]]] = [
        ("idle", {"idle": IDLE}),
        ("idle, without a standby", {"idle": IDLE, "standby": False}),
        ("idle, a sleep beside", {"idle": IDLE, "sleeper": True}),
        ("back to back", {"idle": 0.0}),
    ]
    for label, how in series:
        steps_of = partial(Bench(recorder, label).steps, count, **how)
        recorder.attempt(f"steps, {label}", steps_of, limit=limit)
    unchanged = partial(Bench(recorder, "idle").unchanged, max(count // 2, 3))
    recorder.attempt("unchanged checkpoint", unchanged, limit=limit)
    finish(recorder, output)


if __name__ == "__main__":
    main()
