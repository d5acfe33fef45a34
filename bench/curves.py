"""The curves: what a checkpoint and a rollback cost, over each thing that could make them dear.

The promise is that cost follows the change and not the state. So each curve turns one knob over
three orders of magnitude and leaves the others alone, with the standard step's 150 ms of thought
before each checkpoint and each rollback, and all contents verified. Every point has its floor
from the same run (floor.c).

    python bench/curves.py --json out.json
    python bench/curves.py --only memory --x memory=10,2048
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import click
import floor
from curve_files import bytes_on_disk, changed_files
from curve_memory import dirty_pages, memory
from curve_shape import descriptors, processes, sandboxes
from floor import Floor
from report import Recorder, finish, options

Measure = Callable[[Recorder, Floor, list[int], int, float], None]


@dataclass(frozen=True)
class Knob:
    measure: Measure
    full: tuple[int, ...]
    quick: tuple[int, ...]


KNOBS = {
    "memory": Knob(memory, (10, 30, 100, 300, 1024, 2048, 4096), (10, 256)),  # MB
    "dirty": Knob(dirty_pages, (10, 100, 1000, 10_000, 100_000), (10, 10_000)),
    "files": Knob(changed_files, (0, 5, 50, 500, 5000), (0, 500)),
    "disk": Knob(bytes_on_disk, (0, 100, 1024, 10_240), (256,)),  # MB
    "processes": Knob(processes, (1, 2, 4, 8, 16, 32, 64), (2, 8)),
    "descriptors": Knob(descriptors, (10, 30, 100, 300, 1000), (100,)),
    "sandboxes": Knob(sandboxes, (1, 2, 4, 8, 16, 32), (1, 4)),
}


def chosen(values: tuple[str, ...]) -> dict[str, list[int]]:
    """`("memory=10,2048",)` as `{"memory": [10, 2048]}`."""
    found = {}
    for value in values:
        name, _, xs = value.partition("=")
        if name not in KNOBS:
            raise click.BadParameter(f"{name!r} is none of {', '.join(KNOBS)}")
        try:
            found[name] = sorted({int(x) for x in xs.split(",")})
        except ValueError:
            raise click.BadParameter(f"{xs!r} is no list of whole numbers") from None
    return found


@click.command()
@options
@click.option("--only", multiple=True, type=click.Choice(list(KNOBS)), help="These curves.")
@click.option("--x", "xs", multiple=True, help="The points of a curve: NAME=1,10,100.")
@click.option("--rounds", type=click.IntRange(min=1), help="Of a point; default 30, quick 3.")
def main(
    *,
    output: Path | None,
    quick: bool,
    budget: float | None,
    only: tuple[str, ...],
    xs: tuple[str, ...],
    rounds: int | None,
) -> None:
    """Measure the curves."""
    recorder = Recorder("curves", what=__doc__, budget=budget, quick=quick)
    points = chosen(xs)
    with floor.built() as program:
        for name, knob in KNOBS.items():
            if not only or name in only:
                here = points.get(name) or list(knob.quick if quick else knob.full)
                patience = 3.0 if quick else 20.0
                knob.measure(recorder, program, here, rounds or (3 if quick else 30), patience)
    finish(recorder, output)


if __name__ == "__main__":
    main()
