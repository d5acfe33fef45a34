"""What cannot be given back is refused by name, and the tree runs on."""

from __future__ import annotations

import pytest

from deltabox import Sandbox, UnsupportedState
from tests.probe import Probe

_CASES = {
    "a userfaultfd": "fd = libc.syscall(323, 1)",
    "a perf event": (
        "a = struct.pack('IIQQQQQ', 1, 112, 0, 0, 0, 0, 1 << 5 | 1 << 6).ljust(112, b'\\0');"
        "fd = libc.syscall(298, a, 0, -1, -1, 0)"
    ),
    "a raw socket": "import socket; s = socket.socket(2, 3, 255); fd = s.fileno()",
}


def test_an_io_uring_is_refused_where_it_can_be_had() -> None:
    with Sandbox.create(io_uring=True) as sandbox:
        probe = Probe.start(sandbox)
        probe.do("p = ctypes.create_string_buffer(120); fd = libc.syscall(425, 4, p)")
        fd = probe.ask("fd")
        assert fd >= 0
        with pytest.raises(UnsupportedState, match=f"fd {fd} of pid .* is an io_uring instance"):
            sandbox.checkpoint()
        probe.do("os.close(fd)")
        checkpoint = sandbox.checkpoint()
        sandbox.rollback(checkpoint)
        assert probe.ask("1 + 1") == 2


@pytest.mark.parametrize("what", _CASES)
def test_refused_by_name(sandbox: Sandbox, what: str) -> None:
    probe = Probe.start(sandbox)
    probe.do(_CASES[what])
    fd = probe.ask("fd")
    assert fd >= 0, probe.ask("os.strerror(ctypes.get_errno())")
    with pytest.raises(UnsupportedState) as caught:
        sandbox.checkpoint("refused")
    pid = probe.process.pid
    assert str(caught.value) == f"fd {fd} of pid {pid} (python3) is {what}"
    assert (caught.value.pid, caught.value.process) == (pid, "python3")
    assert probe.ask("1 + 1") == 2
    assert sandbox.checkpoints == []
    probe.do("os.close(fd)")
    if what == "a raw socket":
        probe.do("s.detach()")
    checkpoint = sandbox.checkpoint("allowed")
    sandbox.rollback(checkpoint)
    assert probe.ask("1 + 1") == 2


@pytest.mark.parametrize(
    ("command", "match"),
    [
        ("unshare --uts sleep 100", "uts namespace"),
        ("mount -t tmpfs none /mnt && sleep 100", "mounted"),
        ("ip addr add 10.9.9.9/32 dev lo && sleep 100", "network"),
    ],
)
def test_changes_of_the_world_are_refused(sandbox: Sandbox, command: str, match: str) -> None:
    running = sandbox.spawn(command)
    sandbox.run("sleep 0.3")
    with pytest.raises(UnsupportedState, match=match):
        sandbox.checkpoint()
    assert running.exit_code is None
    assert sandbox.run("echo alive").stdout == "alive\n"
