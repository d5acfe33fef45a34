"""Namespaces: the flags of clone3(2), unshare(2) and setns(2)."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from typing import TypeVar

from ._libc import syscall

T = TypeVar("T")

CLONE_VM = 0x100
CLONE_FS = 0x200
CLONE_FILES = 0x400
CLONE_SIGHAND = 0x800
CLONE_PIDFD = 0x1000
CLONE_VFORK = 0x4000
CLONE_PARENT = 0x8000
CLONE_THREAD = 0x10000
CLONE_NEWNS = 0x20000
CLONE_SYSVSEM = 0x40000
CLONE_CHILD_CLEARTID = 0x200000
CLONE_NEWCGROUP = 0x2000000
CLONE_NEWUTS = 0x4000000
CLONE_NEWIPC = 0x8000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
CLONE_CLEAR_SIGHAND = 0x100000000
CLONE_INTO_CGROUP = 0x200000000

_UNSHARE = 272
_SETNS = 308


def unshare(flags: int) -> None:
    syscall(_UNSHARE, flags)


def setns(fd: int, kind: int) -> None:
    """Move the calling thread into the namespace behind `fd`."""
    syscall(_SETNS, fd, kind)


def within(path: str, kind: int, call: Callable[[], T]) -> T:
    """What `call` returns when it is made inside a namespace (a link in /proc/PID/ns).

    A thread of its own goes there and ends: the caller's own thread never leaves.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def visit() -> None:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                setns(fd, kind)
            finally:
                os.close(fd)
            results.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=visit, name="connection to a namespace")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def set_hostname(pid: int, name: str) -> None:
    """Set the host name of another process's UTS namespace."""
    within(f"/proc/{pid}/ns/uts", CLONE_NEWUTS, lambda: socket.sethostname(name))
