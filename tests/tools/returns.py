"""What every tool must survive: many returns to one checkpoint, in place and in forks."""

from __future__ import annotations

from collections.abc import Callable

from deltabox import Sandbox


def returns(
    sandbox: Sandbox,
    verify: Callable[[Sandbox], None],
    *,
    rollbacks: int = 10,
    forks: int = 4,
) -> None:
    """Take a checkpoint; `verify` after it and after each return to it.

    `verify` looks from inside whether everything is as at the checkpoint, and then has the tool go
    on in a way that the next look would notice if it were not undone.
    """
    checkpoint = sandbox.checkpoint()
    verify(sandbox)
    for _ in range(rollbacks):
        sandbox.rollback(checkpoint)
        verify(sandbox)
    for fork in sandbox.fork_many(forks, at=checkpoint):
        with fork:
            verify(fork)
    sandbox.rollback(checkpoint)
    with sandbox.fork() as fork, fork.fork() as grandchild:
        verify(grandchild)
        verify(fork)
    verify(sandbox)
