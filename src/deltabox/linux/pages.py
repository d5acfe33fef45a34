"""A store of pages, and tables that tell what an object held at an instant: pages.c's face.

A `Table` is one state of one piece of shared memory.  It shares what has not changed with other
tables of its store, so it takes only what it differs in.
"""

from __future__ import annotations

import ctypes
import errno
import os
from array import array

from . import beside
from .bulk import library

PAGE = 4096
_SLOTS = 1 << 26  # 256 GiB, of addresses
_ALONE = 1024  # pages that are not worth a second thread

library.pages_open.restype = ctypes.c_void_p
library.pages_held.restype = ctypes.c_uint64
library.pages_present.restype = ctypes.c_uint64
library.pages_renew.restype = ctypes.c_long


class Table:
    """What every page of an object held. To be closed."""

    def __init__(self, store: Store, slots: array[int]) -> None:
        self._store = store
        self._slots = slots
        self.closed = False

    @property
    def address(self) -> int:
        return self._slots.buffer_info()[0]

    def __len__(self) -> int:
        return len(self._slots)

    def __eq__(self, other: object) -> bool:
        """Whether both are known to be the same; what was changed and put back counts as other."""
        if not isinstance(other, Table):
            return NotImplemented
        return self._store is other._store and self._slots == other._slots

    __hash__ = None  # type: ignore[assignment]

    def slots(self, count: int) -> array[int]:
        """The first so many pages, holes behind the end."""
        if count == len(self):
            return self._slots
        return self._slots[:count] + array("I", bytes(4 * max(0, count - len(self))))

    @property
    def size(self) -> int:
        """Bytes in pages that are no holes."""
        count = ctypes.c_uint64(len(self))
        return PAGE * int(library.pages_present(ctypes.c_void_p(self.address), count))

    def copy(self) -> Table:
        """The same once more."""
        return self._store.table(len(self), self)

    def renew(self, fd: int, first: int, count: int) -> None:
        """Look at some pages again, and hold what they are now; others may look at nothing then."""
        bad = library.pages_renew(
            ctypes.c_void_p(self._store.address),
            ctypes.c_int(fd),
            ctypes.c_uint64(first),
            ctypes.c_uint64(count),
            ctypes.c_void_p(self.address),
        )
        if bad < 0:
            raise OSError(-bad, os.strerror(-bad))

    def close(self) -> None:
        """Idempotent."""
        if not self.closed:
            self.closed = True
            self._store.release(self._slots)


class Reading:
    """A look at an object that other threads take. To be ended by `table` or `drop`."""

    def __init__(self, store: Store, fd: int, size: int, before: Table | None, adds: bool) -> None:
        """`fd` and `before` must stay as they are until it has ended."""
        count = -(-size // PAGE)
        self.slots = array("I", bytes(4 * count))
        self._store = store
        # of an object that has another size now: the beginning
        self._known = before.slots(count) if before is not None else array("I")
        known = self._known.buffer_info()[0] if self._known else 0
        self._jobs: list[beside.Job] = []
        self._keep = (self.slots, self._known, before)
        for first, some in _parts(count):
            address = self.slots.buffer_info()[0]
            self._jobs.append(
                beside.read_pages(
                    store.address, fd, first, some, known, address, int(adds), keep=self._keep
                )
            )
        self._adds = adds
        self.changed = 0

    def end(self) -> None:
        """Wait; raises the first OSError."""
        results = [job.wait() for job in self._jobs]
        bad = min(results, default=0)
        if bad < 0:
            self.drop()
            raise OSError(-bad, os.strerror(-bad))
        self.changed = sum(results)

    def table(self) -> Table:
        """Wait for the end; what it holds."""
        self.end()
        self._jobs = []
        return Table(self._store, self.slots)

    def drop(self) -> None:
        """Wait for the end, and forget what was found."""
        for job in self._jobs:
            job.wait()
        if self._jobs and self._adds:
            self._store.release(self.slots)
        self._jobs = []


class Store:
    """Pages of many tables. Thread-safe but for `close`."""

    def __init__(self) -> None:
        self.handle = ctypes.c_void_p(library.pages_open(ctypes.c_uint64(_SLOTS)))
        if not self.handle:
            raise OSError(errno.ENOMEM, "no addresses are left for a store of pages")

    @property
    def address(self) -> int:
        if not self.handle:
            raise OSError(errno.ESTALE, "the store of pages has been closed")
        return self.handle.value or 0

    @property
    def size(self) -> int:
        """Bytes held."""
        return PAGE * int(library.pages_held(self.handle)) if self.handle else 0

    def read(self, fd: int, size: int, before: Table | None) -> Reading:
        """Begin to find out what an object of `size` bytes holds; `before`: what it held once."""
        return Reading(self, fd, size, before, True)

    def table(self, count: int, like: Table | None) -> Table:
        """A table of so many pages, as those of `like` and holes behind them."""
        if like is not None and like.closed:
            raise OSError(errno.ESTALE, "the state has been forgotten")
        slots = array("I", bytes(4 * count)) if like is None else like.slots(count)[:]
        address = ctypes.c_void_p(slots.buffer_info()[0])
        library.pages_keep(ctypes.c_void_p(self.address), address, ctypes.c_uint64(count))
        return Table(self, slots)

    def compare(self, fd: int, size: int, table: Table) -> array[int]:
        """What it holds in terms of `table`; pages that it has otherwise are unknown."""
        reading = Reading(self, fd, size, table, False)
        reading.end()
        return reading.slots

    def write(self, fd: int, size: int, want: Table, have: array[int] | None) -> int:
        """Make an object hold `want`; `have` is what it holds now, None: nothing. Pages written."""
        known = 0 if have is None else have.buffer_info()[0]
        jobs = [
            beside.write_pages(
                self.address, fd, first, some, known, want.address, size, keep=(want, have)
            )
            for first, some in _parts(len(want))
        ]
        for job in jobs:
            job.wait()
        return sum(job.count() for job in jobs)

    def release(self, slots: array[int]) -> None:
        if self.handle:
            address = ctypes.c_void_p(slots.buffer_info()[0])
            library.pages_release(self.handle, address, ctypes.c_uint64(len(slots)))

    def close(self) -> None:
        """Give everything back; tables that are left are worth nothing then."""
        if self.handle:
            library.pages_close(self.handle)
            self.handle = ctypes.c_void_p(0)


def _parts(count: int) -> list[tuple[int, int]]:
    """(first, number) of what each thread does."""
    if count <= _ALONE:
        return [(0, count)] if count else []
    half = count // 2
    return [(0, half), (half, count - half)]
