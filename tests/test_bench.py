"""The benchmark itself: its arithmetic, and one short run with verified contents."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parents[1]


def test_a_short_run(tmp_path: Path) -> None:
    output = tmp_path / "out.json"
    done = subprocess.run(
        [
            *(sys.executable, str(HERE / "bench" / "standard.py")),
            *("--json", str(output), "--steps", "3", "--forks", "1"),
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    answer = json.loads(output.read_text())
    assert len(answer["samples"]["rollback, idle"]) == 3
    assert len(answer["samples"]["rollback, back to back"]) == 3
    for name in ("floor: fork + namespaces + overlay", "first result, idle"):
        assert 0 < answer["figures"][name]["median"] <= answer["figures"][name]["p99"]


def test_quantiles_are_nearest_rank() -> None:
    sys.path.insert(0, str(HERE / "bench"))
    try:
        from standard import quantile
    finally:
        sys.path.pop(0)
    hundred = [float(n) for n in range(100, 0, -1)]
    assert quantile(hundred, 0.5) == 50
    assert quantile(hundred, 0.99) == 99
    assert quantile([3.0], 0.99) == 3.0
