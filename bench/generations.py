"""Checkpoint, rollback, checkpoint, ...: does the thirtieth generation cost more than the first?

A server with three workers and connections between them, which answers a request in every
generation. The figures are the medians of the first and of the last third; their ratio is to stay
near 1. Nothing but time is measured here: that nothing else grows is a test
(tests/deltacr/test_generations.py).

    python bench/generations.py --json out.json
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import click
from report import Recorder, Wrong, finish, options, quantile
from standard import IDLE, stop_of

from deltabox import Sandbox

# A server with workers: epoll, unix and TCP connections, shared memory, threads, a child.
SERVER = r"""
import asyncio, mmap, os, socket, sys, threading, time
shared = mmap.mmap(-1, 1 << 16)
listening = socket.create_server(('127.0.0.1', 8000), reuse_port=True)
def work(number):
    async def serve(reader, writer):
        while line := await reader.readline():
            shared[number] = (shared[number] + 1) % 256
            writer.write(b'%d %d ' % (number, sum(shared[:4])) + line)
            await writer.drain()
    async def main():
        server = await asyncio.start_server(serve, sock=listening)
        await server.serve_forever()
    asyncio.run(main())
for number in range(3):
    if not os.fork():
        work(number)
for _ in range(3):
    threading.Thread(target=lambda: time.sleep(1e6), daemon=True).start()
client = socket.create_connection(('127.0.0.1', 8000))
stream = client.makefile('rwb')
print('up', flush=True)
for line in sys.stdin:
    stream.write(line.encode()); stream.flush()
    print(stream.readline().decode(), end='', flush=True)
"""


def measure(generations: int) -> dict[str, list[float]]:
    """Milliseconds of each generation."""
    spent: dict[str, list[float]] = {"checkpoint stop": [], "rollback": [], "first answer": []}
    with Sandbox.create() as sandbox:
        process = sandbox.spawn(["python3", "-c", SERVER])
        if process.stdout.readline() != "up\n":
            raise Wrong(process.stderr.read_available())
        for _ in range(generations):
            time.sleep(IDLE)
            checkpoint = sandbox.checkpoint()
            spent["checkpoint stop"].append(stop_of(checkpoint))
            process.stdin.write("a request\n")
            process.stdout.readline()
            time.sleep(IDLE)
            begun = time.perf_counter()
            sandbox.rollback(checkpoint)
            back = time.perf_counter()
            process.stdin.write("a request\n")
            if not process.stdout.readline().endswith("a request\n"):
                raise Wrong("the server does not answer after the rollback")
            answered = time.perf_counter()
            spent["rollback"].append((back - begun) * 1000)
            spent["first answer"].append((answered - begun) * 1000)
    return spent


def compare(recorder: Recorder, generations: int) -> None:
    for what, values in measure(generations).items():
        third = max(1, len(values) // 3)
        first, last = values[:third], values[-third:]
        for name, some in (("first", first), ("last", last)):
            for value in some:
                recorder.add(f"{what}, {name} third", value)
        ratio = f"{what}, last third against the first"
        recorder.expect(ratio, unit="x")
        recorder.add(ratio, quantile(last, 0.5) / quantile(first, 0.5))


@click.command()
@options
@click.option("--generations", type=click.IntRange(min=3), help="Default 30, quick 9.")
def main(
    *, output: Path | None, quick: bool, budget: float | None, generations: int | None
) -> None:
    """Measure generations of a server."""
    recorder = Recorder("generations", what=__doc__, budget=budget, quick=quick)
    count = generations or (9 if quick else 30)
    recorder.attempt("generations", partial(compare, recorder, count), limit=30 + 3.0 * count)
    finish(recorder, output)


if __name__ == "__main__":
    main()
