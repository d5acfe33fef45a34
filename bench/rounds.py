"""One point of a curve: the same round again and again, on a state of a given size.

A round changes something, waits as an agent thinks, takes a checkpoint, changes it again (the
wrong branch), waits, rolls back, hears from the program, and checks that what came back is what
had been saved. A command of the sandbox ends before each wait, as it does when an agent works:
that is when the engine may begin to work ahead.

The first round is not recorded, because the first checkpoint of a sandbox has everything to do;
nor is the last one, which compares the whole state instead of the part that had changed. A point
ends early, but not before some rounds, when it has taken longer than it may: slow points say so
by their n.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from puppet import Puppet
from report import Recorder, Wrong
from standard import IDLE, create, forget, has_standby

from deltabox import Checkpoint, Sandbox

LEAST = 5

# what is added to a figure's name, and the switch
VARIANTS = [("", True), (", without a standby", False)] if has_standby else [("", True)]


@dataclass(frozen=True)
class Load:
    """What a puppet holds and does, as expressions; `{n}` is the number of the change."""

    setup: str | None
    change: str
    check: str  # its value is the number last told
    whole: str | None = None  # its value is the same whenever everything is


@dataclass
class Point:
    """The rounds of one x. Figures are named `CURVE: checkpoint pause`, `CURVE: rollback`, ..."""

    recorder: Recorder
    curve: str
    x: float
    rounds: int
    patience: float = 20.0  # seconds
    suffix: str = ""

    def record(self, name: str, milliseconds: float) -> None:
        self.recorder.add(f"{self.curve}: {name}{self.suffix}", milliseconds, x=self.x)

    def run(self, load: Load, *, standby: bool = True) -> None:
        with create(standby=standby) as sandbox:
            puppet = Puppet.start(sandbox)
            if load.setup is not None:
                puppet.ask(load.setup)
            self.measure(sandbox, puppet, load)

    def measure(self, sandbox: Sandbox, puppet: Puppet, load: Load) -> None:
        number = 0
        began = 0.0
        for turn in range(self.rounds + 1):
            number += 1
            self._round(sandbox, puppet, load, number, record=turn > 0)
            if turn == 0:
                began = time.monotonic()
            elif turn >= LEAST and time.monotonic() - began > self.patience:
                break
        self._round(sandbox, puppet, load, number + 1, record=False, whole=True)

    def line(self, sandbox: Sandbox, puppet: Puppet, load: Load, *, suffix: str) -> None:
        """Checkpoints alone, one after the other as long as the agent likes what he sees; at the
        end a rollback to one of them, to see that it holds what it should.
        """
        began = time.monotonic()
        for turn in range(1, self.rounds + 1):
            number = 1000 + turn  # as nothing else has
            puppet.expect(load.change.format(n=number), number)
            think(sandbox)
            checkpoint, call = timed(sandbox)
            self.record(f"checkpoint call{suffix}", call)
            self.record(f"checkpoint pause{suffix}", checkpoint.stats.pause_ms)
            forget(sandbox)
            if turn >= LEAST and time.monotonic() - began > self.patience:
                break
        puppet.expect(load.change.format(n=2000), 2000)
        sandbox.rollback(checkpoint)
        puppet.expect(load.check, number)

    def _round(
        self,
        sandbox: Sandbox,
        puppet: Puppet,
        load: Load,
        number: int,
        *,
        record: bool,
        whole: bool = False,
    ) -> None:
        puppet.expect(load.change.format(n=2 * number), 2 * number)
        everything = puppet.ask(load.whole) if whole and load.whole else ""
        think(sandbox)
        began = time.perf_counter()
        checkpoint = sandbox.checkpoint()
        called = time.perf_counter()
        puppet.expect(load.change.format(n=2 * number + 1), 2 * number + 1)
        think(sandbox)
        left = time.perf_counter()
        sandbox.rollback(checkpoint)
        back = time.perf_counter()
        answer = puppet.ask("number")
        answered = time.perf_counter()
        if answer != str(2 * number):
            raise Wrong(f"{answer} came back, not {2 * number}")
        puppet.expect(load.check, 2 * number)
        if everything and puppet.ask(load.whole or "") != everything:
            raise Wrong(f"{load.whole} is another after the rollback")
        if record:
            self.record("checkpoint call", (called - began) * 1e3)
            self.record("checkpoint pause", checkpoint.stats.pause_ms)
            self.record("rollback", (back - left) * 1e3)
            self.record("first result", (answered - left) * 1e3)
        forget(sandbox)


def think(sandbox: Sandbox) -> None:
    """A command ends, and nothing is asked for a while."""
    sandbox.run("true", timeout=10)
    time.sleep(IDLE)


def timed(sandbox: Sandbox) -> tuple[Checkpoint, float]:
    """A checkpoint and how long the call took, milliseconds."""
    began = time.perf_counter()
    checkpoint = sandbox.checkpoint()
    return checkpoint, (time.perf_counter() - began) * 1e3
