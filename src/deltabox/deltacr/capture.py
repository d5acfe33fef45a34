"""Read a frozen tree into a `Capture`.

From outside wherever the kernel lets us (/proc, ptrace, pidfd_getfd, kcmp, get_robust_list), and by
one injected batch for each thread for what only it can tell.  Everything that could not be
given back is refused here, with the process, the descriptor and the object named, before anything
has been changed.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from dataclasses import replace

from ..errors import UnsupportedState
from ..linux import numbers as nr
from ..linux import pidfd, proc, ptrace
from ..linux.bulk import Regions
from ..linux.futex import get_robust_list
from . import memory
from .descriptors import DescriptorTable
from .freeze import Frozen, in_interpreter
from .inject import Injection
from .interrupted import UnknownCall, Waits
from .live import Live
from .model import (
    Capture,
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
    locked,
    mqueues,
    remains,
    seccomp,
    signals,
    tcp,
    terminals,
    timers,
)
from .objects.ghosts import Attic, Ghosts
from .objects.sockets import Network
from .space import Space
from .stash import Changes
from .subject import Refuse, Refused

_PR_GET_SECUREBITS, _PR_GET_TID_ADDRESS = 27, 40
# Fields of a thread that are restored on the last steps, after a stopped job has stopped.
_SET_LAST = (
    *("registers", "xstate", "sigmask", "altstack", "rseq", "memory", "seccomp", "blocked"),
)
_NAMESPACES = ("mnt", "pid", "net", "ipc", "uts", "user", "cgroup", "time")

_Asked = tuple[
    tuple[bytes, ...],
    tuple[bytes, ...],
    list[PosixTimer],
    int,
    attributes.ProcessAttributes,
]
_Answers = tuple[bytes, int, int, attributes.Asked]


def capture(
    live: Live,
    frozen: Frozen,
    *,
    owner: int,
    externals: Mapping[str, External],
    waits: Waits,
    base: int,
    born: float,
    attic: Attic,
    on_external: str,
) -> tuple[Capture, list[int], dict[int, Changes]]:
    """Everything but the pages, files with shared memory, and which pages may have changed.

    Raises UnsupportedState.

    `base` is a descriptor of the base's root (-1: none); `born` the time.time() of the tree's
    first moment, before which every inode change belongs to the base; `on_external` says what
    becomes of connections to the outside.
    """
    capturing = _Capturing(live, frozen, owner, externals, waits, base, born, attic, on_external)
    try:
        return capturing.whole(), capturing.table.shared.copies, capturing.changes
    except BaseException:
        capturing.table.shared.close()
        raise


class _Capturing:
    def __init__(
        self,
        live: Live,
        frozen: Frozen,
        owner: int,
        externals: Mapping[str, External],
        waits: Waits,
        base: int,
        born: float,
        attic: Attic,
        on_external: str,
    ) -> None:
        self.live = live
        self.frozen = frozen
        self.owner = owner
        self.waits = waits
        self.changes: dict[int, Changes] = {}  # by pid inside
        self.filters = seccomp.ours(live.init)
        self.ghosts = Ghosts(live.root, owner, attic, born)
        self.names = Names(live.root, base, born, self.ghosts)
        network = Network(live.init, on_external)
        self.table = DescriptorTable(live, owner, externals, self.ghosts, network)
        self.namespaces = {
            name: os.stat(f"/proc/{live.init}/ns/{name}").st_ino for name in _NAMESPACES
        }

    def whole(self) -> Capture:
        self._check_world()
        try:
            self.table.queues.look()
        except Refused as refused:
            raise UnsupportedState(
                f"the sandbox holds {refused}", pid=1, process="init", object="message queue"
            ) from None
        inside = proc.inside_pids([self.live.init, *self.frozen.threads])
        self.table.inside.update(inside)
        try:
            found = [self._process(pid, inside) for pid in self.frozen.threads]
            zombies = self._zombies(inside)
            self.table.inside |= {z.host_pid: z.pid for z in zombies}
            self.table.settle()
            self.table.terminals.finish(self.table.descriptions, found, self.table.inside)
            found = [tcp.finish_calls(p, self.table.descriptions) for p in found]
        finally:
            self.table.close()
        found += zombies
        processes = tuple(sorted(found, key=lambda p: p.pid))
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
            {p.pid: p for p in processes},
        )

    # -- the world the tree lives in --------------------------------------------------------

    def _check_world(self) -> None:
        if proc.mount_count(self.live.init) != self.live.world.mounts:
            raise UnsupportedState(
                "file systems were mounted or unmounted inside the sandbox; "
                "undo that (umount) and try again",
                pid=1,
                process="init",
                object="mount",
            )
        if self.live.world.network and self.live.world.network != proc.network_state(
            self.live.init
        ):
            raise UnsupportedState(
                "network interfaces, addresses or routes were changed inside the sandbox",
                pid=1,
                process="init",
                object="network",
            )
        self.survey = self.live.survey()
        for what, count in self.survey.ipc.items():
            if count:
                raise UnsupportedState(
                    f"the sandbox holds {count} System V {what}", pid=1, process="init", object=what
                )

    # -- one process ----------------------------------------------------------------------------

    def _process(self, host: int, inside: dict[int, int]) -> Process:
        stat = proc.stat(host)
        status = proc.status(host)
        pid = inside[host]

        def refuse(what: str, kind: str) -> UnsupportedState:
            return UnsupportedState(
                f"pid {pid} ({stat.comm}) {what}", pid=pid, process=stat.comm, object=kind
            )

        tids = self.frozen.threads[host]
        if host not in tids:
            raise refuse("has ended its main thread while others run on", "thread")
        tids = [host, *(t for t in tids if t != host)]
        self._check_process(host, tids, status, refuse)

        space = self.live.space(host, pid)
        bare, vdso, gap = memory.mappings(host, space.watched, refuse)
        pagemap = os.open(f"/proc/{host}/pagemap", os.O_RDONLY | os.O_CLOEXEC)
        try:
            return self._stopped(
                host, pid, tids, stat, status, space, pagemap, bare, vdso, gap, inside, refuse
            )
        finally:
            os.close(pagemap)

    def _stopped(
        self,
        host: int,
        pid: int,
        tids: list[int],
        stat: proc.Stat,
        status: dict[str, str],
        space: Space,
        pagemap: int,
        bare: list[Vma],
        vdso: int,
        gap: int,
        inside: dict[int, int],
        refuse: Refuse,
    ) -> Process:
        present = space.present(pagemap, bare)
        mappings = memory.with_pages(bare, present)
        mappings = self.names.mapped(host, mappings, refuse)
        mappings = [self._shared(host, m, refuse) for m in mappings]
        mappings = [
            replace(m, of_base=True)
            if m.pages and m.kind == "file" and self.names.is_pristine(m)
            else m
            for m in mappings
        ]
        descriptors = self.table.of_process(host, refuse)
        ignores_trap = bool(int(status["SigIgn"], 16) >> 4 & 1)
        memory_fd = os.open(f"/proc/{host}/mem", os.O_RDWR | os.O_CLOEXEC)
        try:
            with Injection(
                leader=host, memory=memory_fd, gap=gap, vdso=vdso, ignores_trap=ignores_trap
            ) as injection:
                mine = self._ask_process(host, injection, int(status["Umask"], 8), refuse)
                answers = {tid: self._ask_thread(tid, injection) for tid in tids}
                lock_future = locked.future(host, status.get("VmLck", ""), gap)
                space.watch(injection)
            actions, itimers, posix, brk, carried = mine
            pending = tuple(ptrace.pending(host, shared=True))
            partial = Process(pid, host, 0, 0, 0, 0, b"", sigactions=actions, pending=pending)
            threads = tuple(
                self._thread(host, tid, answers[tid], partial, memory_fd, refuse) for tid in tids
            )
        finally:
            os.close(memory_fd)
        self._look(space, pid, pagemap, bare, present)
        waiting = self._still_to_resume(pid, threads)
        if waiting is not None:
            then = {t.tid: t for t in waiting.threads}
            threads = tuple(
                replace(t, **{name: getattr(then[t.tid], name) for name in _SET_LAST})
                for t in threads
            )
            itimers = waiting.itimers
        seccomp.check(threads, signals.handled(actions), refuse)
        by_host = {t.host_tid: t.tid for t in threads}
        self.table.inside |= by_host
        self.table.inside[stat.pgrp] = int(status["NSpgid"].split()[-1])
        posix = [
            PosixTimer(
                t.identifier,
                t.clock,
                t.signal,
                t.notify,
                t.value,
                by_host.get(t.tid, 0) if t.notify & 4 else 0,
                t.setting,
            )
            for t in posix
        ]
        if waiting is not None:
            settings = {t.identifier: t.setting for t in waiting.timers}
            posix = [replace(t, setting=settings[t.identifier]) for t in posix]
        cwd, cwd_ghost = self.names.directory(host, "cwd", refuse)
        stop = max(self.frozen.stops[t] for t in tids)
        return Process(
            pid=pid,
            host_pid=host,
            ppid=inside.get(stat.ppid, 0),
            pgid=int(status["NSpgid"].split()[-1]),
            sid=int(status["NSsid"].split()[-1]),
            exit_signal=stat.exit_signal,
            comm=os.fsencode(stat.comm),
            stopped=stop,
            stop_reported=bool(stop) and stat.exit_code == 0,
            threads=threads,
            mappings=tuple(mappings),
            layout=MemoryLayout(
                stat.start_code,
                stat.end_code,
                stat.start_data,
                stat.end_data,
                stat.start_brk,
                brk,
                stat.start_stack,
                stat.arg_start,
                stat.arg_end,
                stat.env_start,
                stat.env_end,
                proc.read(f"/proc/{host}/auxv"),
                *self.names.executable(host, refuse),
            ),
            descriptors=descriptors,
            cwd=cwd,
            cwd_ghost=cwd_ghost,
            root=self.names.root_of(host, refuse),
            sigactions=actions,
            pending=pending,
            itimers=itimers,
            timers=tuple(posix),
            attributes=carried,
            lock_future=lock_future,
            tty=terminals.controlling(stat.tty),
        )

    def _look(
        self, space: Space, pid: int, pagemap: int, mappings: list[Vma], present: Regions
    ) -> None:
        base = self.live.base
        held = base.stash.of(pid) if base is not None and base.stash is not None else {}
        space.look(pagemap, mappings, present, held, base)
        whole = present if not present.guarded else present.unguarded()
        self.changes[pid] = Changes(space.changes(), whole, space.compared)

    def _shared(self, host: int, mapping: Vma, refuse: Refuse) -> Vma:
        if mapping.kind != "memory":
            return mapping
        try:
            return replace(mapping, memory=self.table.shared.of_mapping(host, mapping))
        except Refused as refused:
            raise refuse(f"maps {refused}", "mapping") from None

    def _still_to_resume(self, pid: int, threads: tuple[Thread, ...]) -> Process | None:
        """The captured process that a restored, stopped one will become when it is continued.

        A stopped job is restored by stopping it just before its threads go back to their captured
        registers, and before what is set last of all; that much is still as it was captured then.
        """
        if not in_interpreter(threads[0].registers.rip) or self.live.origin is None:
            return None
        return self.live.origin.by_pid[pid]

    def _check_process(
        self,
        host: int,
        tids: list[int],
        status: dict[str, str],
        refuse: Refuse,
    ) -> None:
        for name, expected in self.namespaces.items():
            if os.stat(f"/proc/{host}/ns/{name}").st_ino != expected:
                raise refuse(f"has a {name} namespace of its own", f"{name} namespace")
        attributes.check_before_asking(host, tids, self.namespaces, refuse)
        for tid in tids:
            task = status if tid == host else proc.status(host, tid)
            if seccomp.is_under(task, self.filters):
                seccomp.suspend(tid)
            if tid != host:
                for kind, what in (
                    (pidfd.KCMP_FILES, "descriptor table"),
                    (pidfd.KCMP_FS, "working directory"),
                ):
                    if pidfd.kcmp(host, tid, kind):
                        raise refuse(f"has a thread with a {what} of its own", "thread")

    def _ask_process(
        self,
        host: int,
        injection: Injection,
        umask: int,
        refuse: Refuse,
    ) -> _Asked:
        data = injection.data
        itimer_at = signals.SIGNALS * signals.SIGACTION_SIZE
        timer_at = itimer_at + 3 * timers.ITIMER_SIZE
        carried_at = 4096 - attributes.PROCESS_AREA
        try:
            posix = timers.listed(host)
        except timers.Refused as refused:
            raise refuse(f"has {refused}", "timer") from None
        if len(posix) > (carried_at - timer_at) // timers.ITIMERSPEC_SIZE:
            raise refuse(f"has {len(posix)} POSIX timers", "timer")
        calls = signals.capture_calls(data)
        calls += timers.capture_calls(data + itimer_at)
        calls += timers.setting_calls(posix, data + timer_at)
        first = len(calls)
        calls += [(nr.BRK, 0), *attributes.process_calls(data + carried_at)]
        results = injection.run(host, calls)
        buffer = injection.read(0, 4096)
        settled = [
            PosixTimer(
                t.identifier,
                t.clock,
                t.signal,
                t.notify,
                t.value,
                t.tid,
                buffer[timer_at + i * 32 : timer_at + i * 32 + 32],
            )
            for i, t in enumerate(posix)
        ]
        carried = attributes.process(
            host,
            self.live.init,
            self.owner,
            umask,
            results[first + 1 :],
            buffer[carried_at:],
            refuse,
        )
        return (
            signals.parse(buffer),
            timers.parse(buffer[itimer_at:timer_at]),
            settled,
            results[first],
            carried,
        )

    def _ask_thread(self, tid: int, injection: Injection) -> _Answers:
        data = injection.data
        results = injection.run(
            tid,
            [
                (nr.SIGALTSTACK, 0, data),
                (nr.PRCTL, _PR_GET_TID_ADDRESS, data + 32),
                (nr.PRCTL, _PR_GET_SECUREBITS),
                *attributes.thread_calls(data + 64),
            ],
        )
        undo = attributes.put_back_calls(results[3:])
        if undo:
            injection.run(tid, undo)
        buffer = injection.read(0, 64 + attributes.THREAD_AREA)
        address = struct.unpack_from("<Q", buffer, 32)[0]
        asked = attributes.asked(results[3:], buffer[64:])
        return buffer[:24], address, results[2], asked

    def _thread(
        self,
        host: int,
        tid: int,
        answers: _Answers,
        process: Process,
        memory_fd: int,
        refuse: Refuse,
    ) -> Thread:
        altstack, clear_tid, securebits, asked = answers
        status = proc.status(host, tid)
        stat = proc.stat(host, tid)
        carried = attributes.thread(host, tid, self.live.init, stat, asked, refuse)
        registers = ptrace.get_registers(tid)
        if registers.cs != 0x33:
            raise refuse("runs 32-bit code", "registers")
        mask = ptrace.get_sigmask(tid)
        pending = tuple(ptrace.pending(tid, shared=False))
        try:
            fixed, extra = self.waits.restored(
                tid,
                registers,
                memory_fd,
                self.frozen.began,
                signals.first_handler(process, mask, pending),
            )
        except UnknownCall:
            raise refuse(
                "is in a call that was restarted before it could be identified", "system call"
            ) from None
        blocked = registers if fixed.rip != registers.rip else None
        rseq = ptrace.get_rseq(tid)
        if rseq.address:
            abort = _rseq_abort(memory_fd, rseq.address, fixed.rip)
            if abort:
                fixed.rip = abort
        try:
            who = credentials.capture(status, self.owner, securebits)
        except credentials.Refused as refused:
            raise refuse(f"has an {refused}", "credentials") from None
        return Thread(
            tid=int(status["NSpid"].split()[-1]),
            host_tid=tid,
            registers=fixed,
            xstate=ptrace.get_xstate(tid),
            sigmask=mask,
            pending=pending,
            altstack=altstack,
            clear_child_tid=clear_tid,
            robust_list=get_robust_list(tid),
            rseq=rseq,
            attributes=carried,
            credentials=who,
            seccomp=seccomp.capture(tid, status, self.filters),
            memory=extra,
            blocked=blocked,
        )

    # -- the dead ---------------------------------------------------------------------------------

    def _zombies(self, inside: dict[int, int]) -> list[Process]:
        """Children that have ended and are not waited for; they are in no group any more."""
        found = []
        for host, tids in self.frozen.threads.items():
            for tid in tids:
                for child in proc.read(f"/proc/{host}/task/{tid}/children").split():
                    pid = int(child)
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
                            pid=int(status["NSpid"].split()[-1]),
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


def _rseq_abort(memory: int, area: int, rip: int) -> int:
    """Where to continue when the thread was inside a restartable sequence; 0 when it was not."""
    section = struct.unpack("<Q", os.pread(memory, 8, area + 8))[0]
    if not section:
        return 0
    _, _, start, length, abort = struct.unpack("<IIQQQ", os.pread(memory, 32, section))
    return abort if start <= rip < start + length else 0
