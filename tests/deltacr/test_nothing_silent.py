"""Nothing silent: all that /proc tells of every process is the same before and after a restore.

The lists below say what may differ, each with its reason; anything else fails. They are the
contract of docs/fidelity.md: numbers of anonymous objects and of the host, accounting, devices.
"""

from __future__ import annotations

import json
import re
import subprocess
import textwrap
import uuid
from pathlib import Path
from typing import Any

from deltabox import Sandbox

# Run in the sandbox's pid and mount namespaces with the host's privileges, because what is to be
# compared includes processes that root inside may not look at.
# {pid: {what: text}} for all processes but itself.
_LOOK = r"""
import json, os, re
def read(path):
    try:
        with open(path, 'rb') as f:
            return f.read().decode(errors='backslashreplace')
    except OSError as error:
        return 'errno %d' % error.errno
def link(path):
    try:
        return os.readlink(path)
    except OSError as error:
        return 'errno %d' % error.errno
def names(path):
    try:
        return sorted(os.listdir(path))
    except OSError as error:
        return []
FILES = ('stat status maps limits mountinfo timers cgroup cmdline environ comm auxv personality '
    'oom_score_adj coredump_filter timerslack_ns uid_map gid_map setgroups loginuid '
    'smaps net/tcp net/tcp6 net/udp net/udp6 net/unix net/netlink net/raw net/packet net/route '
    'net/dev net/if_inet6 net/igmp attr/current').split()
out = {}
for name in names('/proc'):
    if not name.isdigit() or int(name) == os.getpid():
        continue
    at = '/proc/' + name
    found = {file: read(f'{at}/{file}') for file in FILES}
    for kind in ('cwd', 'root', 'exe'):
        found[kind] = link(f'{at}/{kind}')
    for kind in names(at + '/ns'):
        found['ns/' + kind] = link(f'{at}/ns/{kind}')
    for fd in names(at + '/fd') if name != '1' else []:  # PID 1 is the engine's own
        found['fd/' + fd] = link(f'{at}/fd/{fd}')
        found['fdinfo/' + fd] = read(f'{at}/fdinfo/{fd}')
    for tid in names(at + '/task'):
        if tid != name:
            for file in ('stat', 'status', 'comm', 'children'):
                found[f'task/{tid}/{file}'] = read(f'{at}/task/{tid}/{file}')
    out[name] = found
print(json.dumps(out))
"""

# Fields of stat (proc(5), counted from 1) that are accounting: flags of the kernel's process
# accounting (forked without exec, used privileges), faults, times, sizes, processor, io delay.
_STAT = {9, 10, 11, 12, 13, 14, 15, 16, 17, 22, 23, 24, 36, 37, 39, 42, 43, 44}
# Lines of status that are accounting.
_STATUS = re.compile(
    r"^(Vm|Rss|HugetlbPages|voluntary|nonvoluntary|FDSize|SigQ|Ngid|NSpid|NSpgid|NSsid|NStgid)"
)
_OURS = range(0x4200_0000_0000, 0x5500_0000_0000)  # the two mappings that docs/fidelity.md names


def _stat(text: str) -> list[str]:
    head, _, rest = text.rpartition(")")
    fields = [*head.split(" (", 1), *rest.split()]
    return [f for number, f in enumerate(fields, 1) if number not in _STAT]


def _status(text: str) -> list[str]:
    return [line for line in text.splitlines() if not _STATUS.match(line)]


def _ours(address: str) -> bool:
    return int(address.split("-")[0], 16) in _OURS


def _maps(text: str) -> list[str]:
    out = []
    for line in text.splitlines():
        where, perms, offset, _device, inode, *path = line.split(None, 5)
        name = path[0] if path else ""
        if _ours(where):
            continue
        if (
            not name.startswith("/")
            or name.startswith(("/memfd:", "/dev/zero"))
            or (name.endswith("(deleted)"))
        ):
            inode = "0"
        out.append(f"{where} {perms} {offset} {inode} {name}")
    return out


def _smaps(text: str) -> list[str]:
    out, where = [], ""
    for line in text.splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            where = line.split()[0]
        elif line.startswith("VmFlags:") and not _ours(where):
            # sd: soft-dirty; uw: the engine watches its writes (deltacr/space.py)
            flags = [f for f in line.split()[1:] if f not in ("sd", "uw")]
            out.append(where + " " + " ".join(flags))
    return out


def _fdinfo(text: str, link: str) -> list[str]:
    out = []
    for line in text.splitlines():
        if line.startswith(("mnt_id:", "ino:", "eventfd-id:", "flags:\t0100002\nscm")):
            continue
        if line.startswith("it_value"):
            continue  # clocks run on
        line = re.sub(r" ino:[0-9a-f]+ sdev:[0-9a-f]+", "", line)
        line = re.sub(r"(fhandle-\w+|f_handle):[0-9a-f]*", "", line)
        line = re.sub(r"^(lock:.*?) (\d+) [0-9a-f]+:[0-9a-f]+:\d+ ", r"\1 \2 ", line)
        line = re.sub(r"^lock:\s*\d+:", "lock:", line)
        out.append(line)
    return sorted(out) if link.startswith("anon_inode") else out


def _net(name: str, text: str) -> list[str]:
    """Without kernel addresses, inode numbers, counters and timers."""
    lines = text.splitlines()
    if name == "dev":
        return [line.split(":")[0] for line in lines]
    if name in ("tcp", "tcp6", "udp", "udp6"):
        # local and remote address, state, queues; uid
        lines = [
            " ".join([*f[1:5], f[7]])
            for f in (line.split() for line in lines[1:])
            if f[3] != "06"  # TIME_WAIT belongs to nobody
        ]
        return sorted(lines)
    if name == "unix":
        return sorted(" ".join([*f[3:6], *f[7:]]) for f in (line.split() for line in lines[1:]))
    if name == "netlink":
        return sorted(" ".join(f[1:4]) for f in (line.split() for line in lines[1:]))
    return lines


def _mountinfo(text: str) -> list[str]:
    out = []
    for line in text.splitlines():
        _, _, _, root, place, rest = line.split(None, 5)
        out.append(f"{root} {place} {rest}")
    return out


def _link(text: str) -> str:
    return re.sub(r"\[\d+\]", "[]", text)


def _same(what: str, text: str, everything: dict[str, str]) -> Any:
    last = what.rsplit("/", 1)[-1]
    if text.startswith("errno "):
        return text
    if last == "stat":
        return _stat(text)
    if last == "status":
        return _status(text)
    if what == "maps":
        return _maps(text)
    if what == "smaps":
        return _smaps(text)
    if what == "mountinfo":
        return _mountinfo(text)
    if what.startswith("fdinfo/"):
        return _fdinfo(text, everything["fd/" + last])
    if what.startswith("net/"):
        return _net(last, text)
    if what.startswith(("fd/", "ns/")):
        return _link(text)
    return text


def _first_process(sandbox: Sandbox) -> int:
    """The host pid of the sandbox's PID 1."""
    mark = uuid.uuid4().hex
    sandbox.files.write_text("/root/.mark", mark)
    for entry in Path("/proc").iterdir():
        try:
            is_first = (entry / "stat").read_text().split()[1] == "(init)"
            if is_first and (entry / "root/root/.mark").read_text() == mark:
                return int(entry.name)
        except OSError:
            continue
    raise AssertionError("the sandbox has no first process")


def look(sandbox: Sandbox) -> dict[str, Any]:
    """What there is to be seen, without what may differ.

    We look from outside, so the engine thinks that nobody uses the sandbox. After a call it may
    stop it to work ahead, once in the first turn (_TURNS in keeper/leisure.py) and twice in each of
    the others, and not once more.
    """
    for _ in range(5):
        found = _look(sandbox)
        if not any("tracing stop" in str(seen) for seen in found.values()):
            return found
    return _look(sandbox)


def _look(sandbox: Sandbox) -> dict[str, Any]:
    enter = ["nsenter", "-t", str(_first_process(sandbox)), "--pid", "--mount", "--net", "--cgroup"]
    told = subprocess.run([*enter, "python3", "-c", _LOOK], check=True, stdout=subprocess.PIPE)
    raw = json.loads(told.stdout)
    return {
        f"{pid} {what}": _same(what, text, found)
        for pid, found in raw.items()
        for what, text in found.items()
    }


def compare(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """One line for every difference."""
    out = []
    for key in sorted(before.keys() | after.keys()):
        one, other = before.get(key), after.get(key)
        if one != other:
            if isinstance(one, list) and isinstance(other, list):
                gone = [x for x in one if x not in other]
                new = [x for x in other if x not in one]
                out.append(f"{key}: {gone} -> {new}")
            else:
                out.append(f"{key}: {one!r} -> {other!r}")
    return out


# A tree with something of every kind. Everybody waits when it is looked at.
_PROGRAM = textwrap.dedent(
    """
    import ctypes, fcntl, mmap, os, select, signal, socket, struct, sys, threading, time
    libc = ctypes.CDLL(None)
    signal.signal(signal.SIGUSR1, lambda *a: None)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
    os.kill(os.getpid(), signal.SIGUSR2)
    keep = [open('/etc/services'), open('/root/written', 'w+')]
    keep[0].read(1000)
    pipe = os.pipe(); os.write(pipe[1], b'contents')
    event = os.eventfd(3)
    epoll = select.epoll(); epoll.register(pipe[0]); epoll.register(event, select.EPOLLET)
    inotify = libc.inotify_init1(0); libc.inotify_add_watch(inotify, b'/etc', 0x100)
    pair = socket.socketpair(); pair[0].send(b'in the queue')
    server = socket.socket(socket.AF_UNIX); server.bind('/run/server'); server.listen(3)
    client = socket.socket(socket.AF_UNIX); client.connect('/run/server')
    accepted = server.accept()
    shared = mmap.mmap(-1, 1 << 16); memory = os.memfd_create('memory'); os.write(memory, b'x')
    private = mmap.mmap(-1, 1 << 20, flags=mmap.MAP_PRIVATE); private.madvise(mmap.MADV_DONTDUMP)
    tcp = socket.create_server(('127.0.0.1', 7000)); caller = socket.create_connection(
        ('127.0.0.1', 7000)); called = tcp.accept()[0]; caller.send(b'unread')
    tcp.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    six = socket.create_server(('::1', 7001), family=socket.AF_INET6)
    udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); udp.bind(('127.0.0.1', 7002))
    udp.sendto(b'datagram', ('127.0.0.1', 7002))
    route = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0); route.bind((0, 1))
    terminal = os.openpty(); os.write(terminal[1], b'unread line\\n')
    locked = open('/root/locked', 'w'); fcntl.flock(locked, fcntl.LOCK_EX)
    ranged = open('/root/ranged', 'w+'); fcntl.lockf(ranged, fcntl.LOCK_EX, 10, 5)
    gone = open('/root/gone', 'w+'); gone.write('still here'); gone.flush(); os.unlink('/root/gone')
    file = open('/root/mapped', 'w+b'); file.truncate(8192); mapped = mmap.mmap(file.fileno(), 8192)
    timer = libc.syscall(283, 1, 0)
    libc.syscall(286, timer, 0, struct.pack('4q', 0, 0, 9999, 0), 0)
    signals = libc.syscall(289, -1, struct.pack('Q', 1 << 11), 8, 0)
    root = os.open('/usr', os.O_RDONLY | os.O_DIRECTORY); path = os.open('/etc', os.O_PATH)
    signal.setitimer(signal.ITIMER_REAL, 100000)
    worker = threading.Thread(target=lambda: time.sleep(100000), daemon=True); worker.start()
    child = os.fork()
    if not child:
        os.setpgid(0, 0); os.nice(5); os.umask(0o77); os.chdir('/tmp')
        os.sched_setaffinity(0, {0}); os.closerange(0, 3)
        shared[0] = 1
        signal.pause()
    pid_fd = os.pidfd_open(child)
    zombie = os.fork()
    if not zombie:
        os._exit(3)
    os.waitid(os.P_PID, zombie, os.WEXITED | os.WNOWAIT)
    user = os.fork()
    if not user:
        os.setsid(); os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        libc.prctl(29, 70000); os.setgroups([7, 8])
        os.setresgid(33, 33, 33); os.setresuid(33, 33, 33)
        libc.prctl(38, 1, 0, 0, 0)
        signal.pause()
    half = os.open('/proc/self/status', os.O_RDONLY); os.read(half, 10)
    time.sleep(0.2)
    print('ready', flush=True)
    for line in sys.stdin:
        print(line, end='', flush=True)
    """
)


def test_all_of_proc_is_the_same(sandbox: Sandbox) -> None:
    shell = sandbox.shell()
    shell.run("cd /usr; x=1; sleep 100000 & sleep 100000 | cat & (sleep 100000 &)")
    terminal = sandbox.spawn(["bash", "--norc"], tty=True)
    terminal.stdin.write("PS1=; sleep 100000\n")
    process = sandbox.spawn(["python3", "-c", _PROGRAM])
    assert process.stdout.readline() == "ready\n"
    look(sandbox)  # the first look warms caches that a program may see, as libc's
    before = look(sandbox)
    checkpoint = sandbox.checkpoint()
    assert compare(before, look(sandbox)) == [], "the checkpoint was noticed"
    for turn in range(3):
        shell.run("cd /; x=2; sleep 100000 &")
        process.stdin.write("change\n")
        assert process.stdout.readline() == "change\n"
        sandbox.rollback(checkpoint)
        differences = compare(before, look(sandbox))
        assert differences == [], f"rollback {turn + 1}"
    with sandbox.fork(at=checkpoint) as fork:
        assert compare(before, look(fork)) == [], "a fork"
        with fork.fork() as child:
            assert compare(before, look(child)) == [], "a fork of a fork"
