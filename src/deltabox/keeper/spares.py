"""Spares: writable copies of checkpoints' files, mounted and with a first process, made ahead.

The next restore of a checkpoint takes its spare, and begins with its processes at once.
"""

from __future__ import annotations

import logging
import os
import threading
from dataclasses import replace
from typing import TYPE_CHECKING

from ..errors import DeltaBoxError
from .nodes import Node, Spare

if TYPE_CHECKING:
    from .trees import Tree

log = logging.getLogger(__name__)

_MOST = 16  # in one tree of sandboxes; the oldest go first


class Spares:
    """Those of one tree of sandboxes."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._lock = threading.Lock()
        self._order: list[Node] = []  # those that have one, the oldest first

    def stock(self, node: Node) -> None:
        """Make the checkpoint's spare, if it has none (in the background)."""
        with node.spare_lock:
            if node.spare is not None or node.deleted:
                return
            node.spare = self._furnished(node, self._made(node))
        with self._lock:
            self._order = [n for n in self._order if n is not node and n.spare]
            self._order.append(node)
            surplus = self._order[:-_MOST]
        for other in surplus:
            self.drop(other)

    def take(self, node: Node) -> Spare:
        """The checkpoint's spare, made now if there is none."""
        with node.spare_lock:
            spare, node.spare = node.spare, None
        if spare is not None and spare.world is not None and not spare.world.fit:
            log.info("%s: a process made ahead has died, or its network", self._tree.name)
            self.discard(spare)
            spare = None
        return spare if spare is not None else self._made(node)

    def drop(self, node: Node) -> None:
        """End the checkpoint's spare, if it has one."""
        with node.spare_lock:
            spare, node.spare = node.spare, None
        if spare is not None:
            self.discard(spare)

    def discard(self, spare: Spare) -> None:
        """End one that has been taken."""
        if spare.world is not None:
            spare.world.end()
        os.close(spare.mount)
        self._tree.image.delete(spare.layer)

    @staticmethod
    def close(node: Node) -> None:
        """Let go of the mount of the checkpoint's spare; its files go with the image."""
        if node.spare is not None:
            os.close(node.spare.mount)
            node.spare = None

    # -- inner --------------------------------------------------------------------------------

    def _made(self, node: Node) -> Spare:
        tree = self._tree
        layer = tree.image.writable(node.snapshot)
        try:
            mount = tree.root_of(layer)
        except BaseException:
            tree.image.delete(layer)
            raise
        return Spare(layer, mount)

    def _furnished(self, node: Node, spare: Spare) -> Spare:
        """The spare with a first process in it; as it is when none can be made."""
        try:
            world = self._tree.engine.open_world(node.template, root_mount=spare.mount)
        except (OSError, DeltaBoxError) as error:
            # its mount may have been moved into what failed
            log.info("%s: no process was made ahead: %s", self._tree.name, error)
            self.discard(spare)
            return self._made(node)
        return replace(spare, world=world)
