"""Ruby: threads under one lock, fibers on stacks of their own, a server, a child without exec."""

from __future__ import annotations

from pathlib import Path

import pytest

from deltabox import Sandbox

from . import lives

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]

_SOURCE = Path(__file__).with_name("fibers.rb")


def start(sandbox: Sandbox) -> lives.Program:
    sandbox.files.upload(_SOURCE, "/srv/fibers.rb")
    return lives.Program(sandbox.spawn(["ruby", "/srv/fibers.rb"]))


def report(program: lives.Program, box: Sandbox) -> str:
    said = program.within(box).ask("report")
    assert said.startswith("18 threads, kept ") and said.endswith(", 4 served"), said
    return said


def change(program: lives.Program, box: Sandbox, number: int) -> None:
    inside = program.within(box)
    assert inside.ask(f"keep {number}").endswith(str(number))
    assert inside.ask("ring") == "true"
    assert inside.ask("late") == "late"
    fibers, _, fresh = inside.ask("resume").split()
    assert (fibers, fresh) == ("true", "1")
    inside.ask(f"child {number + 1}")
    if number % 4 == 0:
        assert inside.ask("compact") == "compacted"


def test_threads_and_fibers(sandbox: Sandbox) -> None:
    program = start(sandbox)
    for number in range(10, 14):
        change(program, sandbox, number)
    lives.check(
        sandbox,
        lambda box: report(program, box),
        lambda box, number: change(program, box, number),
        program.end,
    )
