"""What tells a fork that it is one: a file in it, a signal to who asked for it, a name of its own.

A program that keeps a secret or a seed of its own in memory (a random generator, a clock sequence
of UUIDs, a session with a server) is copied with it, and nothing inside could tell.  So when a
state comes to life in a *sandbox other than the one it was saved in* - in a fork, and when a
sandbox goes to a checkpoint of another one - then, before any of its programs runs,

- `/run/deltabox/fork.json` is written: the sandbox's id, a number that grows with each fork of the
  tree (0 in the sandbox that was created), 32 random bytes;
- processes that were registered get their signal (`deltacr.notify`);
- a sandbox that was forked with an identity of its own gets its host name and machine id.

A rollback to a checkpoint of its own does none of this: it repeats what was, that is what it is
for.  Registrations belong to the state: a checkpoint keeps them, a rollback brings them back.

The file lies in the sandbox's files and not on a mount of its own, because a mount costs every
restore; comparisons leave `/run/deltabox` out (`deltafs.diff`).  Rejected: a counter in memory that
programs map (it needs their cooperation all the same, and shared memory cannot be copied lazily).
"""

from __future__ import annotations

import errno
import json
import os
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..deltacr.engine import Live
from ..deltafs.inside import Inside
from ..deltafs.root import FORK_FILE, MACHINE_IDS
from ..errors import RollbackError
from ..linux import namespace, pidfd

_LONGEST = 64  # characters of a host name (__NEW_UTS_LEN)


@dataclass(frozen=True)
class Identity:
    """The host name and machine id of a fork that has its own."""

    hostname: str
    machine_id: str

    @classmethod
    def new(cls, like: bytes, number: str) -> Identity:
        """For the fork with this number, of a sandbox with this host name."""
        suffix = "-" + number.rpartition("-")[2]
        old = like.decode("ascii", errors="replace")
        return cls(old[: _LONGEST - len(suffix)] + suffix, secrets.token_hex(16))


def announce(root: int, owner: int, sandbox: str, fork: int, identity: Identity | None) -> None:
    """Write who it is into a sandbox's files; `root` is a mount that no program uses yet."""
    content = {"sandbox": sandbox, "fork": fork, "random": secrets.token_hex(32)}
    inside = Inside(root, owner)
    path = FORK_FILE
    try:
        inside.write(path, json.dumps(content).encode() + b"\n", 0o644)
        if identity is not None:
            path = "/etc/hostname"
            inside.write(path, identity.hostname.encode() + b"\n")
            for path in MACHINE_IDS:
                if path == MACHINE_IDS[0] or inside.exists(path):
                    inside.write(path, identity.machine_id.encode() + b"\n", 0o444)
    except OSError as error:
        raise RollbackError(
            f"{path} could not be written into the copy: {error.strerror}; "
            "something inside has put another thing in its place, or the disk is full"
        ) from error


def rename(live: Live, identity: Identity) -> None:
    """Give a restored tree that waits at its barrier its own host name."""
    namespace.set_hostname(live.init, identity.hostname)


@dataclass(frozen=True)
class Registration:
    """A process (its pid inside) and the signal that it gets in a fork."""

    pid: int
    signal: int


class Registrations:
    """Who wants to hear of forks in one live tree. All access with the sandbox's lock held.

    Each holds a pidfd, so that a pid that is used again is never mistaken for the one registered.
    """

    def __init__(self) -> None:
        self._registered: dict[int, tuple[int, int]] = {}  # pid inside -> (signal, pidfd)

    @classmethod
    def restored(cls, hosts: Mapping[int, int], saved: Iterable[Registration]) -> Registrations:
        """Those of a checkpoint, in a tree restored from it that waits at its barrier."""
        made = cls()
        try:
            for one in saved:
                made.add(one.pid, one.signal, os.pidfd_open(hosts[one.pid]))
        except BaseException:
            made.close()
            raise
        return made

    def add(self, pid: int, signal: int, task: int) -> None:
        """Register a process (its pid inside and a pidfd, which is taken)."""
        self.remove(pid)
        self._registered[pid] = (signal, task)

    def remove(self, pid: int) -> bool:
        """Whether it was registered."""
        _, task = self._registered.pop(pid, (0, -1))
        if task >= 0:
            os.close(task)
        return task >= 0

    def save(self) -> tuple[Registration, ...]:
        """What a checkpoint keeps: those that have not ended."""
        for pid, (_, task) in list(self._registered.items()):
            if pidfd.ended(task, 0):
                self.remove(pid)
        return tuple(Registration(pid, signal) for pid, (signal, _) in self._registered.items())

    def close(self) -> None:
        for pid in list(self._registered):
            self.remove(pid)


def find(live: Live, pid: int) -> int:
    """A pidfd of a process of a live tree. ProcessLookupError when there is none."""
    host = live.hosts().get(pid)
    if host is not None:
        try:
            task = os.pidfd_open(host)
        except ProcessLookupError:
            pass
        else:
            if live.hosts().get(pid) == host and not pidfd.ended(task, 0):
                return task
            os.close(task)
    raise ProcessLookupError(errno.ESRCH, f"there is no process {pid} in the sandbox")
