"""PostgreSQL's own regression tests, as its developers run them on an installed server.

Debian ships their drivers (pg_regress, pg_isolation_regress) with the programs, but neither what
they run nor what should come out: that is in the source package. A part of the tests calls
functions of a small library, regress.so; it is compiled against the server's headers, which are
unpacked from their package without being installed, since that one asks for a whole compiler of
another kind. (Rejected: a build of all of PostgreSQL, which takes many packages and minutes and
then tests other programs than those that people use.)
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from deltabox import Process

from . import debian
from .postgres import ENVIRONMENT, HOME, USER, Server, programs

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


def fetch() -> Path:
    """The directory with all that is needed, by suite, and regress.so in `lib`."""
    version = programs().parent.name
    with debian.made_once(f"postgresql/{version}") as (place, scratch):
        if scratch is not None:
            _prepare(scratch, version)
    return place


def _prepare(scratch: Path, version: str) -> None:
    package = f"postgresql-{version}"
    exact = debian.version(package)
    apt = debian.Apt(scratch)
    for part in ("headers", "sources", "ready/lib"):
        (scratch / part).mkdir(parents=True)
    headers = apt.package(f"postgresql-server-dev-{version}", exact)
    debian.run("dpkg-deb", "--extract", headers, "headers", cwd=scratch)
    unpack: list[str | Path] = ["tar", "-xf", apt.source(package, exact), "-C", "sources"]
    wanted = ["--strip-components=3", "--wildcards", "*/src/test/regress", "*/src/test/isolation"]
    debian.run(*unpack, *wanted, cwd=scratch)
    for suite in (REGRESS, ISOLATION):
        (scratch / "sources" / suite.name).rename(scratch / "ready" / suite.name)
    _compile(scratch, version)


def _compile(scratch: Path, version: str) -> None:
    include = scratch / "headers" / "usr" / "include" / "postgresql" / version / "server"
    library = scratch / "ready" / "lib"
    source = scratch / "ready" / "regress" / "regress.c"
    flags = ["-O2", "-shared", "-fPIC", "-D_GNU_SOURCE", f"-I{include}"]
    debian.run(
        os.environ.get("CC", "cc"), *flags, "-o", library / "regress.so", source, cwd=scratch
    )
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
