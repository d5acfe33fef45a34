"""Python's own http.server, and uvicorn: with asyncio, with uvloop, and with its reloader."""

from __future__ import annotations

from typing import Any

import pytest

from deltabox import Process, Sandbox

from ..probe import Probe
from .packages import ENVIRONMENT, PYTHON, install
from .returns import returns

CLIENT = """
import http.client, os, socket

def connect():
    connection = http.client.HTTPConnection("127.0.0.1", 8080, timeout=15)
    until = time.monotonic() + 15
    while True:
        try:
            connection.connect()
            return connection
        except ConnectionRefusedError:
            assert time.monotonic() < until
            time.sleep(0.01)

def get(connection, path, method="GET", body=None):
    connection.request(method, path, body)
    answer = connection.getresponse()
    return [answer.status, answer.read().decode()]

kept = connect()
"""

# clocks run on, so a connection that is kept for a few seconds only would be closed
UVICORN = [PYTHON, "-m", "uvicorn", "served:application", "--port", "8080"]
UVICORN += ["--timeout-keep-alive", "3600"]
LARGE = bytes(range(256)) * 40_000  # ten megabytes: more than fits in flight

APPLICATION = """
import asyncio, os

served = 0
body = b""
go = asyncio.Event()

async def ticking():
    while True:
        await asyncio.sleep(0.01)

async def application(scope, receive, send):
    global served, body
    if scope["type"] == "lifespan":
        tasks = [asyncio.create_task(ticking())]
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await send({"type": "lifespan.shutdown.complete"})
        return
    async def say(text, more=False):
        await send({"type": "http.response.body", "body": text.encode(), "more_body": more})
    served += 1
    await send({"type": "http.response.start", "status": 200, "headers": []})
    if scope["path"] == "/stream":
        await say("before ", more=True)
        await go.wait()
        await say("after")
    elif scope["path"] == "/go":
        go.set()
        await say("gone")
    elif scope["path"] == "/upload":
        while (event := await receive())["more_body"]:
            body += event["body"]
        await say(f"{len(body + event['body'])} bytes")
    elif scope["path"] == "/thread":
        await say(await asyncio.to_thread(str, 6 * 7))
    else:
        await say(f"{VERSION} {os.getpid()} {served}")

VERSION = "first"
"""

ASYNC_CLIENT = (
    CLIENT
    + """
stream = connect()
stream.request("GET", "/stream")
streamed = stream.getresponse()
started = streamed.read(7).decode()
upload = connect()
upload.putrequest("POST", "/upload")
upload.putheader("Content-Length", "1000")
upload.endheaders(b"x" * 400)
"""
)


def test_http_server(sandbox: Sandbox) -> None:
    sandbox.files.write_text("/srv/root/page", "one\n")
    sandbox.files.write("/srv/root/large", LARGE)
    server = sandbox.spawn(
        ["python3", "-u", "-m", "http.server", "8080", "-b", "127.0.0.1", "-p", "HTTP/1.1"],
        cwd="/srv/root",
    )
    server.stdout.readline(timeout=20)
    probe = Probe.start(sandbox)
    probe.do(CLIENT)
    assert probe.ask("get(kept, '/page')") == [200, "one\n"]
    # one thread is in the middle of sending, one waits for the rest of a request
    probe.do("large = connect(); large.request('GET', '/large'); sent = large.getresponse()")
    probe.do("half = connect(); half.sock.sendall(b'GET /page HTTP/1.1\\r\\nX-Half: ye')")
    while "large" not in server.stderr.readline(timeout=20):
        pass
    threads = f"len(os.listdir('/proc/{server.pid}/task'))"
    probe.do(
        f"until = time.monotonic() + 15\nwhile {threads} != 4: assert time.monotonic() < until"
    )

    def verify(box: Sandbox) -> None:
        inside = probe.within(box)

        def ask(text: str) -> Any:
            return inside.ask(text)

        assert ask(threads) == 4
        assert ask("get(kept, '/page')") == [200, "one\n"]
        assert "GET /page" in box.counterpart(server).stderr.readline(timeout=20)
        box.files.write_text("/srv/root/page", "two\n")
        assert ask("get(kept, '/page')") == [200, "two\n"]
        assert ask("get(connect(), '/page')") == [200, "two\n"]
        assert ask("sent.read() == open('/srv/root/large', 'rb').read()")
        inside.do("half.sock.sendall(b's\\r\\nConnection: close\\r\\n\\r\\n')")
        assert ask("half.sock.makefile().read().splitlines()[-1]") == "two"
        assert ask("get(large, '/missing')[0]") == 404

    returns(sandbox, verify)


def start(sandbox: Sandbox, *options: str) -> tuple[Process, Probe]:
    install(sandbox, "uvicorn", "httptools", "uvloop", "watchfiles")
    sandbox.files.write_text("/srv/app/served.py", APPLICATION)
    server = sandbox.spawn(
        [*UVICORN, *options],
        cwd="/srv/app",
        env=ENVIRONMENT,
    )
    probe = Probe.start(sandbox)
    server.stderr.read_until("Application startup complete", timeout=20)
    return server, probe


@pytest.mark.parametrize(("loop", "http"), [("asyncio", "h11"), ("uvloop", "httptools")])
def test_uvicorn(sandbox: Sandbox, loop: str, http: str) -> None:
    server, probe = start(sandbox, "--loop", loop, "--http", http)
    probe.do(ASYNC_CLIENT)
    assert probe.ask("get(kept, '/thread')") == [200, "42"]
    assert probe.ask("get(kept, '/')") == [200, f"first {server.pid} 4"]

    def verify(box: Sandbox) -> None:
        inside = probe.within(box)

        def ask(text: str) -> Any:
            return inside.ask(text)

        assert ask("get(kept, '/')") == [200, f"first {server.pid} 5"]
        assert ask("get(kept, '/thread')") == [200, "42"]
        inside.do("upload.send(b'y' * 600)")
        assert ask("upload.getresponse().read().decode()") == "1000 bytes"
        assert ask("get(connect(), '/go')") == [200, "gone"]
        assert ask("started + streamed.read().decode()") == "before after"
        assert ask("get(stream, '/')") == [200, f"first {server.pid} 8"]

    returns(sandbox, verify)


def test_uvicorn_reloads(sandbox: Sandbox) -> None:
    server, probe = start(sandbox, "--reload", "--reload-delay", "0.05")
    probe.do(CLIENT)
    first = probe.ask("get(kept, '/')")[1]
    worker = int(first.split()[1])
    assert first == f"first {worker} 1"
    assert worker != server.pid

    def verify(box: Sandbox) -> None:
        inside = probe.within(box)
        assert inside.ask("get(kept, '/')") == [200, f"first {worker} 2"]
        copy = box.counterpart(server)
        text = APPLICATION.replace('"first"', '"second"')
        box.run("cat > served.py", cwd="/srv/app", input=text, check=True)
        copy.stderr.read_until("Application startup complete", timeout=20)
        inside.do("kept.close(); kept = connect()")
        version, pid, served = inside.ask("get(kept, '/')")[1].split()
        assert (version, served) == ("second", "1")
        assert int(pid) != worker
        assert inside.ask("get(kept, '/')") == [200, f"second {pid} 2"]

    returns(sandbox, verify)
