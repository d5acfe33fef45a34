"""Calls that only `deltabox doctor` makes: each asks the kernel whether it can do one thing.

A version number proves little: distributions switch features off, containers forbid them,
vendors port them back. So every probe here *makes the call*. There are two kinds:

- **asked**: the call is made with arguments that the kernel must refuse, and the errno tells
  whether it knows the call at all. No child, no side effect, microseconds. `Sandbox.create()`
  can afford these.
- **tried**: the whole thing is done for real in a child (`in_child`), which has namespaces of
  its own where needed and is gone afterwards.

Every probe returns on success and raises `OSError` otherwise. Numbers are of x86_64; constants
are from the uapi headers named beside them.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import platform
import select
import signal
import struct
import traceback
from collections.abc import Callable
from pathlib import Path

from deltabox.linux._libc import libc, syscall

# asm/unistd_64.h
_SYS_BRK = 12
_SYS_PTRACE = 101
_SYS_CAPGET = 125
_SYS_PRCTL = 157
_SYS_MOUNT = 165
_SYS_UMOUNT2 = 166
_SYS_UNSHARE = 272
_SYS_PROCESS_VM_READV = 310
_SYS_KCMP = 312
_SYS_USERFAULTFD = 323
_SYS_OPEN_TREE = 428
_SYS_MOVE_MOUNT = 429
_SYS_FSOPEN = 430
_SYS_FSCONFIG = 431
_SYS_FSMOUNT = 432
_SYS_PIDFD_OPEN = 434
_SYS_CLONE3 = 435
_SYS_OPENAT2 = 437
_SYS_PIDFD_GETFD = 438
_SYS_MOUNT_SETATTR = 442

# linux/sched.h
CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
CLONE_INTO_CGROUP = 0x200000000
_CLONE_ARGS_SIZE = 88  # CLONE_ARGS_SIZE_VER2: with set_tid and cgroup

# linux/mount.h
MS_NODEV, MS_REC, MS_PRIVATE = 0x4, 0x4000, 0x40000
MNT_DETACH = 0x2
_FSCONFIG_SET_FLAG, _FSCONFIG_SET_STRING, _FSCONFIG_SET_FD, _FSCONFIG_CMD_CREATE = 0, 1, 5, 6
_OPEN_TREE_CLONE = 0x1
_AT_EMPTY_PATH = 0x1000
_MOUNT_ATTR_IDMAP = 0x00100000
_MOUNT_ATTR_SIZE = 32

# linux/prctl.h
_PR_SET_MM, _PR_SET_MM_MAP, _PR_SET_MM_MAP_SIZE = 35, 14, 15

# linux/ptrace.h
_PTRACE_CONT, _PTRACE_SETOPTIONS = 7, 0x4200
_PTRACE_SEIZE, _PTRACE_INTERRUPT = 0x4206, 0x4207
_PTRACE_GETSIGMASK, _PTRACE_GET_RSEQ_CONFIGURATION = 0x420A, 0x420F

# linux/fs.h: PAGEMAP_SCAN is _IOWR('f', 16, struct pm_scan_arg)
_PAGEMAP_SCAN = 0xC0606610
_PM_SCAN_ARG_SIZE = 96
_PAGE_IS_PRESENT = 1 << 3

# linux/userfaultfd.h
_UFFD_USER_MODE_ONLY = 1
_UFFD_API = 0xAA
_UFFDIO_API = 0xC018AA3F
UFFD_FEATURE_WP_UNPOPULATED = 1 << 13
UFFD_FEATURE_WP_ASYNC = 1 << 15

# linux/loop.h
_LOOP_SET_FD, _LOOP_CLR_FD, _LOOP_CONFIGURE = 0x4C00, 0x4C01, 0x4C0A
_LOOP_CTL_GET_FREE = 0x4C82
_LO_FLAGS_AUTOCLEAR = 4

# linux/btrfs.h: BTRFS_IOC_SUBVOL_CREATE is _IOW(0x94, 14, struct btrfs_ioctl_vol_args)
_BTRFS_IOC_SUBVOL_CREATE = 0x5000940E

# linux/capability.h: the ones that the engine itself uses
CAPABILITIES = {
    "CAP_CHOWN": 0,
    "CAP_DAC_OVERRIDE": 1,
    "CAP_KILL": 5,
    "CAP_SETGID": 6,
    "CAP_SETUID": 7,
    "CAP_SYS_PTRACE": 19,
    "CAP_SYS_ADMIN": 21,
}


class ProbeFailed(Exception):
    """The feature is not there; the text is the reason, for a reader."""


# --- the process ---------------------------------------------------------------------------


def effective_capabilities() -> int:
    """The CapEff mask of this process (capget, so that no file of /proc is needed)."""
    header = ctypes.create_string_buffer(struct.pack("<Ii", 0x20080522, 0))
    data = ctypes.create_string_buffer(24)
    syscall(_SYS_CAPGET, header, data)
    words = struct.unpack("<6I", data.raw)
    return int(words[0] | words[3] << 32)


def unshare(flags: int) -> None:
    syscall(_SYS_UNSHARE, flags)


def machine() -> str:
    return platform.machine()


# --- asked: the kernel must refuse, the errno tells ------------------------------------------


def _known(call: Callable[[], object], *, unknown: tuple[int, ...] = (errno.ENOSYS,)) -> None:
    """Make a call that must fail; raise only if it fails as a call that does not exist."""
    try:
        call()
    except OSError as error:
        if error.errno in unknown:
            raise


def ask_clone3() -> None:
    """clone3 whose struct has `set_tid` and `cgroup` (5.7). CLONE_NEWNS|CLONE_FS is EINVAL."""
    args = ctypes.create_string_buffer(struct.pack("<11Q", CLONE_NEWNS | 0x200, *[0] * 10))
    _known(
        lambda: syscall(_SYS_CLONE3, args, _CLONE_ARGS_SIZE),
        unknown=(errno.ENOSYS, errno.E2BIG, errno.EPERM),
    )


def ask_new_mount_api() -> None:
    """fsopen, fsmount, move_mount, open_tree (5.2) and mount_setattr (5.12)."""
    attributes = ctypes.create_string_buffer(_MOUNT_ATTR_SIZE)
    _known(lambda: syscall(_SYS_FSOPEN, b"", 0x80))
    _known(lambda: syscall(_SYS_FSMOUNT, -1, 0, 0))
    _known(lambda: syscall(_SYS_MOVE_MOUNT, -1, b"", -1, b"", 0x80))
    _known(lambda: syscall(_SYS_OPEN_TREE, -1, b"", 0x80))
    _known(lambda: syscall(_SYS_MOUNT_SETATTR, -1, b"", 0x80, attributes, _MOUNT_ATTR_SIZE))


def openat2_in_root() -> None:
    """openat2 with RESOLVE_IN_ROOT (5.6): `/proc/self/../..` must stay below the root given."""
    root = os.open("/proc/self", os.O_PATH | os.O_DIRECTORY)
    try:
        how = ctypes.create_string_buffer(struct.pack("<3Q", os.O_PATH, 0, 0x10))
        inside = syscall(_SYS_OPENAT2, root, b"/../..", how, 24)
        try:
            if not os.path.sameopenfile(root, inside):
                raise ProbeFailed("RESOLVE_IN_ROOT does not confine")
        finally:
            os.close(inside)
    finally:
        os.close(root)


def ask_mm_map() -> None:
    """PR_SET_MM_MAP_SIZE: the kernel was built with CONFIG_CHECKPOINT_RESTORE."""
    size = ctypes.create_string_buffer(4)
    syscall(_SYS_PRCTL, _PR_SET_MM, _PR_SET_MM_MAP_SIZE, size, 0, 0)
    if struct.unpack("<I", size.raw)[0] != 104:
        raise ProbeFailed("struct prctl_mm_map has an unknown size")


def ask_kcmp() -> None:
    """kcmp(KCMP_FILE): are two file descriptors one open file description?"""
    me = os.getpid()
    if syscall(_SYS_KCMP, me, me, 0, 0, 0) != 0:
        raise ProbeFailed("kcmp says that fd 0 is not itself")


def ask_process_vm_readv() -> None:
    """process_vm_readv of ourselves."""
    source = ctypes.create_string_buffer(b"deltabox", 8)
    target = ctypes.create_string_buffer(8)
    local = ctypes.create_string_buffer(struct.pack("<QQ", ctypes.addressof(target), 8))
    remote = ctypes.create_string_buffer(struct.pack("<QQ", ctypes.addressof(source), 8))
    syscall(_SYS_PROCESS_VM_READV, os.getpid(), local, 1, remote, 1, 0)
    if target.raw != b"deltabox":
        raise ProbeFailed("it read something else")


def ask_pidfd_getfd() -> None:
    """pidfd_open (5.3) and pidfd_getfd (5.6), on ourselves."""
    pidfd = syscall(_SYS_PIDFD_OPEN, os.getpid(), 0)
    try:
        read, write = os.pipe()
        try:
            os.close(syscall(_SYS_PIDFD_GETFD, pidfd, read, 0))
        finally:
            os.close(read)
            os.close(write)
    finally:
        os.close(pidfd)


def ask_pagemap_scan() -> None:
    """ioctl PAGEMAP_SCAN (6.7) over one page of our own."""
    with mmap.mmap(-1, mmap.PAGESIZE) as page, open("/proc/self/pagemap", "rb") as pagemap:
        page[0] = 1
        view = ctypes.c_char.from_buffer(page)
        try:
            start = ctypes.addressof(view)
            regions = ctypes.create_string_buffer(24)
            end = start + mmap.PAGESIZE
            argument = struct.pack(
                "<12Q",
                *(_PM_SCAN_ARG_SIZE, 0, start, end, 0, ctypes.addressof(regions), 1, 0),
                *(0, _PAGE_IS_PRESENT, 0, _PAGE_IS_PRESENT),
            )
            if fcntl.ioctl(pagemap, _PAGEMAP_SCAN, bytearray(argument)) != 1:
                raise ProbeFailed("it did not find a page that is there")
        finally:
            del view


def ask_userfaultfd_wp_async() -> None:
    """userfaultfd with WP_ASYNC and WP_UNPOPULATED (6.7)."""
    fd = syscall(_SYS_USERFAULTFD, os.O_CLOEXEC | _UFFD_USER_MODE_ONLY)
    try:
        wanted = UFFD_FEATURE_WP_ASYNC | UFFD_FEATURE_WP_UNPOPULATED
        fcntl.ioctl(fd, _UFFDIO_API, bytearray(struct.pack("<QQQ", _UFFD_API, wanted, 0)))
    finally:
        os.close(fd)


def ask_rseq() -> None:
    """rseq is registered for us by libc or known to the kernel (auxv, 6.3)."""
    at_rseq_feature_size = 27
    libc.getauxval.restype = ctypes.c_ulong
    if libc.getauxval(ctypes.c_ulong(at_rseq_feature_size)) == 0:
        raise ProbeFailed("the kernel does not announce rseq")


# --- tried: in a child of ours -----------------------------------------------------------------


def in_child(body: Callable[[], None], *, timeout: float = 10.0) -> None:
    """Run `body` in a forked child and wait; raises what it raised, as OSError or ProbeFailed.

    The child can leave nothing: its namespaces, mounts and memory go when it ends.
    """
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(read)
            body()
            answer = b"ok"
        except OSError as error:
            answer = f"errno {error.errno} {error.strerror}".encode()
        except BaseException as error:
            reason = str(error) or "".join(traceback.format_exception_only(error)).strip()
            answer = f"failed {reason}".encode()
        try:
            os.write(write, answer[:4000])
        finally:
            os._exit(0)
    os.close(write)
    try:
        ready, _, _ = select.select([read], [], [], timeout)
        answer = os.read(read, 4096) if ready else b"failed it hung"
    finally:
        os.close(read)
        if not answer_ended(child):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    kind, _, rest = answer.decode(errors="replace").partition(" ")
    if kind == "errno":
        number, _, text = rest.partition(" ")
        raise OSError(int(number), text)
    if kind != "ok":
        raise ProbeFailed(rest or "the probe died")


def answer_ended(child: int, patience: float = 1.0) -> bool:
    """Reap the child if it ends within `patience` seconds."""
    pidfd = syscall(_SYS_PIDFD_OPEN, child, 0)
    try:
        ended = bool(select.select([pidfd], [], [], patience)[0])
    finally:
        os.close(pidfd)
    if ended:
        os.waitpid(child, 0)
    return ended


def clone3(flags: int, *, set_tid: list[int] | None = None, cgroup: int = 0) -> int:
    """fork() with flags, chosen pids and a cgroup; 0 in the child. Only for `in_child` bodies."""
    tids = (ctypes.c_int * max(1, len(set_tid or [])))(*(set_tid or [0]))
    words = (
        *(flags, 0, 0, 0, int(signal.SIGCHLD), 0, 0, 0),
        ctypes.addressof(tids) if set_tid else 0,
        len(set_tid or []),
        cgroup,
    )
    args = ctypes.create_string_buffer(struct.pack("<11Q", *words))
    return syscall(_SYS_CLONE3, args, _CLONE_ARGS_SIZE)


def _await(pid: int) -> None:
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    if code != 0:
        raise OSError(code, os.strerror(code)) if code > 0 else ProbeFailed(f"signal {-code}")


def try_set_tid() -> None:
    """A fresh pid namespace whose PID 1 makes a child with the pid 4242."""

    def first() -> None:
        inner = clone3(0, set_tid=[4242])
        if inner == 0:
            os._exit(0 if os.getpid() == 4242 else errno.EPROTO)
        _await(inner)

    child = clone3(CLONE_NEWPID)
    if child == 0:
        try:
            first()
        except OSError as error:
            os._exit(error.errno or errno.EPROTO)
        except BaseException:
            os._exit(errno.EPROTO)
        os._exit(0)
    _await(child)


def _ptraced(ask: Callable[[int], None]) -> None:
    """Seize and interrupt a child of ours, ask, let it end."""
    tracee = os.fork()
    if tracee == 0:
        signal.pause()
        os._exit(0)
    try:
        syscall(_SYS_PTRACE, _PTRACE_SEIZE, tracee, 0, 0)
        syscall(_SYS_PTRACE, _PTRACE_INTERRUPT, tracee, 0, 0)
        os.waitpid(tracee, 0x40000000)  # __WALL
        ask(tracee)
    finally:
        os.kill(tracee, signal.SIGKILL)
        os.waitpid(tracee, 0x40000000)


def try_ptrace() -> None:
    """PTRACE_SEIZE, INTERRUPT and GETSIGMASK."""
    mask = ctypes.create_string_buffer(8)
    _ptraced(lambda pid: void(syscall(_SYS_PTRACE, _PTRACE_GETSIGMASK, pid, 8, mask)))


def try_rseq_configuration() -> None:
    """PTRACE_GET_RSEQ_CONFIGURATION (5.13)."""
    answer = ctypes.create_string_buffer(24)
    _ptraced(
        lambda pid: void(syscall(_SYS_PTRACE, _PTRACE_GET_RSEQ_CONFIGURATION, pid, 24, answer))
    )


def void(_: object) -> None:
    return None


def try_mm_map() -> None:
    """PR_SET_MM_MAP with the values that the child has already."""
    stat = Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()
    field = {number: int(stat[number - 3]) for number in (26, 27, 28, *range(45, 52))}
    words = (
        *(field[26], field[27], field[45], field[46], field[47], syscall(_SYS_BRK, 0)),
        *(field[28], field[48], field[49], field[50], field[51]),
        0,
    )
    image = ctypes.create_string_buffer(struct.pack("<12QIi", *words, 0, -1))
    syscall(_SYS_PRCTL, _PR_SET_MM, _PR_SET_MM_MAP, image, 104, 0)


def private_mounts() -> None:
    """A mount namespace of our own, from which nothing propagates."""
    unshare(CLONE_NEWNS)
    syscall(_SYS_MOUNT, b"none", b"/", None, MS_REC | MS_PRIVATE, None)


def mount(source: str, target: str, kind: str, flags: int = 0, data: str = "") -> None:
    arguments = (source.encode(), target.encode(), kind.encode())
    syscall(_SYS_MOUNT, *arguments, flags, data.encode() or None)


def umount(target: str) -> None:
    syscall(_SYS_UMOUNT2, target.encode(), MNT_DETACH)


def user_namespace() -> int:
    """An fd of a fresh user namespace that maps 0..65535 to 100000..165535 of the host."""
    up_read, up_write = os.pipe()
    down_read, down_write = os.pipe()
    holder = os.fork()
    if holder == 0:
        code = 0
        try:
            os.close(down_write)
            unshare(CLONE_NEWUSER)
        except OSError as error:
            code = error.errno or errno.EPROTO
        os.write(up_write, bytes([code]))
        os.read(down_read, 1)
        os._exit(0)
    os.close(down_read)
    try:
        code = os.read(up_read, 1)[0]
        if code:
            raise OSError(code, os.strerror(code))
        Path(f"/proc/{holder}/uid_map").write_text("0 100000 65536")
        Path(f"/proc/{holder}/gid_map").write_text("0 100000 65536")
        return os.open(f"/proc/{holder}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        for fd in (up_read, up_write, down_write):
            os.close(fd)
        os.waitpid(holder, 0)


def try_user_namespace() -> None:
    os.close(user_namespace())


def try_all_namespaces() -> None:
    """Mount, pid, ipc, uts, net and cgroup namespaces."""
    unshare(CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWNET)


def try_idmapped_mount(path: str) -> None:
    """A detached clone of the mount of `path` whose owners are shifted by a user namespace."""
    userns = user_namespace()
    flags = _OPEN_TREE_CLONE | os.O_CLOEXEC
    tree = syscall(_SYS_OPEN_TREE, -100, path.encode(), flags)
    attributes = ctypes.create_string_buffer(struct.pack("<4Q", _MOUNT_ATTR_IDMAP, 0, 0, userns))
    syscall(_SYS_MOUNT_SETATTR, tree, b"", _AT_EMPTY_PATH, attributes, _MOUNT_ATTR_SIZE)
    owner = os.stat(f"/proc/self/fd/{tree}").st_uid
    if owner != os.stat(path).st_uid + 100000:
        raise ProbeFailed(f"the owner of {path} reads as {owner}")


def try_nested_mount(path: str) -> None:
    """A mount attached below one that is itself mounted nowhere."""
    flags = _OPEN_TREE_CLONE | os.O_CLOEXEC
    tree = syscall(_SYS_OPEN_TREE, -100, path.encode(), flags)
    other = syscall(_SYS_OPEN_TREE, -100, path.encode(), flags)
    place = os.open("below", os.O_PATH | os.O_DIRECTORY, dir_fd=tree)
    syscall(_SYS_MOVE_MOUNT, other, b"", place, b"", 0x44)  # F_EMPTY_PATH, T_EMPTY_PATH


OVERLAY_OPTIONS = {"redirect_dir": "on", "metacopy": "on", "index": "off", "xino": "on"}


def try_overlay(scratch: Path, *, by_descriptor: bool) -> None:
    """An overlay mount with the options of the engine that can be written to.

    `by_descriptor` gives it its layers as file descriptors, the lower one a detached clone of a
    mount, as the engine does; otherwise by path. Lower and upper are on a tmpfs.
    """
    private_mounts()
    mount("none", str(scratch), "tmpfs")
    for name in ("lower", "lower/d", "upper", "work", "merged"):
        (scratch / name).mkdir()
    (scratch / "lower/f").write_text("lower")
    if by_descriptor:
        _overlay_by_descriptor(scratch)
    else:
        layers = f"lowerdir={scratch}/lower,upperdir={scratch}/upper,workdir={scratch}/work"
        options = ",".join(f"{key}={value}" for key, value in OVERLAY_OPTIONS.items())
        mount("overlay", f"{scratch}/merged", "overlay", 0, f"{layers},{options},volatile")
    (scratch / "merged/f").write_text("upper")
    (scratch / "merged/d").rename(scratch / "merged/e")
    if (scratch / "lower/f").read_text() != "lower":
        raise ProbeFailed("a write reached the lower layer")


def _overlay_by_descriptor(scratch: Path) -> None:
    context = syscall(_SYS_FSOPEN, b"overlay", 1)

    def config(command: int, key: str | None, value: str | None = None, aux: int = 0) -> None:
        name = None if key is None else key.encode()
        text = None if value is None else value.encode()
        syscall(_SYS_FSCONFIG, context, command, name, text, aux)

    lower = f"{scratch}/lower".encode()
    base = syscall(_SYS_OPEN_TREE, -100, lower, _OPEN_TREE_CLONE | os.O_CLOEXEC)
    config(_FSCONFIG_SET_FD, "lowerdir+", aux=base)
    for key, name in (("upperdir", "upper"), ("workdir", "work")):
        config(_FSCONFIG_SET_FD, key, aux=os.open(scratch / name, os.O_PATH | os.O_DIRECTORY))
    for key, value in OVERLAY_OPTIONS.items():
        config(_FSCONFIG_SET_STRING, key, value)
    config(_FSCONFIG_SET_FLAG, "volatile")
    config(_FSCONFIG_CMD_CREATE, None)
    mounted = syscall(_SYS_FSMOUNT, context, 1, 0)
    syscall(_SYS_MOVE_MOUNT, mounted, b"", -100, f"{scratch}/merged".encode(), 0x4)


class LoopDevice:
    """A file attached to a loop device, detached again at the end of the `with` block.

    The device stays, free, if it had to be made: removing it could take it from under another
    process which has just been told that it is free.
    """

    def __init__(self, image: Path) -> None:
        self._image = image

    def __enter__(self) -> str:
        for _ in range(50):
            try:
                return self._attach()
            except OSError as error:
                # Another process was faster, between the question for a free device and its use.
                if error.errno not in (errno.EBUSY, errno.ENXIO, errno.ENOENT):
                    raise
        raise ProbeFailed("other programs take every free loop device")

    def _attach(self) -> str:
        with open("/dev/loop-control", "rb+", buffering=0) as control:
            number = fcntl.ioctl(control, _LOOP_CTL_GET_FREE)
        self.path = f"/dev/loop{number}"
        self._fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            backing = os.open(self._image, os.O_RDWR | os.O_CLOEXEC)
            try:
                config = struct.pack("<II", backing, 4096) + bytes(52)
                config += struct.pack("<I", _LO_FLAGS_AUTOCLEAR)
                fcntl.ioctl(self._fd, _LOOP_CONFIGURE, config.ljust(304, b"\0"))
            finally:
                os.close(backing)
        except BaseException:
            os.close(self._fd)
            raise
        return self.path

    def __exit__(self, *_: object) -> None:
        try:
            fcntl.ioctl(self._fd, _LOOP_CLR_FD)
        except OSError:
            pass
        os.close(self._fd)


def btrfs_subvolume(parent: str, name: str) -> None:
    """Create a subvolume below `parent`, which must be on btrfs."""
    fd = os.open(parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        argument = struct.pack("<q", 0) + name.encode().ljust(4088, b"\0")
        fcntl.ioctl(fd, _BTRFS_IOC_SUBVOL_CREATE, bytearray(argument))
    finally:
        os.close(fd)


def ask_tun() -> None:
    """The tun driver is there; opening its device loads it where it is a module."""
    try:
        os.close(os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC))
    except FileNotFoundError:  # of /dev only: the engine makes a node of its own
        if "tun" not in Path("/proc/misc").read_text().split():
            raise ProbeFailed("the kernel has no tun driver") from None


def try_into_cgroup(directory: Path) -> None:
    """Make a child straight into the cgroup (CLONE_INTO_CGROUP, 5.7)."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    child = clone3(CLONE_INTO_CGROUP, cgroup=fd)
    if child == 0:
        os._exit(0)
    _await(child)
