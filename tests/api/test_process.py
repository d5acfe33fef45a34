"""`Sandbox.spawn`: a program to talk to."""

from __future__ import annotations

import re
import signal
import threading
import time

import pytest

from deltabox import CommandTimeout, Sandbox


def test_conversation(sandbox: Sandbox) -> None:
    p = sandbox.spawn(["python3", "-i", "-q"])
    p.stdin.write("print(6 * 7)\n")
    assert p.stdout.readline(timeout=10) == "42\n"
    p.stderr.read_until(">>> ", timeout=10)
    p.stdin.close()
    assert p.wait(timeout=10) == 0
    assert p.exit_code == 0
    assert p.stdout.read() == ""


def test_pid_is_the_one_inside(sandbox: Sandbox) -> None:
    p = sandbox.spawn("echo $$; sleep 1000")
    assert int(p.stdout.readline(timeout=10)) == p.pid
    assert p.exit_code is None
    p.kill(signal.SIGTERM)
    assert p.wait(timeout=10) == -signal.SIGTERM
    p.kill()  # no error


def test_reading_in_all_ways(sandbox: Sandbox) -> None:
    p = sandbox.spawn("cat", text=False)
    p.stdin.write(b"one\ntwo three four\nlast")
    assert p.stdout.readline() == b"one\n"
    assert p.stdout.read_until(b"three") == b"two three"
    assert p.stdout.read_until(re.compile(rb"f\w+\n")) == b" four\n"
    with pytest.raises(CommandTimeout, match="'last'"):
        p.stdout.readline(timeout=0.1)
    assert p.stdout.read_available() == b"last"
    assert p.stdout.read_available() == b""
    p.stdin.write(b"a\nb\nc")
    p.stdin.close()
    assert list(p.stdout) == [b"a\n", b"b\n", b"c"]
    with pytest.raises(EOFError, match="ended before 'x'"):
        p.stdout.read_until("x")


def test_characters_are_never_split(sandbox: Sandbox) -> None:
    p = sandbox.spawn("printf 'a\\303'; sleep 0.3; printf '\\266b'")
    seen = ""
    while p.exit_code is None:
        seen += p.stdout.read_available()
        time.sleep(0.01)
    assert seen + p.stdout.read() == "aöb"


def test_back_pressure_both_ways(sandbox: Sandbox) -> None:
    p = sandbox.spawn("cat", text=False)
    total = 6 << 20

    def write() -> None:
        for _ in range(total // 65536):
            p.stdin.write(b"x" * 65536)

    writer = threading.Thread(target=write)
    writer.start()
    writer.join(0.5)
    assert writer.is_alive()  # nobody reads: what has been sent is bounded
    received = 0
    while received < total:
        received += len(p.stdout.read_available())
        time.sleep(0.001)
    writer.join(10)
    p.stdin.close()
    assert p.stdout.read() == b""


def test_one_long_line(sandbox: Sandbox) -> None:
    p = sandbox.spawn("head -c 3000000 /dev/zero; echo", text=False)
    assert len(p.stdout.readline(timeout=20)) == 3000001


def test_broken_pipe(sandbox: Sandbox) -> None:
    p = sandbox.spawn("true")
    p.wait(timeout=10)
    with pytest.raises(BrokenPipeError):
        p.stdin.write("x")
    with pytest.raises(BrokenPipeError):
        p.stdin.write("x")


def test_wait_times_out_without_killing(sandbox: Sandbox) -> None:
    p = sandbox.spawn("sleep 1000")
    with pytest.raises(CommandTimeout, match="runs on"):
        p.wait(timeout=0.1)
    assert p.exit_code is None


def test_short_lived_processes_are_not_missed(sandbox: Sandbox) -> None:
    for number in range(30):
        assert sandbox.spawn(f"exit {number}").wait(timeout=10) == number
