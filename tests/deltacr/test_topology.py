"""The tree of the issue: parents, sessions, groups, the stopped, the dead and the orphaned."""

from __future__ import annotations

import pytest

from deltabox import Sandbox, Shell
from tests.probe import Probe

_TREE = """
x=41; cd /tmp
f() { echo "function $1"; }
exec 9</etc/passwd; read -u 9 line
sleep 900 | sleep 901 &
sleep 902 & kill -STOP $!; stopped=$!
sh -c 'exit 3' & zombie=$!
(setsid sleep 903 &)
(sleep 904 &)
sleep 0.3
"""


@pytest.fixture
def tree(sandbox: Sandbox) -> tuple[Shell, Probe]:
    shell = sandbox.shell()
    probe = Probe.start(sandbox)
    probe.do(
        "threads = [threading.Thread(target=time.sleep, args=(9999,)) for _ in range(4)];"
        "[t.start() for t in threads]; counter = 0;"
        "log = open('/root/log', 'a+'); log.write('begin'); log.flush()"
    )
    shell.run(_TREE)
    return shell, probe


def _facts(sandbox: Sandbox, shell: Shell, probe: Probe) -> list[object]:
    """Everything a program inside can see of the tree."""
    inside = sandbox.files
    seen: list[object] = []
    seen += [
        (p.pid, p.ppid, p.pgid, p.sid, p.state.replace("R", "S"), p.cmdline, p.cwd)
        for p in sandbox.processes()
    ]
    script = r"""
import os, re
out = []
for pid in sorted(int(n) for n in os.listdir('/proc') if n.isdigit()):
    if pid in (1, os.getpid()): continue
    base = '/proc/%d/' % pid
    for line in open(base + 'maps'):
        where, prot, offset, device, inode, *name = line.split()
        if not where.startswith('4200'): out.append((pid, where, prot, offset, inode, name))
    for n in sorted(os.listdir(base + 'fd')):
        info = open(base + 'fdinfo/' + n).read().split()
        out.append((pid, n, re.sub(r'\d+', '', os.readlink(base + 'fd/' + n)), info[1], info[3]))
print('\n'.join(map(repr, out)))
"""
    seen += sandbox.run(["python3", "-c", script], check=True).stdout.splitlines()
    seen.append(shell.run('echo "$x $PWD $line"; f called; echo $stopped $zombie').stdout)
    seen.append(probe.ask("[counter, log.tell(), [t.is_alive() for t in threads]]"))
    assert inside.exists("/root/log")
    return seen


def test_fifty_rollbacks_among_three_checkpoints(
    sandbox: Sandbox, tree: tuple[Shell, Probe]
) -> None:
    shell, probe = tree
    states = []
    for number in range(3):
        probe.do(f"counter = {number}; log.write('more'); log.flush()")
        shell.run(f"x={number}; read -u 9 line")
        facts = _facts(sandbox, shell, probe)
        states.append((sandbox.checkpoint(f"state {number}"), facts))
    for turn in range(50):
        checkpoint, facts = states[turn % 3]
        shell.run("kill %1; x=lost; touch /tmp/$RANDOM; sleep 77 &")
        probe.do("counter += 100; log.write('lost')")
        sandbox.rollback(checkpoint)
        now = _facts(sandbox, shell, probe)
        assert [f for f in now if f not in facts] == [], f"new at turn {turn}"
        assert [f for f in facts if f not in now] == [], f"missing at turn {turn}"
        if turn % 10 == 0:
            assert shell.run("wait $zombie; echo $?").stdout == "3\n"
            assert (
                shell.run("kill -CONT $stopped; kill $stopped; wait $stopped; echo $?").stdout
                == "143\n"
            )
    assert [c.name for c, _ in states] == ["state 0", "state 1", "state 2"]


def test_new_pids_go_on_where_they_were(sandbox: Sandbox) -> None:
    shell = sandbox.shell()
    checkpoint = sandbox.checkpoint()
    first = shell.run("sh -c 'echo $$'").stdout
    sandbox.run("true")
    sandbox.rollback(checkpoint)
    assert shell.run("sh -c 'echo $$'").stdout == first


def test_forks_diverge(sandbox: Sandbox, tree: tuple[Shell, Probe]) -> None:
    shell, probe = tree
    checkpoint = sandbox.checkpoint()
    sandbox.rollback(checkpoint)
    forks = sandbox.fork_many(8, at=sandbox.checkpoint())
    for number, fork in enumerate(forks):
        copy = probe.within(fork)
        copy.do(f"counter = {number}; open('/root/mine', 'w').write('{number}')")
        fork.counterpart(shell).run(f"x=fork{number}; sleep 1{number} &")
    for number, fork in enumerate(forks):
        copy = probe.within(fork)
        assert copy.ask("[counter, open('/root/mine').read()]") == [number, str(number)]
        assert fork.counterpart(shell).run("echo $x").stdout == f"fork{number}\n"
        commands = [p.cmdline for p in fork.processes()]
        assert ["sleep", f"1{number}"] in [list(c) for c in commands]
        assert not sandbox.files.exists("/root/mine")
    grandchild = forks[3].fork()
    forks[3].close()
    assert probe.within(grandchild).ask("counter") == 3
    assert grandchild.counterpart(shell).run("echo $x").stdout == "fork3\n"
    for fork in (*forks, grandchild):
        fork.close()
    assert probe.ask("counter") == 0


@pytest.mark.parametrize(
    "script",
    [
        # a session whose leader is gone, with a group whose leader is gone too
        "setsid sh -c 'sleep 800 & (sleep 801 | sleep 802) & exit 0'; sleep 0.2",
        # a parent that called setsid after forking
        "python3 -c 'import os,time\nif os.fork():\n  os.setpgid(0,0) if 0 else None\n"
        "  os.fork() or os.setsid()\n  time.sleep(99)\ntime.sleep(99)' & sleep 0.3",
        # a child that is an orphan of an orphan's session
        "(setsid sh -c '(sleep 700 &) ; sleep 701' &); sleep 0.3",
        # groups made by job control
        "set -m; sleep 600 | sleep 601 & sleep 602 & set +m; sleep 0.2",
        # killed children not yet waited for
        "python3 -c 'import os,time,signal\np=os.fork()\nif not p: time.sleep(99)\n"
        "os.kill(p,9)\ntime.sleep(99)' & sleep 0.4",
    ],
)
def test_odd_trees(sandbox: Sandbox, script: str) -> None:
    shell = sandbox.shell()
    shell.run(script)

    def look() -> list[tuple[object, ...]]:
        return [
            (p.pid, p.ppid, p.pgid, p.sid, p.state.replace("R", "S"), p.cmdline)
            for p in sandbox.processes()
        ]

    before = look()
    checkpoint = sandbox.checkpoint()
    assert look() == before
    for _ in range(3):
        sandbox.rollback(checkpoint)
        assert look() == before


def test_generations_of_a_tree_with_a_stopped_job(
    sandbox: Sandbox, tree: tuple[Shell, Probe]
) -> None:
    """A checkpoint taken at once after a rollback, thirty times over."""
    shell, probe = tree
    facts = _facts(sandbox, shell, probe)
    for generation in range(30):
        checkpoint = sandbox.checkpoint()
        sandbox.rollback(checkpoint)
        if generation % 3 == 0:
            now = _facts(sandbox, shell, probe)
            assert [f for f in now if f not in facts] == [], f"new in generation {generation}"
            assert [f for f in facts if f not in now] == [], f"missing in {generation}"
    assert shell.run("kill -CONT $stopped; kill $stopped; wait $stopped; echo $?").stdout == "143\n"
