"""The steps that an agent takes in a sandbox, each with the state that it has led to.

An agent does something, looks at what came of it, thinks, and does the next thing. The state after
each step is kept while the agent thinks: its checkpoint is taken beside, as searches do
(explore/lanes.py), and the next step waits for it before it changes anything. That is safe because
a step is over when its command is; what it has left running is captured wherever it is.

Steps know the step before them, as checkpoints do, so steps that were left by a rollback are not
lost: whoever has one can go to it. An agent's library needs a few lines over this; what is its own
(what an action is, what an output looks like) is not known here.

Taking the checkpoint before each step instead would make the agent wait for every one of them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, TypeVar

from ..checkpoint import Checkpoint
from ..errors import RollbackError, UnknownCheckpoint
from ..sandbox import Sandbox

T = TypeVar("T")


@dataclass(eq=False)
class Step:
    """What was done once, and the state that it led to. Step 0 is the start, at which nothing was.

    `output` is None for a step that was cut off by an exception. `waited` is how many seconds it
    had to wait for the checkpoint of the step before.
    """

    number: int
    parent: Step | None = field(repr=False)  # or all of them would be shown
    action: Any = None
    output: Any = None
    waited: float = 0.0
    _state: Future[Checkpoint] = field(default_factory=Future, repr=False)

    @property
    def checkpoint(self) -> Checkpoint:
        """The state after it; waits until it is taken.

        Raises what `Sandbox.checkpoint` has raised, `UnsupportedState` for instance.
        """
        return self._state.result()

    @property
    def taken(self) -> Checkpoint | None:
        """The same, if there is one by now; does not wait."""
        return self._state.result() if self._known and self.problem is None else None

    @property
    def problem(self) -> str | None:
        """Why there is no going back to it, by name; None if there is, or is not known yet.

        A checkpoint that was taken, and deleted later, is no problem of this kind.
        """
        error = self._state.exception() if self._known else None
        return None if error is None else f"{type(error).__name__}: {error}"

    @property
    def _known(self) -> bool:
        """Whether it has been taken, or not."""
        return self._state.done()

    def _settle(self) -> None:
        """Wait until that is known."""
        self._state.exception()

    def _take(self, sandbox: Sandbox) -> None:
        """Have it be what is in the sandbox now. An error is kept, for who wants to go there."""
        try:
            self._state.set_result(sandbox.checkpoint())
        except Exception as error:
            self._state.set_exception(error)

    @property
    def way(self) -> list[Step]:
        """The steps from the start to this one."""
        way = [self]
        while (before := way[-1].parent) is not None:
            way.append(before)
        return way[::-1]


class Trail:
    """The way that a sandbox has come, and the going back on it.

    Of a trail's own calls only one happens at a time: a rollback waits for a step in progress. What
    else is done with the sandbox belongs to no step, and is in the next checkpoint.

    >>> trail = Trail(sandbox)                                  # doctest: +SKIP
    >>> trail.do("rm -rf /usr", lambda: sandbox.run("rm -rf /usr"))
    >>> trail.rollback(0)

    The trail owns the sandbox: closing one closes the other.
    """

    def __init__(self, sandbox: Sandbox, *, at: Step | None = None) -> None:
        """at: the step whose state the sandbox is in; None: its state becomes step 0.

        The start is held: no policy drops it, so that a patch against it can always be had.
        Raises what `Sandbox.checkpoint` does.
        """
        if at is None:
            began = sandbox.checkpoint()
            began.hold()
            at = Step(0, None)
            at._state.set_result(began)
        self._sandbox = sandbox
        self._present = at
        self._lock = threading.Lock()
        self._saver = ThreadPoolExecutor(1, thread_name_prefix="step")

    @property
    def sandbox(self) -> Sandbox:
        """Where it all happens."""
        return self._sandbox

    @property
    def steps(self) -> list[Step]:
        """From the start to the present; each stands at its own number."""
        return self._present.way

    def do(self, action: Any, work: Callable[[], T]) -> T:
        """Take a step: do `work`, and keep the state after it.

        Returns what `work` does. What it raises is raised, and is a step all the same, because it
        may have been done in part.
        """
        with self._lock:
            began = time.perf_counter()
            self._present._settle()
            step = Step(self._present.number + 1, self._present, action)
            step.waited = time.perf_counter() - began
            try:
                output = step.output = work()
            finally:
                self._present = step
                try:
                    self._saver.submit(step._take, self._sandbox)
                except RuntimeError as error:  # the trail is closed
                    step._state.set_exception(error)
        return output

    def rollback(self, step: Step | int) -> Step:
        """Go back to the state after a step: files and processes; the step.

        step: one of any trail of the tree, or a number on the present way.

        Raises `RollbackError` when no checkpoint could be taken of that state, and says why;
        `UnknownCheckpoint` when it was deleted or let go by the tree's policy; `IndexError`; what
        `Sandbox.rollback` does. Nothing has changed then.
        """
        with self._lock:
            target = self._found(step)
            self._present._settle()  # or a checkpoint would be taken in the middle of it
            checkpoint = _gone_to(target)
            try:
                self._sandbox.rollback(checkpoint)
            except UnknownCheckpoint as error:
                raise _let_go(target) from error
            self._present = target
        return target

    def fork(self, step: Step | int | None = None) -> Trail:
        """A live copy of the state after a step, by default the last one, with the way to there.

        Raises what `rollback` does, and `ForkError`.
        """
        with self._lock:
            target = self._present if step is None else self._found(step)
        checkpoint = _gone_to(target)
        try:
            return Trail(self._sandbox.fork(at=checkpoint), at=target)
        except UnknownCheckpoint as error:
            raise _let_go(target) from error

    def close(self) -> None:
        """Close the sandbox. Twice is no error."""
        self._saver.shutdown(wait=True)  # or a checkpoint would be taken of one that is closed
        self._sandbox.close()

    def __enter__(self) -> Trail:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _found(self, step: Step | int) -> Step:
        if isinstance(step, Step):
            return step
        if isinstance(step, bool) or not isinstance(step, int):
            raise TypeError(f"a step is a Step or its number, not {type(step).__name__}")
        steps = self._present.way
        if not 0 <= step < len(steps):
            raise IndexError(f"there is no step {step} on this way: it has 0 to {len(steps) - 1}")
        return steps[step]


def _gone_to(step: Step) -> Checkpoint:
    """The state of a step that is to be gone to."""
    try:
        return step.checkpoint
    except Exception as error:
        raise RollbackError(
            f"step {step.number} has no state to go to, choose another: {step.problem}"
        ) from error


def _let_go(step: Step) -> UnknownCheckpoint:
    return UnknownCheckpoint(
        f"the state of step {step.number} was deleted, or let go by what the tree keeps: "
        f"keep more (keep=KeepLast(...)), or hold it in time (step.checkpoint.hold())"
    )
