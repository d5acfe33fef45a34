"""A busy machine, checkpointed at random instants and rolled back at later ones, ends as if nothing
had happened.

The work compiles, installs, tests, pipes and calls a server, all at the same time; what it prints
must be the very same as without us. Each storm is told by its seed, which it prints: `STORM_SEED`
repeats it (the instants themselves are as random as the machine is).

Nothing in it may give up by the clock, which runs on: so boltons' netstring tests, with timeouts of
10 ms, are left out.
"""

from __future__ import annotations

import difflib
import os
import random
import time
from collections import Counter

import pytest

from deltabox import Checkpoint, Process, Sandbox, UnsupportedState

from . import workload

_WORK = r"""
set -eEu -o pipefail
trap 'echo "line $LINENO: $BASH_COMMAND: $?" >&2' ERR
cd /root/work

build() {
  make -s -C project clean
  make -s -j2 -C project
  project/program
}
install() {
  venv/bin/pip install -q --no-index --no-build-isolation --disable-pip-version-check \
    packages/made-$1.0.tar.gz packages/wheeled-$1.0-py3-none-any.whl
  venv/bin/python -c 'import made, wheeled
print(made.VERSION, made.TOTAL, wheeled.VERSION, wheeled.TOTAL)'
}
check() {
  (cd boltons; PYTHONPATH=../site python3 -m pytest -q -p no:cacheprovider -c tox.ini --color=no \
    -k "not netstring" --deselect tests/test_setutils.py \
    tests/test_[a-d]*.py tests/test_[l-z]*.py) | sed 's/ in [0-9.]*s.*//'
}
pipe() {
  seq 1 20000 | sort -r | awk '{ s += $1 } NR <= 3 { print } END { print s }'
  tar cf - boltons/boltons/*.py site/_pytest/*.py |
    tee >(cat >/dev/null) | tar tf - | sort | md5sum
  find boltons/boltons -name '*.py' | sort | xargs -P2 -n3 sha256sum | sort | sha256sum
  for n in 1 2 3; do (sleep 0.01; echo $n >after.$n) & done; wait
  cat after.?
  rm after.?
}
ask() {
  python3 calls.py
  python3 -c "
import subprocess, threading
def ask(n):
    print(subprocess.check_output(['sh', '-c', f'sleep 0.0{n}; echo {n} {n}'], text=True), end='')
for n in range(4):
    one = threading.Thread(target=ask, args=(n,)); one.start(); one.join()"
}
running=()
for part in build install check pipe ask; do
  (for round in 1 2; do $part $round; done) >$part.out &
  running+=($!)
done
for one in ${running[@]}; do wait $one; done
for part in build install check pipe ask; do cat $part.out; done
echo done
"""
_CALLS = """
import http.client, http.server, threading, urllib.request
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'
    def do_POST(self):
        content = self.rfile.read(int(self.headers['Content-Length']))[::-1]
        self.send_response(200)
        self.send_header('Content-Length', str(len(content)))
        self.end_headers()
        self.wfile.write(content)
    def log_message(self, *words):
        pass
server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler)
url = 'http://127.0.0.1:%d/' % server.server_port
threading.Thread(target=server.serve_forever, daemon=True).start()
def kept(n):
    client = http.client.HTTPConnection(*server.server_address)
    for turn in range(100):
        client.request('POST', '/', bytes([n]) * (n * turn * 10) + b'end')
        got[n] += len(client.getresponse().read())
    client.close()
def anew(n):
    for turn in range(50):
        with urllib.request.urlopen(url, b'x' * n) as answer:
            got[n] += len(answer.read())
got = [0] * 6
callers = [threading.Thread(target=(kept, anew)[n % 2], args=(n,)) for n in range(6)]
for caller in callers: caller.start()
for caller in callers: caller.join()
print(got)
"""
_PROMPT = 120  # seconds for work that takes some ten, however loaded the machine
_APART = 0.1  # seconds between two instants, at most
_KEPT = 4  # checkpoints
_REFUSALS = 10  # of a hundred instants, at most this many


def _prepared(sandbox: Sandbox) -> None:
    home = workload.HOME
    workload.library_and_pytest(sandbox, home)
    workload.virtual_environment(sandbox, f"{home}/venv")
    workload.c_project(sandbox, f"{home}/project", files=6, functions=20)
    for version in ("1.0", "2.0"):
        made, wheeled = workload.source("made", version, 5), workload.wheel("wheeled", version, 60)
        workload.packages(sandbox, f"{home}/packages", made, wheeled)
    sandbox.files.write_text(f"{home}/work.sh", _WORK)
    sandbox.files.write_text(f"{home}/calls.py", _CALLS)


def _hanging(sandbox: Sandbox) -> str:
    """Who waits in what."""
    look = r"""
ps -eo pid,ppid,pgid,sid,stat,wchan:30,args
for process in /proc/[0-9]*; do
  for thread in $process/task/*; do
    echo "$thread $(cat $thread/comm): $(cat $thread/wchan) $(cat $thread/syscall)"
    grep -E '^(Sig|Shd)(Pnd|Blk|Ign)' $thread/status | xargs
  done
  ls -l $process/fd | sed 's/.* \([0-9]* -> \)/\1/'
done"""
    return sandbox.run(["bash", "-c", look], timeout=20).stdout


def _start(sandbox: Sandbox) -> Process:
    return sandbox.spawn(["bash", f"{workload.HOME}/work.sh"])


def _end(sandbox: Sandbox, work: Process) -> tuple[int, str, str]:
    try:
        code = work.wait(timeout=_PROMPT)
    except TimeoutError:
        pytest.fail(f"the work hangs:\n{_hanging(sandbox)}")
    return code, work.stdout.read(timeout=10), work.stderr.read(timeout=10)


def _compare(found: tuple[int, str, str], expected: tuple[int, str, str], done: int) -> None:
    if found == expected:
        return
    (code, out, error), (_, right, _) = found, expected
    lines = difflib.unified_diff(right.splitlines(), out.splitlines(), "expected", "found", n=1)
    differ = "\n".join(lines)
    pytest.fail(f"after {done} rollbacks it ended with {code}, with output\n{differ}\n{error}")


def _storm(sandbox: Sandbox, rollbacks: int) -> None:
    seed = int(os.environ.get("STORM_SEED", random.randrange(1 << 32)))
    print(f"STORM_SEED={seed}")
    chance = random.Random(seed)
    _prepared(sandbox)
    with sandbox.fork() as calm:
        expected = _end(calm, _start(calm))
    assert expected[0] == 0 and expected[1].endswith("done\n") and not expected[2], expected

    work = _start(sandbox)
    since = time.monotonic()
    refused: Counter[str] = Counter()
    kept: list[Checkpoint] = []
    done = ended = 0
    while done < rollbacks:
        time.sleep(chance.random() * _APART)
        if work.exit_code is not None:
            _compare(_end(sandbox, work), expected, done)
            ended += 1
            while kept:
                kept.pop().delete()
            work = _start(sandbox)
            since = time.monotonic()
        try:
            kept.append(sandbox.checkpoint())
        except UnsupportedState as refusal:
            refused[str(refusal)] += 1
            continue
        if len(kept) > _KEPT:
            kept.pop(0).delete()
        for _ in range(min(chance.choice((1, 1, 2)), rollbacks - done)):
            time.sleep(chance.random() * _APART)
            # mostly to the last; else further back, or on to a state that was left
            sandbox.rollback(kept[-1] if chance.random() < 0.7 else chance.choice(kept))
            done += 1
        if time.monotonic() - since > 4 * _PROMPT:
            pytest.fail(f"the work does not get on after {done} rollbacks:\n{_hanging(sandbox)}")
    _compare(_end(sandbox, work), expected, done)
    print(f"{done} rollbacks, {ended + 1} times the work; refused: {dict(refused)}")
    assert refused.total() * 100 <= _REFUSALS * rollbacks


@pytest.mark.timeout(300)
def test_thirty_rollbacks(sandbox: Sandbox) -> None:
    _storm(sandbox, 30)


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_three_hundred_rollbacks(sandbox: Sandbox) -> None:
    _storm(sandbox, 300)
