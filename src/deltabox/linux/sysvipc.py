"""System V shared memory, semaphores and message queues (sysvipc(7)) of the thread's namespace.

Numbers and structures are those of linux/ipc.h, linux/shm.h, linux/sem.h and linux/msg.h on x86-64.
An identifier of one's choice comes from /proc/sys/kernel/*_next_id, and messages are read without
taking them by MSG_COPY: both need CONFIG_CHECKPOINT_RESTORE.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from ._libc import syscall

SHMGET, SHMAT, SHMCTL, SHMDT = 29, 30, 31, 67
SEMGET, SEMOP, SEMCTL = 64, 65, 66
MSGGET, MSGSND, MSGRCV, MSGCTL = 68, 69, 70, 71
IPC_RMID, IPC_SET, IPC_STAT = 0, 1, 2
IPC_PRIVATE: Final = 0
SHM_RDONLY, SHM_EXEC = 0o10000, 0o100000
SHM_DEST, SHM_LOCKED = 0o1000, 0o2000  # in a mode
SHM_HUGETLB, SHM_NORESERVE = 0o4000, 0o10000
_CREATE = 0o1000 | 0o2000  # IPC_CREAT, IPC_EXCL
_GETALL, _SETALL = 13, 17
_MSG_NOERROR, _MSG_COPY, _IPC_NOWAIT = 0o10000, 0o40000, 0o4000
_SETRESUID, _SETRESGID = 117, 119
_SAME = -1
_PERM = struct.Struct("<iIIIIIHHxxxxQQ")  # struct ipc64_perm


def listed(kind: str) -> list[dict[str, int]]:
    """The lines of /proc/sysvipc/`kind` (shm, sem, msg), by the names of their columns."""
    with open(f"/proc/sysvipc/{kind}") as file:
        names, *lines = (line.split() for line in file)
    return [
        {
            name: int(value, 8) if name == "perms" else int(value)
            for name, value in zip(names, line, strict=True)
        }
        for line in lines
    ]


def permissions(uid: int, gid: int, mode: int) -> bytes:
    """A struct shmid64_ds that IPC_SET takes these from."""
    return _PERM.pack(0, uid, gid, 0, 0, mode, 0, 0, 0, 0) + bytes(64)


@contextmanager
def maker(uid: int, gid: int) -> Iterator[None]:
    """This thread makes objects as their creator. Only for threads that end soon."""
    syscall(_SETRESGID, _SAME, gid, _SAME)
    syscall(_SETRESUID, _SAME, uid, _SAME)
    try:
        yield
    finally:
        syscall(_SETRESUID, _SAME, 0, _SAME)
        syscall(_SETRESGID, _SAME, 0, _SAME)


def choose(kind: str, identifier: int) -> None:
    """The next object of a kind (shm, sem, msg) gets this identifier."""
    fd = os.open(f"/proc/sys/kernel/{kind}_next_id", os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, str(identifier).encode())
    finally:
        os.close(fd)


def shmget(key: int, size: int, mode: int) -> int:
    return syscall(SHMGET, key, size, _CREATE | mode)


@contextmanager
def attached(identifier: int, size: int, *, writable: bool) -> Iterator[int]:
    """A descriptor of a segment's file."""
    address = syscall(SHMAT, identifier, None, 0 if writable else SHM_RDONLY)
    try:
        end = address + (size + 4095 & -4096)
        path = f"/proc/self/map_files/{address:x}-{end:x}"
        fd = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
    finally:
        syscall(SHMDT, address)
    try:
        yield fd
    finally:
        os.close(fd)


def shmctl_set(identifier: int, uid: int, gid: int, mode: int) -> None:
    syscall(SHMCTL, identifier, IPC_SET, permissions(uid, gid, mode))


def semget(key: int, count: int, mode: int) -> int:
    return syscall(SEMGET, key, count, _CREATE | mode)


def semaphores(identifier: int, count: int) -> list[int]:
    """The values of a set."""
    buffer = ctypes.create_string_buffer(2 * count)
    syscall(SEMCTL, identifier, 0, _GETALL, buffer)
    return list(struct.unpack(f"<{count}H", buffer.raw))


def set_semaphores(identifier: int, values: list[int]) -> None:
    syscall(SEMCTL, identifier, 0, _SETALL, struct.pack(f"<{len(values)}H", *values))


def semop(identifier: int, which: int, change: int) -> None:
    """Without waiting."""
    syscall(SEMOP, identifier, struct.pack("<Hhh", which, change, _IPC_NOWAIT), 1)


def semctl_set(identifier: int, uid: int, gid: int, mode: int) -> None:
    syscall(SEMCTL, identifier, 0, IPC_SET, permissions(uid, gid, mode))


def msgget(key: int, mode: int) -> int:
    return syscall(MSGGET, key, _CREATE | mode)


def message(identifier: int, index: int, largest: int) -> tuple[int, bytes]:
    """(type, text) of the message at a place in a queue, which keeps it."""
    buffer = ctypes.create_string_buffer(8 + largest)
    flags = _MSG_COPY | _IPC_NOWAIT | _MSG_NOERROR
    size = syscall(MSGRCV, identifier, buffer, largest, index, flags)
    return struct.unpack("<q", buffer.raw[:8])[0], buffer.raw[8 : 8 + size]


def msgsnd(identifier: int, kind: int, text: bytes) -> None:
    """Without waiting."""
    syscall(MSGSND, identifier, struct.pack("<q", kind) + text, len(text), _IPC_NOWAIT)


def queue_limit(identifier: int) -> int:
    """How many bytes a queue takes (msg_qbytes)."""
    buffer = ctypes.create_string_buffer(_PERM.size + 72)
    syscall(MSGCTL, identifier, IPC_STAT, buffer)
    return int(struct.unpack_from("<Q", buffer.raw, _PERM.size + 5 * 8)[0])


def msgctl_set(identifier: int, uid: int, gid: int, mode: int, limit: int) -> None:
    """As struct msqid64_ds, with msg_qbytes."""
    head = _PERM.pack(0, uid, gid, 0, 0, mode, 0, 0, 0, 0)
    syscall(
        MSGCTL, identifier, IPC_SET, head + struct.pack("<5QQ", 0, 0, 0, 0, 0, limit) + bytes(32)
    )
