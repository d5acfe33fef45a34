"""Pipes between the keeper and the programs, read and written by one thread.

Programs talk to their callers through pipes whose other ends we hold. One thread, the `Pump`,
reads them all into buffers and writes what is waiting for a program's standard input; callers wait
on their sandbox's condition. A thread per stream would be simpler to read, but a rollback replaces
every stream of a sandbox at once, and it is easier to swap entries of an epoll set than to stop
threads that sit in `read`.

Two kinds of buffer, because two things are asked of them. `Kept` collects the output of a command
for its result: a list of chunks, so that a checkpoint copies references and not 16 MiB, with a cap
beyond which output is still read but thrown away. `Unread` is what a caller of `Process.stdout` has
not read yet: one `bytearray` to search in, with back-pressure instead of a cap: when it is full we
stop reading and the program blocks in `write`, as it would on any pipe.

Every method of `Reader` and `Writer` is called with the sandbox's lock held. A checkpoint takes
this lock while the programs are stopped, drains the pipes and copies the buffers; nothing can be
in flight between a pipe and its buffer then.
"""

from __future__ import annotations

import errno
import logging
import os
import select
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

log = logging.getLogger(__name__)

CAP: Final = 16 << 20
"""Bytes of one stream of a command that are kept for its result."""
FULL: Final = 1 << 20
"""Bytes a caller may leave unread before the program has to wait."""
CHUNK: Final = 65536

READ: Final = select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR
WRITE: Final = select.EPOLLOUT | select.EPOLLERR


class Pump(threading.Thread):
    """Calls back when a file descriptor has something: one epoll, one thread, for everything."""

    def __init__(self) -> None:
        super().__init__(name="pump", daemon=True)
        self._epoll = select.epoll()
        self._watched: dict[int, Callable[[int], None]] = {}
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._ended = False
        self._epoll.register(self._wake, select.EPOLLIN)

    def watch(self, fd: int, events: int, callback: Callable[[int], None]) -> None:
        """Call `callback(events)` in the pump's thread whenever one of `events` holds for `fd`."""
        self._watched[fd] = callback
        self._epoll.register(fd, events)

    def change(self, fd: int, events: int) -> None:
        """Watch `fd`, which is watched already, for other events."""
        self._epoll.modify(fd, events)

    def forget(self, fd: int) -> None:
        """Stop watching `fd`; to be called before it is closed. Forgetting twice is no error."""
        if self._watched.pop(fd, None) is not None:
            try:
                self._epoll.unregister(fd)
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.EBADF):
                    raise

    def run(self) -> None:
        watched = self._watched
        while not self._ended:
            for fd, events in self._epoll.poll():
                callback = watched.get(fd)
                if callback is None:
                    continue
                try:
                    callback(events)
                except Exception:
                    log.exception("fd %d: no longer watched", fd)
                    self.forget(fd)

    def end(self) -> None:
        """End the thread; what is watched stays open."""
        self._ended = True
        os.eventfd_write(self._wake, 1)
        if threading.current_thread() is not self:
            self.join()
        self._epoll.close()
        os.close(self._wake)


class Kept:
    """The output of a command, up to `cap` bytes, for its result."""

    __slots__ = ("cap", "chunks", "size", "truncated")

    def __init__(
        self, chunks: tuple[bytes, ...] = (), *, truncated: bool = False, cap: int = CAP
    ) -> None:
        self.chunks = list(chunks)
        self.size = sum(map(len, self.chunks))
        self.truncated = truncated
        self.cap = cap

    def add(self, data: bytes) -> None:
        room = self.cap - self.size
        if len(data) > room:
            self.truncated = True
            data = data[:room]
        if not data:
            return
        self.size += len(data)
        if self.chunks and len(self.chunks[-1]) < 4096:
            self.chunks[-1] += data
        else:
            self.chunks.append(data)

    def take(self) -> tuple[bytes, bool]:
        """Everything kept and whether more was thrown away; the buffer is empty and new."""
        result = b"".join(self.chunks), self.truncated
        self.chunks = []
        self.size = 0
        self.truncated = False
        return result

    @property
    def full(self) -> bool:
        return False

    def save(self) -> tuple[tuple[bytes, ...], bool]:
        return tuple(self.chunks), self.truncated


class Unread:
    """What a program has written and its caller has not read."""

    __slots__ = ("data", "wanted")

    def __init__(self, chunks: tuple[bytes, ...] = ()) -> None:
        self.data = bytearray(b"".join(chunks))
        self.wanted = 0

    def add(self, data: bytes) -> None:
        self.data += data

    def take(self, size: int) -> bytes:
        """Remove and return the first `size` bytes."""
        result = bytes(memoryview(self.data)[:size])
        del self.data[:size]
        return result

    @property
    def full(self) -> bool:
        return len(self.data) >= FULL and not self.wanted

    def save(self) -> tuple[tuple[bytes, ...], bool]:
        return ((bytes(self.data),) if self.data else ()), False


@dataclass(frozen=True)
class SavedReader:
    """A `Reader` as a checkpoint keeps it."""

    name: str
    chunks: tuple[bytes, ...]
    truncated: bool
    live: tuple[bytes, ...] | None
    eof: bool


@dataclass(frozen=True)
class SavedWriter:
    """A `Writer` as a checkpoint keeps it."""

    chunks: tuple[bytes, ...]
    closing: bool
    closed: bool


class Reader:
    """One stream from a program. `changed` is the sandbox's condition (its lock is held).

    `live` holds what is still to be streamed to an `on_stdout` callback; None when nobody asked.
    `discard` is set when nobody will ever ask for the output: it is read and dropped, so that
    programs left in the background neither block nor die of SIGPIPE. `held` is set while a rollback
    ends the program.
    """

    def __init__(
        self,
        name: str,
        buffer: Kept | Unread,
        *,
        pump: Pump,
        changed: threading.Condition,
        after: Callable[[], None] | None = None,
    ) -> None:
        self.name = name
        self.buffer = buffer
        self.live: deque[bytes] | None = None
        self.discard = False
        self.held = False
        self.fd = -1
        self.inode = 0
        self.eof = True
        self.passed = 0  # bytes that were read from the pipe
        self._paused = False
        self._pump = pump
        self._changed = changed
        self._after = after

    def open(self, owner: int) -> int:
        """Make the pipe; the program's end, which the caller closes once it is handed over."""
        ours, theirs = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(ours, False)
        os.fchown(theirs, owner, owner)
        self.fd = ours
        self.inode = os.fstat(ours).st_ino
        self.eof = False
        self._pump.watch(ours, READ, self._on_event)
        return theirs

    def attach(self, fd: int) -> None:
        """Read this from now on: a descriptor of a terminal's master, which is ours to close."""
        self.fd = fd
        self.eof = False
        self._pump.watch(fd, READ, self._on_event)

    def _on_event(self, _events: int) -> None:
        with self._changed:
            if self.fd < 0:
                return
            if self._paused:
                return
            if self._full:
                self._pause()
                return
            if self.pull():
                if self._after is not None:
                    self._after()
                self._changed.notify_all()

    @property
    def _full(self) -> bool:
        if self.discard:
            return False
        return self.buffer.full or (self.live is not None and len(self.live) > 64)

    def _pause(self) -> None:
        self._paused = True
        self._pump.forget(self.fd)

    def hold(self) -> None:
        """Read no more until `resume`: what is in the pipe from now on is nobody's business."""
        self.held = True
        if self.fd >= 0 and not self._paused:
            self._pause()

    def resume(self) -> None:
        """Read on, after a caller has made room or wants more than fits."""
        if self._paused and self.fd >= 0 and not self.held and not self._full:
            self._paused = False
            self._pump.watch(self.fd, READ, self._on_event)

    def pull(self) -> bool:
        """Read once, without waiting; whether there was anything (the end counts)."""
        if self.fd < 0 or self.held:
            return False
        try:
            data = os.read(self.fd, CHUNK)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno != errno.EIO or not _hung_up(self.fd):
                raise
            data = b""  # so a terminal tells that nobody has it open any more
        self.passed += len(data)
        if not data:
            self.close()
            return True
        if not self.discard:
            self.buffer.add(data)
            if self.live is not None:
                self.live.append(data)
        return True

    def drain(self) -> None:
        """Read all that is in the pipe now (bounded: a program may be writing for ever)."""
        for _ in range(64):
            if not self.pull():
                return

    def close(self) -> None:
        """Close our end: end of stream."""
        self.eof = True
        if self.fd >= 0:
            if not self._paused:
                self._pump.forget(self.fd)
            os.close(self.fd)
            self.fd = -1

    def save(self) -> SavedReader:
        """The buffer as it is now, for a checkpoint."""
        chunks, truncated = self.buffer.save()
        live = None if self.live is None else tuple(self.live)
        return SavedReader(self.name, chunks, truncated, live, self.eof)


def _hung_up(fd: int) -> bool:
    """Whether this is a terminal's master, and nobody has the other side open."""
    poller = select.poll()
    poller.register(fd, 0)
    return os.isatty(fd) and bool(poller.poll(0))


_PIECE = 1 << 16  # bytes


class Writer:
    """A program's standard input. What does not fit into the pipe waits in `waiting`."""

    def __init__(self, *, pump: Pump, changed: threading.Condition) -> None:
        self.waiting: deque[bytes] = deque()
        self.size = 0
        self.closing = False
        self.broken = False
        self.held = False
        self.fd = -1
        self.inode = 0
        self.passed = 0  # bytes that were written to the pipe
        self._watching = False
        self._pump = pump
        self._changed = changed

    def open(self, owner: int) -> int:
        """Make the pipe; the program's end, which the caller closes once it is handed over."""
        theirs, ours = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(ours, False)
        os.fchown(theirs, owner, owner)
        self.fd = ours
        self.inode = os.fstat(ours).st_ino
        return theirs

    def attach(self, fd: int) -> None:
        """Write to this: a descriptor of a terminal's master, which is ours to close."""
        self.fd = fd

    @property
    def closed(self) -> bool:
        """Whether no more can be written."""
        return self.closing or self.fd < 0

    def add(self, data: bytes) -> None:
        """Queue `data` and write what the pipe takes."""
        # in pieces: what is left of one is copied whenever a pipe has taken a part of it
        self.waiting.extend(data[at : at + _PIECE] for at in range(0, len(data), _PIECE))
        self.size += len(data)
        self.flush()

    def flush(self) -> None:
        """Write what the pipe takes; watch for room if something is left over."""
        if self.held or self.fd < 0:
            return
        while self.waiting:
            data = self.waiting[0]
            try:
                done = os.write(self.fd, data)
            except BlockingIOError:
                break
            except OSError:
                self.broken = True
                self.close()
                return
            self.size -= done
            self.passed += done
            if done == len(data):
                self.waiting.popleft()
            else:
                self.waiting[0] = data[done:]
        if not self.waiting and self.closing:
            self.close()
        elif bool(self.waiting) != self._watching:
            self._watching = not self._watching
            if self._watching:
                self._pump.watch(self.fd, WRITE, self._on_event)
            else:
                self._pump.forget(self.fd)

    def _on_event(self, _events: int) -> None:
        with self._changed:
            if self.fd < 0:
                return
            if self.held:
                self._watching = False
                self._pump.forget(self.fd)
                return
            self.flush()
            self._changed.notify_all()

    def finish(self) -> None:
        """Close the program's standard input once everything waiting has been written."""
        self.closing = True
        self.flush()

    def close(self) -> None:
        """Close our end now; what is waiting is dropped."""
        self.waiting.clear()
        self.size = 0
        if self.fd >= 0:
            if self._watching:
                self._watching = False
                self._pump.forget(self.fd)
            os.close(self.fd)
            self.fd = -1

    def save(self) -> SavedWriter:
        """What is waiting now, for a checkpoint; what is in the pipe is the engine's to keep."""
        return SavedWriter(tuple(self.waiting), self.closing, self.fd < 0)
