"""What counts as the same map of a process."""

from __future__ import annotations

import pytest

from deltabox.deltacr.verify import same_map
from deltabox.errors import CheckpointError

HEAP = b"00:00 0                          [heap]\nVmFlags: rd wr ac\n"
TWO = b"1000-3000 rw-p 00000000 %s3000-4000 rw-p 00000000 %s" % (HEAP, HEAP)
ONE = b"1000-4000 rw-p 00000000 %s" % HEAP
FILE = b"0:0 77 /usr/lib/a.so\nVmFlags: rd mr\n"


def test_what_the_kernel_has_joined_is_the_same() -> None:
    same_map("a map", TWO, ONE)
    same_map("a map", ONE, TWO)
    parts = b"1000-2000 r--p 00000000 %s2000-3000 r--p 00001000 %s" % (FILE, FILE)
    same_map("a map", parts, b"1000-3000 r--p 00000000 %s" % FILE)


@pytest.mark.parametrize(
    "other",
    [
        b"1000-5000 rw-p 00000000 %s" % HEAP,  # longer
        b"1000-4000 r--p 00000000 %s" % HEAP,  # another access
        ONE.replace(b"ac", b"ac nh"),  # another flag
        ONE.replace(b"[heap]", b""),
        b"1000-3000 rw-p 00000000 %s" % HEAP,
        b"1000-2000 rw-p 00000000 %s3000-4000 rw-p 00000000 %s" % (HEAP, HEAP),  # a hole
        b"",
    ],
)
def test_everything_else_is_not(other: bytes) -> None:
    with pytest.raises(CheckpointError, match="a map changed unnoticed"):
        same_map("a map", TWO, other)


def test_a_file_that_does_not_go_on() -> None:
    apart = b"1000-2000 r--p 00000000 %s2000-3000 r--p 00005000 %s" % (FILE, FILE)
    with pytest.raises(CheckpointError):
        same_map("a map", apart, b"1000-3000 r--p 00000000 %s" % FILE)
