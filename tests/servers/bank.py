"""A bank: a web server, which has its accounts in PostgreSQL and counts in Redis, and its clients.

`serve DIRECTORY` is the server; DIRECTORY is where PostgreSQL's socket is. Each connection of a
client has one of its own to either database, and keeps them. `call CLIENT` is a client, which keeps
its connection, too. It takes lines from standard input:

    order NUMBER  makes the transfers of that order; they follow from the number alone
    noted         what it has been told is done
    books         what the server finds in the databases

and answers each with one. So whoever gave the orders knows all that must come out.
"""

from __future__ import annotations

import hashlib
import json
import random
import socket
import struct
import sys
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final, NamedTuple

PORT: Final = 8080
REDIS: Final = 6380
PATIENCE: Final = 300.0  # seconds: who hangs is still found hanging when somebody looks
ACCOUNTS: Final = 50
BALANCE: Final = 1000
TRANSFERS: Final = 6  # of an order, for each client

SCHEMA: Final = (
    "CREATE TABLE account (id int PRIMARY KEY, balance bigint NOT NULL)",
    f"INSERT INTO account SELECT id, {BALANCE} FROM generate_series(0, {ACCOUNTS - 1}) AS id",
    "CREATE TABLE transfer"
    " (client int, number int, note text NOT NULL, PRIMARY KEY (client, number))",
)


class Transfer(NamedTuple):
    order: int
    taken: int
    given: int
    amount: int

    @property
    def note(self) -> str:
        return " ".join(map(str, self))


def transfers(client: int, order: int) -> list[Transfer]:
    """What a client is to do."""
    chance = random.Random(f"{client} {order}")
    made = []
    for _ in range(TRANSFERS):
        taken, given = chance.sample(range(ACCOUNTS), 2)
        made.append(Transfer(order, taken, given, chance.randint(1, 9)))
    return made


def digest(notes: list[str]) -> str:
    """What tells of every transfer, and of their order."""
    return hashlib.md5("\n".join(notes).encode()).hexdigest()


class Postgres:
    """A connection that asks one query after the other."""

    def __init__(self, directory: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(PATIENCE)
        self.socket.connect(f"{directory}/.s.PGSQL.5432")
        self.file = self.socket.makefile("rb")
        names = b"user\0postgres\0database\0postgres\0\0"
        self.socket.sendall(struct.pack("!ii", 8 + len(names), 3 << 16) + names)
        self.read()

    def __call__(self, query: str) -> list[list[str]]:
        text = query.encode() + b"\0"
        self.socket.sendall(struct.pack("!ci", b"Q", 4 + len(text)) + text)
        return self.read()

    def read(self) -> list[list[str]]:
        rows, failed = [], ""
        while True:
            kind, size = struct.unpack("!ci", self.file.read(5))
            body = self.file.read(size - 4)
            if kind == b"D":
                rows.append(self.row(body))
            elif kind == b"E":
                failed = body.replace(b"\0", b" ").decode()
            elif kind == b"Z":  # it waits for the next query
                assert not failed, failed
                return rows

    @staticmethod
    def row(body: bytes) -> list[str]:
        (count,), at = struct.unpack_from("!h", body), 2
        values = []
        for _ in range(count):
            (size,) = struct.unpack_from("!i", body, at)
            values.append(body[at + 4 : at + 4 + size].decode())
            at += 4 + size
        return values


class Redis:
    """A connection for commands that are one line, and answered with a number or with texts."""

    def __init__(self) -> None:
        self.socket = socket.create_connection(("127.0.0.1", REDIS), PATIENCE)
        self.file = self.socket.makefile("rb")

    def __call__(self, command: str) -> Any:
        self.socket.sendall(command.encode() + b"\r\n")
        return self.read()

    def read(self) -> Any:
        line = self.file.readline().decode()
        kind, number = line[:1], int(line[1:])
        if kind == "*":
            return [self.read() for _ in range(number)]
        assert kind in (":", "$"), line
        return self.file.read(number + 2)[:-2].decode() if kind == "$" else number


class Handler(BaseHTTPRequestHandler):
    """One connection of a client."""

    protocol_version = "HTTP/1.1"
    directory = ""

    def setup(self) -> None:
        super().setup()
        self.postgres = Postgres(self.directory)
        self.redis = Redis()

    def do_POST(self) -> None:
        wanted = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        client, number = wanted["client"], wanted["number"]
        transfer = Transfer(*wanted["transfer"])
        changes = {transfer.taken: -transfer.amount, transfer.given: transfer.amount}
        # one after the other, so that a checkpoint often falls between two of them
        self.postgres("BEGIN")
        for account in sorted(changes):  # always in this order: or two might wait for each other
            change = f"balance = balance + {changes[account]}"
            self.postgres(f"UPDATE account SET {change} WHERE id = {account}")
        self.postgres(f"INSERT INTO transfer VALUES ({client}, {number}, '{transfer.note}')")
        self.postgres("COMMIT")
        self.answer(self.redis(f"HINCRBY served {client} 1"))

    def do_GET(self) -> None:
        balances = self.postgres("SELECT balance FROM account ORDER BY id")
        notes: dict[str, list[str]] = {}
        for client, note in self.postgres(
            "SELECT client, note FROM transfer ORDER BY client, number"
        ):
            notes.setdefault(client, []).append(note)
        words = iter(self.redis("HGETALL served"))
        self.answer(
            {
                "balances": [int(balance) for (balance,) in balances],
                "transfers": {client: [len(all), digest(all)] for client, all in notes.items()},
                "served": {client: int(count) for client, count in zip(words, words, strict=True)},
            }
        )

    def answer(self, value: Any) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words: object) -> None:
        """Standard error is for what goes wrong."""


class Server(ThreadingHTTPServer):
    daemon_threads = True


def serve(directory: str) -> None:
    Handler.directory = directory
    with Server(("127.0.0.1", PORT), Handler) as server:
        print("up", flush=True)
        server.serve_forever()


class Client:
    """What it was told is done is in its memory, and in a file as well."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.connection = HTTPConnection("127.0.0.1", PORT, timeout=PATIENCE)
        self.connection.connect()
        assert self.connection.sock is not None
        self.name = self.connection.sock.getsockname()
        self.path = f"/srv/bank/noted.{number}"
        self.file = open(self.path, "w")  # noqa: SIM115
        self.done: list[str] = []

    def ask(self, method: str, value: Any = None) -> Any:
        self.connection.request(method, "/", None if value is None else json.dumps(value))
        with self.connection.getresponse() as response:
            answer = json.loads(response.read())
        assert response.status == 200, answer
        # it connects anew by itself when it finds itself without a connection
        assert self.connection.sock is not None
        assert self.connection.sock.getsockname() == self.name, "the connection is another one"
        return answer

    def order(self, order: int) -> str:
        for transfer in transfers(self.number, order):
            number = len(self.done)
            wanted = {"client": self.number, "number": number, "transfer": transfer}
            served = self.ask("POST", wanted)
            assert served == number + 1, f"Redis has counted {served} after {number} before"
            self.done.append(transfer.note)
            self.file.write(transfer.note + "\n")
            self.file.flush()
        return f"done {order}"

    def noted(self) -> list[Any]:
        with open(self.path) as file:
            assert file.read().splitlines() == self.done, "file and memory differ"
        return [len(self.done), digest(self.done)]


def call(number: int) -> None:
    client = Client(number)
    print("up", flush=True)
    for line in sys.stdin:
        match line.split():
            case ["order", order]:
                print(client.order(int(order)), flush=True)
            case ["noted"]:
                print(json.dumps(client.noted()), flush=True)
            case ["books"]:
                print(json.dumps(client.ask("GET")), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2])
    else:
        call(int(sys.argv[2]))
