"""Checkpoint, rollback, checkpoint, ...: does the thirtieth generation cost more than the first?

A server with three workers and connections between them, which answers a request in every
generation. The figures are the medians of the first and of the last third; their ratio is to stay
near 1. Nothing but time is measured here: that nothing else grows is a test
(tests/deltacr/test_generations.py).

    python bench/generations.py
"""

from __future__ import annotations

import statistics
import time

import click
from rich.console import Console
from rich.table import Table

from deltabox import Sandbox

IDLE = 0.15  # seconds of thought between the steps

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


@click.command()
@click.option("--generations", default=30, show_default=True)
def main(generations: int) -> None:
    spent: dict[str, list[float]] = {"checkpoint pause": [], "rollback": [], "first answer": []}
    with Sandbox.create() as sandbox:
        process = sandbox.spawn(["python3", "-c", SERVER])
        if process.stdout.readline() != "up\n":
            raise click.ClickException(process.stderr.read_available())
        for _ in range(generations):
            time.sleep(IDLE)
            checkpoint = sandbox.checkpoint()
            spent["checkpoint pause"].append(checkpoint.stats.pause_ms)
            process.stdin.write("a request\n")
            process.stdout.readline()
            time.sleep(IDLE)
            begun = time.perf_counter()
            sandbox.rollback(checkpoint)
            back = time.perf_counter()
            process.stdin.write("a request\n")
            process.stdout.readline()
            answered = time.perf_counter()
            spent["rollback"].append((back - begun) * 1000)
            spent["first answer"].append((answered - begun) * 1000)
    table = Table("what", "first third, ms", "last third, ms", "ratio")
    for what, values in spent.items():
        third = max(1, len(values) // 3)
        first, last = statistics.median(values[:third]), statistics.median(values[-third:])
        table.add_row(what, f"{first:.2f}", f"{last:.2f}", f"{last / first:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
