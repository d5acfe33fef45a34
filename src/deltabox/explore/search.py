"""The engine of a search: nodes, steps from one to the next, and what they may cost.

A strategy (strategies.py) is a function over two verbs, `proposals` and `steps`; both do what they
are given in parallel, as far as there are lanes. Everything else is here: going to states, taking
checkpoints of new ones, events, budgets, and an end at which every sandbox of the search is closed.

A *node* is a state that an action has led to. Its checkpoint is of the instant after `score`.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ..checkpoint import Checkpoint
from ..sandbox import Sandbox
from .events import Began, Dropped, Ended, Failed, Listener, Noted, Proposed, Stepped
from .lanes import SPARE, Holdings, Lane, Lanes, Place, Visit
from .problem import Problem, State, described

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class Budget:
    """What a search may take. It ends when one of them is used up, with the best so far.

    expansions: actions that are done.
    seconds: of wall clock; steps that have begun by then are finished.
    parallel: sandboxes that work at the same time. A lane mostly waits for its model, so there may
        be more than processors.
    memory: bytes that the checkpoints of the sandbox's tree may hold (`Usage.memory`).
    """

    expansions: int | None = None
    seconds: float | None = None
    parallel: int = 4
    memory: int | None = None

    def __post_init__(self) -> None:
        if self.parallel < 1:
            raise ValueError("a search needs at least one sandbox to work in: parallel >= 1")
        for name in ("expansions", "seconds", "memory"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"{name} is 0 or more, not {value!r}")


@dataclass(eq=False)
class Node:
    """A state of the search."""

    number: int
    parent: Node | None
    action: Any = None
    score: float = -math.inf
    result: Any = None
    error: str | None = None  # of an action that failed: there is no state
    children: list[Node] = field(default_factory=list)
    place: Place | None = None  # None: dropped, or failed
    notes: tuple[Any, ...] = ()
    proposed: list[Any] | None = None

    depth: int = field(init=False)  # how many actions have led here

    def __post_init__(self) -> None:
        self.depth = 0 if self.parent is None else self.parent.depth + 1

    @property
    def path(self) -> list[Node]:
        """The nodes from the root's child to this one."""
        path: list[Node] = []
        node = self
        while node.parent is not None:
            path.append(node)
            node = node.parent
        return path[::-1]

    @property
    def actions(self) -> tuple[Any, ...]:
        """What has led here."""
        return tuple(node.action for node in self.path)

    @property
    def checkpoint(self) -> Checkpoint:
        """The state itself, to be rolled back to or forked."""
        if self.place is None:
            raise ValueError(f"node {self.number} has no state: it failed, or was dropped")
        return self.place.checkpoint()

    @property
    def is_open(self) -> bool:
        """Whether steps can start here."""
        return self.place is not None and self.place.failure is None


@dataclass(frozen=True)
class Found:
    """What has come of a search. The checkpoints of its best node and of the root stay."""

    sandbox: Sandbox
    best: Node
    root: Node
    reason: str  # why it ended: done, found, expansions, seconds, memory
    nodes: int
    seconds: float

    @property
    def score(self) -> float:
        """The best one."""
        return self.best.score

    @property
    def actions(self) -> tuple[Any, ...]:
        """What has led to the best state."""
        return self.best.actions

    def commit(self) -> None:
        """Make the sandbox be in the best state.

        Handles from before the search go on in that state.
        """
        self.sandbox.rollback(self.best.checkpoint)


class Over(Exception):
    """A strategy needs not go on; `search.best` is what has been found."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Search:
    """One run. Strategies get it; callers use the functions of strategies.py."""

    def __init__(
        self,
        sandbox: Sandbox,
        problem: Problem,
        *,
        budget: Budget,
        goal: float | None,
        listeners: Sequence[Listener],
    ) -> None:
        self.problem = problem
        self.budget = budget
        self._goal = math.inf if goal is None else goal
        self._sandbox = sandbox
        self._listeners = listeners
        self._began = time.perf_counter()
        self._lock = threading.Lock()
        self._telling = threading.Lock()
        self._spent = 0
        self._numbers = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._holdings = Holdings()
        place = Place.at(sandbox.checkpoint(reuse=True), self._holdings)
        self.root = Node(0, None, place=place)
        self._leaders = [self.root]  # one of them is the best: not all can be kept, perhaps
        self._workers = ThreadPoolExecutor(budget.parallel, thread_name_prefix="search")
        # as many as there may be checkpoints and rollbacks in the background at a time
        most = budget.parallel + SPARE
        self._savers = ThreadPoolExecutor(most, thread_name_prefix="checkpoint")
        self._lanes = Lanes(sandbox, place, budget.parallel, self._savers)

    # -- what strategies do ------------------------------------------------------------------

    def proposals(self, nodes: Iterable[Node]) -> list[list[Any]]:
        """The actions that there are at each node; asked once for each."""
        where = list(nodes)
        return self._each(self._propose, where, where)

    def steps(self, wanted: Iterable[tuple[Node, Any]], *, then: Sequence[Node] = ()) -> list[Node]:
        """Do each action at its node; the new nodes, in that order. Failed ones have an `error`.

        then: where the next steps are likely to start. It need not be right: sandboxes are brought
            there meanwhile.

        Raises `Over` when the budget is used up, or the goal reached, by then.
        """
        pairs = list(wanted)
        allowed = self._reserve(len(pairs))
        where = [node for node, _ in pairs[:allowed]]
        made = self._each(self._step, pairs[:allowed], [*where, *then])
        with self._lock:
            self._leaders += made
        if self.best.score >= self._goal and self._certain_best().score >= self._goal:
            raise Over("found")
        if allowed < len(pairs):
            raise Over("expansions")
        self._check()
        return made

    @property
    def best(self) -> Node:
        """The best one so far whose state is not known to be lost; of equals the first."""
        with self._lock:
            return self._best()

    @best.setter
    def best(self, node: Node) -> None:
        with self._lock:
            self._leaders = [self.root, node]

    def _best(self) -> Node:
        """The same, and forget who is certainly worse. The lock is held."""
        self._leaders = [node for node in self._leaders if node.is_open]
        certain = [n for n in self._leaders if n.place is not None and n.place.settled]
        least = max(certain, key=lambda node: node.score)
        self._leaders = [n for n in self._leaders if n is least or n.score > least.score]
        return max(self._leaders, key=lambda node: node.score)

    def _certain_best(self) -> Node:
        """The best one whose state is there: its checkpoint has been taken."""
        while True:
            best = self.best
            assert best.place is not None
            best.place.settle()
            if best.is_open:
                return best

    def drop(self, nodes: Iterable[Node]) -> None:
        """Give up the states of nodes that nothing will start from any more.

        The best one's and the root's stay, whatever is asked for.
        """
        for node in nodes:
            place = node.place
            if place is None or node is self.root or self._leads(node):
                continue
            node.place, place.given_up = None, True
            self._savers.submit(place.give_up)
            self.tell(functools.partial(Dropped, node=node.number))

    def _leads(self, node: Node) -> bool:
        """Whether it is the best one, or may turn out to be."""
        with self._lock:
            self._best()
            return node in self._leaders

    def note(self, nodes: Iterable[Node], text: str) -> None:
        """Tell whoever listens."""
        numbers = [node.number for node in nodes]
        self.tell(functools.partial(Noted, nodes=numbers, text=text))

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call one of the problem's functions, which may be a coroutine function."""
        made = function(*arguments)
        if inspect.isawaitable(made):
            return asyncio.run_coroutine_threadsafe(_awaited(made), self._running_loop()).result()
        return made

    @contextmanager
    def at(self, node: Node) -> Iterator[State]:
        """A state to look at."""
        assert node.place is not None
        with Visit(self._lanes, node.place, ()) as visit:
            yield self._state(node, visit)

    # -- one node ----------------------------------------------------------------------------

    def _state(self, node: Node, where: Visit | Lane) -> State:
        scores = tuple(one.score for one in node.path)
        return State(where, node.actions, scores, node.result, node.notes)

    def _propose(self, node: Node, then: Sequence[Place]) -> list[Any]:
        if node.proposed is None:
            place = node.place
            if place is None or not node.is_open:
                return []
            with Visit(self._lanes, place, then) as visit:
                began = time.perf_counter()
                state = self._state(node, visit)
                node.proposed = list(self.call(self.problem.propose, state))
                took = time.perf_counter() - began
            self.tell(
                functools.partial(
                    Proposed,
                    node=node.number,
                    actions=[described(action) for action in node.proposed],
                    seconds=took - visit.waited,
                    overhead=visit.waited,
                )
            )
        return node.proposed

    def _step(self, pair: tuple[Node, Any], then: Sequence[Place]) -> Node:
        parent, action = pair
        with self._lock:
            self._numbers += 1
            node = Node(self._numbers, parent, action, notes=parent.notes)
            parent.children.append(node)
        shown = described(action)
        about: dict[str, Any] = {"node": node.number, "parent": parent.number, "action": shown}
        try:
            if parent.place is None:
                raise ValueError(f"node {parent.number} has been dropped")
            asked = time.perf_counter()
            here = parent.place
            with self._lanes.use(here, then or [here]) as lane:  # mostly here again
                lane.go(here)
                lane.place = None
                began = time.perf_counter()
                node.result = self.call(self.problem.apply, self._state(parent, lane), action)
                applied = time.perf_counter()
                score = float(self.call(self.problem.score, self._state(node, lane)))
                scored = time.perf_counter()
                if math.isnan(score):
                    raise ValueError("the score is not a number")
                lane.place = lane.saving = node.place = Place(self._holdings)
                node.score = score
                lost = functools.partial(self._lost, node, about)
                node.place.take(lane.sandbox, here.checkpoint(), self._savers, lost)
        except Exception as error:
            node.error = f"{type(error).__name__}: {error}"
            self.tell(functools.partial(Failed, **about, error=node.error))
            return node
        self.tell(
            functools.partial(
                Stepped,
                **about,
                score=node.score,
                apply=applied - began,
                scoring=scored - applied,
                overhead=began - asked,
            )
        )
        return node

    def _lost(self, node: Node, about: dict[str, Any], error: Exception) -> None:
        """No checkpoint could be taken of a new node."""
        node.error = f"{type(error).__name__}: {error}"
        self.tell(functools.partial(Failed, **about, error=node.error))

    # -- many --------------------------------------------------------------------------------

    def _each(
        self, work: Callable[[T, Sequence[Place]], R], items: Sequence[T], where: Sequence[Node]
    ) -> list[R]:
        """Work on each, in parallel; `where` says at which node, and goes on with likely ones."""
        futures = []
        for index, item in enumerate(items):
            coming = where[index + self.budget.parallel :][:SPARE]
            places = [node.place for node in coming if node.place is not None]
            futures.append(self._workers.submit(work, item, places))
        return [future.result() for future in futures]

    def _reserve(self, wanted: int) -> int:
        """How many more actions may be done."""
        self._check()
        if self.budget.expansions is None:
            return wanted
        allowed = max(0, min(wanted, self.budget.expansions - self._spent))
        self._spent += allowed
        return allowed

    def _check(self) -> None:
        budget = self.budget
        if budget.seconds is not None and self.seconds > budget.seconds:
            raise Over("seconds")
        if budget.expansions is not None and self._spent >= budget.expansions:
            raise Over("expansions")
        if budget.memory is not None and self._sandbox.usage.memory > budget.memory:
            raise Over("memory")

    @property
    def seconds(self) -> float:
        """Since it began."""
        return time.perf_counter() - self._began

    def tell(self, made: Callable[..., Any]) -> None:
        """Tell an event, made with its time, to all who listen: one at a time, in order."""
        with self._telling:
            event = made(at=self.seconds)
            for listener in self._listeners:
                listener(event)

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, daemon=True).start()
            return self._loop

    # -- the whole ---------------------------------------------------------------------------

    def run(self, name: str, strategy: Callable[[Search], None], settings: dict[str, Any]) -> Found:
        """Let a strategy work to its end, or the budget's."""
        shown = {key: described(value) for key, value in settings.items()}
        self.tell(functools.partial(Began, strategy=name, settings=shown, started=time.time()))
        reason = "error"
        try:
            try:
                self._check()
                strategy(self)
                reason = "done"
            except Over as over:
                reason = over.reason
            except KeyboardInterrupt:
                reason = "interrupted"
                raise
            self._certain_best()
        finally:
            self._close()
            score = None if math.isinf(self.best.score) else self.best.score
            ended = functools.partial(
                Ended, best=self.best.number, score=score, reason=reason, nodes=self._numbers
            )
            self.tell(ended)
        return Found(
            self._sandbox, self.best, self.root, reason, self._numbers, seconds=self.seconds
        )

    def _close(self) -> None:
        """End all sandboxes, and let go of every state but the best."""
        self._workers.shutdown(wait=False, cancel_futures=True)
        self._lanes.stop()
        self._savers.shutdown(wait=True)  # or a checkpoint would be taken of one that is closed
        self._lanes.close()
        self._workers.shutdown(wait=True)
        kept = {self.best, self.root}
        pending, places = [self.root], []
        while pending:
            node = pending.pop()
            pending += node.children
            if node not in kept and node.place is not None:
                places.append(node.place)
                node.place = None
        with ThreadPoolExecutor(self.budget.parallel + SPARE) as freeing:
            list(freeing.map(Place.give_up, places))
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)


async def _awaited(made: Any) -> Any:
    return await made
