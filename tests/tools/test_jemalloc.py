"""A C++ program under jemalloc, whose arenas go back to the kernel and come again all the time.

jemalloc gives pages back by MADV_FREE and MADV_DONTNEED, from threads of its own, and takes it for
granted that the latter read as zeros.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from deltabox import Sandbox

from . import midway

_SOURCE = Path(__file__).with_name("churn.cpp")
_LIBRARIES = ("/usr/lib/x86_64-linux-gnu/libjemalloc.so.2", "/usr/lib64/libjemalloc.so.2")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("churn") / "churn"
    build = ["g++", "-std=c++17", "-O2", "-pthread", "-o", str(made), str(_SOURCE), "-ldl"]
    subprocess.run(build, check=True)
    return made


@pytest.mark.parametrize("purging", ["dirty_decay_ms:0,muzzy_decay_ms:0", "dirty_decay_ms:5"])
def test_arenas(sandbox: Sandbox, program: Path, purging: str) -> None:
    library = next(path for path in _LIBRARIES if Path(path).exists())
    sandbox.files.upload(program, "/root/churn")
    settings = f"narenas:6,background_thread:true,junk:true,{purging}"
    command = f"MALLOC_CONF={settings} LD_PRELOAD={library} exec /root/churn 6 20000"
    plain = sandbox.run(["/root/churn", "6", "20000"], check=True).stdout.splitlines()
    assert plain[0] == "0 arenas"
    midway.check(
        sandbox,
        ["sh", "-c", command],
        "true",
        cwd="/root",
        read=lambda box, process: _sum(midway.ended(box, process), plain[1]),
    )


def _sum(outcome: midway.Outcome, right: str) -> midway.Outcome:
    assert outcome == (0, f"6 arenas\n{right}\n", "")
    return outcome
