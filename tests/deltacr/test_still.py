"""A process that has not moved is not asked again (deltacr/told.py); one that has always is.

The keeper of the tests asks again all the same and compares (deltacr/verify.py), so a test only
has to let a program do something between two stops that might be overlooked.
"""

from __future__ import annotations

import random
import time

from deltabox import Sandbox
from tests.probe import Probe

# A thread that moves its break by a page and sleeps, again and again: it is always found at the
# same instruction with the same registers, and writes nothing.
_CREEPING = """
import mmap
code = mmap.mmap(-1, 4096, prot=7)
code.write(bytes.fromhex(
    "31ff b80c000000 0f05"  # brk(0)
    "488db800100000 b80c000000 0f05"  # brk(rax + 4096)
    "b823000000 488d3d0d000000 31f6 0f05"  # nanosleep(time, 0)
    "ebd7") + bytes(7) + struct.pack("<qq", 0, %d))
at = ctypes.addressof(ctypes.c_char.from_buffer(code))
threading.Thread(target=ctypes.CFUNCTYPE(None)(at), daemon=True).start()
"""


def _rest(sandbox: Sandbox, seconds: float) -> None:
    """Have work done ahead, and perhaps a rehearsal."""
    sandbox.run(["true"])
    time.sleep(seconds)


def test_a_program_that_leaves_no_trace_in_its_memory(sandbox: Sandbox) -> None:
    chance = random.Random(7)
    probe = Probe.start(sandbox)
    probe.do(_CREEPING % 60_000_000)
    for number in range(20):
        _rest(sandbox, chance.random() * 0.15)
        checkpoint = sandbox.checkpoint()
        if number % 5 == 4:
            sandbox.rollback(checkpoint)


def test_what_others_change_is_noticed(sandbox: Sandbox) -> None:
    """Another process may set the limits and the timer slack of one that sleeps."""
    sleeper = Probe.start(sandbox)
    pid = sleeper.ask("os.getpid()")
    other = Probe.start(sandbox)
    known = []
    for number in range(1, 4):
        other.do(f"resource.prlimit({pid}, resource.RLIMIT_NOFILE, ({100 + number}, 1000))")
        other.do(f"open('/proc/{pid}/timerslack_ns', 'w').write('{number}000')")
        _rest(sandbox, 0.1)
        known.append(sandbox.checkpoint())
        _rest(sandbox, 0.1)
        sandbox.checkpoint()
    for number, checkpoint in enumerate(known, 1):
        sandbox.rollback(checkpoint)
        assert sleeper.ask("resource.getrlimit(resource.RLIMIT_NOFILE)[0]") == 100 + number
        assert sleeper.ask("libc.prctl(30, 0, 0, 0, 0)") == number * 1000


def test_states_of_a_tree_at_rest(sandbox: Sandbox) -> None:
    """Checkpoints one after the other without anything between, forks and rollbacks of them."""
    probe = Probe.start(sandbox)
    shell = sandbox.shell()
    shell.run("x=1; sleep 1000 &")
    probe.do("x = bytearray(os.urandom(1 << 20)); import zlib; total = zlib.crc32(x)")
    known = []
    for _ in range(3):
        _rest(sandbox, 0.12)
        known += [sandbox.checkpoint() for _ in range(4)]
    for number, checkpoint in enumerate(known):
        sandbox.rollback(checkpoint)
        _rest(sandbox, 0.03 * (number % 4))
        if number % 3 == 0:
            known.append(sandbox.checkpoint())
        assert shell.run("echo $x $(jobs | wc -l)").stdout == "1 1\n"
        assert probe.ask("zlib.crc32(x) == total") is True
    with sandbox.fork() as copy:
        assert probe.within(copy).ask("zlib.crc32(x) == total") is True


def test_a_timeout_is_not_longer_for_a_rehearsal(sandbox: Sandbox) -> None:
    """epoll_wait(2) answers a stop with EINTR, and nobody knows how much of its time is left."""
    probe = Probe.start(sandbox)
    probe.do(
        """
import select
poller, took = select.epoll(), []
def wait():
    for _ in range(3):
        began = time.monotonic()
        poller.poll(0.4)
        took.append(time.monotonic() - began)
"""
    )
    probe.do("thread = threading.Thread(target=wait); thread.start()")
    for _ in range(10):
        _rest(sandbox, 0.12)
    probe.do("thread.join()")
    took = probe.ask("took")
    assert all(0.39 < seconds < 0.5 for seconds in took), took
