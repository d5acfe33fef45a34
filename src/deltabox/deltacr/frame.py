"""The signal frame that takes a rebuilt thread back to its captured instant.

rt_sigreturn(2) loads all registers, the extended state, the signal mask and the alternate stack at
once from a `struct rt_sigframe` (arch/x86/include/asm/sigframe.h).  The frames of all threads of a
process lie in one small mapping that also counts the threads which still need the control memory.
They cannot lie on the threads' own stacks: Go's are smaller than a frame.

The first frame of a thread under seccomp leads to its exit (objects/seccomp.py) with all signals
blocked; behind the frames lie the exits, on pages that can be executed and not written.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from ..linux.ptrace import Registers
from .model import Thread
from .objects.seccomp import Exits
from .records import FRAMES

_UC_FLAGS = 7  # UC_FP_XSTATE | UC_SIGCONTEXT_SS | UC_STRICT_RESTORE_SS
_MAGIC1, _MAGIC2 = 0x46505853, 0x46505845
_FRAME = 8 + 8 + 8 + 24 + 256 + 8 + 128  # pretcode, ucontext, siginfo
_HEADER = 64
_REGISTERS = 8 + 8 + 8 + 24  # where they are in a frame
_TRAP_FLAG = 0x100


@dataclass(frozen=True)
class Built:
    """The mapping at FRAMES: what can be written, then the code, from a page of its own on."""

    content: bytes
    code_at: int
    code: bytes
    frames: dict[int, int]  # by tid, the address of the frame to leave the interpreter with
    last: dict[int, int]  # by tid, the address of the frame of the captured instant


def build(threads: Sequence[Thread], handled: int) -> Built:
    """`handled` are the signals for which the process has a handler."""
    exits = Exits(threads, handled)
    content = bytearray(struct.pack("<I", len(threads)).ljust(_HEADER, b"\0"))
    content += exits.data
    last: dict[int, tuple[int, int]] = {}
    for thread in threads:
        at = _append(content, 64, bytes(_FRAME))
        extended = _append(content, 64, _extended(thread.xstate))
        content[at : at + _FRAME] = _frame(thread, FRAMES + extended)
        last[thread.tid] = FRAMES + at, FRAMES + extended
    first = {tid: _append(content, 64, bytes(_FRAME)) for tid in exits.of}
    code_at = FRAMES + ((len(content) + 4095) & ~4095)
    code = bytearray()
    frames = {tid: address for tid, (address, _) in last.items()}
    for thread in threads:
        if thread.tid in exits.of:
            address, extended = last[thread.tid]
            start = code_at + len(code)
            code += exits.code(thread, start, address)
            at = first[thread.tid]
            content[at : at + _FRAME] = _frame(thread, extended, leads_to=start)
            frames[thread.tid] = FRAMES + at
    instants = {tid: address for tid, (address, _) in last.items()}
    return Built(bytes(content), code_at, bytes(code), frames, instants)


def _append(content: bytearray, align: int, more: bytes) -> int:
    content += bytes(-len(content) % align)
    at = len(content)
    content += more
    return at


def registers(
    threads: Sequence[Thread], handled: int, thread: Thread, changed: Registers
) -> tuple[int, bytes]:
    """(address, content) that gives one thread other general registers in its last frame."""
    built = build(threads, handled)
    return built.last[thread.tid] + _REGISTERS, _general(changed, changed.rip)


def _general(r: Registers, rip: int) -> bytes:
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
                rip,
                r.eflags & ~_TRAP_FLAG,
            )
        ),
    )


def _frame(thread: Thread, fpstate: int, *, leads_to: int | None = None) -> bytes:
    """The captured instant; or, with nothing but the instruction and the mask changed, an exit."""
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
    rip = r.rip if leads_to is None else leads_to
    context = (_general(r, rip) + rest).ljust(256, b"\0")
    return (
        struct.pack("<QQQ", 0, _UC_FLAGS, 0)
        + thread.altstack
        + context
        + struct.pack("<Q", thread.sigmask if leads_to is None else (1 << 64) - 1)
        + bytes(128)
    )


def _extended(xstate: bytes) -> bytes:
    """The XSAVE area with the software bytes that rt_sigreturn checks."""
    area = bytearray(xstate)
    features = struct.unpack_from("<Q", area, 464)[0]
    struct.pack_into("<IIQI", area, 464, _MAGIC1, len(area) + 4, features, len(area))
    area[484:512] = bytes(28)
    return bytes(area) + struct.pack("<I", _MAGIC2)
