"""openat2(2): open a path that may not leave a root, whatever its symlinks say.

Paths come from callers, and the trees they are looked up in belong to untrusted programs. With
`RESOLVE_IN_ROOT` the kernel itself treats the directory as `/` for the whole lookup, also for
`..` and absolute symlinks, also while the tree is being renamed; no check in user space can.
Magic links (`/proc/PID/fd`, `root`, `cwd`) jump anywhere and are refused.

Structures are from include/uapi/linux/openat2.h.
"""

from __future__ import annotations

import errno
import os
import struct
from typing import Final

from deltabox.linux._libc import syscall

_OPENAT2: Final = 437

RESOLVE_NO_XDEV: Final = 0x01
RESOLVE_NO_MAGICLINKS: Final = 0x02
RESOLVE_NO_SYMLINKS: Final = 0x04
RESOLVE_BENEATH: Final = 0x08
RESOLVE_IN_ROOT: Final = 0x10

_ATTEMPTS: Final = 128


def openat2(
    directory: int,
    path: str | bytes,
    flags: int,
    *,
    mode: int = 0,
    resolve: int = RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS,
) -> int:
    """Open `path` with `directory` as its root. Always close-on-exec.

    EAGAIN (a rename crossed a `..` of the lookup) is tried again.
    """
    encoded = os.fsencode(path)
    if b"\0" in encoded:
        raise ValueError("embedded null byte in path")
    # a mode without O_CREAT/O_TMPFILE is EINVAL here, unlike in open(2)
    how = struct.pack("=QQQ", flags | os.O_CLOEXEC, mode, resolve)
    for _ in range(_ATTEMPTS):
        try:
            return syscall(_OPENAT2, directory, encoded or b".", how, len(how))
        except OSError as error:
            if error.errno != errno.EAGAIN:
                raise OSError(error.errno, os.strerror(error.errno or 0), path) from None
    raise OSError(errno.EAGAIN, "the tree is being renamed too fast to look this path up", path)
