"""The rule that policies follow, played against random trees without any sandbox."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from deltabox import KeepAll, KeepFitting, KeepLast, KeepReachable
from deltabox.keeper.retention import Retention, claimed, surplus, threshold
from deltabox.retention import Policy, described, rebuilt


@dataclass
class Node:
    serial: int
    name: str | None = None
    held: bool = False
    references: int = 0
    pins: int = 0

    @property
    def number(self) -> str:
        return f"n{self.serial}"

    @property
    def referred(self) -> bool:
        return self.references > 0


policies: st.SearchStrategy[Policy] = st.one_of(
    st.just(KeepAll()),
    st.integers(0, 8).map(KeepLast),
    st.just(KeepReachable()),
    st.just(KeepFitting()),
)
nodes = st.lists(
    st.builds(
        Node,
        serial=st.integers(0, 1000),
        name=st.none() | st.just("name"),
        held=st.booleans(),
        references=st.integers(0, 2),
        pins=st.integers(0, 1),
    ),
    unique_by=lambda node: node.serial,
    max_size=30,
).map(lambda found: sorted(found, key=lambda node: node.serial))


def gone(policy: Policy, found: list[Node], heads: set[str]) -> list[Node]:
    """The rule in one breath, as the documentation has it."""
    if isinstance(policy, KeepAll | KeepFitting):
        return []
    kept = {node.number for node in found if node.name or node.held or node.pins} | heads
    if isinstance(policy, KeepReachable):
        kept |= {node.number for node in found if node.references}
    else:
        kept |= {node.number for node in found[max(0, len(found) - policy.count) :]}
    return [node for node in found if node.number not in kept]


@given(policies, nodes, st.sets(st.integers(0, 1000), max_size=40))
def test_the_rule(policy: Policy, found: list[Node], serials: set[int]) -> None:
    heads = {node.number for node in found if node.serial in serials}
    everything = {node.number: node for node in found}
    newest = 0
    if isinstance(policy, KeepLast):
        newest = threshold(everything, policy.count) if len(found) > policy.count else 0
    expected = gone(policy, found, heads)
    assert list(surplus(policy, found, heads=heads, newest=newest)) == expected
    retention: Retention[Node] = Retention()
    retention.change(policy, found)
    assert retention.surplus(everything, heads) == expected
    assert rebuilt(described(policy)) == policy


class Tree(RuleBasedStateMachine):
    """Checkpoints come, go and change, and the set kept aside is right after every step."""

    def __init__(self) -> None:
        super().__init__()
        self.retention: Retention[Node] = Retention()
        self.nodes: dict[str, Node] = {}
        self.heads: set[str] = set()
        self.taken = 0

    def _one(self, choice: int) -> Node:
        found = list(self.nodes.values())
        return found[choice % len(found)]

    def _drop(self) -> None:
        expected = gone(self.retention.policy, list(self.nodes.values()), self.heads)
        assert self.retention.surplus(self.nodes, self.heads) == expected
        for node in expected:
            del self.nodes[node.number]
            self.retention.forget(node)

    @rule(policy=policies)
    def change(self, policy: Policy) -> None:
        self.retention.change(policy, self.nodes.values())
        self._drop()

    @rule(named=st.booleans(), references=st.integers(0, 1))
    def take(self, named: bool, references: int) -> None:
        self.taken += 1
        node = Node(self.taken, "name" if named else None, references=references)
        self.nodes[node.number] = node
        self.heads = {node.number}
        self.retention.note(node)
        self._drop()
        assert node.number in self.nodes

    @precondition(lambda self: self.nodes)
    @rule(choice=st.integers(0), held=st.booleans(), references=st.integers(0, 2))
    def claim(self, choice: int, held: bool, references: int) -> None:
        node = self._one(choice)
        node.held, node.references = held, references
        self.retention.note(node)
        self._drop()

    @precondition(lambda self: self.nodes)
    @rule(choice=st.integers(0), pins=st.integers(0, 1))
    def pin(self, choice: int, pins: int) -> None:
        self._one(choice).pins = pins
        self._drop()

    @precondition(lambda self: self.nodes)
    @rule(choices=st.sets(st.integers(0, 50), max_size=3))
    def move(self, choices: set[int]) -> None:
        self.heads = {self._one(choice).number for choice in choices}
        self._drop()

    @precondition(lambda self: self.nodes)
    @rule(choice=st.integers(0))
    def delete(self, choice: int) -> None:
        node = self._one(choice)
        del self.nodes[node.number]
        self.heads.discard(node.number)
        self.retention.forget(node)
        self._drop()

    @invariant()
    def the_oldest_goes_first(self) -> None:
        oldest = self.retention.oldest(self.heads)
        free = [
            node
            for node in self.nodes.values()
            if not claimed(self.retention.policy, node)
            and node.number not in self.heads
            and not node.pins
        ]
        offers = isinstance(self.retention.policy, KeepFitting) and free
        assert oldest is (free[0] if offers else None)


TestTree = Tree.TestCase


@pytest.mark.parametrize("count", [-1, 1.5, True, "3", None])
def test_a_number_of_checkpoints(count: object) -> None:
    with pytest.raises(ValueError, match="an int, 0 or more"):
        KeepLast(count)  # type: ignore[arg-type]


def test_no_policy() -> None:
    with pytest.raises(TypeError, match="one of KeepAll, KeepLast, KeepReachable, KeepFitting"):
        described("all")  # type: ignore[arg-type]
