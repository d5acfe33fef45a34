"""What /proc says of processes (proc(5)).

Readers return plain values; a process that has gone in the meantime gives `ProcessLookupError`
or, where a caller looks over many, is left out.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
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
    return parse_stat(read(f"/proc/{pid}/stat" if tid is None else f"/proc/{pid}/task/{tid}/stat"))


def parse_stat(raw: bytes) -> Stat:
    text = raw.decode(errors="surrogateescape")
    opened, closed = text.index("("), text.rindex(")")
    f = text[closed + 2 :].split()
    return Stat(
        comm=text[opened + 1 : closed],
        state=f[0],
        **{name: int(f[field - 3]) for name, field in _STAT_FIELDS.items()},
    )


# Stat's names and the fields of proc(5), which counts from 1
_STAT_FIELDS = {
    "ppid": 4,
    "pgrp": 5,
    "session": 6,
    "tty": 7,
    "foreground": 8,
    "nice": 19,
    "threads": 20,
    "start_time": 22,
    "start_code": 26,
    "end_code": 27,
    "start_stack": 28,
    "exit_signal": 38,
    "start_data": 45,
    "end_data": 46,
    "start_brk": 47,
    "arg_start": 48,
    "arg_end": 49,
    "env_start": 50,
    "env_end": 51,
    "exit_code": 52,
    "rt_priority": 40,
    "policy": 41,
}


class Status:
    """/proc/PID/status; a line is looked up when it is asked for."""

    __slots__ = ("raw",)

    def __init__(self, raw: bytes) -> None:
        self.raw = b"\n" + raw

    def get(self, key: str, default: str = "") -> str:
        """The stripped text behind `key:`."""
        wanted = b"\n%s:" % key.encode()
        at = self.raw.find(wanted)
        if at < 0:
            return default
        at += len(wanted)
        return self.raw[at : self.raw.index(b"\n", at)].decode(errors="surrogateescape").strip()

    def __getitem__(self, key: str) -> str:
        value = self.get(key, "\0")
        if value == "\0":
            raise KeyError(key)
        return value


def status(pid: int, tid: int | None = None) -> Status:
    path = f"/proc/{pid}/status" if tid is None else f"/proc/{pid}/task/{tid}/status"
    return Status(read(path))


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


NETWORK_FILES = ("dev", "route", "fib_trie", "if_inet6", "ipv6_route")


def network_state(init: int) -> bytes:
    """What describes a network namespace that nobody has touched; `init` has its sysfs on /sys."""

    def look(name: str) -> bytes | None:
        interface, _, attribute = name.rpartition(" ")
        path = f"net/{name}"
        if interface:
            path = f"root/sys/class/net/{interface}/{attribute}"
        try:
            return read(f"/proc/{init}/{path}")
        except OSError:
            return None

    return describe_network(look)


def describe_network(look: Callable[[str], bytes | None]) -> bytes:
    """The same of what has been read: of each of NETWORK_FILES, and of "INTERFACE ATTRIBUTE"."""
    parts = []
    for name in NETWORK_FILES:
        text = look(name)
        if text is None:
            continue
        if name == "dev":  # without the counters
            lines = []
            for interface in sorted(devices(text)):
                # one that was renamed or deleted at this moment differs from what it was
                found = [look(f"{interface} {what}") or b"?" for what in INTERFACE_FILES]
                lines.append(b" ".join([interface.encode(), *(one.strip() for one in found)]))
            text = b"\n".join(lines)
        elif name == "ipv6_route":
            text = b"\n".join(line[:70] for line in text.splitlines())
        elif name == "route":
            text = b"\n".join(b" ".join(line.split()[:4]) for line in text.splitlines())
        parts.append(text)
    return b"\0".join(parts)


def devices(text: bytes) -> list[str]:
    """The names of the interfaces in /proc/net/dev."""
    return [line.split(b":")[0].strip().decode() for line in text.splitlines()[2:]]


INTERFACE_FILES = ("flags", "mtu", "address")  # in /sys/class/net/NAME


def mount_count(init: int) -> int:
    return read(f"/proc/{init}/mountinfo").count(b"\n")
