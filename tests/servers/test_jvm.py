"""OpenJDK: twenty threads, compiled code, G1 under pressure, monitors, a mapped file."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from deltabox import Sandbox

from . import lives

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]

_SOURCE = Path(__file__).with_name("Threads.java")
# so small a heap that it is collected many times a second
_SETTINGS = ["-XX:+UseG1GC", "-Xmx96m", "-Xms96m"]


def start(sandbox: Sandbox) -> lives.Program:
    sandbox.files.upload(_SOURCE, "/srv/Threads.java")
    process = sandbox.spawn(["java", *_SETTINGS, "/srv/Threads.java"])
    return lives.Program(process)


def report(program: lives.Program, box: Sandbox) -> tuple[str, bytes]:
    said = program.within(box).ask("report")
    assert said.startswith("20 alive, ") and said.endswith(" 1 connections"), said
    # what was stored through the mapping, as others see it
    count, total = struct.unpack(">qq", box.files.read("/srv/ledger")[:16])
    assert f" {count} sent, sum {total}, " in said
    return said, box.files.read("/srv/ledger")


def change(program: lives.Program, box: Sandbox, number: int) -> None:
    inside = program.within(box)
    first, second = map(int, inside.ask(f"send {number + 1}").split())
    assert second == first + number + 1
    assert inside.ask(f"wake {number}") == "woken"
    if number % 4 == 0:
        assert inside.ask("collect") == "collected"


def test_threads(sandbox: Sandbox) -> None:
    program = start(sandbox)
    for number in range(10):
        change(program, sandbox, number)
    lives.check(
        sandbox,
        lambda box: report(program, box),
        lambda box, number: change(program, box, number),
        program.end,
    )
