"""Pipes and FIFOs, with their contents."""

from __future__ import annotations

from deltabox import Sandbox
from tests.probe import check


def test_contents_capacity_and_ends(sandbox: Sandbox) -> None:
    check(
        sandbox,
        setup="""
r, w = os.pipe()
os.write(w, b'in flight')
os.set_blocking(r, False)
full_r, full_w = os.pipe()
os.set_blocking(full_w, False)
os.write(full_w, b'x' * 65536)
big_r, big_w = os.pipe()
size = fcntl.fcntl(big_w, 1031, 1 << 18)
def peek(fd):
    n = struct.unpack('i', fcntl.ioctl(fd, 0x541B, bytes(4)))[0]
    return n
""",
        report="[peek(r), peek(full_r), fcntl.fcntl(big_r, 1032), fcntl.fcntl(r, fcntl.F_GETFL)]",
        change="assert os.read(r, 99).endswith(b'in flight'); os.read(full_r, 10)",
    )


def test_bytes_come_out_in_order(sandbox: Sandbox) -> None:
    check(
        sandbox,
        setup="""
r, w = os.pipe()
os.write(w, bytes(range(200)) * 100)
seen = 0
def look():
    data = os.read(r, 65536)
    os.write(w, data)
    return [len(data), data == bytes(range(200)) * 100]
""",
        report="look()",
        change="os.read(r, 777)",
    )


def test_one_end_closed(sandbox: Sandbox) -> None:
    check(
        sandbox,
        setup="""
r, w = os.pipe()
os.write(w, b'last words'); os.close(w)
lonely_r, lonely_w = os.pipe(); os.close(lonely_r)
signal.signal(signal.SIGPIPE, signal.SIG_IGN)
tries = []
def broken():
    try:
        os.write(lonely_w, b'x')
    except BrokenPipeError:
        return True
""",
        report="[broken(), struct.unpack('i', fcntl.ioctl(r, 0x541B, bytes(4)))[0]]",
        change="os.read(r, 4)",
    )


def test_fifo(sandbox: Sandbox) -> None:
    check(
        sandbox,
        setup="""
os.mkfifo('/root/fifo')
both = os.open('/root/fifo', os.O_RDWR)
reader = os.open('/root/fifo', os.O_RDONLY | os.O_NONBLOCK)
os.write(both, b'named')
""",
        report="""[struct.unpack('i', fcntl.ioctl(reader, 0x541B, bytes(4)))[0],
os.readlink('/proc/self/fd/%d' % reader), fcntl.fcntl(both, fcntl.F_GETFL) & 3]""",
        change="os.read(reader, 2)",
    )


def test_standard_input_not_yet_read(sandbox: Sandbox) -> None:
    process = sandbox.spawn(["sh", "-c", "read go; cat"])
    process.stdin.write("go\nsome text")
    checkpoint = sandbox.checkpoint()
    for _ in range(3):
        process.stdin.write(" and more\n")
        process.stdin.close()
        assert process.wait(timeout=10) == 0
        assert process.stdout.read_available() == "some text and more\n"
        sandbox.rollback(checkpoint)
    assert process.exit_code is None


def test_reopened_standard_error(sandbox: Sandbox) -> None:
    shell = sandbox.shell()
    shell.run("exec 7>/dev/stderr")
    checkpoint = sandbox.checkpoint()
    for _ in range(2):
        assert shell.run("echo seven >&7").stderr == "seven\n"
        sandbox.rollback(checkpoint)
