"""Read and write a sandbox's files from outside, while its programs run and may be hostile.

The engine is root on the host, so two things must hold whatever symlinks, renames and mounts
the programs play with. *Where*: every path is looked up by openat2(2) with the sandbox's root as
`/`, magic links refused. *What*: a file is judged by the descriptor already open, before a byte
moves: it must be a regular file on the root itself or on a tmpfs. Otherwise a symlink to
`/proc/sys/kernel/core_pattern` would turn a harmless write into one by the host's root, and a
FIFO would block the engine for ever. Kernel files are read with a command inside instead.

*As whom*: with the file-system ids of the sandbox's root, so that what is made belongs to it.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Literal

from deltabox.linux.fsuid import file_owner
from deltabox.linux.mount import OVERLAYFS_SUPER_MAGIC, TMPFS_MAGIC, filesystem_type
from deltabox.linux.openat2 import openat2

Kind = Literal["file", "directory", "symlink", "fifo", "socket", "device"]

_KINDS: Final[dict[int, Kind]] = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "directory",
    stat.S_IFLNK: "symlink",
    stat.S_IFIFO: "fifo",
    stat.S_IFSOCK: "socket",
}
_IDS: Final = 65536  # ids of a sandbox
_NOBODY: Final = 65534
_CHUNK: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class FileStat:
    """What stat(2) says, with owners as the sandbox sees them."""

    size: int
    mode: int  # permission bits
    uid: int
    gid: int
    mtime_ns: int
    kind: Kind


class Inside:
    """The files below `root_fd`; `owner` is the host uid and gid of the sandbox's root.

    The descriptor stays the caller's. Errors are `OSError`s that name the path as given.
    """

    def __init__(self, root_fd: int, owner: int) -> None:
        self._root = root_fd
        self._owner = owner

    @contextmanager
    def _at(self, path: str) -> Iterator[None]:
        """Act as the sandbox's root; name the caller's path in whatever goes wrong."""
        try:
            with file_owner(self._owner):
                yield
        except OSError as error:
            raise OSError(error.errno, error.strerror, path) from None

    def read(self, path: str) -> bytes:
        """The contents of a regular file."""
        with self._at(path):
            fd = openat2(self._root, path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
            try:
                _judge(fd)
                chunks = []
                while chunk := os.read(fd, _CHUNK):
                    chunks.append(chunk)
                return b"".join(chunks)
            finally:
                os.close(fd)

    def write(
        self, path: str, data: bytes, mode: int | None = None, *, parents: bool = True
    ) -> None:
        """Replace the contents of a file in place, or make it (0644, or `mode`).

        `mode` given sets the permissions of an existing file, too. Missing directories above are
        made unless `parents` is False.
        """
        with self._at(path):
            fd, new = self._open_for_writing(path, parents)
            try:
                _judge(fd)
                os.ftruncate(fd, 0)
                view = memoryview(data)
                while view:
                    view = view[os.write(fd, view) :]
                if mode is not None or new:
                    os.fchmod(fd, 0o644 if mode is None else mode)
            finally:
                os.close(fd)

    def _open_for_writing(self, path: str, parents: bool) -> tuple[int, bool]:
        if path.endswith("/"):
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
        flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY
        try:
            return openat2(self._root, path, flags), False
        except FileNotFoundError:
            pass
        except OSError as error:
            if error.errno == errno.ENXIO:  # a FIFO without reader, a socket
                raise OSError(errno.EINVAL, "not a regular file") from None
            raise
        try:
            return openat2(self._root, path, flags | os.O_CREAT, mode=0o644), True
        except FileNotFoundError:
            if not parents:
                raise
        self._make_directories(os.path.dirname(path))
        return openat2(self._root, path, flags | os.O_CREAT, mode=0o644), True

    def list(self, path: str = "/") -> list[str]:
        """The names in a directory, sorted."""
        with self._at(path):
            fd = openat2(self._root, path, os.O_RDONLY | os.O_DIRECTORY | os.O_NONBLOCK)
            try:
                return sorted(os.listdir(fd))
            finally:
                os.close(fd)

    def stat(self, path: str, *, follow_symlinks: bool = True) -> FileStat:
        """What a path is."""
        flags = os.O_PATH if follow_symlinks else os.O_PATH | os.O_NOFOLLOW
        with self._at(path):
            fd = openat2(self._root, path, flags)
            try:
                status = os.fstat(fd)
            finally:
                os.close(fd)
        return FileStat(
            size=status.st_size,
            mode=stat.S_IMODE(status.st_mode),
            uid=self._inside_id(status.st_uid),
            gid=self._inside_id(status.st_gid),
            mtime_ns=status.st_mtime_ns,
            kind=_KINDS.get(stat.S_IFMT(status.st_mode), "device"),
        )

    def _inside_id(self, host: int) -> int:
        inside = host - self._owner
        return inside if 0 <= inside < _IDS else _NOBODY

    def exists(self, path: str) -> bool:
        """Whether a path leads to something."""
        try:
            self.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            if error.errno == errno.ELOOP:
                return False
            raise
        return True

    def mkdir(self, path: str, *, parents: bool = False, mode: int = 0o755) -> None:
        """Make a directory; with `parents` also those above, and it may exist already."""
        with self._at(path):
            if parents:
                self._make_directories(path, mode)
            else:
                self._make_directory(path, mode)

    def _make_directory(self, path: str, mode: int) -> None:
        above, name = os.path.split(path.rstrip("/"))
        if name in ("", ".", ".."):
            raise OSError(errno.EEXIST, os.strerror(errno.EEXIST))
        parent = openat2(self._root, above or "/", os.O_RDONLY | os.O_DIRECTORY)
        try:
            _judge_directory(parent)
            os.mkdir(name, mode, dir_fd=parent)
            # only what was just made: should it be a symlink by now, that is refused
            made = openat2(parent, name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                os.fchmod(made, mode)
            finally:
                os.close(made)
        finally:
            os.close(parent)

    def _make_directories(self, path: str, mode: int = 0o755) -> None:
        at = "/"
        for part in path.split("/"):
            if part in ("", "."):
                continue
            at = os.path.join(at, part)
            try:
                os.close(openat2(self._root, at, os.O_PATH | os.O_DIRECTORY))
            except FileNotFoundError:
                try:
                    self._make_directory(at, mode)
                except FileExistsError:  # made by somebody else meanwhile, or a dangling link
                    os.close(openat2(self._root, at, os.O_PATH | os.O_DIRECTORY))

    def remove(self, path: str, *, recursive: bool = False) -> None:
        """Remove a file, a symlink or a directory: an empty one unless `recursive`."""
        with self._at(path):
            above, name = os.path.split(path.rstrip("/"))
            if name in ("", ".", ".."):
                raise OSError(errno.EBUSY, "this directory cannot be removed")
            parent = openat2(self._root, above or "/", os.O_RDONLY | os.O_DIRECTORY)
            try:
                _judge_directory(parent)
                _remove(parent, name, recursive)
            finally:
                os.close(parent)


def _judge(fd: int) -> None:
    """Refuse everything but a regular file that belongs to the sandbox."""
    mode = os.fstat(fd).st_mode
    if stat.S_ISDIR(mode):
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "not a regular file")
    _judge_directory(fd)


def _judge_directory(fd: int) -> None:
    if filesystem_type(fd) not in (OVERLAYFS_SUPER_MAGIC, TMPFS_MAGIC):
        raise OSError(errno.EPERM, "a file of the kernel; use a command inside the sandbox")


def _remove(parent: int, name: str, recursive: bool) -> None:
    mode = os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode
    if not stat.S_ISDIR(mode):
        os.unlink(name, dir_fd=parent)
        return
    if recursive:
        # Every directory is opened without following links and refused on kernel file systems.
        # Iterative: a program may have nested directories deeper than Python's stack.
        stack: list[tuple[int, str, int, list[str]]] = []
        try:
            stack.append(_descend(parent, name))
            while stack:
                above, here, fd, names = stack[-1]
                if names:
                    child = names.pop()
                    status = os.stat(child, dir_fd=fd, follow_symlinks=False)
                    if stat.S_ISDIR(status.st_mode):
                        stack.append(_descend(fd, child))
                    else:
                        os.unlink(child, dir_fd=fd)
                else:
                    stack.pop()
                    os.close(fd)
                    os.rmdir(here, dir_fd=above)
        finally:
            for _, _, fd, _ in stack:
                os.close(fd)
    else:
        os.rmdir(name, dir_fd=parent)


def _descend(parent: int, name: str) -> tuple[int, str, int, list[str]]:
    fd = openat2(parent, name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        _judge_directory(fd)
        return parent, name, fd, os.listdir(fd)
    except BaseException:
        os.close(fd)
        raise
