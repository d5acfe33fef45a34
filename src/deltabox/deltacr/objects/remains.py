"""What /proc still tells of a process that has ended and is not waited for: a zombie.

Its memory and descriptors are gone, but its ids, capabilities, limits and signal masks can be seen
until its parent has waited.  They are read from outside, and the stand-in that is cloned for it
takes them on before it ends with the same status.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence as Items
from dataclasses import dataclass

from ...linux import numbers as nr
from ...linux import proc
from ..model import Credentials
from ..records import Program, Sequence
from . import credentials

_PR_SET_NAME = 15
_RLIMIT_CORE = 4
_IGNORE, _SOMEWHERE = 1, 0x1000  # a handler is never called any more: only that there is one counts
_SETMASK = 2
_UNLIMITED = (1 << 64) - 1
_LIMIT = re.compile(r"^Max .{21} (\S+) +(\S+)", re.MULTILINE)
# The lines of /proc/PID/limits in the order of their numbers (fs/proc/base.c, resource.h).
_LIMITS = 16


@dataclass(frozen=True)
class Remains:
    credentials: Credentials
    limits: tuple[tuple[int, int], ...]
    blocked: int
    ignored: int
    caught: int
    nice: int


def capture(host: int, owner: int) -> Remains:
    status = proc.status(host)
    text = proc.read(f"/proc/{host}/limits").decode()
    limits = tuple((_limit(soft), _limit(hard)) for soft, hard in _LIMIT.findall(text))
    if len(limits) != _LIMITS:
        raise OSError(f"/proc/PID/limits has {len(limits)} lines, not {_LIMITS}")
    return Remains(
        credentials.capture(status, owner, 0),
        limits,
        int(status["SigBlk"], 16),
        int(status["SigIgn"], 16),
        int(status["SigCgt"], 16),
        proc.stat(host).nice,
    )


def _limit(text: str) -> int:
    return _UNLIMITED if text == "unlimited" else int(text)


def restore(
    program: Program,
    do: Sequence,
    pid: int,
    comm: bytes,
    status: int,
    remains: Remains,
    limits: Items[tuple[int, int]],
) -> None:
    """Become a zombie with the captured wait status; `limits` are those it has now."""
    number = status & 0x7F
    do.call(nr.PRCTL, _PR_SET_NAME, program.text(comm[:15]))
    if remains.nice:
        do.call(nr.SETPRIORITY, 0, 0, remains.nice, what="nice")
    for which, limit in enumerate(remains.limits):
        wanted = (0, limit[1]) if number and which == _RLIMIT_CORE else limit  # no core of ours
        if wanted != tuple(limits[which]):
            packed = program.data(struct.pack("<QQ", *wanted))
            do.call(nr.PRLIMIT64, 0, which, packed, 0, what=f"limit {which}")
    for signal in range(1, 65):
        bit = 1 << signal - 1
        handler = _IGNORE if remains.ignored & bit else _SOMEWHERE if remains.caught & bit else 0
        if handler and signal != number:
            action = program.data(struct.pack("<QQ16x", handler, 0))
            do.call(nr.RT_SIGACTION, signal, action, 0, 8, what=f"signal {signal}")
    credentials.restore(program, do, remains.credentials)
    blocked = remains.blocked & ~(1 << number - 1 if number else 0)
    do.call(nr.RT_SIGPROCMASK, _SETMASK, program.data(struct.pack("<Q", blocked)), 0, 8)
    if number:
        do.call(nr.KILL, pid, number)
    do.call(nr.EXIT_GROUP, status >> 8 & 0xFF)
