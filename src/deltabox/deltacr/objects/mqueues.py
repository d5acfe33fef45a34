"""POSIX message queues (mq_overview(7), ipc/mqueue.c): all those of the sandbox's ipc namespace.

A queue is a file of the `mqueue` file system that PID 1 mounts at /dev/mqueue.  It lives on when
nobody has it open, so queues are found there, and those without a name by who has them open.

Messages cannot be looked at.  While everybody is stopped they are taken out and put back through
a descriptor of the keeper's own: by priority and age, which is the order they are kept in, so
nothing has changed afterwards but what inotify(7) and an edge-triggered epoll set would tell.
Whatever goes wrong in between, what was taken is put back.  A stopped process is in no queue's list
of waiters: a call that blocks was interrupted when it was stopped.

A registered notification (mq_notify(3)) is refused: sending to an empty queue would fire it, and
its value cannot be read.

Rejected: a mount made only when there are queues (it costs 12 us of a restore, and programs look
for it); reading the messages out of the kernel's memory.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import resource
import struct
from dataclasses import dataclass

from ...linux import mqueue, namespace
from ...linux import numbers as nr
from ...linux.fsuid import file_owner
from ...linux.mount import filesystem_type
from ...linux.openat2 import openat2
from ..boot import REQUESTS
from ..model import Description
from ..peer import insist
from ..rebuild import Kind, Rebuild
from ..records import Ref
from ..subject import Refused, Subject

LIMITS = ("queues_max", "msg_max", "msgsize_max", "msg_default", "msgsize_default")
LIMITS_DIRECTORY = "/proc/sys/fs/mqueue"
_DEFAULTS = (256, 10, 8192, 10, 8192)  # of a new namespace (linux/ipc_namespace.h)
_DIRECTORY = "/dev/mqueue"
_MESSAGE, _PRIORITY = 48, 48  # struct msg_msg, struct posix_msg_tree_node
_PRIORITIES = 32768
_LARGEST = 32 << 20
_O_CREAT, _O_EXCL, _O_RDWR, _O_CLOEXEC = 0o100, 0o200, 2, 0o2000000
_MQ_OPEN, _MQ_UNLINK, _MQ_TIMEDSEND, _UTIMENSAT = 240, 241, 242, 280
_FCHMOD, _FCHOWN = 91, 93
_NOTIFY = re.compile(rb"NOTIFY_PID:(\d+)")


@dataclass(frozen=True)
class Queue:
    """One queue; owners as seen inside."""

    name: str
    linked: bool
    mode: int
    uid: int
    gid: int
    times: tuple[int, int]  # of the last access and change, in nanoseconds
    longest: int
    size: int
    messages: tuple[tuple[int, bytes], ...]  # (priority, message), in the order of their delivery

    @property
    def charge(self) -> int:
        """What the kernel counts for it, however full it is (mqueue_get_inode)."""
        tree = self.longest * _MESSAGE + min(self.longest, _PRIORITIES) * _PRIORITY
        return tree + self.longest * self.size


@dataclass(frozen=True)
class Queues:
    """All queues of a tree, and the limits of its namespace in the order of `LIMITS`."""

    all: tuple[Queue, ...] = ()
    limits: tuple[int, ...] = _DEFAULTS

    @property
    def linked(self) -> tuple[Queue, ...]:
        return tuple(queue for queue in self.all if queue.linked)


@dataclass(frozen=True)
class OpenQueue:
    """What a description of a queue shows."""

    index: int
    by_path: bool  # opened as a file below /dev/mqueue, not by mq_open(3)


class QueueTable:
    """The queues of a stopped tree; its descriptors find theirs here."""

    def __init__(self, root: int, owner: int) -> None:
        self._root = root
        self._owner = owner
        self._device = -1
        self._index: dict[int, int] = {}  # by inode
        self.found: list[Queue] = []

    def look(self) -> None:
        """Find those that have a name. Refused says what one of them is."""
        try:
            directory = openat2(self._root, _DIRECTORY, os.O_RDONLY | os.O_DIRECTORY)
        except OSError:
            return  # no such file system in this kernel, and no queues then
        try:
            if filesystem_type(directory) != mqueue.MQUEUE_MAGIC:
                return
            self._device = os.fstat(directory).st_dev
            for name in sorted(os.listdir(directory)):
                fd = os.open(name, _O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
                self._add(name, fd)
        finally:
            os.close(directory)

    def has(self, info: os.stat_result) -> bool:
        """Whether what is open is a queue."""
        return info.st_dev == self._device

    def capture(self, subject: Subject, info: os.stat_result) -> Description:
        """Describe an open queue."""
        if info.st_ino not in self._index:
            name = os.path.basename(subject.target).removesuffix(" (deleted)")
            self._add(name, os.open(subject.path, _O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC))
        by_path = subject.target.startswith(_DIRECTORY + "/")
        state = OpenQueue(self._index[info.st_ino], by_path)
        return Description("mqueue", subject.flags, subject.position, state=state)

    def _add(self, name: str, fd: int) -> None:
        """Capture a queue through a descriptor of ours, which is closed."""
        try:
            info = os.fstat(fd)
            what = f"the message queue /{name}"
            notified = _NOTIFY.search(os.pread(fd, 256, 0))
            if notified is None or int(notified[1]):
                raise Refused(f"{what}, which notifies a process (mq_notify)")
            longest, size, present = mqueue.attributes(fd)
            queue = Queue(
                name,
                bool(info.st_nlink),
                info.st_mode & 0o7777,
                info.st_uid - self._owner,
                info.st_gid - self._owner,
                (info.st_atime_ns, info.st_mtime_ns),
                longest,
                size,
                _messages(fd, size) if present else (),
            )
            os.utime(fd, ns=queue.times)  # to read what it tells of itself counts as an access
        finally:
            os.close(fd)
        if sum(len(text) for each in (*self.found, queue) for _, text in each.messages) > _LARGEST:
            raise Refused(f"{what}; all queues hold more than {_LARGEST >> 20} MiB together")
        limit = resource.getrlimit(resource.RLIMIT_MSGQUEUE)[0]
        named, nameless = (
            sum(each.charge for each in (*self.found, queue) if each.linked is linked)
            for linked in (True, False)
        )
        # those without a name are made by PID 1, while the old tree may still have its own
        if 0 <= limit < max(named, 2 * nameless):
            raise Refused(
                f"{what}; to make all queues again would take more room than RLIMIT_MSGQUEUE "
                f"of the engine allows ({limit} bytes)"
            )
        self._index[info.st_ino] = len(self.found)
        self.found.append(queue)


def _messages(fd: int, size: int) -> tuple[tuple[int, bytes], ...]:
    """All messages; they are in the queue again when this returns or raises.

    Once begun it must go on to the end: what stayed in the queue would come before what is put
    back.
    """
    taken: list[tuple[int, bytes]] = []

    def take() -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                taken.append(mqueue.receive(fd, size))

    try:
        insist(take)
    finally:
        for priority, message in taken:
            insist(lambda p=priority, m=message: mqueue.send(fd, p, m))  # type: ignore[misc]
    return tuple(taken)


# -- and back ---------------------------------------------------------------------------------


def restore(rebuild: Rebuild, queues: Queues) -> None:
    """Make every queue, and open what is open of it; before all other descriptions.

    Those without a name come first: their old name may have been given to another.  For the others
    PID 1 waits until the keeper has made them (`make`).
    """
    needed = tuple(max(pair) for pair in zip(queues.limits, _room(queues), strict=True))
    if needed != _DEFAULTS:
        _set_limits(rebuild, needed)
    for index, queue in enumerate(queues.all):
        if not queue.linked:
            _restore_unlinked(rebuild, index, queue)
    if queues.linked:
        do, requests = rebuild.init, REQUESTS
        buffer = rebuild.program.data(bytes(8))
        do.call(nr.WRITE, requests, buffer, 8, what="ask for message queues")
        do.call(nr.READ, requests, buffer, 8, what="wait for message queues")
        for index, queue in enumerate(queues.all):
            if queue.linked:
                name = rebuild.program.text(os.fsencode(queue.name))
                _open_descriptions(rebuild, index, queue, name)
    if needed != queues.limits:
        _set_limits(rebuild, queues.limits)


def make(init: int, owner: int, queues: Queues) -> None:
    """The keeper's part: make the queues with a name in the namespace of a PID 1 that waits.

    The kernel counts their room for the user who makes them, up to RLIMIT_MSGQUEUE for all of a
    tree of sandboxes, and gives it back some time after a namespace has gone.  So each restore
    counts it for another uid of the tree's range, one that is no user outside.
    """

    def work() -> None:
        mqueue.charge_to(owner + 1 + next(_turn) % 65534)
        with file_owner(owner):
            for queue in queues.linked:
                _make(queue, owner)

    namespace.within(f"/proc/{init}/ns/ipc", namespace.CLONE_NEWIPC, work)


_turn = itertools.count()


def _make(queue: Queue, owner: int) -> None:
    fd = mqueue.create(queue.name, queue.longest, queue.size)
    try:
        for priority, message in queue.messages:
            mqueue.send(fd, priority, message)
        os.fchown(fd, owner + queue.uid, owner + queue.gid)
        os.fchmod(fd, queue.mode)
        os.utime(fd, ns=queue.times)
    finally:
        os.close(fd)


def _room(queues: Queues) -> tuple[int, ...]:
    """Limits that let all of them be made: they may have been lowered since."""
    longest = max((q.longest for q in queues.all), default=0)
    size = max((q.size for q in queues.all), default=0)
    return (len(queues.all), longest, size, 0, 0)


def _set_limits(rebuild: Rebuild, limits: tuple[int, ...]) -> None:
    do, program = rebuild.init, rebuild.program
    for name, value in zip(LIMITS, limits, strict=True):
        path = program.text(f"{LIMITS_DIRECTORY}/{name}")
        text = str(value).encode()
        do.call(nr.OPENAT, -100, path, 1, save=rebuild.opened, what=f"open {name}")
        do.call(nr.WRITE, rebuild.opened, program.data(text), len(text), what=f"set {name}")
        do.call(nr.CLOSE, rebuild.opened)


def _restore_unlinked(rebuild: Rebuild, index: int, queue: Queue) -> None:
    do, program = rebuild.init, rebuild.program
    what = f"message queue /{queue.name}"
    name = program.text(os.fsencode(queue.name))
    made = program.variable()
    attributes = program.data(struct.pack("<8q", 0, queue.longest, queue.size, 0, 0, 0, 0, 0))
    do.call(
        _MQ_OPEN,
        name,
        _O_RDWR | _O_CREAT | _O_EXCL | _O_CLOEXEC,
        0o600,
        attributes,
        save=made,
        what=f"make the {what}",
    )
    for priority, message in queue.messages:
        text = program.data(message)
        do.call(_MQ_TIMEDSEND, made, text, len(message), priority, 0, what=f"fill the {what}")
    do.call(_FCHOWN, made, queue.uid, queue.gid, what=f"owner of the {what}")
    do.call(_FCHMOD, made, queue.mode, what=f"mode of the {what}")
    _open_descriptions(rebuild, index, queue, name)
    times = struct.pack("<4q", *(part for ns in queue.times for part in divmod(ns, 10**9)))
    do.call(_UTIMENSAT, made, 0, program.data(times), 0, what=f"times of the {what}")
    do.call(_MQ_UNLINK, name, what=f"unlink the {what}")
    do.call(nr.CLOSE, made)


def _open_descriptions(rebuild: Rebuild, index: int, queue: Queue, name: Ref) -> None:
    do, program = rebuild.init, rebuild.program
    for position, description in enumerate(rebuild.capture.descriptions):
        if description.kind != "mqueue" or description.state.index != index:
            continue
        what = f"open the message queue /{queue.name}"
        if description.state.by_path:
            path = program.text(os.fsencode(f"{_DIRECTORY}/{queue.name}"))
            do.call(nr.OPENAT, -100, path, description.flags, save=rebuild.opened, what=what)
        else:
            flags = description.flags
            do.call(_MQ_OPEN, name, flags, 0, 0, save=rebuild.opened, what=what)
        if description.position:
            do.call(nr.LSEEK, rebuild.opened, description.position, 0)
        rebuild.place(rebuild.number(position))


KIND = Kind(("mqueue",))
