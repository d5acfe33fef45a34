"""The sandboxes that a search works in: each goes from state to state by rollbacks.

A lane is made by one fork and used for many steps, because going back is a fraction of a fork. It
remembers which node's state it is in, so that a step from where it stands needs nothing at all.

The checkpoint of a new state is taken beside whatever comes next: mostly the model thinks, and only
looks. Who is going to change the state waits for it first.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager

from ..checkpoint import Checkpoint
from ..sandbox import Sandbox


class Place:
    """A state that can be gone to: its checkpoint, or the one that is just being taken."""

    def __init__(self, taken: Checkpoint | None = None) -> None:
        self._future: Future[Checkpoint] = Future()
        if taken is not None:
            self._future.set_result(taken)

    def take(self, sandbox: Sandbox, executor: Executor, lost: Callable[[Exception], None]) -> None:
        """Have the checkpoint be taken of what is in the sandbox; `lost` is told if it fails."""

        def work() -> None:
            try:
                self._future.set_result(sandbox.checkpoint())
            except Exception as error:
                lost(error)
                self._future.set_exception(error)

        try:
            executor.submit(work)
        except RuntimeError as error:  # the search is over
            self._future.set_exception(error)

    def checkpoint(self) -> Checkpoint:
        """Wait for it. Raises what `Sandbox.checkpoint` has raised."""
        return self._future.result()

    def settle(self) -> None:
        """Wait until it has been taken, or not."""
        self._future.exception()

    @property
    def taken(self) -> Checkpoint | None:
        """Its checkpoint, if there is one by now."""
        done = self._future.done() and self._future.exception() is None
        return self._future.result() if done else None

    @property
    def failure(self) -> BaseException | None:
        """Why there is no checkpoint, if that is known."""
        return self._future.exception() if self._future.done() else None


class Lane:
    """A sandbox, and the state that it is in, if nothing has changed that since."""

    def __init__(self, sandbox: Sandbox, place: Place) -> None:
        self.sandbox = sandbox
        self.place: Place | None = place
        self.saving: Place | None = None  # whose checkpoint is being taken in it

    def settle(self) -> None:
        """Wait until its state may be changed."""
        if self.saving is not None:
            self.saving.settle()
            self.saving = None

    def go(self, place: Place) -> float:
        """Bring it into a state that may be changed; the seconds that took."""
        began = time.perf_counter()
        self.settle()
        if self.place is not place:
            checkpoint = place.checkpoint()
            self.place = None
            self.sandbox.rollback(checkpoint)
            self.place = place
        return time.perf_counter() - began


class Lanes:
    """Up to `count` of them, made when they are needed."""

    def __init__(self, sandbox: Sandbox, root: Place, count: int) -> None:
        self._sandbox = sandbox
        self._root = root
        self._left = count
        self._free: list[Lane] = []
        self._all: list[Lane] = []
        self._changed = threading.Condition()
        self._closed = False

    @contextmanager
    def use(self, place: Place) -> Iterator[Lane]:
        """A lane for one caller: one that is in this state already, if there is one."""
        lane = self._take(place)
        try:
            yield lane
        except BaseException:
            lane.place = None  # whatever was being done may have been done in part
            raise
        finally:
            with self._changed:
                self._free.append(lane)
                self._changed.notify()

    def _take(self, place: Place) -> Lane:
        with self._changed:
            while True:
                if self._closed:
                    raise RuntimeError("the search is over")
                found = next((lane for lane in self._free if lane.place is place), None)
                if found is None and not self._left and self._free:
                    # one whose checkpoint is not being taken, if there is one
                    found = min(self._free, key=lambda lane: lane.saving is not None)
                if found is not None:
                    self._free.remove(found)
                    return found
                if self._left:
                    self._left -= 1
                    break
                self._changed.wait()
        try:
            lane = Lane(self._sandbox.fork(at=self._root.checkpoint()), self._root)
        except BaseException:
            with self._changed:
                self._left += 1
                self._changed.notify()
            raise
        with self._changed:
            self._all.append(lane)
        if self.closed:  # meanwhile
            lane.sandbox.close()
        return lane

    @property
    def closed(self) -> bool:
        """Whether nothing is to be done any more."""
        with self._changed:
            return self._closed

    def close(self) -> None:
        """End them all; what is being done in one is cut off."""
        with self._changed:
            self._closed = True
            lanes = list(self._all)
            self._changed.notify_all()
        for lane in lanes:
            lane.sandbox.close()
