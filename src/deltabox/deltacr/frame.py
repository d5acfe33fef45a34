"""The signal frame that takes a rebuilt thread back to its captured instant.

rt_sigreturn(2) loads all registers, the extended state, the signal mask and the alternate stack at
once from a `struct rt_sigframe` (arch/x86/include/asm/sigframe.h).  The frames of all threads of a
process lie in one small mapping that also counts the threads which still need the control memory.
They cannot lie on the threads' own stacks: Go's are smaller than a frame.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from ..linux.ptrace import Registers
from .model import Thread
from .records import FRAMES

_UC_FLAGS = 7  # UC_FP_XSTATE | UC_SIGCONTEXT_SS | UC_STRICT_RESTORE_SS
_MAGIC1, _MAGIC2 = 0x46505853, 0x46505845
_FRAME = 8 + 8 + 8 + 24 + 256 + 8 + 128  # pretcode, ucontext, siginfo
_HEADER = 64
_REGISTERS = 8 + 8 + 8 + 24  # where they are in a frame
_TRAP_FLAG = 0x100


def build(threads: Sequence[Thread]) -> tuple[bytes, list[int]]:
    """(content of the mapping, offset of each thread's frame in it)."""
    content = bytearray(struct.pack("<I", len(threads)).ljust(_HEADER, b"\0"))
    offsets = []
    for thread in threads:
        offset = (len(content) + 63) & ~63
        fpstate = (offset + _FRAME + 63) & ~63
        content += bytes(offset - len(content))
        content += _frame(thread, FRAMES + fpstate)
        content += bytes(fpstate - len(content))
        content += _extended(thread.xstate)
        offsets.append(offset)
    return bytes(content), offsets


def registers(threads: Sequence[Thread], thread: Thread, changed: Registers) -> tuple[int, bytes]:
    """(offset in the mapping, content) that gives one thread other general registers."""
    _, offsets = build(threads)
    at = next(o for o, t in zip(offsets, threads, strict=True) if t.tid == thread.tid)
    return at + _REGISTERS, _general(changed)


def _general(r: Registers) -> bytes:
    """The first part of struct sigcontext."""
    mask = (1 << 64) - 1
    return struct.pack(
        "<18Q",
        *(
            v & mask
            for v in (
                r.r8,
                r.r9,
                r.r10,
                r.r11,
                r.r12,
                r.r13,
                r.r14,
                r.r15,
                r.rdi,
                r.rsi,
                r.rbp,
                r.rbx,
                r.rdx,
                r.rax,
                r.rcx,
                r.rsp,
                r.rip,
                r.eflags & ~_TRAP_FLAG,
            )
        ),
    )


def _frame(thread: Thread, fpstate: int) -> bytes:
    r = thread.registers
    rest = struct.pack(
        "<4H4Q2Q",
        r.cs & 0xFFFF,
        0,
        0,
        r.ss & 0xFFFF,
        0,
        0,
        0,
        0,
        fpstate,
        0,
    )
    context = (_general(r) + rest).ljust(256, b"\0")
    return (
        struct.pack("<QQQ", 0, _UC_FLAGS, 0)
        + thread.altstack
        + context
        + struct.pack("<Q", thread.sigmask)
        + bytes(128)
    )


def _extended(xstate: bytes) -> bytes:
    """The XSAVE area with the software bytes that rt_sigreturn checks."""
    area = bytearray(xstate)
    features = struct.unpack_from("<Q", area, 464)[0]
    struct.pack_into("<IIQI", area, 464, _MAGIC1, len(area) + 4, features, len(area))
    area[484:512] = bytes(28)
    return bytes(area) + struct.pack("<I", _MAGIC2)
