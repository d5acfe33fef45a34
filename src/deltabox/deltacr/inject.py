"""Run system calls inside a stopped process, and leave it exactly as it was.

Some facts only the process itself can be asked for (signal handlers, alternate stacks, the brk).
A page is mapped into it by one call through the `syscall` instruction of its vdso; a few bytes of
code there then work through a list of calls and stop at a breakpoint.  Afterwards the page is
unmapped and registers and signal mask are put back, so nothing of ours stays.

Two traps.  The kernel *resets the disposition* of SIGTRAP when a breakpoint hits while SIGTRAP is
blocked or ignored (force_sig_info_to_task in kernel/signal.c): so it is unblocked meanwhile, and
in a process that ignores it every call is stepped by PTRACE_SYSCALL instead, which sends no
signal.  And orig_rax is set to -1, or the kernel would "restart" our call.  The steps themselves
are in linux/stop.c.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import struct
from functools import lru_cache
from types import TracebackType

from ..errors import CheckpointError
from ..linux import numbers as nr
from ..linux import stop
from .peer import insist

SIZE = 0x6000
_RECORDS = 0x1000
_DATA = 0x4000
DATA = 1 << 62
"""Addresses from here on mean the 8 KiB that calls may use as buffers, wherever they will lie."""

# rbx points to records of {number, six arguments, result}; the list ends with number -1.
#   next: mov rax,[rbx]; cmp rax,-1; je done; mov rdi,[rbx+8]; mov rsi,[rbx+16]; mov rdx,[rbx+24]
#         mov r10,[rbx+32]; mov r8,[rbx+40]; mov r9,[rbx+48]; syscall; mov [rbx+56],rax
#         add rbx,64; jmp next
#   done: int3
_CODE = bytes.fromhex(
    "488b034883f8ff7424488b7b08488b7310488b53184c8b53204c8b43284c8b4b300f05488943384883c340ebd3cc"
)

_ALL = (1 << 64) - 1
_MOST = (_DATA - _RECORDS) // 64 - 1

Call = tuple[int, ...]


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


@lru_cache(maxsize=256)
def pack(calls: tuple[Call, ...]) -> bytes:
    """Calls as bulk_batch() in linux/stop.c takes them; the same lists come again and again."""
    if len(calls) > _MOST:
        raise ValueError("too many calls for one batch")
    parts = []
    for call in calls:
        number, *arguments = (*call, 0, 0, 0, 0, 0, 0)[:7]
        bits = 0
        for index, value in enumerate(arguments):
            if DATA <= value < 2 * DATA:
                bits |= 1 << index
                arguments[index] = value - DATA
        parts.append(struct.pack("<8Q", *(v & _ALL for v in (number, *arguments)), bits))
    return b"".join(parts)


class NoRoom(CheckpointError):
    """Something is mapped already where our page should have been."""


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
        self._saved = stop.save(self._leader)
        with contextlib.ExitStack() as undo:
            undo.callback(_put_back, self._leader, self._saved)
            got = self._map(self._gap, SIZE, 7)
            if got != -errno.EEXIST:
                undo.callback(self._unmap)
            if got == -errno.EACCES:
                # PR_SET_MDWE or a security module: nothing may be writable and executable at once
                got = self._map(self._gap, mmap.PAGESIZE, 5)
                if got == self._gap:
                    rest = self._gap + mmap.PAGESIZE
                    got += self._map(rest, SIZE - mmap.PAGESIZE, 3) - rest
            if got == -errno.EEXIST:
                raise NoRoom("no free place was found in a process")
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
            _put_back(self._leader, self._saved)

    def _map(self, address: int, size: int, protection: int) -> int:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x100000  # MAP_FIXED_NOREPLACE
        call = (nr.MMAP, address, size, protection, flags, -1, 0)
        return self._one(self._leader, self._saved, call)

    def _unmap(self) -> None:
        insist(lambda: self._one(self._leader, self._saved, (nr.MUNMAP, self._gap, SIZE)))

    @property
    def data(self) -> int:
        """Address of 8 KiB that calls may use as buffers."""
        return self._gap + _DATA

    def write(self, offset: int, content: bytes) -> None:
        os.pwrite(self._memory, content, self.data + offset)

    def read(self, offset: int, size: int) -> bytes:
        return os.pread(self._memory, size, self.data + offset)

    def run(self, tid: int, calls: tuple[Call, ...]) -> tuple[int, ...]:
        """Make the calls (number, arguments...) in the given thread; the kernel's results."""
        own = tid != self._leader
        saved = stop.save(tid) if own else self._saved
        try:
            if self._step:
                return tuple(self._one(tid, saved, self._placed(call)) for call in calls)
            return stop.batch(
                tid, saved, self._memory, self._gap, self._gap + _RECORDS, self.data, pack(calls)
            )
        except (stop.Killed, stop.StoppedElsewhere) as error:
            raise CheckpointError(f"a process was captured and {error}") from None
        finally:
            if own:
                _put_back(tid, saved)

    def _placed(self, call: Call) -> Call:
        return tuple(v - DATA + self.data if DATA <= v < 2 * DATA else v for v in call)

    def _one(self, tid: int, saved: stop.Saved, call: Call) -> int:
        """One call through the vdso."""
        try:
            return stop.call(tid, saved, self._instruction, call, stepped=not self._step)
        except (stop.Killed, stop.StoppedElsewhere) as error:
            raise CheckpointError(f"a process was captured and {error}") from None


def _put_back(tid: int, saved: stop.Saved) -> None:
    insist(lambda: stop.put_back(tid, saved))
