"""Ways to search, each a small function over `Search.proposals` and `Search.steps`.

All take a sandbox, whose present state is the root and which they leave as it is, a problem
(problem.py), and the same options: see `best_of`. A strategy of your own is a function of a
`Search`, run by `explore`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypedDict, Unpack

from ..sandbox import Sandbox
from .events import Listener
from .problem import Problem
from .search import Budget, Found, Node, Search

_ANYTHING = Budget()


class Options(TypedDict, total=False):
    """What every search takes."""

    budget: Budget
    goal: float | None
    listeners: Sequence[Listener]


def explore(
    sandbox: Sandbox,
    problem: Problem,
    strategy: Callable[[Search], None],
    *,
    name: str = "",
    settings: dict[str, Any] | None = None,
    budget: Budget = _ANYTHING,
    goal: float | None = None,
    listeners: Sequence[Listener] = (),
) -> Found:
    """Run a strategy of your own. `name` and `settings` are for displays and traces."""
    search = Search(sandbox, problem, budget=budget, goal=goal, listeners=listeners)
    return search.run(name or strategy.__name__, strategy, settings or {})


def best_of(sandbox: Sandbox, problem: Problem, count: int, **options: Unpack[Options]) -> Found:
    """Do the first `count` proposals, each from the root; the best of them.

    budget: what the search may take, see `Budget`.
    goal: a score with which it ends at once.
    listeners: called with every event, one at a time; see events.py.

    Raises what `propose` raises, and what `Sandbox.checkpoint` and `Sandbox.fork` do. Actions that
    fail are no error: they are failed nodes.

    >>> explore.best_of(sb, Repair(), 8, goal=1.0).commit()     # doctest: +SKIP
    """

    def strategy(search: Search) -> None:
        (actions,) = search.proposals([search.root])
        search.steps((search.root, action) for action in actions[:count])

    return explore(sandbox, problem, strategy, name="best of", settings={"count": count}, **options)


def depth_first(
    sandbox: Sandbox,
    problem: Problem,
    *,
    depth: int,
    width: int | None = None,
    **options: Unpack[Options],
) -> Found:
    """Follow the best child to `depth`, then back to the next best, and so on.

    width: of the proposals at each node only so many are done. Options as for `best_of`.
    """

    def strategy(search: Search) -> None:
        pending = [search.root]
        while pending:
            node = pending.pop()
            (actions,) = search.proposals([node])
            children = search.steps((node, action) for action in actions[:width])
            search.drop([node])
            going_on = [child for child in children if child.is_open and child.depth < depth]
            pending += sorted(going_on, key=_score)
            search.drop(child for child in children if child not in going_on)

    settings = {"depth": depth, "width": width}
    return explore(sandbox, problem, strategy, name="depth first", settings=settings, **options)


def beam(
    sandbox: Sandbox,
    problem: Problem,
    *,
    width: int,
    depth: int,
    **options: Unpack[Options],
) -> Found:
    """Level by level: all proposals of the `width` best states of the level before.

    Options as for `best_of`.
    """

    def strategy(search: Search) -> None:
        level = [search.root]
        for _ in range(depth):
            found = search.proposals(level)
            wanted = [
                (n, action) for n, actions in zip(level, found, strict=True) for action in actions
            ]
            children = [child for child in search.steps(wanted) if child.is_open]
            search.drop(level)
            level = sorted(children, key=_score, reverse=True)[:width]
            search.drop(child for child in children if child not in level)
            if not level:
                return

    settings = {"width": width, "depth": depth}
    return explore(sandbox, problem, strategy, name="beam", settings=settings, **options)


def uct(
    sandbox: Sandbox,
    problem: Problem,
    *,
    depth: int,
    exploration: float = math.sqrt(2),
    **options: Unpack[Options],
) -> Found:
    """UCT tree search (Kocsis and Szepesvari 2006): spend steps where they have paid, or were few.

    Each round does as many untried actions as there are lanes, each chosen as if those before it
    in the round had brought nothing. It ends when there is nothing left to try down to `depth`, or
    by the budget. Options as for `best_of`.

    exploration: the weight of what is little known, for scores between 0 and 1.
    """

    def strategy(search: Search) -> None:
        tree = _Tree(search, depth, exploration)
        while wanted := tree.choose(search.budget.parallel):
            for node in search.steps(wanted, then=tree.likely):
                tree.learn(node)

    settings = {"depth": depth, "exploration": exploration}
    return explore(sandbox, problem, strategy, name="uct", settings=settings, **options)


class _Tree:
    """What UCT knows: visits and the sum of scores of each node, and what was not tried there."""

    def __init__(self, search: Search, depth: int, exploration: float) -> None:
        self._search = search
        self._depth = depth
        self._exploration = exploration
        self._visits: dict[Node, int] = {}
        self._sums: dict[Node, float] = {}
        self._untried: dict[Node, list[Any]] = {}
        self._done: set[Node] = set()  # with nothing left to try, there or below
        # where the next would be chosen if these bring nothing, and if they bring what was there
        self.likely: list[Node] = []

    def choose(self, count: int) -> list[tuple[Node, Any]]:
        """The next actions to do, where."""
        chosen: list[tuple[Node, Any]] = []
        busy: set[Node] = set()  # all that can be tried there is chosen already
        while len(chosen) < count:
            node = self._go_down(busy)
            if node is None:
                break
            chosen.append((node, self._untried[node].pop(0)))
            self._visit(node, 0.0)  # until it is known
        nodes = [node for node, _ in chosen]
        likely = [self._look_ahead(busy)]
        for node in nodes:
            self._visit(node, 0.0, -1)
            self._visit(node, self._as_before(node))
        likely.append(self._look_ahead(busy))
        for node in nodes:
            self._visit(node, self._as_before(node), -1)
        self.likely = [node for node in dict.fromkeys(likely) if node is not None]
        return chosen

    def _as_before(self, node: Node) -> float:
        return 0.0 if math.isinf(node.score) else node.score

    def learn(self, node: Node) -> None:
        """A new node's score counts for all on its path; a failed one brings nothing."""
        self._visit(node, node.score if node.is_open else 0.0)

    def _visit(self, node: Node, score: float, times: int = 1) -> None:
        at: Node | None = node
        while at is not None:
            self._visits[at] = self._visits.get(at, 0) + times
            self._sums[at] = self._sums.get(at, 0.0) + score * times
            at = at.parent

    def _go_down(self, busy: set[Node]) -> Node | None:
        """The most promising node with something untried; None if there is none just now."""
        node: Node | None = self._search.root
        while node is not None:
            if self._can_try(node):
                return node
            below = [c for c in node.children if c not in self._done and c not in busy]
            if below:
                node = max(below, key=self._promise)
                continue
            over = all(child in self._done for child in node.children)
            waits = len(node.children) < len(node.proposed or ())  # for what is chosen
            (self._done if over and not waits else busy).add(node)
            if node is self._search.root:
                return None
            node = node.parent
        return None

    def _look_ahead(self, busy: set[Node]) -> Node | None:
        """As `_go_down`, but without asking for proposals; busy is what is chosen already."""
        node = self._search.root
        while True:
            if node.is_open and node.depth < self._depth and self._untried.get(node, [None]):
                return node
            below = [c for c in node.children if c not in self._done and c not in busy]
            if not below:
                return None
            node = max(below, key=self._promise)

    def _can_try(self, node: Node) -> bool:
        if not node.is_open or node.depth >= self._depth:
            return False
        if node not in self._untried:
            (actions,) = self._search.proposals([node])
            self._untried[node] = list(actions)
        return bool(self._untried[node])

    def _promise(self, node: Node) -> float:
        visits = self._visits.get(node, 0)
        if not visits or node.parent is None:
            return -math.inf
        rare = math.log(max(1, self._visits.get(node.parent, 1))) / visits
        return self._sums[node] / visits + self._exploration * math.sqrt(rare)


def tournament(
    sandbox: Sandbox,
    problem: Problem,
    count: int,
    *,
    better: Callable[[Any, Any], Any],
    **options: Unpack[Options],
) -> Found:
    """Do `count` proposals from the root and have them compared in pairs until one is left.

    For what is easier to compare than to score. `better` gets two states, both live, and says
    whether the first is the better one; it may be a coroutine function. Scores do not decide, but
    for who meets whom: the best and the worst meet first. Options as for `best_of`; two states are
    live at a time, so `parallel` is 2 at least.
    """
    if options.get("budget", _ANYTHING).parallel < 2:
        raise ValueError("a tournament needs two sandboxes at a time: parallel >= 2")

    def strategy(search: Search) -> None:
        (actions,) = search.proposals([search.root])
        made = search.steps((search.root, action) for action in actions[:count])
        left = sorted((node for node in made if node.is_open), key=_score, reverse=True)
        while len(left) > 1:
            half = len(left) // 2
            pairs = list(zip(left[:half], reversed(left[-half:]), strict=True))
            bye = left[half : len(left) - half]
            winners = [one if _wins(search, better, one, other) else other for one, other in pairs]
            losers = [node for pair in pairs for node in pair if node not in winners]
            for one, other in zip(winners, losers, strict=True):
                search.note([one, other], "is better than")
            left = winners + bye
            search.best = left[0]
            search.drop(losers)

    settings = {"count": count}
    return explore(sandbox, problem, strategy, name="tournament", settings=settings, **options)


def _wins(search: Search, better: Callable[[Any, Any], Any], one: Node, other: Node) -> bool:
    with search.at(one) as first, search.at(other) as second:
        return bool(search.call(better, first, second))


def reflexion(
    sandbox: Sandbox,
    problem: Problem,
    *,
    attempts: int,
    depth: int,
    reflect: Callable[[Any], Any],
    **options: Unpack[Options],
) -> Found:
    """Try, think about what went wrong, go back and try again knowing it (Shinn et al. 2023).

    Each attempt follows the first proposal at every state to `depth`, from the root. `reflect` gets
    the state it has ended in, still alive, and returns what should be remembered; later attempts
    find that in `State.notes`. Options as for `best_of`; without a `goal` every attempt is made.
    """

    def strategy(search: Search) -> None:
        notes: tuple[Any, ...] = ()
        for _ in range(attempts):
            node = search.root
            node.notes, node.proposed = notes, None
            while node.depth < depth:
                (actions,) = search.proposals([node])
                if not actions:
                    break
                (child,) = search.steps([(node, actions[0])])
                if not child.is_open:
                    break
                search.drop([node])
                node = child
            with search.at(node) as state:
                note = search.call(reflect, state)
            search.note([node], str(note))
            search.drop([node])
            notes = (*notes, note)

    settings = {"attempts": attempts, "depth": depth}
    return explore(sandbox, problem, strategy, name="reflexion", settings=settings, **options)


def _score(node: Node) -> float:
    return node.score
