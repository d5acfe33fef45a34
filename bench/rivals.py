"""The standard step beside CRIU 4.1, on the same tree of processes, in turns.

Each round is one standard step of DeltaBox (see standard.py) and the same with CRIU (see criu.py):
250 pages of a Python with 30 MB and 20 of a bash are written, the tree is saved, written again
and brought back, and its contents are verified. 150 ms of idle time before each operation. The
ratios are taken within a round, so that a busy minute of the machine falls on both.

What a figure covers:

- "checkpoint call" and "rollback" are what the caller waits for. They hold files, processes and
  namespaces, and the old tree is stopped before a rollback ends.
- "pause" is how long the programs stood still; of CRIU it is its own `frozen_time`.
- "CRIU dump" and "CRIU restore" are from the start of the program to its end: two processes, no
  files, no namespaces, images in memory. The tree goes on running after a dump. A restore needs
  the pids free, so the old tree is killed first: that is "CRIU stop", in no other figure.
- The floor of CRIU's figures is its program started only to say its version.

    python bench/rivals.py --json out.json
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path

import click
import criu
import report
import standard
from report import Recorder

ROUNDS = 30
QUICK_ROUNDS = 5
IDLE = 0.150
DUMP_GOAL = 20.0  # times the checkpoint
RESTORE_GOAL = 30.0  # times the rollback


def expect(recorder: Recorder) -> None:
    for name in ("dump", "dump's pause", "stop", "restore"):
        recorder.expect(f"CRIU {name}", floor="CRIU started for its version")
    for name, goal in (
        ("CRIU dump : checkpoint call", DUMP_GOAL),
        ("CRIU dump : checkpoint stop", DUMP_GOAL),
        ("CRIU dump's pause : checkpoint stop", None),
        ("CRIU restore : rollback", RESTORE_GOAL),
        ("CRIU stop and restore : rollback", None),
    ):
        recorder.expect(name, unit="times", goal=goal, at_least=True)


def ours(tree: standard.Tree) -> dict[str, float]:
    """One standard step of DeltaBox, in milliseconds."""
    tree.dirty()
    expected = tree.state()
    time.sleep(IDLE)
    began = time.perf_counter()
    checkpoint = tree.sandbox.checkpoint()
    saved = time.perf_counter() - began
    tree.dirty()
    time.sleep(IDLE)
    began = time.perf_counter()
    tree.sandbox.rollback(checkpoint)
    back = time.perf_counter() - began
    if tree.state() != expected:
        raise report.Wrong("DeltaBox's rollback gave other contents back")
    standard.forget(tree.sandbox)
    return {
        "checkpoint call": saved * 1e3,
        "checkpoint pause": checkpoint.stats.pause_ms,
        "checkpoint stop": standard.stop_of(checkpoint),
        "rollback": back * 1e3,
    }


def theirs(tree: criu.Tree, number: int) -> tuple[dict[str, float], dict[str, float]]:
    """One standard step of CRIU, in milliseconds; and what it says of its dump."""
    tree.dirty(number)
    expected = tree.state()
    time.sleep(IDLE)
    dump = tree.dump()
    tree.dirty(number + 1)
    time.sleep(IDLE)
    stopped = tree.stop()
    restore = tree.restore()
    if tree.state() != expected:
        raise report.Wrong("CRIU's restore gave other contents back")
    figures = {
        "CRIU dump": dump["took"],
        "CRIU dump's pause": dump["frozen"],
        "CRIU stop": stopped,
        "CRIU restore": restore["took"],
    }
    return figures, dump


def ratios(us: dict[str, float], them: dict[str, float]) -> dict[str, float]:
    """How many times as long CRIU took, in one round."""
    dump, restore = them["CRIU dump"], them["CRIU restore"]
    return {
        "CRIU dump : checkpoint call": dump / us["checkpoint call"],
        "CRIU dump : checkpoint stop": dump / us["checkpoint stop"],
        "CRIU dump's pause : checkpoint stop": them["CRIU dump's pause"] / us["checkpoint stop"],
        "CRIU restore : rollback": restore / us["rollback"],
        "CRIU stop and restore : rollback": (them["CRIU stop"] + restore) / us["rollback"],
    }


def start(recorder: Recorder, cache: Path) -> criu.Tree | None:
    """CRIU's tree, warm; None, and the reason in the report, when it cannot be had."""
    try:
        tree = criu.Tree(criu.fetch(cache))
    except (criu.Unavailable, OSError) as error:
        recorder.fail("CRIU", f"it cannot be had or does not run here: {error}")
        return None
    try:
        theirs(tree, 1)  # CRIU keeps what it finds out about the kernel
        recorder.floor("CRIU started for its version", [tree.bare_start() for _ in range(10)])
    except (criu.Unavailable, report.Wrong) as error:
        tree.close()
        recorder.fail("CRIU", error)
        return None
    recorder.note(f"CRIU {tree.version}, Debian's build, images and /run on a tmpfs")
    return tree


def pre_dump(recorder: Recorder, tree: criu.Tree) -> None:
    """Incremental dumps, where the kernel has what CRIU needs for them."""
    try:
        recorder.add("CRIU pre-dump", tree.pre_dump()["took"])
    except criu.Unavailable as error:
        recorder.note(f"no incremental dumps: {error}")


def measure(recorder: Recorder, rounds: int, cache: Path) -> None:
    expect(recorder)
    with ExitStack() as stack:
        step = standard.Tree.start(stack.enter_context(standard.create()))
        ours(step)  # the first checkpoint is a full one, as CRIU's first start is
        tree = start(recorder, cache)
        if tree is not None:
            stack.enter_context(tree)
            pre_dump(recorder, tree)
        for number in range(rounds):
            us = ours(step)
            for name, value in us.items():
                recorder.add(name, value)
            if tree is None:
                continue
            try:
                them, dump = theirs(tree, 10 * number + 10)
            except (criu.Unavailable, report.Wrong) as error:
                recorder.fail("CRIU", error)
                tree = None
                continue
            for name, value in {**them, **ratios(us, them)}.items():
                recorder.add(name, value)
            if number == 0:
                recorder.note(
                    f"each dump of CRIU stops the tree and writes all of it:"
                    f" {dump['pages written']:,.0f} pages, {dump['bytes'] / (1 << 20):.0f} MiB"
                )


@click.command()
@report.options
@click.option("--rounds", type=click.IntRange(min=1), help="Turns; 30, or 5 with --quick.")
def main(*, output: Path | None, quick: bool, budget: float | None, rounds: int | None) -> None:
    """Measure the standard step beside CRIU."""
    recorder = Recorder("rivals", what=__doc__, budget=budget, quick=quick)
    wanted = rounds or (QUICK_ROUNDS if quick else ROUNDS)
    recorder.attempt("rounds", lambda: measure(recorder, wanted, criu.CACHE), limit=300)
    report.finish(recorder, output)


if __name__ == "__main__":
    main()
