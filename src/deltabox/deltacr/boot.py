"""PID 1 and its world: the records that make namespaces, mounts and a network for a tree.

The same program serves a fresh sandbox and one that is to be restored, and for those it may run
long before: at its end PID 1 only waits for requests, of which a restore is one.  It is run by the
*door* of a template, a task that shares the template's memory but has moved into the sandbox tree's
user namespace, so that every namespace it makes is owned by that.  PID 1 shares the template's
memory too (CLONE_VM): no second copy of the page tables is made for it.

Order matters (user_namespaces(7), pid_namespaces(7)): user namespace first, by the door; then all
others in one clone3; then mounts, with the overlay made by the keeper and only moved into place.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable
from dataclasses import dataclass

from ..linux import namespace as ns
from ..linux import numbers as nr
from .records import Program, Ref, Sealed, Sequence, Var

SIGCHLD = 17
_MADV_DOFORK = 11
AT_FDCWD = -100
# linux/keyctl.h; a kernel without keys has none to hide
_KEYCTL_JOIN_SESSION_KEYRING, _KEYCTL_SETPERM, _SESSION_KEYRING = 1, 5, -3
_POSSESSOR_READS = 0x0B000000  # view, read, search
_MOVE_MOUNT_F_EMPTY_PATH = 4
_MS_BIND, _MS_REC, _MS_SLAVE, _MS_RDONLY, _MS_REMOUNT = 4096, 16384, 1 << 19, 1, 32
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 2, 4, 8
_MNT_DETACH = 2
_FSCONFIG_SET_STRING, _FSCONFIG_CMD_CREATE = 1, 6
_MOUNT_ATTR_RDONLY, _MOUNT_ATTR_NOSUID, _MOUNT_ATTR_NODEV, _MOUNT_ATTR_NOEXEC = 1, 2, 4, 8
PR_SET_PDEATHSIG, PR_CAPBSET_DROP, PR_SET_NAME = 1, 24, 15
SIGKILL = 9

DEVICES = {
    "null": (1, 3),
    "zero": (1, 5),
    "full": (1, 7),
    "random": (1, 8),
    "urandom": (1, 9),
    "tty": (5, 0),
}

# linux/capability.h: what development work needs; the rest leaves the bounding set.
CAPABILITIES = {
    "CHOWN": 0,
    "DAC_OVERRIDE": 1,
    "DAC_READ_SEARCH": 2,
    "FOWNER": 3,
    "FSETID": 4,
    "KILL": 5,
    "SETGID": 6,
    "SETUID": 7,
    "SETPCAP": 8,
    "NET_BIND_SERVICE": 10,
    "NET_ADMIN": 12,
    "NET_RAW": 13,
    "IPC_LOCK": 14,
    "SYS_CHROOT": 18,
    "SYS_PTRACE": 19,
    "SYS_ADMIN": 21,
    "SYS_NICE": 23,
    "AUDIT_WRITE": 29,
    "SETFCAP": 31,
}


@functools.cache
def last_capability() -> int:
    with open("/proc/sys/kernel/cap_last_cap") as file:
        return int(file.read())


def seed_program(root: str) -> Program:
    """Move the seed into a mount namespace of its own that holds only what mounting needs.

    Copying a mount namespace costs with its size, so PID 1's is copied from this one instead of
    the host's; /proc and /sys are there because the kernel lets a user namespace mount its own
    only where it can see a full one.
    """
    program = Program()
    do = program.root
    mask = program.data(struct.pack("<Q", (1 << 64) - 1))
    do.call(nr.RT_SIGPROCMASK, 0, mask, 0, 8)
    # what the keeper's parents ignored must not be ignored inside
    default = program.data(bytes(32))
    for number in range(1, 65):
        if number not in (9, 19):
            do.call(nr.RT_SIGACTION, number, default, 0, 8)
    do.call(nr.PRCTL, PR_SET_PDEATHSIG, SIGKILL)
    do.call(nr.PRCTL, PR_SET_NAME, program.text("deltabox"))
    # Nor does a sandbox possess the keys of whoever started the keeper (session-keyring(7)). All of
    # them inherit this one, so it stays empty: it can be looked at and searched, no more.
    do.call(nr.KEYCTL, _KEYCTL_JOIN_SESSION_KEYRING, 0, may_fail=True)
    do.call(nr.KEYCTL, _KEYCTL_SETPERM, _SESSION_KEYRING, _POSSESSOR_READS, may_fail=True)
    do.call(nr.UNSHARE, ns.CLONE_NEWNS, what="unshare mounts")
    none = program.text("none")
    _mount(program, do, none, "/", None, _MS_REC | _MS_SLAVE)
    _mount(program, do, none, root, "tmpfs", 0, "mode=0755,size=1m")
    do.call(nr.CHDIR, program.text(root))
    for directory in ("proc", "sys", "dev", "dev/net", "mnt"):
        do.call(nr.MKDIRAT, AT_FDCWD, program.text(directory), 0o755)
    for name, (major, minor) in DEVICES.items():
        path = program.text(f"dev/{name}")
        do.call(259, AT_FDCWD, path, 0o020666, major << 8 | minor, what="mknodat")
        do.call(268, AT_FDCWD, path, 0o666, what="fchmodat")  # mknod obeys the umask
    tun = program.text("dev/net/tun")  # for network.py; sandboxes do not get it
    do.call(259, AT_FDCWD, tun, 0o020600, 10 << 8 | 200, what="mknodat")
    do.call(268, AT_FDCWD, tun, 0o666, what="fchmodat")
    _mount(program, do, program.text("proc"), "proc", "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    _mount(program, do, program.text("sysfs"), "sys", "sysfs", _MS_RDONLY)
    dot = program.text(".")
    do.call(nr.PIVOT_ROOT, dot, dot, what="pivot_root")
    do.call(nr.UMOUNT2, dot, _MNT_DETACH)
    do.call(nr.CHDIR, program.text("/"))
    do.call(nr.CLOSE_RANGE, 0, 2, 0)
    do.call(nr.CLOSE_RANGE, 4, (1 << 32) - 1, 0)
    return program


def template_program(stash: list[tuple[int, int]]) -> Program:
    """Run by the seed: fork a blank template into the group of its tree.

    Or by a template: fork one that shares all its pages. `stash` are the address ranges it holds,
    some of which a restore may have kept from being inherited.
    """
    program = Program("sock", "cgroup")
    body = program.sequence("template")
    for low, high in stash:
        program.root.call(nr.MADVISE, low, high - low, _MADV_DOFORK, may_fail=True)
    arguments = program.clone_args(
        flags=ns.CLONE_PARENT | ns.CLONE_INTO_CGROUP, stack=_stack(0), stack_size=_STACK
    )
    program.root.store(arguments + 80, program.inputs["cgroup"])
    program.root.clone(arguments, body, save=program.result)
    body.call(nr.PRCTL, PR_SET_PDEATHSIG, SIGKILL)
    _keep_only(body, program.inputs["sock"])
    body.serve(3, -1, -1)
    return program


def door_program() -> Program:
    """Run by the template: a task that shares its memory, inside the tree's user namespace."""
    program = Program("sock", "userns")
    body = program.sequence("door")
    arguments = program.clone_args(
        flags=ns.CLONE_PARENT | ns.CLONE_VM, stack=_stack(1), stack_size=_STACK
    )
    program.root.clone(arguments, body, save=program.result)
    body.call(nr.PRCTL, PR_SET_PDEATHSIG, SIGKILL)
    body.call(nr.SETNS, program.inputs["userns"], ns.CLONE_NEWUSER, what="setns user")
    body.call(nr.SETGROUPS, 0, 0)
    body.call(nr.SETRESGID, 0, 0, 0)
    body.call(nr.SETRESUID, 0, 0, 0)
    body.call(nr.PRCTL, PR_SET_PDEATHSIG, SIGKILL)  # changing ids cleared it
    _keep_only(body, program.inputs["sock"])
    body.serve(3, -1, -1)
    return program


def user_namespace_program(owner: int) -> Program:
    """Run by the seed: a process that makes the tree's user namespace, under the tree's own uid.

    The creator's uid is what the kernel charges inotify instances and keys to.
    """
    program = Program()
    body = program.sequence("user namespace")
    stack = program.stack()
    arguments = program.clone_args(flags=ns.CLONE_PARENT, stack=stack)
    program.root.clone(arguments, body, save=program.result)
    body.call(nr.PRCTL, PR_SET_PDEATHSIG, SIGKILL)
    body.call(nr.SETGROUPS, 0, 0)
    body.call(nr.SETRESGID, owner, owner, owner)
    body.call(nr.SETRESUID, owner, owner, owner)
    body.call(nr.UNSHARE, ns.CLONE_NEWUSER, what="unshare user")
    body.call(nr.PRCTL, PR_SET_PDEATHSIG, SIGKILL)  # changing ids cleared it
    program.root.barrier(0, 2)
    body.barrier(0, 2)
    body.call(34)  # pause(2), until the keeper has written the maps and ends it
    return program


@dataclass(frozen=True)
class World:
    """What differs between the worlds of sandboxes."""

    hostname: bytes
    domainname: bytes = b"(none)"
    network: str = "none"


def first_process(program: Program, body: Sequence, world: World) -> Var:
    """Add to the root sequence (run by the door) the clone of PID 1; its host pid is the result."""
    flags = (
        ns.CLONE_VM
        | ns.CLONE_PARENT
        | ns.CLONE_NEWPID
        | ns.CLONE_NEWNS
        | ns.CLONE_NEWIPC
        | ns.CLONE_NEWUTS
        | ns.CLONE_INTO_CGROUP
    )
    arguments = program.clone_args(flags=flags, stack=program.stack(16384), stack_size=16384)
    program.root.store(arguments + 80, program.inputs["cgroup"])
    pid = program.variable()
    program.root.clone(arguments, body, save=pid)
    return pid


FIRST_INPUTS = ("cgroup", "root", "network", "requests", "reports")
# PID 1's own descriptors, for the rest of its life
REQUESTS, REPORTS, SIGNALS = 3, 4, 5
OWN = SIGNALS + 1


def settle(program: Program, do: Sequence, world: World) -> None:
    """PID 1's own set-up, up to a pivoted root."""
    do.call(nr.PRCTL, PR_SET_PDEATHSIG, SIGKILL)
    do.call(nr.PRCTL, PR_SET_NAME, program.text("init"))
    do.call(nr.SETSID)
    do.call(nr.SETHOSTNAME, program.data(world.hostname), len(world.hostname))
    if world.domainname != b"(none)":
        do.call(nr.SETDOMAINNAME, program.data(world.domainname), len(world.domainname))
    # the group is the root of what is seen inside, so that its name on the host is not told
    do.call(nr.UNSHARE, ns.CLONE_NEWCGROUP, what="unshare cgroup")
    if world.network != "host":
        do.call(nr.SETNS, program.inputs["network"], ns.CLONE_NEWNET, what="setns net")
    do.call(
        nr.MOVE_MOUNT,
        program.inputs["root"],
        program.text(""),
        AT_FDCWD,
        program.text("/mnt"),
        _MOVE_MOUNT_F_EMPTY_PATH,
        what="move_mount root",
    )
    for name in DEVICES:
        _mount(program, do, program.text(f"/dev/{name}"), f"/mnt/dev/{name}", None, _MS_BIND)
    do.call(nr.CHDIR, program.text("/mnt"))
    quiet = _MOUNT_ATTR_NOSUID | _MOUNT_ATTR_NODEV | _MOUNT_ATTR_NOEXEC
    _new_mount(program, do, "proc", "proc", quiet, ())
    _new_mount(
        program,
        do,
        "devpts",
        "dev/pts",
        _MOUNT_ATTR_NOSUID | _MOUNT_ATTR_NOEXEC,
        (("ptmxmode", "0666"), ("mode", "0620"), ("gid", "5")),
    )
    # a kernel without POSIX message queues has no such file system
    _new_mount(program, do, "mqueue", "dev/mqueue", quiet, (), optional=True)
    if world.network == "host":
        # a sysfs of the host's network namespace is not ours to mount
        _mount(program, do, program.text("/sys"), "sys", None, _MS_BIND | _MS_REC)
    else:
        _new_mount(program, do, "sysfs", "sys", quiet | _MOUNT_ATTR_RDONLY, ())
    dot = program.text(".")
    do.call(nr.PIVOT_ROOT, dot, dot, what="pivot_root")
    do.call(nr.UMOUNT2, dot, _MNT_DETACH)
    do.call(nr.CHDIR, program.text("/"))
    for capability in range(last_capability() + 1):
        if capability not in CAPABILITIES.values():
            do.call(nr.PRCTL, PR_CAPBSET_DROP, capability)


@dataclass(frozen=True)
class First:
    """The program that makes a PID 1 and its world."""

    sealed: Sealed
    pid: Var  # will hold its host pid


def first(world: World, furnish: Callable[[Program, Sequence], None] | None = None) -> First:
    """The whole of it. `furnish` adds what PID 1 shall have open besides, from OWN upwards."""
    program = Program(*FIRST_INPUTS)
    program.root.keep_to_itself()
    init = program.sequence("PID 1")
    pid = first_process(program, init, world)
    settle(program, init, world)
    signals = program.variable()
    chosen = program.data(struct.pack("<Q", 1 << (SIGCHLD - 1)))
    init.call(nr.SIGNALFD4, -1, chosen, 8, 0o2000000 | 0o4000, save=signals, what="signalfd")
    own = (program.inputs["requests"], program.inputs["reports"], signals)
    # by way of numbers that nothing has: what comes in may lie on those that are wanted
    for index, fd in enumerate(own):
        init.call(nr.DUP3, fd, _ASIDE + index, _O_CLOEXEC, what="put aside")
    init.call(nr.CLOSE_RANGE, 0, _ASIDE - 1, 0)
    for index, number in enumerate((REQUESTS, REPORTS, SIGNALS)):
        init.call(nr.DUP3, _ASIDE + index, number, _O_CLOEXEC, what="own descriptor")
    init.call(nr.CLOSE_RANGE, OWN, (1 << 32) - 1, 0)
    if furnish is not None:
        furnish(program, init)
    answer(program, init)
    serve_for_ever(init)
    return First(program.seal(), pid)


def answer(program: Program, do: Sequence) -> None:
    """PID 1 tells the keeper that it has come this far, as if a request had been answered.

    From here on nothing in this sequence must fail.
    """
    do.late = True
    do.call(nr.WRITE, REQUESTS, program.data(bytes(8)), 8)


def serve_for_ever(do: Sequence) -> None:
    """PID 1's life: spawn, reap and report."""
    do.serve(REQUESTS, SIGNALS, REPORTS)


_STACK = 0x8000
_ASIDE = 250
_O_CLOEXEC = 0o2000000


def _stack(index: int) -> int:
    from .records import STACKS

    return STACKS + index * _STACK


def _keep_only(do: Sequence, sock: Var) -> None:
    """Leave a new task with one descriptor, its socket, as number 3."""
    do.call(nr.DUP3, sock, 250, 0o2000000)
    do.call(nr.CLOSE_RANGE, 0, 249, 0)
    do.call(nr.DUP3, 250, 3, 0o2000000)
    do.call(nr.CLOSE_RANGE, 4, (1 << 32) - 1, 0)


def _mount(
    program: Program,
    do: Sequence,
    source: Ref,
    target: str,
    kind: str | None,
    flags: int,
    options: str | None = None,
) -> None:
    do.call(
        nr.MOUNT,
        source,
        program.text(target),
        program.text(kind) if kind else 0,
        flags,
        program.text(options) if options else 0,
        what=f"mount {target}",
    )


def _new_mount(
    program: Program,
    do: Sequence,
    kind: str,
    target: str,
    attributes: int,
    options: tuple[tuple[str, str], ...],
    *,
    optional: bool = False,
) -> None:
    """fsopen, fsconfig, fsmount, move_mount: a superblock of this sandbox's own."""
    context, mount = program.variable(), program.variable()
    name = program.text(kind)
    do.call(nr.FSOPEN, name, 1, save=context, may_fail=optional, what=f"fsopen {kind}")
    if optional:
        do.skip_if_error(context, 5 + len(options))
    for key, value in options:
        do.call(
            nr.FSCONFIG,
            context,
            _FSCONFIG_SET_STRING,
            program.text(key),
            program.text(value),
            0,
            what=f"{kind} {key}",
        )
    do.call(nr.FSCONFIG, context, _FSCONFIG_CMD_CREATE, 0, 0, 0, what=f"create {kind}")
    do.call(nr.FSMOUNT, context, 1, attributes, save=mount, what=f"fsmount {kind}")
    do.call(
        nr.MOVE_MOUNT,
        mount,
        program.text(""),
        AT_FDCWD,
        program.text(target),
        _MOVE_MOUNT_F_EMPTY_PATH,
        what=f"move_mount {target}",
    )
    do.call(nr.CLOSE, mount)
    do.call(nr.CLOSE, context)
