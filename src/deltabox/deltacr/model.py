"""What a checkpoint knows of a process tree: plain frozen records, no behaviour.

Pids, ids and paths are those seen inside the sandbox unless a name says `host`.  A reader who
knows this file knows what is captured; `capture.py` fills it, `program.py` turns it into records.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from ..linux.ptrace import Registers, Rseq
from .objects.attributes import ProcessAttributes, ThreadAttributes
from .objects.seccomp import NONE as NO_SECCOMP
from .objects.seccomp import Seccomp

PAGE = 4096
_WIPED = frozenset({"wf", "dp"})  # VM_WIPEONFORK, VM_DROPPABLE


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
    attributes: ThreadAttributes
    credentials: Credentials
    seccomp: Seccomp = NO_SECCOMP
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
    memory: int = -1  # the number in Capture.shared of shared memory without a file
    ghost: int = -1  # index into Capture.ghosts of a file without a name
    guards: tuple[tuple[int, int], ...] = ()  # MADV_GUARD_INSTALL

    @property
    def size(self) -> int:
        return self.end - self.start

    @property
    def saved(self) -> bool:
        """Whether its private pages are kept: not if it is shared, or to be wiped in a child."""
        return not (self.shared or self.flags & _WIPED)


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
    ghost: int = -1  # of an executable without a name


@dataclass(frozen=True)
class Ghost:
    """A file or directory in use that has no name, and how it gets its old one for a moment."""

    kind: Literal["moved", "linked", "unnamed", "directory", "fifo"]
    name: str  # its old one
    source: str  # where the copy lies in every restore, or another name that it has
    aside: str  # what must be put aside meanwhile; "": nothing
    missing: tuple[str, ...]  # directories that must exist meanwhile, outermost first
    times: tuple[tuple[str, int, int], ...]  # of the directories that this changes: ns
    mode: int
    uid: int
    gid: int
    modified: tuple[int, int]  # atime and mtime, ns


@dataclass(frozen=True)
class Lock:
    """A lock that is held: a whole file's, or a range's (`length` 0: to the end)."""

    kind: str  # FLOCK, POSIX, OFDLCK
    write: bool
    start: int
    length: int
    taker: int = 0  # the pid that an flock shows; 0: of nobody in the tree


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
    ghost: int = -1  # index into Capture.ghosts of a file without a name
    pipe: int = -1  # index into Capture.pipes for pipes and FIFOs
    key: str = ""  # of an external pipe
    state: Any = None
    owner: Owner | None = None
    locks: tuple[Lock, ...] = ()  # those that belong to the description


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
    locks: tuple[Lock, ...] = ()  # those that belong to the process


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
    cwd_ghost: int = -1
    root: str = "/"
    sigactions: tuple[bytes, ...] = ()  # struct kernel_sigaction, index 0 is signal 1
    pending: tuple[bytes, ...] = ()
    itimers: tuple[bytes, ...] = ()
    timers: tuple[PosixTimer, ...] = ()
    attributes: ProcessAttributes | None = None
    lock_future: int = 0  # flags of mlockall(2)
    tty: int = -1  # the index of its controlling terminal


@dataclass(frozen=True)
class Capture:
    """A whole tree at one instant. PID 1 is ours and not in it."""

    processes: tuple[Process, ...]
    descriptions: tuple[Description, ...]
    pipes: tuple[Pipe, ...]
    shared: tuple[Any, ...]  # SharedMemory
    ghosts: tuple[Ghost, ...]
    last_pid: int
    hostname: bytes
    domainname: bytes
    queues: Any  # POSIX message queues of the namespace, see objects/mqueues.py
    system_v: Any  # its System V objects, see objects/sysv.py
    by_pid: dict[int, Process] = field(default_factory=dict)
