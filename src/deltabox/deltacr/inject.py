"""Run system calls inside a stopped process, and leave it exactly as it was.

Some facts only the process itself can be asked for (signal handlers, alternate stacks, the brk).
A page is mapped into it by one call through the `syscall` instruction of its vdso; a few bytes of
code there then work through a list of calls and stop at a breakpoint.  Afterwards the page is
unmapped and registers and signal mask are put back, so nothing of ours stays.

Two traps.  The kernel *resets the disposition* of SIGTRAP when a breakpoint hits while SIGTRAP is
blocked or ignored (force_sig_info_to_task in kernel/signal.c): so it is unblocked meanwhile, and
in a process that ignores it every call is stepped by PTRACE_SYSCALL instead, which sends no
signal.  And orig_rax is set to -1, or the kernel would "restart" our call.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import struct
from collections.abc import Callable
from functools import lru_cache
from types import TracebackType

from ..errors import CheckpointError
from ..linux import numbers as nr
from ..linux import ptrace
from ..linux.ptrace import Registers
from .peer import insist

SIZE = 0x5000
_RECORDS = 0x1000
_DATA = 0x4000

# rbx points to records of {number, six arguments, result}; the list ends with number -1.
#   next: mov rax,[rbx]; cmp rax,-1; je done; mov rdi,[rbx+8]; mov rsi,[rbx+16]; mov rdx,[rbx+24]
#         mov r10,[rbx+32]; mov r8,[rbx+40]; mov r9,[rbx+48]; syscall; mov [rbx+56],rax
#         add rbx,64; jmp next
#   done: int3
_CODE = bytes.fromhex(
    "488b034883f8ff7424488b7b08488b7310488b53184c8b53204c8b43284c8b4b300f05488943384883c340ebd3cc"
)

_ALL = (1 << 64) - 1
_SIGTRAP = 5


@lru_cache(maxsize=1)
def syscall_offset() -> int:
    """Where in the vdso a `syscall` instruction is; the same in every process of a kernel."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            if line.rstrip().endswith("[vdso]"):
                start, end = (int(part, 16) for part in line.split()[0].split("-"))
                with open("/proc/self/mem", "rb", buffering=0) as memory:
                    memory.seek(start)
                    offset = memory.read(end - start).find(b"\x0f\x05")
                if offset >= 0:
                    return offset
    raise CheckpointError("the vdso holds no syscall instruction")


class Injection:
    """A place in one stopped process from which calls can be made, by any of its threads."""

    def __init__(
        self, *, leader: int, memory: int, gap: int, vdso: int, ignores_trap: bool
    ) -> None:
        """`memory` is /proc/PID/mem opened for writing; `gap` a free address of SIZE bytes."""
        self._leader = leader
        self._memory = memory
        self._gap = gap
        self._instruction = vdso + syscall_offset()
        self._step = ignores_trap

    def __enter__(self) -> Injection:
        self._saved = {self._leader: _save(self._leader)}
        with contextlib.ExitStack() as undo:
            undo.callback(_restore, self._leader, *self._saved[self._leader])
            undo.callback(self._unmap)
            got = self._map(self._gap, SIZE, 7)
            if got == -errno.EACCES:
                # PR_SET_MDWE or a security module: nothing may be writable and executable at once
                got = self._map(self._gap, mmap.PAGESIZE, 5)
                if got == self._gap:
                    rest = self._gap + mmap.PAGESIZE
                    got += self._map(rest, SIZE - mmap.PAGESIZE, 3) - rest
            if got != self._gap:
                raise CheckpointError(f"no page could be mapped for injection: {got}")
            os.pwrite(self._memory, _CODE, self._gap)
            undo.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._unmap()
        finally:
            _restore(self._leader, *self._saved[self._leader])

    def _map(self, address: int, size: int, protection: int) -> int:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x100000  # MAP_FIXED_NOREPLACE
        return self._one(self._leader, nr.MMAP, address, size, protection, flags, -1, 0)

    def _unmap(self) -> None:
        insist(lambda: self._one(self._leader, nr.MUNMAP, self._gap, SIZE))

    @property
    def data(self) -> int:
        """Address of 4 KiB that calls may use as buffers."""
        return self._gap + _DATA

    def write(self, offset: int, content: bytes) -> None:
        os.pwrite(self._memory, content, self.data + offset)

    def read(self, offset: int, size: int) -> bytes:
        return os.pread(self._memory, size, self.data + offset)

    def run(self, tid: int, calls: list[tuple[int, ...]]) -> list[int]:
        """Make the calls (number, arguments...) in the given thread; the kernel's results."""
        if len(calls) > (_DATA - _RECORDS) // 64 - 1:
            raise ValueError("too many calls for one batch")
        own = tid != self._leader
        saved = _save(tid) if own else self._saved[tid]
        try:
            if self._step:
                return [self._one(tid, *call) for call in calls]
            base = self._gap + _RECORDS
            packed = b"".join(
                struct.pack("<8Q", *(v & _ALL for v in (*call, 0, 0, 0, 0, 0, 0)[:7]), 0)
                for call in calls
            )
            os.pwrite(self._memory, packed + b"\xff" * 8, base)
            ptrace.set_sigmask(tid, _ALL & ~(1 << (_SIGTRAP - 1)))
            registers = saved[0].copy()
            registers.rip, registers.rbx, registers.orig_rax = self._gap, base, -1
            registers.rax = 0
            ptrace.set_registers(tid, registers)
            self._go(tid, ptrace.resume, lambda status: ptrace.stop_signal(status) == _SIGTRAP)
            raw = os.pread(self._memory, 64 * len(calls), base)
            return [struct.unpack_from("<q", raw, 64 * i + 56)[0] for i in range(len(calls))]
        finally:
            if own:
                _restore(tid, *saved)

    def _one(self, tid: int, number: int, *arguments: int) -> int:
        """One call through the vdso, stopped at its entry and exit: no signal is involved."""
        registers = (
            self._saved[self._leader][0].copy()
            if tid == self._leader
            else (ptrace.get_registers(tid))
        )
        ptrace.set_sigmask(tid, _ALL)
        values = (*arguments, 0, 0, 0, 0, 0, 0)
        registers.rdi, registers.rsi, registers.rdx = values[:3]
        registers.r10, registers.r8, registers.r9 = values[3:6]
        registers.rax, registers.orig_rax, registers.rip = number, -1, self._instruction
        ptrace.set_registers(tid, registers)
        for _ in range(2):
            self._go(tid, ptrace.resume_to_syscall, ptrace.is_syscall_stop)
        result = 0

        def read() -> None:
            nonlocal result
            result = ptrace.get_registers(tid).rax

        insist(read)
        return result - (1 << 64) if result >> 63 else result

    def _go(self, tid: int, resume: Callable[[int], None], wanted: Callable[[int], bool]) -> None:
        """Let the thread run to the wanted stop."""
        while True:
            insist(lambda: resume(tid))  # half-way through a call there is no other way out
            status = ptrace.wait(tid)
            if status is None or not os.WIFSTOPPED(status):
                raise CheckpointError("a process was killed while it was captured")
            # a thread of a stopped job takes its group stop first; it has to be sent on again
            if not ptrace.is_event_stop(status):
                break
        if not wanted(status):
            raise CheckpointError(f"unexpected stop {status:#x} while a process was captured")


def _save(tid: int) -> tuple[Registers, int]:
    return ptrace.get_registers(tid), ptrace.get_sigmask(tid)


def _restore(tid: int, registers: Registers, mask: int) -> None:
    insist(lambda: ptrace.set_registers(tid, registers))
    insist(lambda: ptrace.set_sigmask(tid, mask))
