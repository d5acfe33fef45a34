"""A terminal whose master is the keeper's: what `tty=True` gives a program.

It is a pseudo-terminal of the sandbox's own devpts, so inside it is /dev/pts/N like any other.  The
master is kept until the program has ended and nobody has the terminal open any more, because
closing it hangs up: a program that closes all its descriptors for a while would be told SIGHUP.

At a restore PID 1 makes a new one with the same number, and the keeper takes its master from there
(`deltacr/objects/terminals.py`).
"""

from __future__ import annotations

import os
import select
import stat

from ..errors import DeltaBoxError, UnsupportedState
from ..linux import terminal as tty
from ..linux.openat2 import openat2

TYPE = "xterm-256color"
"""TERM, when the caller sets none."""
_GROUP = 5  # tty, in every distribution; devpts is mounted with it


class Terminal:
    """`master` is -1 until it is made, and after the end."""

    def __init__(self) -> None:
        self.master = -1

    def make(self, root: int, *, owner: int, uid: int, rows: int, columns: int) -> int:
        """Make the pair in the devpts below `root`; the slave side, which the caller closes."""
        path = openat2(root, "/dev/pts/ptmx", os.O_PATH | os.O_NOFOLLOW)
        try:
            found = os.fstat(path)
            device = (os.major(found.st_rdev), os.minor(found.st_rdev))
            if not stat.S_ISCHR(found.st_mode) or device != tty.PTMX:
                raise DeltaBoxError("the sandbox's /dev/pts/ptmx was replaced: no terminal is left")
            flags = os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC
            self.master = os.open(f"/proc/self/fd/{path}", flags)
        finally:
            os.close(path)
        try:
            tty.unlock(self.master)
            tty.resize(self.master, rows, columns)
            slave = tty.peer(self.master)
            os.fchown(slave, owner + uid, owner + _GROUP)
        except BaseException:
            self.close()
            raise
        return slave

    @property
    def link(self) -> str:
        """What /proc shows of the slave side's descriptors."""
        return f"/dev/pts/{tty.index(self.master)}"

    def end_of_input(self) -> bytes:
        """What a user would type for the end of input (VEOF)."""
        return bytes((tty.control(tty.settings(self.master), tty.VEOF) or 4,))

    def check(self, label: str) -> None:
        """Raise for a state that cannot be given back. Its output has been read."""
        end = tty.peer(self.master)
        try:
            poller = select.poll()
            poller.register(end, select.POLLOUT)
            if not poller.poll(0):
                raise UnsupportedState(
                    f"the output of the terminal of {label} is stopped (Ctrl-S); send Ctrl-Q",
                    object="terminal",
                )
        finally:
            os.close(end)

    def close(self) -> None:
        """Hang up."""
        if self.master >= 0:
            os.close(self.master)
            self.master = -1
