"""Shared memory that only processes hold: memfd_create(2), and MAP_SHARED | MAP_ANONYMOUS.

Both are files of the kernel's own tmpfs; a mapping is told by their inode number, and the file is
reached through /proc/PID/map_files.  Fork shares such memory instead of copying it, so a template
cannot hold it.  What it held is a table in the tree's store of pages (linux/pages.py): a checkpoint
compares the object with its last table, and adds the pages that differ.  Before it, while the tree
runs, the same is done ahead (`Sharing.refresh`), so that little is left to copy.

A restore needs an object of its own with the same content: the keeper makes and fills it, PID 1
passes it on as a descriptor, and everybody maps that.  (An open file of anonymous shared memory can
be had through map_files; what maps it shows as what it was.)  Writing into pages that an object has
already is ten times faster than making a new one, so anonymous objects of trees that have ended are
kept in a `Stock` and brought to what is wanted.

docs/shared-memory.md has the measurements, and what was rejected: files in the sandbox's image,
cloned for each restore, and filling on first touch by userfaultfd(2).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import itertools
import os
import stat
import threading
from collections.abc import Callable, Container, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass

from ...linux import numbers as nr
from ...linux import shmem
from ...linux.mount import filesystem_type
from ...linux.pages import Reading, Store, Table
from ..model import PAGE, Description, Mapping
from ..rebuild import Entry, Kind, Rebuild
from ..subject import Refused, Subject

ANONYMOUS, MEMFD, SEGMENT = "/dev/zero (deleted)", "/memfd:", "/SYSV"
_DELETED = " (deleted)"
_F_GET_SEALS, _F_ADD_SEALS = 1034, 1033
_MFD_CLOEXEC, _MFD_ALLOW_SEALING = 1, 2
_CLOEXEC = 0o2000000
_HUGETLBFS = 0x958458F6  # linux/magic.h
_PIECE = 2048  # pages looked at before somebody else may take over
_SPARES = 1  # objects of a kind that wait to be used
_LARGE = 1 << 20  # bytes that it is worth to copy before they are needed

_GONE = (errno.ENOENT, errno.ESRCH, errno.ENXIO)

_ids = itertools.count(1)
# device and inode number, and whether the latter is the identifier of a System V segment: those
# may be the same as another file's
Key = tuple[int, int, bool]


def is_shared_memory(path: str, *, shared: bool) -> bool:
    """Whether a mapping of this name, in /proc/PID/maps, is of what this file is about."""
    return path.startswith((MEMFD, SEGMENT)) or (shared and path == ANONYMOUS)


@dataclass(frozen=True)
class SharedMemory:
    """One object at one instant. `number` is that of the object in all states of a tree."""

    number: int
    name: str | None  # a memfd's; None: anonymous
    segment: int  # the identifier of a System V segment; -1
    size: int
    mode: int
    uid: int
    gid: int
    seals: int
    table: Table
    reserve: bool

    @property
    def holder(self) -> str:
        """The input of a restore that brings it."""
        return f"shared{self.number}"


@dataclass(eq=False)
class Object:
    """One object of a running tree.

    Nothing of ours holds what the tree has made itself: it would not be freed when nobody in the
    tree has it any more. `path` led to it once.
    """

    number: int
    key: Key
    name: str | None
    reserve: bool
    path: str = ""
    fd: int = -1  # of what we have made
    table: Table | None = None  # what it held when it was looked at last

    @property
    def segment(self) -> int:
        """The identifier of a System V segment; -1."""
        return self.key[1] if self.key[2] else -1

    def open(self) -> int:
        """A descriptor for reading, if its path still leads there; else -1. Raises Refused."""
        try:
            path = self.path if self.fd < 0 else f"/proc/self/fd/{self.fd}"
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            if error.errno in _GONE:
                return -1
            raise
        try:
            info = os.fstat(fd)
            if (info.st_dev, info.st_ino) != self.key[:2]:
                os.close(fd)
                return -1
            if filesystem_type(fd) == _HUGETLBFS or not stat.S_ISREG(info.st_mode):
                raise Refused("shared memory of huge pages")
        except BaseException:
            os.close(fd)
            raise
        return fd

    def release(self) -> None:
        """Hold it no longer."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def close(self) -> None:
        self.release()
        if self.table is not None:
            self.table.close()
            self.table = None


class Sharing:
    """The shared memory of a running tree, as far as it has been met. Thread-safe."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._objects: dict[Key, Object] = {}
        self._lock = threading.Lock()

    def meet(self, key: Key, path: str, name: str | None, reserve: bool) -> Object:
        """What is behind `path` now."""
        with self._lock:
            if key not in self._objects:
                self._objects[key] = Object(next(_ids), key, name, reserve)
            found = self._objects[key]
            found.path = path
            return found

    def of_mapping(self, host: int, mapping: Mapping) -> Object:
        """What is mapped."""
        path = f"/proc/{host}/map_files/{mapping.start:x}-{mapping.end:x}"
        name = None
        if mapping.path.startswith(MEMFD):
            name = mapping.path.removeprefix(MEMFD).removesuffix(_DELETED)
        key = mapping.device, mapping.inode, mapping.path.startswith(SEGMENT)
        return self.meet(key, path, name, "nr" not in mapping.flags)

    def adopt(self, shared: SharedMemory, fd: int) -> None:
        """`fd`, which is taken, is what `shared` was made again as."""
        try:
            info = os.fstat(fd)
        except BaseException:
            os.close(fd)
            raise
        key = info.st_dev, info.st_ino, shared.segment >= 0
        one = Object(shared.number, key, shared.name, shared.reserve, fd=fd)
        one.table = shared.table.copy()
        with self._lock:
            self._objects[key] = one

    def place(self, number: int) -> tuple[int, int] | None:
        """Device and inode number of an object by its own number."""
        with self._lock:
            found = (one.key[:2] for one in self._objects.values() if one.number == number)
            return next(found, None)

    def all(self) -> list[Object]:
        with self._lock:
            return list(self._objects.values())

    def release_others(self, mapped: Container[int]) -> None:
        """Do not hold what nobody maps any more, of what only mappings have."""
        for one in self.all():
            if one.name is None and one.number not in mapped:
                one.release()

    def keep(self, numbers: set[int]) -> None:
        """Forget all others: nobody has them any more."""
        with self._lock:
            gone = [key for key, one in self._objects.items() if one.number not in numbers]
            for key in gone:
                self._objects.pop(key).close()

    def pieces(self, has_room: Callable[[int], bool]) -> Iterator[Callable[[], None]]:
        """Calls that look at what has changed while the tree runs, so that the next capture has
        less to do. Nobody may capture it during one of them.
        """
        for one in self.all():
            try:
                fd = one.open()
            except Refused:
                continue  # the capture says so
            if fd < 0:
                continue
            try:
                count = _pages(fd)
                if one.table is not None or has_room(count * PAGE):
                    for first in range(0, count, _PIECE):
                        yield functools.partial(self._renew, one, fd, first)
            finally:
                os.close(fd)

    def _renew(self, one: Object, fd: int, first: int) -> None:
        count = _pages(fd)
        if one.table is None or len(one.table) != count:
            before, one.table = one.table, self.store.table(count, one.table)
            if before is not None:
                before.close()
        if first < count:
            one.table.renew(fd, first, min(_PIECE, count - first))

    def leave(self) -> list[Object]:
        """Give all of them to the caller: the tree has ended."""
        with self._lock:
            found = list(self._objects.values())
            self._objects.clear()
        return found


class SharedMemories:
    """What a capture finds, in a tree that stands still.

    What is known from before is looked at from the beginning, by threads of C beside the tracer.
    """

    def __init__(self, sharing: Sharing, owner: int) -> None:
        self._sharing = sharing
        self._owner = owner
        self._opened: dict[int, int] = {}  # descriptors, by number
        self._readings: dict[int, Reading] = {}
        self._met: dict[int, Object] = {}
        self.found: list[SharedMemory] = []
        self.changed = 0  # bytes
        try:
            for one in sharing.all():
                with contextlib.suppress(Refused):  # who has it is not known yet
                    self._begin(one)
        except BaseException:
            self.close()
            raise

    def _begin(self, one: Object) -> bool:
        fd = one.open()
        if fd < 0:
            return False
        self._opened[one.number] = fd
        size = os.fstat(fd).st_size
        self._readings[one.number] = self._sharing.store.read(fd, size, one.table)
        return True

    def of_mapping(self, host: int, mapping: Mapping) -> int:
        """The number of what is mapped. Raises Refused."""
        return self._enter(self._sharing.of_mapping(host, mapping))

    def of_descriptor(self, subject: Subject) -> Description:
        info = os.stat(subject.path)
        name = subject.target.removeprefix(MEMFD).removesuffix(_DELETED)
        one = self._sharing.meet((info.st_dev, info.st_ino, False), subject.path, name, True)
        return Description("memfd", subject.flags, subject.position, state=self._enter(one))

    def of_segment(self, identifier: int) -> int | None:
        """The number of a System V segment that somebody has attached; None if nobody has."""
        return next((n for n, one in self._met.items() if one.segment == identifier), None)

    def enter_segment(self, identifier: int, fd: int) -> int:
        """The number of a segment that `fd` is of."""
        key = os.fstat(fd).st_dev, identifier, True
        return self._enter(self._sharing.meet(key, f"/proc/self/fd/{fd}", None, True))

    def _enter(self, one: Object) -> int:
        if one.number not in self._met:
            if one.number not in self._readings and not self._begin(one):
                raise Refused("shared memory that cannot be opened")
            self._met[one.number] = one
        return one.number

    def finish(self) -> None:
        """Before the tree goes on: wait until all of it has been looked at."""
        for number, one in self._met.items():
            fd = self._opened[number]
            info = os.fstat(fd)
            seals = fcntl.fcntl(fd, _F_GET_SEALS) if one.name is not None else 0
            reading = self._readings.pop(number)
            table = reading.table()
            self.changed += reading.changed * PAGE
            self.found.append(
                SharedMemory(
                    number,
                    one.name,
                    one.segment,
                    info.st_size,
                    stat.S_IMODE(info.st_mode),
                    info.st_uid - self._owner,
                    info.st_gid - self._owner,
                    seals,
                    table,
                    one.reserve,
                )
            )
            if one.table is not None:
                one.table.close()
            one.table = table.copy()
        self._drop()
        self._sharing.keep(set(self._met))

    def _drop(self) -> None:
        while self._readings:
            self._readings.popitem()[1].drop()
        while self._opened:
            os.close(self._opened.popitem()[1])

    def close(self) -> None:
        """There will be no checkpoint."""
        self._drop()
        while self.found:
            self.found.pop().table.close()


def _pages(fd: int) -> int:
    """How many an object has now."""
    return -(-os.fstat(fd).st_size // PAGE)


# -- restore ------------------------------------------------------------------------------------


@dataclass
class _Spare:
    """An object that nobody uses."""

    fd: int
    holds: Table | None = None  # what it holds, if that is known

    def close(self) -> None:
        os.close(self.fd)
        if self.holds is not None:
            self.holds.close()


class Stock:
    """Anonymous objects that wait to be used: of trees that have ended, or made ahead. Thread-safe.

    What one of an ended tree holds is looked at when it is needed: the end of a tree that has never
    run may change it too (the kernel marks robust mutexes of the dead).
    """

    def __init__(self, store: Store, has_room: Callable[[int], bool]) -> None:
        self._store = store
        self._has_room = has_room
        self._spares: dict[tuple[int, int], list[_Spare]] = {}  # by number and size
        self._lock = threading.Lock()
        self._closed = False

    def make(self, shared: SharedMemory, owner: int) -> int:
        """A descriptor of an object like `shared` at its instant, for a new tree."""
        spare = self._take(shared)
        if spare is None:
            fd = _memfd(shared, owner) if shared.name is not None else _anonymous(shared)
            spare = _Spare(fd, self._store.table(len(shared.table), None))
        try:
            self._bring(spare, shared)
        except BaseException:
            spare.close()
            raise
        if spare.holds is not None:
            spare.holds.close()
        return spare.fd

    def prepare(self, shared: Items[SharedMemory], owner: int) -> None:
        """Have one ready that is like each of these, for the next tree of this instant."""
        for one in shared:
            if not _may_wait(one) or not self._has_room(one.size):
                continue
            spare = self._take(one) or _Spare(_anonymous(one), self._store.table(0, None))
            try:
                self._bring(spare, one)
                if spare.holds is not None:
                    spare.holds.close()
                spare.holds = one.table.copy()
            except BaseException:
                spare.close()
                raise
            if not self._put(one.number, one.size, spare):
                spare.close()

    def fill(self, fd: int, shared: SharedMemory) -> None:
        """Make a new object, which holds nothing yet, hold what `shared` does."""
        self._store.write(fd, shared.size, shared.table, None)

    def give(self, objects: Items[Object]) -> None:
        """Keep or close what a tree has left that has ended."""
        for one in objects:
            if one.fd >= 0 and one.name is None and one.segment < 0:
                size = os.fstat(one.fd).st_size
                if self._has_room(size) and self._put(one.number, size, _Spare(one.fd)):
                    one.fd = -1
            one.close()

    def _take(self, shared: SharedMemory) -> _Spare | None:
        with self._lock:
            waiting = self._spares.get((shared.number, shared.size))
            return waiting.pop() if waiting else None

    def _put(self, number: int, size: int, spare: _Spare) -> bool:
        with self._lock:
            waiting = self._spares.setdefault((number, size), [])
            room = len(waiting) < _SPARES and not self._closed
            if room:
                waiting.append(spare)
            return room

    def _bring(self, spare: _Spare, shared: SharedMemory) -> None:
        """Make it hold what `shared` does; nobody knows what it holds if that fails."""
        table, count = shared.table, len(shared.table)
        if spare.holds is None:
            have = self._store.compare(spare.fd, shared.size, table)
        else:
            have = spare.holds.slots(count)
        self._store.write(spare.fd, shared.size, table, have)

    @property
    def size(self) -> int:
        """Bytes that wait to be used, at the most."""
        with self._lock:
            return sum(size * len(waiting) for (_, size), waiting in self._spares.items())

    def clear(self) -> bool:
        """Give the memory back; whether there was any."""
        with self._lock:
            gone = [spare for waiting in self._spares.values() for spare in waiting]
            self._spares.clear()
        for spare in gone:
            spare.close()
        return bool(gone)

    def close(self) -> None:
        self._closed = True
        self.clear()


def _may_wait(shared: SharedMemory) -> bool:
    """Whether it is worth having one more of it, and nothing tells it from a new one."""
    return shared.name is None and shared.segment < 0 and shared.table.size >= _LARGE


def _anonymous(shared: SharedMemory) -> int:
    return shmem.anonymous((shared.size + PAGE - 1) & -PAGE, reserve=shared.reserve)


def _memfd(shared: SharedMemory, owner: int) -> int:
    fd = os.memfd_create(shared.name or "", _MFD_CLOEXEC | _MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, shared.size)
        os.fchown(fd, owner + shared.uid, owner + shared.gid)
        os.fchmod(fd, shared.mode)
    except BaseException:
        os.close(fd)
        raise
    return fd


def brought(shared: Items[SharedMemory]) -> list[SharedMemory]:
    """Those that come with the request; segments are found by their identifier."""
    return [one for one in shared if one.segment < 0]


def make(rebuild: Rebuild) -> None:
    """Give every object that came with the request its number, before anybody needs it."""
    places: dict[int, int] = {}
    readers: dict[int, int] = {}
    rebuild.notes["shared memory"] = places
    rebuild.notes["shared memory to read"] = readers
    for shared in brought(rebuild.capture.shared):
        number = places[shared.number] = rebuild.reserve()
        given = rebuild.program.inputs[shared.holder]
        rebuild.init.call(nr.DUP3, given, number, _CLOEXEC, what="shared memory")
        if _is_mapped_for_reading(rebuild, shared.number):
            readers[shared.number] = rebuild.reserve()
            _reopen(rebuild, number, os.O_RDONLY)
            rebuild.place(readers[shared.number])


def finish(rebuild: Rebuild) -> None:
    """When all processes have mapped what they had: seals."""
    places: dict[int, int] = rebuild.notes["shared memory"]
    for shared in rebuild.capture.shared:
        if shared.seals:
            place = places[shared.number]
            rebuild.init.call(nr.FCNTL, place, _F_ADD_SEALS, shared.seals, what="F_ADD_SEALS")


def descriptor_of(rebuild: Rebuild, mapping: Mapping) -> int:
    """The descriptor of the object in PID 1 and its clones."""
    kind = "shared memory" if _may_write(mapping) else "shared memory to read"
    number: int = rebuild.notes[kind][mapping.memory]
    return number


def _may_write(mapping: Mapping) -> bool:
    """A shared mapping of a descriptor for reading, or of sealed memory, stays without writing."""
    return mapping.may_write or not mapping.shared


def _is_mapped_for_reading(rebuild: Rebuild, number: int) -> bool:
    mappings = (m for p in rebuild.capture.processes for m in p.mappings)
    return any(m.memory == number and not _may_write(m) for m in mappings)


def _open(rebuild: Rebuild, entries: Items[Entry]) -> None:
    """Each description through the link of the object's first descriptor, as open(2) makes one."""
    for number, description in entries:
        _reopen(rebuild, rebuild.notes["shared memory"][description.state], description.flags)
        if description.position:
            rebuild.init.call(nr.LSEEK, rebuild.opened, description.position, 0)
        rebuild.place(number)


def _reopen(rebuild: Rebuild, number: int, flags: int) -> None:
    path = rebuild.program.text(f"/proc/self/fd/{number}")
    rebuild.init.call(nr.OPENAT, -100, path, flags, save=rebuild.opened, what="open a memfd")


KIND = Kind(("memfd",), _open)
