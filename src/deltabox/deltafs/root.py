"""The root directory of a sandbox: an overlay of its layer over the shared, read-only base.

Why an overlay and not a btrfs copy of the base: the base (by default the host's own `/`) is
used as it is, without copying a byte, and a sandbox's layer holds nothing but what it changed.

Everything is id-mapped, so that the sandbox's root owns the files of uid 0 while it is an
unprivileged user of the host: base and layer are cloned as detached mounts, mapped with
mount_setattr(2), and handed to fsopen("overlay") as descriptors. On disk owners stay 0-based,
which is why snapshots, metacopy and redirects need no thought of it. Two traps: the overlay acts
with the credentials of whoever mounts it, so the mounting thread's fsuid must be the sandbox's
root, with its capabilities set again after the switch; without that the mount succeeds and is
silently read-only. And the mount is made in the initial user namespace: made inside, overlayfs
has neither metacopy nor redirects.

The options, each for a reason met in measurement: `redirect_dir=on` or renaming a directory of
the base is EXDEV; `metacopy=on` or chmod copies the whole file; `index=off` or a snapshot cannot
be mounted (ESTALE); `nfs_export=off` needs it off; `xino=on` or directories change their inode
number at a rollback; `volatile` or every fsync of a program waits for the disk.
"""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import os
import secrets
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath
from typing import Final

from deltabox.deltafs.layers import Layer
from deltabox.errors import DeltaBoxError, HostUnsupported
from deltabox.linux import mount
from deltabox.linux.fsuid import file_owner
from deltabox.linux.openat2 import openat2

_OVERLAY_OPTIONS: Final = (
    ("redirect_dir", "on"),
    ("metacopy", "on"),
    ("index", "off"),
    ("nfs_export", "off"),
    ("xino", "on"),
    ("uuid", "null"),
)

_OPAQUE: Final = "trusted.overlay.opaque"

_HOME_SECRETS: Final = (
    ".ssh", ".gnupg", ".password-store", ".local/share/keyrings", ".pki",
    ".aws", ".azure", ".boto", ".s3cfg", ".config/gcloud", ".config/doctl", ".config/rclone",
    ".config/hcloud", ".oci", ".kube", ".docker", ".config/containers/auth.json", ".vault-token",
    ".terraform.d/credentials.tfrc.json", ".terraformrc", ".config/op", ".config/sops",
    ".netrc", ".git-credentials", ".config/git/credentials", ".config/gh", ".config/hub",
    ".config/glab-cli", ".npmrc", ".yarnrc.yml", ".pypirc", ".cargo/credentials",
    ".cargo/credentials.toml", ".gem/credentials", ".m2/settings.xml",
    ".m2/settings-security.xml", ".gradle/gradle.properties", ".composer/auth.json",
    ".config/composer/auth.json", ".pgpass", ".my.cnf", ".mylogin.cnf",
    ".huggingface", ".cache/huggingface/token", ".kaggle", ".claude", ".claude.json", ".codex",
    ".gemini", ".config/github-copilot", ".mozilla", ".config/google-chrome", ".config/chromium",
    ".bash_history", ".zsh_history", ".python_history", ".psql_history", ".mysql_history",
)  # fmt: skip

DEFAULT_HIDE: Final[tuple[str, ...]] = (
    *(f"/root/{name}" for name in _HOME_SECRETS),
    *(f"/home/*/{name}" for name in _HOME_SECRETS),
    "/etc/shadow-", "/etc/gshadow-", "/var/backups/shadow*", "/var/backups/gshadow*",
    "/etc/ssh/ssh_host_*_key", "/etc/ssl/private", "/etc/krb5.keytab", "/etc/wireguard",
    "/etc/NetworkManager/system-connections", "/etc/wpa_supplicant", "/etc/kubernetes",
    "/var/lib/cloud", "/var/lib/docker", "/var/lib/containerd", "/var/lib/containers",
    "/var/lib/kubelet", "/var/lib/deltabox", "/swapfile", "/swap.img",
)  # fmt: skip
"""What a sandbox over the host's own `/` does not get to see: keys, tokens, histories, the data
of other containers, our own state directory. `*` stands for any part of one name."""

OWN_DIRECTORY: Final = "/run/deltabox"
"""What the engine tells a sandbox about itself; comparisons of files leave it out."""
FORK_FILE: Final = f"{OWN_DIRECTORY}/fork.json"
MACHINE_IDS: Final = ("/etc/machine-id", "/var/lib/dbus/machine-id")
"""machine-id(5), and where D-Bus keeps a copy of its own on some hosts."""

_DEVICES: Final = ("null", "zero", "full", "random", "urandom", "tty")
_DEVICE_LINKS: Final = (
    ("fd", "/proc/self/fd"),
    ("stdin", "/proc/self/fd/0"),
    ("stdout", "/proc/self/fd/1"),
    ("stderr", "/proc/self/fd/2"),
    ("ptmx", "pts/ptmx"),
)


def base_mount(base: Path, userns_fd: int) -> int:
    """A detached, read-only clone of `base` with its owners mapped; made once per tree.

    Mounts below `base` are not part of it. Raises `ValueError` when `base` is no directory and
    `HostUnsupported` when its file system cannot be id-mapped.
    """
    clone = _clone(base)
    try:
        _map_owners(clone, userns_fd, mount.MOUNT_ATTR_RDONLY, f"the file system of {base}")
    except BaseException:
        os.close(clone)
        raise
    return clone


def _clone(directory: Path) -> int:
    try:
        if not stat.S_ISDIR(os.stat(directory).st_mode):
            raise ValueError(f"base {str(directory)!r} is not a directory")
        return mount.open_tree(
            mount.AT_FDCWD, directory, mount.OPEN_TREE_CLONE | mount.OPEN_TREE_CLOEXEC
        )
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f"base {str(directory)!r} does not exist") from None
    except PermissionError as error:
        raise HostUnsupported("mounting needs root (CAP_SYS_ADMIN)") from error


def _map_owners(mount_fd: int, userns_fd: int, attributes: int, what: str) -> None:
    try:
        mount.mount_setattr(mount_fd, set_=mount.MOUNT_ATTR_IDMAP | attributes, userns_fd=userns_fd)
    except OSError as error:
        if error.errno == errno.EINVAL:
            raise HostUnsupported(f"{what} cannot be id-mapped by this kernel") from error
        raise


def root_mount(base_fd: int, layer: Layer, userns_fd: int, owner: int) -> int:
    """The root over `base_fd` and `layer`, as a detached mount; the caller attaches it.

    `owner` is the host uid (and gid) of the sandbox's root. A layer bears one mount at a time.
    """
    clone = _clone(layer.path)
    try:
        _map_owners(clone, userns_fd, 0, "btrfs")
        upper = os.open("upper", os.O_PATH | os.O_CLOEXEC, dir_fd=clone)
        try:
            work = os.open("work", os.O_PATH | os.O_CLOEXEC, dir_fd=clone)
            try:
                with file_owner(owner):
                    root = _overlay(base_fd, upper, work)
            finally:
                os.close(work)
        finally:
            os.close(upper)
    finally:
        os.close(clone)
    try:
        _verify_writable(root)
    except BaseException:
        os.close(root)
        raise
    return root


def _overlay(base_fd: int, upper: int, work: int) -> int:
    context = mount.fsopen("overlay")
    try:
        mount.fsconfig_string(context, "source", "deltabox")
        try:
            mount.fsconfig_fd(context, "lowerdir+", base_fd)
            mount.fsconfig_fd(context, "upperdir", upper)
            mount.fsconfig_fd(context, "workdir", work)
            for key, value in _OVERLAY_OPTIONS:
                mount.fsconfig_string(context, key, value)
            mount.fsconfig_flag(context, "volatile")
            mount.fsconfig_create(context)
        except OSError as error:
            said = mount.messages(context) or str(error)
            if error.errno == errno.EINVAL:
                raise HostUnsupported(f"this kernel refuses the overlay mount: {said}") from error
            raise OSError(error.errno, f"overlay mount: {said}") from error
        # atime would dirty the layer at every read
        return mount.fsmount(context, mount.MOUNT_ATTR_NODEV | mount.MOUNT_ATTR_NOATIME)
    finally:
        os.close(context)


def _verify_writable(root: int) -> None:
    """overlayfs turns itself read-only, without an error, when it cannot use its work directory."""
    if os.fstatvfs(root).f_flag & os.ST_RDONLY:
        raise DeltaBoxError("the sandbox's root came up read-only")


def skeleton(
    layer: Layer,
    base: Path,
    hide: Sequence[str],
    *,
    hostname: str = "sandbox",
    resolver: str | None = None,
) -> None:
    """Furnish a tree's first layer, before its first mount.

    Mount points, an empty `/dev` of our own (the devices are regular files to bind the host's
    nodes onto), and whiteouts for `hide`. Over the host's own `/` also an empty `/tmp` and
    `/run`, a host name, a machine id, and the password files without their hashes. `resolver` is
    the content of an `/etc/resolv.conf` for a base that has an `/etc`.
    """
    whole_host = os.path.samefile(base, "/")
    tree = _clone(base)
    try:
        upper = _Upper(layer.upper, tree)
        for name in ("proc", "sys"):
            upper.empty(name, 0o755)
        upper.empty("dev", 0o755)
        for name in ("pts", "mqueue"):
            upper.empty(f"dev/{name}", 0o755)
        upper.empty("dev/shm", 0o1777)
        for name in _DEVICES:
            upper.file(f"dev/{name}", b"", 0o666)
        for name, target in _DEVICE_LINKS:
            os.symlink(target, layer.upper / "dev" / name)
        if whole_host:
            upper.empty("tmp", 0o1777)
            upper.empty("run", 0o755)
            upper.empty("run/lock", 0o1777)
            upper.file("etc/hostname", hostname.encode() + b"\n", 0o644)
            upper.identify()
            for name in ("etc/shadow", "etc/gshadow"):
                upper.redact(name)
        else:
            upper.directory("tmp", 0o1777)
        upper.directory(OWN_DIRECTORY.lstrip("/"), 0o755)
        if resolver is not None:
            upper.configure("etc/resolv.conf", resolver.encode())
        for pattern in hide:
            for path in upper.matches(pattern):
                upper.hide(path)
    finally:
        os.close(tree)


class _Upper:
    """An upper directory being furnished, over the detached clone `base` of the base.

    All paths are relative to the root and free of symlinks. Owners are those on disk, 0-based.
    """

    def __init__(self, path: Path, base: int) -> None:
        self._path = path
        self._base = base

    def _lower(self, path: str) -> os.stat_result | None:
        try:
            return os.stat(path, dir_fd=self._base, follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError):
            return None

    def directory(self, path: str, mode: int) -> Path:
        """Make sure a directory exists: that of the base, or else a new one."""
        here = self._path / path
        if stat.S_ISDIR(_mode(here)):
            return here
        self._parents(path)
        lower = self._lower(path)
        here.mkdir()
        if lower is not None and stat.S_ISDIR(lower.st_mode):
            os.chown(here, lower.st_uid, lower.st_gid)
            here.chmod(stat.S_IMODE(lower.st_mode))
            os.utime(here, ns=(lower.st_atime_ns, lower.st_mtime_ns))
        else:
            here.chmod(mode)
            if lower is not None:
                os.setxattr(here, _OPAQUE, b"y")
        return here

    def _parents(self, path: str) -> None:
        parent = os.path.dirname(path)
        if parent:
            self.directory(parent, 0o755)

    def empty(self, path: str, mode: int) -> None:
        """An empty directory in place of whatever the base has there."""
        self._parents(path)
        here = self._path / path
        here.mkdir()
        here.chmod(mode)
        os.setxattr(here, _OPAQUE, b"y")

    def file(self, path: str, data: bytes, mode: int) -> None:
        """A regular file in place of whatever the base has there."""
        self._parents(path)
        here = self._path / path
        here.write_bytes(data)
        here.chmod(mode)

    def identify(self) -> None:
        """A machine id of its own where the base has one: two machines must not share it."""
        made = secrets.token_hex(16).encode() + b"\n"
        for path in MACHINE_IDS:
            lower = self._lower(path.lstrip("/"))
            if lower is not None and stat.S_ISREG(lower.st_mode):
                self.file(path.lstrip("/"), made, 0o444)

    def configure(self, path: str, data: bytes) -> None:
        """A regular file in a directory of the base, if that is one."""
        lower = self._lower(os.path.dirname(path))
        if lower is not None and stat.S_ISDIR(lower.st_mode):
            self.file(path, data, 0o644)

    def redact(self, path: str) -> None:
        """The base's password file, every hash replaced by a lock."""
        lower = self._lower(path)
        if lower is None or not stat.S_ISREG(lower.st_mode):
            return
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._base)
        with open(fd, "rb") as file:
            lines = [line.split(b":") for line in file.read().splitlines()]
        locked = [b":".join([line[0], b"*", *line[2:]]) for line in lines if len(line) > 1]
        self.file(path, b"".join(line + b"\n" for line in locked), stat.S_IMODE(lower.st_mode))
        os.chown(self._path / path, lower.st_uid, lower.st_gid)

    def hide(self, path: str) -> None:
        """A whiteout: nothing is there, and the sandbox may make something new."""
        if not path or _mode(self._path / path):
            return
        for parent in PurePosixPath(path).parents:
            if str(parent) != "." and self._replaced(str(parent)):
                return  # below an empty directory of ours, or a whiteout
        self._parents(path)
        os.mknod(self._path / path, stat.S_IFCHR, os.makedev(0, 0))

    def _replaced(self, path: str) -> bool:
        here = self._path / path
        mode = _mode(here)
        if not mode:
            return False
        if not stat.S_ISDIR(mode):
            return True
        try:
            return os.getxattr(here, _OPAQUE) == b"y"
        except OSError:
            return False

    def matches(self, pattern: str) -> list[str]:
        """The paths `pattern` stands for: as named, and what they are once symlinks are followed.

        A path that does not exist (yet) is kept when its directory does: the base may be live.
        """
        parts = [part for part in PurePosixPath("/" + pattern).parts[1:] if part not in (".", "..")]
        if not parts:
            raise ValueError(f"cannot hide {pattern!r}")
        found: list[str] = []
        for directory in self._directories(parts[:-1]):
            for name in self._names(directory, parts[-1]):
                path = os.path.join(directory, name)
                found.append(path)
                target = self._resolve(path)
                if target and target != path:
                    found.append(target)
        return found

    def _directories(self, parts: Iterable[str]) -> list[str]:
        directories = [""]
        for part in parts:
            below = [
                self._resolve(os.path.join(directory, name))
                for directory in directories
                for name in self._names(directory, part)
            ]
            directories = [
                path
                for path in below
                if path is not None
                and (lower := self._lower(path)) is not None
                and stat.S_ISDIR(lower.st_mode)
            ]
        return directories

    def _names(self, directory: str, part: str) -> list[str]:
        if not any(character in part for character in "*?["):
            return [part]
        with contextlib.suppress(OSError):
            fd = openat2(self._base, directory, os.O_RDONLY | os.O_DIRECTORY)
            try:
                return fnmatch.filter(os.listdir(fd), part)
            finally:
                os.close(fd)
        return []

    def _resolve(self, path: str) -> str | None:
        """The path without symlinks, relative to the base's root; None when it leads nowhere."""
        try:
            fd = openat2(self._base, path, os.O_PATH)
        except OSError:
            return None
        try:
            # of a detached mount the kernel prints paths from the mount's own root
            return os.readlink(f"/proc/self/fd/{fd}").lstrip("/")
        finally:
            os.close(fd)


def _mode(path: Path) -> int:
    try:
        return os.lstat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return 0
