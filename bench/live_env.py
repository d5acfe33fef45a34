"""Gymnasium environments that go back in time: what a state, a way back and a fork cost.

For each environment: one step's round trip; `clone_state` after a step; `restore_state`, and that
with the step after it, when a restored process first touches its memory; `fork(8)` until each of
the eight has done a step. *Idle* leaves 150 ms before each, as a model that thinks does; *back to
back* leaves nothing. Each return is checked: the step after it must say the same.

    python bench/live_env.py [--python PATH] [--json out.json] [ENVIRONMENT ...]

`--python` is one inside a sandbox that has the environments; by default the one that runs this.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import click
import msgspec
from report import Recorder, Wrong, finish, options

from deltabox.integrations._values import lower
from deltabox.integrations.gymnasium import LiveEnv

ENVIRONMENTS = ("CartPole-v1", "ale_py:ALE/Breakout-v5", "HalfCheetah-v5")
IDLE = 0.15  # seconds
TURNS, QUICK_TURNS = 40, 5
CHILDREN = 8
BEFORE = 20  # steps until the middle of an episode


class Timed:
    """An environment in the middle of an episode, and the rounds."""

    def __init__(self, recorder: Recorder, env: LiveEnv, title: str) -> None:
        self.recorder = recorder
        self.env = env
        self.title = title
        env.action_space.seed(1)
        env.reset(seed=1)
        for _ in range(BEFORE):
            if any(env.step(env.action_space.sample())[2:4]):
                env.reset()
        self.action = env.action_space.sample()
        self.state = env.clone_state()
        self.expected = self.step(env)

    def add(self, name: str, began: float) -> None:
        self.recorder.add(f"{self.title}: {name}", (time.perf_counter() - began) * 1e3)

    def step(self, env: LiveEnv) -> bytes:
        said: Any = env.step(self.action)
        return msgspec.msgpack.encode(lower(said))

    def check(self, said: bytes) -> None:
        if said != self.expected:
            raise Wrong("the environment has gone on in another way")

    def rounds(self, turns: int, how: str, idle: float) -> None:
        for _ in range(turns):
            time.sleep(idle)
            began = time.perf_counter()
            self.env.restore_state(self.state)
            self.add(f"restore_state, {how}", began)
            self.check(self.step(self.env))
            self.add(f"restore_state and a step, {how}", began)
            began = time.perf_counter()
            self.env.step(self.action)
            self.add("the step after that", began)
            time.sleep(idle)
            began = time.perf_counter()
            self.env.clone_state()
            self.add(f"clone_state, {how}", began)

    def steps(self, turns: int) -> None:
        for _ in range(10 * turns):
            began = time.perf_counter()
            ended = any(self.env.step(self.action)[2:4])
            self.add("step", began)
            if ended:
                self.env.reset()

    def forks(self, turns: int) -> None:
        for _ in range(turns):
            time.sleep(IDLE)
            began = time.perf_counter()
            children = self.env.fork(CHILDREN, at=self.state)
            try:
                self.add(f"fork({CHILDREN})", began)
                for child in children:
                    self.check(self.step(child))
                self.add(f"fork({CHILDREN}) and a step of each", began)
            finally:
                for child in children:
                    child.close()


def measure(recorder: Recorder, name: str, python: str | None, turns: int) -> None:
    with LiveEnv(name, python=python) as env:
        timed = Timed(recorder, env, env.spec.name if env.spec is not None else name)
        timed.steps(turns)
        timed.rounds(turns, "idle", IDLE)
        timed.rounds(turns, "back to back", 0.0)
        timed.forks(turns)


@click.command()
@options
@click.option("--python", help="The Python inside, with the environments.")
@click.argument("environments", nargs=-1)
def main(
    *,
    output: Path | None,
    quick: bool,
    budget: float | None,
    python: str | None,
    environments: tuple[str, ...],
) -> None:
    """Measure environments: CartPole, Breakout and HalfCheetah, or those that are named."""
    recorder = Recorder("live_env", what=__doc__, budget=budget, quick=quick)
    turns = QUICK_TURNS if quick else TURNS
    for name in environments or ENVIRONMENTS:
        recorder.attempt(name, partial(measure, recorder, name, python, turns))
    finish(recorder, output)


if __name__ == "__main__":
    main()
