"""The example: its stand-in finds the repair, a real model would be asked as its API wants it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from issue import library
from issue.asked import Asked, ModelError
from issue.scripted import EDITS, LOOKS
from solve_issue import KEYS

from deltabox import explore

from .conftest import EXAMPLES

START, STOP = EDITS[4], EDITS[7]
PROGRAM = [sys.executable, str(EXAMPLES / "solve_issue.py")]


def environment(**more: str) -> dict[str, str]:
    """Ours without keys, which would be spent."""
    return {name: value for name, value in os.environ.items() if name not in KEYS} | more


def solve(*options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*PROGRAM, *options],
        env=environment(COLUMNS="120", **variables),
        capture_output=True,
        text=True,
        timeout=100,
    )


def test_the_scripted_model_solves_it(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    done = solve("--scripted", "--think", "0", "--trace", str(trace))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "20 of 33 tests pass before; the model is scripted" in done.stdout
    assert "33 of 33 tests pass" in done.stdout and "Ran 669 tests" in done.stdout
    assert "+            start = self._start + first * self._step" in done.stdout
    began, *events, ended = list(explore.replay(trace))
    assert isinstance(began, explore.Began) and began.strategy == "uct"
    assert isinstance(ended, explore.Ended) and (ended.score, ended.reason) == (1.0, "found")
    stepped = [event for event in events if isinstance(event, explore.Stepped)]
    assert len(stepped) > 10 and min(event.score for event in stepped) <= 0.0


def test_it_is_fetched_once(tmp_path: Path) -> None:
    there = library.fetch(library.default_cache())
    again = tmp_path / there.name
    again.write_bytes(b"kept")
    assert library.fetch(tmp_path) == again and again.read_bytes() == b"kept"


# -- real models -------------------------------------------------------------------------------


@dataclass
class Stub:
    """An API on the loopback: what it was asked, and what it answers: a status and a body."""

    url: str = ""
    asked: list[tuple[str, dict[str, str], Any]] = field(default_factory=list)
    answers: Callable[[int, Any], tuple[int, Any] | None] = lambda count, body: (500, {})
    lock: threading.Lock = field(default_factory=threading.Lock)
    begun: threading.Event = field(default_factory=threading.Event)
    over: threading.Event = field(default_factory=threading.Event)


@pytest.fixture
def stub() -> Iterator[Stub]:
    made = Stub()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            headers = {name.lower(): value for name, value in self.headers.items()}
            with made.lock:
                count = len(made.asked)
                made.asked.append((self.path, headers, body))
            made.begun.set()
            answer = made.answers(count, body)
            if answer is None:
                made.over.wait(60)
                return
            status, said = answer
            encoded = json.dumps(said).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(encoded)))
            self.send_header("retry-after", "0.01")
            self.end_headers()
            self.wfile.write(encoded)

        def log_message(self, format: str, *about: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield made
    made.over.set()
    server.shutdown()
    thread.join()
    server.server_close()


def blocks(*commands: str) -> str:
    return "Let me see.\n" + "\n".join(f"```bash\n{command}\n```" for command in commands)


def next_commands(messages: list[dict[str, Any]]) -> str:
    """What a model says that needs three actions, each among others."""
    done = [message["content"] for message in messages if message["role"] == "assistant"]
    if not done:
        return blocks(LOOKS[0], LOOKS[1])
    if done == [blocks(LOOKS[0]).partition("\n")[2]]:
        assert "def __getitem__" in messages[-1]["content"]
        assert "20 of 33 tests pass" in messages[-1]["content"]
        return blocks("# give up\nfalse", START.command, START.command)
    if START.command in done[-1]:
        assert "exit code 0" in messages[-1]["content"]
        return blocks(STOP.command)
    return "I see nothing to do."


@pytest.mark.full
def test_a_real_model_solves_it(stub: Stub, tmp_path: Path) -> None:
    def answers(count: int, body: Any) -> tuple[int, Any]:
        if count == 0:
            return 529, {"error": "overloaded"}
        text = next_commands(body["messages"])
        return 200, {"content": [{"type": "thinking"}, {"type": "text", "text": text}]}

    stub.answers = answers
    trace = tmp_path / "trace"
    options = ["--url", stub.url, "--model", "some-model", "--trace", str(trace)]
    done = solve(*options, ANTHROPIC_API_KEY="secret-1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the model is some-model" in done.stdout and "solved" in done.stdout
    assert "secret-1" not in done.stdout + done.stderr + trace.read_text()
    for path, headers, body in stub.asked:
        assert path == "/v1/messages"
        assert headers["x-api-key"] == "secret-1" and headers["anthropic-version"]
        assert body["model"] == "some-model" and body["max_tokens"] > 0
        assert "pull request 1128" in body["system"]
        roles = [message["role"] for message in body["messages"]]
        assert roles == ["user", "assistant"] * (len(roles) // 2) + ["user"]


def ask(model: Asked, *told: tuple[str, str], count: int = 5) -> list[str]:
    """What it proposes; the state itself is nothing that it looks at."""
    state: Any = None
    return asyncio.run(model.commands(state, told, count))


def test_anthropic(stub: Stub) -> None:
    parts = [{"type": "thinking", "thinking": "?"}, {"type": "text", "text": blocks("ls -l")}]
    busy, good = (529, {"error": "overloaded"}), (200, {"content": parts})
    stub.answers = lambda count, body: good if count == 2 else busy
    told = (("ls", "exit code 0"), ("cat x", "exit code 1"))
    assert ask(Asked("anthropic", "secret-1", name="m", url=stub.url), *told) == ["ls -l"]
    assert len(stub.asked) == 3
    path, headers, body = stub.asked[-1]
    assert path == "/v1/messages" and headers["x-api-key"] == "secret-1"
    assert headers["anthropic-version"] and body["model"] == "m" and body["max_tokens"] > 0
    assert "pull request 1128" in body["system"]
    said = [(message["role"], message["content"]) for message in body["messages"]]
    assert said[1:3] == [("assistant", "```bash\nls\n```"), ("user", "exit code 0")]
    assert [role for role, _ in said] == ["user", "assistant", "user", "assistant", "user"]


def test_openai(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", f"{stub.url}/v1/")
    text = blocks("# one\nls", "# two\nls", "# one\nls", " ", "# three\nls")
    stub.answers = lambda count, body: (200, {"choices": [{"message": {"content": text}}]})
    found = ask(Asked("openai", "secret-2", name="m"), ("ls", "exit code 0"), count=2)
    assert found == ["# one\nls", "# two\nls"]
    ((path, headers, body),) = stub.asked
    assert path == "/v1/chat/completions" and headers["authorization"] == "Bearer secret-2"
    said = [(message["role"], message["content"]) for message in body["messages"]]
    assert body["model"] == "m" and said[0][0] == "system" and "up to 2 commands" in said[0][1]
    assert said[2:] == [("assistant", "```bash\nls\n```"), ("user", "exit code 0")]


@pytest.mark.parametrize(
    ("api", "status", "body", "said"),
    [
        ("anthropic", 401, {"error": "no"}, "answered 401; is the key right?"),
        ("openai", 404, {"error": "no"}, "is there a model 'm'"),
        ("openai", 503, {"error": "busy"}, "was asked 5 times in vain: .* answered 503"),
        ("anthropic", 200, {"hello": 1}, "something else than the anthropic API does"),
        ("openai", 200, {"choices": []}, "something else than the openai API does"),
    ],
)
def test_what_goes_wrong_is_said(stub: Stub, api: str, status: int, body: Any, said: str) -> None:
    stub.answers = lambda count, asked: (status, body)
    with pytest.raises(ModelError, match=said) as raised:
        ask(Asked(api, "secret-3", name="m", url=stub.url, pause=0.01))
    assert "secret-3" not in str(raised.value)
    assert len(stub.asked) == (5 if status == 503 else 1)


def test_nobody_answers() -> None:
    with socket.socket() as taken:  # bound, and not listened to
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ModelError, match="asked 5 times in vain: ConnectError"):
            ask(Asked("openai", "secret-4", url=url, pause=0.001))


def test_a_refused_key_ends_the_program(stub: Stub, tmp_path: Path) -> None:
    stub.answers = lambda count, asked: (401, {})
    options = ["--url", stub.url, "--model", "m", "--trace", str(tmp_path / "trace")]
    done = solve(*options, ANTHROPIC_API_KEY="secret-5")
    assert done.returncode == 1 and "is the key right?" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr and "secret-5" not in done.stderr


def test_without_a_key() -> None:
    done = solve("--model", "some-model")
    assert done.returncode == 2
    assert "ANTHROPIC_API_KEY or OPENAI_API_KEY" in done.stderr and "--scripted" in done.stderr


def test_ctrl_c_while_the_model_thinks(stub: Stub, tmp_path: Path) -> None:
    """A model that does not answer is not waited for; the trace can be read."""
    stub.answers = lambda count, body: None
    trace = tmp_path / "trace"
    options = ["--url", stub.url, "--model", "m", "--trace", str(trace)]
    running = subprocess.Popen(
        [*PROGRAM, *options],
        env=environment(ANTHROPIC_API_KEY="secret-6"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert stub.begun.wait(60)
        running.send_signal(signal.SIGINT)
        out, errors = running.communicate(timeout=20)
    finally:
        running.kill()
        running.wait()
    assert running.returncode == 130, errors
    assert "deltabox trace" in out and "Traceback" not in errors
    assert isinstance(next(iter(explore.replay(trace))), explore.Began)
