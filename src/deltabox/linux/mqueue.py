"""POSIX message queues (mq_overview(7)) through descriptors of their file system.

A queue that is opened as a file of a mounted `mqueue` is as good as one from mq_open(3): that is
how a queue of another ipc namespace is reached.
"""

from __future__ import annotations

import ctypes
import os
import struct

from ._libc import syscall

MQUEUE_MAGIC = 0x19800202  # linux/magic.h
_OPEN, _TIMEDSEND, _TIMEDRECEIVE, _GETSETATTR = 240, 242, 243, 245
_SETRESUID = 117


def charge_to(uid: int) -> None:
    """Have the room of queues that this thread makes counted for another real uid."""
    syscall(_SETRESUID, uid, -1, -1)


def create(name: str, longest: int, size: int) -> int:
    """Make a queue in the thread's ipc namespace, open for reading and writing."""
    attributes = struct.pack("<8q", 0, longest, size, 0, 0, 0, 0, 0)
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    return syscall(_OPEN, os.fsencode(name), flags, 0o600, attributes)


def attributes(fd: int) -> tuple[int, int, int]:
    """(the most messages, the size of the largest, messages there are)."""
    buffer = ctypes.create_string_buffer(64)
    syscall(_GETSETATTR, fd, None, buffer)
    _, longest, size, present = struct.unpack_from("<4q", buffer)
    return longest, size, present


def receive(fd: int, size: int) -> tuple[int, bytes]:
    """The oldest message of the highest priority, with that priority."""
    buffer = ctypes.create_string_buffer(max(1, size))
    priority = ctypes.create_string_buffer(4)
    length = syscall(_TIMEDRECEIVE, fd, buffer, size, priority, None)
    found: int = struct.unpack("<I", priority)[0]
    return found, buffer.raw[:length]


def send(fd: int, priority: int, message: bytes) -> None:
    syscall(_TIMEDSEND, fd, message, len(message), priority, None)
