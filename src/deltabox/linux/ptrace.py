"""ptrace(2) in its seize form, and what belongs to a traced thread.

`PTRACE_SEIZE` and `PTRACE_INTERRUPT` are used, never `PTRACE_ATTACH`: attaching sends a SIGSTOP
that the program can see.  A tracee belongs to the thread that seized it, so everything here must
be called from one thread for one freeze.  Constants: uapi/linux/ptrace.h.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import struct
from dataclasses import dataclass, fields

from ._libc import libc

PTRACE_CONT = 7
PTRACE_DETACH = 17
PTRACE_SYSCALL = 24
PTRACE_SETOPTIONS = 0x4200
PTRACE_GETREGSET = 0x4204
PTRACE_SETREGSET = 0x4205
PTRACE_SEIZE = 0x4206
PTRACE_INTERRUPT = 0x4207
PTRACE_PEEKSIGINFO = 0x4209
PTRACE_GETSIGMASK = 0x420A
PTRACE_SETSIGMASK = 0x420B
PTRACE_SECCOMP_GET_FILTER = 0x420C
PTRACE_SECCOMP_GET_METADATA = 0x420D
PTRACE_GET_RSEQ_CONFIGURATION = 0x420F
PTRACE_GET_SYSCALL_USER_DISPATCH_CONFIG = 0x4211

O_TRACESYSGOOD = 1
O_TRACEFORK = 2
O_TRACEVFORK = 4
O_TRACECLONE = 8
O_EXITKILL = 1 << 20
O_SUSPEND_SECCOMP = 1 << 21

EVENT_STOP = 128
PEEKSIGINFO_SHARED = 1

NT_PRSTATUS = 1
NT_X86_XSTATE = 0x202

_WALL = 0x40000000

_ptrace = libc.ptrace
_ptrace.restype = ctypes.c_long
_ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]


def _call(request: int, tid: int, address: int = 0, data: int = 0) -> int:
    result: int = _ptrace(request, tid, address, data)
    if result == -1:
        code = ctypes.get_errno()
        if code:
            raise OSError(code, os.strerror(code))
    return result


def seize(tid: int, options: int) -> None:
    """Begin to trace without stopping."""
    _call(PTRACE_SEIZE, tid, 0, options)


def set_options(tid: int, options: int) -> None:
    """For a thread that is stopped."""
    _call(PTRACE_SETOPTIONS, tid, 0, options)


def interrupt(tid: int) -> None:
    """Ask a seized thread to stop; the stop is reported through `wait`."""
    _call(PTRACE_INTERRUPT, tid)


def detach(tid: int) -> None:
    """Let go; a thread of a stopped process goes back to its group stop."""
    _call(PTRACE_DETACH, tid)


def detach_with(tid: int, signum: int) -> None:
    """Let go and deliver `signum`, which a signal-delivery stop had held back."""
    _call(PTRACE_DETACH, tid, 0, signum)


def resume(tid: int, signum: int = 0) -> None:
    """PTRACE_CONT."""
    _call(PTRACE_CONT, tid, 0, signum)


def resume_to_syscall(tid: int) -> None:
    """PTRACE_SYSCALL: run to the next system call's entry or exit."""
    _call(PTRACE_SYSCALL, tid)


def wait(tid: int, *, block: bool = True) -> int | None:
    """The wait status of one traced thread, or None if it has not stopped yet."""
    got, status = os.waitpid(tid, _WALL | (0 if block else os.WNOHANG))
    return status if got else None


@dataclass
class Registers:
    """struct user_regs_struct of x86-64, in the kernel's order."""

    r15: int
    r14: int
    r13: int
    r12: int
    rbp: int
    rbx: int
    r11: int
    r10: int
    r9: int
    r8: int
    rax: int
    rcx: int
    rdx: int
    rsi: int
    rdi: int
    orig_rax: int
    rip: int
    cs: int
    eflags: int
    rsp: int
    ss: int
    fs_base: int
    gs_base: int
    ds: int
    es: int
    fs: int
    gs: int

    def copy(self) -> Registers:
        return Registers(*(getattr(self, name) for name in _NAMES))

    @classmethod
    def unpack(cls, raw: bytes) -> Registers:
        return cls(*_REGISTERS.unpack(raw))

    def pack(self) -> bytes:
        return _REGISTERS.pack(*(getattr(self, name) & _MASK for name in _NAMES))


_NAMES = tuple(f.name for f in fields(Registers))
_REGISTERS = struct.Struct("27Q")
_MASK = (1 << 64) - 1


class _Iovec(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("size", ctypes.c_size_t)]


def get_registers(tid: int) -> Registers:
    return Registers(*_REGISTERS.unpack(_get_regset(tid, NT_PRSTATUS, _REGISTERS.size)))


def set_registers(tid: int, registers: Registers) -> None:
    data = ctypes.create_string_buffer(registers.pack(), _REGISTERS.size)
    vector = _Iovec(ctypes.addressof(data), _REGISTERS.size)
    _call(PTRACE_SETREGSET, tid, NT_PRSTATUS, ctypes.addressof(vector))


def get_xstate(tid: int) -> bytes:
    """The whole extended state in the standard XSAVE layout."""
    return _get_regset(tid, NT_X86_XSTATE, 16384)


def _get_regset(tid: int, kind: int, size: int) -> bytes:
    data = ctypes.create_string_buffer(size)
    vector = _Iovec(ctypes.addressof(data), size)
    _call(PTRACE_GETREGSET, tid, kind, ctypes.addressof(vector))
    return data.raw[: vector.size]


def get_sigmask(tid: int) -> int:
    """Blocked signals, bit 0 is signal 1; inside sigsuspend and ppoll the mask to come back to."""
    mask = ctypes.c_uint64()
    _call(PTRACE_GETSIGMASK, tid, 8, ctypes.addressof(mask))
    return mask.value


def set_sigmask(tid: int, mask: int) -> None:
    value = ctypes.c_uint64(mask)
    _call(PTRACE_SETSIGMASK, tid, 8, ctypes.addressof(value))


class _PeekSiginfo(ctypes.Structure):
    _fields_ = [("offset", ctypes.c_uint64), ("flags", ctypes.c_uint32), ("count", ctypes.c_int32)]


SIGINFO_SIZE = 128


def pending(tid: int, *, shared: bool) -> list[bytes]:
    """Queued siginfo_t of a stopped thread, or of its whole process."""
    infos: list[bytes] = []
    count = 32
    data = ctypes.create_string_buffer(SIGINFO_SIZE * count)
    while True:
        args = _PeekSiginfo(len(infos), PEEKSIGINFO_SHARED if shared else 0, count)
        got = _call(PTRACE_PEEKSIGINFO, tid, ctypes.addressof(args), ctypes.addressof(data))
        raw = data.raw
        infos += [raw[i * SIGINFO_SIZE : (i + 1) * SIGINFO_SIZE] for i in range(got)]
        if got < count:
            return infos


@dataclass(frozen=True)
class Rseq:
    """struct ptrace_rseq_configuration; address 0 when none is registered."""

    address: int
    size: int
    signature: int
    flags: int


def get_rseq(tid: int) -> Rseq:
    data = ctypes.create_string_buffer(24)
    _call(PTRACE_GET_RSEQ_CONFIGURATION, tid, 24, ctypes.addressof(data))
    address, size, signature, flags = struct.unpack("QIIIxxxx", data.raw)
    return Rseq(address, size, signature, flags)


def seccomp_filter(tid: int, index: int) -> bytes | None:
    """The instructions (struct sock_filter) of a filter, 0 being the oldest; None after the last.

    A thread that is under no filter has none.
    """
    try:
        count = _call(PTRACE_SECCOMP_GET_FILTER, tid, index)
        data = ctypes.create_string_buffer(8 * count)
        _call(PTRACE_SECCOMP_GET_FILTER, tid, index, ctypes.addressof(data))
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.EINVAL):
            return None
        raise
    return data.raw


def seccomp_flags(tid: int, index: int) -> int:
    """SECCOMP_FILTER_FLAG_LOG, or 0."""
    data = ctypes.create_string_buffer(struct.pack("<QQ", index, 0), 16)
    _call(PTRACE_SECCOMP_GET_METADATA, tid, 16, ctypes.addressof(data))
    flags: int = struct.unpack("<QQ", data.raw)[1]
    return flags


def dispatches_calls(tid: int) -> bool:
    """Whether PR_SET_SYSCALL_USER_DISPATCH is on; False where the kernel cannot tell."""
    data = ctypes.create_string_buffer(32)
    try:
        _call(PTRACE_GET_SYSCALL_USER_DISPATCH_CONFIG, tid, 32, ctypes.addressof(data))
    except OSError as error:
        if error.errno in (errno.EIO, errno.EINVAL):
            return False
        raise
    return bool(struct.unpack_from("<Q", data)[0])


def stop_signal(status: int) -> int:
    return (status >> 8) & 0xFF


def is_event_stop(status: int) -> bool:
    """True for the stop that PTRACE_INTERRUPT (or a group stop) makes."""
    return os.WIFSTOPPED(status) and status >> 16 == EVENT_STOP


def is_syscall_stop(status: int) -> bool:
    """True for a stop at a system call's border, marked by PTRACE_O_TRACESYSGOOD."""
    return os.WIFSTOPPED(status) and stop_signal(status) == signal.SIGTRAP | 0x80
