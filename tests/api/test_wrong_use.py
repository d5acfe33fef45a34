"""Wrong use: one clear sentence each, and nothing has changed."""

from __future__ import annotations

import copy
import os
import pickle
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deltabox import (
    DeltaBoxError,
    HostUnsupported,
    NoSpace,
    Sandbox,
    SandboxClosed,
    UnsupportedState,
)


def test_base(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'/no/such/base' is not a directory"):
        Sandbox.create(base="/no/such/base")
    with pytest.raises(ValueError, match="is not a directory"):
        Sandbox.create(base="/etc/passwd")


def test_another_base(tmp_path: Path) -> None:
    """Any directory can be a root; a static program needs nothing else."""
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc" / "passwd").write_text("root:x:0:0::/:/bin/sh\n")
    with Sandbox.create(base=tmp_path) as sandbox:
        assert sandbox.files.read_text("/etc/passwd").startswith("root")
        with pytest.raises(FileNotFoundError, match="'/bin/sh'"):
            sandbox.run("true")


def test_sizes_and_options() -> None:
    with pytest.raises(ValueError, match="memory_limit is written like '512M'"):
        Sandbox.create(memory_limit="lots")
    with pytest.raises(ValueError, match="more than 0"):
        Sandbox.create(disk_limit=0)
    with pytest.raises(TypeError, match="memory_limit is an int or a str"):
        Sandbox.create(memory_limit=1.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="network"):
        Sandbox.create(network="wifi")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="pids_limit"):
        Sandbox.create(pids_limit=0)
    with pytest.raises(TypeError, match="hide"):
        Sandbox.create(hide="/root")


def test_arguments_of_commands(sandbox: Sandbox) -> None:
    with pytest.raises(ValueError, match="empty list"):
        sandbox.run([])
    with pytest.raises(TypeError, match="a str or a list"):
        sandbox.run(b"ls")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="NUL"):
        sandbox.run("a\0b")
    with pytest.raises(ValueError, match="absolute path"):
        sandbox.run("true", cwd="tmp")
    with pytest.raises(ValueError, match="environment variable"):
        sandbox.run("true", env={"A=B": "1"})
    with pytest.raises(TypeError, match="are str"):
        sandbox.run("true", env={"A": 1})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="number of seconds"):
        sandbox.run("true", timeout=-1)


def test_closed() -> None:
    sandbox = Sandbox.create()
    sh = sandbox.shell()
    checkpoint = sandbox.checkpoint()
    sandbox.close()
    sandbox.close()
    assert sandbox.closed
    calls: list[Callable[[], Any]] = [
        lambda: sandbox.run("true"),
        lambda: sandbox.checkpoint(),
        lambda: sandbox.rollback(checkpoint),
        lambda: sandbox.fork(),
        lambda: sandbox.processes(),
        lambda: sandbox.files.read("/etc/passwd"),
        lambda: sh.run("true"),
        lambda: checkpoint.parent,
    ]
    for call in calls:
        with pytest.raises(SandboxClosed, match=r"^the sandbox is closed$"):
            call()


def test_checkpoint_during_close() -> None:
    sandbox = Sandbox.create()
    sandbox.spawn("sleep 1000")
    errors: list[BaseException] = []

    def take() -> None:
        try:
            while True:
                sandbox.checkpoint()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=take) for _ in range(2)]
    for thread in threads:
        thread.start()
    time.sleep(0.2)
    sandbox.close()
    for thread in threads:
        thread.join(20)
    assert len(errors) == 2
    for error in errors:
        assert isinstance(error, SandboxClosed), error
        assert "closed" in str(error)


def test_copies_of_handles(sandbox: Sandbox) -> None:
    sh = sandbox.shell()
    for handle in (sandbox, sh, sandbox.checkpoint(), sandbox.spawn("true")):
        for attempt in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(TypeError, match="cannot be pickled or copied"):
                attempt(handle)


def test_forked_caller(sandbox: Sandbox) -> None:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            sandbox.run("true")
            said = "no error"
        except DeltaBoxError as error:
            said = str(error)
        os.write(writing, said.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    assert f"belongs to process {os.getpid()}" in said
    assert sandbox.run("echo fine").stdout == "fine\n"


def test_not_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DELTABOX_STATE", str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(HostUnsupported, match="root"):
        Sandbox.create()


def test_full_image() -> None:
    with Sandbox.create(disk_limit="160M") as sandbox:
        sh = sandbox.shell()
        sh.run("x=1")
        result = sh.run("head -c 400M /dev/zero > /tmp/big; echo $?")
        assert "No space left on device" in result.stderr
        try:
            checkpoint = sandbox.checkpoint()
        except NoSpace as error:
            assert "full" in str(error)
        else:
            sandbox.rollback(checkpoint)
        assert sh.run("rm /tmp/big; echo $x").stdout == "1\n"


def test_budget(sandbox: Sandbox) -> None:
    program = """
x = bytes(range(256)) * 80000
print("up", flush=True), input()
y = bytes(range(255, -1, -1)) * 80000
print("more", flush=True), input()
"""
    p = sandbox.spawn(["python3", "-c", program])
    assert p.stdout.readline(timeout=10) == "up\n"
    sandbox.checkpoint("fits")
    p.stdin.write("\n")
    assert p.stdout.readline(timeout=10) == "more\n"
    try:
        Sandbox.create(max_memory="30M").close()
        with pytest.raises(NoSpace, match="max_memory of"):
            sandbox.checkpoint("does not")
        assert [c.name for c in sandbox.checkpoints] == ["fits"]
        sandbox.rollback("fits")
    finally:
        Sandbox.create(max_memory="8G").close()
    sandbox.checkpoint("does not")


def test_unsupported_state_is_named_and_leaves_the_tree_alone(sandbox: Sandbox) -> None:
    sh = sandbox.shell()
    sh.run("x=1")
    p = sandbox.spawn(
        [
            "python3",
            "-u",
            "-c",
            "import ctypes, os\n"
            "fd = ctypes.CDLL(None).syscall(323, 1)\n"
            "print(fd); input(); os.close(fd); print('closed'); input()",
        ]
    )
    fd = int(p.stdout.readline(timeout=10))
    if fd < 0:
        pytest.fail("userfaultfd is not available here, choose another object")
    with pytest.raises(UnsupportedState) as caught:
        sandbox.checkpoint("refused")
    error = caught.value
    assert (error.pid, error.process) == (p.pid, "python3")
    assert f"fd {fd} of pid {p.pid} (python3)" in str(error)
    assert "userfaultfd" in str(error.object)
    assert sh.run("echo $x").stdout == "1\n"
    p.stdin.write("\n")
    assert p.stdout.readline(timeout=10) == "closed\n"
    sandbox.checkpoint("refused")  # the name is free, the object gone
