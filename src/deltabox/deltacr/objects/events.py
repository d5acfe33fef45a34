"""eventfd, timerfd and signalfd: counters and masks that fdinfo tells completely.

A timer is read as what remains (relative) and as the point in time that it stands for (absolute);
which of the two is given back depends on how the program had set it, as for sleeping calls:
clocks run on, so a point in time may have passed when its owner wakes.  Timers start at the very
end, after the release, so that neither the restore nor a wait at its barrier eats into them.
"""

from __future__ import annotations

import re
import struct
import time
from collections.abc import Sequence as Items
from dataclasses import dataclass

from ...linux import numbers as nr
from ..model import Description
from ..rebuild import Entry, Kind, Rebuild
from ..subject import Refused, Subject

_EFD_SEMAPHORE = 1
_O_NONBLOCK = 0o4000
_TFD_TIMER_ABSTIME = 1
_TFD_IOC_SET_TICKS = 0x40085400
_NANO = 10**9
_PAIR = re.compile(r"\((\d+), (\d+)\)")


# -- eventfd(2) ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Eventfd:
    count: int
    semaphore: bool


def capture_eventfd(subject: Subject) -> Description:
    count = int(subject.fact("eventfd-count"), 16)
    semaphore = subject.fact("eventfd-semaphore") == "1"
    return Description("eventfd", subject.flags, state=Eventfd(count, semaphore))


def _restore_eventfd(rebuild: Rebuild, entries: Items[Entry]) -> None:
    do = rebuild.init
    for number, description in entries:
        state: Eventfd = description.state
        flags = (_EFD_SEMAPHORE if state.semaphore else 0) | (description.flags & _O_NONBLOCK)
        small = state.count if state.count < 1 << 32 else 0
        do.call(nr.EVENTFD2, small, flags, save=rebuild.opened, what="eventfd")
        if state.count != small:
            count = rebuild.program.data(struct.pack("<Q", state.count))
            do.call(nr.WRITE, rebuild.opened, count, 8, what="set an eventfd")
        rebuild.place(number)


# -- timerfd_create(2) --------------------------------------------------------------------------


@dataclass(frozen=True)
class Timerfd:
    """Times in nanoseconds. `value` is what remained; `due` the time on its clock, if absolute."""

    clock: int
    ticks: int
    flags: int
    value: int
    interval: int
    due: int


def capture_timerfd(subject: Subject) -> Description:
    clock = int(subject.fact("clockid"))
    flags = int(subject.fact("settime flags"), 8)
    value, interval = _time(subject.fact("it_value")), _time(subject.fact("it_interval"))
    due = 0
    if flags & _TFD_TIMER_ABSTIME and value:
        due = time.clock_gettime_ns(_readable(clock)) + value
    state = Timerfd(clock, int(subject.fact("ticks")), flags, value, interval, due)
    return Description("timerfd", subject.flags, state=state)


def _time(text: str) -> int:
    found = _PAIR.fullmatch(text)
    if found is None:
        raise Refused(f"a timerfd this kernel describes as {text}")
    return int(found[1]) * _NANO + int(found[2])


def _readable(clock: int) -> int:
    """The clock to read for one that timers run on: the alarm clocks are the others' twins."""
    return {8: time.CLOCK_REALTIME, 9: time.CLOCK_BOOTTIME}.get(clock, clock)


def _restore_timerfd(rebuild: Rebuild, entries: Items[Entry]) -> None:
    do = rebuild.init
    for number, description in entries:
        state: Timerfd = description.state
        flags = description.flags & _O_NONBLOCK
        do.call(nr.TIMERFD_CREATE, state.clock, flags, save=rebuild.opened, what="timerfd_create")
        rebuild.place(number)


def _start_timerfd(rebuild: Rebuild, entries: Items[Entry]) -> None:
    do, program = rebuild.init, rebuild.program
    for number, description in entries:
        state: Timerfd = description.state
        if state.value or state.interval or state.flags:
            when = state.due or state.value
            setting = struct.pack(
                "<4q", *divmod(state.interval, _NANO), *divmod(when if state.value else 0, _NANO)
            )
            do.call(
                nr.TIMERFD_SETTIME, number, state.flags, program.data(setting), 0, what="timerfd"
            )
        if state.ticks:
            ticks = program.data(struct.pack("<Q", state.ticks))
            do.call(nr.IOCTL, number, _TFD_IOC_SET_TICKS, ticks, what="ticks of a timerfd")


# -- signalfd(2) --------------------------------------------------------------------------------


def capture_signalfd(subject: Subject) -> Description:
    mask = int(subject.fact("sigmask"), 16)
    return Description("signalfd", subject.flags, state=mask)


def _restore_signalfd(rebuild: Rebuild, entries: Items[Entry]) -> None:
    for number, description in entries:
        mask = rebuild.program.data(struct.pack("<Q", description.state))
        flags = description.flags & _O_NONBLOCK
        rebuild.init.call(nr.SIGNALFD4, -1, mask, 8, flags, save=rebuild.opened, what="signalfd")
        rebuild.place(number)


KINDS = (
    Kind(("eventfd",), _restore_eventfd),
    Kind(("timerfd",), _restore_timerfd, start=_start_timerfd),
    Kind(("signalfd",), _restore_signalfd),
)
