"""What is done for the next checkpoint while nobody waits: look for writes, copy what was written.

All of it is done to a tree that runs.  Looking protects the pages that it finds written, and what is
written again is found again: so a page that was copied at any moment is either as it was then or
found by the next look (space.py).  A checkpoint that begins takes over at once: it has to wait for
one look at one process, or one piece of copying, at the most.
"""

from __future__ import annotations

import contextlib
import logging
import os

from ..errors import DeltaBoxError
from .live import Live
from .memories import refusing
from .space import Space

log = logging.getLogger(__name__)


def look(live: Live) -> None:
    """Begin to watch the processes of a restored tree."""
    for pid, host in live.hosts().items():
        with live.ahead.step() as may:
            if not may:
                return
            space = live.space(host, pid)
            if space.watched and not space.seen:
                with contextlib.suppress(FileNotFoundError, ProcessLookupError, DeltaBoxError):
                    _look(live, space, pid)


def _look(live: Live, space: Space, pid: int) -> None:
    base = live.base
    held = base.stash.of(pid) if base is not None and base.stash is not None else {}
    known = space.map(refusing(space.host, pid))
    pagemap = os.open(f"/proc/{space.host}/pagemap", os.O_RDONLY | os.O_CLOEXEC)
    try:
        present = space.present(pagemap, known.bare)
        space.look(pagemap, known.bare, present, held, base)
    finally:
        os.close(pagemap)
