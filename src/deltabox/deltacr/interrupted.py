"""Blocked calls: none may end early because we looked, and none may wait too long.

A stop interrupts the call a thread is blocked in.  Most calls answer with one of the kernel's
private restart codes, and the kernel restarts them by itself when the *live* thread goes on.  Two
things remain to be done here.

*Live*: some calls (epoll_wait, rt_sigtimedwait, semtimedop, ...; signal(7), "Interruption of system
calls by stop signals") answer -EINTR instead.  They are rewound to their own `syscall`
instruction, with what is left of their timeout.

*Restored*: a rebuilt thread has no kernel state to restart from, so every code is turned into a
rewind, and calls with a relative timeout get what is left of it.

What is left is exact where the kernel has told (nanosleep with a remainder, select, ppoll).
Otherwise it is our own clock's word, counted from the first freeze that met the call: the call may
end late by at most the time it had been waiting before that freeze, never early.  A call met again
is recognized by the timeout argument we gave it, which no other call of the program would have.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..linux import proc
from ..linux.ptrace import Registers

EINTR = 4
ERESTARTSYS, ERESTARTNOINTR, ERESTARTNOHAND, ERESTART_RESTARTBLOCK = 512, 513, 514, 516
RESTART_SYSCALL = 219
_SA_RESTART = 0x10000000

_POLL, _NANOSLEEP, _CLOCK_NANOSLEEP, _FUTEX = 7, 35, 230, 202
_FUTEX_WAIT = 0

# number -> (register with the timeout, its form)
_EINTR_CALLS: dict[int, tuple[str, str] | None] = {
    232: ("r10", "ms"),  # epoll_wait
    281: ("r10", "ms"),  # epoll_pwait
    441: ("r10", "timespec"),  # epoll_pwait2
    128: ("rdx", "timespec"),  # rt_sigtimedwait
    65: None,  # semop
    220: ("r10", "timespec"),  # semtimedop
    208: ("r8", "timespec"),  # io_getevents
    333: ("r8", "timespec"),  # io_pgetevents
    # sockets with SO_RCVTIMEO or SO_SNDTIMEO: the timeout is the socket's own
    42: None,
    43: None,
    44: None,
    45: None,
    46: None,
    47: None,
    288: None,
    299: None,
    307: None,
}
_BLOCK_CALLS: dict[int, tuple[str, str]] = {
    _POLL: ("rdx", "ms"),
    _NANOSLEEP: ("rdi", "timespec"),
    _CLOCK_NANOSLEEP: ("rdx", "timespec"),
    _FUTEX: ("r10", "timespec"),
}
# The kernel itself writes back what was left when these were stopped, and restarts them with it.
_UPDATED_CALLS: dict[int, tuple[str, int]] = {
    23: ("r8", 1_000_000),  # select: struct timeval
    270: ("r8", 1_000_000_000),  # pselect6
    271: ("rdx", 1_000_000_000),  # ppoll
}


_ARGUMENTS = ("rdi", "rsi", "rdx", "r10", "r8", "r9")
_SEMOP = 65


def may_be_late(call: bytes) -> bool:
    """Whether a stop would make a blocked call last longer; `call` is /proc/TID/syscall.

    So it is with those that answer -EINTR and have a timeout: nobody knows how much is left.
    """
    fields = call.split()
    if len(fields) < 1 + len(_ARGUMENTS):
        return False  # it runs, or is in no call
    number = int(fields[0])
    if number not in _EINTR_CALLS or number == _SEMOP:
        return False
    timeout = _EINTR_CALLS[number]
    if timeout is None:
        return True  # a socket may have one
    value = int(fields[1 + _ARGUMENTS.index(timeout[0])], 16)
    return 0 < value & 0xFFFFFFFF < 1 << 31 if timeout[1] == "ms" else value != 0


def ends_by_itself(call: bytes) -> bool:
    """Whether a blocked call has a timeout of which less is left every moment.

    `call` is /proc/TID/syscall. Not those with the timeout of a socket: made again they have all
    of it.
    """
    fields = call.split()
    if len(fields) < 1 + len(_ARGUMENTS):
        return True  # it runs, or is in no call
    arguments = {name: int(value, 16) for name, value in zip(_ARGUMENTS, fields[1:], strict=False)}
    return _has_timeout(int(fields[0]), arguments)


def _has_timeout(number: int, arguments: Mapping[str, int]) -> bool:
    if number in _UPDATED_CALLS:
        where: tuple[str, str] | None = (_UPDATED_CALLS[number][0], "timeval")
    else:
        where = _EINTR_CALLS.get(number) or _BLOCK_CALLS.get(number)
    if where is None:
        return number == RESTART_SYSCALL  # whose timeout the kernel keeps to itself
    value = arguments[where[0]]
    return _signed32(value) >= 0 if where[1] == "ms" else value != 0


def may_be_another(registers: Registers) -> bool:
    """Whether a thread that was stopped before, in a call that looks the same, may have made it
    again since without having slept in between.

    The time of the first one may have run out while it was stopped. A call that the kernel goes on
    with comes as restart_syscall(2), and is the first one still.
    """
    if registers.rax == (1 << 64) - ERESTART_RESTARTBLOCK:
        return registers.orig_rax != RESTART_SYSCALL
    arguments = {name: getattr(registers, name) for name in _ARGUMENTS}
    return _has_timeout(registers.orig_rax, arguments)


class UnknownCall(Exception):
    """A restarted call whose number cannot be told any more."""


@dataclass
class _Wait:
    number: int
    deadline: float
    signature: tuple[int, ...]


class Waits:
    """The blocked calls of one tree with their deadlines, across freezes."""

    def __init__(self) -> None:
        self._waits: dict[int, _Wait] = {}

    def forget_others(self, tids: set[int]) -> None:
        for tid in self._waits.keys() - tids:
            del self._waits[tid]

    def live(
        self,
        tid: int,
        registers: Registers,
        memory: int,
        began: float,
        stopped: float,
        forbids_restart: Callable[[int], bool],
    ) -> Registers | None:
        """Registers to give a live thread before it goes on; None to leave it alone.

        `memory` is /proc/PID/mem; the freeze began and everybody had stopped at these times.
        """
        now = time.monotonic()
        number, result = _signed(registers.orig_rax), _signed(registers.rax)
        if result == -ERESTART_RESTARTBLOCK and number in _BLOCK_CALLS:
            # the kernel restarts it; remember when it was met, for a later restore
            self._meet(tid, number, registers, memory, began)
            if deliverable(tid) or not forbids_restart(tid):
                return None
            # by a call of its own, restart_syscall(2), which a seccomp filter may not know
            return self._again(tid, number, registers, memory, began, now)
        if result == -ERESTARTNOHAND and number in _UPDATED_CALLS:
            # from when it had stopped for certain: rather a little late than early
            _charge(number, registers, memory, now - stopped)
            return None
        if number not in _EINTR_CALLS or result != -EINTR or deliverable(tid):
            return None
        return self._again(tid, number, registers, memory, began, now)

    def _again(
        self, tid: int, number: int, registers: Registers, memory: int, began: float, now: float
    ) -> Registers:
        """The call made again by the thread itself, with what is left of its timeout."""
        fixed = _rewound(registers, number)
        for address, content in self._shorten(tid, number, fixed, memory, began, now):
            os.pwrite(memory, content, address)
        return fixed

    def restored(
        self,
        tid: int,
        registers: Registers,
        memory: int,
        now: float,
        handler_flags: int | None,
    ) -> tuple[Registers, tuple[tuple[int, bytes], ...]]:
        """Registers and memory for a rebuilt thread.

        `handler_flags` are the sa_flags of the handler that a pending signal will run first.
        """
        number, result = _signed(registers.orig_rax), _signed(registers.rax)
        if number < 0 or result not in (
            -ERESTARTSYS,
            -ERESTARTNOINTR,
            -ERESTARTNOHAND,
            -ERESTART_RESTARTBLOCK,
            -EINTR,
        ):
            return _plain(registers), ()
        if result == -EINTR and number not in _EINTR_CALLS:
            return _plain(registers), ()
        if handler_flags is not None:
            ended = ended_by_handler(registers, handler_flags)
            if ended is not None:
                return ended, ()
        if number == RESTART_SYSCALL or result == -ERESTART_RESTARTBLOCK:
            number = self._meet(tid, number, registers, memory, now).number
            fixed = _rewound(registers, number)
            return fixed, tuple(self._shorten(tid, number, fixed, memory, now, now))
        fixed = _rewound(registers, number)
        if result == -EINTR:
            return fixed, tuple(self._shorten(tid, number, fixed, memory, now, now))
        return fixed, ()

    # -- deadlines ------------------------------------------------------------------------------

    def _meet(self, tid: int, number: int, registers: Registers, memory: int, now: float) -> _Wait:
        """The record of a call that the kernel itself restarts."""
        known = self._waits.get(tid)
        signature = _signature(registers)
        if number == RESTART_SYSCALL:
            if known is not None and known.signature == signature:
                return known
            number = _number_before(registers, memory)
        wait = _Wait(number, now + _requested(number, registers, memory), signature)
        self._waits[tid] = wait
        return wait

    def _shorten(
        self,
        tid: int,
        number: int,
        fixed: Registers,
        memory: int,
        met: float,
        now: float,
    ) -> list[tuple[int, bytes]]:
        """Put what is left of the timeout at `now` into the call; memory to write for that."""
        where = _EINTR_CALLS.get(number) or _BLOCK_CALLS.get(number)
        if where is None:
            return []
        register, form = where
        value = getattr(fixed, register)
        if number == _FUTEX and fixed.rsi & 0x7F != _FUTEX_WAIT:
            return []  # absolute
        if (form == "ms" and _signed32(value) < 0) or (form == "timespec" and value == 0):
            return []
        exact = _remainder(number, fixed, memory)
        known = self._waits.get(tid)
        signature = _signature(fixed)
        if exact is not None:
            left = exact
        elif known is not None and known.number == number and known.signature == signature:
            left = max(0.0, known.deadline - now)
        else:
            left = max(0.0, met + _requested(number, fixed, memory) - now)
        out: list[tuple[int, bytes]] = []
        if form == "ms":
            setattr(fixed, register, int(left * 1000 + 0.999))
        else:
            # below the red zone nothing of the program's is kept (System V ABI, x86-64)
            address = (fixed.rsp - 256) & ~15
            seconds = int(left)
            out = [(address, struct.pack("<qq", seconds, int((left - seconds) * 1e9)))]
            setattr(fixed, register, address)
        self._waits[tid] = _Wait(number, now + left, _signature(fixed))
        return out


def ended_by_handler(registers: Registers, flags: int) -> Registers | None:
    """Registers of a thread whose call a handler with these sa_flags ends; None: it restarts.

    `registers` are those of the stop: the kernel's answer is still in them.
    """
    number, result = _signed(registers.orig_rax), _signed(registers.rax)
    if number < 0 or not (
        result in (-ERESTARTNOHAND, -ERESTART_RESTARTBLOCK)
        or (result == -ERESTARTSYS and not flags & _SA_RESTART)
        or (result == -EINTR and number in _EINTR_CALLS)
    ):
        return None
    ended = _plain(registers)
    ended.rax = -EINTR
    return ended


def deliverable(tid: int) -> bool:
    """True when a signal with a handler is pending and not blocked: its EINTR is the real one."""
    status = proc.status(tid)
    pending = int(status["SigPnd"], 16) | int(status["ShdPnd"], 16)
    return bool(pending & ~int(status["SigBlk"], 16) & int(status["SigCgt"], 16))


def _requested(number: int, registers: Registers, memory: int) -> float:
    """Seconds the call asked for; a year when it asked for no end or an absolute one."""
    where = _EINTR_CALLS.get(number) or _BLOCK_CALLS.get(number)
    year = 31536000.0
    if where is None or (number == _FUTEX and registers.rsi & 0x7F != _FUTEX_WAIT):
        return year
    value = getattr(registers, where[0])
    if where[1] == "ms":
        return _signed32(value) / 1000 if _signed32(value) >= 0 else year
    if value == 0:
        return year
    exact = _remainder(number, registers, memory)
    if exact is not None:
        return exact
    return _timespec(memory, value)


def _remainder(number: int, registers: Registers, memory: int) -> float | None:
    """What the kernel has written back as remaining, where the caller asked for it."""
    if number == _NANOSLEEP and registers.rsi:
        return _timespec(memory, registers.rsi)
    if number == _CLOCK_NANOSLEEP and registers.r10:
        return _timespec(memory, registers.r10)
    return None


def _charge(number: int, registers: Registers, memory: int, pause: float) -> None:
    """Take the pause off a remaining time that the kernel noted when the pause began."""
    register, unit = _UPDATED_CALLS[number]
    address = getattr(registers, register)
    if not address:
        return
    seconds, fraction = struct.unpack("<qq", os.pread(memory, 16, address))
    left = seconds * unit + fraction
    if left <= 0:
        return
    left = max(1, left - int(pause * unit))
    os.pwrite(memory, struct.pack("<qq", *divmod(left, unit)), address)


def _timespec(memory: int, address: int) -> float:
    data = os.pread(memory, 16, address)
    seconds, nanoseconds = struct.unpack("<qq", data)
    return float(seconds) + float(nanoseconds) / 1e9


def _number_before(registers: Registers, memory: int) -> int:
    """The number of a call that was restarted before we first saw it: `mov $number, %eax`."""
    code = os.pread(memory, 7, registers.rip - 7)
    if code[0] == 0xB8 and code[5:] == b"\x0f\x05":
        number: int = struct.unpack_from("<I", code, 1)[0]
        if number in _BLOCK_CALLS:
            return number
    raise UnknownCall


def _signature(registers: Registers) -> tuple[int, ...]:
    r = registers
    return (r.rsp, r.rdi, r.rsi, r.rdx, r.r10)


def _rewound(registers: Registers, number: int) -> Registers:
    fixed = _plain(registers)
    fixed.rax = number
    fixed.rip -= 2  # the length of `syscall`
    return fixed


def _plain(registers: Registers) -> Registers:
    fixed = registers.copy()
    fixed.orig_rax = -1
    return fixed


def _signed(value: int) -> int:
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


def _signed32(value: int) -> int:
    value &= (1 << 32) - 1
    return value - (1 << 32) if value >> 31 else value
