"""Checkpoints while processes are being made: vfork, spawn, workers that never call exec."""

from __future__ import annotations

import time

import pytest

from deltabox import Sandbox, UnsupportedState
from tests.probe import Probe, check

_SLOW_VFORK = r"""
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static void *waits(void *unused)
{
        struct timespec limit = { 3, 0 };
        sigset_t set;
        (void)unused;
        sigemptyset(&set);
        sigaddset(&set, SIGUSR2);
        sigprocmask(SIG_BLOCK, &set, 0);
        /* nothing may end this early with EINTR */
        int got = sigtimedwait(&set, 0, &limit);
        printf("waited %d\n", got < 0 ? errno : 0);
        fflush(stdout);
        return 0;
}

int main(int argc, char **argv)
{
        pthread_t thread;
        (void)argc;
        pthread_create(&thread, 0, waits, 0);
        struct timespec moment = { 0, 50000000 };
        char *const arguments[] = { "sh", "-c", "echo child; exit 7", 0 };
        int status, late = argv[1][0] == 'b';
        clock_t until;
        printf("begun\n");
        fflush(stdout);
        for (int n = 0; n < 3; n++) {
                pid_t pid = vfork();
                if (pid == 0) {
                        if (late)
                                for (until = clock() + CLOCKS_PER_SEC / 20; clock() < until;)
                                        ;
                        else
                                nanosleep(&moment, 0);
                        execv("/bin/sh", arguments);
                        _exit(99);
                }
                waitpid(pid, &status, 0);
                printf("ended %d\n", WEXITSTATUS(status));
                fflush(stdout);
        }
        pthread_join(thread, 0);
        printf("over\n");
}
"""


@pytest.mark.parametrize("how", ["asleep", "busy"])
def test_a_parent_in_vfork(sandbox: Sandbox, how: str) -> None:
    """It cannot be stopped until its child has called exec; nobody else may notice the attempts."""
    sandbox.files.write_text("/slow.c", _SLOW_VFORK)
    sandbox.run("gcc -O1 -pthread -o /slow /slow.c", check=True)
    program = sandbox.spawn(["/slow", how])
    assert program.stdout.readline(timeout=20) == "begun\n"
    expected = ["child\n", "ended 7\n"] * 3 + ["waited 11\n", "over\n"]
    checkpoint = sandbox.checkpoint()

    def rest() -> list[str]:
        return [program.stdout.readline(timeout=20) for _ in expected]

    sandbox.checkpoint()
    told = rest()
    assert sorted(told) == sorted(expected)
    for _ in range(3):
        sandbox.rollback(checkpoint)
        assert sorted(rest()) == sorted(expected)


def test_spawning_without_end(sandbox: Sandbox) -> None:
    """Every child's status is its own, however many checkpoints and rollbacks there are."""
    probe = Probe.start(sandbox)
    probe.do(
        """
import subprocess
count, wrong, stop = [0, 0, 0], [], False
def spawn(n):
    while not stop:
        got = os.waitpid(os.posix_spawn('/bin/sh', ['sh', '-c', 'exit %d' % (n + 3)], {}), 0)[1]
        if os.waitstatus_to_exitcode(got) != n + 3: wrong.append(got)
        count[n] += 1
threads = [threading.Thread(target=spawn, args=(n,), daemon=True) for n in range(3)]
for t in threads: t.start()
"""
    )
    for _ in range(5):
        for _ in range(3):
            checkpoint = sandbox.checkpoint()
        before = probe.ask("list(count)")
        sandbox.rollback(checkpoint)
        until = time.monotonic() + 20
        while probe.ask("min(count)") <= max(before):
            assert time.monotonic() < until, "a spawner came to a halt"
        assert probe.ask("wrong") == []
    probe.do("stop = True; [t.join() for t in threads]")


def test_a_pool_of_workers_that_never_call_exec(sandbox: Sandbox) -> None:
    """All have their parent's layout; what each has written is its own, and stays so."""
    check(
        sandbox,
        setup="""
import zlib
shared = bytearray(b'parent' * 200000)
pipes = []
for n in range(6):
    r, w = os.pipe(); r2, w2 = os.pipe()
    if os.fork() == 0:
        shared[n * 5000:n * 5000 + 4096] = bytes([n]) * 4096
        mine = [b'%d' % (n * i) for i in range(5000)]
        if n == 3:
            mine = mine[:10]
        while True:
            order = os.read(r, 1)
            if order == b'c':
                shared[n] ^= 255; mine.append(b'more')
            if order == b'f' and os.fork() == 0:
                os._exit(n)
            if order == b'f':
                os.write(w2, b'%d;' % os.waitstatus_to_exitcode(os.wait()[1]))
            else:
                told = [os.getpid(), os.getppid(), zlib.crc32(shared), zlib.crc32(b','.join(mine))]
                os.write(w2, json.dumps(told).encode() + b';')
    os.close(r); os.close(w2)
    pipes.append((r2, w))
def order(what):
    out = []
    for r, w in pipes:
        os.write(w, what); out.append(os.read(r, 1000).decode())
    return out
""",
        report="[order(b'r'), order(b'f'), zlib.crc32(shared)]",
        change="order(b'c'); shared[0] ^= 1",
    )


_NAMESPACES = {
    "user": "unshare -Ur",
    "net": "unshare -n",
    "mnt": "unshare -m",
    "pid": "unshare -p -f",
    "ipc": "unshare -i",
    "cgroup": "unshare -C",
    "time": "unshare -T -f",
    "uts": "unshare -u",
}


@pytest.mark.parametrize("kind", _NAMESPACES)
def test_namespaces_made_inside(sandbox: Sandbox, kind: str) -> None:
    """Refused by name while they live; afterwards the sandbox is as good as before."""
    program = sandbox.spawn(f"exec {_NAMESPACES[kind]} sh -c 'echo in; read x; echo $x; read y'")
    assert program.stdout.readline(timeout=20) == "in\n"
    with pytest.raises(UnsupportedState, match=f"{kind} namespace of its own"):
        sandbox.checkpoint()
    program.stdin.write("alive\n")
    assert program.stdout.readline(timeout=20) == "alive\n"
    program.stdin.write("end\n")
    assert program.wait(timeout=20) == 0
    checkpoint = sandbox.checkpoint()
    sandbox.rollback(checkpoint)
    assert sandbox.run("echo well").stdout == "well\n"
