"""Branches: forks that are meant to come back."""

from __future__ import annotations

import os
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Literal, overload

from .checkpoint import Change, Checkpoint
from .files import StrPath
from .sandbox import Sandbox


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

    def __init__(self, parent: Sandbox, name: str, described: dict[str, Any]) -> None:
        super().__init__(_keeper=parent._keeper, _described=described)
        self._parent = parent
        self._name = name
        self._committed = self._merged = False
        self._origin = self.head

    @property
    def name(self) -> str:
        """The name it was given, for displays; it need not be unique."""
        return self._name

    @property
    def parent(self) -> Sandbox:
        """The sandbox that it was made of, or what that has become part of since."""
        return self._parent._present()

    @property
    def origin(self) -> Checkpoint:
        """The state that it began as."""
        assert self._origin is not None  # a fork stands on the checkpoint it was made of
        return self._origin

    @property
    def committed(self) -> bool:
        """Whether its parent is it by now."""
        return self._committed

    @overload
    def commit(self) -> None: ...

    @overload
    def commit(self, *, files_only: Literal[False]) -> None: ...

    @overload
    def commit(self, *, files_only: Literal[True], paths: Sequence[StrPath] = ...) -> list[str]: ...

    def commit(
        self, *, files_only: bool = False, paths: Sequence[StrPath] = ("/",)
    ) -> list[str] | None:
        """Make the parent be this branch: its files, its programs, its handles.

        The parent's own programs end, with everything it has done since the branch was made: calls
        that wait in it raise `RolledBack`, handles that it got since then are stale. Handles of the
        branch, and calls in flight on them, go on in the parent. The branch itself is closed. No
        checkpoint is taken for that, and none is lost.

        files_only: bring only what the branch has changed in files, at or below `paths`, into those
            of the parent, whose programs go on; they stand still meanwhile and see all of it at
            once. What the parent has changed since the branch was made stays, and it may have been
            rolled back, or be another branch by now. Returns the paths that have changed there. The
            branch runs on; a `with` block just closes it at its end then.

        Raises `BranchStale` if the parent was rolled back since, or another branch committed;
        `MergeConflict`, with the paths of files that both have changed; `SandboxClosed` if the
        parent is closed; `BranchError`. Nothing has changed then, and the branch runs on.
        """
        if files_only:
            if isinstance(paths, (str, bytes)):
                raise TypeError("paths is a list of paths, not one string")
            under = [os.path.normpath(f"/{os.fspath(path)}") for path in paths]
            merged: list[str] = self._call("merge", _settle=True, under=under)
            self._merged = True
            return merged
        if tuple(paths) != ("/",):
            raise ValueError("paths are for files_only=True: programs cannot be committed in part")
        self._keeper.call("commit", _settle=True, box=self._check_open())
        self._committed = self._closed = True
        return None

    def abort(self) -> None:
        """End the branch; its parent is as if it had never been. The same as `close`."""
        self.close()

    def diff(
        self, since: Checkpoint | str | None = None, until: Checkpoint | str | None = None
    ) -> list[Change]:
        """What has changed in the files, by default since the branch was made."""
        return super().diff(self.origin if since is None else since, until)

    def patch(
        self,
        since: Checkpoint | str | None = None,
        until: Checkpoint | str | None = None,
        *,
        under: str = "/",
    ) -> str:
        """The changes to text files as a unified diff, by default since the branch was made."""
        return super().patch(self.origin if since is None else since, until, under=under)

    def __enter__(self) -> Branch:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if kind is None and not self._closed and not self._merged:
                self.commit()
        finally:
            self.close()

    def _present(self) -> Sandbox:
        return self._parent._present() if self._committed else self

    def __repr__(self) -> str:
        state = " (committed)" if self._committed else " (closed)" if self._closed else ""
        return f"<Branch {self._name or self._box}{state} of {self._parent!r}>"
