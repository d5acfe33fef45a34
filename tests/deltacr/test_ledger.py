"""What templates hold together: the ledger against a model that knows every page."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from deltabox.deltacr.ledger import Ledger

PAGE = 4096
PAGES = 12

State = dict[int, object]  # page -> its version; equal objects are shared memory


class Model:
    """Templates as maps of pages, forked and closed as the engine does, with the kernel's view."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.states: dict[int, State] = {}
        self.programs: list[State] = []  # restored trees, which share pages as well
        self.reported = 0
        self.ledger.report = self._report
        self._next = 0

    def _report(self, change: int) -> None:
        self.reported += change

    def make(self, parent: int | None, written: set[int], dropped: set[int]) -> None:
        key = self._next
        self._next += 1
        state = dict(self.states[parent]) if parent is not None else {}
        self.ledger.opened(key, parent)
        state |= {page: object() for page in written}
        for page in dropped - written:
            state.pop(page, None)
        self.states[key] = state
        whole = len(state) * PAGE
        self.ledger.resize(key, own=len(written) * PAGE, whole=whole, extra=100)

    def close(self, key: int) -> None:
        state = self.states.pop(key)
        others = {
            id(version)
            for other in [*self.states.values(), *self.programs]
            for version in other.values()
        }
        alone = sum(id(version) not in others for version in state.values())
        freed = alone * PAGE if self.ledger.shares(key) else 0
        self.ledger.closed(key, freed)

    def held(self) -> int:
        unique = {id(version) for state in self.states.values() for version in state.values()}
        return len(unique) * PAGE + 100 * len(self.states)


pages = st.sets(st.integers(0, PAGES - 1), max_size=6)
steps = st.lists(st.tuples(st.integers(0, 7), st.integers(0, 1000), pages, pages), max_size=60)


def play(model: Model, moves: list[tuple[int, int, set[int], set[int]]], *, programs: bool) -> None:
    for kind, choice, written, dropped in moves:
        keys = sorted(model.states)
        if kind == 0 or not keys:
            model.make(None, written, set())
        elif kind < 4:
            model.make(keys[choice % len(keys)], written, dropped)
        elif kind < 7:
            model.close(keys[choice % len(keys)])
        elif programs:
            model.programs.append(dict(model.states[keys[choice % len(keys)]]))
        assert model.reported == model.ledger.held
        if programs:
            assert model.held() <= model.ledger.held
        else:
            assert model.ledger.held == model.held()


@given(steps)
@settings(max_examples=400, deadline=None)
def test_every_page_is_counted_once(moves: list[tuple[int, int, set[int], set[int]]]) -> None:
    model = Model()
    play(model, moves, programs=False)
    for key in list(model.states):
        model.close(key)
    assert model.ledger.held == 0


@given(steps)
@settings(max_examples=400, deadline=None)
def test_pages_that_programs_share_are_never_forgotten(
    moves: list[tuple[int, int, set[int], set[int]]],
) -> None:
    model = Model()
    play(model, moves, programs=True)
    model.programs.clear()
    for key in list(model.states):
        model.close(key)
    assert model.ledger.held == 0


def test_a_line_of_which_the_oldest_goes() -> None:
    """What a policy does all day: the root's pages stay, and count once."""
    model = Model()
    model.make(None, set(range(PAGES)), set())
    for number in range(50):
        model.make(number, {number % PAGES}, set())
        model.close(number)
        assert model.ledger.held == PAGES * PAGE + 100


def test_a_fork_that_is_not_filled_yet() -> None:
    """A successor made ahead takes over what is left of its closed parent."""
    ledger = Ledger()
    ledger.opened(1, None)
    ledger.resize(1, own=0, whole=10 * PAGE, extra=0)
    assert ledger.held == 10 * PAGE
    ledger.opened(2, 1)
    ledger.closed(1, 0)
    assert ledger.held == 10 * PAGE
    ledger.resize(2, own=10 * PAGE, whole=10 * PAGE, extra=0)  # at the most, while it is filled
    ledger.resize(2, own=2 * PAGE, whole=10 * PAGE, extra=0)
    assert ledger.held == 10 * PAGE
    ledger.closed(2, 0)
    assert ledger.held == 0
