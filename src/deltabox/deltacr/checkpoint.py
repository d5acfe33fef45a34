"""Take a checkpoint: freeze, capture, copy, thaw, compile.

Between freeze and thaw only what needs the tree to stand still is done: the capture, the copy of
the pages into the template, and the caller's `at_instant` (the file system's snapshot), which is
begun first and waited for last.  The program is compiled after the tree runs again: at once if it
could turn out that there is none, else when it is wanted, which is in the keeper's background.
Whatever fails, the tree is thawed as it was.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import resource
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import TypeVar

from ..errors import CheckpointError, DeltaBoxError
from ..linux import ptrace
from . import verify
from .capture import Capturing
from .freeze import Frozen, freeze
from .interrupted import Waits
from .live import Live
from .model import PAGE, External
from .model import Mapping as Vma
from .objects.ghosts import Attic
from .objects.seccomp import forbids_restart
from .peer import PeerGone, ProgramFailed, insist
from .plain import is_plain
from .program import compile_program
from .stash import feed, plan
from .template import Stats, Template

log = logging.getLogger(__name__)
T = TypeVar("T")

_PROGRAMS = 256 << 10  # bytes that a template's programs take, mostly

# begins what another keeps of the instant; gives (wait for it, finish it after the thaw)
AtInstant = Callable[[], AbstractContextManager[tuple[Callable[[], None], Callable[[], T]]]]


def take(
    live: Live,
    blank: Template,
    *,
    owner: int,
    network: str,
    base: int,
    reference: int,
    born: float,
    on_external: str,
    externals: Mapping[str, External],
    attic: Attic,
    at_instant: AtInstant[T],
) -> tuple[Template, T]:
    """Fill `blank` with the tree's state at one instant; it is the checkpoint's template then.

    It may be a fork of the template before: then only the pages that differ are written.

    Raises UnsupportedState when something could not be given back, CheckpointError otherwise; the
    tree runs on in both cases.
    """
    started = time.monotonic()
    with live.lock:
        capturing = None
        try:
            put_back = functools.partial(undisturbed, waits=live.waits)
            with ExitStack() as after:
                with freeze(live, put_back) as frozen:
                    wait, finish = after.enter_context(at_instant())
                    capturing = Capturing(
                        live,
                        frozen,
                        blank,
                        owner=owner,
                        externals=externals,
                        base=base,
                        born=born,
                        attic=attic,
                        on_external=on_external,
                    )
                    capturing.gather()
                    changed = _feed(blank, capturing, reference)
                    if verify.ENABLED and blank.stash is not None:
                        verify.check(
                            blank.pid_outside,
                            blank.stash,
                            capturing.processes(),
                            capturing.kernel_areas(),
                        )
                    wait()
                pause = time.monotonic() - frozen.began
                result = finish()
            seen = capturing.finish()
            live.forget_others(frozen.threads)
            for space in live.spaces.values():
                space.settled()
        except BaseException as error:
            if capturing is not None:
                capturing.give_up()
            if not isinstance(error, DeltaBoxError) and isinstance(
                error, (ProgramFailed, PeerGone, OSError)
            ):
                raise CheckpointError(f"the tree could not be captured: {error}") from error
            raise
    assert blank.stash is not None
    blank.shared = [one.table for one in seen.shared]
    limits = [_limit(which) for which in range(16)]
    blank.compile_later(
        functools.partial(compile_program, seen, blank.stash, network=network, limits=limits)
    )
    programs = _PROGRAMS
    if not is_plain(seen, limits):  # what cannot be compiled is refused now
        programs = max(programs, len(blank.sealed.content))  # what is in queues may be large
    blank.capture = seen
    blank.known = {
        p.pid: found.known
        for p in seen.processes
        if (found := live.spaces.get(p.host_pid)) is not None and found.known is not None
    }
    blank.externals = [d.key for d in seen.descriptions if d.kind == "external"]
    whole = blank.whole
    blank.resize(own=changed, whole=whole, extra=programs)
    blank.stats = Stats(
        pause_ms=pause * 1e3,
        total_ms=(time.monotonic() - started) * 1e3,
        dirty_bytes=changed + capturing.changed_shared,
        processes=len(seen.processes),
    )
    return blank, result


def _feed(blank: Template, capturing: Capturing, reference: int) -> int:
    """Read the tree's pages into the template; bytes that were written there."""
    processes, changes = capturing.processes(), capturing.changes
    mappings = {p.pid: p.mappings for p in processes}
    if _holds(blank, mappings) and not any(len(c.pages) for c in changes.values()):
        return blank.read_ahead
    stash = plan(processes, blank.stash)
    whole = sum(stash.sizes().values())
    feeding = feed(processes, stash, blank.stash, reference, changes)
    try:
        blank.resize(own=feeding.most(blank.read_ahead, whole), whole=whole)
        run = blank.peer.run(feeding.whole().seal(), 0, feeding.fds, copies=whole)
    finally:
        feeding.close()
    blank.stash, blank.mappings = stash, mappings
    return blank.read_ahead + feeding.pulled + run.variable(feeding.copied) * PAGE


def _holds(template: Template, mappings: dict[int, tuple[Vma, ...]]) -> bool:
    """Whether a template was fed for these very mappings with these pages."""
    held = template.mappings
    return (
        template.stash is not None
        and held.keys() == mappings.keys()
        and all(held[p] is m for p, m in mappings.items())
    )


@contextlib.contextmanager
def still(live: Live) -> Iterator[None]:
    """No program runs within the block. The caller's thread must do all of it."""
    put_back = functools.partial(undisturbed, waits=live.waits)
    with live.lock, freeze(live, put_back):
        yield


def undisturbed(frozen: Frozen, waits: Waits) -> None:
    """Before the thaw, calls that the kernel would end with EINTR are put back."""
    for pid, tids in frozen.threads.items():
        try:
            memory_fd = os.open(f"/proc/{pid}/mem", os.O_RDWR | os.O_CLOEXEC)
        except (FileNotFoundError, ProcessLookupError):
            log.debug("process %d was killed while it was frozen", pid)
            continue
        try:
            for tid in tids:
                insist(functools.partial(_put_back, tid, memory_fd, frozen, waits))
        finally:
            os.close(memory_fd)
    if frozen.complete:
        waits.forget_others(set(frozen.tids()))


def _put_back(tid: int, memory_fd: int, frozen: Frozen, waits: Waits) -> None:
    try:
        registers = ptrace.get_registers(tid)
        fixed = waits.live(tid, registers, memory_fd, frozen.began, frozen.stopped, forbids_restart)
        if fixed is not None:
            ptrace.set_registers(tid, fixed)
    except ProcessLookupError:
        log.debug("thread %d was killed, or had not stopped yet", tid)


def _limit(which: int) -> tuple[int, int]:
    soft, hard = resource.getrlimit(which)
    return soft & ((1 << 64) - 1), hard & ((1 << 64) - 1)
