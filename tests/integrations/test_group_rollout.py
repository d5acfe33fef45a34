"""examples/group_rollout.py, as a user calls it."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from click.testing import CliRunner

from deltabox.integrations.gymnasium import LiveEnv

from .conftest import Make, Place

EXAMPLE = Path(__file__).parents[2] / "examples" / "group_rollout.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("group_rollout", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # the module's dataclasses look for it there
    sys.modules["group_rollout"] = module
    spec.loader.exec_module(module)
    return module


def test_it_says_how_it_is_used() -> None:
    said = subprocess.run(
        [sys.executable, str(EXAMPLE), "--help"], check=True, capture_output=True, text=True
    ).stdout
    assert "Usage: group_rollout.py [OPTIONS] [ENVIRONMENT]" in said


@pytest.mark.parametrize("id", ["CartPole-v1", "MountainCarContinuous-v0"])
def test_a_group(
    place: Place, example: ModuleType, monkeypatch: pytest.MonkeyPatch, id: str
) -> None:
    with place.sandbox.fork() as sandbox:
        options = {name: place.options[name] for name in place.options if name != "python"}
        where = partial(LiveEnv, sandbox=sandbox, **options)
        monkeypatch.setattr(example, "LiveEnv", where)
        python = place.options.get("python", sys.executable)
        words = [id, "--python", python, "--horizon", "60"]
        ended = CliRunner().invoke(example.main, words, catch_exceptions=False)
        assert ended.exit_code == 0
        assert sandbox.processes() == []
    assert f"{id}: 16 live forks of one state" in " ".join(ended.output.split())
    rows = re.findall(r"(\d+) │ +(\d+)\+? │ +(-?[\d.]+) │ +([+-][\d.]+)", ended.output)
    assert [int(row[0]) for row in rows] == list(range(1, 17))
    assert len({row[2] for row in rows}) > 1  # each has gone its own way
    assert abs(sum(float(row[3]) for row in rows)) < 0.2


def test_a_group_of_one_policy_has_one_end(make: Make, example: ModuleType) -> None:
    env = make("CartPole-v1")
    observation = example.to_the_middle(env, 8, 1)
    ends = []
    for child in env.fork(3):
        ends.append(example.attempt(child, observation, 40, 5))
        child.close()
    assert len(set(ends)) == 1
    assert example.advantages([one.reward for one in ends]) == [0, 0, 0]
    assert np.isclose(example.advantages([1, 2, 3])[2], np.sqrt(1.5))
