"""MariaDB: transactions left open by clients of all kinds, and transfers that never stop."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest

from deltabox import Sandbox, UnsupportedState

from ..probe import Probe
from ..tools.returns import returns

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]

INSTALL = ["mariadb-install-db", "--no-defaults", "--user=nobody", "--datadir=/srv/db/data"]
INSTALL += ["--auth-root-authentication-method=normal", "--skip-test-db"]
SERVER = ["mariadbd", "--no-defaults", "--datadir=/srv/db/data", "--socket=/srv/db/socket"]
SERVER += ["--port=3307", "--bind-address=127.0.0.1", "--log-error=/srv/db/log.err"]
SERVER += ["--pid-file=/srv/db/pid", "--wait-timeout=86400", "--innodb-lock-wait-timeout=86400"]

# The protocol by hand: what a query sends can be cut in two, and nothing has to be installed.
CLIENT = """
import os, socket, subprocess

class Failed(Exception):
    pass

class Client:
    def __init__(self, path=None):
        until = time.monotonic() + 60
        while True:
            self.socket = socket.socket(socket.AF_UNIX if path else socket.AF_INET)
            self.socket.settimeout(60)
            try:
                self.socket.connect(path or ("127.0.0.1", 3307))
                break
            except (ConnectionRefusedError, FileNotFoundError):
                assert time.monotonic() < until, open("/srv/db/log.err").read()
                time.sleep(0.01)
        self.file = self.socket.makefile("rb")
        self.packet()  # the greeting: what it can do is known
        what = 0x1 | 0x200 | 0x2000 | 0x8000 | 0x80000  # CLIENT_*, as in mysql_com.h
        said = struct.pack("<IIB23x", what, 1 << 24, 45) + b"root\\0\\0mysql_native_password\\0"
        self.socket.sendall(len(said).to_bytes(3, "little") + b"\\1" + said)
        self.read()
    def packet(self):
        head = self.file.read(4)
        assert len(head) == 4, "the server has closed the connection"
        return self.file.read(int.from_bytes(head[:3], "little"))
    def send(self, query, upto=None, since=0):
        text = b"\\3" + query.encode()
        self.socket.sendall((len(text).to_bytes(3, "little") + b"\\0" + text)[since:upto])
    def read(self):
        first = self.packet()
        if first[0] == 0xFF:
            raise Failed(int.from_bytes(first[1:3], "little"), first[9:].decode())
        if first[0] == 0:
            return first[1]  # rows that were changed
        for _ in range(first[0] + 1):  # the columns' names, and their end
            self.packet()
        rows = []
        while (packet := self.packet())[0] != 0xFE:
            row = []
            while packet:
                assert packet[0] < 251, "only short texts are asked for"
                row.append(packet[1:packet[0] + 1].decode())
                packet = packet[packet[0] + 1:]
            rows.append(row)
        return rows
    def __call__(self, query):
        self.send(query)
        return self.read()

def bank(client):
    client("CREATE DATABASE bank")
    client("CREATE TABLE bank.accounts (id INT PRIMARY KEY, balance INT) ENGINE=InnoDB")
    client("CREATE TABLE bank.moved (client INT, number INT, taken INT, given INT, amount INT,"
           " KEY (client)) ENGINE=InnoDB")
    client("INSERT INTO bank.accounts VALUES " + ",".join(f"({n},1000)" for n in range(20)))

def until_true(condition):
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)

def clean(client):
    told = client("CHECK TABLE bank.accounts, bank.moved EXTENDED")
    assert [row[3] for row in told] == ["OK", "OK"], told
    log = open("/srv/db/log.err").read()
    assert "crash recovery" not in log and "[ERROR]" not in log, log
"""


def start(sandbox: Sandbox, *options: str) -> Probe:
    sandbox.run("install -d -o nobody /srv/db", check=True)
    sandbox.run(INSTALL, check=True, timeout=60)
    sandbox.spawn([*SERVER, *options], user="nobody")
    probe = Probe.start(sandbox)
    probe.do(CLIENT)
    probe.do("first = Client(); bank(first)")
    return probe


def test_transactions_that_are_open(sandbox: Sandbox) -> None:
    probe = start(sandbox)
    probe.do("tcp, local, waits, half = Client(), Client('/srv/db/socket'), Client(), Client()")
    terminal = sandbox.spawn(
        ["mariadb", "--no-defaults", "-S/srv/db/socket", "-uroot", "-N", "-n", "bank"]
    )

    def take(amount: int, account: int) -> str:
        return f"UPDATE bank.accounts SET balance = balance - {amount} WHERE id = {account}"

    probe.do(f"tcp('BEGIN'), tcp('{take(10, 0)}')")
    probe.do(f"local('BEGIN'), local('{take(20, 1)}'), local('SAVEPOINT here')")
    probe.do(f"local('{take(500, 1)}')")
    terminal.stdin.write(f"BEGIN; {take(30, 2)}; SELECT balance FROM accounts WHERE id = 2;\n")
    assert terminal.stdout.readline(timeout=20) == "970\n"
    # one waits for a lock of another, one has sent half of what it asks
    probe.do(f"waits.send('{take(1, 0)}')")
    # not from information_schema: its tables of locks stay as they are while they are often read
    probe.do("waiting = \"SHOW STATUS LIKE 'Innodb_row_lock_current_waits'\"")
    probe.do("until_true(lambda: first(waiting)[0][1] == '1')")
    probe.do("half.send('SELECT 6 * 7', upto=9)")
    turn = 0

    def verify(box: Sandbox) -> None:
        nonlocal turn
        turn += 1
        inside = probe.within(box)

        def ask(text: str) -> Any:
            return inside.ask(text)

        def balance(account: int, asked: str = "first") -> int:
            query = f"SELECT balance FROM bank.accounts WHERE id = {account}"
            return int(ask(f"{asked}('{query}')")[0][0])

        # nobody sees what another has not committed
        assert [balance(n) for n in range(3)] == [1000, 1000, 1000]
        assert [balance(0, "tcp"), balance(1, "local")] == [990, 480]
        assert ask("first(waiting)[0][1]") == "1"
        # each goes on with its transaction, in every copy differently
        assert ask(f"tcp('{take(turn, 0)}'), tcp('COMMIT')") == [1, 0]
        assert ask("waits.read()") == 1
        assert ask("local('ROLLBACK TO here'), local('COMMIT')") == [0, 0]
        copy = box.counterpart(terminal)
        end = "COMMIT" if turn % 2 else "ROLLBACK"
        copy.stdin.write(f"{end}; SELECT balance FROM accounts WHERE id = 2;\n")
        left = 970 if turn % 2 else 1000
        assert copy.stdout.readline(timeout=20) == f"{left}\n"
        inside.do("half.send('SELECT 6 * 7', since=9)")
        assert ask("half.read()") == [["42"]]
        assert [balance(n) for n in range(3)] == [989 - turn, 980, left]
        # the files on disk and the memory belong to the same instant
        inside.do("clean(first)")
        inside.do("server = '/proc/' + open('/srv/db/pid').read().strip()")
        inside.do("first('SHUTDOWN'); until_true(lambda: not os.path.exists(server))")
        inside.do(f"again = {SERVER!r}")
        inside.do("subprocess.Popen(again, user='nobody', stderr=subprocess.DEVNULL)")
        inside.do("first = Client(); clean(first)")
        assert [balance(n) for n in range(3)] == [989 - turn, 980, left]

    returns(sandbox, verify)


# Each client keeps a record of what the server has acknowledged, in a file and in its memory.
TRANSFERS = """
from random import Random

going = True
done = {}
broken = []

def transfers(number, path):
    try:
        client = Client(path)
        chance = Random(number)
        done[number] = []
        record = open(f"/srv/db/acknowledged.{number}", "a")
        while going:
            taken, given = chance.sample(range(20), 2)
            amount = chance.randint(1, 9)
            count = len(done[number])
            move = "UPDATE bank.accounts SET balance = balance"
            try:
                client("BEGIN")
                client(f"{move} - {amount} WHERE id = {taken}")
                client(f"{move} + {amount} WHERE id = {given}")
                client(f"INSERT INTO bank.moved VALUES"
                       f" ({number},{count},{taken},{given},{amount})")
                client("COMMIT")
            except Failed as failure:
                if failure.args[0] != 1213:  # a deadlock: it is undone as a whole
                    raise
                continue
            record.write(f"{count} {taken} {given} {amount}\\n")
            record.flush()
            done[number].append([count, taken, given, amount])
    except BaseException as error:
        broken.append(repr(error))

workers = [threading.Thread(target=transfers, args=(n, path))
           for n, path in enumerate([None, "/srv/db/socket"] * 3)]
for worker in workers:
    worker.start()

def acknowledged():
    assert not broken, broken
    return sum(map(len, done.values()))

def sums():
    return first("SELECT SUM(balance) FROM bank.accounts")

def end():
    global going
    going = False
    for worker in workers:
        worker.join(60)
        assert not worker.is_alive()
    assert not broken, broken

def compare():
    balances = [1000] * 20
    for number, known in done.items():
        query = f"SELECT number, taken, given, amount FROM bank.moved WHERE client = {number}"
        rows = sorted([int(field) for field in row] for row in first(query))
        assert rows == known, "acknowledged and kept are not the same"
        assert [count for count, *_ in known] == list(range(len(known)))
        lines = open(f"/srv/db/acknowledged.{number}").read().splitlines()
        assert [[int(field) for field in line.split()] for line in lines] == known
        for _, taken, given, amount in known:
            balances[taken] -= amount
            balances[given] += amount
    rows = first("SELECT balance FROM bank.accounts ORDER BY id")
    assert [int(row[0]) for row in rows] == balances
    return sum(balances)
"""


def _more_than(probe: Probe, count: int) -> int:
    """Wait until the clients have so many transfers acknowledged; how many it is then."""
    until = time.monotonic() + 60
    while (now := int(probe.ask("acknowledged()"))) <= count:
        assert time.monotonic() < until, f"the clients do not get on after {now} transfers"
        time.sleep(0.005)
    return now


def _compare(probe: Probe) -> None:
    """More transfers, then none, and nothing is lost or there twice."""
    _more_than(probe, int(probe.ask("acknowledged()")) + 30)
    assert probe.ask("sums()") == [["20000"]]  # also while they go on
    probe.do("end()")
    assert probe.ask("compare()") == 20000
    probe.do("clean(first)")


def test_transfers_through_twenty_rollbacks(sandbox: Sandbox) -> None:
    probe = start(sandbox)
    probe.do(TRANSFERS)
    chance = random.Random(1)
    _more_than(probe, 50)
    kept = []
    for turn in range(20):
        if turn % 2 == 0:
            _more_than(probe, int(probe.ask("acknowledged()")) + 10)
            kept.append(sandbox.checkpoint())  # in the middle of transfers
        _compare(probe)
        # mostly to the last; else further back, or on to a state that was left
        sandbox.rollback(kept[-1] if chance.random() < 0.7 else chance.choice(kept))
    for fork in sandbox.fork_many(4):
        with fork:
            _compare(probe.within(fork))
    _compare(probe)


def test_rings_are_refused_by_name() -> None:
    with Sandbox.create(io_uring=True) as sandbox:
        probe = start(sandbox)
        with pytest.raises(
            UnsupportedState, match=r"of pid \d+ \(mariadbd\) is an io_uring instance"
        ):
            sandbox.checkpoint()
        assert probe.ask("first('SELECT SUM(balance) FROM bank.accounts')") == [["20000"]]
