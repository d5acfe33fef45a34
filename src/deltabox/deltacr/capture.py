"""Read a frozen tree into a `Capture`.

From outside wherever the kernel lets us (/proc, ptrace, pidfd_getfd, kcmp, get_robust_list), and by
one injected batch for each thread for what only it can tell.  Everything that could not be
given back is refused here, with the process, the descriptor and the object named, before anything
has been changed.
"""

from __future__ import annotations

import functools
import os
import struct
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace

from ..errors import UnsupportedState
from ..linux import pidfd, proc, userfaultfd
from ..linux.ptrace import Registers
from . import memory, verify
from .descriptors import DescriptorTable
from .freeze import Frozen, in_interpreter
from .inject import Injection, NoRoom
from .interrupted import UnknownCall
from .live import Live
from .look import Look
from .memories import Memories, refusing
from .model import (
    Capture,
    Descriptor,
    External,
    MemoryLayout,
    PosixTimer,
    Process,
    Thread,
)
from .model import Mapping as Vma
from .names import Names
from .objects import (
    attributes,
    credentials,
    mqueues,
    remains,
    seccomp,
    signals,
    sysv,
    tcp,
    terminals,
    timers,
)
from .objects.ghosts import Attic, Ghosts
from .objects.sockets import Network
from .stash import Changes
from .subject import Refuse, Refused
from .survey import Around, WorldState
from .template import Template
from .told import (
    BRK_RESULT,
    CARRIED_AT,
    ITIMERS_AT,
    MOST_TIMERS,
    PROCESS_CALLS,
    TIMERS_AT,
    Told,
    Witness,
    ask,
    rseq_abort,
)

# Fields of a thread that are restored on the last steps, after a stopped job has stopped.
_SET_LAST = (
    *("registers", "xstate", "sigmask", "altstack", "rseq", "memory", "seccomp", "blocked"),
)


@dataclass(frozen=True)
class _Going:
    """What one thread has told, and how it will go on."""

    results: tuple[int, ...]
    buffer: bytes
    registers: Registers  # fit to continue from
    extra: tuple[tuple[int, bytes], ...]  # memory for that
    met: Registers  # those of the stop
    seccomp: seccomp.Seccomp


@dataclass(frozen=True)
class _Gathered:
    """What has been asked of one stopped process; what it means can be found out later."""

    host: int
    pid: int
    tids: list[int]
    look: Look
    refuse: Refuse
    descriptors: tuple[Descriptor, ...]
    told: Told
    timers: list[PosixTimer]
    threads: dict[int, _Going]
    names: tuple[tuple[str, int], tuple[str, int], str]  # executable, directory, root
    mappings: tuple[Vma, ...] = ()


class Capturing:
    """One capture: `gather` while the tree stands still, `finish` at any time after."""

    def __init__(
        self,
        live: Live,
        frozen: Frozen,
        template: Template,
        *,
        owner: int,
        externals: Mapping[str, External],
        base: int,
        born: float,
        attic: Attic,
        on_external: str,
    ) -> None:
        """`template` will hold it; `base` is a descriptor of the base's root (-1: none); `born`
        the time.time() of the tree's first moment, before which every inode change belongs to the
        base; `on_external` says what becomes of connections to the outside.
        """
        self.live = live
        self.frozen = frozen
        self.template = template
        self.owner = owner
        self.waits = live.waits
        self.ghosts = Ghosts(live.root, owner, attic, born)
        self.names = Names(live.root, base, born, self.ghosts, live.shared)
        network = Network(live.init, on_external)
        self.table = DescriptorTable(live, owner, externals, self.ghosts, network)
        self.changes: dict[int, Changes] = {}  # by pid inside: which pages may have changed
        self.inside: dict[int, int] = {}
        # by host pid
        self.looks: dict[int, Look] = {}
        self.memory: dict[int, int] = {}  # descriptors of /proc/PID/mem
        self.still: dict[int, Told] = {}  # what those have told who have not moved since
        self.gathered: list[_Gathered] = []
        self._processes: list[Process] | None = None
        self.system_v = sysv.NOTHING
        self._zombies_found: list[Process] = []
        self._memories: Memories

    @property
    def changed_shared(self) -> int:
        """Bytes of shared memory that were not as they had been seen last."""
        return self.table.shared.changed

    def give_up(self) -> None:
        """There will be no checkpoint."""
        self.table.shared.close()

    def gather(self) -> None:
        """Ask everything that needs the tree to stand still. Raises UnsupportedState."""
        live = self.live
        with ExitStack() as stack:
            memories = Memories(live, self.frozen.threads, self.names, self.template)
            self._memories = stack.enter_context(memories)
            self._look(stack)
            around, hosts = live.around, frozenset(self.frozen.threads)
            believed = around is not None and around.hosts == hosts == self.still.keys()
            if not believed or verify.ENABLED:
                survey = stack.enter_context(live.surveying())
                world = stack.enter_context(live.world_now())
            self.common = live.common()
            try:
                self._gather_all()
            finally:
                self.table.close()
            if not believed or verify.ENABLED:
                found = Around(hosts, world(), survey())
                if believed:
                    verify.same("what surrounds the tree", around, found)
                around = live.around = found
        assert around is not None
        self.survey = around.survey
        self._check_world(around.world)
        self.system_v = self._look_at_system_v()
        self.table.shared.finish()

    def _look(self, stack: ExitStack) -> None:
        """See all that can be seen from outside, and who has not moved since he was asked."""
        for host, tids in self.frozen.threads.items():
            look = self.looks[host] = Look([host, *(tid for tid in tids if tid != host)])
            self.inside[host] = _inside(look.status)
        self._memories.meet(self.inside)
        self.inside[self.live.init] = 1
        self.table.inside.update(self.inside)
        for host, tids in self.frozen.threads.items():
            fd = self.memory[host] = os.open(f"/proc/{host}/mem", os.O_RDWR | os.O_CLOEXEC)
            stack.callback(os.close, fd)
            look = self.looks[host]
            if look.answers["timers"] or any(self.frozen.stops[tid] for tid in tids):
                continue
            if self._memories.is_still(host, look, tids, fd):
                told = self._memories.space(host).told
                assert told is not None
                self.still[host] = told

    def _gather_all(self) -> None:
        try:
            self.table.queues.look()
        except Refused as refused:
            raise UnsupportedState(
                f"the sandbox holds {refused}", pid=1, process="init", object="message queue"
            ) from None
        asked = [self._gather(host) for host in self.frozen.threads]
        self.gathered = [replace(g, mappings=self._mappings(g.host, g.refuse)) for g in asked]
        for g in self.gathered:
            self.changes[g.pid] = self._memories.changes(g.host)
        self._zombies_found = self._zombies()
        self.table.inside |= {z.host_pid: z.pid for z in self._zombies_found}
        self.table.settle()
        if self.table.terminals.any(g.look.stat.tty for g in self.gathered):
            self._processes = [self._process(g) for g in self.gathered]
            self.table.terminals.finish(self.table.descriptions, self._processes, self.table.inside)

    def processes(self) -> list[Process]:
        """Of each that lives, no more than its pids and its mappings."""
        return [Process(g.pid, g.host, 0, 0, 0, 0, b"", mappings=g.mappings) for g in self.gathered]

    def kernel_areas(self) -> dict[int, set[int]]:
        """Where the kernel itself writes when threads go on (rseq), by pid."""
        return {g.pid: {g.look.thread(tid).rseq.address for tid in g.tids} for g in self.gathered}

    def finish(self) -> Capture:
        """Make records of what was gathered. Raises UnsupportedState."""
        found = self._processes
        if found is None:
            found = [self._process(g) for g in self.gathered]
        found = [tcp.finish_calls(p, self.table.descriptions) for p in found]
        processes = tuple(sorted((*found, *self._zombies_found), key=lambda p: p.pid))
        return Capture(
            processes,
            tuple(self.table.descriptions),
            tuple(self.table.pipes),
            tuple(self.table.shared.found),
            tuple(self.ghosts.found),
            self.survey.last_pid,
            self.survey.hostname,
            self.survey.domainname,
            mqueues.Queues(tuple(self.table.queues.found), self.survey.queue_limits),
            self.system_v,
            {p.pid: p for p in processes},
        )

    # -- the world the tree lives in --------------------------------------------------------

    def _check_world(self, world: WorldState) -> None:
        if world.mounts != self.live.world.mounts:
            raise UnsupportedState(
                "file systems were mounted or unmounted inside the sandbox; "
                "undo that (umount) and try again",
                pid=1,
                process="init",
                object="mount",
            )
        if self.live.world.network and self.live.world.network != world.network:
            raise UnsupportedState(
                "network interfaces, addresses or routes were changed inside the sandbox",
                pid=1,
                process="init",
                object="network",
            )

    def _look_at_system_v(self) -> sysv.SystemV:
        if not any(self.survey.ipc.values()):
            return sysv.NOTHING
        try:
            found = sysv.capture(self.live.init, self.owner, self.table.shared)
        except Refused as refused:
            raise UnsupportedState(
                f"the sandbox holds {refused}", pid=1, process="init", object="System V IPC"
            ) from None
        for process, g in zip(self.processes(), self.gathered, strict=True):
            sysv.check(found, self.live.init, process, g.refuse)
        return found

    # -- one process ----------------------------------------------------------------------------

    def _gather(self, host: int) -> _Gathered:
        pid = self.inside[host]
        tids = self.frozen.threads[host]
        tids = [host, *(t for t in tids if t != host)]
        look = self.looks[host]
        refuse = refusing(host, pid)
        if host not in self.frozen.threads[host]:
            raise refuse("has ended its main thread while others run on", "thread")
        self._check_process(host, tids, look, refuse)
        self.table.inside[look.stat.pgrp] = int(look.status["NSpgid"].split()[-1])
        for tid in tids:
            self.table.inside[tid] = _inside(look.thread(tid).status)
        descriptors = self.table.of_process(host, look, refuse)
        try:
            posix = timers.listed(look.answers["timers"])
        except timers.Refused as refused:
            raise refuse(f"has {refused}", "timer") from None
        if len(posix) > MOST_TIMERS:
            raise refuse(f"has {len(posix)} POSIX timers", "timer")
        memory_fd = self.memory[host]
        told = self.still.get(host)
        if told is None or verify.ENABLED:
            answers = self._ask(host, look, tids, posix, memory_fd)
            if told is not None:
                before, after = told.but_for_timers(), answers.but_for_timers()
                verify.same(f"what pid {pid} has told", before, after)
                self._memories.verify(host)
            told = answers
        actions = signals.parse(told.buffer)
        threads = {
            tid: self._going(tid, look, told.threads[tid], actions, memory_fd, refuse)
            for tid in tids
        }
        names = (
            self.names.executable(host, look, refuse),
            self.names.directory(host, "cwd", look, refuse),
            self.names.root_of(host, look, refuse),
        )
        return _Gathered(host, pid, tids, look, refuse, descriptors, told, posix, threads, names)

    def _process(self, g: _Gathered) -> Process:
        look, refuse, host = g.look, g.refuse, g.host
        actions = signals.parse(g.told.buffer)
        stopped = max(self.frozen.stops[t] for t in g.tids)
        pending = signals.lasting(look.pending(), stopped, refuse)
        threads = tuple(self._thread(tid, g, g.threads[tid], stopped) for tid in g.tids)
        itimers = timers.parse(g.told.buffer[ITIMERS_AT:TIMERS_AT])
        waiting = self._still_to_resume(g.pid, threads)
        if waiting is not None:
            then = {t.tid: t for t in waiting.threads}
            threads = tuple(
                replace(t, **{name: getattr(then[t.tid], name) for name in _SET_LAST})
                for t in threads
            )
            itimers = waiting.itimers
        seccomp.check(threads, signals.handled(actions), refuse)
        by_host = {t.host_tid: t.tid for t in threads}
        stat, status = look.stat, look.status
        size = timers.ITIMERSPEC_SIZE
        posix = [
            replace(
                t,
                setting=g.told.buffer[TIMERS_AT + i * size : TIMERS_AT + (i + 1) * size],
                tid=by_host.get(t.tid, 0) if t.notify & 4 else 0,
            )
            for i, t in enumerate(g.timers)
        ]
        if waiting is not None:
            settings = {t.identifier: t.setting for t in waiting.timers}
            posix = [replace(t, setting=settings[t.identifier]) for t in posix]
        executable, (cwd, cwd_ghost), root = g.names
        return Process(
            pid=g.pid,
            host_pid=host,
            ppid=self.inside.get(stat.ppid, 0),
            pgid=int(status["NSpgid"].split()[-1]),
            sid=int(status["NSsid"].split()[-1]),
            exit_signal=stat.exit_signal,
            comm=os.fsencode(stat.comm),
            stopped=stopped,
            stop_reported=bool(stopped) and stat.exit_code == 0,
            threads=threads,
            mappings=g.mappings,
            layout=MemoryLayout(
                stat.start_code,
                stat.end_code,
                stat.start_data,
                stat.end_data,
                stat.start_brk,
                g.told.results[BRK_RESULT],
                stat.start_stack,
                stat.arg_start,
                stat.arg_end,
                stat.env_start,
                stat.env_end,
                look.answers["auxv"],
                *executable,
            ),
            descriptors=g.descriptors,
            cwd=cwd,
            cwd_ghost=cwd_ghost,
            root=root,
            sigactions=actions,
            pending=pending,
            itimers=itimers,
            timers=tuple(posix),
            attributes=attributes.process(
                look,
                self.common,
                self.owner,
                g.told.results[BRK_RESULT + 1 : len(PROCESS_CALLS)],
                g.told.buffer[CARRIED_AT:],
                refuse,
            ),
            lock_future=g.told.lock_future,
            tty=terminals.controlling(stat.tty),
        )

    def _mappings(self, host: int, refuse: Refuse) -> tuple[Vma, ...]:
        """With pages, checked names and objects; as they were found before if nothing changed."""
        seen = self._memories.of(host)
        if seen.found is not None and self._shares_still(host, seen.found, refuse):
            self._memories.space(host).confirm()
            return seen.found
        mappings = memory.with_pages(seen.known.bare, seen.present)
        mappings = self.names.mapped(host, mappings, refuse)
        mappings = [self._shared(host, m, refuse) for m in mappings]
        found = self.names.with_base(mappings)
        if all(m.ghost < 0 and self.names.is_settled(m) for m in found):
            self._memories.space(host).learn(seen.present, seen.names, found)
        return found

    def _ask(
        self, host: int, look: Look, tids: list[int], posix: list[PosixTimer], memory_fd: int
    ) -> Told:
        """What only it can tell."""
        known = self._memories.assumed(host)
        if known.vdso != look.vdso:  # it may have called exec
            known = self._memories.map(host)
        also = functools.partial(self._watch, host)
        try:
            told = ask(known, host, look, tids, posix, memory_fd, also)
        except NoRoom:
            known = self._memories.map(host)
            told = ask(known, host, look, tids, posix, memory_fd, also)
        witness = Witness.of(look, tids, memory_fd)
        self._memories.space(host).remember(told, witness)
        self._memories.begin(host)
        return told

    def _watch(self, host: int, injection: Injection) -> None:
        space = self._memories.space(host)
        if not space.watched and userfaultfd.supported():
            seen = self._memories.of(host)  # not before: our page is not one of its own
            space.watch(injection)
            self._memories.look_for_writes(host, seen)

    def _shared(self, host: int, mapping: Vma, refuse: Refuse) -> Vma:
        if mapping.kind != "memory":
            return mapping
        try:
            return replace(mapping, memory=self.table.shared.of_mapping(host, mapping))
        except Refused as refused:
            raise refuse(f"maps {refused}", "mapping") from None

    def _shares_still(self, host: int, found: tuple[Vma, ...], refuse: Refuse) -> bool:
        """Whether mappings of shared memory, known from before, are of what they were of."""
        return all(m.memory == self._shared(host, m, refuse).memory for m in found)

    def _still_to_resume(self, pid: int, threads: tuple[Thread, ...]) -> Process | None:
        """The captured process that a restored, stopped one will become when it is continued.

        A stopped job is restored by stopping it just before its threads go back to their captured
        registers, and before what is set last of all; that much is still as it was captured then.
        """
        if not in_interpreter(threads[0].registers.rip) or self.live.origin is None:
            return None
        return self.live.origin.by_pid[pid]

    def _check_process(self, host: int, tids: list[int], look: Look, refuse: Refuse) -> None:
        attributes.check_before_asking(host, tids, look, self.common, refuse)
        attributes.check_policies(host, refuse)
        for tid in tids:
            if seccomp.is_under(look.thread(tid).status, self.common.filters):
                seccomp.suspend(tid)
            if tid != host:
                for kind, what in (
                    (pidfd.KCMP_FILES, "descriptor table"),
                    (pidfd.KCMP_FS, "working directory"),
                ):
                    if pidfd.kcmp(host, tid, kind):
                        raise refuse(f"has a thread with a {what} of its own", "thread")

    def _going(
        self,
        tid: int,
        look: Look,
        raw: tuple[tuple[int, ...], bytes],
        actions: tuple[bytes, ...],
        memory_fd: int,
        refuse: Refuse,
    ) -> _Going:
        """With registers to continue from, for which its memory may be needed."""
        thread = look.thread(tid)
        registers = thread.registers()
        if registers.cs != 0x33:
            raise refuse("runs 32-bit code", "registers")
        pending = (*thread.pending(), *look.pending())
        try:
            fixed, extra = self.waits.restored(
                tid,
                registers,
                memory_fd,
                self.frozen.began,
                signals.first_handler(actions, thread.sigmask, pending),
            )
        except UnknownCall:
            raise refuse(
                "is in a call that was restarted before it could be identified", "system call"
            ) from None
        rseq = thread.rseq
        if rseq.address:
            abort = rseq_abort(memory_fd, rseq.address, fixed.rip)
            if abort:
                fixed = fixed.copy()
                fixed.rip = abort
        filters = seccomp.capture(tid, thread.status, self.common.filters)
        return _Going(*raw, fixed, extra, registers, filters)

    def _thread(self, tid: int, g: _Gathered, told: _Going, stopped: int) -> Thread:
        look, refuse = g.look.thread(tid), g.refuse
        status = look.status
        asked = attributes.asked(told.results[3:], told.buffer[64:])
        altstack, clear_tid = told.buffer[:24], struct.unpack_from("<Q", told.buffer, 32)[0]
        securebits = told.results[2]
        try:
            who = credentials.capture(status, self.owner, securebits)
        except credentials.Refused as refused:
            raise refuse(f"has an {refused}", "credentials") from None
        return Thread(
            tid=_inside(status),
            host_tid=tid,
            registers=told.registers,
            xstate=look.xstate,
            sigmask=look.sigmask,
            pending=signals.lasting(look.pending(), stopped, refuse),
            altstack=altstack,
            clear_child_tid=clear_tid,
            robust_list=look.robust_list,
            rseq=look.rseq,
            attributes=attributes.thread(look, self.common, asked, refuse),
            credentials=who,
            seccomp=told.seccomp,
            memory=told.extra,
            blocked=told.met if told.registers.rip != told.met.rip else None,
        )

    # -- the dead ---------------------------------------------------------------------------------

    def _zombies(self) -> list[Process]:
        """Children that have ended and are not waited for; they are in no group any more."""
        found = []
        inside = self.inside
        for g in self.gathered:
            host = g.host
            for tid in g.tids:
                for pid in g.look.thread(tid).children():
                    if pid in inside:
                        continue
                    stat = proc.stat(pid)
                    status = proc.status(pid)
                    if stat.state != "Z":
                        raise UnsupportedState(
                            f"a child of pid {inside[host]}, {stat.comm}, is in another group",
                            pid=inside[host],
                            process=stat.comm,
                            object="process",
                        )
                    found.append(
                        Process(
                            pid=_inside(status),
                            host_pid=pid,
                            ppid=inside[host],
                            pgid=int(status["NSpgid"].split()[-1]),
                            sid=int(status["NSsid"].split()[-1]),
                            exit_signal=stat.exit_signal,
                            comm=os.fsencode(stat.comm),
                            zombie=stat.exit_code,
                            remains=self._remains(pid, stat.comm),
                        )
                    )
        return found

    def _remains(self, host: int, comm: str) -> remains.Remains:
        try:
            return remains.capture(host, self.owner)
        except credentials.Refused as refused:
            raise UnsupportedState(
                f"the ended process {comm} had an {refused}", process=comm, object="credentials"
            ) from None


def _inside(status: proc.Status) -> int:
    """The id that a process or thread has inside."""
    return int(status["NSpid"].split()[-1])
