"""Work that nobody waits for: one thread per tree of sandboxes.

After a rollback the old processes have to be collected, their files deleted and the next spare
made; none of it belongs into the caller's time. One thread and one queue per tree keep the order
(btrfs is slower, not faster, when two threads work on one image) and let the tree wait for the
rest of it when it is closed. When there is nothing to do for a second, `idle` is called.

What is deleted goes to a second queue, `later`: five hundred checkpoints dropped at once must not
stand between a sandbox and its next spare. It is served one piece at a time when the first queue is
empty, with pauses three times as long as the work; and, so that a sandbox that never rests cannot
outgrow it, after any other piece of work once its oldest has waited for a second.

What is made for the case that it will be wanted (a standby) is done `quietly`: when nothing has
been asked for some milliseconds.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

log = logging.getLogger(__name__)

Item = tuple[Callable[..., Any], tuple[Any, ...]]
_QUIET = 0.005  # seconds without work after which the quiet kind begins
_REST = 3.0  # times as long as a piece of the second queue took, nothing more of it is done
_SHORTEST = 0.002
_PATIENCE = 1.0  # seconds that the second queue gives way to the first

_serving = threading.local()


@contextmanager
def after_reply() -> Iterator[None]:
    """What this thread submits within the block begins only at its end, when the caller has its
    answer: the interpreter lock is one, and the caller's time is what counts.
    """
    _serving.calls = []
    try:
        yield
    finally:
        _begin_deferred()
        _serving.calls = None


def _begin_deferred() -> None:
    calls = getattr(_serving, "calls", None) or []
    while calls:
        background, item = calls.pop(0)
        background._queue.put(item)


def _look_again() -> None:
    """Something that can wait has been added."""


class Background(threading.Thread):
    """A queue of calls and the thread that makes them. An error is logged and passed over."""

    def __init__(self, name: str, *, idle: Callable[[], None], busy: Callable[[], bool]) -> None:
        super().__init__(name=f"background {name}", daemon=True)
        self._idle = idle
        self._busy = busy
        self._queue: queue.SimpleQueue[Item | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._quiet: dict[str, tuple[float, Item]] = {}  # with the time from which it may begin
        self._later: deque[tuple[float, Callable[..., Any], tuple[Any, ...]]] = deque()
        self._pause = _SHORTEST
        self.start()

    def submit(self, function: Callable[..., Any], *args: Any) -> None:
        """Call `function(*args)` after everything that was submitted before."""
        deferred = getattr(_serving, "calls", None)
        if deferred is not None:
            deferred.append((self, (function, args)))
        else:
            self._queue.put((function, args))

    def later(self, function: Callable[..., Any], *args: Any) -> None:
        """Call `function(*args)` when there is nothing else to do; not at all after `end`."""
        first = not self._later
        self._later.append((time.monotonic(), function, args))
        if first:
            self.submit(lambda: None)  # so that the thread looks

    @property
    def backlog(self) -> int:
        """Pieces of work that wait for a quiet moment."""
        return len(self._later)

    def hurry(self) -> bool:
        """Do one piece of that work now, in the caller's thread; False when there is none."""
        try:
            _, function, args = self._later.popleft()
        except IndexError:
            return False
        self._call(function, args)
        return True

    def run(self) -> None:
        while True:
            try:
                item = self._queue.get(timeout=self._patience())
            except queue.Empty:
                if quiet := self._take_quiet():
                    self._call(*quiet)
                elif not self._at_leisure() and not self._quiet:
                    self._call(self._idle, ())
                continue
            if item is None:
                return
            self._call(*item)
            if self._waits_too_long():
                self._at_leisure()

    def _patience(self) -> float:
        """Seconds to wait for work before something that can wait is done."""
        with self._lock:
            due = min((when for when, _ in self._quiet.values()), default=None)
        patience = self._pause if self._later else 1.0
        if due is None:
            return patience
        wait = due - time.monotonic()
        return _QUIET if wait <= _QUIET else min(patience, wait)

    def _take_quiet(self) -> Item | None:
        with self._lock:
            now = time.monotonic()
            key = next((key for key, (when, _) in self._quiet.items() if when <= now), None)
            if key is None or self._busy():
                return None
            return self._quiet.pop(key)[1]

    def _call(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        try:
            function(*args)
        except Exception:
            log.exception("in the background: %s", getattr(function, "__name__", function))

    def _at_leisure(self) -> bool:
        began = time.monotonic()
        did = self.hurry()
        self._pause = max(_SHORTEST, _REST * (time.monotonic() - began))
        return did

    def _waits_too_long(self) -> bool:
        try:
            return time.monotonic() - self._later[0][0] > _PATIENCE
        except IndexError:
            return False

    def quietly(self, key: str, function: Callable[..., Any], *args: Any, after: float = 0) -> None:
        """Call `function(*args)` when there has been nothing to do for a moment and nobody is
        `busy`, in `after` seconds at the earliest. A later one with the same key takes the place
        of one that has not begun.
        """
        with self._lock:
            self._quiet.pop(key, None)
            self._quiet[key] = time.monotonic() + after, (function, args)
        self.submit(_look_again)

    def flush(self) -> None:
        """Wait until everything submitted so far is done, but for what can wait."""
        _begin_deferred()
        done = threading.Event()
        self._queue.put((done.set, ()))
        done.wait()

    def end(self) -> None:
        """Do what is left, but for what could wait, and end the thread."""
        _begin_deferred()
        self._queue.put(None)
        self.join()
