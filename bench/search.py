"""What a search costs besides its model and its actions, and how far it gets in the same time
without going back in time.

UCT over the repairs of the demo's library (docs/explore.md): each action edits a file, has a live
Python process take the edit over, and tells a live shell; the score is the share of the library's
own tests that pass. The model is a stand-in that thinks for 1 to 3 seconds about each state. One
lane, so that the time is the sum of model, actions and what is ours:

- "of our own, a node": (all the time - model - actions and scores) / nodes;
- "total : model and actions": what is left to gain.

The rival has the same model, the same actions and the same scores in the same order. To be in the
state that an action starts from it copies the files and runs everything again, as the demo's does
(src/deltabox/demo/rival.py): measured for each node, without a sandbox, and without the tests on
the way. "nodes in the same time" is how many it gets done until our search has ended.

    python bench/search.py [--expansions N] --json out.json [--picture docs/search.svg]
"""

from __future__ import annotations

import random
import re
import tempfile
import threading
import time
from functools import partial
from pathlib import Path

import click
from report import Recorder, Wrong, finish, options

from deltabox import KeepReachable, Sandbox, explore
from deltabox.demo import library, live, rival
from deltabox.demo.proposals import FILE, INDICES, SLICES, Proposal, next_proposals
from deltabox.demo.search import ROOT, ask
from deltabox.explore import State

EXPANSIONS, QUICK_EXPANSIONS = 60, 10
THOUGHT = (1.0, 3.0)  # seconds
QUICK_THOUGHT = (0.1, 0.3)
DEPTH = 6
PATH = f"{ROOT}/boltons/{FILE}"
WITHIN = 600.0

# what does no harm and no good: a model proposes such things, too
_CLASS = "class IndexedSet(MutableSet):\n"
NOTES = tuple(
    Proposal(f"note_{what}", f"a note about {what}", _CLASS, f"# to be looked at: {what}\n{_CLASS}")
    for what in ("slices", "indices", "deletion")
)

OVERHEAD = "of our own, a node"
RATIO = "total : model and actions"
CURVE = "search"


class Repair:
    """The demo's library, with a live shell and a live Python process."""

    def __init__(self, sandbox: Sandbox, thought: tuple[float, float]) -> None:
        sandbox.files.mkdir(ROOT)
        sandbox.files.upload(str(library.archive(library.default_cache())), f"{ROOT}/all.tar")
        sandbox.run(f"tar --no-same-owner -xf {ROOT}/all.tar -C {ROOT}", check=True)
        self._shell = sandbox.shell()
        self._shell.run(live.SHELL.format(root=ROOT))
        command = ["python3", "-B", "-u", "-c", live.DRIVER]
        self._python = sandbox.spawn(command, cwd=f"{ROOT}/boltons")
        ask(self._python, live.BUILD)
        self._chance = random.Random(1)
        self._lock = threading.Lock()
        self._thought = thought

    def propose(self, state: State) -> tuple[Proposal, ...]:
        text = state.files.read_text(PATH)  # it looks first, and thinks then
        with self._lock:
            seconds = self._chance.uniform(*self._thought)
        time.sleep(seconds)
        possible = (*next_proposals(state.actions), *NOTES)
        new = (action for action in possible if action not in state.actions)
        return tuple(action for action in new if action.apply(text) is not None)

    def apply(self, state: State, action: Proposal) -> None:
        edited = action.apply(state.sandbox.files.read_text(PATH))
        if edited is None:
            raise ValueError("another change has taken its place")
        state.sandbox.files.write_text(PATH, edited)
        ask(state.counterpart(self._python), live.TAKE_OVER)
        state.counterpart(self._shell).run(f'tried="$tried {action.name}"')

    def score(self, state: State) -> float:
        shell = state.counterpart(self._shell)
        tried = shell.run("echo $tried").stdout.split()
        if tried != [action.name for action in state.actions]:
            raise Wrong(f"a state of {state.actions} says it is of {tried}")
        last = shell.run(f"judge {library.JUDGE}").stdout.strip().rpartition("\n")[2]
        counts = {what: int(count) for count, what in re.findall(r"(\d+) (passed|failed)", last)}
        return counts.get("passed", 0) / max(1, sum(counts.values()))


class Comparison:
    def __init__(self, recorder: Recorder, expansions: int, thought: tuple[float, float]) -> None:
        self.recorder = recorder
        self.expansions = expansions
        self.thought = thought
        self.events: list[explore.AnyEvent] = []
        self.found: explore.Found | None = None

    def search(self) -> None:
        with Sandbox.create(keep=KeepReachable()) as sandbox:
            problem = Repair(sandbox, self.thought)
            budget = explore.Budget(expansions=self.expansions, parallel=1)
            # what any search of this sandbox has to do once, and none of its nodes
            sandbox.checkpoint()
            self.found = explore.uct(
                sandbox, problem, depth=DEPTH, budget=budget, listeners=[self.events.append]
            )
        model = sum(e.seconds for e in self.events if isinstance(e, explore.Proposed))
        steps = [e for e in self.events if isinstance(e, explore.Stepped)]
        acted = sum(e.apply + e.scoring for e in steps)
        total = self.events[-1].at
        own = total - model - acted
        self.recorder.add(OVERHEAD, own * 1e3 / self.found.nodes)
        self.recorder.add(RATIO, total / (model + acted))
        self.recorder.add("the whole search", total)
        self.recorder.add("nodes", float(self.found.nodes))
        for event in steps:
            self.recorder.add("back to a state", event.overhead * 1e3)
        for count, event in enumerate(steps, 1):
            self.recorder.add(f"{CURVE}: with checkpoints", event.at, x=count)
        best = " ".join(action.name for action in self.found.actions)
        self.recorder.note(f"best of {self.found.nodes} nodes: {best}, {self.found.score:.3f}")

    def rival(self) -> None:
        """The same search, step by step, with what it has to do instead of a rollback."""
        assert self.found is not None
        end = self.events[-1].at
        elapsed, done = 0.0, 0
        paths: dict[int, tuple[Proposal, ...]] = {0: ()}
        known = {proposal.name: proposal for proposal in (*SLICES, *INDICES, *NOTES)}
        with tempfile.TemporaryDirectory(prefix="deltabox-search-") as directory:
            pristine = Path(directory) / "pristine"
            library.unpack(library.archive(library.default_cache()), pristine)
            for event in self.events:
                if isinstance(event, explore.Proposed):
                    elapsed += event.seconds
                elif isinstance(event, explore.Stepped):
                    name = re.search(r"name='(\w+)'", str(event.action))
                    assert name is not None
                    parent = paths[event.parent]
                    paths[event.node] = (*parent, known[name[1]])
                    again = rival.measure(pristine, Path(directory), parent)
                    self.recorder.add("copy and re-execution, for a state", again * 1e3)
                    elapsed += again + event.apply + event.scoring
                    done += elapsed <= end
                    count = len(paths) - 1
                    self.recorder.add(f"{CURVE}: copy and re-execution", elapsed, x=count)
        self.recorder.add("the same by copy and re-execution", elapsed)
        self.recorder.add("nodes in the same time", float(done))


@click.command()
@options
@click.option("--expansions", type=click.IntRange(min=1), help="Of the search; 60, or 10.")
@click.option("--picture", type=click.Path(dir_okay=False, path_type=Path), help="Of the curve.")
def main(
    *,
    output: Path | None,
    quick: bool,
    budget: float | None,
    expansions: int | None,
    picture: Path | None,
) -> None:
    """Measure a search."""
    recorder = Recorder("search", what=__doc__, budget=budget, quick=quick)
    recorder.expect(OVERHEAD, unit="ms", goal=5.0)
    recorder.expect(RATIO, unit="times", goal=1.01)
    for name in ("the whole search", "the same by copy and re-execution"):
        recorder.expect(name, unit="s")
    for name in ("nodes", "nodes in the same time"):
        recorder.expect(name, unit="nodes")
    recorder.curve(CURVE, title="A search", x="nodes", log_x=False, log_y=False)
    for name in ("with checkpoints", "copy and re-execution"):
        recorder.expect(f"{CURVE}: {name}", unit="s", curve=CURVE)
    library.fetch(library.default_cache())
    many = expansions or (QUICK_EXPANSIONS if quick else EXPANSIONS)
    comparison = Comparison(recorder, many, QUICK_THOUGHT if quick else THOUGHT)
    if recorder.attempt("the search", comparison.search, limit=WITHIN):
        recorder.attempt("its rival", partial(comparison.rival), limit=WITHIN)
    finish(recorder, output)
    if picture is not None:
        from pictures import draw  # which is slow to import, and not always there

        draw(recorder.report(), CURVE, picture)


if __name__ == "__main__":
    main()
