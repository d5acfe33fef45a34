"""A group rollout: many ends of one and the same beginning, and which of them were better.

Methods that compare a group of attempts, such as GRPO, need them to start from the same state. Here
that is the middle of an episode: it is played once, forked into a group of live environments, and
each of these goes on with a policy of its own. What an attempt got beyond the group's mean, in
standard deviations, is its advantage, the weight that a learner would give it.

    pip install 'deltabox[gymnasium]'
    python examples/group_rollout.py
    python examples/group_rollout.py MountainCarContinuous-v0 --horizon 100
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import click
import numpy as np
from gymnasium import spaces
from gymnasium.spaces.utils import flatdim, flatten
from rich.console import Console
from rich.table import Table

from deltabox import DeltaBoxError
from deltabox.integrations.gymnasium import LiveEnv

AT_LEAST_ONE = click.IntRange(min=1)


@dataclass(frozen=True)
class Attempt:
    """How one of the group went on."""

    reward: float
    steps: int
    ended: bool  # by the environment, not by the horizon


class Policy:
    """A linear policy whose weights are noise, so that each of a group does something else.

    For one action out of several, or for a vector of numbers; in any other space it draws one.
    """

    def __init__(self, env: LiveEnv, seed: int) -> None:
        self._seen, self._done = env.observation_space, env.action_space
        self._done.seed(seed)
        outputs = self._done.n if isinstance(self._done, spaces.Discrete) else flatdim(self._done)
        shape = int(outputs), flatdim(self._seen)
        self._weights = np.random.default_rng(seed).normal(size=shape)

    def __call__(self, observation: Any) -> Any:
        """The action to take."""
        said = self._weights @ np.asarray(flatten(self._seen, observation))
        if isinstance(self._done, spaces.Discrete):
            return self._done.start + np.argmax(said)
        if isinstance(self._done, spaces.Box):
            return np.clip(
                said.reshape(self._done.shape).astype(self._done.dtype),
                self._done.low,
                self._done.high,
            )
        return self._done.sample()


def to_the_middle(env: LiveEnv, steps: int, seed: int) -> Any:
    """Play at random, but not to the end of the episode: the last observation."""
    env.action_space.seed(seed)
    observation, _ = env.reset(seed=seed)
    for _ in range(steps):
        observation, _, terminated, truncated, _ = env.step(env.action_space.sample())
        if terminated or truncated:
            return to_the_middle(env, steps // 2, seed + 1)
    return observation


def attempt(env: LiveEnv, observation: Any, horizon: int, seed: int) -> Attempt:
    """Go on from here with a policy of one's own."""
    policy = Policy(env, seed)
    reward = 0.0
    for step in range(1, horizon + 1):
        observation, gained, terminated, truncated, _ = env.step(policy(observation))
        reward += float(gained)
        if terminated or truncated:
            return Attempt(reward, step, True)
    return Attempt(reward, horizon, False)


def group(
    env: LiveEnv, observation: Any, *, size: int, horizon: int, seed: int
) -> tuple[list[Attempt], float]:
    """Fork the present state, have all forks go on at once: the attempts, the seconds to fork."""
    began = time.perf_counter()
    children = env.fork(size)
    forked = time.perf_counter() - began
    try:
        with ThreadPoolExecutor(size) as threads:
            waiting = [
                threads.submit(attempt, child, observation, horizon, seed + number)
                for number, child in enumerate(children, 1)
            ]
            return [one.result() for one in waiting], forked
    finally:
        for child in children:
            child.close()


def advantages(rewards: list[float]) -> list[float]:
    """What each got beyond the mean, in standard deviations of the group."""
    deviation = float(np.std(rewards))
    if not deviation:
        return [0.0] * len(rewards)
    return [(reward - float(np.mean(rewards))) / deviation for reward in rewards]


def table(title: str, attempts: list[Attempt]) -> Table:
    """The group as a table."""
    rewards = [one.reward for one in attempts]
    shown = Table(
        title=title,
        caption=f"mean reward {np.mean(rewards):.2f}, standard deviation {np.std(rewards):.2f}",
    )
    for column in ("child", "steps", "reward", "advantage"):
        shown.add_column(column, justify="right")
    for number, (one, advantage) in enumerate(zip(attempts, advantages(rewards), strict=True), 1):
        steps = f"{one.steps}" if one.ended else f"{one.steps}+"
        shown.add_row(f"{number}", steps, f"{one.reward:.2f}", f"{advantage:+.2f}")
    return shown


@click.command()
@click.argument("environment", default="CartPole-v1")
@click.option("--children", type=AT_LEAST_ONE, default=16, show_default=True, help="Attempts.")
@click.option(
    "--before",
    type=click.IntRange(min=0),
    default=8,
    show_default=True,
    help="Steps before the fork.",
)
@click.option(
    "--horizon", type=AT_LEAST_ONE, default=200, show_default=True, help="Most steps of an attempt."
)
@click.option("--seed", default=1, show_default=True, help="Of the episode and the policies.")
@click.option("--python", help="The Python inside, with gymnasium; by default this one.")
def main(
    *, environment: str, children: int, before: int, horizon: int, seed: int, python: str | None
) -> None:
    """Fork the middle of an episode of ENVIRONMENT into a group, and compare how they go on."""
    try:
        with LiveEnv(environment, python=python) as env:
            observation = to_the_middle(env, before, seed)
            attempts, forked = group(env, observation, size=children, horizon=horizon, seed=seed)
    except (DeltaBoxError, FileNotFoundError, ModuleNotFoundError) as error:
        raise click.ClickException(str(error)) from error
    title = f"{environment}: {children} live forks of one state, made in {forked * 1e3:.0f} ms"
    Console().print(table(title, attempts))


if __name__ == "__main__":
    main()
