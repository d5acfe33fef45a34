"""What all tests share: a state directory of their own, a sandbox, and the check for leaks.

The check runs once, after the last test: by then the keeper must have gone by itself, and with
it every process, mount, loop device and cgroup that any test had it make.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from deltabox import Sandbox

GONE_WITHIN = 20.0  # seconds; the keeper stays a little after its last client

# Set at import, before any test module can start a keeper.
_STATE = Path(tempfile.mkdtemp(prefix="deltabox-tests-"))
os.environ["DELTABOX_STATE"] = str(_STATE)


def processes() -> set[str]:
    """Keepers of our state directory; what they made is found in their cgroups."""
    found = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(_STATE) in command and int(entry.name) != os.getpid():
            found.add(f"process {entry.name}: {command}")
    return found


def mounts() -> set[str]:
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return {f"mount {line}" for line in lines if "deltabox" in line}


def loop_devices() -> set[str]:
    found = set()
    for backing in Path("/sys/block").glob("loop*/loop/backing_file"):
        try:
            name = backing.read_text().strip()
        except OSError:
            continue
        if str(_STATE) in name:
            found.add(f"loop device {backing.parts[3]}: {name}")
    return found


def cgroups() -> set[str]:
    """The groups of our keeper and of dead ones; those of another live keeper are its own."""
    found = set()
    for directory, below, _ in os.walk("/sys/fs/cgroup"):
        for name in below:
            keeper = name.removeprefix("deltabox-")
            if name == keeper:
                continue
            try:
                command = Path(f"/proc/{keeper}/cmdline").read_bytes()
            except OSError:
                command = str(_STATE).encode()
            if str(_STATE).encode() in command:
                found.add(f"cgroup {directory}/{name}")
    return found


def resources() -> set[str]:
    """Everything on this host that looks like ours."""
    return processes() | mounts() | loop_devices() | cgroups()


@pytest.fixture(scope="session", autouse=True)
def nothing_leaks() -> Iterator[None]:
    before = resources()
    yield
    deadline = time.monotonic() + GONE_WITHIN
    while (left := resources() - before) and time.monotonic() < deadline:
        time.sleep(0.1)
    log = _STATE / "keeper.log"
    tail = log.read_text(errors="replace")[-2000:] if log.exists() else ""
    images = [
        str(path) for path in _STATE.rglob("*") if path.is_file() and path.stat().st_size > 1 << 20
    ]
    shutil.rmtree(_STATE, ignore_errors=True)
    assert not left, "the tests left behind:\n" + "\n".join(sorted(left)) + "\n" + tail
    assert not images, f"files left in the state directory: {images}"


@pytest.fixture(scope="session")
def state_directory() -> Path:
    return _STATE


@pytest.fixture
def sandbox() -> Iterator[Sandbox]:
    """A fresh sandbox over the host's own root."""
    from deltabox import Sandbox

    with Sandbox.create() as made:
        yield made
