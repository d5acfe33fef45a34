"""`sandbox.files`: in and out without a process."""

from __future__ import annotations

from pathlib import Path

import pytest

from deltabox import Sandbox


def test_read_and_write(sandbox: Sandbox) -> None:
    files = sandbox.files
    files.write("/tmp/new/deep/a", b"\0\1", mode=0o600)
    assert files.read("/tmp/new/deep/a") == b"\0\1"
    files.write_text("/tmp/new/t", "zwölf")
    assert files.read_text("/tmp/new/t") == "zwölf"
    assert files.list("/tmp/new") == ["deep", "t"]
    stat = files.stat("/tmp/new/deep/a")
    assert (stat.kind, stat.size, stat.mode, stat.uid, stat.gid) == ("file", 2, 0o600, 0, 0)
    assert sandbox.run("stat -c %U:%a /tmp/new/deep/a").stdout == "root:600\n"
    files.mkdir("/tmp/d")
    assert files.exists("/tmp/d")
    files.remove("/tmp/new", recursive=True)
    assert not files.exists("/tmp/new")


def test_errors_are_the_system_s(sandbox: Sandbox) -> None:
    with pytest.raises(FileNotFoundError, match="'/tmp/none'"):
        sandbox.files.read("/tmp/none")
    with pytest.raises(IsADirectoryError):
        sandbox.files.read("/tmp")
    with pytest.raises(ValueError, match="absolute"):
        sandbox.files.read("tmp")
    with pytest.raises(TypeError, match="write_text"):
        sandbox.files.write("/tmp/a", "text")  # type: ignore[arg-type]


def test_symlinks_do_not_lead_out(sandbox: Sandbox, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("of the host")
    sandbox.run(f"mkdir -p {tmp_path}; rm -rf {tmp_path}/*; ln -s {secret} /tmp/link")
    with pytest.raises(FileNotFoundError):
        sandbox.files.read("/tmp/link")


def test_upload_and_download(sandbox: Sandbox, tmp_path: Path) -> None:
    source = tmp_path / "tree"
    (source / "sub").mkdir(parents=True)
    (source / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (source / "run.sh").chmod(0o755)
    (source / "sub" / "data").write_bytes(bytes(range(256)))
    sandbox.files.upload(source, "/opt/tree")
    assert sandbox.run(["/opt/tree/run.sh"]).stdout == "ran\n"
    sandbox.run("ln -s /etc/passwd /opt/tree/link; echo more > /opt/tree/sub/more")
    sandbox.files.download("/opt/tree", tmp_path / "back")
    assert (tmp_path / "back/sub/data").read_bytes() == bytes(range(256))
    assert (tmp_path / "back/sub/more").read_text() == "more\n"
    assert (tmp_path / "back/run.sh").stat().st_mode & 0o777 == 0o755
    assert not (tmp_path / "back/link").exists()


def test_the_base_is_never_written(sandbox: Sandbox) -> None:
    before = Path("/etc/hostname").read_bytes()
    sandbox.files.write("/etc/hostname", b"changed\n")
    sandbox.run("rm -rf /etc/passwd; echo x > /usr/new")
    assert Path("/etc/hostname").read_bytes() == before
    assert Path("/etc/passwd").exists()
    assert not Path("/usr/new").exists()
