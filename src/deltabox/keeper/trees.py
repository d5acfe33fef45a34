"""A tree of sandboxes: everything that shares one history.

A sandbox, its checkpoints, the forks made of them and theirs form one tree. It owns what they
share: the btrfs image, the range of host uids with its user namespace, the clone of the base, the
checkpoints and their names. Any sandbox of the tree may go back to any checkpoint of it. The tree
ends with its last sandbox.

`Tree.lock` guards the dictionaries here and nothing that takes time; it is never held while a
sandbox's lock is taken. A checkpoint that somebody works with is *pinned*: deleting it takes it out
of sight at once, and its memory and files go when the last pin does, one checkpoint after the other
in quiet moments. So do those that the tree's policy (retention.py) lets go of.
"""

from __future__ import annotations

import errno
import functools
import itertools
import logging
import os
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from ..deltacr import notify
from ..deltacr.engine import Engine, Live
from ..deltacr.network import resolver
from ..deltafs import find, root
from ..deltafs.commons import Commons
from ..deltafs.image import Image
from ..deltafs.layers import Layer, Snapshot
from ..errors import RollbackError, UnknownCheckpoint
from ..retention import KeepAll, Policy
from . import identity
from .background import Background
from .box import Box, Saved
from .budget import Budget
from .handles import Handle
from .identity import Registrations
from .leisure import Leisure
from .nodes import Node, Revived, State
from .retention import Retention
from .spares import Spares
from .standby import Standby
from .streams import Pump, Writer

log = logging.getLogger(__name__)

DYING = 4
"""Trees of processes that may be ending at once; the next rollback waits for one of them."""


class Tree:
    """See the module."""

    def __init__(
        self,
        *,
        engine: Engine,
        pump: Pump,
        name: str,
        directory: Path,
        first_uid: int,
        base: Path,
        hide: Sequence[str],
        memory_limit: int | None,
        pids_limit: int | None,
        disk_limit: int,
        network: str,
        on_external: str,
        io_uring: bool,
        budget: Budget,
        policy: Policy,
        standby: int,
        shared: Sequence[str],
    ) -> None:
        self.name = name
        self.base = base
        self.hide = tuple(hide)
        self.network = network
        self.directory = directory
        self.first_uid = first_uid
        self.pump = pump
        self.budget = budget
        self.lock = threading.Lock()
        self.nodes: dict[str, Node] = {}
        self.names: dict[str, str | None] = {}
        self.boxes: dict[str, Box] = {}
        self.retention: Retention[Node] = Retention()
        self.place = -1
        self.origin: Snapshot
        self.shared = tuple(shared)
        self.commons: Commons | None = None
        self._numbers = itertools.count(1)
        self._leaving: dict[str, Node] = {}
        self._disk = 0
        self.standby = Standby(self, limit=standby)
        self.dying = threading.BoundedSemaphore(DYING)
        with ExitStack() as undo:
            self.image = Image.create(directory, name=name, size_limit=disk_limit)
            undo.callback(self.image.close)
            self.engine = engine.open_tree(
                name,
                first_uid=first_uid,
                memory_limit=memory_limit,
                pids_limit=pids_limit,
                network=network,
                on_external=on_external,
                io_uring=io_uring,
            )
            undo.callback(self.engine.close)
            self.owner = self.engine.owner
            self.base_fd = root.base_mount(base, self.engine.userns)
            undo.callback(os.close, self.base_fd)
            self.engine.base = self.base_fd
            self.engine.has_room = budget.has_room
            self.engine.reference = root.root_mount(
                self.base_fd, self.image.blank(), self.engine.userns, self.owner
            )
            undo.callback(os.close, self.engine.reference)
            self.engine.ledger.report = lambda change: budget.took(memory=change)
            self.retention.change(policy, ())
            self.spares = Spares(self)
            self.background = Background(name, idle=self._idle, busy=self._busy)
            self._leisure = Leisure(self.background, self.engine, self.image.presync)
            budget.enter(self)
            undo.pop_all()

    def next_number(self) -> int:
        """A number that is used once in this tree: for handles, calls and commands."""
        return next(self._numbers)

    # -- sandboxes ---------------------------------------------------------------------------

    def boot(self, hostname: str) -> Box:
        """The tree's first sandbox: fresh files, nothing but PID 1 running."""
        box = Box(self, self._box_number(), head=None, pump=self.pump)
        with ExitStack() as undo:
            layer = self.image.blank()
            undo.callback(self.image.delete, layer)
            root.skeleton(layer, self.base, self.hide, hostname=hostname, resolver=self._resolver())
            mount = root.root_mount(self.base_fd, layer, self.engine.userns, self.owner)
            try:
                self.commons = Commons(
                    self.shared, self.image, self.engine.userns, self.owner, mount
                )
                self.engine.shared = self.shared
                self.origin = self.image.snapshot(layer)
                self.commons.attach(mount)
                identity.announce(mount, self.owner, box.number, 0, None)
                box.live = self.engine.boot(root_mount=mount, hostname=hostname)
            finally:
                os.close(mount)
            undo.callback(box.live.end)
            box.layer = layer
            self._let_find(box.live, layer)
            box.watch()
            with self.lock:
                self.boxes[box.number] = box
            undo.pop_all()
        return box

    def root_of(self, layer: Layer) -> int:
        """The root with a layer's files, mounted nowhere yet."""
        assert self.commons is not None  # made with the first sandbox
        mount = root.root_mount(self.base_fd, layer, self.engine.userns, self.owner)
        try:
            self.commons.attach(mount)
        except BaseException:
            os.close(mount)
            raise
        return mount

    def _resolver(self) -> str | None:
        """The resolv.conf that the sandboxes need instead of the base's."""
        if self.network != "nat":
            return None
        try:
            with open("/etc/resolv.conf", errors="replace") as host:
                return resolver(host)
        except FileNotFoundError:
            return resolver(())

    def _box_number(self) -> str:
        return f"{self.name}-{self.next_number()}"

    def new_box(self, head: str) -> Box:
        """A sandbox that is still empty, for a fork."""
        return Box(self, self._box_number(), head=head, pump=self.pump)

    def adopt(self, box: Box) -> None:
        """Make a fork one of the tree's sandboxes."""
        with self.lock:
            self.boxes[box.number] = box

    def remove(self, box: Box) -> bool:
        """Take a closed sandbox out; whether it was the last one.

        Not one whose place a branch has taken, which may end after the branch.
        """
        with self.lock:
            last = self.boxes.pop(box.number, None) is not None and not self.boxes
            gone = [] if last else self._surplus()
        self._free_later(gone)
        return last

    # -- checkpoints -------------------------------------------------------------------------

    @contextmanager
    def reserving(self, name: str | None) -> Iterator[None]:
        """Hold a name for a checkpoint that is being taken; free it again on an error."""
        if name is None:
            yield
            return
        with self.lock:
            if name in self.names or name in self.nodes:
                raise ValueError(f"there is a checkpoint named {name!r} in this tree already")
            self.names[name] = None
        try:
            yield
        except BaseException:
            with self.lock:
                del self.names[name]
            raise

    def add(
        self,
        *,
        box: Box,
        name: str | None,
        state: State,
        saved: Saved,
        stats: dict[str, Any],
    ) -> Node:
        """Record a checkpoint that has been taken (its name is reserved). The sandbox stands on it
        from here on, and the caller will have an object for it.

        UnknownCheckpoint if the state was another checkpoint's, and went with it.
        """
        node = Node(
            number=uuid.uuid4().hex[:12],
            serial=self.next_number(),
            name=name,
            parent=None,
            created_at=time.time(),
            state=state,
            saved=saved,
            stats=stats,
        )
        with self.lock:
            if state.freed:
                raise UnknownCheckpoint("the state that was to be shared is gone")
            state.nodes += 1
            self.nodes[node.number] = node
            if name is not None:
                self.names[name] = node.number
            parent = None if box.head is None else self.nodes.get(box.head)
            if parent is not None:
                node.parent = parent.number
                parent.children.append(node.number)
            box.head = node.number
            node.references = 1
            self.retention.note(node)
            gone = self._surplus()
        self._free_later(gone)
        return node

    def find(self, reference: str) -> Node:
        """The checkpoint of this id or name. The lock is held."""
        node = self.nodes.get(reference)
        if node is None:
            number = self.names.get(reference)
            node = None if number is None else self.nodes.get(number)
        if node is None:
            raise UnknownCheckpoint(f"there is no checkpoint {reference!r} in this sandbox's tree")
        return node

    @contextmanager
    def pinned(self, reference: str) -> Iterator[Node]:
        """The checkpoint of this id or name; it does not go away within the block."""
        with self.lock:
            node = self.find(reference)
            node.pins += 1
        try:
            yield node
        finally:
            with self.lock:
                gone = self._unpin(node)
            self._free_later(gone)

    @contextmanager
    def pinned_parent(self, node: Node) -> Iterator[Node | None]:
        """The checkpoint's parent, as `pinned` has it; None if it has none."""
        with self.lock:
            parent = None if node.parent is None else self.nodes.get(node.parent)
            if parent is not None:
                parent.pins += 1
        try:
            yield parent
        finally:
            if parent is not None:
                with self.lock:
                    gone = self._unpin(parent)
                self._free_later(gone)

    def _unpin(self, node: Node) -> list[Node]:
        """Let go of a pin; what can be freed now. The lock is held."""
        node.pins -= 1
        return [node] if node.deleted and not node.pins else self._surplus()

    def delete(self, reference: str) -> None:
        """Delete a checkpoint; its children become children of its parent."""
        with self.lock:
            node = self.find(reference)
            self._take_out(node)
            gone = self._surplus()
            if not node.pins:
                gone.append(node)
        self._free_later(gone)

    def _take_out(self, node: Node) -> None:
        """Take a checkpoint out of sight. The lock is held."""
        node.deleted = True
        del self.nodes[node.number]
        self.retention.forget(node)
        if node.name is not None:
            del self.names[node.name]
        parent = None if node.parent is None else self.nodes.get(node.parent)
        if parent is not None:
            at = parent.children.index(node.number)
            parent.children[at : at + 1] = node.children
        for child in node.children:
            self.nodes[child].parent = node.parent
        for box in self.boxes.values():
            if box.head == node.number:
                box.head = node.parent

    def _free_later(self, nodes: Sequence[Node]) -> None:
        for node in nodes:
            with self.lock:
                self._leaving[node.number] = node
            self.background.later(self._free, node)

    def _free(self, node: Node) -> None:
        self.standby.drop(node=node)
        self.spares.drop(node)
        with self.lock:
            node.state.nodes -= 1
            last = node.state.freed = not node.state.nodes
        if last:
            self._free_state(node.state)
        with self.lock:
            del self._leaving[node.number]

    def leave(self, state: State) -> None:
        """Free a state that has not become any checkpoint's."""
        with self.lock:
            if state.nodes or state.freed:
                return
            state.freed = True
        self.background.submit(self._free_state, state)

    def drop_foreseen(self) -> bool:
        """Free what was captured, read, or kept, before anybody has asked for it; whether there
        was anything.
        """
        leftover = self.engine.drop_leftover()
        with self.lock:
            boxes = list(self.boxes.values())
        found = [rested for box in boxes if (rested := box.rested) and rested.foreseen]
        gone = []
        with self.lock:
            for rested in found:
                if not rested.state.nodes and not rested.state.freed:
                    rested.state.freed = True
                    gone.append(rested)
        for rested in gone:
            rested.live.drop_successor()
            self._free_state(rested.state)
        read = [box for box in boxes if box.live.drop_read_ahead()]
        return leftover or bool(gone or read)

    def _free_state(self, state: State) -> None:
        state.template.close()
        self.image.delete(state.snapshot)

    # -- what is kept ------------------------------------------------------------------------

    def keep(self, policy: Policy) -> None:
        """Go by another policy from here on."""
        with self.lock:
            self.retention.change(policy, self.nodes.values())
            gone = self._surplus()
        self._free_later(gone)

    def hold(self, reference: str, *, held: bool) -> None:
        """Keep a checkpoint whatever the policy says, or no longer."""
        with self.lock:
            node = self.find(reference)
            node.held = held
            self.retention.note(node)
            gone = self._surplus()
        self._free_later(gone)

    def refer(self, node: Node) -> None:
        """The client will have one more object for a checkpoint. The lock is held."""
        node.references += 1
        self.retention.note(node)

    def released(self, numbers: Iterable[str]) -> None:
        """The client has one object less for each of these checkpoints."""
        with self.lock:
            for number in numbers:
                node = self.nodes.get(number)
                if node is not None:
                    node.references -= 1
                    self.retention.note(node)
            gone = self._surplus()
        self._free_later(gone)

    def oldest_to_spare(self) -> Node | None:
        """What the policy would give up first for want of room."""
        with self.lock:
            return self.retention.oldest(self._heads())

    def give_up(self, node: Node) -> bool:
        """Free a checkpoint now, for want of room, unless somebody has come to want it."""
        with self.lock:
            if node is not self.retention.oldest(self._heads()):
                return False
            self._take_out(node)
            self._leaving[node.number] = node
        self._free(node)
        return True

    def _heads(self) -> set[str]:
        return {box.head for box in self.boxes.values() if box.head is not None}

    def _surplus(self) -> list[Node]:
        """Take what the policy lets go of out of sight. The lock is held."""
        if isinstance(self.retention.policy, KeepAll):
            return []
        gone = self.retention.surplus(self.nodes, self._heads())
        for node in gone:
            self._take_out(node)
        return gone

    # -- restoring ---------------------------------------------------------------------------

    def revive(self, box: Box, node: Node) -> Revived:
        """Restore a checkpoint for a sandbox, up to the point where it only has to be let go."""
        with ExitStack() as undo:
            spare = self.spares.take(node)
            undo.callback(self.spares.discard, spare)
            elsewhere = not box.is_author(node.saved)
            if elsewhere:
                number = self.next_number()
                identity.announce(spare.mount, self.owner, box.number, number, box.identity)
            externals: dict[str, int] = {}
            shut: list[Writer] = []
            with box.changed:
                handles = box.rebuilt(node.saved, externals, shut)
            undo.callback(close_handles, box, handles)
            box.generation += 1
            try:
                live = self.engine.restore(
                    node.template,
                    root_mount=spare.mount,
                    externals=externals,
                    world=spare.world,
                )
            finally:
                for fd in externals.values():
                    os.close(fd)
            undo.callback(live.end)
            self._let_find(live, spare.layer)
            with box.changed:
                for handle in handles.values():
                    master = live.handed.pop(f"{handle.number}/tty", None)
                    if master is not None:
                        handle.take_master(master)
                for writer in shut:
                    writer.close()
            try:
                if elsewhere and box.identity is not None:
                    identity.rename(live, box.identity)
                wanted = {one.pid: one.signal for one in node.saved.registered}
                hosts = live.hosts() if wanted else {}
                if not wanted.keys() <= hosts.keys():
                    raise ProcessLookupError(errno.ESRCH, "a registered process did not come back")
                if elsewhere and node.template.capture is not None:
                    notify.queue(hosts, node.template.capture, wanted)
                registrations = Registrations.restored(hosts, node.saved.registered)
            except OSError as error:
                raise RollbackError(
                    f"the copy could not be told that it is one: {error.strerror}"
                ) from error
            undo.pop_all()
        os.close(spare.mount)
        return Revived(live, spare.layer, handles, registrations)

    def _let_find(self, live: Live, layer: Layer) -> None:
        """Tell the process half where to ask for a file's name."""
        live.find = functools.partial(find.paths_of, layer=layer, base=self.base, root=live.root)

    def forsake(self, box: Box, revived: Revived) -> None:
        """Take back a revival that will not be used."""
        close_handles(box, revived.handles)
        revived.registrations.close()
        revived.live.end()
        self.image.delete(revived.layer)

    # -- accounting and the end --------------------------------------------------------------

    def memory_bytes(self) -> int:
        """What the checkpoints' templates hold together."""
        return self.engine.ledger.held

    def disk_bytes(self) -> int:
        """What the image takes on the host's disk."""
        return self.image.used_bytes()

    def reclaim(self) -> None:
        """Have the host get back now what deleted files took."""
        self.image.reclaim()

    def account(self) -> None:
        """Tell the budget what the image takes now."""
        with self.lock:
            used = self.disk_bytes()
            change, self._disk = used - self._disk, used
        self.budget.took(disk=change)

    def touch(self, box: Box, *, restored: bool = False) -> None:
        """Somebody has got an answer, and is likely to think about it: work ahead meanwhile."""
        self._leisure.begin(box, restored=restored)

    def _busy(self) -> bool:
        """Whether somebody waits for a checkpoint, a rollback or a fork."""
        with self.lock:
            boxes = list(self.boxes.values())
        return any(box.operates for box in boxes)

    def _idle(self) -> None:
        self.standby.yield_memory()
        self.image.maintain()
        self.account()

    def close(self) -> None:
        """Free everything. There is no sandbox left."""
        steps: list[Callable[[], Any]] = [self.background.end, self.standby.drop]
        with self.lock:
            nodes = [*self.nodes.values(), *self._leaving.values()]
            self.nodes.clear()
            self.names.clear()
        # looked at only when their turn comes: the background may be making one now
        steps += [functools.partial(self.spares.close, node) for node in nodes]
        steps += [
            self.engine.close,
            lambda: os.close(self.engine.reference),
            lambda: os.close(self.base_fd),
            self._close_commons,
            self.image.close,
            self._leave_budget,
            lambda: shutil.rmtree(self.directory),
        ]
        for step in steps:
            try:
                step()
            except Exception:
                log.exception("closing tree %s", self.name)

    def _close_commons(self) -> None:
        if self.commons is not None:
            self.commons.close()

    def _leave_budget(self) -> None:
        self.budget.leave(self)
        self.account()


def close_handles(box: Box, handles: dict[int, Handle]) -> None:
    """Close our ends of the pipes of handles that nobody uses (any more)."""
    for handle in handles.values():
        with box.changed:
            handle.close()
