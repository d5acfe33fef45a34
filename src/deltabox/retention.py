"""Which checkpoints a tree of sandboxes keeps on its own: four policies, plain values.

A search takes thousands of checkpoints and comes back to few. What no policy ever drops is the same
for all: a checkpoint with a name, one that is held (`Checkpoint.hold`), one that a live sandbox of
the tree stands on (its `head`), and one that an operation is working with.

Nothing else has to be kept for the sake of a checkpoint: each is complete. A template shares pages
with the one it was forked from, a snapshot shares blocks, and what is shared stays for as long as
one of them is there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True)
class KeepAll:
    """Drop nothing. What a tree does until it is told otherwise."""


@dataclass(frozen=True)
class KeepLast:
    """Keep the newest `count` checkpoints of the tree: an agent that goes back a few steps.

    >>> KeepLast(20)
    KeepLast(count=20)
    """

    count: int

    def __post_init__(self) -> None:
        if isinstance(self.count, bool) or not isinstance(self.count, int) or self.count < 0:
            raise ValueError(f"the checkpoints to keep are an int, 0 or more, not {self.count!r}")


@dataclass(frozen=True)
class KeepReachable:
    """Keep what the program can still name: a tree search that lets go of its branches.

    A checkpoint is kept while a `Checkpoint` object for it exists in the program, wherever it came
    from. When the last one has gone, so may the checkpoint: at the program's next call to a
    sandbox. An id kept as a string is no object; give such a checkpoint a name, or hold it.
    """


@dataclass(frozen=True)
class KeepFitting:
    """Keep everything while there is room; then the oldest go, for as long as it takes.

    Room is what `max_memory` and `max_disk` leave (see `Sandbox.create`). They are dropped before
    a checkpoint is refused with `NoSpace`.
    """


Policy = KeepAll | KeepLast | KeepReachable | KeepFitting

KEEP_ALL: Final = KeepAll()

_KINDS: Final[dict[str, type[Policy]]] = {
    "all": KeepAll,
    "last": KeepLast,
    "reachable": KeepReachable,
    "fitting": KeepFitting,
}


def described(policy: Policy) -> dict[str, Any]:
    """A policy as a plain map."""
    for kind, cls in _KINDS.items():
        if isinstance(policy, cls):
            return {"kind": kind} | vars(policy)
    names = ", ".join(cls.__name__ for cls in _KINDS.values())
    raise TypeError(f"what to keep is said by one of {names}, not {policy!r}")


def rebuilt(description: dict[str, Any]) -> Policy:
    """The policy that `described` was given."""
    values = dict(description)
    return _KINDS[values.pop("kind")](**values)
