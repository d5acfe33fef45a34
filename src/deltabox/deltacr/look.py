"""Everything that can be seen of a stopped process from outside, seen in one go.

Which questions there are depends only on the process and its threads, so the list is made once and
asked at every checkpoint (linux/ask.py).  What the answers mean is each object's own business.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from collections.abc import Sequence as Items
from functools import cached_property

from ..linux import proc
from ..linux.ask import Answers, Descriptor, Kind, Questions
from ..linux.ptrace import NT_PRSTATUS, NT_X86_XSTATE, SIGINFO_SIZE, Registers, Rseq
from ..linux.sched import Scheduling

PROCESS_NAMESPACES = (
    *("mnt", "pid", "net", "ipc", "uts", "user", "cgroup", "time"),
    *("pid_for_children", "time_for_children"),
)
THREAD_NAMESPACES = ("net", "ipc", "uts", "cgroup", "pid_for_children", "time_for_children")
_FILES = (
    *("stat", "status", "auxv", "timers", "autogroup", "attr/current"),
    *("loginuid", "oom_score_adj", "coredump_filter"),
)


class Look:
    """The answers of one process. `host` ids; the main thread is the first of `tids`."""

    def __init__(self, questions: Questions) -> None:
        self.answers: Answers = questions.ask()

    @cached_property
    def stat(self) -> proc.Stat:
        return proc.parse_stat(self.answers["stat"])

    @cached_property
    def status(self) -> proc.Status:
        return proc.Status(self.answers["status"])

    def namespace(self, name: str, tid: int = 0) -> int | None:
        """The inode of a namespace; None where nobody has been born in it yet."""
        raw = self.answers.get(f"{tid}/ns/{name}" if tid else f"ns/{name}")
        return None if raw is None else struct.unpack_from("=QQ", raw)[1]

    def file(self, name: str) -> bytes | None:
        """The contents of /proc/PID/NAME, where there is such a file that we may read."""
        return self.answers.get(name)

    def descriptors(self) -> Iterator[tuple[bytes, Descriptor]]:
        return self.answers.descriptors("descriptors")

    def pending(self) -> tuple[bytes, ...]:
        """The siginfo_t of signals that any thread may take."""
        return _infos(self.answers["pending"])

    def thread(self, tid: int) -> ThreadLook:
        return ThreadLook(self.answers, tid)


class ThreadLook:
    """The answers of one thread."""

    def __init__(self, answers: Answers, tid: int) -> None:
        self._answers = answers
        self._at = f"{tid}/"

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


def questions(host: int, tids: Items[int]) -> Questions:
    """What to ask of a stopped process with these threads."""
    ask = Questions()
    at = f"/proc/{host}"
    for name in _FILES:
        ask.add(name, Kind.READ, f"{at}/{name}")
    for name in PROCESS_NAMESPACES:
        ask.add(f"ns/{name}", Kind.STAT, f"{at}/ns/{name}")
    for name in ("exe", "cwd", "root"):
        ask.add(name, Kind.LINK, f"{at}/{name}")
        ask.add(f"{name} facts", Kind.STAT, f"{at}/{name}")
    ask.add("descriptors", Kind.DESCRIPTORS, who=host)
    ask.add("pending", Kind.SIGNALS, who=host, more=1)
    for tid in tids:
        task = f"{at}/task/{tid}"
        for name in ("stat", "status", "children", "personality"):
            ask.add(f"{tid}/{name}", Kind.READ, f"{task}/{name}")
        for name in THREAD_NAMESPACES if tid != host else ():
            ask.add(f"{tid}/ns/{name}", Kind.STAT, f"{task}/ns/{name}")
        ask.add(f"{tid}/registers", Kind.REGISTERS, who=tid, more=NT_PRSTATUS)
        ask.add(f"{tid}/xstate", Kind.REGISTERS, who=tid, more=NT_X86_XSTATE)
        ask.add(f"{tid}/mask", Kind.SIGNAL_MASK, who=tid)
        ask.add(f"{tid}/pending", Kind.SIGNALS, who=tid)
        ask.add(f"{tid}/rseq", Kind.RSEQ, who=tid)
        ask.add(f"{tid}/dispatch", Kind.DISPATCH, who=tid)
        ask.add(f"{tid}/robust", Kind.ROBUST_LIST, who=tid)
        _scheduling(ask, f"{tid}/", tid)
    return ask


def _scheduling(ask: Questions, at: str, tid: int) -> None:
    ask.add(f"{at}scheduling", Kind.SCHEDULING, who=tid)
    ask.add(f"{at}affinity", Kind.AFFINITY, who=tid)
    ask.add(f"{at}io priority", Kind.IO_PRIORITY, who=tid)


class Common:
    """What PID 1 has, and what all others began with."""

    def __init__(self, init: int) -> None:
        self._ask = Questions()
        for name in ("attr/current", "loginuid", "oom_score_adj", "coredump_filter"):
            self._ask.add(name, Kind.READ, f"/proc/{init}/{name}")
        for name in PROCESS_NAMESPACES[:8]:
            self._ask.add(f"ns/{name}", Kind.STAT, f"/proc/{init}/ns/{name}")
        _scheduling(self._ask, "", init)

    def look(self) -> CommonLook:
        return CommonLook(self._ask.ask())


class CommonLook:
    """The answers of PID 1."""

    def __init__(self, answers: Answers) -> None:
        self.file = answers.get
        self.scheduling = Scheduling.unpack(answers["scheduling"])
        self.affinity = answers["affinity"]
        self.io_priority = int.from_bytes(answers["io priority"], "little")
        self.namespaces = {
            name: answers.facts(f"ns/{name}").inode for name in PROCESS_NAMESPACES[:8]
        }


def _infos(raw: bytes) -> tuple[bytes, ...]:
    return tuple(raw[at : at + SIGINFO_SIZE] for at in range(0, len(raw), SIGINFO_SIZE))
