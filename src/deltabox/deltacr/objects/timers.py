"""Interval timers and POSIX timers (setitimer(2), timer_create(2), /proc/PID/timers).

Both are read as "what remains" and started again at the very end of a restore, after the release,
so that neither the restore nor a wait at the barrier eats into them.
"""

from __future__ import annotations

import re
import struct

from ...linux import numbers as nr
from ..model import PosixTimer, Process
from ..records import Program, Sequence

ITIMERS = (0, 1, 2)
ITIMER_SIZE = 32
ITIMERSPEC_SIZE = 32
_CLOSE = 10_000  # microseconds before its end at which nothing is said of a timer
_NOTIFY = {"signal": 0, "none": 1, "thread": 2}
_ENTRY = re.compile(
    r"ID: (\d+)\nsignal: (\d+)/([0-9a-f]+)\nnotify: (\w+)/(\w+)\.(\d+)\nClockID: (-?\d+)"
)


class Refused(Exception):
    """What the timer is."""


def capture_calls(buffer: int) -> list[tuple[int, ...]]:
    return [(nr.GETITIMER, which, buffer + which * ITIMER_SIZE) for which in ITIMERS]


def parse(buffer: bytes) -> tuple[bytes, ...]:
    return tuple(buffer[i * ITIMER_SIZE : (i + 1) * ITIMER_SIZE] for i in ITIMERS)


def aged(buffer: bytes, seconds: float) -> bytes | None:
    """What `capture_calls` would find so much later, if the process has done nothing meanwhile.

    None if that cannot be told: a timer has run out, or counts processor time.
    """
    real, *others = parse(buffer)
    if any(map(any, others)):
        return None
    if not any(real):
        return buffer
    *interval, whole, part = struct.unpack("<4q", real)
    left = whole * 1_000_000 + part - int(seconds * 1e6)
    if left < _CLOSE:
        return None
    return struct.pack("<4q", *interval, *divmod(left, 1_000_000)) + buffer[ITIMER_SIZE:]


def listed(text: bytes) -> list[PosixTimer]:
    """POSIX timers in /proc/PID/timers, still without their settings; tids are the host's."""
    timers = []
    for found in _ENTRY.finditer(text.decode()):
        identifier, signal, value, how, target, tid, clock = found.groups()
        if int(clock) < 0:
            raise Refused("a timer on the CPU time of a process or thread")
        notify = _NOTIFY[how] | (4 if target == "tid" else 0)
        timers.append(
            PosixTimer(
                int(identifier), int(clock), int(signal), notify, int(value, 16), int(tid), b""
            )
        )
    return timers


def setting_calls(timers: list[PosixTimer], buffer: int) -> list[tuple[int, ...]]:
    return [
        (nr.TIMER_GETTIME, timer.identifier, buffer + index * ITIMERSPEC_SIZE)
        for index, timer in enumerate(timers)
    ]


def create(program: Program, do: Sequence, process: Process) -> None:
    """Make the timers with their identifiers, unarmed; all threads must exist."""
    import struct

    for timer in sorted(process.timers, key=lambda t: t.identifier):
        event = program.data(
            struct.pack("<QiiI", timer.value, timer.signal, timer.notify, timer.tid).ljust(
                64, b"\0"
            )
        )
        do.timer(timer.clock, event, timer.identifier)


def start(program: Program, do: Sequence, process: Process) -> None:
    for which, value in enumerate(process.itimers):
        if any(value):
            do.call(nr.SETITIMER, which, program.data(value), 0, what="setitimer")
    for timer in process.timers:
        if any(timer.setting[16:]):
            do.call(nr.TIMER_SETTIME, timer.identifier, 0, program.data(timer.setting), 0)
