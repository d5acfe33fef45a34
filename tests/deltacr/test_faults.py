"""All or nothing: every operation, with its n-th call or record failing, for every n.

Afterwards the old state runs on or the new one does, and what can be counted has not grown.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deltabox import DeltaBoxError, Process, Sandbox, Shell
from tests.api.test_growth import until
from tests.api.test_standby import awaited, used
from tests.conftest import keeper_of_its_own
from tests.objects.test_mqueue import CALLS
from tests.probe import Probe

pytestmark = pytest.mark.timeout(400)  # hundreds of operations each


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A keeper of its own in the test mode."""
    with keeper_of_its_own(tmp_path_factory.mktemp("faults"), DELTABOX_FAULTS="1"):
        yield


class State:
    """A sandbox with a shell and a python that hold something, and a checkpoint."""

    def __init__(self, standby: str | int = 0) -> None:
        # 0: whether one waits would depend on the time that the background has had
        self.sandbox = Sandbox.create(standby=standby)
        self.shell: Shell = self.sandbox.shell()
        self.shell.run("x=1; sleep 1000 & sleep 1001 | sleep 1002 &")
        self.python: Process = self.sandbox.spawn(
            [
                "python3",
                "-c",
                "import fcntl, os, sys\nn = 0\n"
                "f = open('/root/gone', 'w')\nf.write('x' * 100000)\nf.flush()\n"
                "fcntl.flock(f, 2)\nos.unlink('/root/gone')\n"
                "for l in sys.stdin:\n n += 1\n print(n, flush=True)",
            ]
        )
        self.python.stdin.write("\n")
        assert self.python.stdout.readline() == "1\n"
        self.first = self.sandbox.checkpoint("first")
        self.counter = 1

    def arm(self, kind: str, number: int) -> str:
        answer = self.sandbox._keeper.call(
            "fault", call=number if kind == "call" else 0, record=number if kind == "record" else 0
        )
        assert isinstance(answer, str)
        return answer

    def works(self, sandbox: Sandbox, x: str, counter: int) -> None:
        assert sandbox.counterpart(self.shell).run("echo $x").stdout == f"{x}\n"
        python = sandbox.counterpart(self.python)
        python.stdin.write("\n")
        assert python.stdout.readline(timeout=10) == f"{counter + 1}\n"
        assert len(sandbox.processes()) == 5


def _each_fault(
    state: State,
    kind: str,
    operation: Callable[[bool], None],
    prepare: Callable[[], object] = lambda: None,
) -> int:
    """Run the operation with fault 1, 2, 3, ... until none fires; how many there were."""
    number = 0
    while True:
        number += 1
        prepare()
        state.arm(kind, number)
        failed: Exception | None = None
        try:
            operation(False)
        except (DeltaBoxError, OSError) as error:
            failed = error
        fired = state.arm(kind, 0)
        try:
            operation(True)
        except BaseException as error:
            raise AssertionError(f"after {kind} {number} ({fired}, {failed!r})") from error
        if not fired:
            assert failed is None
            return number - 1


def _keeper_pid(state: State) -> int:
    lines = subprocess.run(["ps", "-eww", "-o", "pid,args"], capture_output=True, text=True).stdout
    where = os.environ["DELTABOX_STATE"]
    return next(
        int(line.split()[0])
        for line in lines.splitlines()
        if "deltabox.keeper" in line and where in line
    )


def _held(pid: int) -> dict[str, int]:
    """What a leak would make grow."""
    groups = sum(len(names) for _, names, _ in os.walk(f"/sys/fs/cgroup/unified/deltabox-{pid}"))
    mounts = Path(f"/proc/{pid}/mountinfo").read_text().count("\n")
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return {
        "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
        "mounts": mounts,
        "children": len(children),
        "groups": groups,
    }


def _groups(pid: int) -> set[Path]:
    """The control groups of trees, in all hierarchies."""
    return {group for group in Path("/sys/fs/cgroup").glob(f"*/deltabox-{pid}/*") if group.is_dir()}


@pytest.fixture
def state(faulty: None) -> Iterator[State]:
    made = State()
    yield made
    made.arm("call", 0)
    made.sandbox.close()


@pytest.mark.parametrize("kind", ["call", "record"])
def test_checkpoint(state: State, kind: str) -> None:
    taken: list[object] = []

    def operation(look: bool) -> None:
        if not look:
            taken.append(state.sandbox.checkpoint())
            return
        state.works(state.sandbox, "1", state.counter)
        state.counter += 1
        while len(state.sandbox.checkpoints) > 1:
            state.sandbox.checkpoints[-1].delete()

    assert _each_fault(state, kind, operation) > 20
    assert len(taken) >= 1


@pytest.mark.parametrize("kind", ["call", "record"])
def test_rollback(state: State, kind: str) -> None:
    def operation(look: bool) -> None:
        if not look:
            state.sandbox.rollback("first")
            return
        x = state.shell.run("echo $x").stdout.strip()
        state.works(state.sandbox, x, 1 if x == "1" else state.counter)
        state.counter = 2 if x == "1" else state.counter + 1

    assert _each_fault(state, kind, operation, lambda: state.shell.run("x=2")) > 20


def test_rollback_to_a_standby(faulty: None) -> None:
    state = State("256M")

    def prepare() -> None:
        state.shell.run("x=2")
        awaited(state.sandbox, state.first)

    def operation(look: bool) -> None:
        if not look:
            state.sandbox.rollback("first")
            return
        x = state.shell.run("echo $x").stdout.strip()
        state.works(state.sandbox, x, 1 if x == "1" else state.counter)
        state.counter = 2 if x == "1" else state.counter + 1

    assert _each_fault(state, "call", operation, prepare) > 3
    assert used(state.sandbox) > 3
    state.sandbox.close()


@pytest.mark.parametrize("kind", ["call", "record"])
def test_fork(state: State, kind: str) -> None:
    forks: list[Sandbox] = []

    def operation(look: bool) -> None:
        if not look:
            forks.extend(state.sandbox.fork_many(2, at="first"))
            return
        for fork in forks:
            state.works(fork, "1", 1)
            fork.close()
        forks.clear()
        state.works(state.sandbox, "1", state.counter)
        state.counter += 1

    assert _each_fault(state, kind, operation) > 20


# each hidden path costs a dozen calls, which are the same for all
FEW = ["/root/.ssh", "/home/*/.netrc", "/etc/shadow-", "/missing/*/below", "/var/lib/../lib/cloud"]


@pytest.mark.parametrize(
    ("kind", "hide"),
    [
        ("call", FEW),
        ("record", None),
        pytest.param("call", None, marks=[pytest.mark.full, pytest.mark.timeout(1800)]),
    ],
)
def test_create_and_close(state: State, kind: str, hide: list[str] | None) -> None:
    def operation(look: bool) -> None:
        if look:
            state.works(state.sandbox, "1", state.counter)
            state.counter += 1
            return
        with Sandbox.create(hide=hide, visibility=["/srv"]) as other:
            assert other.run("echo hi").stdout == "hi\n"

    pid = _keeper_pid(state)
    before = _groups(pid)
    assert _each_fault(state, kind, operation) > 20
    assert until(lambda: _groups(pid) == before), "control groups of trees are left"


@pytest.mark.full
def test_forks_with_what_all_see(state: State) -> None:
    def operation(look: bool) -> None:
        if look:
            state.works(state.sandbox, "1", state.counter)
            state.counter += 1
            return
        with Sandbox.create(hide=[], visibility=["/srv"]) as other, other.fork() as fork:
            fork.files.write_text("/srv/a", "")
            assert other.files.exists("/srv/a")

    pid = _keeper_pid(state)
    before = _groups(pid)
    assert _each_fault(state, "call", operation) > 20
    assert until(lambda: _groups(pid) == before), "control groups of trees are left"


@pytest.mark.parametrize("operation", ["checkpoint", "rollback", "fork"])
def test_message_queues_and_who_is_told(state: State, operation: str) -> None:
    """Messages are taken out and put back; a fork is announced: at each step something fails."""
    probe = Probe.start(state.sandbox)
    probe.do(
        CALLS
        + """
q = mq_open('q', os.O_CREAT | os.O_RDWR | os.O_NONBLOCK)
g = mq_open('g', os.O_CREAT | os.O_RDWR | os.O_NONBLOCK)
mq_unlink('g')
for priority in (1, 7, 1, 1):
    send(q, str(os.getrandom(2)), priority)
    send(g, str(os.getrandom(2)), priority)
"""
    )
    state.sandbox.on_fork(probe.process, signal.SIGURG)
    checkpoint = state.sandbox.checkpoint()
    look = "[drained(q), drained(g)]"
    before = probe.ask(look)
    forks: list[Sandbox] = []

    def operate(again: bool) -> None:
        if again:
            for fork in forks:
                assert probe.within(fork).ask(look) == before
                fork.close()
            forks.clear()
            assert probe.ask(look) == before
        elif operation == "checkpoint":
            state.sandbox.checkpoint().delete()
        elif operation == "rollback":
            state.sandbox.rollback(checkpoint)
        else:
            forks.append(state.sandbox.fork(at=checkpoint, identity="new"))

    assert _each_fault(state, "call", operate) > 20


@pytest.mark.parametrize("operation", ["checkpoint", "rollback", "fork"])
def test_shared_memory(state: State, operation: str) -> None:
    """Objects are looked at, made and filled; at each step something fails."""
    small = Sandbox.create(standby=0)  # fewer calls, in the same keeper
    probe = Probe.start(small)
    probe.do(
        """
m = mmap.mmap(-1, 1 << 20); fd = os.memfd_create('thing', 2); os.truncate(fd, 1 << 16)
segment = libc.shmget(0x77, 8192, 0o1600); libc.shmat.restype = ctypes.c_void_p
at = libc.shmat(segment, None, 0); sem = libc.semget(0x78, 1, 0o1600)
assert libc.semctl(sem, 0, 16, 7) == 0
def put(n):
    m[5000] = n; os.pwrite(fd, bytes([n]), 300); ctypes.memset(at + 5000, n, 1)
def seen():
    return [m[5000], os.pread(fd, 1, 300)[0], ctypes.string_at(at + 5000, 1)[0],
            libc.semctl(sem, 0, 12)]
put(5)
"""
    )
    checkpoint = small.checkpoint()
    forks: list[Sandbox] = []

    def operate(again: bool) -> None:
        if again:
            for fork in forks:
                assert probe.within(fork).ask("seen()") == [5, 5, 5, 7]
                fork.close()
            forks.clear()
            assert probe.ask("seen()") in ([5, 5, 5, 7], [6, 6, 6, 7])
        elif operation == "checkpoint":
            small.checkpoint().delete()
        elif operation == "rollback":
            small.rollback(checkpoint)
        else:
            forks.append(small.fork(at=checkpoint))

    assert _each_fault(state, "call", operate, lambda: probe.do("put(6)")) > 20
    small.close()


def test_nothing_grows(state: State) -> None:
    """After all those failures, whole cycles hold as much at the end as at the beginning."""

    def cycle(number: int) -> None:
        state.arm("call", number)
        try:
            state.sandbox.checkpoint("next")
            state.sandbox.rollback("next")
            state.sandbox.fork().close()
        except (DeltaBoxError, OSError):
            pass
        state.arm("call", 0)
        for checkpoint in state.sandbox.checkpoints:
            if checkpoint.name != "first":
                checkpoint.delete()
        state.sandbox.rollback("first")

    import time

    pid = _keeper_pid(state)
    for number in range(5):
        cycle(number + 1)
    time.sleep(1.0)
    before = _held(pid)
    for number in range(0, 400, 9):
        cycle(number)
    deadline = time.monotonic() + 20
    while (after := _held(pid)) != before and time.monotonic() < deadline:
        time.sleep(0.1)
        if all(after[key] <= before[key] + 4 for key in before):
            break
    assert all(after[key] <= before[key] + 4 for key in before), (before, after)
