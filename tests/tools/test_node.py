"""Node.js: a development server that watches its sources, with a worker thread and a child."""

from __future__ import annotations

from typing import Any

from deltabox import Process, Sandbox

from ..probe import Probe
from .returns import returns

SERVER = """
const { fork } = require("child_process");
const crypto = require("crypto");
const fs = require("fs");
const http = require("http");
const path = require("path");
const { Worker } = require("worker_threads");

const source = "/srv/app/src";
const listeners = new Set();
let page = require(source + "/page.js");
let served = 0;

// by hand: Debian 12's own version has no recursive watch
const below = (at) => [at].concat(...fs.readdirSync(at, { withFileTypes: true })
    .filter((entry) => entry.isDirectory()).map((entry) => below(`${at}/${entry.name}`)));
for (const directory of below(source)) fs.watch(directory, (event, file) => {
    const name = path.relative(source, `${directory}/${file}`);
    for (const module of Object.keys(require.cache))
        if (module.startsWith(source)) delete require.cache[module];
    try {
        page = require(source + "/page.js");
    } catch (error) {
        page = { render: () => "broken: " + error.message.split("\\n")[0] };
    }
    for (const response of listeners) response.write(`data: ${name}\\n`);
});

const child = fork("/srv/app/helper.js");
const worker = new Worker("/srv/app/worker.js");
const ask = (other, send) =>
    new Promise((answer) => { other.once("message", answer); send(); });

const routes = {
    "/page": () => page.render() + " " + ++served,
    "/child": () => ask(child, () => child.send(2)),
    "/worker": () => ask(worker, () => worker.postMessage(3)),
    "/pool": () => new Promise((answer) =>
        crypto.pbkdf2("password", "salt", 1000, 16, "sha256", (error, key) =>
            answer(key.toString("hex")))),
    "/file": async () => (await fs.promises.readFile(source + "/page.js", "utf8")).length + "",
};

const server = http.createServer(async (request, response) => {
    if (request.url === "/events") {
        response.writeHead(200, { "Content-Type": "text/event-stream" });
        response.write("data: hello\\n");
        listeners.add(response);
        request.on("close", () => listeners.delete(response));
        return;
    }
    response.end(await routes[request.url]());
});
server.keepAliveTimeout = 0;
server.listen(8080, "127.0.0.1", () => console.log("ready"));
let ticks = 0;
setInterval(() => { ticks++; }, 20);
process.on("SIGUSR2", () => console.log("ticks " + (ticks > 0)));
"""

HELPER = """
let sum = 0;
process.on("message", (n) => { sum += n; process.send(process.pid + " " + sum); });
"""

WORKER = """
const { parentPort } = require("worker_threads");
let product = 1;
parentPort.on("message", (n) => { product *= n; parentPort.postMessage("" + product); });
"""

CLIENT = """
import hashlib, http.client, os

def get(path, connection=None):
    connection = connection or http.client.HTTPConnection("127.0.0.1", 8080, timeout=15)
    connection.request("GET", path)
    return connection.getresponse().read().decode()

def save(path, text):
    # as editors do it
    with open("/srv/app/.saved", "w") as file:
        file.write(text)
    os.rename("/srv/app/.saved", path)

def told_of(name):
    # the server may be told several times of one change
    while (line := events.readline().decode().strip()) != f"data: {name}":
        assert line.startswith("data: "), line
    return True

def shows(text):
    until = time.monotonic() + 15
    while not (found := get("/page", kept)).startswith(text + " "):
        assert time.monotonic() < until, found
        time.sleep(0.01)
    return True

kept = http.client.HTTPConnection("127.0.0.1", 8080, timeout=15)
stream = http.client.HTTPConnection("127.0.0.1", 8080, timeout=15)
stream.request("GET", "/events")
events = stream.getresponse()
assert told_of("hello")
hashed = hashlib.pbkdf2_hmac("sha256", b"password", b"salt", 1000, 16).hex()
"""

PAGE = 'const part = require("./parts/part.js"); exports.render = () => "{} " + part;'


def start(sandbox: Sandbox) -> tuple[Process, Probe]:
    write = sandbox.files.write_text
    write("/srv/app/server.js", SERVER)
    write("/srv/app/helper.js", HELPER)
    write("/srv/app/worker.js", WORKER)
    write("/srv/app/src/page.js", PAGE.format("first"))
    write("/srv/app/src/parts/part.js", 'module.exports = "part";')
    server = sandbox.spawn(["node", "/srv/app/server.js"])
    assert server.stdout.readline(timeout=20) == "ready\n", server.stderr.read_available()
    probe = Probe.start(sandbox)
    probe.do(CLIENT)
    return server, probe


def test_development_server(sandbox: Sandbox) -> None:
    server, probe = start(sandbox)
    for _ in range(2):
        probe.ask("get('/page', kept)")
        child = probe.ask("get('/child', kept)")
        probe.ask("get('/worker', kept)")
    assert child.endswith(" 4")
    child = child.replace(" 4", " 6")

    def verify(box: Sandbox) -> None:
        inside = probe.within(box)

        def ask(text: str) -> Any:
            return inside.ask(text)

        assert ask("get('/page', kept)") == "first part 3"
        assert ask("get('/child', kept)") == child
        assert ask("get('/worker', kept)") == "27"
        assert ask("get('/pool', kept) == hashed")
        # what is saved is seen, told to who listens, and served
        inside.do(f"save('/srv/app/src/page.js', {PAGE.format('second')!r})")
        assert ask("told_of('page.js')")
        assert ask("shows('second part')")
        inside.do("save('/srv/app/src/parts/part.js', 'module.exports = \"better\";')")
        assert ask("told_of('parts/part.js')")
        assert ask("shows('second better')")
        assert ask("get('/page').startswith('second better ')")
        assert ask("int(get('/file', kept))") == len(PAGE.format("second"))
        copy = box.counterpart(server)
        copy.kill(12)
        assert copy.stdout.readline(timeout=20) == "ticks true\n"

    returns(sandbox, verify)
