"""Regular files, directories and devices that a process has open."""

from __future__ import annotations

from deltabox import Sandbox
from tests.probe import check


def test_offset_flags_and_content(sandbox: Sandbox) -> None:
    check(
        sandbox,
        setup="""
f = os.open('/root/data', os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o640)
os.write(f, b'one two three')
os.lseek(f, 4, os.SEEK_SET)
g = os.open('/root/data', os.O_RDONLY | os.O_NONBLOCK)
os.set_inheritable(g, True)
""",
        report="""[os.lseek(f, 0, os.SEEK_CUR),
fcntl.fcntl(f, fcntl.F_GETFL), fcntl.fcntl(f, fcntl.F_GETFD),
fcntl.fcntl(g, fcntl.F_GETFL), fcntl.fcntl(g, fcntl.F_GETFD), os.pread(g, 99, 0).decode(),
sorted(int(n) for n in os.listdir('/proc/self/fd') if int(n) < 30)]""",
        change="os.write(f, b'!'); h = os.open('/etc/passwd', os.O_RDONLY)",
    )


def test_shared_descriptions_stay_shared(sandbox: Sandbox) -> None:
    check(
        sandbox,
        setup="""
f = os.open('/etc/passwd', os.O_RDONLY)
same = os.dup(f)
other = os.open('/etc/passwd', os.O_RDONLY)
os.lseek(f, 7, os.SEEK_SET)
def seek_both():
    was = os.lseek(f, 0, os.SEEK_CUR)
    os.lseek(same, 100, os.SEEK_SET)
    now = os.lseek(f, 0, os.SEEK_CUR)
    os.lseek(f, was, os.SEEK_SET)
    return [was, now, os.lseek(other, 0, os.SEEK_CUR)]
""",
        report="seek_both()",
        change="os.lseek(other, 3, os.SEEK_CUR)",
    )


def test_a_deleted_file_lives_on(sandbox: Sandbox) -> None:
    check(
        sandbox,
        setup="""
f = open('/root/gone', 'w+')
f.write('still here'); f.flush()
os.unlink('/root/gone')
again = os.open('/proc/self/fd/%d' % f.fileno(), os.O_RDONLY)
""",
        report="""[os.pread(f.fileno(), 99, 0).decode(), os.pread(again, 99, 0).decode(), f.tell(),
os.readlink('/proc/self/fd/%d' % f.fileno()), os.path.exists('/root/gone'),
os.fstat(f.fileno()).st_ino == os.fstat(again).st_ino]""",
        change="os.pwrite(f.fileno(), b'LOST', 0)",
    )


def test_directories_and_devices(sandbox: Sandbox) -> None:
    check(
        sandbox,
        setup="""
d = os.open('/etc', os.O_RDONLY | os.O_DIRECTORY)
devices = {n: os.open('/dev/' + n, os.O_RDWR) for n in ('null', 'zero', 'full', 'urandom')}
where = os.open('/usr', os.O_PATH)
""",
        report="""[os.readlink('/proc/self/fd/%d' % d), 'passwd' in os.listdir(d),
os.read(devices['zero'], 4).hex(),
len(os.read(devices['urandom'], 8)), os.write(devices['null'], b'x'),
os.readlink('/proc/self/fd/%d' % where), os.path.exists('/etc/mark')]""",
        change="open('/etc/mark', 'w').close()",
    )


def test_directories_of_the_process(sandbox: Sandbox) -> None:
    check(
        sandbox,
        setup="os.makedirs('/srv/jail/inner'); os.chdir('/srv/jail'); os.umask(0o027)",
        report="[os.getcwd(), os.umask(0o027), sorted(os.listdir('.'))]",
        change="os.chdir('/'); os.umask(0o077)",
    )


def test_chroot(sandbox: Sandbox) -> None:
    sandbox.run("mkdir -p /srv/jail/inner && echo in > /srv/jail/mark", check=True)
    check(
        sandbox,
        setup="os.chdir('/srv/jail/inner'); os.chroot('/srv/jail')",
        report="[open('/mark').read(), sorted(os.listdir('/')), os.getcwd()]",
        change="open('/other', 'w').close()",
    )


def test_modes_flags_and_far_positions(sandbox: Sandbox) -> None:
    check(
        sandbox,
        setup="""
flags = {'append': os.O_APPEND, 'direct': os.O_DIRECT, 'sync': os.O_SYNC, 'dsync': os.O_DSYNC,
         'noatime': os.O_NOATIME, 'nonblock': os.O_NONBLOCK, 'nofollow': os.O_NOFOLLOW, 'none': 0}
opened = []
for number, (name, flag) in enumerate(flags.items()):
    for mode in (os.O_RDONLY, os.O_WRONLY, os.O_RDWR):
        fd = os.open('/root/' + name, mode | flag | os.O_CREAT, 0)
        os.lseek(fd, (number << 33) + mode, 0)
        opened.append(fd)
path = os.open('/etc/passwd', os.O_PATH)
link = os.open('/etc/mtab', os.O_PATH | os.O_NOFOLLOW)
""",
        report="""[[[fcntl.fcntl(f, 3), fcntl.fcntl(f, 1), os.lseek(f, 0, 1)] for f in opened],
fcntl.fcntl(path, 3), fcntl.fcntl(link, 3), os.readlink('', dir_fd=link)]""",
        change="os.lseek(opened[1], 3, 1); fcntl.fcntl(opened[2], 4, 0)",
    )


def test_a_listing_read_half_way_goes_on(sandbox: Sandbox) -> None:
    """Without loss or repetition: in directories of the layer, of the base, and of both."""
    check(
        sandbox,
        setup="""
os.mkdir('/root/many')
for n in range(500): open('/root/many/%d' % n, 'w').close()
open('/etc/one-more', 'w').close(); os.unlink('/etc/services')
names = ('/root/many', '/usr/bin', '/etc')
wanted = [sorted(os.listdir(n)) for n in names]
def some(fd, size):
    buffer = ctypes.create_string_buffer(size)
    got, at, out = libc.syscall(217, fd, buffer, size), 0, []
    while at < got:
        length = struct.unpack_from('H', buffer, at + 16)[0]
        out.append(buffer.raw[at + 19:at + length].split(b'\\0')[0].decode())
        at += length
    return out
opened = [os.open(n, os.O_RDONLY) for n in names]
first = [some(f, 2000) + some(f, 1000) for f in opened]
def rest():
    out = []
    for fd, start, all in zip(opened, first, wanted):
        was, found = os.lseek(fd, 0, 1), list(start)
        while more := some(fd, 3000): found += more
        os.lseek(fd, was, 0)
        out.append([was > 0, sorted(set(found) - {'.', '..'}) == all, len(found) == len(all) + 2])
    return out
""",
        report="[rest(), [len(f) for f in first]]",
        change="first[0] += some(opened[0], 500)",
    )
