"""What network="nat" costs: rollbacks, forks, throughput, round trips, memory.

The peer is a server of this process at the host's own address, so the figures are of the path
between the sandbox and a socket of the host, without any wire; beside them the same through the
host's loopback device, from a program outside (`network="host"`).

    python bench/nat.py
"""

from __future__ import annotations

import socket
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import click
from rich.console import Console
from rich.table import Table

from deltabox import Sandbox

MEGABYTES = 512
ROUND_TRIPS = 3000
CONNECTIONS = 300

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
    network: Literal["none", "nat", "host"], address: str, port: int, steps: int
) -> dict[str, float]:
    figures = {}
    with Sandbox.create(network=network) as sandbox:
        sandbox.shell().run("true")
        checkpoint = sandbox.checkpoint()
        rollbacks = []
        for _ in range(steps):
            time.sleep(0.1)
            rollbacks.append(seconds(lambda: sandbox.rollback(checkpoint)))
        figures["rollback, ms"] = 1e3 * statistics.median(rollbacks)
        forks: list[Sandbox] = []
        figures["fork_many(8), ms"] = 1e3 * seconds(
            lambda: forks.extend(sandbox.fork_many(8, at=checkpoint))
        )
        if network == "nat":
            figures["memory of a carrier, KiB"] = statistics.median(carrier_kilobytes())
        for fork in forks:
            fork.close()
        if network == "none":
            return figures

        def inside(what: str, count: int) -> float:
            arguments = [what, address, str(port), str(count)]
            done = sandbox.run(["python3", "-c", PROGRAM, *arguments], check=True, timeout=300)
            return float(done.stdout)

        for what in ("download", "upload"):
            figures[f"{what}, MB/s"] = MEGABYTES * 1.048576 / inside(what, MEGABYTES)
        figures["round trip, us"] = 1e6 * inside("round trips", ROUND_TRIPS) / ROUND_TRIPS
        figures["connect, us"] = 1e6 * inside("connections", CONNECTIONS) / CONNECTIONS
    return figures


@click.command()
@click.option("--steps", default=50, help="Rollbacks to measure.")
def main(*, steps: int) -> None:
    """Print the figures for no network, nat, and the host's network."""
    address = own_address()
    with socket.create_server((address, 0), backlog=1024) as listener:
        threading.Thread(target=accept, args=(listener,), daemon=True).start()
        port = int(listener.getsockname()[1])
        columns = [measure(kind, address, port, steps) for kind in ("none", "nat", "host")]
    table = Table("what (median)", "none", "nat", "host", title="The cost of a network")
    for what in columns[1]:
        table.add_row(what, *(f"{c[what]:,.1f}" if what in c else "" for c in columns))
    Console().print(table)


if __name__ == "__main__":
    main()
