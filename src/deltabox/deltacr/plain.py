"""Whether a capture can certainly be compiled, and so need not be before the tree goes on.

Compiling (program.py) takes milliseconds, and may find out that a state cannot be rebuilt, which
has to be said while the checkpoint can still be refused.  For most captures that cannot happen: the
program is compiled in the background, off the path of the checkpoint.
"""

from __future__ import annotations

import resource
from collections.abc import Sequence as Items

from .model import Capture
from .objects import seccomp
from .topology import arrange

# kinds of descriptions that are made in the same way whatever their state is
_PLAIN = frozenset({"file", "directory", "device", "path", "external", "pipe", "fifo"})
_PLAIN |= {"eventfd", "timerfd", "signalfd", "epoll", "memfd", "unix socket", "tcp"}


def is_plain(capture: Capture, limits: Items[tuple[int, int]]) -> bool:
    """Whether a capture can be compiled for certain, so that it can wait.

    Nothing in it can turn out to be impossible, and it is far smaller than what fits into a
    program: each description takes two variables of 2,048 at the most, each mapping or run of
    pages five records (64 bytes) of 32 MiB. Raises UnsupportedState when its processes cannot be
    arranged.
    """
    arrange(capture)
    mappings = [m for p in capture.processes for m in p.mappings]
    numbers = max((d.number for p in capture.processes for d in p.descriptors), default=0)
    return (
        len(capture.processes) <= 64
        and len(capture.descriptions) + len(capture.shared) <= 600
        and sum(len(p.threads) for p in capture.processes) <= 256
        and len(mappings) + sum(len(m.pages) + len(m.guards) for m in mappings) <= 40_000
        and _bytes_under_way(capture) <= 1 << 20
        and 2 * numbers + 4096 < limits[resource.RLIMIT_NOFILE][1]
        and not (capture.ghosts or capture.queues.all)
        and all(d.kind in _PLAIN for d in capture.descriptions)
        and all(not p.stopped and p.zombie is None for p in capture.processes)
        and all(t.seccomp == seccomp.NONE for p in capture.processes for t in p.threads)
    )


def _bytes_under_way(capture: Capture) -> int:
    """What lies in pipes and sockets."""
    total = sum(len(pipe.content) for pipe in capture.pipes)
    for description in capture.descriptions:
        if description.kind == "tcp":
            total += len(description.state.content) + len(description.state.coming)
        elif description.kind == "unix socket":
            total += sum(4096 + len(message.data) for message in description.state.queue)
    return total
