"""Test mode: make the n-th system call, or the n-th interpreter record, of one operation fail.

As SQLite tests itself: for every n, the operation is run with its n-th call failing, and afterwards
the state must be the old one or the new one and nothing may be left over.  The mode exists in a
keeper that was started with DELTABOX_FAULTS=1; in any other nothing here is ever installed.

The calls are caught where our modules make them: `os`, `fcntl` and the few other names below are
replaced in every module of ours by stand-ins that count.  A fault fires once, so that what undoes
the damage is not hit as well; `close` is left alone, because Linux closes even when it complains.
Only the threads that serve a request count, never the background.
"""

from __future__ import annotations

import errno
import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ..deltacr import peer

_OS = frozenset(
    [
        "open",
        "read",
        "write",
        "pread",
        "pwrite",
        "readlink",
        "stat",
        "fstat",
        "listdir",
        "mkdir",
        "makedirs",
        "rmdir",
        "unlink",
        "rename",
        "chown",
        "fchown",
        "chmod",
        "fchmod",
        "pipe",
        "pipe2",
        "memfd_create",
        "ftruncate",
        "truncate",
        "pidfd_open",
        "statvfs",
        "fstatvfs",
        "sched_getaffinity",
        "getpriority",
        "posix_fallocate",
        "setxattr",
        "getxattr",
        "symlink",
        "link",
    ]
)
_FCNTL = frozenset(["ioctl", "fcntl"])
_MOUNT = [
    "mount",
    "umount",
    "open_tree",
    "move_mount",
    "mount_setattr",
    "fsopen",
    "fsconfig_string",
    "fsconfig_flag",
    "fsconfig_fd",
    "fsconfig_create",
    "fsmount",
    "syncfs",
]
_PACKAGES = ("deltabox.linux.", "deltabox.deltacr.", "deltabox.deltafs.", "deltabox.keeper.")
_COUNTED_THREADS = ("connection", "fork", "beside")


class Faults:
    """What shall fail next. One operation at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls_left = 0
        self._records_left = 0
        self.fired = ""

    def arm(self, *, call: int = 0, record: int = 0) -> str:
        """Set the n-th call or record to fail (0: none); what fired since the last time."""
        with self._lock:
            fired, self.fired = self.fired, ""
            self._calls_left, self._records_left = call, record
            return fired

    def call(self, name: str) -> None:
        """A counted call is about to be made."""
        if self._calls_left <= 0 or not _counted():
            return
        with self._lock:
            if self._calls_left <= 0:
                return
            self._calls_left -= 1
            if self._calls_left:
                return
            self.fired = name
        raise OSError(errno.EIO, f"injected fault in {name}")

    def records(self, count: int) -> int:
        """A program with `count` records is about to run: which of them shall fail, 0 for none."""
        if self._records_left <= 0 or not _counted():
            return 0
        with self._lock:
            if self._records_left <= 0:
                return 0
            if self._records_left > count:
                self._records_left -= count
                return 0
            chosen, self._records_left = self._records_left, 0
            self.fired = f"record {chosen} of {count}"
            return chosen

    def install(self) -> None:
        """Put the stand-ins into all modules of ours that are loaded."""
        for name, module in list(sys.modules.items()):
            if not name.startswith(_PACKAGES) or name == __name__:
                continue
            for attribute, counted in (("os", _OS), ("fcntl", _FCNTL)):
                real = module.__dict__.get(attribute)
                if isinstance(real, ModuleType):
                    setattr(module, attribute, _StandIn(real, counted, self))
            if "syscall" in module.__dict__ and name != "deltabox.linux._libc":
                module.__dict__["syscall"] = self._counting(module.__dict__["syscall"], "syscall")
        from ..linux import mount, ptrace

        for name in _MOUNT:
            setattr(mount, name, self._counting(getattr(mount, name), name))
        ptrace._call = self._counting(ptrace._call, "ptrace")
        peer.choose_fault = self.records

    def _counting(self, real: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            self.call(name)
            return real(*arguments, **keywords)

        return call


def _counted() -> bool:
    return threading.current_thread().name.startswith(_COUNTED_THREADS)


class _StandIn(ModuleType):
    """A module whose chosen functions count before they act."""

    def __init__(self, real: ModuleType, counted: frozenset[str], faults: Faults) -> None:
        super().__init__(real.__name__)
        self.__dict__.update(real.__dict__)
        for name in counted:
            function = getattr(real, name, None)
            if function is not None:
                self.__dict__[name] = faults._counting(function, f"{real.__name__}.{name}")
