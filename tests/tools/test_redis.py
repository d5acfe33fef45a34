"""redis-server: clients that wait in several ways, a log of all writes, a child that saves."""

from __future__ import annotations

from typing import Any

from deltabox import Sandbox

from ..probe import Probe
from .returns import returns

# Debian has the server in redis-tools, under a name that makes it check files instead
SERVER = "/usr/local/bin/redis-server"
COMMAND = [SERVER, "--port", "6380", "--bind", "127.0.0.1", "--dir", "/srv/data"]
COMMAND += ["--unixsocket", "/srv/data/socket", "--appendonly", "yes", "--appendfsync", "always"]
COMMAND += ["--save", ""]

CLIENT = """
import socket, subprocess

class Client:
    def __init__(self, path=None):
        until = time.monotonic() + 15
        while True:
            self.socket = socket.socket(socket.AF_UNIX if path else socket.AF_INET)
            self.socket.settimeout(15)
            try:
                self.socket.connect(path or ("127.0.0.1", 6380))
                break
            except (ConnectionRefusedError, FileNotFoundError):
                assert time.monotonic() < until
                time.sleep(0.01)
        self.file = self.socket.makefile("rb")
    def send(self, *words):
        parts = [b"*%d\\r\\n" % len(words)]
        for word in map(str.encode, words):
            parts.append(b"$%d\\r\\n%s\\r\\n" % (len(word), word))
        self.socket.sendall(b"".join(parts))
    def read(self):
        line = self.file.readline().decode().strip()
        kind, rest = line[0], line[1:]
        if kind == "$":
            return self.file.read(int(rest) + 2)[:-2].decode() if rest != "-1" else None
        if kind == "*":
            return [self.read() for _ in range(int(rest))]
        return int(rest) if kind == ":" else line
    def __call__(self, *words):
        self.send(*words)
        return self.read()

def until_true(condition):
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)

def info(section):
    return dict(l.split(":") for l in kept("INFO", section).split("\\r\\n") if ":" in l)

kept = Client()
until_true(lambda: kept("PING") == "+PONG")
"""


def start(sandbox: Sandbox) -> Probe:
    sandbox.run(f"ln -s /usr/bin/redis-check-rdb {SERVER}; mkdir -p /srv/data", check=True)
    sandbox.spawn(COMMAND)
    probe = Probe.start(sandbox)
    probe.do(CLIENT)
    return probe


def test_clients_that_wait(sandbox: Sandbox) -> None:
    probe = start(sandbox)
    probe.do("for n in range(1000): kept('SET', f'key:{n}', 'v' * n)")
    probe.do("kept('INCR', 'counter'), kept('INCR', 'counter')")
    probe.do("pops, listens, local = Client(), Client(), Client('/srv/data/socket')")
    probe.do("pops.send('BLPOP', 'queue', '0'); listens('SUBSCRIBE', 'news')")
    probe.do(
        "local('MULTI'); local('INCR', 'counter'); local.socket.sendall(b'*3\\r\\n$3\\r\\nSET')"
    )
    assert probe.ask("info('clients')['blocked_clients']") == "1"
    served = int(probe.ask("info('stats')['total_commands_processed']"))

    def verify(box: Sandbox) -> None:
        inside = probe.within(box)

        def ask(text: str) -> Any:
            return inside.ask(text)

        assert int(ask("info('stats')['total_commands_processed']")) == served + 1
        assert ask("kept('INCR', 'counter')") == 3
        assert ask("kept('DBSIZE'), kept('STRLEN', 'key:777')") == [1001, 777]
        assert ask("kept('RPUSH', 'queue', 'job')") == 1
        assert ask("pops.read()") == ["queue", "job"]
        assert ask("kept('PUBLISH', 'news', 'hello')") == 1
        assert ask("listens.read()") == ["message", "news", "hello"]
        inside.do("local.socket.sendall(b'\\r\\n$1\\r\\nx\\r\\n$1\\r\\ny\\r\\n')")
        assert ask("[local.read(), local('EXEC')]") == ["+QUEUED", [4, "+OK"]]
        # the log on disk and the memory belong to the same instant
        inside.do("server = '/proc/' + info('server')['process_id']")
        inside.do("kept.send('SHUTDOWN', 'NOSAVE'); assert kept.file.read() == b''")
        inside.do("until_true(lambda: not os.path.exists(server))")
        inside.do(f"server = subprocess.Popen({COMMAND!r}, stdout=subprocess.DEVNULL)")
        inside.do("kept = Client(); until_true(lambda: kept('PING') == '+PONG')")
        assert ask("kept('GET', 'counter'), kept('DBSIZE'), kept('GET', 'x')") == ["4", 1002, "y"]

    returns(sandbox, verify)


def test_in_the_middle_of_saving(sandbox: Sandbox) -> None:
    """The child that saves shares its parent's memory, and never called exec."""
    probe = start(sandbox)
    probe.do("for n in range(60): kept('SET', f'key:{n}', 'value')")
    probe.do("kept('CONFIG', 'SET', 'rdb-key-save-delay', '10000')")  # microseconds
    assert probe.ask("kept('BGSAVE')") == "+Background saving started"
    before = probe.ask("info('persistence')")
    assert (before["rdb_bgsave_in_progress"], before["rdb_last_bgsave_time_sec"]) == ("1", "-1")

    def verify(box: Sandbox) -> None:
        inside = probe.within(box)
        assert inside.ask("kept('DBSIZE')") == 60
        inside.do("kept('SET', 'later', 'not in it')")
        inside.do("until_true(lambda: info('persistence')['rdb_bgsave_in_progress'] == '0')")
        after = inside.ask("info('persistence')")
        assert after["rdb_last_bgsave_status"] == "ok"
        assert int(after["rdb_last_bgsave_time_sec"]) >= 0
        checked = box.run("redis-check-rdb /srv/data/dump.rdb", check=True).stdout
        assert "60 keys read" in checked

    returns(sandbox, verify, rollbacks=4, forks=4)
