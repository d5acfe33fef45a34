"""A real program inside a sandbox that sets some state up and reports it from inside.

`check` takes it through what every kind of state must survive: a checkpoint that it does not
notice, ten rollbacks with changes in between, three forks, and a checkpoint of a rolled-back
state with a fork of a fork.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from deltabox import Process, Sandbox

_DRIVER = """
import ctypes, fcntl, json, mmap, os, resource, select, signal, struct, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
scope = globals()
for line in sys.stdin:
    kind, text = json.loads(line)
    try:
        if kind == "do":
            exec(text, scope)
            answer = None
        else:
            answer = eval(text, scope)
        print(json.dumps(["ok", answer]), flush=True)
    except BaseException as error:
        print(json.dumps(["error", repr(error)]), flush=True)
"""


@dataclass
class Probe:
    """A python driver inside `sandbox`; its handle can be exchanged for a fork's copy."""

    sandbox: Sandbox
    process: Process

    @classmethod
    def start(
        cls,
        sandbox: Sandbox,
        *,
        user: str | None = None,
        python: str = "python3",
        env: dict[str, str] | None = None,
    ) -> Probe:
        return cls(sandbox, sandbox.spawn([python, "-c", _DRIVER], user=user, env=env))

    def _exchange(self, kind: str, text: str) -> Any:
        self.process.stdin.write(json.dumps([kind, text]) + "\n")
        line = self.process.stdout.readline(timeout=20)
        if not line:
            raise AssertionError(f"the probe died: {self.process.stderr.read_available()}")
        status, answer = json.loads(line)
        assert status == "ok", answer
        return answer

    def do(self, text: str) -> None:
        self._exchange("do", text)

    def ask(self, text: str) -> Any:
        return self._exchange("ask", text)

    def within(self, fork: Sandbox) -> Probe:
        return Probe(fork, fork.counterpart(self.process))


def check(
    sandbox: Sandbox,
    *,
    setup: str,
    report: str,
    change: str,
    rollbacks: int = 10,
    forks: int = 3,
    user: str | None = None,
) -> None:
    """`report` must give the same answer after every return to the checkpoint."""
    probe = Probe.start(sandbox, user=user)
    probe.do(setup)
    before = probe.ask(report)
    checkpoint = sandbox.checkpoint()
    after = probe.ask(report)
    assert after == before, "the checkpoint itself was noticed"
    for turn in range(rollbacks):
        probe.do(change)
        assert probe.ask(report) != before, "the change changes nothing: the test is void"
        sandbox.rollback(checkpoint)
        after = probe.ask(report)
        assert after == before, f"rollback {turn + 1}"
    for fork in sandbox.fork_many(forks, at=checkpoint):
        with fork:
            copy = probe.within(fork)
            after = copy.ask(report)
            assert after == before, "in a fork"
            copy.do(change)
            assert probe.ask(report) == before, "a fork's change shows in its origin"
    again = sandbox.checkpoint()
    probe.do(change)
    sandbox.rollback(again)
    assert probe.ask(report) == before, "a checkpoint of a rolled-back state"
    with sandbox.fork(at=again) as child, child.fork() as grandchild:
        assert probe.within(grandchild).ask(report) == before, "a fork of a fork"
