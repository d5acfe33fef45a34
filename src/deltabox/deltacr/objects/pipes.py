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
from collections.abc import Sequence as Items

from ...linux import numbers as nr
from ...linux._libc import syscall
from ..model import Description, Pipe
from ..rebuild import Entry, Kind, Rebuild
from ..records import Ref, Var

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


def restore(rebuild: Rebuild, entries: Items[Entry]) -> None:
    grouped: dict[int, list[Entry]] = {}
    for number, description in entries:
        grouped.setdefault(description.pipe, []).append((number, description))
    for index, ends in grouped.items():
        pipe = rebuild.capture.pipes[index]
        if ends[0][1].kind == "pipe":
            _restore_pipe(rebuild, pipe, ends)
        else:
            _restore_fifo(rebuild, pipe, ends)


KIND = Kind(("pipe", "fifo"), restore)


def restore_external(rebuild: Rebuild, entries: Items[Entry]) -> None:
    """Pipes whose other ends are the keeper's: it brings new ones to every restore."""
    filled: set[str] = set()
    taken: set[str] = set()
    for number, description in entries:
        key = description.key
        rebuild.init.call(nr.DUP3, rebuild.program.inputs[key], number, _O_CLOEXEC)
        if key in taken:
            _reopen(rebuild, number, description)
        else:
            rebuild.set_status(number, description.flags)
        taken.add(key)
        if description.pipe >= 0 and key not in filled:
            filled.add(key)
            _refill_external(rebuild, number, rebuild.capture.pipes[description.pipe])


EXTERNAL = Kind(("external",), restore_external)


def _restore_pipe(rebuild: Rebuild, pipe: Pipe, ends: list[Entry]) -> None:
    """Make an anonymous pipe; `ends` gives a descriptor number for every description of it."""
    program, do = rebuild.program, rebuild.init
    both = program.data(bytes(8))
    read_end, write_end = program.variable(), program.variable()
    do.call(nr.PIPE2, both, _O_CLOEXEC)
    do.load(both, read_end)
    do.load(both + 4, write_end)
    _fill(rebuild, pipe, write_end)
    used: set[bool] = set()
    for number, description in ends:
        writes = bool(description.flags & 3)
        end = write_end if writes else read_end
        do.call(nr.DUP3, end, number, _O_CLOEXEC)
        if writes in used or description.flags & 3 == 2:
            # a description of its own for the same end: open it once more
            _reopen(rebuild, number, description)
        else:
            used.add(writes)
            rebuild.set_status(number, description.flags)
    do.call(nr.CLOSE, read_end)
    do.call(nr.CLOSE, write_end)


def _reopen(rebuild: Rebuild, number: int, description: Description) -> None:
    """Turn a duplicate into a description of its own, as opening /dev/stderr makes."""
    path = rebuild.program.text(f"/proc/self/fd/{number}")
    _open(rebuild, path, description.flags, "open a pipe's end again")
    rebuild.place(number)
    rebuild.init.call(nr.FCNTL, number, _F_SETFL, description.flags & ~(3 | _O_CLOEXEC))


def _open(rebuild: Rebuild, path: Ref, flags: int, what: str) -> None:
    """Without waiting for the other end, whatever the flags are to be."""
    wanted = (flags & ~_O_CLOEXEC) | _O_NONBLOCK
    rebuild.init.call(nr.OPENAT, -100, path, wanted, save=rebuild.opened, what=what)


def _refill_external(rebuild: Rebuild, number: int, pipe: Pipe) -> None:
    """Put back what the program had not read of its standard input."""
    if not pipe.content and pipe.capacity == DEFAULT_CAPACITY:
        return
    path = rebuild.program.text(f"/proc/self/fd/{number}")
    _open(rebuild, path, 1, "open stdin for writing")
    _fill(rebuild, pipe, rebuild.opened)
    rebuild.init.call(nr.CLOSE, rebuild.opened)


def _fill(rebuild: Rebuild, pipe: Pipe, write_end: Var) -> None:
    do = rebuild.init
    if pipe.capacity != DEFAULT_CAPACITY:
        do.call(nr.FCNTL, write_end, _F_SETPIPE_SZ, pipe.capacity)
    if pipe.content:
        size = len(pipe.content)
        content = rebuild.program.data(pipe.content)
        do.call(nr.WRITE, write_end, content, size, expect=size, what="fill a pipe")


def _restore_fifo(rebuild: Rebuild, pipe: Pipe, ends: list[Entry]) -> None:
    """A named pipe: open it for both first, so that no open blocks, then each end."""
    do = rebuild.init
    both = rebuild.program.variable()
    path = rebuild.program.text(os.fsencode(ends[0][1].path))
    do.call(nr.OPENAT, -100, path, 2 | _O_CLOEXEC, save=both, what=f"open {ends[0][1].path}")
    _fill(rebuild, pipe, both)
    for number, description in ends:
        _open(rebuild, path, description.flags, f"open {description.path}")
        rebuild.place(number)
        do.call(nr.FCNTL, number, _F_SETFL, description.flags & ~(3 | _O_CLOEXEC))
    do.call(nr.CLOSE, both)
