"""The program that runs inside the sandbox and holds a gymnasium environment.

It is sent in, as text, with `_msgpack.py`, `_values.py` and `_spaces.py` (see `_program.py`), so
nothing of DeltaBox has to be installed there. It reads a request, does it, answers, and waits for
the next: between two requests everything is at rest, and nothing is on its way.

Its standard output is no place for answers, because environments print. Before this module is
loaded the pipes have been put aside, and standard output and error lead to a file. Not to a pipe:
nobody reads it while an episode runs, and a full pipe would stop the environment. The file is kept
short here.

Also runs inside: standard library, numpy and gymnasium only, Python 3.9 or later.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from typing import Any, BinaryIO

import gymnasium

from ._msgpack import from_line, pack, to_line, unpack
from ._spaces import described
from ._values import NotData, lift, lower

LOG_MOST, LOG_KEPT = 1 << 20, 1 << 16  # bytes


def main(requests: BinaryIO, answers: BinaryIO) -> None:
    """Serve until there are no more requests, or `close` is one."""
    os.register_at_fork(after_in_child=lambda: _let_go(requests, answers))
    held = Held()
    for line in requests:
        number, name, arguments = unpack(from_line(line))
        try:
            answer = [number, "ok", getattr(held, name)(*lift(arguments))]
        except BaseException as error:  # SystemExit too: what an environment raises is told
            answer = [number, "error", *_told(error)]
        _shorten_log()
        answers.write(to_line(pack(answer)))
        answers.flush()
        if name == "close":
            return


def _let_go(*pipes: BinaryIO) -> None:
    """In a child that the environment forks: what it does must not look like an answer of ours."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for pipe in pipes:
        os.dup2(nothing, pipe.fileno(), inheritable=False)
    os.close(nothing)


def _told(error: BaseException) -> tuple[str, str, str]:
    """The name, text and traceback of an error, below our own frame."""
    kind = type(error)
    name = kind.__qualname__
    if kind.__module__ != "builtins":
        name = f"{kind.__module__}.{name}"
    below = None if error.__traceback__ is None else error.__traceback__.tb_next
    lines = traceback.format_exception(kind, error, below)
    return name, _sendable(str(error)), _sendable("".join(lines))


def _sendable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


def _shorten_log() -> None:
    """Keep the end of what was printed, when it has become too much."""
    sys.stdout.flush()
    size = os.fstat(1).st_size
    if size > LOG_MOST:
        tail = os.pread(1, LOG_KEPT, size - LOG_KEPT)
        os.ftruncate(1, 0)
        os.write(1, tail)  # opened to append


def _found(entry_point: str) -> Any:
    """What "module:name" names."""
    module, _, name = entry_point.partition(":")
    found = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _lowered(**values: Any) -> list[Any]:
    """Several values as one; an error says in which of them it is."""
    data: list[Any] = ["t"]
    for name, value in values.items():
        try:
            data.append(lower(value))
        except NotData as error:
            error.path = f"{name}{error.path}"
            raise
    return data


class Held:
    """The environment. Each method is a request; it returns plain data."""

    env: Any

    def make(
        self,
        id: str | None,
        entry_point: str | None,
        kwargs: dict[str, Any],
        wrappers: list[tuple[str, dict[str, Any]]],
        setup: str | None,
    ) -> Any:
        """Make it, and say all that a client has to know of it."""
        if setup is not None:
            exec(compile(setup, "<setup>", "exec"), sys.modules["__main__"].__dict__)
        env = gymnasium.make(id, **kwargs) if id else _found(str(entry_point))(**kwargs)
        for name, options in wrappers:
            env = _found(name)(env, **options)
        if not isinstance(env, gymnasium.Env):
            raise TypeError(f"{entry_point} has made a {type(env).__name__}, no gymnasium.Env")
        self.env = env
        spec = env.spec
        return lower(
            {
                "action_space": described(env.action_space),
                "observation_space": described(env.observation_space),
                "metadata": dict(env.metadata),
                "render_mode": env.render_mode,
                "spec": None
                if spec is None
                else {
                    "id": spec.id,
                    "reward_threshold": spec.reward_threshold,
                    "nondeterministic": spec.nondeterministic,
                    "max_episode_steps": spec.max_episode_steps,
                },
            }
        )

    def reset(self, seed: int | None, options: dict[str, Any] | None) -> Any:
        observation, info = self.env.reset(seed=seed, options=options)
        return _lowered(observation=observation, info=info)

    def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, info = self.env.step(action)
        return _lowered(
            observation=observation,
            reward=reward,
            terminated=terminated,
            truncated=truncated,
            info=info,
        )

    def render(self) -> Any:
        return lower(self.env.render())

    def call(self, name: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """An attribute of the environment or its wrappers, called if it can be."""
        found = self.env.get_wrapper_attr(name)
        return lower(found(*arguments, **options) if callable(found) else found)

    def nothing(self) -> None:
        """Whoever has the answer knows that all requests before it have been done."""

    def close(self) -> None:
        self.env.close()
