"""Process descriptors (pidfd_open(2)).

A pidfd means a process, not its number, so it can be opened only when the rebuilt process exists:
by each process that holds it, after all have been cloned.  Processes that share one description
get one each; all they could share is its O_NONBLOCK.  One whose process has been waited for is
made by PID 1 from a child that ends at once.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

from ...linux import numbers as nr
from ..model import Description, Process
from ..rebuild import Entry, Kind, Rebuild
from ..records import Sequence
from ..subject import Refused, Subject

_KEPT = 0o4000 | 0o200  # PIDFD_NONBLOCK, PIDFD_THREAD
_F_DUPFD_CLOEXEC = 1030
_WALL = 0x40000000


def capture(subject: Subject) -> Description:
    flags = subject.raw_flags & _KEPT
    if subject.fact("Pid") == "-1":
        return Description("ended pidfd", flags)
    return Description("pidfd", flags, state=int(subject.fact("NSpid").split()[-1]))


def settle(subject: Subject, description: Description) -> Description:
    """All processes of the tree are known now."""
    if int(subject.fact("Pid")) not in subject.table.inside:
        raise Refused("a pidfd of a process outside the sandbox")
    return description


def _each(
    rebuild: Rebuild, do: Sequence, process: Process, number: int, description: Description
) -> None:
    opened = rebuild.program.variable()
    do.call(nr.PIDFD_OPEN, description.state, description.flags, save=opened, what="pidfd_open")
    do.call(nr.FCNTL, opened, _F_DUPFD_CLOEXEC, number)
    do.call(nr.CLOSE, opened)


def _open_ended(rebuild: Rebuild, entries: Items[Entry]) -> None:
    program, do = rebuild.program, rebuild.init
    for number, description in entries:
        body = program.sequence("an ended process")
        body.call(nr.EXIT, 0)
        pid = program.variable()
        do.clone(program.clone_args(flags=0, stack=program.stack()), body, save=pid)
        do.call(nr.PIDFD_OPEN, pid, description.flags, save=rebuild.opened, what="pidfd_open")
        do.call(nr.WAIT4, pid, 0, _WALL, 0, what="reap")
        rebuild.place(number)


KINDS = (Kind(("pidfd",), each=_each), Kind(("ended pidfd",), _open_ended))
