"""What all tests share: a state directory of their own, a sandbox, and the check for leaks.

The check runs once, after the last test: all sandboxes are closed then, so their files, loop
devices and cgroups must be gone while the keeper still runs. Then the keeper is told to end, and
must leave no process, mount or cgroup either.
"""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from deltabox import Sandbox

pytest.register_assert_rewrite("tests.probe", "tests.servers.lives")  # to see what differs

GONE_WITHIN = 15.0  # seconds; much is freed in the background

# Set at import, before any test module can start a keeper.
_STATE = Path(tempfile.mkdtemp(prefix="deltabox-tests-"))
# a process that only hands tests to others imports this as well, and runs no fixture
atexit.register(shutil.rmtree, _STATE, ignore_errors=True)
os.environ["DELTABOX_STATE"] = str(_STATE)
os.environ["DELTABOX_VERIFY"] = "1"  # every checkpoint is compared with the memory it is of


def keepers() -> list[int]:
    """The keepers of our state directory."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"deltabox.keeper" in command and str(_STATE).encode() in command:
                found.append(int(entry.name))
    return found


@contextmanager
def keeper_of_its_own(state: Path, **environment: str) -> Iterator[None]:
    """What is created within the block has another keeper, started in this environment."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        patch.setenv("DELTABOX_STATE", str(state))
        yield


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
    ours = {str(pid) for pid in keepers()}
    for directory, below, _ in os.walk("/sys/fs/cgroup"):
        for name in below:
            pid = name.removeprefix("deltabox-")
            if name != pid and (pid in ours or not Path(f"/proc/{pid}").exists()):
                found.add(f"{directory}/{name}")
    return found


def sandboxes() -> set[str]:
    """What exists only while a sandbox does."""
    found = {f"files {path}" for path in (_STATE / "trees").glob("*")}
    for group in cgroups():
        found |= {f"cgroup {path.parent}" for path in Path(group).glob("*/cgroup.procs")}
    return found | loop_devices()


def orphans() -> set[str]:
    """Processes of the engine's interpreter whose keeper has ended."""
    found = set()
    for entry in Path("/proc").iterdir():
        try:
            _, name, rest = (entry / "stat").read_text().replace(")", "(").split("(")
        except (OSError, ValueError):
            continue
        state, parent = rest.split()[:2]
        if name == "deltabox" and state != "Z" and parent == "1":
            found.add(f"process {entry.name}: left by a keeper that has gone")
    return found


def everything() -> set[str]:
    """Everything on this host that looks like ours."""
    running = {f"keeper {pid}" for pid in keepers()}
    groups = {f"cgroup {path}" for path in cgroups()}
    return running | orphans() | mounts() | loop_devices() | groups


def _left(look: Callable[[], set[str]], before: set[str]) -> str:
    """What is still there when it has had its time to go, one a line."""
    deadline = time.monotonic() + GONE_WITHIN
    while (left := look() - before) and time.monotonic() < deadline:
        time.sleep(0.1)
    return "\n".join(sorted(left))


@pytest.fixture(scope="session", autouse=True)
def nothing_leaks() -> Iterator[None]:
    before = everything()
    before_sandboxes = sandboxes()
    yield
    gc.collect()
    open_still = _left(sandboxes, before_sandboxes)
    for keeper in keepers():  # it would stay as long as its client, which is this process
        os.kill(keeper, signal.SIGTERM)
    left = _left(everything, before)
    log = _STATE / "keeper.log"
    tail = log.read_text(errors="replace")[-2000:] if log.exists() else ""
    shutil.rmtree(_STATE, ignore_errors=True)
    assert not open_still, f"sandboxes left something behind:\n{open_still}\n{tail}"
    assert not left, f"the keeper left something behind:\n{left}\n{tail}"


@pytest.fixture(scope="session")
def state_directory() -> Path:
    return _STATE


@pytest.fixture
def sandbox() -> Iterator[Sandbox]:
    """A fresh sandbox over the host's own root."""
    from deltabox import Sandbox

    with Sandbox.create() as made:
        yield made
