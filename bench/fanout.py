"""Fan-out: many live copies of one state, until every one of them has answered from inside.

The tree has three processes: the standard step's bash and Python with 30 MB, and a `sleep`. The
clock runs from the call of `fork_many` until the Python of the last copy has told what is in its
memory. The floor does the same number of bare clones at once, on all cores (floor.c): for each a
writable btrfs snapshot, five new namespaces, an overlay mount on the snapshot, a process with
30 MB and two small ones, and a byte from each of the three.

The memory of an idle copy is how much less MemAvailable is while the copies wait, divided by their
number; it is also given for when they have answered, because a REPL writes to its memory then.

    python bench/fanout.py --json out.json
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import click
import floor
from report import Recorder, Wrong, finish, meminfo, options, quantile
from rounds import LEAST
from standard import IDLE, MEGABYTES, Tree, create

from deltabox import Checkpoint, Sandbox

COUNTS = {8: None, 16: 60.0, 64: 200.0}  # copies, and the goal of the issue
QUICK_COUNTS = (16, 64)
OF_FLOOR = 2.0
IDLE_COPY_MB = 2.0
MEMORY_ROUNDS = 5
SETTLED = 1.0  # seconds after which nothing moves any more that a fork has left behind
VERIFIED = 4  # copies of each round whose whole state is compared


def answers(name: int) -> str:
    return f"fork_many({name}), an answer from each"


def floor_of(count: int) -> str:
    return f"{count} bare copies"


class Fan:
    """The tree, its checkpoint, and rounds of copies."""

    def __init__(self, recorder: Recorder, sandbox: Sandbox) -> None:
        self.recorder = recorder
        self.sandbox = sandbox
        self.tree = Tree.start(sandbox)
        sandbox.spawn(["sleep", "infinity"])
        self.tree.dirty()
        self.expected = self.tree.state()
        pages = MEGABYTES << 8
        at = self.tree.number * 7 % pages * 4096
        self.question = f'print("=", int.from_bytes(memory[{at}:{at + 8}], "little"), flush=True)'
        self.checkpoint: Checkpoint = sandbox.checkpoint()

    def times(self, count: int, rounds: int, patience: float) -> None:
        began = time.monotonic()
        for turn in range(rounds):
            time.sleep(IDLE)
            self._time(count)
            if turn + 1 >= LEAST and time.monotonic() - began > patience:
                return

    def _time(self, count: int) -> None:
        with ExitStack() as opened:
            start = time.perf_counter()
            copies = self.sandbox.fork_many(count, at=self.checkpoint)
            made = time.perf_counter()
            for copy in copies:
                opened.callback(copy.close)
            trees = [self.tree.of(copy) for copy in copies]
            for tree in trees:
                tree.tell(self.question)
            said = {tree.hear() for tree in trees}
            answered = time.perf_counter()
            self.recorder.add(f"fork_many({count}) call", (made - start) * 1e3)
            self.recorder.add(answers(count), (answered - start) * 1e3)
            if said != {f"= {self.tree.number}\n"}:
                raise Wrong(f"the copies answered {said}")
            for tree in trees[:: max(1, count // VERIFIED)]:
                if tree.state() != self.expected:
                    raise Wrong("a copy has another state")

    def memory(self, count: int, rounds: int) -> None:
        for _ in range(rounds):
            time.sleep(SETTLED)
            before = meminfo("MemAvailable")
            with ExitStack() as opened:
                copies = self.sandbox.fork_many(count, at=self.checkpoint)
                for copy in copies:
                    opened.callback(copy.close)
                time.sleep(SETTLED)
                idle = (before - meminfo("MemAvailable")) / 1024 / count
                self.recorder.add(f"memory of an idle copy, of {count}", idle)
                for copy in copies:
                    tree = self.tree.of(copy)
                    tree.tell(self.question)
                    tree.hear()
                used = (before - meminfo("MemAvailable")) / 1024 / count
                self.recorder.add(f"memory of a copy that has answered, of {count}", used)


def _start(recorder: Recorder, opened: ExitStack) -> Fan:
    return Fan(recorder, opened.enter_context(create()))


def _floors(recorder: Recorder, program: floor.Floor, count: int, rounds: int) -> None:
    with floor.image(program.scratch, gigabytes=4) as image:
        star = program.star(image, count, MEGABYTES, rounds)
    recorder.floor(floor_of(count), star.milliseconds)
    recorder.floor(f"memory of one of {count} bare copies", star.megabytes)


def _expectations(recorder: Recorder, count: int, goal: float | None) -> None:
    of_floor = f"fork_many({count}), against its floor"
    recorder.expect(answers(count), goal=goal, floor=floor_of(count))
    recorder.expect(f"fork_many({count}) call", floor=floor_of(count))
    recorder.expect(of_floor, goal=None if goal is None else OF_FLOOR, unit="x")
    floor_memory = f"memory of one of {count} bare copies"
    for state in ("an idle copy", "a copy that has answered"):
        name = f"memory of {state}, of {count}"
        limit = IDLE_COPY_MB if "idle" in state and goal is not None else None
        recorder.expect(name, unit="MB", goal=limit, floor=floor_memory)


@click.command()
@options
@click.option("--rounds", type=click.IntRange(min=1), help="Of each number; default 30, quick 5.")
def main(*, output: Path | None, quick: bool, budget: float | None, rounds: int | None) -> None:
    """Measure fork_many."""
    turns = rounds or (5 if quick else 30)
    patience = 4.0 if quick else 40.0
    recorder = Recorder("fanout", what=__doc__, budget=budget, quick=quick)
    with floor.built() as program, ExitStack() as opened:
        fans: list[Fan] = []
        counts = QUICK_COUNTS if quick else tuple(COUNTS)
        for count in counts:
            _expectations(recorder, count, COUNTS[count])
            body = partial(_floors, recorder, program, count, 3 if quick else 10)
            recorder.attempt(floor_of(count), body)
        start = partial(_start, recorder, opened)
        recorder.attempt("the tree", lambda: fans.append(start()))
        for fan, count in ((fan, count) for fan in fans for count in counts):
            times = partial(fan.times, count, turns, patience)
            recorder.attempt(answers(count), times, limit=30 + 3 * patience)
            memory = partial(fan.memory, count, 1 if quick else MEMORY_ROUNDS)
            recorder.attempt(f"memory of {count} copies", memory)
            bare = recorder.floors(floor_of(count))
            if bare:
                for value in recorder.values(answers(count)):
                    name = f"fork_many({count}), against its floor"
                    recorder.add(name, value / quantile(bare, 0.5))
    finish(recorder, output)


if __name__ == "__main__":
    main()
