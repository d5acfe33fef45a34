"""The command line."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner

from deltabox import doctor
from deltabox.cli import cli
from deltabox.linux.features import ProbeFailed


def test_doctor_prints_a_table() -> None:
    result = CliRunner().invoke(cli, ["doctor"])
    assert result.exit_code == 0, result.output
    assert "DeltaBox can run here." in result.output
    assert "overlayfs" in result.output


def test_doctor_as_json() -> None:
    result = CliRunner().invoke(cli, ["doctor", "--json"])
    assert result.exit_code == 0
    answer = json.loads(result.output)
    assert answer["blockers"] == []
    assert {f["name"] for f in answer["findings"]} == {f.name for f in doctor.FEATURES}
    keys = {"name", "purpose", "present", "required", "remark", "remedy", "without"}
    assert set(answer["findings"][0]) == keys


def test_doctor_exits_1_when_something_required_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse() -> None:
        raise ProbeFailed("the kernel knows no file system btrfs")

    features = tuple(replace(f, probe=refuse) if f.name == "btrfs" else f for f in doctor.FEATURES)
    monkeypatch.setattr(doctor, "FEATURES", features)
    result = CliRunner().invoke(cli, ["doctor"])
    assert result.exit_code == 1
    assert "lacks btrfs" in result.output.replace("\n", " ")


def test_version() -> None:
    result = CliRunner().invoke(cli, ["version"])
    assert result.exit_code == 0
    assert result.output.startswith("deltabox 0.")


def test_help_names_every_command() -> None:
    result = CliRunner().invoke(cli, ["--help"])
    for command in ("demo", "doctor", "version"):
        assert command in result.output
