"""Curves over the shape of a sandbox: processes, descriptors, and sandboxes beside each other.

Of the processes one half are forks of one parent, which all have the same addresses, and the other
half different programs, which have not. Descriptors are files with an offset of their own and
pipes with something in them, in equal parts. Sandboxes are independent (each made by itself, with
an image of its own) or siblings (forks of one, on one image); all of them are checkpointed, or
rolled back, at once, and the figure is the wall time until the last is done.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from threading import Barrier
from typing import TypeVar

import floor as floors
from floor import Floor
from puppet import Puppet
from report import Recorder, quantile
from rounds import LEAST, VARIANTS, Load, Point
from standard import IDLE, create

from deltabox import Checkpoint, Sandbox

T = TypeVar("T")

PROCESSES = "processes"
DESCRIPTORS = "descriptors"
SANDBOXES = "sandboxes"
AT_ONCE = ("all checkpointed", "all rolled back")
EVEN = "the checkpoints of one alone, shared evenly by all cores"
MEGABYTES = 10  # of each sandbox on the curve over sandboxes


def processes(
    recorder: Recorder, floor: Floor, xs: list[int], rounds: int, patience: float
) -> None:
    recorder.curve(PROCESSES, title="Processes", x="processes")
    for suffix, _ in VARIANTS:
        for name in ("checkpoint call", "checkpoint pause", "rollback"):
            expected = f"{PROCESSES}: {name}{suffix}"
            recorder.expect(expected, floor="fork them in new namespaces", curve=PROCESSES)
    for x in xs:
        values = partial(_tree_floor, recorder, floor, x)
        recorder.attempt(f"{PROCESSES}: floor", values, x=x)
        load = Load(f"family({x})", "set_all({n})", "get_all()")
        for suffix, standby in VARIANTS:
            point = Point(recorder, PROCESSES, x, rounds, patience, suffix)
            body = partial(point.run, load, standby=standby)
            recorder.attempt(f"{PROCESSES}{suffix}", body, x=x, limit=10 + 5 * patience)


def _tree_floor(recorder: Recorder, floor: Floor, x: int) -> None:
    recorder.floor("fork them in new namespaces", floor.tree(x, 20), x=x)


def descriptors(
    recorder: Recorder, floor: Floor, xs: list[int], rounds: int, patience: float
) -> None:
    recorder.curve(DESCRIPTORS, title="Open files and pipes", x="descriptors")
    for name in ("checkpoint call", "checkpoint pause", "rollback"):
        recorder.expect(f"{DESCRIPTORS}: {name}", floor="fork and open them", curve=DESCRIPTORS)
    for x in xs:
        values = partial(_descriptors_floor, recorder, floor, x)
        recorder.attempt(f"{DESCRIPTORS}: floor", values, x=x)
        point = Point(recorder, DESCRIPTORS, x, rounds, patience)
        body = partial(point.run, Load(f"hold({x})", "turn({n})", "turned()"))
        recorder.attempt(DESCRIPTORS, body, x=x, limit=10 + 5 * patience)


def _descriptors_floor(recorder: Recorder, floor: Floor, x: int) -> None:
    recorder.floor("fork and open them", floor.descriptors(x, 20), x=x)


def sandboxes(
    recorder: Recorder, floor: Floor, xs: list[int], rounds: int, patience: float
) -> None:
    recorder.curve(SANDBOXES, title="Sandboxes at once", x="sandboxes")
    for kind in ("independent", "siblings"):
        checkpoints, rollbacks = (f"{SANDBOXES}: {kind}, {name}" for name in AT_ONCE)
        recorder.expect(checkpoints, floor=EVEN, curve=SANDBOXES)
        recorder.expect(rollbacks, floor="bare copies at once", curve=SANDBOXES)
        for name in (checkpoints, rollbacks):
            recorder.expect(f"{name}, against one alone", unit="x")
    for x in xs:
        recorder.attempt(f"{SANDBOXES}: floor", partial(_star, recorder, floor, x), x=x)
        for kind in ("independent", "siblings"):
            body = partial(_beside, recorder, kind, x, rounds, patience)
            recorder.attempt(f"{SANDBOXES}: {kind}", body, x=x, limit=10 + 2 * x + 5 * patience)
            for name in AT_ONCE:
                _compare(recorder, f"{SANDBOXES}: {kind}, {name}", x)
        alone = recorder.values(f"{SANDBOXES}: independent, {AT_ONCE[0]}", x=1)
        if alone:
            fair = max(1.0, x / (os.cpu_count() or 1))
            recorder.floor(EVEN, [value * fair for value in alone], x=x)


def _star(recorder: Recorder, floor: Floor, x: int) -> None:
    with floors.image(floor.scratch, gigabytes=4) as image:
        recorder.floor("bare copies at once", floor.star(image, x, MEGABYTES, 5).milliseconds, x=x)


def _compare(recorder: Recorder, name: str, x: int) -> None:
    alone = recorder.values(name, x=1)
    for value in recorder.values(name, x=x) if alone else ():
        recorder.add(f"{name}, against one alone", value / quantile(alone, 0.5), x=x)


def _beside(recorder: Recorder, kind: str, x: int, rounds: int, patience: float) -> None:
    with ExitStack() as opened:
        first = opened.enter_context(create())
        puppet = Puppet.start(first)
        puppet.ask(f"grow({MEGABYTES})")
        boxes, puppets = [first], [puppet]
        if kind == "siblings" and x > 1:
            boxes += [opened.enter_context(copy) for copy in first.fork_many(x - 1)]
            puppets += [puppet.of(copy) for copy in boxes[1:]]
        while len(boxes) < x:
            boxes.append(opened.enter_context(create()))
            puppets.append(Puppet.start(boxes[-1]))
            puppets[-1].ask(f"grow({MEGABYTES})")
        # entered last, so that its threads end before the sandboxes do
        pool = opened.enter_context(ThreadPoolExecutor(x))
        began = time.monotonic()
        older: list[Checkpoint] = []
        for turn in range(rounds + 1):
            made, checkpointed, back = _round(boxes, puppets, pool, 2 * turn + 2)
            if turn:
                recorder.add(f"{SANDBOXES}: {kind}, {AT_ONCE[0]}", checkpointed, x=x)
                recorder.add(f"{SANDBOXES}: {kind}, {AT_ONCE[1]}", back, x=x)
            for checkpoint in older:
                checkpoint.delete()
            older = made
            if turn >= LEAST and time.monotonic() - began > patience:
                break


def _round(
    boxes: list[Sandbox], puppets: list[Puppet], pool: ThreadPoolExecutor, number: int
) -> tuple[list[Checkpoint], float, float]:
    """The checkpoints, how long it took until the last of them was there, and of the rollbacks."""

    def change(n: int) -> None:
        for puppet in puppets:
            puppet.tell(f"dirty(250, {n}) and write(5, {n})")
        for puppet in puppets:
            puppet.hear()
        for box in boxes:
            box.run("true", timeout=10)
        time.sleep(IDLE)

    change(number)
    made, checkpointed = _at_once(pool, [box.checkpoint for box in boxes])
    change(number + 1)
    pairs = zip(boxes, made, strict=True)
    rollbacks: list[Callable[[], None]] = [
        partial(box.rollback, checkpoint) for box, checkpoint in pairs
    ]
    _, back = _at_once(pool, rollbacks)
    for puppet in puppets:
        puppet.expect("dirt(250)", number)
        puppet.expect("written(5)", number)
    return made, checkpointed, back


def _at_once(pool: ThreadPoolExecutor, calls: Sequence[Callable[[], T]]) -> tuple[list[T], float]:
    """The results, and the milliseconds from the moment all may begin until the last is done."""
    barrier = Barrier(len(calls) + 1)

    def one(call: Callable[[], T]) -> T:
        barrier.wait(timeout=30)
        return call()

    waiting = [pool.submit(one, call) for call in calls]
    barrier.wait(timeout=30)
    began = time.perf_counter()
    results = [future.result() for future in waiting]
    return results, (time.perf_counter() - began) * 1e3
