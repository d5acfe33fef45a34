"""The repairs that the search may try: replacements of text in `boltons/setutils.py`.

They are what a programmer (or a model) might propose after reading the failing tests. The bug
has two halves, slices and single indices, and the second needs two changes; each wrong proposal
is wrong for a reason that only a run of the tests shows.
"""

from __future__ import annotations

from dataclasses import dataclass

FILE = "boltons/setutils.py"


@dataclass(frozen=True)
class Proposal:
    """Replace `old` by `new` in FILE."""

    name: str
    idea: str
    old: str
    new: str

    def apply(self, text: str) -> str | None:
        """The text after the change; None when `old` is not there (another change took it)."""
        return text.replace(self.old, self.new) if text.count(self.old) == 1 else None


_SLICE = """\
        if start is not None:
            start = self._get_real_index(start)
        if stop is not None:
            stop = self._get_real_index(stop)
"""
_REAL = """\
        if index < 0:
            index += len(self)
        if not self.dead_indices:
            return index
        real_index = index
"""
_ITEM = """\
        if index < 0:
            index += len(self)
        real_index = self._get_real_index(index)
        try:
"""
_BOUNDS = """\
        if index < 0 or index >= len(self):
            raise IndexError('IndexedSet index out of range')
"""

SLICES = (
    Proposal(
        "apparent",
        "slice bounds are apparent indices: translate the other way",
        _SLICE,
        _SLICE.replace("_get_real_index", "_get_apparent_index"),
    ),
    Proposal(
        "compact",
        "remove the dead slots before each slice",
        _SLICE,
        "        self._compact()\n" + _SLICE,
    ),
    Proposal(
        "count",
        "slice the live items; count negative bounds from the end",
        _SLICE,
        """\
        if start is not None and start < 0:
            start += len(self)
        if stop is not None and stop < 0:
            stop += len(self)
""",
    ),
    Proposal(
        "clamp",
        "slice the live items; count from the end, but not past the start",
        _SLICE,
        """\
        if start is not None and start < 0:
            start = max(start + len(self), 0)
        if stop is not None and stop < 0:
            stop = max(stop + len(self), 0)
""",
    ),
)

INDICES = (
    Proposal(
        "once",
        "leave it to _get_real_index to count from the end",
        _ITEM,
        _ITEM.replace("        if index < 0:\n            index += len(self)\n", ""),
    ),
    Proposal(
        "real",
        "refuse indices out of bounds in _get_real_index",
        _REAL,
        _REAL.replace("        if not self.dead", _BOUNDS + "        if not self.dead"),
    ),
    Proposal(
        "getitem",
        "refuse indices out of bounds in __getitem__",
        _ITEM,
        _ITEM.replace("        real_index", _BOUNDS + "        real_index"),
    ),
)


def next_proposals(path: tuple[Proposal, ...]) -> tuple[Proposal, ...]:
    """What to try after the changes of `path`: first a slice, then indices not yet touched."""
    if not path:
        return SLICES
    return tuple(proposal for proposal in INDICES if proposal not in path)
