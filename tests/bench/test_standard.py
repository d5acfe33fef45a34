"""The standard step: one short run, with verified contents."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import report

BENCH = Path(__file__).parents[2] / "bench"


def test_a_short_run(tmp_path: Path) -> None:
    output = tmp_path / "out.json"
    done = subprocess.run(
        [
            *(sys.executable, str(BENCH / "standard.py")),
            *("--json", str(output), "--quick", "--steps", "3"),
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = report.read_json(output)
    assert found.part == "standard" and not found.failures, found.failures
    figures = {figure.name: figure for figure in found.figures}
    assert figures["rollback, idle, without a standby"].n == 3
    assert figures["rollback, back to back"].n == 3
    assert figures["unchanged checkpoint pause, idle"].n == 3
    for name in ("rollback, idle, without a standby", "checkpoint pause, back to back"):
        figure = figures[name]
        assert 0 < figure.median <= figure.p99
        assert figure.floor is not None and found.floors[figure.floor].median > 0
