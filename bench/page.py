"""docs/performance.md, from the reports of a run and a template with the prose.

The template (performance.md.j2, jinja2) is what people write; every figure in the page comes from
a report. It asks for them by part and name:

    {{ table("standard") }}                       all figures of a part that have no x
    {{ table("fanout", "memory") }}               those whose names begin so
    {{ curve("curves", "memory") }}               a picture and its points
    {{ points("curves", "memory: pre-copy memory") }}   points that are in no picture
    {{ value("standard", "rollback, idle") }}     one median, in the middle of a sentence
    {{ missed() }}                                every goal missed, every point not measured

A part that was not run, or a figure that was not measured, leaves a sentence that says so, so the
page can be made from any run; a name the template does not know is an error. The page has no date
and no name of a machine in it, only what kind it is.

    python bench/page.py --to docs          from bench/out/*.json, as the suite does at its end
"""

from __future__ import annotations

from pathlib import Path

import click
import jinja2
from pictures import draw_all, floors_of, series, short
from report import Figure, Report, goal_text, number, read_json, whole

BENCH = Path(__file__).parent
TEMPLATE = "performance.md.j2"
ORDER = ("standard", "curves", "line", "fanout", "rivals", "programs", "generations", "nat")
NOT_RUN = "*Not measured in this run.*"


def rows(header: list[str], body: list[list[str]]) -> str:
    """A Markdown table; the first column to the left, the others to the right."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *body]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines
    )


class Page:
    """What the template may ask for."""

    def __init__(self, reports: list[Report]) -> None:
        self.reports = {report.part: report for report in reports}

    def _figures(self, part: str, start: str) -> list[Figure]:
        report = self.reports.get(part)
        if report is None:
            return []
        return [f for f in report.figures if f.x is None and f.name.startswith(start)]

    def table(self, part: str, start: str = "") -> str:
        figures = self._figures(part, start)
        if not figures:
            return NOT_RUN
        report = self.reports[part]
        body = []
        for figure in figures:
            under = report.floors.get(figure.floor or "")
            mark = " **missed**" if figure.missed else ""
            body.append(
                [
                    figure.name,
                    f"{number(figure.median)} {figure.unit}",
                    number(figure.p99),
                    str(figure.n),
                    "" if under is None else number(under.median),
                    goal_text(figure) + mark,
                ]
            )
        text = rows(["what", "median", "p99", "n", "floor", "goal"], body)
        used = {figure.floor for figure in figures if figure.floor in report.floors}
        if used:
            text += f"\n\nFloors: {'; '.join(sorted(name or '' for name in used))}."
        return text

    def curve(self, part: str, name: str) -> str:
        report = self.reports.get(part)
        lines = {} if report is None or name not in report.curves else series(report, name)
        if report is None or not lines:
            return NOT_RUN
        curve = report.curves[name]
        picture = f"figures/{part}-{name.replace(' ', '-')}.svg"
        xs = sorted({figure.x or 0.0 for figures in lines.values() for figure in figures})
        under = {label: dict(points) for label, points in floors_of(report, lines) if points}
        header = [curve.x, *(_head(line, figures) for line, figures in lines.items())]
        body = []
        for x in xs:
            points = [[f for f in figures if f.x == x] for figures in lines.values()]
            cells = [_cell(found[0]) if found else "" for found in points]
            below = [number(values[x]) if x in values else "" for values in under.values()]
            runs = min(figure.n for found in points for figure in found)
            body.append([whole(x), *cells, *below, str(runs)])
        table = rows([*header, *(f"floor: {label}" for label in under), "n"], body)
        return f"![{curve.title}]({picture})\n\n{table}"

    def points(self, part: str, *names: str) -> str:
        """A table over x of figures that are in no picture."""
        report = self.reports.get(part)
        found = [] if report is None else [f for f in report.figures if f.name in names]
        if not found:
            return NOT_RUN
        units = {figure.name: figure.unit for figure in found}
        cells = {(figure.name, figure.x): _cell(figure) for figure in found}
        shown = [name for name in names if name in units]
        body = [
            [whole(x), *(cells.get((name, x), "") for name in shown)]
            for x in sorted({figure.x for figure in found if figure.x is not None})
        ]
        return rows(["", *(f"{short(name)}, {units[name]}" for name in shown)], body)

    def value(self, part: str, name: str, x: float | None = None) -> str:
        report = self.reports.get(part)
        for figure in report.figures if report is not None else []:
            if figure.name == name and figure.x == x:
                return f"{number(figure.median)} {figure.unit}"
        return "(not measured)"

    def floor(self, part: str, name: str) -> str:
        report = self.reports.get(part)
        if report is None or name not in report.floors:
            return "(not measured)"
        return f"{number(report.floors[name].median)} {report.unit}"

    def missed(self) -> str:
        body = []
        for report in self.reports.values():
            for figure in report.missed:
                under = report.floors.get(figure.floor or "")
                body.append(
                    [
                        _at(figure.name, figure.x),
                        f"{number(figure.median)} {figure.unit}",
                        number(figure.p99),
                        "" if under is None else number(under.median),
                        goal_text(figure),
                    ]
                )
        text = rows(["goal missed", "median", "p99", "floor", "goal"], body) if body else "None."
        failed = [
            f"- {_at(failure.name, failure.x)}: {failure.error}"
            for report in self.reports.values()
            for failure in report.failures
        ]
        if failed:
            text += "\n\nNot measured:\n\n" + "\n".join(failed)
        return text

    def met(self) -> str:
        """How many of the goals are met."""
        goals = [f for r in self.reports.values() for f in r.figures if f.goal is not None]
        return f"{sum(not figure.missed for figure in goals)} of {len(goals)}"

    def notes(self) -> str:
        found = [note for report in self.reports.values() for note in report.notes]
        return "\n".join(f"- {note}" for note in found) if found else "None."

    def machine(self) -> str:
        report = next(iter(self.reports.values()), None)
        if report is None:
            return NOT_RUN
        here = report.host
        quick = " **A quick run: few points, few rounds.**" if report.quick else ""
        return (
            f"{here.cpus} cores ({here.cpu}, {here.machine}), {here.memory_mb / 1024:.0f} GiB of"
            f" memory, kernel {here.kernel}, Python {here.python}; the load before the run was"
            f" {here.load:.2f}.{quick}"
        )

    def minutes(self) -> str:
        return f"{sum(report.seconds for report in self.reports.values()) / 60:.0f}"


def _at(name: str, x: float | None) -> str:
    return name if x is None else f"{name}, at {whole(x)}"


def _head(line: str, figures: list[Figure]) -> str:
    return f"{short(line)}, {figures[0].unit}"


def _cell(figure: Figure) -> str:
    """Median and, in brackets, p99 of a point, with its goal."""
    text = f"{number(figure.median)} ({number(figure.p99)})"
    if figure.goal is not None:
        text += f" goal {goal_text(figure)}{' **missed**' if figure.missed else ''}"
    return text


def render(reports: list[Report], template: str) -> str:
    page = Page(reports)
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, keep_trailing_newline=True, autoescape=False
    )
    asked = (
        *("table", "curve", "points", "value", "floor"),
        *("missed", "met", "notes", "machine", "minutes"),
    )
    return environment.from_string(template).render({name: getattr(page, name) for name in asked})


def load(directory: Path) -> list[Report]:
    """The reports in a directory, in the page's order."""
    found = {report.part: report for report in map(read_json, sorted(directory.glob("*.json")))}
    known = [part for part in ORDER if part in found]
    return [found[part] for part in [*known, *sorted(found.keys() - set(known))]]


def write(reports: list[Report], directory: Path) -> Path:
    """The page and its pictures."""
    figures = directory / "figures"
    made = {path for report in reports for path in draw_all(report, figures)}
    for old in set(figures.glob("*.svg")) - made:
        old.unlink()
    path = directory / "performance.md"
    path.write_text(render(reports, (BENCH / TEMPLATE).read_text()))
    return path


@click.command()
@click.option(
    "--from",
    "source",
    default=BENCH / "out",
    show_default="bench/out",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
)
@click.option("--to", "target", required=True, type=click.Path(file_okay=False, path_type=Path))
def main(*, source: Path, target: Path) -> None:
    """Write TARGET/performance.md and TARGET/figures from the reports in SOURCE."""
    reports = load(source)
    if not reports:
        raise click.ClickException(f"there is no report in {source}")
    click.echo(f"written to {write(reports, target)}")


if __name__ == "__main__":
    main()
