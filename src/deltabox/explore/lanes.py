"""The sandboxes that a search works in: each goes from state to state by rollbacks.

A lane is made by one fork and used for many steps, because going back is a fraction of a fork. It
remembers which node's state it is in, so that a step from where it stands needs nothing at all.

What a step needs of us is done while others work, or the model thinks. The checkpoint of a new
state is taken beside whatever comes next. And there are a few lanes more than workers: whoever
takes one for a state has others brought to where the next steps will start, as far as the strategy
knows, or else to the same state again. One that was not wanted after all has cost a rollback on
another processor. Who only wants to look, as the model does, takes a lane when it does look: it may
think first, or not look at all.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Final

from ..checkpoint import Checkpoint
from ..errors import DeltaBoxError
from ..files import Files
from ..sandbox import Sandbox

SPARE: Final = 2  # lanes more than workers, at most


class Holdings:
    """How many places each checkpoint is used for: an action that changed nothing adds none."""

    def __init__(self) -> None:
        self._uses: Counter[Checkpoint] = Counter()
        self._lock = threading.Lock()

    def hold(self, checkpoint: Checkpoint) -> None:
        """One more place needs it."""
        with self._lock:
            self._uses[checkpoint] += 1

    def let_go(self, checkpoint: Checkpoint) -> None:
        """One place less does; the last frees it."""
        with self._lock:
            self._uses[checkpoint] -= 1
            if self._uses[checkpoint]:
                return
            del self._uses[checkpoint]
        try:
            checkpoint.delete()
        except DeltaBoxError:
            pass  # the policy of its tree has freed it, or the tree has been closed


class Place:
    """A state that can be gone to: its checkpoint, or the one that is just being taken."""

    def __init__(self, holdings: Holdings) -> None:
        self._future: Future[Checkpoint] = Future()
        self._holdings = holdings
        self.given_up = False  # nothing will start here any more

    @classmethod
    def at(cls, checkpoint: Checkpoint, holdings: Holdings) -> Place:
        """One whose checkpoint is there."""
        place = cls(holdings)
        holdings.hold(checkpoint)
        place._future.set_result(checkpoint)
        return place

    def take(
        self,
        sandbox: Sandbox,
        before: Checkpoint,
        executor: Executor,
        lost: Callable[[Exception], None],
    ) -> None:
        """Have the checkpoint be taken of what is in the sandbox; `lost` is told if it fails.

        before: of the state that it was in until the last action. If nothing has happened since,
            this place has that checkpoint, too.
        """
        self._holdings.hold(before)  # it may be given up at any moment

        def work() -> None:
            try:
                taken = sandbox.checkpoint(reuse=True)
                self._holdings.hold(taken)
                self._future.set_result(taken)
            except Exception as error:
                self._future.set_exception(error)  # first: a listener may raise
                lost(error)
            finally:
                self._holdings.let_go(before)

        try:
            executor.submit(work)
        except RuntimeError as error:  # the search is over
            self._holdings.let_go(before)
            self._future.set_exception(error)

    def give_up(self) -> None:
        """Free it, when it is there; one that has never come about is no error."""
        self.settle()
        if self.failure is None:
            self._holdings.let_go(self.checkpoint())

    def same_as(self, other: Place) -> bool:
        """Whether both are known to be one state."""
        if self is other:
            return True
        known = self.settled and other.settled and not self.failure and not other.failure
        return known and self.checkpoint() == other.checkpoint()

    def checkpoint(self) -> Checkpoint:
        """Wait for it. Raises what `Sandbox.checkpoint` has raised."""
        return self._future.result()

    def settle(self) -> None:
        """Wait until it has been taken, or not."""
        self._future.exception()

    @property
    def settled(self) -> bool:
        """Whether that is known."""
        return self._future.done()

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

    @property
    def files(self) -> Files:
        """Its files."""
        return self.sandbox.files

    def settle(self) -> None:
        """Wait until its state may be changed."""
        if self.saving is not None:
            self.saving.settle()
            self.saving = None

    def is_at(self, place: Place) -> bool:
        """Whether it is in this state already, perhaps while its checkpoint is being taken."""
        return self.place is not None and self.place.same_as(place)

    def go(self, place: Place) -> None:
        """Bring it into a state that may be changed."""
        self.settle()
        if not self.is_at(place):
            checkpoint = place.checkpoint()
            self.place = None
            self.sandbox.rollback(checkpoint)
            self.place = place

    @property
    def worth(self) -> int:
        """How much would be lost if it went elsewhere."""
        if self.place is None or self.place.given_up:
            return 0
        return 1 if self.saving is None or self.saving.settled else 2


class Lanes:
    """One for each of `workers`, and some to be where they are going next; made when needed."""

    def __init__(self, sandbox: Sandbox, root: Place, workers: int, executor: Executor) -> None:
        self._sandbox = sandbox
        self._root = root
        self._executor = executor
        self._left = workers + SPARE
        self._free: list[Lane] = []  # who has been free for the longest first
        self._bound: list[Place] = []  # where lanes are being brought
        self._all: list[Lane] = []
        self._changed = threading.Condition()
        self._closed = False

    @contextmanager
    def use(self, place: Place, then: Sequence[Place] = ()) -> Iterator[Lane]:
        """A lane for one caller: one that is in this state already, if there is one.

        then: where somebody is likely to need one next.
        """
        lane = self._take(place)
        for likely in then:
            self.bring(likely)
        try:
            yield lane
        except BaseException:
            lane.place = None  # whatever was being done may have been done in part
            raise
        finally:
            self._release(lane)

    def _release(self, lane: Lane) -> None:
        with self._changed:
            self._free.append(lane)
            self._changed.notify_all()

    def _take(self, place: Place) -> Lane:
        with self._changed:
            while True:
                if self._closed:
                    raise RuntimeError("the search is over")
                found = self._find(place)
                if found is None and place not in self._bound:
                    found = min(self._free, key=lambda lane: lane.worth, default=None)
                if found is not None:
                    self._free.remove(found)
                    return found
                if self._left and place not in self._bound:
                    self._left -= 1
                    break
                self._changed.wait()
        return self._make(self._root)

    def _find(self, place: Place) -> Lane | None:
        return next((lane for lane in self._free if lane.is_at(place)), None)

    def _make(self, place: Place) -> Lane:
        """A new lane that is counted already."""
        try:
            lane = Lane(self._sandbox.fork(at=place.checkpoint()), place)
        except BaseException:
            with self._changed:
                self._left += 1
                self._changed.notify_all()
            raise
        with self._changed:
            self._all.append(lane)
        if self.closed:  # meanwhile
            lane.sandbox.close()
        return lane

    def bring(self, place: Place) -> None:
        """Have a lane that nobody uses be brought to a state, in the background."""
        with self._changed:
            if self._closed or place in self._bound or len(self._bound) >= SPARE:
                return
            if self._find(place) is not None:
                return
            lane: Lane | None = None
            if self._left:
                self._left -= 1
            elif self._free:
                lane = min(self._free, key=lambda lane: lane.worth)
                self._free.remove(lane)
            else:
                return
            self._bound.append(place)

        def work() -> None:
            brought = lane
            try:
                if self.closed:
                    return
                if brought is None:
                    brought = self._make(place)
                else:
                    brought.go(place)
            except DeltaBoxError:
                pass  # whoever really goes there meets it, and says so
            finally:
                with self._changed:
                    self._bound.remove(place)
                    if brought is not None:
                        self._free.append(brought)
                    self._changed.notify_all()

        try:
            self._executor.submit(work)
        except RuntimeError:  # the search is over
            with self._changed:
                self._bound.remove(place)
                if lane is not None:
                    self._free.append(lane)

    @property
    def closed(self) -> bool:
        """Whether nothing is to be done any more."""
        with self._changed:
            return self._closed

    def stop(self) -> None:
        """Let nobody have one any more, and bring none anywhere."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def close(self) -> None:
        """End them all; what is being done in one is cut off."""
        self.stop()
        lanes = list(self._all)
        with ThreadPoolExecutor(len(lanes) or 1) as closing:
            list(closing.map(lambda lane: lane.sandbox.close(), lanes))


class Visit:
    """A state to look at, for which a lane is taken when somebody does look."""

    def __init__(self, lanes: Lanes, place: Place, then: Sequence[Place]) -> None:
        self._lanes = lanes
        self._place = place
        self._then = then
        self._lock = threading.Lock()
        self._stack = ExitStack()
        self._lane: Lane | None = None
        self.waited = 0.0  # seconds

    @property
    def sandbox(self) -> Sandbox:
        """A sandbox in that state, whose checkpoint has been taken."""
        return self._at(settled=True).sandbox

    @property
    def files(self) -> Files:
        """Its files; the checkpoint may still be being taken, and does not mind being read."""
        return self._at(settled=False).sandbox.files

    def _at(self, *, settled: bool) -> Lane:
        with self._lock:
            began = time.perf_counter()
            if self._lane is None:
                self._lane = self._stack.enter_context(self._lanes.use(self._place))
            if settled or not self._lane.is_at(self._place):
                self._lane.go(self._place)
            self.waited += time.perf_counter() - began
            return self._lane

    def __enter__(self) -> Visit:
        for place in (self._place, *self._then):
            self._lanes.bring(place)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.__exit__(kind, error, traceback)
