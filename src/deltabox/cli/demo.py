"""`deltabox demo`: a tree search over a real library with a real bug."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.option(
    "--fetch",
    type=click.Path(file_okay=False, path_type=Path),
    help="Only download what the demo needs into this directory.",
)
def demo(*, fetch: Path | None) -> None:
    """Repair a real library by tree search, going back in time from each wrong branch."""
    from deltabox import demo as scripted

    if fetch is not None:
        scripted.fetch(fetch)
    else:
        scripted.run()
