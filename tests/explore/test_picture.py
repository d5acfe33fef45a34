"""The picture of a search, and `deltabox trace`."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from deltabox import explore
from deltabox.cli import cli
from deltabox.explore import (
    AnyEvent,
    Began,
    Dropped,
    Ended,
    Failed,
    LiveTree,
    Noted,
    Picture,
    Stepped,
)


def step(at: float, node: int, parent: int, action: Any, score: float) -> Stepped:
    return Stepped(
        at=at,
        node=node,
        parent=parent,
        action=action,
        score=score,
        apply=0.5,
        scoring=0.25,
        overhead=0.002,
    )


EVENTS: list[AnyEvent] = [
    Began(at=0.0, strategy="beam", settings={"width": 2, "goal": None}, started=1.7e9),
    explore.Proposed(at=1.0, node=0, actions=["a", "b"], seconds=1.0, overhead=0.0),
    step(2.0, 1, 0, "first\n  edit", 0.25),
    step(2.1, 2, 0, "second " + "x" * 100, 0.5),
    Failed(at=2.2, node=3, parent=0, action="third", error="ZeroDivisionError: no"),
    step(3.0, 4, 2, "deeper", 0.75),
    Dropped(at=3.0, node=1),
    Noted(at=3.1, nodes=[2, 4], text="is better than"),
    Ended(at=4.0, best=4, score=0.75, reason="done", nodes=4),
]


def shown(picture: Picture) -> str:
    console = Console(file=io.StringIO(), width=120)
    console.print(picture.render())
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text


def test_what_it_shows() -> None:
    picture = Picture()
    for event in EVENTS:
        picture(event)
    text = shown(picture)
    assert text.startswith("beam width=2\n")
    for part in (
        "#1 0.25 first edit",
        "#2 0.5 second xxx",
        "#3 third: ZeroDivisionError: no",
        "#4 0.75 deeper",
        "4 nodes in 4.0 s: model 1.0 s, actions 2.2 s, 1.5 ms a node of our own",
        "ended: done",
    ):
        assert part in text
    assert "x" * 100 not in text


def test_a_state_that_could_not_be_kept_is_not_the_best() -> None:
    picture = Picture()
    for event in EVENTS[:6]:
        picture(event)
    picture(Failed(at=3.0, node=4, parent=2, action="deeper", error="UnsupportedState: a socket"))
    assert "#4 deeper: UnsupportedState" in shown(picture)


def test_a_large_tree_fits() -> None:
    picture = Picture()
    picture(EVENTS[0])
    for number in range(1, 3000):
        picture(step(number / 10, number, (number - 1) // 10, number, number % 97 / 97))
    text = shown(picture)
    assert len(text.splitlines()) < 80 and "others" in text and "more" in text
    assert "#2999" in text, "what came last is shown"


def test_a_deep_tree_fits() -> None:
    picture = Picture()
    for number in range(1, 3000):
        picture(step(number / 10, number, number - 1, number, number))
    assert len(shown(picture).splitlines()) < 80


def test_live(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=120, force_terminal=True)
    with LiveTree(console) as tree:
        for event in EVENTS:
            tree(event)
    assert "deeper" in console.file.getvalue()  # type: ignore[attr-defined]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    file = explore.Trace(path)
    for event in EVENTS:
        file(event)
    file.close()
    return path


def test_the_command(trace: Path) -> None:
    result = CliRunner().invoke(cli, ["trace", str(trace)])
    assert result.exit_code == 0, result.output
    assert "deeper" in result.output and "ended: done" in result.output
    result = CliRunner().invoke(cli, ["trace", str(trace), "--until", "2.5"])
    assert "deeper" not in result.output and "second" in result.output


@pytest.mark.parametrize("content", [b"", b"{}\n", b"no json\n", b'{"event": "began"}\n'])
def test_no_trace(trace: Path, content: bytes) -> None:
    trace.write_bytes(content)
    result = CliRunner().invoke(cli, ["trace", str(trace)])
    assert result.exit_code == 1 and str(trace) in str(result.exception)
