"""One sandbox, as the keeper holds it: a live tree, its layer, the handles on its programs.

Three locks, always taken in this order:

- `operation` (a plain lock, taken through `operating`): checkpoint, rollback, fork and close of one
  sandbox exclude each other, nothing else.
- `steady`: while it is held the live tree is neither frozen nor replaced. Starting or killing a
  process takes it, so that no process can exist that a checkpoint has but no handle knows.
- `changed` (a condition): the handles, their buffers and the calls that wait. Held for
  microseconds; a checkpoint takes it at its instant, while every program is stopped. Nobody calls
  the live tree with it held, except to read exit reports.

A *call* is one caller that waits for something a program does. A checkpoint remembers which calls
were in flight at its instant. A rollback to it lets exactly these go on, now waiting for the
restored program, and ends all others with `RolledBack`. That is the whole rule; it needs no clock.
"""

from __future__ import annotations

import errno
import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..deltacr.engine import Live
from ..deltacr.model import External
from ..deltafs.layers import Layer
from ..errors import BranchStale, DeltaBoxError, RolledBack, SandboxClosed, StaleHandle
from ..linux import terminal as tty
from .handles import Handle, SavedHandle, nothing, portable, restored
from .identity import Identity, Registration, Registrations, find
from .streams import READ, Pump, Writer

if TYPE_CHECKING:
    from .nodes import Rested
    from .trees import Tree

log = logging.getLogger(__name__)


class Call:
    """A caller that waits. `gone` is set by the server when its connection has closed."""

    __slots__ = ("gone", "number", "rolled_back")

    def __init__(self, number: int) -> None:
        self.number = number
        self.rolled_back = False
        self.gone = False


class Busy(Exception):
    """Somebody else is at work on the sandbox, and it was not to be waited for."""


class CallerGone(Exception):
    """The caller has closed its connection; nobody waits for the answer any more."""


@dataclass(frozen=True)
class Origin:
    """Where a fork of a present state began: at which sandbox, after how many turns of it, and as
    which checkpoint.
    """

    box: Box
    turns: int
    node: str


@dataclass(frozen=True)
class Saved:
    """What a checkpoint keeps of the keeper's own state."""

    handles: tuple[SavedHandle, ...]
    calls: frozenset[int]
    author: str  # the sandbox it was taken of
    registered: tuple[Registration, ...]  # for a signal in forks


class Box:
    """A sandbox. Made by `Tree.boot` and `Tree.fork`, which own the order of things."""

    def __init__(self, tree: Tree, number: str, *, head: str | None, pump: Pump) -> None:
        self.tree = tree
        self.number = number  # a branch that is committed gets its parent's
        self.author = number  # this does not change
        self.authors = {number}  # with those of the sandboxes whose place it has taken
        self.origin: Origin | None = None
        self.turns = 0  # how often it has become another state, by a rollback
        self.head = head
        self.pump = pump
        self.live: Live
        self.layer: Layer
        self.handles: dict[int, Handle] = {}
        self.calls: dict[int, Call] = {}
        self.registrations = Registrations()
        self.identity: Identity | None = None  # of a fork that has its own
        self.steady = threading.Lock()
        self.changed = threading.Condition(threading.Lock())
        self.closing = False
        self.closed = False
        self.successor: Box | None = None  # a branch that has its number now
        self.dead = False
        self.generation = 0
        self.rested: Rested | None = None
        self.arrived: tuple[Live, object] | None = None  # at `head`, by a restore; with its traces
        self.in_vain = 0  # how much was captured ahead for nothing, see taking.py
        self._touches = 0
        self._touching = 0
        self._operation = threading.Lock()
        self._spawning = 0
        self._early: dict[int, int] = {}
        self._reports = -1

    # -- who may do what when ----------------------------------------------------------------

    @contextmanager
    def operating(self, what: str) -> Iterator[None]:
        """Exclude every other checkpoint, rollback, fork and close of this sandbox."""
        with self._operation:
            self.check_replaced()
            if self.closing:
                raise SandboxClosed(f"cannot {what}: the sandbox is closed")
            yield

    @contextmanager
    def present(self, turns: int) -> Iterator[None]:
        """As `operating`, if it has not turned into another state since; else BranchStale."""
        with self._operation:
            if self.turns != turns:
                raise BranchStale(
                    "the sandbox that the branch was made of has become another state meanwhile, "
                    "by a rollback or because another branch was committed"
                )
            if self.closing:
                raise SandboxClosed("cannot commit: the sandbox that it was made of is closed")
            yield

    @contextmanager
    def operating_if_free(self) -> Iterator[None]:
        """The same without waiting; raises `Busy` if it cannot be had at once."""
        if not self._operation.acquire(blocking=False):
            raise Busy
        try:
            if self.closing or self.dead:
                raise Busy
            yield
        finally:
            self._operation.release()

    @contextmanager
    def kept_steady(self, *, wait: bool) -> Iterator[None]:
        """`steady`; raises `Busy` if it would have to be waited for and must not.

        Who holds it may wait for the background, so that must not wait for it.
        """
        if not self.steady.acquire(blocking=wait):
            raise Busy
        try:
            yield
        finally:
            self.steady.release()

    @property
    def operates(self) -> bool:
        """Whether somebody waits for a checkpoint, a rollback, a fork or the end."""
        return self._operation.locked()

    def is_author(self, saved: Saved) -> bool:
        """Whether a state is this sandbox's own, so that to go back there is not to be copied."""
        return saved.author in self.authors

    def check_closed(self) -> None:
        """Raise if the sandbox has been closed. The condition is held."""
        self.check_replaced()
        if self.closing:
            raise SandboxClosed("the sandbox is closed")

    def check_replaced(self) -> None:
        """Raise if a request has come for what the sandbox no longer is."""
        if self.successor is not None:
            raise RolledBack("a branch was committed into the sandbox at this moment")

    def check_open(self) -> None:
        """Raise unless the sandbox runs. The condition is held."""
        self.check_closed()
        if self.dead:
            raise SandboxClosed(
                "the sandbox's first process was killed (perhaps out of memory), and with it all "
                "others; roll back to a checkpoint or close it"
            )

    @contextmanager
    def calling(self, attach: Callable[[Call], None] | None = None) -> Iterator[Call]:
        """A call in flight for the length of the block."""
        call = Call(self.tree.next_number())
        with self.changed:
            self.check_open()
            self.calls[call.number] = call
            self.live.ahead.disturb()
        try:
            if attach is not None:
                attach(call)
            yield call
        finally:
            with self.changed:
                self.calls.pop(call.number, None)
                for handle in [] if self.closing else list(self.handles.values()):
                    if handle.forget(call.number):
                        self._settle(handle)
                        self.changed.notify_all()
            self.tree.touch(self)  # the caller has an answer, and is likely to think about it

    @contextmanager
    def touching(self) -> Iterator[None]:
        """Something is done to the sandbox's state, other than by its programs and pipes."""
        with self.changed:
            self._touching += 1
            self._touches += 1
        try:
            yield
        finally:
            with self.changed:
                self._touching -= 1
                self._touches += 1

    def traces(self) -> object:
        """What is the same at two instants if nothing but its programs can have changed the state
        between them; like nothing else while somebody is about to. The condition is held.
        """
        if self._touching:
            return object()
        return self._touches, tuple(handle.traces() for handle in self.handles.values())

    def wait(self, call: Call, deadline: float | None) -> bool:
        """Wait until something has changed; False when the deadline (monotonic) has passed.

        Raises what ends the call: `RolledBack`, `SandboxClosed`, `CallerGone`.
        """
        self.check_call(call)
        if deadline is None:
            self.changed.wait()
        else:
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            self.changed.wait(min(left, threading.TIMEOUT_MAX))
        self.check_call(call)
        return True

    def check_call(self, call: Call) -> None:
        """Raise if the call must not go on. The condition is held."""
        if call.gone:
            raise CallerGone
        if call.rolled_back:
            raise RolledBack(
                "the sandbox was rolled back to a state from before this call began, or a branch "
                "that does not have the call was committed into it"
            )
        self.check_open()

    def handle(self, number: int) -> Handle:
        """The handle of this number. The condition is held."""
        self.check_open()
        handle = self.handles.get(number)
        if handle is None:
            raise StaleHandle(
                "this process was started after the state that the sandbox has been rolled back to"
            )
        return handle

    # -- programs ----------------------------------------------------------------------------

    def start(
        self,
        handle: Handle,
        *,
        argv: Sequence[bytes],
        env: Sequence[bytes],
        cwd: bytes,
        uid: int,
        gid: int,
        groups: Sequence[int],
        call: Call | None = None,
        prepare: Callable[[Handle], None] | None = None,
        size: tuple[int, int] = (24, 80),
    ) -> None:
        """Start a program and make `handle` its handle; `size` is that of its terminal."""
        owner = self.tree.owner
        with self.steady:
            with self.changed:
                if call is not None:
                    self.check_call(call)
                self.check_open()
                live = self.live
                ends = handle.open(owner, uid=uid, root=live.root, size=size)
                self._spawning += 1
            try:
                stdio = dict(ends)
                if 0 not in stdio:
                    stdio[0] = nothing(live.root)
                    ends[0] = stdio[0]
                spawn = functools.partial(
                    live.spawn,
                    argv=argv,
                    env=env,
                    cwd=cwd,
                    uid=uid,
                    gid=gid,
                    groups=groups,
                    stdio=stdio,
                    controlled=handle.terminal is not None,
                )
                try:
                    pid = spawn()
                except BlockingIOError:
                    # where limits are a tree's, an old process tree that is ending counts as well
                    self.tree.background.flush()
                    pid = spawn()
            except BaseException as error:
                with self.changed:
                    self._spawned()
                    handle.close()
                if isinstance(error, OSError) and error.errno == errno.EAGAIN:
                    raise BlockingIOError(
                        errno.EAGAIN, "no more processes: the sandbox's pids_limit is reached"
                    ) from None
                if isinstance(error, OSError) or not isinstance(error, Exception):
                    raise
                log.warning("%s: spawn", self.number, exc_info=True)
                raise DeltaBoxError(f"the command could not be started: {error}") from error
            finally:
                for fd in ends.values():
                    os.close(fd)
            with self.changed:
                handle.pid = pid
                handle.call = 0 if call is None else call.number
                self.handles[handle.number] = handle
                status = self._early.pop(pid, None)
                self._spawned()
                if prepare is not None:
                    prepare(handle)
                if status is not None:
                    handle.exited(status)
                    self._settle(handle)

    def _spawned(self) -> None:
        self._spawning -= 1
        if not self._spawning:
            self._early.clear()

    def on_reports(self, _events: int) -> None:
        """The live tree's PID 1 has something to report (pump's thread)."""
        with self.changed:
            if self._reports >= 0:
                self.reap()
                self.changed.notify_all()

    def reap(self) -> None:
        """Take the exit reports that have come. The condition is held."""
        try:
            exits = self.live.read_exits()
        except EOFError:
            self.unwatch()
            if not self.closing:
                log.warning("%s: its first process has died", self.number)
                self.dead = True
            return
        for exit in exits:
            status = os.waitstatus_to_exitcode(exit.status)
            for handle in self.handles.values():
                if handle.pid == exit.pid and handle.status is None:
                    handle.exited(status)
                    self._settle(handle)
                    break
            else:
                if self._spawning:
                    self._early[exit.pid] = status

    def _settle(self, handle: Handle) -> None:
        """Let go of a command that is over and that nobody waits for."""
        if handle.discard and handle.ended:
            self.handles.pop(handle.number, None)

    def kill(self, number: int, signum: int) -> None:
        """Send a signal to the process of a handle."""
        with self.touching(), self.steady:
            with self.changed:
                handle = self.handle(number)
                if handle.status is not None:
                    return
                live, pid = self.live, handle.pid
            try:
                live.kill(pid, signum)
            except ProcessLookupError:
                pass  # it has just ended

    def resize(self, number: int, rows: int, columns: int) -> None:
        """Give the terminal of a handle another size."""
        with self.touching(), self.steady, self.changed:
            handle = self.handle(number)
            if handle.terminal is None:
                raise DeltaBoxError("the process has no terminal; start it with tty=True")
            if handle.terminal.master >= 0:
                tty.resize(handle.terminal.master, rows, columns)

    def kill_tree(self, number: int) -> None:
        """Kill a handle's process with its session, group and descendants, if it still exists."""
        with self.steady:
            with self.changed:
                handle = self.handles.get(number)
                if handle is None or handle.status is not None or self.closing or self.dead:
                    return
                live, pid = self.live, handle.pid
            try:
                live.kill_tree(pid)
            except ProcessLookupError:
                pass

    def on_fork(self, number: int | None, pid: int, signum: int | None) -> None:
        """Register a process, of a handle or by its pid, for a signal in forks; None: no longer."""
        with self.steady:
            with self.changed:
                self.check_open()
                live = self.live
                if number is not None:
                    handle = self.handle(number)
                    if handle.status is not None:
                        raise ProcessLookupError(errno.ESRCH, "the process has ended")
                    pid = handle.pid
                if signum is None and self.registrations.remove(pid):
                    return
            task = find(live, pid)
            if signum is None:
                os.close(task)
                return
            with self.changed:
                self.registrations.add(pid, signum, task)

    # -- checkpoint and rollback -------------------------------------------------------------

    def hold(self) -> Mapping[str, External]:
        """Before a freeze: keep standard inputs still, and name the pipes. `steady` is held."""
        with self.changed:
            self.check_open()
            externals: dict[str, External] = {}
            for handle in self.handles.values():
                externals.update(handle.externals())
                if handle.stdin is not None:
                    handle.stdin.held = True
                if handle.command is not None:
                    handle.command = portable(handle.command)
            return externals

    def let_go(self) -> None:
        """After a freeze, or a restore: standard inputs flow again."""
        with self.changed:
            for handle in self.handles.values():
                if handle.stdin is not None:
                    handle.stdin.held = False
                    handle.stdin.flush()

    def save(self) -> Saved:
        """At the instant: take what the pipes hold and copy the state. The condition is held."""
        for handle in self.handles.values():
            handle.drain()
        self.reap()
        for number in [n for n, h in self.handles.items() if h.discard and h.ended]:
            del self.handles[number]
        return Saved(
            handles=tuple(handle.save() for handle in self.handles.values()),
            calls=frozenset(self.calls),
            author=self.author,
            registered=self.registrations.save(),
        )

    def rebuilt(
        self, saved: Saved, externals: dict[str, int], shut: list[Writer]
    ) -> dict[int, Handle]:
        """New handles, with new pipes, in a state that was saved."""
        handles: dict[int, Handle] = {}
        try:
            for state in saved.handles:
                handles[state.number] = restored(
                    state,
                    pump=self.pump,
                    changed=self.changed,
                    in_flight=self.calls.__contains__,
                    owner=self.tree.owner,
                    externals=externals,
                    shut=shut,
                )
        except BaseException:
            for handle in handles.values():
                handle.close()
            for fd in externals.values():
                os.close(fd)
            externals.clear()
            raise
        self.reconsider(saved, handles)
        return handles

    def reconsider(self, saved: Saved, handles: dict[int, Handle]) -> None:
        """Have rebuilt handles forget the callers that wait no longer. The condition is held."""

        def resumed(call: int) -> bool:
            return call in saved.calls and call in self.calls

        for handle in handles.values():
            handle.resume(resumed)

    def switch(
        self,
        live: Live,
        layer: Layer,
        handles: dict[int, Handle],
        registrations: Registrations,
        saved: Saved,
    ) -> None:
        """Make a restored tree the live one. The condition is held; cannot fail."""
        self.unwatch()
        self.registrations.close()
        self.live, self.layer, self.handles = live, layer, handles
        self.registrations = registrations
        self.dead = False
        self._early.clear()
        for number, call in self.calls.items():
            if number not in saved.calls:
                call.rolled_back = True
        for handle in list(handles.values()):
            # a caller may have gone since `rebuilt` asked
            if handle.kind == "run" and not handle.discard and handle.call not in self.calls:
                handle.abandon()
        self.watch()
        self.arrived = None if saved.registered else (live, self.traces())
        self.changed.notify_all()

    def silence(self) -> None:
        """The live tree is about to be ended by a rollback: hear no more of it."""
        self.unwatch()
        for handle in self.handles.values():
            for reader in handle.readers.values():
                reader.hold()

    def listen(self) -> None:
        """Take `silence` back."""
        for handle in self.handles.values():
            for reader in handle.readers.values():
                reader.held = False
                reader.resume()
        if not self.dead:
            self.watch()

    def watch(self) -> None:
        """Listen to the live tree's exit reports."""
        self._reports = self.live.reports.fileno()
        self.pump.watch(self._reports, READ, self.on_reports)

    def unwatch(self) -> None:
        """No longer listen to them; to be called before the live tree is ended."""
        if self._reports >= 0:
            self.pump.forget(self._reports)
            self._reports = -1

    def cut_off(self, successor: Box) -> None:
        """A branch takes its place: end every call that waits, and have no other branch come."""
        with self.changed:
            self.turns += 1
            self.closing = True
            self.successor = successor
            for call in self.calls.values():
                call.rolled_back = True
            self.changed.notify_all()

    def shut(self) -> None:
        """Refuse everything from now on and end every call that waits."""
        with self.changed:
            self.closing = True
            self.changed.notify_all()

    def describe(self) -> dict[str, Any]:
        """What the library needs to know of it."""
        return {"box": self.number, "tree": self.tree.name}


def gone(call: Call, box: Box) -> None:
    """Mark a call whose caller has closed its connection, and wake it."""
    with box.changed:
        call.gone = True
        box.changed.notify_all()
