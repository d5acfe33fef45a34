"""Many copies at once: all of them answer from inside, and nothing of them stays."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from deltabox import Process, Sandbox, Shell

pytestmark = pytest.mark.timeout(180)


def _asleep(seconds: str) -> int:
    """How many processes on this host sleep for so long."""
    found = 0
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found += path.read_bytes() == b"sleep\0" + seconds.encode() + b"\0"
        except OSError:
            continue
    return found


def test_sixty_four() -> None:
    seconds = f"9{os.getpid()}"
    with Sandbox.create() as sandbox:
        shell: Shell = sandbox.shell()
        shell.run(f"sleep {seconds} & x=1; echo one > /root/file")
        program = "import sys\nn = 41\nfor line in sys.stdin:\n n += 1\n print(n, flush=True)\n"
        python: Process = sandbox.spawn(["python3", "-c", program])
        python.stdin.write("\n")
        assert python.stdout.readline(timeout=10) == "42\n"
        checkpoint = sandbox.checkpoint()
        for _ in range(2):
            children = sandbox.fork_many(64, at=checkpoint)

            def answer(child: Sandbox) -> str:
                own = child.counterpart(python)
                own.stdin.write("\n")
                said = child.counterpart(shell).run(
                    "echo $x $(cat /root/file); echo 2 > /root/file"
                )
                return own.stdout.readline(timeout=30) + said.stdout

            with ThreadPoolExecutor(8) as pool:
                assert set(pool.map(answer, children)) == {"43\n1 one\n"}
            assert (
                len({child.files.read_text("/run/deltabox/fork.json") for child in children}) == 64
            )
            assert _asleep(seconds) >= 65
            with ThreadPoolExecutor(8) as pool:
                list(pool.map(Sandbox.close, children))
            assert shell.run("echo $x $(cat /root/file)").stdout == "1 one\n"
    assert _asleep(seconds) == 0
