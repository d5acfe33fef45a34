"""Made by tools/mirror. `deltabox.aio` itself says what this is."""

import re
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Mapping, Sequence
from datetime import datetime
from types import TracebackType
from typing import Any, Generic, Literal, TypeVar, overload

import deltabox

from .. import BranchError as BranchError
from .. import BranchStale as BranchStale
from .. import BytesResult as BytesResult
from .. import Change as Change
from .. import CheckpointError as CheckpointError
from .. import CommandFailed as CommandFailed
from .. import CommandTimeout as CommandTimeout
from .. import DeltaBoxError as DeltaBoxError
from .. import FileStat as FileStat
from .. import ForkError as ForkError
from .. import HostUnsupported as HostUnsupported
from .. import KeepAll as KeepAll
from .. import KeepFitting as KeepFitting
from .. import KeepLast as KeepLast
from .. import KeepReachable as KeepReachable
from .. import MergeConflict as MergeConflict
from .. import NoSpace as NoSpace
from .. import ProcessInfo as ProcessInfo
from .. import Result as Result
from .. import RollbackError as RollbackError
from .. import RolledBack as RolledBack
from .. import SandboxClosed as SandboxClosed
from .. import StaleHandle as StaleHandle
from .. import UnknownCheckpoint as UnknownCheckpoint
from .. import UnsupportedState as UnsupportedState
from .. import Usage as Usage
from .._arguments import Command
from ..files import StrPath
from ..process import Data
from ..retention import Policy

S = TypeVar("S", bound=Sandbox)
H = TypeVar("H", bound=Handle)

class Made(Generic[S]):
    """A sandbox that is being made: to be awaited, or entered with `async with`."""

    def __await__(self) -> Generator[Any, Any, S]: ...
    async def __aenter__(self) -> S: ...
    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...

class Handle:
    """What a process and a shell have in common: a number, and the sandbox it is used in."""

    @property
    def pid(self) -> int:
        """The pid as seen inside. A rollback and a fork keep it."""

    @property
    def sandbox(self) -> Sandbox:
        """The sandbox it runs in: its branch's parent, once that has been committed."""

class Shell(Handle):
    """Made by `Sandbox.shell`.

    >>> sh = sandbox.shell()                                # doctest: +SKIP
    >>> sh.run("cd /tmp; x=41; sleep 1000 &").exit_code     # doctest: +SKIP
    0
    >>> sh.run("echo $((x + 1)) in $PWD").stdout            # doctest: +SKIP
    '42 in /tmp\\n'
    """

    async def run(
        self, command: str, *, timeout: float | None = None, check: bool = False
    ) -> Result:
        """Run a command line in the shell itself and return its result.

        Its standard input is /dev/null. One command runs at a time; calls from other threads wait
        for their turn. What background jobs write shows up in the result of the command that runs
        then, or of the next one.

        `timeout` in seconds, counted from the call: then everything the command has started is
        killed (and the shell as well when it does not come back), and `CommandTimeout` raised.
        `check=True` raises `CommandFailed` for an exit code that is not 0.
        """

    async def close(self) -> None:
        """Kill the shell. Its background jobs live on."""

class Stdin(Generic[Data]):
    """The standard input of a process. Writing waits only when very much is unread (1 MiB)."""

    async def write(self, data: Data) -> None:
        """Send `data`. `BrokenPipeError` when the process has closed its end."""

    async def close(self) -> None:
        """Send no more: the process reads end-of-file after what was written. Twice is fine.

        On a terminal the character for that (Ctrl-D) is typed instead: at the beginning of a line
        a program that reads lines sees end-of-file. The terminal stays open, and can be written to.
        """

class Stream(Generic[Data]):
    """The standard output or error of a process.

    What has been read is gone for good, also after a rollback; what has not been read belongs to
    the state of the sandbox, and a rollback restores it. While more than 1 MiB is unread the
    process waits when it writes. Iterating gives lines until the end of the stream.
    """

    async def read_available(self) -> Data:
        """What has come so far, without waiting; empty when there is nothing."""

    async def readline(self, timeout: float | None = None) -> Data:
        """The next line with its newline; empty at the end of the stream.

        `timeout` in seconds; `CommandTimeout` leaves everything unread.
        """

    async def read_until(
        self,
        pattern: str | bytes | re.Pattern[str] | re.Pattern[bytes],
        timeout: float | None = None,
    ) -> Data:
        """Everything up to and with the first occurrence of `pattern`, a literal or an expression.

        `timeout` in seconds; `CommandTimeout`, and `EOFError` when the stream ends before, leave
        everything unread.
        """

    async def read(self, timeout: float | None = None) -> Data:
        """Everything up to the end of the stream. `timeout` in seconds, as for `readline`."""

    def __aiter__(self) -> AsyncIterator[Data]: ...

class AnyProcess(Handle, Generic[Data]):
    """A program started with `Sandbox.spawn`: its streams, its end."""

    stdin: Stdin[Data]
    stdout: Stream[Data]
    stderr: Stream[Data]

    @property
    def exit_code(self) -> Awaitable[int | None]:
        """Its exit code, negative for a signal; None while it runs."""

    async def wait(self, timeout: float | None = None) -> int:
        """Wait for its end: the exit code. `CommandTimeout` after `timeout` seconds; it runs on."""

    async def resize(self, rows: int, columns: int) -> None:
        """Change the size of its terminal (`tty=True`); what runs in the foreground is told so."""

    async def kill(self, signal: int = ...) -> None:
        """Send it a signal; nothing happens when it has ended already."""

class Process(AnyProcess[str]):
    """A program started with `Sandbox.spawn`; its streams are text.

        >>> p = sandbox.spawn(["python3", "-i", "-q"])          # doctest: +SKIP
        >>> p.stdin.write("print(6 * 7)
    ")                     # doctest: +SKIP
        >>> p.stdout.readline(timeout=5)                        # doctest: +SKIP
        '42
    '
    """

class BytesProcess(AnyProcess[bytes]):
    """A program started with `Sandbox.spawn(..., text=False)`; its streams are bytes."""

class Files:
    """`sandbox.files`. Errors are those of the operating system, such as `FileNotFoundError`."""

    async def read(self, path: StrPath) -> bytes:
        """The contents of a regular file."""

    async def read_text(self, path: StrPath, encoding: str = "utf-8") -> str:
        """The contents of a regular file as text."""

    async def write(self, path: StrPath, data: bytes, *, mode: int | None = None) -> None:
        """Write a file; directories above are made. `mode` sets its permissions (new: 0o644)."""

    async def write_text(
        self, path: StrPath, text: str, encoding: str = "utf-8", *, mode: int | None = None
    ) -> None:
        """Write a file of text; see `write`."""

    async def list(self, path: StrPath) -> list[str]:
        """The names in a directory, sorted."""

    async def stat(self, path: StrPath) -> FileStat:
        """What a file is. A symlink at the end is followed, within the sandbox."""

    async def exists(self, path: StrPath) -> bool:
        """Whether the path leads to something."""

    async def mkdir(self, path: StrPath, *, parents: bool = False) -> None:
        """Make a directory; with `parents` those above too, and it may exist already."""

    async def remove(self, path: StrPath, *, recursive: bool = False) -> None:
        """Remove a file or an empty directory; with `recursive` whatever is in it as well."""

    async def upload(self, source: StrPath, path: StrPath) -> None:
        """Copy a file or directory of the host to `path` inside, with its permissions.

        Symlinks in a directory are followed as far as files go; other kinds are refused.
        """

    async def download(self, path: StrPath, target: StrPath) -> None:
        """Copy a file or directory inside to `target` on the host.

        Only regular files and directories are copied: a program inside decides what is there, and
        a symlink of its making has no business on the host.
        """

class Stats:
    """What a checkpoint cost, and holds. It does not keep the checkpoint."""

    pause_ms: float
    ahead_ms: float
    total_ms: float
    dirty_bytes: int
    processes: int

    @property
    def changed_files(self) -> Awaitable[int]:
        """Files that differ from the parent checkpoint's (from a fresh sandbox's, for the first).

        Counted when first asked for.
        """

class Checkpoint:
    """Made by `Sandbox.checkpoint`. Equal to any other object for the same checkpoint.

    It lives until it is deleted, the last sandbox of its tree is closed, or the tree's policy lets
    go of it (`Sandbox.keep`).
    """

    @property
    def id(self) -> str:
        """Unique, for ever."""

    @property
    def name(self) -> str | None:
        """The name it was given, unique within the tree."""

    @property
    def created_at(self) -> datetime:
        """When it was taken (UTC)."""

    @property
    def parent(self) -> Awaitable[Checkpoint | None]:
        """The checkpoint whose state the sandbox was last in before this one was taken."""

    @property
    def children(self) -> Awaitable[list[Checkpoint]]:
        """The checkpoints taken next after this one, oldest first."""

    @property
    def stats(self) -> Awaitable[Stats]:
        """What it cost."""

    async def hold(self) -> None:
        """Keep it whatever the tree's policy says, until `release`. Twice is no error."""

    async def release(self) -> None:
        """End what `hold` began: the policy decides again."""

    async def delete(self) -> None:
        """Free its memory and files. No other checkpoint and no sandbox is harmed.

        Its children become children of its parent.
        """

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
        keep: Policy = ...,
    ) -> Made[Sandbox]:
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

    @overload
    async def run(
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
    async def run(
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
    @overload
    async def spawn(
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
    async def spawn(
        self,
        command: Command,
        *,
        cwd: str = ...,
        env: Mapping[str, str] | None = ...,
        user: str | int | None = ...,
        tty: bool | tuple[int, int] = ...,
        text: Literal[False],
    ) -> BytesProcess: ...
    async def shell(
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

    @property
    def files(self) -> Files:
        """Read and write files inside; see `Files`."""

    async def processes(self) -> list[ProcessInfo]:
        """All processes, as seen inside, by pid; the sandbox's own first process is left out."""

    async def checkpoint(self, name: str | None = None, *, reuse: bool = False) -> Checkpoint:
        """Keep the present state, files and processes at one instant. The programs run on.

        name: unique in the tree of sandboxes (`ValueError`).
        reuse: when nothing has happened since the checkpoint that the sandbox stands on, its
            `head`, give that one back instead of another one of the same state. That is for those
            who take one after every step; reading files is no happening, starting a program is.

        Raises `UnsupportedState` when the sandbox holds something that could not be given back,
        `CheckpointError`, `NoSpace`; the sandbox runs on then as if nothing had been.
        """

    async def rollback(self, checkpoint: Checkpoint | str) -> None:
        """Go back to a checkpoint of this tree (or its name or id): files and processes.

        Calls that were in flight when the checkpoint was taken, and are still, go on with the
        restored programs; later ones raise `RolledBack`, later handles `StaleHandle`.

        Raises `UnknownCheckpoint`, `RollbackError`, `NoSpace`; nothing has changed then.
        """

    def fork(
        self, *, at: Checkpoint | str | None = None, identity: Literal["same", "new"] = "same"
    ) -> Made[Sandbox]:
        """A live copy of a checkpoint, or of the present state (which becomes a checkpoint).

        identity: as for `fork_many`.
        """

    async def fork_many(
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

    def branch(self, name: str = "") -> Made[Branch]:
        """A live fork of the present state that is meant to come back: see `Branch`.

        >>> with sb.branch("try-a") as b:                       # doctest: +SKIP
        ...     b.run("make test", check=True)

        At the end of the block the sandbox *is* the branch; after an exception it is as if the
        branch had never been. Raises what `fork` raises.
        """

    async def on_fork(self, process: Handle | int, signal: int | None) -> None:
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

    async def counterpart(self, handle: H) -> H:
        """This sandbox's own copy of a shell or process of another sandbox of the tree."""

    @property
    def head(self) -> Awaitable[Checkpoint | None]:
        """The checkpoint that the present state began as; None before the first."""

    @property
    def checkpoints(self) -> Awaitable[list[Checkpoint]]:
        """All checkpoints of the tree, oldest first."""

    @property
    def usage(self) -> Awaitable[Usage]:
        """What the tree takes of the host now. What was deleted counts until it has gone."""

    async def keep(self, policy: Policy) -> None:
        """Say which checkpoints the tree keeps from here on; the others are deleted.

        policy: `KeepAll()`, `KeepLast(count)`, `KeepReachable()` or `KeepFitting()`. It holds for
            the whole tree. Whatever it is, a checkpoint stays that has a name, is held
            (`Checkpoint.hold`), is the `head` of an open sandbox of the tree, or is in use.

        >>> sb.keep(KeepLast(20))                               # doctest: +SKIP
        """

    async def diff(
        self, since: Checkpoint | str, until: Checkpoint | str | None = None
    ) -> list[Change]:
        """What has changed in the files since a checkpoint, until now or another checkpoint."""

    async def patch(
        self, since: Checkpoint | str, until: Checkpoint | str | None = None, *, under: str = "/"
    ) -> str:
        """The changes to text files below a path as a unified diff; see `diff`."""

    async def close(self) -> None:
        """End its processes and free its files. Its tree goes with its last sandbox.

        Closing twice is no error.
        """

    @property
    def closed(self) -> bool:
        """Whether it was closed from here."""

    async def __aenter__(self) -> Sandbox: ...
    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...

class Branch(Sandbox):
    """A live fork of a sandbox, which the sandbox may become.

    Made by `Sandbox.branch`. It is a sandbox like any other: it can be checkpointed, rolled back,
    forked, and branched itself. A `with` block commits it at its end, and aborts it when it is left
    by an exception.

    >>> with sb.branch("try-a") as b:                           # doctest: +SKIP
    ...     b.run("pip install -U requests")
    ...     print(b.diff())
    ...     b.run("make test", check=True)

    Of several branches of one state the first to be committed wins; the others get `BranchStale`.
    """

    @property
    def name(self) -> str:
        """The name it was given, for displays; it need not be unique."""

    @property
    def parent(self) -> Sandbox:
        """The sandbox that it was made of, or what that has become part of since."""

    @property
    def origin(self) -> Checkpoint:
        """The state that it began as."""

    @property
    def committed(self) -> bool:
        """Whether its parent is it by now."""

    @overload
    async def commit(self) -> None: ...
    @overload
    async def commit(self, *, files_only: Literal[False]) -> None: ...
    @overload
    async def commit(
        self, *, files_only: Literal[True], paths: Sequence[StrPath] = ...
    ) -> list[str]: ...
    async def abort(self) -> None:
        """End the branch; its parent is as if it had never been. The same as `close`."""

    async def diff(
        self, since: Checkpoint | str | None = None, until: Checkpoint | str | None = None
    ) -> list[Change]:
        """What has changed in the files, by default since the branch was made."""

    async def patch(
        self,
        since: Checkpoint | str | None = None,
        until: Checkpoint | str | None = None,
        *,
        under: str = "/",
    ) -> str:
        """The changes to text files as a unified diff, by default since the branch was made."""

    async def __aenter__(self) -> Branch: ...
    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...

@overload
def awaited(plain: deltabox.Branch) -> Branch: ...
@overload
def awaited(plain: deltabox.Sandbox) -> Sandbox: ...
@overload
def awaited(plain: deltabox.Checkpoint) -> Checkpoint: ...
@overload
def awaited(plain: deltabox.Stats) -> Stats: ...
@overload
def awaited(plain: deltabox.Files) -> Files: ...
@overload
def awaited(plain: deltabox.BytesProcess) -> BytesProcess: ...
@overload
def awaited(plain: deltabox.Process) -> Process: ...
@overload
def awaited(plain: deltabox.Shell) -> Shell: ...

__all__ = [
    "Branch",
    "BranchError",
    "BranchStale",
    "BytesProcess",
    "BytesResult",
    "Change",
    "Checkpoint",
    "CheckpointError",
    "CommandFailed",
    "CommandTimeout",
    "DeltaBoxError",
    "FileStat",
    "Files",
    "ForkError",
    "HostUnsupported",
    "KeepAll",
    "KeepFitting",
    "KeepLast",
    "KeepReachable",
    "MergeConflict",
    "NoSpace",
    "Process",
    "ProcessInfo",
    "Result",
    "RollbackError",
    "RolledBack",
    "Sandbox",
    "SandboxClosed",
    "Shell",
    "StaleHandle",
    "Stats",
    "UnknownCheckpoint",
    "UnsupportedState",
    "Usage",
    "awaited",
]
