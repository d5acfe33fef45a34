"""redis-server in a sandbox, and the client that speaks to it from inside."""

from __future__ import annotations

from deltabox import Sandbox

from ..probe import Probe

# Debian has the server in redis-tools, under a name that makes it check files instead
SERVER = "/usr/local/bin/redis-server"
COMMAND = [SERVER, "--port", "6380", "--bind", "127.0.0.1", "--dir", "/srv/data"]
COMMAND += ["--unixsocket", "/srv/data/socket", "--appendonly", "yes", "--appendfsync", "always"]

CLIENT = """
import os, socket, time

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
        if not line:
            raise ConnectionError("the server has gone")
        kind, rest = line[0], line[1:]
        if rest == "-1" and kind in "$*":
            return None
        if kind == "$":
            return self.file.read(int(rest) + 2)[:-2].decode()
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

def connect():
    global kept
    kept = Client()
    until_true(lambda: kept("PING") == "+PONG")  # not while it still reads its files

def info(section):
    return dict(l.split(":") for l in kept("INFO", section).split("\\r\\n") if ":" in l)

def end(signal=None):
    server = int(info("server")["process_id"])
    if signal is None:
        kept.send("SHUTDOWN", "NOSAVE")
    else:
        os.kill(server, signal)
    assert kept.file.read() == b""
    until_true(lambda: not os.path.exists(f"/proc/{server}"))
"""


def start(sandbox: Sandbox, *, save: str) -> Probe:
    """A server that saves at the points `save`, and a probe that is its client `kept`."""
    sandbox.run(f"ln -s /usr/bin/redis-check-rdb {SERVER}; mkdir -p /srv/data", check=True)
    sandbox.spawn([*COMMAND, "--save", save])
    probe = Probe.start(sandbox)
    probe.do(CLIENT)
    probe.do("connect()")
    return probe


def restart(inside: Probe, *options: str, kill: bool = False) -> None:
    """Another server takes the place of the one that runs, and knows only what is on disk."""
    inside.do("end(signal.SIGKILL)" if kill else "end()")
    inside.sandbox.spawn([*COMMAND, *options])
    inside.do("connect()")
