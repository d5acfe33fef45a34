"""Inotify instances."""

from __future__ import annotations

import pytest

from deltabox import Sandbox, UnsupportedState
from tests.probe import Probe, check

_HELP = """
import pathlib
def watch(path, mask):
    wd = libc.inotify_add_watch(fd, os.fsencode(path), mask)
    assert wd > 0, path
    return wd
def watches():
    lines = open('/proc/self/fdinfo/%d' % fd).read().splitlines()
    fields = [dict(f.split(':') for f in l.split()[1:]) for l in lines if l.startswith('inotify')]
    return sorted([f['wd'], f['mask'], f['ino']] for f in fields)
def events():
    out = []
    while select.select([fd], [], [], 0)[0]:
        data = os.read(fd, 65536)
        while data:
            wd, mask, cookie, size = struct.unpack_from('iIII', data)
            out.append([wd, mask & 0xfff, data[16:16 + size].rstrip(b'\\0').decode()])
            data = data[16 + size:]
    return out
fd = libc.inotify_init1(os.O_NONBLOCK)
"""


def test_watches(sandbox: Sandbox) -> None:
    """Of files and directories of the base, changed and new, renamed, and a symbolic link."""
    check(
        sandbox,
        setup=_HELP
        + """
os.makedirs('/root/new/sub')
pathlib.Path('/root/new/file').write_text('x')
os.symlink('file', '/root/new/link')
os.rename('/root/new/sub', '/root/new/moved')
os.rename('/usr/share/doc', '/usr/share/papers')
gone = watch('/root/new/file', 2)
libc.inotify_rm_watch(fd, gone)
for path, mask in (('/root/new', 0x3c6), ('/root/new/file', 2), ('/root/new/moved', 0xfff),
                   ('/etc', 0x3c6), ('/etc/services', 0xfff), ('/usr/share/papers', 0x100),
                   ('/root/new/link', 0x2000000 | 4), ('/root', 0x80000000 | 0x100), ('/', 0x200)):
    watch(path, mask)
events()
def probe():
    pathlib.Path('/root/new/moved/f').write_text('y')
    os.unlink('/root/new/moved/f')
    pathlib.Path('/root/new/file').write_text('z')
    return events()
""",
        report="[watches(), events(), probe()]",
        change="watch('/usr', 2)",
    )


def test_a_watcher_that_waits(sandbox: Sandbox) -> None:
    probe = Probe.start(sandbox)
    probe.do(
        _HELP
        + """
os.set_blocking(fd, True)
os.mkdir('/root/w')
watch('/root/w', 0x100)
seen = []
def read():
    while True:
        data = os.read(fd, 4096)
        seen.append(data[16:].rstrip(b'\\0').decode())
threading.Thread(target=read, daemon=True).start()
"""
    )
    checkpoint = sandbox.checkpoint()
    for turn in range(5):
        assert probe.ask("seen") == []
        sandbox.run(["touch", f"/root/w/{turn}"])
        probe.do("time.sleep(0.1)")
        assert probe.ask("seen") == [str(turn)]
        sandbox.rollback(checkpoint)
    with sandbox.fork(at=checkpoint) as child:
        child.run("touch /root/w/child")
        copy = probe.within(child)
        copy.do("time.sleep(0.1)")
        assert copy.ask("seen") == ["child"]
    assert probe.ask("seen") == []


def test_unread_events_are_refused(sandbox: Sandbox) -> None:
    probe = Probe.start(sandbox)
    probe.do(_HELP + "watch('/root', 0x100); open('/root/x', 'w')")
    with pytest.raises(UnsupportedState, match="events that its program has not read"):
        sandbox.checkpoint()
    assert probe.ask("[e[2] for e in events()]") == ["x"]
    sandbox.checkpoint()
