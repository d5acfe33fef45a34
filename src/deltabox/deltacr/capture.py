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
from concurrent.futures import Executor
from dataclasses import replace

from ..errors import UnsupportedState
from ..linux import numbers as nr
from ..linux import pidfd, proc, userfaultfd
from . import memory
from .descriptors import DescriptorTable
from .freeze import Frozen, in_interpreter
from .inject import DATA, Injection
from .interrupted import UnknownCall, Waits
from .live import Live
from .look import CommonLook, Look, ThreadLook
from .memories import Memories, refusing
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
from .stash import Changes
from .subject import Refuse, Refused

_PR_GET_SECUREBITS, _PR_GET_TID_ADDRESS = 27, 40
# Fields of a thread that are restored on the last steps, after a stopped job has stopped.
_SET_LAST = (
    *("registers", "xstate", "sigmask", "altstack", "rseq", "memory", "seccomp", "blocked"),
)

# Calls for injection, in the order of their answers; buffers are offsets from DATA.
_ITIMERS_AT = signals.SIGNALS * signals.SIGACTION_SIZE
_TIMERS_AT = _ITIMERS_AT + 3 * timers.ITIMER_SIZE
_CARRIED_AT = 4096 - attributes.PROCESS_AREA
_PROCESS_CALLS = (
    *signals.capture_calls(DATA),
    *timers.capture_calls(DATA + _ITIMERS_AT),
    (nr.BRK, 0),
    *attributes.process_calls(DATA + _CARRIED_AT),
)
_BRK_RESULT = signals.SIGNALS + len(timers.ITIMERS)
_THREAD_CALLS = (
    (nr.SIGALTSTACK, 0, DATA),
    (nr.PRCTL, _PR_GET_TID_ADDRESS, DATA + 32),
    (nr.PRCTL, _PR_GET_SECUREBITS),
    *attributes.thread_calls(DATA + 64),
)

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
    beside: Executor,
) -> tuple[Capture, list[int], dict[int, Changes]]:
    """Everything but the pages, files with shared memory, and which pages may have changed.

    Raises UnsupportedState.

    `base` is a descriptor of the base's root (-1: none); `born` the time.time() of the tree's
    first moment, before which every inode change belongs to the base; `on_external` says what
    becomes of connections to the outside; `beside` has a thread for what can be done meanwhile.
    """
    capturing = _Capturing(live, frozen, owner, externals, waits, base, born, attic, on_external)
    try:
        return capturing.whole(beside), capturing.table.shared.copies, capturing.changes
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
        self.ghosts = Ghosts(live.root, owner, attic, born)
        self.names = Names(live.root, base, born, self.ghosts)
        network = Network(live.init, on_external)
        self.table = DescriptorTable(live, owner, externals, self.ghosts, network)
        self.common = CommonLook(live.init)
        self.filters = self.common.filters
        self.looks: dict[int, Look] = {}
        self.memories: Memories

    def whole(self, beside: Executor) -> Capture:
        inside = proc.inside_pids([self.live.init, *self.frozen.threads])
        stopped = {host: inside[host] for host in self.frozen.threads}
        with Memories(self.live, stopped, self.names, beside) as self.memories:
            return self._whole(inside)

    def _whole(self, inside: dict[int, int]) -> Capture:
        self._check_world()
        try:
            self.table.queues.look()
        except Refused as refused:
            raise UnsupportedState(
                f"the sandbox holds {refused}", pid=1, process="init", object="message queue"
            ) from None
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
        pid = inside[host]
        tids = self.frozen.threads[host]
        tids = [host, *(t for t in tids if t != host)]
        look = self.looks[host] = Look(tids)
        refuse = refusing(host, pid)
        if host not in self.frozen.threads[host]:
            raise refuse("has ended its main thread while others run on", "thread")
        self._check_process(host, tids, look, refuse)
        descriptors = self.table.of_process(host, look, refuse)
        actions, itimers, posix, brk, carried, answers, lock_future, memory_fd = self._ask(
            host, look, tids, refuse
        )
        try:
            partial = Process(
                pid, host, 0, 0, 0, 0, b"", sigactions=actions, pending=look.pending()
            )
            threads = tuple(
                self._thread(tid, look.thread(tid), answers[tid], partial, memory_fd, refuse)
                for tid in tids
            )
        finally:
            os.close(memory_fd)
        mappings = self._mappings(host, refuse)
        self.changes[pid] = self.memories.changes(host)
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
        stat, status = look.stat, look.status
        group = int(status["NSpgid"].split()[-1])
        self.table.inside |= by_host
        self.table.inside[stat.pgrp] = group
        posix = [replace(t, tid=by_host.get(t.tid, 0) if t.notify & 4 else 0) for t in posix]
        if waiting is not None:
            settings = {t.identifier: t.setting for t in waiting.timers}
            posix = [replace(t, setting=settings[t.identifier]) for t in posix]
        cwd, cwd_ghost = self.names.directory(host, "cwd", look, refuse)
        stopped = max(self.frozen.stops[t] for t in tids)
        return Process(
            pid=pid,
            host_pid=host,
            ppid=inside.get(stat.ppid, 0),
            pgid=group,
            sid=int(status["NSsid"].split()[-1]),
            exit_signal=stat.exit_signal,
            comm=os.fsencode(stat.comm),
            stopped=stopped,
            stop_reported=bool(stopped) and stat.exit_code == 0,
            threads=threads,
            mappings=mappings,
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
                look.answers["auxv"],
                *self.names.executable(host, look, refuse),
            ),
            descriptors=descriptors,
            cwd=cwd,
            cwd_ghost=cwd_ghost,
            root=self.names.root_of(host, look, refuse),
            sigactions=actions,
            pending=partial.pending,
            itimers=itimers,
            timers=tuple(posix),
            attributes=carried,
            lock_future=lock_future,
            tty=terminals.controlling(stat.tty),
        )

    def _mappings(self, host: int, refuse: Refuse) -> tuple[Vma, ...]:
        """With pages, checked names and objects; as they were found before if nothing changed."""
        seen = self.memories.of(host)
        if seen.found is not None:
            return seen.found
        mappings = memory.with_pages(seen.known.bare, seen.present)
        mappings = self.names.mapped(host, mappings, refuse)
        mappings = [self._shared(host, m, refuse) for m in mappings]
        found = tuple(
            replace(m, of_base=True)
            if m.pages and m.kind == "file" and self.names.is_pristine(m)
            else m
            for m in mappings
        )
        if all(m.memory < 0 and m.ghost < 0 and self.names.is_settled(m) for m in found):
            self.memories.space(host).learn(seen.present, seen.names, found)
        return found

    def _ask(
        self,
        host: int,
        look: Look,
        tids: list[int],
        refuse: Refuse,
    ) -> tuple[
        tuple[bytes, ...],
        tuple[bytes, ...],
        list[PosixTimer],
        int,
        attributes.ProcessAttributes,
        dict[int, _Answers],
        int,
        int,
    ]:
        """What only the process can tell; and its memory, opened."""
        ignores_trap = bool(int(look.status["SigIgn"], 16) >> 4 & 1)
        known = self.memories.map(host)
        space = self.memories.space(host)
        memory_fd = os.open(f"/proc/{host}/mem", os.O_RDWR | os.O_CLOEXEC)
        try:
            with Injection(
                leader=host,
                memory=memory_fd,
                gap=known.gap,
                vdso=known.vdso,
                ignores_trap=ignores_trap,
            ) as injection:
                mine = self._ask_process(host, look, injection, refuse)
                answers = {tid: self._ask_thread(tid, injection) for tid in tids}
                lock_future = locked.future(host, look.status.get("VmLck"), known.gap)
                if not space.watched and userfaultfd.supported():
                    seen = self.memories.of(host)  # not before: our page is not one of its own
                    space.watch(injection)
                    self.memories.look_for_writes(host, seen)
        except BaseException:
            os.close(memory_fd)
            raise
        return *mine, answers, lock_future, memory_fd

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

    def _check_process(self, host: int, tids: list[int], look: Look, refuse: Refuse) -> None:
        attributes.check_before_asking(host, tids, look, self.common.namespaces, refuse)
        for tid in tids:
            if seccomp.is_under(look.thread(tid).status, self.filters):
                seccomp.suspend(tid)
            if tid != host:
                for kind, what in (
                    (pidfd.KCMP_FILES, "descriptor table"),
                    (pidfd.KCMP_FS, "working directory"),
                ):
                    if pidfd.kcmp(host, tid, kind):
                        raise refuse(f"has a thread with a {what} of its own", "thread")

    def _ask_process(self, host: int, look: Look, injection: Injection, refuse: Refuse) -> _Asked:
        try:
            posix = timers.listed(look.answers["timers"])
        except timers.Refused as refused:
            raise refuse(f"has {refused}", "timer") from None
        if len(posix) > (_CARRIED_AT - _TIMERS_AT) // timers.ITIMERSPEC_SIZE:
            raise refuse(f"has {len(posix)} POSIX timers", "timer")
        calls = _PROCESS_CALLS
        if posix:
            calls = (*calls, *timers.setting_calls(posix, DATA + _TIMERS_AT))
        results = injection.run(host, calls)
        buffer = injection.read(0, 4096)
        size = timers.ITIMERSPEC_SIZE
        settled = [
            replace(t, setting=buffer[_TIMERS_AT + i * size : _TIMERS_AT + (i + 1) * size])
            for i, t in enumerate(posix)
        ]
        carried = attributes.process(
            host,
            look,
            self.common,
            self.owner,
            results[_BRK_RESULT + 1 : len(_PROCESS_CALLS)],
            buffer[_CARRIED_AT:],
            refuse,
        )
        return (
            signals.parse(buffer),
            timers.parse(buffer[_ITIMERS_AT:_TIMERS_AT]),
            settled,
            results[_BRK_RESULT],
            carried,
        )

    def _ask_thread(self, tid: int, injection: Injection) -> _Answers:
        results = injection.run(tid, _THREAD_CALLS)
        undo = attributes.put_back_calls(results[3:])
        if undo:
            injection.run(tid, tuple(undo))
        buffer = injection.read(0, 64 + attributes.THREAD_AREA)
        address = struct.unpack_from("<Q", buffer, 32)[0]
        asked = attributes.asked(results[3:], buffer[64:])
        return buffer[:24], address, results[2], asked

    def _thread(
        self,
        tid: int,
        look: ThreadLook,
        answers: _Answers,
        process: Process,
        memory_fd: int,
        refuse: Refuse,
    ) -> Thread:
        altstack, clear_tid, securebits, asked = answers
        status = look.status
        carried = attributes.thread(look, self.common, asked, refuse)
        registers = look.registers()
        if registers.cs != 0x33:
            raise refuse("runs 32-bit code", "registers")
        mask = look.sigmask
        pending = look.pending()
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
        rseq = look.rseq
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
            xstate=look.xstate,
            sigmask=mask,
            pending=pending,
            altstack=altstack,
            clear_child_tid=clear_tid,
            robust_list=look.robust_list,
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
            look = self.looks[host]
            for tid in tids:
                for pid in look.thread(tid).children():
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
