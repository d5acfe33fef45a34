"""What the engine may use of the host: an error for one caller instead of trouble for all.

Checkpoints hold memory (their templates) and disk (their images). Without a limit a search that
never deletes a checkpoint ends in the host's OOM killer, or in a full disk, which a loop image does
not survive. So there are two budgets for all sandboxes of a keeper, `max_memory` and `max_disk`,
checked before and after a checkpoint is taken, and a floor of available host memory below which no
new copy of anything is started. The sandboxes' own memory is limited by their cgroups, not here.

The trees report what changes, so a check adds nothing up, however many checkpoints there are. Where
one fails, room is made first: what has been deleted and waits for a quiet moment is freed now, then
the oldest checkpoints go of those trees whose policy offers them (`KeepFitting`), the caller's own
tree first.

Defaults: half of the host's memory; the disk's free space when the keeper starts, less a reserve.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any, Protocol

from ..errors import NoSpace


class Backlog(Protocol):
    """Deleted things that wait for a quiet moment."""

    def hurry(self) -> bool:
        """Free one of them now; False when there is none."""


class Holder(Protocol):
    """What is counted, and can make room: a tree of sandboxes."""

    @property
    def background(self) -> Backlog: ...

    def account(self) -> None:
        """Report what its image takes now."""

    def reclaim(self) -> None:
        """Have the host get back now what deleted files took."""

    def drop_foreseen(self) -> bool:
        """Free what was captured before anybody has asked for it; whether there was anything."""

    def oldest_to_spare(self) -> Any:
        """The checkpoint that it would give up first, if any."""

    def give_up(self, node: Any) -> bool:
        """Free that checkpoint, unless somebody has come to want it."""


class Meminfo:
    """/proc/meminfo, kept open: 6 us a look instead of 15."""

    def __init__(self) -> None:
        self._fd = os.open("/proc/meminfo", os.O_RDONLY | os.O_CLOEXEC)

    def bytes(self, key: bytes) -> int:
        """The value of one of its first lines, as b"MemAvailable"."""
        text = os.pread(self._fd, 256, 0)
        at = text.index(key + b":") + len(key) + 1
        return int(text[at : text.index(b"kB", at)]) << 10


def readable(size: int) -> str:
    """A size in words: `1.5 GiB`."""
    value = float(size)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "bytes" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


class Budget:
    """The limits of one keeper, what is used of them, and the check of one against the other."""

    def __init__(self, directory: Path, *, max_memory: int | None, max_disk: int | None) -> None:
        self._meminfo = Meminfo()
        total = self._meminfo.bytes(b"MemTotal")
        free = os.statvfs(directory)
        available = free.f_bavail * free.f_frsize
        self.max_memory = max_memory if max_memory is not None else total // 2
        self.max_disk = (
            max_disk if max_disk is not None else max(available - (1 << 30), available // 2)
        )
        self.floor = min(256 << 20, total // 16)
        self.memory = 0
        """Bytes that the checkpoints of all trees hold."""
        self.disk = 0
        """Bytes that their images take, as last reported."""
        self._holders: list[Holder] = []
        self._lock = threading.Lock()

    def change(self, *, max_memory: int | None, max_disk: int | None) -> None:
        """Set the limits that are given."""
        with self._lock:
            if max_memory is not None:
                self.max_memory = max_memory
            if max_disk is not None:
                self.max_disk = max_disk

    def enter(self, holder: Holder) -> None:
        """A tree was made."""
        with self._lock:
            self._holders.append(holder)

    def leave(self, holder: Holder) -> None:
        """A tree has gone."""
        with self._lock:
            self._holders.remove(holder)

    def took(self, *, memory: int = 0, disk: int = 0) -> None:
        """So many bytes more are used, or fewer."""
        with self._lock:
            self.memory += memory
            self.disk += disk

    def check(self, holder: Holder | None = None) -> None:
        """Make room if a limit is passed; raise `NoSpace` when there is none to be made.

        `holder` is the tree that is about to use more, or has just done so.
        """
        if holder is not None:
            holder.account()
        drop = 1
        while (passed := self._passed()) is not None:
            disk = self.disk > self.max_disk
            if not self._make_room(holder, drop, disk=disk):
                raise NoSpace(passed)
            if disk:
                drop *= 2  # because each time is a commit and a trim

    def check_host(self) -> None:
        """Raise `NoSpace` when the host has hardly any memory left."""
        passed = self._host_passed()
        if passed is not None:
            raise NoSpace(passed)

    def has_room(self, size: int) -> bool:
        """Whether checkpoints may hold so many bytes more, and the host has them to give."""
        left = self._meminfo.bytes(b"MemAvailable") - self.floor
        return size <= min(left, self.max_memory - self.memory)

    def _passed(self) -> str | None:
        """What is to be said of the limit that is passed."""
        if self.memory > self.max_memory:
            return (
                f"checkpoints would hold {readable(self.memory)} of memory, more than the engine's "
                f"max_memory of {readable(self.max_memory)}; delete some, or raise the limit"
            )
        if self.disk > self.max_disk:
            return (
                f"the sandboxes' images use {readable(self.disk)} of disk, more than the engine's "
                f"max_disk of {readable(self.max_disk)}; delete checkpoints, or raise the limit"
            )
        return self._host_passed()

    def _host_passed(self) -> str | None:
        available = self._meminfo.bytes(b"MemAvailable")
        if available >= self.floor:
            return None
        return (
            f"the host has only {readable(available)} of memory left "
            f"(the engine leaves {readable(self.floor)} alone)"
        )

    def _make_room(self, first: Holder | None, drop: int, *, disk: bool) -> bool:
        """Free what is deleted already, or else up to `drop` checkpoints; whether anything was."""
        with self._lock:
            holders = sorted(self._holders, key=lambda holder: holder is not first)
        hurried = [h for h in holders if sum(h.background.hurry() for _ in range(drop))]
        touched = hurried or [h for h in holders if h.drop_foreseen()] or self._drop(holders, drop)
        for holder in set(touched) if disk else ():
            holder.reclaim()
            holder.account()
        return bool(touched)

    def _drop(self, holders: list[Holder], count: int) -> list[Holder]:
        """Give up the oldest checkpoints: of the first tree that has some to spare."""
        for holder in holders:
            done = 0
            while done < count and (node := holder.oldest_to_spare()) is not None:
                done += holder.give_up(node)
            if done:
                return [holder]
        return []
