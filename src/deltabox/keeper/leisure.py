"""What is done for a sandbox while its caller thinks: a turn at once, and more when it lasts."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .background import Background
from .taking import foresee

if TYPE_CHECKING:
    from ..deltacr.engine import Live, Tree
    from .box import Box

# Seconds after a call in which nobody has wanted anything, for each turn. From the second on nobody
# is likely to want anything soon. What the turns before have taken is part of it.
_TURNS = (0.0, 0.04, 0.14)
_REST = 2.0  # times as long as a piece of improving templates took, nothing more of it is done


@dataclass(frozen=True)
class _Rest:
    """The time after a call."""

    box: Box
    calm: Callable[[], bool]  # whether there was none since
    since: float  # time.monotonic()
    restored: bool


class Leisure:
    """Works ahead for the next checkpoint, in the background and only when it is quiet."""

    def __init__(self, background: Background, engine: Tree, presync: Callable[[], None]) -> None:
        """`presync` writes the files' changes to the disk."""
        self._background = background
        self._engine = engine
        self._presync = presync

    def begin(self, box: Box, *, restored: bool) -> None:
        """A call has ended, or (`restored`) a rollback.

        Not at once: a shell has a few pages more to write until it waits for the next one.
        """
        live = box.live
        undisturbed = live.ahead.undisturbed()
        rest = _Rest(
            box,
            # what is queued or in progress while a rollback happens is of a tree that has ended
            lambda: box.live is live and undisturbed(),
            time.monotonic(),
            restored,
        )
        self._turn(rest, 0)

    def _turn(self, rest: _Rest, turn: int) -> None:
        key, after = f"ahead {rest.box.number}", rest.since + _TURNS[turn] - time.monotonic()
        self._background.quietly(key, self._work_ahead, rest, turn, after=after)

    def _work_ahead(self, rest: _Rest, turn: int) -> None:
        box = rest.box
        if box.closing or box.dead or (turn and not rest.calm()):
            return
        self._presync()
        more = self._engine.work_ahead(box.live, unused=rest.calm, rested=turn > 0)
        if turn and not rest.restored:  # what was restored is a checkpoint already
            foresee(box, rest.calm)
        if not rest.calm():
            return  # there is a newer call, at whose end this begins again
        if turn == 0 or (more and turn + 1 < len(_TURNS)):
            self._turn(rest, turn + 1)
        else:
            self._improve(box, box.live, self._engine.improve(box.live))

    def _improve(self, box: Box, live: Live, steps: Generator[None, None, bool]) -> None:
        """Make the templates quicker to fork, one piece at a time, with rests between them."""
        if box.closing or box.dead or box.live is not live:
            steps.close()
            return
        began = time.monotonic()
        try:
            next(steps)
        except StopIteration as end:
            if end.value:
                # what was written since the last checkpoint is not in the new template
                self.begin(box, restored=True)
            return
        rest = _REST * (time.monotonic() - began)
        key = f"improve {box.number}"
        self._background.quietly(key, self._improve, box, live, steps, after=rest)
