"""What makes copies of a running program dangerous, one test for each row of docs/hazards.md."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from deltabox import ForkError, Sandbox
from tests.conftest import keepers
from tests.probe import Probe

_WIPED = """
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
def mapped(kind, advice=0):
    at = libc.mmap(None, 16384, 3, kind | mmap.MAP_ANONYMOUS, -1, 0)
    assert at not in (None, 2 ** 64 - 1), os.strerror(ctypes.get_errno())
    if advice:
        assert libc.madvise(at, 16384, advice) == 0
    ctypes.memset(at, 0x5a, 16384)
    return at
def content(at):
    return sorted(set(ctypes.string_at(at, 16384)))
def flags(at):
    found = False
    for line in open('/proc/self/smaps'):
        if line.startswith('%x-' % at):
            found = True
        if found and line.startswith('VmFlags'):
            return sorted(set(line.split()[1:]) - {'sd'})
wiped = mapped(mmap.MAP_PRIVATE, 18)
droppable = mapped(8)
kept = mapped(mmap.MAP_PRIVATE)
both = [flags(wiped), flags(droppable)]
"""


def test_random_devices_differ(sandbox: Sandbox) -> None:
    probe = Probe.start(sandbox)
    probe.do("file = open('/dev/urandom', 'rb', buffering=0)")
    checkpoint = sandbox.checkpoint()
    forks = sandbox.fork_many(3, at=checkpoint)
    look = "[os.getrandom(16).hex(), file.read(16).hex(), open('/dev/random', 'rb').read(16).hex()]"
    seen = [value for one in (probe, *map(probe.within, forks)) for value in one.ask(look)]
    for _ in range(2):
        sandbox.rollback(checkpoint)
        seen += probe.ask(look)
    assert len(set(seen)) == len(seen) == 18
    for fork in forks:
        fork.close()


def test_memory_to_be_wiped_on_fork_is_never_saved(sandbox: Sandbox) -> None:
    """And the mapping with its flag comes back, so that the next fork(2) wipes it, too."""
    probe = Probe.start(sandbox)
    probe.do(_WIPED)
    assert [("wf" in each, "dp" in each) for each in probe.ask("both")] == [
        (True, False),
        (True, True),
    ]
    checkpoint = sandbox.checkpoint()
    look = "[content(at) for at in (wiped, droppable, kept)]"
    assert probe.ask(look) == [[0x5A]] * 3, "the checkpoint itself wiped something"
    child = """
import select
pid = os.fork()
if not pid:
    os._exit(content(wiped) == content(droppable) == [0] and content(kept) == [0x5a])
forked = os.waitpid(pid, 0)[1]
"""
    for _ in range(2):
        sandbox.rollback(checkpoint)
        assert probe.ask(look) == [[0], [0], [0x5A]]
        assert probe.ask("[flags(wiped), flags(droppable)] == both")
        probe.do("ctypes.memset(wiped, 0x5a, 16384); ctypes.memset(droppable, 0x5a, 16384)")
        probe.do(child)
        assert probe.ask("os.waitstatus_to_exitcode(forked)") == 1
    with sandbox.fork(at=checkpoint) as fork, fork.fork() as grandchild:
        for one in (fork, grandchild):
            assert probe.within(one).ask(look) == [[0], [0], [0x5A]]
            assert probe.within(one).ask("[flags(wiped), flags(droppable)] == both")


_GENERATOR = r"""
#define _GNU_SOURCE
#include <stdio.h>
#include <string.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/random.h>

/* As BoringSSL and others do it: a generator whose state lives in ordinary memory, and a page that
 * is wiped in a child to tell that it must be seeded again. */
static struct { uint64_t key, count; } state;
static volatile uint64_t *alive;

static uint64_t next(void)
{
        if (!*alive) {
                getrandom(&state, sizeof state, 0);
                *alive = 1;
        }
        state.key ^= state.key << 13, state.key ^= state.key >> 7, state.key ^= state.key << 17;
        return state.key + state.count++;
}

int main(void)
{
        char line[16];
        alive = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (madvise((void *)alive, 4096, MADV_WIPEONFORK))
                return 1;
        while (fgets(line, sizeof line, stdin)) {
                printf("%016lx\n", next());
                fflush(stdout);
        }
}
"""


def test_a_generator_that_watches_for_forks_is_seeded_again(sandbox: Sandbox) -> None:
    sandbox.files.write_text("/tmp/generator.c", _GENERATOR)
    sandbox.run("gcc -O1 -o /tmp/generator /tmp/generator.c", check=True)
    generator = sandbox.spawn(["/tmp/generator"])

    def draw(where: Sandbox) -> str:
        copy = where.counterpart(generator)
        copy.stdin.write("\n")
        return copy.stdout.readline(timeout=10)

    seen = [draw(sandbox), draw(sandbox)]
    checkpoint = sandbox.checkpoint()
    seen.append(draw(sandbox))
    forks = sandbox.fork_many(3, at=checkpoint)
    seen += [draw(fork) for fork in forks for _ in range(2)]
    for _ in range(2):
        sandbox.rollback(checkpoint)
        seen += [draw(sandbox), draw(sandbox)]
    assert len(set(seen)) == len(seen) == 13
    for fork in forks:
        fork.close()


_VDSO_GETRANDOM = """
vdso = ctypes.CDLL('linux-vdso.so.1')
draw_into = vdso.__vdso_getrandom
draw_into.restype = ctypes.c_ssize_t
draw_into.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint, ctypes.c_void_p,
                      ctypes.c_size_t]
wanted = ctypes.create_string_buffer(64)  # struct vgetrandom_opaque_params
assert draw_into(None, 0, 0, ctypes.addressof(wanted), 2 ** 64 - 1) == 0
size, prot, kind = struct.unpack_from('3I', wanted)
libc.mmap.restype = ctypes.c_void_p
state = libc.mmap(None, mmap.PAGESIZE, prot, kind, -1, 0)
assert state is not None and size <= mmap.PAGESIZE
def draw():
    out = ctypes.create_string_buffer(16)
    assert draw_into(ctypes.addressof(out), 16, 0, state, size) == 16
    return out.raw.hex()
first = draw()
"""


def test_the_generator_in_the_vdso_is_seeded_again(sandbox: Sandbox) -> None:
    probe = Probe.start(sandbox)
    probe.do(_VDSO_GETRANDOM)
    seen = [probe.ask("first")]
    checkpoint = sandbox.checkpoint()
    forks = sandbox.fork_many(3, at=checkpoint)
    seen += [probe.within(fork).ask("draw()") for fork in forks]
    for _ in range(3):
        seen.append(probe.ask("draw()"))
        sandbox.rollback(checkpoint)
    assert len(set(seen)) == len(seen) == 7
    for fork in forks:
        fork.close()


# -- being told ------------------------------------------------------------------------------------


def _told(sandbox: Sandbox) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(sandbox.files.read_text("/run/deltabox/fork.json"))
    return told


def test_each_fork_finds_who_it_is(sandbox: Sandbox) -> None:
    first = _told(sandbox)
    assert (first["fork"], len(first["random"])) == (0, 64)
    assert sandbox.run("stat -c '%u %a' /run/deltabox/fork.json").stdout == "0 644\n"
    checkpoint = sandbox.checkpoint()
    sandbox.files.write_text("/tmp/mine", "x")
    forks = sandbox.fork_many(3, at=checkpoint)
    told = [_told(fork) for fork in forks]
    grandchild = forks[0].fork()
    told.append(_told(grandchild))
    for one in told:
        assert one["fork"] > 0
    assert told[3]["fork"] > told[0]["fork"]
    for field in ("sandbox", "fork", "random"):
        assert len({one[field] for one in (first, *told)}) == 5
    # nothing of it shows in comparisons
    assert forks[0].diff(checkpoint) == [] and forks[0].patch(checkpoint) == ""
    assert [change.path for change in sandbox.diff(checkpoint)] == ["/tmp/mine"]
    assert checkpoint.stats.changed_files == 0
    # a rollback to what was saved here repeats it; to what was saved elsewhere is a fork of that
    sandbox.rollback(checkpoint)
    assert _told(sandbox) == first
    forks[1].rollback(checkpoint)
    again = _told(forks[1])
    assert again["sandbox"] == told[1]["sandbox"]
    assert again["fork"] > told[3]["fork"] and again["random"] != told[1]["random"]
    for fork in (*forks, grandchild):
        fork.close()


def test_a_fork_that_cannot_be_told_is_refused(sandbox: Sandbox) -> None:
    sandbox.run("rm -r /run/deltabox", check=True)
    with sandbox.fork() as fork:
        assert _told(fork)["fork"] > 0
    sandbox.run("mkdir -p /run/deltabox/fork.json", check=True)
    with pytest.raises(ForkError, match=r"/run/deltabox/fork\.json could not be written"):
        sandbox.fork()
    assert sandbox.run("echo on").stdout == "on\n"


_SEEDED = """
import random
random.seed(5)
told = []
def reseed(number, frame):
    random.seed(json.load(open('/run/deltabox/fork.json'))['random'])
    told.append(number)
signal.signal(signal.SIGUSR1, reseed)
"""


def test_a_registered_process_is_told_of_forks_and_not_of_rollbacks(sandbox: Sandbox) -> None:
    probe = Probe.start(sandbox)
    probe.do(_SEEDED)
    unregistered = sandbox.checkpoint()
    sandbox.on_fork(probe.process, signal.SIGUSR1)
    checkpoint = sandbox.checkpoint()
    expected = probe.ask("random.random()")
    for _ in range(2):
        sandbox.rollback(checkpoint)
        assert probe.ask("[told, random.random()]") == [[], expected]
    forks = sandbox.fork_many(3, at=checkpoint)
    # it comes before the line that was already waiting to be read is
    drawn = [probe.within(fork).ask("[told, random.random()]") for fork in forks]
    assert [told for told, _ in drawn] == [[signal.SIGUSR1]] * 3
    assert len({expected, *(value for _, value in drawn)}) == 4
    # the registration is part of the state
    with forks[0].fork() as grandchild:
        assert probe.within(grandchild).ask("told") == [signal.SIGUSR1] * 2
    with sandbox.fork(at=unregistered) as fork:
        assert probe.within(fork).ask("[told, random.random()]") == [[], expected]
    sandbox.rollback(unregistered)
    with sandbox.fork() as fork:
        assert probe.within(fork).ask("told") == []
    sandbox.rollback(checkpoint)
    with sandbox.fork() as fork:
        assert probe.within(fork).ask("told") == [signal.SIGUSR1]
    sandbox.on_fork(probe.process.pid, None)
    with sandbox.fork() as fork:
        assert probe.within(fork).ask("told") == []
    assert probe.ask("told") == []
    for fork in forks:
        fork.close()


def test_a_fork_going_to_a_state_of_another_sandbox_is_told(sandbox: Sandbox) -> None:
    probe = Probe.start(sandbox)
    probe.do(_SEEDED)
    sandbox.on_fork(probe.process, signal.SIGUSR1)
    checkpoint = sandbox.checkpoint()
    with sandbox.fork(at=checkpoint) as fork:
        copy = probe.within(fork)
        first = copy.ask("random.random()")
        own = fork.checkpoint()
        fork.rollback(own)
        assert copy.ask("told") == [signal.SIGUSR1]
        fork.rollback(checkpoint)
        assert copy.ask("told") == [signal.SIGUSR1]
        assert copy.ask("random.random()") != first


@pytest.mark.parametrize(
    "wait",
    [
        "signal.pause()",
        "select.poll().poll(1000000)",
        "os.read(pipe[0], 1)",
        "time.sleep(1000)",
        "threading.Event().wait(1000)",
        "signal.sigwait([signal.SIGUSR1]) and hear(0, 0)",
    ],
)
def test_a_process_that_waits_is_woken(sandbox: Sandbox, wait: str) -> None:
    """Its handler runs at once, as for any signal, and not when the call has come to its end."""
    program = f"""
import os, select, signal, threading, time, json, sys
def hear(number, frame):
    print(number, json.load(open('/run/deltabox/fork.json'))['fork'], flush=True)
signal.signal(signal.SIGUSR1, hear)
if 'sigwait' in {wait!r}:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
pipe = os.pipe()
print('waiting', flush=True)
{wait}
"""
    waiting = sandbox.spawn(["python3", "-c", program])
    assert waiting.stdout.readline(timeout=20) == "waiting\n"
    _until_blocked(sandbox, waiting.pid)
    sandbox.on_fork(waiting, signal.SIGUSR1)
    checkpoint = sandbox.checkpoint()
    for fork in sandbox.fork_many(2, at=checkpoint):
        with fork:
            heard = fork.counterpart(waiting).stdout.readline(timeout=10).split()
            assert heard[0] in ("10", "0") and int(heard[1]) == _told(fork)["fork"]
    sandbox.rollback(checkpoint)
    _until_blocked(sandbox, waiting.pid)
    assert waiting.stdout.read_available() == ""
    assert waiting.exit_code is None


def _until_blocked(sandbox: Sandbox, pid: int) -> None:
    """Wait until a process sleeps in a system call."""
    deadline = time.monotonic() + 20
    while next(p.state for p in sandbox.processes() if p.pid == pid) != "S":
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_threads_that_block_the_signal_leave_it_to_the_one_that_does_not(sandbox: Sandbox) -> None:
    program = """
import os, signal, threading, time
def hear(number, frame):
    print('heard', flush=True)
signal.signal(signal.SIGUSR1, hear)
def other():
    print('waiting', flush=True)
    time.sleep(1000)  # takes the signal; the handler runs in the main thread, woken by a byte
r, w = os.pipe2(os.O_NONBLOCK)
signal.set_wakeup_fd(w)
os.set_blocking(r, True)
threading.Thread(target=other, daemon=True).start()
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
os.read(r, 1)
print('woken', flush=True)
"""
    waiting = sandbox.spawn(["python3", "-c", program])
    assert waiting.stdout.readline(timeout=20) == "waiting\n"
    _until_blocked(sandbox, waiting.pid)
    sandbox.on_fork(waiting, signal.SIGUSR1)
    with sandbox.fork() as fork:
        copy = fork.counterpart(waiting)
        assert copy.stdout.read(timeout=10) == "heard\nwoken\n"
    assert waiting.exit_code is None


def test_registering_what_is_not_there(sandbox: Sandbox) -> None:
    with pytest.raises(ProcessLookupError, match="no process 4242 in the sandbox"):
        sandbox.on_fork(4242, signal.SIGUSR1)
    with pytest.raises(ProcessLookupError, match="no process 4242"):
        sandbox.on_fork(4242, None)
    ended = sandbox.spawn("exit 3")
    ended.wait(timeout=10)
    with pytest.raises(ProcessLookupError):
        sandbox.on_fork(ended, signal.SIGUSR1)
    sleeper = sandbox.spawn(["sleep", "1000"])
    for wrong in (0, 65, 9, 19, 33):
        with pytest.raises(ValueError, match="cannot be handled"):
            sandbox.on_fork(sleeper, wrong)
    with pytest.raises(ValueError, match="first process"):
        sandbox.on_fork(1, signal.SIGUSR1)
    with pytest.raises(TypeError):
        sandbox.on_fork("sleep", signal.SIGUSR1)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        sandbox.on_fork(sleeper, "SIGUSR1")  # type: ignore[arg-type]
    with Sandbox.create() as other, pytest.raises(ValueError, match="another tree"):
        other.on_fork(sleeper, signal.SIGUSR1)
    # a registration ends with its process, whoever has the pid afterwards
    sandbox.on_fork(sleeper, signal.SIGUSR1)
    sleeper.kill()
    sleeper.wait(timeout=10)
    sandbox.run(
        f"echo {sleeper.pid - 1} > /proc/sys/kernel/ns_last_pid; sleep 1000 & echo $!",
        check=True,
    )
    assert sleeper.pid in [p.pid for p in sandbox.processes()]
    with sandbox.fork() as fork:
        assert sleeper.pid in [p.pid for p in fork.processes()]


# -- who it is -------------------------------------------------------------------------------------

_WHO = "hostname; cat /etc/hostname /etc/machine-id /proc/sys/kernel/random/boot_id"


def test_a_sandbox_is_not_its_host() -> None:
    with Sandbox.create(hostname="node-7.example") as one, Sandbox.create() as other:
        mine, its = one.run(_WHO).stdout.split(), other.run(_WHO).stdout.split()
        assert mine[:2] == ["node-7.example"] * 2 and its[:2] == ["sandbox"] * 2
        host = Path("/etc/machine-id").read_text().strip()
        assert len({mine[2], its[2], host}) == 3
    for wrong in ("", "-a", "a_b", "a" * 65, "ä", "a\nb"):
        with pytest.raises(ValueError, match="host name"):
            Sandbox.create(hostname=wrong)


def test_identity_is_copied_unless_a_new_one_is_asked_for(sandbox: Sandbox) -> None:
    before = sandbox.run(_WHO).stdout.split()
    checkpoint = sandbox.checkpoint()
    with sandbox.fork(at=checkpoint) as same:
        assert same.run(_WHO).stdout.split() == before
    seen = [before]
    for fork in sandbox.fork_many(2, at=checkpoint, identity="new"):
        with fork:
            mine = fork.run(_WHO).stdout.split()
            assert mine[0] == mine[1] and mine[0].startswith("sandbox-")
            assert mine[3] == before[3], "the boot id is the host's"
            seen.append(mine)
            with fork.fork() as child:
                assert child.run(_WHO).stdout.split() == mine
            fork.rollback(checkpoint)
            assert fork.run(_WHO).stdout.split() == mine, "it keeps its identity"
    for position in (0, 2):
        assert len({one[position] for one in seen}) == 3
    assert sandbox.run(_WHO).stdout.split() == before
    with pytest.raises(ValueError, match="'same' or 'new'"):
        sandbox.fork(identity="other")  # type: ignore[arg-type]


# -- what repeats, what does not -------------------------------------------------------------------


def test_seeds_in_ordinary_memory_repeat(sandbox: Sandbox) -> None:
    """They are part of the state; what comes from the kernel is not."""
    probe = Probe.start(sandbox)
    probe.do("import random, tempfile, uuid; tempfile.mktemp()")
    checkpoint = sandbox.checkpoint()
    look = "[[random.random(), tempfile.mktemp(), os.getpid()], str(uuid.uuid4())]"
    seen = [probe.ask(look)]
    for fork in sandbox.fork_many(2, at=checkpoint):
        with fork:
            seen.append(probe.within(fork).ask(look))
    sandbox.rollback(checkpoint)
    seen.append(probe.ask(look))
    assert all(repeated == seen[0][0] for repeated, _ in seen)
    assert len({fresh for _, fresh in seen}) == 4


def test_no_clock_goes_back(sandbox: Sandbox) -> None:
    probe = Probe.start(sandbox)
    look = "[time.clock_gettime(c) for c in (0, 1, 4, 5, 6, 7, 11)]"
    checkpoint = sandbox.checkpoint()
    before = probe.ask(look)
    for _ in range(3):
        sandbox.rollback(checkpoint)
        after = probe.ask(look)
        assert all(new >= old for new, old in zip(after, before, strict=True))
        before = after
    with sandbox.fork(at=checkpoint) as fork:
        after = probe.within(fork).ask(look)
        assert all(new >= old for new, old in zip(after, before, strict=True))


# -- secrets ---------------------------------------------------------------------------------------


def test_what_holds_checkpoints_is_out_of_reach(sandbox: Sandbox) -> None:
    """PID 1 shares its memory with the template; siblings are in other namespaces."""
    probe = Probe.start(sandbox)
    probe.do("secret = os.urandom(32)")
    checkpoint = sandbox.checkpoint()
    forks = sandbox.fork_many(2, at=checkpoint)
    sandbox.rollback(checkpoint)
    for one in (probe, *map(probe.within, forks)):
        one.do("""
refused = []
for path in ('mem', 'maps', 'environ', 'pagemap', 'auxv', 'map_files', 'fd', 'stack'):
    try:
        (os.listdir if path in ('fd', 'map_files') else open)('/proc/1/' + path)
    except PermissionError:
        refused.append(path)
refused.append(libc.ptrace(16, 1, None, None) == -1 and ctypes.get_errno())
""")
        assert one.ask("refused") == [
            *("mem", "maps", "environ", "pagemap", "auxv", "map_files", "fd", "stack"),
            1,
        ]
        assert one.ask("sorted(int(p) for p in os.listdir('/proc') if p.isdigit())") == [
            1,
            probe.process.pid,
        ]
    for fork in forks:
        fork.close()


def test_checkpoints_are_never_dumped(sandbox: Sandbox) -> None:
    """A limit of 1 byte: a core file needs more, and a program that takes cores is not started."""
    sandbox.spawn(["sleep", "1000"])
    sandbox.checkpoint()
    found = 0
    for keeper in keepers():
        for child in Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split():
            limits = Path(f"/proc/{child}/limits").read_text()
            soft = next(
                line.split()[4] for line in limits.splitlines() if line.startswith("Max core")
            )
            assert soft in ("0", "1")
            found += 1
    assert found > 2
