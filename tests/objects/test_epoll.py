"""Epoll sets."""

from __future__ import annotations

import signal

import pytest

from deltabox import Sandbox, UnsupportedState
from tests.probe import Probe, check

_HELP = """
def watches(e):
    lines = open('/proc/self/fdinfo/%d' % e.fileno()).read().splitlines()
    return sorted(' '.join(l.split()[:6]) for l in lines if l.startswith('tfd'))
def ready(e):
    return sorted(e.poll(0))
"""


def test_level_watches(sandbox: Sandbox) -> None:
    check(
        sandbox,
        setup=_HELP
        + """
r, w = os.pipe(); empty, other = os.pipe()
n = os.eventfd(5)
e = select.epoll()
e.register(r, select.EPOLLIN); e.register(empty, select.EPOLLIN | select.EPOLLPRI)
e.register(n, select.EPOLLIN | select.EPOLLOUT)
os.write(w, b'x')
""",
        report="[watches(e), ready(e), ready(e)]",
        change="os.read(r, 1); e.unregister(n); e.modify(empty, select.EPOLLOUT)",
    )


def test_edges_that_were_seen_are_not_reported_again(sandbox: Sandbox) -> None:
    check(
        sandbox,
        setup=_HELP
        + """
r, w = os.pipe(); n = os.eventfd(0)
e = select.epoll()
e.register(r, select.EPOLLIN | select.EPOLLET); e.register(n, select.EPOLLIN | select.EPOLLET)
os.write(w, b'x')
assert e.poll(0) == [(r, select.EPOLLIN)]
""",
        report="[watches(e), ready(e)]",
        change="os.write(w, b'y'); e.unregister(n)",
    )


def test_an_edge_that_is_still_to_come(sandbox: Sandbox) -> None:
    probe = Probe.start(sandbox)
    probe.do(
        _HELP + "r, w = os.pipe(); e = select.epoll();"
        "e.register(r, select.EPOLLIN | select.EPOLLET); os.write(w, b'x')"
    )
    checkpoint = sandbox.checkpoint()
    for _ in range(3):
        assert probe.ask("ready(e) == [(r, select.EPOLLIN)]")
        assert probe.ask("ready(e) == []")
        sandbox.rollback(checkpoint)


def test_one_shot(sandbox: Sandbox) -> None:
    check(
        sandbox,
        setup=_HELP
        + """
n = os.eventfd(1); m = os.eventfd(1); k = os.eventfd(0)
e = select.epoll()
for fd in (n, m, k):
    e.register(fd, select.EPOLLIN | select.EPOLLONESHOT)
assert len(e.poll(0, 1)) == 1
spent = sum('40000000' in l.split()[3] for l in watches(e))
""",
        report="[watches(e), spent]",
        change="e.modify(k, select.EPOLLIN)",
    )


def test_nested(sandbox: Sandbox) -> None:
    check(
        sandbox,
        setup=_HELP
        + """
r, w = os.pipe()
inner = select.epoll(); outer = select.epoll()
inner.register(r, select.EPOLLIN); outer.register(inner.fileno(), select.EPOLLIN)
os.write(w, b'x')
""",
        report="[watches(inner), watches(outer), ready(outer), ready(inner)]",
        change="os.read(r, 1); inner.modify(r, select.EPOLLOUT)",
    )


def test_watched_under_numbers_that_mean_something_else_now(sandbox: Sandbox) -> None:
    """Closed since, duplicated since, and the number taken by another file, watched as well."""
    check(
        sandbox,
        setup=_HELP
        + """
r, w = os.pipe()
e = select.epoll()
e.register(r, select.EPOLLIN)
kept = fcntl.fcntl(r, fcntl.F_DUPFD, 600)
os.close(r)
again = os.eventfd(3)
assert again == r
e.register(again, select.EPOLLIN)
high = fcntl.fcntl(kept, fcntl.F_DUPFD, 900)
e.register(high, select.EPOLLIN)
os.close(high)
os.write(w, b'x')
""",
        report="[watches(e), ready(e)]",
        change="os.read(kept, 1)",
    )


def test_shared_by_parent_and_child(sandbox: Sandbox) -> None:
    check(
        sandbox,
        setup=_HELP
        + """
r, w = os.pipe(); answer_r, answer_w = os.pipe(); ask_r, ask_w = os.pipe()
e = select.epoll()
e.register(r, select.EPOLLIN)
if not os.fork():
    while os.read(ask_r, 1):
        os.write(answer_w, b'1' if e.poll(0) else b'0')
    os._exit(0)
def child():
    os.write(ask_w, b'?')
    return os.read(answer_r, 1).decode()
""",
        report="[watches(e), ready(e), child()]",
        change="os.write(w, b'x')",
    )


def test_a_pidfd_in_a_set(sandbox: Sandbox) -> None:
    check(
        sandbox,
        setup=_HELP
        + """
pid = os.fork()
if not pid:
    time.sleep(1000)
p = os.pidfd_open(pid)
e = select.epoll()
e.register(p, select.EPOLLIN)
""",
        report="[watches(e), ready(e)]",
        change="os.kill(pid, 9); e.poll(5)",
    )


def test_a_waiter_in_epoll_wait(sandbox: Sandbox) -> None:
    probe = Probe.start(sandbox)
    probe.do(
        """
r, w = os.pipe()
e = select.epoll()
e.register(r, select.EPOLLIN)
seen = []
t = threading.Thread(target=lambda: seen.append(e.poll()), daemon=True)
t.start()
time.sleep(0.1)
"""
    )
    checkpoint = sandbox.checkpoint()
    for _ in range(3):
        assert probe.ask("seen") == []
        probe.do("os.write(w, b'x'); t.join(5)")
        assert probe.ask("seen == [[(r, 1)]]")
        sandbox.rollback(checkpoint)


def test_asyncio(sandbox: Sandbox) -> None:
    """An event loop with timers, a child watched by pidfd and a pipe."""
    probe = Probe.start(sandbox)
    probe.do(
        """
import asyncio
ticks = []
async def main():
    child = await asyncio.create_subprocess_exec('cat', stdin=-1, stdout=-1)
    while True:
        child.stdin.write(b'tick\\n')
        ticks.append((await child.stdout.readline()).decode())
        await asyncio.sleep(0.02)
threading.Thread(target=lambda: asyncio.run(main()), daemon=True).start()
time.sleep(0.3)
"""
    )
    checkpoint = sandbox.checkpoint()
    for _ in range(5):
        count = probe.ask("len(ticks)")
        probe.do("time.sleep(0.3)")
        assert probe.ask("len(ticks)") > count + 3
        sandbox.rollback(checkpoint)


def test_a_spent_watch_that_cannot_be_spent_again(sandbox: Sandbox) -> None:
    probe = Probe.start(sandbox)
    probe.do(
        "r, w = os.pipe(); e = select.epoll();"
        "e.register(r, select.EPOLLIN | select.EPOLLONESHOT);"
        "os.write(w, b'x'); e.poll(0); os.read(r, 1)"
    )
    with pytest.raises(UnsupportedState, match="one-shot watch of pipe:"):
        sandbox.checkpoint()
    probe.do("e.modify(r, select.EPOLLIN)")
    sandbox.checkpoint()


def test_a_signalfd_wakes_its_owner(sandbox: Sandbox) -> None:
    """A signalfd in a set tells of signals to the process that has added it."""
    probe = Probe.start(sandbox)
    probe.do(
        """
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGURG])
mask = (1 << (signal.SIGURG - 1)).to_bytes(8, 'little')
fd = libc.syscall(289, -1, mask, 8, 0o4000)
ep = select.epoll(); ep.register(fd, select.EPOLLIN)
done_r, done_w = os.pipe()
def wait():
    os.write(done_w, bytes([len(ep.poll(30)), os.read(fd, 128)[0]]))
threading.Thread(target=wait, daemon=True).start()
time.sleep(0.1)
def wake():
    os.kill(os.getpid(), signal.SIGURG)
    return list(os.read(done_r, 2)) if select.select([done_r], [], [], 10)[0] else 'asleep'
"""
    )
    checkpoint = sandbox.checkpoint()
    expected = [1, signal.SIGURG]
    for _ in range(3):
        assert probe.ask("wake()") == expected
        sandbox.rollback(checkpoint)
    with sandbox.fork(at=checkpoint) as fork:
        assert probe.within(fork).ask("wake()") == expected
    assert probe.ask("wake()") == expected


@pytest.mark.parametrize("nested", [False, True])
def test_a_checkpoint_does_not_take_a_signals_wake_up(sandbox: Sandbox, nested: bool) -> None:
    """Only who has added a signalfd may look whether there is news: for others there is none."""
    probe = Probe.start(sandbox)
    probe.do(
        f"""
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGURG])
mask = (1 << (signal.SIGURG - 1)).to_bytes(8, 'little')
fd = libc.syscall(289, -1, mask, 8, 0o4000)
ep = select.epoll(); ep.register(fd, select.EPOLLIN | select.EPOLLET)
inner = ep
if {nested}:
    ep = select.epoll(); ep.register(inner.fileno(), select.EPOLLIN | select.EPOLLET)
def woken():
    return [len(ep.poll(0)), os.read(fd, 128)[0]]
"""
    )
    for _ in range(2):
        probe.do("os.kill(os.getpid(), signal.SIGURG)")
        checkpoint = sandbox.checkpoint()
        expected = [1, signal.SIGURG]
        assert probe.ask("woken()") == expected
        sandbox.rollback(checkpoint)
        assert probe.ask("woken()") == expected
