"""The path of a file of which only its handle is known, as fdinfo shows it for inotify watches.

Overlayfs encodes its handles as those of the layer the file lies in (struct ovl_fb in
fs/overlayfs/overlayfs.h), so the layer's own file system can be asked: it finds the inode without
any search, and the name follows from its dentry, which the overlay keeps alive.  The answer is a
guess to be checked by its inode number: a directory may have been renamed in the upper layer.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from ..linux.handles import open_by_handle_at
from .layers import Layer

OVERLAY: Final = 0xF8  # OVL_FILEID_V1
_HEADER: Final = struct.Struct("<3xBBBBB16s")
_MAGIC: Final = 0xFB
_OF_UPPER: Final = 4
_INODE: Final = (1 << 32) - 1  # of the layer's own number; xino puts the layer into the high bits


def paths_of(
    kind: int, handle: bytes, inode: int, *, layer: Layer, base: Path, root: int
) -> Iterator[str]:
    """Guesses at the path inside the sandbox whose root directory is open as `root`.

    The first costs a lookup.  The others are for files of the base below a directory that has been
    renamed, and read all that has changed.
    """
    found = _real_path(kind, handle, layer, base)
    if found is None:
        return
    path, is_upper = found
    yield path
    if is_upper:
        return
    # some directory above it, or itself, has another name now, and so lies in the upper layer
    above = Path(path)
    wanted: dict[int, str] = {}
    while above != above.parent:
        try:
            wanted[os.lstat(base / str(above)[1:]).st_ino] = path[len(str(above)) :]
        except OSError:
            break
        above = above.parent
    for directory, names, files in os.walk(layer.upper):
        here = directory[len(str(layer.upper)) :]
        for name in (*names, *files):
            moved = f"{here}/{name}"
            try:
                number = os.stat(moved[1:], dir_fd=root, follow_symlinks=False).st_ino
            except OSError:
                continue
            if number == inode:
                yield moved
            elif number & _INODE in wanted:
                yield moved + wanted[number & _INODE]


def _real_path(kind: int, handle: bytes, layer: Layer, base: Path) -> tuple[str, bool] | None:
    """The path below the layer that the handle names, and whether that is the upper one."""
    if kind != OVERLAY or len(handle) < _HEADER.size:
        return None
    _, magic, length, flags, real_kind, _ = _HEADER.unpack_from(handle)
    if magic != _MAGIC:
        return None
    real = handle[_HEADER.size : 3 + length]
    is_upper = bool(flags & _OF_UPPER)
    top = layer.upper if is_upper else base
    place = os.open(top, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fd = open_by_handle_at(place, real_kind, real)
    except OSError:
        return None
    finally:
        os.close(place)
    try:
        path = os.readlink(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)
    start = str(top).rstrip("/")
    if path != start and not path.startswith(start + "/"):
        return None
    return path[len(start) :] or "/", is_upper
