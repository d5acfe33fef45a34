"""Linux AIO: whether a context is idle cannot be seen, so it is refused by name."""

from __future__ import annotations

import pytest

from deltabox import Sandbox, UnsupportedState
from tests.probe import Probe


def test_a_context_is_refused_until_it_is_gone(sandbox: Sandbox) -> None:
    probe = Probe.start(sandbox)
    make = "context = ctypes.c_ulong(); assert libc.syscall(206, 32, ctypes.byref(context)) == 0"
    probe.do(make)
    with pytest.raises(UnsupportedState, match=r"has an AIO context \(io_setup\) at 0x"):
        sandbox.checkpoint()
    probe.do("assert libc.syscall(207, context) == 0")
    checkpoint = sandbox.checkpoint()
    sandbox.rollback(checkpoint)
    probe.do(make)
