"""`elasticd config`: detection and policy as they are, and changed while everything runs; `pause`, `resume`."""

from __future__ import annotations

import time

import click
from rich.table import Table

from elasticd.cli.console import command_console
from elasticd.cli.options import asking, json_option, write_json
from elasticd.client import ApiClient, CannotReach, asker
from elasticd.coordinator.live_config import key_now

PAUSED = "policy.paused"


@click.group()
def config() -> None:
    """Show and change detection and policy while running; kept in etcd, over what the file says."""


@config.command()
@asking
@json_option("The value, or all by their keys.")
@click.argument("key", required=False)
def get(api: ApiClient, as_json: bool, key: str | None) -> None:
    """Show the value of KEY, or all."""
    settings = api.settings()
    key = key and key_now(key)
    if key is not None and key not in settings.values:
        raise CannotReach(f"there is no key {key!r}; there are: {', '.join(sorted(settings.values))}")
    if as_json:
        write_json(settings.values if key is None else settings.values[key])
        return
    if key is not None:
        click.echo(_text(settings.values[key]))
        return
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, value in sorted(settings.values.items()):
        table.add_row(name, _text(value), "changed while running" if name in settings.changed else "")
    command_console().print(table)


@config.command("set", context_settings={"ignore_unknown_options": True})  # a value may be below zero
@asking
@click.argument("key")
@click.argument("value")
def set_(api: ApiClient, key: str, value: str) -> None:
    """Change KEY, as policy.horizon_steps, to VALUE, at once and for every later leader."""
    api.change({key: value}, by=asker())
    click.echo(f"{key} = {value}")


@config.command()
@asking
@click.argument("key")
def unset(api: ApiClient, key: str) -> None:
    """Let KEY be as in the coordinator's file again."""
    api.change({key: None}, by=asker())
    click.echo(f"{key} is as in the file again")


@config.command()
@asking
@json_option("All changes, the oldest first.")
def history(api: ApiClient, as_json: bool) -> None:
    """Show every change: when, by whom, and what differed from the file from then on."""
    settings = api.settings()
    if as_json:
        write_json(settings.history)
        return
    for record in settings.history:
        clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.at))
        values = ", ".join(f"{key} = {_text(value)}" for key, value in sorted(record.values.items()))
        click.echo(f"{record.number:>4}  {clock}  {record.by}: {values or 'all as in the file'}")


@click.command()
@asking
def pause(api: ApiClient) -> None:
    """Let running plans stay as they are, until `elasticd resume`; faults and drains are still answered."""
    api.change({PAUSED: True}, by=asker())
    click.echo("replanning is paused; 'elasticd resume' ends that")


@click.command()
@asking
def resume(api: ApiClient) -> None:
    """Let plans be replaced by better ones again."""
    api.change({PAUSED: None}, by=asker())
    click.echo("replanning goes on")


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
