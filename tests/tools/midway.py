"""A program that works for some moments, gone back to from its middle again and again.

Checkpoints are taken at several instants of one run. From each the program must come to the same
end: in the sandbox itself, after it went on for some time or to its end, and in forks.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence

from deltabox import Checkpoint, Process, Sandbox

PROMPT = 60  # seconds for what takes a few, however loaded the machine

Outcome = tuple[int, str, str]
Read = Callable[[Sandbox, Process], Outcome]


def ended(sandbox: Sandbox, process: Process) -> Outcome:
    """How it ended, with what it printed."""
    code = process.wait(timeout=PROMPT)
    return code, process.stdout.read(timeout=10), process.stderr.read(timeout=10)


def check(
    sandbox: Sandbox,
    command: Sequence[str],
    result: str,
    *,
    cwd: str,
    read: Read = ended,
    expected: str | None = None,
    rollbacks: int = 10,
    forks: int = 4,
    instants: int = 3,
) -> None:
    """`result` is a shell command inside whose output tells that all is right, and is the same.

    The first run, in a fork, tells how long it takes and what has to come out.
    """

    def outcome(box: Sandbox, process: Process) -> tuple[Outcome, str]:
        how = read(box, process)
        return how, box.run(["bash", "-c", result], cwd=cwd, check=True, timeout=PROMPT).stdout

    with sandbox.fork() as calm:
        began = time.monotonic()
        process = calm.spawn(command, cwd=cwd)
        process.wait(timeout=PROMPT)
        takes = time.monotonic() - began
        right = outcome(calm, process)
    assert right[0][0] == 0, right
    assert expected is None or expected in right[1], right

    chance = random.Random(repr(command))
    process = sandbox.spawn(command, cwd=cwd)
    kept: list[Checkpoint] = []
    while len(kept) < instants:
        time.sleep(chance.random() * takes / instants)
        made = sandbox.checkpoint()
        if process.exit_code is not None:
            made.delete()
            break
        kept.append(made)
    assert kept, "it had ended before the first checkpoint"
    assert outcome(sandbox, process) == right, "after the checkpoints"
    for turn in range(rollbacks):
        sandbox.rollback(chance.choice(kept))
        if turn % 3 == 0:  # a rollback of what has just been rolled back, and is under way
            time.sleep(chance.random() * takes)
            sandbox.rollback(chance.choice(kept))
        assert outcome(sandbox, process) == right, f"after {turn + 1} rollbacks"
    copies = sandbox.fork_many(forks, at=chance.choice(kept))
    for copy in copies:
        with copy:
            assert outcome(copy, copy.counterpart(process)) == right, "in a fork"
