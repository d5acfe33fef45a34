"""Control groups: one v2 group for each sandbox, and limits wherever the host has the controllers.

Version 2 (Documentation/admin-guide/cgroup-v2.rst) carries the process list, the freezer and
CLONE_INTO_CGROUP.  Memory and pids limits are set in the same group when those controllers belong
to version 2.  On hosts where version 1 owns them there is a group per *tree* in those hierarchies:
joining a v1 group costs 5-11 ms (it waits for an RCU grace period, and no task of the host can be
forked meanwhile), so it is done once for each tree and everything else is forked into it.
"""

from __future__ import annotations

import os
import select
import time
from functools import lru_cache
from pathlib import Path


@lru_cache(maxsize=1)
def hierarchies() -> dict[str, Path]:
    """Mount points: key "2" for version 2, controller names for version 1."""
    found: dict[str, Path] = {}
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, target, kind, options, *_ = line.split()
        if kind == "cgroup2":
            found.setdefault("2", Path(target))
        elif kind == "cgroup":
            for name in options.split(","):
                if name in ("memory", "pids"):
                    found.setdefault(name, Path(target))
    return found


def in_version_2(controller: str) -> bool:
    root = hierarchies().get("2")
    if root is None:
        return False
    return controller in (root / "cgroup.controllers").read_text().split()


def make(path: Path, controllers: bool) -> None:
    """Create a v2 group and, for inner groups, hand its controllers down."""
    path.mkdir(exist_ok=True)
    if controllers:
        for name in ("memory", "pids"):
            if in_version_2(name):
                (path / "cgroup.subtree_control").write_text(f"+{name}")


def set_limits(path: Path, *, memory: int | None, pids: int | None, version: int) -> None:
    if memory is not None and (path / _MEMORY[version]).exists():
        (path / _MEMORY[version]).write_text(str(memory))
    if pids is not None and (path / "pids.max").exists():
        (path / "pids.max").write_text(str(pids))


_MEMORY = {1: "memory.limit_in_bytes", 2: "memory.max"}


def processes(path: Path) -> list[int]:
    """Process ids in the group (not in its children), as this process sees them."""
    fd = os.open(path / "cgroup.procs", os.O_RDONLY | os.O_CLOEXEC)
    try:
        parts = []
        while part := os.read(fd, 65536):
            parts.append(part)
    finally:
        os.close(fd)
    return [int(pid) for pid in b"".join(parts).split()]


def remove(path: Path, timeout: float = 5.0) -> None:
    """Remove a group and those below it; members that are still exiting are waited for."""
    deadline = time.monotonic() + timeout
    for directory, _, _ in os.walk(path, topdown=False):
        while True:
            try:
                os.rmdir(directory)
                break
            except FileNotFoundError:
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.002)  # exiting tasks leave the group a moment after they are reaped


def kill(path: Path) -> None:
    """Kill everybody in a v2 group and below it. It can only be removed then (see live.py)."""
    fd = os.open(path / "cgroup.kill", os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, b"1")
    finally:
        os.close(fd)


def freeze(path: Path, frozen: bool) -> None:
    """Freeze a v2 group, or thaw it; `wait_event` tells when everybody in it has stopped."""
    fd = os.open(path / "cgroup.freeze", os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, b"1" if frozen else b"0")
    finally:
        os.close(fd)


def wait_event(path: Path, wanted: bytes, timeout: float) -> bool:
    """Wait until cgroup.events of a v2 group has the line `wanted`; False after `timeout` s."""
    events = os.open(path / "cgroup.events", os.O_RDONLY | os.O_CLOEXEC)
    try:
        poller = select.poll()
        poller.register(events, select.POLLPRI)
        deadline = time.monotonic() + timeout
        while wanted not in os.pread(events, 256, 0):
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            poller.poll(min(left, 0.1) * 1000)
        return True
    finally:
        os.close(events)
