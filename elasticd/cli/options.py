"""Options that several commands share: options, tables, and JSON for programs."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Literal, TypeVar

import click
import msgspec
from rich.table import Table

from elasticd.client import reach

F = TypeVar("F", bound=Callable[..., Any])


def config_option(function: F) -> F:
    """`--config FILE`, as the argument `config`."""
    option = click.option("--config", metavar="FILE", help="TOML configuration (default: $ELASTICD_CONFIG).")
    return option(function)


def cluster_options(function: F) -> F:
    """`--config FILE` and `--coordinator URL`, as the arguments `config` and `coordinator`."""
    option = click.option(
        "--coordinator",
        metavar="URL",
        help="The coordinator, as http://HOST:PORT (default: ask etcd who leads).",
    )
    return config_option(option(function))


def asking(command: Callable[..., None]) -> Callable[..., None]:
    """`cluster_options` for a `command` that asks the coordinator that they name: it gets that as `api`."""

    @cluster_options
    @wraps(command)
    def asked(config: str | None, coordinator: str | None, **given: Any) -> None:
        with reach(config, coordinator) as api:
            command(api, **given)

    return asked


def json_option(what: str) -> Callable[[F], F]:
    """`--json`, as the argument `as_json`; `what` the JSON is, in a sentence."""
    return click.option("--json", "as_json", is_flag=True, help=f"For programs: {what[0].lower()}{what[1:]}")


def plain_table(*columns: str, whole: int = 0) -> Table:
    """A table without lines, by the heads of its columns; one that begins with ">" is aligned to the right.
    What is in the first `whole` columns is never broken into lines."""
    table = Table(box=None, header_style="dim", pad_edge=False)
    for place, head in enumerate(columns):
        justify: Literal["left", "right"] = "right" if head.startswith(">") else "left"
        table.add_column(head.removeprefix(">"), justify=justify, no_wrap=place < whole)
    return table


def write_json(value: Any) -> None:
    """One line of JSON."""
    click.echo(msgspec.json.encode(value))
