"""A program that works by itself while it is checkpointed, gone back to and copied.

Its `report` tells what changes only when it is asked to, so it is the same after every return. What
goes on by itself cannot be compared like that: the program looks after that from inside, by sums
that hold at any instant, and reports only once everything has moved on without one being broken.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from deltabox import Process, Sandbox

PROMPT = 60  # seconds for what takes one, however loaded the machine


@dataclass(frozen=True)
class Program:
    """A program inside that answers each line it is sent with one."""

    process: Process

    def ask(self, words: str) -> str:
        self.process.stdin.write(words + "\n")
        answer = self.process.stdout.readline(timeout=PROMPT)
        assert answer, f"no answer to {words!r}: {self.process.stderr.read_available()}"
        return answer.rstrip("\n")

    def within(self, sandbox: Sandbox) -> Program:
        return Program(sandbox.counterpart(self.process))

    def end(self, sandbox: Sandbox) -> None:
        """Have it come to its own end, which it does well only if all of it is still there."""
        copy = sandbox.counterpart(self.process)
        copy.stdin.write("end\n")
        assert copy.wait(timeout=PROMPT) == 0, copy.stderr.read_available()
        assert copy.stderr.read(timeout=PROMPT) == ""


def check(
    sandbox: Sandbox,
    report: Callable[[Sandbox], object],
    change: Callable[[Sandbox, int], None],
    end: Callable[[Sandbox], None],
    *,
    rollbacks: int = 20,
    forks: int = 4,
) -> None:
    """`change` takes a number, and makes something else of the program with each."""
    before = report(sandbox)
    checkpoint = sandbox.checkpoint()
    assert report(sandbox) == before, "the checkpoint itself was noticed"
    for turn in range(rollbacks):
        change(sandbox, turn)
        if turn % 3 == 0:
            assert report(sandbox) != before, "the change changes nothing: the test is void"
        if turn % 5 == 4:
            end(sandbox)
        sandbox.rollback(checkpoint)
        assert report(sandbox) == before, f"rollback {turn + 1}"

    with ExitStack() as living:
        copies = sandbox.fork_many(forks, at=checkpoint)
        for copy in copies:
            living.enter_context(copy)
        for copy in copies:
            assert report(copy) == before, "in a fork"
        for number, copy in enumerate(copies):
            change(copy, number)
        came = [report(copy) for copy in copies]
        for number, one in enumerate(came):
            assert one not in [before, *came[:number]], "two forks have become the same"
        assert report(sandbox) == before, "what forks do shows in their origin"

        parent = copies[0]
        grandchild = living.enter_context(parent.fork())
        assert report(grandchild) == came[0], "a fork of a fork"
        change(grandchild, forks)
        assert report(grandchild) not in [before, *came]
        assert report(parent) == came[0], "what a fork's fork does shows in the fork"
        for copy in [grandchild, *copies]:
            end(copy)

    again = sandbox.checkpoint()
    change(sandbox, 0)
    sandbox.rollback(again)
    assert report(sandbox) == before, "a checkpoint of a rolled-back state"
    end(sandbox)
