"""What callers pass, checked before anything is asked of the engine."""

from __future__ import annotations

import codecs
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from signal import SIGKILL, SIGSTOP
from typing import Final

Command = str | Sequence[str]

_HOSTNAME: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,62}[A-Za-z0-9])?", re.ASCII)
_UNSENDABLE: Final = (SIGKILL, SIGSTOP, 32, 33)  # libc keeps the last two
_UNITS: Final = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}


def size(value: str | int, what: str = "a size") -> int:
    """A number of bytes from an int or a string like `"512M"` or `"2G"` (powers of 1024)."""
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise TypeError(f"{what} is an int or a str such as '2G', not {type(value).__name__}")
    if isinstance(value, str):
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*", value, re.IGNORECASE)
        if found is None:
            raise ValueError(f"{what} is written like '512M' or '2G', not {value!r}")
        value = int(float(found[1]) * (1 << _UNITS[found[2].upper()]))
    if value <= 0:
        raise ValueError(f"{what} must be more than 0")
    return value


def optional(value: str | int | None, what: str) -> int | None:
    return None if value is None else size(value, what)


def argv(command: Command) -> list[str]:
    if isinstance(command, str):
        argv = ["/bin/sh", "-c", command]
    elif not isinstance(command, (list, tuple)):
        raise TypeError(f"a command is a str or a list of str, not {type(command).__name__}")
    else:
        argv = [os.fspath(word) for word in command]
        if not argv:
            raise ValueError("a command cannot be an empty list")
    for word in argv:
        if not isinstance(word, str):
            raise TypeError(f"the words of a command are str, not {type(word).__name__}")
        if "\0" in word:
            raise ValueError("a command cannot contain a NUL character")
    return argv


def environment(env: Mapping[str, str] | None) -> dict[str, str]:
    for key, value in (env or {}).items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise TypeError(f"environment variables are str, not {key!r}: {value!r}")
        if not key or "=" in key or "\0" in key + value:
            raise ValueError(f"{key!r}={value!r} cannot be an environment variable")
    return dict(env or {})


def directory(cwd: str) -> str:
    cwd = os.fspath(cwd)
    if not cwd.startswith("/"):
        raise ValueError(f"cwd is an absolute path inside the sandbox, {cwd!r} is not")
    return cwd


def world(
    *, network: str, hostname: str, on_external: str, hide: object, pids_limit: int | None
) -> None:
    """Check what a sandbox is to be like."""
    if network not in ("none", "nat", "host"):
        raise ValueError(f"network is 'none', 'nat' or 'host', not {network!r}")
    if not isinstance(hostname, str) or not _HOSTNAME.fullmatch(hostname):
        raise ValueError(
            f"a host name has up to 64 letters, digits, '-' and '.', unlike {hostname!r}"
        )
    if on_external not in ("reset", "refuse"):
        raise ValueError(f"on_external is 'reset' or 'refuse', not {on_external!r}")
    if isinstance(hide, (str, bytes)):
        raise TypeError("hide is a list of paths, not one string")
    if pids_limit is not None and pids_limit < 1:
        raise ValueError("pids_limit must be more than 0")


def signal(number: int | None) -> None:
    """Check one that a program is to be told something by."""
    if isinstance(number, bool) or not isinstance(number, int | None):
        raise TypeError(f"a signal is an int or None, not {type(number).__name__}")
    if number is not None and (not 1 <= number <= 64 or number in _UNSENDABLE):
        raise ValueError(f"signal {number} cannot be handled by a program")


def shared(visibility: str | Sequence[str]) -> list[str]:
    """The directories that all sandboxes of a tree see at once."""
    if visibility == "isolated":
        return []
    if isinstance(visibility, (str, bytes)):
        raise ValueError(f"visibility is 'isolated' or a list of directories, not {visibility!r}")
    found: list[str] = []
    for path in map(os.fspath, visibility):
        directory(path)
        path = os.path.normpath(path)
        first = path.split("/")[1]
        if path == "/" or first in ("proc", "sys", "dev"):
            raise ValueError(f"visibility: {path} cannot be shared")
        for other in found:
            if os.path.commonpath([path, other]) in (path, other):
                raise ValueError(f"visibility: {path} and {other} lie in each other")
        found.append(path)
    return found


def seconds(timeout: float | None) -> float | None:
    if timeout is not None and (timeout < 0 or math.isnan(timeout)):
        raise ValueError(f"a timeout is a number of seconds, not {timeout!r}")
    return timeout


def decoder() -> Callable[[bytes], str]:
    return codecs.getincrementaldecoder("utf-8")(errors="replace").decode
