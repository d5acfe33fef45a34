"""Locked memory: mlock(2), mlock2(2), mlockall(2).

Each mapping tells whether it is locked (`lo` in smaps) and whether its pages are to be locked only
when they are touched (`lf`).  That mappings of the future will be locked too, nothing tells; but
the page that injection maps is one of them, and the process's count of locked memory shows it.

Locks come back when the memory is in place and before the thread is anything but root, with the
limit as high as it may be; then the process gets its own, which it may have lowered since.  Two
calls for each mapping: the first only says that it is locked, and must not fail; the second
fills it, which it could do no better for the program itself (PROT_NONE, the end of a file).
"""

from __future__ import annotations

import re
import struct
from typing import TYPE_CHECKING

from ...linux import numbers as nr
from ...linux import proc
from ..records import Program, Sequence
from .attributes import RLIMIT_MEMLOCK, set_limit

if TYPE_CHECKING:
    from collections.abc import Sequence as Items

    from ..model import Process

_MLOCK, _MLOCKALL, _MLOCK2 = 149, 151, 325
_MLOCK_ONFAULT = 1
_MCL_FUTURE, _MCL_ONFAULT = 2, 4


def future(host: int, before: str, injected: int) -> int:
    """Flags of mlockall(2) for what is mapped later; looked at while a page of ours is mapped.

    `before` is the VmLck of /proc/PID/status without that page, which lies at `injected`.
    """
    if proc.status(host).get("VmLck") == before:
        return 0
    smaps = proc.read(f"/proc/{host}/smaps").decode(errors="surrogateescape")
    found = re.search(rf"^{injected:08x}-.*?^VmFlags:([^\n]*)", smaps, re.MULTILINE | re.DOTALL)
    on_fault = found is not None and "lf" in found[1].split()
    return _MCL_FUTURE | (_MCL_ONFAULT if on_fault else 0)


def restore(
    program: Program, do: Sequence, process: Process, inherited: Items[tuple[int, int]]
) -> None:
    locked = [m for m in process.mappings if "lo" in m.flags and m.kind != "vdso"]
    assert process.attributes is not None
    highest = inherited[RLIMIT_MEMLOCK][1]
    if locked or process.lock_future:
        room = program.data(struct.pack("<QQ", highest, highest))
        do.call(nr.PRLIMIT64, 0, RLIMIT_MEMLOCK, room, 0, what="room to lock memory")
    for mapping in locked:
        where = f"lock {mapping.start:#x}-{mapping.end:#x}"
        do.call(_MLOCK2, mapping.start, mapping.size, _MLOCK_ONFAULT, what=where)
        if "lf" not in mapping.flags:
            do.call(_MLOCK, mapping.start, mapping.size, may_fail=True)
    if process.lock_future:
        do.call(_MLOCKALL, process.lock_future, what="mlockall")
    mine = process.attributes.rlimits[RLIMIT_MEMLOCK]
    if (locked or process.lock_future) and mine != (highest, highest):
        limit = program.data(struct.pack("<QQ", *mine))
        do.call(nr.PRLIMIT64, 0, RLIMIT_MEMLOCK, limit, 0, what="limit of locked memory")
    elif not (locked or process.lock_future):
        set_limit(program, do, RLIMIT_MEMLOCK, mine, inherited)
