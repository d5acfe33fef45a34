"""How copies of shared memory can be had: the measurements behind docs/shared-memory.md.

sharing.c compares the ways for one size and one share of pages that are written afterwards; here it
is compiled, given a btrfs image of the same kind as the engine's, and run for all of them.

    python bench/sharing.py [--rounds N] [--megabytes N]... [--percent N]...
"""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

import click
import floor
from report import wide_console
from rich.table import Table

SOURCE = Path(__file__).with_name("sharing.c")


@click.command()
@click.option("--rounds", default=5, show_default=True, help="Of which the median is told.")
@click.option("--megabytes", multiple=True, default=(16, 128, 1024), show_default=True)
@click.option("--percent", multiple=True, default=(1, 10, 100), show_default=True)
def main(rounds: int, megabytes: tuple[int, ...], percent: tuple[int, ...]) -> None:
    """Compare the ways; milliseconds."""
    with tempfile.TemporaryDirectory(prefix="deltabox-sharing-") as directory:
        scratch = Path(directory)
        program = scratch / "sharing"
        command = ["cc", "-O2", "-Wall", "-Wextra", "-pthread", "-o", str(program), str(SOURCE)]
        subprocess.run(command, check=True)
        table = Table("MB", "written", "way", "ready", "writes", "whole")
        for size in megabytes:
            for share in percent:
                with floor.image(scratch, gigabytes=4 + size // 256) as image:
                    numbers = (str(size), str(share), str(rounds))
                    done = subprocess.run(
                        [program, *numbers, image], stdout=subprocess.PIPE, text=True, check=True
                    )
                for line in done.stdout.splitlines():
                    way, *found = line.split()
                    ready, writes, whole = (f"{float(n):.2f}" for n in found)
                    shown = whole if float(whole) else ""
                    table.add_row(str(size), f"{share} %", way, ready, writes, shown)
    wide_console().print(table)


if __name__ == "__main__":
    main()
