"""Ids, groups, capabilities, limits and the rest of a process's identity."""

from __future__ import annotations

import errno

from deltabox import Sandbox
from tests.probe import Probe, check

_FIELDS = """
def fields(*names):
    lines = open('/proc/self/status').read().splitlines()
    return [l for l in lines if l.split(':')[0] in names]
"""


def test_ids_and_groups(sandbox: Sandbox) -> None:
    check(
        sandbox,
        setup=_FIELDS
        + "os.setgroups([4, 20, 1000]); os.setresgid(*[1000] * 3); os.setresuid(*[1000] * 3)",
        report="[fields('Uid', 'Gid', 'Groups', 'CapEff', 'CapPrm', 'CapBnd'), os.nice(0)]",
        change="os.nice(3)",
    )


def test_effective_ids_and_capabilities(sandbox: Sandbox) -> None:
    check(
        sandbox,
        setup=_FIELDS + "os.setresuid(0, 33, 0);"
        "libc.prctl(24, 13, 0, 0, 0); libc.prctl(38, 1, 0, 0, 0)",
        report="fields('Uid', 'CapEff', 'CapPrm', 'CapBnd', 'NoNewPrivs')",
        change="os.setresuid(0, 0, 0)",
    )


def test_limits_nice_and_flags(sandbox: Sandbox) -> None:
    check(
        sandbox,
        setup="""
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 200))
resource.setrlimit(resource.RLIMIT_STACK, (1 << 20, 1 << 24))
os.nice(5)
libc.prctl(36, 1, 0, 0, 0)
libc.prctl(29, 123456, 0, 0, 0)
libc.prctl(1, 15, 0, 0, 0)
libc.prctl(15, b'renamed', 0, 0, 0)
""",
        report="""[resource.getrlimit(resource.RLIMIT_NOFILE),
resource.getrlimit(resource.RLIMIT_STACK),
os.nice(0), libc.prctl(30, 0, 0, 0, 0), open('/proc/self/comm').read(),
libc.prctl(3, 0, 0, 0, 0), open('/proc/self/cmdline').read(),
os.readlink('/proc/self/exe'),
open('/proc/self/environ').read(), len(open('/proc/self/auxv', 'rb').read())]""",
        change="os.nice(1)",
    )


def test_a_user_of_its_own(sandbox: Sandbox) -> None:
    check(
        sandbox,
        user="daemon",
        setup="x = 1",
        report="[os.getuid(), os.getgid(), x]",
        change="x = 2",
    )


def test_nobody_else_s_keys(sandbox: Sandbox) -> None:
    """The session keyring inside is empty and stays so: all sandboxes would share what is in it."""
    probe = Probe.start(sandbox)
    probe.do(
        """
def keyctl(*arguments):
    result = libc.syscall(250, *arguments)
    return result if result >= 0 else -ctypes.get_errno()
def add(where):
    result = libc.syscall(248, b'user', b'name', b'secret', 6, where)
    return result if result >= 0 else -ctypes.get_errno()
"""
    )
    assert probe.ask("keyctl(11, -3, None, 0)") == 0  # KEYCTL_READ: nothing in it
    assert probe.ask("add(-3)") == -errno.EACCES
    assert probe.ask("keyctl(1, 0) > 0 and add(-3) > 0")  # a session keyring of its own is free
