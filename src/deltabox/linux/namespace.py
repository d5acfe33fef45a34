"""Namespaces: the flags of clone3(2), unshare(2) and setns(2)."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ._libc import syscall

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


@contextmanager
def network_of(pid: int) -> Iterator[None]:
    """The calling thread is in the network namespace of a process within the block.

    A socket made there belongs to that namespace for ever.
    """
    own = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        other = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            setns(other, CLONE_NEWNET)
        finally:
            os.close(other)
        try:
            yield
        finally:
            setns(own, CLONE_NEWNET)
    finally:
        os.close(own)


def within(pid: int, name: str, kind: int, work: Callable[[], None]) -> None:
    """Do something in another process's namespace (its name in /proc/PID/ns, its flag).

    In a thread of its own, which is not used for anything afterwards.
    """
    failed: list[Exception] = []

    def enter() -> None:
        try:
            fd = os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY | os.O_CLOEXEC)
            try:
                setns(fd, kind)
            finally:
                os.close(fd)
            work()
        except Exception as error:  # for the caller, in its own thread
            failed.append(error)

    thread = threading.Thread(target=enter, name=f"in {name} of {pid}")
    thread.start()
    thread.join()
    if failed:
        raise failed[0]


def set_hostname(pid: int, name: str) -> None:
    """Set the host name of another process's UTS namespace."""
    within(pid, "uts", CLONE_NEWUTS, lambda: socket.sethostname(name))
