"""A program in Go: its threads and goroutines, timers, network poller and child go on."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from deltabox import Process, Sandbox

_SOURCE = Path(__file__).with_name("server.go")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("go")
    settings = {
        "CGO_ENABLED": "0",  # the runtime alone, with neither libc nor its threads
        "GO111MODULE": "off",
        "GOCACHE": str(made / "cache"),
        "GOFLAGS": "",
    }
    subprocess.run(
        ["go", "build", "-o", made / "server", _SOURCE], check=True, env=os.environ | settings
    )
    return made / "server"


def ask(process: Process, word: str) -> str:
    process.stdin.write(word + "\n")
    answer = process.stdout.readline(timeout=20)
    assert answer, process.stderr.read_available()
    return answer.rstrip("\n")


def test_server(sandbox: Sandbox, program: Path) -> None:
    sandbox.files.upload(program, "/root/server")
    go = sandbox.spawn(["/root/server"])
    for n in range(1, 6):
        said = ask(go, "get")
        assert said.startswith(f"served {n} reused={str(n > 1).lower()} from 127.0.0.1:"), said
    port = said.split(":")[1].split()[0]
    child = ask(go, "child").split()[0]
    ask(go, "one")
    ask(go, "two")
    checkpoint = sandbox.checkpoint()

    def check(process: Process) -> None:
        assert ask(process, "get") == f"served 6 reused=true from 127.0.0.1:{port} connections 1"
        assert ask(process, "ring") == "1002"
        assert ask(process, "child") == f"{child} 2 <nil>"
        assert ask(process, "tick") == "ticked"
        assert ask(process, "spin") == "true"
        assert ask(process, "collect") == "collected"
        assert ask(process, "exec") == "42 <nil>"
        assert ask(process, "three") == "one two three"
        assert ask(process, "get") == f"served 7 reused=true from 127.0.0.1:{port} connections 1"

    check(go)
    for turn in range(10):
        sandbox.rollback(checkpoint)
        check(go)
        if turn % 3 == 0:
            assert ask(go, "end") == "<nil>"
            assert go.wait(timeout=20) == 0
    sandbox.rollback(checkpoint)
    for fork in sandbox.fork_many(4, at=checkpoint):
        with fork:
            check(fork.counterpart(go))
            with fork.fork() as again:
                assert ask(again.counterpart(go), "four") == "one two three four"
    check(go)
    assert ask(go, "end") == "<nil>"
    assert go.wait(timeout=20) == 0
