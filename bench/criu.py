"""CRIU of a newer Debian, started beside the system, and a tree of processes for it to dump.

Debian 12's own CRIU 3.17 cannot start on a 6.18 kernel, 4.1 can. So its package and all libraries
it needs, libc included, are fetched by apt from the next release of Debian, from the mirror that
the host's own sources name, and unpacked into a directory of the cache; the program is started
through the loader that was unpacked with it. apt gets a state, a cache and a list of packages of
its own, empty, so nothing of the host's changes and every dependency is fetched. (Rejected: a
container image, which needs a registry and an engine; building from source, which needs forty
packages.)

CRIU gets the best conditions we know of:

- Its images are on a tmpfs, and so is `/run`, where it keeps what it has found out about the
  kernel; without that every start would probe again.
- The tree is what the standard step has, a bash and a Python with 30 MB, and no more: two
  processes, no sockets, no terminal. It lives in a pid namespace of its own, for a restore needs
  its pids free, and CRIU runs in the same namespaces. So a dump holds neither files nor mounts,
  network or namespaces; all of these are in DeltaBox's checkpoint of the same tree.
- Nothing is to be locked or kept for it: `--network-lock skip`, `--manage-cgroups=ignore`.
- The standard streams are FIFOs, which it opens again by name.

The other half of this file, `python bench/criu.py DIRECTORY`, is the first process of that
namespace: it starts the tree, runs CRIU and holds the clock, so that entering a namespace is in no
figure. It reads one JSON request a line and answers each with one line.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, Any, Final

import standard

RELEASE: Final = "trixie"
CACHE: Final = Path(__file__).parents[1] / ".cache" / "criu"
ENVIRONMENT: Final = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
_FETCH_WITHIN: Final = 300.0
_RUN_WITHIN: Final = 60.0

# images/stats.proto of CRIU: the fields of DumpStatsEntry and RestoreStatsEntry; times in us
STATS: Final = {
    1: {1: "freezing", 2: "frozen", 3: "memory dumped", 4: "memory written", 7: "pages written"},
    2: {3: "forking", 4: "restore", 5: "pages restored"},
}
_STATS_HEADER: Final = bytes.fromhex("40591055 06330957")  # service image, and stats, little endian


class Unavailable(Exception):
    """CRIU cannot be had, or does not run, on this host."""


# -- fetched ---------------------------------------------------------------------------------


def fetch(cache: Path = CACHE) -> Path:
    """The directory CRIU is unpacked in; downloaded when it is not there yet."""
    root = cache / RELEASE
    if (root / "usr" / "sbin" / "criu").exists():
        return root
    source = f"deb {mirror()} {RELEASE} main\n"
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as name:
        scratch = Path(name)
        for part in ("state/lists/partial", "archives/partial", "unpacked"):
            (scratch / part).mkdir(parents=True)
        (scratch / "status").touch()  # no package is installed: all are needed
        (scratch / "sources.list").write_text(source)
        settings = {
            "Dir::Etc::sourcelist": scratch / "sources.list",
            "Dir::Etc::sourceparts": "-",
            "Dir::Etc::preferences": "-",
            "Dir::Etc::preferencesparts": "-",
            "Dir::State": scratch / "state",
            "Dir::State::status": scratch / "status",
            "Dir::Cache": scratch,
            "APT::Sandbox::User": "root",
        }
        apt = ["apt-get", "-qq", *(f"-o{key}={value}" for key, value in settings.items())]
        _run([*apt, "update"])
        _run([*apt, "install", "--yes", "--no-install-recommends", "--download-only", "criu"])
        for package in sorted((scratch / "archives").glob("*.deb")):
            _run(["dpkg-deb", "--extract", str(package), str(scratch / "unpacked")])
        shutil.rmtree(root, ignore_errors=True)
        (scratch / "unpacked").rename(root)
    return root


def mirror() -> str:
    """The Debian archive this host's own packages come from."""
    release = platform.freedesktop_os_release()
    if release.get("ID") != "debian":
        raise Unavailable(f"CRIU is fetched from Debian's archive, this host is {release['ID']}")
    wanted = "$(REPO_URI)|$(RELEASE)|$(COMPONENT)"
    listed = _run(
        ["apt-get", "indextargets", "--no-release-info", "--format", wanted, "Created-By: Packages"]
    )
    found = archive(listed, release.get("VERSION_CODENAME", ""))
    if found is None:
        raise Unavailable("apt's sources name no archive of this Debian release")
    return found


def archive(listed: str, codename: str) -> str | None:
    """The address among apt's index targets that carries a release as a whole."""
    for line in listed.splitlines():
        address, release, component = line.rsplit("|", 2)
        if release == codename and component == "main":
            return address
    return None


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_FETCH_WITHIN
        )
    except FileNotFoundError:
        raise Unavailable(f"there is no {command[0]} on this host") from None
    except subprocess.TimeoutExpired:
        raise Unavailable(f"{command[0]} took more than {_FETCH_WITHIN:.0f} s") from None
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
        raise Unavailable(f"{command[0]}: {said[-1]}")
    return done.stdout


def command(root: Path) -> list[str]:
    """How to start the unpacked program: through its own loader."""
    libraries = root / "usr" / "lib" / f"{platform.machine()}-linux-gnu"
    loaders = sorted(libraries.glob("ld-linux-*.so.*"))
    if not loaders:
        raise Unavailable(f"no loader was unpacked for {platform.machine()}")
    return [str(loaders[0]), "--library-path", str(libraries), str(root / "usr" / "sbin" / "criu")]


# -- what CRIU writes down -------------------------------------------------------------------


def stats(image: bytes) -> dict[str, int]:
    """The figures of a `stats-dump` or `stats-restore` image, by name; times in microseconds."""
    if len(image) < 12 or image[:8] != _STATS_HEADER:
        raise ValueError("this is no statistics image of CRIU")
    size = int.from_bytes(image[8:12], "little")
    message = image[12:]
    if len(message) != size:
        raise ValueError(f"the image says {size} bytes and has {len(message)}")
    found: dict[str, int] = {}
    for kind, entry in fields(message).items():
        names = STATS.get(kind, {})
        if isinstance(entry, bytes):
            for number, value in fields(entry).items():
                if number in names and isinstance(value, int):
                    found[names[number]] = value
    return found


def fields(message: bytes) -> dict[int, int | bytes]:
    """A message of protocol buffers that has numbers and messages only, by field number."""
    found: dict[int, int | bytes] = {}
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        value, at = _varint(message, at)
        if tag & 7 == 0:
            found[tag >> 3] = value
        elif tag & 7 == 2:
            if at + value > len(message):
                raise ValueError("the message ends within a field")
            found[tag >> 3] = message[at : at + value]
            at += value
        else:
            raise ValueError(f"a field of wire type {tag & 7}")
    return found


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(message):
        byte = message[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
    raise ValueError("the message ends within a number")


def complaint(log: str) -> str:
    """The first error of a log: those after it are its consequences."""
    for line in log.splitlines():
        found = re.search(r"Error \([^)]*\): (.*)", line)
        if found:
            return found[1]
    return "no error in its log"


# -- outside ---------------------------------------------------------------------------------


class Tree:
    """The tree in its pid namespace, as the benchmark holds it. Times are in milliseconds."""

    def __init__(self, root: Path) -> None:
        self._process = subprocess.Popen(
            [
                *("unshare", "--pid", "--mount", "--ipc", "--fork", "--mount-proc", "--kill-child"),
                *(sys.executable, __file__, str(root)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            self.version: str = self._ask("start")["version"]
        except BaseException:
            self.close()
            raise

    def _ask(self, request: str, **arguments: Any) -> dict[str, Any]:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        stdin.write(json.dumps({"request": request, **arguments}) + "\n")
        stdin.flush()
        line = stdout.readline()
        if not line:
            raise Unavailable(f"the namespace of CRIU's tree ended at {request!r}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise Unavailable(answer["error"])
        return answer

    def dirty(self, number: int) -> None:
        """The changes of the standard step."""
        self._ask("dirty", number=number)

    def state(self) -> str:
        """What a restore must give back: Python's memory as its CRC, bash's variable."""
        found: str = self._ask("state")["state"]
        return found

    def dump(self) -> dict[str, float]:
        return self._ask("dump")

    def pre_dump(self) -> dict[str, float]:
        return self._ask("pre-dump")

    def stop(self) -> float:
        """Kill the tree, by its pids, until they are free."""
        took: float = self._ask("stop")["took"]
        return took

    def restore(self) -> dict[str, float]:
        return self._ask("restore")

    def bare_start(self) -> float:
        """How long CRIU takes to start and say its version."""
        took: float = self._ask("version")["took"]
        return took

    def close(self) -> None:
        """End the namespace with all that is in it."""
        self._process.kill()
        self._process.communicate()

    def __enter__(self) -> Tree:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# -- inside ----------------------------------------------------------------------------------


class First:
    """Process 1 of the namespace."""

    def __init__(self, root: Path) -> None:
        self.criu = command(root)
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/run"], check=True)
        self.work = Path("/run/deltabox-bench")
        self.images = self.work / "images"
        self.work.mkdir()
        self.streams = {name: self._fifo(name) for name in ("sh.in", "sh.out", "py.in", "py.out")}
        self.shell = self.python = 0

    def _fifo(self, name: str) -> IO[bytes]:
        """Opened for both directions: no open of it ever waits, no end of it ever closes."""
        path = self.work / name
        os.mkfifo(path)
        return open(os.open(path, os.O_RDWR | os.O_CLOEXEC), "r+b", buffering=0)

    def start(self) -> dict[str, Any]:
        version, _ = self._criu("--version")
        here = str(self.work)
        self.shell = os.posix_spawn(
            "/bin/bash",
            ["bash", "--norc", "--noprofile"],
            ENVIRONMENT,
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, f"{here}/sh.in", os.O_RDWR, 0),
                (os.POSIX_SPAWN_OPEN, 1, f"{here}/sh.out", os.O_RDWR, 0),
                (os.POSIX_SPAWN_OPEN, 2, "/dev/null", os.O_WRONLY, 0),
            ],
            setsid=True,
        )
        self.python = int(
            self._tell("sh", f"cd /; python3 -i -q <>{here}/py.in >{here}/py.out & echo = $!")
        )
        self._tell("py", standard.SETUP.replace('f"/bench/', f'f"{here}/') + "print('= ready')")
        self.dirty(0)
        return {"version": version.split()[1]}

    def _tell(self, whom: str, text: str) -> str:
        """Send lines, wait for the one that begins with '='."""
        self.streams[f"{whom}.in"].write(text.encode() + b"\n")
        while True:
            line = self.streams[f"{whom}.out"].readline().decode()
            if line.startswith("="):
                return line[1:].strip()

    def dirty(self, number: int) -> dict[str, Any]:
        self._tell("py", f"dirty({number})")
        size = standard.BASH_PAGES * 4096
        self._tell("sh", f"n={number}; printf -v pages %0{size}d $n; echo =")
        return {}

    def state(self) -> dict[str, Any]:
        memory = self._tell("py", "state()").split()[0]
        return {"state": memory + " " + self._tell("sh", 'echo "= $n ${#pages} $((10#$pages))"')}

    def _criu(self, *arguments: str) -> tuple[str, float]:
        began = time.perf_counter()
        done = subprocess.run(
            [*self.criu, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=_RUN_WITHIN,
        )
        took = (time.perf_counter() - began) * 1e3
        if done.returncode:
            log = self.images / "log"
            said = log.read_text(errors="replace") if log.exists() else done.stdout
            raise Unavailable(f"CRIU refused: {arguments[0]}: {complaint(said)}")
        return done.stdout, took

    def _timed(self, what: str, *arguments: str) -> dict[str, Any]:
        _, took = self._criu(
            what, "--images-dir", str(self.images), "--log-file", "log", *arguments
        )
        answer: dict[str, Any] = {"took": took}
        written = self.images / f"stats-{'restore' if what == 'restore' else 'dump'}"
        for name, value in stats(written.read_bytes()).items():
            answer[name] = value if name.startswith("pages") else value / 1e3
        return answer

    def _fresh_images(self) -> None:
        shutil.rmtree(self.images, ignore_errors=True)
        self.images.mkdir()

    def dump(self) -> dict[str, Any]:
        self._fresh_images()
        answer = self._timed(
            *("dump", "--tree", str(self.shell), "--leave-running"),
            *("--manage-cgroups=ignore", "--network-lock", "skip"),
        )
        answer["bytes"] = sum(image.stat().st_size for image in self.images.iterdir())
        return answer

    def pre_dump(self) -> dict[str, Any]:
        self._fresh_images()
        return self._timed("pre-dump", "--tree", str(self.shell), "--track-mem")

    def stop(self) -> dict[str, Any]:
        began = time.perf_counter()
        for pid in (self.shell, self.python):
            os.kill(pid, signal.SIGKILL)
        for pid in (self.shell, self.python):  # bash's child is ours once bash has ended
            os.waitpid(pid, 0)
        return {"took": (time.perf_counter() - began) * 1e3}

    def restore(self) -> dict[str, Any]:
        return self._timed(
            "restore", "--restore-detached", "--manage-cgroups=ignore", "--network-lock", "skip"
        )

    def version(self) -> dict[str, Any]:
        return {"took": self._criu("--version")[1]}

    def serve(self) -> None:
        for line in sys.stdin:
            request = json.loads(line)
            method = getattr(self, request.pop("request").replace("-", "_"))
            try:
                answer = method(**request)
            except (Unavailable, OSError, ValueError, subprocess.SubprocessError) as error:
                answer = {"error": str(error)}
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    First(Path(sys.argv[1])).serve()
