"""Searches over live states: a number that is in a file and in a program's memory."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from deltabox import Sandbox, explore
from deltabox.explore import Budget, Found, State
from tests.probe import Probe

STEPS = {"+1": "n += 1", "*2": "n *= 2", "-3": "n -= 3"}


class Number:
    """Make a 1 into a target by few operations; the state is a program and a file at once."""

    def __init__(self, sandbox: Sandbox, target: int = 11) -> None:
        self.probe = Probe.start(sandbox)
        self.probe.do("n = 1")
        sandbox.files.write_text("/srv/n", "1")
        self.target = target
        self.proposed: list[tuple[str, ...]] = []

    def value(self, sandbox: Sandbox) -> int:
        number: int = self.probe.within(sandbox).ask("n")
        assert sandbox.files.read_text("/srv/n") == str(number), "files and memory differ"
        return number

    def propose(self, state: State) -> list[str]:
        assert self.value(state.sandbox) == self.after(state.actions)
        self.proposed.append(state.actions)
        return list(STEPS)

    def apply(self, state: State, action: str) -> str:
        assert self.value(state.sandbox) == self.after(state.actions)
        self.probe.within(state.sandbox).do(STEPS[action])
        number = self.after((*state.actions, action))
        state.sandbox.files.write_text("/srv/n", str(number))
        return f"{action} made {number}"

    def score(self, state: State) -> float:
        number = self.value(state.sandbox)
        assert number == self.after(state.actions)
        assert state.result == f"{state.actions[-1]} made {number}"
        return 1 / (1 + abs(self.target - number))

    @staticmethod
    def after(actions: tuple[str, ...]) -> int:
        scope = {"n": 1}
        for action in actions:
            exec(STEPS[action], scope)
        return scope["n"]


@pytest.fixture
def number(sandbox: Sandbox) -> Number:
    return Number(sandbox)


@pytest.fixture
def events() -> list[Any]:
    return []


def check(sandbox: Sandbox, number: Number, found: Found, events: list[Any]) -> None:
    """What holds of every search: events that fit, nothing left behind, a state to commit."""
    assert isinstance(events[0], explore.Began) and isinstance(events[-1], explore.Ended)
    times = [event.at for event in events]
    assert times == sorted(times)
    stepped = [event for event in events if isinstance(event, explore.Stepped)]
    known: dict[int, tuple[Any, ...]] = {0: ()}
    for event in stepped:
        known[event.node] = (*known[event.parent], event.action)
    assert known[found.best.number] == found.actions
    assert found.nodes == len(stepped) + sum(isinstance(e, explore.Failed) for e in events)
    assert found.score == max(event.score for event in stepped)
    # the sandbox is as it was, and only what may be needed stays
    assert number.value(sandbox) == 1
    assert {c.id for c in sandbox.checkpoints} == {
        found.root.checkpoint.id,
        found.best.checkpoint.id,
    }
    found.commit()
    assert number.value(sandbox) == number.after(found.actions)


def reflect(state: State) -> str:
    return f"{len(state.notes)}: {state.actions}"


SEARCHES: dict[str, Callable[..., Found]] = {
    "best_of": lambda sb, p, **o: explore.best_of(sb, p, 3, **o),
    "depth_first": lambda sb, p, **o: explore.depth_first(sb, p, depth=5, width=2, **o),
    "beam": lambda sb, p, **o: explore.beam(sb, p, width=3, depth=5, **o),
    "uct": lambda sb, p, **o: explore.uct(sb, p, depth=6, **o),
    "reflexion": lambda sb, p, **o: explore.reflexion(
        sb, p, attempts=3, depth=4, reflect=reflect, **o
    ),
}


@pytest.mark.parametrize("parallel", [1, 3])
@pytest.mark.parametrize("name", SEARCHES)
def test_each(
    sandbox: Sandbox, number: Number, events: list[Any], name: str, parallel: int
) -> None:
    budget = Budget(expansions=40, parallel=parallel)
    found = SEARCHES[name](sandbox, number, budget=budget, goal=1.0, listeners=[events.append])
    if name == "depth_first":
        assert number.after(found.actions) == 11 and found.reason == "found"
    check(sandbox, number, found, events)


@pytest.mark.parametrize("parallel", [1, 4])
def test_uct_tries_everything_once(sandbox: Sandbox, number: Number, parallel: int) -> None:
    """Without a budget it ends when there is nothing left to try."""
    number.target = 10**9
    seen: list[Any] = []
    budget = Budget(parallel=parallel)
    found = explore.uct(sandbox, number, depth=3, budget=budget, listeners=[seen.append])
    stepped = [event for event in seen if isinstance(event, explore.Stepped)]
    assert found.nodes == len(stepped) == 3 + 9 + 27 and found.reason == "done"
    assert len({(event.parent, event.action) for event in stepped}) == 39


def test_a_deep_search(sandbox: Sandbox) -> None:
    """Many actions in a row are no problem for any part of it."""

    class Deep:
        def propose(self, state: State) -> list[int]:
            return [state.depth]

        def apply(self, state: State, action: int) -> None:
            pass

        def score(self, state: State) -> float:
            return float(state.depth)

    picture = explore.Picture()
    budget = Budget(expansions=100)
    found = explore.uct(sandbox, Deep(), depth=10**6, budget=budget, listeners=[picture])
    assert found.actions == tuple(range(100))
    picture.render()


def test_reflexion_remembers(sandbox: Sandbox, number: Number, events: list[Any]) -> None:
    seen: list[tuple[Any, ...]] = []

    def remember(state: State) -> str:
        seen.append(state.notes)
        return f"attempt {len(state.notes)} came to {number.value(state.sandbox)}"

    explore.reflexion(
        sandbox, number, attempts=3, depth=2, reflect=remember, listeners=[events.append]
    )
    first, second = "attempt 0 came to 3", "attempt 1 came to 3"
    assert seen == [(), (first,), (first, second)]
    assert [e.text for e in events if isinstance(e, explore.Noted)][:2] == [first, second]


def test_an_action_that_changes_nothing_takes_no_checkpoint(sandbox: Sandbox) -> None:
    """Its node is in its parent's state; that is freed when none of them needs it any more."""
    sandbox.shell().run("true")
    deadline = time.monotonic() + 20
    while any(process.state != "S" for process in sandbox.processes()):
        assert time.monotonic() < deadline, "the shell does not wait for its next command"

    class Looks:
        def propose(self, state: State) -> list[str]:
            return ["look", "write"]

        def apply(self, state: State, action: str) -> str:
            if action == "write":
                name = "".join(one[0] for one in (*state.actions, action))
                state.sandbox.files.write_text(f"/srv/{name}", "")
            return " ".join(state.sandbox.files.list("/srv"))

        def score(self, state: State) -> float:
            assert not state.result or state.result.split() == [
                "".join(one[0] for one in state.actions[: n + 1])
                for n, one in enumerate(state.actions)
                if one == "write"
            ]
            return float(state.actions.count("write"))

    seen: list[tuple[str, int]] = []

    def two_levels(search: explore.Search) -> None:
        (look,) = search.steps([(search.root, "look")])
        (again, write) = search.steps([(look, "look"), (look, "write")])
        (last,) = search.steps([(write, "look")])
        nodes = (look, again, write, last)
        seen.extend((node.checkpoint.id, len(sandbox.checkpoints)) for node in nodes)
        search.drop([look, again, write])
        search.steps([(last, "write")])

    found = explore.explore(sandbox, Looks(), two_levels, budget=Budget(parallel=1))
    root = found.root.checkpoint.id
    assert [one == root for one, _ in seen] == [True, True, False, False]
    assert seen[2][0] == seen[3][0] and {many for _, many in seen} == {2}
    assert found.actions == ("look", "write", "look", "write")
    found.commit()
    assert sandbox.files.list("/srv") == ["lw", "lwlw"]
    assert len(sandbox.checkpoints) == 2


def test_tournament(sandbox: Sandbox, number: Number) -> None:
    """Whoever is less wins, whatever the scores say; both are live when they are compared."""

    async def less(one: State, other: State) -> bool:
        await asyncio.sleep(0.01)
        return number.value(one.sandbox) < number.value(other.sandbox)

    found = explore.tournament(sandbox, number, 3, better=less)
    assert found.actions == ("-3",)
    found.commit()
    assert number.value(sandbox) == -2
    with pytest.raises(ValueError, match="parallel"):
        explore.tournament(sandbox, number, 3, better=less, budget=Budget(parallel=1))


def test_coroutines_run_side_by_side(sandbox: Sandbox) -> None:
    class Slow:
        running = most = 0

        async def propose(self, state: State) -> list[int]:
            return [1, 2, 3, 4]

        async def apply(self, state: State, action: int) -> None:
            Slow.running += 1
            Slow.most = max(Slow.most, Slow.running)
            await asyncio.sleep(0.3)
            Slow.running -= 1

        async def score(self, state: State) -> float:
            return float(state.actions[-1])

    found = explore.best_of(sandbox, Slow(), 4, budget=Budget(parallel=4))
    assert found.actions == (4,) and Slow.most > 1


def test_failed_actions_are_no_end(sandbox: Sandbox, events: list[Any]) -> None:
    class Fails:
        def propose(self, state: State) -> list[str]:
            return ["raise", "nan", "kill", "packet", "fine"] if not state.depth else []

        def apply(self, state: State, action: str) -> None:
            if action == "raise":
                raise ZeroDivisionError("as asked")
            if action == "packet":  # such a state cannot be kept
                Probe.start(state.sandbox).do(
                    "import socket; s = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)"
                )
            state.sandbox.run("echo $$ > /srv/pid", check=True)

        def score(self, state: State) -> float:
            if state.actions == ("kill",):
                return float(state.sandbox.run("kill -9 $$; echo 1", check=True).stdout)
            return {"nan": float("nan"), "packet": 0.5}.get(state.actions[0], 0.25)

    found = explore.beam(sandbox, Fails(), width=5, depth=2, listeners=[events.append])
    errors = {e.action: e.error for e in events if isinstance(e, explore.Failed)}
    assert set(errors) == {"raise", "nan", "kill", "packet"}
    assert errors["raise"] == "ZeroDivisionError: as asked"
    assert "AF_PACKET" in errors["packet"] or "packet" in errors["packet"]
    assert (found.actions, found.reason) == (("fine",), "done")


def test_a_listener_that_raises_keeps_nobody_waiting(sandbox: Sandbox) -> None:
    """Not even when it is told that a state cannot be kept, beside the search."""

    class Lost:
        def propose(self, state: State) -> list[str]:
            return ["packet"]

        def apply(self, state: State, action: str) -> None:
            Probe.start(state.sandbox).do(
                "import socket; s = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)"
            )

        def score(self, state: State) -> float:
            return 1.0

    def full(event: explore.AnyEvent) -> None:
        if isinstance(event, explore.Failed):
            raise OSError("No space left on device")

    found = explore.best_of(sandbox, Lost(), 1, goal=1.0, listeners=[full])
    assert found.best is found.root and found.reason == "done"


def test_what_propose_raises_ends_the_search(sandbox: Sandbox, events: list[Any]) -> None:
    class Broken(Number):
        def propose(self, state: State) -> list[str]:
            if state.depth == 2:
                raise LookupError("no model")
            return super().propose(state)

    problem = Broken(sandbox)
    with pytest.raises(LookupError):
        explore.beam(sandbox, problem, width=2, depth=4, listeners=[events.append])
    assert events[-1].reason == "error" and len(sandbox.checkpoints) == 2
    assert problem.value(sandbox) == 1


@pytest.mark.parametrize(
    ("budget", "reason"),
    [
        (Budget(expansions=0), "expansions"),
        (Budget(expansions=7), "expansions"),
        (Budget(seconds=0.5), "seconds"),
        (Budget(memory=1), "memory"),
    ],
)
def test_budgets(
    sandbox: Sandbox, number: Number, events: list[Any], budget: Budget, reason: str
) -> None:
    number.target = 10**9
    found = explore.uct(sandbox, number, depth=50, budget=budget, listeners=[events.append])
    assert found.reason == reason == events[-1].reason
    if budget.expansions is not None:
        assert found.nodes == budget.expansions
    assert len(sandbox.checkpoints) <= 2


def test_the_checkpoint_is_taken_while_the_model_thinks(sandbox: Sandbox) -> None:
    """A search that follows one path waits for its model and its actions, and hardly for us."""
    thought = 0.2

    class Thinks(Number):
        def propose(self, state: State) -> list[str]:
            time.sleep(thought)
            return super().propose(state)

    events: list[Any] = []
    problem = Thinks(sandbox, 10**9)
    explore.depth_first(sandbox, problem, depth=5, width=1, listeners=[events.append])
    stepped = [event for event in events if isinstance(event, explore.Stepped)]
    assert len(stepped) == 5
    assert all(event.overhead < thought / 2 for event in stepped[1:])


def test_an_interrupt_ends_it_all(sandbox: Sandbox, events: list[Any]) -> None:
    class Hangs(Number):
        def apply(self, state: State, action: str) -> str:
            if state.depth == 1:
                if action == "+1":  # once
                    threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGINT]).start()
                state.sandbox.run("sleep 1000")
            return super().apply(state, action)

    problem = Hangs(sandbox)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        explore.beam(sandbox, problem, width=1, depth=3, listeners=[events.append])
    assert time.monotonic() - began < 20
    assert events[-1].reason == "interrupted"
    assert problem.value(sandbox) == 1 and len(sandbox.checkpoints) <= 2


_KILLED = """
import sys, time
from deltabox import Sandbox, explore

class Endless:
    def propose(self, state):
        return [1, 2]
    def apply(self, state, action):
        state.sandbox.run(f"echo {action} >> /srv/log", check=True)
    def score(self, state):
        if state.depth == 3:
            print("deep", flush=True)
        return float(state.depth)

with Sandbox.create() as sb:
    explore.uct(sb, Endless(), depth=1000, listeners=[explore.Trace(sys.argv[1])])
"""


@pytest.fixture
def trace(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "trace.jsonl"


def test_a_killed_caller_leaves_a_trace(trace: Path, sandbox: Sandbox) -> None:
    """Its sandboxes are closed by the engine, and what had happened can be read."""
    state = Path(os.environ["DELTABOX_STATE"]) / "trees"
    before = len(list(state.iterdir()))
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(_KILLED), str(trace)], stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        said = child.stdout.readline()
        child.kill()
        assert said.startswith(b"deep")
    deadline = time.monotonic() + 20
    while len(list(state.iterdir())) > before:
        assert time.monotonic() < deadline, "the tree of the killed search is still there"
        time.sleep(0.05)
    found = list(explore.replay(trace))
    assert isinstance(found[0], explore.Began) and found[0].strategy == "uct"
    assert any(isinstance(event, explore.Stepped) for event in found)
    whole = trace.read_bytes()
    trace.write_bytes(whole[:-5])
    assert list(explore.replay(trace)) == found[:-1]


def test_a_trace_is_what_was_told(
    trace: Path, sandbox: Sandbox, number: Number, events: list[Any]
) -> None:
    file = explore.Trace(trace)
    explore.beam(sandbox, number, width=2, depth=3, listeners=[events.append, file])
    file.close()
    assert list(explore.replay(trace)) == events


def test_an_own_strategy(sandbox: Sandbox, number: Number) -> None:
    def twice(search: explore.Search) -> None:
        (first,) = search.steps([(search.root, "*2")])
        search.steps([(first, "*2"), (first, "+1"), (search.root, "-3")])

    found = explore.explore(sandbox, number, twice)
    assert (found.nodes, found.actions) == (4, ("*2", "*2"))


def test_wrong_use(sandbox: Sandbox) -> None:
    with pytest.raises(ValueError, match="parallel"):
        Budget(parallel=0)
    with pytest.raises(ValueError, match="seconds"):
        Budget(seconds=-1)
