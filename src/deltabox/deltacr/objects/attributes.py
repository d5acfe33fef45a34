"""Everything small that a process or thread carries: limits, priorities, flags of prctl(2).

Where the kernel shows an attribute to others (/proc, sched_getattr(2), ioprio_get(2)) it is read
from outside; for the rest the thread itself is asked by injection.  What a rebuilt thread has
before it sets anything is what the engine's own processes have, so the keeper asks itself the
same questions (`ordinary`), and only what differs is set.

Some come last.  A process may have lowered a limit below what it had taken by then: so limits of
threads, queued signals and priorities are set when all that they govern is there, and that of
locked memory by objects/locked.py.  And dumpable, which every change of credentials resets
(commit_creds in kernel/cred.c).

Rejected: refusing fs.suid_dumpable's value 2, which prctl(PR_SET_DUMPABLE) does not take.  It is
what the kernel leaves behind in every server that drops its ids on hosts that collect core dumps;
a change of the file system id and back leaves it behind again.

Out of reach, and in docs/fidelity.md: PR_SET_PTRACER, Landlock domains, the thread whose end sends
the death signal (always the main one after a restore).
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from ...linux import numbers as nr
from ...linux import proc, sched
from ...linux._libc import batch, syscall
from ..look import NAMESPACES, CommonLook, Look, ThreadLook
from ..records import Program, Sequence

if TYPE_CHECKING:
    from collections.abc import Sequence as Items

    from ..model import Process, Thread
    from ..subject import Refuse

_PR_SET_PDEATHSIG, _PR_GET_PDEATHSIG = 1, 2
_PR_GET_DUMPABLE, _PR_SET_DUMPABLE = 3, 4
_PR_SET_NAME = 15
_PR_GET_TSC, _PR_SET_TSC = 25, 26
_PR_SET_TIMERSLACK, _PR_GET_TIMERSLACK = 29, 30
_PR_MCE_KILL, _PR_MCE_KILL_GET, _PR_MCE_KILL_SET = 33, 34, 1
_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37
_PR_SET_THP_DISABLE, _PR_GET_THP_DISABLE = 41, 42
_PR_GET_SPECULATION_CTRL, _PR_SET_SPECULATION_CTRL, _PR_SPEC_PRCTL = 52, 53, 1
_PR_SCHED_CORE, _PR_SCHED_CORE_GET = 62, 0
_PR_SET_MDWE, _PR_GET_MDWE = 65, 66
_PR_SET_MEMORY_MERGE, _PR_GET_MEMORY_MERGE = 67, 68
_SPECULATIONS = (0, 1, 2)  # store bypass, indirect branch, L1D flush
_ARCH_GET_CPUID, _ARCH_SET_CPUID = 0x1011, 0x1012
_ARCH_GET_XCOMP_PERM, _ARCH_REQ_XCOMP_PERM, _XFEATURE_TILE = 0x1022, 0x1023, 18
_MEMBARRIER, _GET_REGISTRATIONS, _REGISTRATIONS = 324, 512, (4, 16, 64, 256)
_GET_MEMPOLICY, _SET_MEMPOLICY, _NODE_BITS = 239, 238, 1024
_MODIFY_LDT, _IOPRIO_SET, _SCHED_SETATTR, _SETFSUID = 154, 251, 314, 122
_RLIMITS = range(16)
_LAST_LIMITS = (6, 11, 13, 14)  # RLIMIT_NPROC, RLIMIT_SIGPENDING, RLIMIT_NICE, RLIMIT_RTPRIO
RLIMIT_MEMLOCK = 8
_UNSET = (1 << 32) - 1


@dataclass(frozen=True)
class ProcessAttributes:
    """What all threads of a process share."""

    umask: int
    rlimits: tuple[tuple[int, int], ...]
    dumpable: int
    subreaper: bool
    thp: int  # of PR_GET_THP_DISABLE
    deny_write_execute: int  # of PR_GET_MDWE
    merge: bool  # of PR_GET_MEMORY_MERGE
    tiles: bool  # may use the AMX state
    membarrier: int  # the commands it has registered for
    oom_score_adj: int | None  # None: PID 1's
    coredump_filter: int | None
    login: int | None


@dataclass(frozen=True)
class Asked:
    """What only the thread itself can tell; a negative number is the kernel's refusal."""

    pdeathsig: int
    timer_slack: int
    own_slack: int  # what PR_SET_TIMERSLACK of 0 goes back to
    tsc: int
    cpuid: int
    mce_kill: int
    speculation: tuple[int, ...]
    policy: tuple[int, bytes]  # set_mempolicy(2): the mode, and the nodes


@dataclass(frozen=True)
class ThreadAttributes:
    """What each thread has of its own. None: as in the engine's own processes."""

    comm: bytes
    scheduling: bytes | None
    affinity: bytes | None
    io_priority: int | None
    personality: int
    asked: Asked


# -- asking -------------------------------------------------------------------------------------

PROCESS_AREA = 16 * len(_RLIMITS) + 64
THREAD_AREA = 16 + 8 + _NODE_BITS // 8


def process_calls(data: int) -> list[tuple[int, ...]]:
    """Calls whose results `process` reads, with PROCESS_AREA bytes at `data`."""
    words = data + 16 * len(_RLIMITS)
    # limits are asked for from inside: another's would need CAP_SYS_RESOURCE
    return [
        *((nr.PRLIMIT64, 0, which, 0, data + 16 * which) for which in _RLIMITS),
        (nr.PRCTL, _PR_GET_DUMPABLE),
        (nr.PRCTL, _PR_GET_CHILD_SUBREAPER, words),
        (nr.PRCTL, _PR_GET_THP_DISABLE, 0, 0, 0, 0),
        (nr.PRCTL, _PR_GET_MDWE, 0, 0, 0, 0),
        (nr.PRCTL, _PR_GET_MEMORY_MERGE, 0, 0, 0, 0),
        (nr.ARCH_PRCTL, _ARCH_GET_XCOMP_PERM, words + 8),
        (_MEMBARRIER, _GET_REGISTRATIONS, 0, 0),
        (_MODIFY_LDT, 0, words + 16, 8),
        (nr.PRCTL, _PR_SCHED_CORE, _PR_SCHED_CORE_GET, 0, 0, words + 24),
    ]


def process(
    look: Look,
    common: CommonLook,
    owner: int,
    results: Items[int],
    area: bytes,
    refuse: Refuse,
) -> ProcessAttributes:
    """`common` is PID 1's, whom all others began as; `owner` the uid of root inside."""
    limits = tuple(struct.unpack_from("<QQ", area, 16 * which) for which in _RLIMITS)
    rest = results[len(_RLIMITS) :]
    dumpable, _, thp, mdwe, merge, got_tiles, membarrier, ldt, got_cookie = rest
    subreaper, tiles, _, cookie = struct.unpack_from("<QQQQ", area, 16 * len(_RLIMITS))
    if ldt > 0:
        raise refuse("has a local descriptor table (modify_ldt)", "ldt")
    if not got_cookie and cookie:
        raise refuse("has a core scheduling cookie (PR_SCHED_CORE)", "scheduler")
    _check_group(look, refuse)
    if look.file("attr/current") != common.file("attr/current"):
        raise refuse("is confined by a security module", "security label")
    login = _unless(common, look, "loginuid", 10)
    if login is not None and login != _UNSET:
        login -= owner
    return ProcessAttributes(
        umask=int(look.status["Umask"], 8),
        rlimits=limits,
        dumpable=dumpable,
        subreaper=bool(subreaper & 0xFFFFFFFF),
        thp=max(thp, 0),
        deny_write_execute=max(mdwe, 0),
        merge=merge > 0,
        tiles=not got_tiles and bool(tiles >> _XFEATURE_TILE & 1),
        # a kernel that cannot tell is given all that it knows: being registered is only slower
        membarrier=membarrier if membarrier >= 0 else _membarrier_commands(),
        oom_score_adj=_unless(common, look, "oom_score_adj", 10),
        coredump_filter=_unless(common, look, "coredump_filter", 16),
        login=login,
    )


def thread_calls(data: int) -> list[tuple[int, ...]]:
    """Calls whose results `asked` reads, with THREAD_AREA bytes at `data`."""
    return [
        (nr.PRCTL, _PR_GET_PDEATHSIG, data),
        (nr.PRCTL, _PR_GET_TIMERSLACK),
        (nr.PRCTL, _PR_GET_TSC, data + 8),
        (nr.ARCH_PRCTL, _ARCH_GET_CPUID),
        (nr.PRCTL, _PR_MCE_KILL_GET, 0, 0, 0, 0),
        *((nr.PRCTL, _PR_GET_SPECULATION_CTRL, which, 0, 0, 0) for which in _SPECULATIONS),
        (_GET_MEMPOLICY, data + 16, data + 24, _NODE_BITS, 0, 0),
        # the only way to see what 0 stands for
        (nr.PRCTL, _PR_SET_TIMERSLACK, 0),
        (nr.PRCTL, _PR_GET_TIMERSLACK),
    ]


def put_back_calls(results: Items[int]) -> list[tuple[int, ...]]:
    """What undoes the one question that is a change."""
    return [(nr.PRCTL, _PR_SET_TIMERSLACK, results[1])] if results[1] != results[-1] else []


def asked(results: Items[int], area: bytes) -> Asked:
    pdeathsig, tsc, mode = struct.unpack_from("<i4xi4xi", area)
    slack, cpuid, mce_kill = results[1], results[3], results[4]
    has_policy = results[5 + len(_SPECULATIONS)] == 0
    return Asked(
        pdeathsig,
        slack,
        results[-1],
        tsc if results[2] == 0 else 0,
        cpuid,
        mce_kill,
        tuple(results[5 : 5 + len(_SPECULATIONS)]),
        (mode, area[24:THREAD_AREA]) if has_policy else (0, b""),
    )


@lru_cache(maxsize=1)
def ordinary() -> Asked:
    """The keeper's own answers: what everything it makes begins with."""
    results, area = batch(lambda data: thread_calls(data)[:-2], THREAD_AREA)
    return asked([*results, results[1]], area)


def thread(look: ThreadLook, common: CommonLook, mine: Asked, refuse: Refuse) -> ThreadAttributes:
    wanted, base = look.scheduling, common.scheduling
    if wanted.policy not in (sched.OTHER, sched.BATCH, sched.IDLE):
        raise refuse("has a real-time scheduling class", "scheduler")
    return ThreadAttributes(
        comm=os.fsencode(look.stat.comm),
        scheduling=None if wanted == base else wanted.packed(base),
        affinity=None if look.affinity == common.affinity else look.affinity,
        io_priority=None if look.io_priority == common.io_priority else look.io_priority,
        personality=int(look["personality"], 16),
        asked=mine,
    )


def check_before_asking(
    host: int, tids: Items[int], look: Look, common: CommonLook, refuse: Refuse
) -> None:
    """Refuse what a call of ours would meet inside; `common` is PID 1's."""
    for tid in tids:
        if look.namespaces(tid) != common.namespaces:
            differ = zip(NAMESPACES, look.namespaces(tid), common.namespaces, strict=True)
            name = next(name for name, one, other in differ if one != other)
            kind = name.partition("_")[0]
            what = f"a {kind} namespace of its own"
            if tid != host:
                what = f"a thread in {what}"
            elif "_" in name:
                what = f"{what} for its children"
            raise refuse(f"has {what}", f"{kind} namespace")
        if look.thread(tid).dispatches_calls:
            raise refuse(
                "dispatches its system calls itself (PR_SET_SYSCALL_USER_DISPATCH)", "thread"
            )


def check_policies(host: int, refuse: Refuse) -> None:
    """Refuse memory with a policy that differs from that of the rest."""
    if _more_nodes() and _has_own_policies(host):
        raise refuse("has memory bound to nodes (mbind)", "mapping")


def _check_group(look: Look, refuse: Refuse) -> None:
    """A session's share of the processor (sched(7), autogroup); setting it is rationed."""
    text = look.file("autogroup")
    if text and not text.rstrip().endswith(b"nice 0"):
        raise refuse("is in a session with a nice value of its own (autogroup)", "scheduler")


@lru_cache(maxsize=1)
def _more_nodes() -> bool:
    return os.path.exists("/sys/devices/system/node/node1")


def _has_own_policies(host: int) -> bool:
    """Whether some memory has a policy that differs from that of the rest."""
    lines = proc.read(f"/proc/{host}/numa_maps").splitlines()
    return len({line.split()[1] for line in lines}) > 1


@lru_cache(maxsize=1)
def _membarrier_commands() -> int:
    supported = syscall(_MEMBARRIER, 0, 0, 0)
    return sum(command for command in _REGISTRATIONS if supported & command)


def _unless(common: CommonLook, look: Look, name: str, base: int) -> int | None:
    """A number in /proc/PID, unless it is PID 1's too."""
    own = look.file(name)
    return None if own is None or own == common.file(name) else int(own, base)


# -- and back -----------------------------------------------------------------------------------


def restore_process(
    program: Program, do: Sequence, process: Process, inherited: Items[tuple[int, int]]
) -> None:
    """When the memory is in place, and before the first thread is cloned; still as root."""
    it = process.attributes
    assert it is not None
    for which, limit in enumerate(it.rlimits):
        if which not in (*_LAST_LIMITS, RLIMIT_MEMLOCK):
            set_limit(program, do, which, limit, inherited)
    if it.subreaper:
        do.call(nr.PRCTL, _PR_SET_CHILD_SUBREAPER, 1)
    if it.thp:
        do.call(nr.PRCTL, _PR_SET_THP_DISABLE, 1, it.thp & ~1, 0, 0, what="PR_SET_THP_DISABLE")
    if it.deny_write_execute:
        do.call(nr.PRCTL, _PR_SET_MDWE, it.deny_write_execute, 0, 0, 0, what="PR_SET_MDWE")
    if it.merge:
        do.call(nr.PRCTL, _PR_SET_MEMORY_MERGE, 1, 0, 0, 0, what="PR_SET_MEMORY_MERGE")
    if it.tiles:
        do.call(nr.ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_TILE, what="AMX state")
    for command in _REGISTRATIONS:
        if it.membarrier & command:
            do.call(_MEMBARRIER, command, 0, 0, what="membarrier")
    written = {
        "oom_score_adj": it.oom_score_adj,
        "coredump_filter": it.coredump_filter,
        "loginuid": it.login,
    }
    if any(value is not None for value in written.values()):
        do.call(nr.PRCTL, _PR_SET_DUMPABLE, 1)  # or its files in /proc would be the host's root's
    for name, value in written.items():
        if value is not None:
            _write_self(program, do, name, str(value))
    do.call(nr.UMASK, it.umask)
    if it.dumpable == 2:
        do.call(_SETFSUID, 1)
        do.call(_SETFSUID, 0)


class Slack:
    """A task's own timer slack is what its maker has at that moment; set when any is unusual."""

    def __init__(self, processes: Items[Process]) -> None:
        usual = ordinary().timer_slack
        self._usual = usual
        self._needed = any(
            t.attributes.asked.own_slack != usual for p in processes for t in p.threads
        )

    def before_clone(self, do: Sequence, thread: Thread | None) -> None:
        if self._needed:
            own = thread.attributes.asked.own_slack if thread else self._usual
            do.call(nr.PRCTL, _PR_SET_TIMERSLACK, own)

    def after_clones(self, do: Sequence) -> None:
        if self._needed:
            do.call(nr.PRCTL, _PR_SET_TIMERSLACK, 0)


def restore_thread(program: Program, do: Sequence, thread: Thread) -> None:
    """Before the thread's credentials are its own."""
    it, common = thread.attributes, ordinary()
    mine = it.asked
    do.call(nr.PRCTL, _PR_SET_NAME, program.text(it.comm[:15]))
    if it.affinity is not None:
        mask = program.data(it.affinity)
        do.call(nr.SCHED_SETAFFINITY, 0, len(it.affinity), mask, what="affinity")
    if it.scheduling is not None:
        do.call(_SCHED_SETATTR, 0, program.data(it.scheduling), 0, what="sched_setattr")
    if it.io_priority is not None:
        do.call(_IOPRIO_SET, 1, 0, it.io_priority, what="ioprio_set")
    do.call(nr.PERSONALITY, it.personality)
    do.call(nr.PRCTL, _PR_SET_TIMERSLACK, mine.timer_slack)
    if mine.tsc != common.tsc:
        do.call(nr.PRCTL, _PR_SET_TSC, mine.tsc, what="PR_SET_TSC")
    if mine.cpuid != common.cpuid:
        do.call(nr.ARCH_PRCTL, _ARCH_SET_CPUID, mine.cpuid, what="ARCH_SET_CPUID")
    if mine.mce_kill != common.mce_kill:
        do.call(nr.PRCTL, _PR_MCE_KILL, _PR_MCE_KILL_SET, mine.mce_kill, 0, 0, what="PR_MCE_KILL")
    for which, value, usual in zip(
        _SPECULATIONS, mine.speculation, common.speculation, strict=True
    ):
        if value != usual and value > 0 and value & _PR_SPEC_PRCTL:
            wanted = value & ~_PR_SPEC_PRCTL
            do.call(nr.PRCTL, _PR_SET_SPECULATION_CTRL, which, wanted, 0, 0, what="speculation")
    if mine.policy != common.policy:
        mode, nodes = mine.policy
        where = program.data(nodes) if any(nodes) else 0
        do.call(_SET_MEMPOLICY, mode, where, _NODE_BITS if any(nodes) else 0, what="set_mempolicy")


def restore_after_credentials(do: Sequence, thread: Thread) -> None:
    """Changing ids has cleared it."""
    if thread.attributes.asked.pdeathsig:
        do.call(nr.PRCTL, _PR_SET_PDEATHSIG, thread.attributes.asked.pdeathsig)


def restore_last(
    program: Program, do: Sequence, process: Process, inherited: Items[tuple[int, int]]
) -> None:
    """By the main thread, when threads have their priority, credentials, signals and timers."""
    it = process.attributes
    assert it is not None
    for which in _LAST_LIMITS:
        set_limit(program, do, which, it.rlimits[which], inherited)
    if it.dumpable in (0, 1):
        do.call(nr.PRCTL, _PR_SET_DUMPABLE, it.dumpable)


def set_limit(
    program: Program,
    do: Sequence,
    which: int,
    limit: tuple[int, int],
    inherited: Items[tuple[int, int]],
) -> None:
    if limit != tuple(inherited[which]):
        packed = program.data(struct.pack("<QQ", *limit))
        do.call(nr.PRLIMIT64, 0, which, packed, 0, what=f"limit {which}")


def _write_self(program: Program, do: Sequence, name: str, value: str) -> None:
    opened = program.variable()
    path = program.text(f"/proc/self/{name}")
    do.call(nr.OPENAT, -100, path, 1, save=opened, what=f"open {name}")
    do.call(nr.WRITE, opened, program.text(value), len(value), what=f"set {name}")
    do.call(nr.CLOSE, opened)
