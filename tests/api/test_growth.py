"""Deleted checkpoints: their memory and disk come back, and nobody else notices."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

from deltabox import Checkpoint, ForkError, KeepLast, KeepReachable, Sandbox, UnknownCheckpoint
from deltabox.linux import cgroup
from tests.conftest import keepers
from tests.probe import Probe

MIB = 1 << 20
WITHIN = 30.0


def until(reached: Callable[[], bool]) -> bool:
    """Wait for something that happens in the background."""
    deadline = time.monotonic() + WITHIN
    while not (done := reached()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return done


def memory(sandbox: Sandbox) -> int:
    """What the tree's control group is charged: templates and programs together."""
    (keeper,) = keepers()
    name = f"deltabox-{keeper}/{sandbox._tree}"
    if cgroup.in_version_2("memory"):
        path = cgroup.hierarchies()["2"] / name / "memory.current"
    else:
        path = cgroup.hierarchies()["memory"] / name / "memory.usage_in_bytes"
    return int(path.read_text())


def image(sandbox: Sandbox, state: Path) -> Path:
    return state / "trees" / sandbox._tree / f"{sandbox._tree}.img"


def disk(path: Path) -> int:
    return path.stat().st_blocks * 512


def test_memory_comes_back(sandbox: Sandbox) -> None:
    """Twelve states with 16 MiB of their own: one is left of them, and then none."""
    probe = Probe.start(sandbox)
    probe.do("x = b''")
    first = sandbox.checkpoint("first")
    empty = memory(sandbox)
    taken = []
    for number in range(12):
        probe.do(f"x = os.urandom(1 << 20) * 16; y = {number}")
        taken.append(sandbox.checkpoint())
    full = memory(sandbox)
    assert full - empty > 12 * 16 * MIB
    digest = "__import__('hashlib').sha256(x).hexdigest()"
    before = probe.ask(digest)
    for checkpoint in taken[:-1]:
        checkpoint.delete()
    # the next checkpoint's template may be a fresh copy already, after so many generations
    assert until(lambda: memory(sandbox) < full - 8 * 16 * MIB), memory(sandbox) / MIB
    sandbox.rollback(taken[-1])
    assert probe.ask("y") == 11
    assert probe.ask(digest) == before
    sandbox.rollback(first)
    taken[-1].delete()
    assert until(lambda: memory(sandbox) < empty + 16 * MIB), (memory(sandbox) - empty) / MIB


def test_disk_comes_back(sandbox: Sandbox, state_directory: Path) -> None:
    path = image(sandbox, state_directory)
    sandbox.checkpoint("first")
    empty = disk(path)
    taken = []
    for _ in range(6):
        sandbox.run("head -c 16M /dev/urandom > /tmp/big", check=True)
        taken.append(sandbox.checkpoint())
    full = disk(path)
    assert full - empty > 5 * 16 * MIB
    for checkpoint in taken:
        checkpoint.delete()
    sandbox.rollback("first")
    assert until(lambda: disk(path) < empty + 20 * MIB), (disk(path) - empty) / MIB


def test_a_policy_keeps_memory_and_disk_level(sandbox: Sandbox, state_directory: Path) -> None:
    """Forty steps of 8 MiB in memory and 4 MiB on disk, of which four are kept."""
    path = image(sandbox, state_directory)
    sandbox.keep(KeepLast(4))
    probe = Probe.start(sandbox)
    probe.do("x = b''")
    sandbox.checkpoint("first")
    level, used = memory(sandbox), disk(path)
    for number in range(40):
        probe.do(f"x = os.urandom(1 << 20) * 8; y = {number}")
        sandbox.run("head -c 4M /dev/urandom > /tmp/big", check=True)
        sandbox.checkpoint()
    assert len(sandbox.checkpoints) == 5
    assert until(lambda: memory(sandbox) < level + 12 * 8 * MIB), (memory(sandbox) - level) / MIB
    assert until(lambda: disk(path) < used + 12 * 4 * MIB), (disk(path) - used) / MIB
    assert probe.ask("y") == 39


def test_no_state_needs_its_ancestors(sandbox: Sandbox) -> None:
    """Twenty generations, more than a line of templates is long; every one but the last deleted.

    The state has what could be kept elsewhere: a file without a name, a changed library that is
    mapped, shared memory, files of every generation.
    """
    probe = Probe.start(sandbox)
    probe.do(
        "ghost = open('/tmp/ghost', 'w+'); ghost.write('without a name'); ghost.flush();"
        "os.unlink('/tmp/ghost'); shared = mmap.mmap(-1, 1 << 16); shared[:6] = b'shared';"
        "early = os.urandom(1 << 20); heap = {}"
    )
    line = []
    for number in range(20):
        probe.do(f"heap[{number}] = b'%d' % {number} * 5000")
        sandbox.files.write_text(f"/tmp/{number}", f"{number}\n")
        line.append(sandbox.checkpoint())
    whole = (
        "[__import__('zlib').crc32(early), [len(v) for v in heap.values()],"
        " shared[:6].decode(), os.pread(ghost.fileno(), 99, 0).decode(),"
        " [open('/tmp/%d' % n).read() for n in range(20)]]"
    )
    before = probe.ask(whole)
    for checkpoint in random.Random(4).sample(line[:-1], 19):
        checkpoint.delete()
    last = line[-1]
    assert sandbox.checkpoints == [last]
    assert last.parent is None
    for _ in range(3):
        probe.do("heap.clear(); early = b''; shared[:6] = b'xxxxxx'; ghost.truncate(0)")
        sandbox.run("rm /tmp/*")
        sandbox.rollback(last)
        assert probe.ask(whole) == before
    with sandbox.fork(at=last) as fork:
        assert probe.within(fork).ask(whole) == before
    sandbox.files.write_text("/tmp/next", "next\n")
    following = sandbox.checkpoint()
    assert following.stats.changed_files == 1
    last.delete()
    sandbox.rollback(following)
    assert probe.ask(whole) == before


def test_deleted_while_it_is_restored(sandbox: Sandbox) -> None:
    """Whoever got hold of it first has all of it; whoever came too late is told so."""
    probe = Probe.start(sandbox)
    home = sandbox.checkpoint("home")
    outcomes = set()
    for number in range(12):
        probe.do(f"y = {number}; x = os.urandom(1 << 20)")
        checkpoint = sandbox.checkpoint()
        total = probe.ask("__import__('zlib').crc32(x)")
        sandbox.rollback(home)
        began = threading.Event()

        def delete(doomed: Checkpoint, began: threading.Event) -> None:
            began.wait()
            doomed.delete()

        thread = threading.Thread(target=delete, args=(checkpoint, began))
        thread.start()
        began.set()
        try:
            if number % 2:
                with sandbox.fork(at=checkpoint) as fork:
                    copy = probe.within(fork)
                    assert copy.ask("[y, __import__('zlib').crc32(x)]") == [number, total]
            else:
                sandbox.rollback(checkpoint)
                assert probe.ask("[y, __import__('zlib').crc32(x)]") == [number, total]
            outcomes.add("restored")
        except UnknownCheckpoint:
            outcomes.add("too late")
        except ForkError as error:
            raise AssertionError("half of a checkpoint was found") from error
        thread.join()
        assert sandbox.checkpoints == [home]
        sandbox.rollback(home)
    assert outcomes <= {"restored", "too late"}


def test_a_policy_in_the_middle_of_forks(sandbox: Sandbox) -> None:
    """Forks of a node that loses its last object meanwhile."""
    probe = Probe.start(sandbox)
    home = sandbox.checkpoint("home")
    sandbox.keep(KeepReachable())
    for number in range(6):
        probe.do(f"y = {number}")
        reference = sandbox.checkpoint().id  # the head, so far
        copies = sandbox.fork_many(3, at=reference)
        sandbox.rollback(home)
        for copy in copies:
            assert probe.within(copy).ask("y") == number
            copy.rollback(reference)
            assert probe.within(copy).ask("y") == number
            copy.close()
        assert sandbox.checkpoints == [home]


def test_a_hundred_and_fifty_at_once(state_directory: Path) -> None:
    """Deleting many neither stalls a running sandbox nor the close of the tree."""
    with Sandbox.create() as sandbox:
        shell = sandbox.shell()
        sandbox.checkpoint("kept")
        usual = []
        for number in range(150):
            shell.run(f"x={number}; echo $x > /tmp/{number % 9}")
            began = time.perf_counter()
            sandbox.checkpoint()
            usual.append(time.perf_counter() - began)
        began = time.perf_counter()
        sandbox.keep(KeepLast(0))
        assert time.perf_counter() - began < 0.5
        during = []
        for number in range(20):
            shell.run(f"echo {number} > /tmp/n")
            began = time.perf_counter()
            sandbox.checkpoint()
            during.append(time.perf_counter() - began)
        assert sorted(during)[10] < 4 * sorted(usual)[75] + 0.05, (during, sorted(usual)[75])
        files = state_directory / "trees" / sandbox._tree
        began = time.perf_counter()
    assert time.perf_counter() - began < 2.0
    assert not files.exists()


def test_templates_end_with_their_checkpoints(sandbox: Sandbox) -> None:
    """No process is left of what was deleted."""
    (keeper,) = keepers()

    def templates() -> int:
        children = Path(f"/proc/{keeper}/task").glob("*/children")
        return sum(len(path.read_text().split()) for path in children)

    sandbox.checkpoint("first")
    sandbox.checkpoint().delete()
    few = templates()
    taken = [sandbox.checkpoint() for _ in range(20)]
    assert templates() >= few + 20
    for checkpoint in taken:
        checkpoint.delete()
    assert until(lambda: templates() <= few + 6), (few, templates())


def test_the_count_of_memory_is_the_kernels(sandbox: Sandbox) -> None:
    """A line long enough for full copies, half of it deleted: what is said is what is charged."""
    probe = Probe.start(sandbox)
    probe.do("x = bytearray(os.urandom(1 << 20) * 24)")
    sandbox.checkpoint("first")
    before, said_before = memory(sandbox), sandbox.usage.memory
    assert said_before > 24 * MIB
    line = []
    for number in range(20):
        # a view: a bytearray would copy what it is given once more before it takes it
        probe.do(f"memoryview(x)[{number} << 20 : {number + 2} << 20] = os.urandom(2 << 20)")
        line.append(sandbox.checkpoint())
        time.sleep(0.05)  # thought, in which the next template is made ahead

    def agrees() -> bool:
        charged, said = memory(sandbox) - before, sandbox.usage.memory - said_before
        return abs(charged - said) < 16 * MIB + said // 10

    assert until(agrees), ((memory(sandbox) - before) / MIB, sandbox.usage)
    said = sandbox.usage.memory
    assert said < 20 * 4 * MIB + 5 * 28 * MIB  # what changed, and the full copies
    for checkpoint in line[1::2]:
        checkpoint.delete()
    assert until(lambda: sandbox.usage.memory < said - 5 * MIB), sandbox.usage
    assert until(agrees), ((memory(sandbox) - before) / MIB, sandbox.usage)
    sandbox.rollback("first")
    for checkpoint in line[0::2]:
        checkpoint.delete()
    assert until(lambda: sandbox.usage.memory < said_before + 4 * MIB), sandbox.usage
