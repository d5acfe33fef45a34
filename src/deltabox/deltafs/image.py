"""The btrfs image of one sandbox tree: where its layers and snapshots live.

Why an image and not a directory of the host: a snapshot must cost what changed, under a live
overlay mount, on any host file system. A sparse file on a loop device gives that everywhere.
One image per tree, because neighbours on one btrfs share its transactions and wait for each
other's (5.8 ms instead of 1.35 for a checkpoint, measured). `mkfs -n 4096` matters most of all
settings: the smaller node keeps the cost of an aged tree near that of a young one.

Why a full host disk is the one thing to fear: an image that runs full is benign, programs get
ENOSPC and checkpoints go on working. A *host* that runs full under a sparse image is not: btrfs
meets EIO below, drops its last transaction and goes read-only. So the image never offers more
than the host has: its size is capped to the host's free space less a reserve when it is made,
and `maintain()` follows the host afterwards: it grows the file when there is more room, and
pumps up a *ballast*, a preallocated file that takes space in the image and none on the host,
when there is less. (Shrinking the file system instead would move data about for seconds.)

Nothing needs to survive a crash of the host, so barriers and data checksums are off. Nothing is
left after a crash of the engine but the file itself: mount and loop device go with the engine's
mount namespace (autoclear).
"""

from __future__ import annotations

import errno
import logging
import math
import os
import shutil
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from deltabox.deltafs.attic import Attic, Key, lay_out
from deltabox.deltafs.layers import Layer, Snapshot
from deltabox.errors import DeltaBoxError, HostUnsupported, NoSpace
from deltabox.linux import beside, btrfs, loop, mount

log = logging.getLogger(__name__)

MINIMUM_SIZE: Final = 128 << 20
_STEP: Final = 64 << 20  # smaller changes of size or ballast are not worth the calls
_TRIM_EVERY: Final = 10.0  # seconds, at least, unless room is wanted at once
_LOOK: Final = 0.005  # seconds between two looks at what btrfs' cleaner has left to do
_OPTIONS: Final = "nodatasum,nobarrier,discard=async,commit=30"


@dataclass(frozen=True)
class Snapshotting:
    """A snapshot that is being taken: `wait` until it holds its instant, `finish` to have it."""

    wait: Callable[[], None]
    finish: Callable[[], Snapshot]


class Image:
    """A btrfs file system in a sparse file, mounted at `mountpoint`. Threads may share it."""

    path: Path
    mountpoint: Path

    def __init__(self, path: Path, mountpoint: Path, *, size_limit: int, reserve: int) -> None:
        self.path = path
        self.mountpoint = mountpoint
        self._size_limit = size_limit
        self._reserve = reserve
        self._lock = threading.Lock()
        self._making = threading.Lock()  # sixteen take 7 ms one by one, 30 ms at once
        self._number = 0
        self._closed = False
        self._ballast = 0
        self._deleted = False  # something, since the cleaner was last set to work
        self._cleaning = False
        self._trimmed = -math.inf
        self._shelf: dict[Key, Path] = {}
        self._open = ExitStack()

    @classmethod
    def create(
        cls, directory: Path, *, name: str, size_limit: int, reserve: int = 1 << 30
    ) -> Image:
        """Make, attach and mount the image `directory/name.img` at `directory/name`.

        `size_limit` (bytes) caps what the tree's files may take; `reserve` (bytes) is left free
        on the host whatever happens. Raises `NoSpace` when the host has not enough room.
        """
        if size_limit < MINIMUM_SIZE:
            raise ValueError(
                f"a disk limit of {size_limit} bytes is too small,"
                f" the least is {MINIMUM_SIZE >> 20} MiB"
            )
        directory.mkdir(parents=True, exist_ok=True)
        image = cls(
            directory / f"{name}.img", directory / name, size_limit=size_limit, reserve=reserve
        )
        with ExitStack() as undo:
            undo.callback(image.close)
            try:
                image._make()
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT):
                    raise NoSpace(f"{directory}: {error.strerror}") from error
                raise
            undo.pop_all()
        return image

    def _make(self) -> None:
        room = self._host_free() - self._reserve
        size = min(self._size_limit, room) & ~0xFFFFF
        if size < MINIMUM_SIZE:
            raise NoSpace(
                f"{self.path.parent} has {max(room, 0) >> 20} MiB left above the reserve of"
                f" {self._reserve >> 20} MiB, a sandbox needs {MINIMUM_SIZE >> 20} MiB"
            )
        file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._open.callback(self._forget_file)
        self._open.callback(os.close, file)
        self._file = file
        os.ftruncate(file, size)
        self._size = size
        _make_filesystem(self.path)

        # Through the page cache: checkpoints wait for small writes, see docs/deltafs.md.
        try:
            self._device, device = loop.attach(file, name=self.path.name, direct_io=False)
        except (FileNotFoundError, PermissionError) as error:
            raise HostUnsupported(f"no loop device can be had: {error.strerror}") from error
        self._open.callback(os.close, self._device)
        self.mountpoint.mkdir(mode=0o700)
        self._open.callback(self.mountpoint.rmdir)
        try:
            mount.mount(device, self.mountpoint, "btrfs", mount.MS_NOATIME, _OPTIONS)
        except OSError as error:
            if error.errno == errno.ENODEV:
                raise HostUnsupported("this kernel has no btrfs") from error
            raise
        self._open.callback(mount.umount, self.mountpoint, mount.MNT_DETACH)

        self._top = self._directory(self.mountpoint)
        for kind in ("layers", "snapshots", "ghosts"):
            (self.mountpoint / kind).mkdir(mode=0o700)
        self._layers = self._directory(self.mountpoint / "layers")
        self._snapshots = self._directory(self.mountpoint / "snapshots")

    def _directory(self, path: Path) -> int:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._open.callback(os.close, fd)
        return fd

    def _forget_file(self) -> None:
        self.path.unlink(missing_ok=True)

    def _host_free(self) -> int:
        host = os.statvfs(self.path.parent)
        return host.f_bavail * host.f_frsize

    def _next(self) -> int:
        with self._lock:
            self._number += 1
            return self._number

    @contextmanager
    def _space(self, what: str) -> Iterator[None]:
        """Turn a full image, and a host about to be full, into `NoSpace`."""
        if self._host_free() < self._reserve // 2:
            raise NoSpace(f"no {what}: the disk under {self.path.parent} is nearly full")
        try:
            yield
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise NoSpace(f"no {what}: the sandbox's disk image is full") from error
            raise

    def presync(self) -> None:
        """Write back what is dirty, so that a snapshot taken soon has little left to do.

        Call it while the programs still run. It takes as long as the dirty data need, and some
        40 us when there are none. (A look at btrfs' `bytes_may_use` first would be cheaper, but
        misses files that were overwritten: their data are on their way, their metadata are not.)
        """
        mount.syncfs(self._top)

    def blank(self) -> Layer:
        """A new empty layer, the first of a tree."""
        number = self._next()
        with self._space("layer"):
            btrfs.create_subvolume(self._layers, str(number))
            layer = Layer(self, number, None)
            try:
                for part in ("upper", "work"):
                    (layer.path / part).mkdir()
                    (layer.path / part).chmod(0o755)
            except BaseException:
                self.delete(layer)
                raise
        return layer

    def snapshot(self, layer: Layer) -> Snapshot:
        """The layer's files as they are now, for ever. The mounted overlay does not notice.

        For an exact instant nothing may write meanwhile: freeze the programs first.
        """
        with self.snapshotting(layer) as snapshotting:
            return snapshotting.finish()

    @contextmanager
    def snapshotting(self, layer: Layer) -> Iterator[Snapshotting]:
        """The same while something else is done; without `finish` there is none in the end."""
        number = self._next()
        with layer.lock, self._space("checkpoint"), ExitStack() as undo:
            source = _subvolume(self._layers, layer.number)
            undo.callback(os.close, source)
            job = btrfs.begin_snapshot(self._snapshots, str(number), source)
            made = undo.enter_context(ExitStack())
            made.callback(self._abandon, job, number)

            def finish() -> Snapshot:
                job.check()
                fd = _subvolume(self._snapshots, number)
                try:
                    generation = btrfs.generation(fd)
                finally:
                    os.close(fd)
                made.pop_all()
                layer.head = Snapshot(self, number, layer.head, generation)
                return layer.head

            yield Snapshotting(job.check, finish)

    def _abandon(self, job: beside.Job, number: int) -> None:
        """Take back a snapshot that nobody waited for."""
        try:
            job.check()
        except OSError as error:
            log.debug("no snapshot was made: %s", error)
        else:
            btrfs.destroy_subvolume(self._snapshots, str(number))

    def attic(self, layer: Layer, owner: int) -> Attic:
        """Where the next snapshot of a layer keeps files that have no name (see attic.py)."""
        directory = self.mountpoint / "ghosts" / f"next-{self._next()}"
        return Attic(layer, directory, self._top, owner, self._shelf)

    def writable(self, snapshot: Snapshot) -> Layer:
        """A new layer that starts as the snapshot, ready for `root_mount`."""
        number = self._next()
        with self._space("layer"):
            with self._making:
                _snapshot(self._snapshots, snapshot.number, self._layers, number, read_only=False)
            layer = Layer(self, number, snapshot)
            try:
                _forget_volatile(layer)
                lay_out(snapshot, layer)
            except BaseException:
                self.delete(layer)
                raise
        return layer

    def delete(self, what: Layer | Snapshot) -> None:
        """Remove a layer or snapshot; no other is harmed. One that is gone already is no error.

        Returns at once, btrfs frees the blocks in the background. A layer whose overlay is still
        mounted disappears from under it, so end that first.
        """
        with self._lock:
            if self._closed:
                return
            parent = os.dup(self._layers if isinstance(what, Layer) else self._snapshots)
            self._deleted = True
        try:
            btrfs.destroy_subvolume(parent, str(what.number))
        except FileNotFoundError:
            pass
        finally:
            os.close(parent)
        if isinstance(what, Snapshot):
            shutil.rmtree(what.ghosts, ignore_errors=True)

    def maintain(self) -> None:
        """Follow the host's free space and give freed blocks back. Call it when idle, each ~1 s."""
        with self._lock:
            if self._closed:
                return
            room = max(0, self._host_free() - self._reserve)
            self._grow(room)
            self._fill_ballast(room)
        if self._cleaning or time.monotonic() - self._trimmed >= _TRIM_EVERY:
            self._give_back()

    def reclaim(self, timeout: float = 2.0) -> None:
        """Give back to the host now what deletions have freed; stops waiting after `timeout` s."""
        deadline = time.monotonic() + timeout
        while self._give_back() and time.monotonic() < deadline:
            time.sleep(_LOOK)  # there is nothing to wait on before Linux 6.13

    def _give_back(self) -> bool:
        """Take freed blocks one step further; whether there is another step.

        A deletion is committed, which sets btrfs' cleaner to work. When that is through, another
        commit makes the blocks free, and the trim hands them to the host.
        """
        with self._lock:
            if self._closed or not (self._deleted or self._cleaning):
                return False
            begin = self._deleted
            if begin:
                self._deleted, self._cleaning = False, True
            top = os.dup(self._top)
        try:  # without the lock: these may take their time
            if begin:
                btrfs.sync(top)
            elif not btrfs.dying(top):
                self._cleaning = False
                self._trimmed = time.monotonic()
                btrfs.sync(top)
                btrfs.trim(top)
        except OSError as error:  # the host's file system cannot punch holes: space stays
            log.debug("freeing space of %s: %s", self.path, error)
        finally:
            os.close(top)
        return self._cleaning or self._deleted

    def _grow(self, room: int) -> None:
        size = min(self._size_limit, self.used_bytes() + room) & ~0xFFFFF
        if size - self._size < min(_STEP, self._size_limit - self._size) or size <= self._size:
            return
        os.ftruncate(self._file, size)
        loop.set_capacity(self._device)
        btrfs.resize(self._top, None)
        log.info("%s: grown from %d to %d MiB", self.path, self._size >> 20, size >> 20)
        self._size = size

    def _fill_ballast(self, room: int) -> None:
        inside = os.fstatvfs(self._top)
        offered = inside.f_bavail * inside.f_frsize + self._ballast
        wanted = max(0, offered - room) & ~0xFFFFF
        if abs(wanted - self._ballast) < _STEP and (wanted or not self._ballast):
            return
        ballast = os.open("ballast", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600, dir_fd=self._top)
        try:
            if wanted < self._ballast:
                os.ftruncate(ballast, wanted)
                self._ballast = wanted
            else:
                log.warning(
                    "%s: the host's disk has %d MiB left above the reserve, taking %d MiB away",
                    self.path, room >> 20, (wanted - self._ballast) >> 20,
                )  # fmt: skip
                # in steps, so that a full image keeps what could be taken
                while self._ballast < wanted:
                    step = min(256 << 20, wanted - self._ballast)
                    os.posix_fallocate(ballast, self._ballast, step)
                    self._ballast += step
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
        finally:
            os.close(ballast)
        mount.syncfs(self._top)  # until then statvfs does not know of the change

    def used_bytes(self) -> int:
        """What the image takes on the host's disk."""
        return os.fstat(self._file).st_blocks * 512 if not self._closed else 0

    def close(self) -> None:
        """Unmount, detach and remove the image. A second call does nothing.

        Mounts that still use it keep the file system alive until they are gone themselves.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._open.close()


def _make_filesystem(path: Path) -> None:
    search = os.environ.get("PATH", "") + ":/usr/local/sbin:/usr/sbin:/sbin"
    program = shutil.which("mkfs.btrfs", path=search)
    if program is None:
        raise HostUnsupported("mkfs.btrfs is missing; install the package btrfs-progs")
    # an identity of its own: the kernel takes equal ones for one file system
    identity = str(uuid.uuid4())
    done = subprocess.run(
        [program, "-q", "-m", "single", "-d", "single", "-n", "4096", "-U", identity, str(path)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    if done.returncode:
        said = done.stdout.decode(errors="replace").strip().splitlines() or ["no message"]
        raise DeltaBoxError(f"mkfs.btrfs failed on {path}: {said[-1]}")


def _subvolume(parent: int, number: int) -> int:
    return os.open(
        str(number), os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent
    )


def _snapshot(
    source_parent: int, source: int, target_parent: int, target: int, *, read_only: bool
) -> None:
    fd = _subvolume(source_parent, source)
    try:
        btrfs.snapshot(target_parent, str(target), fd, read_only=read_only)
    finally:
        os.close(fd)


def _forget_volatile(layer: Layer) -> None:
    """Remove the mark that a volatile overlay was not unmounted: ours never is, before a snapshot.

    The kernel refuses to mount a layer that bears it, for the writes may be lost. Here they are
    not, the snapshot has flushed them.
    """
    work = os.open(layer.path / "work", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.unlink("work/incompat/volatile/dirty", dir_fd=work)
        os.rmdir("work/incompat/volatile", dir_fd=work)
        os.rmdir("work/incompat", dir_fd=work)
    except FileNotFoundError:  # the snapshot was taken before the first mount
        pass
    finally:
        os.close(work)
