"""A search as a tree in the terminal, while it goes on or from its trace.

A tree of thousands does not fit on a screen. Shown are the way to the best node, what came last,
and of each node's children the best few, down to some depth; the rest is a number.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text
from rich.tree import Tree

from .events import AnyEvent, Began, Dropped, Ended, Failed, Noted, Proposed, Stepped

_SHOWN: Final = 4  # children of a node
_WIDEST: Final = 60  # characters of an action
_DEEPEST: Final = 24  # levels


@dataclass(eq=False)
class _Node:
    number: int
    parent: _Node | None
    action: str = "root"
    score: float = -math.inf
    error: str = ""
    dropped: bool = False
    children: list[_Node] = field(default_factory=list)


class Picture:
    """A listener that knows what a search looks like; `render` shows it with rich."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._nodes: dict[int, _Node] = {0: _Node(0, None)}
        self._latest = self._best = self._nodes[0]
        self._title = "search"
        self._said = ""
        self._at = self._thought = self._acted = self._overhead = 0.0

    def __call__(self, event: AnyEvent) -> None:
        with self._lock:
            self._at = event.at
            match event:
                case Began():
                    settings = (f"{k}={v}" for k, v in event.settings.items() if v is not None)
                    self._title = " ".join([event.strategy, *settings])
                case Proposed():
                    self._thought += event.seconds
                    self._overhead += event.overhead
                case Stepped():
                    self._acted += event.apply + event.scoring
                    self._overhead += event.overhead
                    node = self._make(event)
                    node.score = event.score
                    if node.score > self._best.score:
                        self._best = node
                case Failed():
                    node = self._nodes.get(event.node) or self._make(event)
                    node.error, node.score = event.error, -math.inf
                    if node is self._best:  # what it was taken for cannot be kept
                        self._best = max(self._nodes.values(), key=lambda one: one.score)
                case Dropped():
                    self._nodes[event.node].dropped = True
                case Noted():
                    numbers = ", ".join(f"#{number}" for number in event.nodes)
                    self._said = f"{numbers}: {event.text}"
                case Ended():
                    self._best = self._nodes[event.best]
                    self._said = f"ended: {event.reason}"

    def _make(self, event: Stepped | Failed) -> _Node:
        parent = self._nodes[event.parent]
        action = " ".join(str(event.action).split())
        if len(action) > _WIDEST:
            action = action[: _WIDEST - 1] + "…"
        node = self._nodes[event.node] = _Node(event.node, parent, action)
        parent.children.append(node)
        self._latest = node
        return node

    def render(self) -> RenderableType:
        """What is known so far."""
        with self._lock:
            ways = {*_way(self._best), *_way(self._latest)}
            root = self._nodes[0]
            tree = Tree(self._line(root))
            self._add(tree, root, ways, _DEEPEST)
            nodes = len(self._nodes) - 1
            each = f", {1e3 * self._overhead / nodes:.1f} ms a node of our own" if nodes else ""
            foot = (
                f"{nodes} nodes in {self._at:.1f} s: model {self._thought:.1f} s, "
                f"actions {self._acted:.1f} s{each}"
            )
            lines: list[RenderableType] = [
                Text(self._title, style="bold"),
                tree,
                Text(foot, style="dim"),
            ]
            return Group(*lines, Text(self._said)) if self._said else Group(*lines)

    def _line(self, node: _Node) -> Text:
        line = Text(f"#{node.number} ", style="dim")
        if node.error:
            return line.append(f"{node.action}: {node.error}", style="red")
        on_best = node in _way(self._best)
        if node.parent is not None:
            line.append(f"{node.score:.3g} ", style="bold green" if on_best else "cyan")
        return line.append(node.action, style="dim" if node.dropped and not on_best else "")

    def _add(self, tree: Tree, node: _Node, ways: set[_Node], levels: int) -> None:
        ranked = sorted(node.children, key=lambda one: (one in ways, one.score), reverse=True)
        shown = set(ranked[:_SHOWN]) | (ways & set(ranked))
        for child in node.children:
            if child in shown:
                below = tree.add(self._line(child))
                if levels > 1 and (child in ways or len(self._nodes) <= _SHOWN**3):
                    self._add(below, child, ways, levels - 1)
                elif child.children:
                    below.add(Text(f"{_count(child)} more", style="dim"))
        if len(ranked) > len(shown):
            tree.add(Text(f"{len(ranked) - len(shown)} others", style="dim"))


class LiveTree(Picture):
    """The same, kept up to date in the terminal within a `with` block.

    >>> with explore.LiveTree() as tree:                    # doctest: +SKIP
    ...     explore.beam(sb, Repair(), width=4, depth=5, listeners=[tree])
    """

    def __init__(self, console: Console | None = None) -> None:
        super().__init__()
        self._live = Live(
            console=console, get_renderable=self.render, refresh_per_second=8, transient=False
        )

    def __enter__(self) -> LiveTree:
        self._live.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._live.__exit__(kind, error, traceback)


def _way(node: _Node) -> list[_Node]:
    """From the root to a node."""
    way = [node]
    while (above := way[-1].parent) is not None:
        way.append(above)
    return way[::-1]


def _count(node: _Node) -> int:
    """How many there are below a node."""
    count, pending = 0, list(node.children)
    while pending:
        count += 1
        pending += pending.pop().children
    return count
