"""Curves over files: how many have changed, and how much there is on the disk.

The bytes on the disk are really written, random and different in every block: a sparse file, or
one that is the same all over, would cost nothing. How much fits is said in a note.
"""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

import floor as floors
from floor import Floor
from report import Recorder
from rounds import Load, Point

from deltabox._connection import state_directory

FILES = "changed files"
DISK = "files on disk"
CHANGED = 5  # on the curve over the bytes on disk
RESERVE_MB = 6 << 10  # of the disk, for everything else


def changed_files(
    recorder: Recorder, floor: Floor, xs: list[int], rounds: int, patience: float
) -> None:
    recorder.curve(FILES, title="Changed files", x="files of 4 KiB changed since")
    for name in ("checkpoint call", "checkpoint pause", "rollback"):
        recorder.expect(f"{FILES}: {name}", floor="snapshot, synced before", curve=FILES)
    for x in xs:
        recorder.attempt(f"{FILES}: floor", partial(_floor, recorder, floor, x), x=x)
        load = Load(None, f"write({x}, {{n}})", f"written({x})")
        point = Point(recorder, FILES, x, rounds, patience)
        recorder.attempt(FILES, partial(point.run, load), x=x, limit=10 + 5 * patience)


def _floor(recorder: Recorder, floor: Floor, x: int) -> None:
    with floors.image(floor.scratch, gigabytes=2) as image:
        rounds = 10 if x > 1000 else 20
        synced = floor.snapshot(image, x, rounds, synced=True)
        recorder.floor("snapshot, synced before", synced, x=x)
        recorder.floor("snapshot", floor.snapshot(image, x, rounds, synced=False), x=x)


def bytes_on_disk(
    recorder: Recorder, floor: Floor, xs: list[int], rounds: int, patience: float
) -> None:
    recorder.curve(DISK, title="Files on disk", x="MB of files written before")
    for name in ("checkpoint call", "checkpoint pause", "rollback"):
        recorder.expect(f"{DISK}: {name}", floor="snapshot, synced before", curve=DISK)
    recorder.attempt(f"{DISK}: floor", partial(_constant_floor, recorder, floor))
    for x in xs:
        if x + RESERVE_MB > _free_mb():
            recorder.note(f"{DISK}: {x} MB left out, {_free_mb()} MB are free.")
            continue
        setup = f"bulk({x})" if x else None
        load = Load(setup, f"write({CHANGED}, {{n}})", f"written({CHANGED})", f"bulky({x})")
        point = Point(recorder, DISK, x, rounds, patience)
        recorder.attempt(DISK, partial(point.run, load), x=x, limit=10 + x / 30 + 5 * patience)


def _constant_floor(recorder: Recorder, floor: Floor) -> None:
    with floors.image(floor.scratch, gigabytes=2) as image:
        values = floor.snapshot(image, CHANGED, 30, synced=True)
        recorder.floor("snapshot, synced before", values)


def _free_mb() -> int:
    directory = next(
        path for path in (state_directory(), *state_directory().parents) if path.exists()
    )
    return shutil.disk_usage(Path(directory)).free >> 20
