"""The floor of every figure: the kernel's own part of the work, measured in the same run.

floor.c does it, in C and without any of our code; here it is compiled, given a btrfs image of the
same kind as the engine's where it needs one, and its numbers are read. All are lists of
milliseconds, one for each round.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

SOURCE = Path(__file__).with_name("floor.c")
_MKFS = ("mkfs.btrfs", "-q", "-m", "single", "-n", "4096")
_OPTIONS = "loop,noatime,nodatasum,nobarrier,discard=async,commit=30"
_LIMIT = 300.0  # seconds; a floor that takes longer is of no use


class Floor:
    """The compiled program and a scratch directory for it."""

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch
        self.program = scratch / "floor"
        subprocess.run(["cc", "-O2", "-Wall", "-o", self.program, SOURCE], check=True)

    def _run(self, *arguments: object) -> list[float]:
        done = subprocess.run(
            [self.program, *map(str, arguments)],
            stdout=subprocess.PIPE,
            text=True,
            timeout=_LIMIT,
        )
        if done.returncode:
            raise RuntimeError(f"the floor {arguments[0]} ended with {done.returncode}")
        return [float(line) for line in done.stdout.split()]

    def fork(self, megabytes: int, rounds: int, *, huge_pages: bool = False) -> list[float]:
        """A bare fork of this size, until a byte of it has arrived."""
        return _milliseconds(self._run("fork", rounds, megabytes, int(huge_pages)))

    def namespaces(self, megabytes: int, rounds: int) -> list[float]:
        """A fork into five new namespaces."""
        return _milliseconds(self._run("namespaces", rounds, megabytes))

    def overlay(self, megabytes: int, rounds: int) -> list[float]:
        """A fork into five new namespaces that mounts an overlay."""
        with tempfile.TemporaryDirectory(dir=self.scratch) as directory:
            places = [Path(directory) / name for name in ("upper", "work", "merged")]
            for place in places:
                place.mkdir()
            return _milliseconds(self._run("overlay", rounds, megabytes, "/", *places))

    def pages(self, count: int, rounds: int) -> list[float]:
        """Reading this many scattered pages of another process."""
        return _milliseconds(self._run("pages", rounds, count))

    def tree(self, processes: int, rounds: int) -> list[float]:
        """This many small processes in new namespaces."""
        return _milliseconds(self._run("tree", rounds, processes))

    def descriptors(self, count: int, rounds: int) -> list[float]:
        """A fork that opens this many files."""
        return _milliseconds(self._run("descriptors", rounds, count))

    def snapshot(
        self, image: Path, files: int, rounds: int, *, synced: bool, kept: bool = False
    ) -> list[float]:
        """A btrfs snapshot of `image/source` after this many files of 4 KiB have changed; `synced`:
        after they were written back, which is not measured; `kept`: none is deleted.
        """
        numbers = (rounds, files, int(synced), int(kept))
        return _milliseconds(self._run("snapshot", *numbers, image / "source", image))

    def star(self, image: Path, count: int, megabytes: int, rounds: int) -> Star:
        """This many copies at once, on all cores: see floor.c."""
        workers = os.cpu_count() or 1
        found = self._run("star", rounds, count, megabytes, workers, "/", image)
        return Star(_milliseconds(found[::2]), [kilobytes / 1024 for kilobytes in found[1::2]])


class Star:
    def __init__(self, milliseconds: list[float], megabytes: list[float]) -> None:
        self.milliseconds = milliseconds
        self.megabytes = megabytes  # of MemAvailable, for each copy


def _milliseconds(microseconds: list[float]) -> list[float]:
    return [value / 1e3 for value in microseconds]


@contextmanager
def built() -> Iterator[Floor]:
    with tempfile.TemporaryDirectory(prefix="deltabox-floor-") as directory:
        yield Floor(Path(directory))


@contextmanager
def image(scratch: Path, *, gigabytes: int) -> Iterator[Path]:
    """A btrfs image as the engine makes them, mounted, with a subvolume `source` that can be the
    upper half of an overlay, and a directory `merged` to mount one on.
    """
    with ExitStack() as undo:
        directory = Path(undo.enter_context(tempfile.TemporaryDirectory(dir=scratch)))
        file, mountpoint = directory / "image", directory / "mounted"
        file.touch()
        os.truncate(file, gigabytes << 30)
        subprocess.run([*_MKFS, str(file)], check=True, capture_output=True)
        mountpoint.mkdir()
        subprocess.run(["mount", "-t", "btrfs", "-o", _OPTIONS, file, mountpoint], check=True)
        undo.callback(lambda: subprocess.run(["umount", mountpoint], check=True))
        source = mountpoint / "source"
        subprocess.run(
            ["btrfs", "subvolume", "create", source], check=True, stdout=subprocess.DEVNULL
        )
        for place in (source / "upper", source / "work", mountpoint / "merged"):
            place.mkdir()
        yield mountpoint
