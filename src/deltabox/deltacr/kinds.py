"""All kinds of open file descriptions, in the order in which they are made."""

from __future__ import annotations

from .objects import (
    connections,
    epoll,
    events,
    files,
    inotify,
    kernel_files,
    mqueues,
    netlink,
    pidfds,
    pipes,
    shared_memory,
    terminals,
    udp,
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
    connections.KIND,
    udp.KIND,
    netlink.KIND,
    unix_wiring.KIND,
    *pidfds.KINDS,
    *kernel_files.KINDS,
    mqueues.KIND,
    epoll.KIND,
    inotify.KIND,  # last, or it would see the others being made
)
BY_NAME = {name: kind for kind in KINDS for name in kind.names}
