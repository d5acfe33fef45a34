"""Everything that can be seen of a stopped process from outside, seen in one go.

Which questions there are depends only on the number of threads, so the lists are made once and
asked of every process (linux/ask.py).  What the answers mean is each object's own business.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from collections.abc import Sequence as Items
from functools import cached_property, lru_cache

from ..linux import proc
from ..linux.ask import Answers, Descriptor, Kind, Questions
from ..linux.ptrace import NT_PRSTATUS, NT_X86_XSTATE, SIGINFO_SIZE, Registers, Rseq
from ..linux.sched import Scheduling

NAMESPACES = (  # as in ask.c
    *("mnt", "pid", "net", "ipc", "uts", "user", "cgroup", "time"),
    *("pid_for_children", "time_for_children"),
)
_AT_SYSINFO_EHDR = 33
_FILES = (
    *("auxv", "timers", "autogroup", "attr/current"),
    *("loginuid", "oom_score_adj", "coredump_filter", "limits"),
)


class Look:
    """The answers of one process; `tids` are the host's, the main thread's first."""

    def __init__(self, tids: Items[int]) -> None:
        self.answers: Answers = questions(len(tids)).ask(tids)
        self._index = {tid: index for index, tid in enumerate(tids)}

    @cached_property
    def stat(self) -> proc.Stat:
        return proc.parse_stat(self.answers["0/stat"])

    @cached_property
    def status(self) -> proc.Status:
        return proc.Status(self.answers["0/status"])

    @cached_property
    def vdso(self) -> int:
        """Where the kernel has put the vdso (getauxval(3), AT_SYSINFO_EHDR); 0 if it has not."""
        pairs = struct.iter_unpack("=QQ", self.answers["auxv"])
        return next((value for key, value in pairs if key == _AT_SYSINFO_EHDR), 0)

    def namespaces(self, tid: int | None = None) -> tuple[int, ...]:
        """The inodes of NAMESPACES; 0 for one in which nobody has been born yet."""
        raw = self.answers["0/ns" if tid is None else f"{self._index[tid]}/ns"]
        return struct.unpack(f"={len(NAMESPACES)}Q", raw)

    def file(self, name: str) -> bytes | None:
        """The contents of /proc/PID/NAME, where there is such a file that we may read."""
        return self.answers.get(name)

    def descriptors(self) -> Iterator[tuple[bytes, Descriptor]]:
        return self.answers.descriptors("descriptors")

    def pending(self) -> tuple[bytes, ...]:
        """The siginfo_t of signals that any thread may take."""
        return _infos(self.answers["pending"])

    def thread(self, tid: int) -> ThreadLook:
        return ThreadLook(self.answers, self._index[tid])


class ThreadLook:
    """The answers of one thread."""

    def __init__(self, answers: Answers, index: int) -> None:
        self._answers = answers
        self._at = f"{index}/"

    def __getitem__(self, name: str) -> bytes:
        return self._answers[self._at + name]

    @cached_property
    def status(self) -> proc.Status:
        return proc.Status(self["status"])

    @cached_property
    def stat(self) -> proc.Stat:
        return proc.parse_stat(self["stat"])

    def registers(self) -> Registers:
        return Registers.unpack(self["registers"])

    @property
    def xstate(self) -> bytes:
        """The whole extended state in the standard XSAVE layout."""
        return self["xstate"]

    @property
    def sigmask(self) -> int:
        """Blocked signals; inside sigsuspend and ppoll the mask to come back to."""
        return int.from_bytes(self["mask"], "little")

    def pending(self) -> tuple[bytes, ...]:
        return _infos(self["pending"])

    @property
    def rseq(self) -> Rseq:
        return Rseq(*struct.unpack("=QIII4x", self["rseq"]))

    @property
    def robust_list(self) -> tuple[int, int]:
        """(address of the head, its size); zeros when the thread has none."""
        head, size = struct.unpack("=QQ", self["robust"])
        return head, size

    @property
    def dispatches_calls(self) -> bool:
        """PR_SET_SYSCALL_USER_DISPATCH; False where the kernel cannot tell."""
        raw = self._answers.get(self._at + "dispatch")
        return raw is not None and any(raw)

    @property
    def slack(self) -> bytes:
        """The timer slack, where the kernel tells."""
        return self._answers.get(self._at + "slack") or b""

    @property
    def scheduling(self) -> Scheduling:
        return Scheduling.unpack(self["scheduling"])

    @property
    def affinity(self) -> bytes:
        return self["affinity"]

    @property
    def io_priority(self) -> int:
        return int.from_bytes(self["io priority"], "little")

    def children(self) -> list[int]:
        return [int(pid) for pid in self["children"].split()]


@lru_cache(maxsize=256)
def questions(threads: int) -> Questions:
    """What to ask of a stopped process with so many threads."""
    ask = Questions()
    for name in _FILES:
        ask.add(name, Kind.READ, f"/proc/%d/{name}")
    for name in ("exe", "cwd", "root"):
        ask.add(name, Kind.LINK, f"/proc/%d/{name}")
        ask.add(f"{name} facts", Kind.STAT, f"/proc/%d/{name}")
    ask.add("descriptors", Kind.DESCRIPTORS)
    ask.add("pending", Kind.SIGNALS, more=1)
    for who in range(threads):
        task = "/proc/%d/task/%d"
        for name in ("stat", "status", "children", "personality"):
            ask.add(f"{who}/{name}", Kind.READ, f"{task}/{name}", who=who)
        ask.add(f"{who}/slack", Kind.READ, "/proc/%2$d/timerslack_ns", who=who)
        ask.add(f"{who}/ns", Kind.NAMESPACES, f"{task}/ns", who=who)
        ask.add(f"{who}/registers", Kind.REGISTERS, who=who, more=NT_PRSTATUS)
        ask.add(f"{who}/xstate", Kind.REGISTERS, who=who, more=NT_X86_XSTATE)
        ask.add(f"{who}/mask", Kind.SIGNAL_MASK, who=who)
        ask.add(f"{who}/pending", Kind.SIGNALS, who=who)
        ask.add(f"{who}/rseq", Kind.RSEQ, who=who)
        ask.add(f"{who}/dispatch", Kind.DISPATCH, who=who)
        ask.add(f"{who}/robust", Kind.ROBUST_LIST, who=who)
        _scheduling(ask, f"{who}/", who)
    return ask


def _scheduling(ask: Questions, at: str, who: int) -> None:
    ask.add(f"{at}scheduling", Kind.SCHEDULING, who=who)
    ask.add(f"{at}affinity", Kind.AFFINITY, who=who)
    ask.add(f"{at}io priority", Kind.IO_PRIORITY, who=who)


def _common() -> Questions:
    ask = Questions()
    for name in ("attr/current", "loginuid", "oom_score_adj", "coredump_filter"):
        ask.add(name, Kind.READ, f"/proc/%d/{name}")
    ask.add("ns", Kind.NAMESPACES, "/proc/%d/ns")
    ask.add("status", Kind.READ, "/proc/%d/status")
    _scheduling(ask, "", 0)
    return ask


_COMMON = _common()


class CommonLook:
    """What PID 1 has, and what all others began with."""

    def __init__(self, init: int) -> None:
        answers = _COMMON.ask([init])
        self.file = answers.get
        self.scheduling = Scheduling.unpack(answers["scheduling"])
        self.affinity = answers["affinity"]
        self.io_priority = int.from_bytes(answers["io priority"], "little")
        self.filters = int(proc.Status(answers["status"])["Seccomp_filters"])
        self.namespaces: tuple[int, ...] = struct.unpack(f"={len(NAMESPACES)}Q", answers["ns"])


def _infos(raw: bytes) -> tuple[bytes, ...]:
    return tuple(raw[at : at + SIGINFO_SIZE] for at in range(0, len(raw), SIGINFO_SIZE))
