"""What a caller can ask for: one method for each request, the arguments as in the message.

A method gets the connection it came over and plain arguments, and returns what can be sent back.
It translates and nothing else: the work is in `operations` (checkpoint, rollback, fork, close),
`commands` (programs and streams) and `deltafs`.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ..deltacr.engine import Engine
from ..deltafs import diff
from ..deltafs.inside import Inside
from ..deltafs.root import DEFAULT_HIDE
from ..errors import NoSpace, SandboxClosed
from ..retention import rebuilt
from . import branches, commands, operations
from .box import Box
from .budget import Budget
from .faults import Faults
from .journal import Journal
from .nodes import Node
from .streams import Pump
from .trees import Tree

if TYPE_CHECKING:
    from .server import Connection

log = logging.getLogger(__name__)

FIRST_UID: Final = 0x60000000
"""Host uids of the first tree; each has 65536 of its own. No distribution hands these out."""
TREES: Final = 4096


class Requests:
    """The state of one keeper, and everything that can be asked of it."""

    def __init__(self, *, directory: Path, engine: Engine, pump: Pump, journal: Journal) -> None:
        self.directory = directory
        self.engine = engine
        self.pump = pump
        self.journal = journal
        self.budget = Budget(directory, max_memory=_limit("MEMORY"), max_disk=_limit("DISK"))
        self.boxes: dict[str, Box] = {}
        self.trees: dict[int, Tree] = {}
        self.places: set[int] = set()
        self.lock = threading.Lock()
        self.faults: Faults | None = None
        if os.environ.get("DELTABOX_FAULTS") == "1":
            self.faults = Faults()
            self.faults.install()
        self.executor = ThreadPoolExecutor(4, thread_name_prefix="fork")

    def handler(self, op: str) -> Callable[..., Any]:
        """The method for a request."""
        method: Callable[..., Any] | None = getattr(self, f"do_{op}", None)
        if method is None:
            raise ValueError(f"there is no request {op!r}")
        return method

    def box(self, number: str) -> Box:
        box = self.boxes.get(number)
        if box is None:
            raise SandboxClosed("the sandbox is closed")
        return box

    def all_trees(self) -> list[Tree]:
        with self.lock:
            return list(self.trees.values())

    # -- sandboxes ---------------------------------------------------------------------------

    def do_create(
        self,
        connection: Connection,
        *,
        base: str,
        hide: list[str] | None,
        memory_limit: int | None,
        pids_limit: int | None,
        disk_limit: int | None,
        network: str,
        hostname: str,
        on_external: str,
        io_uring: bool,
        standby: int,
        shared: list[str],
        max_memory: int | None,
        max_disk: int | None,
        keep: dict[str, Any],
    ) -> dict[str, Any]:
        self.budget.change(max_memory=max_memory, max_disk=max_disk)
        self.budget.check()
        path = Path(base)
        if not path.is_dir():
            raise ValueError(f"the base {base!r} is not a directory")
        hidden = list(hide) if hide is not None else list(DEFAULT_HIDE) if base == "/" else []
        state = self.directory.resolve()
        if state.is_relative_to(path.resolve()):
            hidden.append("/" + str(state.relative_to(path.resolve())))
        with self.lock:
            place = next((n for n in range(TREES) if n not in self.places), None)
            if place is None:
                raise NoSpace(f"there are {TREES} sandboxes already")
            self.places.add(place)
        name = f"t{secrets.token_hex(4)}"
        directory = self.directory / "trees" / name
        try:
            self.journal.made("tree", str(directory))
            directory.mkdir(parents=True)
            tree = Tree(
                engine=self.engine,
                pump=self.pump,
                name=name,
                directory=directory,
                first_uid=FIRST_UID + place * 65536,
                base=path,
                hide=hidden,
                memory_limit=memory_limit,
                pids_limit=pids_limit,
                disk_limit=min(self.budget.max_disk, disk_limit or self.budget.max_disk),
                network=network,
                on_external=on_external,
                io_uring=io_uring,
                budget=self.budget,
                policy=rebuilt(keep),
                standby=standby,
                shared=shared,
            )
            try:
                box = tree.boot(hostname)
            except BaseException:
                tree.close()
                raise
        except BaseException:
            shutil.rmtree(directory, ignore_errors=True)
            self.journal.gone("tree", str(directory))
            with self.lock:
                self.places.discard(place)
            raise
        tree.place = place
        with self.lock:
            self.trees[place] = tree
        self._enter(connection, box)
        return box.describe()

    def _enter(self, connection: Connection, box: Box) -> None:
        with self.lock:
            self.boxes[box.number] = box
        connection.session.boxes.add(box.number)
        connection.unclaimed.append(box.number)

    def do_close(self, connection: Connection, *, box: str) -> None:
        self.close(box)
        connection.session.boxes.discard(box)

    def close(self, number: str) -> None:
        """End a sandbox; fine if it is gone already."""
        box = self.boxes.get(number)
        if box is None:
            return
        last = operations.close(box)
        with self.lock:
            self.boxes.pop(number, None)
            if last:
                self.trees.pop(box.tree.place, None)
                self.places.discard(box.tree.place)
        if last:
            self.journal.gone("tree", str(box.tree.directory))

    def do_fork(
        self, connection: Connection, *, box: str, count: int, at: str | None, identity: str
    ) -> list[dict[str, Any]]:
        copies = operations.fork(
            self.box(box),
            count,
            at,
            identity=identity,
            budget=self.budget,
            executor=self.executor,
        )
        for copy in copies:
            self._enter(connection, copy)
        return [copy.describe() for copy in copies]

    def do_commit(self, connection: Connection, *, box: str) -> None:
        branches.commit(self.box(box), self._exchange)
        connection.session.boxes.discard(box)

    def do_merge(self, connection: Connection, *, box: str, under: list[str]) -> list[str]:
        return branches.merge(self.box(box), under)

    def _exchange(self, parent: Box, branch: Box) -> None:
        with self.lock, parent.tree.lock:
            for boxes in (self.boxes, parent.tree.boxes):
                del boxes[branch.number]
                boxes[parent.number] = branch
            branch.number, parent.number = parent.number, branch.number

    def do_processes(self, connection: Connection, *, box: str) -> list[dict[str, Any]]:
        found = self.box(box)
        with found.steady:
            with found.changed:
                found.check_open()
                live = found.live
            with live.ahead.excluded():  # or those whom it stops would seem to wait for the disk
                return [_process(info) for info in live.processes()]

    # -- checkpoints -------------------------------------------------------------------------

    def do_checkpoint(
        self, connection: Connection, *, box: str, name: str | None, reuse: bool
    ) -> dict[str, Any]:
        found = self.box(box)
        node = operations.checkpoint(found, name, reuse=reuse, budget=self.budget)
        connection.given.append((found.tree, node.number))
        return node.describe() | {"stats": node.stats}

    def do_rollback(self, connection: Connection, *, box: str, to: str) -> None:
        operations.rollback(self.box(box), to, budget=self.budget)

    def do_delete(self, connection: Connection, *, box: str, which: str) -> None:
        found = self.box(box)
        with found.changed:
            found.check_closed()
        found.tree.delete(which)

    def _give(self, connection: Connection, tree: Tree, node: Node) -> dict[str, Any]:
        """Describe a checkpoint to a client that makes an object of it. The tree's lock is held."""
        tree.refer(node)
        connection.given.append((tree, node.number))
        return node.describe()

    def do_parent(self, connection: Connection, *, box: str, which: str) -> dict[str, Any] | None:
        tree = self.box(box).tree
        with tree.lock:
            number = tree.find(which).parent
            return None if number is None else self._give(connection, tree, tree.nodes[number])

    def do_children(self, connection: Connection, *, box: str, which: str) -> list[dict[str, Any]]:
        tree = self.box(box).tree
        with tree.lock:
            numbers = tree.find(which).children
            return [self._give(connection, tree, tree.nodes[number]) for number in numbers]

    def do_head(self, connection: Connection, *, box: str) -> dict[str, Any] | None:
        found = self.box(box)
        with found.changed:
            found.check_closed()
        tree = found.tree
        with tree.lock:
            node = None if found.head is None else tree.nodes.get(found.head)
            return None if node is None else self._give(connection, tree, node)

    def do_nodes(self, connection: Connection, *, box: str) -> list[dict[str, Any]]:
        found = self.box(box)
        with found.changed:
            found.check_closed()
        tree = found.tree
        with tree.lock:
            return [self._give(connection, tree, node) for node in tree.nodes.values()]

    def do_keep(self, connection: Connection, *, box: str, policy: dict[str, Any]) -> None:
        found = self.box(box)
        with found.changed:
            found.check_closed()
        found.tree.keep(rebuilt(policy))

    def do_usage(self, connection: Connection, *, box: str) -> dict[str, Any]:
        tree = self.box(box).tree
        with tree.lock:
            count = len(tree.nodes)
        return {"checkpoints": count, "memory": tree.memory_bytes(), "disk": tree.disk_bytes()}

    def do_hold(self, connection: Connection, *, box: str, which: str, held: bool) -> None:
        self.box(box).tree.hold(which, held=held)

    def released(self, numbers: dict[str, list[str]]) -> None:
        """Objects for these checkpoints of the trees of these names have gone in a client."""
        for tree in self.all_trees():
            if tree.name in numbers:
                tree.released(numbers[tree.name])

    def do_stats(self, connection: Connection, *, box: str, which: str) -> dict[str, Any]:
        tree = self.box(box).tree
        with tree.lock:
            stats = dict(tree.find(which).stats)
        return stats | {"changed_files": operations.changed_files(tree, which)}

    def do_measured(self, connection: Connection, *, box: str, which: str) -> dict[str, Any]:
        tree = self.box(box).tree
        with tree.lock:
            return dict(tree.find(which).stats)

    def do_diff(
        self, connection: Connection, *, box: str, old: str, new: str | None
    ) -> list[dict[str, Any]]:
        found = operations.changes(self.box(box), old, new, diff.diff)
        return [asdict(change) for change in found]

    def do_patch(
        self, connection: Connection, *, box: str, old: str, new: str | None, under: str
    ) -> str:
        def compare(before: Any, after: Any, base: Path) -> str:
            return diff.patch(before, after, base, under)

        text: str = operations.changes(self.box(box), old, new, compare)
        return text

    # -- programs ----------------------------------------------------------------------------

    def do_run(self, connection: Connection, *, box: str, **options: Any) -> dict[str, Any]:
        found = self.box(box)
        return commands.run(
            found,
            attach=connection.attaching(found),
            event=lambda data: connection.channel.send({"event": "stdout", "data": data}),
            **options,
        )

    def do_spawn(self, connection: Connection, *, box: str, **options: Any) -> dict[str, Any]:
        return commands.spawn(self.box(box), **options)

    def do_shell(self, connection: Connection, *, box: str, **options: Any) -> dict[str, Any]:
        return commands.open_shell(self.box(box), **options)

    def do_shell_run(
        self, connection: Connection, *, box: str, handle: int, **options: Any
    ) -> dict[str, Any]:
        found = self.box(box)
        return commands.shell_run(found, handle, attach=connection.attaching(found), **options)

    def do_read(self, connection: Connection, *, box: str, handle: int, **options: Any) -> bytes:
        found = self.box(box)
        return commands.read(found, handle, attach=connection.attaching(found), **options)

    def do_write(self, connection: Connection, *, box: str, handle: int, data: bytes) -> None:
        found = self.box(box)
        commands.write(found, handle, data=data, attach=connection.attaching(found))

    def do_close_stdin(self, connection: Connection, *, box: str, handle: int) -> None:
        commands.close_stdin(self.box(box), handle)

    def do_wait(
        self, connection: Connection, *, box: str, handle: int, timeout: float | None
    ) -> int:
        found = self.box(box)
        return commands.wait(found, handle, timeout=timeout, attach=connection.attaching(found))

    def do_poll(self, connection: Connection, *, box: str, handle: int) -> int | None:
        return commands.poll(self.box(box), handle)

    def do_handle(self, connection: Connection, *, box: str, handle: int) -> int:
        found = self.box(box)
        with found.changed:
            return found.handle(handle).pid

    def do_resize(
        self, connection: Connection, *, box: str, handle: int, rows: int, columns: int
    ) -> None:
        self.box(box).resize(handle, rows, columns)

    def do_kill(self, connection: Connection, *, box: str, handle: int, signal: int) -> None:
        self.box(box).kill(handle, signal)

    def do_on_fork(
        self, connection: Connection, *, box: str, handle: int | None, pid: int, signal: int | None
    ) -> None:
        self.box(box).on_fork(handle, pid, signal)

    # -- files -------------------------------------------------------------------------------

    def _files(self, box: str, work: Callable[[Inside], Any], *, looks: bool = False) -> Any:
        return commands.with_files(self.box(box), work, looks=looks)

    def do_file_read(self, connection: Connection, *, box: str, path: str) -> bytes:
        data: bytes = self._files(box, lambda inside: inside.read(path), looks=True)
        return data

    def do_file_write(
        self, connection: Connection, *, box: str, path: str, data: bytes, mode: int | None
    ) -> None:
        self._files(box, lambda inside: inside.write(path, data, mode))

    def do_file_list(self, connection: Connection, *, box: str, path: str) -> list[str]:
        names: list[str] = self._files(box, lambda inside: inside.list(path), looks=True)
        return names

    def do_file_stat(self, connection: Connection, *, box: str, path: str) -> dict[str, Any]:
        return asdict(self._files(box, lambda inside: inside.stat(path), looks=True))

    def do_file_kind(self, connection: Connection, *, box: str, path: str) -> str:
        return str(self._files(box, lambda i: i.stat(path, follow_symlinks=False).kind, looks=True))

    def do_file_exists(self, connection: Connection, *, box: str, path: str) -> bool:
        return bool(self._files(box, lambda inside: inside.exists(path), looks=True))

    def do_file_mkdir(self, connection: Connection, *, box: str, path: str, parents: bool) -> None:
        self._files(box, lambda inside: inside.mkdir(path, parents=parents))

    def do_file_remove(
        self, connection: Connection, *, box: str, path: str, recursive: bool
    ) -> None:
        self._files(box, lambda inside: inside.remove(path, recursive=recursive))

    def do_standby(self, connection: Connection, *, box: str) -> dict[str, Any]:
        return self.box(box).tree.standby.describe()

    # -- tests -------------------------------------------------------------------------------

    def do_fault(self, connection: Connection, *, call: int, record: int) -> str:
        if self.faults is None:
            raise ValueError("this keeper was not started with DELTABOX_FAULTS=1")
        return self.faults.arm(call=call, record=record)

    # -- the end -----------------------------------------------------------------------------

    def close_all(self) -> None:
        """End every sandbox."""
        for number in list(self.boxes):
            try:
                self.close(number)
            except Exception:
                log.exception("closing %s", number)
        self.executor.shutdown()


def _limit(what: str) -> int | None:
    text = os.environ.get(f"DELTABOX_MAX_{what}")
    return int(text) if text and text.isdigit() else None


def _process(info: Any) -> dict[str, Any]:
    return {
        "pid": info.pid,
        "ppid": info.ppid,
        "pgid": info.pgid,
        "sid": info.sid,
        "state": info.state,
        "cmdline": list(info.cmdline),
        "cwd": info.cwd,
    }
