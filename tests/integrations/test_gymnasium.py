"""LiveEnv: what gymnasium demands of an environment, and states that come back bit for bit."""

from __future__ import annotations

import copy
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import gymnasium
import msgspec
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import SyncVectorEnv
from gymnasium.wrappers import TimeLimit

from deltabox import Sandbox, UnknownCheckpoint
from deltabox.integrations import gymnasium as integration
from deltabox.integrations._values import lower
from deltabox.integrations.gymnasium import LiveEnv, LiveState

from .conftest import Make, Place

STEPS = 5
CARTPOLE = "CartPole-v1"
ATARI = "ale_py:ALE/Breakout-v5"  # which repeats actions at random
PHYSICS = "BipedalWalker-v3"


def bits(value: Any) -> bytes:
    """All of a value, to the last bit and type."""
    return msgspec.msgpack.encode(lower(value))


def play(env: Any, steps: int = STEPS) -> list[bytes]:
    """What the environment says to actions that its own space draws; frames too, if it has any."""
    said = []
    for _ in range(steps):
        said.append(bits(env.step(env.action_space.sample())))
        if env.render_mode is not None:
            said.append(bits(env.render()))
    said.append(bits((env.np_random.random(), env.np_random_seed)))
    return said


def midway(env: LiveEnv, steps: int = 10) -> LiveEnv:
    """In the middle of an episode."""
    env.action_space.seed(5)
    env.reset(seed=7)
    for _ in range(steps):
        env.step(env.action_space.sample())
    return env


# -- an environment as any other --------------------------------------------------------------


def test_the_checker_is_content_with_cartpole(make: Make) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # CartPole's own speeds are without bounds
        warnings.filterwarnings("ignore", message=".*Box observation space m.*imum value is")
        check_env(make(CARTPOLE))


def test_the_checker_is_content_with_atari(make: Make) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(make(ATARI, render_mode="rgb_array"))


def test_it_says_the_same_as_outside_of_a_sandbox(make: Make) -> None:
    here = gymnasium.make(ATARI)
    there = make(ATARI)
    assert there.observation_space == here.observation_space
    assert there.action_space == here.action_space
    assert here.spec is not None and there.spec is not None
    assert there.spec.max_episode_steps == here.spec.max_episode_steps
    assert there.metadata["render_fps"] == here.metadata["render_fps"]
    assert "human" not in there.metadata["render_modes"]
    assert str(there) == "<LiveEnv<ALE/Breakout-v5>>"
    assert bits(there.reset(seed=3)) == bits(here.reset(seed=3))
    for _ in range(STEPS):
        action = here.action_space.sample()
        assert bits(there.step(action)) == bits(here.step(action))
    here.close()


def test_nested_observations_and_odd_infos(make: Make) -> None:
    env = make(entry_point="environments:Nested")
    observation, info = env.reset(seed=1, options={"a": [1, (2.5, None)]})
    assert observation in env.observation_space
    assert info == {"options": {"a": [1, (2.5, None)]}}
    said: Any = env.step(env.action_space.sample())
    observation, info = said[0], said[4]
    assert observation in env.observation_space
    assert info[1, "key"] == {"set", 2}
    assert info["big"] == 1 << 200
    assert type(info["numpy"]) is np.float32 and info["numpy"] == np.float32(0.1)
    assert info["when"] == np.datetime64("2024-01-01")
    assert list(info["names"]) == ["a", "\N{SNOWMAN}"]
    assert np.isnan(info["nan"])
    assert info["complex"] == 1 + 2j


def test_its_own_sandbox_comes_and_goes_with_it(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Sandbox] = []

    def create(**_: Any) -> Sandbox:
        made.append(place.sandbox.fork())
        return made[-1]

    monkeypatch.setattr(Sandbox, "create", create)
    with LiveEnv(CARTPOLE, **place.options) as env:
        env.reset(seed=1)
        assert not env.sandbox.closed
    with pytest.raises(integration.EnvironmentFailed):
        LiveEnv("Nothing-v0", **place.options)
    assert [one.closed for one in made] == [True, True]


def test_code_and_wrappers_inside(make: Make) -> None:
    env = make(
        entry_point="__main__:make",
        setup="def make(**options):\n    import gymnasium\n"
        "    return gymnasium.make('CartPole-v1', **options)",
        wrappers=[
            ("gymnasium.wrappers:TimeLimit", {"max_episode_steps": 4}),
            "gymnasium.wrappers:RecordEpisodeStatistics",
        ],
    )
    env.reset(seed=1)
    env.step(0)
    state = env.clone_state()
    for _ in range(2):  # the wrappers have counted one step again, both times
        ends = [env.step(action)[3:] for action in (0, 1, 0)]
        assert [truncated for truncated, _ in ends] == [False, False, True]
        assert ends[-1][1]["episode"]["l"] == 4
        env.restore_state(state)
    assert env.call("get_wrapper_attr", "_elapsed_steps") == 1
    assert env.call("x_threshold") == 2.4


# -- states -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("id", "returns"),
    [
        (CARTPOLE, 100),
        (ATARI, 10),
        (PHYSICS, 10),
        pytest.param(ATARI, 100, marks=pytest.mark.full),
        pytest.param(PHYSICS, 100, marks=pytest.mark.full),
    ],
)
def test_every_return_goes_on_in_the_same_way(make: Make, id: str, returns: int) -> None:
    frames = {"render_mode": "rgb_array"} if id == ATARI else {}
    returns_alike(midway(make(id, **frames)), returns)


@pytest.mark.full
@pytest.mark.parametrize("id", ["Humanoid-v5", "HalfCheetah-v5"])
def test_every_return_of_mujoco_goes_on_in_the_same_way(place: Place, make: Make, id: str) -> None:
    place.add("mujoco", "imageio")
    returns_alike(midway(make(id)), 100)


def returns_alike(env: LiveEnv, returns: int) -> None:
    state = env.clone_state()
    expected = play(env)
    for _ in range(returns):
        env.restore_state(state)
        assert play(env) == expected
    children = env.fork(2, at=state)
    assert [play(child) for child in children] == [expected] * 2
    for child in children:
        child.close()


def test_back_from_the_end_and_from_another_episode(make: Make) -> None:
    env = midway(make(CARTPOLE))
    state = env.clone_state()
    expected = play(env)
    env.restore_state(state)
    while not env.step(0)[2]:
        pass
    env.restore_state(state)
    assert play(env) == expected
    env.reset(seed=99)
    env.action_space.seed(3)
    assert play(env) != expected
    env.restore_state(state)
    assert play(env) == expected


def test_forks_of_forks_go_their_own_way(make: Make) -> None:
    env = midway(make(CARTPOLE))
    first, second = env.fork(2)
    third = first.fork()[0]
    expected = play(env)
    assert play(first) == expected
    assert play(third) == expected
    second.action_space.seed(1)
    assert play(second) != expected
    deep = third.clone_state()
    after = play(third)
    first.restore_state(deep)  # a state of its own fork
    assert play(first) == after
    for child in (first, second, third):
        child.close()
        assert child.sandbox.closed
    assert not env.sandbox.closed


def test_a_simulator_that_is_a_process_with_a_file(make: Make) -> None:
    env = make(entry_point="environments:Accounts")
    env.reset(seed=1)
    for action in (1, 2):
        *_, info = env.step(action)
    assert info["book"] == "1\n3\n"
    state = env.clone_state()
    for _ in range(3):
        observation, *_, after = env.step(7)
        assert after == {"book": "1\n3\n10\n", "pid": info["pid"]}
        assert list(observation) == [3, 10]  # a step and a sum, of two processes
        env.restore_state(state)
    with env.fork()[0] as child:
        child.step(5)
        assert child.step(5)[4]["book"] == "1\n3\n8\n13\n"
    assert env.step(1)[4]["book"] == "1\n3\n4\n"


def test_what_the_client_remembers_goes_back_too(make: Make) -> None:
    env = make(entry_point="environments:Nested")
    env.reset(seed=4)
    env.action_space.seed(1)
    env.observation_space.seed(2)

    def drawn() -> bytes:
        inner = env.observation_space
        return bits((env.action_space.sample(), inner.sample(), env.np_random.random()))

    drawn()
    state = env.clone_state()
    expected = drawn()
    child = env.fork(at=state)[0]
    env.reset(seed=5)
    env.observation_space.seed(9)
    env.restore_state(state)
    assert (drawn(), env.np_random_seed) == (expected, 4)
    assert bits(child.observation_space.sample()) != bits(env.observation_space.sample())
    child.close()


def test_a_deep_copy_is_a_fork_with_its_wrappers(make: Make) -> None:
    env: Any = TimeLimit(midway(make(CARTPOLE)), 30)
    env.reset(seed=1)
    env.step(0)
    with copy.deepcopy(env) as twin:
        assert isinstance(twin.unwrapped, LiveEnv)
        assert twin._elapsed_steps == 1
        assert play(twin) == play(env)
    with pytest.raises(TypeError):
        copy.copy(env.unwrapped)


def test_another_one_of_the_same_kind(place: Place, make: Make) -> None:
    with place.sandbox.fork() as sandbox:
        env = make(CARTPOLE, sandbox=sandbox, max_episode_steps=7)
        with env.fork()[0] as child:
            for one in (env, child):
                assert one.spec is not None
                with one.spec.make() as again:
                    live = again.unwrapped
                    assert isinstance(live, LiveEnv)
                    assert live.sandbox is one.sandbox
                    assert again.reset(seed=1)[0] in live.observation_space
                assert len(one.sandbox.processes()) == 1


def test_forks_as_a_vector(make: Make) -> None:
    env = midway(make(CARTPOLE))
    vector = SyncVectorEnv([partial(lambda one: one, child) for child in env.fork(3)])
    observations, rewards, *_ = vector.step(np.array([0, 1, 0]))
    assert np.array_equal(observations[0], observations[2])
    assert not np.array_equal(observations[0], observations[1])
    assert np.array_equal(observations[0], env.step(0)[0])
    assert list(rewards) == [1, 1, 1]
    vector.close()


def test_forks_in_threads(make: Make) -> None:
    env = midway(make(CARTPOLE))
    state = env.clone_state()
    expected = play(env)
    children = env.fork(3, at=state)
    with ThreadPoolExecutor() as threads:
        assert list(threads.map(play, children)) == [expected] * 3
        # one environment in several threads: its calls wait for each other
        states = list(threads.map(lambda _: env.clone_state(), range(4)))
    after = play(env)
    for one in states:
        env.restore_state(one)
        assert play(env) == after
    for child in children:
        child.close()


def test_states_are_freed_with_their_objects(make: Make) -> None:
    env = midway(make(CARTPOLE))
    state = env.clone_state()
    env.step(0)
    kept = env.clone_state().checkpoint.id
    env.restore_state(state)
    assert kept not in [one.id for one in env.sandbox.checkpoints]


def test_states_of_others_are_refused(make: Make) -> None:
    env = midway(make(CARTPOLE))
    neighbour = make(CARTPOLE, sandbox=env.sandbox)
    expected = play(env.fork()[0])
    state = env.clone_state()
    with pytest.raises(ValueError, match="of another environment than CartPole-v1"):
        neighbour.restore_state(state)
    with pytest.raises(TypeError, match=r"what clone_state\(\) returns, not int"):
        env.restore_state(3)  # type: ignore[arg-type]
    gone = env.clone_state()
    gone.checkpoint.delete()
    with pytest.raises(UnknownCheckpoint):
        env.restore_state(gone)
    with pytest.raises(UnknownCheckpoint):
        env.fork(2, at=gone)
    assert isinstance(state, LiveState)
    assert play(env) == expected


def test_without_gymnasium() -> None:
    program = "import sys; sys.modules['gymnasium'] = None; import deltabox.integrations.gymnasium"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.stderr.strip().endswith(
        "ImportError: deltabox.integrations.gymnasium needs gymnasium: "
        "pip install 'deltabox[gymnasium]'"
    )
