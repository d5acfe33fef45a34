"""Signal handlers, pending signals, alternate stacks (sigaction(2), PTRACE_PEEKSIGINFO).

Handlers are asked for by injection, because /proc shows only which signals are caught.  Pending
signals are queued again by the thread itself: the kernel lets a process send itself any siginfo
(rt_sigqueueinfo(2)).  Everything stays blocked until rt_sigreturn sets the captured mask, and that
also restores the alternate stack from the frame.
"""

from __future__ import annotations

import signal
import struct

from ...linux import numbers as nr
from ..model import Process, Thread
from ..records import Program, Ref, Sequence
from ..subject import Refuse

SIGNALS = 64
SIGACTION_SIZE = 32
ALTSTACK_SIZE = 24
_DEFAULT = bytes(SIGACTION_SIZE)
_UNSETTABLE = (9, 19)
_IGNORE = 1
_IGNORED_BY_DEFAULT = (17, 23, 28)  # SIGCHLD, SIGURG, SIGWINCH


def capture_calls(buffer: int) -> list[tuple[int, ...]]:
    """Injected calls that write all handlers to `buffer`, 32 bytes each."""
    return [
        (nr.RT_SIGACTION, number, 0, buffer + (number - 1) * SIGACTION_SIZE, 8)
        for number in range(1, SIGNALS + 1)
    ]


def parse(buffer: bytes) -> tuple[bytes, ...]:
    return tuple(buffer[i * 32 : i * 32 + 32] for i in range(SIGNALS))


def handler_of(action: bytes) -> tuple[int, int]:
    """(handler address, sa_flags)."""
    handler, flags = struct.unpack_from("<QQ", action)
    return handler, flags


def handled(actions: tuple[bytes, ...]) -> int:
    """The signals that run a handler, bit 0 for signal 1."""
    return sum(1 << i for i, action in enumerate(actions) if handler_of(action)[0] > 1)


def first_handler(actions: tuple[bytes, ...], mask: int, pending: tuple[bytes, ...]) -> int | None:
    """sa_flags of the handler that a deliverable pending signal would run, or None."""
    for info in pending:
        number = struct.unpack_from("<i", info)[0]
        if mask >> (number - 1) & 1:
            continue
        handler, flags = handler_of(actions[number - 1])
        if handler > 1:
            return flags
    return None


def lasting(pending: tuple[bytes, ...], stopped: int, refuse: Refuse) -> tuple[bytes, ...]:
    """The pending signals without SIGSTOP, which nothing can hold back in a restored process.

    To one that is stopped it means nothing, because SIGCONT takes it back. Any other is about to
    stop, within microseconds of the thaw, and is refused until then.
    """
    found = tuple(info for info in pending if struct.unpack_from("<i", info)[0] != signal.SIGSTOP)
    if len(found) != len(pending) and not stopped:
        raise refuse("is about to be stopped by a SIGSTOP", "signal")
    return found


def restore_handlers(program: Program, do: Sequence, process: Process) -> None:
    """Every disposition that is not the default; a rebuilt process starts with defaults."""
    for index, action in enumerate(process.sigactions):
        if action[:8] != _DEFAULT[:8] and index + 1 not in _UNSETTABLE:
            do.call(nr.RT_SIGACTION, index + 1, program.data(action), 0, 8, what="sigaction")


def unblock_ignored(program: Program, do: Sequence, process: Process) -> None:
    """Let the main thread's mask lie open for what is ignored anyway, before anybody goes on.

    A blocked signal is never ignored (sig_ignored() in kernel/signal.c), but queued: a child that
    ends while its parent's main thread is still on its way out would wake another thread, whose
    sigtimedwait(2) would end with EINTR.
    """
    ignored = 0
    for index, action in enumerate(process.sigactions):
        handler = handler_of(action)[0]
        if handler == _IGNORE or (handler == 0 and index + 1 in _IGNORED_BY_DEFAULT):
            ignored |= 1 << index
    mask = ((1 << 64) - 1) & ~(ignored & ~process.threads[0].sigmask)
    do.call(nr.RT_SIGPROCMASK, 2, program.data(struct.pack("<Q", mask)), 0, 8, what="ignored")


def drop_child_signal(program: Program, do: Sequence, none: Ref, mask: Ref) -> None:
    """Take back the SIGCHLD that rebuilding zombies and stopped children has sent."""
    do.call(nr.RT_SIGTIMEDWAIT, mask, 0, none, 8, may_fail=True)


def restore_pending(program: Program, do: Sequence, process: Process, thread: Thread) -> None:
    for info in thread.pending:
        number = struct.unpack_from("<i", info)[0]
        do.call(
            nr.RT_TGSIGQUEUEINFO,
            process.pid,
            thread.tid,
            number,
            program.data(info),
            what=f"queue signal {number}",
        )
    if thread is process.threads[0]:
        for info in process.pending:
            number = struct.unpack_from("<i", info)[0]
            do.call(
                nr.RT_SIGQUEUEINFO,
                process.pid,
                number,
                program.data(info),
                what=f"queue signal {number}",
            )
