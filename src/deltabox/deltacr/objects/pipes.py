"""Pipes and FIFOs with what is in them (pipe(7), tee(2)).

Capture: `tee` duplicates the contents into a pipe of ours without consuming them, through a
descriptor taken with pidfd_getfd.  A pipe of which only write ends are open has no reader to take;
it is opened once more through /proc, which the program cannot notice while it is stopped.

Restore: PID 1 makes the pipe before the tree exists, writes the contents and hands the ends down.
External pipes (the stdio we hold the other end of) come from the keeper at every restore; only
what the program has not read yet is written back.
"""

from __future__ import annotations

import array
import fcntl
import os
import termios

from ...linux import numbers as nr
from ...linux._libc import syscall
from ..model import Description, Pipe
from ..records import Program, Sequence, Var

DEFAULT_CAPACITY = 65536
_F_SETPIPE_SZ, _F_GETPIPE_SZ = 1031, 1032
_O_DIRECT = 0o40000
_O_CLOEXEC = 0o2000000
_O_NONBLOCK = 0o4000
_F_SETFL = 4
_TEE = 276
_SPLICE_F_NONBLOCK = 2


def capture(host_pid: int, number: int) -> Pipe:
    """Contents and capacity of the pipe or FIFO behind one descriptor of a stopped process."""
    reader = os.open(f"/proc/{host_pid}/fd/{number}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        capacity = fcntl.fcntl(reader, _F_GETPIPE_SZ)
        waiting = array.array("i", [0])
        fcntl.ioctl(reader, termios.FIONREAD, waiting)
        if not waiting[0]:
            return Pipe(capacity, b"")
        read_end, write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if capacity > DEFAULT_CAPACITY:
                fcntl.fcntl(write_end, _F_SETPIPE_SZ, capacity)
            got = _tee(reader, write_end, waiting[0])
            parts = []
            while got > 0:
                part = os.read(read_end, got)
                parts.append(part)
                got -= len(part)
            content = b"".join(parts)
        finally:
            os.close(read_end)
            os.close(write_end)
        if len(content) != waiting[0]:
            raise OSError(f"only {len(content)} of {waiting[0]} bytes in a pipe could be read")
        return Pipe(capacity, content)
    finally:
        os.close(reader)


def _tee(source: int, target: int, size: int) -> int:
    return syscall(_TEE, source, target, size, _SPLICE_F_NONBLOCK)


def restore(
    program: Program, do: Sequence, pipe: Pipe, ends: list[tuple[int, Description]]
) -> None:
    """Make an anonymous pipe; `ends` gives a descriptor number for every description of it."""
    both = program.data(bytes(8))
    read_end, write_end = program.variable(), program.variable()
    do.call(nr.PIPE2, both, _O_CLOEXEC)
    do.load(both, read_end)
    do.load(both + 4, write_end)
    _fill(program, do, pipe, write_end)
    used: set[bool] = set()
    for number, description in ends:
        writes = bool(description.flags & 3)
        end = write_end if writes else read_end
        if writes in used or description.flags & 3 == 2:
            # a description of its own for the same end: open it once more
            do.call(nr.DUP3, end, number, _O_CLOEXEC)
            reopen(program, do, number, description)
        else:
            used.add(writes)
            do.call(nr.DUP3, end, number, _O_CLOEXEC)
            status = description.flags & ~(3 | _O_CLOEXEC)
            if status:
                do.call(nr.FCNTL, number, _F_SETFL, status)
    do.call(nr.CLOSE, read_end)
    do.call(nr.CLOSE, write_end)


def reopen(program: Program, do: Sequence, number: int, description: Description) -> None:
    """Turn a duplicate into a description of its own, as opening /dev/stderr makes."""
    opened = program.variable()
    path = program.text(f"/proc/self/fd/{number}")
    flags = (description.flags & ~_O_CLOEXEC) | _O_NONBLOCK
    do.call(nr.OPENAT, -100, path, flags, save=opened, what="open a pipe's end again")
    do.call(nr.DUP3, opened, number, _O_CLOEXEC)
    do.call(nr.CLOSE, opened)
    do.call(nr.FCNTL, number, _F_SETFL, description.flags & ~(3 | _O_CLOEXEC))


def refill_external(program: Program, do: Sequence, number: int, pipe: Pipe) -> None:
    """Put back what the program had not read of its standard input."""
    if not pipe.content and pipe.capacity == DEFAULT_CAPACITY:
        return
    opened = program.variable()
    path = program.text(f"/proc/self/fd/{number}")
    do.call(nr.OPENAT, -100, path, 1 | _O_NONBLOCK, save=opened, what="open stdin for writing")
    _fill(program, do, pipe, opened)
    do.call(nr.CLOSE, opened)


def _fill(program: Program, do: Sequence, pipe: Pipe, write_end: Var) -> None:
    if pipe.capacity != DEFAULT_CAPACITY:
        do.call(nr.FCNTL, write_end, _F_SETPIPE_SZ, pipe.capacity)
    if pipe.content:
        do.call(nr.WRITE, write_end, program.data(pipe.content), len(pipe.content))


def restore_fifo(
    program: Program, do: Sequence, pipe: Pipe, ends: list[tuple[int, Description]]
) -> None:
    """A named pipe: open it for both first, so that no open blocks, then each end."""
    both = program.variable()
    path = program.text(ends[0][1].path)
    do.call(nr.OPENAT, -100, path, 2 | _O_CLOEXEC, save=both, what=f"open {ends[0][1].path}")
    _fill(program, do, pipe, both)
    for number, description in ends:
        opened = program.variable()
        flags = (description.flags & ~_O_CLOEXEC) | _O_NONBLOCK
        do.call(nr.OPENAT, -100, path, flags, save=opened)
        do.call(nr.DUP3, opened, number, _O_CLOEXEC)
        do.call(nr.CLOSE, opened)
        do.call(nr.FCNTL, number, _F_SETFL, description.flags & ~(3 | _O_CLOEXEC))
    do.call(nr.CLOSE, both)
