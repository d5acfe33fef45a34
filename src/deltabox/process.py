"""A program running inside a sandbox, and what a command that has ended leaves.

All three are handles: a number that is unique in the tree of sandboxes, and the sandbox it is used
in. Nothing about the program is remembered here, so nothing here can be wrong after a rollback.

Text is UTF-8; bytes that are not are shown as U+FFFD. The engine never splits a character, so that
what is read piece by piece is the same text as what is read at once.
"""

from __future__ import annotations

import re
import signal as signals
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

from ._connection import no_copies
from .errors import CommandTimeout

if TYPE_CHECKING:
    from .sandbox import Sandbox

Data = TypeVar("Data", str, bytes)


@dataclass(frozen=True)
class ProcessInfo:
    """A process as it is seen inside the sandbox.

    `state` is the letter that ps(1) shows, such as `S` for sleeping and `Z` for a zombie. `cmdline`
    is empty when the process has ended and its parent has not yet asked how.
    """

    pid: int
    ppid: int
    pgid: int
    sid: int
    state: str
    cmdline: tuple[str, ...]
    cwd: str


@dataclass(frozen=True)
class AnyResult(Generic[Data]):
    """How a command ended.

    `exit_code` is negative for the signal that ended it; `duration` is in seconds, as the caller
    waited; `truncated` says that a stream was longer than 16 MiB and is cut there.
    """

    exit_code: int
    stdout: Data
    stderr: Data
    duration: float
    truncated: bool


@dataclass(frozen=True)
class Result(AnyResult[str]):
    """How a command ended; see `AnyResult` for the fields. The streams are text."""


@dataclass(frozen=True)
class BytesResult(AnyResult[bytes]):
    """How a command ended; see `AnyResult` for the fields. The streams are bytes."""


def convert(data: bytes, *, text: bool) -> Any:
    """`data` as the caller wants it."""
    return data.decode("utf-8", errors="replace") if text else data


def readable(error: CommandTimeout, *, text: bool) -> CommandTimeout:
    """The error, with the streams it carries as the caller wants them."""
    for name in ("stdout", "stderr"):
        data = error.attributes.get(name)
        if isinstance(data, bytes):
            error.attributes[name] = convert(data, text=text)
    return error


def terminal_size(tty: bool | tuple[int, int]) -> tuple[int, int] | None:
    """The size that `tty=` asks for; None for no terminal."""
    if isinstance(tty, bool):
        return (24, 80) if tty else None
    if not isinstance(tty, (tuple, list)) or len(tty) != 2:
        raise TypeError(f"tty is a bool or (rows, columns), not {tty!r}")
    for number in tty:
        if isinstance(number, bool) or not isinstance(number, int):
            raise TypeError(f"the size of a terminal is two ints, not {tty!r}")
        if not 0 < number < 1 << 16:
            raise ValueError(f"a terminal cannot have {tty[0]} rows and {tty[1]} columns")
    return tty[0], tty[1]


class Handle:
    """What a process and a shell have in common: a number, and the sandbox it is used in."""

    def __init__(self, sandbox: Sandbox, number: int, pid: int) -> None:
        self._sandbox = sandbox
        self._number = number
        self._pid = pid

    @property
    def pid(self) -> int:
        """The pid as seen inside. A rollback and a fork keep it."""
        return self._pid

    @property
    def sandbox(self) -> Sandbox:
        """The sandbox it runs in: its branch's parent, once that has been committed."""
        return self._sandbox._present()

    def _call(self, op: str, **arguments: Any) -> Any:
        return self.sandbox._call(op, handle=self._number, **arguments)

    def __reduce__(self) -> NoReturn:
        no_copies(type(self).__name__)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} pid={self._pid} of {self.sandbox!r}>"


class Stdin(Generic[Data]):
    """The standard input of a process. Writing waits only when very much is unread (1 MiB)."""

    def __init__(self, process: AnyProcess[Data]) -> None:
        self._process: AnyProcess[Data] = process

    def write(self, data: Data) -> None:
        """Send `data`. `BrokenPipeError` when the process has closed its end."""
        if isinstance(data, str):
            encoded = data.encode("utf-8", errors="surrogateescape")
        elif isinstance(data, (bytes, bytearray, memoryview)):
            encoded = bytes(data)
        else:
            raise TypeError(f"write() takes str or bytes, not {type(data).__name__}")
        self._process._call("write", data=encoded)

    def close(self) -> None:
        """Send no more: the process reads end-of-file after what was written. Twice is fine.

        On a terminal the character for that (Ctrl-D) is typed instead: at the beginning of a line
        a program that reads lines sees end-of-file. The terminal stays open, and can be written to.
        """
        self._process._call("close_stdin")


class Stream(Generic[Data]):
    """The standard output or error of a process.

    What has been read is gone for good, also after a rollback; what has not been read belongs to
    the state of the sandbox, and a rollback restores it. While more than 1 MiB is unread the
    process waits when it writes. Iterating gives lines until the end of the stream.
    """

    def __init__(self, process: AnyProcess[Data], name: str, *, text: bool) -> None:
        self._process: AnyProcess[Data] = process
        self._name = name
        self._text = text

    def _read(self, how: str, timeout: float | None, pattern: bytes = b"", flags: int = 0) -> Data:
        data = self._process._call(
            "read",
            stream=self._name,
            how=how,
            pattern=pattern,
            flags=flags,
            text=self._text,
            timeout=timeout,
        )
        result: Data = convert(data, text=self._text)
        return result

    def read_available(self) -> Data:
        """What has come so far, without waiting; empty when there is nothing."""
        return self._read("available", None)

    def readline(self, timeout: float | None = None) -> Data:
        """The next line with its newline; empty at the end of the stream.

        `timeout` in seconds; `CommandTimeout` leaves everything unread.
        """
        return self._read("line", timeout)

    def read_until(
        self,
        pattern: str | bytes | re.Pattern[str] | re.Pattern[bytes],
        timeout: float | None = None,
    ) -> Data:
        """Everything up to and with the first occurrence of `pattern`, a literal or an expression.

        `timeout` in seconds; `CommandTimeout`, and `EOFError` when the stream ends before, leave
        everything unread.
        """
        if isinstance(pattern, re.Pattern):
            source = pattern.pattern
            encoded = source.encode() if isinstance(source, str) else source
            return self._read("match", timeout, encoded, pattern.flags & ~re.UNICODE)
        if not isinstance(pattern, (str, bytes)):
            raise TypeError(f"a pattern is str, bytes or re.Pattern, not {type(pattern).__name__}")
        encoded = pattern.encode() if isinstance(pattern, str) else pattern
        if not encoded:
            raise ValueError("read_until() needs a pattern that is not empty")
        return self._read("until", timeout, encoded)

    def read(self, timeout: float | None = None) -> Data:
        """Everything up to the end of the stream. `timeout` in seconds, as for `readline`."""
        return self._read("all", timeout)

    def __iter__(self) -> Iterator[Data]:
        while line := self.readline():
            yield line


class AnyProcess(Handle, Generic[Data]):
    """A program started with `Sandbox.spawn`: its streams, its end."""

    _text = True

    def __init__(self, sandbox: Sandbox, number: int, pid: int) -> None:
        super().__init__(sandbox, number, pid)
        self.stdin: Stdin[Data] = Stdin(self)
        self.stdout: Stream[Data] = Stream(self, "stdout", text=self._text)
        self.stderr: Stream[Data] = Stream(self, "stderr", text=self._text)

    @property
    def exit_code(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        code: int | None = self._call("poll")
        return code

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end: the exit code. `CommandTimeout` after `timeout` seconds; it runs on."""
        code: int = self._call("wait", timeout=timeout)
        return code

    def resize(self, rows: int, columns: int) -> None:
        """Change the size of its terminal (`tty=True`); what runs in the foreground is told so."""
        terminal_size((rows, columns))
        self._call("resize", rows=rows, columns=columns)

    def kill(self, signal: int = signals.SIGKILL) -> None:
        """Send it a signal; nothing happens when it has ended already."""
        self._call("kill", signal=int(signal))


class Process(AnyProcess[str]):
    """A program started with `Sandbox.spawn`; its streams are text.

    >>> p = sandbox.spawn(["python3", "-i", "-q"])          # doctest: +SKIP
    >>> p.stdin.write("print(6 * 7)\n")                     # doctest: +SKIP
    >>> p.stdout.readline(timeout=5)                        # doctest: +SKIP
    '42\n'
    """


class BytesProcess(AnyProcess[bytes]):
    """A program started with `Sandbox.spawn(..., text=False)`; its streams are bytes."""

    _text = False
