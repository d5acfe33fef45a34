"""What the parts of the benchmark hand back: the arithmetic, goals, floors, failures."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import click
import curves
import msgspec
import pytest
import report
from report import Figure, Recorder, Wrong, quantile


def recorder(budget: float | None = None) -> Recorder:
    return Recorder("part", what=" what it is ", budget=budget)


def test_quantiles_are_nearest_rank() -> None:
    hundred = [float(n) for n in range(100, 0, -1)]
    assert quantile(hundred, 0.5) == 50
    assert quantile(hundred, 0.99) == 99
    assert quantile([3.0], 0.99) == 3.0
    assert quantile([4.0, 1.0], 0.5) == 1.0
    assert report.summary([1.0, 5.0, 2.0]) == report.Summary(2.0, 5.0, 3)


@pytest.mark.parametrize(
    ("figure", "missed"),
    [
        (Figure("a", None, 4.0, 9.0, 1), False),
        (Figure("a", None, 4.0, 9.0, 1, goal=4.0), False),
        (Figure("a", None, 4.1, 9.0, 1, goal=4.0), True),
        (Figure("a", None, 1.0, 9.0, 1, goal=4.0, goal_p99=6.0), True),
        (Figure("a", None, 19.0, 21.0, 1, goal=20.0, at_least=True), True),
        (Figure("a", None, 20.0, 21.0, 1, goal=20.0, at_least=True), False),
    ],
)
def test_goals(figure: Figure, missed: bool) -> None:
    assert figure.missed is missed


def test_a_point_has_its_own_goal_and_floor_and_the_rest_of_its_curve() -> None:
    made = recorder()
    made.expect("call", floor="fork", curve="memory", unit="us")
    made.expect("call", x=2048, goal=8.0)
    made.floor("fork", [3.0], x=2048)
    for x in (10, 2048):
        made.add("call", 5.0, x=x)
    small, big = made.report().figures
    assert (small.goal, small.floor, small.curve, small.unit) == (None, None, "memory", "us")
    assert (big.goal, big.floor, big.curve, big.unit) == (8.0, "fork @ 2048", "memory", "us")


def test_a_floor_without_x_is_below_every_point() -> None:
    made = recorder()
    made.expect("call", floor="snapshot")
    made.floor("snapshot", [1.0])
    made.add("call", 5.0, x=10)
    assert made.report().figures[0].floor == "snapshot"


def test_what_fails_is_named_and_the_rest_goes_on() -> None:
    made = recorder()

    def half() -> None:
        made.add("call", 1.0)
        raise Wrong("the files are others")

    assert not made.attempt("call", half, x=3)
    assert not made.attempt("other", lambda: 1 // 0)
    assert made.attempt("third", lambda: made.add("third", 2.0))
    found = made.report()
    assert [figure.name for figure in found.figures] == ["call", "third"]
    assert [(f.name, f.x, f.error) for f in found.failures] == [
        ("call", 3, "the files are others"),
        ("other", None, "ZeroDivisionError: integer division or modulo by zero"),
    ]


def test_a_point_may_not_take_for_ever() -> None:
    made = recorder()
    before = signal.getsignal(signal.SIGALRM)
    began = time.monotonic()
    assert not made.attempt("slow", lambda: time.sleep(30), limit=0.05)
    assert time.monotonic() - began < 5
    assert made.report().failures[0].error.startswith("it took longer than 0.05 s, at report.py: ")
    assert signal.getsignal(signal.SIGALRM) == before
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0


def test_no_point_is_begun_when_the_time_is_over() -> None:
    made = recorder(budget=1e-9)
    assert not made.attempt("late", lambda: made.add("late", 1.0))
    assert not made.report().figures
    assert "time of this part was over" in made.report().failures[0].error


def test_an_interrupt_is_not_a_failure_of_a_point() -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        recorder().attempt("call", interrupted)


def test_reports_are_written_and_read(tmp_path: Path) -> None:
    made = recorder()
    made.expect("call", goal=1.0, goal_p99=2.0, at_least=True)
    made.add("call", 1.5, x=10)
    made.add("call", 2.5, x=10)
    made.floor("fork", [0.5])
    made.curve("memory", title="Memory", x="MB")
    made.note("nothing else")
    made.fail("other", "it could not be")
    wanted = made.report()
    path = tmp_path / "new" / "out.json"
    report.write_json(path, wanted)
    assert report.read_json(path) == wanted
    assert wanted.samples == {"call @ 10": [1.5, 2.5]}
    assert [entry.name for entry in path.parent.iterdir()] == ["out.json"]
    path.write_text("{}")
    with pytest.raises(msgspec.ValidationError):
        report.read_json(path)


def test_the_host_is_described_and_not_named() -> None:
    here = report.host()
    assert here.cpus > 0 and here.memory_mb > 0
    assert not {"name", "hostname", "node"} & set(here.__struct_fields__)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.123, "0.12"), (9.876, "9.88"), (12.34, "12.3"), (1234.5, "1,234"), (-3.0, "-3.00")],
)
def test_numbers(value: float, text: str) -> None:
    assert report.number(value) == text


def test_x_values_can_be_chosen() -> None:
    assert curves.chosen(("memory=2048,10", "disk=0")) == {"memory": [10, 2048], "disk": [0]}
    for wrong in ("weight=1", "memory=", "memory=a"):
        with pytest.raises(click.BadParameter):
            curves.chosen((wrong,))
