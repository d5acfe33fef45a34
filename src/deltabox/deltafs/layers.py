"""The nouns of the file half: a Layer is written to, a Snapshot never changes again.

Both are btrfs subvolumes of one image with the same two directories: `upper/` (the changed
files, an overlay upper layer) and `work/` (overlayfs' own). They form a history like that of a
version control system: a layer has a head, the snapshot it was made of or that was last taken
of it, and a snapshot's parent is the head at its time. The last snapshot two states have in
common, and the btrfs transaction it was taken in, bound what can differ between them: `diff`
reads no more than that. A parent stays in the history after its files have been deleted.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deltabox.deltafs.image import Image


@dataclass(slots=True, eq=False)
class Layer:
    """A writable subvolume. At most one overlay may be mounted on it."""

    image: Image = field(repr=False)
    number: int
    head: Snapshot | None = field(repr=False)
    # the order of a layer's snapshots must be that of its history
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @property
    def path(self) -> Path:
        """The subvolume's directory, in the engine's mount namespace."""
        return self.image.mountpoint / "layers" / str(self.number)

    @property
    def upper(self) -> Path:
        """The overlay's upper directory."""
        return self.path / "upper"


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """A read-only subvolume: the files of one checkpoint.

    `generation` is the transaction it was taken in: whatever has changed since, in any layer
    descended from it, carries a higher one.
    """

    image: Image = field(repr=False)
    number: int
    parent: Snapshot | None = field(repr=False)
    generation: int

    @property
    def path(self) -> Path:
        """The subvolume's directory, in the engine's mount namespace."""
        return self.image.mountpoint / "snapshots" / str(self.number)

    @property
    def upper(self) -> Path:
        """The overlay's upper directory as it was."""
        return self.path / "upper"

    @property
    def ghosts(self) -> Path:
        """A writable directory of this snapshot for files that were open but had no name.

        It exists once somebody has made it, and goes when the snapshot is deleted.
        """
        return self.image.mountpoint / "ghosts" / str(self.number)


State = Layer | Snapshot


def common_ancestor(one: State, other: State) -> Snapshot | None:
    """The last snapshot that both states are, or descend from; None when they share none."""
    mine = {id(snapshot) for snapshot in _history(one)}
    return next((snapshot for snapshot in _history(other) if id(snapshot) in mine), None)


def _history(state: State) -> Iterator[Snapshot]:
    snapshot = state.head if isinstance(state, Layer) else state
    while snapshot is not None:
        yield snapshot
        snapshot = snapshot.parent
