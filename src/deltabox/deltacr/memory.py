"""A process's address space: read its map, and build it again in a clone of a template.

Private pages are the template's business (stash.py); here is everything around them.  Anonymous
mappings are moved into place from the stash, files are mapped again, and what /proc/PID/smaps tells
of each mapping is set again with madvise(2).  Facts that have no place in a rebuilt mapping are
refused by name.

Memory that its owner wants wiped in a child (MADV_WIPEONFORK, and MAP_DROPPABLE, which the kernel
itself may drop at any time) is never saved: a rebuilt process finds zeros there, as a child of
fork(2) does.  That is how user-space random generators learn that they have become two, and a
rollback makes two of them out of one as well, one after the other.
"""

from __future__ import annotations

import mmap
import os
import re
import struct
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import replace
from itertools import pairwise
from typing import Literal

from ..linux import numbers as nr
from ..linux.bulk import Regions
from ..linux.pagemap import PAGE_IS_GUARD
from .model import PAGE, Mapping, Process
from .objects import shared_memory, sysv
from .rebuild import Rebuild
from .records import (
    CODE,
    CONTROL,
    FRAMES,
    OURS,
    OURS_END,
    Program,
    Sequence,
)
from .stash import Stash, map_flags
from .subject import Refuse

_HEADER = re.compile(
    r"^([0-9a-f]+)-([0-9a-f]+) (.)(.)(.)(.) ([0-9a-f]+) ([0-9a-f]+):([0-9a-f]+) (\d+) *(.*)$"
)
_GIB = 1 << 30
_ANONYMOUS_NAMES = ("", "[heap]", "[stack]")
_VDSO_NAMES = ("[vvar]", "[vvar_vclock]", "[vdso]")
_REFUSED_FLAGS = {
    "ht": "huge pages of hugetlbfs",
    "pf": "physical memory",
    "io": "device memory",
    "um": "memory watched by a userfaultfd",
    "uw": "memory watched by a userfaultfd",
    "ui": "memory watched by a userfaultfd",
    "ss": "a shadow stack",
    "sf": "directly mapped storage (MAP_SYNC)",
}
_KNOWN_FLAGS = {
    *("rd", "wr", "ex", "sh", "mr", "mw", "me", "ms", "gd", "lo", "lf", "sr", "rr", "dc", "de"),
    *("ac", "nr", "ar", "wf", "dd", "sd", "mm", "hg", "nh", "mg", "sl", "dp", "gu", "pkey"),
}
# VmFlags -> advice of madvise(2) that sets them again
_ADVICE = {"rr": 1, "sr": 2, "dc": 10, "mg": 12, "hg": 14, "nh": 15, "dd": 16, "wf": 18}
_IOV_MAX = 1024
_MADV_UNMERGEABLE, _MADV_GUARD_INSTALL = 13, 102
_MSEAL = 462
_DROPPABLE = 8 | 0x20 | 0x100000  # MAP_DROPPABLE, MAP_ANONYMOUS, MAP_FIXED_NOREPLACE
_Pages = tuple[tuple[int, int], ...]
_PR_SET_VMA = 0x53564D41
_DELETED = " (deleted)"
# The ring of an AIO context could be made again and moved to its place (aio_ring_mremap() in
# fs/aio.c), but nothing tells whether it is idle: free slots are cached by CPUs, so they cannot be
# counted even by submitting requests. A lost request would be a program that waits for ever.
_AIO = "/[aio] (deleted)"


def mappings(text: bytes, refuse: Refuse) -> tuple[list[Mapping], int, int]:
    """(VMAs, address of the vdso, a free place for injection), from what ask.c left of smaps."""
    found: list[Mapping] = []
    vdso = 0
    for header, flags in _entries(text):
        mapping = _mapping(header, flags, refuse)
        if mapping is None:
            continue
        if mapping.path == "[vdso]":
            vdso = mapping.start
        found.append(mapping)
    if not vdso:
        raise refuse("has unmapped its vdso", "mapping")
    return found, vdso, _gap(found)


def with_pages(mappings: list[Mapping], present: Regions) -> list[Mapping]:
    """The mappings with the pages and guard regions that have been found in them."""
    return [
        replace(m, pages=pages if m.saved else (), guards=guards) if pages or guards else m
        for m, (pages, guards) in zip(mappings, _pages_of(mappings, present), strict=True)
    ]


def repaged(
    before: tuple[Mapping, ...], present: Regions, pristine: Callable[[Mapping], bool]
) -> tuple[Mapping, ...]:
    """The same mappings with the pages they have now; those with the same pages stay themselves."""
    return tuple(
        m
        if (m.pages, m.guards) == (pages, guards) or (not m.saved and m.guards == guards)
        else replace(
            m,
            pages=pages if m.saved else (),
            guards=guards,
            of_base=bool(pages) and m.saved and m.kind == "file" and pristine(m),
        )
        for m, (pages, guards) in zip(before, _pages_of(before, present), strict=True)
    )


def _pages_of(mappings: Items[Mapping], present: Regions) -> list[tuple[_Pages, _Pages]]:
    """(pages, guard regions) of each mapping."""
    out: list[tuple[_Pages, _Pages]] = []
    regions = iter(present)
    region = next(regions, None)
    for mapping in mappings:
        pages: list[tuple[int, int]] = []
        guards: list[tuple[int, int]] = []
        while region is not None and region[0] < mapping.end:
            low, high, found = region
            if high > mapping.start:
                into = guards if found & PAGE_IS_GUARD else pages
                low, end = max(low, mapping.start), min(high, mapping.end)
                if into and into[-1][1] == low:
                    into[-1] = into[-1][0], end
                else:
                    into.append((low, end))
            if high > mapping.end:
                break
            region = next(regions, None)
        out.append((tuple(pages), tuple(guards)))
    return out


def _entries(text: bytes) -> list[tuple[re.Match[str], frozenset[str]]]:
    out = []
    header: re.Match[str] | None = None
    key = ""
    for line in text.decode(errors="surrogateescape").splitlines():
        if line.startswith("VmFlags:"):
            assert header is not None
            out.append((header, frozenset(line[8:].split()) | ({key} if key else frozenset())))
        elif line.startswith("ProtectionKey:"):
            key = "pkey" if line.split()[1] != "0" else ""
        elif not line[0].isupper():
            header = _HEADER.match(line)
    return out


def _mapping(header: re.Match[str], flags: frozenset[str], refuse: Refuse) -> Mapping | None:
    low, high, r, w, x, s, offset, major, minor, inode, path = header.groups()
    start, end = int(low, 16), int(high, 16)
    if path == "[vsyscall]":
        return None  # the same in every process
    if start < OURS_END and end > OURS:
        raise refuse(
            f"maps memory at {start:#x}; the engine needs {OURS:#x}-{OURS_END:#x} for itself",
            "mapping",
        )
    prot = (r == "r") | (w == "w") << 1 | (x == "x") << 2
    if path in _VDSO_NAMES:
        return Mapping(start, end, prot, False, 0, "vdso", path, False, flags)
    for flag, what in _REFUSED_FLAGS.items():
        if flag in flags:
            raise refuse(f"has {what} at {start:#x}", "mapping")
    unknown = flags - _KNOWN_FLAGS
    if unknown:
        raise refuse(f"has memory of an unknown kind ({min(unknown)}) at {start:#x}", "mapping")
    if "pkey" in flags:
        raise refuse(f"has memory under a protection key at {start:#x}", "mapping")
    shared = s == "s"
    if path in _ANONYMOUS_NAMES or path.startswith("[anon:"):
        name = path[6:-1] if path.startswith("[anon:") else ""
        return Mapping(start, end, prot, False, 0, "anonymous", name, True, flags)
    if not path.startswith("/"):
        raise refuse(f"maps a kernel object, {path}", "mapping")
    if path.startswith("/anon_hugepage"):
        raise refuse(f"has shared memory at {start:#x} ({path})", "mapping")
    if path == _AIO:
        raise refuse(
            f"has an AIO context (io_setup) at {start:#x}, whose requests in flight cannot be seen",
            "aio context",
        )
    if shared_memory.is_shared_memory(path, shared=shared):
        kind: Literal["file", "memory"] = "memory"
    else:
        kind = "file"
    return Mapping(
        start,
        end,
        prot,
        shared,
        int(offset, 16),
        kind,
        path,
        "mw" in flags,
        flags,
        os.makedev(int(major, 16), int(minor, 16)),
        int(inode),
    )


def check_version(memory_fd: int, mapping: Mapping, file: int, refuse: Refuse) -> None:
    """A mapping must show what its file holds now, where the process has not written itself.

    It may not: a mapping made before overlayfs copied a file of the base up stays with the base's
    version for ever, under the same inode number.
    """
    size = os.fstat(file).st_size
    position = mapping.start
    edges = [*mapping.pages, (mapping.end, mapping.end)]
    for low, high in edges:
        while position < low:
            offset = mapping.offset + position - mapping.start
            length = min(low - position, 1 << 20, size - offset)
            if length <= 0:
                return
            if os.pread(memory_fd, length, position) != os.pread(file, length, offset):
                raise refuse(f"maps {mapping.path} as it was before it was changed", "mapping")
            position += length
        position = high


def _gap(found: list[Mapping]) -> int:
    """A free range well away from stacks that grow and heaps that grow."""
    ordered = sorted((m.start, m.end) for m in found)
    for (_, end), (start, _) in pairwise(ordered):
        if start - end > (64 << 20):
            return (end + start) // 2 & ~(PAGE - 1)
    return ordered[-1][1] + (16 << 20)


# -- and back ---------------------------------------------------------------------------------


def restore(
    rebuild: Rebuild,
    do: Sequence,
    process: Process,
    stash: Stash,
    opened: dict[tuple[str | int, int], int],
) -> None:
    """Build the address space of one clone; `opened` gives the descriptor of each mapped file."""
    program = rebuild.program
    fixed = mmap.MAP_PRIVATE | 0x100000  # MAP_FIXED_NOREPLACE
    segments = {segment.memory for segment in rebuild.capture.system_v.segments}
    for mapping in process.mappings:
        if mapping.kind == "vdso":
            continue
        start, size, prot = mapping.start, mapping.size, mapping.prot
        name = f"{start:#x}-{mapping.end:#x}"
        held = stash.held.get((process.pid, start))
        if "dp" in mapping.flags:
            # what the kernel may drop (getrandom(2) in the vdso) is a kind of its own
            do.call(nr.MMAP, start, size, 3, _DROPPABLE, -1, 0, what=f"map {name}")
            if prot != 3:
                do.call(nr.MPROTECT, start, size, prot, what=f"protect {name}")
        elif held is not None and (mapping.kind == "anonymous" or held.file):
            do.call(nr.MREMAP, held.address, size, size, 3, start, what=f"place {name}")
            if prot != 3:
                do.call(nr.MPROTECT, start, size, prot, what=f"protect {name}")
        elif mapping.kind == "anonymous":
            flags = fixed | mmap.MAP_ANONYMOUS | map_flags(mapping)
            do.call(nr.MMAP, start, size, prot, flags, -1, 0, what=f"map {name}")
        else:
            if mapping.memory in segments:
                continue  # attached below
            if mapping.memory < 0:
                file = mapping.ghost if mapping.ghost >= 0 else mapping.path
                fd = opened[file, open_mode(mapping)]
            else:
                fd = shared_memory.descriptor_of(rebuild, mapping)
            first = prot | 3 if mapping.pages else prot
            kind = mmap.MAP_SHARED | 0x100000 if mapping.shared else fixed
            do.call(
                nr.MMAP,
                start,
                size,
                first,
                kind | map_flags(mapping),
                fd,
                mapping.offset,
                what=f"map {mapping.path}",
            )
            for low, high in mapping.pages:
                assert held is not None
                do.copy(low, low + held.shift, high - low)
            if first != prot:
                do.call(nr.MPROTECT, start, size, prot, what=f"protect {name}")
        if mapping.kind == "anonymous" and mapping.path:
            do.call(nr.PRCTL, _PR_SET_VMA, 0, start, size, program.text(mapping.path))
    sysv.attach(rebuild, do, process)
    vdso = min(m.start for m in process.mappings if m.kind == "vdso")
    do.call(nr.ARCH_PRCTL, 0x2003, vdso, what="map the vdso")


def advise(do: Sequence, process: Process) -> None:
    """Flags that would act on our own forks, and the rest of madvise(2), once all is in place.

    A droppable mapping comes with those that it always has.
    """
    merged = process.attributes is not None and process.attributes.merge
    for mapping in process.mappings:
        if merged and mapping.kind == "anonymous" and "mg" not in mapping.flags:
            do.call(nr.MADVISE, mapping.start, mapping.size, _MADV_UNMERGEABLE, may_fail=True)
        for flag, advice in _ADVICE.items():
            if flag in mapping.flags and mapping.kind != "vdso":
                if flag in ("wf", "dd") and "dp" in mapping.flags:
                    continue
                do.call(nr.MADVISE, mapping.start, mapping.size, advice, what=f"advice {flag}")


def guard_and_seal(do: Sequence, process: Process) -> None:
    """What makes memory unusable or unchangeable, last of all."""
    for mapping in process.mappings:
        for low, high in mapping.guards:
            do.call(nr.MADVISE, low, high - low, _MADV_GUARD_INSTALL, what="guard region")
    for mapping in process.mappings:
        if "sl" in mapping.flags and mapping.kind != "vdso":
            do.call(_MSEAL, mapping.start, mapping.size, 0, what="mseal")


def open_mode(mapping: Mapping) -> int:
    """O_RDWR for a shared mapping that may be made writable, else O_RDONLY."""
    return 2 if mapping.shared and mapping.may_write else 0


def drop_inherited(program: Program, do: Sequence) -> None:
    """Unmap all that a clone has inherited of ours but the code and its own control memory."""
    do.call(nr.MUNMAP, CODE + 0x10_0000, FRAMES - CODE - 0x10_0000)
    do.call(nr.MUNMAP, CONTROL, program.below)
    do.call(nr.MUNMAP, program.end, program.above)


def layout(program: Program, do: Sequence, process: Process, exe: int) -> None:
    """struct prctl_mm_map (linux/prctl.h)."""
    a = process.layout
    assert a is not None
    auxv = program.data(a.auxv)
    block = program.data(
        struct.pack(
            "<12QIi",
            a.start_code,
            a.end_code,
            a.start_data,
            a.end_data,
            a.start_brk,
            a.brk,
            a.start_stack,
            a.arg_start,
            a.arg_end,
            a.env_start,
            a.env_end,
            0,
            len(a.auxv),
            exe,
        )
    )
    program.pointer(block + 88, auxv)
    do.call(nr.PRCTL, 35, 14, block, 104, 0, what="PR_SET_MM_MAP")
