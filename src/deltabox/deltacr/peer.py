"""A process that runs the interpreter, as the keeper sees it: send a program, get its result.

Templates, their doors and every PID 1 are peers.  A request is one seqpacket message with the
control memory (a memfd) and the descriptors the program uses; the answer is one number.  The
control memory stays mapped here too, so results and errors are read from it, not sent.
"""

from __future__ import annotations

import array
import contextlib
import errno
import mmap
import os
import signal
import socket
import struct
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..linux import pidfd
from .records import BUDGET_OFFSET, VARIABLES_OFFSET, Sealed, Var

MAX_DESCRIPTORS = 250
_WORD = struct.Struct("<Q")
_PATIENCE = 10.0  # seconds until no answer is taken for an end
_SLOWEST = 50e6  # bytes a second that a program copies at least, into memory never used before


class ProgramFailed(Exception):
    """A record failed; nothing after it ran."""

    def __init__(self, error: int, where: str) -> None:
        super().__init__(f"{where}: {os.strerror(error)}")
        self.errno = error
        self.where = where


def lacks_tasks(error: BaseException | None) -> bool:
    """Whether it is because no process could be made (fork(2): EAGAIN)."""
    while error is not None:
        if getattr(error, "errno", None) == errno.EAGAIN:
            return True
        error = error.__cause__
    return False


class PeerGone(Exception):
    """The process at the other end has ended."""


# The test mode (keeper/faults.py) chooses which record of a program fails; 0 means none.
choose_fault: Callable[[int], int] = lambda records: 0  # noqa: E731


@dataclass
class Run:
    """The control memory of one program that was sent."""

    sealed: Sealed
    memory: mmap.mmap

    def variable(self, var: Var) -> int:
        value: int = struct.unpack_from("<q", self.memory, VARIABLES_OFFSET + 8 * var.index)[0]
        return value

    def give_up(self) -> None:
        """Make every party of the program that still waits for another stop waiting."""
        struct.pack_into("<IiQ", self.memory, 0, 1, errno.ETIMEDOUT, 0)

    def check(self) -> None:
        failed, error, where = struct.unpack_from("<IiQ", self.memory, 0)
        if failed:
            raise ProgramFailed(error, self.sealed.locate(where))


class Loaded:
    """A program in control memory of its own, made for one slot; ready to be started once."""

    def __init__(self, sealed: Sealed, slot: int) -> None:
        if len(sealed.inputs) > MAX_DESCRIPTORS:
            raise ProgramFailed(errno.EMFILE, "too many descriptors for one program")
        address, size, words = sealed.place(slot)
        self.request = struct.pack("<3Q", address, size, sealed.entry)
        self.memfd = os.memfd_create("deltabox", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.memfd, size)
            os.pwrite(self.memfd, sealed.content, 0)
            memory = mmap.mmap(self.memfd, size)
            for at, value in words:
                _WORD.pack_into(memory, at, value)
        except BaseException:
            self.close()
            raise
        self.run = Run(sealed, memory)

    def close(self) -> None:
        """Our descriptor of it; the memory stays as long as it is mapped."""
        if self.memfd >= 0:
            os.close(self.memfd)
            self.memfd = -1

    def __enter__(self) -> Loaded:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Peer:
    """One end of a conversation; requests are serialized."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.lock = threading.Lock()

    def send(self, sealed: Sealed, slot: int, fds: Mapping[str, int]) -> Run:
        """Start a program without waiting for it."""
        return self.start(Loaded(sealed, slot), fds)

    def start(self, loaded: Loaded, fds: Mapping[str, int]) -> Run:
        """As `send`, of a program that lies in its control memory already; it is used up."""
        with loaded:
            run = loaded.run
            budget = choose_fault(run.sealed.records)
            if budget:
                _WORD.pack_into(run.memory, BUDGET_OFFSET, budget)
            numbers = array.array("i", [loaded.memfd, *(fds[name] for name in run.sealed.inputs)])
            try:
                self.sock.sendmsg(
                    [loaded.request], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, numbers)]
                )
            except (BrokenPipeError, ConnectionResetError) as error:
                raise PeerGone("the process that runs programs has ended") from error
        return run

    def answer(self, run: Run, timeout: float = _PATIENCE) -> None:
        """Wait for a program that was sent; raises what went wrong in it."""
        self.sock.settimeout(timeout)
        try:
            data = self.sock.recv(8)
        except ConnectionResetError:
            data = b""
        except TimeoutError as error:
            run.give_up()
            raise PeerGone(f"no answer from a program within {timeout:.0f} s") from error
        run.check()
        if not data:
            raise PeerGone("the process that runs programs has ended")
        result = struct.unpack("<q", data)[0]
        if result < 0:
            raise ProgramFailed(-result if result > -4096 else errno.EIO, "control memory")

    def run(
        self, sealed: Sealed, slot: int, fds: Mapping[str, int] | None = None, *, copies: int = 0
    ) -> Run:
        """Send a program and wait for it; one that copies so many bytes has more time for it."""
        with self.lock:
            run = self.send(sealed, slot, fds or {})
            self.answer(run, _PATIENCE + copies / _SLOWEST)
        return run

    def close(self) -> None:
        self.sock.close()


def pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)


def own_task(pid: int) -> int:
    """The pidfd of a child of ours. One that cannot be had is killed, or nobody ever would."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0x40000000)  # __WALL
        raise


def end_task(task: int) -> None:
    """Kill and collect a child of ours by its pidfd, and close that."""
    with contextlib.suppress(ProcessLookupError):
        insist(lambda: pidfd.send_signal(task, signal.SIGKILL))
    pidfd.reap(task)
    os.close(task)


def insist(undo: Callable[[], object]) -> None:
    """Do something that puts an earlier state back; a second try, because nothing else mends it."""
    try:
        undo()
    except OSError as error:
        if error.errno == errno.ESRCH:
            raise
        undo()
