"""Loop devices, where others are taken and given back at the same time."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from deltabox.linux import loop


@pytest.mark.parametrize("code", [errno.ENXIO, errno.ENOENT])
def test_one_that_is_just_going_is_not_waited_for_in_vain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    refused: list[int] = []
    really = loop._open_device

    def busy(number: int) -> int:
        if len(refused) < 5:
            refused.append(number)
            raise OSError(code, os.strerror(code), f"/dev/loop{number}")
        return really(number)

    monkeypatch.setattr(loop, "_open_device", busy)
    with (tmp_path / "image").open("wb+") as file:
        file.truncate(1 << 20)
        device, path = loop.attach(file.fileno(), name="test", direct_io=False)
        os.close(device)
    assert len(refused) == 5 and path.startswith("/dev/loop")


def test_another_error_is_not_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(number: int) -> int:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(loop, "_open_device", refuses)
    with (tmp_path / "image").open("wb+") as file, pytest.raises(PermissionError):
        loop.attach(file.fileno(), name="test", direct_io=False)
