"""File access from outside: nothing leads out of the root, nothing reaches the kernel's files."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from deltabox.deltafs.inside import FileStat, Inside
from deltabox.linux import mount
from deltabox.linux.fsuid import file_owner
from tests.deltafs.conftest import OWNER, Box, Boxes


@pytest.fixture
def box(boxes: Boxes) -> Box:
    return boxes.first()


@pytest.fixture
def files(box: Box) -> Inside:
    return Inside(box.mount, OWNER)


@pytest.fixture
def attached(box: Box, tmp_path: Path) -> Iterator[Inside]:
    """The root where /proc is mounted, as a running sandbox has it."""
    at = tmp_path / "root"
    at.mkdir()
    mount.move_mount(box.mount, "", mount.AT_FDCWD, at, mount.MOVE_MOUNT_F_EMPTY_PATH)
    mount.mount("proc", at / "proc", "proc")
    mount.mount("tmpfs", at / "tmp", "tmpfs")
    fd = os.open(at, os.O_PATH | os.O_CLOEXEC)
    yield Inside(fd, OWNER)
    os.close(fd)
    mount.umount(at, mount.MNT_DETACH)


def test_write_and_read(files: Inside, box: Box) -> None:
    files.write("/tmp/a", b"one")
    assert files.read("/tmp/a") == b"one"
    files.write("/tmp/a", b"2")
    assert files.read("tmp/a") == b"2"
    status = files.stat("/tmp/a")
    assert (status.uid, status.gid, status.mode, status.size, status.kind) == (
        0,
        0,
        0o644,
        1,
        "file",
    )
    assert (box.layer.upper / "tmp" / "a").stat().st_uid == 0


def test_write_makes_parents_and_keeps_modes(files: Inside) -> None:
    files.write("/srv/deep/er/a", b"x")
    assert files.stat("/srv/deep") == FileStat(
        size=files.stat("/srv/deep").size, mode=0o755, uid=0, gid=0,
        mtime_ns=files.stat("/srv/deep").mtime_ns, kind="directory",
    )  # fmt: skip
    files.write("/srv/run", b"x", mode=0o750)
    files.write("/srv/run", b"y")
    assert files.stat("/srv/run").mode == 0o750
    files.write("/srv/run", b"y", mode=0o600)
    assert files.stat("/srv/run").mode == 0o600
    with pytest.raises(FileNotFoundError) as caught:
        files.write("/no/such/file", b"", parents=False)
    assert caught.value.filename == "/no/such/file"


def test_the_umask_of_the_engine_does_not_show(files: Inside) -> None:
    old = os.umask(0o077)
    try:
        files.write("/srv/a/b", b"", mode=0o666)
        files.mkdir("/srv/c")
    finally:
        os.umask(old)
    assert [files.stat(f"/srv/{name}").mode for name in ("a", "a/b", "c")] == [0o755, 0o666, 0o755]


def test_a_file_of_the_base_keeps_its_inode(files: Inside, box: Box) -> None:
    before = (box.path / "etc" / "passwd").stat().st_ino
    files.write("/etc/passwd", b"changed")
    assert (box.path / "etc" / "passwd").stat().st_ino == before


def test_list_stat_exists(files: Inside) -> None:
    assert files.list("/usr") == ["lib"]
    assert files.list("/usr/lib") == ["big", "text"]
    assert files.stat("/link").kind == "file"
    assert files.stat("/link", follow_symlinks=False).kind == "symlink"
    assert files.exists("/link")
    assert not files.exists("/nothing")
    assert not files.exists("/link/below")
    with pytest.raises(NotADirectoryError):
        files.list("/link")


@pytest.mark.parametrize("call", ["read", "list", "stat", "remove", "mkdir"])
def test_what_is_missing_is_named(files: Inside, call: str) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        getattr(files, call)("/no/such")
    assert caught.value.filename == "/no/such"


def test_mkdir(files: Inside) -> None:
    files.mkdir("/a")
    with pytest.raises(FileExistsError):
        files.mkdir("/a")
    files.mkdir("/a/b/c", parents=True)
    files.mkdir("/a/b/c", parents=True)
    assert files.list("/a/b") == ["c"]
    files.write("/a/file", b"")
    with pytest.raises(NotADirectoryError):
        files.mkdir("/a/file/x", parents=True)


def test_remove(files: Inside) -> None:
    files.write("/d/e/f", b"")
    with pytest.raises(OSError, match="not empty"):
        files.remove("/d")
    files.remove("/d", recursive=True)
    assert not files.exists("/d")
    files.remove("/link")
    assert files.exists("/usr/lib/text")
    with pytest.raises(OSError, match="cannot be removed"):
        files.remove("/", recursive=True)


def test_remove_follows_no_link(files: Inside, box: Box, as_root: None) -> None:
    files.mkdir("/d")
    (box.path / "d" / "out").symlink_to("/usr")
    files.remove("/d", recursive=True)
    assert files.exists("/usr/lib/text")


def test_deep_trees(files: Inside) -> None:
    files.mkdir("/d" * 1500, parents=True)
    files.remove("/d", recursive=True)
    assert not files.exists("/d")


@pytest.mark.parametrize(
    "target",
    ["/outside", "../../../../../../../../outside", "/proc/self/root/outside"],
)
def test_no_path_leads_out(files: Inside, box: Box, tmp_path: Path, target: str) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    with file_owner(OWNER):
        (box.path / "evil").symlink_to(target.replace("/outside", str(secret)))
    with pytest.raises(OSError):
        files.read("/evil")
    with pytest.raises(OSError):
        files.read("/tmp/../../../../../../.." + str(secret))
    assert not files.exists("/evil")
    # written through the link: lands inside, if anywhere
    try:
        files.write("/evil", b"overwritten")
    except OSError:
        pass
    assert secret.read_text() == "secret"


def test_renames_cannot_trick_a_lookup(files: Inside, box: Box, tmp_path: Path) -> None:
    """A directory is moved about and replaced by a link to the outside all the while."""
    outside = tmp_path / "outside"
    outside.mkdir()
    stop = threading.Event()

    def play() -> None:
        with file_owner(OWNER):
            (box.path / "a" / "b").mkdir(parents=True)
            while not stop.is_set():
                (box.path / "a").rename(box.path / "z")
                (box.path / "a").symlink_to(outside)
                (box.path / "a").unlink()
                (box.path / "z").rename(box.path / "a")

    thread = threading.Thread(target=play)
    thread.start()
    try:
        for number in range(300):
            try:
                files.write(f"/a/b/../b/{number}", b"x", parents=False)
            except OSError:
                continue
    finally:
        stop.set()
        thread.join()
    assert list(outside.iterdir()) == []


def test_a_fifo_does_not_block(files: Inside, box: Box, as_root: None) -> None:
    os.mkfifo(box.path / "fifo", 0o666)
    with pytest.raises(OSError, match="not a regular file"):
        files.read("/fifo")
    with pytest.raises(OSError, match="not a regular file"):
        files.write("/fifo", b"x")
    assert files.stat("/fifo").kind == "fifo"


def test_directories_are_no_files(files: Inside) -> None:
    for call in (lambda: files.read("/usr"), lambda: files.write("/usr", b""),
                 lambda: files.write("/usr/", b"")):  # fmt: skip
        with pytest.raises(IsADirectoryError):
            call()


def test_files_of_the_kernel_are_refused(attached: Inside, tmp_path: Path) -> None:
    host = Path("/proc/sys/kernel/core_pattern").read_text()
    with file_owner(OWNER):
        (tmp_path / "root" / "etc" / "innocent").symlink_to("/proc/sys/kernel/core_pattern")
    for path in ("/proc/sys/kernel/core_pattern", "/etc/innocent"):
        with pytest.raises(PermissionError) as caught:
            attached.write(path, b"|/evil")
        assert caught.value.filename == path
        with pytest.raises(PermissionError):
            attached.read(path)
    assert Path("/proc/sys/kernel/core_pattern").read_text() == host
    with pytest.raises(PermissionError):
        attached.remove("/proc/1", recursive=True)
    assert attached.exists("/proc/self")
    assert "self" in attached.list("/proc")


def test_a_tmpfs_inside_is_reached(attached: Inside) -> None:
    attached.write("/tmp/a", b"x")
    assert attached.read("/tmp/a") == b"x"


def test_a_null_byte(files: Inside) -> None:
    with pytest.raises(ValueError, match="null byte"):
        files.read("/a\0b")


def test_no_space_is_an_oserror(files: Inside, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space") as caught:
        files.write("/tmp/a", b"x")
    assert caught.value.filename == "/tmp/a"
