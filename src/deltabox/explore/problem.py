"""What is to be searched: three functions over a live state.

The search knows nothing of models, prompts or rewards. It asks which actions there are, has one
done, and is told a number.
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from ..files import Files
from ..process import Handle
from ..sandbox import Sandbox

H = TypeVar("H", bound=Handle)


class Where(Protocol):
    """What has a sandbox in a state, or will have one when it is asked."""

    @property
    def sandbox(self) -> Sandbox: ...

    @property
    def files(self) -> Files: ...


@dataclass(frozen=True)
class State:
    """A live state of the search, for the length of one call.

    What `apply` and `score` do in its sandbox becomes part of it.
    """

    _where: Where = field(repr=False)
    actions: tuple[Any, ...]  # that have led here from the root
    scores: tuple[float, ...]  # of the states on the way, this one's last; the root has none
    result: Any = None  # what the last `apply` returned
    notes: tuple[Any, ...] = field(default=())  # what the strategy has to tell, as reflexion does

    @property
    def sandbox(self) -> Sandbox:
        """A sandbox in that state, to be used in every way but closed, rolled back or committed.

        One is brought into the state when `propose` first asks for it, if none is; while the
        state's checkpoint is still being taken, that is waited for. A program that was just being
        asked something would be kept with the answer on its way otherwise, and whoever goes back
        there would read an answer to a question of somebody else's.
        """
        return self._where.sandbox

    @property
    def files(self) -> Files:
        """Its files, to be read: that needs not wait for the state's checkpoint."""
        return self._where.files

    @property
    def depth(self) -> int:
        """How many actions have led here."""
        return len(self.actions)

    def counterpart(self, handle: H) -> H:
        """This state's own copy of a shell or a process that was started before the search."""
        return self.sandbox.counterpart(handle)


class Problem(Protocol):
    """What a search is given. Each function may be a coroutine function instead.

    They are called from several threads at once, each call with a sandbox of its own.

    >>> class Repair:                                       # doctest: +SKIP
    ...     def propose(self, state):
    ...         return model.edits(state.files.read_text("/src/lib.py"))
    ...     def apply(self, state, action):
    ...         state.sandbox.files.write_text("/src/lib.py", action)
    ...     def score(self, state):
    ...         return 1.0 - failures(state.sandbox.run("make test")) / 100
    """

    def propose(self, state: State) -> Iterable[Any] | Awaitable[Iterable[Any]]:
        """The actions worth trying in this state, the best first; none: it is an end.

        Only looks: what it changes may be lost, or may not be.
        """

    def apply(self, state: State, action: Any) -> Any:
        """Do it. `state` is the one before. What is returned is the next state's `result`.

        An exception makes the action a failed one: its state is not searched any further.
        """

    def score(self, state: State) -> float | Awaitable[float]:
        """How good this state is. More is better; the scale is yours."""


def described(action: Any) -> Any:
    """An action as it is shown and written down: plain data as it is, anything else by its repr."""
    if action is None or isinstance(action, (str, int, float, bool)):
        return action
    if isinstance(action, (list, tuple)):
        return [described(part) for part in action]
    if isinstance(action, Mapping):
        return {str(key): described(value) for key, value in action.items()}
    return repr(action)
