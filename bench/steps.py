"""What a checkpoint at every step costs an agent, and what going back does.

The steps of an agent that works on the demo's library, with a live web server that an earlier step
has left running: look, edit, run a test, look at what has changed. After each one the stand-in for
a model thinks. The trail (src/deltabox/integrations/trail.py) takes a checkpoint meanwhile:

- "a step waits": how long the next command had to wait for it, while the model took its time;
- "a step waits, without thought": the same when the model answers at once, so the whole price;
- "programs stand still": the pause of the checkpoint, at the call or before;
- "back to a step", "a fork of a step": of random steps, to the end of the call.

    python bench/steps.py [--steps N] --json out.json
"""

from __future__ import annotations

import random
import time
from functools import partial
from pathlib import Path

import click
from report import Recorder, Wrong, finish, options

from deltabox import Sandbox
from deltabox.demo import library
from deltabox.demo.search import ROOT
from deltabox.integrations.trail import Trail

STEPS, QUICK_STEPS = 60, 12
THOUGHT = 0.5  # seconds
BACKS, QUICK_BACKS = 30, 6
WITHIN = 300.0

WAITS, AT_ONCE = "a step waits", "a step waits, without thought"
STILL, WHOLE = "programs stand still", "the whole checkpoint"
BACK, FORK = "back to a step", "a fork of a step"

HERE = f"{ROOT}/{library.NAME}"
SERVE = "python3 -m http.server --bind 127.0.0.1 8000 >/dev/null 2>&1 &"
ACTIONS = (
    "grep -rn 'def ' boltons/setutils.py | head -20",
    "echo '# {n}' >> boltons/setutils.py",
    f"PYTHONPATH={ROOT}/site:. python3 -m pytest -q -p no:cacheprovider -k iter {library.JUDGE}",
    "echo {n} >> notes; wc -l notes; ls -la boltons | tail -3",
)


class Agent:
    def __init__(self, recorder: Recorder, steps: int, backs: int) -> None:
        self.recorder = recorder
        self.count = steps
        self.backs = backs

    def do(self, trail: Trail, command: str) -> None:
        run = partial(trail.sandbox.run, ["bash", "-lc", command], cwd=HERE, timeout=60)
        trail.do(command, run)

    def work(self, *, thought: float, waits: str) -> None:
        """All the steps, and what each has waited."""
        with Sandbox.create() as sandbox:
            sandbox.files.mkdir(ROOT)
            sandbox.files.upload(str(library.archive(library.default_cache())), f"{ROOT}/all.tar")
            sandbox.run(f"tar --no-same-owner -xf {ROOT}/all.tar -C {ROOT}", check=True)
            trail = Trail(sandbox)
            self.do(trail, SERVE)
            for n in range(self.count):
                time.sleep(thought)
                self.do(trail, ACTIONS[n % len(ACTIONS)].replace("{n}", str(n)))
            steps = trail.steps
            for step in steps[2:]:  # the first command waits for the first checkpoint, once
                self.recorder.add(waits, step.waited * 1e3)
            if thought:
                for step in steps[2:]:
                    stats = step.checkpoint.stats
                    self.recorder.add(STILL, stats.pause_ms + stats.ahead_ms)
                    self.recorder.add(WHOLE, stats.total_ms)
                self.go_back(trail)
            trail.close()

    def go_back(self, trail: Trail) -> None:
        chance = random.Random(1)
        steps = trail.steps
        for _ in range(self.backs):
            step = chance.choice(steps[2:])
            began = time.perf_counter()
            trail.rollback(step)
            self.recorder.add(BACK, (time.perf_counter() - began) * 1e3)
            self.check(trail, step.number)
            step = chance.choice(steps[2:])
            began = time.perf_counter()
            with trail.fork(step) as other:
                self.recorder.add(FORK, (time.perf_counter() - began) * 1e3)
                self.check(other, step.number)

    def check(self, trail: Trail, number: int) -> None:
        """What the files say, and that the server is there."""
        lines = trail.sandbox.run(f"cat {HERE}/notes 2>/dev/null | wc -l").stdout.strip()
        if int(lines) != (number - 1) // len(ACTIONS):
            raise Wrong(f"after step {number} there are {lines} notes")
        if not any("http.server" in process.cmdline for process in trail.sandbox.processes()):
            raise Wrong(f"after step {number} the server is gone")


@click.command()
@options
@click.option("--steps", type=click.IntRange(min=4), help=f"{STEPS}, or {QUICK_STEPS}.")
def main(*, output: Path | None, quick: bool, budget: float | None, steps: int | None) -> None:
    """Measure an agent's steps."""
    recorder = Recorder("steps", what=__doc__, budget=budget, quick=quick)
    for name in (WAITS, AT_ONCE, STILL, WHOLE, BACK, FORK):
        recorder.expect(name, unit="ms")
    library.fetch(library.default_cache())
    many = steps or (QUICK_STEPS if quick else STEPS)
    agent = Agent(recorder, many, QUICK_BACKS if quick else BACKS)
    recorder.attempt(
        "an agent that thinks", partial(agent.work, thought=THOUGHT, waits=WAITS), limit=WITHIN
    )
    recorder.attempt(
        "an agent that does not", partial(agent.work, thought=0.0, waits=AT_ONCE), limit=WITHIN
    )
    finish(recorder, output)


if __name__ == "__main__":
    main()
