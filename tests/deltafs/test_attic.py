"""What the attic keeps of files without a name, and how it lies in the layers of a snapshot."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from deltabox.deltafs import attic
from deltabox.linux.fsuid import file_owner
from tests.deltafs.conftest import OWNER, Box, Boxes


def _kept(boxes: Boxes, box: Box, *files: int) -> list[Path]:
    """Where copies of the open files lie in a layer made of a snapshot taken now."""
    with file_owner(0):
        made = boxes.image.attic(box.layer, OWNER)
        paths = [made.keep(fd) for fd in files]
        snapshot = boxes.snapshot(box)
        made.belong(snapshot)
    return [boxes.of(snapshot).path / path.lstrip("/") for path in paths]


@pytest.mark.parametrize("size", [10, 1 << 20])
def test_a_file_of_the_layer(boxes: Boxes, as_root: None, size: int) -> None:
    box = boxes.first()
    fd = os.open(box.path / "gone", os.O_RDWR | os.O_CREAT, 0o640)
    os.write(fd, os.urandom(size))
    os.fchown(fd, OWNER + 5, OWNER + 6)
    os.setxattr(fd, "user.key", b"value")
    os.utime(fd, (1, 2))
    os.unlink(box.path / "gone")
    (kept,) = _kept(boxes, box, fd)
    info = kept.stat()
    assert (info.st_uid, info.st_gid, info.st_mtime) == (OWNER + 5, OWNER + 6, 2)
    assert stat.S_IMODE(info.st_mode) == 0o640
    assert os.getxattr(kept, "user.key") == b"value"
    assert kept.read_bytes() == os.pread(fd, size, 0)
    os.close(fd)


def test_a_file_of_the_base_is_copied_once(boxes: Boxes, as_root: None) -> None:
    box = boxes.first()
    fd = os.open(box.path / "usr/lib/big", os.O_PATH)
    os.unlink(box.path / "usr/lib/big")
    (first,), (second,) = _kept(boxes, box, fd), _kept(boxes, box, fd)
    content = (boxes.base / "usr/lib/big").read_bytes()
    assert first.read_bytes() == second.read_bytes() == content
    assert len(list((boxes.image.mountpoint / "ghosts").glob("base-*"))) == 1
    assert first.stat().st_uid == OWNER
    os.close(fd)


def test_holes_stay_holes(boxes: Boxes, as_root: None) -> None:
    box = boxes.first()
    fd = os.open(box.path / "usr/lib/text", os.O_RDWR)  # copied up, so it is no clone
    os.ftruncate(fd, 1 << 40)
    os.pwrite(fd, b"far", 1 << 39)
    os.unlink(box.path / "usr/lib/text")
    (kept,) = _kept(boxes, box, fd)
    info = kept.stat()
    assert info.st_size == 1 << 40
    assert info.st_blocks < 100
    with open(kept, "rb") as file:
        assert file.read(3) == b"one"
        file.seek(1 << 39)
        assert file.read(3) == b"far"
    os.close(fd)


def test_too_much_to_copy(boxes: Boxes, as_root: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attic, "LIMIT", 10_000)
    box = boxes.first()
    fd = os.open(box.path / "usr/lib/big", os.O_RDWR)
    os.write(fd, b"changed")
    os.unlink(box.path / "usr/lib/big")
    made = boxes.image.attic(box.layer, OWNER)
    with file_owner(0):
        with pytest.raises(OSError, match=os.strerror(errno.EFBIG)):
            made.keep(fd)
        made.discard()
    assert not list((boxes.image.mountpoint / "ghosts").glob("next-*"))
    os.close(fd)


def test_the_names_that_are_left(boxes: Boxes, as_root: None) -> None:
    box = boxes.first()
    fd = os.open(box.path / "one", os.O_RDWR | os.O_CREAT)
    os.mkdir(box.path / "tmp/sub")
    os.link(box.path / "one", box.path / "tmp/sub/two")
    os.unlink(box.path / "one")
    with file_owner(0):
        names = boxes.image.attic(box.layer, OWNER).names(fd)
    assert "/tmp/sub/two" in names
    os.close(fd)
