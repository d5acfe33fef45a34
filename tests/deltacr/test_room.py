"""The limits of a tree of sandboxes are a sum; what makes processes has a second chance."""

from __future__ import annotations

import errno
import threading
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from deltabox.deltacr import room
from deltabox.deltacr.room import Room
from deltabox.errors import CheckpointError, RollbackError


class _Groups:
    """What Room needs of them: it remembers what was written."""

    share_tasks = True

    def __init__(self) -> None:
        self.written: list[dict[str, int]] = []
        self.began = threading.Event()
        self.go_on = threading.Event()
        self.go_on.set()

    def tasks(self) -> int:
        return 42

    def scale(self, **sums: int) -> None:
        if not self.began.is_set():
            self.began.set()
            assert self.go_on.wait(20)
        self.written.append(sums)


@pytest.fixture
def groups() -> _Groups:
    return _Groups()


@pytest.fixture
def made(groups: _Groups, monkeypatch: pytest.MonkeyPatch) -> Room:
    monkeypatch.setattr(room, "still", nullcontext)
    return Room(groups, lambda: (1, 0))  # type: ignore[arg-type]


def _live() -> Any:
    return SimpleNamespace(ahead=SimpleNamespace(excluded=nullcontext), tasks=0)


def _full() -> RollbackError:
    error = RollbackError("nothing was rolled back")
    error.__cause__ = BlockingIOError(errno.EAGAIN, "fork")
    return error


def test_an_older_sum_is_not_written_over_a_newer_one(groups: _Groups, made: Room) -> None:
    groups.go_on.clear()
    older = threading.Thread(target=made.begin, args=(0,))
    older.start()
    assert groups.began.wait(20)
    newer = threading.Thread(target=made.begin, args=(5,))
    newer.start()
    newer.join(0.2)  # it must not come through now, so there is nothing else to wait for
    groups.go_on.set()
    older.join(20)
    newer.join(20)
    assert [sums["waiting"] for sums in groups.written] == [0, 5]


def test_what_lacked_a_process_is_done_again_with_room(groups: _Groups, made: Room) -> None:
    tries: list[int] = []

    def work() -> str:
        tries.append(groups.written[-1]["more"] if groups.written else 0)
        if len(tries) == 1:
            raise _full()
        return "done"

    assert made.given(_live(), work) == "done"
    assert tries == [0, 42]
    assert groups.written[-1]["more"] == 0


def test_the_room_is_taken_back_when_it_fails_again(groups: _Groups, made: Room) -> None:
    def work() -> None:
        raise _full()

    with pytest.raises(RollbackError):
        made.given(_live(), work)
    assert [sums["more"] for sums in groups.written] == [42, 0]


def test_any_other_error_is_an_error_at_once(groups: _Groups, made: Room) -> None:
    tries = []

    def work() -> None:
        tries.append(1)
        raise RollbackError("nothing was rolled back")

    with pytest.raises(RollbackError):
        made.given(_live(), work)
    groups.share_tasks = False
    with pytest.raises(RollbackError):
        made.given(_live(), lambda: (_ for _ in ()).throw(_full()))
    assert tries == [1]
    assert groups.written == []


def test_the_first_error_is_told_where_nobody_could_be_stopped(
    groups: _Groups, made: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    def still(_live: object) -> None:
        raise CheckpointError("thread 7 did not stop within 5 s")

    monkeypatch.setattr(room, "still", still)

    def work() -> None:
        raise _full()

    with pytest.raises(RollbackError, match="nothing was rolled back"):
        made.given(_live(), work)
    assert groups.written == []
