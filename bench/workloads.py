"""What programs.py runs on both sides: inside a sandbox, and on the same overlay without us.

`python3 workloads.py DIRECTORY` reads one line a run, the name of a program and how much of it,
and answers with a line: "=", the seconds it took, and what it found out, which must be the same on
both sides. The clock is that of this process. It lives on from run to run, as a shell or a REPL of
an agent does, so what a checkpoint does to its memory is in the next figure. What a run leaves
behind is removed after the clock has stopped. "fresh" makes a new program of the process: where
its memory happens to lie alone makes two runs of the same Python differ by 10 %, for as long as
they live.

It knows nothing of the benchmark and imports nothing outside the standard library.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

BLOCKS = 20_000
MEBIBYTE = 1 << 20
HERE = Path(sys.argv[1]) if __name__ == "__main__" else Path()


@contextmanager
def scratch() -> Iterator[Path]:
    directory = HERE / "scratch"
    directory.mkdir()
    try:
        yield directory
    finally:
        shutil.rmtree(directory)


def timed(body: Callable[[], str]) -> tuple[float, str]:
    began = time.perf_counter()
    found = body()
    return time.perf_counter() - began, found


def loop(rounds: int) -> tuple[float, str]:
    """Arithmetic in the interpreter, without a system call."""

    def body() -> str:
        value = 1
        for number in range(rounds):
            value = (value * 1103515245 + number) & 0x7FFFFFFF
        return str(value)

    return timed(body)


def churn(exchanges: int) -> tuple[float, str]:
    """churn.c, which lives through all runs and holds its own clock."""
    global _churn
    if _churn is None:
        _churn = subprocess.Popen(
            [str(HERE / "churn"), str(BLOCKS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
    assert _churn.stdin is not None and _churn.stdout is not None
    _churn.stdin.write(f"{exchanges}\n")
    _churn.stdin.flush()
    seconds, total = _churn.stdout.readline().split()
    return float(seconds), total


_churn: subprocess.Popen[str] | None = None


def suite(number: int) -> tuple[float, str]:
    """So many files of the tests of boltons; of one, some tests fail in this release."""
    names = sorted(path.name for path in (HERE / "boltons" / "tests").glob("test_*.py"))
    chosen = [f"tests/{name}" for name in names if name != "test_setutils.py"][:number]

    def body() -> str:
        done = subprocess.run(
            [sys.executable, "-B", "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen],
            cwd=HERE / "boltons",
            env={**os.environ, "PYTHONPATH": f"{HERE / 'site'}:."},
            capture_output=True,
            text=True,
        )
        return done.stdout.strip().splitlines()[-1].partition(" in ")[0].replace(" ", "-")

    return timed(body)


def database(rounds: int) -> tuple[float, str]:
    """sqlite: many small transactions, each of them durable, then a bulk, an index, questions."""
    with scratch() as directory:

        def body() -> str:
            with sqlite3.connect(directory / "data.db", isolation_level=None) as base:
                base.execute("create table small (id integer primary key, text)")
                for number in range(rounds):
                    base.execute("begin")
                    base.execute("insert into small values (?, ?)", (number, f"row {number}"))
                    base.execute("update small set text = text || '!' where id = ?", (number // 2,))
                    base.execute("commit")
                base.execute("create table bulk (id integer primary key, key, text)")
                base.execute("begin")
                base.executemany(
                    "insert into bulk values (?, ?, ?)",
                    ((n, n * 7919 % 100_003, f"some text of row {n}") for n in range(100 * rounds)),
                )
                base.execute("commit")
                base.execute("create index by_key on bulk (key)")
                asked = [
                    base.execute("select count(*) from bulk where key = ?", (key,)).fetchone()[0]
                    for key in range(rounds)
                ]
                count, text = base.execute("select count(*), max(text) from small").fetchone()
            base.close()
            return f"{count}|{text}|{sum(asked)}"

        return timed(body)


def files(number: int) -> tuple[float, str]:
    """Small files in directories of a hundred: made, listed, read, renamed, every other removed."""
    with scratch() as directory:

        def body() -> str:
            crc = 0
            for at in range(number):
                if at % 100 == 0:
                    (directory / f"{at // 100}").mkdir()
                with open(directory / f"{at // 100}" / f"{at}.txt", "wb", buffering=0) as file:
                    file.write(b"%08d" % at * 128)
            names = sorted(
                os.path.join(top, name) for top, _, below in os.walk(directory) for name in below
            )
            for name in names:
                os.stat(name)
                with open(name, "rb", buffering=0) as file:
                    crc = zlib.crc32(file.read(), crc)
            for name in names[::2]:
                os.rename(name, name + "~")
            for name in names[1::2]:
                os.unlink(name)
            return f"{len(names)} {crc}"

        return timed(body)


def sequential(mebibytes: int) -> tuple[float, str]:
    """One big file, in pieces of 1 MiB, and fsync; it stays."""
    piece = os.urandom(MEBIBYTE)

    def body() -> str:
        fd = os.open(HERE / "big", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            for _ in range(mebibytes):
                if os.write(fd, piece) != MEBIBYTE:
                    raise OSError("a short write")
            os.fsync(fd)
            return str(os.fstat(fd).st_size)
        finally:
            os.close(fd)

    return timed(body)


def remove(_: int) -> tuple[float, str]:
    """The big file goes."""
    began = time.perf_counter()
    (HERE / "big").unlink()
    return time.perf_counter() - began, "removed"


def fresh() -> None:
    """Start over, with another layout of memory; the answer has been given."""
    if _churn is not None:
        _churn.communicate()
    os.execv(sys.executable, [sys.executable, *sys.argv])


PROGRAMS: dict[str, Callable[[int], tuple[float, str]]] = {
    "loop": loop,
    "churn": churn,
    "suite": suite,
    "database": database,
    "files": files,
    "sequential": sequential,
    "remove": remove,
}


def main() -> None:
    for line in sys.stdin:
        name, amount = line.split()
        if name == "fresh":
            print("= 0 fresh", flush=True)
            fresh()
        seconds, found = PROGRAMS[name](int(amount))
        print(f"= {seconds:.6f} {found}", flush=True)


if __name__ == "__main__":
    main()
