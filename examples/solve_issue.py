"""Solve a real issue of a real library by tree search over an agent's actions.

The library is more-itertools 10.8.0, the issue is its pull request 1128 (examples/issue). An action
is a shell command in a sandbox; each state is judged by the tests of the release that repaired it,
and by tests of what the issue says, in a live Python process that goes back with everything else.
UCT decides where to go on: back to any earlier state, in milliseconds, as it was.

The model is a scripted stand-in, or a real one when ANTHROPIC_API_KEY or OPENAI_API_KEY is set.

    python examples/solve_issue.py --help
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import click
from issue import library
from issue.scripted import Scripted
from rich.console import Console
from rich.syntax import Syntax

from deltabox import Process, Sandbox, explore
from deltabox.errors import DeltaBoxError
from deltabox.explore import Budget, Found, State

KEYS = {"ANTHROPIC_API_KEY": "anthropic", "OPENAI_API_KEY": "openai"}
PROPOSALS = 5
DEPTH = 6
EXPLORATION = 0.4
COMMAND_WITHIN = 60.0  # seconds
JUDGED_WITHIN = 30.0
MOST_OUTPUT = 6000  # characters of a command's output that a model is told


class Model(Protocol):
    """Says what to do next."""

    name: str

    def commands(
        self, state: State, told: Sequence[tuple[str, str]], count: int
    ) -> Iterable[str] | Awaitable[Iterable[str]]:
        """Up to `count` commands; `told` has the ones that led here, with what came of each."""

    def stop(self) -> None:
        """Do not wait for anything any more."""


@dataclass(frozen=True)
class Verdict:
    """What the tests say about a state."""

    passed: int
    total: int
    failed: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.passed} of {self.total} tests pass"


def start_judge(sandbox: Sandbox) -> Process:
    """The live process that runs the tests."""
    command = ["python3", "-B", f"{library.JUDGE}/judge.py", library.WHERE]
    return sandbox.spawn(command, user=library.JUDGE_USER)


def ask(judge: Process) -> Verdict:
    """Run the tests where this process lives."""
    judge.stdin.write("\n")
    line = judge.stdout.readline(timeout=JUDGED_WITHIN)
    if not line:
        raise RuntimeError(f"the judge has ended: {judge.stderr.read_available().strip()}")
    said = json.loads(line)
    return Verdict(said["passed"], said["total"], tuple(said["failed"]))


class Issue:
    """The problem: a model's commands as actions.

    The score is the share of the failing tests that pass now. What breaks others can be below 0.
    """

    def __init__(self, model: Model, judge: Process) -> None:
        self._model = model
        self._judge = judge
        self._before = ask(judge)
        self._lock = threading.Lock()
        self._came: dict[tuple[str, ...], str] = {}  # of each way, what its last action came to

    def propose(self, state: State) -> Iterable[str] | Awaitable[Iterable[str]]:
        with self._lock:
            ways = [state.actions[: n + 1] for n in range(state.depth)]
            told = [(way[-1], self._came[way]) for way in ways]
        return self._model.commands(state, told, PROPOSALS)

    def apply(self, state: State, action: str) -> str:
        joined = ["/bin/sh", "-c", 'exec "$@" 2>&1', "sh", "bash", "-c", action]
        quiet = {"PYTHONDONTWRITEBYTECODE": "1"}  # or what was run would be in the patch
        result = state.sandbox.run(
            joined, cwd=library.WHERE, user=library.USER, env=quiet, timeout=COMMAND_WITHIN
        )
        output = result.stdout
        if len(output) > MOST_OUTPUT:
            cut = len(output) - MOST_OUTPUT
            output = (
                f"{output[: MOST_OUTPUT // 2]}\n[{cut} characters]\n{output[-MOST_OUTPUT // 2 :]}"
            )
        return f"exit code {result.exit_code}\n{output}"

    def score(self, state: State) -> float:
        verdict = ask(state.counterpart(self._judge))
        with self._lock:
            self._came[state.actions] = f"{state.result}\n{verdict}"
        failing = self._before.total - self._before.passed
        return (verdict.passed - self._before.passed) / failing


def search(
    sandbox: Sandbox,
    model: Model,
    judge: Process,
    *,
    budget: Budget,
    listeners: Sequence[explore.Listener] = (),
) -> Found:
    """Look for a state in which all tests pass; the sandbox stays as it is."""
    return explore.uct(
        sandbox,
        Issue(model, judge),
        depth=DEPTH,
        exploration=EXPLORATION,
        budget=budget,
        goal=1.0,
        listeners=listeners,
    )


def chosen(*, scripted: bool, name: str | None, url: str | None, seed: int, think: float) -> Model:
    """The model that the options and the environment ask for."""
    key = next((key for key in KEYS if os.environ.get(key)), None)
    if scripted or (key is None and name is None and url is None):
        return Scripted(seed=seed, seconds=think)
    if key is None:
        raise click.UsageError(
            f"a real model needs its key in the environment: {' or '.join(KEYS)}; "
            f"without --model and --url, or with --scripted, a stand-in is asked"
        )
    try:
        from issue.asked import Asked
    except ImportError as error:  # who has no key needs no httpx
        raise click.ClickException(f"{error}: pip install 'deltabox[swe]'") from error
    return Asked(KEYS[key], os.environ[key], name=name, url=url)


_TRACE = "Where to write the search down; by default beside what was fetched."
_CACHE = "Where fetched packages are; by default .cache/examples of the checkout."


@click.command()
@click.option("--scripted", is_flag=True, help="Ask the stand-in, even if a key is set.")
@click.option("--model", "name", help="Which model of the API to ask.")
@click.option("--url", help="Where the API is, if not at its own place.")
@click.option("--seed", default=0, show_default=True, help="Of the stand-in.")
@click.option("--think", default=0.2, show_default=True, help="Seconds the stand-in thinks.")
@click.option("--expansions", default=120, show_default=True, help="The most actions.")
@click.option("--seconds", default=1800.0, show_default=True, help="The longest time.")
@click.option("--parallel", default=2, show_default=True, help="Sandboxes at a time.")
@click.option("--trace", type=click.Path(dir_okay=False, path_type=Path), help=_TRACE)
@click.option("--cache", type=click.Path(file_okay=False, path_type=Path), help=_CACHE)
@click.option("--fetch", is_flag=True, help="Only fetch the library.")
def main(
    *,
    scripted: bool,
    name: str | None,
    url: str | None,
    seed: int,
    think: float,
    expansions: int,
    seconds: float,
    parallel: int,
    trace: Path | None,
    cache: Path | None,
    fetch: bool,
) -> None:
    """Solve an issue of more-itertools by tree search over live states.

    Asks a real model when ANTHROPIC_API_KEY or OPENAI_API_KEY is set, otherwise a scripted
    stand-in. Ends with 0 if all tests pass, with 1 if not.
    """
    cache = cache or library.default_cache()
    try:
        budget = Budget(expansions=expansions, seconds=seconds, parallel=parallel)
        packed = library.fetch(cache)
    except (ValueError, RuntimeError) as error:
        raise click.ClickException(str(error)) from error
    if fetch:
        return
    model = chosen(scripted=scripted, name=name, url=url, seed=seed, think=think)
    console = Console()
    trace = trace or cache / "solve_issue.trace"
    usual = signal.getsignal(signal.SIGINT)

    def interrupted(number: int, frame: FrameType | None) -> Any:
        model.stop()  # or the search would wait for its answers before it ends
        signal.default_int_handler(number, frame)

    signal.signal(signal.SIGINT, interrupted)
    try:
        solved = solve(console, packed, model, budget, trace)
    except KeyboardInterrupt:
        console.print(f"\ninterrupted; what was done until then: deltabox trace {trace}")
        sys.exit(130)
    except (DeltaBoxError, RuntimeError, OSError) as error:
        raise click.ClickException(f"{error} (what was done: deltabox trace {trace})") from error
    finally:
        signal.signal(signal.SIGINT, usual)
    sys.exit(0 if solved else 1)


def solve(console: Console, packed: Path, model: Model, budget: Budget, trace: Path) -> bool:
    """The whole: a sandbox, the search, what was found. Whether all tests pass."""
    written = explore.Trace(trace)
    try:
        with Sandbox.create() as sandbox:
            library.install(sandbox, packed)
            console.rule(f"{library.NAME} {library.BROKEN}, pull request 1128")
            judge = start_judge(sandbox)
            console.print(f"{ask(judge)} before; the model is {model.name}")
            with explore.LiveTree(console) as tree:
                found = search(sandbox, model, judge, budget=budget, listeners=[tree, written])
            console.print()
            return report(console, sandbox, judge, found, trace)
    finally:
        written.close()


def report(console: Console, sandbox: Sandbox, judge: Process, found: Found, trace: Path) -> bool:
    """Say what was found; whether it solves the issue."""
    found.commit()
    verdict = ask(judge)
    for number, action in enumerate(found.actions, 1):
        console.print(f"{number}. {action.splitlines()[0].lstrip('# ')}", highlight=False)
    patch = sandbox.patch(found.root.checkpoint, under=library.WHERE)
    if patch:
        console.print(Syntax(patch.rstrip(), "diff", background_color="default"))
    console.print(f"{verdict}; {found.nodes} actions were tried in {found.seconds:.1f} s")
    console.print(f"the search: deltabox trace {trace}", highlight=False)
    if verdict.failed:
        console.print(f"[red]not solved[/red] ({found.reason}); still wrong:")
        for test in verdict.failed:
            console.print(f"  {test}", highlight=False)
        return False
    command = ["python3", "-B", "-m", "unittest", "-q", "tests.test_more"]
    suite = sandbox.run(command, cwd=library.WHERE, user=library.USER, timeout=300)
    said = " ".join(suite.stderr.split("-" * 70)[-1].split())
    console.print(f"the library's own suite: {said}", highlight=False)
    if suite.exit_code != 0:
        console.print("[red]not solved[/red]: it breaks something else")
        return False
    console.print("[green]solved[/green]")
    return True


if __name__ == "__main__":
    main()
