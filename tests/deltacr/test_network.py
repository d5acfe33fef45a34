"""The two networks of this slice: none but loopback, and the host's own."""

from __future__ import annotations

from pathlib import Path

from deltabox import Sandbox


def _interfaces(text: str) -> list[str]:
    return sorted(line.split(":")[0].strip() for line in text.splitlines() if ":" in line)


def test_none_has_only_loopback(sandbox: Sandbox) -> None:
    checkpoint = sandbox.checkpoint()
    for _ in range(2):
        assert _interfaces(sandbox.run("cat /proc/net/dev").stdout) == ["lo"]
        assert sandbox.run("cat /sys/class/net/lo/operstate").exit_code == 0
        sandbox.rollback(checkpoint)


def test_host() -> None:
    host = _interfaces(Path("/proc/net/dev").read_text())
    with Sandbox.create(network="host") as sandbox:
        checkpoint = sandbox.checkpoint()
        for _ in range(2):
            assert _interfaces(sandbox.run("cat /proc/net/dev").stdout) == host
            sandbox.rollback(checkpoint)
        with sandbox.fork() as fork:
            assert _interfaces(fork.run("cat /proc/net/dev").stdout) == host
