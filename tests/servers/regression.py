"""PostgreSQL's own regression tests, as its developers run them on an installed server.

Debian ships their drivers (pg_regress, pg_isolation_regress) with the programs, but neither what
they run nor what should come out: that is in the source package. It is fetched with apt, with lists
and sources of apt's own in a directory of ours, so that nothing of the host's changes. A part of
the tests calls functions of a small library, regress.so; it is compiled against the server's
headers, which are unpacked from their package without being installed, since that one asks for a
whole compiler of another kind. (Rejected: a build of all of PostgreSQL, which takes many packages
and minutes and then tests other programs than those that people use.)
"""

from __future__ import annotations

import fcntl
import os
import platform
import re
import shutil
import subprocess
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from deltabox import Process

from .postgres import ENVIRONMENT, HOME, USER, Server, programs

CACHE: Final = Path(__file__).parents[2] / ".cache" / "postgresql"
_FETCH_WITHIN: Final = 300.0
_OUTCOME = re.compile(r"^(?:test)? +(\S+) +\.\.\. (\S+(?: \(\S+\))?)", re.MULTILINE)


@dataclass(frozen=True)
class Suite:
    """A directory of PostgreSQL's sources, and the driver that runs it."""

    name: str
    driver: str
    schedule: str

    def start(self, server: Server) -> Process:
        """Start it; what it prints is to be read when it has ended."""
        library = programs().parent / "lib"
        tests = f"{HOME}/tests/{self.name}"
        driver = library / "pgxs" / "src" / "test" / self.name / self.driver
        options = [
            f"--inputdir={tests}",
            f"--outputdir={HOME}/out",
            f"--bindir={programs()}",
            f"--dlpath={HOME}/tests/lib",
            f"--schedule={tests}/{self.schedule}",
            "--max-concurrent-tests=20",
            f"--host={HOME}",
            f"--user={USER}",
        ]
        command = [str(driver), *options]
        return server.sandbox.spawn(command, user=USER, env=ENVIRONMENT, cwd=f"{HOME}/out")


REGRESS: Final = Suite("regress", "pg_regress", "parallel_schedule")
ISOLATION: Final = Suite("isolation", "pg_isolation_regress", "isolation_schedule")


def _run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, check=False, timeout=_FETCH_WITHIN
    )
    assert done.returncode == 0, f"{command}:\n{done.stdout}{done.stderr}"
    return done.stdout


def _sources(cwd: Path) -> str:
    """The archives of this Debian release that apt knows, for packages and for sources."""
    release = platform.freedesktop_os_release().get("VERSION_CODENAME", "")
    wanted = "$(REPO_URI) $(RELEASE) $(COMPONENT)"
    listed = _run("apt-get", "indextargets", "--no-release-info", "--format", wanted, cwd=cwd)
    lines = {line for line in listed.splitlines() if line.endswith(" main")}
    ours = [line for line in sorted(lines) if line.split()[1].split("-")[0] == release]
    return "".join(f"deb {line}\ndeb-src {line}\n" for line in ours)


def fetch(cache: Path = CACHE) -> Path:
    """The directory with all that is needed, by suite, and regress.so in `lib`."""
    version = programs().parent.name
    ready = cache / version
    cache.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        lock = stack.enter_context((cache / "lock").open("w"))
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests that run beside this one want it, too
        if ready.exists():
            return ready
        name = stack.enter_context(tempfile.TemporaryDirectory(dir=cache))
        scratch = Path(name)
        for part in ("state/lists/partial", "archives/partial", "headers", "sources", "ready/lib"):
            (scratch / part).mkdir(parents=True)
        (scratch / "sources.list").write_text(_sources(scratch))
        settings = {
            "Dir::Etc::sourcelist": scratch / "sources.list",
            "Dir::Etc::sourceparts": "-",
            "Dir::State::lists": scratch / "state" / "lists",
            "Dir::Cache": scratch,
            "APT::Sandbox::User": "root",
            "Acquire::Languages": "none",
        }
        apt = ["apt-get", "-qq", *(f"-o{key}={value}" for key, value in settings.items())]
        package = f"postgresql-{version}"
        exact = _run("dpkg-query", "-W", "-f", "${source:Version}", package, cwd=scratch)
        _run(*apt, "update", cwd=scratch)
        _run(*apt, "download", f"postgresql-server-dev-{version}={exact}", cwd=scratch)
        only = ["--download-only", "--tar-only"]
        _run(*apt, "source", *only, f"{package}={exact}", cwd=scratch)
        (headers,) = scratch.glob("*.deb")
        _run("dpkg-deb", "--extract", headers, "headers", cwd=scratch)
        (archive,) = scratch.glob("*.orig.tar.*")
        wanted = ["--wildcards", "*/src/test/regress", "*/src/test/isolation"]
        _run("tar", "-xf", archive, "-C", "sources", "--strip-components=3", *wanted, cwd=scratch)
        for suite in (REGRESS, ISOLATION):
            (scratch / "sources" / suite.name).rename(scratch / "ready" / suite.name)
        _compile(scratch, version)
        (scratch / "ready").rename(ready)
    return ready


def _compile(scratch: Path, version: str) -> None:
    headers = scratch / "headers" / "usr" / "include" / "postgresql" / version / "server"
    library = scratch / "ready" / "lib"
    source = scratch / "ready" / "regress" / "regress.c"
    flags = ["-O2", "-shared", "-fPIC", "-D_GNU_SOURCE", f"-I{headers}"]
    _run(os.environ.get("CC", "cc"), *flags, "-o", library / "regress.so", source, cwd=scratch)
    for name in ("autoinc.so", "refint.so"):  # the tests want all libraries in one place
        shutil.copy(programs().parent / "lib" / name, library)


def prepare(server: Server) -> None:
    """Put the suites into the sandbox."""
    packed = subprocess.run(
        ["tar", "-cf", "-", "-C", fetch(), "."], capture_output=True, check=True
    ).stdout
    run = server.sandbox.run
    run(["install", "-d", "-o", USER, f"{HOME}/tests", f"{HOME}/out"], check=True)
    run(["tar", "-xf", "-", "-C", f"{HOME}/tests"], input=packed, check=True)


def outcomes(said: str) -> dict[str, str]:
    """Each test that a driver tells of, with its result."""
    return dict(_OUTCOME.findall(said))


def differences(server: Server) -> str:
    """What came out that should not have; empty when nothing did."""
    return server.sandbox.run(f"cat {HOME}/out/regression.diffs 2>/dev/null").stdout
