"""What happens in a search, one event after the other: for displays, logs, and a trace file.

A trace is a text file with one event, as JSON, in each line, written at once and in order. Whatever
ends a search, also a kill of its process, leaves a trace that can be read up to its last whole
line; `replay` gives its events again as they came.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec


class Event(msgspec.Struct, frozen=True, tag_field="event", kw_only=True):
    """The root of them; `at` is seconds since the search began."""

    at: float


class Began(Event, frozen=True, tag="began"):
    """A search has begun, at node 0."""

    strategy: str
    settings: dict[str, Any]
    started: float  # time.time()


class Proposed(Event, frozen=True, tag="proposed"):
    """A node's actions are known."""

    node: int
    actions: list[Any]
    seconds: float  # of thought
    overhead: float  # seconds until the state was there, and to be looked at


class Stepped(Event, frozen=True, tag="stepped"):
    """An action has led to a new node."""

    node: int
    parent: int
    action: Any
    score: float
    apply: float  # seconds
    scoring: float  # seconds
    overhead: float  # seconds until the parent's state was there


class Failed(Event, frozen=True, tag="failed"):
    """An action has raised an exception, or its score has; or its state cannot be kept, which may
    turn out after it was scored.
    """

    node: int
    parent: int
    action: Any
    error: str


class Dropped(Event, frozen=True, tag="dropped"):
    """A node's state has been given up; nothing starts from it any more."""

    node: int


class Noted(Event, frozen=True, tag="noted"):
    """The strategy has something to tell, of a node or of several."""

    nodes: list[int]
    text: str


class Ended(Event, frozen=True, tag="ended"):
    """The search is over."""

    best: int
    score: float | None
    reason: str  # done, found, expansions, seconds, memory, interrupted, error
    nodes: int


AnyEvent = Began | Proposed | Stepped | Failed | Dropped | Noted | Ended
Listener = Callable[[AnyEvent], object]


class Trace:
    """A listener that writes every event into a file."""

    def __init__(self, path: str | Path) -> None:
        self._file = open(path, "wb", buffering=0)  # noqa: SIM115  closed by `close`
        self._lock = threading.Lock()

    def __call__(self, event: AnyEvent) -> None:
        line = msgspec.json.encode(event) + b"\n"
        with self._lock:
            self._file.write(line)

    def close(self) -> None:
        self._file.close()


def replay(path: str | Path) -> Iterator[AnyEvent]:
    """The events of a trace, of a search that has ended, or goes on, or was cut off."""
    decoder = msgspec.json.Decoder(AnyEvent)
    with open(path, "rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                return  # cut off in the middle
            yield decoder.decode(line)
