"""A program that a caller holds by its standard streams, and how a checkpoint keeps it.

A handle is what `run`, `spawn` and `shell` leave in a sandbox: a pid, three pipes (a fourth for a
shell) and whatever a caller has not fetched yet. Its number is unique in the tree of sandboxes and
never used again, so it means the same program in a sandbox, in what a rollback makes of it and in
every fork; `Sandbox.counterpart` needs nothing else.

`save` freezes a handle into a `SavedHandle` (references to immutable bytes, no copies of large
buffers), `restored` makes a new handle of one with new pipes. The engine is told which pipe is
which by the key `"<number>/<stream>"`.
"""

from __future__ import annotations

import os
import stat
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final

from ..deltacr.model import External
from ..linux.openat2 import openat2
from ..linux.proc import inside_pids
from .streams import Kept, Pump, Reader, SavedReader, SavedWriter, Unread, Writer
from .terminal import Terminal

RUN: Final = "run"
PROCESS: Final = "process"
SHELL: Final = "shell"

CONTROL: Final = "control"
"""The stream on which a shell reports the end of each command (its fd 3)."""

FDS: Final = {"stdin": 0, "stdout": 1, "stderr": 2, CONTROL: 3}
COMMANDS: Final = 4
"""The fd where the shell of a terminal finds its commands; its standard input is the terminal."""


@dataclass(frozen=True)
class Command:
    """A command that a shell is working on. `call` is the caller that waits for it.

    `before`: the processes that ran when it began, and are not to be killed with it. Host pids are
    quick to get and mean nothing after a rollback, so a checkpoint keeps pids as seen inside.
    """

    number: int
    call: int
    before: frozenset[int] = frozenset()
    inside: bool = False
    sent: bool = False


@dataclass(frozen=True)
class Done:
    """How a command ended, with its output, for the caller that waits for it."""

    call: int
    status: int
    stdout: bytes
    stderr: bytes
    truncated: bool


@dataclass(frozen=True)
class SavedHandle:
    """A handle as a checkpoint keeps it."""

    number: int
    kind: str
    pid: int
    label: str
    status: int | None
    call: int
    discard: bool
    stdin: SavedWriter | None
    readers: tuple[SavedReader, ...]
    command: Command | None
    results: tuple[tuple[int, Done], ...]
    terminal: bool  # whether it has one; what is in it, the engine keeps


class Handle:
    """One program with its pipes. All access with the sandbox's lock held."""

    def __init__(
        self,
        number: int,
        kind: str,
        label: str,
        *,
        pump: Pump,
        changed: threading.Condition,
        in_flight: Callable[[int], bool],
        stdin: bool,
        terminal: bool = False,
    ) -> None:
        self.number = number
        self.kind = kind
        self.label = label
        self.pid = 0
        self.status: int | None = None
        self.call = 0
        self.discard = False
        self.command: Command | None = None
        self.results: dict[int, Done] = {}
        self.stdin = Writer(pump=pump, changed=changed) if stdin else None
        self.readers: dict[str, Reader] = {}
        self._in_flight = in_flight
        self.terminal = Terminal() if terminal else None
        for name in ("stdout", "stderr"):
            buffer: Kept | Unread = Unread() if kind == PROCESS else Kept()
            after = self._after_terminal if terminal and name == "stdout" else None
            self.readers[name] = Reader(name, buffer, pump=pump, changed=changed, after=after)
        if kind == SHELL:
            self.readers[CONTROL] = Reader(
                CONTROL, Unread(), pump=pump, changed=changed, after=self._after_control
            )

    # -- pipes -----------------------------------------------------------------------------

    def open(
        self, owner: int, *, uid: int = 0, root: int = -1, size: tuple[int, int] = (24, 80)
    ) -> dict[int, int]:
        """Make all pipes: fd inside -> the program's end. The caller closes these ends.

        For a terminal (of the devpts below `root`) as well.
        """
        ends: dict[int, int] = {}
        try:
            if self.terminal is not None:
                rows, columns = size
                ends[0] = self.terminal.make(root, owner=owner, uid=uid, rows=rows, columns=columns)
                ends[1], ends[2] = os.dup(ends[0]), os.dup(ends[0])
                self._attach(self.terminal.master)
            for name in self.pipes():
                stream = self.stdin if name == "stdin" else self.readers[name]
                assert stream is not None
                ends[self.place(name)] = stream.open(owner + uid)
        except BaseException:
            for fd in ends.values():
                os.close(fd)
            self.close()
            raise
        return ends

    def pipes(self) -> list[str]:
        """The streams that are pipes; with a terminal, only those of a shell for its commands."""
        if self.terminal is None:
            return [*(("stdin",) if self.stdin is not None else ()), *self.readers]
        return ["stdin", CONTROL] if self.kind == SHELL else []

    def place(self, name: str) -> int:
        """The descriptor inside that is this stream."""
        return COMMANDS if name == "stdin" and self.terminal is not None else FDS[name]

    def _attach(self, master: int) -> None:
        self.readers["stdout"].attach(os.dup(master))
        if self.kind != SHELL and self.stdin is not None:
            self.stdin.attach(os.dup(master))

    def take_master(self, master: int) -> None:
        """The master of a terminal that was made again; ours from now on."""
        assert self.terminal is not None
        self.terminal.master = master
        os.set_blocking(master, False)
        self._attach(master)

    def externals(self) -> Iterator[tuple[str, External]]:
        """What is still open: what /proc shows of the program's end, and its key."""
        if self.terminal is not None and self.terminal.master >= 0:
            yield self.terminal.link, External(f"{self.number}/tty", self.terminal.master)
        for name in self.pipes():
            if name == "stdin":
                if self.stdin is not None and self.stdin.inode:
                    yield f"pipe:[{self.stdin.inode}]", External(f"{self.number}/stdin")
            elif not self.readers[name].eof:
                yield f"pipe:[{self.readers[name].inode}]", External(f"{self.number}/{name}")

    @property
    def ended(self) -> bool:
        """Nothing more can come of it: exited, and every stream is at its end."""
        return self.status is not None and all(r.eof for r in self.readers.values())

    def drain(self) -> None:
        """Read what the pipes hold now, the shell's reports last."""
        for reader in self.readers.values():
            reader.drain()
        if self.kind == SHELL:
            self._after_control()

    def close(self) -> None:
        """Close our ends of all pipes."""
        if self.stdin is not None:
            self.stdin.close()
        for reader in self.readers.values():
            reader.close()
        if self.terminal is not None:
            self.terminal.close()

    def abandon(self) -> None:
        """Nobody will ask for this command's output: let it run, read and forget what it writes."""
        self.discard = True
        for name in ("stdout", "stderr"):
            reader = self.readers[name]
            reader.discard = True
            reader.live = None
            reader.buffer = Kept()
            reader.resume()

    def forget(self, call: int) -> bool:
        """A call is over, with or without an answer: whether this handle had to do with it.

        Asked of the handle that is there then; a rollback may have put it in the place of the one
        that gave the answer.
        """
        command = self.command
        if command is not None and command.call == call and not command.sent:
            self.command = None
            return True
        if self.kind == RUN and self.call == call and not self.discard:
            self.abandon()
            return True
        return False

    def resume(self, resumed: Callable[[int], bool]) -> None:
        """Forget, after a restore, what nobody waits for any more.

        `resumed(call)` says whether the caller that waited when the checkpoint was taken waits
        still (its call is in flight and goes on).
        """
        self.results = {n: done for n, done in self.results.items() if resumed(done.call)}
        command = self.command
        if command is not None and not command.sent and not resumed(command.call):
            self.command = None
        if self.kind == RUN and not self.discard and not resumed(self.call):
            self.abandon()

    # -- what happened ---------------------------------------------------------------------

    def exited(self, status: int) -> None:
        """Its process has ended with this exit code (negative: the signal)."""
        if self.kind == SHELL:
            self.drain()
        else:
            for name in ("stdout", "stderr"):
                self.readers[name].drain()
        self.status = status
        if self.command is not None:
            self._finish(self.command, status)
        self._after_terminal()

    def _after_terminal(self) -> None:
        """Hang up when the program has ended and nobody else has its terminal open."""
        if self.terminal is not None and self.status is not None and self.readers["stdout"].eof:
            self.close()

    def _after_control(self) -> None:
        buffer = self.readers[CONTROL].buffer
        assert isinstance(buffer, Unread)
        while (end := buffer.data.find(b"\n")) >= 0:
            line = buffer.take(end + 1)
            try:
                number, status = map(int, line.split())
            except ValueError:
                continue  # a program wrote to the shell's fd 3
            if self.command is not None and self.command.number == number:
                self._finish(self.command, status)

    def _finish(self, command: Command, status: int) -> None:
        out, err = self.readers["stdout"], self.readers["stderr"]
        out.drain()
        err.drain()
        assert isinstance(out.buffer, Kept) and isinstance(err.buffer, Kept)
        stdout, cut_out = out.buffer.take()
        stderr, cut_err = err.buffer.take()
        self.command = None
        if self._in_flight(command.call):
            self.results[command.number] = Done(
                command.call, status, stdout, stderr, cut_out or cut_err
            )

    # -- checkpoint and restore ------------------------------------------------------------

    def traces(self) -> object:
        """What is another as soon as something has passed through its pipes, or one was closed."""
        writer = None if self.stdin is None else (self.stdin.passed, self.stdin.fd)
        readers = tuple((reader.passed, reader.fd) for reader in self.readers.values())
        return self.number, self.status, writer, readers

    def save(self) -> SavedHandle:
        """The handle as it is now. UnsupportedState when its terminal cannot be given back."""
        if self.terminal is not None and not self.readers["stdout"].eof:
            self.terminal.check(self.label)
        return SavedHandle(
            number=self.number,
            kind=self.kind,
            pid=self.pid,
            label=self.label,
            status=self.status,
            call=self.call,
            discard=self.discard,
            stdin=None if self.stdin is None else self.stdin.save(),
            readers=tuple(reader.save() for reader in self.readers.values()),
            command=self.command,
            results=tuple(self.results.items()),
            terminal=self.terminal is not None,
        )


def restored(
    saved: SavedHandle,
    *,
    pump: Pump,
    changed: threading.Condition,
    in_flight: Callable[[int], bool],
    owner: int,
    externals: dict[str, int],
    shut: list[Writer],
) -> Handle:
    """A handle with new pipes in the state that was saved.

    The programs' ends go into `externals`, for the engine; `Handle.resume` does the rest. A
    standard input that had been closed gets a pipe all the same, because the engine may have bytes
    to put back into it; its writer is added to `shut`, to be closed once the engine is done.
    """
    handle = Handle(
        saved.number,
        saved.kind,
        saved.label,
        pump=pump,
        changed=changed,
        in_flight=in_flight,
        stdin=saved.stdin is not None,
        terminal=saved.terminal,
    )
    pipes = handle.pipes()
    handle.pid = saved.pid
    handle.status = saved.status
    handle.call = saved.call
    try:
        for reader_state in saved.readers:
            reader = handle.readers[reader_state.name]
            if isinstance(reader.buffer, Kept):
                reader.buffer = Kept(reader_state.chunks, truncated=reader_state.truncated)
            else:
                reader.buffer = Unread(reader_state.chunks)
            if reader_state.live is not None:
                reader.live = deque(reader_state.live)
            if not reader_state.eof and reader_state.name in pipes:
                externals[f"{saved.number}/{reader_state.name}"] = reader.open(owner)
        if handle.stdin is not None and saved.stdin is not None:
            if "stdin" in pipes:
                externals[f"{saved.number}/stdin"] = handle.stdin.open(owner)
            handle.stdin.held = True
            if saved.stdin.closed:
                shut.append(handle.stdin)
            else:
                handle.stdin.waiting.extend(saved.stdin.chunks)
                handle.stdin.size = sum(map(len, saved.stdin.chunks))
                handle.stdin.closing = saved.stdin.closing
    except BaseException:
        handle.close()
        raise
    handle.results = dict(saved.results)
    handle.command = saved.command
    if saved.discard:
        handle.abandon()
    return handle


def sent(command: Command, before: frozenset[int]) -> Command:
    """The same command, now on its way; `before`: host pids of what runs already."""
    return replace(command, sent=True, before=before)


def portable(command: Command) -> Command:
    """The same command with its `before` as pids seen inside."""
    if command.inside:
        return command
    before = frozenset(inside_pids(command.before).values())
    return replace(command, before=before, inside=True)


def nothing(root: int) -> int:
    """For a standard input: a new file description of the /dev/null below `root`.

    Where a program has put something else in its place: a pipe that has ended.
    """
    try:
        path = openat2(root, "dev/null", os.O_PATH | os.O_NOFOLLOW)
    except OSError:
        path = -1
    try:
        if path >= 0:
            found = os.fstat(path)
            if stat.S_ISCHR(found.st_mode) and found.st_rdev == os.makedev(1, 3):
                return os.open(f"/proc/self/fd/{path}", os.O_RDWR | os.O_CLOEXEC)
    finally:
        if path >= 0:
            os.close(path)
    fd, other = os.pipe2(os.O_CLOEXEC)
    os.close(other)
    return fd
