"""The store of pages: what a table says is what the object held, and each page is held once."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltabox.linux.pages import PAGE, Store, Table

_MOST = 40  # pages

# (what, page, byte): write a whole page, a few bytes, zeros, punch a hole, set the size
_change = st.tuples(
    st.sampled_from(("page", "bytes", "zeros", "hole", "size")),
    st.integers(0, _MOST - 1),
    st.integers(0, 255),
)


@pytest.fixture
def store() -> Iterator[Store]:
    made = Store()
    yield made
    made.close()


@contextmanager
def _object(size: int = 0) -> Iterator[int]:
    fd = os.memfd_create("object")
    try:
        os.ftruncate(fd, size)
        yield fd
    finally:
        os.close(fd)


def _apply(fd: int, change: tuple[str, int, int]) -> None:
    what, page, byte = change
    at = page * PAGE
    if what == "page":
        os.pwrite(fd, bytes([byte]) * PAGE, at)
    elif what == "bytes":
        os.pwrite(fd, bytes([byte]) * 5, at + byte)
    elif what == "zeros":
        os.pwrite(fd, bytes(PAGE), at)
    elif what == "hole":
        _punch(fd, at)
    else:
        os.ftruncate(fd, at + byte)


def _punch(fd: int, at: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
    assert libc.fallocate(fd, 3, at, PAGE) == 0  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE


def _look(fd: int) -> tuple[bytes, list[int]]:
    """Its bytes, and which pages are no holes."""
    size = os.fstat(fd).st_size
    content = os.pread(fd, size, 0)
    present: list[int] = []
    at = 0
    while at < size:
        try:
            at = os.lseek(fd, at, os.SEEK_DATA)
        except OSError:
            break
        end = os.lseek(fd, at, os.SEEK_HOLE)
        present += range(at // PAGE, -(-end // PAGE))
        at = end
    return content, present


def _size(fd: int) -> int:
    return os.fstat(fd).st_size


@settings(deadline=None, max_examples=60)
@given(st.lists(st.lists(_change, max_size=12), min_size=1, max_size=6), st.data())
def test_every_state_comes_back(
    rounds: list[list[tuple[str, int, int]]], data: st.DataObject
) -> None:
    store = Store()
    states: list[tuple[Table, tuple[bytes, list[int]]]] = []
    with _object() as fd:
        table: Table | None = None
        for changes in rounds:
            for change in changes:
                _apply(fd, change)
            if table is not None and data.draw(st.booleans()):  # looked at ahead
                ahead = store.table(-(-_size(fd) // PAGE), table)
                ahead.renew(fd, 0, len(ahead))
                states.append((ahead, _look(fd)))
                for change in data.draw(st.lists(_change, max_size=3)):
                    _apply(fd, change)
                table = ahead
            table = store.read(fd, _size(fd), table).table()
            states.append((table, _look(fd)))
        for want, (content, present) in states:
            with _object(len(content)) as made:
                store.write(made, len(content), want, None)
                assert _look(made) == (content, present)
            # into an object that holds something else
            if _size(fd) == len(content):
                have = store.compare(fd, len(content), want)
                store.write(fd, len(content), want, have)
                assert _look(fd) == (content, present)
    while states:
        states.pop(data.draw(st.integers(0, len(states) - 1)))[0].close()
    assert store.size == 0
    store.close()


def test_a_page_is_held_once(store: Store) -> None:
    with _object(1000 * PAGE) as fd:
        for page in range(500):
            os.pwrite(fd, page.to_bytes(8, "little"), page * PAGE)
        first = store.read(fd, 1000 * PAGE, None).table()
        assert store.size == first.size - PAGE == 499 * PAGE  # one of them is all zeros
        os.pwrite(fd, b"other", 7 * PAGE)
        reading = store.read(fd, 1000 * PAGE, first)
        second = reading.table()
        assert (reading.changed, store.size) == (1, 500 * PAGE)
        same = store.read(fd, 1000 * PAGE, second).table()
        assert same == second != first
        first.close()
        first.close()
        assert store.size == 499 * PAGE
        second.close()
        same.close()
        assert store.size == 0


def test_looking_does_not_fill_holes(store: Store) -> None:
    with _object(1 << 30) as fd:
        os.pwrite(fd, b"x", 1 << 29)
        before = os.fstat(fd).st_blocks
        store.read(fd, 1 << 30, None).table().close()
        assert os.fstat(fd).st_blocks == before


def test_what_cannot_be_read_leaves_nothing(store: Store) -> None:
    with _object(3000 * PAGE) as fd:
        os.pwrite(fd, os.urandom(3000 * PAGE), 0)
        blind = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY)
        try:
            with pytest.raises(OSError):
                store.read(blind, 3000 * PAGE, None).table()
        finally:
            os.close(blind)
        reading = store.read(fd, 3000 * PAGE, None)
        reading.drop()
        reading.drop()
    assert store.size == 0
