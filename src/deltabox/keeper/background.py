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
from collections.abc import Callable
from typing import Any

log = logging.getLogger(__name__)


class Background(threading.Thread):
    """A queue of calls and the thread that makes them. An error is logged and passed over."""

    def __init__(self, name: str, *, idle: Callable[[], None]) -> None:
        super().__init__(name=f"background {name}", daemon=True)
        self._idle = idle
        self._queue: queue.SimpleQueue[tuple[Callable[..., Any], tuple[Any, ...]] | None] = (
            queue.SimpleQueue()
        )
        self.start()

    def submit(self, function: Callable[..., Any], *args: Any) -> None:
        """Call `function(*args)` after everything that was submitted before."""
        self._queue.put((function, args))

    def run(self) -> None:
        while True:
            try:
                item = self._queue.get(timeout=1.0)
            except queue.Empty:
                item = (self._idle, ())
            if item is None:
                return
            function, args = item
            try:
                function(*args)
            except Exception:
                log.exception("in the background: %s", getattr(function, "__name__", function))

    def flush(self) -> None:
        """Wait until everything submitted so far is done."""
        done = threading.Event()
        self.submit(done.set)
        done.wait()

    def end(self) -> None:
        """Do what is left and end the thread."""
        self._queue.put(None)
        self.join()
