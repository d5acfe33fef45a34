"""A stand-in for a model: the same proposals for the same seed, most of them wrong.

They are what somebody might try who has read the method and not thought it through: defaults
swapped without their ends, the one slice of the issue as a special case, half of the repair. Each
is wrong for a reason that only the tests show, some raise the score and lead nowhere, and the right
way takes three actions: read, the start, the stop. What may be proposed depends on what is in the
file, since an edit needs its text to be there.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

from deltabox.explore import State

from .library import WHERE

FILE = "more_itertools/more.py"

_START = """\
            if key.start is None or key.start <= -self._len:
                start = self._start
            elif key.start >= self._len:
                start = self._stop
            else:  # -self._len < key.start < self._len
                start = self._get_by_index(key.start)
"""
_STOP = """\
            if key.stop is None or key.stop >= self._len:
                stop = self._stop
            elif key.stop <= -self._len:
                stop = self._start
            else:  # -self._len < key.stop < self._len
                stop = self._get_by_index(key.stop)
"""
_RETURN = "            return numeric_range(start, stop, step)\n"
_END = f"{_STOP}\n{_RETURN}"
_BACKWARDS = "key.step is not None and key.step < 0"


@dataclass(frozen=True)
class Edit:
    """Replace `old` by `new` in FILE."""

    idea: str
    old: str
    new: str
    needs: str = ""  # what must be there already

    def fits(self, text: str) -> bool:
        return text.count(self.old) == 1 and self.needs in text

    @property
    def command(self) -> str:
        return (
            f"# {self.idea}\n"
            f"python3 - <<'END'\n"
            f"from pathlib import Path\n"
            f"path = Path({FILE!r})\n"
            f"text = path.read_text()\n"
            f"old = {self.old!r}\n"
            f"new = {self.new!r}\n"
            f"assert text.count(old) == 1\n"
            f"path.write_text(text.replace(old, new))\n"
            f"END"
        )


LOOKS = (
    f"# read the method\ngrep -n -A 26 'def __getitem__(self, key)' {FILE} | grep -A 26 _get_by",
    "# see what the issue says\npython3 -c 'from more_itertools import numeric_range as r\n"
    "print(list(r(0, 10, 2)[::-1]), list(r(0, 10, 2)[3:0:-1]))'",
)

EDITS = (
    Edit(
        "swap start and stop when going backwards",
        _END,
        f"{_STOP}            if {_BACKWARDS}:\n"
        f"                start, stop = stop, start\n{_RETURN}",
    ),
    Edit(
        "reverse the whole range when asked for [::-1]",
        _START,
        "            if key == slice(None, None, -1):\n"
        "                last = self._get_by_index(-1)\n"
        "                return numeric_range(last, self._start - self._step, step)\n" + _START,
    ),
    Edit(
        "begin at the last element, end before the first, when none is given",
        _END,
        f"{_STOP}            if {_BACKWARDS} and self._len:\n"
        f"                if key.start is None:\n"
        f"                    start = self._get_by_index(-1)\n"
        f"                if key.stop is None:\n"
        f"                    stop = self._start - self._step\n{_RETURN}",
    ),
    Edit(
        "the same for falling steps",
        _END,
        "            if step < self._zero:\n"
        "                start, stop = self._get_by_index(-1), self._start - self._step\n"
        + _RETURN,
    ),
    Edit(
        "the start: as slice.indices says",
        _START,
        "            first, last, _ = key.indices(self._len)\n"
        "            start = self._start + first * self._step\n",
    ),
    Edit(
        "the stop: the element at the last index",
        _STOP,
        "            stop = self._get_by_index(last)\n",
        needs="first, last, _ =",
    ),
    Edit(
        "the stop: the element at the last index, or the end",
        _STOP,
        "            at_end = last >= self._len\n"
        "            stop = self._stop if at_end else self._get_by_index(last)\n",
        needs="first, last, _ =",
    ),
    Edit(
        "the stop: as slice.indices says",
        _STOP,
        "            stop = self._start + last * self._step\n",
        needs="first, last, _ =",
    ),
)
HASTY = EDITS[:2]  # before anything was read


class Scripted:
    """Proposes looks, and edits that fit what is there, in an order that the seed decides.

    seconds: how long it thinks about each state.
    """

    name = "scripted"

    def __init__(self, *, seed: int = 0, seconds: float = 0.0) -> None:
        self._seed = seed
        self._seconds = seconds

    def commands(self, state: State, told: Sequence[tuple[str, str]], count: int) -> list[str]:
        """Up to `count` commands, alternatives of each other."""
        time.sleep(self._seconds)
        done = [command for command, _ in told]
        text = state.sandbox.files.read_text(f"{WHERE}/{FILE}")
        edits = EDITS if LOOKS[0] in done else HASTY
        found = [command for command in LOOKS if command not in done and len(done) < 2]
        found += [edit.command for edit in edits if edit.fits(text) and edit.command not in done]
        random.Random(f"{self._seed} {done}").shuffle(found)
        return found[:count]

    def stop(self) -> None:
        """Nothing that it waits for lasts."""
