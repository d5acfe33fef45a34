"""A state of a sandbox that it, and every sandbox of its tree, can go back to."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from ._connection import no_copies
from .errors import UnknownCheckpoint

if TYPE_CHECKING:
    from .sandbox import Sandbox


@dataclass(frozen=True)
class Change:
    """One difference between the files of two states. `old_path` is set for a rename."""

    kind: Literal["added", "modified", "deleted", "renamed", "mode"]
    path: str
    old_path: str | None = None


@dataclass(frozen=True)
class Usage:
    """What a tree of sandboxes takes of the host, besides what its programs do."""

    checkpoints: int
    """How many there are."""
    memory: int
    """Bytes of memory that they hold together, every shared page counted once."""
    disk: int
    """Bytes on the host's disk, of the sandboxes' own files and all checkpoints'."""


class Stats:
    """What a checkpoint cost, and holds. It does not keep the checkpoint."""

    def __init__(self, sandbox: Sandbox, number: str, measured: dict[str, Any]) -> None:
        self._sandbox = sandbox
        self._number = number
        self.pause_ms: float = measured["pause_ms"]
        """Milliseconds for which the programs were stopped by it."""
        self.ahead_ms: float = measured["ahead_ms"]
        """Milliseconds for which they had been stopped before it, when all of them waited."""
        self.total_ms: float = measured["total_ms"]
        """Milliseconds the whole checkpoint took in the engine."""
        self.dirty_bytes: int = measured["dirty_bytes"]
        """Bytes of memory that were copied."""
        self.processes: int = measured["processes"]
        """Processes captured."""
        self._changed_files: int | None = None

    @property
    def changed_files(self) -> int:
        """Files that differ from the parent checkpoint's (from a fresh sandbox's, for the first).

        Counted when first asked for.
        """
        if self._changed_files is None:
            answer = self._sandbox._open_one()._call("stats", which=self._number)
            self._changed_files = int(answer["changed_files"])
        return self._changed_files

    def __repr__(self) -> str:
        return (
            f"Stats(pause_ms={self.pause_ms:.2f}, ahead_ms={self.ahead_ms:.2f}, "
            f"total_ms={self.total_ms:.2f}, "
            f"dirty_bytes={self.dirty_bytes}, processes={self.processes})"
        )


class Checkpoint:
    """Made by `Sandbox.checkpoint`. Equal to any other object for the same checkpoint.

    It lives until it is deleted, the last sandbox of its tree is closed, or the tree's policy lets
    go of it (`Sandbox.keep`).
    """

    _id = ""  # until it is made

    def __init__(
        self, sandbox: Sandbox, described: dict[str, Any], stats: dict[str, Any] | None = None
    ) -> None:
        self._sandbox = sandbox
        self._tree = sandbox._tree
        self._name: str | None = described["name"]
        self._created_at: float = described["created_at"]
        number: str = described["id"]
        self._stats = None if stats is None else Stats(sandbox, number, stats)
        self._id = number

    def __del__(self) -> None:
        if self._id:
            self._sandbox._keeper.release(self._tree, self._id)

    def _call(self, op: str, **arguments: Any) -> Any:
        return self._sandbox._open_one()._call(op, which=self._id, **arguments)

    @property
    def id(self) -> str:
        """Unique, for ever."""
        return self._id

    @property
    def name(self) -> str | None:
        """The name it was given, unique within the tree."""
        return self._name

    @property
    def created_at(self) -> datetime:
        """When it was taken (UTC)."""
        return datetime.fromtimestamp(self._created_at, tz=UTC)

    @property
    def parent(self) -> Checkpoint | None:
        """The checkpoint whose state the sandbox was last in before this one was taken."""
        described = self._call("parent")
        return None if described is None else Checkpoint(self._sandbox, described)

    @property
    def children(self) -> list[Checkpoint]:
        """The checkpoints taken next after this one, oldest first."""
        return [Checkpoint(self._sandbox, one) for one in self._call("children")]

    @property
    def stats(self) -> Stats:
        """What it cost."""
        if self._stats is None:
            self._stats = Stats(self._sandbox, self._id, self._call("measured"))
        return self._stats

    def hold(self) -> None:
        """Keep it whatever the tree's policy says, until `release`. Twice is no error."""
        self._call("hold", held=True)

    def release(self) -> None:
        """End what `hold` began: the policy decides again."""
        self._call("hold", held=False)

    def delete(self) -> None:
        """Free its memory and files. No other checkpoint and no sandbox is harmed.

        Its children become children of its parent.
        """
        self._call("delete")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Checkpoint):
            return NotImplemented
        return (self._tree, self._id) == (other._tree, other._id)

    def __hash__(self) -> int:
        return hash((self._tree, self._id))

    def __reduce__(self) -> NoReturn:
        no_copies("Checkpoint")

    def __repr__(self) -> str:
        return f"<Checkpoint {self._name or self._id}>"


def reference(tree: str, checkpoint: Checkpoint | str) -> str:
    """What the engine knows a checkpoint by."""
    if isinstance(checkpoint, Checkpoint):
        if checkpoint._tree != tree:
            raise UnknownCheckpoint(f"{checkpoint!r} belongs to another tree of sandboxes")
        return checkpoint._id
    if isinstance(checkpoint, str):
        return checkpoint
    raise TypeError(
        f"a checkpoint is given as a Checkpoint, its name or its id, "
        f"not as {type(checkpoint).__name__}"
    )
