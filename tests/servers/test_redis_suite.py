"""Redis' own tests, by its own runner, which starts hundreds of servers, kills and restarts them.

Debian's package has the programs only; the tests are in its source. Runner, servers and clients are
all in the sandbox. It is checkpointed every other second and goes back now and then, and what comes
of each test must be what came of it in a fork that was left alone.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections import Counter
from pathlib import Path
from typing import Final

import pytest

from deltabox import Process, Sandbox

from . import debian
from .disturbance import disturb

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]

WITHIN: Final = 900.0  # seconds, for a run that takes three minutes on a machine that is idle
REFUSALS: Final = 10  # at least so many checkpoints for each that was refused
HOME: Final = "/srv/redis"
PROGRAMS: Final = {
    "redis-server": "redis-check-rdb",  # one program, that looks at the name it is called by
    "redis-sentinel": "redis-check-rdb",
    "redis-check-rdb": "redis-check-rdb",
    "redis-check-aof": "redis-check-aof",
    "redis-cli": "redis-cli",
    "redis-benchmark": "redis-benchmark",
}
SKIPPED: Final = (
    # many minutes
    "integration/replication",
    "integration/replication-4",
    "integration/replication-psync",
    "integration/psync2",
    "integration/psync2-pingoff",
    "integration/corrupt-dump-fuzzer",
    # expects times within a tenth of a second; the clock goes on while a checkpoint is taken
    "unit/latency-monitor",
    # asks whether a client is gone before the server may have come to it; fails alone, too
    "unit/client-eviction",
)
TIMED: Final = "PSYNC2 #3899 regression"  # as often as ten seconds allow
_OUTCOME = re.compile(r"^\[(ok|err|exception|ignore|skip)\]: (.*?)(?: \(\d+ ms\))?$", re.MULTILINE)
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def fetch() -> Path:
    """The directory with the tests of the version that is installed."""
    version = debian.version("redis-tools")
    with debian.made_once(f"redis/{version.replace(':', '_')}") as (place, scratch):
        if scratch is not None:
            archive = debian.Apt(scratch).source("redis", version)
            (scratch / "ready").mkdir()
            unpack: list[str | Path] = [
                "tar",
                "-xf",
                archive,
                "-C",
                "ready",
                "--strip-components=1",
            ]
            debian.run(*unpack, "--wildcards", "*/tests", "*/redis.conf", cwd=scratch)
    return place


def prepare(sandbox: Sandbox) -> None:
    packed = subprocess.run(
        ["tar", "-cf", "-", "-C", fetch(), "."], capture_output=True, check=True
    ).stdout
    sandbox.run(["mkdir", "-p", f"{HOME}/src"], check=True)
    sandbox.run(["tar", "-xf", "-", "-C", HOME], input=packed, check=True)
    for name, program in PROGRAMS.items():
        sandbox.run(["ln", "-s", f"/usr/bin/{program}", f"{HOME}/src/{name}"], check=True)


def start(sandbox: Sandbox) -> Process:
    skipped = [word for unit in SKIPPED for word in ("--skipunit", unit)]
    options = ["--clients", "6", "--tags", "-slow -defrag", *skipped]
    command = ["tclsh", "tests/test_helper.tcl", *options]
    return sandbox.spawn(["sh", "-c", f"exec {shlex.join(command)} >out 2>&1"], cwd=HOME)


def outcomes(sandbox: Sandbox, work: Process) -> dict[str, list[str]]:
    """What came of the tests of each name."""
    work.wait(timeout=WITHIN)
    said = _COLOUR.sub("", sandbox.files.read_text(f"{HOME}/out"))
    found: dict[str, list[str]] = {}
    for outcome, name in _OUTCOME.findall(said):
        found.setdefault(name, []).append(outcome)
    assert "The End" in said, said[-5000:]
    return {
        name: sorted(set(each) if name.startswith(TIMED) else each) for name, each in found.items()
    }


def test_its_own_tests_do_not_notice_us(sandbox: Sandbox) -> None:
    prepare(sandbox)
    with sandbox.fork() as undisturbed:
        expected = outcomes(undisturbed, start(undisturbed))
    results = Counter(result for each in expected.values() for result in each)
    print(results)
    assert set(results) <= {"ok", "ignore"} and results["ok"] > 1000, expected
    work = start(sandbox)
    done = disturb(sandbox, work)
    print(done)
    found = outcomes(sandbox, work)
    differ = {
        name: (expected.get(name), found.get(name))
        for name in expected.keys() | found.keys()
        if expected.get(name) != found.get(name)
    }
    assert not differ, differ
    assert work.exit_code == 0
    assert done.checkpoints >= 10 and done.rollbacks >= 2, "they were too fast to say something"
    assert done.refused.total() * REFUSALS <= done.checkpoints, done
