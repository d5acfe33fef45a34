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
import stat
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import cached_property
from typing import TypeVar

from ..errors import UnsupportedState
from ..linux import namespace as ns
from ..linux import unix_diag
from ..linux.unix_diag import UnixInfo
from . import kinds
from .live import Live
from .look import Look
from .model import Description, Descriptor, External, Owner, Pipe
from .objects import (
    epoll,
    events,
    files,
    inotify,
    kernel_files,
    locks,
    mqueues,
    pidfds,
    pipes,
    sockets,
    tcp,
    terminals,
    udp,
    unix,
)
from .objects.ghosts import Ghosts
from .objects.shared_memory import SharedMemories
from .subject import O_CLOEXEC, Refuse, Refused, Subject

_ANONYMOUS: dict[str, Callable[[Subject], Description]] = {
    "[eventfd]": events.capture_eventfd,
    "[timerfd]": events.capture_timerfd,
    "[signalfd]": events.capture_signalfd,
    "[eventpoll]": epoll.capture,
    "inotify": inotify.capture,
    "[pidfd]": pidfds.capture,
}
_REFUSED = {
    "[fanotify]": "a fanotify group",
    "[io_uring]": "an io_uring instance",
    "[userfaultfd]": "a userfaultfd",
    "[perf_event]": "a perf event",
    "[aio]": "an aio context",
    "bpf-prog": "a BPF program",
    "bpf-map": "a BPF map",
    "[fscontext]": "a mount under construction",
    "seccomp notify": "a seccomp listener",
}
_SETTLE: dict[str, Callable[[Subject, Description], Description]] = {
    "epoll": epoll.settle,
    "pidfd": pidfds.settle,
    "unix socket": unix.settle,
    "proc": kernel_files.settle,
}
_CHECK: dict[str, Callable[[Subject, Description], None]] = {
    "unix socket": unix.check,
}
# when all are known
_FINISH: tuple[Callable[[DescriptorTable], None], ...] = (sockets.finish, tcp.finish, udp.finish)

_F_GETSIG, _F_GETOWN_EX = 11, 16
_T = TypeVar("_T")


class DescriptorTable:
    """Grows with each process that is captured; indexes into it are what descriptors hold."""

    def __init__(
        self,
        live: Live,
        owner: int,
        externals: Mapping[str, External],
        ghosts: Ghosts,
        network: sockets.Network,
    ) -> None:
        self.descriptions: list[Description] = []
        self.pipes: list[Pipe] = []
        self.queues = mqueues.QueueTable(live.root, owner)
        self.root = live.root  # a descriptor of the sandbox's root directory
        self.owner = owner  # the host uid of root inside
        self.shared_directories = live.shared
        self.find_file = live.find  # the path of a file handle of the sandbox's root
        self.ghosts = ghosts  # what has no name any more
        self.network = network
        self.inside: dict[int, int] = {}  # host pids, tids, groups and sessions -> inside
        self.terminals = terminals.Terminals(live.root, owner, externals)
        self.shared = SharedMemories(live.sharing, owner)
        self._live = live
        self._externals = externals
        self._pipe_index: dict[int, int] = {}
        self._seen: dict[tuple[str, str, int], list[Subject]] = {}
        self._index: dict[tuple[int, int], int] = {}
        self._first: list[Subject] = []  # who showed each description
        self._settling: list[tuple[Subject, int]] = []
        self.unix_holders: dict[int, Subject] = {}  # by inode number
        self._unknown_peers: list[Subject] = []
        self._peer_pids: dict[tuple[int, int], int] = {}  # (host, fd) -> pid inside
        self._adopted = ExitStack()

    def close(self) -> None:
        """Let go of descriptors that only the capture held."""
        self._adopted.close()
        self.network.close()

    def hold(self, resource: AbstractContextManager[_T]) -> _T:
        """Keep something until the capture has ended."""
        return self._adopted.enter_context(resource)

    def subject(self, index: int) -> Subject:
        """A descriptor of this description."""
        return self._first[index]

    def refuse(self, index: int, kind: str) -> UnsupportedState:
        return self._refused(self._first[index], kind)

    def of_process(self, host: int, look: Look, refuse: Refuse) -> tuple[Descriptor, ...]:
        out: list[Descriptor] = []
        entered: set[int] = set()
        for _, found in sorted(look.descriptors(), key=lambda one: one[1].number):
            subject = Subject.seen(host, found, self, refuse)
            index = self._enter(subject)
            first = index not in entered
            entered.add(index)
            held = locks.of_process(subject) if first and "lock:" in subject.facts else ()
            out.append(Descriptor(found.number, index, bool(subject.raw_flags & O_CLOEXEC), held))
        return tuple(out)

    def find(self, host: int, number: int) -> int | None:
        """The index of what a process that has been seen holds as descriptor `number`."""
        return self._index.get((host, number))

    def index_of(self, subject: Subject) -> int:
        """The index of the description of a descriptor that has been seen."""
        return self._index[subject.host, subject.number]

    def candidates(self, host: int, number: int, inode: int) -> Iterator[Subject]:
        """One descriptor of each description that may be what a process once had as `number`."""
        index = self.find(host, number)
        found = [s for same in self._seen.values() for s in same]
        found.sort(key=lambda s: self.index_of(s) != index)  # its own one first
        return (s for s in found if s.fact("ino", "0") == str(inode))

    def is_own(self, index: int) -> bool:
        """Whether a description is opened by each process itself, not by PID 1."""
        return kinds.BY_NAME[self.descriptions[index].kind].each is not None

    def holders(self, index: int) -> list[int]:
        """Host pids of the processes that have a description open, among those that were seen."""
        return list(dict.fromkeys(host for (host, _), i in self._index.items() if i == index))

    def is_shared(self, subject: Subject) -> bool:
        """Whether several processes hold the description of `subject`."""
        index = self._index[subject.host, subject.number]
        return any(i == index and host != subject.host for (host, _), i in self._index.items())

    def adopt(self, fd: int, holder: Subject) -> int:
        """The index of what is in flight in a queue of `holder`; `fd` is ours, and taken."""
        self._adopted.callback(os.close, fd)
        return self._enter(Subject.look(os.getpid(), fd, self, holder.refuse))

    @cached_property
    def unix_sockets(self) -> dict[int, UnixInfo]:
        """All unix sockets of the sandbox's network namespace, by inode number."""
        return ns.within(self.network.path, ns.CLONE_NEWNET, unix_diag.dump)

    @cached_property
    def unaccepted(self) -> set[int]:
        """Inode numbers of unix sockets that have connected and wait to be accepted."""
        return {inode for info in self.unix_sockets.values() for inode in info.waiting}

    @property
    def unix_states(self) -> list[unix.Unix]:
        return [d.state for d in self.descriptions if d.kind == "unix socket"]

    @property
    def unix_known(self) -> set[int]:
        return {state.inode for state in self.unix_states}

    def peer_pid(self, subject: Subject, pid: int) -> int:
        """The pid inside of the maker of a socket's peer; the kernel tells us that of the host.

        A process that has ended is known inside only; so is a task that made a socket for a
        restore, and every socket of a restored tree was made by one.
        """
        if pid in self.inside:
            return self.inside[pid]
        place = (subject.host, subject.number)
        if place not in self._peer_pids:
            asked = [s for s in self._unknown_peers if (s.host, s.number) not in self._peer_pids]
            asked = list({(s.host, s.number): s for s in (*asked, subject)}.values())
            with ExitStack() as taken:
                fds = [taken.enter_context(s.taken()) for s in asked]
                pids = self._live.peer_pids(fds)
            self._peer_pids |= {
                (s.host, s.number): found for s, found in zip(asked, pids, strict=True)
            }
        return self._peer_pids[place]

    def will_ask(self, subject: Subject) -> None:
        """Remember a socket whose `peer_pid` is going to be asked, to ask for all at once."""
        self._unknown_peers.append(subject)

    def settle(self) -> None:
        """Resolve what refers to other descriptions; this may find new ones in queues."""
        done = 0
        while done < len(self._settling):
            subject, index = self._settling[done]
            done += 1
            found = self.descriptions[index]
            try:
                if found.kind in _SETTLE:
                    found = _SETTLE[found.kind](subject, found)
                if subject.sends_signals:
                    found = replace(found, owner=self._owner_of(subject))
            except Refused as refused:
                raise self._refused(subject, str(refused)) from None
            self.descriptions[index] = found
        for subject, index in self._settling:
            description = self.descriptions[index]
            if description.kind in _CHECK:
                try:
                    _CHECK[description.kind](subject, description)
                except Refused as refused:
                    raise self._refused(subject, str(refused)) from None
        for finish in _FINISH:
            finish(self)

    def _enter(self, subject: Subject) -> int:
        key = (subject.target, subject.fact("ino", "0"), subject.raw_flags & ~O_CLOEXEC)
        for other in self._seen.get(key, ()):
            if subject.is_same_file(other.host, other.number):
                index = self._index[other.host, other.number]
                self._index[subject.host, subject.number] = index
                return index
        try:
            held = locks.of_description(subject)
            description = self._describe(subject)
            if held:
                if kinds.BY_NAME[description.kind].each is not None:
                    raise Refused(f"{subject.target}, with a lock")
                description = replace(description, locks=held)
        except Refused as refused:
            raise self._refused(subject, str(refused)) from None
        index = len(self.descriptions)
        self.descriptions.append(description)
        self._first.append(subject)
        self._index[subject.host, subject.number] = index
        self._seen.setdefault(key, []).append(subject)
        if description.kind in _SETTLE or subject.sends_signals:
            self._settling.append((subject, index))
        return index

    def _refused(self, subject: Subject, kind: str) -> UnsupportedState:
        error = subject.refuse("", kind)
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
            return sockets.capture(subject)
        if target.startswith("anon_inode:"):
            name = target.removeprefix("anon_inode:")
            if name in _ANONYMOUS:
                return _ANONYMOUS[name](subject)
            raise Refused(_REFUSED.get(name, f"an anonymous kernel object, {name}"))
        if target.startswith("/memfd:"):
            return self.shared.of_descriptor(subject)
        if terminals.is_terminal(subject):
            return self.terminals.capture(subject)
        if not target.startswith("/"):
            namespace = kernel_files.capture_namespace(subject)
            if namespace is not None:
                return namespace
            raise Refused(f"a kernel object, {target}")
        info = os.stat(subject.path)
        if self.queues.has(info) and stat.S_ISREG(info.st_mode) and not flags & os.O_PATH:
            return self.queues.capture(subject, info)
        found = files.capture(subject, info)
        if found.kind == "fifo":
            found = replace(found, pipe=self._pipe(subject, info.st_ino))
        return found

    def _pipe(self, subject: Subject, inode: int) -> int:
        if inode not in self._pipe_index:
            self._pipe_index[inode] = len(self.pipes)
            self.pipes.append(pipes.capture(subject.host, subject.number))
        return self._pipe_index[inode]

    def _owner_of(self, subject: Subject) -> Owner:
        with subject.taken() as fd:
            return self.owner_of(fd)

    def owner_of(self, fd: int) -> Owner:
        """Whom the description signals; the kernel tells pids as the keeper sees them."""
        kind, target = struct.unpack("ii", fcntl.fcntl(fd, _F_GETOWN_EX, bytes(8)))
        signal = fcntl.fcntl(fd, _F_GETSIG)
        if target and target not in self.inside:
            target = 0  # it has ended: nobody is signalled any more
        return Owner(kind, self.inside.get(target, 0), signal, True)
