"""Terminals: ioctl_tty(2), termios2 (asm-generic/termbits.h), pseudo-terminals (pts(4))."""

from __future__ import annotations

import fcntl
import os
import struct

TIOCEXCL, TIOCSCTTY, TIOCSPGRP, TIOCSTI = 0x540C, 0x540E, 0x5410, 0x5412
TIOCGWINSZ, TIOCSWINSZ, FIONREAD, TIOCPKT = 0x5413, 0x5414, 0x541B, 0x5420
TIOCNOTTY, TIOCGETD, TIOCGPTPEER = 0x5422, 0x5424, 0x5441
TCGETS2, TCSETS2 = 0x802C542A, 0x402C542B
TIOCSPTLCK, TIOCGDEV = 0x40045431, 0x80045432
TIOCGPKT, TIOCGPTLCK, TIOCGEXCL = 0x80045438, 0x80045439, 0x80045440

SLAVE_MAJOR = 136  # Documentation/admin-guide/devices.txt
PTMX = (5, 2)

ISIG, ICANON, IEXTEN, EXTPROC = 0o1, 0o2, 0o100000, 0o200000
VEOF, VEOL, VLNEXT, VEOL2 = 4, 11, 15, 16
_TERMIOS = struct.Struct("<4IB19s2I")
_CONTROL = 17  # where the control characters begin


def number(fd: int, request: int) -> int:
    """An ioctl that writes one int."""
    value: int = struct.unpack("i", fcntl.ioctl(fd, request, bytes(4)))[0]
    return value


def index(fd: int) -> int:
    """The N of /dev/pts/N, asked on either side or on /dev/tty."""
    return minor(number(fd, TIOCGDEV))


def minor(device: int) -> int:
    """The minor number in the kernel's 32-bit form of a device number."""
    return device & 0xFF | device >> 12 & 0xFFF00


def waiting(fd: int) -> int:
    """How many bytes can be read, as far as FIONREAD tells."""
    return number(fd, FIONREAD)


def settings(fd: int) -> bytes:
    """The struct termios2 of the slave side, asked on either side."""
    return fcntl.ioctl(fd, TCGETS2, bytes(_TERMIOS.size))


def change(fd: int, termios: bytes) -> None:
    fcntl.ioctl(fd, TCSETS2, termios)


def local_flags(termios: bytes) -> int:
    flags: int = _TERMIOS.unpack(termios)[3]
    return flags


def control(termios: bytes, which: int) -> int:
    """A control character; 0 when it is disabled."""
    return termios[_CONTROL + which]


def plain(termios: bytes, *, local: int = 0, **characters: int) -> bytes:
    """The same line with nothing done to what passes: no mapping, no echo, no signals.

    `local` are the flags that stay set; `characters` (`eof`, `eol`, `lnext`) are not disabled.
    """
    fields = list(_TERMIOS.unpack(termios))
    chosen = bytearray(19)
    for place, name in ((VEOF, "eof"), (VEOL, "eol"), (VLNEXT, "lnext")):
        chosen[place] = characters.get(name, 0)
    if not local & ICANON:
        chosen[6] = 1  # VMIN
    fields[0], fields[1], fields[3], fields[5] = 0, 0, local, bytes(chosen)
    return _TERMIOS.pack(*fields)


def uncanonical(termios: bytes) -> bytes:
    fields = list(_TERMIOS.unpack(termios))
    fields[3] &= ~ICANON
    return _TERMIOS.pack(*fields)


def unmapped(termios: bytes) -> bytes:
    """Output passes as it is."""
    fields = list(_TERMIOS.unpack(termios))
    fields[1] = 0
    return _TERMIOS.pack(*fields)


def size(fd: int) -> tuple[int, int]:
    """(rows, columns)"""
    rows, columns, _, _ = struct.unpack("4H", fcntl.ioctl(fd, TIOCGWINSZ, bytes(8)))
    return rows, columns


def resize(fd: int, rows: int, columns: int) -> None:
    """The foreground group gets SIGWINCH when this changes anything."""
    fcntl.ioctl(fd, TIOCSWINSZ, struct.pack("4H", rows, columns, 0, 0))


def unlock(master: int) -> None:
    fcntl.ioctl(master, TIOCSPTLCK, struct.pack("i", 0))


def peer(master: int) -> int:
    """The slave side, open, without a way through a path.

    O_CLOEXEC would stay in the flags of the description, where fdinfo shows it for ever, so it is
    set afterwards.
    """
    fd = fcntl.ioctl(master, TIOCGPTPEER, os.O_RDWR | os.O_NOCTTY)
    os.set_inheritable(fd, False)
    return fd


def stuff(fd: int, data: bytes) -> None:
    """Put bytes where this side reads, as if they had come from the other (TIOCSTI).

    The line discipline has taken them when this returns. Needs CAP_SYS_ADMIN.
    """
    for byte in data:
        fcntl.ioctl(fd, TIOCSTI, bytes((byte,)))
