"""Chromium: its processes, a page whose script runs on, and who looks at it from outside."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest

from deltabox import Process, Sandbox

from ..probe import Probe
from ..tools.returns import returns

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

COMMAND = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic"]
COMMAND += ["--no-first-run", "--disable-background-networking", "--disable-component-update"]
COMMAND += ["--disable-sync", "--user-data-dir=/srv/profile", "--remote-debugging-port=9222"]

PAGE = """<!doctype html>
<title>counting</title>
<canvas id="canvas" width="200" height="200"></canvas>
<script>
"use strict";
const state = { count: 0, heard: [] };
let ticks = 0, release;
setInterval(() => { ticks++; }, 20);

const pen = canvas.getContext("2d");
function draw(colour) {
    pen.fillStyle = colour;
    pen.fillRect(50, 50, 100, 100);
}
function colour() { return Array.from(pen.getImageData(100, 100, 1, 1).data).join(" "); }
draw("rgb(1, 2, 3)");

const source = "let sum = 0; onmessage = (event) => { sum += event.data; postMessage(sum); }";
const worker = new Worker(URL.createObjectURL(new Blob([source])));
const add = (number) => new Promise((answer) => {
    worker.onmessage = (event) => answer(event.data);
    worker.postMessage(number);
});

const finished = (request) => new Promise((answer, failed) => {
    request.onsuccess = () => answer(request.result);
    request.onerror = () => failed(request.error);
});
const opening = indexedDB.open("kept", 1);
opening.onupgradeneeded = () => opening.result.createObjectStore("values");
const database = finished(opening);
async function keep(value) {
    const values = (await database).transaction("values", "readwrite").objectStore("values");
    const before = await finished(values.count());
    await finished(values.put(value, before));
    return before;
}

const served = async () => Number(await (await fetch("/count")).text());
const events = new EventSource("/events");
events.onmessage = (event) => { state.heard.push(event.data); };

// All of it without a pause, and each answer must be the one that follows the last.
const done = { served: 0, kept: 0, added: 0, drawn: 0 };
const broken = [];
let going = true;
async function again(name, answer) {
    while (going) {
        const got = await answer(done[name]);
        if (got !== done[name]++) broken.push(`${name}: ${got} after ${done[name] - 1}`);
    }
}
const frame = (count) => new Promise((answer) => requestAnimationFrame(() => {
    draw(`rgb(${count % 256}, 2, 3)`);
    answer(colour() === `${count % 256} 2 3 255` ? count : colour());
}));
let ended;
function work() {
    ended = Promise.all([again("served", async () => await served() - 1), again("kept", keep),
        again("added", async () => await add(1) - 1), again("drawn", frame)]);
}
async function end() {
    going = false;
    await ended;
    return [done.served, done.kept, done.added, done.drawn, await keep("last")];
}
</script>
"""

# A server for the page, and the protocol of the developer tools: JSON in a websocket.
CLIENT = """
import http.client, http.server, socket

served = 0
listening = []

class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        global served
        if self.path == "/events":
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            listening.append(self.wfile)
            threading.Event().wait()
        if self.path == "/count":
            served += 1
            text = str(served)
        else:
            text = open("/srv/page.html").read()
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())
    def log_message(self, *arguments):
        pass

server = http.server.ThreadingHTTPServer(("127.0.0.1", 8080), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()

def tell(text):
    listening[-1].write(f"data: {text}\\n\\n".encode())

class DevTools:
    def __init__(self, path):
        self.socket = socket.create_connection(("127.0.0.1", 9222), timeout=60)
        self.file = self.socket.makefile("rb")
        self.number = 0
        said = ["GET " + path + " HTTP/1.1", "Host: 127.0.0.1:9222", "Upgrade: websocket"]
        said += ["Connection: Upgrade", "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA=="]
        said += ["Sec-WebSocket-Version: 13", "", ""]
        self.socket.sendall("\\r\\n".join(said).encode())
        assert b" 101 " in self.file.readline()
        while self.file.readline() != b"\\r\\n":
            pass
    def send(self, method, **parameters):
        self.number += 1
        text = json.dumps({"id": self.number, "method": method, "params": parameters}).encode()
        # one final frame of text, with a mask that changes nothing
        self.socket.sendall(struct.pack(">BBH4x", 0x81, 0x80 | 126, len(text)) + text)
        return self.number
    def message(self):
        text = b""
        while True:
            kind, size = self.file.read(2)
            if size == 126:
                size = int.from_bytes(self.file.read(2), "big")
            elif size == 127:
                size = int.from_bytes(self.file.read(8), "big")
            text += self.file.read(size)
            if kind & 0x80:
                return json.loads(text)
    def answer(self, number):
        while (message := self.message()).get("id") != number:
            assert "id" not in message, message  # else it is an event
        assert "error" not in message, message
        return message["result"]
    def __call__(self, method, **parameters):
        return self.answer(self.send(method, **parameters))
    def begin(self, script):
        return self.send("Runtime.evaluate", expression=script, awaitPromise=True,
                         returnByValue=True)
    def value(self, number):
        answer = self.answer(number)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")
    def run(self, script):
        return self.value(self.begin(script))

def about(path, method="GET"):
    connection = http.client.HTTPConnection("127.0.0.1", 9222, timeout=60)
    connection.request(method, path)
    return json.loads(connection.getresponse().read())

def until_true(condition):
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)

def pages():
    try:
        return [page for page in about("/json/list") if page["type"] == "page"]
    except ConnectionRefusedError:
        return []

def path_of(page):
    return page["webSocketDebuggerUrl"].removeprefix("ws://127.0.0.1:9222")

def look(page):
    # not before: there is another page first, whose answers may be lost with it
    until_true(lambda: [page["id"], "counting"] in [[one["id"], one["title"]] for one in pages()])
    client = DevTools(path_of(page))
    until_true(lambda: client.run("document.readyState") == "complete")
    return client
"""


def start(sandbox: Sandbox, *options: str) -> tuple[Process, Probe]:
    sandbox.files.write_text("/srv/page.html", PAGE)
    probe = Probe.start(sandbox)
    probe.do(CLIENT)
    browser = sandbox.spawn(
        ["sh", "-c", 'exec "$@" 2>/srv/log', "sh", *COMMAND, *options, "http://127.0.0.1:8080/"]
    )
    probe.do("until_true(pages); client = look(pages()[0])")
    probe.do("until_true(lambda: listening)")
    return browser, probe


@pytest.mark.parametrize(
    "options",
    [
        pytest.param((), id="as it comes"),
        pytest.param(("--no-zygote", "--disable-dev-shm-usage"), id="no zygote"),
        pytest.param(("--single-process",), id="single process"),
    ],
)
def test_a_page(sandbox: Sandbox, options: tuple[str, ...]) -> None:
    browser, probe = start(sandbox, *options)
    probe.do("client.run('state.count = 5; add(7)'); client.run('keep(1)'); client.run('served()')")
    probe.do("tell('before'); until_true(lambda: client.run('state.heard.length') == 1)")
    # another client waits for a promise
    probe.do("waits = DevTools(path_of(pages()[0]))")
    probe.do("asked = waits.begin('new Promise((go) => { release = go; })')")
    probe.do("until_true(lambda: client.run('typeof release') == 'function')")
    picture = probe.ask("client('Page.captureScreenshot')['data']")
    ticks = probe.ask("client.run('ticks')")
    turn = 0

    def verify(box: Sandbox) -> None:
        nonlocal turn
        turn += 1
        inside = probe.within(box)

        def ask(text: str) -> Any:
            return inside.ask(text)

        assert ask("client.run('state.count')") == 5
        assert ask("client.run('state.heard')") == ["before"]
        assert ask("client.run('colour()')") == "1 2 3 255"
        # every part of it goes on, in every copy differently: timers, workers, storage, network
        assert ask("client.run('ticks')") >= ticks
        inside.do("now = client.run('ticks'); until_true(lambda: client.run('ticks') > now)")
        inside.do(f"client.run('state.count += {turn}')")
        assert ask("client.run('state.count')") == 5 + turn
        assert ask(f"client.run('add({turn})')") == 7 + turn
        assert ask(f"client.run('keep({turn})')") == 1
        assert ask("client.run('served()')") == 2
        inside.do(f"tell('turn {turn}')")
        inside.do("until_true(lambda: client.run('state.heard.length') == 2)")
        assert ask("client.run('state.heard')") == ["before", f"turn {turn}"]
        inside.do(f"client.run('release({turn})')")
        assert ask("waits.value(asked)") == turn
        assert ask("client('Page.captureScreenshot')['data']") == picture
        inside.do(f"client.run('draw(\"rgb({turn}, 0, 200)\")')")
        assert ask("client.run('colour()')") == f"{turn} 0 200 255"
        assert ask("client('Page.captureScreenshot')['data']") != picture
        # it opens another page, with a process of its own, and ends when it is told
        inside.do("other = look(about('/json/new?http://127.0.0.1:8080/', 'PUT'))")
        assert ask("other.run('state.count')") == 0
        assert ask("other.run('keep(0)')") == 2
        inside.do("other('Browser.close')")
        assert box.counterpart(browser).wait(timeout=60) == 0

    returns(sandbox, verify)


def _goes_on(probe: Probe) -> None:
    """Wait until the page has done more of everything, all of it in order."""
    before = probe.ask("client.run('done')")
    until = time.monotonic() + 120
    while True:
        now = probe.ask("client.run('done')")
        assert probe.ask("client.run('broken')") == []
        if all(now[name] >= before[name] + 5 for name in before):
            return
        assert time.monotonic() < until, f"{before}, and then {now}"
        time.sleep(0.01)


def _compare(probe: Probe) -> None:
    """Nothing that the page has done is lost or done twice, here or where it was done."""
    _goes_on(probe)
    answered, kept, _, _, stored = probe.ask("client.run('end()')")
    assert probe.ask("client.run('broken')") == []
    assert (answered, kept) == (probe.ask("served"), stored)


def test_a_page_that_never_rests(sandbox: Sandbox) -> None:
    _, probe = start(sandbox)
    probe.do("client.run('work()')")
    chance = random.Random(1)
    kept = []
    for turn in range(20):
        _goes_on(probe)
        if turn % 2 == 0:
            kept.append(sandbox.checkpoint())
        _compare(probe)
        # mostly to the last; else further back, or on to a state that was left
        sandbox.rollback(kept[-1] if chance.random() < 0.7 else chance.choice(kept))
    for fork in sandbox.fork_many(4):
        with fork:
            _compare(probe.within(fork))
    _compare(probe)


def test_addresses_that_v8_reserves(sandbox: Sandbox) -> None:
    """A renderer reserves 1,440 GiB from a random address of 46 bits on, so they may end above."""
    probe = Probe.start(sandbox)
    probe.do(
        "libc.mmap.restype = ctypes.c_ulong\n"
        "libc.mmap.argtypes = [ctypes.c_ulong] * 6\n"
        "last = 2**46 - 2**32  # it is aligned to 4 GiB\n"
        "flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS\n"
        "assert libc.mmap(last, 1440 << 30, 0, flags, 2**64 - 1, 0) == last\n"
        "assert libc.mprotect(ctypes.c_ulong(last + (1 << 40)), 4096, 3) == 0\n"
        "value = ctypes.c_int.from_address(last + (1 << 40))\n"
        "value.value = 5"
    )
    checkpoint = sandbox.checkpoint()
    probe.do("value.value = 6")
    sandbox.rollback(checkpoint)
    assert probe.ask("value.value") == 5
