"""DuckDB: an open transaction, a log of committed ones, writers and parallel queries."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from deltabox import Sandbox

from ..tools.packages import ENVIRONMENT, PYTHON, install
from . import lives

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]

_SOURCE = Path(__file__).with_name("queries.py")
_COMMAND = [PYTHON, "/srv/queries.py"]


def start(sandbox: Sandbox) -> lives.Program:
    install(sandbox, "duckdb")
    sandbox.files.upload(_SOURCE, "/srv/queries.py")
    return lives.Program(sandbox.spawn(_COMMAND, env=ENVIRONMENT))


def report(program: lives.Program, box: Sandbox) -> str:
    said = program.within(box).ask("report")
    assert said.startswith("["), said
    return said


def change(program: lives.Program, box: Sandbox, number: int) -> None:
    """The open transaction is committed or undone; the next one is open afterwards."""
    inside = program.within(box)
    assert inside.ask(f"keep {number}") == "done"
    assert inside.ask("undo" if number % 3 == 2 else "commit") == "done"
    assert inside.ask(f"keep {100 + number}") == "done"


def end(program: lives.Program, box: Sandbox) -> None:
    """It is killed: what it had committed is found in the log, and then in the database."""
    process = box.counterpart(program.process)
    committed = program.within(box).ask("kept")
    process.kill(signal.SIGKILL)
    process.wait(timeout=lives.PROMPT)
    for _ in range(2):
        found = box.run([*_COMMAND, "recover"], env=ENVIRONMENT, timeout=lives.PROMPT)
        assert (found.stdout, found.stderr) == (committed + "\n", "")


def test_transactions(sandbox: Sandbox) -> None:
    program = start(sandbox)
    for number in range(1000, 1003):
        change(program, sandbox, number)
    lives.check(
        sandbox,
        lambda box: report(program, box),
        lambda box, number: change(program, box, number),
        lambda box: end(program, box),
    )
