"""`elasticd coordinator`: runs the daemon that decides."""

from __future__ import annotations

import sys
from typing import Any

import click

from elasticd.cli.options import config_option
from elasticd.config.tree import load, with_overrides
from elasticd.system.logs import set_up

#: The keys of the configuration that the options set.
_KEYS = {
    "name": "coordinator.name",
    "host": "coordinator.host",
    "port": "coordinator.port",
    "etcd": "etcd.endpoints",
    "cluster": "cluster.name",
    "insecure": "security.insecure",
    "log_format": "log.format",
    "log_level": "log.level",
}


@click.command()
@config_option
@click.option("--name", metavar="NAME", help="This coordinator's name (default: the host's).")
@click.option("--host", metavar="HOST", help="The address to serve at.")
@click.option("--port", type=click.IntRange(0, 65535), help="The port to serve at; 0 takes a free one.")
@click.option("--etcd", metavar="HOST:PORT,...", help="etcd's endpoints.")
@click.option("--cluster", metavar="NAME", help="The cluster's name.")
@click.option(
    "--insecure",
    is_flag=True,
    default=None,
    help="Serve other machines without tokens, as [security] insecure does.",
)
@click.option(
    "--log-format", type=click.Choice(["text", "json"]), help="Lines for people, or a JSON object each."
)
@click.option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]), help="Default: info.")
def coordinator(config: str | None, **given: Any) -> None:
    """Run a coordinator until Ctrl-C or SIGTERM. Training goes on without it; nothing is replanned then."""
    from elasticd.coordinator.daemon import serve

    options = {_KEYS[option]: value for option, value in given.items()}
    settings = with_overrides(load(config), options)
    set_up(settings.log, {"cluster": settings.cluster.name, "coordinator": settings.coordinator.name})
    sys.exit(serve(lambda: with_overrides(load(config), options)))
