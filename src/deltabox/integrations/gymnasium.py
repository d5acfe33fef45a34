"""A gymnasium environment that goes back in time, whatever it is made of.

Searches over environments (MCTS, Go-Explore, group rollouts) need `clone_state` and
`restore_state`, which Atari has and most others have not: a `copy.deepcopy` stops at the first
object of C, and a simulator that is another process is out of its reach. Here the environment lives
in a process of a sandbox, and its state is a checkpoint of that: memory, threads, subprocesses and
files, without anything asked of the environment.

The environment is a program inside that answers requests (`_program.py`, `_environment.py`); this
class is its client. What a client remembers itself are generators of random numbers, its own and
those of its spaces; they go back with the environment.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from sys import executable
from typing import Any, NoReturn

try:
    import gymnasium
except ImportError as error:
    raise ImportError(
        "deltabox.integrations.gymnasium needs gymnasium: pip install 'deltabox[gymnasium]'"
    ) from error

import numpy as np
from gymnasium.envs.registration import EnvSpec
from gymnasium.error import ClosedEnvironmentError

from .._arguments import seconds
from .._connection import no_copies
from ..checkpoint import Checkpoint
from ..process import BytesProcess
from ..retention import KeepReachable
from ..sandbox import Sandbox
from ._program import EnvironmentDied, EnvironmentFailed, Program
from ._spaces import built, parts
from ._values import NotData

__all__ = ["EnvironmentDied", "EnvironmentFailed", "LiveEnv", "LiveState", "NotData"]

Wrapper = str | tuple[str, Mapping[str, Any]]


@dataclass(frozen=True)
class _Chance:
    """The generators of random numbers that the client has, as they were."""

    own: np.random.Generator | None
    seed: int | None
    of_spaces: tuple[np.random.Generator | None, ...]


@dataclass(frozen=True, eq=False)
class LiveState:
    """What `LiveEnv.clone_state` returns: a whole environment at one instant.

    `checkpoint` is that of its sandbox. Of a sandbox that the environment has made itself it is
    freed with the last object that stands for it; of another one when that one's policy says so
    (`Sandbox.keep`), or with `checkpoint.delete()`.
    """

    checkpoint: Checkpoint
    _process: BytesProcess
    _chance: _Chance

    def __repr__(self) -> str:
        return f"<LiveState {self.checkpoint.name or self.checkpoint.id}>"


class LiveEnv(gymnasium.Env[Any, Any]):
    """An environment in a sandbox, with `clone_state`, `restore_state` and `fork`.

    >>> with LiveEnv("CartPole-v1") as env:                     # doctest: +SKIP
    ...     env.reset(seed=1)
    ...     env.step(0)
    ...     state = env.clone_state()
    ...     env.step(1)
    ...     env.restore_state(state)
    ...     children = env.fork(16)

    id: what `gymnasium.make` takes inside: a name, or "module:name".
    entry_point: instead of an id, "module:callable": what makes the environment, a class or a
        function. `"__main__:name"` is what `setup` has defined.
    sandbox: where it is to live. It belongs to the caller: `close` ends the environment only, but
        `restore_state` takes back everything in it. By default one is made and closed with it.
    python: the Python inside, with gymnasium and numpy; by default this one's path.
    env: variables for it, added to a small clean environment.
    cwd: the directory inside that it runs in, and imports from.
    setup: Python code that is run inside first, such as `"import ale_py"`.
    wrappers: wrappers put around the environment *inside*, the innermost first, so that what they
        count goes back, too: `"gymnasium.wrappers:RecordEpisodeStatistics"`, or a pair of that and
        a dict of options.
    timeout: seconds that the environment may take for one call; then `CommandTimeout` is raised.
        By default as long as it wants.
    kwargs: for the environment, `render_mode` among them.

    Raises `FileNotFoundError` and `ModuleNotFoundError` when there is no such Python inside, or no
    gymnasium for it, `EnvironmentFailed` for what the environment raises, `NotData` for arguments
    that cannot be told, and what `Sandbox.create` raises. All methods but `close` wait for each
    other; after `close` they raise `gymnasium.error.ClosedEnvironmentError`.
    """

    def __init__(
        self,
        id: str | None = None,
        /,
        *,
        entry_point: str | None = None,
        sandbox: Sandbox | None = None,
        python: str | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str = "/",
        setup: str | None = None,
        wrappers: Sequence[Wrapper] = (),
        timeout: float | None = None,
        **kwargs: Any,
    ) -> None:
        if (id is None) == (entry_point is None):
            raise TypeError("LiveEnv() takes either an id or an entry_point")
        if entry_point is not None and not all(entry_point.partition(":")):
            raise ValueError(f"an entry point is written 'module:callable', not {entry_point!r}")
        if kwargs.get("render_mode") == "human":
            raise ValueError(
                "render_mode='human' needs a screen, and there is none inside a sandbox; use "
                "'rgb_array', and gymnasium.wrappers.HumanRendering around the LiveEnv"
            )
        pairs = [(one, {}) if isinstance(one, str) else (one[0], dict(one[1])) for one in wrappers]
        self._timeout = seconds(timeout)
        self._title = id or str(entry_point)
        self._lock = threading.RLock()
        self._closed = False
        self._owned = sandbox is None
        again = partial(
            type(self),
            id,
            entry_point=entry_point,
            sandbox=sandbox,
            python=python,
            env=env,
            cwd=cwd,
            setup=setup,
            wrappers=wrappers,
            timeout=timeout,
        )
        self._program: Program | None = None
        self._sandbox = Sandbox.create(keep=KeepReachable()) if sandbox is None else sandbox
        try:
            self._program = Program.start(
                self._sandbox, self._title, python=python or executable, env=env or {}, cwd=cwd
            )
            told = self._ask("make", id, entry_point, kwargs, pairs, setup)
            self.action_space = built(told["action_space"])
            self.observation_space = built(told["observation_space"])
            self.render_mode = told["render_mode"]
            self.metadata = dict(told["metadata"])
            modes = self.metadata.get("render_modes", ())
            self.metadata["render_modes"] = [mode for mode in modes if mode != "human"]
            if told["spec"] is not None:
                # making it again makes another LiveEnv; what runs inside must not be able to name
                # what is to be imported here
                self.spec = EnvSpec(
                    id=str(told["spec"]["id"]),
                    entry_point=again,
                    reward_threshold=told["spec"]["reward_threshold"],
                    nondeterministic=bool(told["spec"]["nondeterministic"]),
                    max_episode_steps=told["spec"]["max_episode_steps"],
                    order_enforce=False,
                    disable_env_checker=True,
                    kwargs=kwargs,
                )
        except BaseException:
            self.close()
            raise

    # -- what gymnasium asks of an environment -----------------------------------------------

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin an episode: the first observation, and the info.

        `np_random` of this object is seeded as well, but the environment draws from its own.
        """
        with self._lock:
            observation, info = self._ask("reset", seed, options)
            super().reset(seed=seed)
        return observation, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Do an action: observation, reward, terminated, truncated, info."""
        observation, reward, terminated, truncated, info = self._ask("step", action)
        return observation, reward, terminated, truncated, info

    def render(self) -> Any:
        """A picture of the present state, as `render_mode` says."""
        return self._ask("render")

    def close(self) -> None:
        """End the environment, and its sandbox unless that was given. Twice is no error.

        A call that another thread waits in is cut off.
        """
        if self._closed:
            return
        self._closed = True
        if self._owned:
            self._sandbox.close()
        elif self._program is not None and not self._sandbox.closed:
            idle = self._lock.acquire(blocking=False)
            try:
                self._program.end(ask=idle)
            finally:
                if idle:
                    self._lock.release()

    # -- states ------------------------------------------------------------------------------

    @property
    def sandbox(self) -> Sandbox:
        """Where the environment lives. Whoever rolls it back takes the environment along."""
        return self._sandbox

    def clone_state(self) -> LiveState:
        """The whole present state, to go back to: the environment's, and this object's.

        It is taken between two calls, and the environment runs on. Raises `UnsupportedState` when
        the environment holds something that could not be given back, `NoSpace`, `CheckpointError`.
        """
        with self._lock:
            self._running().settle(timeout=self._timeout)
            return LiveState(self._sandbox.checkpoint(), self._running().process, self._chance())

    def restore_state(self, state: LiveState) -> None:
        """Go back to a state of this environment, or of any that was forked from the same.

        Everything in its sandbox goes back. What has ended, an episode or the process itself, is
        alive again. Raises `ValueError` for a state of another environment, `UnknownCheckpoint`
        for one that is gone, `RollbackError`, `NoSpace`; nothing has changed then.
        """
        with self._lock:
            self._check(state)
            try:
                self._sandbox.rollback(state.checkpoint)
            except KeyboardInterrupt:  # raised when the engine is through with it
                self._recall(state)
                raise
            self._recall(state)

    def fork(self, n: int = 1, *, at: LiveState | None = None) -> list[LiveEnv]:
        """Live copies of the present state, or of another one: all of them, or none and an error.

        Each has a sandbox of its own, which is closed with it, and goes its own way. They are
        copies with all their random numbers: to have them act differently, seed their action
        spaces. `copy.deepcopy` makes one, too, also of wrappers around this object.

        Raises what `clone_state` and `restore_state` raise, and `ForkError`.
        """
        with self._lock:
            if at is None:
                at = self.clone_state()
            self._check(at)
            sandboxes = self._sandbox.fork_many(n, at=at.checkpoint)
            try:
                return [self._copy(sandbox, at) for sandbox in sandboxes]
            except BaseException:
                for sandbox in sandboxes:
                    sandbox.close()
                raise

    def _copy(self, sandbox: Sandbox, state: LiveState) -> LiveEnv:
        made = object.__new__(type(self))
        made.__dict__.update(self.__dict__)  # with what a subclass has added
        made._lock = threading.RLock()
        made._owned = True
        made._sandbox = sandbox
        made._program = self._running().of(sandbox)
        made.action_space = copy.deepcopy(self.action_space)
        made.observation_space = copy.deepcopy(self.observation_space)
        made.metadata = copy.deepcopy(self.metadata)
        if self.spec is not None:
            again = self.spec.entry_point
            if isinstance(again, partial) and again.keywords["sandbox"] is not None:
                again = partial(again, sandbox=sandbox)  # where its own copy would live
            made.spec = replace(self.spec, entry_point=again)
        made._recall(state)
        return made

    def _chance(self) -> _Chance:
        kept = [one._np_random for one in self._sampled()]
        return copy.deepcopy(_Chance(self._np_random, self._np_random_seed, tuple(kept)))

    def _recall(self, state: LiveState) -> None:
        """This object, once the environment is in that state."""
        self._running().went_back()
        chance = copy.deepcopy(state._chance)
        self._np_random, self._np_random_seed = chance.own, chance.seed
        for space, generator in zip(self._sampled(), chance.of_spaces, strict=True):
            space._np_random = generator

    def _sampled(self) -> list[Any]:
        """All spaces that have a generator of random numbers."""
        return [*parts(self.action_space), *parts(self.observation_space)]

    def _check(self, state: LiveState) -> None:
        if not isinstance(state, LiveState):
            raise TypeError(f"a state is what clone_state() returns, not {type(state).__name__}")
        if not self._running().is_that_of(state._process):
            raise ValueError(f"{state!r} is of another environment than {self._title}")

    # -- more of what is inside --------------------------------------------------------------

    def call(self, name: str, /, *arguments: Any, **options: Any) -> Any:
        """What `env.get_wrapper_attr(name)` is inside; if it can be called, what it returns.

        >>> env.call("get_action_meanings")                     # doctest: +SKIP
        """
        return self._ask("call", name, arguments, options)

    @property
    def output(self) -> str:
        """What the environment has printed, to standard output and error; the end of it, if much.

        It belongs to the state.
        """
        with self._lock:
            return self._running().output()

    def _running(self) -> Program:
        if self._closed or self._program is None:
            raise ClosedEnvironmentError(f"{self._title} is closed")
        return self._program

    def _ask(self, request: str, *arguments: Any) -> Any:
        with self._lock:
            return self._running().ask(request, *arguments, timeout=self._timeout)

    def __deepcopy__(self, memo: dict[int, Any]) -> LiveEnv:
        return self.fork()[0]

    def __reduce__(self) -> NoReturn:
        no_copies(type(self).__name__)
