"""Compile a capture into the program that rebuilds it.

Two programs.  The first makes PID 1 and its world (boot.py) with the files open that are mapped;
nothing in it depends on the moment of a rollback, so it may have run long before.  The second is a
request to that PID 1.  Its shape (numbers are barriers over the whole tree):

    PID 1        opens every description once; clones the roots; tells the keeper
    each process clones its children; setsid, setpgid             0  groups exist  1  all joined
                 memory, descriptors, directories; children that are dead or stopped are waited for
                 handlers, limits, identity; threads; credentials, rseq  2  ready
    PID 1        tells the keeper, waits for the release               3  go
    each thread  timers, rt_sigreturn

Everything is decided here; the interpreter only executes.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Sequence as Items

from ..errors import UnsupportedState
from ..linux import namespace as ns
from ..linux import numbers as nr
from . import boot, frame, kinds, memory, reports
from .boot import First, World
from .model import Capture, Process, Thread
from .objects import (
    attributes,
    credentials,
    epoll,
    ghosts,
    kernel_files,
    locked,
    locks,
    mqueues,
    remains,
    shared_memory,
    signals,
    sysv,
    terminals,
    timers,
)
from .rebuild import Entry, Rebuild, nothing
from .records import BARRIERS, FRAMES, Program, Ref, Sealed, Sequence
from .stash import Stash
from .topology import Task, arrange, everyone

_GROUPS_EXIST, _JOINED, _READY, _GO, _LOCAL = range(5)
_PR_SET_NAME = 15
_ARCH_SET_GS, _ARCH_SET_FS = 0x1001, 0x1002
_P_PID, _WSTOPPED, _WEXITED, _WNOWAIT = 1, 2, 4, 0x01000000
_WALL = 0x40000000
_MADV_DONTFORK, _MADV_DOFORK = 10, 11
_O_CLOEXEC, _O_PATH = 0o2000000, 0o10000000
_F_SETSIG, _F_SETOWN_EX, _O_ASYNC = 10, 15, 0o20000


def external_inputs(capture: Capture) -> list[str]:
    """Keys of the external pipes that some process still holds, in order of first use."""
    return list(dict.fromkeys(d.key for d in capture.descriptions if d.kind == "external"))


def compile_program(
    capture: Capture, stash: Stash, *, network: str, limits: Items[tuple[int, int]]
) -> tuple[Sealed, First]:
    """(the program that rebuilds the tree, the one that makes its PID 1)."""
    return _Compiler(capture, stash, network, limits).build()


def _announced(path: str | int) -> bool:
    """Whether the keeper may still write it, between PID 1's start and the restore."""
    return isinstance(path, str) and path.startswith(("/etc/", "/run/", "/var/lib/"))


class _Compiler:
    def __init__(
        self,
        capture: Capture,
        stash: Stash,
        network: str,
        limits: Items[tuple[int, int]],
    ) -> None:
        self.capture = capture
        self.stash = stash
        self.extents = stash.extents()
        self.sizes = stash.sizes()
        self.limits = limits
        self.slack = attributes.Slack(capture.processes)
        self.keys = external_inputs(capture)
        self.program = Program(
            *self.keys, *(s.holder for s in shared_memory.brought(capture.shared))
        )
        self.world = World(capture.hostname, capture.domainname, network)
        self.root = arrange(capture)
        self.tasks = everyone(self.root)
        numbers = [d.number for p in capture.processes for d in p.descriptors]
        numbers += [epoll.highest(d) for d in capture.descriptions if d.kind == "epoll"]
        highest = max(numbers, default=2)
        self.init = self.program.root
        self.rebuild = Rebuild(
            self.program, self.init, capture, max(highest + 1, 64 + len(self.program.inputs))
        )
        self.files: dict[tuple[str | int, int], int] = {}  # path, or index of a ghost; flags
        self.next_local = _LOCAL
        self.running = sum(len(p.threads) for p in capture.processes if p.threads and not p.stopped)
        self.zero_time = self.program.data(bytes(16))
        self.child_signal = self.program.data(struct.pack("<Q", 1 << (boot.SIGCHLD - 1)))

    def build(self) -> tuple[Sealed, First]:
        program, init = self.program, self.init
        mapped = self._mapped()
        first = boot.first(
            self.world, lambda made, do: self._open_mapped(made, do, mapped, announced=False)
        )
        shared_memory.make(self.rebuild)
        mqueues.restore(self.rebuild, self.capture.queues)
        self._descriptions("open")
        self._open_mapped(program, init, mapped, announced=True)
        self.files |= ghosts.restore(self.rebuild)
        self._descriptions("link")
        locks.restore(self.rebuild)
        self._check_room()
        self._clone_all(init, self.root)
        init.keep_to_itself()
        # What a clone inherits is a property of the memory that all restores of this template
        # share: the keeper lets the next one begin when this one says so.
        init.call(nr.WRITE, boot.REQUESTS, program.data(bytes(8)), 8, what="tell of the clones")
        everybody = len(self.tasks) + 1
        init.barrier(_GROUPS_EXIST, everybody)
        init.barrier(_JOINED, everybody)
        for stand_in in self.root.stand_ins:
            init.call(nr.WAIT4, stand_in.pid, 0, _WALL, 0, what="reap a stand-in")
        for process in self.capture.processes:
            if process.ppid in (0, 1) and process.stopped:
                init.call(nr.WAITID, _P_PID, process.pid, 0, _WSTOPPED, 0, what="wait for a stop")
        self._descriptions("joined")
        self._owners()
        clocks = self._starting()
        init.barrier(_READY, self.running + 1)
        shared_memory.finish(self.rebuild)
        sysv.finish(self.rebuild)
        if not clocks:
            self._close_all()
        self._set_last_pid(init)
        boot.answer(program, init)
        buffer = program.data(bytes(8))
        init.call(nr.READ, boot.REQUESTS, buffer, 8, what="wait for the release")
        if clocks:
            self._descriptions("start")
            self._close_all()
        init.barrier(_GO, self.running + 1)
        boot.serve_for_ever(init)
        return program.seal(), first

    # -- PID 1 --------------------------------------------------------------------------------

    def _descriptions(self, step: str) -> None:
        """Let every kind do its part of one step."""
        entries: dict[str, list[Entry]] = {}
        for index, description in enumerate(self.capture.descriptions):
            if kinds.BY_NAME[description.kind].each is None:
                entry = (self.rebuild.number(index), description)
                entries.setdefault(description.kind, []).append(entry)
        for kind in kinds.KINDS:
            found = [entry for name in kind.names for entry in entries.get(name, ())]
            if found:
                getattr(kind, step)(self.rebuild, found)

    def _starting(self) -> bool:
        """Whether something has to be done after the release."""
        return bool(self.program.handed) or any(
            kinds.BY_NAME[d.kind].start is not nothing for d in self.capture.descriptions
        )

    def _close_all(self) -> None:
        """PID 1 itself keeps nothing of what the processes have open."""
        self.init.call(nr.CLOSE_RANGE, boot.OWN, (1 << 32) - 1, 0)
        self.init.call(nr.CLOSE_RANGE, 0, boot.REQUESTS - 1, 0)  # what came with the request

    def _owners(self) -> None:
        """Whom descriptions send signals to; every pid exists by now."""
        for index, description in enumerate(self.capture.descriptions):
            owner = description.owner
            if owner is None:
                continue
            number = self.rebuild.number(index)
            if owner.target:
                whom = self.program.data(struct.pack("<ii", owner.kind, owner.target))
                self.init.call(nr.FCNTL, number, _F_SETOWN_EX, whom, what="F_SETOWN_EX")
            if owner.signal:
                self.init.call(nr.FCNTL, number, _F_SETSIG, owner.signal, what="F_SETSIG")
            if owner.enabled:
                flags = description.flags & ~3 | _O_ASYNC
                self.init.call(nr.FCNTL, number, 4, flags, what="O_ASYNC")

    def _mapped(self) -> list[tuple[str, int, int]]:
        """Files that are mapped or executed, with flags and a number: every process finds them
        open.
        """
        found: dict[tuple[str, int], int] = {}
        for process in self.capture.processes:
            wanted = [
                (m.path, memory.open_mode(m))
                for m in process.mappings
                if m.kind == "file" and m.ghost < 0 and not self.stash.has_file(process.pid, m)
            ]
            if process.layout is not None and process.layout.ghost < 0:
                wanted.append((process.layout.exe, 0))
            for key in wanted:
                if key not in found:
                    found[key] = self.rebuild.reserve()
        self.files.update(found.items())
        return [(path, mode, number) for (path, mode), number in found.items()]

    def _open_mapped(
        self,
        program: Program,
        do: Sequence,
        mapped: Items[tuple[str, int, int]],
        *,
        announced: bool,
    ) -> None:
        """Open those that the keeper may still write, or all others."""
        opened = program.variable()
        for path, mode, number in mapped:
            if _announced(path) == announced:
                name = program.text(os.fsencode(path))
                flags = mode | _O_CLOEXEC
                do.call(nr.OPENAT, -100, name, flags, save=opened, what=f"open {path}")
                do.call(nr.DUP3, opened, number, _O_CLOEXEC)
                do.call(nr.CLOSE, opened)

    def _check_room(self) -> None:
        number = self.rebuild.numbers + max(
            (len(p.descriptors) for p in self.capture.processes), default=0
        )
        if number >= self.limits[7][1]:
            raise UnsupportedState(
                f"restoring the tree needs {number} descriptors, more than RLIMIT_NOFILE",
                object="descriptors",
                errno=errno.EMFILE,
            )

    def _set_last_pid(self, init: Sequence) -> None:
        opened = self.program.variable()
        value = str(self.capture.last_pid).encode()
        init.call(
            nr.OPENAT,
            -100,
            self.program.text("/proc/sys/kernel/ns_last_pid"),
            1,
            save=opened,
            what="open ns_last_pid",
        )
        init.call(nr.WRITE, opened, self.program.data(value), len(value), what="set ns_last_pid")
        init.call(nr.CLOSE, opened)

    # -- processes ----------------------------------------------------------------------------

    def _clone(self, do: Sequence, task: Task, exit_signal: int | None = None) -> None:
        program = self.program
        body = program.sequence(f"pid {task.pid}")
        signal = exit_signal
        if signal is None:
            signal = task.process.exit_signal if task.process is not None else 0
        arguments = program.clone_args(
            flags=0, exit_signal=signal, pid=task.pid, stack=program.stack()
        )
        threads = task.process.threads if task.process is not None else ()
        self.slack.before_clone(do, threads[0] if threads else None)
        do.clone(arguments, body)
        self._process(body, task)

    def _clone_all(self, do: Sequence, task: Task) -> None:
        carried = self._carried(do, task)
        for child in task.before:
            self._carry(do, child, carried)
            self._clone(do, child)
        if task.leads_session:
            do.call(nr.SETSID, what="setsid")
            terminals.take_control(self.rebuild, do, task.process)
        # the biggest first: it has the most to do while the others are still being cloned
        for child in sorted(task.after, key=lambda t: -self.sizes.get(t.pid, 0)):
            # a child that will be PID 1's, or a stand-in, ends without a signal to this parent
            silent = child.process is None or (
                child.process.ppid != task.pid and task is not self.root
            )
            self._carry(do, child, carried)
            self._clone(do, child, 0 if silent else None)
        for helper_pid, orphan in task.orphans:
            self._carry(do, orphan, carried)
            self._clone_orphan(do, helper_pid, orphan)
        self.slack.after_clones(do)

    def _carried(self, do: Sequence, task: Task) -> set[int]:
        """Whose parts of the stash the clones of a task inherit, to begin with.

        Everybody has what was carried to him. PID 1 shares the template's memory, where an earlier
        program may have ended half-way, so it puts everything aside first.
        """
        if task is not self.root:
            return {task.pid, *(t.pid for t in everyone(task))} & self.extents.keys()
        for ranges in self.extents.values():
            self._advise(do, ranges, _MADV_DONTFORK)
        return set()

    def _carry(self, do: Sequence, child: Task, carried: set[int]) -> None:
        """Let a clone inherit only the parts of the stash that it or its children need.

        Copying page tables is most of what a clone costs.
        """
        wanted = {child.pid, *(t.pid for t in everyone(child))} & self.extents.keys()
        for pid in sorted(wanted ^ carried):
            self._advise(do, self.extents[pid], _MADV_DOFORK if pid in wanted else _MADV_DONTFORK)
        carried.clear()
        carried |= wanted

    def _advise(self, do: Sequence, ranges: Items[tuple[int, int]], advice: int) -> None:
        for low, high in ranges:
            # ENOMEM only says that there are holes in between
            do.call(nr.MADVISE, low, high - low, advice, may_fail=True)

    def _clone_orphan(self, do: Sequence, helper_pid: int, orphan: Task) -> None:
        program = self.program
        helper = program.sequence(f"helper {helper_pid}")
        arguments = program.clone_args(flags=0, pid=helper_pid, stack=program.stack())
        do.clone(arguments, helper)
        self._clone(helper, orphan)
        helper.call(nr.EXIT, 0)
        do.call(nr.WAIT4, helper_pid, 0, _WALL, 0, what="reap a helper")

    def _process(self, do: Sequence, task: Task) -> None:
        everybody = len(self.tasks) + 1
        process = task.process
        self._clone_all(do, task)
        terminals.give_up_control(self.rebuild, do, process)
        leads_group = process is None or process.pgid == task.pid
        if leads_group and not task.leads_session:
            do.call(nr.SETPGID, 0, 0, what="setpgid")
        # only who joins a group needs its leader, and only who is to end needs the others
        do.barrier(_GROUPS_EXIST, everybody, wait=not leads_group)
        if process is not None and not leads_group:
            do.call(nr.SETPGID, 0, process.pgid, what=f"setpgid({process.pgid})")
        waits = task.dies or bool(task.stand_ins) or self._opens_own(process)
        do.barrier(_JOINED, everybody, wait=waits or terminals.sets_foreground(process))
        terminals.set_foreground(self.rebuild, do, process)
        for stand_in in task.stand_ins:
            do.call(nr.WAIT4, stand_in.pid, 0, _WALL, 0, what="reap a stand-in")
        if process is None:
            do.call(231, 0)
        elif process.zombie is not None:
            self._die(do, process)
        else:
            self._live(do, process)

    def _die(self, do: Sequence, process: Process) -> None:
        """Become a zombie with the captured wait status."""
        assert process.zombie is not None
        remains.restore(
            self.program,
            do,
            process.pid,
            process.comm,
            process.zombie,
            process.remains,
            self.limits,
        )

    def _live(self, do: Sequence, process: Process) -> None:
        program = self.program
        for low, high in self.extents.get(process.pid, ()):
            # what its own clones did not inherit (`_carry`), the program's later ones shall
            do.call(nr.MADVISE, low, high - low, _MADV_DOFORK, may_fail=True)
        memory.restore(self.rebuild, do, process, self.stash, self.files)
        self._frames(do, process)
        memory.drop_inherited(program, do)
        assert process.layout is not None
        layout = process.layout
        exe = layout.ghost if layout.ghost >= 0 else layout.exe
        memory.layout(program, do, process, self.files[exe, 0])
        reports.send_watcher(self.rebuild, do, process)
        self._directory(do, process)
        self._descriptors(do, process)
        self._await_children(do, process)
        signals.restore_handlers(program, do, process)
        attributes.restore_process(program, do, process, self.limits)
        memory.advise(do, process)
        memory.guard_and_seal(do, process)
        locked.restore(program, do, process, self.limits)
        if process.root != "/":  # last: until here /proc is needed
            do.call(nr.CHROOT, program.text(os.fsencode(process.root)), what="chroot")
        local = None
        if process.stopped:
            local = (self._local(), self._local())
        for thread in process.threads[1:]:
            body = program.sequence(f"pid {process.pid} thread {thread.tid}")
            arguments = program.clone_args(
                flags=ns.CLONE_VM
                | ns.CLONE_FS
                | ns.CLONE_FILES
                | ns.CLONE_SIGHAND
                | ns.CLONE_THREAD
                | ns.CLONE_SYSVSEM,
                pid=thread.tid,
                stack=program.stack(),
            )
            self.slack.before_clone(do, thread)
            do.clone(arguments, body)
            self._thread(body, process, thread, local)
        self._thread(do, process, process.threads[0], local)

    def _local(self) -> int:
        index = self.next_local
        if index >= BARRIERS:
            raise UnsupportedState("too many stopped processes", object="process")
        self.next_local += 1
        return index

    def _frames(self, do: Sequence, process: Process) -> None:
        """The only memory of ours that stays: each thread's last frame, and its exit if any."""
        built = frame.build(process.threads, signals.handled(process.sigactions))
        size = built.code_at - FRAMES
        more = (len(built.code) + 4095) & ~4095
        do.call(nr.MMAP, FRAMES, size + more, 3, 0x100022, -1, 0, what="map frames")
        do.copy(FRAMES, self.program.data(built.content, 64), len(built.content))
        if built.code:
            do.copy(built.code_at, self.program.data(built.code), len(built.code))
            do.call(nr.MPROTECT, built.code_at, more, 5, what="protect exits")
        for thread in process.threads:
            self._frame_at[process.pid, thread.tid] = built.frames[thread.tid]

    @property
    def _frame_at(self) -> dict[tuple[int, int], int]:
        found: dict[tuple[int, int], int] = self.__dict__.setdefault("_frame_table", {})
        return found

    def _directory(self, do: Sequence, process: Process) -> None:
        if process.cwd_ghost >= 0:
            do.call(nr.FCHDIR, self.files[process.cwd_ghost, _O_PATH], what="fchdir")
        elif process.cwd != "/":
            path = self.program.text(os.fsencode(process.cwd))
            do.call(nr.CHDIR, path, what=f"chdir {process.cwd}")

    def _descriptors(self, do: Sequence, process: Process) -> None:
        descriptions = self.capture.descriptions
        sources: dict[int, int] = {}
        for index in dict.fromkeys(d.description for d in process.descriptors):
            own = kinds.BY_NAME[descriptions[index].kind].each
            if own is not None:
                # opened by the process itself, and kept out of the way for the moment
                sources[index] = self.rebuild.numbers + len(sources)
                own(self.rebuild, do, process, sources[index], descriptions[index])
        low = 0
        for descriptor in process.descriptors:
            if descriptor.number > low:
                do.call(nr.CLOSE_RANGE, low, descriptor.number - 1, 0)
            index = descriptor.description
            do.call(
                nr.DUP3,
                sources.get(index, self.rebuild.number(index)),
                descriptor.number,
                _O_CLOEXEC if descriptor.cloexec else 0,
                what=f"fd {descriptor.number}",
            )
            low = descriptor.number + 1
        do.call(nr.CLOSE_RANGE, low, (1 << 32) - 1, 0)
        added: set[int] = set()
        for descriptor in process.descriptors:
            description = descriptions[descriptor.description]
            if description.kind == "epoll" and descriptor.description not in added:
                added.add(descriptor.description)
                for watch in epoll.own_watches(description, process.pid):
                    epoll.add(self.rebuild, do, descriptor.number, watch)
        locks.restore_own(self.rebuild, do, process)

    def _opens_own(self, process: Process | None) -> bool:
        """Whether it must open something itself, when every pid exists."""
        return process is not None and (
            process.cwd.startswith("/proc/")
            or any(
                kinds.BY_NAME[self.capture.descriptions[d.description].kind].each is not None
                for d in process.descriptors
            )
        )

    def _await_children(self, do: Sequence, process: Process) -> None:
        awaited = False
        for child in self.capture.processes:
            if child.ppid != process.pid:
                continue
            if child.zombie is not None:
                do.call(
                    nr.WAITID,
                    _P_PID,
                    child.pid,
                    0,
                    _WEXITED | _WNOWAIT,
                    0,
                    what="wait for a zombie",
                )
                awaited = True
            elif child.stopped:
                flags = _WSTOPPED | (0 if child.stop_reported else _WNOWAIT)
                do.call(nr.WAITID, _P_PID, child.pid, 0, flags, 0, what="wait for a stop")
                awaited = True
        if awaited:
            signals.drop_child_signal(self.program, do, self.zero_time, self.child_signal)

    # -- threads ------------------------------------------------------------------------------

    def _thread(
        self, do: Sequence, process: Process, thread: Thread, local: tuple[int, int] | None
    ) -> None:
        program = self.program
        leader = thread is process.threads[0]
        if thread.robust_list[0]:
            do.call(nr.SET_ROBUST_LIST, *thread.robust_list, what="robust list")
        do.call(nr.SET_TID_ADDRESS, thread.clear_child_tid)
        do.call(nr.ARCH_PRCTL, _ARCH_SET_FS, thread.registers.fs_base)
        do.call(nr.ARCH_PRCTL, _ARCH_SET_GS, thread.registers.gs_base)
        for address, content in thread.memory:
            do.copy(address, program.data(content), len(content))
        attributes.restore_thread(program, do, thread)
        credentials.restore(program, do, thread.credentials)
        attributes.restore_after_credentials(do, thread)
        signals.restore_pending(program, do, process, thread)
        if thread.rseq.address:
            # the interpreter is in no critical section, so the kernel only notes the cpu here
            do.call(
                nr.RSEQ,
                thread.rseq.address,
                thread.rseq.size,
                0,
                thread.rseq.signature,
                what="rseq",
            )
        if leader:
            signals.unblock_ignored(program, do, process)
        if local is None:
            do.barrier(_READY, self.running + 1)
        else:
            do.barrier(local[0], len(process.threads))
        if leader:
            # every thread has changed its credentials by now, and each change cleared this
            timers.create(program, do, process)
            attributes.restore_last(program, do, process, self.limits)
        do.late = True
        if leader:
            kernel_files.position(self.rebuild, do, process)
        if local is None:
            do.barrier(_GO, self.running + 1, sleep=True)
        else:
            if leader:
                do.call(nr.KILL, process.pid, process.stopped)
            do.barrier(local[1], len(process.threads))
        if leader:
            timers.start(program, do, process)
        do.resume(self._frame_at[process.pid, thread.tid], FRAMES, Ref(0), program.length)
