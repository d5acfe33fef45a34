"""What a restored process forks must have all of its memory."""

from __future__ import annotations

from deltabox import Sandbox
from tests.probe import Probe


def test_a_parent_can_still_fork_after_a_rollback(sandbox: Sandbox) -> None:
    """Its clones were not given its big memory at the restore; what it forks later must have it."""
    probe = Probe.start(sandbox)
    probe.do(
        """
big = bytearray(b'x') * (16 << 20)
if not os.fork():
    while True: signal.pause()
def forked():
    child = os.fork()
    if not child:
        os._exit(7 if big[-1] == 120 else 8)
    return os.waitpid(child, 0)[1]
"""
    )
    checkpoint = sandbox.checkpoint()
    assert probe.ask("forked()") == 7 << 8
    for _ in range(2):
        sandbox.rollback(checkpoint)
        assert probe.ask("forked()") == 7 << 8
    assert "dc" not in probe.ask("open('/proc/self/smaps').read()").split()
