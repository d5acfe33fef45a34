"""Checkpoints as the keeper knows them, and what is made from one."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

from ..deltacr.engine import Live, Template
from ..deltafs.layers import Layer, Snapshot
from .box import Saved
from .handles import Handle
from .identity import Registrations


@dataclass(frozen=True)
class Spare:
    """A writable copy of a checkpoint's files, mounted (detached) and waiting to be used."""

    layer: Layer
    mount: int
    world: Live | None = None  # a first process that has it for its root


@dataclass
class State:
    """Files and processes of one instant, which one or more checkpoints stand for."""

    snapshot: Snapshot
    template: Template
    nodes: int = 0  # how many; guarded by the tree's lock
    freed: bool = False  # or about to be


@dataclass
class Node:
    """A checkpoint. Changed only with the tree's lock held, `spare` with its own."""

    number: str
    serial: int
    name: str | None
    parent: str | None
    created_at: float
    state: State
    saved: Saved
    stats: dict[str, Any]
    children: list[str] = field(default_factory=list)
    pins: int = 0
    held: bool = False
    references: int = 0  # objects for it in the client
    deleted: bool = False
    spare: Spare | None = None
    spare_lock: threading.Lock = field(default_factory=threading.Lock)
    changed_files: int | None = None

    @property
    def snapshot(self) -> Snapshot:
        return self.state.snapshot

    @property
    def template(self) -> Template:
        return self.state.template

    @property
    def referred(self) -> bool:
        return self.references > 0

    def describe(self) -> dict[str, Any]:
        return {
            "id": self.number,
            "name": self.name,
            "parent": self.parent,
            "children": list(self.children),
            "created_at": self.created_at,
        }


@dataclass(frozen=True)
class Revived:
    """A restored tree of processes that waits to be let go, with its files and handles."""

    live: Live
    layer: Layer
    handles: dict[int, Handle]
    registrations: Registrations


@dataclass(frozen=True)
class Rested:
    """What a sandbox was like when it was captured last, to see whether it is still."""

    live: Live
    state: State
    traces: object  # see Box.traces
    stats: dict[str, Any]
    foreseen: bool  # nobody has asked for it yet
