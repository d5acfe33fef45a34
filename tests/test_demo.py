"""The demo: its proposals fit the library, and the search finds the repair and rolls back right."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from deltabox.demo import library, proposals, rival, search


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The broken library as the demo lays it out."""
    cache = library.default_cache()
    library.fetch(cache)
    directory = tmp_path_factory.mktemp("pristine")
    library.unpack(library.archive(cache), directory)
    return directory


def test_each_proposal_changes_the_broken_file(pristine: Path) -> None:
    text = (pristine / library.NAME / proposals.FILE).read_text()
    for proposal in (*proposals.SLICES, *proposals.INDICES):
        edited = proposal.apply(text)
        assert edited is not None and edited != text, proposal.name
        compile(edited, proposals.FILE, "exec")


def test_a_proposal_whose_text_is_gone_does_not_apply(pristine: Path) -> None:
    text = (pristine / library.NAME / proposals.FILE).read_text()
    once, _, getitem = proposals.INDICES
    edited = getitem.apply(text)
    assert edited is not None
    assert once.apply(edited) is None


def test_fetch_is_done_once(tmp_path: Path) -> None:
    library.archive(tmp_path).write_bytes(b"kept")
    library.fetch(tmp_path)
    assert library.archive(tmp_path).read_bytes() == b"kept"


def test_the_rival_reaches_the_state_and_leaves_nothing(pristine: Path, tmp_path: Path) -> None:
    seconds = rival.measure(pristine, tmp_path, (proposals.SLICES[3], proposals.INDICES[2]))
    assert 0 < seconds < 30
    assert list(tmp_path.iterdir()) == []


def test_the_search_finds_the_repair(pristine: Path) -> None:
    output = io.StringIO()
    root = search.run(Console(file=output, width=120))
    nodes = [node for _, node in search._walk(root)]
    (winner,) = [node for node in nodes if node.found and not node.children]
    assert [step.name for step in winner.path] == ["clamp", "getitem", "real"]
    wrong = [node for node in nodes if not node.found]
    assert len(wrong) >= 10
    # every wrong branch was left by a rollback, and search.py compared the state after each
    assert all(node.back_ms is not None for node in wrong)
    printed = output.getvalue()
    assert "441 passed" in printed
    assert "+        if index < 0 or index >= len(self):" in printed
    assert "(all the same)" in printed
