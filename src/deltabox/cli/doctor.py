"""`deltabox doctor`: what the host offers, as a table or as JSON; exit code 1 if too little."""

from __future__ import annotations

import sys

import click
import msgspec
from rich.console import Console
from rich.table import Table

from deltabox.doctor import Finding, examine, sentences


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
@click.option("--clean", is_flag=True, help="First remove what a killed engine left behind.")
def doctor(*, as_json: bool, clean: bool) -> None:
    """Try every kernel and host feature that DeltaBox uses.

    The exit code is 1 when the engine cannot run here.
    """
    cleaned = _clean() if clean else None
    findings = examine()
    reasons = sentences(findings)
    if as_json:
        answer: dict[str, object] = {"findings": findings, "blockers": reasons}
        if cleaned is not None:
            answer["cleaned"] = cleaned
        click.echo(msgspec.json.format(msgspec.json.encode(answer), indent=2))
    else:
        _show(findings, reasons, cleaned)
    sys.exit(1 if reasons else 0)


def _clean() -> list[str]:
    """What was removed, one line each. Needs no engine running; one that runs is left alone."""
    from deltabox._connection import state_directory
    from deltabox.keeper.journal import clean

    return clean(state_directory())


def _show(findings: list[Finding], reasons: list[str], cleaned: list[str] | None) -> None:
    console = Console()
    if cleaned is not None:
        for line in cleaned or ["nothing was left behind"]:
            console.print(f"clean: {line}", highlight=False, markup=False)
    table = Table(title="What DeltaBox needs from this host", title_justify="left")
    table.add_column("feature", overflow="fold")
    table.add_column("what it is for", overflow="fold")
    table.add_column("here", no_wrap=True)
    table.add_column("how to get it", overflow="fold")
    table.add_column("works without it", overflow="fold")
    for finding in findings:
        table.add_row(
            finding.name,
            finding.purpose,
            _mark(finding),
            "" if finding.present else _remedy(finding),
            finding.without,
        )
    console.print(table)
    if not reasons:
        console.print("[green]DeltaBox can run here.[/green]")
    for reason in reasons:
        console.print(reason, style="red", highlight=False, markup=False)


def _mark(finding: Finding) -> str:
    if finding.present is None:
        return "[dim]not tried[/dim]"
    if finding.present:
        return "[green]yes[/green]"
    return "[red]no, required[/red]" if finding.required else "[yellow]no, optional[/yellow]"


def _remedy(finding: Finding) -> str:
    return finding.remedy if finding.present is None else f"{finding.remedy} ({finding.remark})"
