"""The doctor: finds what is there, names what is not, leaves nothing behind."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from deltabox import doctor
from deltabox.linux import features
from deltabox.linux.features import ProbeFailed


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    doctor._quick_blockers.cache_clear()
    yield
    doctor._quick_blockers.cache_clear()


_LOOPS = Path("/sys/block")
_OF_DOCTOR = re.compile("deltabox-doctor")


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""  # it has just gone


def _host() -> dict[str, object]:
    return {
        "loop": sorted(
            filter(_OF_DOCTOR.search, map(_text, _LOOPS.glob("loop*/loop/backing_file")))
        ),
        "mounts": Path("/proc/self/mountinfo").read_text(),
        "fds": sorted(os.listdir("/proc/self/fd")),
        "scratch": sorted(p.name for p in Path("/tmp").glob("deltabox-doctor-*")),
        "cgroups": sorted(str(p) for p in Path("/sys/fs/cgroup").glob("*/deltabox-doctor*")),
        "children": Path(f"/proc/self/task/{os.getpid()}/children").read_text(),
    }


def test_this_host_can_run_the_engine() -> None:
    findings = doctor.examine()
    assert doctor.sentences(findings) == []
    assert [f.name for f in findings if f.required and not f.present] == []
    assert {f.name for f in findings} == {f.name for f in doctor.FEATURES}
    assert doctor.blockers() == []


def test_every_feature_says_what_it_is_for() -> None:
    for feature in doctor.FEATURES:
        assert feature.purpose and feature.remedy and feature.without, feature.name


def test_nothing_is_left_behind() -> None:
    doctor.examine()
    before = _host()
    for _ in range(3):
        doctor.examine()
    deadline = time.monotonic() + 10  # another worker's examination is gone by then
    while _host() != before and time.monotonic() < deadline:
        time.sleep(0.1)
    assert _host() == before


def test_blockers_are_quick_and_do_not_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden() -> int:
        raise AssertionError("blockers() must not fork")

    monkeypatch.setattr(os, "fork", forbidden)
    began = time.perf_counter()
    assert doctor.blockers() == []
    assert time.perf_counter() - began < 0.05
    began = time.perf_counter()
    doctor.blockers()
    assert time.perf_counter() - began < 0.001


def test_the_wrong_architecture_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "machine", lambda: "aarch64")
    assert doctor.blockers() == ["DeltaBox runs on x86_64 only; this machine is aarch64."]


def test_a_missing_capability_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "effective_capabilities", lambda: 0xFFFF)
    (sentence,) = doctor.blockers()
    assert sentence.startswith("This process lacks CAP_SYS_PTRACE, CAP_SYS_ADMIN")


def test_a_missing_feature_is_one_sentence_and_the_others_are_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse() -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    broken = tuple(
        replace(f, probe=refuse) if f.name == "kcmp" else f for f in doctor.FEATURES if f.quick
    )
    monkeypatch.setattr(doctor, "FEATURES", broken)
    (sentence,) = doctor.blockers()
    assert "kcmp" in sentence
    assert "Function not implemented (ENOSYS)" in sentence
    assert "CONFIG_KCMP" in sentence


def test_an_optional_feature_does_not_block(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise ProbeFailed("not today")

    name = "userfaultfd with WP_ASYNC"
    broken = tuple(replace(f, probe=refuse) if f.name == name else f for f in doctor.FEATURES)
    monkeypatch.setattr(doctor, "FEATURES", broken)
    findings = {f.name: f for f in doctor.examine()}
    assert findings[name].present is False
    assert findings[name].remark == "not today"
    assert doctor.sentences(list(findings.values())) == []


def _as_nobody(program: str) -> str:
    """What a program prints when user 65534 runs it; the package is imported before that."""
    whole = f"import os; from deltabox import doctor; os.setgid(65534); os.setuid(65534); {program}"
    done = subprocess.run([sys.executable, "-c", whole], capture_output=True, text=True, check=True)
    return done.stdout


def test_not_root_is_the_only_sentence() -> None:
    sentences = _as_nobody("print(*doctor.blockers(), sep='\\n')").splitlines()
    assert sentences[0].startswith("DeltaBox must run as root, and this process has the user id")
    assert not any("kernel" in sentence for sentence in sentences)


def test_the_others_are_not_tried_without_root() -> None:
    out = _as_nobody("print({f.present for f in doctor.examine()} >= {None, False})")
    assert out.strip() == "True"


def test_a_user_namespace_is_one_sentence() -> None:
    program = (
        "from deltabox import doctor; from deltabox.linux import features as f; import os\n"
        "pid = os.getpid()\n"
        "r, w = os.pipe(); r2, w2 = os.pipe()\n"
        "helper = os.fork()\n"
        "if helper == 0:\n"
        "    os.read(r, 1)\n"
        "    open(f'/proc/{pid}/uid_map', 'w').write('0 100000 65536')\n"
        "    os.write(w2, b'x'); os._exit(0)\n"
        "f.unshare(f.CLONE_NEWUSER); os.write(w, b'x'); os.read(r2, 1); os.waitpid(helper, 0)\n"
        "os.setuid(0)\n"
        "print(*doctor.blockers(), sep='\\n')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (sentence,) = done.stdout.splitlines()
    assert sentence.startswith("This is an unprivileged container or another user namespace")
    assert "user 100000 outside" in sentence


def test_a_probe_that_hangs_or_dies_is_reported() -> None:
    with pytest.raises(ProbeFailed, match="it hung"):
        features.in_child(lambda: time.sleep(60), timeout=0.2)
    with pytest.raises(ProbeFailed, match="the probe died"):
        features.in_child(lambda: os.kill(os.getpid(), 9))
    with pytest.raises(OSError, match="Operation not permitted"):
        features.in_child(_not_permitted)


def _not_permitted() -> None:
    raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
