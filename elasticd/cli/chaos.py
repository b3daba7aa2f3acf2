"""`elasticd chaos`: harms a cluster on purpose, where its configuration allows that."""

from __future__ import annotations

import click

from elasticd.chaos.client import Chaos, slowdown
from elasticd.chaos.client import chaos as at
from elasticd.cli.options import asking, cluster_options
from elasticd.client import ApiClient


@click.group()
def chaos() -> None:
    """Harm the cluster on purpose, where its configuration allows that.

    It is off unless section [chaos] says enabled = true; coordinator and agents read that section, each its
    own. 'elasticd up --chaos' has it on.
    """


@chaos.command()
@asking
@click.argument("device")
@click.argument("factor", type=float, callback=lambda context, argument, factor: slowdown(factor))
def slow(api: ApiClient, device: str, factor: float) -> None:
    """Slow DEVICE (as alpha/1) down: FACTOR times the time for the same work."""
    pending = Chaos(api).slow(device, factor)
    _echo(f"{device} now takes {factor:g} times as long for the same work", pending)


@chaos.command()
@asking
@click.argument("device")
def recover(api: ApiClient, device: str) -> None:
    """Let DEVICE (as alpha/1) run at its normal speed again."""
    pending = Chaos(api).recover(device)
    _echo(f"{device} runs at its normal speed again", pending)


@chaos.command()
@asking
@click.argument("device")
def kill(api: ApiClient, device: str) -> None:
    """Kill the worker of DEVICE (as alpha/1), by SIGKILL."""
    Chaos(api).kill(device)
    click.echo(f"the worker of {device} is to be killed by its agent")


@chaos.command()
@asking
@click.argument("device")
def freeze(api: ApiClient, device: str) -> None:
    """Let the worker of DEVICE (as alpha/1) stand still, by SIGSTOP."""
    Chaos(api).freeze(device)
    click.echo(f"the worker of {device} is to be frozen by its agent; elasticd chaos thaw {device} ends that")


@chaos.command()
@asking
@click.argument("device")
def thaw(api: ApiClient, device: str) -> None:
    """Let the frozen worker of DEVICE (as alpha/1) go on."""
    Chaos(api).thaw(device)
    click.echo(f"the worker of {device} is to go on")


@chaos.command()
@cluster_options
@click.option(
    "--for",
    "seconds",
    type=click.FloatRange(min=0),
    default=0.0,
    metavar="SECONDS",
    help="Heal it after so long (default: when told).",
)
@click.option("--data", metavar="OTHER", help="Cut the data network between NODE and this node instead.")
@click.option("--one-way", is_flag=True, help="With --data: only what NODE sends is lost.")
@click.argument("node")
def cut(
    config: str | None, coordinator: str | None, seconds: float, data: str | None, one_way: bool, node: str
) -> None:
    """Cut the agent of NODE (as alpha) off from leader and etcd; its workers train on.

    The cut ends by `elasticd chaos heal`, after --for SECONDS, or with the leader that ordered it. With --data
    OTHER the workers of the two nodes lose each other, and their agents nobody: in silence where an agent may
    set routes (root); elsewhere it shuts its workers' connections once, and says so in its log.
    """
    if one_way and data is None:
        raise click.UsageError("--one-way is about the data network: name the other node by --data")
    ending = f"for {seconds:g} s" if seconds else f"until elasticd chaos heal {node}"
    with at(config, coordinator) as cluster:
        if data is None:
            cluster.cut(node, seconds)
            click.echo(f"node {node} is to be cut off from leader and store, {ending}")
            return
        cluster.cut_data(node, data, seconds, one_way=one_way)
    lost = f"node {node} sends to node {data}" if one_way else f"nodes {node} and {data} send to each other"
    ending += "" if seconds else f" --data {data}"
    click.echo(f"what {lost} on the data network is to be lost, {ending}")


@chaos.command()
@asking
@click.option("--data", metavar="OTHER", help="Heal the data network between NODE and this node instead.")
@click.argument("node")
def heal(api: ApiClient, data: str | None, node: str) -> None:
    """Let the agent of NODE (as alpha) reach leader and etcd again."""
    if data is not None:
        Chaos(api).heal_data(node, data)
        click.echo(f"nodes {node} and {data} are to reach each other on the data network again")
        return
    Chaos(api).heal(node)
    click.echo(f"node {node} is to reach leader and store again")


def _echo(words: str, pending: tuple[str, ...]) -> None:
    """Prints that an order was heard, or which agents are told later."""
    if pending:
        words = (
            f"the agent of node {', '.join(pending)} has not heard of it yet; it is told once it is back, "
            "while this coordinator leads"
        )
    click.echo(words)
