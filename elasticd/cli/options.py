"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])


def config_option(function: F) -> F:
    """`--config FILE`, as the argument `config`."""
    option = click.option("--config", metavar="FILE", help="TOML configuration (default: $ELASTICD_CONFIG).")
    return option(function)


def coordinator_option(function: F) -> F:
    """`--coordinator URL`, as the argument `coordinator`."""
    option = click.option(
        "--coordinator",
        metavar="URL",
        help="The coordinator, as http://HOST:PORT (default: ask etcd who leads).",
    )
    return option(function)
