"""When templates are copied anew, and when not (deltacr/improve.py)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from deltabox.deltacr.improve import GENERATIONS, improve


class _Asked(Exception):
    """A blank template was asked for: a copy would begin."""


def _blank() -> Any:
    raise _Asked


def _run(*, base: int | None, successor: int | None) -> bool:
    """With these generations; None for none. Whether a copy would be made."""

    def template(depth: int | None) -> Any:
        if depth is None:
            return None
        stash = SimpleNamespace(sizes=lambda: {1: 1 << 30}, full=list)
        return SimpleNamespace(depth=depth, stash=stash, whole=1 << 30, gathered=False)

    live: Any = SimpleNamespace(base=template(base), successor=template(successor))
    try:
        list(improve(live, take_blank=_blank, reference=-1, has_room=lambda size: True))
    except _Asked:
        return True
    return False


@pytest.mark.parametrize("successor", [None, 1, GENERATIONS + 1])
def test_a_long_line_is_copied(successor: int | None) -> None:
    assert _run(base=GENERATIONS, successor=successor)


@pytest.mark.parametrize("base", [None, 0, GENERATIONS - 1])
def test_a_short_one_is_not(base: int | None) -> None:
    assert not _run(base=base, successor=0 if base is None else base + 1)


def test_once_is_enough() -> None:
    """The successor begins a new line already: it is used at the next checkpoint, if ever."""
    assert not _run(base=GENERATIONS + 5, successor=0)
