"""diff() and patch() against the plain truth: two walks of the mounted roots."""

from __future__ import annotations

import os
import random
import shutil
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deltabox.deltafs.diff import Change, count_changes, diff, patch
from deltabox.deltafs.layers import Snapshot, State
from deltabox.linux.fsuid import file_owner
from tests.deltafs.conftest import OWNER, Box, Boxes

Tree = dict[str, tuple[object, ...]]


def walk(top: Path) -> Tree:
    """Everything a program can see, by path."""
    found: Tree = {}
    root = str(top)
    for directory, below, files in os.walk(root):
        for name in below + files:
            path = os.path.join(directory, name)
            status = os.lstat(path)
            kind = stat.S_IFMT(status.st_mode)
            data: object = None
            if kind == stat.S_IFREG:
                data = Path(path).read_bytes()
            elif kind == stat.S_IFLNK:
                data = os.readlink(path)
            xattrs = [
                (key, os.getxattr(path, key, follow_symlinks=False))
                for key in sorted(os.listxattr(path, follow_symlinks=False))
            ]
            found[path[len(root):]] = (
                kind, data, status.st_mode, status.st_uid, status.st_gid, tuple(xattrs),
            )  # fmt: skip
    return found


def moved(path: str, renames: dict[str, str]) -> str:
    """Where a path of the old tree is in the new one."""
    if path in renames:
        return renames[path]
    above, name = os.path.split(path)
    return path if above == "/" else os.path.join(moved(above, renames), name)


def check(changes: list[Change], old: Tree, new: Tree) -> None:
    """Applying the changes to the old tree gives the new one, and none is idle."""
    renames = {c.old_path: c.path for c in changes if c.kind == "renamed" and c.old_path}
    deleted = {c.path for c in changes if c.kind == "deleted"}
    added = {c.path for c in changes if c.kind == "added"}
    assert deleted <= old.keys()
    assert not deleted & renames.keys()
    predicted = {moved(path, renames): path for path in old if path not in deleted}
    assert not added & predicted.keys()
    assert predicted.keys() | added == new.keys()
    for path, before in predicted.items():
        kinds = {c.kind for c in changes if c.path == path} - {"renamed"}
        kinds -= {"deleted"} if path in deleted else set()
        one, other = old[before], new[path]
        if one[:2] != other[:2]:
            assert kinds == {"modified"}, (path, kinds)
        elif one != other:
            assert kinds == {"mode"}, (path, kinds)
        else:
            assert kinds == set(), (path, kinds)
    assert changes == sorted(changes, key=lambda c: (c.path, c.kind))


def kinds(changes: list[Change]) -> list[tuple[str, ...]]:
    return [(c.kind, c.path, c.old_path) if c.old_path else (c.kind, c.path) for c in changes]


def test_each_kind(boxes: Boxes, as_root: None) -> None:
    box = boxes.first()
    before = boxes.snapshot(box)
    old = walk(box.path)
    assert diff(before, box.layer, boxes.base) == []
    (box.path / "new").write_text("x")
    (box.path / "usr" / "lib" / "text").write_text("one\n2\nthree\n")
    (box.path / "link").unlink()
    (box.path / "etc" / "passwd").chmod(0o600)
    (box.path / "usr" / "lib" / "big").rename(box.path / "big2")
    changes = diff(before, box.layer, boxes.base)
    assert kinds(changes) == [
        ("renamed", "/big2", "/usr/lib/big"),
        ("mode", "/etc/passwd"),
        ("deleted", "/link"),
        ("added", "/new"),
        ("modified", "/usr/lib/text"),
    ]
    check(changes, old, walk(box.path))
    back = diff(box.layer, before, boxes.base)
    check(back, walk(box.path), old)
    assert ("renamed", "/usr/lib/big", "/big2") in kinds(back)
    assert count_changes(before, box.layer, boxes.base) == 5


def test_what_is_only_touched_is_no_change(boxes: Boxes, as_root: None) -> None:
    box = boxes.first()
    before = boxes.snapshot(box)
    os.utime(box.path / "usr" / "lib" / "text")
    (box.path / "etc" / "passwd").write_bytes((box.path / "etc" / "passwd").read_bytes())
    (box.path / "usr" / "lib" / "big").rename(box.path / "there")
    (box.path / "there").rename(box.path / "usr" / "lib" / "big")
    (box.path / "t").write_text("")
    (box.path / "t").unlink()
    assert diff(before, box.layer, boxes.base) == []


def test_a_renamed_directory_is_one_change(boxes: Boxes, as_root: None) -> None:
    box = boxes.first()
    before = boxes.snapshot(box)
    old = walk(box.path)
    (box.path / "new").mkdir()
    (box.path / "usr" / "lib").rename(box.path / "new" / "lib")
    (box.path / "new" / "lib" / "text").write_text("x")
    (box.path / "new" / "lib" / "big").rename(box.path / "big")
    (box.path / "usr").rmdir()
    changes = diff(before, box.layer, boxes.base)
    check(changes, old, walk(box.path))
    assert kinds(changes) == [
        ("renamed", "/big", "/usr/lib/big"),
        ("added", "/new"),
        ("renamed", "/new/lib", "/usr/lib"),
        ("modified", "/new/lib/text"),
        ("deleted", "/usr"),
    ]


def test_siblings(boxes: Boxes, as_root: None) -> None:
    """Forks hand out the same inode numbers at the same moment: neither equal nor renamed."""
    box = boxes.first()
    (box.path / "common").write_text("common")
    parting = boxes.snapshot(box)
    one, other = boxes.of(parting), boxes.of(parting)
    (one.path / "a").write_text("1")
    (other.path / "a").write_text("2")
    (one.path / "b").write_text("same")
    (other.path / "c").write_text("same")
    (one.path / "common").rename(one.path / "common1")
    (other.path / "common").rename(other.path / "common2")
    changes = diff(one.layer, other.layer, boxes.base)
    check(changes, walk(one.path), walk(other.path))
    assert kinds(changes) == [
        ("modified", "/a"),
        ("deleted", "/b"),
        ("added", "/c"),
        ("renamed", "/common2", "/common1"),
    ]


def test_attributes_and_special_files(boxes: Boxes, as_root: None) -> None:
    box = boxes.first()
    os.mkfifo(box.path / "fifo")
    os.setxattr(box.path / "etc" / "passwd", "user.a", b"1")
    (box.path / "swap").write_text("file")
    before = boxes.snapshot(box)
    old = walk(box.path)
    os.setxattr(box.path / "etc" / "passwd", "user.a", b"2")
    os.chown(box.path / "fifo", OWNER + 5, OWNER + 5)
    (box.path / "swap").unlink()
    (box.path / "swap").mkdir()
    (box.path / "swap" / "in").write_text("")
    (box.path / "etc").rename(box.path / "e")
    (box.path / "etc").write_text("now a file")
    changes = diff(before, box.layer, boxes.base)
    check(changes, old, walk(box.path))


NAMES = ("a", "b", "c")


class Monkey:
    """Does random things to a tree, as a program would."""

    def __init__(self, top: Path, choices: random.Random) -> None:
        self.top = top
        self.choose = choices

    def path(self) -> Path:
        depth = self.choose.choice((1, 1, 2, 2, 3))
        return self.top.joinpath(*(self.choose.choice(NAMES) for _ in range(depth)))

    def act(self) -> None:
        actions = (
            self.write, self.write, self.append, self.unlink, self.mkdir, self.rmtree, self.rename,
            self.rename, self.rename, self.chmod, self.symlink, self.link, self.attribute,
            self.touch,
        )  # fmt: skip
        try:
            self.choose.choice(actions)()
        except OSError:
            pass

    def write(self) -> None:
        self.path().write_bytes(b"x" * self.choose.choice((0, 1, 1, 5000)))

    def append(self) -> None:
        with self.path().open("ab") as file:
            file.write(b"y")

    def unlink(self) -> None:
        self.path().unlink()

    def mkdir(self) -> None:
        self.path().mkdir()

    def rmtree(self) -> None:
        remove_tree(self.path())

    def rename(self) -> None:
        self.path().rename(self.path())

    def chmod(self) -> None:
        path = self.path()
        if not path.is_symlink():
            path.chmod(self.choose.choice((0o700, 0o755)))

    def symlink(self) -> None:
        self.path().symlink_to(self.choose.choice(NAMES))

    def link(self) -> None:
        os.link(self.path(), self.path(), follow_symlinks=False)

    def attribute(self) -> None:
        os.setxattr(self.path(), "user.x", self.choose.choice((b"1", b"2")), follow_symlinks=False)

    def touch(self) -> None:
        os.utime(self.path(), follow_symlinks=False)


def remove_tree(path: Path) -> None:
    for directory, below, files in os.walk(path, topdown=False):
        for name in files:
            Path(directory, name).unlink()
        for name in below:
            inner = Path(directory, name)
            inner.unlink() if inner.is_symlink() else inner.rmdir()
    path.rmdir()


def wild_base(top: Path) -> Path:
    for path in ("a/a/a", "a/b", "b/a", "b/c"):
        (top / path).mkdir(parents=True)
    for path in ("a/a/a/b", "a/a/b", "a/c", "b/b", "b/a/a", "c"):
        (top / path).write_text(path)
    (top / "b/c/a").symlink_to("nowhere")
    return top


UNHURRIED = settings(
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
SEEDS = st.integers(0, 2**32)


@settings(UNHURRIED, max_examples=80)
@given(seed=SEEDS, steps=st.lists(st.integers(0, 12), min_size=2, max_size=4))
def test_diff_is_what_two_walks_say(
    boxes_over: Callable[[Path], Boxes], tmp_path: Path, seed: int, steps: list[int]
) -> None:
    compare_histories(boxes_over, tmp_path, seed, steps)


@pytest.mark.full
@pytest.mark.timeout(900)
@settings(UNHURRIED, max_examples=1500)
@given(seed=SEEDS, steps=st.lists(st.integers(0, 60), min_size=2, max_size=5))
def test_diff_of_long_histories(
    boxes_over: Callable[[Path], Boxes], tmp_path: Path, seed: int, steps: list[int]
) -> None:
    compare_histories(boxes_over, tmp_path, seed, steps)


def compare_histories(
    boxes_over: Callable[[Path], Boxes], tmp_path: Path, seed: int, steps: list[int]
) -> None:
    """Random histories with forks; every pair of states, in both directions."""
    base = tmp_path / "wild"
    if not base.exists():
        wild_base(base)
    boxes = boxes_over(base)
    choices = random.Random(seed)
    box: Box = boxes.first()
    states: list[tuple[State, Tree]] = []
    snapshots: list[Snapshot] = []
    for count in steps:
        with file_owner(OWNER):
            monkey = Monkey(box.path, choices)
            for _ in range(count):
                monkey.act()
        snapshot = boxes.snapshot(box)
        snapshots.append(snapshot)
        states.append((snapshot, walk(box.path)))
        if choices.random() < 0.4:
            box = boxes.of(choices.choice(snapshots))
    states.append((box.layer, walk(box.path)))
    for old, old_tree in states:
        for new, new_tree in states:
            changes = diff(old, new, base)
            check(changes, old_tree, new_tree)
            assert count_changes(old, new, base) >= len({c.path for c in changes})
    boxes.undo.close()


def apply(text: str, tree: Path) -> None:
    subprocess.run(["git", "apply", "-p2"], cwd=tree, input=text.encode(), check=True)


def test_patch_applies(boxes: Boxes, as_root: None, tmp_path: Path) -> None:
    box = boxes.first()
    (box.path / "src").mkdir()
    (box.path / "src" / "keep").write_text("".join(f"{n}\n" for n in range(40)))
    (box.path / "src" / "no newline").write_text("last")
    (box.path / "src" / "gone").write_text("gone\n")
    (box.path / "src" / "séparé\x85\x0c").write_text("a\x0cb\r\nc\n")
    before = boxes.snapshot(box)
    copy = tmp_path / "copy"
    with file_owner(0):
        shutil.copytree(box.path / "src", copy)
    (box.path / "src" / "keep").write_text("".join(f"{n}\n" for n in range(40) if n != 20) + "end")
    (box.path / "src" / "no newline").write_text("last\nmore")
    (box.path / "src" / "gone").unlink()
    (box.path / "src" / "new").write_text("new\n")
    (box.path / "src" / "séparé\x85\x0c").write_text("a\x0cB\r\nc\n")
    (box.path / "elsewhere").write_text("not under src\n")
    text = patch(before, box.layer, boxes.base, under="/src")
    assert "elsewhere" not in text
    with file_owner(0):
        apply(text, copy)
    for file in copy.iterdir():
        assert file.read_bytes() == (box.path / "src" / file.name).read_bytes()
    assert {f.name for f in copy.iterdir()} == {f.name for f in (box.path / "src").iterdir()}


def test_patch_names_binary_files(boxes: Boxes, as_root: None) -> None:
    box = boxes.first()
    before = boxes.snapshot(box)
    (box.path / "binary").write_bytes(b"\0\1")
    (box.path / "usr" / "lib" / "big").write_bytes(b"\0")
    assert patch(before, box.layer, boxes.base) == (
        "diff --git a/binary b/binary\nnew file mode 100644\n"
        "Binary files /dev/null and b/binary differ\n"
        "diff --git a/usr/lib/big b/usr/lib/big\n"
        "Binary files a/usr/lib/big and b/usr/lib/big differ\n"
    )


def test_patch_tells_renames_and_modes(boxes: Boxes, as_root: None) -> None:
    box = boxes.first()
    before = boxes.snapshot(box)
    (box.path / "usr" / "lib" / "text").rename(box.path / "text")
    (box.path / "etc" / "passwd").chmod(0o755)
    (box.path / "link").unlink()
    (box.path / "link").symlink_to("text")
    text = patch(before, box.layer, boxes.base)
    assert "rename from usr/lib/text\nrename to text\n" in text
    assert "old mode 100644\nnew mode 100755\n" in text
    assert "-usr/lib/text\n\\ No newline at end of file\n+text\n" in text
    assert patch(before, before, boxes.base) == ""


def test_patch_of_a_file_that_became_a_link(boxes: Boxes, as_root: None) -> None:
    box = boxes.first()
    before = boxes.snapshot(box)
    (box.path / "usr" / "lib" / "text").unlink()
    (box.path / "usr" / "lib" / "text").symlink_to("big")
    text = patch(before, box.layer, boxes.base)
    assert "deleted file mode 100644" in text
    assert "new file mode 120000" in text


@pytest.mark.parametrize("name", ['quo"te', "back\\slash", "new\nline", "sché"])
def test_odd_names_are_quoted(boxes: Boxes, as_root: None, name: str) -> None:
    box = boxes.first()
    before = boxes.snapshot(box)
    (box.path / name).write_text("x\n")
    assert [change.path for change in diff(before, box.layer, boxes.base)] == [f"/{name}"]
    assert '+++ "b/' in patch(before, box.layer, boxes.base)
