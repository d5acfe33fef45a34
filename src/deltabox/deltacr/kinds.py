"""All kinds of open file descriptions, in the order in which they are made."""

from __future__ import annotations

from .objects import events, files, pipes, terminals
from .rebuild import Kind

KINDS: tuple[Kind, ...] = (
    pipes.EXTERNAL,
    terminals.KIND,
    files.KIND,
    pipes.KIND,
    *events.KINDS,
)
BY_NAME = {name: kind for kind in KINDS for name in kind.names}
