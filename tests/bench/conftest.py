"""The modules of bench/ are programs, not a package: they import each other by their bare names."""

from __future__ import annotations

import sys
from pathlib import Path

BENCH = Path(__file__).parents[2] / "bench"

sys.path.insert(0, str(BENCH))
