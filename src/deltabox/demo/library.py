"""What the demo needs from PyPI: fetched once by `make`, pinned by hash; no network afterwards.

Two source distributions of boltons: the broken one is repaired, and the tests of the next
release judge the repairs. pytest comes as wheels, which are unpacked and not installed, so that
the Python inside the sandbox needs no pip.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

from deltabox.errors import DeltaBoxError

NAME = "boltons"
BROKEN = "26.0.0"
REPAIRED = "26.1.0"
SHA256 = {
    BROKEN: "5566d6cfd5a1e873d8e8476496287a9f92979964611ad9a9cecb6b0ef29b1edd",
    REPAIRED: "5764468aba493b15995ed17f46a16789023f123ca2a62d491a9ce825c1cbe26c",
}
JUDGE = "tests/test_setutils.py"  # this file is taken from the repaired release
PYTEST = (
    "pytest==8.4.2",
    "iniconfig==2.3.0",
    "packaging==25.0",
    "pluggy==1.6.0",
    "pygments==2.19.2",
)


def default_cache() -> Path:
    """`.cache/demo` of a checkout, else a directory of the user."""
    chosen = os.environ.get("DELTABOX_DEMO_CACHE")
    if chosen:
        return Path(chosen)
    checkout = Path(__file__).parents[3]
    if (checkout / "pyproject.toml").exists():
        return checkout / ".cache" / "demo"
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "deltabox" / "demo"


def archive(cache: Path) -> Path:
    """The tar that is unpacked in the sandbox: `boltons/` (broken, newer tests) and `site/`."""
    return cache / f"{NAME}-{BROKEN}-and-pytest.tar"


def ready(cache: Path) -> bool:
    return archive(cache).exists()


def fetch(cache: Path) -> None:
    """Download and lay out; does nothing when that was done before."""
    if ready(cache):
        return
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        work = Path(scratch)
        broken = _source(work, BROKEN)
        repaired = _source(work, REPAIRED)
        shutil.copyfile(repaired / JUDGE, broken / JUDGE)
        site = work / "site"
        _pip(work, "--only-binary=:all:", *PYTEST)
        for wheel in sorted(work.glob("*.whl")):
            with zipfile.ZipFile(wheel) as packed:
                packed.extractall(site)
        fresh = work / "fresh.tar"
        with tarfile.open(fresh, "w") as tar:
            tar.add(broken, NAME)
            tar.add(site, "site")
        fresh.replace(archive(cache))


def _source(work: Path, version: str) -> Path:
    """One source distribution: downloaded, checked, unpacked."""
    pinned = work / f"{version}.txt"
    pinned.write_text(f"{NAME}=={version} --hash=sha256:{SHA256[version]}\n")
    _pip(work, "--no-binary=:all:", "--require-hashes", "-r", str(pinned))
    package = work / f"{NAME}-{version}.tar.gz"
    if hashlib.sha256(package.read_bytes()).hexdigest() != SHA256[version]:
        raise DeltaBoxError(f"{package.name} is not the file that the demo was written for")
    unpack(package, work)
    return work / f"{NAME}-{version}"


def unpack(package: Path, directory: Path) -> None:
    """Unpack a tar file; its contents are known by their hash."""
    with tarfile.open(package) as tar:
        if hasattr(tarfile, "data_filter"):
            tar.extractall(directory, filter="data")
        else:  # Python before 3.11.4, Debian 12's among them
            tar.extractall(directory)


def _pip(work: Path, *what: str) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run(
        [*command, "--no-deps", "--dest", str(work), *what],
        check=False,
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        raise DeltaBoxError(f"pip could not download for the demo: {done.stderr.strip()}")
