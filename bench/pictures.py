"""One SVG for each curve of the benchmark.

Lines are medians, bands reach up to the 99th percentile, dashed lines are floors, and a short bar
is a goal. The background is transparent and all text of a middle grey, which can be read on a
white page and on a dark one: a picture in a README cannot know which it will be on. Text stays
text, and nothing in the file depends on the day, so that a picture changes only when figures do.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import matplotlib
from cycler import cycler
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullLocator
from report import Figure, Report

matplotlib.use("svg")

GREY = "#808080"
COLOURS = ("#2f81f7", "#d9730d", "#2da44e", "#b05cd6", "#d1495b", "#0f9d9d")
_STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "deltabox",
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": GREY,
    "axes.labelcolor": GREY,
    "axes.edgecolor": GREY,
    "axes.titlesize": 11,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "axes.prop_cycle": cycler(color=COLOURS),
}

_NOTHING = dict.fromkeys(("Date", "Creator", "Format", "Type"))  # about how it was made

Points = list[tuple[float, float]]


def series(report: Report, curve: str) -> dict[str, list[Figure]]:
    """The figures of a curve by name, each over x."""
    found: dict[str, list[Figure]] = defaultdict(list)
    for figure in report.figures:
        if figure.curve == curve and figure.x is not None:
            found[figure.name].append(figure)
    return {
        name: sorted(figures, key=lambda figure: figure.x or 0.0) for name, figures in found.items()
    }


def floors_of(report: Report, lines: dict[str, list[Figure]]) -> list[tuple[str, Points]]:
    """The floors of a curve, each once: its name without x, and its points."""
    found: dict[str, dict[float, float]] = defaultdict(dict)
    for figures in lines.values():
        for figure in figures:
            if figure.floor in report.floors:
                name = (figure.floor or "").partition(" @ ")[0]
                found[name][figure.x or 0.0] = report.floors[figure.floor or ""].median
    return [(name, sorted(points.items())) for name, points in found.items()]


def short(name: str) -> str:
    """A figure's name without the part that all of its curve share."""
    return name.partition(": ")[2] or name


def number(value: float, _position: object = None) -> str:
    return f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:g}"


def _scales(axes: Axes, xs: set[float], lowest: float, *, log_x: bool, log_y: bool) -> None:
    if log_x:
        if min(xs) <= 0:
            axes.set_xscale("symlog", linthresh=min((x for x in xs if x > 0), default=1.0))
        else:
            axes.set_xscale("log")
        if len(xs) <= 12:
            axes.set_xticks(sorted(xs))
        axes.xaxis.set_minor_locator(NullLocator())
    if log_y and lowest > 0:
        axes.set_yscale("log")
    elif log_y:
        axes.set_yscale("symlog", linthresh=1.0)
    axes.xaxis.set_major_formatter(FuncFormatter(number))
    axes.yaxis.set_major_formatter(FuncFormatter(number))


def draw(report: Report, name: str, path: Path) -> None:
    """Write the picture of a curve."""
    curve, lines = report.curves[name], series(report, name)
    with pyplot.style.context(_STYLE):
        figure, axes = pyplot.subplots(figsize=(7.2, 4.6), layout="constrained")
        xs: set[float] = set()
        values: list[float] = []
        for line, points in lines.items():
            x = [point.x or 0.0 for point in points]
            medians = [point.median for point in points]
            (made,) = axes.plot(x, medians, marker="o", markersize=3.5, label=short(line))
            high = [point.p99 for point in points]
            axes.fill_between(x, medians, high, color=made.get_color(), alpha=0.15, linewidth=0)
            goals = [(p.x or 0.0, p.goal) for p in points if p.goal is not None]
            if goals:
                axes.plot(
                    *zip(*goals, strict=True),
                    marker="_",
                    markersize=14,
                    markeredgewidth=2,
                    linestyle="none",
                    color=made.get_color(),
                    label=f"goal: {short(line)}",
                )
            xs.update(x)
            values += medians
        for number_, (floor, under) in enumerate(floors_of(report, lines)):
            axes.plot(
                *zip(*under, strict=True),
                linestyle=("--", ":", "-.")[number_ % 3],
                color=GREY,
                label=f"floor: {floor}",
            )
            values += [value for _, value in under]
        _scales(axes, xs, min(values), log_x=curve.log_x, log_y=curve.log_y)
        axes.set_xlabel(curve.x)
        axes.set_ylabel(next(iter(lines.values()))[0].unit)
        axes.set_title(curve.title, loc="left")
        axes.grid(visible=True, which="major", color=GREY, alpha=0.2, linewidth=0.6)
        figure.legend(loc="outside lower center", ncols=2)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, transparent=True, metadata=_NOTHING)
        pyplot.close(figure)


def draw_all(report: Report, directory: Path) -> list[Path]:
    """One file for each curve that has points: `PART-CURVE.svg`."""
    made = []
    for name in report.curves:
        if series(report, name):
            path = directory / f"{report.part}-{name.replace(' ', '-')}.svg"
            draw(report, name, path)
            made.append(path)
    return made
