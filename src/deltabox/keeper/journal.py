"""What the keeper has made outside of itself, so that the next one can remove it.

Mounts, loop devices and processes end with the keeper (its mount namespace, `autoclear`, death
signals). Two kinds of things outlive a killed one: directories with image files, and control
groups. Each is written here, one JSON line, *before* it is made, and again when it is gone. The
file is a few hundred bytes for a sandbox and starts anew with every keeper.

A line carries who wrote it: pid, the process's start time and the boot's id. A pid that is in use
again is not mistaken for a keeper that still lives, and nothing is removed that a living one holds.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any, Final

log = logging.getLogger(__name__)

NAME: Final = "journal"
_PF_EXITING: Final = 4  # of the flags in /proc/PID/stat: killed, and on the way to being a zombie


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def start_time(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None: there is none, or it is ending."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    ends = fields[0] in "ZX" or int(fields[6]) & _PF_EXITING
    return None if ends else int(fields[19])


class Journal:
    """The journal of the running keeper."""

    def __init__(self, state: Path) -> None:
        self._lock = threading.Lock()
        self._writer = {"pid": os.getpid(), "start": start_time(os.getpid()), "boot": boot_id()}
        self._fd = os.open(
            state / NAME, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600
        )

    def made(self, kind: str, value: str) -> None:
        """Something is about to be made: kind "tree" (a directory) or "cgroup"."""
        self._write({"op": "made", "kind": kind, "value": value})

    def gone(self, kind: str, value: str) -> None:
        """It has been removed. On a full disk that goes unsaid: what is not there is not missed."""
        try:
            self._write({"op": "gone", "kind": kind, "value": value})
        except OSError as error:
            log.warning("the journal does not know that %s has gone: %s", value, error)

    def _write(self, entry: dict[str, Any]) -> None:
        line = json.dumps(entry | self._writer) + "\n"
        with self._lock:
            os.write(self._fd, line.encode())

    def close(self) -> None:
        os.close(self._fd)


def outstanding(state: Path) -> list[tuple[str, str]]:
    """What is left of what no living keeper has made: (kind, value), oldest first."""
    try:
        lines = (state / NAME).read_text().splitlines()
    except FileNotFoundError:
        return []
    this_boot = boot_id()
    alive: dict[tuple[int, int], bool] = {}
    found: dict[tuple[str, str], bool] = {}
    for line in lines:
        try:
            entry = json.loads(line)
            key = (str(entry["kind"]), str(entry["value"]))
            if entry["op"] == "gone":
                found.pop(key, None)
                continue
            writer = (int(entry["pid"]), int(entry["start"]))
            if writer not in alive:
                alive[writer] = entry["boot"] == this_boot and start_time(writer[0]) == writer[1]
            found[key] = alive[writer]
        except (ValueError, KeyError, TypeError):
            log.warning("%s: a line that makes no sense: %.80r", state / NAME, line)
    return [key for key, held in found.items() if not held and os.path.exists(key[1])]


def clean(state: Path) -> list[str]:
    """Remove what a killed keeper has left; what was removed, in words.

    Does nothing while a keeper runs on this state directory: it has cleaned up when it started.
    """
    removed = []
    groups = []
    for kind, value in outstanding(state):
        if kind == "cgroup":
            groups.append(value)
        elif kind == "tree" and _remove_tree(state, Path(value)):
            removed.append(f"files of a sandbox: {value}")
    # children after their parents in the journal, before them here
    groups.sort(key=len, reverse=True)
    return removed + [f"control group {g}" for g in groups if _remove_group(Path(g))]


def _remove_tree(state: Path, directory: Path) -> bool:
    if directory.parent != state / "trees" or not directory.is_dir():
        return False
    shutil.rmtree(directory, ignore_errors=True)
    return not directory.exists()


def _remove_group(group: Path) -> bool:
    if not group.is_relative_to("/sys/fs/cgroup") or not group.is_dir():
        return False
    if "deltabox" not in str(group):
        return False
    from ..deltacr.engine import remove_cgroup

    try:
        (group / "cgroup.kill").write_text("1")
    except OSError:
        pass  # version 1; its members died with the keeper
    deadline = time.monotonic() + 5.0
    while True:
        try:
            remove_cgroup(group)
            return True
        except FileNotFoundError:
            return False
        except OSError as error:
            if time.monotonic() > deadline:
                log.warning("control group %s: %s", group, error)
                return False
            time.sleep(0.02)
