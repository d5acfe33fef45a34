"""Five hundred checkpoints in one line: does the last one cost more than the first?

The standard step's tree, its pages and files changed before each checkpoint, with its 150 ms of
thought, and no checkpoint ever deleted. The pause (how long the programs stood still for it, at the
call or before) and the call are kept for every step and shown as the median of 25 steps each; the
floor is a bare btrfs snapshot in an image that ages in the same way. Then we go back from the end
to checkpoints at several depths, ten times each, and verify what is there against what was there
when they were taken.

The issue asks that the pause grows by at most 1.5 ms and the call by at most a factor of 3, that
both are flat after 300, and that a rollback costs the same at any depth. What "flat" and "the same"
mean in numbers (0.5 ms; a factor of 1.5) is this file's choice.

    python bench/line.py --json out.json
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import click
import floor
from report import Recorder, Wrong, finish, meminfo, options, quantile
from rounds import timed
from standard import FILES, IDLE, PYTHON_PAGES, Tree, create, stop_of

from deltabox import Checkpoint, Sandbox
from deltabox._connection import state_directory

LENGTH, QUICK_LENGTH = 500, 50
BIN = 25
FLAT_AFTER = 300
DEPTHS = (1, 10, 50, 100, 200, 300, 400, 499)
ROUNDS, QUICK_ROUNDS = 10, 3
LINE, DEPTH = "line", "depth"


class Line:
    """The checkpoints, the states they hold, and what each of them cost."""

    def __init__(self, recorder: Recorder, sandbox: Sandbox) -> None:
        self.recorder = recorder
        self.sandbox = sandbox
        self.tree = Tree.start(sandbox)
        self.checkpoints: list[Checkpoint] = []
        self.states: list[str] = []
        self.pauses: list[float] = []
        self.calls: list[float] = []

    def grow(self, length: int) -> None:
        while len(self.checkpoints) < length:
            self.tree.dirty()
            self.states.append(self.tree.state())
            time.sleep(IDLE)
            checkpoint, call = timed(self.sandbox)
            self.checkpoints.append(checkpoint)
            self.pauses.append(stop_of(checkpoint))
            self.calls.append(call)

    def tell(self) -> None:
        """Record the steps, in bins, and how the last of them compare with the first."""
        length = len(self.calls)
        for first in range(0, length, BIN):
            x = float(min(first + BIN, length))
            for name, values in (("pause", self.pauses), ("call", self.calls)):
                for value in values[first : first + BIN]:
                    self.recorder.add(f"{LINE}: checkpoint {name}", value, x=x)
        pauses = [_middle(self.pauses, at) for at in (0, FLAT_AFTER, length - BIN)]
        calls = [_middle(self.calls, at) for at in (0, FLAT_AFTER, length - BIN)]
        self.recorder.add(f"{LINE}: growth of the pause", pauses[2] - pauses[0])
        self.recorder.add(f"{LINE}: growth of the call", calls[2] / calls[0])
        if length >= FLAT_AFTER + 2 * BIN:
            after = f"after {FLAT_AFTER}"
            self.recorder.add(f"{LINE}: growth of the pause {after}", pauses[2] - pauses[1])
            self.recorder.add(f"{LINE}: growth of the call {after}", calls[2] - calls[1])

    def go_back(self, depth: int, rounds: int) -> None:
        end = len(self.checkpoints) - 1
        for _ in range(rounds):
            time.sleep(IDLE)
            began = time.perf_counter()
            self.sandbox.rollback(self.checkpoints[end - depth])
            self.recorder.add(
                f"{LINE}: rollback", (time.perf_counter() - began) * 1e3, x=float(depth)
            )
            if self.tree.state() != self.states[end - depth]:
                raise Wrong(f"the state {depth} checkpoints before the last is another")
            self.sandbox.rollback(self.checkpoints[end])


def _middle(values: list[float], first: int) -> float:
    """The median of the bin that begins there."""
    return quantile(values[first : first + BIN] or values[-BIN:], 0.5)


def images_mb() -> float:
    """What the images of all trees take on the disk."""
    found = state_directory().glob("trees/*/*.img")
    return sum(path.stat().st_blocks * 512 for path in found) / (1 << 20)


def _floors(recorder: Recorder, length: int) -> None:
    with floor.built() as program, floor.image(program.scratch, gigabytes=4) as image:
        read = quantile(program.pages(PYTHON_PAGES, 30), 0.5)
        aged = program.snapshot(image, FILES, length, synced=True, kept=True)
        for first in range(0, length, BIN):
            x = float(min(first + BIN, length))
            values = [read + value for value in aged[first : first + BIN]]
            recorder.floor("pages read + aged snapshot", values, x=x)
        recorder.floor("fork + namespaces + overlay", program.overlay(30, 30))


def _expectations(recorder: Recorder) -> None:
    recorder.curve(LINE, title="Checkpoints in one line", x="checkpoints before", log_x=False)
    recorder.curve(DEPTH, title="Rollback from the end of the line", x="checkpoints back")
    for name in ("pause", "call"):
        expected = f"{LINE}: checkpoint {name}"
        recorder.expect(expected, floor="pages read + aged snapshot", curve=LINE)
        recorder.expect(f"{LINE}: growth of the {name} after {FLAT_AFTER}", goal=0.5)
    recorder.expect(f"{LINE}: growth of the pause", goal=1.5)
    recorder.expect(f"{LINE}: growth of the call", goal=3.0, unit="x")
    recorder.expect(f"{LINE}: rollback", floor="fork + namespaces + overlay", curve=DEPTH)
    recorder.expect(f"{LINE}: slowest depth against the fastest", goal=1.5, unit="x")
    recorder.expect(f"{LINE}: memory of a checkpoint", unit="MB")
    recorder.expect(f"{LINE}: disk of a checkpoint", unit="MB")


def _start(recorder: Recorder, opened: ExitStack) -> Line:
    return Line(recorder, opened.enter_context(create()))


def _measure(recorder: Recorder, line: Line, steps: int, *, rounds: int) -> None:
    before, disk = meminfo("MemAvailable"), images_mb()
    recorder.attempt("the line", partial(line.grow, steps), limit=60 + 1.0 * steps)
    taken = len(line.checkpoints)
    if taken >= 2 * BIN:
        line.tell()
        memory = (before - meminfo("MemAvailable")) / 1024
        recorder.add(f"{LINE}: memory of a checkpoint", memory / taken)
        recorder.add(f"{LINE}: disk of a checkpoint", (images_mb() - disk) / taken)
    medians = []
    for depth in [depth for depth in DEPTHS if depth < taken]:
        x = float(depth)
        if recorder.attempt("going back", partial(line.go_back, depth, rounds), x=x):
            medians.append(quantile(recorder.values(f"{LINE}: rollback", x=x), 0.5))
    if medians:
        against = f"{LINE}: slowest depth against the fastest"
        recorder.add(against, max(medians) / min(medians))


@click.command()
@options
@click.option("--length", type=click.IntRange(min=2 * BIN), help="Default 500, quick 50.")
def main(*, output: Path | None, quick: bool, budget: float | None, length: int | None) -> None:
    """Measure a long line of checkpoints."""
    steps = length or (QUICK_LENGTH if quick else LENGTH)
    recorder = Recorder("line", what=__doc__, budget=budget, quick=quick)
    _expectations(recorder)
    recorder.attempt("the floors", partial(_floors, recorder, steps))
    with ExitStack() as opened:
        lines: list[Line] = []
        start = partial(_start, recorder, opened)
        recorder.attempt("the sandbox", lambda: lines.append(start()))
        for line in lines:
            _measure(recorder, line, steps, rounds=QUICK_ROUNDS if quick else ROUNDS)
    finish(recorder, output)


if __name__ == "__main__":
    main()
