"""What /proc says of processes (proc(5)).

Readers return plain values; a process that has gone in the meantime gives `ProcessLookupError`
or, where a caller looks over many, is left out.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class ProcessInfo:
    """One process as seen inside its sandbox."""

    pid: int
    ppid: int
    pgid: int
    sid: int
    state: str  # one letter, as in ps(1)
    cmdline: list[str]
    cwd: str


@dataclass(frozen=True)
class Stat:
    """/proc/PID/stat, the fields that matter here; pids are the reader's."""

    comm: str
    state: str
    ppid: int
    pgrp: int
    session: int
    tty: int
    foreground: int  # process group of that terminal
    nice: int
    threads: int
    start_time: int
    start_code: int
    end_code: int
    start_stack: int
    exit_signal: int
    start_data: int
    end_data: int
    start_brk: int
    arg_start: int
    arg_end: int
    env_start: int
    env_end: int
    exit_code: int
    rt_priority: int
    policy: int


def read(path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        parts = []
        while part := os.read(fd, 65536):
            parts.append(part)
        return b"".join(parts)
    finally:
        os.close(fd)


def stat(pid: int, tid: int | None = None) -> Stat:
    path = f"/proc/{pid}/stat" if tid is None else f"/proc/{pid}/task/{tid}/stat"
    text = read(path).decode(errors="surrogateescape")
    opened, closed = text.index("("), text.rindex(")")
    f = text[closed + 2 :].split()
    number = [0, 0, 0, *(int(v) for v in f[1:])]  # number[i] is field (i + 1) of proc(5)
    return Stat(
        comm=text[opened + 1 : closed],
        state=f[0],
        ppid=number[3],
        pgrp=number[4],
        session=number[5],
        tty=number[6],
        foreground=number[7],
        nice=number[18],
        threads=number[19],
        start_time=number[21],
        start_code=number[25],
        end_code=number[26],
        start_stack=number[27],
        exit_signal=number[37],
        start_data=number[44],
        end_data=number[45],
        start_brk=number[46],
        arg_start=number[47],
        arg_end=number[48],
        env_start=number[49],
        env_end=number[50],
        exit_code=number[51],
        rt_priority=number[39],
        policy=number[40],
    )


def status(pid: int, tid: int | None = None) -> dict[str, str]:
    """/proc/PID/status as a dictionary of stripped strings."""
    path = f"/proc/{pid}/status" if tid is None else f"/proc/{pid}/task/{tid}/status"
    text = read(path).decode(errors="surrogateescape")
    found = {}
    for line in text.splitlines():
        key, _, value = line.partition(":")
        found[key] = value.strip()
    return found


def inside_pid(pid: int) -> int:
    """The pid in the innermost pid namespace."""
    return int(status(pid)["NSpid"].split()[-1])


def inside_pids(pids: Iterable[int]) -> dict[int, int]:
    """Host pid -> pid inside, for those that still exist."""
    found = {}
    for pid in pids:
        try:
            found[pid] = inside_pid(pid)
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def process_info(pid: int, inside: dict[int, int]) -> ProcessInfo | None:
    """None when the process has gone. Ids outside the sandbox read as 0, as the kernel shows."""
    try:
        values = status(pid)
        facts = stat(pid)
        cmdline = read(f"/proc/{pid}/cmdline").decode(errors="replace")
        try:
            cwd = os.readlink(f"/proc/{pid}/cwd")
        except OSError:
            cwd = ""
    except (FileNotFoundError, ProcessLookupError):
        return None
    return ProcessInfo(
        pid=inside[pid],
        ppid=inside.get(facts.ppid, 0),
        pgid=int(values["NSpgid"].split()[-1]),
        sid=int(values["NSsid"].split()[-1]),
        state=facts.state,
        cmdline=cmdline.rstrip("\0").split("\0") if cmdline else [],
        cwd=cwd,
    )


def threads(pid: int) -> list[int]:
    return [int(name) for name in os.listdir(f"/proc/{pid}/task")]


def start_time(pid: int) -> int:
    """Clock ticks since boot at which the process started; tells a reused pid apart."""
    return stat(pid).start_time


def network_state(init: int) -> bytes:
    """What describes a network namespace that nobody has touched; `init` has its sysfs on /sys."""
    names = ("dev", "route", "fib_trie", "if_inet6", "ipv6_route")
    parts = []
    for name in names:
        try:
            text = read(f"/proc/{init}/net/{name}")
        except FileNotFoundError:
            continue
        if name == "dev":  # without the counters
            devices = [line.split(b":")[0].strip().decode() for line in text.splitlines()[2:]]
            text = b"\n".join(_interface(init, device) for device in sorted(devices))
        elif name == "ipv6_route":
            text = b"\n".join(line[:70] for line in text.splitlines())
        elif name == "route":
            text = b"\n".join(b" ".join(line.split()[:4]) for line in text.splitlines())
        parts.append(text)
    return b"\0".join(parts)


def _interface(init: int, name: str) -> bytes:
    parts = [name.encode()]
    for attribute in ("flags", "mtu", "address"):
        try:
            parts.append(read(f"/proc/{init}/root/sys/class/net/{name}/{attribute}").strip())
        except OSError:  # renamed or deleted at this moment: it differs from what it was
            parts.append(b"?")
    return b" ".join(parts)


def mount_count(init: int) -> int:
    return read(f"/proc/{init}/mountinfo").count(b"\n")
