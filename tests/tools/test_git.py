"""git: a clone and a collection of garbage under way, a rebase stopped half-way, its locks held."""

from __future__ import annotations

import random
import time

import pytest

from deltabox import Process, Sandbox

from . import midway

REPOSITORY = "/root/origin"
_NAME = {
    "GIT_AUTHOR_NAME": "A",
    "GIT_AUTHOR_EMAIL": "a@example.org",
    "GIT_AUTHOR_DATE": "1700000000 +0000",
    "GIT_COMMITTER_NAME": "A",
    "GIT_COMMITTER_EMAIL": "a@example.org",
    "GIT_COMMITTER_DATE": "1700000000 +0000",
}


def _history(commits: int, files: int) -> bytes:
    """A stream for git fast-import: text that grows, in `files` files for each commit."""
    chance = random.Random(commits)
    words = [f"{chance.getrandbits(60):x}" for _ in range(2000)]
    texts: dict[int, str] = {}
    out: list[bytes] = []
    for commit in range(commits):
        out.append(b"commit refs/heads/main\ncommitter A <a@example.org> ")
        out.append(b"%d +0000\ndata <<X\ncommit %d\nX\n" % (1_600_000_000 + commit, commit))
        for _ in range(files):
            which = chance.randrange(400)
            texts[which] = texts.get(which, "") + "\n".join(chance.choices(words, k=40)) + "\n"
            data = texts[which].encode()
            out.append(b"M 100644 inline part%d/file%d\n" % (which % 20, which))
            out.append(b"data %d\n%s\n" % (len(data), data))
    return b"".join(out)


@pytest.fixture
def repository(sandbox: Sandbox) -> str:
    """A repository with some thousand objects, in one pack."""
    sandbox.run(["git", "init", "-q", "-b", "main", REPOSITORY], check=True)
    stream = _history(commits=60, files=20)
    git = ["git", "-C", REPOSITORY]
    sandbox.run([*git, "fast-import", "--quiet"], input=stream, check=True)
    sandbox.run([*git, "reset", "-q", "--hard"], check=True)
    return sandbox.run([*git, "rev-parse", "main"], check=True).stdout.strip()


def test_clone(sandbox: Sandbox, repository: str) -> None:
    midway.check(
        sandbox,
        ["git", "clone", "--quiet", f"file://{REPOSITORY}", "copy"],
        "cd copy && git rev-parse HEAD && git status --porcelain && git fsck --strict 2>&1 &&"
        " git count-objects && ls -A . .git .git/objects | md5sum",
        cwd="/root",
        expected=repository,
    )


def test_gc(sandbox: Sandbox, repository: str) -> None:
    loose = (
        "mv .git/objects/pack/pack-* .. && cat ../*.pack | git unpack-objects -q && rm ../pack-*"
    )
    sandbox.run(["sh", "-c", loose], cwd=REPOSITORY, check=True)
    midway.check(
        sandbox,
        ["git", "gc", "--quiet"],
        "git rev-parse HEAD && git fsck --strict 2>&1 && git count-objects -v | grep -v size &&"
        " git status --porcelain && find .git | grep 'lock\\|tmp\\|gc.pid' || true",
        cwd=REPOSITORY,
        expected=repository,
    )


def _until(sandbox: Sandbox, path: str) -> None:
    deadline = time.monotonic() + midway.PROMPT
    while not sandbox.files.exists(path):
        assert time.monotonic() < deadline, f"{path} did not come to be"
        time.sleep(0.005)


def test_rebase_stopped_half_way(sandbox: Sandbox) -> None:
    """The second of three commits conflicts; its editor waits, with the branch half rebased."""
    script = r"""
set -e
git init -q -b main /root/small; cd /root/small
for n in 0 1 2 3; do
  seq $((n * 10)) $((n * 10 + 9)) >file$n; git add .; git commit -qm "number $n"
done
git checkout -q -b side HEAD~3
echo other >file2; git add .; git commit -qm other
git checkout -q main
! git rebase side >/dev/null 2>&1
echo both >file2; git add file2
printf '#!/bin/sh\ntouch /root/editing\nread line </root/answer\necho "$line" >"$1"\n' >/root/editor
chmod +x /root/editor; mkfifo /root/answer
"""
    sandbox.run(["bash", "-c", script], env=_NAME, check=True)
    rebase = sandbox.spawn(
        ["git", "rebase", "--continue"],
        cwd="/root/small",
        env=_NAME | {"GIT_EDITOR": "/root/editor"},
    )
    _until(sandbox, "/root/editing")
    checkpoint = sandbox.checkpoint()

    def check(box: Sandbox, process: Process, message: str) -> tuple[int, str]:
        assert process.exit_code is None
        status = box.run(["git", "status"], cwd="/root/small", check=True).stdout
        assert "rebase in progress; onto" in status, status
        box.run(["sh", "-c", f"echo {message} >/root/answer"], check=True, timeout=20)
        code = process.wait(timeout=midway.PROMPT)
        look = "git log --format='%H %s'; git status; cat file2; ls .git"
        return code, box.run(["sh", "-c", look], cwd="/root/small", check=True).stdout

    first = check(sandbox, rebase, "resolved")
    assert first[0] == 0 and " number 3\n" in first[1] and " resolved\n" in first[1], first
    assert "nothing to commit, working tree clean" in first[1]
    for turn in range(10):
        sandbox.rollback(checkpoint)
        if turn % 2:
            assert " another\n" in check(sandbox, rebase, "another")[1]
            sandbox.rollback(checkpoint)
        assert check(sandbox, rebase, "resolved") == first
    for copy in sandbox.fork_many(4, at=checkpoint):
        with copy:
            assert check(copy, copy.counterpart(rebase), "resolved") == first


def test_locks(sandbox: Sandbox) -> None:
    """A commit of one file, whose editor is open: two lock files, and nobody else may write."""
    script = r"""
set -e
git init -q -b main /root/small; cd /root/small
echo 1 >one; echo 1 >two; git add .; git commit -qm first; echo 2 >one; echo 2 >two
printf '#!/bin/sh\ntouch /root/editing\nread line </root/answer\necho "$line" >"$1"\n' >/root/editor
chmod +x /root/editor; mkfifo /root/answer
"""
    sandbox.run(["bash", "-c", script], env=_NAME, check=True)
    commit = sandbox.spawn(
        ["git", "commit", "one"], cwd="/root/small", env=_NAME | {"GIT_EDITOR": "/root/editor"}
    )
    _until(sandbox, "/root/editing")
    checkpoint = sandbox.checkpoint()
    git = ["git", "-C", "/root/small"]

    def check(box: Sandbox, process: Process) -> str:
        refused = box.run([*git, "add", "two"])
        assert refused.exit_code == 128 and "index.lock': File exists" in refused.stderr
        box.run(["sh", "-c", "echo second >/root/answer"], check=True, timeout=20)
        assert process.wait(timeout=midway.PROMPT) == 0, process.stderr.read_available()
        box.run([*git, "add", "two"], check=True)
        return box.run([*git, "log", "--format=%H %s", "--stat"], check=True).stdout

    first = check(sandbox, commit)
    assert " second\n" in first
    for _ in range(10):
        sandbox.rollback(checkpoint)
        assert check(sandbox, commit) == first
    for copy in sandbox.fork_many(4, at=checkpoint):
        with copy:
            assert check(copy, copy.counterpart(commit)) == first
