"""`elasticd dashboard`: shows the cluster to browsers, and keeps what happened over leaders."""

from __future__ import annotations

import sys
from typing import Any

import click

from elasticd.cli.options import cluster_options
from elasticd.config.tree import with_overrides
from elasticd.local_cluster import settings as settings_of
from elasticd.system.logs import set_up

#: The keys of the configuration that the options set.
_KEYS = {
    "host": "dashboard.host",
    "port": "dashboard.port",
    "history": "dashboard.history",
    "log_format": "log.format",
    "log_level": "log.level",
}


@click.command()
@cluster_options
@click.option("--host", metavar="HOST", help="The address to serve at (default: 127.0.0.1).")
@click.option("--port", type=click.IntRange(0, 65535), help="The port to serve at; 0 takes a free one.")
@click.option("--history", metavar="FILE", help="The file of the history (SQLite).")
@click.option(
    "--log-format", type=click.Choice(["text", "json"]), help="Lines for people, or a JSON object each."
)
@click.option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]), help="Default: info.")
def dashboard(config: str | None, coordinator: str | None, **given: Any) -> None:
    """Serve the cluster's pages until Ctrl-C or SIGTERM.

    A process of its own: it listens to whoever leads, keeps events, steps and measurements in a file, and
    passes on what people ask for with their own token. It may be started and ended at any time.
    """
    from elasticd.dashboard.daemon import serve

    options = {_KEYS[option]: value for option, value in given.items()}
    settings = with_overrides(settings_of(config), options)
    set_up(settings.log, {"cluster": settings.cluster.name})
    sys.exit(serve(settings, coordinator))
