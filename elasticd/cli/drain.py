"""`elasticd drain`: takes a node out of all plans, its state moved off first, so that it can be stopped."""

from __future__ import annotations

import time

import click

from elasticd.cli.options import asking
from elasticd.client import ApiClient, CannotReach

_POLL_SECONDS = 0.5


@click.command()
@asking
@click.option("--undo", is_flag=True, help="Let plans use the node again.")
@click.option(
    "--wait",
    type=click.FloatRange(min=0),
    default=600.0,
    show_default=True,
    metavar="SECONDS",
    help="How long to wait until no plan uses the node; 0: not at all.",
)
@click.argument("node")
def drain(api: ApiClient, undo: bool, wait: float, node: str) -> None:
    """Let all jobs leave NODE, and wait until they have.

    Nothing stalls: the next plans are made without its devices, and its state moves in the midst of training.
    Then its torchruns and its agent can be stopped. The node stays drained, also under an agent that is started
    anew, until --undo or 'elasticd forget --node'.
    """
    api.drain(node, on=not undo)
    if undo:
        click.echo(f"plans may use node {node} again")
        return
    deadline = time.monotonic() + wait
    while (left := _left(api, node)) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    if _unheard(api, node):
        text = f"the agent of node {node} has not heard of it yet; it is told again when it comes back"
        raise click.ClickException(f"{text}: 'elasticd status' shows it till then")
    if left and wait:
        raise click.ClickException(
            f"jobs still use {left} devices of node {node}, which goes on to be drained: 'elasticd status' "
            "shows which; a job in restart mode has no plans, and leaves once you stop its torchrun there"
        )
    click.echo(f"node {node} is being drained" if left else f"no job uses node {node}: it can be stopped")


def _unheard(api: ApiClient, node: str) -> bool:
    """Returns True until the node's agent confirms the drain."""
    return any(each.node == node and each.drain_pending for each in api.status().nodes)


def _left(api: ApiClient, node: str) -> int:
    """The number of its devices that plans use; all of them, until its agent has taken note."""
    for node_status in api.status().nodes:
        if node_status.node == node:
            return node_status.members if node_status.draining else max(1, node_status.members)
    raise CannotReach(f"node {node} is gone: its agent ended")
