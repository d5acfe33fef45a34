"""A sandbox with gymnasium and environments in it, of which each test has a fork."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from deltabox import KeepReachable, Sandbox
from deltabox.integrations.gymnasium import LiveEnv

from ..tools.packages import ENVIRONMENT, PYTHON, install

OURS = "/opt/live"  # where environments.py lies inside
PACKAGES = ("gymnasium", "ale-py", "box2d", "pygame-ce")


class Place:
    """A sandbox, and how an environment is started there."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox
        self._added: set[str] = set()
        sandbox.files.mkdir(OURS)
        sandbox.files.upload(
            str(Path(__file__).with_name("environments.py")), f"{OURS}/environments.py"
        )
        self.options: dict[str, Any] = {"cwd": OURS}
        if not self._sees(PACKAGES[0]):  # our own environment: it may lie below /tmp
            install(sandbox, *PACKAGES)
            self.options |= {"python": PYTHON, "env": ENVIRONMENT}

    def _sees(self, package: str) -> bool:
        try:
            return self.sandbox.run([sys.executable, "-c", f"import {package}"]).exit_code == 0
        except FileNotFoundError:
            return False

    def add(self, *packages: str) -> None:
        """Have these as well, in what is made from now on."""
        missing = set(packages) - self._added
        if missing and "python" in self.options:
            install(self.sandbox, *missing)
        self._added |= missing


Make = Callable[..., LiveEnv]


@pytest.fixture(scope="session")
def place() -> Iterator[Place]:
    with Sandbox.create(keep=KeepReachable()) as sandbox:
        yield Place(sandbox)


@pytest.fixture(scope="session")
def first(place: Place) -> Iterator[Make]:
    """A new environment in a sandbox of its own, which lasts until the end of all tests."""
    with ExitStack() as opened:

        def made(id: str | None, **options: Any) -> LiveEnv:
            sandbox = opened.enter_context(place.sandbox.fork())
            return LiveEnv(id, sandbox=sandbox, **(place.options | options))

        yield made


_made: dict[str, LiveEnv] = {}  # by what they were made of


@pytest.fixture
def make(first: Make, place: Place) -> Iterator[Make]:
    """Makes a LiveEnv that nobody has used: a fork of one, because that is faster than a start.

    With `sandbox=` a really new one, in that.
    """
    with ExitStack() as opened:

        def made(id: str | None = None, /, **options: Any) -> LiveEnv:
            if "sandbox" in options:
                env = LiveEnv(id, **(place.options | options))
            else:
                key = repr((id, options))
                if key not in _made:
                    _made[key] = first(id, **options)
                env = _made[key].fork()[0]
            opened.callback(env.close)
            return env

        yield made
