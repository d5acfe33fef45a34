"""System V IPC (sysvipc(7)): segments of shared memory, sets of semaphores, message queues.

All of it belongs to the sandbox's ipc namespace and lives without anybody who uses it, so it is
found there, by a thread of the keeper's that goes into the namespace.  A restore has a new
namespace; the keeper makes everything again in it, with the same identifiers, before any process
exists, and fills segments as it fills other shared memory (shared_memory.py).  Clones attach
segments themselves, so that they are counted; until all have, a segment can be attached by anybody
inside, because who clones has no CAP_IPC_OWNER.

What a process owes when it ends (SEM_UNDO) cannot be seen.  A process without a list of such debts
is told from one that has a list by kcmp(2); where there are semaphores, the others are refused.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Container
from collections.abc import Sequence as Items
from contextlib import ExitStack
from dataclasses import dataclass

from ...linux import namespace, pidfd, sysvipc
from ...linux import numbers as nr
from ..model import PAGE, Mapping, Process
from ..rebuild import Rebuild
from ..records import Sequence
from ..subject import Refuse, Refused
from .shared_memory import SharedMemories, SharedMemory, Stock

_OPEN_TO_ALL = 0o666
_LARGEST = 16 << 20  # bytes of messages


@dataclass(frozen=True)
class Owned:
    """What all three kinds have. Ids inside."""

    key: int
    identifier: int
    mode: int
    uid: int
    gid: int
    creator: tuple[int, int]  # uid, gid


@dataclass(frozen=True)
class Segment(Owned):
    memory: int  # the number of what it holds in Capture.shared
    size: int
    doomed: bool  # goes when nobody has it attached any more


@dataclass(frozen=True)
class Semaphores(Owned):
    values: tuple[int, ...]
    used: bool  # semop(2) was called: some take that for a sign that it has been set up


@dataclass(frozen=True)
class MessageQueue(Owned):
    messages: tuple[tuple[int, bytes], ...]
    limit: int  # bytes


@dataclass(frozen=True)
class SystemV:
    """Everything in a namespace."""

    segments: tuple[Segment, ...] = ()
    semaphores: tuple[Semaphores, ...] = ()
    queues: tuple[MessageQueue, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.segments or self.semaphores or self.queues)


NOTHING = SystemV()


def capture(init: int, owner: int, shared: SharedMemories) -> SystemV:
    """Of the namespace of a PID 1 whose processes stand still. Raises Refused."""

    def look() -> SystemV:
        return SystemV(
            tuple(_segment(line, owner, shared) for line in sysvipc.listed("shm")),
            tuple(_semaphores(line, owner) for line in sysvipc.listed("sem")),
            _queues(owner),
        )

    return namespace.within(f"/proc/{init}/ns/ipc", namespace.CLONE_NEWIPC, look)


def _owned(
    line: dict[str, int], identifier: str, owner: int
) -> tuple[int, int, int, int, int, tuple[int, int]]:
    creator = line["cuid"] - owner, line["cgid"] - owner
    mode = line["perms"] & 0o777
    return line["key"], line[identifier], mode, line["uid"] - owner, line["gid"] - owner, creator


def _segment(line: dict[str, int], owner: int, shared: SharedMemories) -> Segment:
    number, mode, size = line["shmid"], line["perms"], line["size"]
    what = f"System V shared memory {number}"
    if mode & sysvipc.SHM_LOCKED:
        raise Refused(f"{what}, which is locked (SHM_LOCK)")
    if not (memory := shared.of_segment(number)):
        # nobody has it attached; this changes its time of attachment, as anybody's look would
        with sysvipc.attached(number, size, writable=False) as fd:
            memory = shared.enter_segment(number, fd)
    doomed = bool(mode & sysvipc.SHM_DEST)
    return Segment(*_owned(line, "shmid", owner), memory, size, doomed)


def _semaphores(line: dict[str, int], owner: int) -> Semaphores:
    values = sysvipc.semaphores(line["semid"], line["nsems"])
    return Semaphores(*_owned(line, "semid", owner), tuple(values), bool(line["otime"]))


def _queues(owner: int) -> tuple[MessageQueue, ...]:
    found = []
    room = _LARGEST
    for line in sysvipc.listed("msg"):
        number, size = line["msqid"], line["cbytes"]
        room -= size
        if room < 0:
            raise Refused(f"System V message queues of more than {_LARGEST >> 20} MiB together")
        messages = (sysvipc.message(number, index, size) for index in range(line["qnum"]))
        limit = sysvipc.queue_limit(number)
        found.append(MessageQueue(*_owned(line, "msqid", owner), tuple(messages), limit))
    return tuple(found)


def check(found: SystemV, init: int, process: Process, refuse: Refuse) -> None:
    """Whether a stopped process goes with it; raises what `refuse` makes."""
    if found.semaphores and pidfd.kcmp(init, process.host_pid, pidfd.KCMP_SYSVSEM):
        raise refuse(
            "may owe something to a System V semaphore when it ends (SEM_UNDO; with threads, that "
            "cannot be told)",
            "semaphore",
        )
    sizes = {segment.memory: segment.size for segment in found.segments}
    for (memory, base), parts in _attachments(process.mappings, sizes.keys()).items():
        end = base + (sizes[memory] + PAGE - 1 & -PAGE)
        position = base
        for part in parts:
            if part.start != position:
                break
            position = part.end
        if position != end:
            raise refuse(f"has mapped a part of a System V segment, at {base:#x}", "mapping")


def _attachments(
    mappings: Items[Mapping], segments: Container[int]
) -> dict[tuple[int, int], list[Mapping]]:
    found: dict[tuple[int, int], list[Mapping]] = defaultdict(list)
    for mapping in mappings:
        if mapping.memory >= 0 and mapping.memory in segments:
            found[mapping.memory, mapping.start - mapping.offset].append(mapping)
    return found


# -- and back ---------------------------------------------------------------------------------


def make(
    init: int, owner: int, found: SystemV, shared: dict[int, SharedMemory], stock: Stock
) -> dict[int, int]:
    """The keeper's part, in the namespace of a PID 1 that has no children yet.

    Descriptors of the memory of segments, by its number, as `shared` is.
    """
    made: dict[int, int] = {}

    def work() -> None:
        for segment in found.segments:
            made[segment.memory] = _make_segment(segment, owner, shared[segment.memory], stock)
        for each in found.semaphores:
            _make_semaphores(each, owner)
        for queue in found.queues:
            _make_queue(queue, owner)

    try:
        namespace.within(f"/proc/{init}/ns/ipc", namespace.CLONE_NEWIPC, work)
    except BaseException:
        for fd in made.values():
            os.close(fd)
        raise
    return made


def _make_segment(segment: Segment, owner: int, content: SharedMemory, stock: Stock) -> int:
    sysvipc.choose("shm", segment.identifier)
    uid, gid = segment.creator
    flags = _OPEN_TO_ALL | (0 if content.reserve else sysvipc.SHM_NORESERVE)
    with sysvipc.maker(owner + uid, owner + gid):
        key = sysvipc.IPC_PRIVATE if segment.doomed else segment.key
        number = sysvipc.shmget(key, segment.size, flags)
    _is_chosen(number, segment)
    with ExitStack() as stack:
        fd = stack.enter_context(sysvipc.attached(number, segment.size, writable=True))
        stock.fill(fd, content)
        return os.dup(fd)


def _is_chosen(number: int, wanted: Owned) -> None:
    if number != wanted.identifier:
        raise OSError(17, f"the identifier {wanted.identifier} of a System V object is taken")


def _make_semaphores(each: Semaphores, owner: int) -> None:
    sysvipc.choose("sem", each.identifier)
    uid, gid = each.creator
    with sysvipc.maker(owner + uid, owner + gid):
        number = sysvipc.semget(each.key, len(each.values), each.mode)
    _is_chosen(number, each)
    values = list(each.values)
    if each.used:
        step = -1 if values[0] else 1
        sysvipc.set_semaphores(number, [values[0] + step, *values[1:]])
        sysvipc.semop(number, 0, -step)
    else:
        sysvipc.set_semaphores(number, values)
    sysvipc.semctl_set(number, owner + each.uid, owner + each.gid, each.mode)


def _make_queue(queue: MessageQueue, owner: int) -> None:
    sysvipc.choose("msg", queue.identifier)
    uid, gid = queue.creator
    with sysvipc.maker(owner + uid, owner + gid):
        number = sysvipc.msgget(queue.key, queue.mode)
    _is_chosen(number, queue)
    for kind, text in queue.messages:
        sysvipc.msgsnd(number, kind, text)
    sysvipc.msgctl_set(number, owner + queue.uid, owner + queue.gid, queue.mode, queue.limit)


def attach(rebuild: Rebuild, do: Sequence, process: Process) -> None:
    """In a clone: all that it had attached."""
    numbers = {s.memory: s.identifier for s in rebuild.capture.system_v.segments}
    for (memory, base), parts in _attachments(process.mappings, numbers.keys()).items():
        writes = any(part.may_write for part in parts)
        runs = any(part.prot & 4 for part in parts)
        flags = (0 if writes else sysvipc.SHM_RDONLY) | (sysvipc.SHM_EXEC if runs else 0)
        first = (3 if writes else 1) | (4 if runs else 0)
        do.call(sysvipc.SHMAT, numbers[memory], base, flags, what=f"attach at {base:#x}")
        for part in parts:
            if part.prot != first:
                do.call(nr.MPROTECT, part.start, part.size, part.prot, what="protect a segment")


def finish(rebuild: Rebuild) -> None:
    """In PID 1, when everybody has attached what he had."""
    do, program = rebuild.init, rebuild.program
    for segment in rebuild.capture.system_v.segments:
        buffer = program.data(sysvipc.permissions(segment.uid, segment.gid, segment.mode))
        number = segment.identifier
        do.call(sysvipc.SHMCTL, number, sysvipc.IPC_SET, buffer, what="owner of a segment")
        if segment.doomed:
            do.call(sysvipc.SHMCTL, number, sysvipc.IPC_RMID, 0, what="remove a segment")
