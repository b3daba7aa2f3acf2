"""`elasticd coordinator`: runs the daemon that decides."""

from __future__ import annotations

import logging
import sys

import click

from elasticd.cli.options import config_option
from elasticd.config import load, with_overrides


@click.command()
@config_option
@click.option("--name", metavar="NAME", help="This coordinator's name (default: the host's).")
@click.option("--host", metavar="HOST", help="The address to serve at.")
@click.option("--port", type=click.IntRange(0, 65535), help="The port to serve at; 0 takes a free one.")
@click.option("--etcd", metavar="HOST:PORT,...", help="etcd's endpoints.")
@click.option("--cluster", metavar="NAME", help="The cluster's name.")
@click.option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]), default="info")
def coordinator(
    config: str | None,
    name: str | None,
    host: str | None,
    port: int | None,
    etcd: str | None,
    cluster: str | None,
    log_level: str,
) -> None:
    """Run a coordinator until Ctrl-C or SIGTERM. Training goes on without it; nothing is replanned then."""
    from elasticd.coordinator.daemon import serve

    logging.basicConfig(level=log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    options = {
        "coordinator.name": name,
        "coordinator.host": host,
        "coordinator.port": port,
        "etcd.endpoints": etcd,
        "cluster.name": cluster,
    }
    sys.exit(serve(lambda: with_overrides(load(config), options)))
