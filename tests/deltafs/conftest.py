"""What the tests of the file half share: a user namespace, an image, and boxes to write in.

The test process moves into a private mount namespace first, so that whatever a crash leaves
mounted goes with the process.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from deltabox.deltafs import root
from deltabox.deltafs.image import Image
from deltabox.deltafs.layers import Layer, Snapshot
from deltabox.linux import mount
from deltabox.linux.fsuid import file_owner

OWNER = 1_879_048_192  # host uid of the sandbox's root
GIB = 1 << 30

_HELPER = """
import ctypes, signal, sys
if ctypes.CDLL(None, use_errno=True).unshare(0x10000000):
    sys.exit(1)
print("ready", flush=True)
signal.pause()
"""


@pytest.fixture(scope="session", autouse=True)
def private_mounts() -> None:
    mount.private_namespace()


@pytest.fixture(scope="session")
def userns() -> Iterator[int]:
    """A user namespace in which OWNER is root; it lives by the descriptor alone."""
    helper = subprocess.Popen([sys.executable, "-c", _HELPER], stdout=subprocess.PIPE)
    try:
        assert helper.stdout is not None
        assert helper.stdout.readline() == b"ready\n"
        for name in ("uid_map", "gid_map"):
            Path(f"/proc/{helper.pid}/{name}").write_text(f"0 {OWNER} 65536")
        fd = os.open(f"/proc/{helper.pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        helper.send_signal(signal.SIGKILL)
        helper.communicate()
    yield fd
    os.close(fd)


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Image]:
    made = Image.create(tmp_path_factory.mktemp("image"), name="tree", size_limit=GIB, reserve=0)
    yield made
    made.close()


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A small base with a file of each sort."""
    made = tmp_path / "base"
    (made / "etc").mkdir(parents=True)
    (made / "etc" / "passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    (made / "usr" / "lib").mkdir(parents=True)
    (made / "usr" / "lib" / "big").write_bytes(os.urandom(100_000))
    (made / "usr" / "lib" / "text").write_text("one\ntwo\nthree\n")
    (made / "link").symlink_to("usr/lib/text")
    return made


@dataclass
class Box:
    """A mounted root and the layer under it."""

    layer: Layer
    mount: int

    @property
    def path(self) -> Path:
        return Path(f"/proc/self/fd/{self.mount}")


@dataclass
class Boxes:
    """Makes boxes over one base, and takes them all away again."""

    image: Image
    base: Path
    userns: int
    base_fd: int
    undo: ExitStack

    def first(self, hide: tuple[str, ...] = ()) -> Box:
        with file_owner(0):  # the engine's part, also in a test that acts as the sandbox's root
            layer = self.image.blank()
            self.undo.callback(self.image.delete, layer)
            root.skeleton(layer, self.base, hide)
        return self.mounted(layer)

    def of(self, snapshot: Snapshot) -> Box:
        with file_owner(0):
            layer = self.image.writable(snapshot)
        self.undo.callback(self.image.delete, layer)
        return self.mounted(layer)

    def snapshot(self, box: Box) -> Snapshot:
        with file_owner(0):
            snapshot = self.image.snapshot(box.layer)
        self.undo.callback(self.image.delete, snapshot)
        return snapshot

    def mounted(self, layer: Layer) -> Box:
        with file_owner(0):
            fd = root.root_mount(self.base_fd, layer, self.userns, OWNER)
        self.undo.callback(os.close, fd)
        return Box(layer, fd)


@pytest.fixture
def boxes_over(image: Image, userns: int) -> Iterator[Callable[[Path], Boxes]]:
    with ExitStack() as undo:

        def make(base: Path) -> Boxes:
            base_fd = root.base_mount(base, userns)
            undo.callback(os.close, base_fd)
            return Boxes(image, base, userns, base_fd, undo)

        yield make


@pytest.fixture
def boxes(boxes_over: Callable[[Path], Boxes], base: Path) -> Boxes:
    return boxes_over(base)


@pytest.fixture
def as_root() -> Iterator[None]:
    """The test acts on files as the sandbox's root."""
    with file_owner(OWNER):
        yield
