"""A checkpoint is not noticed: nothing lost, no EINTR, no new descriptor, no late timeout."""

from __future__ import annotations

import json
import random
import threading
import time

from deltabox import Sandbox

CHECKPOINTS = 100
PROGRAM = r"""
import ctypes, json, os, queue, select, signal, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
durations, errors = {}, []
class timespec(ctypes.Structure):
    _fields_ = [('s', ctypes.c_long), ('n', ctypes.c_long)]
class pollfd(ctypes.Structure):
    _fields_ = [('fd', ctypes.c_int), ('events', ctypes.c_short), ('revents', ctypes.c_short)]
r, w = os.pipe()
poller = select.poll(); poller.register(r, select.POLLIN)
waiting = queue.Queue()
second = ctypes.byref(timespec(1, 0))
usr1 = (ctypes.c_ulong * 16)(1 << 9)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
def raw(name, expected, call):
    result = call()
    if result != expected:
        errors.append([name, result, os.strerror(ctypes.get_errno())])
def from_queue():
    try:
        waiting.get(timeout=1)
    except queue.Empty:
        pass
calls = {
    'select': lambda: select.select([r], [], [], 1),
    'poll': lambda: poller.poll(1000),
    'raw poll': lambda: raw('poll', 0, lambda: libc.poll(ctypes.byref(pollfd(r, 1)), 1, 1000)),
    'nanosleep': lambda: raw('nanosleep', 0, lambda: libc.nanosleep(second, None)),
    'sleep': lambda: time.sleep(1),
    'queue': from_queue,
    'sigtimedwait': lambda: raw('wait', -1, lambda: libc.sigtimedwait(usr1, None, second)),
}
def watch(name, call):
    while True:
        began = time.monotonic()
        try:
            call()
        except OSError as error:
            errors.append([name, repr(error)])
        durations.setdefault(name, []).append(time.monotonic() - began)
log = open('/root/log', 'w', buffering=1)
descriptors = sorted(os.listdir('/proc/self/fd'))
count = 0
for line in sys.stdin:
    if line == 'begin\n':
        for item in calls.items():
            threading.Thread(target=watch, args=item, daemon=True).start()
        continue
    if line == 'report\n':
        now = sorted(os.listdir('/proc/self/fd'))
        print(json.dumps([count, durations, errors, now == descriptors, os.getpid()]), flush=True)
        continue
    count += 1
    log.write(line)
    sys.stdout.write(line)
    sys.stdout.flush()
"""


def test_a_hundred_checkpoints_at_random_moments(sandbox: Sandbox) -> None:
    process = sandbox.spawn(["python3", "-c", PROGRAM])
    ended = threading.Event()
    sent = 0
    heard: list[str] = []

    def ask() -> None:
        nonlocal sent
        while not ended.is_set():
            process.stdin.write(f"{sent}\n")
            sent += 1
            time.sleep(0.001)  # the rate of the load, not a wait for anything

    def listen() -> None:
        for line in process.stdout:
            heard.append(line)
            if line.startswith("["):
                return

    threads = [threading.Thread(target=ask), threading.Thread(target=listen)]
    for thread in threads:
        thread.start()
    first = sandbox.checkpoint()
    process.stdin.write("begin\n")
    random.seed(20)
    for _ in range(CHECKPOINTS - 1):
        time.sleep(random.random() * 0.04)
        sandbox.checkpoint().delete()
    first.delete()
    ended.set()
    threads[0].join()
    process.stdin.write("report\n")
    threads[1].join(timeout=20)
    count, durations, errors, same_descriptors, pid = json.loads(heard.pop())
    assert heard == [f"{n}\n" for n in range(sent)]
    assert count == sent
    assert sandbox.files.read_text("/root/log") == "".join(heard)
    assert errors == []
    assert same_descriptors
    assert pid == process.pid
    for name, seconds in durations.items():
        assert all(s >= 0.999 for s in seconds), (name, seconds)
        # the kernel tells what is left of most waits; for sigtimedwait our clock starts at the
        # first freeze that meets the call (docs/fidelity.md), which here comes within 0.1 s
        assert all(s < 1.25 for s in seconds), (name, seconds)
