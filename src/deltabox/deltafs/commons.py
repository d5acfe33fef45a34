"""Directories that all sandboxes of a tree see at once, whatever state each of them is in.

Each is an overlay of its own, made once, and its mount is cloned into the root of every sandbox:
one superblock, so that what one of them writes the others see in the same moment, locks and
inotify included. The layer below lies in the tree's image, counts towards its limit, and goes with
it; nobody takes snapshots of it.

The clones are attached below the root while that is still detached itself, so that neither the
first process nor its program knows of them. The kernel allows that since 6.15 (move_mount(2)).
A plain idmapped directory of btrfs would do as well, but for inode numbers and file handles that
the rest of the engine would have to tell apart.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Sequence
from contextlib import ExitStack

from ..errors import HostUnsupported, UnsupportedState
from ..linux import mount
from ..linux.openat2 import openat2
from .image import Image
from .inside import Inside
from .root import base_mount, root_mount


class Commons:
    """The shared directories of one tree, by their paths inside."""

    def __init__(
        self, paths: Sequence[str], image: Image, userns: int, owner: int, root: int
    ) -> None:
        """Make them, empty, as directories of `root`, the tree's first; made there if need be.

        ValueError for a path that leads somewhere else, by a symlink.
        """
        self.paths = tuple(paths)
        self._mounts: list[int] = []
        with ExitStack() as undo:
            undo.callback(self.close)
            for path in paths:
                info = _place(root, path, owner)
                layer = image.blank()
                undo.callback(image.delete, layer)
                layer.upper.chmod(stat.S_IMODE(info.st_mode))
                os.chown(layer.upper, info.st_uid - owner, info.st_gid - owner)
                nothing = layer.path / "nothing"
                nothing.mkdir()
                below = base_mount(nothing, userns)
                try:
                    self._mounts.append(root_mount(below, layer, userns, owner))
                finally:
                    os.close(below)
            undo.pop_all()
        self._devices = [os.fstat(made).st_dev for made in self._mounts]

    def attach(self, root: int) -> None:
        """Have them in a root that is mounted nowhere yet."""
        for path, made in zip(self.paths, self._mounts, strict=True):
            flags = mount.OPEN_TREE_CLONE | mount.OPEN_TREE_CLOEXEC | mount.AT_EMPTY_PATH
            clone = mount.open_tree(made, "", flags)
            try:
                place = openat2(root, path, os.O_PATH | os.O_DIRECTORY)
                try:
                    both = mount.MOVE_MOUNT_F_EMPTY_PATH | mount.MOVE_MOUNT_T_EMPTY_PATH
                    mount.move_mount(clone, "", place, "", both)
                finally:
                    os.close(place)
            except OSError as error:
                if error.errno == errno.EINVAL:
                    raise HostUnsupported(
                        "directories that branches share need a kernel that mounts below what is "
                        "mounted nowhere itself (Linux 6.15)"
                    ) from error
                raise
            finally:
                os.close(clone)

    def check(self, root: int) -> None:
        """UnsupportedState if one of them is no longer where the next root would have it."""
        for path, device in zip(self.paths, self._devices, strict=True):
            try:
                found = openat2(root, path, os.O_PATH | os.O_DIRECTORY)
            except OSError:
                here = False
            else:
                here = os.fstat(found).st_dev == device
                os.close(found)
            if not here:
                raise UnsupportedState(
                    f"the shared directory {path} has been moved", object="mount", path=path
                )

    def close(self) -> None:
        """Let go of them; they last as long as the sandboxes that have them."""
        while self._mounts:
            os.close(self._mounts.pop())


def _place(root: int, path: str, owner: int) -> os.stat_result:
    Inside(root, owner).mkdir(path, parents=True)
    fd = openat2(root, path, os.O_PATH | os.O_DIRECTORY)
    try:
        # of a detached mount the kernel prints paths from the mount's own root
        if (really := os.readlink(f"/proc/self/fd/{fd}")) != path:
            raise ValueError(f"visibility: {path} leads to {really}; name that")
        return os.fstat(fd)
    finally:
        os.close(fd)
