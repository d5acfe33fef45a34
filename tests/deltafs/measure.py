"""The cost of each step of the file half, as docs/deltafs.md quotes it. Run as root:

.venv/bin/python -m tests.deltafs.measure [--direct-io] [--steps 200] [--files 5]
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deltabox.deltafs import root
from deltabox.deltafs.diff import count_changes, diff
from deltabox.deltafs.image import Image
from deltabox.linux import loop, mount
from deltabox.linux.fsuid import file_owner
from tests.deltafs.conftest import _HELPER, OWNER

times: dict[str, list[float]] = {}


def timed(name: str, call: Callable[..., Any], *arguments: Any) -> Any:
    start = time.perf_counter()
    result = call(*arguments)
    times.setdefault(name, []).append((time.perf_counter() - start) * 1000)
    return result


def user_namespace() -> int:
    helper = subprocess.Popen([sys.executable, "-c", _HELPER], stdout=subprocess.PIPE)
    assert helper.stdout is not None
    helper.stdout.readline()
    for name in ("uid_map", "gid_map"):
        Path(f"/proc/{helper.pid}/{name}").write_text(f"0 {OWNER} 65536")
    fd = os.open(f"/proc/{helper.pid}/ns/user", os.O_RDONLY)
    helper.send_signal(signal.SIGKILL)
    helper.communicate()
    return fd


def change(top: Path, files: int, step: int) -> None:
    with file_owner(OWNER):
        for number in range(files):
            (top / "tmp" / f"{number}").write_bytes(os.urandom(12_288))


def creates(top: Path) -> None:
    with file_owner(OWNER):
        (top / "tmp" / "many").mkdir()
        for number in range(1000):
            (top / "tmp" / "many" / f"{number}").write_bytes(b"x" * 1000)


def sequential(top: Path, image: Image) -> None:
    chunk = os.urandom(1 << 20)
    with file_owner(OWNER), (top / "tmp" / "big").open("wb", buffering=0) as file:
        for _ in range(1024):
            file.write(chunk)
    image.presync()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--direct-io", action="store_true")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--files", type=int, default=5)
    parser.add_argument("--idle", type=float, default=0.02, help="seconds between steps")
    parser.add_argument("--no-presync", action="store_true")
    parser.add_argument("--big", action="store_true", help="also 1 GiB written in one go")
    options = parser.parse_args()
    mount.private_namespace()
    if options.direct_io:
        attach = loop.attach
        loop.attach = lambda file, **named: attach(file, **{**named, "direct_io": True})
    userns = user_namespace()
    with tempfile.TemporaryDirectory(dir="/var/tmp") as directory:
        image = timed("create", lambda: Image.create(Path(directory), name="m", size_limit=8 << 30))
        base = timed("base_mount", root.base_mount, Path("/"), userns)
        layer = timed("blank", image.blank)
        timed("skeleton", root.skeleton, layer, Path("/"), root.DEFAULT_HIDE)
        fd = root.root_mount(base, layer, userns, OWNER)
        snapshots = []
        for step in range(options.steps):
            top = Path(f"/proc/self/fd/{fd}")
            change(top, options.files, step)
            time.sleep(options.idle)
            if not options.no_presync:
                timed("presync", image.presync)
                timed("presync when clean", image.presync)
            snapshots.append(timed("snapshot", image.snapshot, layer))
            if step:
                timed("diff", diff, snapshots[-2], snapshots[-1], Path("/"))
                timed("count_changes", count_changes, snapshots[-2], snapshots[-1], Path("/"))
            spare = timed("writable", image.writable, snapshots[-1])
            new = timed("root_mount", root.root_mount, base, spare, userns, OWNER)
            timed("close the old root", os.close, fd)
            timed("delete the old layer", image.delete, layer)
            layer, fd = spare, new
        timed("1,000 creates", creates, Path(f"/proc/self/fd/{fd}"))
        image.presync()
        if options.big:
            timed("1 GiB", sequential, Path(f"/proc/self/fd/{fd}"), image)
        for descriptor in (fd, base):
            os.close(descriptor)
        timed("close", image.close)
    print(f"{'step':24}{'median':>9}{'p90':>9}{'first 20':>10}{'last 20':>9}   ms")
    for name, taken in times.items():
        young, old = statistics.median(taken[:20]), statistics.median(taken[-20:])
        p90 = sorted(taken)[int(len(taken) * 0.9)]
        print(f"{name:24}{statistics.median(taken):9.2f}{p90:9.2f}{young:10.2f}{old:9.2f}")


if __name__ == "__main__":
    main()
