"""What the engine may use of the host: an error for one caller instead of trouble for all.

Checkpoints hold memory (their templates) and disk (their images). Without a limit a search that
never deletes a checkpoint ends in the host's OOM killer, or in a full disk, which a loop image does
not survive. So there are two budgets for all sandboxes of a keeper, `max_memory` and `max_disk`,
checked before and after a checkpoint is taken, and a floor of available host memory below which no
new copy of anything is started. The sandboxes' own memory is limited by their cgroups, not here.

Defaults: half of the host's memory; the disk's free space when the keeper starts, less a reserve.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from ..errors import NoSpace


class Holder(Protocol):
    """What is counted: a tree of sandboxes."""

    def memory_bytes(self) -> int: ...

    def disk_bytes(self) -> int: ...


def _meminfo(key: str) -> int:
    with open("/proc/meminfo", "rb") as file:
        for line in file:
            if line.startswith(key.encode()):
                return int(line.split()[1]) << 10
    return 0


def readable(size: int) -> str:
    """A size in words: `1.5 GiB`."""
    value = float(size)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "bytes" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


class Budget:
    """The limits of one keeper, and the check against them."""

    def __init__(self, directory: Path, *, max_memory: int | None, max_disk: int | None) -> None:
        total = _meminfo("MemTotal:")
        free = os.statvfs(directory)
        available = free.f_bavail * free.f_frsize
        self.max_memory = max_memory if max_memory is not None else total // 2
        self.max_disk = (
            max_disk if max_disk is not None else max(available - (1 << 30), available // 2)
        )
        self.floor = min(256 << 20, total // 16)
        self._lock = threading.Lock()

    def change(self, *, max_memory: int | None, max_disk: int | None) -> None:
        """Set the limits that are given."""
        with self._lock:
            if max_memory is not None:
                self.max_memory = max_memory
            if max_disk is not None:
                self.max_disk = max_disk

    def check(self, holders: Iterable[Holder], *, extra: int = 0) -> None:
        """Raise `NoSpace` when a limit is passed. `extra`: memory about to be held as well."""
        holders = list(holders)
        memory = extra + sum(holder.memory_bytes() for holder in holders)
        if memory > self.max_memory:
            raise NoSpace(
                f"checkpoints would hold {readable(memory)} of memory, more than the engine's "
                f"max_memory of {readable(self.max_memory)}; delete some, or raise the limit"
            )
        self.check_host()
        used = sum(holder.disk_bytes() for holder in holders)
        if used > self.max_disk:
            raise NoSpace(
                f"the sandboxes' images use {readable(used)} of disk, more than the engine's "
                f"max_disk of {readable(self.max_disk)}; delete checkpoints, or raise the limit"
            )

    def check_host(self) -> None:
        """Raise `NoSpace` when the host has hardly any memory left."""
        available = _meminfo("MemAvailable:")
        if available < self.floor:
            raise NoSpace(
                f"the host has only {readable(available)} of memory left "
                f"(the engine leaves {readable(self.floor)} alone)"
            )
