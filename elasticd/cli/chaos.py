"""`elasticd chaos`: harms a cluster on purpose, where its configuration allows that."""

from __future__ import annotations

import math

import click

from elasticd.cli.options import config_option, coordinator_option
from elasticd.cli.reach import reach


@click.group()
def chaos() -> None:
    """Harm the cluster on purpose. Off unless section [chaos] says enabled = true."""


@chaos.command()
@config_option
@coordinator_option
@click.argument("device")
@click.argument("factor", type=float)
def slow(config: str | None, coordinator: str | None, device: str, factor: float) -> None:
    """Slow DEVICE (as alpha/1) down: FACTOR times the time for the same work."""
    if not math.isfinite(factor) or factor < 1:
        raise click.BadParameter(f"FACTOR {factor:g} must be a number of at least 1 (1 is normal speed), as 3")
    with reach(config, coordinator) as api:
        api.chaos("slow", device, factor)
    click.echo(f"{device} now takes {factor:g} times as long for the same work")


@chaos.command()
@config_option
@coordinator_option
@click.argument("device")
def recover(config: str | None, coordinator: str | None, device: str) -> None:
    """Let DEVICE (as alpha/1) run at its normal speed again."""
    with reach(config, coordinator) as api:
        api.chaos("recover", device)
    click.echo(f"{device} runs at its normal speed again")
