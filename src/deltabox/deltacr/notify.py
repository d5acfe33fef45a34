"""Queue a signal in a restored tree before it executes any instruction.

A restored tree waits at its barrier with all signals blocked until rt_sigreturn(2) sets its masks,
so what is sent now is delivered before anything else happens.  It goes to the thread that the
kernel would choose (complete_signal() in kernel/signal.c): the first that does not block it, the
main one before others.

A thread that was in a blocking call when it was captured is restored just before that call, which
would begin again after the handler and perhaps never end: Python, for one, runs its handlers
only when the call has returned.  So where the kernel would have ended the call with EINTR
(signal(7)), the waiting frame is changed to have it ended.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from ..linux import signals as kernel
from ..linux.proc import inside_pid, threads
from . import frame
from .interrupted import ended_by_handler
from .model import Capture, Process, Thread
from .objects import signals
from .records import FRAMES


def queue(hosts: Mapping[int, int], capture: Capture, wanted: Mapping[int, int]) -> None:
    """`hosts` are the host pids by pid inside; `wanted` the signals by pid inside."""
    for pid, number in wanted.items():
        process = capture.by_pid.get(pid)
        if process is None or process.zombie is not None:
            continue
        host = hosts[pid]
        taker = next((t for t in process.threads if not t.sigmask >> (number - 1) & 1), None)
        if taker is None:
            kernel.kill(host, number)  # it stays pending until somebody asks for it
            continue
        _interrupt(host, process, taker, number)
        kernel.tgkill(host, _host_tid(host, process, taker), number)


def _interrupt(host: int, process: Process, thread: Thread, number: int) -> None:
    """Let the call that the thread is in end with EINTR, if the handler would end it."""
    handler, flags = signals.handler_of(process.sigactions[number - 1])
    if handler <= 1 or thread.blocked is None:
        return
    registers = ended_by_handler(thread.blocked, flags)
    if registers is None:
        return
    offset, content = frame.registers(process.threads, thread, registers)
    fd = os.open(f"/proc/{host}/mem", os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.pwrite(fd, content, FRAMES + offset)
    finally:
        os.close(fd)


def _host_tid(host: int, process: Process, thread: Thread) -> int:
    if thread.tid == process.pid:
        return host
    return next(tid for tid in threads(host) if inside_pid(tid) == thread.tid)
