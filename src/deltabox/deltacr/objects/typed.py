"""What lies unread in a terminal, both ways (drivers/tty/n_tty.c, tty_buffer.c).

A terminal's queues cannot be looked into, only read.  So while the tree stands still everything is
read and put back at once.  Each side has two queues: the line discipline's, of 4095 bytes, and
behind it the flip buffer, which waits for room there and has not been interpreted yet.  What the
first one takes is put back with TIOCSTI, which is synchronous; what was beyond it is written to
the other side, and cannot overtake because the first is full then.

Complete lines stay lines: they are typed again in canonical mode with every mapping, echo and
signal off, what could be special quoted (VLNEXT), and ended as they were: by a newline, by VEOL, or
by VEOF, which nobody will see.  An unfinished line shows only when canonical mode is left, which
would finish it; with nothing there, leaving and entering again changes nothing.

Afterwards the termios are as before, and packet mode, which is off meanwhile so that it notes
nothing.  A terminal stopped by Ctrl-S is refused: that it is stopped can be seen, but not whether
a key did it or TCXONC, and any change of IXON would start it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import select
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ...linux import terminal as tty
from ..subject import Refused

_ROOM = 4095  # of a line discipline (N_TTY_BUF_SIZE - 1)
_QUOTE, _END, _NEWLINE = 0x16, 0x04, 0x0A  # ^V and ^D for the time of typing
_FULL = 1 << 16
# How a flip buffer takes the most: it allocates as long as 8 KiB are not exceeded, and holds twice
# what it has allocated (TTY_BUFFER_PAGE is 1792).
_PIECE, _PIECES, _LAST = 256, 64, 1792

LINE, EOL, EOF, PART = "line", "eol", "eof", "part"
Piece = tuple[bytes, str]


@dataclass(frozen=True)
class Unread:
    """`input` in pieces as they would be read; `untyped` is input still to be interpreted."""

    output: bytes = b""
    input: tuple[Piece, ...] = ()
    untyped: bytes = b""

    def __bool__(self) -> bool:
        return bool(self.output or self.input or self.untyped)


def handed_name(index: int, side: str) -> str:
    """What PID 1 calls a descriptor that the keeper takes to put unread data back."""
    return f"terminal {index} {side}"


def take(
    termios: bytes, *, packet: bool, master: int | None, end: int | None, external: bool
) -> Unread:
    """Copy what is unread; the terminal is as before when this returns, or raises Refused.

    `end` is a description of the keeper's own (O_NONBLOCK), None when nobody in the sandbox has the
    slave side open. Output of an `external` terminal, the keeper reads all the time.
    """
    with _no_packets(packet, master):
        output = b"" if external or master is None else _drain(master)
        stopped = end is not None and not external and not _ready(end, select.POLLOUT)
        if output:
            _put_output(output, termios, master, end)
        if stopped:
            raise Refused("a terminal whose output is stopped (Ctrl-S)")
        if end is None:
            return Unread(output)
        pieces = _take_input(termios, end)
        if not pieces:
            return Unread(output)
        unread = _divided(output, pieces)
        _put_input(unread, termios, master, end)
        return unread


def put_back(unread: Unread, termios: bytes, *, packet: bool, master: int, end: int | None) -> None:
    """Make a terminal's queues, which are empty, hold this."""
    with _no_packets(packet, master):
        if unread.output:
            _put_output(unread.output, termios, master, end)
        if end is not None:
            _put_input(unread, termios, master, end)


def is_full(master: int) -> bool:
    """Whether there may be more output than the master's own queue holds."""
    return tty.waiting(master) >= _ROOM


@contextmanager
def _no_packets(packet: bool, master: int | None) -> Iterator[None]:
    if not packet or master is None:
        yield
        return
    fcntl.ioctl(master, tty.TIOCPKT, struct.pack("i", 0))
    try:
        yield
    finally:
        fcntl.ioctl(master, tty.TIOCPKT, struct.pack("i", 1))


# -- towards the master -------------------------------------------------------------------------


def _drain(fd: int) -> bytes:
    parts = []
    # poll(2) waits for the worker that fills the queue, so nothing is left between the two
    while _ready(fd, select.POLLIN):
        parts.append(os.read(fd, _FULL))
    return b"".join(parts)


def _put_output(output: bytes, termios: bytes, master: int | None, end: int | None) -> None:
    assert master is not None
    tty.stuff(master, output[:_ROOM])
    if len(output) > _ROOM:
        assert end is not None
        with _settings(end, tty.unmapped(termios), termios):
            _write(end, output[_ROOM:])


# -- towards the slave side ---------------------------------------------------------------------


def _take_input(termios: bytes, end: int) -> list[Piece]:
    """Everything unread, in pieces; nothing is left."""
    # what has not been interpreted yet must neither be echoed nor raise a signal while we read
    if not _is_canonical(termios):
        if not _ready(end, select.POLLIN) and not tty.waiting(end):
            return []
        with _settings(end, tty.plain(termios), termios):
            return [(_drain(end), PART)]
    pieces: list[Piece] = []
    if _ready(end, select.POLLIN):
        with _settings(end, tty.plain(termios, local=tty.ICANON), termios):
            while _ready(end, select.POLLIN):
                line = os.read(end, _FULL)
                pieces.append((line, _ending(line, termios)))
    with _settings(end, tty.plain(termios) if pieces else tty.uncanonical(termios), termios):
        if tty.waiting(end):
            pieces.append((_drain(end), PART))
    return pieces


def _is_canonical(termios: bytes) -> bool:
    return tty.local_flags(termios) & (tty.ICANON | tty.EXTPROC) == tty.ICANON


def _ending(line: bytes, termios: bytes) -> str:
    last = line[-1] if line else 0
    if last == _NEWLINE:
        return LINE
    if last and last in (tty.control(termios, tty.VEOL), tty.control(termios, tty.VEOL2)):
        return EOL
    return EOF


def _divided(output: bytes, pieces: list[Piece]) -> Unread:
    """What the line discipline had taken, and what was behind that; VEOF takes a place too."""
    room = _ROOM
    taken: list[Piece] = []
    untyped = b""
    for data, ending in pieces:
        size = len(data) + (ending == EOF)
        if size <= room:
            taken.append((data, ending))
            room -= size
            continue
        if room:
            taken.append((data[:room], PART))
        untyped += data[room:] + (bytes((_END,)) if ending == EOF else b"")
        room = 0
    return Unread(output, tuple(taken), untyped)


def _put_input(unread: Unread, termios: bytes, master: int | None, end: int) -> None:
    if unread.input:
        canonical = _is_canonical(termios)
        local = tty.ICANON | tty.IEXTEN if canonical else 0
        with _settings(end, tty.plain(termios, local=local), termios):
            for data, ending in unread.input:
                if canonical:
                    _type(data, ending, termios, end)
                else:
                    tty.stuff(end, data)
    if unread.untyped:
        assert master is not None
        _write(master, unread.untyped)


def _type(data: bytes, ending: str, termios: bytes, end: int) -> None:
    final = b""
    eol = 0
    if ending in (LINE, EOL):
        data, final = data[:-1], data[-1:]
        eol = final[0] if ending == EOL else 0
    elif ending == EOF:
        final = bytes((_END,))
    special = {_QUOTE, _END, _NEWLINE, eol} - {0}
    local = tty.ICANON | tty.IEXTEN
    tty.change(end, tty.plain(termios, local=local, eof=_END, eol=eol, lnext=_QUOTE))
    typed = b"".join(bytes((_QUOTE, byte) if byte in special else (byte,)) for byte in data)
    tty.stuff(end, typed + final)


# -- small things -------------------------------------------------------------------------------


@contextmanager
def _settings(end: int, wanted: bytes, usual: bytes) -> Iterator[None]:
    tty.change(end, wanted)
    try:
        yield
    finally:
        tty.change(end, usual)


def _ready(fd: int, event: int) -> bool:
    poller = select.poll()
    poller.register(fd, event)
    return any(seen & event for _, seen in poller.poll(0))


def _write(fd: int, data: bytes) -> None:
    """Into the flip buffer behind a queue that is full."""
    sizes = [_PIECE] * _PIECES
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_NONBLOCK)
    try:
        while data:
            data = data[os.write(fd, data[: sizes.pop() if sizes else _LAST]) :]
    except BlockingIOError:
        raise OSError(
            errno.ENOSPC, "what was unread in a terminal does not fit into it again"
        ) from None
    finally:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags)
