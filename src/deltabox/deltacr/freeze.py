"""Stop a whole tree, and let it go again as if nothing had happened.

Every thread is seized and interrupted; passes over the group go on until one finds nobody new,
which is an end because stopped tasks create none.  The threads stay stopped inside the kernel's
signal path, so a call that was interrupted there is restarted by the kernel when we detach.  The
few calls that the kernel does not restart are put right by `interrupted.py`.

A parent in vfork(2) cannot be stopped until its child has called exec, and the child would be
stopped too.  So a freeze begins at a moment when nobody is in vfork.  When a thread still does not
stop, all are let go, as undisturbed as after a checkpoint, and the freeze is tried again a moment
later; the moments grow.  (That alone would not do: while the parent is seized the kernel keeps even
the SIGCHLD that nobody wants, and may wake another thread's rt_sigtimedwait with it.)

Rejected: the cgroup freezer alone (no registers), and staying seized between checkpoints (it
forbids gdb and strace inside and costs every signal a round trip).
"""

from __future__ import annotations

import contextlib
import errno
import functools
import gc
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache

from ..errors import CheckpointError
from ..linux import proc, ptrace, stop
from ..linux.ask import Answers, Kind, Questions
from .live import Live
from .peer import insist
from .records import CODE, CONTROL, FRAMES

log = logging.getLogger(__name__)

_MOMENT = 0.0005  # seconds of waiting in one call
_PATIENCE = 0.03  # seconds a thread may take to stop before all are let go for a moment
_VFORK_PATIENCE, _VFORK_LIMIT = 0.002, 0.5
_LIMIT = 5.0
_VFORKS = (b"56", b"58", b"435")  # clone, vfork, clone3


@dataclass
class Frozen:
    """Host ids of everything that is stopped, leaders first."""

    threads: dict[int, list[int]] = field(default_factory=dict)
    stops: dict[int, int] = field(default_factory=dict)  # tid -> signal of its group stop, or 0
    began: float = 0.0
    stopped: float = 0.0  # when the last of them had stopped
    complete: bool = False  # everybody is in it

    def tids(self) -> list[int]:
        return [tid for tids in self.threads.values() for tid in tids]


class _Unstoppable(Exception):
    pass


class _Uncollected:
    """No garbage is looked for within the block, in any thread.

    A capture makes thousands of objects. Looking whether they are garbage, again and again, took a
    tenth of the pause of a tree with twenty processes. (Rejected: to look more rarely altogether.
    Then an engine that makes and ends many sandboxes holds twice the memory.)
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._within = 0

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        with self._lock:
            self._within += 1
            gc.disable()
        try:
            yield
        finally:
            with self._lock:
                self._within -= 1
                if not self._within:
                    gc.enable()


_uncollected = _Uncollected()


@contextlib.contextmanager
def freeze(
    live: Live, put_back: Callable[[Frozen], None], *, limit: float = _LIMIT
) -> Iterator[Frozen]:
    """Everything but PID 1 is stopped inside the `with`. The caller's thread is the tracer.

    CheckpointError when that did not succeed within `limit` seconds. With a limit of 0 it is tried
    once, and not at all while somebody is in vfork: even an attempt may be noticed then.

    `put_back` is called before every thaw, also after an attempt that has failed: interrupted
    calls are put right there. Some of the threads may not be stopped then.
    """
    with _uncollected(), _stopped_all(live, put_back, limit) as frozen:
        yield frozen


@contextlib.contextmanager
def _stopped_all(live: Live, put_back: Callable[[Frozen], None], limit: float) -> Iterator[Frozen]:
    deadline = time.monotonic() + limit
    moment = 0.001
    while True:
        calm, tasks = _await_vforks(live, min(limit, _VFORK_LIMIT))
        if not calm and not limit:
            raise CheckpointError("a program is just being started")
        frozen = Frozen(began=time.monotonic())
        try:
            _stop_all(live, frozen, tasks)
            frozen.stopped = time.monotonic()
            frozen.complete = True
            break
        except _Unstoppable as error:
            _give_up(frozen, put_back)
            if time.monotonic() > deadline:
                raise CheckpointError(f"{error} did not stop within {limit:.0f} s") from None
            time.sleep(moment)
            moment = min(2 * moment, 0.1)
        except BaseException:
            _give_up(frozen, put_back)
            raise
    try:
        yield frozen
    finally:
        try:
            put_back(frozen)
        finally:
            _thaw(frozen, put_back)


def _give_up(frozen: Frozen, put_back: Callable[[Frozen], None]) -> None:
    frozen.stopped = time.monotonic()
    try:
        put_back(frozen)
    finally:
        _thaw(frozen, put_back)


def _stop_all(live: Live, frozen: Frozen, tasks: list[tuple[int, int]]) -> None:
    """Stop everybody; `tasks` are those that were there a moment ago."""
    known: set[int] = set()
    while True:
        fresh = {tid: pid for pid, tid in tasks or _tasks(live) if tid not in known}
        if not fresh:
            _check_settled(live, frozen)
            return
        known |= fresh.keys()
        waiting: dict[int, int] = {}
        # main threads last: as long as one is not traced, signals that it ignores are not sent
        order = sorted(fresh, key=lambda tid: tid == fresh[tid])
        try:
            refused = dict(zip(order, stop.seize(order, ptrace.O_TRACESYSGOOD), strict=True))
        finally:
            for tid, pid in fresh.items():
                # ours from here on: whatever happens next, the thaw must let it go
                frozen.threads.setdefault(pid, []).append(tid)
                frozen.stops[tid] = 0
        for tid, pid in fresh.items():
            error = refused[tid]
            if error:
                _forget(frozen, tid)
                _check_refused(tid, error)
            else:
                waiting[tid] = pid
        _await(frozen, waiting)
        for pid in [pid for pid, tids in frozen.threads.items() if not tids]:
            del frozen.threads[pid]
        tasks = _tasks(live)


def _await(frozen: Frozen, waiting: dict[int, int]) -> None:
    """Wait until each of them has stopped, or is gone."""
    until = time.monotonic() + _PATIENCE
    look = time.monotonic() + _VFORK_PATIENCE
    while waiting:
        for tid, status in zip(
            list(waiting), stop.await_stops(list(waiting), _MOMENT), strict=True
        ):
            if status is not None and _stopped(frozen, tid, status):
                del waiting[tid]
        now = time.monotonic()
        if waiting and (now > until or (now > look and all(_in_vfork(tid) for tid in waiting))):
            tid, pid = next(iter(waiting.items()))
            raise _Unstoppable(f"thread {tid} of host process {pid}")


def _await_vforks(live: Live, limit: float) -> tuple[bool, list[tuple[int, int]]]:
    """Wait for a moment when no thread is in vfork; whether there was one, and the last tasks."""
    until = time.monotonic() + limit
    while True:
        tasks = _tasks(live)
        tids = [tid for _, tid in tasks]
        answers = _stats(len(tids)).ask(tids)
        waiting = [t for t, name in zip(tids, answers.names, strict=True) if _waits(answers, name)]
        if not any(_in_vfork(tid) for tid in waiting):
            return True, tasks
        if time.monotonic() > until:
            return False, tasks
        time.sleep(0.001)


def _waits(answers: Answers, name: str) -> bool:
    """Whether a stat shows somebody who waits and cannot be woken, as in vfork."""
    stat = answers.get(name)
    return stat is not None and stat.startswith(b"D", stat.rindex(b")") + 2)


@lru_cache(maxsize=1024)
def _stats(count: int) -> Questions:
    ask = Questions()
    for who in range(count):
        ask.add(str(who), Kind.READ, "/proc/%2$d/stat", who=who)
    return ask


def _tasks(live: Live) -> list[tuple[int, int]]:
    """(pid, tid) on the host of all threads but PID 1's."""
    return [(pid, tid) for pid, tid in stop.tasks(live.group) if pid != live.init]


def _in_vfork(tid: int) -> bool:
    """Whether a thread waits for its child to call exec."""
    try:
        stat = proc.read(f"/proc/{tid}/stat")
        if not stat.startswith(b"D", stat.rindex(b")") + 2):
            return False
        call = proc.read(f"/proc/{tid}/syscall").split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return call in _VFORKS


def _check_settled(live: Live, frozen: Frozen) -> None:
    """A thread that was just restored may still be on its way back to its captured instant.

    A stopped job stays on that way until it is continued; `capture` knows what it waits to become.
    """
    if live.origin is None:
        return
    for tid in frozen.tids():
        if not frozen.stops[tid] and in_interpreter(ptrace.get_registers(tid).rip):
            raise _Unstoppable(f"restored thread {tid}")


def in_interpreter(address: int) -> bool:
    """In our code, or in the last steps of a thread that gets its filters back."""
    return CODE <= address < CODE + 0x10_0000 or FRAMES <= address < CONTROL


def _check_refused(tid: int, error: int) -> None:
    """Raise why a thread could not be seized, unless it is gone."""
    if error == errno.ESRCH:
        return
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        state = proc.stat(tid)
        if state.state in "ZX":
            return
        tracer = proc.status(tid).get("TracerPid", "0")
        if error == errno.EPERM and tracer not in ("0", str(os.getpid())):
            raise CheckpointError(
                f"{state.comm} is being traced by another program (a debugger or strace)"
            )
        raise OSError(error, os.strerror(error))


def _stopped(frozen: Frozen, tid: int, status: int) -> bool:
    """Look at a wait status; True when the thread is where we want it, or gone."""
    if not os.WIFSTOPPED(status):
        _forget(frozen, tid)
        return True
    signum = ptrace.stop_signal(status)
    if ptrace.is_event_stop(status):
        frozen.stops[tid] = 0 if signum == 5 else signum
        return True
    # It was stopping for a signal of its own: hand that over, and stop right after it.
    event = status >> 16
    with contextlib.suppress(ProcessLookupError):
        insist(lambda: ptrace.interrupt(tid))
        insist(lambda: ptrace.resume(tid, 0 if event else signum))
    return False


def _forget(frozen: Frozen, tid: int) -> None:
    frozen.stops.pop(tid, None)
    for tids in frozen.threads.values():
        if tid in tids:
            tids.remove(tid)


def _thaw(frozen: Frozen, put_back: Callable[[Frozen], None]) -> None:
    """Let every thread go; one that resists must not keep other processes stopped.

    It does keep the threads of its own.  A traced process is sent even the signals that it ignores
    (sig_ignored() in kernel/signal.c), such as the end of a child; a thread that runs is woken for
    one in place of the traced one, and its sigtimedwait(2) would end with EINTR.
    """
    resisting: dict[int, int] = {}
    held: dict[int, list[int]] = {}
    everybody = frozen.tids()
    # not stopped: a freeze given up half-way, or killed meanwhile
    at_rest = dict(zip(everybody, stop.stopped(everybody), strict=True))
    free: list[int] = []
    for pid, tids in frozen.threads.items():
        slow = [tid for tid in tids if not at_rest[tid]]
        resisting |= dict.fromkeys(slow, pid)
        rest = [tid for tid in tids if at_rest[tid]]
        if slow:
            held[pid] = rest
        else:
            free += rest
    _detach(free)
    if resisting:
        _detach_resisting(resisting, held, frozen.began, put_back)


def _detach(tids: list[int]) -> None:
    for tid, error in zip(tids, stop.detach(tids), strict=True):
        if error not in (0, errno.ESRCH):
            log.error("host thread %d could not be detached: %s", tid, os.strerror(error))


def _detach_resisting(
    resisting: dict[int, int],
    held: dict[int, list[int]],
    began: float,
    put_back: Callable[[Frozen], None],
) -> None:
    """Detaching needs a stop, to which a thread in vfork comes when its child has called exec.

    All of them are looked at in turn: that child may be another one of them.
    """
    for tid in resisting:
        with contextlib.suppress(ProcessLookupError):
            insist(functools.partial(ptrace.interrupt, tid))  # it may not have been asked yet
    deadline = time.monotonic() + _LIMIT
    left = dict(resisting)
    while left and time.monotonic() < deadline:
        left = {tid: pid for tid, pid in left.items() if not _detached(tid, pid, began, put_back)}
        for pid in held.keys() - left.values():
            _detach(held.pop(pid))
        if left:
            time.sleep(0.0002)
    for tid in left:
        log.warning("host thread %d could not be detached", tid)
    for tids in held.values():
        _detach(tids)


def _detached(tid: int, pid: int, began: float, put_back: Callable[[Frozen], None]) -> bool:
    """Look once; True when the thread is let go, or gone."""
    try:
        status = ptrace.wait(tid, block=False)
    except ChildProcessError:
        return True
    if status is None:
        return False
    if not os.WIFSTOPPED(status):
        return True
    held_back = 0 if status >> 16 else ptrace.stop_signal(status)
    try:
        if not held_back:
            # it was slow to stop, and our interruption has ended the call it was in all the same
            put_back(Frozen({pid: [tid]}, {tid: 0}, began, time.monotonic()))
    finally:
        with contextlib.suppress(ProcessLookupError):
            insist(functools.partial(ptrace.detach_with, tid, held_back))
    return True
