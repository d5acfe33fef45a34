"""Go: goroutines that never rest, thousands that wait, a server under load, a heap under pressure.

What a single program does when it is asked to is in `tests/tools/test_go.py`.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from deltabox import Sandbox

from . import lives

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]

_SOURCE = Path(__file__).with_name("goroutines.go")


@pytest.fixture(scope="module", params=["0", "1"], ids=["alone", "with libc"])
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With cgo the resolver and the threads are libc's, without it the runtime has its own."""
    made = tmp_path_factory.mktemp("go")
    settings = {
        "CGO_ENABLED": request.param,
        "GO111MODULE": "off",
        "GOCACHE": str(made / "cache"),
        "GOFLAGS": "",
    }
    program = made / "goroutines"
    subprocess.run(["go", "build", "-o", program, _SOURCE], check=True, env=os.environ | settings)
    return program


def start(sandbox: Sandbox, built: Path) -> lives.Program:
    sandbox.files.upload(built, "/root/goroutines")
    return lives.Program(sandbox.spawn(["/root/goroutines"]))


def report(program: lives.Program, box: Sandbox) -> str:
    said = program.within(box).ask("report")
    assert said.startswith("5 connections, ") and said.endswith(" 5000 idle"), said
    return said


def change(program: lives.Program, box: Sandbox, number: int) -> None:
    inside = program.within(box)
    assert inside.ask(f"keep {number}") == "<nil>"
    assert inside.ask("ring") == "true"
    assert inside.ask("open gate" if number % 2 else "open all") == "true"
    if number % 4 == 0:
        assert inside.ask("free") == "freed"


def test_goroutines(sandbox: Sandbox, built: Path) -> None:
    program = start(sandbox, built)
    for number in range(4):
        change(program, sandbox, number)
    lives.check(
        sandbox,
        lambda box: report(program, box),
        lambda box, number: change(program, box, number),
        program.end,
    )
