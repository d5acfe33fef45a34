"""Filters on system calls (seccomp(2)), and how a thread gets them back.

*Ours.*  What an io_uring was set up with cannot be read back from it, and libuv (Node.js, uvloop)
opens one for every event loop but does without where it must.  So all processes of a tree are
under one filter, unless it was made with `io_uring=True`, that lets io_uring_setup(2) say that
there is no such call, as on many hosts.  They inherit it from the tree's first template, and so do
restored ones without our doing.  A program's own filters come after it.  Under any filter strict
mode is closed.

*Capture.*  A filter would judge the calls that are injected, so it is suspended meanwhile
(PTRACE_O_SUSPEND_SECCOMP); its instructions are read with PTRACE_SECCOMP_GET_FILTER.

*Restore.*  A rebuilt thread must not run one instruction of its own without its filters, yet its
last steps are system calls that a filter may forbid.  So the filters come last of all.  Signals are
all blocked then, and rt_sigreturn(2) takes the thread not to its captured instant but to an *exit*:
straight-line code of its own, compiled here, that installs the filters, oldest first, and leaves
in one of three ways.  Which calls the filters let through is decided when the checkpoint is taken,
by running them (`Filter.judge`).

    allowed: rt_sigreturn       a second one takes the thread to its instant
    else: rt_sigprocmask        it sets the mask; registers are loaded and a jump does the rest
    neither                     the mask is set before the filters, which is the same only when no
                                handler could run then; refused otherwise

In the last two ways no instruction may change the flags: moves, `jrcxz` and `syscall` do not.

Threads share filters, and SECCOMP_FILTER_FLAG_TSYNC works only among threads that do
(seccomp_can_sync_threads in kernel/seccomp.c).  So what all threads of a process have in common is
installed by the main one, with that flag, when the others have made their last call.

Rejected: a tracer that installs the filters (a rollback would wait for Python), and filters before
the last barrier (any call of the interpreter may be forbidden).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

from ...errors import CheckpointError
from ...linux import numbers as nr
from ...linux import proc, ptrace
from ..records import CODE, FRAMES, Program

if TYPE_CHECKING:
    from collections.abc import Sequence as Items

    from ..model import Thread
    from ..subject import Refuse

STRICT, FILTER = 1, 2
_ENOSYS = 38
_ERRNO, _ALLOW = 0x50000, 0x7FFF0000
_IO_URING_SETUP, _IO_SETUP = 425, 206
_X32 = 0x40000000  # in the number of a call of that ABI
_IO_SETUP_X32 = 543 | _X32
_SECCOMP, _SET_MODE_FILTER, _PR_SET_SECCOMP = 317, 1, 22
_TSYNC, _LOG, _SPEC_ALLOW = 1, 2, 4
_RESTART_SYSCALL = 219
_SIG_SETMASK = 2
_ALL = (1 << 64) - 1
_ARCH = 0xC000003E  # AUDIT_ARCH_X86_64
_ACTION = 0xFFFF0000
_PASSED = (0x7FFF0000, 0x7FFC0000)  # SECCOMP_RET_ALLOW, SECCOMP_RET_LOG
_CAP_SYS_ADMIN = 21

Call = tuple[int, ...]  # number and arguments


@dataclass(frozen=True)
class Filter:
    """One filter as it was installed: struct sock_filter, and whether it logs."""

    code: bytes
    log: bool

    def judge(self, call: Call) -> int:
        return _judge(self.code, call)


@dataclass(frozen=True)
class Seccomp:
    """What a thread has put itself under; filters oldest first."""

    mode: int = 0
    filters: tuple[Filter, ...] = ()


NONE = Seccomp()


class Refused(Exception):
    """Why the filters could not be installed again."""


# -- ours ---------------------------------------------------------------------------------------


def our_program() -> Program:
    """Put the process that runs it, and all that it will start, under our filter."""
    program = Program()
    refused = (_IO_URING_SETUP, _IO_URING_SETUP | _X32, _IO_SETUP, _IO_SETUP_X32)
    code = [(0x20, 0, 0, 4), (0x15, 0, len(refused) + 1, _ARCH), (0x20, 0, 0, 0)]
    code += [(0x15, len(refused) - n, 0, call) for n, call in enumerate(refused)]
    code += [(6, 0, 0, _ALLOW), (6, 0, 0, _ERRNO | _ENOSYS)]
    instructions = program.data(b"".join(struct.pack("<HBBI", *one) for one in code))
    fprog = program.data(struct.pack("<QQ", len(code), 0))
    program.pointer(fprog + 8, instructions)
    what = "seccomp: do without asynchronous I/O of the kernel"
    program.root.call(_SECCOMP, _SET_MODE_FILTER, _SPEC_ALLOW, fprog, what=what)
    return program


# -- capture ------------------------------------------------------------------------------------


def is_under(status: proc.Status, ours: int) -> bool:
    """Whether a thread, of which this is /proc/PID/status, has more than those all have from us."""
    return int(status["Seccomp"]) == STRICT or int(status["Seccomp_filters"]) != ours


def suspend(tid: int) -> None:
    """Let a stopped thread call what it likes until it is let go."""
    try:
        ptrace.set_options(tid, ptrace.O_TRACESYSGOOD | ptrace.O_SUSPEND_SECCOMP)
    except PermissionError:
        raise CheckpointError(
            "a program in the sandbox is under a seccomp filter, which the keeper cannot suspend: "
            "it needs CAP_SYS_ADMIN and must not be under such a filter itself"
        ) from None


def capture(tid: int, status: proc.Status, ours: int) -> Seccomp:
    if not is_under(status, ours):
        return NONE
    mode = int(status["Seccomp"])
    return Seccomp(mode, tuple(_filters(tid, ours)) if mode == FILTER else ())


def _filters(tid: int, ours: int) -> list[Filter]:
    """All but ours, which are the oldest."""
    found: list[Filter] = []
    while True:
        index = ours + len(found)
        code = ptrace.seccomp_filter(tid, index)
        if code is None:
            return found
        found.append(Filter(code, bool(ptrace.seccomp_flags(tid, index) & _LOG)))


def forbids_restart(tid: int) -> bool:
    """Whether the kernel's own way to go on with an interrupted call would meet a filter."""
    return not passes(tuple(_filters(tid, 0)), (_RESTART_SYSCALL,))


def check(threads: Items[Thread], handled: int, refuse: Refuse) -> None:
    """Refuse now what could not be installed again; `handled` are the signals with a handler."""
    try:
        Exits(threads, handled)
    except Refused as refused:
        raise refuse(f"is under a seccomp filter {refused}", "seccomp") from None


# -- what a filter says -------------------------------------------------------------------------


def passes(filters: tuple[Filter, ...], call: Call) -> bool:
    return all(f.judge(call) & _ACTION in _PASSED for f in filters)


@lru_cache(maxsize=4096)
def _judge(code: bytes, call: Call) -> int:
    """Run a classic BPF program over struct seccomp_data (linux/seccomp.h, linux/bpf_common.h)."""
    number, *arguments = call
    values = [v & _ALL for v in (*arguments, 0, 0, 0, 0, 0, 0)[:6]]
    # our code is no place that a filter knows, so any address in it stands for all
    data = struct.pack("<iIQ6Q", number, _ARCH, CODE, *values)
    program = list(struct.iter_unpack("<HBBI", code))
    a = x = at = 0
    memory = [0] * 16
    while True:
        op, if_true, if_false, k = program[at]
        at += 1
        kind, by = op & 7, x if op & 8 else k
        if kind == 0:  # BPF_LD
            a = _load(op, k, data, memory)
        elif kind == 1:  # BPF_LDX
            x = _load(op, k, data, memory)
        elif kind == 2:
            memory[k] = a
        elif kind == 3:
            memory[k] = x
        elif kind == 4:
            if op & 0xF0 == 0x30 and by == 0:
                return 0
            a = _compute(op & 0xF0, a, by)
        elif kind == 5:
            if op & 0xF0 == 0:
                at += k
            else:
                at += if_true if _holds(op & 0xF0, a, by) else if_false
        elif kind == 6:
            return a if op & 0x18 == 0x10 else k
        elif op & 0xF8 == 0x80:
            a = x
        else:
            x = a


def _load(op: int, k: int, data: bytes, memory: list[int]) -> int:
    mode = op & 0xE0
    if mode == 0x00:
        return k
    if mode == 0x60:
        return memory[k]
    if mode == 0x80:
        return len(data)
    value: int = struct.unpack_from("<I", data, k)[0]
    return value


def _compute(op: int, a: int, by: int) -> int:
    value = {
        0x00: lambda: a + by,
        0x10: lambda: a - by,
        0x20: lambda: a * by,
        0x30: lambda: a // by,
        0x40: lambda: a | by,
        0x50: lambda: a & by,
        0x60: lambda: a << (by & 31),
        0x70: lambda: a >> (by & 31),
        0x80: lambda: -a,
        0xA0: lambda: a ^ by,
    }[op]()
    return value & 0xFFFFFFFF


def _holds(op: int, a: int, by: int) -> bool:
    return {0x10: a == by, 0x20: a > by, 0x30: a >= by, 0x40: bool(a & by)}[op]


# -- and back -----------------------------------------------------------------------------------


@dataclass
class Exit:
    """How one thread leaves: what it does after the ordinary restore, and in which way."""

    before: list[Call] = field(default_factory=list)
    wait_for: list[int] = field(default_factory=list)  # words that become 1
    shared: list[Call] = field(default_factory=list)
    announce: int = 0  # a word to set to 1
    await_shared: int = 0  # a word to wait for after that
    own: list[Call] = field(default_factory=list)
    after: list[Call] = field(default_factory=list)
    by_return: bool = True


class Exits:
    """The exits of one process's threads, and the data they need, which lies at `DATA`."""

    DATA = FRAMES + 64

    def __init__(self, threads: Items[Thread], handled: int) -> None:
        self.data = bytearray()
        self._places: dict[bytes, int] = {}
        self.of: dict[int, Exit] = {}  # by tid; the others need none
        filtered = [t for t in threads if t.seccomp.mode]
        if not filtered:
            return
        common = self._shared_calls(threads)
        words = {t.tid: self._place(bytes(8), unique=True) for t in threads} if common else {}
        for thread in filtered:
            self.of[thread.tid] = made = Exit()
            if thread.seccomp.mode == STRICT:
                made.own = [(nr.PRCTL, _PR_SET_SECCOMP, STRICT)]
                continue
            self._check_privilege(thread)
            filters = thread.seccomp.filters
            if common and thread is threads[0]:
                made.wait_for = [words[t.tid] for t in threads[1:]]
                made.shared = common
                made.announce = words[thread.tid]
            elif common:
                made.announce = words[thread.tid]
                made.await_shared = words[threads[0].tid]
            made.own = [self._install(filters, n) for n in range(len(common), len(filters))]
            self._leave(made, thread, handled)

    def _leave(self, made: Exit, thread: Thread, handled: int) -> None:
        filters = thread.seccomp.filters
        if passes(filters, (nr.RT_SIGRETURN,)):
            return
        made.by_return = False
        mask = self._place(struct.pack("<Q", thread.sigmask))
        call = (nr.RT_SIGPROCMASK, _SIG_SETMASK, mask, 0, 8)
        if passes(filters, call):
            made.after = [call]
        elif handled & ~thread.sigmask:
            raise Refused(
                "that forbids rt_sigreturn and rt_sigprocmask, while a signal with a handler may "
                "arrive"
            )
        else:
            made.before = [call]

    def _shared_calls(self, threads: Items[Thread]) -> list[Call]:
        """Installing what all threads begin with, for all of them at once; none for one thread."""
        if len(threads) == 1 or len({t.credentials.no_new_privs for t in threads}) > 1:
            return []  # the flag would give no_new_privs to all
        calls: list[Call] = []
        leader = threads[0].seccomp.filters
        for index, found in enumerate(leader):
            if any(t.seccomp.filters[index : index + 1] != (found,) for t in threads):
                break
            call = self._by_seccomp(found, _TSYNC | _SPEC_ALLOW)
            if not passes(leader[:index], call):
                break
            calls.append(call)
        return calls

    def _install(self, filters: tuple[Filter, ...], index: int) -> Call:
        """A call that installs filter `index` and that those before it let through."""
        found = filters[index]
        choices = [self._by_seccomp(found, _SPEC_ALLOW), self._by_seccomp(found, 0)]
        if not found.log:
            choices.append((nr.PRCTL, _PR_SET_SECCOMP, FILTER, self._program(found)))
        for call in choices:
            if passes(filters[:index], call):
                return call
        raise Refused("that forbids to install the ones it was followed by")

    def _by_seccomp(self, found: Filter, flags: int) -> Call:
        flags |= _LOG if found.log else 0
        return (_SECCOMP, _SET_MODE_FILTER, flags, self._program(found))

    def _program(self, found: Filter) -> int:
        """Address of a struct sock_fprog."""
        code = self._place(found.code)
        return self._place(struct.pack("<QQ", len(found.code) // 8, code))

    def _check_privilege(self, thread: Thread) -> None:
        who = thread.credentials
        if not who.no_new_privs and not who.effective >> _CAP_SYS_ADMIN & 1:
            raise Refused(
                "that it could not install itself: it has neither no_new_privs nor CAP_SYS_ADMIN"
            )

    def _place(self, content: bytes, *, unique: bool = False) -> int:
        known = None if unique else self._places.get(content)
        if known is None:
            known = self.DATA + len(self.data)
            self.data += content + bytes(-len(content) % 8)
            if not unique:
                self._places[content] = known
        return known

    def code(self, thread: Thread, address: int, frame: int) -> bytes:
        """Machine code for `address`; `frame` is the one that the second rt_sigreturn takes."""
        made = self.of[thread.tid]
        out = _Code(address)
        for call in made.before:
            out.call(call)
        for word in made.wait_for:
            out.wait(word)
        for call in made.shared:
            out.call(call)
        if made.announce:
            out.announce(made.announce)
        if made.await_shared:
            out.wait(made.await_shared)
        for call in (*made.own, *made.after):
            out.call(call)
        if made.by_return:
            out.load(rsp=frame + 8, rdi=0, rsi=0, rdx=0, r10=0, r8=0, r9=0)
            out.load(rax=nr.RT_SIGRETURN)
            out.add(b"\x0f\x05\x0f\x0b")
        else:
            r = thread.registers
            out.load(rdi=r.rdi, rsi=r.rsi, rdx=r.rdx, r10=r.r10, r8=r.r8, r9=r.r9)
            out.load(rax=r.rax, rcx=r.rcx, r11=r.r11)
            out.add(b"\xff\x25\0\0\0\0" + struct.pack("<Q", r.rip & _ALL))  # jmp *0(%rip)
        return bytes(out.content)


_MOVES = {  # movabs $imm64, %register
    "rax": b"\x48\xb8",
    "rcx": b"\x48\xb9",
    "rdx": b"\x48\xba",
    "rsp": b"\x48\xbc",
    "rsi": b"\x48\xbe",
    "rdi": b"\x48\xbf",
    "r8": b"\x49\xb8",
    "r9": b"\x49\xb9",
    "r10": b"\x49\xba",
    "r11": b"\x49\xbb",
}


class _Code:
    """Instructions that leave the flags alone."""

    def __init__(self, address: int) -> None:
        self.address = address
        self.content = bytearray()

    def add(self, code: bytes) -> None:
        self.content += code

    def load(self, **registers: int) -> None:
        for name, value in registers.items():
            self.add(_MOVES[name] + struct.pack("<Q", value & _ALL))

    def call(self, call: Call) -> None:
        """A system call that must return 0; what fails here ends the process by SIGILL."""
        number, *arguments = call
        names = ("rdi", "rsi", "rdx", "r10", "r8", "r9")
        values = (*arguments, 0, 0, 0, 0, 0, 0)
        self.load(rax=number, **dict(zip(names, values, strict=False)))
        # syscall; mov %rax,%rcx; jrcxz over; ud2; over:
        self.add(b"\x0f\x05\x48\x89\xc1\xe3\x02\x0f\x0b")

    def announce(self, word: int) -> None:
        # movl $1, word(%rip)
        self.add(b"\xc7\x05" + self._distance(word, 10) + struct.pack("<I", 1))

    def wait(self, word: int) -> None:
        # again: mov word(%rip),%ecx; jrcxz idle; jmp done; idle: pause; jmp again; done:
        self.add(b"\x8b\x0d" + self._distance(word, 6) + b"\xe3\x02\xeb\x04\xf3\x90\xeb\xf2")

    def _distance(self, target: int, length: int) -> bytes:
        """A displacement from the end of an instruction of this length, which starts here."""
        return struct.pack("<i", target - (self.address + len(self.content) + length))
