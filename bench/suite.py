"""`make bench`: all parts of the benchmark, one after the other, and the page made of them.

Each part is a process with a state directory, and so an engine, of its own, in a mount namespace of
its own; what one leaves behind in caches or in an aged image cannot be in the figures of the next,
and what it mounts goes with it even if it is killed. A part that fails, hangs or leaves its engine
running is named in the table, and the others are measured all the same. Ctrl-C goes to the part as
well; it takes its sandboxes down, and then the suite ends.

A whole run writes docs/performance.md and docs/figures; a quick one, or one of some parts, writes
the same beside its reports in bench/out, because its figures are not for readers.

    python bench/suite.py [--quick] [--only PART]...
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import click
import msgspec
import page
from report import Failure, Report, goal_text, host, number, read_json, whole, wide_console
from rich.console import Console
from rich.table import Table

BENCH = Path(__file__).parent
OUT = BENCH / "out"
DOCS = BENCH.parent / "docs"


@dataclass(frozen=True)
class Part:
    """A module of bench/, and the seconds after which it begins no further point."""

    name: str
    full: float
    quick: float


PARTS = (
    Part("standard", 180, 15),
    Part("curves", 1050, 60),
    Part("line", 180, 15),
    Part("fanout", 180, 22),
    Part("rivals", 90, 18),
    Part("programs", 330, 40),
    Part("generations", 30, 5),
    Part("nat", 60, 5),
)
GRACE = 60.0  # seconds beyond that until a part is interrupted, and as many until it is killed
GONE_WITHIN = 30.0


def keepers(state: Path) -> list[int]:
    """The engines of a state directory."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue  # it has ended meanwhile
        if b"deltabox.keeper" in command and str(state).encode() in command:
            found.append(int(entry.name))
    return found


def wait_for_keepers(state: Path, seconds: float) -> bool:
    """Whether all of them have ended in time."""
    deadline = time.monotonic() + seconds
    while keepers(state):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def end_keepers(state: Path) -> str | None:
    """End the engine, which has no sandbox any more; what went wrong, if anything.

    It would end by itself two seconds later.
    """
    for number_ in (signal.SIGTERM, signal.SIGKILL):
        for pid in keepers(state):
            try:
                os.kill(pid, number_)
            except ProcessLookupError:
                continue
        if wait_for_keepers(state, GONE_WITHIN):
            if number_ == signal.SIGTERM:
                return None
            clean = [sys.executable, "-m", "deltabox", "doctor", "--clean"]
            environment = os.environ | {"DELTABOX_STATE": str(state)}
            subprocess.run(clean, env=environment, stdout=subprocess.DEVNULL, timeout=GONE_WITHIN)
            return "its engine did not end and was killed"
    return "its engine is still there"


def stop(process: subprocess.Popen[bytes]) -> None:
    """Interrupt a part, and kill it if that does not help."""
    for number_ in (signal.SIGINT, signal.SIGKILL):
        process.send_signal(number_)
        try:
            process.wait(GRACE)
            return
        except subprocess.TimeoutExpired:
            continue


def run(part: Part, output: Path, *, quick: bool) -> Report:
    """Run a part; its report, or one that says why there is none."""
    budget = part.quick if quick else part.full
    output.unlink(missing_ok=True)
    command = ["unshare", "--mount", "--propagation", "slave", sys.executable]
    command += [str(BENCH / f"{part.name}.py"), "--json", str(output), "--budget", str(budget)]
    if quick:
        command.append("--quick")
    state = Path(tempfile.mkdtemp(prefix="deltabox-bench-"))
    failed: list[str] = []
    began = time.monotonic()
    try:
        process = subprocess.Popen(command, env=os.environ | {"DELTABOX_STATE": str(state)})
        try:
            code = process.wait(2 * budget + GRACE)
            if code:
                failed.append(f"it ended with exit code {code}")
        except subprocess.TimeoutExpired:
            failed.append(f"it took longer than {2 * budget + GRACE:.0f} s and was stopped")
            stop(process)
        except KeyboardInterrupt:
            try:
                process.wait(GRACE)  # Ctrl-C has reached it too
            except (subprocess.TimeoutExpired, KeyboardInterrupt):
                stop(process)
            raise
    finally:
        left = end_keepers(state)
        shutil.rmtree(state, ignore_errors=True)
    if left:
        failed.append(left)
    try:
        report = read_json(output)
    except (OSError, msgspec.DecodeError) as error:
        failed.append(f"it left no report ({error})")
        report = Report(part.name, "", "ms", host(), quick=quick)
        report.seconds = time.monotonic() - began
    report.failures += [Failure(part.name, None, text) for text in failed]
    return report


def summary(reports: list[Report]) -> Table:
    """Every goal, and every point that could not be measured; red is bad."""
    table = Table("part", "what", title="goals", title_justify="left")
    for column in ("x", "median", "p99", "n", "floor", "goal"):
        table.add_column(column, justify="right")
    for report in reports:
        for figure in report.figures:
            if figure.goal is None and figure.goal_p99 is None:
                continue
            under = report.floors.get(figure.floor or "")
            table.add_row(
                report.part,
                figure.name,
                "" if figure.x is None else whole(figure.x),
                f"{number(figure.median)} {figure.unit}",
                number(figure.p99),
                str(figure.n),
                "" if under is None else number(under.median),
                goal_text(figure),
                style="red" if figure.missed else "",
            )
        for failure in report.failures:
            at = "" if failure.x is None else whole(failure.x)
            text = f"{failure.name}: {failure.error}"
            table.add_row(report.part, text, at, "failed", "", "", "", "", style="red")
    return table


def measure(parts: list[Part], directory: Path, console: Console, *, quick: bool) -> list[Report]:
    reports = []
    for part in parts:
        console.rule(part.name)
        reports.append(run(part, directory / f"{part.name}.json", quick=quick))
    return reports


@click.command()
@click.option("--quick", is_flag=True, help="Fewer points and rounds: below three minutes.")
@click.option(
    "--only", multiple=True, type=click.Choice([part.name for part in PARTS]), help="These parts."
)
def main(*, quick: bool, only: tuple[str, ...]) -> None:
    """Run the benchmark."""
    console = wide_console()
    directory = OUT / "quick" if quick else OUT
    directory.mkdir(parents=True, exist_ok=True)
    parts = [part for part in PARTS if not only or part.name in only]
    began = time.monotonic()
    try:
        reports = measure(parts, directory, console, quick=quick)
    except KeyboardInterrupt:
        console.print("interrupted; nothing is left behind")
        sys.exit(130)
    console.rule()
    console.print(summary(reports))
    target = directory if quick or only else DOCS
    written = page.write(reports, target)
    minutes = (time.monotonic() - began) / 60
    console.print(f"{minutes:.1f} minutes; reports in {directory}, the page is {written}")
    if any(not report.figures for report in reports):
        sys.exit(1)


if __name__ == "__main__":
    main()
