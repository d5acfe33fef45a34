"""What Debian has for a program and does not install: its sources with their tests, its headers.

Fetched with apt, with lists and sources of apt's own in a directory of ours, so that nothing of the
host's changes.
"""

from __future__ import annotations

import fcntl
import platform
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

CACHE: Final = Path(__file__).parents[2] / ".cache"
_WITHIN: Final = 300.0  # seconds


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, check=False, timeout=_WITHIN
    )
    assert done.returncode == 0, f"{command}:\n{done.stdout}{done.stderr}"
    return done.stdout


def version(package: str) -> str:
    """The source package's version that an installed package was made from."""
    return run("dpkg-query", "-W", "-f", "${source:Version}", package, cwd=Path("/"))


@contextmanager
def made_once(name: str) -> Iterator[tuple[Path, Path | None]]:
    """A place in the cache, and a directory to prepare it in, `ready` there, if it is not yet."""
    place = CACHE / name
    place.parent.mkdir(parents=True, exist_ok=True)
    with (place.parent / f"{place.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests that run beside this one want it, too
        if place.exists():
            yield place, None
            return
        with tempfile.TemporaryDirectory(dir=place.parent) as scratch:
            yield place, Path(scratch)
            (Path(scratch) / "ready").rename(place)


class Apt:
    """apt-get with everything of its own below a directory, which is where files come."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        state = directory / "apt"
        for part in ("lists/partial", "archives/partial"):
            (state / part).mkdir(parents=True)
        (state / "sources.list").write_text(self._sources())
        settings = {
            "Dir::Etc::sourcelist": state / "sources.list",
            "Dir::Etc::sourceparts": "-",
            "Dir::State::lists": state / "lists",
            "Dir::Cache": state,
            "APT::Sandbox::User": "root",
            "Acquire::Languages": "none",
        }
        self.command = ["apt-get", "-qq", *(f"-o{key}={value}" for key, value in settings.items())]
        run(*self.command, "update", cwd=directory)

    def _sources(self) -> str:
        """The archives of this Debian release that apt knows, for packages and for sources."""
        release = platform.freedesktop_os_release().get("VERSION_CODENAME", "")
        wanted = "$(REPO_URI) $(RELEASE) $(COMPONENT)"
        options = ["--no-release-info", "--format", wanted]
        listed = run("apt-get", "indextargets", *options, cwd=self.directory)
        lines = {line for line in listed.splitlines() if line.endswith(" main")}
        ours = [line for line in sorted(lines) if line.split()[1].split("-")[0] == release]
        return "".join(f"deb {line}\ndeb-src {line}\n" for line in ours)

    def package(self, name: str, version: str) -> Path:
        """A package's file."""
        run(*self.command, "download", f"{name}={version}", cwd=self.directory)
        (file,) = self.directory.glob(f"{name}_*.deb")
        return file

    def source(self, name: str, version: str) -> Path:
        """The archive that a source package's authors have published."""
        only = ["--download-only", "--tar-only"]
        run(*self.command, "source", *only, f"{name}={version}", cwd=self.directory)
        (archive,) = self.directory.glob(f"{name}_*.orig.tar.*")
        return archive
