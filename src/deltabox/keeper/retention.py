"""Which checkpoints of a tree may go: the rule, and what makes it cheap.

The rule is one pure function, `surplus`. A search of ten thousand states asks it after every step,
so it must not look at ten thousand checkpoints each time: `Retention` keeps aside those that
nothing *claims* (no name, not held, not referred to where that counts), in the order they were
taken. Only these can ever go, and under a policy that drops they are few, because what could go has
gone. Heads and pins change with every step and are looked at last, for those few.

Rejected: dropping a checkpoint's ancestors only when no descendant is left, as a store of deltas
must. Ours are complete (see `deltabox.retention`), so an ancestor is as free to go as any other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from itertools import islice
from typing import Generic, Protocol, TypeVar

from ..retention import KeepAll, KeepFitting, KeepLast, KeepReachable, Policy


class Kept(Protocol):
    """What the rule wants to know of a checkpoint."""

    @property
    def number(self) -> str:
        """Its id."""

    @property
    def serial(self) -> int:
        """Grows with every checkpoint of the tree."""

    @property
    def name(self) -> str | None: ...

    @property
    def held(self) -> bool:
        """By `Checkpoint.hold`."""

    @property
    def referred(self) -> bool:
        """Some program has an object for it."""

    @property
    def pins(self) -> int:
        """How many operations work with it."""


K = TypeVar("K", bound=Kept)


def claimed(policy: Policy, node: Kept) -> bool:
    """Somebody may ask for it again, by what the policy goes by."""
    if node.name is not None or node.held:
        return True
    return isinstance(policy, KeepReachable) and node.referred


def surplus(
    policy: Policy, nodes: Iterable[K], *, heads: Collection[str], newest: int
) -> Iterator[K]:
    """Those of `nodes`, given oldest first, that the policy lets go now.

    `heads`: the checkpoints that live sandboxes stand on. `newest`: the serial of the oldest of the
    last `count` checkpoints of the tree, for `KeepLast`.
    """
    if isinstance(policy, KeepAll | KeepFitting):
        return
    for node in nodes:
        if isinstance(policy, KeepLast) and node.serial >= newest:
            return
        if not (claimed(policy, node) or node.number in heads or node.pins):
            yield node


class Retention(Generic[K]):
    """The policy of one tree, and its unclaimed checkpoints. The tree's lock guards it."""

    def __init__(self) -> None:
        self.policy: Policy = KeepAll()
        self._loose: dict[str, K] = {}
        self._sorted = True

    def change(self, policy: Policy, nodes: Iterable[K]) -> None:
        """Go by another policy from here on; `nodes` are all that there are."""
        self.policy = policy
        self._loose = {node.number: node for node in nodes if not claimed(policy, node)}
        self._sorted = False

    def note(self, node: K) -> None:
        """A checkpoint is new, or a claim to it has come or gone."""
        if claimed(self.policy, node):
            self._loose.pop(node.number, None)
        elif node.number not in self._loose:
            last = next(reversed(self._loose.values()), None)
            self._sorted = self._sorted and (last is None or last.serial < node.serial)
            self._loose[node.number] = node

    def forget(self, node: K) -> None:
        """A checkpoint was deleted."""
        self._loose.pop(node.number, None)

    def surplus(self, nodes: dict[str, K], heads: Collection[str]) -> list[K]:
        """What may go now, oldest first; `nodes` are all of the tree, in the order taken."""
        newest = 0
        if isinstance(self.policy, KeepLast):
            if len(nodes) <= self.policy.count:
                return []
            newest = threshold(nodes, self.policy.count)
        self._sort()
        return list(surplus(self.policy, self._loose.values(), heads=heads, newest=newest))

    def oldest(self, heads: Collection[str]) -> K | None:
        """What goes first when room is wanted, if the policy is to make room."""
        if not isinstance(self.policy, KeepFitting):
            return None
        self._sort()
        free = (n for n in self._loose.values() if n.number not in heads and not n.pins)
        return next(free, None)

    def _sort(self) -> None:
        if not self._sorted:
            ordered = sorted(self._loose.values(), key=lambda node: node.serial)
            self._loose = {node.number: node for node in ordered}
            self._sorted = True


def threshold(nodes: dict[str, K], count: int) -> int:
    """The serial from which on a checkpoint is one of the newest `count`, of more than that."""
    backwards = reversed(nodes.values())
    if not count:
        return next((node.serial for node in backwards), 0) + 1
    return next(islice(backwards, count - 1, None)).serial
