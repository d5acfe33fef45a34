"""Directories that all sandboxes of a tree see at once, and that belong to no state."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from deltabox import NoSpace, Sandbox, UnsupportedState
from tests.probe import Probe

HERE = "/work/shared"


@pytest.fixture
def sandbox() -> Iterator[Sandbox]:
    with Sandbox.create(visibility=[HERE, "/srv"]) as sandbox:
        yield sandbox


def test_all_see_it_at_once(sandbox: Sandbox) -> None:
    assert sandbox.run(f"ls -A {HERE} /srv").stdout == f"/srv:\n\n{HERE}:\n"
    one = sandbox.fork()
    other = one.fork()
    everybody = [sandbox, one, other]
    for number, box in enumerate(everybody):
        box.run(f"echo {number} > {HERE}/{number}; echo {number} > /work/own", check=True)
        for reader in everybody:
            assert reader.run(f"cat {HERE}/{number}").stdout == f"{number}\n"
            assert reader.files.list(HERE) == [str(n) for n in range(number + 1)]
    assert [box.files.read_text("/work/own") for box in everybody] == ["0\n", "1\n", "2\n"]
    sandbox.files.remove(f"{HERE}/1")
    assert not other.files.exists(f"{HERE}/1")
    one.close()
    other.close()


def test_it_is_no_part_of_any_state(sandbox: Sandbox) -> None:
    shell = sandbox.shell(cwd=HERE)
    begin = sandbox.checkpoint()
    for number in range(20):
        assert shell.run(f"echo {number} >> log; echo x > /work/own; wc -l < log").stdout == (
            f"{number + 1}\n"
        )
        sandbox.rollback(begin)
        assert not sandbox.files.exists("/work/own")
    assert sandbox.diff(begin) == []
    with sandbox.branch() as branch:
        branch.run(f"echo branch > {HERE}/branch; echo y > /work/own", check=True)
        assert [change.path for change in branch.diff()] == ["/work/own"]
        assert sandbox.files.read_text(f"{HERE}/branch") == "branch\n"
    assert shell.run("cat branch; wc -l < log").stdout == "branch\n20\n"
    sandbox.rollback(sandbox.checkpoint())
    assert shell.run("pwd; cat branch").stdout == f"{HERE}\nbranch\n"


def test_locks_and_inotify_reach_across(sandbox: Sandbox) -> None:
    probe = Probe.start(sandbox)
    with sandbox.fork() as fork:
        other = probe.within(fork)
        lock = f"import fcntl; f = open('{HERE}/lock', 'w'); "
        probe.do(f"{lock}fcntl.flock(f, fcntl.LOCK_EX)")
        with pytest.raises(AssertionError, match="BlockingIOError"):
            other.do(f"{lock}fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)")
        probe.do("f.close()")
        other.do(f"{lock}fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)")
        waits = sandbox.spawn(["tail", "-F", "-n", "+1", f"{HERE}/log"])
        fork.run(f"echo told > {HERE}/log", check=True)
        assert waits.stdout.readline(timeout=20) == "told\n"


OPEN = {
    "file": f"f = open('{HERE}/a', 'w')",
    "directory": f"f = os.open('{HERE}', os.O_RDONLY)",
    "path": f"f = os.open('{HERE}', os.O_PATH)",
    "deleted": f"f = open('{HERE}/a', 'w'); os.unlink('{HERE}/a')",
    "fifo": f"os.mkfifo('{HERE}/f'); f = os.open('{HERE}/f', os.O_RDWR)",
    "mapping": f"open('{HERE}/a', 'w').write('x'); f = mmap.mmap(os.open('{HERE}/a', 2), 1)",
    "socket": f"f = socket.socket(socket.AF_UNIX); f.bind('{HERE}/s')",
    "relative": f"os.chdir('{HERE}'); f = socket.socket(socket.AF_UNIX); f.bind('s')",
}


@pytest.mark.parametrize("what", OPEN)
def test_what_is_open_there_is_refused_by_name(sandbox: Sandbox, what: str) -> None:
    probe = Probe.start(sandbox)
    before = sandbox.checkpoint()
    probe.do(f"import mmap, os, socket; {OPEN[what]}")
    with pytest.raises(UnsupportedState, match=rf"{HERE}.*no part of the state") as caught:
        sandbox.checkpoint()
    assert caught.value.process == "python3"
    with pytest.raises(UnsupportedState):
        sandbox.fork()
    if what == "mapping":
        probe.do("os.close(os.dup(0))")  # it runs on
    else:
        probe.do("os.close(f) if type(f) is int else f.close(); os.chdir('/')")
        after = sandbox.checkpoint()
        sandbox.rollback(after)
        assert probe.ask("os.getcwd()") == "/"
    sandbox.rollback(before)
    assert sandbox.files.exists(HERE)


def test_one_that_was_moved_is_refused_by_name(sandbox: Sandbox) -> None:
    before = sandbox.checkpoint()
    sandbox.run("mv /work /elsewhere", check=True)
    with pytest.raises(UnsupportedState, match=f"{HERE} has been moved"):
        sandbox.checkpoint()
    sandbox.run("mv /elsewhere /work", check=True)
    sandbox.checkpoint()
    sandbox.rollback(before)
    assert sandbox.run(f"touch {HERE}/a && ls {HERE}").stdout == "a\n"


def test_it_counts_towards_the_limit() -> None:
    with Sandbox.create(visibility=[HERE], disk_limit="160M") as sandbox:
        filled = sandbox.run(f"head -c 300M /dev/zero > {HERE}/a")
        assert filled.exit_code and "No space left" in filled.stderr
        sandbox.files.remove(f"{HERE}/a")
        try:
            sandbox.checkpoint()
        except NoSpace:
            pass  # nothing of it has been given back yet


def test_owner_and_mode_are_those_of_the_base(tmp_path_factory: pytest.TempPathFactory) -> None:
    with Sandbox.create(visibility=["/var/tmp", "/made/here"]) as sandbox:
        said = sandbox.run("stat -c '%a %u' /var/tmp /made/here; id -u", check=True).stdout
        assert said == "1777 0\n755 0\n0\n"
        sandbox.run("touch /var/tmp/mine", user="nobody", check=True)
        with sandbox.fork() as fork:
            assert fork.run("stat -c %U /var/tmp/mine").stdout == "nobody\n"


@pytest.mark.parametrize(
    ("visibility", "message"),
    [
        ("shared", "list of directories"),
        (["work"], "absolute"),
        (["/"], "cannot be shared"),
        (["/proc/x"], "cannot be shared"),
        (["/a", "/a/b"], "lie in each other"),
        (["/a", "/a/"], "lie in each other"),
        (["/bin"], "leads to /usr/bin"),
    ],
)
def test_wrong_use(visibility: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sandbox.create(visibility=visibility)


def test_isolated_is_the_default() -> None:
    with Sandbox.create() as sandbox, sandbox.fork() as fork:
        fork.files.write_text("/srv/a", "")
        assert not sandbox.files.exists("/srv/a")
