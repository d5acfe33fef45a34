"""What a tree's namespaces hold beside its processes: asked of PID 1, and read from outside.

Some of it only a member of the namespaces can see, so PID 1 runs a small program for it.  Mounts
and the network are only compared with how they were when the tree began: changes are refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ..linux import numbers as nr
from ..linux.ask import Kind, Questions
from ..linux.proc import INTERFACE_FILES, NETWORK_FILES
from .objects.mqueues import LIMITS, LIMITS_DIRECTORY, Queues
from .peer import Loaded, Peer, Run
from .records import Program, Ref, Sealed


@dataclass(frozen=True)
class WorldState:
    """What tells whether mounts or the network were changed inside."""

    mounts: int
    network: bytes


@dataclass(frozen=True)
class Survey:
    """The state of a tree's namespaces."""

    last_pid: int
    hostname: bytes
    domainname: bytes
    ipc: dict[str, int]  # kind of System V object -> how many there are
    queue_limits: tuple[int, ...]  # see objects/mqueues.py


@dataclass(frozen=True)
class Around:
    """What was found around a tree, and is there still as long as nobody in the tree moves."""

    hosts: frozenset[int]  # host pids of everybody
    world: WorldState
    survey: Survey


_BUFFER = 4096
_NUMBER = 32
_LAST_PID = "/proc/sys/kernel/ns_last_pid"
_IPC = {
    "shared memory segments": "/proc/sysvipc/shm",
    "semaphore sets": "/proc/sysvipc/sem",
    "message queues": "/proc/sysvipc/msg",
}


@lru_cache(maxsize=64)
def world_questions(interfaces: tuple[str, ...], network: bool) -> Questions:
    """All that `mount_count` and `network_state` read."""
    ask = Questions()
    ask.add("mountinfo", Kind.READ, "/proc/%d/mountinfo")
    for name in NETWORK_FILES if network else ():
        ask.add(name, Kind.READ, f"/proc/%d/net/{name}")
    for interface in interfaces:
        for name in INTERFACE_FILES:
            escaped = interface.replace("%", "%%")
            path = f"/proc/%d/root/sys/class/net/{escaped}/{name}"
            ask.add(f"{interface} {name}", Kind.READ, path)
    return ask


def _survey_program() -> tuple[Sealed, dict[str, Ref]]:
    program = Program()
    buffers = {"uname": program.data(bytes(_BUFFER))}
    do = program.root
    do.call(63, buffers["uname"], what="uname")
    opened = program.variable()
    queues = [f"{LIMITS_DIRECTORY}/{name}" for name in LIMITS]
    for path in (_LAST_PID, *_IPC.values(), *queues):
        size = _NUMBER if path in queues else _BUFFER
        buffers[path] = program.data(bytes(size))
        name, optional = program.text(path), path in queues
        do.call(nr.OPENAT, -100, name, 0, save=opened, may_fail=optional, what=f"open {path}")
        if optional:  # the kernel may have none
            do.skip_if_error(opened, 2)
        do.call(nr.READ, opened, buffers[path], size)
        do.call(nr.CLOSE, opened)
    return program.seal(), buffers


SURVEY, _BUFFERS = _survey_program()


def _surveyed(run: Run) -> Survey:
    def text(name: str) -> bytes:
        at = _BUFFERS[name].offset
        size = _NUMBER if name.startswith(LIMITS_DIRECTORY) else _BUFFER
        return bytes(run.memory[at : at + size]).rstrip(b"\0")

    uname = run.memory[_BUFFERS["uname"].offset :][:390]
    fields = [uname[i * 65 : (i + 1) * 65].split(b"\0")[0] for i in range(6)]
    return Survey(
        last_pid=int(text(_LAST_PID)),
        hostname=fields[1],
        domainname=fields[5],
        queue_limits=tuple(
            int(text(f"{LIMITS_DIRECTORY}/{name}") or default)
            for name, default in zip(LIMITS, Queues().limits, strict=True)
        ),
        ipc={name: max(0, text(path).count(b"\n") - 1) for name, path in _IPC.items()},
    )


class Surveying:
    """A survey in progress; nothing else can be asked of PID 1 before it has answered."""

    def __init__(self, peer: Peer, loaded: Loaded) -> None:
        self._peer = peer
        self._survey: Survey | None = None
        self._peer.lock.acquire()
        self._waits = True
        try:
            self._run = peer.start(loaded, {})
        except BaseException:
            self._release()
            raise

    def _release(self) -> None:
        self._waits = False
        self._peer.lock.release()

    def answer(self) -> Survey:
        self.end()
        if self._survey is None:
            self._survey = _surveyed(self._run)
        return self._survey

    def end(self) -> None:
        """Wait for the answer, whether anybody wants it or not."""
        if self._waits:
            try:
                self._peer.answer(self._run)
            finally:
                self._release()
