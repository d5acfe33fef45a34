"""Inotify instances with their watches (inotify(7)).

A watch belongs to an inode; fdinfo tells its inode number, device and file handle, and the handle
leads to a name (`Live.find`), which must lead back to that inode.  INOTIFY_IOC_SETNEXTWD gives a
new watch its old descriptor.  Watches are added last, so that what a restore itself opens is not
reported to them.

Events that wait to be read cannot be looked at without taking them, and cannot be put back, so a
checkpoint waits a moment for the program to read them and is refused by name if it does not.
Rejected: an overflow event in their place (16,384 events would have to be made for one), and doing
the same to the files again (changes their times).
"""

from __future__ import annotations

import array
import fcntl
import itertools
import os
import re
import stat
import termios
from collections.abc import Sequence as Items
from dataclasses import dataclass

from ...linux import numbers as nr
from ...linux.openat2 import openat2
from ..model import Description
from ..rebuild import Entry, Kind, Rebuild
from ..subject import Refused, Subject

_SET_NEXT_WD = 0x40044900
_DONT_FOLLOW = 0x02000000
_WATCH = re.compile(
    r"inotify wd:([0-9a-f]+) ino:([0-9a-f]+) sdev:([0-9a-f]+) mask:([0-9a-f]+) "
    r"ignored_mask:[0-9a-f]+ fhandle-bytes:[0-9a-f]+ fhandle-type:([0-9a-f]+) f_handle:([0-9a-f]*)"
)


@dataclass(frozen=True)
class Watch:
    descriptor: int
    mask: int
    path: str


def capture(subject: Subject) -> Description:
    with subject.taken() as fd:
        waiting = array.array("i", [0])
        fcntl.ioctl(fd, termios.FIONREAD, waiting)
    if waiting[0]:
        raise Refused("an inotify instance with events that its program has not read yet")
    watches = sorted((_watch(subject, line) for line in subject.lines("inotify ")), key=_order)
    return Description("inotify", subject.flags, state=tuple(watches))


def _order(watch: Watch) -> int:
    return watch.descriptor


def _watch(subject: Subject, line: str) -> Watch:
    found = _WATCH.match(line)
    if found is None:
        raise Refused(f"an inotify instance this kernel describes as {line}")
    descriptor, inode, _, mask, kind, handle = found.groups()
    wanted = int(mask, 16)
    paths = subject.table.find_file(int(kind, 16), bytes.fromhex(handle), int(inode, 16))
    for candidate in itertools.chain(paths, _MOUNTS):
        try:
            fd = openat2(subject.table.root, candidate, os.O_PATH | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            info = os.fstat(fd)
        finally:
            os.close(fd)
        if info.st_ino == int(inode, 16) and _device(info.st_dev) == int(found[3], 16):
            link = _DONT_FOLLOW if stat.S_ISLNK(info.st_mode) else 0
            return Watch(int(descriptor, 16), wanted | link, candidate)
    raise Refused(f"an inotify instance that watches a file without a name (inode {inode})")


_MOUNTS = ("/proc", "/sys", "/dev/pts", "/dev/mqueue")


def _device(number: int) -> int:
    """As fdinfo shows it: the kernel's own encoding."""
    return os.major(number) << 20 | os.minor(number)


def _open(rebuild: Rebuild, entries: Items[Entry]) -> None:
    for number, description in entries:
        flags = description.flags & os.O_NONBLOCK
        rebuild.init.call(nr.INOTIFY_INIT1, flags, save=rebuild.opened, what="inotify_init1")
        rebuild.place(number)


def _link(rebuild: Rebuild, entries: Items[Entry]) -> None:
    do = rebuild.init
    for number, description in entries:
        watches: tuple[Watch, ...] = description.state
        for watch in watches:
            path = rebuild.program.text(os.fsencode(watch.path))
            do.call(nr.IOCTL, number, _SET_NEXT_WD, watch.descriptor, what="next watch")
            do.call(nr.INOTIFY_ADD_WATCH, number, path, watch.mask, what=f"watch {watch.path}")


KIND = Kind(("inotify",), _open, _link)
