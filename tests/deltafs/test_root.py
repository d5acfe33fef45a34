"""The sandbox's root: who owns what, what is furnished, what is hidden."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from deltabox.deltafs import root
from deltabox.linux import mount
from deltabox.linux.fsuid import file_owner

from .conftest import OWNER, Box, Boxes


def test_owners_are_mapped_both_ways(boxes: Boxes, as_root: None) -> None:
    box = boxes.first()
    file = box.path / "etc" / "new"
    file.write_text("x")
    assert file.stat().st_uid == OWNER
    assert (box.layer.upper / "etc" / "new").stat().st_uid == 0
    assert (box.path / "etc" / "passwd").stat().st_uid == OWNER
    os.chown(file, OWNER + 1000, OWNER + 100)
    on_disk = (box.layer.upper / "etc" / "new").stat()
    assert (on_disk.st_uid, on_disk.st_gid) == (1000, 100)


def test_the_base_is_never_written(boxes: Boxes, as_root: None) -> None:
    box = boxes.first()
    (box.path / "usr" / "lib" / "text").write_text("changed")
    (box.path / "usr" / "lib" / "big").unlink()
    (box.path / "etc").rename(box.path / "etc2")
    assert (boxes.base / "usr" / "lib" / "text").read_text() == "one\ntwo\nthree\n"
    assert (boxes.base / "usr" / "lib" / "big").exists()
    assert (boxes.base / "etc" / "passwd").exists()


def test_chmod_and_rename_copy_no_data(boxes: Boxes, as_root: None) -> None:
    box = boxes.first()
    (box.path / "usr" / "lib" / "big").chmod(0o600)
    assert (box.layer.upper / "usr" / "lib" / "big").stat().st_blocks == 0
    (box.path / "usr" / "lib").rename(box.path / "usr" / "lib2")
    assert (box.path / "usr" / "lib2" / "big").stat().st_size == 100_000


def test_skeleton_over_any_base(boxes: Boxes) -> None:
    path = boxes.first().path
    for name, mode in {"proc": 0o755, "sys": 0o755, "tmp": 0o1777, "dev/shm": 0o1777}.items():
        assert stat.S_IMODE((path / name).stat().st_mode) == mode
        assert list((path / name).iterdir()) == []
    assert (path / "dev" / "null").read_bytes() == b""
    assert (path / "dev" / "fd").readlink() == Path("/proc/self/fd")
    assert (path / "dev" / "ptmx").readlink() == Path("pts/ptmx")


def test_mount_points_of_the_base_are_emptied(
    tmp_path: Path, boxes_over: Callable[[Path], Boxes]
) -> None:
    base = tmp_path / "odd"
    (base / "dev").mkdir(parents=True)
    (base / "dev" / "sda").write_text("a disk")
    (base / "proc").symlink_to("dev")
    (base / "sys").write_text("a file")
    path = boxes_over(base).first().path
    assert not (path / "dev" / "sda").exists()
    assert (path / "proc").is_dir()
    assert not (path / "proc").is_symlink()
    assert list((path / "sys").iterdir()) == []


@pytest.fixture
def whole(boxes_over: Callable[[Path], Boxes]) -> Box:
    return boxes_over(Path("/")).first(root.DEFAULT_HIDE)


def test_skeleton_over_the_host(whole: Box) -> None:
    path = whole.path
    assert (path / "etc" / "hostname").read_text() == "sandbox\n"
    assert list((path / "tmp").iterdir()) == []
    assert sorted(entry.name for entry in (path / "run").iterdir()) == ["deltabox", "lock"]
    assert (path / "etc" / "machine-id").read_bytes() != Path("/etc/machine-id").read_bytes()
    assert (path / "usr" / "bin" / "env").exists()
    for line in (path / "etc" / "shadow").read_text().splitlines():
        assert line.split(":")[1] == "*"
    assert len((path / "etc" / "shadow").read_text()) > 10


def test_default_hide_covers_secrets(whole: Box) -> None:
    for name in ("root/.ssh", "root/.aws", "root/.netrc", "var/lib/deltabox", "etc/ssl/private"):
        assert not (whole.path / name).exists(), name
    with file_owner(OWNER):
        (whole.path / "root" / ".ssh").mkdir()
        (whole.path / "root" / ".ssh" / "known_hosts").write_text("")


def test_hide(tmp_path: Path, boxes_over: Callable[[Path], Boxes]) -> None:
    base = tmp_path / "base"
    for name in ("home/ann", "home/bob", "data/real", "etc"):
        (base / name).mkdir(parents=True)
    for user in ("ann", "bob"):
        (base / "home" / user / ".netrc").write_text("secret")
        (base / "home" / user / "code").write_text("code")
    (base / "etc" / "one.key").write_text("secret")
    (base / "etc" / "two.key").write_text("secret")
    (base / "etc" / "other").write_text("public")
    (base / "data" / "real" / "token").write_text("secret")
    (base / "secret").symlink_to("/data/real/token")
    (base / "people").symlink_to("home")
    (base / "escape").symlink_to("../../../../../../../etc/passwd")
    hide = ("/home/*/.netrc", "/etc/*.key", "secret", "/people/ann/code", "/no/such", "/escape",
            "/home/ann/later")  # fmt: skip
    path = boxes_over(base).first(hide).path
    seen = sorted(str(found.relative_to(path)) for found in path.rglob("*") if found.is_file())
    assert [name for name in seen if not name.startswith("dev/")] == ["etc/other", "home/bob/code"]
    assert Path("/etc/passwd").exists()
    assert not (path / "secret").is_symlink()
    # hidden before it exists: the host may make it any time
    (base / "home" / "ann" / "later").write_text("secret")
    assert not (path / "home" / "ann" / "later").exists()


def test_hiding_the_root_is_refused(boxes: Boxes) -> None:
    with pytest.raises(ValueError, match="cannot hide"):
        boxes.first(("/",))


def test_submounts_of_the_base_are_not_part_of_it(
    tmp_path: Path, boxes_over: Callable[[Path], Boxes]
) -> None:
    base = tmp_path / "base"
    (base / "mnt").mkdir(parents=True)
    mount.mount("tmpfs", base / "mnt", "tmpfs")
    try:
        (base / "mnt" / "x").write_text("x")
        assert list((boxes_over(base).first().path / "mnt").iterdir()) == []
    finally:
        mount.umount(base / "mnt")


@pytest.mark.parametrize(
    ("name", "sentence"), [("missing", "does not exist"), ("file", "not a directory")]
)
def test_a_base_that_is_none(tmp_path: Path, userns: int, name: str, sentence: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=sentence):
        root.base_mount(tmp_path / name, userns)


def test_the_thread_keeps_its_identity(boxes: Boxes, tmp_path: Path) -> None:
    boxes.first()
    (tmp_path / "mine").write_text("")
    assert (tmp_path / "mine").stat().st_uid == 0
    status = Path("/proc/thread-self/status").read_text()
    permitted, effective = (
        next(line.split()[1] for line in status.splitlines() if line.startswith(key))
        for key in ("CapPrm", "CapEff")
    )
    assert effective == permitted


def test_device_files_are_dead(boxes: Boxes) -> None:
    box = boxes.first()
    os.mknod(box.layer.upper / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    with pytest.raises(PermissionError):
        (box.path / "null").read_bytes()
