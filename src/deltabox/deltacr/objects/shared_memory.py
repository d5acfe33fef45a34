"""Shared memory that only processes hold: memfd_create(2), and MAP_SHARED | MAP_ANONYMOUS.

Both are files of the kernel's own tmpfs; a mapping is told by their inode number, and the file is
reached through /proc/PID/map_files.  Fork shares such memory instead of copying it, so a template
cannot hold it: at the checkpoint its bytes (not its holes) are copied into a file of the keeper's,
and PID 1 copies them into a new object at every restore.  That costs with the size, not with the
change.

Anonymous shared memory has no descriptor.  PID 1 maps it where every clone inherits it, and each
duplicates the parts it had into place: mremap(2) of a shared mapping with an old size of 0.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import struct
from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass

from ...linux import numbers as nr
from ..model import PAGE, Description, Mapping
from ..rebuild import Entry, Kind, Rebuild
from ..records import Sequence
from ..subject import Refused, Subject

ANONYMOUS, MEMFD = "/dev/zero (deleted)", "/memfd:"
_DELETED = " (deleted)"
_MOST = 4 << 30  # bytes of one tree's
_CLOSE = 1 << 16  # holes smaller than this are copied too
_F_GET_SEALS, _F_ADD_SEALS = 1034, 1033
_MFD_CLOEXEC, _MFD_ALLOW_SEALING = 1, 2
_NORESERVE = 0x4000


@dataclass(frozen=True)
class SharedMemory:
    """One object. `extents` are (offset, size) of what is not a hole, in its copy too."""

    name: str | None  # a memfd's; None: anonymous
    size: int
    mode: int
    uid: int
    gid: int
    seals: int
    extents: tuple[tuple[int, int], ...]
    holder: str  # the input that brings its copy
    reserve: bool


class SharedMemories:
    """What a capture finds, with copies that the template keeps."""

    def __init__(self, owner: int) -> None:
        self.found: list[SharedMemory] = []
        self.copies: list[int] = []
        self._owner = owner
        self._index: dict[tuple[int, int], int] = {}
        self._total = 0

    def of_mapping(self, host: int, mapping: Mapping) -> int:
        """The index of what is mapped. Raises Refused."""
        key = (mapping.device, mapping.inode)
        if key not in self._index:
            path = f"/proc/{host}/map_files/{mapping.start:x}-{mapping.end:x}"
            name = None
            if mapping.path.startswith(MEMFD):
                name = mapping.path.removeprefix(MEMFD).removesuffix(_DELETED)
            self._index[key] = self._enter(path, name, "nr" not in mapping.flags)
        return self._index[key]

    def of_descriptor(self, subject: Subject) -> Description:
        info = os.stat(subject.path)
        key = (info.st_dev, info.st_ino)
        if key not in self._index:
            name = subject.target.removeprefix(MEMFD).removesuffix(_DELETED)
            self._index[key] = self._enter(subject.path, name, True)
        return Description("memfd", subject.flags, subject.position, state=self._index[key])

    def _enter(self, path: str, name: str | None, reserve: bool) -> int:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            info = os.fstat(fd)
            if info.st_blksize > PAGE or not stat.S_ISREG(info.st_mode):
                raise Refused("shared memory of huge pages")
            extents = tuple(_extents(fd, info.st_size))
            self._total += sum(size for _, size in extents)
            if self._total > _MOST:
                raise Refused(f"shared memory, more than {_MOST >> 30} GiB of it in all")
            seals = fcntl.fcntl(fd, _F_GET_SEALS) if name is not None else 0
            copy = os.memfd_create("deltabox", os.MFD_CLOEXEC)
            self.copies.append(copy)
            os.ftruncate(copy, info.st_size)
            for at, size in extents:
                _copy(fd, copy, at, size)
        finally:
            os.close(fd)
        self.found.append(
            SharedMemory(
                name,
                info.st_size,
                stat.S_IMODE(info.st_mode),
                info.st_uid - self._owner,
                info.st_gid - self._owner,
                seals,
                extents,
                f"shared{len(self.found)}",
                reserve,
            )
        )
        return len(self.found) - 1

    def close(self) -> None:
        """Let go of the copies, if no template keeps them."""
        while self.copies:
            os.close(self.copies.pop())


def _extents(fd: int, size: int) -> Iterator[tuple[int, int]]:
    """(offset, size) of what is not a hole; near ones as one, in whole pages."""
    start = end = 0
    while end < size:
        try:
            low = os.lseek(fd, end, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                break
            raise
        high = os.lseek(fd, low, os.SEEK_HOLE)
        if end > start and low - end > _CLOSE:
            yield start, end - start
            start = low
        elif end == start:
            start = low
        end = high
    if end > start:
        yield start, end - start


def _copy(source: int, target: int, at: int, size: int) -> None:
    while size:
        done = os.copy_file_range(source, target, size, at, at)
        if not done:
            raise OSError(errno.EIO, "shared memory shrank while it was copied")
        at, size = at + done, size - done


# -- restore ------------------------------------------------------------------------------------


def make(rebuild: Rebuild) -> None:
    """All objects, in PID 1, before anything refers to them."""
    places: dict[int, int] = {}
    rebuild.notes["shared memory"] = places
    readers: dict[int, int] = {}
    rebuild.notes["shared memory to read"] = readers
    offset = 0
    for index, shared in enumerate(rebuild.capture.shared):
        if shared.name is None:
            _make_anonymous(rebuild, shared, offset)
            places[index] = offset
            offset += (shared.size + 2 * PAGE - 1) & -PAGE
        else:
            places[index] = rebuild.reserve()
            _make_memfd(rebuild, shared, places[index])
            if _is_mapped_for_reading(rebuild, index):
                readers[index] = rebuild.reserve()
                _reopen(rebuild, places[index], os.O_RDONLY)
                rebuild.place(readers[index])


def _make_anonymous(rebuild: Rebuild, shared: SharedMemory, offset: int) -> None:
    do, program = rebuild.init, rebuild.program
    flags = 0x31 | (0 if shared.reserve else _NORESERVE)  # MAP_SHARED | MAP_FIXED | MAP_ANONYMOUS
    size = (shared.size + PAGE - 1) & -PAGE
    do.call(nr.MMAP, program.place(offset), size, 3, flags, -1, 0, what="map shared memory")
    holder = program.inputs[shared.holder]
    for at, length in shared.extents:
        do.call(
            nr.PREAD64,
            holder,
            program.place(offset + at),
            length,
            at,
            expect=length,
            what="fill shared memory",
        )


def _make_memfd(rebuild: Rebuild, shared: SharedMemory, number: int) -> None:
    do, program = rebuild.init, rebuild.program
    name = program.text(os.fsencode(shared.name or ""))
    flags = _MFD_CLOEXEC | _MFD_ALLOW_SEALING
    do.call(nr.MEMFD_CREATE, name, flags, save=rebuild.opened, what="memfd_create")
    rebuild.place(number)
    do.call(nr.FTRUNCATE, number, shared.size, what="size of a memfd")
    holder = program.inputs[shared.holder]
    for at, length in shared.extents:
        here, there = program.data(struct.pack("<q", at)), program.data(struct.pack("<q", at))
        do.call(nr.COPY_FILE_RANGE, holder, here, number, there, length, expect=length, what="fill")
    if (shared.uid, shared.gid) != (0, 0):
        do.call(nr.FCHOWN, number, shared.uid, shared.gid, what="owner of a memfd")
    do.call(nr.FCHMOD, number, shared.mode, what="mode of a memfd")


def finish(rebuild: Rebuild) -> None:
    """When all processes have mapped what they had: seals, and PID 1's own mappings go."""
    places: dict[int, int] = rebuild.notes["shared memory"]
    for index, shared in enumerate(rebuild.capture.shared):
        if shared.name is None:
            size = (shared.size + PAGE - 1) & -PAGE
            rebuild.init.call(nr.MUNMAP, rebuild.program.place(places[index]), size)
        elif shared.seals:
            number = places[index]
            rebuild.init.call(nr.FCNTL, number, _F_ADD_SEALS, shared.seals, what="F_ADD_SEALS")


def map_part(rebuild: Rebuild, do: Sequence, mapping: Mapping) -> None:
    """Give a clone its mapping of anonymous shared memory."""
    place = rebuild.notes["shared memory"][mapping.memory]
    origin = rebuild.program.place(place + mapping.offset)
    do.call(nr.MREMAP, origin, 0, mapping.size, 3, mapping.start, what="shared memory")
    if mapping.prot != 3:
        do.call(nr.MPROTECT, mapping.start, mapping.size, mapping.prot, what="protect")


def descriptor_of(rebuild: Rebuild, mapping: Mapping) -> int | None:
    """The descriptor of a memfd in PID 1 and its clones; None for anonymous shared memory."""
    if rebuild.capture.shared[mapping.memory].name is None:
        return None
    kind = "shared memory" if _may_write(mapping) else "shared memory to read"
    number: int = rebuild.notes[kind][mapping.memory]
    return number


def _may_write(mapping: Mapping) -> bool:
    """A shared mapping of a descriptor for reading, or of sealed memory, stays without writing."""
    return mapping.may_write or not mapping.shared


def _is_mapped_for_reading(rebuild: Rebuild, index: int) -> bool:
    mappings = (m for p in rebuild.capture.processes for m in p.mappings)
    return any(m.memory == index and not _may_write(m) for m in mappings)


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
