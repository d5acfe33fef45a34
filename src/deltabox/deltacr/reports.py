"""What comes out of a tree unasked: ends of PID 1's children, and watchers of restored processes.

A restored process makes its own userfaultfd, because the kernel ties one to the memory of who makes
it, and sends it here before it runs: the next checkpoint reads only what it will have written
(space.py).  The descriptor never stays in its table.  Where the host has no such thing, none comes.
"""

from __future__ import annotations

import array
import os
import socket
import struct
import threading
from dataclasses import dataclass

from ..linux import numbers as nr
from ..linux import userfaultfd
from . import boot
from .model import Process
from .rebuild import Rebuild
from .records import Sequence

_REPORT = struct.Struct("<ii")
_WATCHER = -1  # in place of a wait status, which is never negative
_CONTROL = socket.CMSG_SPACE(4)
_FD_AT = 16  # behind struct cmsghdr


@dataclass(frozen=True)
class Exit:
    """The end of a child of PID 1: its pid inside, and its wait status (wait(2))."""

    pid: int
    status: int


class Reports:
    """The keeper's end of a tree's socket for reports. Thread-safe."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._lock = threading.Lock()
        self._watchers: dict[int, int] = {}
        self._ended = False
        sock.setblocking(False)

    def fileno(self) -> int:
        return self.sock.fileno()

    def exits(self) -> list[Exit]:
        """Ends reported since the last call; EOFError when PID 1 itself has died."""
        with self._lock:
            found = []
            while report := self._next():
                found.append(Exit(*report))
            if self._ended and not found:
                raise EOFError("PID 1 of the sandbox has died")
            return found

    def collect(self) -> None:
        """Take in the watchers that have come, so that nobody waits to send more."""
        with self._lock:
            self._take_watchers()

    def watcher(self, pid: int) -> int:
        """The userfaultfd of a restored process, now the caller's; -1 if there is none."""
        with self._lock:
            self._take_watchers()
            return self._watchers.pop(pid, -1)

    def _take_watchers(self) -> None:
        """They all come before the first end, which is left to whom the socket wakes for it."""
        while not self._ended:
            try:
                data = self.sock.recv(_REPORT.size, socket.MSG_PEEK)
            except (BlockingIOError, ConnectionResetError):
                return
            if not data or _REPORT.unpack(data)[1] != _WATCHER:
                return
            self._receive()

    def _next(self) -> tuple[int, int] | None:
        """The next end that is reported; None when there is none."""
        while not self._ended:
            try:
                report = self._receive()
            except BlockingIOError:
                return None
            if report is not None:
                return report
        return None

    def _receive(self) -> tuple[int, int] | None:
        """Take one message; None for a watcher, or the end."""
        try:
            data, control, _, _ = self.sock.recvmsg(_REPORT.size, _CONTROL)
        except ConnectionResetError:
            data, control = b"", []
        if not data:
            self._ended = True
            return None
        pid, status = _REPORT.unpack(data)
        if status != _WATCHER:
            return pid, status
        self._keep(pid, b"".join(content for _, _, content in control))
        return None

    def _keep(self, pid: int, content: bytes) -> None:
        received = array.array("i")
        received.frombytes(content[: len(content) & ~3])
        for fd in received:
            if pid in self._watchers:
                os.close(self._watchers[pid])
            self._watchers[pid] = fd

    def close(self) -> None:
        with self._lock:
            self._take_watchers()
            self._ended = True
            for fd in self._watchers.values():
                os.close(fd)
            self._watchers.clear()
            self.sock.close()


def send_watcher(rebuild: Rebuild, do: Sequence, process: Process) -> None:
    """Records by which a process being rebuilt makes its watcher and sends it."""
    if not userfaultfd.supported():
        return
    program = rebuild.program
    made = program.variable()
    message = rebuild.message(_REPORT.pack(process.pid, _WATCHER), fds=(0,))
    control = rebuild.control
    do.call(userfaultfd.USERFAULTFD, userfaultfd.FLAGS, save=made, may_fail=True)
    do.skip_if_error(made, 3)
    do.store(control + _FD_AT, made)
    do.call(nr.SENDMSG, boot.REPORTS, message, 0, what="send the watcher")
    do.call(nr.CLOSE, made)
