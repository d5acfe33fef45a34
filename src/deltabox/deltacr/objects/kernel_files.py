"""Files of /proc and /sys that are held open, and namespaces (proc(5), sysfs(5), namespaces(7)).

They have no contents of their own, so there is nothing to save but which file it is: it is opened
again under the same name.  PID 1 does that for what is the same for everyone.  What is about a
process, `/proc/PID/...`, binds to that process when it is opened, so it is opened when all exist,
by the process that holds it; therefore one that several processes share is refused, for they would
end up with one each.

Permissions are those of root at that moment, except that the kernel lets nobody but a process
itself open what shows its memory before it is complete: such files of *others* are refused, and
files of ended processes and of threads.  A text that has been read half-way goes on at the same
position of a text made anew, as it does whenever it is longer than one read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence as Items

from ...linux import numbers as nr
from ..model import Description, Process
from ..rebuild import Entry, Kind, Rebuild
from ..records import Sequence
from ..subject import Refused, Subject

_O_PATH = 0o10000000
_PR_SET_DUMPABLE = 4
_OF_PROCESS = re.compile(r"/proc/(\d+)(?:/(.*))?")
_NAMESPACE = re.compile(r"(\w+):\[(\d+)\]")
_SAFE = {
    "cgroup", "cmdline", "comm", "coredump_filter", "cpuset", "fd", "fdinfo", "limits",
    "loginuid", "mountinfo", "mounts", "mountstats", "net", "ns", "oom_adj", "oom_score",
    "oom_score_adj", "personality", "sched", "schedstat", "sessionid", "stack", "stat", "statm",
    "status", "syscall", "task", "timers", "timerslack_ns", "wchan",
}  # fmt: skip
_OWN = {"auxv", "environ", "maps", "mem", "numa_maps", "pagemap", "smaps", "smaps_rollup"}
_REFUSED = ("/proc/kmsg", "/proc/kcore", "/sys/kernel/tracing/", "/sys/kernel/debug/")


def capture(subject: Subject) -> Description:
    """Describe a file of /proc or /sys whose name has been found to lead to it."""
    target, flags = subject.target, subject.flags
    position = 0 if flags & _O_PATH else subject.position
    if target.startswith(_REFUSED) or (target.startswith("/proc/pressure/") and flags & 3):
        raise Refused(f"a kernel file with state of its own, {target}")
    if position:
        with subject.taken() as fd:
            try:
                os.lseek(fd, 0, os.SEEK_CUR)
            except OSError:
                raise Refused(f"a kernel file that cannot be positioned, {target}") from None
    of_process = _OF_PROCESS.fullmatch(target)
    if of_process is None:
        return Description("kernel", flags, position, target)
    own = int(of_process[1]) == subject.table.inside.get(subject.host)
    parts = (of_process[2] or "").split("/")
    allowed = parts == [""] or parts[0] in _SAFE or (own and parts[0] in _OWN)
    if not allowed or (parts[0] == "task" and len(parts) > 1):
        raise Refused(f"a kernel file that only its own process could open, {target}")
    return Description("proc", flags, position, target)


def capture_namespace(subject: Subject) -> Description | None:
    """Describe a namespace that is the sandbox's own; None for something else."""
    found = _NAMESPACE.fullmatch(subject.target)
    if found is None:
        return None
    name, inode = found[1], int(found[2])
    try:
        own = os.stat(f"/proc/{subject.host}/ns/{name}").st_ino
    except FileNotFoundError:
        return None
    if own != inode:
        raise Refused(f"a namespace that is not the sandbox's, {subject.target}")
    return Description("kernel", subject.flags, 0, f"/proc/self/ns/{name}")


def settle(subject: Subject, description: Description) -> Description:
    """A process's files come back only where one process holds them."""
    if subject.table.is_shared(subject):
        raise Refused(f"a kernel file that several processes share, {subject.target}")
    return description


def _open_kernel(rebuild: Rebuild, entries: Items[Entry]) -> None:
    for number, description in entries:
        _open(rebuild, rebuild.init, description)
        if description.position:
            rebuild.init.call(nr.LSEEK, rebuild.opened, description.position, 0, what="lseek")
        rebuild.place(number)


def _open_own(
    rebuild: Rebuild, do: Sequence, process: Process, number: int, description: Description
) -> None:
    # until then its files in /proc belong to nobody here; the captured value is set at the end
    do.call(nr.PRCTL, _PR_SET_DUMPABLE, 1)
    _open(rebuild, do, description)
    do.call(nr.DUP3, rebuild.opened, number, 0o2000000)
    do.call(nr.CLOSE, rebuild.opened)


def _open(rebuild: Rebuild, do: Sequence, description: Description) -> None:
    path = description.path
    name, opened = rebuild.program.text(os.fsencode(path)), rebuild.opened
    do.call(nr.OPENAT, -100, name, description.flags, save=opened, what=f"open {path}")


def position(rebuild: Rebuild, do: Sequence, process: Process) -> None:
    """Go to where a process was in files about processes, once all of them are complete.

    Not when they are opened: going there makes the text, and keeps what is left to read of it.
    """
    for descriptor in process.descriptors:
        description = rebuild.capture.descriptions[descriptor.description]
        if description.kind == "proc" and description.position:
            do.call(nr.LSEEK, descriptor.number, description.position, 0, what="lseek")


KINDS = (Kind(("kernel",), _open_kernel), Kind(("proc",), each=_open_own))
