"""Stopping threads, letting them go, and system calls in a stopped one: the face of stop.c.

Everything must be called by the thread that seizes (ptrace(2)).
"""

from __future__ import annotations

import ctypes
import errno
import os
from array import array
from collections.abc import Sequence
from pathlib import Path

from .bulk import library

SAVED = 28 * 8
_NOT_YET, _GONE = -1, -errno.ECHILD - 1

for _name in ("bulk_tasks", "bulk_await", "bulk_save", "bulk_put_back", "bulk_call", "bulk_batch"):
    getattr(library, _name).restype = ctypes.c_long

Saved = ctypes.Array[ctypes.c_char]


class Killed(Exception):
    """The thread ended in the middle."""

    def __str__(self) -> str:
        return "killed meanwhile"


class StoppedElsewhere(Exception):
    """The thread stopped, but not where it should have."""

    def __init__(self, status: int) -> None:
        super().__init__(f"stopped unexpectedly ({status:#x})")


def tasks(group: Path) -> list[tuple[int, int]]:
    """(pid, tid) of all threads in a control group."""
    procs = os.fsencode(group / "cgroup.procs")
    room = 1024
    while True:
        pairs = array("i", bytes(8 * room))
        got = library.bulk_tasks(procs, _at(pairs), ctypes.c_long(room))
        if got != -errno.E2BIG:
            _check(got)
            return list(zip(pairs[0 : 2 * got : 2], pairs[1 : 2 * got : 2], strict=True))
        room *= 8


def seize(tids: Sequence[int], options: int) -> list[int]:
    """PTRACE_SEIZE and PTRACE_INTERRUPT; for each 0 or the errno of a seize that failed."""
    packed = array("i", tids)
    results = array("i", bytes(4 * len(tids)))
    library.bulk_seize(_at(packed), ctypes.c_long(len(tids)), ctypes.c_ulong(options), _at(results))
    return [-result for result in results]


def await_stops(tids: Sequence[int], patience: float) -> list[int | None]:
    """The wait statuses of seized threads; None for who has not stopped within `patience` s.

    -1 stands for one that is gone.
    """
    packed = array("i", tids)
    statuses = array("i", [_NOT_YET] * len(tids))
    library.bulk_await(
        _at(packed),
        ctypes.c_long(len(tids)),
        _at(statuses),
        ctypes.c_uint64(int(patience * 1e9)),
    )
    return [None if s == _NOT_YET else -1 if s == _GONE else s for s in statuses]


def stopped(tids: Sequence[int]) -> list[bool]:
    """Whether each is in a stop of ours."""
    packed = array("i", tids)
    results = array("i", bytes(4 * len(tids)))
    library.bulk_stopped(_at(packed), ctypes.c_long(len(tids)), _at(results))
    return [bool(result) for result in results]


def detach(tids: Sequence[int]) -> list[int]:
    """PTRACE_DETACH; for each 0 or the errno."""
    packed = array("i", tids)
    results = array("i", bytes(4 * len(tids)))
    library.bulk_detach(_at(packed), ctypes.c_long(len(tids)), _at(results))
    return [-result for result in results]


def save(tid: int) -> Saved:
    """Registers and signal mask, which system calls of ours change."""
    saved = ctypes.create_string_buffer(SAVED)
    _check(library.bulk_save(tid, saved))
    return saved


def put_back(tid: int, saved: Saved) -> None:
    _check(library.bulk_put_back(tid, saved))


def call(tid: int, saved: Saved, instruction: int, numbers: Sequence[int], *, stepped: bool) -> int:
    """One system call (number, arguments) through a `syscall` instruction at that address.

    `stepped` is faster, but takes a SIGTRAP that the thread must not ignore.
    """
    packed = (ctypes.c_int64 * 7)(*(_signed(n) for n in numbers))
    result, status = ctypes.c_int64(), ctypes.c_int()
    bad = library.bulk_call(
        tid,
        saved,
        ctypes.c_uint64(instruction),
        packed,
        int(stepped),
        ctypes.byref(result),
        ctypes.byref(status),
    )
    _check(bad, status.value)
    return result.value


def batch(
    tid: int, saved: Saved, memory: int, code: int, records: int, data: int, calls: bytes
) -> tuple[int, ...]:
    """Run injected code over packed calls (inject.py); the kernel's results."""
    count = len(calls) // 64
    results, status = (ctypes.c_int64 * count)(), ctypes.c_int()
    bad = library.bulk_batch(
        tid,
        saved,
        memory,
        ctypes.c_uint64(code),
        ctypes.c_uint64(records),
        ctypes.c_uint64(data),
        calls,
        ctypes.c_long(count),
        results,
        ctypes.byref(status),
    )
    _check(bad, status.value)
    return tuple(results)


def _at(packed: array[int]) -> ctypes.c_void_p:
    return ctypes.c_void_p(packed.buffer_info()[0])


def _signed(value: int) -> int:
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


def _check(result: int, status: int = 0) -> None:
    if result == -errno.ESRCH:
        if status:
            raise Killed
        raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
    if result == -errno.EPROTO:
        raise StoppedElsewhere(status)
    if result < 0:
        raise OSError(-result, os.strerror(-result))
