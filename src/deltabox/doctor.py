"""Can the engine run here, and if not, why: `deltabox doctor` and the guard of `Sandbox.create`.

The answer comes from trying each feature (`linux.features`), never from a version number. One
table, `FEATURES` of host.py, says for each what it is for, how to get it and what works without
it; the command line, the JSON form and docs/support.md are views of it.

Two speeds. `blockers()` is for `Sandbox.create()`: it runs in the caller's own process, so it
must not fork and must be quick; it makes only calls which have no side effect (~1 ms) and keeps
the answer. `examine()` tries everything for real, in children and scratch mounts.

The conditions of the host (root, capabilities, architecture) come first. Without them most
features would fail for that one reason, so the others are then reported as not tried.
"""

from __future__ import annotations

import errno
import functools
from dataclasses import dataclass

from .host import FEATURES as FEATURES
from .host import Feature
from .linux.features import ProbeFailed

_CONDITIONS = frozenset(feature.name for feature in FEATURES if feature.condition)


@dataclass(frozen=True)
class Finding:
    """What became of one feature on this host; `present` is None when it was not tried."""

    name: str
    purpose: str
    present: bool | None
    required: bool
    remark: str
    remedy: str
    without: str

    @property
    def blocks(self) -> bool:
        return self.required and self.present is False

    @property
    def sentence(self) -> str:
        """Why the engine cannot run, when this finding is what stops it."""
        if self.name in _CONDITIONS:
            return self.remark
        return (
            f"The kernel or host lacks {self.name} ({self.purpose}): {self.remark}. {self.remedy}"
        )


def _find(feature: Feature) -> Finding:
    present: bool | None = True
    try:
        remark = feature.probe() or ""
    except ProbeFailed as error:
        present, remark = False, str(error)
    except OSError as error:
        present, remark = False, _explain(error)
    return Finding(
        name=feature.name,
        purpose=feature.purpose,
        present=present,
        required=feature.required,
        remark=remark,
        remedy=feature.remedy,
        without=feature.without,
    )


def _explain(error: OSError) -> str:
    symbol = errno.errorcode.get(error.errno or 0, "?")
    text = error.strerror or str(error)
    return f"{text} ({symbol})"


def _not_tried(feature: Feature) -> Finding:
    return Finding(
        name=feature.name,
        purpose=feature.purpose,
        present=None,
        required=feature.required,
        remark="not tried",
        remedy=feature.remedy,
        without=feature.without,
    )


def _examine(features: tuple[Feature, ...]) -> list[Finding]:
    conditions = [feature for feature in features if feature.condition]
    found = {feature.name: _find(feature) for feature in conditions}
    usable = not any(finding.blocks for finding in found.values())
    for feature in features:
        if not feature.condition:
            found[feature.name] = _find(feature) if usable else _not_tried(feature)
    return list(found.values())


def examine() -> list[Finding]:
    """Try every feature for real (~0.3 s). Leaves nothing behind."""
    return _examine(FEATURES)


def sentences(findings: list[Finding]) -> list[str]:
    """Why the engine cannot run, one sentence a reason; empty when it can."""
    return [finding.sentence for finding in findings if finding.blocks]


@functools.cache
def _quick_blockers() -> tuple[str, ...]:
    return tuple(sentences(_examine(tuple(feature for feature in FEATURES if feature.quick))))


def blockers() -> list[str]:
    """The sentences why the engine cannot run here, from the checks that are quick.

    Does not fork, changes nothing, takes about a millisecond the first time and nothing after.
    """
    return list(_quick_blockers())
