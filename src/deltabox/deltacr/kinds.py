"""All kinds of open file descriptions, in the order in which they are made."""

from __future__ import annotations

from .objects import connections, events, files, netlink, pipes, udp
from .rebuild import Kind

KINDS: tuple[Kind, ...] = (
    pipes.EXTERNAL,
    files.KIND,
    pipes.KIND,
    *events.KINDS,
    connections.KIND,
    udp.KIND,
    netlink.KIND,
)
BY_NAME = {name: kind for kind in KINDS for name in kind.names}
