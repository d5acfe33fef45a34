"""Who a thread is: ids, groups, capabilities, securebits, no_new_privs (credentials(7)).

Credentials are per thread in the kernel, so each thread sets its own, last of all its privileged
work.  Ids read in the keeper are the host's and are mapped back by the tree's first uid.
"""

from __future__ import annotations

import struct

from ...linux import numbers as nr
from ...linux.proc import Status
from ..boot import CAPABILITIES
from ..model import Credentials
from ..records import Program, Sequence

_PR_SET_KEEPCAPS, _PR_CAPBSET_DROP, _PR_SET_SECUREBITS = 8, 24, 28
_PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT = 38, 47
_AMBIENT_RAISE = 2
_VERSION_3 = 0x20080522
FULL_BOUNDING = sum(1 << number for number in CAPABILITIES.values())


class Refused(Exception):
    """An id that does not exist inside."""


def capture(status: Status, owner: int, securebits: int) -> Credentials:
    """From /proc/PID/task/TID/status as read by the keeper."""

    def inside(text: str) -> int:
        value = int(text) - owner
        if not 0 <= value < 65536:
            raise Refused(f"id {text} from outside the sandbox")
        return value

    uids = tuple(inside(v) for v in status["Uid"].split())
    gids = tuple(inside(v) for v in status["Gid"].split())
    return Credentials(
        uids=(uids[0], uids[1], uids[2], uids[3]),
        gids=(gids[0], gids[1], gids[2], gids[3]),
        groups=tuple(inside(v) for v in status["Groups"].split()),
        inheritable=int(status["CapInh"], 16),
        permitted=int(status["CapPrm"], 16),
        effective=int(status["CapEff"], 16),
        bounding=int(status["CapBnd"], 16),
        ambient=int(status["CapAmb"], 16),
        securebits=securebits,
        no_new_privs=status["NoNewPrivs"] == "1",
    )


def restore(program: Program, do: Sequence, who: Credentials) -> None:
    if who.groups:
        packed = program.data(struct.pack(f"<{len(who.groups)}I", *who.groups))
        do.call(nr.SETGROUPS, len(who.groups), packed)
    for number in CAPABILITIES.values():
        if not who.bounding >> number & 1:
            do.call(nr.PRCTL, _PR_CAPBSET_DROP, number)
    if who.uids != (0, 0, 0, 0) or who.gids != (0, 0, 0, 0):
        do.call(nr.PRCTL, _PR_SET_KEEPCAPS, 1)
        do.call(nr.SETRESGID, *who.gids[:3])
        if who.gids[3] != who.gids[1]:
            do.call(123, who.gids[3])
        do.call(nr.SETRESUID, *who.uids[:3])
        if who.uids[3] != who.uids[1]:
            do.call(122, who.uids[3])
        do.call(nr.PRCTL, _PR_SET_KEEPCAPS, 0)
    header = program.data(struct.pack("<II", _VERSION_3, 0))
    if who.securebits:
        everything = who.permitted | 1 << CAPABILITIES["SETPCAP"]
        do.call(nr.CAPSET, header, program.data(_sets(everything, everything, who.inheritable)))
        do.call(nr.PRCTL, _PR_SET_SECUREBITS, who.securebits, what="securebits")
    do.call(
        nr.CAPSET,
        header,
        program.data(_sets(who.effective, who.permitted, who.inheritable)),
        what="capset",
    )
    for number in range(64):
        if who.ambient >> number & 1:
            do.call(nr.PRCTL, _PR_CAP_AMBIENT, _AMBIENT_RAISE, number, 0, 0)
    if who.no_new_privs:
        do.call(nr.PRCTL, _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def _sets(effective: int, permitted: int, inheritable: int) -> bytes:
    low = (1 << 32) - 1
    return struct.pack(
        "<6I",
        effective & low,
        permitted & low,
        inheritable & low,
        effective >> 32,
        permitted >> 32,
        inheritable >> 32,
    )
