"""Checkpoints of rolled-back states of checkpoints: nothing grows with the generations."""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
from collections.abc import Callable
from pathlib import Path

from deltabox import Sandbox
from tests.api.test_standby import awaited
from tests.conftest import keepers
from tests.deltacr.test_nothing_silent import compare, look

_BENCH = Path(__file__).parents[2] / "bench"
sys.path.insert(0, str(_BENCH))
try:
    SERVER = runpy.run_path(str(_BENCH / "generations.py"))["SERVER"]
finally:
    sys.path.pop(0)


def _settled(count: Callable[[], int]) -> int:
    """What is left of something that is freed in the background."""
    values = [count()]
    for _ in range(50):
        time.sleep(0.1)
        values.append(count())
        if len(values) > 3 and len(set(values[-3:])) == 1:
            break
    return values[-1]


def _held_by_keeper() -> dict[str, int]:
    (keeper,) = keepers()
    return {
        "descriptors": _settled(lambda: len(os.listdir(f"/proc/{keeper}/fd"))),
        "threads": _settled(lambda: len(os.listdir(f"/proc/{keeper}/task"))),
        "children": _settled(
            lambda: len(Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split())
        ),
    }


def test_thirty_generations_of_a_server(sandbox: Sandbox) -> None:
    process = sandbox.spawn(["python3", "-c", SERVER])
    assert process.stdout.readline() == "up\n"

    def ask(text: str) -> str:
        process.stdin.write(text + "\n")
        return process.stdout.readline(timeout=20)

    first = ask("hello")
    checkpoint = sandbox.checkpoint()
    sandbox.rollback(checkpoint)
    answer = ask("hello again")
    assert answer.split()[1] == str(int(first.split()[1]) + 1)
    sandbox.rollback(checkpoint)
    before = look(sandbox)
    held: dict[str, int] = {}
    for generation in range(30):
        assert ask("hello again") == answer, f"generation {generation}"
        sandbox.rollback(checkpoint)
        older, checkpoint = checkpoint, sandbox.checkpoint()
        older.delete()
        if generation == 9:  # pools and spares are full by now
            awaited(sandbox, checkpoint)
            held = _held_by_keeper()
    awaited(sandbox, checkpoint)
    assert compare(before, look(sandbox)) == []
    after = _held_by_keeper()
    grown = {what: (held[what], after[what]) for what in held if after[what] > held[what] + 4}
    assert not grown, json.dumps(grown)
    for fork in sandbox.fork_many(2, at=checkpoint):
        with fork:
            assert compare(before, look(fork)) == []
