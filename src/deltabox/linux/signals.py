"""kill(2) and tgkill(2) by host pid, for processes that are known to exist."""

from __future__ import annotations

import os

from ._libc import syscall

_TGKILL = 234


def kill(pid: int, signum: int) -> None:
    os.kill(pid, signum)


def tgkill(pid: int, tid: int, signum: int) -> None:
    syscall(_TGKILL, pid, tid, signum)
