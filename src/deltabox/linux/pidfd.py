"""pidfd_open(2), pidfd_getfd(2), pidfd_send_signal(2), waitid(2) on a pidfd, and kcmp(2)."""

from __future__ import annotations

import os
import select
import struct

from ._libc import syscall

_KCMP = 312
_PIDFD_SEND_SIGNAL = 424
_PIDFD_GETFD = 438

KCMP_FILE, KCMP_VM, KCMP_FILES, KCMP_FS = 0, 1, 2, 3
KCMP_SIGHAND, KCMP_IO, KCMP_SYSVSEM, KCMP_EPOLL_TFD = 4, 5, 6, 7


def getfd(pidfd: int, fd: int) -> int:
    """A duplicate, in this process, of file descriptor `fd` of the process behind `pidfd`."""
    return syscall(_PIDFD_GETFD, pidfd, fd, 0)


def send_signal(pidfd: int, signum: int) -> None:
    syscall(_PIDFD_SEND_SIGNAL, pidfd, signum, None, 0)


def kcmp(pid1: int, pid2: int, kind: int, index1: int = 0, index2: int = 0) -> int:
    """0 when the two share the object, 1 or 2 for an order among different ones."""
    return syscall(_KCMP, pid1, pid2, kind, index1, index2)


def kcmp_epoll(pid: int, fd: int, epoll_pid: int, epoll_fd: int, number: int, nth: int) -> int:
    """0 when the nth watch that was added as descriptor `number` is of the same description.

    Raises ENOENT when there is no such watch.
    """
    slot = struct.pack("III", epoll_fd, number, nth)
    return syscall(_KCMP, pid, epoll_pid, KCMP_EPOLL_TFD, fd, slot)


def reap(pidfd: int) -> None:
    """Wait for the end of a child of this process and collect it; fine if it is gone."""
    try:
        os.waitid(os.P_PIDFD, pidfd, os.WEXITED | 0x40000000)
    except ChildProcessError:
        return


def ended(pidfd: int, timeout: float) -> bool:
    """True when the process behind the pidfd has ended within `timeout` seconds."""
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(timeout * 1000))
