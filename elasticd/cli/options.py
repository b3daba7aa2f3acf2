"""What several commands share: options, JSON for programs, and the user's name."""

from __future__ import annotations

import getpass
import os
import platform
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import click
import msgspec

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


def json_option(what: str) -> Callable[[F], F]:
    """`--json`, as the argument `as_json`; `what` the JSON is, in a sentence."""
    return click.option("--json", "as_json", is_flag=True, help=f"For programs: {what[0].lower()}{what[1:]}")


def write_json(value: Any) -> None:
    """One line of JSON."""
    sys.stdout.write(msgspec.json.encode(value).decode() + "\n")
    sys.stdout.flush()


def asker() -> str:
    """Who gives this command, as in alice@host; a user of a container may have no name, but has a number."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError):
        name = str(os.getuid())
    return f"{name}@{platform.node()}"
