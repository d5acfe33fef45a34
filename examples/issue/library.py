"""The library as it was with the bug, and the tests of the release that repaired it: from PyPI,
pinned by hash, fetched once.

Only source distributions have tests. Of the repaired release nothing but its tests is kept, and
they are put where neither the search nor a model sees them.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from deltabox import Sandbox
from deltabox.demo.library import unpack

NAME = "more-itertools"
BROKEN = "10.8.0"
REPAIRED = "11.0.0"
SHA256 = {
    BROKEN: "f638ddf8a1a0d134181275fb5d58b086ead7c6a72429ad725c67503f13ba30bd",
    REPAIRED: "1fca6853f57fbfabc36ad31b3c3d72490340a414f1cc0eec78436fb847837304",
}
ISSUE = """\
more-itertools pull request 1128: numeric_range sliced with a negative step returns an empty range.

    >>> from more_itertools import numeric_range
    >>> r = numeric_range(0, 10, 2)
    >>> list(reversed(r))
    [8, 6, 4, 2, 0]
    >>> list(r[::-1])
    []

It should be [8, 6, 4, 2, 0]. Slices of a numeric_range should be what slices of the built-in range
are, for every start, stop and step, whatever the range's own direction and type of numbers.
"""

ROOT = "/srv/solve_issue"  # in a sandbox everything else is as on the host
WHERE = f"{ROOT}/work/{NAME}"
JUDGE = f"{ROOT}/judge"
USER = "nobody"  # who works on the library
JUDGE_USER = "daemon"  # whose files and processes are not his
_OWN = Path(__file__).parent
_PACKED = f"{NAME}-{BROKEN}-and-judge.tar"


def default_cache() -> Path:
    """`.cache/examples` of this checkout."""
    return Path(__file__).parents[2] / ".cache" / "examples"


def fetch(cache: Path) -> Path:
    """The tar file for the sandbox: `work/` and `judge/`. Downloads when it is not there.

    Raises `RuntimeError` when the packages cannot be had.
    """
    packed = cache / _PACKED
    if packed.exists():
        return packed
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as scratch, ThreadPoolExecutor() as both:
        broken, repaired = both.map(partial(_source, Path(scratch)), (BROKEN, REPAIRED))
        fresh = Path(scratch) / "fresh.tar"
        with tarfile.open(fresh, "w") as tar:
            tar.add(broken, f"work/{NAME}")
            tar.add(repaired / "tests" / "test_more.py", "judge/test_more.py")
        fresh.replace(packed)  # others may be fetching, too
    return packed


def _source(scratch: Path, version: str) -> Path:
    """A source distribution: downloaded, checked, unpacked."""
    directory = scratch / version
    directory.mkdir()
    pinned = directory / "requirements.txt"
    pinned.write_text(f"{NAME}=={version} --hash=sha256:{SHA256[version]}\n")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    chosen = ["--no-deps", "--no-binary=:all:", "--require-hashes", "-r", str(pinned)]
    done = subprocess.run(
        [*command, *chosen, "--dest", str(directory)], check=False, capture_output=True, text=True
    )
    if done.returncode != 0:
        raise RuntimeError(f"pip could not download {NAME} {version}: {done.stderr.strip()}")
    (package,) = directory.glob("*.tar.gz")
    unpack(package, directory)
    return directory / package.name.removesuffix(".tar.gz")


def install(sandbox: Sandbox, packed: Path) -> None:
    """Put the library and its judge into the sandbox."""
    sandbox.files.mkdir(ROOT)
    sandbox.files.upload(str(packed), f"{ROOT}/all.tar")
    sandbox.run("tar --no-same-owner -xf all.tar && rm all.tar", cwd=ROOT, check=True)
    for name in ("judge.py", "test_issue.py"):
        sandbox.files.upload(str(_OWN / name), f"{JUDGE}/{name}")
    sandbox.run(f"chown -R {USER} {WHERE}", check=True)
    # compiled once here, and not at every judgement
    sandbox.run(f"python3 -m compileall -q {JUDGE} && chmod -R a+rX {JUDGE}", check=True)
