"""What is in use without a name: deleted and replaced files, libraries, directories."""

from __future__ import annotations

import pytest

from deltabox import Sandbox, UnsupportedState
from tests.probe import Probe, check

_TOOLS = """
import shutil, hashlib
def label(fd):
    return os.readlink('/proc/self/fd/%d' % fd)
def info(fd):
    s = os.fstat(fd)
    return [oct(s.st_mode), s.st_uid, s.st_gid, s.st_size, s.st_nlink, s.st_mtime_ns, s.st_blocks]
def put(path, content):
    with open(path, 'w') as f: f.write(content)
def left():
    return [n for n in os.listdir('/') if n.startswith('.deltabox')]
"""

_LIBRARY = """
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int,
                      ctypes.c_long]
def mapped(path, prot=3):
    fd = os.open(path, os.O_RDONLY)
    address = libc.mmap(None, os.fstat(fd).st_size, prot, 2, fd, 0)
    os.close(fd)
    return address
def row(address):
    for l in open('/proc/self/maps'):
        low, rest = l.split('-', 1)
        if int(low, 16) == address:
            return [rest.split()[1], rest.split(None, 5)[-1].strip()]
def peek(address, size=8):
    return ctypes.string_at(address, size).decode(errors='replace')
"""


def test_a_replaced_file(sandbox: Sandbox) -> None:
    """As editors and package managers do it; the new file keeps the name."""
    check(
        sandbox,
        setup=_TOOLS
        + """
os.makedirs('/root/d')
put('/root/d/f', 'first'); first = os.open('/root/d/f', os.O_RDWR | os.O_APPEND)
put('/root/d/n', 'second'); os.rename('/root/d/n', '/root/d/f')
second = os.open('/root/d/f', os.O_RDONLY)
put('/root/d/n', 'third'); os.rename('/root/d/n', '/root/d/f')
third = os.open('/root/d/f', os.O_RDONLY)
os.lseek(first, 2, 0)
os.chmod(first, 0o640); os.chown(first, 5, 6); os.utime(first, (1, 2))
""",
        report="""[[[label(x), info(x), os.pread(x, 99, 0).decode()] for x in (first, second,
third)], os.lseek(first, 0, 1), fcntl.fcntl(first, 3), os.listdir('/root/d'), left(),
os.stat('/root/d').st_mtime_ns, os.stat('/').st_mtime_ns, open('/root/d/f').read()]""",
        change="os.write(first, b' more'); put('/root/d/f', 'fourth')",
    )


def test_other_names_are_left(sandbox: Sandbox) -> None:
    check(
        sandbox,
        setup=_TOOLS
        + """
put('/root/a', 'linked'); f = os.open('/root/a', os.O_RDWR); mark = os.stat('/root/a').st_ino
os.link('/root/a', '/root/b'); os.unlink('/root/a')
put('/root/c', 'renamed'); g = os.open('/root/c', os.O_RDWR); os.rename('/root/c', '/root/e')
""",
        report="""[label(f), info(f), os.pread(f, 9, 0).decode(), os.path.sameopenfile(f,
os.open('/root/b', 0)), label(g), sorted(os.listdir('/root'))[-3:], left(),
os.fstat(f).st_ino == mark, os.closerange(20, 99)]""",
        change="os.pwrite(f, b'THROUGH', 0)",
    )


def test_a_nameless_temporary_file_can_still_be_named(sandbox: Sandbox) -> None:
    check(
        sandbox,
        setup=_TOOLS
        + """
f = os.open('/root', os.O_TMPFILE | os.O_RDWR | os.O_APPEND, 0o600)
os.write(f, b'z' * 200000); os.lseek(f, 5, 0)
again = os.open('/proc/self/fd/%d' % f, os.O_RDONLY)
def clear():
    return label(f).split('#')[0]
""",
        report="""[clear(), info(f), info(again), fcntl.fcntl(f, 3), os.lseek(f, 0, 1),
os.pread(again, 3, 0).decode(), left()]""",
        change="os.ftruncate(f, 3)",
    )
    probe = Probe.start(sandbox)
    probe.do(_TOOLS + "f = os.open('/root', os.O_TMPFILE | os.O_WRONLY, 0o600)")
    probe.do("os.write(f, b'z' * 200000)")
    checkpoint = sandbox.checkpoint()
    for _ in range(2):
        sandbox.rollback(checkpoint)
        probe.do("assert not libc.linkat(-100, b'/proc/self/fd/%d' % f, -100, b'/root/n', 0x400)")
        probe.do("os.write(f, b'!')")
        assert probe.ask("open('/root/n').read() == 'z' * 200000 + '!'")


def test_large_and_sparse(sandbox: Sandbox) -> None:
    check(
        sandbox,
        setup=_TOOLS
        + """
f = os.open('/root/large', os.O_RDWR | os.O_CREAT)
for n in range(128): os.write(f, bytes([n]) * (1 << 20))
os.pwrite(f, b'far', 1 << 40)
os.unlink('/root/large')
hole = os.open('/root/hole', os.O_RDWR | os.O_CREAT)
os.ftruncate(hole, 1 << 34)
os.unlink('/root/hole')
""",
        report="""[info(f), info(hole), os.pread(f, 3, 1 << 40).decode(), left(),
[os.pread(f, 1, n << 20).hex() for n in range(128)], label(f)]""",
        change="os.pwrite(f, b'X', 5 << 20); os.pwrite(hole, b'X', 0)",
        rollbacks=3,
        forks=1,
    )


def test_mapped_files_deleted_and_replaced(sandbox: Sandbox) -> None:
    check(
        sandbox,
        setup=_TOOLS
        + _LIBRARY
        + """
shutil.copy('/etc/services', '/root/own')
own = mapped('/root/own'); os.unlink('/root/own')
base = mapped('/etc/protocols'); os.rename('/etc/protocols', '/etc/moved')
swapped = mapped('/etc/networks')
put('/etc/n', 'new networks'); os.rename('/etc/n', '/etc/networks')
ctypes.memmove(base + 4096, b'touched', 7) if os.stat('/etc/moved').st_size > 4200 else None
ctypes.memmove(own + 4096, b'touched', 7)
""",
        report="""[peek(own, 100), peek(own + 4096, 99), peek(base), row(own), row(base),
peek(swapped), row(swapped), open('/etc/networks').read(), left()]""",
        change="ctypes.memmove(own, b'CHANGED!', 8); put('/etc/networks', 'newer')",
    )


def test_a_library_and_an_executable_upgraded_while_they_run(sandbox: Sandbox) -> None:
    sandbox.run("cp /usr/bin/python3.11 /usr/local/bin/py && cp $(ldd /usr/bin/python3.11 "
                "| awk '/libm/ {print $3}') /usr/local/lib/libold.so", check=True)  # fmt: skip
    check(
        sandbox,
        setup=_TOOLS
        + """
import subprocess
child = subprocess.Popen(['/usr/local/bin/py', '-u', '-c', '''
import ctypes, sys
m = ctypes.CDLL("/usr/local/lib/libold.so"); m.sqrt.restype = ctypes.c_double
for line in sys.stdin:
    print(m.sqrt(ctypes.c_double(float(line))), len(open("/proc/self/exe", "rb").read()))
'''], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
def root_of(x):
    child.stdin.write('%d\\n' % x)
    return child.stdout.readline()
root_of(4)
for path in ('/usr/local/bin/py', '/usr/local/lib/libold.so', '/usr/bin/python3.11'):
    put(path + '.new', 'upgraded'); os.rename(path + '.new', path)
def maps(pid):
    return [l.split(None, 5)[1::4] for l in open('/proc/%s/maps' % pid) if '(deleted)' in l]
asked = 0
def ask():
    global asked
    asked += 1
    return root_of(81)
""",
        report="""[ask(), os.readlink('/proc/self/exe'), os.readlink('/proc/%d/exe' % child.pid),
maps('self'), maps(child.pid), open('/usr/local/bin/py').read(), left(), len(maps('self')) > 3]""",
        change="put('/usr/local/bin/py', 'again')",
    )


def test_deleted_directories(sandbox: Sandbox) -> None:
    check(
        sandbox,
        setup=_TOOLS
        + """
os.makedirs('/srv/a/b/c'); os.chmod('/srv/a/b', 0o750); os.chown('/srv/a/b', 7, 8)
os.chdir('/srv/a/b/c')
b = os.open('/srv/a/b', os.O_RDONLY | os.O_DIRECTORY)
f = os.open('/srv/a/b/file', os.O_RDWR | os.O_CREAT)
o = os.open('/srv/a/b/file', os.O_PATH)
w = os.open('/srv/a', os.O_PATH | os.O_DIRECTORY)
shutil.rmtree('/srv/a'); put('/srv/a', 'a file by now')
ask, go = os.pipe(); done, tell = os.pipe()
if not os.fork():
    while True:
        os.read(ask, 1)
        os.write(tell, os.readlink('/proc/self/cwd').encode())
def other():
    os.write(go, b'x')
    return os.read(done, 99).decode()
def fails(call, *args):
    try: return call(*args)
    except OSError as error: return error.errno
""",
        report="""[label(b), label(f), label(w), label(o), other(), os.readlink('/proc/self/cwd'),
fails(os.getcwd), os.listdir(b), info(b)[:3], fails(os.mkdir, 'x'), fails(os.open, 'y', os.O_CREAT),
open('/srv/a').read(), left()]""",
        change="os.chdir('/')",
    )


def test_what_a_fork_does_to_a_ghost_stays_its_own(sandbox: Sandbox) -> None:
    probe = Probe.start(sandbox)
    probe.do(_TOOLS + "f = open('/root/f', 'w+'); f.write('x' * 100000); f.flush()")
    probe.do("os.unlink('/root/f')")
    checkpoint = sandbox.checkpoint()
    with sandbox.fork(at=checkpoint) as one, sandbox.fork(at=checkpoint) as two:
        for number, fork in enumerate((one, two)):
            copy = probe.within(fork)
            copy.do(f"os.pwrite(f.fileno(), b'{number}', 0)")
        for number, fork in enumerate((one, two)):
            copy = probe.within(fork)
            assert copy.ask("os.pread(f.fileno(), 2, 0).decode()") == f"{number}x"
            assert copy.ask("left()") == []
    assert probe.ask("os.pread(f.fileno(), 2, 0).decode()") == "xx"
    assert sandbox.diff(checkpoint) == []


@pytest.mark.parametrize(
    ("make", "what"),
    [
        ("os.symlink('x', '/root/n'); fd = os.open('/root/n', O | os.O_NOFOLLOW)", "a symbolic"),
        ("import socket; s = socket.socket(1); s.bind('/root/n'); fd = os.open('/root/n', O);"
         "s.close()", "a socket file"),
    ],
)  # fmt: skip
def test_other_nameless_things_are_refused(sandbox: Sandbox, make: str, what: str) -> None:
    probe = Probe.start(sandbox)
    probe.do(f"O = os.O_PATH; {make}; os.unlink('/root/n')")
    with pytest.raises(UnsupportedState, match=f"is {what}.* without a name, /root/n"):
        sandbox.checkpoint()
    probe.do("os.close(fd)")
    sandbox.checkpoint()


def test_a_deleted_fifo(sandbox: Sandbox) -> None:
    check(
        sandbox,
        setup=_TOOLS
        + """
os.mkfifo('/root/n', 0o640)
r = os.open('/root/n', os.O_RDONLY | os.O_NONBLOCK); w = os.open('/root/n', os.O_WRONLY)
p = os.open('/root/n', os.O_PATH)
os.write(w, b'waiting')
os.unlink('/root/n')
n = 0
def turn():
    got = os.read(r, 99).decode()
    os.write(w, got.encode())
    return got
""",
        report="[turn(), label(r), label(w), label(p), info(r)[:3], info(p)[:3], left()]",
        change="os.write(w, b'more')",
    )


def test_a_name_that_cannot_be_found_is_refused(sandbox: Sandbox) -> None:
    """Nothing leads from a copied-up file of the base to its other names."""
    probe = Probe.start(sandbox)
    probe.do("fd = os.open('/etc/services', os.O_RDWR); os.write(fd, b'changed')")
    probe.do("os.link('/etc/services', '/etc/other'); os.unlink('/etc/services')")
    with pytest.raises(UnsupportedState, match="has lost the name it was opened by"):
        sandbox.checkpoint()
    probe.do("os.close(fd)")
    sandbox.checkpoint()
