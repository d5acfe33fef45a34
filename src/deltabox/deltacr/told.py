"""What only a stopped process itself can tell, and whether that is still true at a later stop.

Asking means injection: a page is mapped, every thread makes some calls, the page is unmapped:
0.3 to 0.4 ms for each process.  But a process that waits for the agent does nothing, and has
nothing new to tell.  A process that was asked is *still* when at a later stop

- it has the same threads, with the same registers and signal masks;
- each of them has gone to sleep twice since: once in the call that the thaw let it go on with, and
  once for this stop (voluntary context switches in /proc/PID/status, proc_pid_status(5));
- no page of it was written, but for those in which the kernel notes the processor of a thread that
  goes on (rseq(2)), and these hold what they held but for that note;
- and none of the little that others may change (resource limits, timer slack) has been changed.

A program that makes a call with an effect in the kernel alone, comes back to the same instruction
with all registers as they were, and has not written a byte meanwhile, does not exist outside of
purposely written assembly; and even it is noticed unless one of its two calls did not sleep.  What
goes on without the process, its interval timers, is asked for every time.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from ..linux import numbers as nr
from ..linux.ask import Kind, Questions
from .inject import DATA, Injection
from .interrupted import ends_by_itself, may_be_another, may_be_late
from .look import Look
from .model import PAGE, PosixTimer
from .objects import attributes, locked, signals, timers
from .space import Known

_PR_GET_SECUREBITS, _PR_GET_TID_ADDRESS = 27, 40
_ERESTART_RESTARTBLOCK = (1 << 64) - 516

# Calls for injection, in the order of their answers; buffers are offsets from DATA.
ITIMERS_AT = signals.SIGNALS * signals.SIGACTION_SIZE
TIMERS_AT = ITIMERS_AT + 3 * timers.ITIMER_SIZE
CARRIED_AT = 4096 - attributes.PROCESS_AREA
MOST_TIMERS = (CARRIED_AT - TIMERS_AT) // timers.ITIMERSPEC_SIZE
PROCESS_CALLS = (
    *signals.capture_calls(DATA),
    *timers.capture_calls(DATA + ITIMERS_AT),
    (nr.BRK, 0),
    *attributes.process_calls(DATA + CARRIED_AT),
)
BRK_RESULT = signals.SIGNALS + len(timers.ITIMERS)
_THREAD_AT = 4096  # behind what the process is asked for
THREAD_CALLS = (
    (nr.SIGALTSTACK, 0, DATA + _THREAD_AT),
    (nr.PRCTL, _PR_GET_TID_ADDRESS, DATA + _THREAD_AT + 32),
    (nr.PRCTL, _PR_GET_SECUREBITS),
    *attributes.thread_calls(DATA + _THREAD_AT + 64),
)
_MAIN_CALLS = (*THREAD_CALLS, *PROCESS_CALLS)
_THREAD_BUFFER = 64 + attributes.THREAD_AREA


@dataclass(frozen=True)
class Told:
    """The answers of one process."""

    results: tuple[int, ...]  # of PROCESS_CALLS and the settings of its timers
    buffer: bytes
    threads: Mapping[int, tuple[tuple[int, ...], bytes]]  # by host tid: of THREAD_CALLS, buffer
    lock_future: int
    at: float = field(compare=False)  # time.monotonic() when it was asked

    def now(self) -> Told | None:
        """What it would say now, if it has not moved; None if its timers make that uncertain."""
        before = self.buffer[ITIMERS_AT:TIMERS_AT]
        if not any(before):
            return self
        at = time.monotonic()
        settings = timers.aged(before, at - self.at)
        if settings is None:
            return None
        buffer = self.buffer[:ITIMERS_AT] + settings + self.buffer[TIMERS_AT:]
        return replace(self, buffer=buffer, at=at)

    def but_for_timers(self) -> Told:
        """To be compared: what is left of a timer is never the same twice."""
        rest = self.buffer[:ITIMERS_AT] + self.buffer[TIMERS_AT:]
        return replace(self, buffer=rest)


def ask(
    known: Known,
    host: int,
    look: Look,
    tids: Sequence[int],
    posix: list[PosixTimer],
    memory_fd: int,
    also: Callable[[Injection], None],
) -> Told:
    """Ask a stopped process; `also` may make calls of its own. Raises inject.NoRoom."""
    calls = _MAIN_CALLS
    if posix:
        calls = (*calls, *timers.setting_calls(posix, DATA + TIMERS_AT))
    told: dict[int, tuple[tuple[int, ...], bytes]] = {}
    at = time.monotonic()
    with Injection(
        leader=host,
        memory=memory_fd,
        gap=known.gap,
        vdso=known.vdso,
        ignores_trap=bool(int(look.status["SigIgn"], 16) >> 4 & 1),
    ) as injection:
        for tid in tids:
            results = injection.run(tid, calls if tid == host else THREAD_CALLS)
            mine = results[: len(THREAD_CALLS)]
            if undo := attributes.put_back_calls(mine[3:]):
                injection.run(tid, tuple(undo))
            if tid == host:
                both = injection.read(0, _THREAD_AT + _THREAD_BUFFER)
                buffer, of_process = both[:_THREAD_AT], results[len(THREAD_CALLS) :]
                told[tid] = mine, both[_THREAD_AT:]
            else:
                told[tid] = mine, injection.read(_THREAD_AT, _THREAD_BUFFER)
        lock_future = locked.future(host, look.status.get("VmLck"), known.gap)
        also(injection)
    return Told(of_process, buffer, told, lock_future, at)


@dataclass(frozen=True)
class Witness:
    """What a stopped process was like; asked again, it shows whether the process has moved."""

    threads: Mapping[int, bytes]  # by host tid: registers, signal mask, timer slack
    limits: bytes | None
    notes: Mapping[int, tuple[int, int]]  # by host tid: where the kernel notes its processor
    pages: Mapping[int, bytes]  # by address: what these lie in, without them
    switches: Mapping[int, int]  # by host tid: how often it has gone to sleep
    places: Mapping[int, tuple[int, int]]  # by host tid: stack pointer and instruction pointer

    @classmethod
    def of(cls, look: Look, tids: Sequence[int], memory_fd: int) -> Witness:
        """Of a process that has just been asked; OSError if its memory cannot be read."""
        notes = {}
        for tid in tids:
            rseq = look.thread(tid).rseq
            if rseq.address:
                notes[tid] = rseq.address, rseq.size
        return cls(
            {tid: _thread(look, tid) for tid in tids},
            look.file("limits"),
            notes,
            _pages(notes, memory_fd),
            {tid: now.switches for tid, now in activities(tids).items()},
            {tid: (r.rsp, r.rip) for tid in tids for r in (look.thread(tid).registers(),)},
        )

    def holds(
        self, look: Look, tids: Sequence[int], written: Sequence[tuple[int, int]], memory_fd: int
    ) -> bool:
        """Whether the process has not moved since; `written` are the ranges of pages written."""
        if (
            self.threads.keys() != set(tids)
            or look.file("limits") != self.limits
            or any(_thread(look, tid) != seen for tid, seen in self.threads.items())
            or any(may_be_another(look.thread(tid).registers()) for tid in tids)
            or any(_switches(look, tid) != count + 2 for tid, count in self.switches.items())
            or not self.expects(written)
        ):
            return False
        notes = {tid: (r.address, r.size) for tid in tids if (r := look.thread(tid).rseq).address}
        return notes == self.notes and _pages(notes, memory_fd) == self.pages

    def expects(self, written: Sequence[tuple[int, int]]) -> bool:
        """Whether these are pages in which the kernel notes something when threads go on."""
        return all(at in self.pages for low, high in written for at in range(low, high, PAGE))

    def asleep(self, counts: Mapping[int, int]) -> bool:
        """Whether threads that run on have gone to sleep once, and not woken up since."""
        return counts == {tid: count + 1 for tid, count in self.switches.items()}

    def rests(
        self,
        now: Mapping[int, Activity],
        written: Sequence[tuple[int, int]],
        memory_fd: int,
    ) -> bool:
        """The same of threads that run on: they wait where they were, and have written nothing.

        `now` was read before `written`.
        """
        return (
            self.asleep({tid: one.switches for tid, one in now.items()})
            and all(one.waits and not one.ends for one in now.values())
            and {tid: one.place for tid, one in now.items()} == self.places
            and self.expects(written)
            and _pages(self.notes, memory_fd) == self.pages
        )

    def again(self, look: Look) -> Witness:
        """The same process at the stop that has shown it to be still."""
        return replace(self, switches={tid: _switches(look, tid) for tid in self.switches})


def _thread(look: Look, tid: int) -> bytes:
    thread = look.thread(tid)
    registers = thread.registers()
    if registers.rax == _ERESTART_RESTARTBLOCK:
        registers.orig_rax = 0  # the same call comes as restart_syscall(2) the second time
    return registers.pack() + thread["mask"] + thread.slack


def _pages(notes: Mapping[int, tuple[int, int]], memory_fd: int) -> dict[int, bytes]:
    """The pages around notes of the kernel, with all but what the program itself writes there."""
    pages = {
        at: bytearray(os.pread(memory_fd, PAGE, at))
        for address, length in notes.values()
        for at in range(address & -PAGE, address + length, PAGE)
    }
    for address, length in notes.values():
        # cpu_id_start and cpu_id, node_id and mm_cid; between them is what the program writes
        for offset in (*range(8), *range(20, min(length, 28))):
            at = address + offset
            pages[at & -PAGE][at % PAGE] = 0
    return {at: bytes(page) for at, page in pages.items()}


def _switches(look: Look, tid: int) -> int:
    return int(look.thread(tid).status["voluntary_ctxt_switches"])


@lru_cache(maxsize=1024)
def _activities(count: int) -> Questions:
    ask = Questions()
    for who in range(count):
        ask.add(f"{who}", Kind.READ, "/proc/%2$d/status", who=who)
        ask.add(f"{who} call", Kind.READ, "/proc/%2$d/syscall", who=who)
    return ask


@dataclass(frozen=True)
class Activity:
    """What a thread that nobody has stopped is doing."""

    waits: bool
    may_be_late: bool  # a stop would make the call that it is in last longer
    ends: bool  # the call has a timeout
    place: tuple[int, int]  # stack pointer and instruction pointer; of one that waits
    switches: int  # how often it has gone to sleep


def activities(tids: Sequence[int]) -> dict[int, Activity]:
    """By host tid; without those that have ended."""
    answers = _activities(len(tids)).ask(tids)
    found = {}
    for index, tid in enumerate(tids):
        status, call = answers.get(f"{index}"), answers.get(f"{index} call")
        if status is not None and call is not None:
            state = status.split(b"\nState:\t", 1)[1][:1]
            count = status.rsplit(b"\nvoluntary_ctxt_switches:\t", 1)[1].split(b"\n", 1)[0]
            found[tid] = Activity(
                state == b"S", may_be_late(call), ends_by_itself(call), _place(call), int(count)
            )
    return found


def _place(call: bytes) -> tuple[int, int]:
    fields = call.split()
    return (int(fields[-2], 16), int(fields[-1], 16)) if len(fields) > 2 else (0, 0)


def rseq_abort(memory_fd: int, area: int, rip: int) -> int:
    """Where to continue when the thread was inside a restartable sequence; 0 when it was not."""
    section = struct.unpack("<Q", os.pread(memory_fd, 8, area + 8))[0]
    if not section:
        return 0
    _, _, start, length, abort = struct.unpack("<IIQQQ", os.pread(memory_fd, 32, section))
    return abort if start <= rip < start + length else 0
