"""Work that nobody waits for: one thread per tree of sandboxes.

After a rollback the old processes have to be collected, their files deleted and the next spare
made; none of it belongs into the caller's time. One thread and one queue per tree keep the order
(btrfs is slower, not faster, when two threads work on one image) and let the tree wait for the
rest of it when it is closed. When there is nothing to do for a second, `idle` is called.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

log = logging.getLogger(__name__)

Item = tuple[Callable[..., Any], tuple[Any, ...]]
_QUIET = 0.005  # seconds


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
        self._later: dict[str, Item] = {}
        self.start()

    def submit(self, function: Callable[..., Any], *args: Any) -> None:
        """Call `function(*args)` after everything that was submitted before."""
        deferred = getattr(_serving, "calls", None)
        if deferred is not None:
            deferred.append((self, (function, args)))
        else:
            self._queue.put((function, args))

    def run(self) -> None:
        while (item := self._next()) is not None:
            function, args = item
            try:
                function(*args)
            except Exception:
                log.exception("in the background: %s", getattr(function, "__name__", function))

    def later(self, key: str, function: Callable[..., Any], *args: Any) -> None:
        """Call `function(*args)` when there has been nothing to do for a moment and nobody is
        `busy`. A later one with the same key takes the place of one that has not begun.
        """
        with self._lock:
            self._later.pop(key, None)
            self._later[key] = (function, args)
        self.submit(_look_again)

    def _next(self) -> Item | None:
        """What to do next; None at the end."""
        while True:
            try:
                return self._queue.get(timeout=_QUIET if self._later else 1.0)
            except queue.Empty:
                with self._lock:
                    if not self._later:
                        return (self._idle, ())
                    if not self._busy():
                        return self._later.pop(next(iter(self._later)))

    def flush(self) -> None:
        """Wait until everything submitted so far is done."""
        _begin_deferred()
        done = threading.Event()
        self._queue.put((done.set, ()))
        done.wait()

    def end(self) -> None:
        """Do what is left and end the thread."""
        _begin_deferred()
        self._queue.put(None)
        self.join()
