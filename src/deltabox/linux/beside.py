"""Long calls that another thread makes meanwhile: the face of beside.c."""

from __future__ import annotations

import ctypes
import os
from enum import IntEnum

from .bulk import library

library.beside_begin.restype = ctypes.c_long


class _Kind(IntEnum):
    IOCTL = 0
    MEMORIES = 1
    ASK = 2
    READ_PAGES = 3
    WRITE_PAGES = 4


class _Job(ctypes.Structure):
    _fields_ = [
        ("kind", ctypes.c_uint64),
        ("arguments", ctypes.c_uint64 * 7),
        ("result", ctypes.c_int64),
        ("nice", ctypes.c_int64),
        ("done", ctypes.c_uint64),
        ("next", ctypes.c_void_p),
    ]


class Job:
    """A call that has begun. It must be waited for, whatever happens: it uses our memory."""

    def __init__(self, kind: _Kind, arguments: tuple[int, ...], keep: object) -> None:
        self._job = _Job(kind, (ctypes.c_uint64 * 7)(*arguments))
        self._keep = keep
        bad = library.beside_begin(ctypes.byref(self._job))
        if bad:
            raise OSError(-bad, os.strerror(-bad))

    def wait(self) -> int:
        """Wait for its end; its result, below zero an errno. May be called again."""
        if not self._job.done:
            library.beside_wait(ctypes.byref(self._job))
        return int(self._job.result)

    def check(self) -> None:
        """Wait for its end; raises the OSError that it met."""
        self.count()

    def count(self) -> int:
        """The same, with its result."""
        result = self.wait()
        if result < 0:
            raise OSError(-result, os.strerror(-result))
        return result


def ioctl(fd: int, request: int, argument: bytes) -> Job:
    """Begin ioctl(2) with a copy of `argument`; `fd` must stay open until it is done."""
    buffer = ctypes.create_string_buffer(argument, len(argument))
    return Job(_Kind.IOCTL, (fd, request, ctypes.addressof(buffer), 0), buffer)


def memories(jobs: int, count: int, room: int, size: int, keep: object) -> Job:
    """Begin bulk_memories() in ask.c with these addresses and sizes."""
    return Job(_Kind.MEMORIES, (jobs, count, room, size), keep)


def ask(
    questions: int, count: int, ids: int, room: int, size: int, answers: int, keep: object
) -> Job:
    """Begin bulk_ask() in ask.c with these addresses and sizes."""
    return Job(_Kind.ASK, (questions, count, ids, room, size, answers), keep)


def read_pages(*arguments: int, keep: object) -> Job:
    """Begin pages_read() in pages.c with these addresses and numbers."""
    return Job(_Kind.READ_PAGES, arguments, keep)


def write_pages(*arguments: int, keep: object) -> Job:
    """Begin pages_write() in pages.c with these addresses and numbers."""
    return Job(_Kind.WRITE_PAGES, arguments, keep)
