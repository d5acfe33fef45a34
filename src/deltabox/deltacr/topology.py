"""Who must clone whom, so that parents, sessions and process groups come out as captured.

The kernel gives a process its parent and its session by where it is forked, and no call changes
them freely afterwards: setsid(2) only makes new sessions, setpgid(2) joins groups whose leader is
there.  So the order of clones is found backwards from what must hold (the same problem is described
in CRIU's documentation on restoring process trees):

- a child whose session is not its parent's present one was born before the parent's setsid;
- a child of PID 1 in somebody's session is an orphan: a short-lived helper forks it from within
  that session and exits, and the kernel hands the orphan to PID 1;
- a session or group whose leader is gone is led by a stand-in with the leader's pid, which exits
  once everybody has joined.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ..errors import UnsupportedState
from .model import Capture, Process


@dataclass
class Task:
    """A process to be cloned: one of the capture, or a stand-in for a dead leader."""

    pid: int
    process: Process | None
    before: list[Task] = field(default_factory=list)  # cloned before its own setsid
    after: list[Task] = field(default_factory=list)
    orphans: list[tuple[int, Task]] = field(default_factory=list)  # (helper's pid, orphan)
    stand_ins: list[Task] = field(default_factory=list)  # children it must reap
    leads_session: bool = False
    free: Iterator[int] = field(default_factory=lambda: iter(()))  # PID 1's: pids nobody has

    def spare_pid(self) -> int:
        """A pid for a helper that is gone before the tree runs."""
        return next(self.free)

    @property
    def dies(self) -> bool:
        return self.process is None or self.process.zombie is not None


def arrange(capture: Capture) -> Task:
    """PID 1's task with everything below it."""
    return _Arrangement(capture).root


class _Arrangement:
    def __init__(self, capture: Capture) -> None:
        self.capture = capture
        self.root = Task(1, None)
        self.tasks = {
            p.pid: Task(p.pid, p, leads_session=p.sid == p.pid) for p in capture.processes
        }
        self.children: dict[int, list[Process]] = {}
        for process in capture.processes:
            self.children.setdefault(process.ppid, []).append(process)
        used = {1, *self.tasks}
        for process in capture.processes:
            used |= {process.sid, process.pgid, *(t.tid for t in process.threads)}
        self.root.free = (pid for pid in range(30000, 300, -1) if pid not in used)
        self._birth: dict[int, int | None] = {}
        for process in capture.processes:
            self._place(process)
        for process in capture.processes:
            self._lead_group(process)

    def _born_in(self, process: Process) -> int | None:
        """The session it must be forked in; None when any will do."""
        if process.sid != process.pid:
            return process.sid
        if process.pid not in self._birth:
            self._birth[process.pid] = None
            for child in self.children.get(process.pid, ()):
                need = self._born_in(child)
                if need not in (None, process.pid):
                    self._birth[process.pid] = need
        return self._birth[process.pid]

    def _place(self, process: Process) -> None:
        task = self.tasks[process.pid]
        need = self._born_in(process)
        if process.ppid in (0, 1):
            if need in (None, 1):
                self.root.after.append(task)
                return
            assert need is not None
            leader = self._leader(need)
            if leader.dies:
                leader.after.append(task)  # it exits, and PID 1 inherits
            else:
                leader.orphans.append((self.root.spare_pid(), task))
            return
        parent = self.tasks[process.ppid]
        assert parent.process is not None
        if need is None or need == parent.process.sid:
            parent.after.append(task)
        elif parent.leads_session and need == self._born_in(parent.process):
            parent.before.append(task)
        else:
            raise UnsupportedState(
                f"pid {process.pid} is in a session ({process.sid}) that it can not have been "
                f"born in under its present parent {process.ppid}",
                pid=process.pid,
                process=process.comm.decode(errors="replace"),
                object="session",
            )

    def _leader(self, session: int) -> Task:
        """The task with pid == session, alive, a zombie or a stand-in made now."""
        if session not in self.tasks:
            stand_in = Task(session, None, leads_session=True)
            self.tasks[session] = stand_in
            self.root.after.append(stand_in)
            self.root.stand_ins.append(stand_in)
        return self.tasks[session]

    def _lead_group(self, process: Process) -> None:
        if process.pgid in self.tasks:
            return
        leader = self.root if process.sid == 1 else self._leader(process.sid)
        stand_in = Task(process.pgid, None)
        self.tasks[process.pgid] = stand_in
        leader.after.append(stand_in)
        if leader.dies and leader is not self.root:
            # it would outlive its parent's wish to reap it: PID 1 inherits and reaps it
            self.root.stand_ins.append(stand_in)
        else:
            leader.stand_ins.append(stand_in)


def everyone(root: Task) -> list[Task]:
    """All tasks below PID 1, parents first."""
    out: list[Task] = []
    for task in (*root.before, *root.after, *(t for _, t in root.orphans)):
        out.append(task)
        out += everyone(task)
    return out
