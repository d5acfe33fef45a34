"""nginx: a master that is root, two workers that are not, counters in shared memory, sendfile."""

from __future__ import annotations

from typing import Any

import pytest

from deltabox import Sandbox

from ..probe import Probe
from .returns import returns

CONFIGURATION = """
user www-data;
worker_processes 2;
daemon {daemon};
pid /srv/web/pid;
error_log /srv/web/error.log;
events {{ worker_connections 64; }}
http {{
    access_log /srv/web/access.log;
    sendfile on;
    keepalive_timeout 1h;
    keepalive_requests 100000;
    send_timeout 1h;
    client_header_timeout 1h;
    server {{
        listen 127.0.0.1:8080;
        listen unix:/srv/web/socket;
        root /srv/web/root;
        add_header X-Served "$pid $connection $connection_requests";
        location /version {{ return 200 "first"; }}
        location /status {{ stub_status; access_log off; }}
    }}
}}
"""

CLIENT = """
import hashlib, http.client, os, pwd, socket, subprocess

def get(connection, path):
    connection.request("GET", path)
    answer = connection.getresponse()
    return [answer.status, answer.read().decode(), answer.headers.get("X-Served")]

def fresh(path):
    return get(http.client.HTTPConnection("127.0.0.1", 8080, timeout=15), path)

def over_unix(path):
    s = socket.socket(socket.AF_UNIX)
    s.settimeout(15)
    s.connect("/srv/web/socket")
    s.sendall(f"GET {path} HTTP/1.0\\r\\n\\r\\n".encode())
    return s.makefile().read().endswith("one\\n")

def master():
    return int(open("/srv/web/pid").read())

def children(pid):
    return [int(n) for n in open(f"/proc/{pid}/task/{pid}/children").read().split()]

def user(pid):
    return pwd.getpwuid(os.stat(f"/proc/{pid}").st_uid).pw_name

def reload():
    old = children(master())
    subprocess.run(["nginx", "-c", "/srv/web/conf", "-s", "reload"], check=True)
    until = time.monotonic() + 15
    while fresh("/version")[1] != "second" or set(old) & set(children(master())):
        assert time.monotonic() < until, "the old workers stay, or the old configuration"
        time.sleep(0.01)

kept = [http.client.HTTPConnection("127.0.0.1", 8080, timeout=15) for _ in range(3)]
for connection in kept:
    connection.connect()
slow = socket.create_connection(("127.0.0.1", 8080), timeout=15)
slow.sendall(b"GET /page HTTP/1.0\\r\\nX-Half: ye")
large = socket.create_connection(("127.0.0.1", 8080), timeout=15)
large.sendall(b"GET /large HTTP/1.0\\r\\n\\r\\n")
head = large.recv(1000)
for connection in kept:
    get(connection, "/page")
"""

LARGE = bytes(range(256)) * 40_000  # ten megabytes: more than fits in flight


def start(sandbox: Sandbox, daemon: str) -> Probe:
    sandbox.files.write_text("/srv/web/conf", CONFIGURATION.format(daemon=daemon))
    sandbox.files.write_text("/srv/web/root/page", "one\n")
    sandbox.files.write("/srv/web/root/large", LARGE)
    command = ["nginx", "-c", "/srv/web/conf"]
    probe = Probe.start(sandbox)
    if daemon == "on":
        sandbox.run(command, check=True, timeout=20)
    else:
        sandbox.spawn(command)
        probe.do(
            "until = time.monotonic() + 15\n"
            "while not os.path.exists('/srv/web/pid'):\n"
            "    assert time.monotonic() < until\n"
            "    time.sleep(0.01)"
        )
    probe.do(CLIENT)
    return probe


@pytest.mark.parametrize("daemon", ["on", "off"])
def test_master_and_workers(sandbox: Sandbox, daemon: str) -> None:
    probe = start(sandbox, daemon)
    workers = probe.ask("sorted(children(master()))")
    assert len(workers) == 2
    served: list[str] = probe.ask("[get(connection, '/page')[2] for connection in kept]")
    status: str = probe.ask("get(kept[0], '/status')[1]")
    first = probe.ask("get(kept[0], '/page')")

    def next_one(said: str, by: int = 1) -> str:
        pid, connection, requests = said.split()
        return f"{pid} {connection} {int(requests) + by}"

    def verify(box: Sandbox) -> None:
        inside = probe.within(box)

        def ask(text: str) -> Any:
            return inside.ask(text)

        assert ask("sorted(children(master()))") == workers
        assert ask("[user(pid) for pid in children(master())]") == ["www-data"] * 2
        assert ask("user(master())") == "root"
        # the same connections, to the same workers, and nobody has asked anything meanwhile
        assert ask("get(kept[0], '/page')") == [200, "one\n", next_one(first[2])]
        assert [ask(f"get(kept[{n}], '/page')[2]") for n in (1, 2)] == [
            next_one(said) for said in served[1:]
        ]
        counted = ask("get(kept[0], '/status')[1]").split()
        was = status.split()
        assert int(counted[9]) == int(was[9]) + 5, "the counters in shared memory"
        # half a request, half an answer
        ask("slow.sendall(b's\\r\\n\\r\\n')")
        assert ask("slow.makefile().read().splitlines()[-1]") == "one"
        inside.do("body = head + large.makefile('rb').read()")
        assert ask("hashlib.sha1(body.split(b'\\r\\n\\r\\n', 1)[1]).hexdigest()") == digest
        # and it goes on working
        assert ask("over_unix('/page')")
        box.files.write_text("/srv/web/root/page", "two\n")
        assert ask("get(kept[2], '/page')[1]") == "two\n"
        text = CONFIGURATION.format(daemon=daemon).replace("first", "second")
        assert ask("fresh('/version')[1]") == "first"
        box.files.write_text("/srv/web/conf", text)
        inside.do("reload()")
        assert ask("fresh('/page')[1]") == "two\n"
        assert ask("[user(pid) for pid in children(master())]") == ["www-data"] * 2

    digest = probe.ask("hashlib.sha1(open('/srv/web/root/large', 'rb').read()).hexdigest()")
    returns(sandbox, verify)
