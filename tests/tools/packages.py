"""Python packages of the test environment, for programs inside a sandbox.

The environment itself may be out of sight there: `/tmp` starts empty, for one.
"""

from __future__ import annotations

import io
import os
import sys
import tarfile
from functools import lru_cache
from importlib import metadata

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from deltabox import Sandbox

PYTHON = os.path.realpath(sys.executable)
WHERE = "/opt/packages"
ENVIRONMENT = {"PYTHONPATH": WHERE}


def install(sandbox: Sandbox, *names: str) -> None:
    """Put these packages, with all that they require, where `ENVIRONMENT` leads PYTHON to."""
    sandbox.files.write("/opt/packages.tar", _archive(names))
    sandbox.run(["tar", "-x", "--one-top-level", "-f", "packages.tar"], cwd="/opt", check=True)
    sandbox.files.remove("/opt/packages.tar")


@lru_cache
def _archive(names: tuple[str, ...]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for distribution in _closure(names):
            for file in distribution.files or ():
                path = str(file.locate())
                if ".." not in file.parts and os.path.exists(path):
                    archive.add(path, str(file))
    return out.getvalue()


def _closure(names: tuple[str, ...]) -> list[metadata.Distribution]:
    found: dict[str, metadata.Distribution] = {}
    wanted = list(names)
    while wanted:
        name = canonicalize_name(wanted.pop())
        if name in found:
            continue
        found[name] = metadata.distribution(name)
        for text in found[name].requires or ():
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                wanted.append(requirement.name)
    return list(found.values())
