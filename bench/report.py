"""What every part of the benchmark hands back, and how a run of it is recorded and shown.

A part is a module of bench/ that runs by itself, `python bench/NAME.py --json out.json`, and takes
the options of `options()`. Its answer is a `Report`, the same for all parts, so that the suite can
put them into one table and one page without knowing any of them.

    recorder = Recorder("lines", what=__doc__, budget=seconds)
    recorder.expect("call", goal=4.0, goal_p99=6.0, floor="fork")
    recorder.floor("fork", values)
    recorder.attempt("call", body)  # body() does recorder.add("call", milliseconds), many times
    finish(recorder, output)

What fails in a body is in the report by name, and the part goes on with the next point.

Figures that form a curve have an `x`, and `recorder.curve()` says what it is. A floor that depends
on x is given as `recorder.floor("fork", values, x=2048)` and belongs to the figures of that x.

Medians and 99th percentiles are by nearest rank, so each is a value that was really measured: with
fewer than 100 values the 99th percentile is the worst one. Averages are of no use here, because
one slow run of a thousand says nothing about the others.
"""

from __future__ import annotations

import functools
import math
import os
import platform
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import click
import msgspec
from rich.console import Console
from rich.table import Table


class Host(msgspec.Struct, frozen=True):
    """The kind of machine; nothing that names it."""

    kernel: str
    cpus: int
    memory_mb: int
    machine: str
    cpu: str
    python: str
    load: float  # the minute before the part began; idle is near 0


class Summary(msgspec.Struct, frozen=True):
    median: float
    p99: float
    n: int


class Figure(msgspec.Struct, frozen=True):
    name: str
    x: float | None
    median: float
    p99: float
    n: int
    unit: str = "ms"
    goal: float | None = None  # for the median
    goal_p99: float | None = None
    at_least: bool = False  # the goal is a lower bound, as of a ratio
    floor: str | None = None  # a key of the report's floors
    curve: str | None = None  # a key of the report's curves

    @property
    def missed(self) -> bool:
        if self.goal is not None:
            if self.at_least and self.median < self.goal:
                return True
            if not self.at_least and self.median > self.goal:
                return True
        return self.goal_p99 is not None and self.p99 > self.goal_p99


class Curve(msgspec.Struct, frozen=True):
    """A picture: the figures that name it, over x."""

    title: str
    x: str  # what x is, with its unit
    log_x: bool = True
    log_y: bool = True


class Failure(msgspec.Struct, frozen=True):
    """A point that could not be measured."""

    name: str
    x: float | None
    error: str


class Report(msgspec.Struct):
    part: str
    what: str
    unit: str
    host: Host
    floors: dict[str, Summary] = {}
    figures: list[Figure] = []
    failures: list[Failure] = []
    curves: dict[str, Curve] = {}
    notes: list[str] = []
    seconds: float = 0.0
    quick: bool = False
    samples: dict[str, list[float]] = {}

    @property
    def missed(self) -> list[Figure]:
        return [figure for figure in self.figures if figure.missed]


def quantile(values: Sequence[float], q: float) -> float:
    """The smallest value that is not below a share `q` of all (nearest rank)."""
    ranked = sorted(values)
    return ranked[max(0, math.ceil(q * len(ranked)) - 1)]


def summary(values: Sequence[float]) -> Summary:
    return Summary(quantile(values, 0.5), quantile(values, 0.99), len(values))


def key(name: str, x: float | None) -> str:
    """The name of a floor or of samples that belong to one x."""
    return name if x is None else f"{name} @ {x:g}"


def cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()


def meminfo(field: str) -> int:
    """A line of /proc/meminfo, in KiB."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0])
    raise KeyError(field)


def host() -> Host:
    return Host(
        kernel=platform.release(),
        cpus=os.cpu_count() or 1,
        memory_mb=meminfo("MemTotal") >> 10,
        machine=platform.machine(),
        cpu=cpu_model(),
        python=platform.python_version(),
        load=os.getloadavg()[0],
    )


class OutOfTime(Exception):
    """A point has taken longer than it may."""


def _where(frame: FrameType | None) -> str:
    """The line of the benchmark that was waiting."""
    here = str(Path(__file__).parent)
    lines = [line for line in traceback.extract_stack(frame) if line.filename.startswith(here)]
    return f"at {Path(lines[-1].filename).name}: {lines[-1].line}" if lines else "elsewhere"


class Wrong(Exception):
    """What came back is not what had been saved."""


class _Expected(msgspec.Struct):
    unit: str | None = None
    goal: float | None = None
    goal_p99: float | None = None
    at_least: bool = False
    floor: str | None = None
    curve: str | None = None


class Recorder:
    """A report in the making. Of the main thread: a point's time limit is an alarm signal."""

    def __init__(
        self,
        part: str,
        *,
        what: str | None,
        unit: str = "ms",
        budget: float | None = None,
        quick: bool = False,
    ) -> None:
        self._began = time.monotonic()
        self._ends = math.inf if budget is None else self._began + budget
        self._report = Report(part, (what or "").strip(), unit, host(), quick=quick)
        self._expected: dict[tuple[str, float | None], _Expected] = {}
        self._samples: dict[tuple[str, float | None], list[float]] = {}
        self._floors: dict[str, list[float]] = {}

    # -- what is measured --------------------------------------------------------------------

    def add(self, name: str, value: float, *, x: float | None = None) -> None:
        self._samples.setdefault((name, x), []).append(value)

    def floor(self, name: str, values: Sequence[float], *, x: float | None = None) -> None:
        self._floors.setdefault(key(name, x), []).extend(values)

    def expect(
        self,
        name: str,
        *,
        x: float | None = None,
        unit: str | None = None,
        goal: float | None = None,
        goal_p99: float | None = None,
        at_least: bool = False,
        floor: str | None = None,
        curve: str | None = None,
    ) -> None:
        """Say what belongs to a figure. With x: to that point; what is not said there is as said
        for the whole curve (without x).
        """
        self._expected[name, x] = _Expected(unit, goal, goal_p99, at_least, floor, curve)

    def curve(
        self, name: str, *, title: str, x: str, log_x: bool = True, log_y: bool = True
    ) -> None:
        self._report.curves[name] = Curve(title, x, log_x, log_y)

    def note(self, text: str) -> None:
        """A fact of this run that a reader needs, such as a point left out for want of memory."""
        self._report.notes.append(text)

    def fail(self, name: str, error: BaseException | str, *, x: float | None = None) -> None:
        named = isinstance(error, BaseException) and not isinstance(error, OutOfTime | Wrong)
        text = f"{type(error).__name__}: {error}" if named else str(error)
        self._report.failures.append(Failure(name, x, text))

    def attempt(
        self, name: str, body: Callable[[], object], *, x: float | None = None, limit: float = 120.0
    ) -> bool:
        """Measure a point, or several, with `body()`; whether that went well.

        If it fails, or takes longer than `limit` seconds, a failure is recorded and what it had
        added stays. It is not begun when the part's time is over, but may end after that. How
        long it took goes to standard error, so that who waits sees something.
        """
        began = time.monotonic()
        if began >= self._ends:
            self.fail(name, "not begun: the time of this part was over", x=x)
            return False

        def alarm(number: int, frame: FrameType | None) -> NoReturn:
            raise OutOfTime(f"it took longer than {limit:g} s, {_where(frame)}")

        before = signal.signal(signal.SIGALRM, alarm)
        try:
            signal.setitimer(signal.ITIMER_REAL, limit)
            body()
        except Exception as error:
            self.fail(name, error, x=x)
            return False
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
            spent = time.monotonic() - began
            click.echo(f"  {spent:6.1f} s  {name}{'' if x is None else f', {whole(x)}'}", err=True)
        return True

    def values(self, name: str, *, x: float | None = None) -> list[float]:
        return self._samples.get((name, x), [])

    def floors(self, name: str, *, x: float | None = None) -> list[float]:
        return self._floors.get(key(name, x), [])

    # -- the report --------------------------------------------------------------------------

    def _figure(self, name: str, x: float | None, values: list[float]) -> Figure:
        whole = self._expected.get((name, None), _Expected())
        own = self._expected.get((name, x), _Expected())
        floor = own.floor or whole.floor
        if floor is not None and key(floor, x) in self._floors:
            floor = key(floor, x)
        found = summary(values)
        return Figure(
            name,
            x,
            found.median,
            found.p99,
            found.n,
            unit=own.unit or whole.unit or self._report.unit,
            goal=whole.goal if own.goal is None else own.goal,
            goal_p99=whole.goal_p99 if own.goal_p99 is None else own.goal_p99,
            at_least=own.at_least or whole.at_least,
            floor=floor if floor in self._floors else None,
            curve=own.curve or whole.curve,
        )

    def report(self) -> Report:
        report = self._report
        report.floors = {name: summary(values) for name, values in self._floors.items() if values}
        report.figures = [
            self._figure(name, x, values) for (name, x), values in self._samples.items() if values
        ]
        report.samples = {key(name, x): values for (name, x), values in self._samples.items()}
        report.seconds = time.monotonic() - self._began
        return report


# -- written, read and shown -----------------------------------------------------------------


def write_json(path: Path, report: Report) -> None:
    """Write a report; a reader sees the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        fresh.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)


def read_json(path: Path) -> Report:
    """Raises `msgspec.ValidationError` for anything that is no report."""
    return msgspec.json.decode(path.read_bytes(), type=Report)


def number(value: float) -> str:
    """Three digits that say something, as people write them."""
    size = abs(value)
    return f"{value:,.{0 if size >= 100 else 1 if size >= 10 else 2}f}"


def whole(value: float) -> str:
    """An x: whole where it is whole."""
    return f"{value:,.0f}" if value == int(value) else f"{value:,g}"


def goal_text(figure: Figure) -> str:
    sign = "≥" if figure.at_least else "≤"
    parts = [] if figure.goal is None else [f"{sign} {figure.goal:g}"]
    if figure.goal_p99 is not None:
        parts.append(f"p99 {sign} {figure.goal_p99:g}")
    return ", ".join(parts)


def table(report: Report) -> Table:
    """Figures, missed goals in red; then what could not be measured."""
    title = f"{report.part}{' (quick)' if report.quick else ''}, {report.seconds:.0f} s"
    made = Table(title=title, title_justify="left")
    made.add_column("what")
    for column in ("x", "median", "p99", "n", "unit", "floor", "goal"):
        made.add_column(column, justify="right")
    for figure in report.figures:
        under = report.floors.get(figure.floor or "")
        made.add_row(
            figure.name,
            "" if figure.x is None else whole(figure.x),
            number(figure.median),
            number(figure.p99),
            str(figure.n),
            figure.unit,
            "" if under is None else number(under.median),
            goal_text(figure),
            style="red" if figure.missed else "",
        )
    for failure in report.failures:
        at = "" if failure.x is None else whole(failure.x)
        made.add_row(failure.name, at, "failed", "", "", "", "", failure.error, style="red")
    return made


def show(console: Console, report: Report) -> None:
    console.print(table(report))
    for name, floor in report.floors.items():
        if " @ " not in name:
            console.print(f"floor, {name}: {number(floor.median)} (p99 {number(floor.p99)})")
    for note in report.notes:
        console.print(f"note: {note}")


def wide_console() -> Console:
    """A console; one that is no terminal is wide enough for our tables."""
    console = Console()
    return console if console.is_terminal else Console(width=120)


def finish(recorder: Recorder, output: Path | None) -> None:
    """Show what was measured, and write it if asked."""
    report = recorder.report()
    console = wide_console()
    show(console, report)
    if output is not None:
        write_json(output, report)
        console.print(f"written to {output}")


def _terminated(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def options(function: Callable[..., Any]) -> Callable[..., Any]:
    """The options every part takes: `output`, `quick`, `budget`. SIGTERM ends a part as Ctrl-C
    does, so that it takes down what it has made.
    """

    @functools.wraps(function)
    def part(*arguments: Any, **named: Any) -> Any:
        signal.signal(signal.SIGTERM, _terminated)
        return function(*arguments, **named)

    for option in (
        click.option(
            "--budget",
            type=click.FloatRange(min=1),
            help="Seconds after which no further point is begun.",
        ),
        click.option("--quick", is_flag=True, help="Fewer points and rounds."),
        click.option(
            "--json", "output", type=click.Path(dir_okay=False, path_type=Path), help="Write here."
        ),
    ):
        part = option(part)
    return part
