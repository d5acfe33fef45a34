"""Programs and their streams, as requests: run, spawn, shell, read, write, wait.

Every function that waits does so in one loop under the sandbox's condition, and looks its handle up
again each time it wakes: after a rollback the same number stands for another, restored process.
`Box.wait` raises what ends a call (`RolledBack`, `SandboxClosed`, the caller's going away), so the
loops contain only what they wait for.

A shell is `bash` reading commands from its standard input, a pipe. A command is sent as

    eval '<the command>' </dev/null 3>&-
    { __deltabox <number>; } 2>/dev/null

and the function writes `<number> <status>` to fd 3, a pipe to us, and returns the status so that
`$?` is right in the next command. `eval` in the shell itself is what keeps variables, directory,
functions and jobs; standard input is `/dev/null` because a command that reads would otherwise eat
the commands that follow; fd 3 is closed for the command, so that no program of it can keep it open
or write to it. bash reads a pipe byte by byte, so nothing of a next command ever hides in a buffer
inside the process, which makes a shell easy to checkpoint.

A shell with a terminal has that as 0, 1 and 2, also for its commands. Its commands come over a pipe
of their own, fd 4, which it opens as its script and closes for everybody else; bash reads a script
that cannot be seeked byte by byte too.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Final, TypeVar

from ..deltafs.inside import Inside
from ..errors import CommandTimeout, DeltaBoxError, RolledBack
from .accounts import ROOT, look_up
from .box import Box, Call, CallerGone
from .handles import COMMANDS, PROCESS, RUN, SHELL, Command, Done, Handle, portable, sent
from .streams import FULL, Kept, Reader, Unread
from .terminal import TYPE

log = logging.getLogger(__name__)
T = TypeVar("T")

Attach = Callable[[Call], None]
Size = tuple[int, int]
_PRELUDE: Final = (
    b"""__deltabox() { local s=$?; printf '%d %d\\n' "$1" "$s" >&3; return "$s"; }\n"""
)


# -- starting ------------------------------------------------------------------------------------


def _launch(
    box: Box,
    handle: Handle,
    *,
    argv: Sequence[str | bytes],
    env: Mapping[str, str],
    cwd: str,
    user: str | int | None,
    call: Call | None = None,
    prepare: Callable[[Handle], None] | None = None,
    size: Size | None = None,
) -> None:
    account = ROOT if user is None else with_files(box, lambda i: look_up(i, user), looks=True)
    environment = account.environment()
    if handle.terminal is not None:
        environment["TERM"] = TYPE
    environment |= dict(env)
    box.start(
        handle,
        argv=[os.fsencode(word) for word in argv],
        env=[os.fsencode(f"{key}={value}") for key, value in environment.items()],
        cwd=os.fsencode(cwd),
        uid=account.uid,
        gid=account.gid,
        groups=account.groups,
        call=call,
        prepare=prepare,
        size=size or (24, 80),
    )


def with_files(box: Box, work: Callable[[Inside], T], *, looks: bool = False) -> T:
    """Do something with the sandbox's files, in the root as it is now; with `looks` only look."""
    with nullcontext() if looks and not box.live.is_watched else box.touching():
        with box.changed:
            box.check_open()
            root = os.dup(box.live.root)
        try:
            return work(Inside(root, box.tree.owner))
        finally:
            os.close(root)


def _handle(box: Box, kind: str, label: str, *, stdin: bool, terminal: bool = False) -> Handle:
    return Handle(
        box.tree.next_number(),
        kind,
        label,
        pump=box.pump,
        changed=box.changed,
        in_flight=box.calls.__contains__,
        stdin=stdin,
        terminal=terminal,
    )


def spawn(
    box: Box,
    *,
    argv: Sequence[str | bytes],
    env: Mapping[str, str],
    cwd: str,
    user: str | int | None,
    tty: Size | None = None,
) -> dict[str, Any]:
    """Start a program that the caller talks to, on a terminal when `tty` gives its size."""
    label = os.fsdecode(argv[0])
    handle = _handle(box, PROCESS, label, stdin=True, terminal=tty is not None)
    _launch(box, handle, argv=argv, env=env, cwd=cwd, user=user, size=tty)
    return {"handle": handle.number, "pid": handle.pid}


def open_shell(
    box: Box,
    *,
    env: Mapping[str, str],
    cwd: str,
    user: str | int | None,
    tty: Size | None = None,
) -> dict[str, Any]:
    """Start a shell."""
    handle = _handle(box, SHELL, "bash", stdin=True, terminal=tty is not None)
    argv = ["bash", "--norc", "--noprofile"]
    prelude = _PRELUDE
    if tty is not None:
        argv.append(f"/dev/fd/{COMMANDS}")
        prelude += b"exec %d<&-; BASH_ARGV0=bash\n" % COMMANDS

    def prepare(started: Handle) -> None:
        assert started.stdin is not None
        started.stdin.add(prelude)

    _launch(box, handle, argv=argv, env=env, cwd=cwd, user=user, prepare=prepare, size=tty)
    return {"handle": handle.number, "pid": handle.pid}


# -- run -----------------------------------------------------------------------------------------


def run(
    box: Box,
    *,
    argv: Sequence[str | bytes],
    env: Mapping[str, str],
    cwd: str,
    user: str | int | None,
    input: bytes | None,
    timeout: float | None,
    stream: bool,
    attach: Attach,
    event: Callable[[bytes], None],
) -> dict[str, Any]:
    """Run a command to its end. It ends when its first process does, whoever holds its pipes."""
    deadline = None if timeout is None else time.monotonic() + timeout
    handle = _handle(box, RUN, os.fsdecode(argv[0]), stdin=input is not None)
    number = handle.number
    if stream:
        handle.readers["stdout"].live = deque()

    def prepare(started: Handle) -> None:
        if started.stdin is not None and input is not None:
            started.stdin.add(input)
            started.stdin.finish()

    with box.calling(attach) as call:
        _launch(box, handle, argv=argv, env=env, cwd=cwd, user=user, call=call, prepare=prepare)
        try:
            done = _run_to_end(box, number, call, deadline, event)
            if done is None:
                box.kill_tree(number)
                out, err, _ = _collect(box, number)
                raise CommandTimeout(
                    f"the command did not end within {timeout:g} s and was killed",
                    stdout=out,
                    stderr=err,
                )
        except (CallerGone, OSError, KeyboardInterrupt):
            box.kill_tree(number)
            raise
    return _answer(done)


def _answer(done: Done) -> dict[str, Any]:
    return {
        "exit_code": done.status,
        "stdout": done.stdout,
        "stderr": done.stderr,
        "truncated": done.truncated,
    }


def _run_to_end(
    box: Box,
    number: int,
    call: Call,
    deadline: float | None,
    event: Callable[[bytes], None],
) -> Done | None:
    """Wait for a command's end, streaming its output; None when the deadline has passed.

    Its end is seen and what it wrote taken at one instant: with a rollback between the two, the
    number would stand for a command that has not ended, or for none.
    """
    while True:
        with box.changed:
            while True:
                box.check_call(call)
                handle = box.handles.get(number)
                if handle is None:
                    raise RolledBack("the sandbox was rolled back to a state before this command")
                out = handle.readers["stdout"]
                if out.live:
                    data = b"".join(out.live)
                    out.live.clear()
                    out.resume()
                    break
                if handle.status is not None:
                    return Done(call.number, handle.status, *_take(handle))
                if not box.wait(call, deadline):
                    return None
        event(data)


def _take(handle: Handle) -> tuple[bytes, bytes, bool]:
    out, err = handle.readers["stdout"].buffer, handle.readers["stderr"].buffer
    assert isinstance(out, Kept) and isinstance(err, Kept)
    stdout, cut_out = out.take()
    stderr, cut_err = err.take()
    return stdout, stderr, cut_out or cut_err


def _collect(box: Box, number: int) -> tuple[bytes, bytes, bool]:
    """What a command that was cut off has written."""
    with box.changed:
        handle = box.handles.get(number)
        if handle is None:
            return b"", b"", False
        handle.drain()
        return _take(handle)


# -- shell ---------------------------------------------------------------------------------------


def shell_run(
    box: Box, number: int, *, command: bytes, timeout: float | None, attach: Attach
) -> dict[str, Any]:
    """Run a command in a shell. One at a time: others wait for their turn."""
    if b"\0" in command:
        raise ValueError("a shell command cannot contain a NUL byte")
    deadline = None if timeout is None else time.monotonic() + timeout
    with box.calling(attach) as call:
        try:
            done = _in_turn(box, number, call, command, deadline)
            if done is None:
                out, err = _cut_off(box, number, call)
                raise CommandTimeout(
                    f"the command did not end within {timeout:g} s and was killed",
                    stdout=out,
                    stderr=err,
                )
        except CallerGone:
            call.gone = False
            _cut_off(box, number, call)
            raise
    return _answer(done)


def _in_turn(
    box: Box, number: int, call: Call, command: bytes, deadline: float | None
) -> Done | None:
    """Wait for the shell to be free, send the command, wait for its end; None: out of time."""
    while True:
        with box.changed:
            while True:
                box.check_call(call)
                handle = box.handle(number)
                mine = [key for key, done in handle.results.items() if done.call == call.number]
                if mine:
                    return handle.results.pop(mine[0])
                current = handle.command
                if current is None:
                    if handle.status is not None:
                        raise DeltaBoxError(f"the shell has ended with exit code {handle.status}")
                    handle.command = Command(box.tree.next_number(), call.number)
                    break
                if current.call == call.number and not current.sent:
                    break  # a rollback to the moment before it was sent
                if not box.wait(call, deadline):
                    return None
        before = _members(box)
        with box.changed:
            box.check_call(call)
            handle = box.handle(number)
            current = handle.command
            if current is None or current.call != call.number or current.sent:
                continue
            handle.command = sent(current, before)
            assert handle.stdin is not None
            quoted = b"'" + command.replace(b"'", b"'\\''") + b"'"
            source = b" </dev/null" if handle.terminal is None else b""
            handle.stdin.add(
                b"eval %b%b 3>&-\n{ __deltabox %d; } 2>/dev/null\n"
                % (quoted, source, current.number)
            )


def _members(box: Box) -> frozenset[int]:
    """Host pids of all processes of the sandbox."""
    with box.steady:
        with box.changed:
            box.check_open()
            live = box.live
        return frozenset(live.host_pids())


def _started(box: Box, number: int, command: Command) -> list[int]:
    """What a shell's command has started and is still below the shell: pids inside."""
    with box.steady:
        with box.changed:
            handle = box.handles.get(number)
            if handle is None or handle.status is not None or box.closing or box.dead:
                return []
            live, pid = box.live, handle.pid
            current = handle.command
            if current is None or current.number != command.number:
                return []
        before = portable(current).before
        processes = live.processes()
    below = {pid}
    while more := {p.pid for p in processes if p.ppid in below} - below:
        below |= more
    return sorted(below - {pid} - before)


def _cut_off(box: Box, number: int, call: Call) -> tuple[bytes, bytes]:
    """Kill what a shell's command has started; the shell too when it does not come back."""
    with box.changed:
        handle = box.handles.get(number)
        command = None if handle is None else handle.command
    if command is None or command.call != call.number or not command.sent:
        return b"", b""  # it never had its turn, or is over
    for _ in range(5):
        started = _started(box, number, command)
        if not started:
            break
        with box.steady:
            live = box.live
            for pid in started:
                try:
                    live.kill(pid, 9)
                except OSError:
                    pass  # it has just ended
    done = _result_within(box, number, call, 1.0)
    if done is None:
        box.kill_tree(number)
        done = _result_within(box, number, call, 5.0)
    return (b"", b"") if done is None else (done.stdout, done.stderr)


def _result_within(box: Box, number: int, call: Call, seconds: float) -> Done | None:
    deadline = time.monotonic() + seconds
    with box.changed:
        while True:
            handle = box.handles.get(number)
            if handle is None:
                return None
            for key, done in handle.results.items():
                if done.call == call.number:
                    return handle.results.pop(key)
            if not box.wait(call, deadline):
                return None


# -- streams -------------------------------------------------------------------------------------


def _reader(box: Box, number: int, stream: str) -> tuple[Reader, Unread]:
    reader = box.handle(number).readers[stream]
    if not isinstance(reader.buffer, Unread):
        raise DeltaBoxError("only the streams of a spawned process can be read")
    return reader, reader.buffer


def read(
    box: Box,
    number: int,
    *,
    stream: str,
    how: str,
    pattern: bytes,
    flags: int,
    text: bool,
    timeout: float | None,
    attach: Attach,
) -> bytes:
    """Read from a spawned process: `available`, `line`, `until` (a literal), `match`, or `all`.

    Returns what is removed from the buffer; b"" at the end of the stream. When the time is over
    nothing is removed.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    searching: Unread | None = None
    with box.calling(attach) as call, box.changed:
        wanting: tuple[Reader, Unread] | None = None
        try:
            while True:
                box.check_call(call)
                reader, unread = _reader(box, number, stream)
                if unread is not searching:  # the first time, and after a rollback
                    searching = unread
                    find = _finder(how, pattern, flags, text)
                if how == "available" and not unread.full:
                    reader.drain()
                size = find(unread.data, reader.eof)
                if size is not None:
                    data = unread.take(size)
                    reader.resume()
                    return data
                if how in ("until", "match") and reader.eof:
                    tail = bytes(unread.data[-200:]).decode(errors="replace")
                    raise EOFError(
                        f"the stream ended before {pattern.decode(errors='replace')!r} came; "
                        f"its last unread characters are {tail!r}"
                    )
                if wanting is None or wanting[1] is not unread:
                    unread.wanted += 1
                    wanting = reader, unread
                    reader.resume()
                if not box.wait(call, deadline):
                    tail = bytes(unread.data[-200:]).decode(errors="replace")
                    raise CommandTimeout(
                        f"nothing to return within {timeout:g} s; "
                        f"the last unread characters are {tail!r}"
                    )
        finally:
            if wanting is not None:
                wanting[1].wanted -= 1


def _finder(
    how: str, pattern: bytes, flags: int, text: bool
) -> Callable[[bytearray, bool], int | None]:
    """How many bytes to take, or None to go on waiting, given the buffer and whether it ended."""
    searched = 0

    def line(data: bytearray, ended: bool) -> int | None:
        nonlocal searched
        at = data.find(b"\n", searched)
        searched = len(data)
        if at >= 0:
            return at + 1
        return len(data) if ended else None

    def until(data: bytearray, _ended: bool) -> int | None:
        nonlocal searched
        at = data.find(pattern, max(0, searched - len(pattern)))
        searched = len(data)
        return at + len(pattern) if at >= 0 else None

    def available(data: bytearray, ended: bool) -> int | None:
        return len(data) if ended or not text else whole_characters(data)

    def everything(data: bytearray, ended: bool) -> int | None:
        return len(data) if ended else None

    if how == "match":
        expression = re.compile(pattern, flags)

        def match(data: bytearray, _ended: bool) -> int | None:
            found = expression.search(data)
            return found.end() if found else None

        return match
    return {"line": line, "until": until, "available": available, "all": everything}[how]


def whole_characters(data: bytearray) -> int:
    """The length of `data` without a last UTF-8 character that has not come whole."""
    size = len(data)
    for back in range(1, min(4, size + 1)):
        byte = data[size - back]
        if byte < 0x80:
            return size
        if byte >= 0xC0:
            length = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return size if back >= length else size - back
    return size


def write(box: Box, number: int, *, data: bytes, attach: Attach) -> None:
    """Write to a spawned process's standard input; waits only when very much is unsent."""
    with box.calling(attach) as call, box.changed:
        first = True
        while True:
            box.check_call(call)
            writer = box.handle(number).stdin
            if writer is None or (writer.closed and first):
                raise BrokenPipeError(32, "the process's standard input is closed")
            if first:
                first = False
                writer.add(data)
                if writer.broken:
                    raise BrokenPipeError(32, "the process has closed its standard input")
            if writer.size <= FULL or writer.fd < 0:
                return
            box.wait(call, None)


def close_stdin(box: Box, number: int) -> None:
    """No more input for a spawned process, once what was written has reached it.

    A terminal stays open: its character for the end of input is typed.
    """
    with box.changed:
        handle = box.handle(number)
        writer = handle.stdin
        if writer is None or writer.closed:
            return
        if handle.terminal is None:
            writer.finish()
        else:
            writer.add(handle.terminal.end_of_input())


def wait(box: Box, number: int, *, timeout: float | None, attach: Attach) -> int:
    """Wait for a process's end: its exit code, negative for a signal."""
    deadline = None if timeout is None else time.monotonic() + timeout
    with box.calling(attach) as call, box.changed:
        while True:
            box.check_call(call)
            status = box.handle(number).status
            if status is not None:
                return status
            if not box.wait(call, deadline):
                raise CommandTimeout(f"the process did not end within {timeout:g} s; it runs on")


def poll(box: Box, number: int) -> int | None:
    """A process's exit code, None while it runs."""
    with box.changed:
        return box.handle(number).status
