"""`deltabox version`."""

from __future__ import annotations

import platform
from importlib import metadata

import click


@click.command()
def version() -> None:
    """Print the versions of DeltaBox, Python and the kernel."""
    click.echo(
        f"deltabox {metadata.version('deltabox')}, "
        f"Python {platform.python_version()}, "
        f"{platform.system()} {platform.release()} {platform.machine()}"
    )
