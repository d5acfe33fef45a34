"""The btrfs ioctls the file half uses, on directory descriptors, without btrfs-progs.

A checkpoint's files are one `SNAP_CREATE_V2`: a subprocess would cost more than the snapshot.
`changed_inodes` reads the file tree with `TREE_SEARCH_V2` and a lowest transaction number:
the kernel skips every node written before it, so the cost follows the change. Unlike times or
sizes the transaction of an inode item can neither be set by a program nor repeat.

Numbers and structures are from include/uapi/linux/{btrfs,btrfs_tree,fs}.h.
"""

from __future__ import annotations

import ctypes
import fcntl
import struct
from dataclasses import dataclass
from typing import Final

from . import beside

_NAME_V1: Final = 4087
_NAME_V2: Final = 4039


def _iow(number: int, size: int) -> int:
    return 1 << 30 | size << 16 | 0x94 << 8 | number


def _ior(number: int, size: int) -> int:
    return 2 << 30 | size << 16 | 0x94 << 8 | number


def _iowr(number: int, size: int) -> int:
    return 3 << 30 | size << 16 | 0x94 << 8 | number


RESIZE: Final = _iow(3, 4096)
SYNC: Final = 0x94 << 8 | 8
SUBVOL_CREATE: Final = _iow(14, 4096)
SNAP_DESTROY: Final = _iow(15, 4096)
TREE_SEARCH_V2: Final = _iowr(17, 112)
SNAP_CREATE_V2: Final = _iow(23, 4096)
SUBVOL_SETFLAGS: Final = _iow(26, 8)
INO_PATHS: Final = _iowr(35, 56)
FICLONE: Final = 1 << 30 | 4 << 16 | 0x94 << 8 | 9  # linux/fs.h
GET_SUBVOL_INFO: Final = _ior(60, 504)
FITRIM: Final = 3 << 30 | 24 << 16 | ord("X") << 8 | 121  # linux/fs.h

SUBVOL_RDONLY: Final = 1 << 1
INODE_ITEM_KEY: Final = 1
FIRST_FREE_OBJECTID: Final = 256
ROOT_TREE: Final = 1
ORPHAN_OBJECTID: Final = (1 << 64) - 5
ORPHAN_ITEM_KEY: Final = 48
_MAX: Final = (1 << 64) - 1
_SEARCH_BUFFER: Final = 256 * 1024


def _vol_args(name: str) -> bytearray:
    # a bytearray: fcntl.ioctl refuses immutable arguments above 1,024 bytes
    encoded = name.encode()
    if len(encoded) > _NAME_V1:
        raise ValueError(f"name of {len(encoded)} bytes is too long for btrfs")
    return bytearray(struct.pack("=q4088s", 0, encoded))


def create_subvolume(parent: int, name: str) -> None:
    """A new, empty, writable subvolume `name` in the directory `parent`."""
    fcntl.ioctl(parent, SUBVOL_CREATE, _vol_args(name))


def snapshot(parent: int, name: str, source: int, *, read_only: bool) -> None:
    """A snapshot of the subvolume `source` as `name` in the directory `parent`."""
    fcntl.ioctl(parent, SNAP_CREATE_V2, bytearray(_snapshot_args(name, source, read_only)))


def begin_snapshot(parent: int, name: str, source: int) -> beside.Job:
    """The same, read-only, by another thread; both descriptors must stay open until it is done."""
    return beside.ioctl(parent, SNAP_CREATE_V2, _snapshot_args(name, source, True))


def _snapshot_args(name: str, source: int, read_only: bool) -> bytes:
    encoded = name.encode()
    if len(encoded) > _NAME_V2:
        raise ValueError(f"name of {len(encoded)} bytes is too long for btrfs")
    flags = SUBVOL_RDONLY if read_only else 0
    return struct.pack("=qQQ4Q4040s", source, 0, flags, 0, 0, 0, 0, encoded)


def destroy_subvolume(parent: int, name: str) -> None:
    """Unlink a subvolume; the kernel frees its blocks in the background."""
    fcntl.ioctl(parent, SNAP_DESTROY, _vol_args(name))


def clone(source: int, target: int) -> None:
    """Make the open file `target` share all blocks of `source` (ioctl_ficlone(2))."""
    fcntl.ioctl(target, FICLONE, source)


def names(file: int, inode: int) -> list[bytes]:
    """All names of an inode, as paths from the root of the subvolume that `file` is in."""
    size = 64 << 10
    # struct btrfs_data_container: bytes left, bytes missing, elements, elements missed; offsets
    container = ctypes.create_string_buffer(size)
    argument = struct.pack("=2Q4QQ", inode, size, 0, 0, 0, 0, ctypes.addressof(container))
    fcntl.ioctl(file, INO_PATHS, argument)
    count = int(struct.unpack_from("=I", container, 8)[0])
    offsets = struct.unpack_from(f"={count}Q", container, 16)
    return [ctypes.string_at(ctypes.addressof(container) + 16 + at) for at in offsets]


def resize(directory: int, size: int | None) -> None:
    """Resize the file system to `size` bytes, or to its device's size."""
    fcntl.ioctl(directory, RESIZE, _vol_args("max" if size is None else str(size)))


def sync(directory: int) -> None:
    """Commit, and wake the cleaner that frees deleted subvolumes (BTRFS_IOC_SYNC)."""
    fcntl.ioctl(directory, SYNC)


def dying(directory: int) -> bool:
    """Whether there are deleted subvolumes that the cleaner is not through with.

    Each has an orphan item in the tree of roots until then (fs/btrfs/root-tree.c).
    """
    buffer = bytearray(112 + 256)
    struct.pack_into(
        "=7Q4I4QQ", buffer, 0,
        ROOT_TREE,
        ORPHAN_OBJECTID, ORPHAN_OBJECTID,
        0, _MAX,
        0, _MAX,
        ORPHAN_ITEM_KEY, ORPHAN_ITEM_KEY,
        1, 0,
        0, 0, 0, 0,
        256,
    )  # fmt: skip
    fcntl.ioctl(directory, TREE_SEARCH_V2, buffer, True)
    return bool(struct.unpack_from("=I", buffer, 64)[0])


def trim(directory: int) -> int:
    """Give free blocks back to the device (FITRIM); the number of bytes given back."""
    answer = fcntl.ioctl(directory, FITRIM, struct.pack("=3Q", 0, _MAX, 0))
    return int(struct.unpack("=3Q", answer)[1])


def generation(subvolume: int) -> int:
    """The last transaction that changed a subvolume, as of the last commit."""
    answer = fcntl.ioctl(subvolume, GET_SUBVOL_INFO, bytes(504))
    (number,) = struct.unpack_from("=Q", answer, 8 + 256 + 8 + 8)
    return int(number)


@dataclass(frozen=True, slots=True)
class Inode:
    """What the tree says of one inode: the transactions of its birth and last change."""

    number: int
    born: int
    changed: int


def changed_inodes(subvolume: int, since: int) -> dict[int, Inode]:
    """The inodes of a subvolume changed in a transaction after `since`, by number.

    Only what is committed is seen: sync first when the subvolume is writable.
    """
    found: dict[int, Inode] = {}
    buffer = bytearray(112 + _SEARCH_BUFFER)
    objectid, kind, offset = FIRST_FREE_OBJECTID, INODE_ITEM_KEY, 0
    while True:
        struct.pack_into(
            "=7Q4I4QQ", buffer, 0,
            0,  # tree: the one the descriptor is in
            objectid, _MAX - 255,
            offset, _MAX,
            since + 1, _MAX,
            kind, INODE_ITEM_KEY,
            _MAX >> 32, 0,  # as many items as fit
            0, 0, 0, 0,
            _SEARCH_BUFFER,
        )  # fmt: skip
        fcntl.ioctl(subvolume, TREE_SEARCH_V2, buffer, True)
        (items,) = struct.unpack_from("=I", buffer, 64)
        if not items:
            return found
        at = 112
        for _ in range(items):
            _transid, objectid, offset, kind, length = struct.unpack_from("=QQQII", buffer, at)
            at += 32
            if kind == INODE_ITEM_KEY:
                born, changed = struct.unpack_from("<QQ", buffer, at)
                if changed > since:
                    found[objectid] = Inode(objectid, born, changed)
            at += length
        # continue behind the last item
        objectid, kind, offset = objectid + 1, INODE_ITEM_KEY, 0
