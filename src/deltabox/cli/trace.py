"""`deltabox trace`: a search shown again from the file it has written."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console

from deltabox.errors import DeltaBoxError


@click.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--until", type=float, help="Only what had happened after so many seconds.")
def trace(*, file: Path, until: float | None) -> None:
    """Show a search, finished or interrupted, from its trace FILE."""
    from deltabox import explore

    picture = explore.Picture()
    count = 0
    try:
        for event in explore.replay(file):
            if until is not None and event.at > until:
                break
            picture(event)
            count += 1
    except ValueError as error:
        raise DeltaBoxError(f"{file} is no trace of a search: {error}") from error
    if not count:
        raise DeltaBoxError(f"{file} has no events")
    Console().print(picture.render())
