"""How much memory all templates of a tree hold together, every shared page counted once.

A template is a fork of the one before it and owns only the pages it wrote; the rest it shares.
Adding up what each owns is right until one of them is closed: what a descendant still shares stays.
So a closed template leaves its entry behind while it has more than one line of descendants, and
hands what is left to its only one otherwise. What is left the kernel tells: the pages that nobody
else maps (bit 56 of /proc/PID/pagemap) are those that its end frees.

The sum is exact while no restored tree shares pages with a template that is closed. Where one does,
the kernel counts those as shared, and the sum is too high until the descendant is closed as well,
but no entry ever counts for more than its template's whole state. It is never too low, and a limit
that is checked against it holds.

Rejected: the control group's own counter (on hosts of version 1 one group has templates and
programs), and Pss of /proc/PID/smaps_rollup (it splits pages with the programs, too).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(eq=False)
class _Entry:
    parent: _Entry | None
    whole: int  # the state's size: more than that it cannot own
    own: int = 0  # bytes of pages it has written itself
    left: int = 0  # bytes of closed forefathers' pages that only it and its descendants share
    extra: int = 0  # what it shares with nobody
    open: bool = True
    children: list[_Entry] = field(default_factory=list)

    @property
    def pages(self) -> int:
        return min(self.own + self.left, self.whole) if self.open else self.left


class Ledger:
    """The templates of one tree, by a key for each. Thread-safe."""

    def __init__(self) -> None:
        self.report: Callable[[int], None] = lambda change: None
        """Called with what `held` has changed by."""
        self.held = 0
        """Bytes of memory that the open templates hold together."""
        self.beside = 0
        """Bytes of those that are not the templates': what shared memory held."""
        self._entries: dict[int, _Entry] = {}
        self._lock = threading.Lock()

    @contextmanager
    def _changing(self) -> Iterator[None]:
        with self._lock:
            before = self.held
            yield
            change = self.held - before
        if change:
            self.report(change)

    def opened(self, key: int, parent: int | None) -> None:
        """A template was made, as a fork of `parent` (of one that holds nothing: None)."""
        with self._lock:
            above = None if parent is None else self._entries.get(parent)
            entry = _Entry(above, 0 if above is None else above.whole)
            if above is not None:
                above.children.append(entry)
            self._entries[key] = entry

    def resize(self, key: int, *, own: int, whole: int, extra: int) -> None:
        """What a template holds now: pages of its own out of its whole state, and more besides.

        Without a parent in the ledger all of the state is its own.
        """
        with self._changing():
            entry = self._entries.get(key)
            if entry is None:  # closed meanwhile
                return
            self.held -= entry.pages + entry.extra
            entry.own = whole if entry.parent is None and not entry.left else own
            entry.whole, entry.extra = whole, extra
            self.held += entry.pages + entry.extra

    def put_beside(self, size: int) -> None:
        """What is held beside the templates takes so many bytes now."""
        with self._changing():
            self.held += size - self.beside
            self.beside = size

    def shares(self, key: int) -> bool:
        """Whether others may share pages with it, so that its end frees less than it holds."""
        with self._lock:
            entry = self._entries.get(key)
            return entry is not None and bool(entry.children or entry.parent)

    def closed(self, key: int, freed: int) -> None:
        """A template is closed; its end frees so many bytes of pages that nobody else maps."""
        with self._changing():
            entry = self._entries.pop(key, None)
            if entry is None:
                return
            pages = entry.pages
            self.held -= pages + entry.extra
            entry.open, entry.left = False, max(0, pages - freed)
            self.held += entry.left
            self._take_from(entry.parent, freed - pages)
            self._settle(entry)

    def _take_from(self, entry: _Entry | None, freed: int) -> None:
        """What an end has freed beyond its own was left over from closed forefathers."""
        while entry is not None and freed > 0:
            if not entry.open:
                part = min(entry.left, freed)
                entry.left -= part
                self.held -= part
                freed -= part
            entry = entry.parent

    def _settle(self, entry: _Entry | None) -> None:
        """Remove closed entries that no longer stand between others, upwards."""
        while entry is not None and not entry.open and len(entry.children) < 2:
            parent = entry.parent
            self.held -= entry.left
            if parent is not None:
                parent.children.remove(entry)
            for child in entry.children:  # the only one
                self.held -= child.pages
                child.left += entry.left
                child.parent = parent
                self.held += child.pages
                if parent is not None:
                    parent.children.append(child)
            entry = parent
