"""CPython with several processes: pools, what they share, numpy's arrays over it, asyncio.

Locks, queues and events of `multiprocessing` are semaphores in files that are mapped by all, often
without a name any more; who waits for one waits in a futex. What is computed comes from generators
of random numbers with known seeds, so each result can be computed again from the beginning: a step
that was lost, or done twice, shows in all that follow.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack

import pytest

from deltabox import Sandbox

from ..probe import Probe
from ..tools.packages import ENVIRONMENT, PYTHON, WHERE, install

WORKERS = 3

# A pool of workers, each with a generator and a row of two arrays: one in shared memory, one in a
# file. A worker waits at the barrier with its task until the others have one too, so each has one.
POOLED = """
import multiprocessing, os, random
from multiprocessing.shared_memory import SharedMemory

import numpy as np

WORKERS, COLUMNS = 3, 4096
SHAPE = (WORKERS + 1, COLUMNS)

class Shared:
    def __init__(self, context):
        self.name = SharedMemory(create=True, size=8 * SHAPE[0] * SHAPE[1]).name
        np.memmap("/srv/mapped", np.int64, "w+", shape=SHAPE).flush()
        self.array = context.Array("q", WORKERS + 1)  # the last one is what this copy adds
        self.started = context.Value("i", 0)
        self.lock = context.Lock()
        self.barrier = context.Barrier(WORKERS)
        self.go = context.Event()
        self.jobs, self.results = context.Queue(), context.Queue()

def attach(made):
    global shared, block, matrix, mapped, number, numbers, calls
    shared, calls = made, 0
    block = SharedMemory(shared.name)
    matrix = np.ndarray(SHAPE, np.int64, block.buf)
    mapped = np.memmap("/srv/mapped", np.int64, "r+", shape=SHAPE)
    with shared.started.get_lock():
        number = shared.started.value
        shared.started.value += 1
    numbers = np.random.default_rng(number)
    random.seed(number)

def work(waits):
    global calls
    shared.barrier.wait()
    if waits:
        shared.go.wait()
    amount = shared.array[-1]
    draws = numbers.integers(0, 1000, COLUMNS)
    matrix[number] += amount * draws
    mapped[number] += amount * draws
    for _ in range(50):
        with shared.lock:  # else some would be lost: this is a read and a write
            matrix[-1, 0] = matrix[-1, 0] + amount
    with shared.array.get_lock():
        shared.array[number] += amount
    calls += 1
    shared.results.put([number, calls, amount])
    return [number, os.getpid(), random.random()]

def consume(jobs, results):
    while (job := jobs.get()) is not None:
        results.put(["consumed", *job])
"""

# The process that owns the pool
OWNER = """
import queue
from pooled import *

context = multiprocessing.get_context(METHOD)
shared = Shared(context)
block = SharedMemory(shared.name)
matrix = np.ndarray(SHAPE, np.int64, block.buf)
mapped = np.memmap("/srv/mapped", np.int64, "r", shape=SHAPE)
pool = context.Pool(WORKERS, attach, [shared])
consumers = [
    context.Process(target=consume, args=(shared.jobs, shared.results)) for _ in range(2)
]
for one in consumers:
    one.start()

def take(count):
    return sorted(shared.results.get(timeout=20) for _ in range(count))

def expected(amounts):
    '''What is in the arrays after these steps, computed without any of the above.'''
    result = np.zeros(SHAPE, np.int64)
    for row in range(WORKERS):
        generator = np.random.default_rng(row)
        for amount in amounts:
            result[row] += amount * generator.integers(0, 1000, COLUMNS)
    result[-1, 0] = 50 * WORKERS * sum(amounts)
    return result

def right(amounts):
    wanted = expected(amounts)
    counted = list(shared.array)[:WORKERS] == [sum(amounts)] * WORKERS
    in_file = (mapped[:-1] == wanted[:-1]).all()
    return [counted, bool((matrix == wanted).all()), bool(in_file)]

def lots(steps):
    '''The numbers that the workers draw besides, in the step after these.'''
    made = [random.Random(row) for row in range(WORKERS)]
    return [[one.random() for _ in range(steps + 1)][-1] for one in made]

shared.array[-1] = 1
begun = sorted(pool.map(work, [False] * WORKERS, chunksize=1))
workers = [pid for _, pid, _ in begun]
assert take(WORKERS) == [[row, 1, 1] for row in range(WORKERS)]

# what the checkpoint is of: tasks that wait, consumers that wait, a result that nobody has taken,
# a lock that is held
pending = pool.map_async(work, [True] * WORKERS, chunksize=1)
while shared.go._cond._sleeping_count.get_value() < WORKERS:
    time.sleep(0.001)
shared.results.put(["kept", "x" * 1000])
while shared.results.empty():
    time.sleep(0.001)
shared.lock.acquire()

generator = np.random.default_rng(99)
np.random.seed(99)
random.seed(99)
square = generator.random((200, 200))
product = square @ square  # in threads of the library
"""

# What its generators give next
DRAWN = """
import json, random, numpy as np
generator = np.random.default_rng(99)
generator.random((200, 200))
np.random.seed(99)
random.seed(99)
print(json.dumps([generator.random(), np.random.random(), random.random()]))
"""


def prepare(sandbox: Sandbox) -> None:
    install(sandbox, "numpy")
    sandbox.files.write_text(f"{WHERE}/pooled.py", POOLED)


def start(sandbox: Sandbox, method: str) -> Probe:
    """The owner of a pool; workers and consumers wait."""
    owner = Probe.start(sandbox, python=PYTHON, env=ENVIRONMENT)
    owner.do(f"METHOD = {method!r}")
    owner.do(OWNER)
    return owner


@pytest.fixture(scope="module")
def computing() -> Iterator[Sandbox]:
    """A sandbox with numpy."""
    with Sandbox.create() as sandbox:
        prepare(sandbox)
        yield sandbox


def come_back(
    sandbox: Sandbox, probe: Probe, steps: Sequence[Callable[[Probe, int], None]]
) -> None:
    """Twenty rollbacks and four copies; what a step does in each is told by a number of its own."""
    checkpoint = sandbox.checkpoint()
    for turn in range(19):
        for step in steps[: turn % len(steps)]:  # left at the beginning and in the middle, too
            step(probe, 2 + turn)
        sandbox.rollback(checkpoint)
    with ExitStack() as stack:
        forks = [stack.enter_context(fork) for fork in sandbox.fork_many(4, at=checkpoint)]
        copies = [probe, *(probe.within(fork) for fork in forks)]
        # all do their step before any does its next: they would notice each other's
        for step in steps:
            for own, copy in enumerate(copies):
                step(copy, 2 + own)
    sandbox.rollback(checkpoint)
    for step in steps:
        step(probe, 21)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_pool(computing: Sandbox, method: str) -> None:
    with computing.fork() as sandbox:
        owner = start(sandbox, method)
        workers = owner.ask("workers")
        assert len(set(workers)) == WORKERS
        drawn = json.loads(sandbox.run([PYTHON, "-c", DRAWN], env=ENVIRONMENT, check=True).stdout)

        def commit(inside: Probe, own: int) -> None:
            assert inside.ask("right([1])") == [True, True, True]
            assert inside.ask("pending.ready(), shared.go.is_set(), len(product)") == [
                False,
                False,
                200,
            ]
            assert inside.ask("take(1)") == [["kept", "x" * 1000]]
            inside.do(f"shared.array[-1] = {own}; shared.go.set()")
            inside.do(f"shared.jobs.put([{own}, 'one']); shared.jobs.put([{own}, 'two'])")

        def go_on(inside: Probe, own: int) -> None:
            consumed = [["consumed", own, "one"], ["consumed", own, "two"]]
            assert inside.ask("take(2)") == consumed
            # the workers have gone as far as the lock, and no further
            assert not inside.ask("pending.ready()")
            assert inside.ask("int(matrix[-1, 0])") == 50 * WORKERS
            inside.do("shared.lock.release()")
            lots = inside.ask("lots(1)")
            done = [[n, workers[n], lots[n]] for n in range(WORKERS)]
            assert inside.ask("sorted(pending.get(20))") == done
            assert inside.ask("take(WORKERS)") == [[n, 2, own] for n in range(WORKERS)]
            assert inside.ask(f"right([1, {own}])") == [True, True, True]

        def again(inside: Probe, own: int) -> None:
            inside.do("after = pool.map_async(work, [False] * WORKERS, chunksize=1)")
            lots = inside.ask("lots(2)")
            done = [[n, workers[n], lots[n]] for n in range(WORKERS)]
            assert inside.ask("sorted(after.get(20))") == done
            assert inside.ask("take(WORKERS)") == [[n, 3, own] for n in range(WORKERS)]
            assert inside.ask(f"right([1, {own}, {own}])") == [True, True, True]
            assert inside.ask("bool((square @ square == product).all())")
            assert inside.ask("generator.random(), np.random.random(), random.random()") == drawn

        def finish(inside: Probe, own: int) -> None:
            inside.do("pool.close(); pool.join(); [shared.jobs.put(None) for _ in consumers]")
            inside.do("[one.join(20) for one in consumers]")
            assert inside.ask("[one.exitcode for one in consumers]") == [0, 0]
            inside.do("del matrix; block.unlink(); block.close()")
            assert not inside.ask("block.name in os.listdir('/dev/shm')")

        come_back(sandbox, owner, (commit, go_on, again, finish))


# Workers that draw numbers and add them to an array in shared memory, without end, each step noted
# in a file of its own
BUSY = """
import multiprocessing, os, time
from multiprocessing.shared_memory import SharedMemory

import numpy as np

SIZE, WORKERS = 5_000, 2

def busy(number, name, lock, steps):
    block = SharedMemory(name)
    sums = np.ndarray(SIZE, np.int64, block.buf)
    numbers = np.random.default_rng(number)
    noted = os.open(f"/srv/{number}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    while not os.path.exists("/srv/stop"):
        draws = numbers.integers(0, 1000, SIZE)
        with lock:
            sums += draws
            steps[number] += 1
        os.write(noted, b"%d\\n" % draws.sum())
        time.sleep(0.001)
    os._exit(0)  # the block is the owner's to free
"""
BUSY_OWNER = """
from busy import *

block = SharedMemory(create=True, size=8 * SIZE)
sums = np.ndarray(SIZE, np.int64, block.buf)
lock, steps = multiprocessing.Lock(), multiprocessing.Array("q", WORKERS)
workers = [
    multiprocessing.Process(target=busy, args=(number, block.name, lock, steps))
    for number in range(WORKERS)
]
for worker in workers:
    worker.start()

def goes_on():
    begin, end = list(steps), time.monotonic() + 30
    while not all(now >= was + 3 for was, now in zip(begin, steps)):
        assert time.monotonic() < end
        time.sleep(0.002)

def ended():
    for worker in workers:
        worker.join(20)
    return [worker.exitcode for worker in workers]

def wrong():
    '''What differs from the same steps, done one after the other.'''
    wanted = np.zeros(SIZE, np.int64)
    for number in range(WORKERS):
        noted = [int(line) for line in open(f"/srv/{number}")]
        if len(noted) != steps[number]:
            return f"{number}: {len(noted)} steps were noted, {steps[number]} counted"
        generator = np.random.default_rng(number)
        for turn, one in enumerate(noted):
            draws = generator.integers(0, 1000, SIZE)
            if draws.sum() != one:
                return f"{number}: step {turn} drew other numbers"
            wanted += draws
    return int((wanted != sums).sum())
"""


def test_arrays_under_load(computing: Sandbox) -> None:
    with computing.fork() as sandbox:
        sandbox.files.write_text(f"{WHERE}/busy.py", BUSY)
        owner = Probe.start(sandbox, python=PYTHON, env=ENVIRONMENT)
        owner.do(BUSY_OWNER)

        def verify(box: Sandbox) -> None:
            inside = owner.within(box)
            inside.do("goes_on()")
            box.files.write_text("/srv/stop", "")
            assert inside.ask("ended()") == [0, 0]
            assert inside.ask("wrong()") == 0

        # each state comes from one that was given back, and is of another moment of the load
        for _ in range(20):
            owner.do("goes_on()")
            checkpoint = sandbox.checkpoint()
            verify(sandbox)
            sandbox.rollback(checkpoint)
        for fork in sandbox.fork_many(4, at=checkpoint):
            with fork:
                verify(fork)
        verify(sandbox)


# Its commands wait for an event, a lock, a queue, a child, a thread, a process, room to send
SERVED = """
import asyncio
from concurrent.futures import ProcessPoolExecutor

import numpy as np

total = 0
numbers = np.random.default_rng(7)
listeners = []
unanswered = []
LARGE = bytes(range(256)) * 40_000  # ten megabytes: more than fits in flight

async def answer(word, argument, send):
    global total
    if word == "add":
        total += int(argument)
        return total
    if word == "draw":
        return int(numbers.integers(1 << 60))
    if word == "wait":
        await go.wait()
        return f"{argument} {total}"
    if word == "hold":  # who has the lock waits with it, and the other one for it
        async with lock:
            await go.wait()
            return f"{argument} {total}"
    if word == "go":
        go.set()
        return "gone"
    if word == "listen":
        listeners.append(queue := asyncio.Queue(1))
        while True:
            await send(await queue.get())
    if word == "say":
        for queue in listeners:
            await queue.put(argument)
        return "said"
    if word == "child":
        child.stdin.write(argument.encode() + b"\\n")
        return (await child.stdout.readline()).decode().strip()
    if word == "close":
        child.stdin.close()
        return "closed"
    if word == "ended":
        return await child.wait()
    if word == "thread":
        return await asyncio.to_thread(str.upper, argument)
    if word == "process":
        return await asyncio.get_running_loop().run_in_executor(pool, pow, 2, int(argument))
    if word == "large":
        await send(LARGE.decode("latin-1"))
        return "sent"
    if word == "unanswered":
        return " ".join(sorted(unanswered))

async def serve(reader, writer):
    async def send(text):
        writer.write(f"{text}\\n".encode("latin-1"))
        await writer.drain()
    while line := await reader.readline():
        word, _, argument = line.decode().strip().partition(" ")
        unanswered.append(word)
        await send(await answer(word, argument, send))
        unanswered.remove(word)

async def main():
    global go, lock, child
    go, lock = asyncio.Event(), asyncio.Lock()
    child = await asyncio.create_subprocess_exec("cat", stdin=-1, stdout=-1)
    servers = [
        await asyncio.start_server(serve, "127.0.0.1", 7000),
        await asyncio.start_unix_server(serve, "/srv/socket"),
    ]
    print("serves", flush=True)
    while True:
        await asyncio.sleep(0.01)

with ProcessPoolExecutor(2) as pool:
    list(pool.map(abs, range(2)))  # the workers are there
    asyncio.run(main())
"""

CLIENTS = """
import socket

class Client:
    def __init__(self, address):
        self.socket = socket.socket(socket.AF_UNIX if address == "/srv/socket" else socket.AF_INET)
        self.socket.settimeout(20)
        self.socket.connect(address)
        self.file = self.socket.makefile("rb")
    def send(self, text):
        self.socket.sendall(text.encode() + b"\\n")
    def read(self):
        return self.file.readline().decode().strip()
    def __call__(self, text):
        self.send(text)
        return self.read()

def both(one="", two=""):
    clients = Client(("127.0.0.1", 7000)), Client("/srv/socket")
    for client, text in zip(clients, (one, two)):
        client.socket.sendall(text.encode())
    return clients

kept, kept_local = both()
waits, waits_local = both("wait one\\n", "wait two\\n")
holds, holds_local = both("hold one\\n", "hold two\\n")
listens, listens_local = both("listen\\n", "listen\\n")
ended, large = both("ended\\n", "large\\n")
half, half_local = both("ad", "add 1")
WAIT = "ended hold hold large listen listen unanswered wait wait"
until = time.monotonic() + 20
while kept("unanswered") != WAIT:
    assert time.monotonic() < until
"""
SECOND = "import numpy; print(numpy.random.default_rng(7).integers(1 << 60, size=2)[1])"


def test_asyncio_server(computing: Sandbox) -> None:
    with computing.fork() as sandbox:
        sandbox.files.write_text("/srv/served.py", SERVED)
        server = sandbox.spawn([PYTHON, "/srv/served.py"], env=ENVIRONMENT)
        assert server.stdout.readline(timeout=20) == "serves\n", server.stderr.read_available()
        probe = Probe.start(sandbox)
        probe.do(CLIENTS)
        assert probe.ask("kept('add 1'), kept_local('add 1')") == ["1", "2"]
        assert probe.ask("kept('child hello'), kept('process 70')") == ["hello", str(2**70)]
        assert probe.ask("kept('say hello')") == "said"  # nobody reads it yet
        probe.ask("kept('draw')")
        drawn = sandbox.run([PYTHON, "-c", SECOND], env=ENVIRONMENT, check=True).stdout.strip()

        def commit(inside: Probe, own: int) -> None:
            assert inside.ask("kept('unanswered') == WAIT")
            assert inside.ask(f"kept('add {own}'), kept_local('say {own}')") == [
                str(2 + own),
                "said",
            ]
            inside.do(f"half.socket.sendall(b'd {own}\\n'); half_local.socket.sendall(b'0\\n')")

        def go_on(inside: Probe, own: int) -> None:
            for said in "hello", str(own):
                assert inside.ask("listens.read(), listens_local.read()") == [said, said]
            inside.do("half.read(), half_local.read()")
            total = 12 + 2 * own
            assert inside.ask("kept_local('draw'), kept('add 0')") == [drawn, str(total)]
            assert inside.ask("kept('go')") == "gone"
            for waited in "waits", "holds":
                answers = inside.ask(f"{waited}.read(), {waited}_local.read()")
                assert answers == [f"one {total}", f"two {total}"]

        def finish(inside: Probe, own: int) -> None:
            assert inside.ask(f"kept('thread own {own}')") == f"OWN {own}"
            assert inside.ask(f"kept_local('process {own}')") == str(2**own)
            assert inside.ask(f"kept('child own {own}'), kept('close')") == [f"own {own}", "closed"]
            assert inside.ask("ended.read()") == "0"
            inside.do("part = bytes(range(256)) * 40_000 + b'\\n'")
            assert inside.ask("large.file.read(len(part)) == part, large.read()") == [True, "sent"]
            assert inside.ask("both('add 0\\n')[0].read()") == str(12 + 2 * own)

        come_back(sandbox, probe, (commit, go_on, finish))
