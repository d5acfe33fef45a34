"""What the processes of a tree have open: descriptors, and the descriptions that they share.

A descriptor is a number in one process; the open file description behind it, with its position and
flags, may be shared by several descriptors of several processes (open(2)).  kcmp(2) tells which,
and each is described once, by the file in `objects/` that knows its kind.  What refers to other
descriptions (an epoll set to what it watches) is *settled* when all processes have been seen.
What cannot be made again is refused here by name.
"""

from __future__ import annotations

import fcntl
import os
import stat as modes
import struct
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace

from ..errors import UnsupportedState
from .model import Description, Descriptor, External, Owner, Pipe
from .objects import events, files, pipes, terminals
from .subject import O_CLOEXEC, Refuse, Refused, Subject

_ANONYMOUS: dict[str, Callable[[Subject], Description]] = {
    "[eventfd]": events.capture_eventfd,
    "[timerfd]": events.capture_timerfd,
    "[signalfd]": events.capture_signalfd,
}
_REFUSED = {
    "[eventpoll]": "an epoll instance",
    "inotify": "an inotify instance",
    "[fanotify]": "a fanotify group",
    "[io_uring]": "an io_uring instance",
    "[userfaultfd]": "a userfaultfd",
    "[perf_event]": "a perf event",
    "[pidfd]": "a pidfd",
    "[aio]": "an aio context",
    "bpf-prog": "a BPF program",
    "bpf-map": "a BPF map",
    "[fscontext]": "a mount under construction",
    "seccomp notify": "a seccomp listener",
}
_SETTLE: dict[str, Callable[[Subject, Description], Description]] = {}

_F_GETSIG, _F_GETOWN_EX = 11, 16


class DescriptorTable:
    """Grows with each process that is captured; indexes into it are what descriptors hold."""

    def __init__(self, root: int, owner: int, externals: Mapping[str, External]) -> None:
        self.descriptions: list[Description] = []
        self.pipes: list[Pipe] = []
        self.root = root  # a descriptor of the sandbox's root directory
        self.owner = owner  # the host uid of root inside
        self.inside: dict[int, int] = {}  # host pids, tids, groups and sessions -> inside
        self.terminals = terminals.Terminals(root, owner, externals)
        self._externals = externals
        self._ghosts: dict[tuple[int, int], int] = {}
        self._pipe_index: dict[int, int] = {}
        self._seen: dict[tuple[str, str, int], list[Subject]] = {}
        self._index: dict[tuple[int, int], int] = {}
        self._settling: list[tuple[Subject, int, Refuse]] = []
        self._adopted = ExitStack()

    def close(self) -> None:
        """Let go of descriptors that only the capture held."""
        self._adopted.close()

    def of_process(self, host: int, refuse: Refuse) -> tuple[Descriptor, ...]:
        out = []
        for number in sorted(int(name) for name in os.listdir(f"/proc/{host}/fd")):
            subject = Subject.look(host, number, self)
            index = self._enter(subject, refuse)
            out.append(Descriptor(number, index, bool(subject.raw_flags & O_CLOEXEC)))
        return tuple(out)

    def find(self, host: int, number: int) -> int | None:
        """The index of what a process that has been seen holds as descriptor `number`."""
        return self._index.get((host, number))

    def adopt(self, fd: int, refuse: Refuse) -> int:
        """The index of a description that only a queue holds; `fd` is the keeper's, and taken."""
        self._adopted.callback(os.close, fd)
        return self._enter(Subject.look(os.getpid(), fd, self), refuse)

    def settle(self) -> None:
        """Resolve what refers to other descriptions; this may find new ones in queues."""
        done = 0
        while done < len(self._settling):
            subject, index, refuse = self._settling[done]
            done += 1
            found = self.descriptions[index]
            try:
                if found.kind in _SETTLE:
                    found = _SETTLE[found.kind](subject, found)
                if subject.sends_signals:
                    found = replace(found, owner=self._owner_of(subject))
            except Refused as refused:
                raise self._refused(subject, refuse, str(refused)) from None
            self.descriptions[index] = found

    def _enter(self, subject: Subject, refuse: Refuse) -> int:
        key = (subject.target, subject.fact("ino", "0"), subject.raw_flags & ~O_CLOEXEC)
        for other in self._seen.get(key, ()):
            if subject.is_same_file(other.host, other.number):
                index = self._index[other.host, other.number]
                self._index[subject.host, subject.number] = index
                return index
        try:
            description = self._describe(subject)
        except Refused as refused:
            raise self._refused(subject, refuse, str(refused)) from None
        index = len(self.descriptions)
        self.descriptions.append(description)
        self._index[subject.host, subject.number] = index
        self._seen.setdefault(key, []).append(subject)
        if description.kind in _SETTLE or subject.sends_signals:
            self._settling.append((subject, index, refuse))
        return index

    def _refused(self, subject: Subject, refuse: Refuse, kind: str) -> UnsupportedState:
        error = refuse("", kind)
        error.message = (
            f"fd {subject.number} of pid {error.attributes['pid']} "
            f"({error.attributes['process']}) is {kind}"
        )
        error.attributes["fd"] = subject.number
        return error

    def _describe(self, subject: Subject) -> Description:
        target, flags = subject.target, subject.flags
        if target.startswith("pipe:["):
            inode = int(target[6:-1])
            external = self._externals.get(target)
            if external is not None:
                index = self._pipe(subject, inode) if flags & 3 == 0 else -1
                return Description("external", flags, pipe=index, key=external.key)
            if flags & 0o40000:
                raise Refused("a pipe in packet mode")
            return Description("pipe", flags, pipe=self._pipe(subject, inode))
        if target.startswith("socket:["):
            raise Refused("a socket")
        if target.startswith("anon_inode:"):
            name = target.removeprefix("anon_inode:")
            if name in _ANONYMOUS:
                return _ANONYMOUS[name](subject)
            raise Refused(_REFUSED.get(name, f"an anonymous kernel object, {name}"))
        if target.startswith("/memfd:"):
            raise Refused("a memfd")
        if terminals.is_terminal(subject):
            return self.terminals.capture(subject)
        if not target.startswith("/"):
            raise Refused(f"a kernel object, {target}")
        info = os.stat(subject.path)
        if modes.S_ISFIFO(info.st_mode):
            files.check_name(self.root, target, info)
            return Description("fifo", flags, path=target, pipe=self._pipe(subject, info.st_ino))
        return self._file(subject, info)

    def _file(self, subject: Subject, info: os.stat_result) -> Description:
        nameless = (info.st_dev, info.st_ino)
        if not info.st_nlink and nameless in self._ghosts:
            original = self._ghosts[nameless]
            return Description(
                "file", subject.flags, subject.position, subject.target, ghost_of=original
            )
        found = files.capture(subject, info)
        if found.ghost is not None:
            self._ghosts[nameless] = len(self.descriptions)
        return found

    def _pipe(self, subject: Subject, inode: int) -> int:
        if inode not in self._pipe_index:
            self._pipe_index[inode] = len(self.pipes)
            self.pipes.append(pipes.capture(subject.host, subject.number))
        return self._pipe_index[inode]

    def _owner_of(self, subject: Subject) -> Owner:
        """Whom the description signals; the kernel tells pids as the keeper sees them."""
        with subject.taken() as fd:
            kind, target = struct.unpack("ii", fcntl.fcntl(fd, _F_GETOWN_EX, bytes(8)))
            signal = fcntl.fcntl(fd, _F_GETSIG)
        if target and target not in self.inside:
            target = 0  # it has ended: nobody is signalled any more
        return Owner(kind, self.inside.get(target, 0), signal, True)
