"""What the engine wants from a host: each feature, what it is for, how to get it, how to try it.

A probe tries the thing itself (`linux.features`), in a child or a scratch mount where it has an
effect, and raises `OSError` or `ProbeFailed` where it is missing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from deltabox.linux import features as linux
from deltabox.linux.features import ProbeFailed

ARCHITECTURES = ("x86_64",)


@dataclass(frozen=True)
class Feature:
    """One thing that the engine wants from the host."""

    name: str
    purpose: str  # what it is for
    remedy: str  # how to get it
    without: str  # what works without it
    required: bool
    probe: Callable[[], str | None]  # a remark, or OSError, or ProbeFailed
    quick: bool = False  # no fork and no side effect: may run in the caller's process
    condition: bool = False  # of the host as a whole: the others are not tried without it


# --- conditions of the host: the text of the failure is the whole sentence ---


def _architecture() -> str:
    machine = linux.machine()
    if machine not in ARCHITECTURES:
        raise ProbeFailed(
            f"DeltaBox runs on {', '.join(ARCHITECTURES)} only; this machine is {machine}."
        )
    return machine


def _root() -> str:
    uid = os.geteuid()
    if uid != 0:
        raise ProbeFailed(
            f"DeltaBox must run as root, and this process has the user id {uid}: use sudo."
        )
    return "uid 0"


def _host_ids() -> str:
    try:
        first = Path("/proc/self/uid_map").read_text().split()
    except OSError:
        raise ProbeFailed("DeltaBox needs /proc, and it is not mounted here.") from None
    if first[:3] != ["0", "0", "4294967295"]:
        raise ProbeFailed(
            "This is an unprivileged container or another user namespace "
            f"(its root is user {first[1]} outside): DeltaBox must run on the host itself, "
            "or in a container that is privileged."
        )
    return "the initial user namespace"


def _capabilities() -> str:
    have = linux.effective_capabilities()
    lacking = [name for name, bit in linux.CAPABILITIES.items() if not have >> bit & 1]
    if lacking:
        raise ProbeFailed(
            f"This process lacks {', '.join(lacking)}, as in an unprivileged container: "
            "give the container all capabilities (docker run --privileged), or run on the host."
        )
    return "all that the engine uses"


# --- helpers ---


def _quietly(probe: Callable[[], None]) -> Callable[[], str | None]:
    def run() -> None:
        probe()

    return run


def _child(probe: Callable[[], None]) -> Callable[[], str | None]:
    def run() -> None:
        linux.in_child(probe)

    return run


def _scratch(probe: Callable[[Path], None]) -> Callable[[], str | None]:
    """A probe with a directory of its own, in a child; the directory goes afterwards."""

    def run() -> None:
        with tempfile.TemporaryDirectory(prefix="deltabox-doctor-") as directory:
            linux.in_child(lambda: probe(Path(directory)))

    return run


def _filesystem_known(name: str) -> None:
    """Registered with the kernel, or there is a module of it to load."""
    listed = Path("/proc/filesystems").read_text().split()
    if name in listed:
        return
    if shutil.which("modprobe", path=_PATH):
        known = subprocess.run(
            ["modprobe", "-q", name], check=False, env={"PATH": _PATH}, capture_output=True
        )
        if known.returncode == 0 and name in Path("/proc/filesystems").read_text().split():
            return
    raise ProbeFailed(f"the kernel knows no file system {name}")


_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def _program(name: str) -> str:
    path = shutil.which(name, path=f"{os.environ.get('PATH', '')}:{_PATH}")
    if path is None:
        raise ProbeFailed(f"{name} is not installed")
    return path


# --- probes ---


def _overlay() -> None:
    _filesystem_known("overlay")
    _scratch(lambda scratch: linux.try_overlay(scratch, by_descriptor=False))()


def _overlay_by_descriptor() -> None:
    _scratch(lambda scratch: linux.try_overlay(scratch, by_descriptor=True))()


def _idmapped_probe() -> None:
    _scratch(lambda scratch: linux.try_idmapped_mount(str(scratch)))()


def _nested_probe() -> None:
    def attach(scratch: Path) -> None:
        (scratch / "below").mkdir()
        linux.try_nested_mount(str(scratch))

    _scratch(attach)()


def _loop() -> str:
    if not os.path.exists("/dev/loop-control"):
        raise ProbeFailed("there is no /dev/loop-control")
    with tempfile.TemporaryDirectory(prefix="deltabox-doctor-") as directory:
        image = Path(directory, "image")
        with image.open("wb") as file:
            file.truncate(1 << 20)
        with linux.LoopDevice(image) as device:
            return device


def _btrfs() -> None:
    _filesystem_known("btrfs")
    mkfs = _program("mkfs.btrfs")

    with tempfile.TemporaryDirectory(prefix="deltabox-doctor-") as directory:
        image, mountpoint = Path(directory, "image"), Path(directory, "mounted")
        mountpoint.mkdir()
        with image.open("wb") as file:
            file.truncate(128 << 20)
        made = subprocess.run(
            [mkfs, "-q", "-m", "single", "-n", "4096", str(image)],
            check=False,
            capture_output=True,
            text=True,
        )
        if made.returncode != 0:
            raise ProbeFailed(f"mkfs.btrfs failed: {made.stderr.strip()}")
        with linux.LoopDevice(image) as device:

            def body() -> None:
                linux.private_mounts()
                linux.mount(device, str(mountpoint), "btrfs", 0, "nodatasum,nobarrier,commit=30")
                linux.btrfs_subvolume(str(mountpoint), "probe")
                linux.umount(str(mountpoint))

            linux.in_child(body)


def _nat() -> str:
    linux.ask_tun()
    carrier = Path(__file__).parent / "deltacr" / "_nat"
    if not carrier.exists():
        raise ProbeFailed(f"{carrier} is missing: the package was not built")
    said = subprocess.run([carrier, "--check"], check=False, capture_output=True, text=True)
    if said.returncode != 0:
        raise ProbeFailed(said.stdout.strip() or said.stderr.strip())
    return f"libslirp {said.stdout.strip()}"


def _cgroup_mounts() -> dict[str, Path]:
    """Controller (or "unified") -> where its hierarchy is mounted."""
    found: dict[str, Path] = {}
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, where, kind, options, *_ = line.split()
        if kind == "cgroup2":
            found.setdefault("unified", Path(where))
        elif kind == "cgroup":
            for option in options.split(","):
                found.setdefault(option, Path(where))
    return found


def _cgroup2() -> str:
    where = _cgroup_mounts().get("unified")
    if where is None:
        raise ProbeFailed("it is not mounted")
    _try_cgroup(where)
    return f"mounted at {where}"


def _try_cgroup(hierarchy: Path) -> None:
    cgroup = hierarchy / f"deltabox-doctor-{os.getpid()}"
    cgroup.mkdir()
    try:
        for name in ("cgroup.freeze", "cgroup.kill"):
            if not (cgroup / name).exists():
                raise ProbeFailed(f"cgroups have no {name} (Linux 5.14)")
        linux.in_child(lambda: linux.try_into_cgroup(cgroup))
    finally:
        cgroup.rmdir()


def _controller(name: str) -> Callable[[], str | None]:
    def probe() -> str:
        mounts = _cgroup_mounts()
        if "unified" in mounts:
            controllers = (mounts["unified"] / "cgroup.controllers").read_text().split()
            if name in controllers:
                return "cgroup v2"
        if name in mounts:
            return "cgroup v1"
        raise ProbeFailed(f"no hierarchy offers the {name} controller")

    return probe


_KERNEL = "A newer kernel has it: Linux {}."

FEATURES: tuple[Feature, ...] = (
    Feature(
        "the architecture x86_64",
        "registers, signal frames and the restore interpreter are written for it",
        "Use an x86_64 machine.",
        "nothing",
        True,
        _architecture,
        quick=True,
        condition=True,
    ),
    Feature(
        "root",
        "namespaces, mounts, ptrace of any process, chosen pids",
        "Run with sudo.",
        "nothing",
        True,
        _root,
        quick=True,
        condition=True,
    ),
    Feature(
        "the initial user namespace",
        "only its root may mount images and choose pids",
        "Run on the host, or in a privileged container.",
        "nothing",
        True,
        _host_ids,
        quick=True,
        condition=True,
    ),
    Feature(
        "capabilities",
        "the powers of root: a container may have taken some",
        "docker run --privileged, or run on the host.",
        "nothing",
        True,
        _capabilities,
        quick=True,
        condition=True,
    ),
    Feature(
        "ptrace",
        "stop a process tree and read its registers",
        "Allow it: sysctl kernel.yama.ptrace_scope below 3, no seccomp filter.",
        "nothing",
        True,
        _child(linux.try_ptrace),
    ),
    Feature(
        "process_vm_readv",
        "copy the memory of a stopped process",
        "A kernel with CONFIG_CROSS_MEMORY_ATTACH, no seccomp filter against it.",
        "nothing",
        True,
        _quietly(linux.ask_process_vm_readv),
        quick=True,
    ),
    Feature(
        "pidfd_getfd",
        "reach the open files of a stopped process",
        _KERNEL.format("5.6"),
        "nothing",
        True,
        _quietly(linux.ask_pidfd_getfd),
        quick=True,
    ),
    Feature(
        "kcmp",
        "tell which descriptors share one open file",
        "A kernel with CONFIG_KCMP or CONFIG_CHECKPOINT_RESTORE.",
        "nothing",
        True,
        _quietly(linux.ask_kcmp),
        quick=True,
    ),
    Feature(
        "clone3 with set_tid",
        "give restored processes their pids",
        _KERNEL.format("5.7"),
        "nothing",
        True,
        _child(linux.try_set_tid),
    ),
    Feature(
        "clone3",
        "make processes in a cgroup and with chosen pids",
        _KERNEL.format("5.7") + " A seccomp filter may forbid it.",
        "nothing",
        True,
        _quietly(linux.ask_clone3),
        quick=True,
    ),
    Feature(
        "PR_SET_MM_MAP",
        "put heap, stack and argument marks of a restored process in place",
        "A kernel with CONFIG_CHECKPOINT_RESTORE (distribution kernels have it).",
        "nothing",
        True,
        _quietly(linux.ask_mm_map),
        quick=True,
    ),
    Feature(
        "PR_SET_MM_MAP in use",
        "the same, tried for real",
        "A kernel with CONFIG_CHECKPOINT_RESTORE.",
        "nothing",
        True,
        _child(linux.try_mm_map),
    ),
    Feature(
        "rseq configuration",
        "restore restartable sequences, which every glibc since 2.35 uses",
        _KERNEL.format("5.13") + " Needs CONFIG_RSEQ.",
        "programs of an older glibc",
        False,
        _child(linux.try_rseq_configuration),
    ),
    Feature(
        "user namespaces",
        "root of a sandbox is nobody on the host",
        "sysctl user.max_user_namespaces above 0.",
        "nothing",
        True,
        _child(linux.try_user_namespace),
    ),
    Feature(
        "mount, pid, ipc, uts and net namespaces",
        "a sandbox sees only itself",
        "A kernel with CONFIG_NAMESPACES and its parts.",
        "nothing",
        True,
        _child(linux.try_all_namespaces),
    ),
    Feature(
        "the mount calls fsopen, fsmount, move_mount, open_tree, mount_setattr",
        "build a root without a path that others could see",
        _KERNEL.format("5.12"),
        "nothing",
        True,
        _quietly(linux.ask_new_mount_api),
        quick=True,
    ),
    Feature(
        "openat2 with RESOLVE_IN_ROOT",
        "follow a path of the sandbox and never leave it",
        _KERNEL.format("5.6"),
        "nothing",
        True,
        _quietly(linux.openat2_in_root),
        quick=True,
    ),
    Feature(
        "idmapped mounts",
        "files belong to the sandbox's own users, whatever the disk says",
        _KERNEL.format("5.12 (ext4, btrfs 5.15, xfs, overlay layers 5.19)"),
        "nothing",
        True,
        _idmapped_probe,
    ),
    Feature(
        "overlayfs with redirect_dir, metacopy, xino, volatile",
        "the root of a sandbox: changes over a shared base",
        "modprobe overlay, or a kernel with CONFIG_OVERLAY_FS: Linux 5.10.",
        "nothing",
        True,
        _overlay,
    ),
    Feature(
        "overlayfs with layers given as descriptors",
        "a root that is mounted without a path which others could see or change",
        _KERNEL.format("6.15"),
        "nothing",
        True,
        _overlay_by_descriptor,
    ),
    Feature(
        "loop devices",
        "a file system image per sandbox tree",
        "modprobe loop; in a container pass /dev/loop-control and /dev/loop*.",
        "nothing",
        True,
        _loop,
    ),
    Feature(
        "mkfs.btrfs",
        "make such an image",
        "apt-get install btrfs-progs",
        "nothing",
        True,
        lambda: _program("mkfs.btrfs"),
        quick=True,
    ),
    Feature(
        "btrfs",
        "snapshots of a sandbox's files in a millisecond",
        "modprobe btrfs, or a kernel with CONFIG_BTRFS_FS.",
        "nothing",
        True,
        _btrfs,
    ),
    Feature(
        "cgroup v2",
        "a group of its own for each sandbox, killed as one",
        "mount -t cgroup2 none /sys/fs/cgroup (or below it, beside version 1). "
        + _KERNEL.format("5.14"),
        "nothing",
        True,
        _cgroup2,
    ),
    Feature(
        "the memory controller",
        "memory_limit",
        "Enable it at boot (cgroup_enable=memory) or in cgroup.subtree_control.",
        "sandboxes without a memory limit of their own",
        False,
        _controller("memory"),
    ),
    Feature(
        "the pids controller",
        "pids_limit",
        "A kernel with CONFIG_CGROUP_PIDS.",
        "sandboxes without a limit of processes",
        False,
        _controller("pids"),
    ),
    Feature(
        "libslirp and the tun driver",
        'network="nat": outgoing connections out of a network of the sandbox\'s own',
        "apt-get install libslirp0; modprobe tun, or a kernel with CONFIG_TUN.",
        'everything but network="nat"',
        False,
        _nat,
    ),
    Feature(
        "mounts below a detached mount",
        "visibility=[...]: directories that all branches see at once",
        _KERNEL.format("6.15"),
        "everything but visibility=[...]",
        False,
        _nested_probe,
    ),
    Feature(
        "PAGEMAP_SCAN",
        "find the pages of a process that hold data, quickly",
        _KERNEL.format("6.7"),
        "nothing: a kernel without it lacks more that is needed",
        True,
        _quietly(linux.ask_pagemap_scan),
        quick=True,
    ),
    Feature(
        "userfaultfd with WP_ASYNC",
        "know which pages changed since the last checkpoint",
        _KERNEL.format("6.7") + " Needs CONFIG_USERFAULTFD.",
        "everything: pages of restored processes are told by their frame numbers, all others are "
        "compared one by one",
        False,
        _quietly(linux.ask_userfaultfd_wp_async),
        quick=True,
    ),
)
