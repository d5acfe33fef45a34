"""Loop devices: a file as a block device, gone by itself when its last user is gone.

`LO_FLAGS_AUTOCLEAR` makes the kernel detach the file when the device's last opener (for us:
the btrfs mount) goes, so a killed engine leaves no device behind. `LOOP_CTL_GET_FREE` only
says which device *is* free, another process may take it before us: `LOOP_CONFIGURE` then
answers EBUSY, or the opening ENXIO, and we ask again. Numbers are from include/uapi/linux/loop.h,
see loop(4).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import random
import stat
import struct
import time
from typing import Final

LOOP_CONFIGURE: Final = 0x4C0A
LOOP_SET_CAPACITY: Final = 0x4C07
LOOP_CTL_GET_FREE: Final = 0x4C82
LO_FLAGS_AUTOCLEAR: Final = 4
LO_FLAGS_DIRECT_IO: Final = 16
LOOP_MAJOR: Final = 7

_ATTEMPTS: Final = 64


def _open_device(number: int) -> int:
    """Open /dev/loopN, also where the host's /dev is no devtmpfs and lacks the node."""
    path = f"/dev/loop{number}"
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        with contextlib.suppress(FileExistsError):
            os.mknod(path, stat.S_IFBLK | 0o600, os.makedev(LOOP_MAJOR, number))
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)


def attach(file: int, *, name: str, direct_io: bool, block_size: int = 4096) -> tuple[int, str]:
    """Attach an open file to a free loop device; (descriptor, path) of the device.

    The device lives as long as the descriptor is open or the device is mounted.
    """
    flags = LO_FLAGS_AUTOCLEAR | (LO_FLAGS_DIRECT_IO if direct_io else 0)
    info = struct.pack(
        "=5Q4I64s64s32s2Q",
        0, 0, 0, 0, 0,  # device, inode, rdevice, offset, sizelimit
        0, 0, 0, flags,  # number, encrypt type, encrypt key size, flags
        os.fsencode(name)[-63:], b"", b"",
        0, 0,
    )  # fmt: skip
    config = struct.pack("=II", file, block_size) + info + bytes(64)
    control = os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC)
    try:
        for attempt in range(_ATTEMPTS):
            number = fcntl.ioctl(control, LOOP_CTL_GET_FREE)
            try:
                device = _open_device(number)
            except OSError as error:
                # ENOENT: udev was slower, or another process has removed it. ENXIO: another process
                # has taken it and let go of it meanwhile, and its end is not over (Lo_rundown in
                # drivers/block/loop.c)
                if error.errno not in (errno.ENOENT, errno.ENXIO):
                    raise
                time.sleep(random.uniform(0, 0.001) * (attempt + 1))
                continue
            try:
                fcntl.ioctl(device, LOOP_CONFIGURE, config)
                return device, f"/dev/loop{number}"
            except OSError as error:
                os.close(device)
                if error.errno != errno.EBUSY:
                    raise
                time.sleep(random.uniform(0, 0.001) * (attempt + 1))
        raise OSError(errno.EBUSY, "every free loop device was taken by somebody else")
    finally:
        os.close(control)


def set_capacity(device: int) -> None:
    """Tell the device that its file has grown."""
    fcntl.ioctl(device, LOOP_SET_CAPACITY)
