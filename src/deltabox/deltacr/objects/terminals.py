"""Pseudo-terminals: both sides, who is in control, and what lies unread in them (pts(4), tty(4)).

A terminal is an index N in the sandbox's own devpts: a *master*, one description that opening
/dev/ptmx made, and any number of *ends*: descriptions of /dev/pts/N or of /dev/tty, which is the
controlling terminal of whoever opened it.  The kernel hands out the lowest free index, so masters
are opened in order, with dummies for indexes that nobody has (drivers/tty/pty.c, devpts/inode.c).

Capture asks through a duplicate of either side; nearly everything belongs to the pair.  Session and
foreground group are those of the leader, from /proc (stat: tty_nr, tpgid).  What cannot be seen at
all is the unread data; `typed.py` has it.

Restore: PID 1 makes the pair.  It leads a session of its own, so it can take control of a terminal
for a moment to open /dev/tty.  A session leader takes control right after setsid, so that its
children inherit that; who has given it up does so again; the leader sets the foreground group when
all groups exist.  When the master is closed its ends are hung up and stay so (every call but close
fails), and keep their number; that is done again.  Nothing else inside can hang up a pty:
vhangup(2) needs CAP_SYS_TTY_CONFIG of the host, and a leader's exit does not (disassociate_ctty).

The master may be the keeper's: terminals of handles.  PID 1 makes those too, and the keeper takes
the master out of it before the release.

Rejected: to put unread data back from inside; TIOCSTI needs CAP_SYS_ADMIN of the host.
"""

from __future__ import annotations

import fcntl
import os
import select
import stat
import struct
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Items
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

from ...errors import UnsupportedState
from ...linux import numbers as nr
from ...linux import proc
from ...linux import terminal as tty
from ...linux.openat2 import openat2
from ..model import Capture, Description, External, Process
from ..rebuild import Entry, Kind, Rebuild
from ..records import Sequence
from ..subject import Refused, Subject
from . import typed

_O_CLOEXEC, _O_NOCTTY, _O_RDWR = 0o2000000, 0o400, 2
_O_LARGEFILE = 0o100000
_N_TTY = 0
_PTMX = "/dev/pts/ptmx"
_MOST = 1024  # indexes; each one below the highest has to be opened for a moment
_FCHOWNAT, _FCHMODAT = 260, 268


@dataclass(frozen=True)
class End:
    """A description of the slave side."""

    index: int
    path: str  # /dev/pts/N or /dev/tty
    hung: bool


@dataclass(frozen=True)
class Terminal:
    """A pair; the state of the master's description, which need not be held by any process."""

    index: int
    key: str = ""  # of the keeper's handle that holds the master
    dead: bool = False  # the master is closed: only ends that were hung up are left
    opened: bool = False  # the slave side has been opened at some time
    owner: tuple[int, int, int] = (0, 0, 0)  # uid, gid and mode of /dev/pts/N
    termios: bytes = b""
    size: bytes = b""
    locked: bool = False
    packet: bool = False
    exclusive: tuple[bool, bool] = (False, False)  # the master, the slave side
    session: int = 0  # the pid of the leader it controls
    foreground: int = 0
    unread: typed.Unread = field(default_factory=typed.Unread)


# -- capture ------------------------------------------------------------------------------------


def is_terminal(subject: Subject) -> bool:
    return subject.target.startswith("/dev/pts/") or subject.target == "/dev/tty"


def controlling(number: int) -> int:
    """The index of a process's controlling terminal, by the `tty_nr` of its stat; -1 for none."""
    return tty.minor(number) if number else -1


class Terminals:
    """All terminals that the processes of a tree have to do with."""

    def __init__(self, root: int, owner: int, externals: Mapping[str, External]) -> None:
        self._root = root
        self._owner = owner
        self._externals = externals
        self._masters: dict[int, Subject] = {}
        self._ends: dict[int, list[Subject]] = {}
        self._hung: set[int] = set()

    def capture(self, subject: Subject) -> Description:
        """One descriptor, as far as it can tell; `finish` completes masters."""
        info = os.stat(subject.path)
        if not stat.S_ISCHR(info.st_mode):
            raise Refused(f"a file on /dev/pts, {subject.target}")
        device = (os.major(info.st_rdev), os.minor(info.st_rdev))
        with subject.taken() as fd:
            hung = False
            try:
                index = tty.index(fd)
            except OSError:
                hung = True
                index = device[1]
            if device == tty.PTMX:
                self._masters[index] = subject
                return Description("terminal", subject.flags, state=Terminal(index))
            if fcntl.fcntl(fd, fcntl.F_GETFL) & _O_CLOEXEC:
                # TIOCGPTPEER leaves it in the description, and hides what the descriptor has
                raise Refused("a terminal opened by TIOCGPTPEER with O_CLOEXEC")
            if hung and device[0] != tty.SLAVE_MAJOR:
                raise Refused("a terminal that was hung up, opened as /dev/tty")
            if hung:
                self._hung.add(index)
            else:
                if tty.number(fd, tty.TIOCGETD) != _N_TTY:
                    raise Refused("a terminal with a line discipline of its own")
                self._ends.setdefault(index, []).append(subject)
        path = "/dev/tty" if device == (5, 0) else f"/dev/pts/{index}"
        return Description("terminal end", subject.flags, state=End(index, path, hung))

    def any(self, controlling: Iterable[int]) -> bool:
        """Whether there is a terminal at all; `controlling` are the tty_nr of processes."""
        return bool(self._masters or self._ends or self._hung) or any(controlling)

    def finish(
        self,
        descriptions: list[Description],
        processes: Iterable[Process],
        inside: Mapping[int, int],
    ) -> None:
        """When everything has been seen: complete the masters, add those that no process holds."""
        leaders = {p.tty: p for p in processes if p.tty >= 0 and p.sid == p.pid}
        at = {d.state.index: i for i, d in enumerate(descriptions) if d.kind == "terminal"}
        held = {d.state.index for d in descriptions if d.kind == "terminal end"}
        for index in sorted({*at, *held, *leaders}):
            whole = self._whole(index, leaders.get(index), inside)
            if index in at:
                descriptions[at[index]] = replace(descriptions[at[index]], state=whole)
            else:
                descriptions.append(Description("terminal", _O_RDWR, state=whole))

    def _whole(self, index: int, leader: Process | None, inside: Mapping[int, int]) -> Terminal:
        master = self._masters.get(index)
        end = next(iter(self._ends.get(index, ())), None)
        external = self._externals.get(f"/dev/pts/{index}")
        if master is None and end is None and leader is None:
            return Terminal(index, dead=True, opened=True)
        foreground = 0 if leader is None else self._foreground(leader, inside)
        session = 0 if leader is None else leader.pid
        try:
            with ExitStack() as undo:
                fd = None
                if master is not None:
                    fd = undo.enter_context(master.taken())
                elif external is not None:
                    fd = external.fd
                state = self._asked(index, fd, undo, end)
        except Refused as refused:
            raise self._refusal(master or end, leader, inside, str(refused)) from None
        key = "" if external is None else external.key
        return replace(state, key=key, session=session, foreground=foreground)

    def _asked(
        self, index: int, master: int | None, undo: ExitStack, end: Subject | None
    ) -> Terminal:
        if master is None:
            raise Refused("a terminal whose other side is outside of the sandbox")
        if index in self._hung:
            raise Refused("a terminal that was hung up while its other side is open")
        if index >= _MOST:
            raise Refused(f"a terminal with an index as high as {index}")
        poller = select.poll()
        poller.register(master, select.POLLPRI)
        seen = dict(poller.poll(0)).get(master, 0)
        if seen & select.POLLPRI:
            raise Refused("a terminal in packet mode with a status that nobody has read")
        if tty.number(master, tty.TIOCGETD) != _N_TTY:
            raise Refused("a terminal with a line discipline of its own")
        external = f"/dev/pts/{index}" in self._externals
        node = self._node(index)
        undo.callback(os.close, node)
        info = os.fstat(node)
        state = Terminal(
            index,
            opened=end is not None or external or bool(seen & select.POLLHUP),
            owner=(
                info.st_uid - self._owner,
                info.st_gid - self._owner,
                stat.S_IMODE(info.st_mode),
            ),
            termios=tty.settings(master),
            size=fcntl.ioctl(master, tty.TIOCGWINSZ, bytes(8)),
            locked=bool(tty.number(master, tty.TIOCGPTLCK)),
            packet=bool(tty.number(master, tty.TIOCGPKT)),
            exclusive=(bool(tty.number(master, tty.TIOCGEXCL)), False),
        )
        own = None
        if end is not None or (state.opened and not external and typed.is_full(master)):
            # one that nobody has open is opened only where nothing else will do
            if state.locked:
                raise Refused("a terminal that was locked while it was open")
            own = os.open(
                f"/proc/self/fd/{node}", _O_RDWR | _O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC
            )
            undo.callback(os.close, own)
            if tty.number(own, tty.TIOCGEXCL):
                state = replace(state, exclusive=(state.exclusive[0], True))
        elif typed.is_full(master) and not external:
            raise Refused("a terminal that was never opened, full of unread data")
        unread = typed.take(
            state.termios, packet=state.packet, master=master, end=own, external=external
        )
        return replace(state, unread=unread)

    def _node(self, index: int) -> int:
        """An O_PATH descriptor of /dev/pts/N."""
        node = openat2(self._root, f"/dev/pts/{index}", os.O_PATH | os.O_NOFOLLOW)
        device = os.fstat(node).st_rdev
        if (os.major(device), os.minor(device)) != (tty.SLAVE_MAJOR, index):
            os.close(node)
            raise Refused(f"a terminal that is not at /dev/pts/{index}")
        return node

    def _foreground(self, leader: Process, inside: Mapping[int, int]) -> int:
        group = proc.stat(leader.host_pid).foreground
        if group in (0, -1):
            return 0
        if group not in inside:
            name = leader.comm.decode(errors="replace")
            raise UnsupportedState(
                f"pid {leader.pid} ({name}) is controlled by a terminal whose foreground group "
                "has no process left",
                pid=leader.pid,
                process=name,
                object="terminal",
            )
        return inside[group]

    def _refusal(
        self,
        subject: Subject | None,
        leader: Process | None,
        inside: Mapping[int, int],
        kind: str,
    ) -> UnsupportedState:
        if subject is not None and subject.host in inside:
            pid, name = inside[subject.host], proc.stat(subject.host).comm
            what = f"fd {subject.number} of pid {pid} ({name}) is {kind}"
        elif subject is not None:  # the keeper's, taken out of a queue
            return UnsupportedState(f"a socket's queue holds {kind}", object=kind)
        else:
            assert leader is not None
            pid, name = leader.pid, leader.comm.decode(errors="replace")
            what = f"pid {pid} ({name}) is controlled by {kind}"
        return UnsupportedState(what, pid=pid, process=name, object=kind)


# -- restore, in PID 1 --------------------------------------------------------------------------


def _restore(rebuild: Rebuild, entries: Items[Entry]) -> None:
    ends: dict[int, list[Entry]] = {}
    masters: list[Entry] = []
    for entry in entries:
        if entry[1].kind == "terminal":
            masters.append(entry)
        else:
            ends.setdefault(entry[1].state.index, []).append(entry)
    dummies = []
    following = 0
    for number, description in sorted(masters, key=lambda entry: entry[1].state.index):
        state: Terminal = description.state
        while following < state.index:
            dummies.append(rebuild.reserve())
            _open(rebuild, dummies[-1], _PTMX, _O_RDWR)
            following += 1
        following += 1
        _restore_pair(rebuild, number, description.flags, state, ends.get(state.index, []))
    for dummy in dummies:
        rebuild.init.call(nr.CLOSE, dummy)


def _restore_pair(
    rebuild: Rebuild, number: int, flags: int, state: Terminal, ends: list[Entry]
) -> None:
    do, program = rebuild.init, rebuild.program
    path = f"/dev/pts/{state.index}"
    _open(rebuild, number, _PTMX, flags)
    unlocked = program.data(struct.pack("i", 0))
    do.call(nr.IOCTL, number, tty.TIOCSPTLCK, unlocked, what="unlock a terminal")
    if state.unread:
        program.handed[typed.handed_name(state.index, "master")] = number
    if not state.opened:
        _settings(rebuild, number, state)
        return
    helper = rebuild.terminals[state.index] = rebuild.reserve()
    _open(rebuild, helper, path, _O_RDWR)
    if not state.dead:
        _settings(rebuild, number, state)
    own = [entry for entry in ends if entry[1].state.path == "/dev/tty"]
    if own:
        do.call(nr.IOCTL, helper, tty.TIOCSCTTY, 0, what=f"take control of {path}")
        for end, description in own:
            _open(rebuild, end, "/dev/tty", description.flags)
        do.call(nr.IOCTL, helper, tty.TIOCNOTTY, 0, what=f"give up control of {path}")
    for end, description in ends:
        if (end, description) in own:
            continue
        if description.flags & _O_LARGEFILE:
            _open(rebuild, end, path, description.flags)
        else:  # opened by TIOCGPTPEER, as openpty(3) does, which does not set that flag
            flags = description.flags | _O_NOCTTY
            do.call(nr.IOCTL, number, tty.TIOCGPTPEER, flags, save=rebuild.opened, what="openpty")
            rebuild.place(end)
    if state.dead:
        do.call(nr.CLOSE, number)
    if state.key:
        program.handed[state.key] = number
    if state.unread:
        program.handed[typed.handed_name(state.index, "slave")] = helper


def _open(rebuild: Rebuild, number: int, path: str, flags: int) -> None:
    name = rebuild.program.text(path)
    flags = flags & ~_O_CLOEXEC | _O_NOCTTY
    rebuild.init.call(nr.OPENAT, -100, name, flags, save=rebuild.opened, what=f"open {path}")
    rebuild.place(number)


def _settings(rebuild: Rebuild, number: int, state: Terminal) -> None:
    """What can be set through the master before anybody is there to be told by a signal."""
    do, program = rebuild.init, rebuild.program
    uid, gid, mode = state.owner
    path = program.text(f"/dev/pts/{state.index}")
    do.call(_FCHOWNAT, -100, path, uid, gid, 0, what="chown a terminal")
    do.call(_FCHMODAT, -100, path, mode, what="chmod a terminal")
    do.call(nr.IOCTL, number, tty.TCSETS2, program.data(state.termios), what="TCSETS2")
    do.call(nr.IOCTL, number, tty.TIOCSWINSZ, program.data(state.size), what="TIOCSWINSZ")


def _joined(rebuild: Rebuild, entries: Items[Entry]) -> None:
    """What would have been in the way of opening, or would have been noted by packet mode."""
    do = rebuild.init
    yes = rebuild.program.data(struct.pack("i", 1))
    for number, description in entries:
        if description.kind != "terminal" or description.state.dead:
            continue
        state: Terminal = description.state
        if state.packet:
            do.call(nr.IOCTL, number, tty.TIOCPKT, yes, what="TIOCPKT")
        if state.exclusive[0]:
            do.call(nr.IOCTL, number, tty.TIOCEXCL, 0, what="TIOCEXCL")
        if state.exclusive[1]:
            helper = rebuild.terminals[state.index]
            do.call(nr.IOCTL, helper, tty.TIOCEXCL, 0, what="TIOCEXCL")
        if state.locked:
            do.call(nr.IOCTL, number, tty.TIOCSPTLCK, yes, what="lock a terminal")


KIND = Kind(("terminal", "terminal end"), _restore, joined=_joined)


# -- restore, in the processes ------------------------------------------------------------------


def take_control(rebuild: Rebuild, do: Sequence, process: Process | None) -> None:
    """Right after setsid, before there is anybody to inherit it."""
    if process is not None and process.tty >= 0:
        helper = rebuild.terminals[process.tty]
        do.call(nr.IOCTL, helper, tty.TIOCSCTTY, 0, what=f"control by /dev/pts/{process.tty}")


def give_up_control(rebuild: Rebuild, do: Sequence, process: Process | None) -> None:
    """A member of a session that has a terminal, and has itself let go of it."""
    if process is None or process.tty >= 0 or process.sid == process.pid:
        return
    leader = rebuild.capture.by_pid.get(process.sid)
    if leader is not None and leader.tty >= 0:
        helper = rebuild.terminals[leader.tty]
        do.call(nr.IOCTL, helper, tty.TIOCNOTTY, 0, what="give up control by a terminal")


def sets_foreground(process: Process | None) -> bool:
    """Whether it must wait until all groups have their members."""
    return process is not None and process.tty >= 0 and process.sid == process.pid


def set_foreground(rebuild: Rebuild, do: Sequence, process: Process | None) -> None:
    """Every signal is blocked, so the leader may do it from the background too."""
    if process is None or not sets_foreground(process):
        return
    state = _state(rebuild.capture, process.tty)
    if state.foreground:
        group = rebuild.program.data(struct.pack("i", state.foreground))
        helper = rebuild.terminals[process.tty]
        do.call(nr.IOCTL, helper, tty.TIOCSPGRP, group, what=f"foreground {state.foreground}")


def _state(capture: Capture, index: int) -> Terminal:
    for description in capture.descriptions:
        if description.kind == "terminal" and description.state.index == index:
            state: Terminal = description.state
            return state
    raise KeyError(index)


def refill(capture: Capture, handed: dict[str, int]) -> None:
    """By the keeper, while a rebuilt tree waits: put back what was unread, close what it needs."""
    for description in capture.descriptions:
        if description.kind != "terminal" or not description.state.unread:
            continue
        state: Terminal = description.state
        master = handed.pop(typed.handed_name(state.index, "master"))
        end = handed.pop(typed.handed_name(state.index, "slave"), None)
        try:
            typed.put_back(state.unread, state.termios, packet=state.packet, master=master, end=end)
        finally:
            os.close(master)
            if end is not None:
                os.close(end)
