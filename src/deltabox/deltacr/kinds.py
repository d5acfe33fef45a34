"""All kinds of open file descriptions, in the order in which they are made."""

from __future__ import annotations

from .objects import (
    epoll,
    events,
    files,
    inotify,
    mqueues,
    pidfds,
    pipes,
    shared_memory,
    terminals,
    unix_wiring,
)
from .rebuild import Kind

KINDS: tuple[Kind, ...] = (
    pipes.EXTERNAL,
    terminals.KIND,
    files.KIND,
    pipes.KIND,
    shared_memory.KIND,
    *events.KINDS,
    unix_wiring.KIND,
    *pidfds.KINDS,
    mqueues.KIND,
    epoll.KIND,
    inotify.KIND,  # last, or it would see the others being made
)
BY_NAME = {name: kind for kind in KINDS for name in kind.names}
