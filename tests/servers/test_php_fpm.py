"""PHP-FPM: a master, workers that share compiled scripts and a scoreboard, requests half done."""

from __future__ import annotations

from typing import Any

import pytest

from deltabox import Process, Sandbox

from ..probe import Probe
from . import lives

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]

WORKERS = 5
CONFIGURATION = f"""
[global]
error_log = /srv/php/log
daemonize = no
[www]
user = www-data
group = www-data
listen = 127.0.0.1:9000
pm = static
pm.max_children = {WORKERS}
pm.status_path = /status
clear_env = yes
php_admin_value[error_log] = /srv/php/errors
php_admin_value[session.save_path] = /srv/php/sessions
"""
# scripts are compiled once for all workers, also into machine code, and again when they change
SETTINGS = {
    "opcache.enable": "1",
    "opcache.memory_consumption": "64",
    "opcache.jit": "tracing",
    "opcache.jit_buffer_size": "16M",
    "opcache.jit_hot_loop": "8",
    "opcache.validate_timestamps": "1",
    "opcache.revalidate_freq": "0",
    "opcache.file_update_protection": "0",
    "session.use_cookies": "0",
    "session.use_only_cookies": "0",
}
PAGE = """<?php
// all workers count in one file, under a lock
$file = fopen("/srv/php/www/count", "c+");
flock($file, LOCK_EX);
$count = (int) stream_get_contents($file) + (int) file_get_contents("php://input");
rewind($file);
ftruncate($file, 0);
fwrite($file, (string) $count);
flock($file, LOCK_UN);
echo PART, " ", $count;
"""
PART = "<?php const PART = '{}';"
SUM = """<?php
// a loop that is compiled to machine code soon
function step(int $n): int { return ($n * 1103515245 + 12345) & 0x7fffffff; }
$n = 1;
for ($i = 0; $i < 200000; $i++) $n = step($n);
echo $n;
"""
CACHE = """<?php
$status = opcache_get_status(true);
$scripts = array_map("basename", array_column($status["scripts"], "full_path"));
sort($scripts);
echo json_encode([$scripts, $status["jit"]["on"], $status["cache_full"]]);
"""
# holds its session's lock until it is told to go on, in the middle of its answer
SLOW = """<?php
session_id("shared");
session_start();
$_SESSION["seen"] = ($_SESSION["seen"] ?? 0) + 1;
echo "begun ";
ob_flush();
flush();
$said = fgets(fopen("/srv/php/www/fifo", "r"));
$_SESSION["said"] = $said;
echo $_SESSION["seen"], " ", $said;
"""
# waits for the lock of the session that the one above holds
NEXT = """<?php
session_id("shared");
session_start();
echo ++$_SESSION["seen"], " ", $_SESSION["said"];
"""

_SUM = 1
for _ in range(200_000):
    _SUM = (_SUM * 1103515245 + 12345) & 0x7FFFFFFF

CLIENT = """
import os, socket

def record(kind, content):
    return struct.pack(">BBHHBx", 1, kind, 1, len(content), 0) + content

def pair(name, value):
    name, value = name.encode(), value.encode()
    lengths = [bytes([len(one)]) if len(one) < 128 else struct.pack(">I", len(one) | 1 << 31)
               for one in (name, value)]
    return b"".join(lengths) + name + value

class Asked:
    def __init__(self, script, body="", query=""):
        # its own count of requests is as old as the server's is
        global sent
        sent += 1
        until = time.monotonic() + 15
        while True:
            try:
                self.socket = socket.create_connection(("127.0.0.1", 9000), timeout=50)
                break
            except ConnectionRefusedError:
                assert time.monotonic() < until
                time.sleep(0.01)
        path = script if script == "/status" else "/srv/php/www" + script
        facts = dict(SCRIPT_FILENAME=path, SCRIPT_NAME=script, QUERY_STRING=query,
                     REQUEST_METHOD="POST", CONTENT_LENGTH=str(len(body)),
                     CONTENT_TYPE="text/plain", REQUEST_URI=script)
        begin = record(1, struct.pack(">HB5x", 1, 0))
        named = b"".join(pair(*fact) for fact in facts.items())
        self.socket.sendall(begin + record(4, named) + record(4, b""))
        self.socket.sendall(record(5, body.encode()) * bool(body) + record(5, b""))
        self.file = self.socket.makefile("rb")
        self.said = b""
    def more(self):
        # False at the end
        kind, _, size, padding = struct.unpack(">xBHHBx", self.file.read(8))
        content = self.file.read(size + padding)[:size]
        assert kind in (3, 6), (kind, content)
        self.said += content if kind == 6 else b""
        if kind == 3:
            assert self.file.read() == b""
            self.socket.close()
        return kind == 6
    def text(self):
        return self.said.partition(b"\\r\\n\\r\\n")[2].decode()
    def whole(self):
        while self.more():
            pass
        return self.text()

def ask(*words):
    return Asked(*words).whole()

def workers():
    return sorted(int(n) for n in open(f"/proc/{master}/task/{master}/children").read().split())

def calls():
    # what each worker does in the kernel
    return [open(f"/proc/{pid}/syscall").read().split()[0] for pid in workers()]

def until_true(condition):
    end = time.monotonic() + 50
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)

sent = 0
"""

REPORT = """
status = json.loads(ask("/status", "", "json"))
found = [
    json.loads(ask("/cache.php")), ask("/page.php", "0"), ask("/sum.php"), workers(),
    # as many as were sent, whoever has answered them; none of them again
    status["accepted conn"] - (sent - 3), status["total processes"],
    status["max children reached"],
    [open(f"/proc/{pid}/comm").read() for pid in workers()],
    os.stat("/srv/php/www/part.php").st_mtime_ns,
]
"""


def start(sandbox: Sandbox) -> tuple[Process, Probe]:
    write = sandbox.files.write_text
    write("/srv/php/conf", CONFIGURATION)
    for name, text in (("page", "<?php require __DIR__ . '/part.php';" + PAGE[5:]), ("sum", SUM)):
        write(f"/srv/php/www/{name}.php", text)
    for name, text in (("cache", CACHE), ("slow", SLOW), ("next", NEXT)):
        write(f"/srv/php/www/{name}.php", text)
    write("/srv/php/www/part.php", PART.format("first"))
    sandbox.run(
        "mkdir /srv/php/sessions; mkfifo /srv/php/www/fifo; chown -R www-data /srv/php", check=True
    )
    options = [word for setting in SETTINGS.items() for word in ("-d", "=".join(setting))]
    master = sandbox.spawn(["php-fpm8.2", "-y", "/srv/php/conf", *options])
    probe = Probe.start(sandbox)
    probe.do(f"master = {master.pid}\n{CLIENT}")
    for _ in range(3 * WORKERS):  # so that all have been used
        assert probe.ask("ask('/page.php', '1')").startswith("first ")
        assert probe.ask("ask('/sum.php')") == str(_SUM)
    # one request is in the middle of its answer, another waits for its session
    probe.do("slow = Asked('/slow.php')\nwhile slow.text() != 'begun ': assert slow.more()")
    probe.do("later = Asked('/next.php')")
    probe.do("until_true(lambda: '73' in calls())  # flock(2)")
    return master, probe


def test_workers(sandbox: Sandbox) -> None:
    master, probe = start(sandbox)

    def report(box: Sandbox) -> Any:
        inside = probe.within(box)
        inside.do(REPORT)
        found = inside.ask("found")
        assert "page.php" in found[0][0] and found[0][1:] == [True, False], found
        assert len(found[3]) == WORKERS
        return found

    def change(box: Sandbox, number: int) -> None:
        inside = probe.within(box)
        said = inside.ask("ask('/page.php', '0')")
        part, count = said.split()
        assert (
            inside.ask(f"ask('/page.php', '{number + 1}')") == f"{part} {int(count) + number + 1}"
        )
        # another script in the place of one that is compiled; the cache goes by whole seconds
        inside.do(
            f"open('/srv/php/www/part.php', 'w').write({PART.format(f'part{number}')!r})\n"
            f"os.utime('/srv/php/www/part.php', (0, {1_000_000 + number}))"
        )
        assert inside.ask("ask('/page.php', '0')") == f"part{number} {int(count) + number + 1}"
        if inside.ask("slow is not None"):
            inside.do(f"open('/srv/php/www/fifo', 'w').write('go {number}')")
            assert inside.ask("slow.whole()") == f"begun 1 go {number}"
            assert inside.ask("later.whole()") == f"2 go {number}"
            inside.do("slow = later = None")
        if number % 3 == 0:  # a worker ends, and the master starts another
            inside.do("old = workers(); os.kill(old[0], 15)")
            inside.do(f"until_true(lambda: len(set(workers()) - {{old[0]}}) == {WORKERS})")
        assert inside.ask("ask('/sum.php')") == str(_SUM)

    def end(box: Sandbox) -> None:
        process = box.counterpart(master)
        process.kill(15)
        assert process.wait(timeout=lives.PROMPT) == 0

    lives.check(sandbox, report, change, end)
