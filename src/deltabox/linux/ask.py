"""Lists of questions to the kernel, prepared once and asked again and again: the face of ask.c.

A list is packed when it is made, so asking it costs one call and no Python for each question.  An
answer is looked at when somebody wants it: bytes, or the OSError that the question met.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import threading
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

from . import beside
from .bulk import library

_ask = library.bulk_ask
_ask.restype = ctypes.c_long
_QUESTION = struct.Struct("=IiQQ")
_ANSWER = struct.Struct("=qQ")
_DESCRIPTOR = struct.Struct("=Iii4x7Q")
_ROOM = 1 << 18
_STAT = struct.Struct("=7Q")


class Kind(IntEnum):
    """What ask.c can ask; the same numbers."""

    READ = 0
    LINK = 1
    STAT = 2
    IN_ROOT = 3
    DESCRIPTORS = 4
    REGISTERS = 5
    SIGNAL_MASK = 6
    SIGNALS = 7
    RSEQ = 8
    DISPATCH = 9
    ROBUST_LIST = 10
    SCHEDULING = 11
    AFFINITY = 12
    IO_PRIORITY = 13
    FLAGS = 14
    NAMESPACES = 15


@dataclass(frozen=True)
class Facts:
    """Of struct stat; `changed` is st_ctime in nanoseconds.

    As the answer to IN_ROOT a device of 0 is that of the root itself.
    """

    device: int
    inode: int
    mode: int
    rdev: int
    links: int
    size: int
    changed: int

    @classmethod
    def unpack(cls, raw: bytes) -> Facts:
        return cls(*_STAT.unpack(raw))

    @classmethod
    def of(cls, info: os.stat_result) -> Facts:
        return cls(
            info.st_dev,
            info.st_ino,
            info.st_mode,
            info.st_rdev,
            info.st_nlink,
            info.st_size,
            info.st_ctime_ns,
        )


@dataclass(frozen=True)
class Descriptor:
    """One open descriptor: the text of its link, its fdinfo, the stat of what is open."""

    number: int
    link: bytes
    info: bytes
    facts: Facts


class _Buffers(threading.local):
    """Room for answers, one for each thread; it grows to what was needed once."""

    def __init__(self) -> None:
        self.room = 1 << 20
        self.bytes = ctypes.create_string_buffer(self.room)

    def grow(self) -> None:
        self.room *= 4
        self.bytes = ctypes.create_string_buffer(self.room)


_buffers = _Buffers()
_packing = threading.Lock()  # what C reads must not be made twice


class Questions:
    """A list of questions by name. Built, then asked any number of times."""

    def __init__(self) -> None:
        self.names: dict[str, int] = {}
        self._entries: list[tuple[int, int, int, int]] = []  # kind, who, more, offset of the path
        self._paths = bytearray()
        self._packed: ctypes.Array[ctypes.c_char] | None = None
        self._kept: ctypes.Array[ctypes.c_char] | None = None

    def add(
        self, name: str, kind: Kind, path: str | bytes = b"", *, who: int = 0, more: int = 0
    ) -> None:
        """Ask `kind` of ids[who], the ids (process, threads or a descriptor) being given later.

        A path is a format of ids[0] and ids[who], but for IN_ROOT.
        """
        self.names[name] = len(self._entries)
        self._entries.append((kind, who, more, len(self._paths)))
        self._paths += os.fsencode(path) + b"\0"

    def _pack(self) -> ctypes.Array[ctypes.c_char]:
        with _packing:
            return self._packed or self._pack_now()

    def _pack_now(self) -> ctypes.Array[ctypes.c_char]:
        self._kept = ctypes.create_string_buffer(bytes(self._paths), len(self._paths))
        base = ctypes.addressof(self._kept)
        packed = b"".join(_QUESTION.pack(k, w, m, base + at) for k, w, m, at in self._entries)
        self._packed = ctypes.create_string_buffer(packed, max(len(packed), 1))
        return self._packed

    @property
    def address(self) -> int:
        """Where the packed list is, which has as many entries as there are names."""
        return ctypes.addressof(self._packed or self._pack())

    def answers(self, raw: bytes, packed: bytes) -> Answers:
        """What C has answered elsewhere: the bytes, and the struct answer of each question."""
        return Answers(self.names, raw, list(_ANSWER.iter_unpack(packed)))

    def begin(self, ids: Sequence[int]) -> Callable[[], Answers]:
        """Have another thread ask; what is returned waits for it. It must be called."""
        about = array("i", ids)
        answers = ctypes.create_string_buffer(_ANSWER.size * len(self.names) or 1)
        room = ctypes.create_string_buffer(_ROOM)
        job = beside.ask(
            self.address,
            len(self.names),
            about.buffer_info()[0],
            ctypes.addressof(room),
            _ROOM,
            ctypes.addressof(answers),
            keep=(self, about, room, answers),
        )

        def finish() -> Answers:
            got = job.wait()
            if got == -errno.E2BIG:
                return self.ask(ids)
            return self.answers(memoryview(room)[:got].tobytes(), answers.raw)

        return finish

    def ask(self, ids: Sequence[int]) -> Answers:
        """Ask all of them of these."""
        about = array("i", ids)
        packed = self._packed or self._pack()
        count = len(self._entries)
        answers = ctypes.create_string_buffer(_ANSWER.size * count or 1)
        while True:
            got = _ask(
                packed,
                ctypes.c_long(count),
                ctypes.c_void_p(about.buffer_info()[0]),
                _buffers.bytes,
                ctypes.c_uint64(_buffers.room),
                answers,
            )
            if got != -errno.E2BIG:
                break
            _buffers.grow()
        raw = memoryview(_buffers.bytes)[:got].tobytes()
        return Answers(self.names, raw, list(_ANSWER.iter_unpack(answers.raw)) if count else [])


class Answers:
    """What the kernel has said."""

    __slots__ = ("_answers", "_names", "_raw")

    def __init__(self, names: dict[str, int], raw: bytes, answers: list[tuple[int, int]]) -> None:
        self._names = names
        self._raw = raw
        self._answers = answers

    @property
    def names(self) -> Iterable[str]:
        """The names of the questions, in their order."""
        return self._names

    def __getitem__(self, name: str) -> bytes:
        """The answer; raises the OSError that the question met."""
        result, at = self._answers[self._names[name]]
        if result < 0:
            raise OSError(-result, os.strerror(-result), name)
        return self._raw[at : at + result]

    def get(self, name: str) -> bytes | None:
        """The answer, or None where there was an error."""
        result, at = self._answers[self._names[name]]
        return None if result < 0 else self._raw[at : at + result]

    def find(self, name: str) -> bytes | None:
        """The answer, or None where there was an error or no such question."""
        return self.get(name) if name in self._names else None

    def text(self, name: str) -> str:
        return os.fsdecode(self[name])

    def facts(self, name: str) -> Facts:
        return Facts.unpack(self[name])

    def descriptors(self, name: str) -> Iterator[tuple[bytes, Descriptor]]:
        """(the whole answer, to be compared; what it says) for each open descriptor."""
        raw = self[name]
        at = 0
        while at < len(raw):
            number, link, info, *facts = _DESCRIPTOR.unpack_from(raw, at)
            first = at + _DESCRIPTOR.size
            end = first + link + info
            yield (
                raw[at:end],
                Descriptor(
                    number,
                    raw[first : first + link],
                    raw[first + link : end],
                    Facts(*facts),
                ),
            )
            at = (end + 7) & ~7

    def same(self, other: Answers) -> bool:
        """Whether the same questions had the same answers, errors included."""
        return self._raw == other._raw and self._answers == other._answers
