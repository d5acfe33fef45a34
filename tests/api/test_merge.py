"""commit(files_only=True): what a branch has changed in files, brought into its parent."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from deltabox import BranchError, MergeConflict, Sandbox
from tests.probe import Probe

_SEEN = r"""
cd /srv && find . -mindepth 1 -printf '%p %y %m %U:%G %l %s ' \
  \( -type f -exec sha1sum {} \; -o -true \) -printf '\n' | sort
"""


def seen(sandbox: Sandbox) -> str:
    return sandbox.run(_SEEN, check=True).stdout


def run(sandbox: Sandbox, *commands: str) -> None:
    for command in commands:
        sandbox.run(command, cwd="/srv", check=True)


def test_every_kind_of_change(sandbox: Sandbox) -> None:
    """The parent, which has changed nothing, looks like the branch afterwards."""
    run(
        sandbox,
        "mkdir -p d/e old empty; echo 1 > f; echo 2 > d/g; echo 3 > d/e/h; ln -s f link",
        "echo 4 > old/a; echo 5 > old/b; echo 6 > becomes-directory; mkdir becomes-file",
        "echo 7 > becomes-file/x; mkfifo pipe; echo 8 > mode; echo 9 > owner",
    )
    sh = sandbox.shell()
    sh.run("x=1; cd /srv/d")
    with sandbox.branch() as branch:
        run(
            branch,
            "echo changed > f; rm d/e/h; echo new > d/e/new; mkdir -p n/m; echo deep > n/m/file",
            "mv old moved; echo more >> moved/a; ln -sfn d link; rmdir empty",
            "rm pipe; mkfifo pipe2",
            "rm -r becomes-file; echo now > becomes-file",
            "rm becomes-directory; mkdir becomes-directory; echo now > becomes-directory/x",
            "chmod 4750 mode; chown 1000:33 owner; : > 'odd name\n'; chmod 1777 d",
            "setfattr -n user.note -v here f || python3 -c "
            "\"import os; os.setxattr('f', 'user.note', b'here')\"",
        )
        wanted = seen(branch)
        merged = branch.commit(files_only=True)
        assert seen(branch) == wanted, "the branch runs on"
    assert seen(sandbox) == wanted
    assert not branch.committed
    note = "import os; print(os.getxattr('/srv/f', 'user.note').decode())"
    assert sandbox.run(["python3", "-c", note], check=True).stdout == "here\n"
    assert {"/srv/f", "/srv/n/m/file", "/srv/old/a", "/srv/moved/a"} <= set(merged)
    assert "/srv/d/g" not in merged
    # its programs have gone on
    assert sh.run("echo $x; pwd; cat g").stdout == "1\n/srv/d\n2\n"


def test_files_of_the_base(sandbox: Sandbox) -> None:
    run(sandbox, "echo mine >> /etc/hosts")
    with sandbox.branch() as branch:
        run(branch, "echo 1.2.3.4 >> /etc/services; rm /etc/protocols; mv /etc/skel /etc/skeleton")
        assert set(branch.commit(files_only=True)) >= {"/etc/services", "/etc/protocols"}
    run(sandbox, "tail -1 /etc/services | grep -q 1.2.3.4; test ! -e /etc/protocols")
    run(sandbox, "test -e /etc/skeleton/.bashrc; test ! -e /etc/skel; grep -q mine /etc/hosts")
    # and it is what a checkpoint has
    checkpoint = sandbox.checkpoint()
    with sandbox.fork(at=checkpoint) as fork:
        run(fork, "test ! -e /etc/protocols; test -e /etc/skeleton/.bashrc")


def test_siblings_that_touch_other_files(sandbox: Sandbox) -> None:
    """Three ways: each brings its own, and nobody's is lost."""
    run(sandbox, "mkdir d; echo base > d/a; echo base > d/b; echo base > d/c")
    branches = [sandbox.branch(name) for name in "abc"]
    for branch in branches:
        run(branch, f"echo {branch.name} > d/{branch.name}; echo same > d/same")
    run(sandbox, "echo parent > d/parent")
    for branch in branches:
        with branch:
            wanted = [f"/srv/d/{branch.name}"] + (["/srv/d/same"] if branch.name == "a" else [])
            assert branch.commit(files_only=True) == wanted
    found = sandbox.run("cd /srv/d; cat a b c parent same", check=True).stdout
    assert found == "a\nb\nc\nparent\nsame\n"


@pytest.mark.parametrize(
    ("theirs", "mine", "paths"),
    [
        ("echo theirs > f", "echo mine > f", ["/srv/f"]),
        ("rm f", "echo mine > f", ["/srv/f"]),
        ("echo theirs > f", "rm f", ["/srv/f"]),
        ("echo theirs > new", "mkdir new", ["/srv/new"]),
        ("chmod 600 f", "chmod 640 f", ["/srv/f"]),
        ("echo theirs > d/new", "rm -r d", ["/srv/d/new"]),
        ("rm -r d", "echo mine > d/new", ["/srv/d/new"]),
        ("echo theirs > d/g", "mv d moved", ["/srv/d/g"]),
        ("rm -r d; echo theirs > d", "echo mine > d/g", ["/srv/d/g"]),
    ],
)
def test_conflicts(sandbox: Sandbox, theirs: str, mine: str, paths: Sequence[str]) -> None:
    run(sandbox, "echo base > f; mkdir d; echo base > d/g; echo base > untouched")
    branch = sandbox.branch()
    run(sandbox, theirs)
    run(branch, mine, "echo more > other")
    before = seen(sandbox)
    with pytest.raises(MergeConflict) as caught:
        branch.commit(files_only=True)
    assert caught.value.paths == paths
    assert seen(sandbox) == before, "nothing is half-merged"
    # what is not in conflict can be had alone
    assert branch.commit(files_only=True, paths=["/srv/other"]) == ["/srv/other"]
    assert sandbox.files.read_text("/srv/other") == "more\n"
    branch.abort()


@pytest.mark.parametrize(
    "change", ["echo same > f", "rm f", "mkdir n; echo x > n/x", "chmod 600 f", "rm -r d"]
)
def test_the_same_change_is_no_conflict(sandbox: Sandbox, change: str) -> None:
    run(sandbox, "echo base > f; mkdir d; echo base > d/g")
    with sandbox.branch() as branch:
        run(branch, change, "echo mine > mine")
        run(sandbox, change)
        assert branch.commit(files_only=True) == ["/srv/mine"]


def test_paths_take_new_directories_along(sandbox: Sandbox) -> None:
    with sandbox.branch() as branch:
        run(branch, "mkdir -p a/b/c; chmod 700 a; echo 1 > a/b/c/file; echo 2 > a/b/other")
        paths = branch.commit(files_only=True, paths=["srv/a/b/c/"])
    assert paths == ["/srv/a", "/srv/a/b", "/srv/a/b/c", "/srv/a/b/c/file"]
    assert sandbox.run("stat -c %a /srv/a; ls /srv/a/b").stdout == "700\nc\n"


def test_the_parent_may_be_another_state_by_now(sandbox: Sandbox) -> None:
    start = sandbox.checkpoint()
    first, second = sandbox.branch(), sandbox.branch()
    run(first, "echo first > first")
    run(second, "echo second > second")
    sandbox.rollback(start)
    third = sandbox.branch()
    run(third, "echo third > third")
    third.commit()
    for branch in (first, second):
        with branch:
            branch.commit(files_only=True)
    assert sandbox.run("cat /srv/*", check=True).stdout == "first\nsecond\nthird\n"


def test_programs_see_all_of_it_at_once(sandbox: Sandbox) -> None:
    """A program that looks again and again never finds some of the files without the others."""
    probe = Probe.start(sandbox)
    probe.do(
        """
import collections
seen, stop = collections.Counter(), False
def look():
    while not stop:
        seen[sum(os.path.exists(f'/srv/{n}') for n in range(200))] += 1
watch = threading.Thread(target=look); watch.start()
"""
    )
    with sandbox.branch() as branch:
        branch.run("touch $(seq 0 199)", cwd="/srv", check=True)
        branch.commit(files_only=True)
    probe.do("time.sleep(0.3); stop = True; watch.join()")
    # the one look that it fell into may have found any number
    counts = dict(probe.ask("sorted(seen.items())"))
    between = {n: count for n, count in counts.items() if n not in (0, 200)}
    assert sum(between.values()) <= 1 and counts[0] and counts[200], counts


def test_an_error_takes_back_what_was_done(sandbox: Sandbox) -> None:
    """The parent's disk has no room for the last file; the first ones have been written by then."""
    with Sandbox.create(disk_limit="160M") as small:
        run(small, "echo base > a; mkdir d; echo base > d/b; ln -s a link; echo base > mode")
        small.run("head -c 40M /dev/urandom > /srv/filler", check=True)
        branch = small.branch()
        run(
            branch,
            "echo mine > a; rm -r d; rm link; chmod 600 mode; mkdir n; echo x > n/x",
            "head -c 45M /dev/urandom > z",
        )
        run(small, "head -c 20M /dev/urandom > more")
        before = seen(small)
        with pytest.raises((BranchError, OSError)):
            branch.commit(files_only=True)
        assert seen(small) == before
        branch.abort()


def test_wrong_use(sandbox: Sandbox) -> None:
    with sandbox.branch() as branch:
        with pytest.raises(TypeError, match="list"):
            branch.commit(files_only=True, paths="/srv")
        with pytest.raises(ValueError, match="files_only"):
            branch.commit(paths=["/srv"])  # type: ignore[call-overload]
        assert branch.commit(files_only=True) == []
