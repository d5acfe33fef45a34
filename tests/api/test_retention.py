"""What a tree keeps on its own, and that nothing else ever goes."""

from __future__ import annotations

import gc
import os
import threading
import time

import pytest

from deltabox import (
    Checkpoint,
    KeepAll,
    KeepFitting,
    KeepLast,
    KeepReachable,
    NoSpace,
    Sandbox,
    UnknownCheckpoint,
)


def ids(sandbox: Sandbox) -> list[str]:
    return [checkpoint.id for checkpoint in sandbox.checkpoints]


def test_the_last_ones(sandbox: Sandbox) -> None:
    with Sandbox.create(keep=KeepLast(3)) as made:
        taken = [made.checkpoint().id for _ in range(6)]
        assert ids(made) == taken[-3:]
        made.keep(KeepLast(1))
        assert ids(made) == taken[-1:]
        made.keep(KeepAll())
        more = [made.checkpoint().id for _ in range(4)]
        assert ids(made) == taken[-1:] + more
    assert ids(sandbox) == []


def test_what_every_policy_keeps(sandbox: Sandbox) -> None:
    """Named ones, held ones, and what a live sandbox stands on."""
    named = sandbox.checkpoint("named")
    held = sandbox.checkpoint()
    held.hold()
    stands = sandbox.checkpoint()
    other = sandbox.fork(at=stands)
    plain = sandbox.checkpoint()
    head = sandbox.checkpoint()
    for policy in (KeepLast(0), KeepLast(1), KeepReachable()):
        sandbox.keep(policy)
        kept = [named.id, held.id, stands.id, head.id]
        if policy == KeepReachable():
            sandbox.rollback(head)
        assert ids(sandbox) == kept
    with pytest.raises(UnknownCheckpoint):
        sandbox.rollback(plain)
    sandbox.keep(KeepLast(0))
    held.release()
    assert ids(sandbox) == [named.id, stands.id, head.id]
    sandbox.rollback("named")
    assert ids(sandbox) == [named.id, stands.id]
    assert other.head == stands
    other.close()
    assert ids(sandbox) == [named.id]


def test_reachable(sandbox: Sandbox) -> None:
    sandbox.keep(KeepReachable())
    tree = [sandbox.checkpoint() for _ in range(5)]
    wanted = [checkpoint.id for checkpoint in tree]
    assert ids(sandbox) == wanted
    del tree[1]
    assert ids(sandbox) == [wanted[0], *wanted[2:]]
    assert tree[1].parent == tree[0]
    assert tree[0].children == [tree[1]]
    head = sandbox.head
    everything = sandbox.checkpoints
    tree.clear()
    sandbox.checkpoint("root")
    root = sandbox.checkpoints[-1].id
    assert ids(sandbox) == [wanted[0], *wanted[2:], root]
    everything.clear()
    assert head is not None
    assert ids(sandbox) == [wanted[-1], root]
    del head
    assert ids(sandbox) == [root]


def test_an_object_from_anywhere_keeps_a_checkpoint(sandbox: Sandbox) -> None:
    sandbox.keep(KeepReachable())
    sandbox.checkpoint("a")
    first = sandbox.checkpoint()
    sandbox.checkpoint("b")
    (again,) = [one for one in sandbox.checkpoints if one == first]
    del first
    assert again.id in ids(sandbox)
    third = sandbox.checkpoints[-1]
    parent = third.parent
    assert parent == again
    del again
    sandbox.run("true")
    assert parent is not None
    sandbox.rollback(parent)
    stats = parent.stats
    sandbox.rollback("a")
    assert stats.changed_files == 0
    gone = parent.id
    del parent
    assert gone not in ids(sandbox)
    with pytest.raises(UnknownCheckpoint):
        sandbox.rollback(gone)


def test_objects_in_a_cycle_go_with_it(sandbox: Sandbox) -> None:
    """A finalizer that the collector runs, in the middle of whatever call."""
    sandbox.keep(KeepReachable())

    class Node:
        def __init__(self, checkpoint: Checkpoint) -> None:
            self.checkpoint = checkpoint
            self.me = self

    for _ in range(5):
        Node(sandbox.checkpoint())
    gc.collect()
    assert len(ids(sandbox)) == 1


def test_a_fork_leaves_no_reference_behind(sandbox: Sandbox) -> None:
    sandbox.keep(KeepReachable())
    with sandbox.fork() as child:
        assert len(ids(sandbox)) == 1
        child.checkpoint("c")
        sandbox.checkpoint("d")
        assert [one.name for one in sandbox.checkpoints] == ["c", "d"]


def test_an_answer_that_nobody_took_is_no_reference(sandbox: Sandbox) -> None:
    """A caller that was interrupted closes its connection; an idle one is closed with a claim."""
    sandbox.keep(KeepReachable())
    taken = []
    for claims in (False, True):
        channel = sandbox._keeper._connect()
        channel.send({"op": "checkpoint", "box": sandbox._box, "name": None, "reuse": False})
        answer = channel.receive()
        assert answer is not None
        taken.append(answer["ok"]["id"])
        if claims:
            channel.send({"op": "claim"})
        channel.close()
    sandbox.checkpoint("next")
    deadline = time.monotonic() + 10
    while ids(sandbox)[0] == taken[0] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert ids(sandbox)[:-1] == taken[1:]


def test_a_child_process_releases_nothing(sandbox: Sandbox) -> None:
    sandbox.keep(KeepReachable())
    first = sandbox.checkpoint()
    sandbox.checkpoint("second")
    pid = os.fork()
    if not pid:
        gc.collect()
        before = len(sandbox._keeper._released)
        del first
        os._exit(len(sandbox._keeper._released) - before)
    assert os.waitpid(pid, 0)[1] == 0
    assert first.id in ids(sandbox)


def test_threads_search_at_once(sandbox: Sandbox) -> None:
    """Each thread grows a line of states and drops it: the others' are never touched."""
    sandbox.run("echo 0 > /tmp/n")
    root = sandbox.checkpoint("root")
    sandbox.keep(KeepReachable())
    errors: list[BaseException] = []

    def search(box: Sandbox, number: int) -> None:
        try:
            for _ in range(4):
                line = []
                for depth in range(4):
                    box.run(f"echo {number}{depth} > /tmp/n")
                    line.append(box.checkpoint())
                for depth in (0, 2, 1, 3):
                    box.rollback(line[depth])
                    assert box.files.read_text("/tmp/n") == f"{number}{depth}\n"
                box.rollback(root)
                assert box.files.read_text("/tmp/n") == "0\n"
        except BaseException as error:
            errors.append(error)

    boxes = sandbox.fork_many(3, at=root)
    threads = [threading.Thread(target=search, args=(box, n)) for n, box in enumerate(boxes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert [one.name for one in sandbox.checkpoints] == ["root"]
    for box in boxes:
        box.close()


FILL = """
import sys
n = 0
print("up", flush=True)
for line in sys.stdin:
    n += 1
    block = bytes([n % 251 + 1]) * (8 << 20)
    print(n, flush=True)
"""


def test_room_is_made(sandbox: Sandbox) -> None:
    """Eight fresh megabytes in every state, and a budget for ten of them."""
    python = sandbox.spawn(["python3", "-c", FILL])
    assert python.stdout.readline(timeout=10) == "up\n"

    def step() -> None:
        python.stdin.write("\n")
        python.stdout.readline(timeout=10)

    step()
    first = sandbox.checkpoint("first")
    sandbox.keep(KeepFitting())
    try:
        Sandbox.create(max_memory="110M").close()
        for _ in range(30):
            step()
            last = sandbox.checkpoint()
        kept = sandbox.checkpoints
        assert (kept[0], kept[-1]) == (first, last)
        assert 4 <= len(kept) <= 13
        sandbox.rollback(kept[len(kept) // 2])
        number = 1 + 30 - len(kept) + 1 + len(kept) // 2
        python.stdin.write("\n")
        assert python.stdout.readline(timeout=10) == f"{number + 1}\n"
        sandbox.rollback(first)
        python.stdin.write("\n")
        assert python.stdout.readline(timeout=10) == "2\n"
        sandbox.keep(KeepAll())
        with pytest.raises(NoSpace, match="max_memory of"):
            for _ in range(15):
                step()
                sandbox.checkpoint()
    finally:
        Sandbox.create(max_memory="8G").close()


def test_room_is_made_on_disk(sandbox: Sandbox) -> None:
    """24 fresh megabytes in every state, and a budget for six of them."""
    sandbox.keep(KeepFitting())
    sandbox.run("echo first > /tmp/which")
    sandbox.checkpoint("first")
    try:
        Sandbox.create(max_disk="160M").close()
        for number in range(14):
            sandbox.run(f"echo {number} > /tmp/which; head -c 24M /dev/urandom > /tmp/big")
            sandbox.checkpoint()
        assert sandbox.usage.disk <= 160 << 20
        kept = sandbox.checkpoints
        assert kept[0].name == "first"
        assert 3 <= len(kept) <= 8
        sandbox.rollback(kept[-2])
        assert sandbox.files.read_text("/tmp/which") == "12\n"
        assert sandbox.files.stat("/tmp/big").size == 24 << 20
        sandbox.rollback("first")
        assert sandbox.files.read_text("/tmp/which") == "first\n"
        sandbox.keep(KeepAll())
        with pytest.raises(NoSpace, match="max_disk of"):
            for _ in range(10):
                sandbox.run("head -c 24M /dev/urandom > /tmp/big")
                sandbox.checkpoint()
    finally:
        Sandbox.create(max_disk="1000G").close()


def test_wrong_use(sandbox: Sandbox) -> None:
    with pytest.raises(TypeError, match="what to keep"):
        sandbox.keep(KeepLast)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="what to keep"):
        Sandbox.create(keep=3)  # type: ignore[arg-type]
    checkpoint = sandbox.checkpoint()
    checkpoint.delete()
    with pytest.raises(UnknownCheckpoint):
        checkpoint.hold()
