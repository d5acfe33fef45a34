"""Images: snapshots under a live mount, full disks, growth, nothing left behind."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from deltabox.deltafs import root
from deltabox.deltafs.image import MINIMUM_SIZE, Image
from deltabox.deltafs.layers import Snapshot, common_ancestor
from deltabox.errors import NoSpace
from deltabox.linux import mount
from deltabox.linux.fsuid import file_owner
from tests.deltafs.conftest import OWNER, Boxes

MIB = 1 << 20


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A host disk of 400 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount.mount("tmpfs", disk, "tmpfs", 0, "size=400m")
    yield disk
    mount.umount(disk, mount.MNT_DETACH)


def loops_of(path: Path) -> list[str]:
    found = []
    for backing in Path("/sys/block").glob("loop*/loop/backing_file"):
        try:
            if backing.read_text().strip().startswith(str(path)):
                found.append(backing.parts[3])
        except OSError:
            continue
    return found


def no_loops_of(path: Path) -> bool:
    """Soon: the kernel lets go when the last opener does, perhaps another who seeks a device."""
    deadline = time.monotonic() + 10
    while loops_of(path):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True


def test_create_and_close_leave_nothing(tmp_path: Path) -> None:
    image = Image.create(tmp_path, name="a", size_limit=1 << 30, reserve=0)
    assert image.path.exists()
    assert image.mountpoint.is_mount()
    assert loops_of(image.path)
    fds = len(os.listdir("/proc/self/fd"))
    image.close()
    image.close()
    assert list(tmp_path.iterdir()) == []
    assert no_loops_of(tmp_path)
    assert len(os.listdir("/proc/self/fd")) < fds


def test_every_failure_of_create_is_undone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail each system call of create() in turn; afterwards nothing is left."""
    calls = [(os, "ftruncate"), (mount, "mount"), (os, "open"), (Path, "mkdir")]
    before = len(os.listdir("/proc/self/fd"))
    for module, name in calls:
        real = getattr(module, name)
        for nth in range(12):
            count = 0

            def failing(*arguments: object, _nth: int = nth, _real=real, **named: object):  # type: ignore[no-untyped-def]
                nonlocal count
                count += 1
                if count == _nth + 1:
                    raise OSError(errno.EIO, "injected")
                return _real(*arguments, **named)

            with monkeypatch.context() as patched:
                patched.setattr(module, name, failing)
                try:
                    image = Image.create(
                        tmp_path / "state", name="a", size_limit=MINIMUM_SIZE, reserve=0
                    )
                except OSError as error:
                    assert error.errno == errno.EIO
                else:
                    patched.undo()
                    image.close()
            assert not (tmp_path / "state").exists() or not list((tmp_path / "state").iterdir())
            assert no_loops_of(tmp_path)
            if count <= nth:
                break
    assert len(os.listdir("/proc/self/fd")) == before


def test_two_images_have_their_own_identity(tmp_path: Path) -> None:
    images = [
        Image.create(tmp_path, name=str(number), size_limit=MINIMUM_SIZE, reserve=0)
        for number in range(2)
    ]
    devices = {os.stat(image.blank().path).st_dev for image in images}
    for image in images:
        image.close()
    assert len(devices) == 2


def test_a_snapshot_is_taken_under_the_live_mount(boxes: Boxes, as_root: None) -> None:
    box = boxes.first()
    file = box.path / "tmp" / "log"
    with file.open("w") as log:
        log.write("before\n")
        log.flush()
        snapshot = boxes.snapshot(box)
        log.write("after\n")
        log.flush()
        assert os.fstat(log.fileno()).st_ino == file.stat().st_ino
    assert file.read_text() == "before\nafter\n"
    back = boxes.of(snapshot)
    assert (back.path / "tmp" / "log").read_text() == "before\n"
    (back.path / "tmp" / "log").write_text("another")
    assert file.read_text() == "before\nafter\n"
    again = boxes.of(snapshot)
    assert (again.path / "tmp" / "log").read_text() == "before\n"


def test_inode_numbers_survive_a_rollback(boxes: Boxes, as_root: None) -> None:
    box = boxes.first()
    (box.path / "etc" / "new").write_text("x")
    (box.path / "usr" / "lib" / "text").chmod(0o600)

    def numbers(path: Path) -> dict[str, int]:
        names = ("etc", "etc/new", "usr/lib", "usr/lib/text", "usr/lib/big")
        return {name: (path / name).stat().st_ino for name in names}

    assert numbers(boxes.of(boxes.snapshot(box)).path) == numbers(box.path)


def test_a_history_of_alternating_rollbacks(boxes: Boxes, as_root: None) -> None:
    box = boxes.first()
    snapshots: list[Snapshot] = []
    for number in range(10):
        (box.path / "tmp" / f"{number}").write_text(str(number))
        snapshots.append(boxes.snapshot(box))
        box = boxes.of(snapshots[number // 2])
    for number, snapshot in enumerate(snapshots):
        names = {entry.name for entry in (snapshot.upper / "tmp").iterdir()}
        assert str(number) in names
        ancestor = common_ancestor(snapshot, snapshots[0])
        assert ancestor is snapshots[0]


def test_common_ancestor(boxes: Boxes) -> None:
    box = boxes.first()
    first = boxes.snapshot(box)
    second = boxes.snapshot(box)
    fork = boxes.of(first)
    forked = boxes.snapshot(fork)
    assert common_ancestor(second, box.layer) is second
    assert common_ancestor(forked, box.layer) is first
    assert common_ancestor(forked, second) is first
    assert common_ancestor(fork.layer, forked) is forked
    assert common_ancestor(boxes.first().layer, second) is None


def test_deleting_one_harms_no_other(boxes: Boxes, as_root: None) -> None:
    box = boxes.first()
    (box.path / "tmp" / "a").write_text("1")
    old = boxes.snapshot(box)
    (box.path / "tmp" / "a").write_text("2")
    new = boxes.snapshot(box)
    boxes.image.delete(old)
    boxes.image.delete(old)
    assert (boxes.of(new).path / "tmp" / "a").read_text() == "2"
    assert (box.path / "tmp" / "a").read_text() == "2"


def test_ghosts_go_with_their_snapshot(boxes: Boxes) -> None:
    snapshot = boxes.snapshot(boxes.first())
    snapshot.ghosts.mkdir()
    (snapshot.ghosts / "1").write_text("unlinked but open")
    boxes.image.delete(snapshot)
    assert not snapshot.ghosts.exists()


def test_threads_may_share_an_image(boxes: Boxes) -> None:
    box = boxes.first()
    snapshot = boxes.snapshot(box)
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(10):
                layer = boxes.image.writable(snapshot)
                taken = boxes.image.snapshot(layer)
                boxes.image.delete(layer)
                boxes.image.delete(taken)
                boxes.image.maintain()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_too_little_room_on_the_host(small_disk: Path) -> None:
    with pytest.raises(NoSpace, match="a sandbox needs 128 MiB"):
        Image.create(small_disk, name="a", size_limit=1 << 30, reserve=300 * MIB)
    assert list(small_disk.iterdir()) == []


def test_a_limit_that_is_too_small(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="128 MiB"):
        Image.create(tmp_path, name="a", size_limit=1 << 20)


def fill(path: Path) -> int:
    """Write until ENOSPC; the number of MiB that went in."""
    chunk = os.urandom(MIB)
    written = 0
    with path.open("wb", buffering=0) as file:
        try:
            while file.write(chunk) == MIB:
                written += 1
        except OSError as error:
            assert error.errno == errno.ENOSPC
    return written


def test_a_full_image_is_benign(small_disk: Path, base: Path, userns: int) -> None:
    image = Image.create(small_disk, name="a", size_limit=1 << 30, reserve=50 * MIB)
    try:
        base_fd = root.base_mount(base, userns)
        layer = image.blank()
        root.skeleton(layer, base, ())
        fd = root.root_mount(base_fd, layer, userns, OWNER)
        path = Path(f"/proc/self/fd/{fd}")
        with file_owner(OWNER):
            (path / "tmp" / "kept").write_text("kept")
            written = fill(path / "tmp" / "big")
        assert 200 < written < 350
        os.sync()
        # the host was never offered out: its reserve is there, the image is healthy
        host = os.statvfs(small_disk)
        assert host.f_bavail * host.f_frsize > 40 * MIB
        (path / "tmp" / "big").unlink()
        snapshot = image.snapshot(layer)
        other = root.root_mount(base_fd, image.writable(snapshot), userns, OWNER)
        assert Path(f"/proc/self/fd/{other}/tmp/kept").read_text() == "kept"
        for each in (base_fd, fd, other):
            os.close(each)
    finally:
        image.close()


def test_the_image_follows_the_host(small_disk: Path, base: Path, userns: int) -> None:
    """The host's disk fills up from elsewhere: the image offers less, then more again."""
    reserve = 50 * MIB
    hog = small_disk / "hog"
    with hog.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, 100 * MIB)
    image = Image.create(small_disk, name="a", size_limit=360 * MIB, reserve=reserve)

    def offered() -> int:
        inside = os.statvfs(image.mountpoint)
        return inside.f_bavail * inside.f_frsize

    try:
        first = offered()
        hog.unlink()
        image.maintain()
        assert offered() > first + 64 * MIB
        with hog.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, 250 * MIB)
        image.maintain()
        assert offered() < 100 * MIB
        hog.unlink()
        image.maintain()
        assert offered() > first + 64 * MIB

        layer = image.blank()
        with hog.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, 380 * MIB)
        with pytest.raises(NoSpace, match="nearly full"):
            image.snapshot(layer)
        hog.unlink()
        image.snapshot(layer)
    finally:
        image.close()


def test_space_of_what_is_deleted_comes_back(tmp_path: Path) -> None:
    image = Image.create(tmp_path, name="a", size_limit=1 << 30, reserve=0)
    try:
        layer = image.blank()
        (layer.upper / "big").write_bytes(os.urandom(64 * MIB))
        image.presync()
        used = image.used_bytes()
        assert used > 64 * MIB
        image.delete(layer)
        for _ in range(15):
            image.maintain()
            time.sleep(0.2)
        assert image.used_bytes() < used - 48 * MIB
    finally:
        image.close()
