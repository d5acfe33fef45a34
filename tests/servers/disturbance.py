"""Checkpoints and rollbacks in the midst of work that should not notice them."""

from __future__ import annotations

import re
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Final

from deltabox import CommandTimeout, Process, Sandbox, UnsupportedState

APART, ROLLBACKS_APART = 2.0, 10.0  # seconds
_NUMBER: Final = re.compile(r"\d+")


@dataclass
class Disturbance:
    checkpoints: int = 0
    rollbacks: int = 0
    refused: Counter[str] = field(default_factory=Counter)  # checkpoints, by what they said


def disturb(sandbox: Sandbox, work: Process) -> Disturbance:
    """A checkpoint every two seconds and a rollback to it every ten, until `work` has ended."""
    done = Disturbance()
    latest = sandbox.checkpoint()
    used = False  # or it would stand still where many checkpoints are refused
    due = time.monotonic() + ROLLBACKS_APART
    while True:
        try:
            work.wait(timeout=APART)
        except CommandTimeout:
            pass
        else:
            return done
        if time.monotonic() >= due and not used:
            sandbox.rollback(latest)
            used = True
            done.rollbacks += 1
            due = time.monotonic() + ROLLBACKS_APART
            continue
        try:
            taken = sandbox.checkpoint()
        except UnsupportedState as refusal:
            done.refused[_NUMBER.sub("N", str(refusal))] += 1
        else:
            latest.delete()
            latest, used = taken, False
            done.checkpoints += 1
