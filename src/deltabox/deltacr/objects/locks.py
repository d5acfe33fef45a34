"""Locks on open files: flock(2), and the byte ranges of fcntl(2), a process's or a description's.

/proc/PID/fdinfo/N has a line for each lock that was taken *through this description* and belongs
to it (flock, F_OFD_SETLK) or to this process (F_SETLK); see show_fd_locks in fs/locks.c.  So whose
a lock is needs no guessing: /proc/locks would only tell the inode.  As a description that several
descriptors share shows its lines in each of them, a process's own locks are taken from the first.

They are taken again by whom they belong to.  A description's come back with the description, in
PID 1; an flock by the process that took it, if that is there and has it open, because the kernel
names it in /proc.  A process's own are taken by itself when its descriptor table is final, because
closing *any* descriptor of a file gives up all locks that the process has on it.  No two of them
conflict: they were all held at one instant.  Calls that wait for a lock wait again.
"""

from __future__ import annotations

import re
import struct

from ...linux import numbers as nr
from ..model import Lock, Process
from ..rebuild import Rebuild
from ..records import Sequence
from ..subject import Refused, Subject

_FLOCK = 73
_F_SETLK, _F_OFD_SETLK = 6, 37
_F_RDLCK, _F_WRLCK = 0, 1
_LOCK_SH, _LOCK_EX, _LOCK_NB = 1, 2, 4
_LINE = re.compile(
    r"lock:\s*\d+: (FLOCK|POSIX|OFDLCK)\s+ADVISORY\s+(READ|WRITE)\s+(-?\d+) \S+ (\d+) (\d+|EOF)"
)


def of_description(subject: Subject) -> tuple[Lock, ...]:
    """The locks that belong to the description, whichever process holds it."""
    return tuple(lock for lock in _all(subject) if lock.kind != "POSIX")


def of_process(subject: Subject) -> tuple[Lock, ...]:
    """The locks that the process has taken through this description."""
    return tuple(lock for lock in _all(subject) if lock.kind == "POSIX")


def _all(subject: Subject) -> list[Lock]:
    found = []
    for line in subject.lines("lock:"):
        match = _LINE.match(line)
        if match is None:
            what = "a lease" if "LEASE" in line else "a delegation" if "DELEG" in line else "a lock"
            raise Refused(f"{subject.target}, with {what} ({' '.join(line.split()[2:5])})")
        kind, mode, holder, start, end = match.groups()
        length = 0 if end == "EOF" else int(end) - int(start) + 1
        pid = subject.table.inside.get(int(holder), 0)
        found.append(Lock(kind, mode == "WRITE", int(start), length, pid))
    return found


def restore(rebuild: Rebuild) -> None:
    """Take the locks of descriptions, in PID 1, where all of them are open."""
    for index, description in enumerate(rebuild.capture.descriptions):
        for lock in description.locks:
            if not _taker(rebuild, index, lock):
                _take(rebuild, rebuild.init, rebuild.number(index), lock)


def _taker(rebuild: Rebuild, index: int, lock: Lock) -> int:
    """The process that an flock names as its taker, if it can take it again; or 0."""
    taker = rebuild.capture.by_pid.get(lock.taker) if lock.kind == "FLOCK" else None
    if taker is None or all(d.description != index for d in taker.descriptors):
        return 0
    return taker.pid


def restore_own(rebuild: Rebuild, do: Sequence, process: Process) -> None:
    """Take the locks of a process, in itself; nothing may be closed any more."""
    done: set[int] = set()
    for descriptor in process.descriptors:
        for lock in descriptor.locks:
            _take(rebuild, do, descriptor.number, lock)
        index = descriptor.description
        if index not in done:
            done.add(index)
            for lock in rebuild.capture.descriptions[index].locks:
                if _taker(rebuild, index, lock) == process.pid:
                    _take(rebuild, do, descriptor.number, lock)


def _take(rebuild: Rebuild, do: Sequence, number: int, lock: Lock) -> None:
    if lock.kind == "FLOCK":
        operation = (_LOCK_EX if lock.write else _LOCK_SH) | _LOCK_NB
        do.call(_FLOCK, number, operation, what="flock")
    else:
        _set(rebuild, do, number, _F_SETLK if lock.kind == "POSIX" else _F_OFD_SETLK, lock)


def _set(rebuild: Rebuild, do: Sequence, number: int, command: int, lock: Lock) -> None:
    kind = _F_WRLCK if lock.write else _F_RDLCK
    block = struct.pack("<hh4xqqi4x", kind, 0, lock.start, lock.length, 0)  # struct flock
    do.call(nr.FCNTL, number, command, rebuild.program.data(block), what="lock a file")
