"""A sandbox's limits hold, also after a rollback and in forks, and never harm the engine."""

from __future__ import annotations

import time

from deltabox import Process, Sandbox

_HOG = "python3 -c 'b = bytearray(600 << 20); print(len(b))'"
_GREEDY = """
import os, time
while True:
    try:
        if os.fork() == 0:
            print("one", flush=True)
            time.sleep(60)
            os._exit(0)
    except OSError:
        time.sleep(0.0005)
"""
_BOMB = "for i in $(seq 60); do sleep 30 & done; wait -n; jobs | wc -l"


def test_memory() -> None:
    with Sandbox.create(memory_limit="300M") as sandbox:
        shell = sandbox.shell()
        shell.run("x=1")
        checkpoint = sandbox.checkpoint()
        for _ in range(2):
            assert sandbox.run(_HOG).exit_code == 137
            assert sandbox.run("python3 -c 'print(len(bytearray(50 << 20)))'").exit_code == 0
            sandbox.rollback(checkpoint)
            assert shell.run("echo $x").stdout == "1\n"
        assert sandbox.run(_HOG).exit_code == 137


def test_checkpoints_are_not_charged_to_the_programs() -> None:
    with Sandbox.create(memory_limit="200M") as sandbox:
        program = "x = b''.join(bytes([n % 251]) * 4096 for n in range({}));"
        program += "print(1, flush=True); input()"
        for _ in range(6):
            python = sandbox.spawn(["python3", "-c", program.format(10000)])
            assert python.stdout.readline(timeout=20) == "1\n"
            sandbox.checkpoint()
            python.kill()
            python.wait()
        assert sandbox.run("echo alive").stdout == "alive\n"
        assert len(sandbox.checkpoints) == 6


def test_processes() -> None:
    with Sandbox.create(pids_limit=20) as sandbox:
        for _ in range(3):
            sandbox.checkpoint()
        result = sandbox.run(_BOMB, timeout=20)
        assert "fork" in result.stderr or "Cannot" in result.stderr, result
        sandbox.rollback(sandbox.checkpoints[0])
        assert sandbox.run("echo alive").stdout == "alive\n"


def _greedy(sandbox: Sandbox) -> Process:
    """A program that takes every process it can get, and has most of them."""
    python = sandbox.spawn(["python3", "-c", _GREEDY])
    for _ in range(15):
        assert python.stdout.readline(timeout=20) == "one\n"
    return python


def test_who_takes_every_process_stops_nobody_else() -> None:
    with Sandbox.create(pids_limit=20, standby=0) as sandbox:
        clean = sandbox.checkpoint()
        for _ in range(5):
            _greedy(sandbox)
            sandbox.checkpoint().delete()
            with sandbox.fork() as fork:
                assert len(fork.processes()) >= 15
            sandbox.rollback(clean)
            assert sandbox.processes() == []
            assert sandbox.run("echo alive").stdout == "alive\n"


def test_what_is_made_ahead_widens_no_limit() -> None:
    """For each checkpoint something is, while a program takes every process it can get."""
    with Sandbox.create(pids_limit=20, standby=0) as sandbox:
        _greedy(sandbox)
        for _ in range(10):
            sandbox.checkpoint()
            time.sleep(0.05)  # for the background; it may not get a process, so nothing to wait for
        assert 15 <= len(sandbox.processes()) <= 30
