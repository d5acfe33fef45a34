"""What it costs a program to run in a sandbox: inside, against the same overlay without us.

Inside is a sandbox over `/`, with a checkpoint taken just before each run, so whatever the engine
does to a program between two checkpoints is in the figure: tracked memory, the filter for system
calls, the cgroup, the user namespace. Beside it, the same programs in namespaces made with
unshare(1) over an overlay mount made with mount(8): its layer in a btrfs image on a loop device of
the same disk, all options as deltafs has them, and nothing of the engine. What the overlay and the
loop device cost is in both.

The programs are those of workloads.py: a live Python (arithmetic, sqlite, small files), a live C
program with 60 MB of small blocks (churn.c), and pytest as their child. Both sides answer with what
they computed, and it must be equal. Each pair has fresh processes, warmed up, and pairs alternate
in which side runs first. The verdict is over
the interval of the ratios (interval.py): "slower, shown" is 0 when the interval has 1 in it.

A big file is another matter: the way through btrfs and the loop device writes it into the page
cache of the host file twice, so it is compared with a plain directory of the host. A layer is
mounted `volatile`, fsync(2) inside does not wait for the disk, therefore both are given: what the
program waits for, and what it takes until the host's disk has the bytes.

    python bench/programs.py --json out.json
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Protocol

import click
import interval
import report
from report import Recorder

from deltabox import Process, Sandbox
from deltabox._connection import state_directory
from deltabox.deltafs.image import _OPTIONS as IMAGE_OPTIONS
from deltabox.deltafs.root import _OVERLAY_OPTIONS as OVERLAY_OPTIONS
from deltabox.demo import library

HERE = Path(__file__).parent
PAIRS = 20
QUICK_PAIRS = 6
BIG_ROUNDS = 8
QUICK_BIG_ROUNDS = 3
BIG = 1024  # MiB
QUICK_BIG = 128
IMAGE_BYTES = 16 << 30  # sparse
DIRECTORY = "/bench"
GOAL = 3.0  # percent
BIG_GOAL = 3.0  # times plain ext4


@dataclass(frozen=True)
class Program:
    title: str
    name: str  # in workloads.py
    amount: int
    quick: int
    warm: int  # before each run, so that a fresh process has its memory and its modules
    writes: bool = False


PROGRAMS = (
    Program("CPU loop", "loop", 5_000_000, 2_000_000, 500_000),
    Program("malloc", "churn", 1_000_000, 300_000, 300_000),
    Program("pytest", "suite", 12, 4, 1),
    Program("sqlite", "database", 1_500, 300, 20, writes=True),
    Program("{amount:,} small files", "files", 10_000, 2_000, 200, writes=True),
)


# -- the sides -------------------------------------------------------------------------------


class Side(Protocol):
    def forget(self) -> None:
        """Drop what earlier runs have left; before the warming up."""

    def ready(self) -> None:
        """The next run is measured."""

    def run(self, name: str, amount: int) -> tuple[float, str]:
        """Seconds, and what the program found out."""


def parse(line: str) -> tuple[float, str]:
    """An answer of workloads.py."""
    mark, _, answer = line.strip().partition(" ")
    if mark != "=":
        raise ValueError(f"not an answer: {line!r}")
    seconds, _, found = answer.partition(" ")
    return float(seconds), found


class Inside:
    """A sandbox; a measured run begins with a checkpoint."""

    def __init__(self, sandbox: Sandbox, payload: Path) -> None:
        self.sandbox = sandbox
        sandbox.files.mkdir(DIRECTORY)
        for source in payload.iterdir():
            sandbox.files.upload(source, f"{DIRECTORY}/{source.name}")
        sandbox.run(
            f"chmod +x churn; tar --no-same-owner -xf {library.archive(payload).name}",
            cwd=DIRECTORY,
            check=True,
        )
        self.process: Process = sandbox.spawn(["python3", f"{DIRECTORY}/workloads.py", DIRECTORY])

    def forget(self) -> None:
        for old in self.sandbox.checkpoints[:-1]:
            old.delete()

    def ready(self) -> None:
        self.sandbox.checkpoint()

    def run(self, name: str, amount: int) -> tuple[float, str]:
        self.process.stdin.write(f"{name} {amount}\n")
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"inside: {name} ended: {self.process.stderr.read_available()}")
        return parse(line)


class Outside:
    """workloads.py as a plain child of ours, however it is wrapped."""

    def __init__(self, command: list[str], environment: dict[str, str], stack: ExitStack) -> None:
        self._process = subprocess.Popen(
            command,
            env=environment,
            cwd="/",
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        stack.callback(self._end)

    def forget(self) -> None:
        """Nothing is to be done."""

    ready = forget

    def run(self, name: str, amount: int) -> tuple[float, str]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{name} {amount}\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"outside: {name} ended with {self._process.wait()}")
        return parse(line)

    def _end(self) -> None:
        """Close its input, so that it ends and its mounts go with it; kill it if it does not."""
        try:
            self._process.communicate(timeout=10)
        except (subprocess.TimeoutExpired, BrokenPipeError):
            self._process.kill()
            self._process.wait()


OVERLAY = """
set -e
mount -t btrfs -o loop,noatime,{image} "$1/image" "$1/layers"
btrfs -q subvolume create "$1/layers/layer"
mkdir "$1/layers/layer/upper" "$1/layers/layer/work"
mount -t overlay -o "noatime,nodev,lowerdir=/,upperdir=$1/layers/layer/upper,\
workdir=$1/layers/layer/work,{overlay},volatile" overlay "$1/root"
python3 -c "import fcntl, socket
fcntl.ioctl(socket.socket(), 0x8914, bytes(b'lo'.ljust(16, bytes(1)) + b'A' + bytes(23)))"
mount -t proc proc "$1/root/proc"
mount --rbind /dev "$1/root/dev"
mkdir "$1/root{directory}"
cp "$1"/payload/* "$1/root{directory}"
cd "$1/root{directory}"
chmod +x churn
tar --no-same-owner -xf *.tar
chroot "$1/root" python3 {directory}/workloads.py {directory}
"""


def overlay(scratch: Path, environment: dict[str, str], stack: ExitStack) -> Outside:
    """The same overlay without us; `scratch` has the payload and is removed afterwards."""
    for name in ("layers", "root"):
        (scratch / name).mkdir()
    with open(scratch / "image", "wb") as image:
        image.truncate(IMAGE_BYTES)
    subprocess.run(
        ["mkfs.btrfs", "-q", "-m", "single", "-d", "single", "-n", "4096", scratch / "image"],
        check=True,
        capture_output=True,  # it has much to say
    )
    script = OVERLAY.format(
        image=IMAGE_OPTIONS,
        overlay=",".join(f"{key}={value}" for key, value in OVERLAY_OPTIONS),
        directory=DIRECTORY,
    )
    spaces = ("--mount", "--pid", "--net", "--ipc", "--uts", "--fork", "--kill-child")
    return Outside(["unshare", *spaces, "sh", "-c", script, "sh", str(scratch)], environment, stack)


def plain(scratch: Path, environment: dict[str, str], stack: ExitStack) -> Outside:
    """A directory of the host's disk."""
    directory = scratch / "plain"
    directory.mkdir()
    program = str(scratch / "payload" / "workloads.py")
    return Outside(["python3", program, str(directory)], environment, stack)


@contextmanager
def furnished() -> Iterator[Path]:
    """A directory on the sandboxes' disk, with what both sides need in `payload`."""
    cache = library.default_cache()
    library.fetch(cache)
    above = state_directory().parent
    above.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="deltabox-programs-", dir=above) as name:
        payload = Path(name) / "payload"
        payload.mkdir()
        subprocess.run(
            ["cc", "-O2", "-Wall", "-o", payload / "churn", HERE / "churn.c"], check=True
        )
        shutil.copy(HERE / "workloads.py", payload)
        shutil.copy(library.archive(cache), payload)
        yield Path(name)


def clean_environment(sandbox: Sandbox) -> dict[str, str]:
    """What programs of the sandbox have, for those outside too."""
    listed = sandbox.run(["env", "--null"], check=True).stdout
    return dict(item.split("=", 1) for item in listed.split("\0") if item)


# -- measured --------------------------------------------------------------------------------


def alternate(sides: dict[str, Side], rounds: int) -> Iterator[list[tuple[str, Side]]]:
    """The sides of each round, each of them first as often as the others."""
    order = list(sides.items())
    for _ in range(rounds):
        yield order
        order = order[1:] + order[:1]


def settle() -> None:
    """Write everything back to the disk.

    Twice: sync(2) goes through the file systems once, oldest first, so what the image's btrfs
    writes into its host file comes too late for the first time.
    """
    os.sync()
    os.sync()


def compare(recorder: Recorder, program: Program, *, quick: bool) -> None:
    amount, rounds = (program.quick, QUICK_PAIRS) if quick else (program.amount, PAIRS)
    title = program.title.format(amount=amount)
    took: dict[str, list[float]] = {"inside": [], "overlay": []}
    with sides() as both:
        for order in alternate(both, rounds):
            found = {}
            for name, side in order:
                side.forget()
                side.run("fresh", 0)
                side.run(program.name, program.warm)
                if program.writes:
                    settle()  # nobody pays for what the other left behind
                side.ready()
                seconds, found[name] = side.run(program.name, amount)
                took[name].append(seconds)
            if len(set(found.values())) != 1:
                raise report.Wrong(f"{title} found {found}")
    judge(recorder, title, took["inside"], took["overlay"])


def judge(recorder: Recorder, title: str, inside: list[float], overlay: list[float]) -> None:
    """The figures of a program, and the verdict: within noise, or slower by so many percent."""
    recorder.floor(f"{title}, overlay alone", overlay)
    recorder.expect(f"{title}, inside", unit="s", floor=f"{title}, overlay alone")
    recorder.expect(f"{title}, inside : overlay", unit="times")
    recorder.expect(f"{title}, slower, shown", unit="%", goal=GOAL)
    for seconds, alone in zip(inside, overlay, strict=True):
        recorder.add(f"{title}, inside", seconds)
        recorder.add(f"{title}, inside : overlay", seconds / alone)
    found = interval.ratio(inside, overlay)
    slower = 0.0 if found.noise else max(0.0, (found.estimate - 1) * 100)
    recorder.add(f"{title}, slower, shown", slower)
    verdict = "within noise" if found.noise else "slower" if found.estimate > 1 else "faster"
    recorder.note(
        f"{title}: {verdict}; inside : overlay is {found} at {found.confidence:.0%},"
        f" {len(inside)} pairs"
    )


def big_file(recorder: Recorder, rounds: int, mebibytes: int) -> None:
    """One sequential write with fsync; what the program waits for, and until the disk has it."""
    title = "1 GiB with fsync" if mebibytes == BIG else f"{mebibytes} MiB with fsync"
    took: dict[str, list[float]] = {"inside": [], "overlay": [], "plain": []}
    settled: dict[str, list[float]] = {name: [] for name in took}
    with sides(also_plain=True) as three:
        for order in alternate(three, rounds):
            for name, side in order:
                side.forget()
                settle()
                side.ready()
                seconds, _ = side.run("sequential", mebibytes)
                began = perf_counter()
                settle()
                took[name].append(seconds)
                settled[name].append(seconds + perf_counter() - began)
                side.run("remove", 0)
    for what, found in ((title, took), (f"{title}, on the disk", settled)):
        for base in ("plain", "overlay"):
            recorder.floor(f"{what}, {base}", found[base])
        recorder.expect(f"{what}, inside", unit="s", floor=f"{what}, plain")
        recorder.expect(f"{what}, inside : plain", unit="times", goal=BIG_GOAL)
        recorder.expect(f"{what}, inside : overlay", unit="times")
        for at, seconds in enumerate(found["inside"]):
            recorder.add(f"{what}, inside", seconds)
            for base in ("plain", "overlay"):
                recorder.add(f"{what}, inside : {base}", seconds / found[base][at])
    waited = interval.ratio(took["inside"], took["plain"])
    written = interval.ratio(settled["inside"], settled["plain"])
    recorder.note(
        f"{title}: inside : plain is {waited} for the program and {written} until the disk has it."
        " fsync inside does not wait for the disk (the overlay is volatile); the bytes go through"
        " the page cache twice, into btrfs and then, by the loop device, into the host's file."
    )


def kind(directory: Path) -> str:
    """The type of the file system a directory is on."""
    return subprocess.run(
        ["stat", "--file-system", "--format=%T", directory],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()


@contextmanager
def sides(*, also_plain: bool = False) -> Iterator[dict[str, Side]]:
    """Both sides, new: what a program that failed has left behind is in no other's figures."""
    with ExitStack() as stack:
        scratch = stack.enter_context(furnished())
        sandbox = stack.enter_context(Sandbox.create())
        environment = clean_environment(sandbox)
        made: dict[str, Side] = {
            "inside": Inside(sandbox, scratch / "payload"),
            "overlay": overlay(scratch, environment, stack),
        }
        if also_plain:
            made["plain"] = plain(scratch, environment, stack)
        yield made


@click.command()
@report.options
@click.option("--only", multiple=True, help="A program's name in workloads.py; several times.")
def main(*, output: Path | None, quick: bool, budget: float | None, only: tuple[str, ...]) -> None:
    """Measure programs between checkpoints."""
    recorder = Recorder("programs", what=__doc__, unit="s", budget=budget, quick=quick)
    for program in PROGRAMS:
        if not only or program.name in only:
            body = partial(compare, recorder, program, quick=quick)
            recorder.attempt(program.name, body, limit=240)
    if not only or "sequential" in only:
        rounds, size = (QUICK_BIG_ROUNDS, QUICK_BIG) if quick else (BIG_ROUNDS, BIG)
        recorder.note(f"plain is a directory of the host on {kind(state_directory().parent)}")
        recorder.attempt("a big file", partial(big_file, recorder, rounds, size), limit=240)
    report.finish(recorder, output)


if __name__ == "__main__":
    main()
