"""The command line: `deltabox COMMAND`, one file per command.

A command does no work of its own: it calls the library and shows the answer, so that whatever
it can do a program can do too.
"""

from __future__ import annotations

import sys

import click

from deltabox.cli.demo import demo
from deltabox.cli.doctor import doctor
from deltabox.cli.trace import trace
from deltabox.cli.version import version
from deltabox.errors import DeltaBoxError

__all__ = ["cli", "main"]


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def cli() -> None:
    """Live Linux sandboxes that can be checkpointed, rolled back and forked in milliseconds."""


cli.add_command(demo)
cli.add_command(doctor)
cli.add_command(trace)
cli.add_command(version)


def main() -> None:
    """The console script: an error of ours is one sentence and exit code 1, not a traceback."""
    try:
        cli(prog_name="deltabox")
    except DeltaBoxError as error:
        click.echo(f"deltabox: {error}", err=True)
        sys.exit(1)
