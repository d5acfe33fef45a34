"""What network="nat" costs: rollbacks, forks, throughput, round trips, memory.

The peer is a server of this process at the host's own address, so the figures are of the path
between the sandbox and a socket of the host, without any wire; beside them the same through the
host's loopback device, from a program outside (`network="host"`).

    python bench/nat.py --json out.json
"""

from __future__ import annotations

import socket
import statistics
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal

import click
from report import Recorder, finish, options

from deltabox import Sandbox

MEGABYTES = 512
ROUND_TRIPS = 3000
CONNECTIONS = 300
FORKS = 5

# Run inside: what to do, where. Prints seconds.
PROGRAM = """
import socket, sys, time
what, host, port, count = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
def connect():
    sock = socket.create_connection((host, port))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.sendall(what[0].encode())
    return sock
piece, started = bytes(1 << 18), time.perf_counter()
if what == "download":
    sock, left = connect(), count << 20
    while left:
        left -= len(sock.recv(min(left, 1 << 18)))
elif what == "upload":
    sock = connect()
    for _ in range(count << 2):
        sock.sendall(piece)
    sock.shutdown(socket.SHUT_WR)
    sock.recv(1)
elif what == "round trips":
    sock = connect()
    for _ in range(count):
        sock.sendall(b"x")
        sock.recv(1)
elif what == "connections":
    for _ in range(count):
        connect().close()
print(time.perf_counter() - started)
"""


def serve(connection: socket.socket) -> None:
    piece = bytes(1 << 18)
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        what = connection.recv(1)
        try:
            while what == b"d":
                connection.sendall(piece)
            while what == b"u" and connection.recv(1 << 18):
                pass
            if what == b"u":
                connection.sendall(b"x")
            while what == b"r" and (data := connection.recv(1)):
                connection.sendall(data)
        except OSError:
            return  # the client has what it wanted


def accept(listener: socket.socket) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return  # closed: all is measured
        threading.Thread(target=serve, args=(connection,), daemon=True).start()


def own_address() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.connect(("198.51.100.1", 9))  # sends nothing
        return str(sock.getsockname()[0])


def seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def carrier_kilobytes() -> list[int]:
    """What each process that carries packets has for itself."""
    found = []
    for comm in Path("/proc").glob("[0-9]*/comm"):
        try:
            if comm.read_text() == "_nat\n":
                text = (comm.parent / "smaps_rollup").read_text()
                dirty = next(line for line in text.splitlines() if "Private_Dirty" in line)
                found.append(int(dirty.split()[1]))
        except OSError:
            continue
    return found


def measure(
    recorder: Recorder, network: Literal["none", "nat", "host"], port: int, steps: int, size: int
) -> None:
    """All figures of one kind of network; `size` is in MB."""

    def add(name: str, value: float, unit: str = "ms") -> None:
        recorder.expect(f"{name}, {network}", unit=unit)
        recorder.add(f"{name}, {network}", value)

    with Sandbox.create(network=network) as sandbox:
        sandbox.shell().run("true")
        checkpoint = sandbox.checkpoint()
        for _ in range(steps):
            time.sleep(0.1)
            add("rollback", 1e3 * seconds(lambda: sandbox.rollback(checkpoint)))
        for turn in range(FORKS):
            started = time.perf_counter()
            forks = sandbox.fork_many(8, at=checkpoint)
            add("fork_many(8)", 1e3 * (time.perf_counter() - started))
            if network == "nat" and not turn:
                add("memory of a carrier", statistics.median(carrier_kilobytes()), "KiB")
            for copy in forks:
                copy.close()
        if network == "none":
            return

        def inside(what: str, count: int) -> float:
            arguments = [what, own_address(), str(port), str(count)]
            done = sandbox.run(["python3", "-c", PROGRAM, *arguments], check=True, timeout=100)
            return float(done.stdout)

        for what in ("download", "upload"):
            add(what, size * 1.048576 / inside(what, size), "MB/s")
        add("round trip", 1e6 * inside("round trips", ROUND_TRIPS) / ROUND_TRIPS, "us")
        add("connect", 1e6 * inside("connections", CONNECTIONS) / CONNECTIONS, "us")


@click.command()
@options
@click.option("--steps", type=click.IntRange(min=1), help="Rollbacks; default 50, quick 5.")
def main(*, output: Path | None, quick: bool, budget: float | None, steps: int | None) -> None:
    """Measure no network, nat, and the host's network."""
    recorder = Recorder("nat", what=__doc__, budget=budget, quick=quick)
    count, size = steps or (5 if quick else 50), 64 if quick else MEGABYTES
    with socket.create_server((own_address(), 0), backlog=1024) as listener:
        threading.Thread(target=accept, args=(listener,), daemon=True).start()
        port = int(listener.getsockname()[1])
        kinds: tuple[Literal["none", "nat", "host"], ...] = ("none", "nat", "host")
        for kind in kinds:
            recorder.attempt(kind, partial(measure, recorder, kind, port, count, size))
    finish(recorder, output)


if __name__ == "__main__":
    main()
