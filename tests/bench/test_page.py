"""The page and the pictures that are made of reports."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import jinja2
import page
import pictures
import pytest
from report import Recorder, Report, write_json


def a_report(part: str = "curves") -> Report:
    made = Recorder(part, what="what it is")
    made.curve("memory", title="Anonymous memory", x="MB")
    made.expect("memory: rollback", floor="fork", curve="memory")
    made.expect("memory: rollback", x=2048, goal=5.0)
    made.expect("memory: call", curve="memory")
    for x in (0, 10, 2048):
        made.floor("fork", [0.5 + x / 1000], x=x)
        made.add("memory: call", 3.0, x=x)
        for value in (1.0, 6.0, 7.0):
            made.add("memory: rollback", value + x / 1000, x=x)
        made.add("memory: left over", 12.0, x=x)
    made.expect("alone", goal=2.0, unit="x", floor="fork")
    made.floor("fork", [0.25])
    made.add("alone", 1.0)
    made.note("a note | with a bar")
    made.fail("memory: call", "no room", x=4096)
    return made.report()


def test_tables_and_curves() -> None:
    text = page.render([a_report()], '{{ table("curves") }}\n--\n{{ curve("curves", "memory") }}')
    table, _, curve = text.partition("\n--\n")
    assert "| alone | 1.00 x | 1.00 | 1 | 0.25 | ≤ 2 |" in table
    assert "Floors: fork." in table
    assert "![Anonymous memory](figures/curves-memory.svg)" in curve
    assert "| MB | call, ms | rollback, ms | floor: fork | n |" in curve
    assert "| 2,048 | 3.00 (3.00) | 8.05 (9.05) goal ≤ 5 **missed** | 2.55 | 1 |" in curve
    assert "| 10 | 3.00 (3.00) | 6.01 (7.01) | 0.51 | 1 |" in curve


def test_what_was_missed_and_what_failed() -> None:
    text = page.render([a_report()], "{{ met() }}\n{{ missed() }}\n{{ notes() }}")
    assert text.startswith("1 of 2\n")
    assert "| memory: rollback, at 2,048 | 8.05 ms | 9.05 | 2.55 | ≤ 5 |" in text
    assert "- memory: call, at 4,096: no room" in text
    assert "- a note | with a bar" in text


def test_figures_in_sentences() -> None:
    template = (
        '{{ value("curves", "memory: rollback", 10) }}, {{ value("curves", "nothing") }},'
        ' {{ floor("curves", "fork") }}, {{ points("curves", "memory: left over") }}'
    )
    text = page.render([a_report()], template)
    assert text.startswith("6.01 ms, (not measured), 0.25 ms, |")
    assert "| 2,048 | 12.0 (12.0) |" in text


def test_a_bar_does_not_break_a_table() -> None:
    assert page.rows(["a", "b"], [["x|y", "1"]]).splitlines()[-1] == "| x\\|y | 1 |"


def test_what_a_template_must_not_ask_for() -> None:
    with pytest.raises(jinja2.UndefinedError):
        page.render([], "{{ figures }}")


@pytest.mark.parametrize("parts", [(), ("curves",), page.ORDER])
def test_the_template_makes_a_page_of_any_run(parts: tuple[str, ...]) -> None:
    template = (page.BENCH / page.TEMPLATE).read_text()
    text = page.render([a_report(part) for part in parts], template)
    assert text.startswith("# Performance\n")
    assert (page.NOT_RUN in text) is True  # no report here has every curve
    assert "{{" not in text and "{%" not in text and "{#" not in text


def test_a_directory_of_reports_becomes_a_page_with_pictures(tmp_path: Path) -> None:
    for part in ("nat", "curves", "another"):
        write_json(tmp_path / "out" / f"{part}.json", a_report(part))
    reports = page.load(tmp_path / "out")
    assert [report.part for report in reports] == ["curves", "nat", "another"]
    docs = tmp_path / "docs"
    stale = docs / "figures" / "curves-gone.svg"
    stale.parent.mkdir(parents=True)
    stale.write_text("<svg/>")
    written = page.write(reports, docs)
    assert "(figures/curves-memory.svg)" in written.read_text()
    pages = {path.name for path in (docs / "figures").iterdir()}
    assert pages == {f"{part}-memory.svg" for part in ("curves", "nat", "another")}


def test_a_picture_is_the_same_for_the_same_figures(tmp_path: Path) -> None:
    report = a_report()
    for name in ("a.svg", "b.svg"):
        pictures.draw(report, "memory", tmp_path / name)
    first = (tmp_path / "a.svg").read_bytes()
    assert first == (tmp_path / "b.svg").read_bytes()
    words = {element.text for element in ElementTree.fromstring(first).iter() if element.text}
    assert {"Anonymous memory", "MB", "ms", "rollback", "floor: fork", "goal: rollback"} <= words
