"""The sandbox, as its user holds it.

A thin client: every method is one request to the keeper (see `deltabox.keeper`), nothing about the
sandbox is remembered here. All methods may be called from any thread at any time.
"""

from __future__ import annotations

import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar, overload

from . import _arguments as arguments
from ._arguments import Command
from ._connection import CallbackError, Keeper, keeper, no_copies
from .checkpoint import Change, Checkpoint, Usage, reference
from .errors import CommandFailed, CommandTimeout, SandboxClosed
from .files import Files, StrPath
from .process import (
    AnyResult,
    BytesProcess,
    BytesResult,
    Handle,
    Process,
    ProcessInfo,
    Result,
    convert,
    readable,
    terminal_size,
)
from .retention import KEEP_ALL, Policy, described
from .shell import Shell, failure

if TYPE_CHECKING:
    from .branch import Branch

H = TypeVar("H", bound=Handle)

_trees: dict[str, weakref.WeakSet[Sandbox]] = {}
_trees_lock = threading.Lock()


class Sandbox:
    """A live Linux sandbox: files and processes that can be checkpointed, rolled back and forked.

    >>> with Sandbox.create() as sb:                        # doctest: +SKIP
    ...     sh = sb.shell()
    ...     sh.run("x=1")
    ...     cp = sb.checkpoint("ready")
    ...     sh.run("x=2; rm -rf /usr")
    ...     sb.rollback(cp)
    ...     sh.run("echo $x; ls -d /usr").stdout
    '1\\n/usr\\n'

    Made by `create` and `fork`, closed by `close`, by the end of a `with` block, and in any case
    when this process ends.
    """

    _closed = True  # until it is made

    def __init__(self, *, _keeper: Keeper, _described: dict[str, Any]) -> None:
        self._keeper = _keeper
        self._box: str = _described["box"]
        self._tree: str = _described["tree"]
        self._process = os.getpid()
        self._closed = False
        with _trees_lock:
            _trees.setdefault(self._tree, weakref.WeakSet()).add(self)

    @classmethod
    def create(
        cls,
        *,
        base: StrPath = "/",
        hide: Sequence[str] | None = None,
        memory_limit: str | int | None = None,
        pids_limit: int | None = None,
        disk_limit: str | int | None = None,
        network: Literal["none", "nat", "host"] = "none",
        hostname: str = "sandbox",
        on_external: Literal["reset", "refuse"] = "reset",
        io_uring: bool = False,
        standby: str | int = "256M",
        visibility: Literal["isolated"] | Sequence[str] = "isolated",
        max_memory: str | int | None = None,
        max_disk: str | int | None = None,
        keep: Policy = KEEP_ALL,
    ) -> Sandbox:
        """Make a sandbox and start it: a fresh root, nothing running.

        base: the directory that is its root; it is never written to. What is mounted below it is
            not part of it.
        hide: paths of the base that do not exist inside (`*` matches within one name). Default for
            `/`: credentials of users and tools; see `docs/semantics.md`.
        memory_limit, disk_limit: bytes, or a string such as `"2G"`. The disk limit holds for the
            sandbox with all its checkpoints and forks together.
        pids_limit: the most processes and threads it may have.
        network: `"none"`: a loopback interface only. `"nat"`: outgoing connections and DNS as well,
            in a network of its own; the host's loopback services are out of reach. `"host"`: the
            host's own network, *unsafe*: programs inside reach whatever the host does, its local
            services too.
        hostname: its name. Over `/` it also gets a machine id of its own.
        on_external: what becomes of TCP connections to the outside, which cannot be had twice.
            `"reset"`: after a rollback or in a fork they are as after a reset by the peer.
            `"refuse"`: no checkpoint can be taken while there is one.
        io_uring: whether programs may use io_uring(7), and io_setup(2). Neither can be given back,
            so no checkpoint can be taken then while a ring, or a context, is open. By default there
            is none inside, and programs do without, as Node.js and all that stands on libuv, and
            MariaDB. seccomp's strict mode needs True.
        standby: bytes, or a string such as `"1G"`: memory that restored trees of processes may take
            which wait, in the background, for the rollback that is likely to come (to the last
            checkpoint, or to the one rolled back to). They share the checkpoint's memory, so it is
            a few MiB for each. 0: none wait, and a rollback takes one or two milliseconds longer.
        visibility: `"isolated"`: no sandbox of the tree sees what another one does. Or directories
            that all of them, forks and branches, see at once, as a cache of builds or a place to
            leave each other notes: they begin empty, and are no part of any state. A rollback
            leaves them as they are; while a program has something open there, no checkpoint can be
            taken.
        max_memory, max_disk: change the engine's budget for all its sandboxes: what checkpoints may
            hold in memory, what images may take on disk. Beyond it is `NoSpace`.
        keep: which checkpoints the tree keeps on its own, as for `keep`. By default all.

        Raises `HostUnsupported` where the engine cannot run, `ValueError` for a base that is no
        directory, `NoSpace`.
        """
        arguments.world(
            network=network,
            hostname=hostname,
            on_external=on_external,
            hide=hide,
            pids_limit=pids_limit,
        )
        made = keeper()
        with made.making(
            "create",
            start=True,
            base=os.path.abspath(os.fspath(base)),
            hide=None if hide is None else [os.fspath(path) for path in hide],
            memory_limit=arguments.optional(memory_limit, "memory_limit"),
            pids_limit=pids_limit,
            disk_limit=arguments.optional(disk_limit, "disk_limit"),
            network=network,
            hostname=hostname,
            on_external=on_external,
            io_uring=bool(io_uring),
            standby=arguments.size(standby, "standby") if standby else 0,
            shared=arguments.shared(visibility),
            max_memory=arguments.optional(max_memory, "max_memory"),
            max_disk=arguments.optional(max_disk, "max_disk"),
            keep=described(keep),
        ) as answer:
            return cls(_keeper=made, _described=answer)

    # -- running programs --------------------------------------------------------------------

    @overload
    def run(
        self,
        command: Command,
        *,
        cwd: str = ...,
        env: Mapping[str, str] | None = ...,
        user: str | int | None = ...,
        input: str | bytes | None = ...,
        timeout: float | None = ...,
        check: bool = ...,
        on_stdout: Callable[[str], object] | None = ...,
        text: Literal[True] = ...,
    ) -> Result: ...

    @overload
    def run(
        self,
        command: Command,
        *,
        cwd: str = ...,
        env: Mapping[str, str] | None = ...,
        user: str | int | None = ...,
        input: str | bytes | None = ...,
        timeout: float | None = ...,
        check: bool = ...,
        on_stdout: Callable[[bytes], object] | None = ...,
        text: Literal[False],
    ) -> BytesResult: ...

    def run(
        self,
        command: Command,
        *,
        cwd: str = "/",
        env: Mapping[str, str] | None = None,
        user: str | int | None = None,
        input: str | bytes | None = None,
        timeout: float | None = None,
        check: bool = False,
        on_stdout: Callable[[Any], object] | None = None,
        text: bool = True,
    ) -> Result | BytesResult:
        """Run a command to its end.

        command: a string, run by `/bin/sh -c`, or a list: a program and its arguments.
        cwd: the directory inside to run it in.
        env: variables added to a small clean environment; nothing of the host's leaks in.
        user: a name or uid inside; root by default.
        input: what it reads from standard input; by default that is /dev/null.
        timeout: seconds; then the command and all its descendants are killed and `CommandTimeout`
            raised, with `stdout` and `stderr` as far as they got.
        check: raise `CommandFailed` for an exit code that is not 0.
        on_stdout: called in this thread with each piece of the output as it comes. An exception of
            it, like Ctrl-C, kills the command and goes to the caller.
        text: whether the streams are str (UTF-8) or bytes.

        The command is over when its own process has ended; what it left in the background runs
        on, its output then goes nowhere. Raises `FileNotFoundError` or `PermissionError` when a
        program (of a list) or `cwd` is missing, `RolledBack` when the sandbox is rolled back to a
        state from before this call.
        """
        started = time.monotonic()
        piece = None
        if on_stdout is not None:
            callback, decode = on_stdout, arguments.decoder() if text else None

            def piece(data: bytes) -> None:
                shown = data if decode is None else decode(data)
                if shown:
                    callback(shown)

        if isinstance(input, str):
            input = input.encode("utf-8", errors="surrogateescape")
        try:
            answer = self._keeper.stream(
                "run",
                piece,
                box=self._check_open(),
                argv=arguments.argv(command),
                env=arguments.environment(env),
                cwd=arguments.directory(cwd),
                user=user,
                input=input,
                timeout=arguments.seconds(timeout),
                stream=on_stdout is not None,
            )
        except CommandTimeout as error:
            raise readable(error, text=text) from None
        except CallbackError as carrier:
            raise carrier.error from None
        fields: dict[str, Any] = {
            "exit_code": answer["exit_code"],
            "stdout": convert(answer["stdout"], text=text),
            "stderr": convert(answer["stderr"], text=text),
            "duration": time.monotonic() - started,
            "truncated": answer["truncated"],
        }
        result: Result | BytesResult = Result(**fields) if text else BytesResult(**fields)
        if check and result.exit_code != 0:
            shown: AnyResult[str] | AnyResult[bytes] = result
            raise CommandFailed(failure(command, shown), result=result)
        return result

    @overload
    def spawn(
        self,
        command: Command,
        *,
        cwd: str = ...,
        env: Mapping[str, str] | None = ...,
        user: str | int | None = ...,
        tty: bool | tuple[int, int] = ...,
        text: Literal[True] = ...,
    ) -> Process: ...

    @overload
    def spawn(
        self,
        command: Command,
        *,
        cwd: str = ...,
        env: Mapping[str, str] | None = ...,
        user: str | int | None = ...,
        tty: bool | tuple[int, int] = ...,
        text: Literal[False],
    ) -> BytesProcess: ...

    def spawn(
        self,
        command: Command,
        *,
        cwd: str = "/",
        env: Mapping[str, str] | None = None,
        user: str | int | None = None,
        tty: bool | tuple[int, int] = False,
        text: bool = True,
    ) -> Process | BytesProcess:
        """Start a program to talk to. Options as for `run`.

        tty: give it a terminal of 24 rows and 80 columns, or of `(rows, columns)`. Everything it
            shows is in `stdout`, lines end in `\\r\\n`, and what is written to `stdin` is typed:
            `"\\x03"` is Ctrl-C. `TERM` is `xterm-256color` unless `env` sets it.
        """
        answer = self._call(
            "spawn",
            argv=arguments.argv(command),
            env=arguments.environment(env),
            cwd=arguments.directory(cwd),
            user=user,
            tty=terminal_size(tty),
        )
        made = Process if text else BytesProcess
        return made(self, answer["handle"], answer["pid"])

    def shell(
        self,
        *,
        cwd: str = "/",
        env: Mapping[str, str] | None = None,
        user: str | int | None = None,
        tty: bool | tuple[int, int] = False,
    ) -> Shell:
        """Start a live bash. Options as for `run`.

        tty: its commands see a terminal of 24 rows and 80 columns, or of `(rows, columns)`, as
            standard input, output and error. Their output is what the terminal showed, all of it in
            `stdout`, with lines that end in `\\r\\n`. Nobody types: a command that reads waits.
        """
        answer = self._call(
            "shell",
            env=arguments.environment(env),
            cwd=arguments.directory(cwd),
            user=user,
            tty=terminal_size(tty),
        )
        return Shell(self, answer["handle"], answer["pid"])

    @property
    def files(self) -> Files:
        """Read and write files inside; see `Files`."""
        return Files(self)

    def processes(self) -> list[ProcessInfo]:
        """All processes, as seen inside, by pid; the sandbox's own first process is left out."""
        return [
            ProcessInfo(**(info | {"cmdline": tuple(info["cmdline"])}))
            for info in self._call("processes")
        ]

    # -- states ------------------------------------------------------------------------------

    def checkpoint(self, name: str | None = None, *, reuse: bool = False) -> Checkpoint:
        """Keep the present state, files and processes at one instant. The programs run on.

        name: unique in the tree of sandboxes (`ValueError`).
        reuse: when nothing has happened since the checkpoint that the sandbox stands on, its
            `head`, give that one back instead of another one of the same state. That is for those
            who take one after every step; reading files is no happening, starting a program is.

        Raises `UnsupportedState` when the sandbox holds something that could not be given back,
        `CheckpointError`, `NoSpace`; the sandbox runs on then as if nothing had been.
        """
        if name is not None and (not isinstance(name, str) or not name):
            raise ValueError(f"a checkpoint's name is a str that is not empty, not {name!r}")
        if name is not None and reuse:
            raise ValueError("a checkpoint that is there already cannot be given a name")
        answer = self._call("checkpoint", name=name, reuse=bool(reuse), _settle=True)
        return Checkpoint(self, answer, answer["stats"])

    def rollback(self, checkpoint: Checkpoint | str) -> None:
        """Go back to a checkpoint of this tree (or its name or id): files and processes.

        Calls that were in flight when the checkpoint was taken, and are still, go on with the
        restored programs; later ones raise `RolledBack`, later handles `StaleHandle`.

        Raises `UnknownCheckpoint`, `RollbackError`, `NoSpace`; nothing has changed then.
        """
        self._call("rollback", _settle=True, to=reference(self._tree, checkpoint))

    def fork(
        self,
        *,
        at: Checkpoint | str | None = None,
        identity: Literal["same", "new"] = "same",
    ) -> Sandbox:
        """A live copy of a checkpoint, or of the present state (which becomes a checkpoint).

        identity: as for `fork_many`.
        """
        return self.fork_many(1, at=at, identity=identity)[0]

    def fork_many(
        self,
        count: int,
        *,
        at: Checkpoint | str | None = None,
        identity: Literal["same", "new"] = "same",
    ) -> list[Sandbox]:
        """Several live copies: all of them, or none and an error.

        identity: `"same"`: host name and machine id are copied like everything else. `"new"`: each
            copy has a host name with a number appended, and a machine id of its own, and keeps
            both when it is rolled back to a checkpoint of another sandbox.

        Raises `ForkError`, `UnknownCheckpoint`, `NoSpace`, and what `checkpoint` raises.
        """
        if identity not in ("same", "new"):
            raise ValueError(f"identity is 'same' or 'new', not {identity!r}")
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError(f"the number of copies is an int of at least 1, not {count!r}")
        with self._forking(count, at=at, identity=identity) as answer:
            return [Sandbox(_keeper=self._keeper, _described=one) for one in answer]

    def _forking(
        self, count: int, *, at: Checkpoint | str | None, identity: str
    ) -> AbstractContextManager[list[dict[str, Any]]]:
        return self._keeper.making(
            "fork",
            start=False,
            box=self._check_open(),
            count=count,
            identity=identity,
            at=None if at is None else reference(self._tree, at),
        )

    def branch(self, name: str = "") -> Branch:
        """A live fork of the present state that is meant to come back: see `Branch`.

        >>> with sb.branch("try-a") as b:                       # doctest: +SKIP
        ...     b.run("make test", check=True)

        At the end of the block the sandbox *is* the branch; after an exception it is as if the
        branch had never been. Raises what `fork` raises.
        """
        from .branch import Branch

        with self._forking(1, at=None, identity="same") as (described,):
            return Branch(self, name, described)

    def on_fork(self, process: Handle | int, signal: int | None) -> None:
        """Have a process told in every fork that it is a copy: by a signal, before it runs on.

        process: a handle, or a pid as seen inside.
        signal: one that the process handles; None: no longer.

        For programs that keep seeds, nonces or names of their own in memory. The signal is
        delivered in the copy before any other instruction; a call that the process waits in ends
        as it does for every signal. `/run/deltabox/fork.json` has the sandbox's id, the number of
        the fork and 32 random bytes then. The registration belongs to the state: a checkpoint
        keeps it, a rollback brings it back. A rollback sends nothing, unless it is to a checkpoint
        of another sandbox.

        Raises `ProcessLookupError` when there is no such process, `StaleHandle`.
        """
        arguments.signal(signal)
        if isinstance(process, Handle):
            if process.sandbox._tree != self._tree:
                raise ValueError(f"{process!r} belongs to another tree of sandboxes")
            self._call("on_fork", handle=process._number, pid=0, signal=signal)
            return
        if isinstance(process, bool) or not isinstance(process, int):
            raise TypeError(f"a process is a handle or a pid, not {type(process).__name__}")
        if process == 1:
            raise ValueError("pid 1 is the sandbox's own first process")
        self._call("on_fork", handle=None, pid=process, signal=signal)

    def counterpart(self, handle: H) -> H:
        """This sandbox's own copy of a shell or process of another sandbox of the tree."""
        if not isinstance(handle, Handle):
            raise TypeError(f"counterpart() takes a Shell or Process, not {type(handle).__name__}")
        if handle.sandbox._tree != self._tree:
            raise ValueError(f"{handle!r} belongs to another tree of sandboxes")
        pid = self._call("handle", handle=handle._number)
        return type(handle)(self, handle._number, pid)

    @property
    def head(self) -> Checkpoint | None:
        """The checkpoint that the present state began as; None before the first."""
        answer = self._call("head")
        return None if answer is None else Checkpoint(self, answer)

    @property
    def checkpoints(self) -> list[Checkpoint]:
        """All checkpoints of the tree, oldest first."""
        return [Checkpoint(self, node) for node in self._call("nodes")]

    @property
    def usage(self) -> Usage:
        """What the tree takes of the host now. What was deleted counts until it has gone."""
        return Usage(**self._call("usage"))

    def keep(self, policy: Policy) -> None:
        """Say which checkpoints the tree keeps from here on; the others are deleted.

        policy: `KeepAll()`, `KeepLast(count)`, `KeepReachable()` or `KeepFitting()`. It holds for
            the whole tree. Whatever it is, a checkpoint stays that has a name, is held
            (`Checkpoint.hold`), is the `head` of an open sandbox of the tree, or is in use.

        >>> sb.keep(KeepLast(20))                               # doctest: +SKIP
        """
        self._call("keep", policy=described(policy))

    def diff(self, since: Checkpoint | str, until: Checkpoint | str | None = None) -> list[Change]:
        """What has changed in the files since a checkpoint, until now or another checkpoint."""
        return [
            Change(**change)
            for change in self._call(
                "diff",
                old=reference(self._tree, since),
                new=None if until is None else reference(self._tree, until),
            )
        ]

    def patch(
        self,
        since: Checkpoint | str,
        until: Checkpoint | str | None = None,
        *,
        under: str = "/",
    ) -> str:
        """The changes to text files below a path as a unified diff; see `diff`."""
        text: str = self._call(
            "patch",
            old=reference(self._tree, since),
            new=None if until is None else reference(self._tree, until),
            under=under,
        )
        return text

    # -- the end -----------------------------------------------------------------------------

    def close(self) -> None:
        """End its processes and free its files. Its tree goes with its last sandbox.

        Closing twice is no error.
        """
        if self._closed:
            return
        try:
            self._keeper.call("close", _settle=True, box=self._box)
        except SandboxClosed:
            pass  # its keeper has ended, and everything with it
        self._closed = True

    @property
    def closed(self) -> bool:
        """Whether it was closed from here."""
        return self._closed

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if self._closed or os.getpid() != self._process:
            return
        warnings.warn(f"{self!r} was never closed", ResourceWarning, stacklevel=2, source=self)
        try:
            self._keeper.post("close", box=self._box)
        except Exception:
            pass  # at the interpreter's end; the keeper closes what this process leaves

    def __reduce__(self) -> NoReturn:
        no_copies("Sandbox")

    def __repr__(self) -> str:
        return f"<Sandbox {self._box}{' (closed)' if self._closed else ''}>"

    # -- inside ------------------------------------------------------------------------------

    def _present(self) -> Sandbox:
        """The sandbox that its programs are in by now."""
        return self

    def _check_open(self) -> str:
        if self._closed:
            raise SandboxClosed("the sandbox is closed")
        return self._box

    def _call(self, op: str, **arguments: Any) -> Any:
        return self._keeper.call(op, box=self._check_open(), **arguments)

    def _open_one(self) -> Sandbox:
        """This sandbox, or another of its tree that is still open."""
        if self._closed:
            with _trees_lock:
                for other in _trees.get(self._tree, ()):
                    if not other._closed:
                        return other
        return self
