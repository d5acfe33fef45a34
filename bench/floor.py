"""The floor of every figure: a bare fork, namespaces and a mount, measured in the same run."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("floor.c")


def measure(megabytes: int, rounds: int) -> dict[str, dict[str, float]]:
    """Milliseconds (median, p99) of a fork of this size, without and with namespaces and mount."""
    with tempfile.TemporaryDirectory(prefix="deltabox-floor-") as directory:
        scratch = Path(directory)
        program = scratch / "floor"
        subprocess.run(["cc", "-O2", "-Wall", "-o", program, SOURCE], check=True)
        for name in ("upper", "work", "merged"):
            (scratch / name).mkdir()
        done = subprocess.run(
            [
                *(program, str(megabytes), str(rounds), "/"),
                *(scratch / "upper", scratch / "work", scratch / "merged"),
            ],
            check=True,
            capture_output=True,
            text=True,
        )
    found: dict[str, dict[str, float]] = {}
    for line in done.stdout.splitlines():
        name, median, p99 = line.split()
        found[name] = {"median": float(median) / 1e3, "p99": float(p99) / 1e3}
    return found
