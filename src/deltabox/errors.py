"""Every error DeltaBox raises, in one tree.

    DeltaBoxError
    ├── HostUnsupported          this machine cannot run the engine (`deltabox doctor` says why)
    ├── SandboxClosed            the sandbox was closed, by you or because its keeper ended
    ├── StaleHandle              the handle was born after the state the sandbox now is in
    │   └── RolledBack           ... and a call on it was in flight when the rollback came
    ├── CommandTimeout           also a TimeoutError; the command and its descendants are killed
    ├── CommandFailed            run(check=True) and the command did not exit with 0
    ├── CheckpointError          no checkpoint was taken, the sandbox runs on
    │   └── UnsupportedState     ... because of one object that could not be given back later
    ├── RollbackError            no rollback was done, the sandbox runs on
    ├── ForkError                no fork was made, the sandbox runs on
    ├── BranchError              nothing was committed, the branch and its parent run on
    │   ├── BranchStale          ... and never will be: the parent is another state by now
    │   └── MergeConflict        ... because the parent has changed the same files
    ├── UnknownCheckpoint        also a KeyError; no such checkpoint in this sandbox's tree
    └── NoSpace                  the engine's memory or disk budget, or the host, is exhausted

Wrong arguments raise the built-in `ValueError` and `TypeError`; what the kernel refuses inside a
sandbox (a command that does not exist, a file that is missing) raises the built-in `OSError`.

An error travels from the engine process to the caller as a class name, a sentence and a few plain
attributes, so every class is built as `Class(message, **attributes)` and keeps its attributes in
`attributes`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .process import Result

__all__ = [
    "BranchError",
    "BranchStale",
    "CheckpointError",
    "CommandFailed",
    "CommandTimeout",
    "DeltaBoxError",
    "ForkError",
    "HostUnsupported",
    "MergeConflict",
    "NoSpace",
    "RollbackError",
    "RolledBack",
    "SandboxClosed",
    "StaleHandle",
    "UnknownCheckpoint",
    "UnsupportedState",
]


class DeltaBoxError(Exception):
    """The root of the tree. `str(error)` is one plain sentence."""

    def __init__(self, message: str = "", **attributes: Any) -> None:
        super().__init__(message)
        self.message = message
        self.attributes = attributes

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.attributes)


def _rebuild(cls: type[DeltaBoxError], message: str, attributes: dict[str, Any]) -> DeltaBoxError:
    return cls(message, **attributes)


class HostUnsupported(DeltaBoxError):
    """This machine cannot run the engine: not root, not x86-64, a kernel feature missing."""


class SandboxClosed(DeltaBoxError):
    """The sandbox was closed, or the engine process that held it has ended."""


class StaleHandle(DeltaBoxError):
    """The handle's process was started after the state that the sandbox has been rolled back to."""


class RolledBack(StaleHandle):
    """A rollback to a state from before this call began has cut the call off."""


class CommandTimeout(DeltaBoxError, TimeoutError):
    """A time limit has passed. `stdout` and `stderr` hold what had come by then, where known."""

    @property
    def stdout(self) -> str | bytes | None:
        """What the command had written to its standard output, or None."""
        value: str | bytes | None = self.attributes.get("stdout")
        return value

    @property
    def stderr(self) -> str | bytes | None:
        """What the command had written to its standard error, or None."""
        value: str | bytes | None = self.attributes.get("stderr")
        return value


class CommandFailed(DeltaBoxError):
    """`run(check=True)` and the command exited with something else than 0; see `result`."""

    @property
    def result(self) -> Result:
        """The command's whole result."""
        result: Result = self.attributes["result"]
        return result


class CheckpointError(DeltaBoxError):
    """No checkpoint was taken; the sandbox runs on as before."""


class UnsupportedState(CheckpointError):
    """The sandbox holds an object that could not be given back, so no checkpoint was taken.

    `pid` (as seen inside), `process` (its name) and `object` (what it is) say which.
    """

    @property
    def pid(self) -> int | None:
        """The pid, as seen inside, of the process that holds the object."""
        value: int | None = self.attributes.get("pid")
        return value

    @property
    def process(self) -> str | None:
        """The name of that process."""
        value: str | None = self.attributes.get("process")
        return value

    @property
    def object(self) -> str | None:
        """What cannot be given back, in words, such as `fd 7 is an io_uring instance`."""
        value: str | None = self.attributes.get("object")
        return value


class RollbackError(DeltaBoxError):
    """No rollback was done; the sandbox runs on as before."""


class ForkError(DeltaBoxError):
    """No fork was made; the sandbox runs on as before."""


class BranchError(DeltaBoxError):
    """Nothing was committed; the branch and its parent run on as before."""


class BranchStale(BranchError):
    """The parent was rolled back, or another branch committed, since the branch was made."""


class MergeConflict(BranchError):
    """The branch and its parent have changed the same files; nothing was merged."""

    @property
    def paths(self) -> list[str]:
        """What both have changed, sorted."""
        value: list[str] = self.attributes["paths"]
        return value


class UnknownCheckpoint(DeltaBoxError, KeyError):
    """No checkpoint of this name or id in the sandbox's tree, or it was deleted."""


class NoSpace(DeltaBoxError):
    """The engine's memory or disk budget, or what the host can give, is used up."""
