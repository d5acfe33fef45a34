"""Node.js: workers that wait in memory they share, beside a server that is asked all the time."""

from __future__ import annotations

from pathlib import Path

import pytest

from deltabox import Sandbox

from . import lives

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]

_SOURCE = Path(__file__).with_name("atomics.js")


def start(sandbox: Sandbox) -> lives.Program:
    sandbox.files.upload(_SOURCE, "/srv/atomics.js")
    # a heap so small that each worker's is collected many times a second
    return lives.Program(sandbox.spawn(["node", "--max-semi-space-size=1", "/srv/atomics.js"]))


def report(program: lives.Program, box: Sandbox) -> str:
    said = program.within(box).ask("report")
    assert said.startswith("kept ") and ", 4 connections, " in said, said
    return said


def change(program: lives.Program, box: Sandbox, number: int) -> None:
    inside = program.within(box)
    assert inside.ask(f"keep {number}").endswith(str(number))
    assert inside.ask(f"ring {number}") in ("ok true", "not-equal true")
    assert inside.ask(f"mark {number}") == "marked"


def test_workers(sandbox: Sandbox) -> None:
    program = start(sandbox)
    for number in range(10, 14):
        change(program, sandbox, number)
    lives.check(
        sandbox,
        lambda box: report(program, box),
        lambda box, number: change(program, box, number),
        program.end,
    )
