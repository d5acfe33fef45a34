"""What a checkpoint knows of a process tree: plain frozen records, no behaviour.

Pids, ids and paths are those seen inside the sandbox unless a name says `host`.  A reader who
knows this file knows what is captured; `capture.py` fills it, `program.py` turns it into records.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from ..linux.ptrace import Registers, Rseq

PAGE = 4096


@dataclass(frozen=True)
class Credentials:
    """Ids inside; capability sets as bit masks (capabilities(7))."""

    uids: tuple[int, int, int, int]  # real, effective, saved, file system
    gids: tuple[int, int, int, int]
    groups: tuple[int, ...]
    inheritable: int
    permitted: int
    effective: int
    bounding: int
    ambient: int
    securebits: int
    no_new_privs: bool


@dataclass(frozen=True)
class Thread:
    """One thread, stopped."""

    tid: int
    host_tid: int
    registers: Registers  # already fit to continue from: no call is half done
    xstate: bytes
    sigmask: int
    pending: tuple[bytes, ...]  # siginfo_t
    altstack: bytes  # stack_t
    clear_child_tid: int
    robust_list: tuple[int, int]
    rseq: Rseq
    comm: bytes
    nice: int
    affinity: bytes | None  # None: that of every other process
    pdeathsig: int
    timer_slack: int
    credentials: Credentials
    memory: tuple[tuple[int, bytes], ...] = ()  # what the continued call reads, below the stack
    blocked: Registers | None = None  # those of the stop, when it was in a call that goes on


@dataclass(frozen=True)
class Mapping:
    """One VMA. `pages` are the address ranges with private pages."""

    start: int
    end: int
    prot: int
    shared: bool
    offset: int
    kind: Literal["anonymous", "file", "memory", "vdso"]
    path: str  # of the file; the name of an [anon:...] mapping
    may_write: bool
    flags: frozenset[str]  # VmFlags of smaps
    device: int = 0
    inode: int = 0
    of_base: bool = False  # a private mapping of a file that is the base's, unchanged
    pages: tuple[tuple[int, int], ...] = ()
    memory: int = -1  # index into Capture.shared of shared memory without a file

    @property
    def size(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class MemoryLayout:
    """What PR_SET_MM_MAP sets (prctl(2))."""

    start_code: int
    end_code: int
    start_data: int
    end_data: int
    start_brk: int
    brk: int
    start_stack: int
    arg_start: int
    arg_end: int
    env_start: int
    env_end: int
    auxv: bytes
    exe: str


@dataclass(frozen=True)
class Ghost:
    """The bytes of a file that is open but has no name any more."""

    content: bytes
    mode: int
    uid: int
    gid: int
    name: str  # where to make it: its old name when that is free, else "" for a name of ours


@dataclass(frozen=True)
class Owner:
    """Whom a description sends SIGIO or SIGURG to (F_SETOWN_EX, F_SETSIG; fcntl(2))."""

    kind: int  # F_OWNER_TID, _PID, _PGRP
    target: int  # as seen inside; 0 for nobody
    signal: int
    enabled: bool  # O_ASYNC


@dataclass(frozen=True)
class External:
    """Something of which the keeper holds the other end: its key, and that end of a terminal."""

    key: str
    fd: int = -1


@dataclass(frozen=True)
class Description:
    """An open file description: what several descriptors of several processes may share.

    `kind` is one of the names in kinds.py; `state` is what that kind's own file keeps of it.
    """

    kind: str
    flags: int
    position: int = 0
    path: str = ""
    ghost: Ghost | None = None
    ghost_of: int = -1  # another description of the same nameless file, by its index
    pipe: int = -1  # index into Capture.pipes for pipes and FIFOs
    key: str = ""  # of an external pipe
    state: Any = None
    owner: Owner | None = None


@dataclass(frozen=True)
class Pipe:
    """A pipe's or FIFO's contents; capacity in bytes."""

    capacity: int
    content: bytes


@dataclass(frozen=True)
class Descriptor:
    number: int
    description: int  # index into Tree.descriptions
    cloexec: bool


@dataclass(frozen=True)
class PosixTimer:
    identifier: int
    clock: int
    signal: int
    notify: int
    value: int  # sigev_value
    tid: int
    setting: bytes  # struct itimerspec with what remains


@dataclass(frozen=True)
class Process:
    """One process. A zombie has only its ids and its wait status."""

    pid: int
    host_pid: int
    ppid: int
    pgid: int
    sid: int
    exit_signal: int
    comm: bytes
    zombie: int | None = None  # wait status
    remains: Any = None  # Remains, of a zombie
    stopped: int = 0  # the signal that stopped it
    stop_reported: bool = False  # its parent has seen that
    threads: tuple[Thread, ...] = ()
    mappings: tuple[Mapping, ...] = ()
    layout: MemoryLayout | None = None
    descriptors: tuple[Descriptor, ...] = ()
    cwd: str = "/"
    root: str = "/"
    umask: int = 0o022
    sigactions: tuple[bytes, ...] = ()  # struct kernel_sigaction, index 0 is signal 1
    pending: tuple[bytes, ...] = ()
    itimers: tuple[bytes, ...] = ()
    timers: tuple[PosixTimer, ...] = ()
    rlimits: tuple[tuple[int, int], ...] = ()
    dumpable: int = 1
    subreaper: bool = False
    thp_disabled: bool = False
    personality: int = 0
    oom_score_adj: int | None = None  # None: PID 1's
    coredump_filter: int | None = None
    tty: int = -1  # the index of its controlling terminal


@dataclass(frozen=True)
class Capture:
    """A whole tree at one instant. PID 1 is ours and not in it."""

    processes: tuple[Process, ...]
    descriptions: tuple[Description, ...]
    pipes: tuple[Pipe, ...]
    shared: tuple[Any, ...]  # SharedMemory
    last_pid: int
    hostname: bytes
    domainname: bytes
    queues: Any  # POSIX message queues of the namespace, see objects/mqueues.py
    by_pid: dict[int, Process] = field(default_factory=dict)
