"""The process trees of one sandbox tree: a user namespace, groups, templates, and what is cloned.

On hosts where version 1 control groups rule, the tree's first template joins the tree's groups and
all others are forked from it, so nobody joins one later: that waits for an RCU grace period, some
10 ms in which no process of the host can be forked.  Templates' own memory is therefore charged to
the tree's group, and its limit follows.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import TypeVar

from ..errors import (
    CheckpointError,
    DeltaBoxError,
    HostUnsupported,
    RollbackError,
    UnsupportedState,
)
from ..linux.pages import Store
from . import ahead, boot, checkpoint, improve, resting
from .asked import Asked
from .boot import First
from .checkpoint import AtInstant
from .groups import Groups
from .live import Live
from .model import Capture, External
from .network import Network, Networks
from .objects import sysv, terminals
from .objects.ghosts import Attic
from .objects.shared_memory import Sharing, Stock
from .peer import Loaded, Peer, PeerGone, ProgramFailed, end_task, own_task, pair
from .records import WORLD_SLOT, Sealed
from .room import Room
from .survey import WorldState
from .template import Template
from .templates import Templates

log = logging.getLogger(__name__)
T = TypeVar("T")

_BLANKS = 2
_SPARE, _MOST = 2, 64  # one more waits in each spare, and in each standby
_MOST_GENERATIONS = 200  # a fork of the last takes some 40 ms
_SMALL = 128 << 20  # bytes
_OWN_MEMORY = 4 << 20  # what a template and its door take besides the pages they hold


class Tree:
    """All process trees that share history."""

    def __init__(
        self,
        name: str,
        *,
        seed: Peer,
        group: Path,
        first_uid: int,
        memory_limit: int | None,
        pids_limit: int | None,
        network: str,
        on_external: str,
        io_uring: bool,
        on_made: Callable[[str, str], None],
        on_gone: Callable[[str, str], None],
    ) -> None:
        """`group` is that of all trees; both functions hear of what will have to go again."""
        self._seed = seed
        self.name = name
        self.owner = first_uid
        self.network = network
        self.on_external = on_external
        self.reference = -1  # a root over the base alone, which nobody writes to
        self.shared: tuple[str, ...] = ()  # directories that are no part of a sandbox's state
        self.base = -1  # a descriptor of the base's root, once the keeper has mounted it
        # whether so many bytes may be taken for what nobody has asked for yet
        self.has_room: Callable[[int], bool] = lambda size: True
        self.born = time.time()
        self._world: WorldState | None = None  # of an untouched sandbox; the same for all
        self._networks: deque[Network] = deque()
        self._stock = _SPARE  # of groups and network namespaces
        self._pages = Store()  # what shared memory held
        self._leftover = Stock(self._pages, lambda size: self.has_room(size))
        self._lock = threading.Lock()
        self._refill_lock = threading.Lock()
        self._closed = False
        self.userns = self._make_user_namespace()
        with contextlib.ExitStack() as undo:
            undo.callback(self._pages.close)
            undo.callback(os.close, self.userns)
            self.groups = Groups(
                group,
                name,
                owner=first_uid,
                memory=memory_limit,
                pids=pids_limit,
                on_made=on_made,
                on_gone=on_gone,
            )
            undo.callback(self.groups.remove)
            self.room = Room(self.groups, self._templates_take)
            self._maker = Networks(network, first_uid)
            undo.callback(self._maker.close)
            self._templates = Templates(
                seed=seed,
                groups=self.groups,
                userns=self.userns,
                io_uring=io_uring,
                on_change=self._templates_changed,
            )
            self.ledger = self._templates.ledger
            self._templates.begin()
            undo.pop_all()

    # -- making ---------------------------------------------------------------------------------

    def boot(self, *, root_mount: int, hostname: str) -> Live:
        """A fresh tree with only PID 1. Raises RollbackError when it cannot be made."""
        first = boot.first(boot.World(hostname.encode(), network=self.network))
        try:
            return self._first_process(self._templates.origin, first, root_mount)
        except (ProgramFailed, PeerGone, OSError) as error:
            raise DeltaBoxError(f"the sandbox's first process could not start: {error}") from error

    def open_world(self, template: Template, *, root_mount: int) -> Live:
        """A PID 1 with everything that `restore` needs, made ahead; it takes hardly any memory."""
        try:
            world = self._first_process(template, template.first, root_mount, tasks=1)
            try:
                world.loaded = Loaded(template.sealed, world.slot)
            except BaseException:
                world.end()
                raise
            return world
        except (ProgramFailed, PeerGone) as error:
            raise RollbackError(f"no first process could be made: {error}") from error

    def restore(
        self,
        template: Template,
        *,
        root_mount: int,
        externals: Mapping[str, int],
        world: Live | None = None,
    ) -> Live:
        """The checkpoint's tree, built and waiting at its barrier; `Live.release` lets it run.

        In a `world` made ahead, which is used up, or in a new one.
        """
        if not template.compiled or template.capture is None:
            raise RollbackError("the checkpoint holds no process state")
        live = world
        try:
            if live is None:
                live = self._first_process(template, template.first, root_mount)
            else:
                self.room.use(live)
            shared = self._make_shared(live, template.capture)
            self._rebuild(live, template, template.sealed, {**externals, **shared})
        except (ProgramFailed, PeerGone, OSError) as error:
            if live is not None:
                live.end()
            raise RollbackError(f"the tree could not be rebuilt: {error}") from error
        except BaseException:
            if live is not None:
                live.end()
            raise
        try:
            terminals.refill(template.capture, live.handed)
        except OSError as error:
            live.end()
            raise RollbackError(f"a terminal could not be filled again: {error}") from error
        live.origin = template.capture
        live.base = live.cloned_from = template
        return live

    def _make_shared(self, live: Live, capture: Capture) -> dict[str, int]:
        """The shared memory of a new tree, by the input of the program that it is for."""
        found = {one.number: one for one in capture.shared}
        if capture.system_v:
            made = sysv.make(live.init, self.owner, capture.system_v, found, self._leftover)
            for number, fd in made.items():
                live.sharing.adopt(found.pop(number), fd)
        inputs = {}
        for shared in found.values():
            fd = inputs[shared.holder] = self._leftover.make(shared, self.owner)
            live.sharing.adopt(shared, fd)
        return inputs

    def _rebuild(
        self, live: Live, template: Template, sealed: Sealed, fds: Mapping[str, int]
    ) -> None:
        """Have PID 1 of an empty tree run the program that rebuilds the tree."""
        assert template.capture is not None
        peer = live.peer
        with peer.lock:
            with template.cloning:
                asked = Asked(peer, self.owner, template.capture)
                loaded, live.loaded = live.loaded, None
                run = peer.start(loaded or Loaded(sealed, live.slot), fds)
                asked.serve(run)
                peer.answer(run)  # all clones have been made
            live.await_answer(run)
        live.take(sealed.handed)

    def checkpoint(
        self,
        live: Live,
        *,
        externals: Mapping[str, External],
        attic: Attic,
        at_instant: AtInstant[T],
    ) -> tuple[Template, T]:
        """Capture a tree into a fresh template; see `checkpoint.take`."""
        if not live.network.carried:
            raise UnsupportedState(
                "the sandbox's eth0 is dead, because it was deleted inside or the process that "
                "carries its packets has ended; a rollback or fork has a new one",
                pid=1,
                process="init",
                object="network",
            )
        with live.ahead.excluded():
            blank = self.room.given(live, lambda: self._successor(live))
            try:
                taken = checkpoint.take(
                    live,
                    blank,
                    owner=self.owner,
                    network=self.network,
                    base=self.base,
                    reference=self.reference,
                    born=self.born,
                    on_external=self.on_external,
                    externals=externals,
                    attic=attic,
                    at_instant=at_instant,
                )
            except BaseException:
                blank.close()
                raise
            live.advance(blank)
            if blank.capture is not None and resting.may_rest(blank.capture, network=self.network):
                live.rested = blank
            return taken

    def may_come_to_rest(self, live: Live) -> bool:
        """Whether it looks as if nothing would happen in the tree for a while."""
        return resting.is_likely(live, network=self.network)

    def unmoved(self, live: Live, *, patience: bool = False) -> Template | None:
        """The template that was filled last, if the tree is found to be in its state still.

        Nobody is stopped for that. `patience`: some milliseconds, if it was stopped just now.
        OSError if the tree cannot be looked at.
        """
        return resting.state_of(live, patience=patience) if live.network.carried else None

    def never_left(self, live: Live) -> bool:
        """Whether a restored tree is found to be in the state it was restored to. As `unmoved`."""
        return live.network.carried and resting.never_left(live, network=self.network)

    def close(self) -> None:
        """End what is left of the tree: all that can be, if something goes wrong."""
        with self._lock:
            self._closed = True
        with contextlib.ExitStack() as steps:  # the last of them first
            steps.callback(self._pages.close)
            steps.callback(self._leftover.close)
            steps.callback(self.groups.remove)
            steps.callback(os.close, self.userns)
            steps.callback(self._maker.close)
            steps.callback(self._close_networks)
            steps.callback(self._close_templates)
            for live in self.room.lives:
                steps.callback(live.end)

    def _close_templates(self) -> None:
        with self._refill_lock:  # whoever makes something ahead has seen `_closed` afterwards
            self._templates.close()

    def _close_networks(self) -> None:
        for network in self._networks:
            network.close()
        self._networks.clear()

    # -- inner --------------------------------------------------------------------------------

    def _first_process(
        self, template: Template, first: First, root_mount: int, *, tasks: int = 0
    ) -> Live:
        """A tree of PID 1 alone, made by a template's door; undone completely on any failure.

        `tasks`: how many it will have while it waits to be used; 0 if it is used at once.
        """
        with contextlib.ExitStack() as undo:
            # room for one tree more, or a rollback would meet the limits that the old one has hit
            self.room.begin(tasks)
            undo.callback(self.room.give_up, tasks)
            group = self.groups.take()
            undo.callback(self.groups.give, group)
            group_fd = os.open(group, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            undo.callback(os.close, group_fd)
            keep = undo.enter_context(contextlib.ExitStack())
            network = self._take_network()
            undo.callback(network.close)
            requests, inner_requests = pair()
            keep.callback(requests.close)
            reports, inner_reports = pair()
            keep.callback(reports.close)
            slot = template.take_slot()
            keep.callback(template.give_slot, slot)
            fds = {
                "cgroup": group_fd,
                "root": root_mount,
                "network": network.namespace,
                "requests": inner_requests.fileno(),
                "reports": inner_reports.fileno(),
            }
            try:
                with template.door.lock:
                    run = template.door.send(first.sealed, slot + WORLD_SLOT, fds)
                    try:
                        template.door.answer(run)
                    except BaseException:
                        _end_first(run.variable(first.pid))
                        raise
            finally:
                inner_requests.close()
                inner_reports.close()
            live = Live(
                init=run.variable(first.pid),
                group=group,
                network=network,
                requests=requests,
                reports=reports,
                slot=slot,
                sharing=Sharing(self._pages),
            )
            live.shared = self.shared
            try:
                live.peer.answer(run)
                live.attach(self._world)
                if self.network == "host":
                    live.world = WorldState(live.world.mounts, b"")  # not ours to watch
                self._world = live.world
            except BaseException:
                live.end()
                raise
            self.room.add(live, tasks)
            live.on_end = lambda: self._ended(live, template, slot)
            keep.pop_all()
            undo.pop_all()
            os.close(group_fd)
            network.entered()
        return live

    def _take_network(self) -> Network:
        """A network namespace nobody has used."""
        while True:
            with self._lock:
                network = self._networks.popleft() if self._networks else None
            if network is None:
                return self._new_network()
            if network.carried:
                return network
            network.close()

    def _new_network(self) -> Network:
        slot = self._templates.origin.take_slot()
        try:
            return self._maker.make(self._templates.origin.door, slot)
        finally:
            self._templates.origin.give_slot(slot)

    def _ended(self, live: Live, template: Template, slot: int) -> None:
        live.network.leave()
        self._leftover.give(live.sharing.leave())
        self._weigh_shared()
        self.groups.give(live.group)
        template.give_slot(slot)
        self.room.remove(live)

    def work_ahead(self, live: Live, *, unused: Callable[[], bool], rested: bool) -> bool:
        """Do what can be done for the next checkpoint of a tree that runs; in the background.

        See `ahead.work`.
        """
        try:
            self.prepare(live)
            return ahead.work(
                live,
                base=self.base,
                born=self.born,
                reference=self.reference,
                has_room=self.has_room,
                unused=unused,
                rested=rested,
            )
        except (OSError, ProgramFailed, PeerGone, DeltaBoxError) as error:
            log.info("the next checkpoint will have more to do: %s", error)
            return False

    def prepare(self, live: Live) -> None:
        """Make the template of a live tree's next checkpoint ahead; for the caller's background.

        It is a fork of the last one; the first is blank. What `improve` does for large ones is done
        here at once for a small one.
        """
        base = live.base
        if live.successor is not None or (base is not None and base.closed):
            return
        try:
            small = base is not None and 0 < base.whole <= _SMALL
            if base is not None and small and self._improve_now(live, base):
                return
            made = self._templates.blank() if base is None else self._templates.fork(base)
        except (OSError, ProgramFailed, PeerGone, CheckpointError) as error:
            log.info("the next checkpoint will be a full copy: %s", error)
            return
        if not live.keep_successor(base, made):
            made.close()

    def _improve_now(self, live: Live, base: Template) -> bool:
        """Without rests. Whether there is a successor now."""
        if not base.depth:
            for _ in improve.gather(base, lambda: not self._closed):
                pass
        else:
            for _ in self._improving(live):
                pass
        return live.successor is not None

    def improve(self, live: Live) -> Generator[None, None, bool]:
        """Make a live tree's templates quicker to fork, piece by piece; see `improve.improve`.

        For large ones, of which a checkpoint is taken now and then; a small one would be through
        only when the next checkpoint has been taken.
        """
        template = live.base or live.successor
        if template is None or template.stash is None:
            return False
        if template.whole <= _SMALL:
            return False
        return (yield from self._improving(live))

    def _improving(self, live: Live) -> Generator[None, None, bool]:
        if live.improving:
            return False
        live.improving = True
        try:
            return (
                yield from improve.improve(
                    live,
                    take_blank=self._templates.blank,
                    reference=self.reference,
                    has_room=self.has_room,
                )
            )
        except (OSError, ProgramFailed, PeerGone, CheckpointError) as error:
            log.info("the templates stay as slow as they are: %s", error)
            return False
        finally:
            live.improving = False

    def _successor(self, live: Live) -> Template:
        """A template for the next checkpoint: prepared, forked now, or blank."""
        made = live.take_successor()
        if made is not None:
            return made
        base = live.base
        # many generations too many are better than a full copy while the tree is frozen
        if base is not None and not base.closed and base.depth < _MOST_GENERATIONS:
            try:
                return self._templates.fork(base)
            except (OSError, ProgramFailed, PeerGone) as error:
                log.info("a full copy, because no template could be forked: %s", error)
        return self._templates.blank()

    def expect(self, count: int) -> None:
        """So many trees were made at once, and may be again: keep as much in stock, up to a point.

        A network namespace takes some 60 KiB of the kernel's memory, a group less.
        """
        self._stock = max(self._stock, min(count, _MOST))

    def refill(self) -> None:
        """Make spare templates, groups and network namespaces; for the caller's background."""
        with self._refill_lock:
            try:
                while not self._closed and self.groups.spare < self._stock:
                    self.groups.stock()
                while not self._closed and len(self._networks) < self._stock:
                    network = self._new_network()
                    with self._lock:
                        self._networks.append(network)
                while not self._closed and self._templates.spare < _BLANKS:
                    self._templates.stock()
            except (OSError, ProgramFailed, PeerGone, HostUnsupported) as error:
                log.warning("nothing could be made ahead: %s", error)

    def _make_user_namespace(self) -> int:
        program = boot.user_namespace_program(self.owner)
        run = self._seed.run(program.seal(), 0)
        pid = run.variable(program.result)
        task = own_task(pid)
        try:
            for name in ("uid_map", "gid_map"):
                Path(f"/proc/{pid}/{name}").write_text(f"0 {self.owner} 65536")
            return os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
        finally:
            end_task(task)

    def prepare_shared(self, template: Template) -> None:
        """Have the shared memory of one more tree of a checkpoint ready; in the background."""
        if template.capture is None:
            return
        try:
            self._leftover.prepare(template.capture.shared, self.owner)
        except OSError as error:
            log.info("shared memory will be copied when it is needed: %s", error)
        self._weigh_shared()

    def drop_leftover(self) -> bool:
        """Give back the shared memory that ended trees have left; whether there was any."""
        gone = self._leftover.clear()
        self._weigh_shared()
        return gone

    def _templates_changed(self) -> None:
        self._weigh_shared()
        self.room.settle()

    def _weigh_shared(self) -> None:
        self.ledger.put_beside(self._pages.size + self._leftover.size)

    def _templates_take(self) -> tuple[int, int]:
        """How many templates there are, and their memory, which is charged to the tree."""
        count, held = self._templates.count, self.ledger.held - self.ledger.beside
        return count, held + held // 64 + count * _OWN_MEMORY


def _end_first(pid: int) -> None:
    """Kill a PID 1 whose program did not get far enough to be a tree, with all it has cloned."""
    if pid > 0:
        with contextlib.suppress(ProcessLookupError):
            end_task(own_task(pid))
