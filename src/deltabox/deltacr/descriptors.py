"""What the processes of a tree have open: descriptors, and the descriptions that they share.

A descriptor is a number in one process; the open file description behind it, with its position and
flags, may be shared by several descriptors of several processes (open(2)).  kcmp(2) tells which,
and each is described once.  What cannot be opened again is refused here by name.
"""

from __future__ import annotations

import os
import stat as modes
from collections.abc import Callable, Mapping

from ..errors import UnsupportedState
from ..linux import pidfd, proc
from .model import Description, Descriptor, Pipe
from .objects import files, pipes

Refuse = Callable[[str, str], UnsupportedState]

_ANONYMOUS = {
    "[eventpoll]": "an epoll instance",
    "[eventfd]": "an eventfd",
    "[timerfd]": "a timerfd",
    "[signalfd]": "a signalfd",
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


class DescriptorTable:
    """Grows with each process that is captured; indexes into it are what descriptors hold."""

    def __init__(self, root: int, owner: int, externals: Mapping[int, str]) -> None:
        self.descriptions: list[Description] = []
        self.pipes: list[Pipe] = []
        self._root = root
        self._owner = owner
        self._externals = externals
        self._ghosts: dict[tuple[int, int] | None, int] = {}
        self._pipe_index: dict[int, int] = {}
        self._seen: dict[tuple[int, int, int, int], list[tuple[int, int, int]]] = {}

    def of_process(self, host: int, refuse: Refuse) -> tuple[Descriptor, ...]:
        out = []
        base = f"/proc/{host}/fd"
        for number in sorted(int(name) for name in os.listdir(base)):
            path = f"{base}/{number}"
            target = os.readlink(path)
            facts = _fdinfo(host, number)
            if "lock" in facts:
                raise refuse(f"holds a lock on fd {number}, {target}", "lock")
            flags, position = int(facts["flags"], 8), int(facts["pos"])
            cloexec = bool(flags & 0o2000000)
            inode = int(facts.get("ino", "0"))
            index = self._known(host, number, inode, flags & ~0o2000000, position)
            if index is None:
                index = len(self.descriptions)
                self.descriptions.append(
                    self._describe(host, number, path, target, flags, position, refuse)
                )
                self._seen.setdefault((inode, flags & ~0o2000000, position, 0), []).append(
                    (host, number, index)
                )
            out.append(Descriptor(number, index, cloexec))
        return tuple(out)

    def _known(self, host: int, number: int, inode: int, flags: int, position: int) -> int | None:
        """The description this descriptor shares with one seen before (kcmp(2))."""
        for other_host, other, index in self._seen.get((inode, flags, position, 0), ()):
            if not pidfd.kcmp(host, other_host, pidfd.KCMP_FILE, number, other):
                return index
        return None

    def _describe(
        self,
        host: int,
        number: int,
        path: str,
        target: str,
        flags: int,
        position: int,
        refuse: Refuse,
    ) -> Description:
        def what(kind: str) -> UnsupportedState:
            error = refuse("", kind)
            error.message = (
                f"fd {number} of pid {error.attributes['pid']} "
                f"({error.attributes['process']}) is {kind}"
            )
            error.attributes["fd"] = number
            return error

        kind = files.open_flags(flags)
        if target.startswith("pipe:["):
            inode = int(target[6:-1])
            key = self._externals.get(inode)
            if key is not None:
                index = self._pipe(host, number, inode) if kind & 3 == 0 else -1
                return Description("external", kind, 0, pipe=index, key=key)
            self._refuse_packets(kind, what)
            return Description("pipe", kind, 0, pipe=self._pipe(host, number, inode))
        if target.startswith("socket:["):
            raise what("a socket")
        if target.startswith("anon_inode:"):
            name = target.removeprefix("anon_inode:")
            raise what(_ANONYMOUS.get(name, f"an anonymous kernel object, {name}"))
        if target.startswith("/memfd:"):
            raise what("a memfd")
        if target.startswith(("/dev/pts/", "/dev/ptmx")) or target == "/dev/tty":
            raise what("a terminal")
        if not target.startswith("/"):
            raise what(f"a kernel object, {target}")
        info = os.stat(path)
        nameless = (info.st_dev, info.st_ino) if info.st_nlink == 0 else None
        if nameless in self._ghosts:
            return Description("file", kind, position, target, ghost_of=self._ghosts[nameless])
        if modes.S_ISFIFO(info.st_mode):
            try:
                files.check_name(self._root, target, info)
            except files.Refused as refused:
                raise what(str(refused)) from None
            return Description("fifo", kind, 0, target, pipe=self._pipe(host, number, info.st_ino))

        try:
            found = files.capture(
                root=self._root,
                fd_path=path,
                target=target,
                flags=flags,
                position=position,
                owner=self._owner,
            )
        except files.Refused as refused:
            raise what(str(refused)) from None
        if found.ghost is not None and nameless is not None:
            self._ghosts[nameless] = len(self.descriptions)
        return found

    def _refuse_packets(self, flags: int, what: Callable[[str], UnsupportedState]) -> None:
        if flags & 0o40000:
            raise what("a pipe in packet mode")

    def _pipe(self, host: int, number: int, inode: int) -> int:
        if inode not in self._pipe_index:
            self._pipe_index[inode] = len(self.pipes)
            self.pipes.append(pipes.capture(host, number))
        return self._pipe_index[inode]


def _fdinfo(host: int, number: int) -> dict[str, str]:
    facts = {}
    for line in proc.read(f"/proc/{host}/fdinfo/{number}").decode().splitlines():
        key, _, value = line.partition(":")
        facts[key] = value.strip()
    return facts
