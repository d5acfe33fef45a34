"""The suite's runner: a part that fails or hangs is named, and harms no other."""

from __future__ import annotations

import time
from pathlib import Path

import page
import pytest
import suite
from report import read_json
from rich.console import Console
from suite import Part

GOOD = """
import sys
from pathlib import Path
sys.path.insert(0, {bench!r})
from report import Recorder, write_json
recorder = Recorder("good", what="", quick="--quick" in sys.argv)
recorder.expect("call", goal=1.0)
recorder.add("call", 2.0)
write_json(Path(sys.argv[sys.argv.index("--json") + 1]), recorder.report())
"""


@pytest.fixture
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of parts in the place of bench/."""
    (tmp_path / "good.py").write_text(GOOD.format(bench=str(suite.BENCH)))
    (tmp_path / "bad.py").write_text("raise SystemExit(3)")
    (tmp_path / "mute.py").write_text("")
    (tmp_path / "hangs.py").write_text("import time\ntime.sleep(60)")
    monkeypatch.setattr(suite, "BENCH", tmp_path)
    monkeypatch.setattr(suite, "GRACE", 0.3)
    return tmp_path


def test_parts_are_run_one_after_the_other(parts: Path) -> None:
    console = Console(quiet=True)
    chosen = [Part("good", 5, 5), Part("bad", 5, 5), Part("mute", 5, 5)]
    good, bad, mute = suite.measure(chosen, parts, console, quick=True)
    assert good.quick and not good.failures
    assert [figure.name for figure in good.missed] == ["call"]
    assert bad.failures[0].error == "it ended with exit code 3"
    assert "left no report" in mute.failures[0].error
    assert read_json(parts / "good.json").figures == good.figures
    assert suite.summary([good, bad, mute]).row_count == 4


def test_a_part_that_hangs_is_stopped(parts: Path) -> None:
    began = time.monotonic()
    found = suite.run(Part("hangs", 0.1, 0.1), parts / "hangs.json", quick=False)
    assert time.monotonic() - began < 10
    assert "was stopped" in found.failures[0].error


def test_an_old_report_is_not_taken_for_a_new_one(parts: Path) -> None:
    (parts / "bad.json").write_text("{}")
    assert not suite.run(Part("bad", 5, 5), parts / "bad.json", quick=False).figures
    assert not (parts / "bad.json").exists()


def test_every_part_of_the_page_is_a_part_of_the_suite() -> None:
    assert [part.name for part in suite.PARTS] == list(page.ORDER)
    assert sum(part.full for part in suite.PARTS) <= 35 * 60
    assert sum(part.quick for part in suite.PARTS) <= 3 * 60
