"""Curves over memory: how much there is, and how much of it has changed.

The first checkpoint of a state has all of it to copy. What of that is done while the agent thinks
can be seen from outside only as memory that becomes less: so before the first checkpoint we wait
until MemAvailable stands still, and report how long that took and how much was gone.
"""

from __future__ import annotations

import time
from functools import partial

from floor import Floor
from puppet import Puppet
from report import Recorder, meminfo
from rounds import VARIANTS, Load, Point, timed
from standard import create

from deltabox import Sandbox

DIRTY = 1000  # pages, on the curve over memory
MEMORY = "memory"
PAGES = "dirty pages"
STILL = 1.0  # seconds for which MemAvailable must not move
STILL_MB = 8  # what is no movement; of a big state, a hundredth of it
LINE = ", no rollbacks"
NEEDED = 2.6  # times the memory of a point: itself, its checkpoint, and what differs


def memory(recorder: Recorder, floor: Floor, xs: list[int], rounds: int, patience: float) -> None:
    recorder.curve(MEMORY, title="Anonymous memory", x="MB of anonymous memory")
    recorder.curve(f"{MEMORY}-first", title="The first checkpoint", x="MB of anonymous memory")
    _expectations(recorder)
    quick = rounds < 10
    for x in xs:
        if x * NEEDED + 1024 > meminfo("MemAvailable") / 1024:
            recorder.note(f"{MEMORY}: {x} MB left out, this machine has too little for it.")
            continue
        recorder.attempt(f"{MEMORY}: floor", partial(_floor, recorder, floor, x), x=x)
        for suffix, standby in VARIANTS:
            point = Point(recorder, MEMORY, x, rounds, patience, suffix)
            body = partial(_memory, point, standby=standby, repeat=1 if x > 1000 or quick else 3)
            recorder.attempt(f"{MEMORY}{suffix}", body, x=x, limit=10 + x / 20 + 6 * patience)


def _expectations(recorder: Recorder) -> None:
    for suffix, _ in VARIANTS:
        rollback, call = f"{MEMORY}: rollback{suffix}", f"{MEMORY}: checkpoint call{suffix}"
        pause = f"{MEMORY}: checkpoint pause{suffix}"
        recorder.expect(rollback, floor="fork with huge pages", curve=MEMORY)
        recorder.expect(rollback, x=2048, goal=5.0)
        recorder.expect(call, floor=f"{DIRTY} pages read", curve=MEMORY)
        recorder.expect(call, x=2048, goal=8.0)
        recorder.expect(pause, floor=f"{DIRTY} pages read", curve=MEMORY)
        recorder.expect(f"{MEMORY}: first result{suffix}", floor="fork")
    for name in (f"checkpoint call{LINE}", f"checkpoint pause{LINE}"):
        recorder.expect(f"{MEMORY}: {name}", floor=f"{DIRTY} pages read", curve=MEMORY)
    recorder.expect(f"{MEMORY}: checkpoint call{LINE}", x=2048, goal=8.0)
    first = f"{MEMORY}-first"
    recorder.expect(f"{MEMORY}: first checkpoint pause", goal=20.0, curve=first, floor="fork")
    recorder.expect(f"{MEMORY}: first checkpoint call", curve=first)
    recorder.expect(f"{MEMORY}: pre-copy time", unit="ms", curve=first)
    recorder.expect(f"{MEMORY}: pre-copy memory", unit="MB")
    recorder.expect(f"{MEMORY}: memory after the first checkpoint", unit="MB")


def _floor(recorder: Recorder, floor: Floor, x: int) -> None:
    rounds = 10 if x <= 1000 else 5
    recorder.floor("fork", floor.fork(x, rounds), x=x)
    recorder.floor("fork with huge pages", floor.fork(x, rounds, huge_pages=True), x=x)
    recorder.floor(f"{DIRTY} pages read", floor.pages(DIRTY, rounds), x=x)


def _memory(point: Point, *, standby: bool, repeat: int) -> None:
    pages = (int(point.x) << 20) // 4096
    load = Load(
        f"grow({point.x:.0f})",
        f"dirty({min(DIRTY, pages)}, {{n}})",
        f"dirt({min(DIRTY, pages)})",
        "checksum()",
    )
    for turn in range(repeat if standby else 1):
        with create(standby=standby) as sandbox:
            puppet = Puppet.start(sandbox)
            puppet.ask(load.setup or "")
            if standby:
                _first(point, sandbox)
            if turn == repeat - 1 or not standby:
                point.measure(sandbox, puppet, load)
            if turn == repeat - 1 and standby:
                point.line(sandbox, puppet, load, suffix=LINE)


def _first(point: Point, sandbox: Sandbox) -> None:
    """The first checkpoint, after all that can be done before it has been done."""
    still = max(STILL_MB, int(point.x) // 100)
    before = meminfo("MemAvailable")
    sandbox.run("true", timeout=10)
    spent, settled = settle(still, limit=point.patience)
    checkpoint, call = timed(sandbox)
    _, after = settle(still, limit=3 * STILL)
    point.record("pre-copy time", spent * 1e3)
    point.record("pre-copy memory", (before - settled) / 1024)
    point.record("first checkpoint pause", checkpoint.stats.pause_ms)
    point.record("first checkpoint call", call)
    point.record("memory after the first checkpoint", (before - after) / 1024)


def settle(still_mb: int, *, limit: float) -> tuple[float, int]:
    """Wait until MemAvailable stands still: the seconds until it last moved, and its value, KiB.

    Other work on the machine moves it too; `limit` seconds are the most.
    """
    began = moved = time.monotonic()
    last = meminfo("MemAvailable")
    while (now := time.monotonic()) - moved < STILL and now - began < limit:
        time.sleep(0.02)
        found = meminfo("MemAvailable")
        if abs(found - last) > still_mb * 1024:
            last, moved = found, now
    return moved - began, meminfo("MemAvailable")


def dirty_pages(
    recorder: Recorder, floor: Floor, xs: list[int], rounds: int, patience: float
) -> None:
    recorder.curve(PAGES, title="Dirty pages", x="pages written since the last checkpoint")
    for name in ("checkpoint call", "checkpoint pause"):
        recorder.expect(f"{PAGES}: {name}", floor="pages read", curve=PAGES)
    recorder.expect(f"{PAGES}: rollback", curve=PAGES, floor="fork")
    recorder.expect(f"{PAGES}: first result", floor="fork")
    for x in xs:
        recorder.attempt(f"{PAGES}: floor", partial(_pages_floor, recorder, floor, x), x=x)
        load = Load(f"grow({_room(x)})", f"dirty({x}, {{n}})", f"dirt({x})", "checksum()")
        point = Point(recorder, PAGES, x, rounds, patience)
        recorder.attempt(PAGES, partial(point.run, load), x=x, limit=10 + 5 * patience)


def _pages_floor(recorder: Recorder, floor: Floor, x: int) -> None:
    recorder.floor("pages read", floor.pages(x, 10), x=x)
    recorder.floor("fork", floor.fork(_room(x), 10), x=x)


def _room(pages: int) -> int:
    """The MB of a puppet with so many pages to write: 30 at least, and twice what they take."""
    return max(30, 2 * pages // 256)
