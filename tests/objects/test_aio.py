"""Linux AIO: whether a context is idle cannot be seen, so it is refused by name."""

from __future__ import annotations

import pytest

from deltabox import Sandbox, UnsupportedState
from tests.probe import Probe


def test_there_is_none_by_default(sandbox: Sandbox) -> None:
    """Programs do without then: MariaDB asks for it when there is no io_uring."""
    probe = Probe.start(sandbox)
    probe.do(
        "context = ctypes.c_ulong(); assert libc.syscall(206, 32, ctypes.byref(context)) == -1"
    )
    assert probe.ask("ctypes.get_errno()") == 38


def test_a_context_is_refused_until_it_is_gone() -> None:
    with Sandbox.create(io_uring=True) as sandbox:
        _refused_until_it_is_gone(sandbox)


def _refused_until_it_is_gone(sandbox: Sandbox) -> None:
    probe = Probe.start(sandbox)
    make = "context = ctypes.c_ulong(); assert libc.syscall(206, 32, ctypes.byref(context)) == 0"
    probe.do(make)
    with pytest.raises(UnsupportedState, match=r"has an AIO context \(io_setup\) at 0x"):
        sandbox.checkpoint()
    probe.do("assert libc.syscall(207, context) == 0")
    checkpoint = sandbox.checkpoint()
    sandbox.rollback(checkpoint)
    probe.do(make)
