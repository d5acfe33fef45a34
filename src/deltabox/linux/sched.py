"""How a thread is scheduled: sched_getattr(2), ioprio_get(2). Both look at another's thread."""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass

from ._libc import syscall

_SCHED_GETATTR, _IOPRIO_GET = 315, 252
_IOPRIO_WHO_PROCESS = 1
_ATTR = struct.Struct("<IIQiIQQQII")  # struct sched_attr, linux/sched/types.h
OTHER, BATCH, IDLE = 0, 3, 5
_UTIL_CLAMP = 0x20 | 0x40


@dataclass(frozen=True)
class Scheduling:
    """struct sched_attr of one thread. `runtime` is the slice, for the classes that share."""

    policy: int
    flags: int
    nice: int
    priority: int
    runtime: int
    deadline: int
    period: int
    util_min: int
    util_max: int

    @classmethod
    def unpack(cls, raw: bytes) -> Scheduling:
        return cls(*_ATTR.unpack(raw[: _ATTR.size])[1:])

    def packed(self, base: Scheduling) -> bytes:
        """What sched_setattr(2) takes to make this of a thread that is scheduled like `base`."""
        clamp = (self.util_min, self.util_max) != (base.util_min, base.util_max)
        return _ATTR.pack(
            _ATTR.size,
            self.policy,
            self.flags | (_UTIL_CLAMP if clamp else 0),
            self.nice,
            self.priority,
            # a slice that is named stays when the system's own is changed later
            0 if self.runtime == base.runtime else self.runtime,
            self.deadline,
            self.period,
            self.util_min if clamp else 0,
            self.util_max if clamp else 0,
        )


def sched_getattr(tid: int) -> Scheduling:
    data = ctypes.create_string_buffer(_ATTR.size)
    syscall(_SCHED_GETATTR, tid, data, _ATTR.size, 0)
    return Scheduling(*_ATTR.unpack(data.raw)[1:])


def ioprio_get(tid: int) -> int:
    """Class and level; 0 when the thread has none of its own."""
    return syscall(_IOPRIO_GET, _IOPRIO_WHO_PROCESS, tid)
