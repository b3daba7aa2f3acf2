"""`elasticd chaos`: harms a cluster on purpose, where its configuration allows that."""

from __future__ import annotations

import click

from elasticd.chaos.client import chaos as at
from elasticd.chaos.client import slowdown
from elasticd.cli.options import cluster_options


@click.group()
def chaos() -> None:
    """Harm the cluster on purpose. Off unless section [chaos] says enabled = true.

    Coordinator and agents read that section, each its own.
    """


@chaos.command()
@cluster_options
@click.argument("device")
@click.argument("factor", type=float)
def slow(config: str | None, coordinator: str | None, device: str, factor: float) -> None:
    """Slow DEVICE (as alpha/1) down: FACTOR times the time for the same work."""
    slowdown(factor)
    with at(config, coordinator) as cluster:
        cluster.slow(device, factor)
    click.echo(f"{device} now takes {factor:g} times as long for the same work")


@chaos.command()
@cluster_options
@click.argument("device")
def recover(config: str | None, coordinator: str | None, device: str) -> None:
    """Let DEVICE (as alpha/1) run at its normal speed again."""
    with at(config, coordinator) as cluster:
        cluster.recover(device)
    click.echo(f"{device} runs at its normal speed again")


@chaos.command()
@cluster_options
@click.argument("device")
def kill(config: str | None, coordinator: str | None, device: str) -> None:
    """Kill the worker of DEVICE (as alpha/1), by SIGKILL."""
    with at(config, coordinator) as cluster:
        cluster.kill(device)
    click.echo(f"the worker of {device} is to be killed by its agent")


@chaos.command()
@cluster_options
@click.argument("device")
def freeze(config: str | None, coordinator: str | None, device: str) -> None:
    """Let the worker of DEVICE (as alpha/1) stand still, by SIGSTOP."""
    with at(config, coordinator) as cluster:
        cluster.freeze(device)
    click.echo(f"the worker of {device} is to be frozen by its agent; elasticd chaos thaw {device} ends that")


@chaos.command()
@cluster_options
@click.argument("device")
def thaw(config: str | None, coordinator: str | None, device: str) -> None:
    """Let the frozen worker of DEVICE (as alpha/1) go on."""
    with at(config, coordinator) as cluster:
        cluster.thaw(device)
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
    with at(config, coordinator) as cluster:
        if data is not None:
            cluster.cut_data(node, data, seconds, one_way=one_way)
        else:
            cluster.cut(node, seconds)
    if data is not None:
        ending = f"for {seconds:g} s" if seconds else f"until elasticd chaos heal {node} --data {data}"
        what = (
            f"what node {node} sends to node {data}"
            if one_way
            else f"what nodes {node} and {data} send to each other"
        )
        click.echo(f"{what} on the data network is to be lost, {ending}")
        return
    ending = f"for {seconds:g} s" if seconds else f"until elasticd chaos heal {node}"
    click.echo(f"node {node} is to be cut off from leader and store, {ending}")


@chaos.command()
@cluster_options
@click.option("--data", metavar="OTHER", help="Heal the data network between NODE and this node instead.")
@click.argument("node")
def heal(config: str | None, coordinator: str | None, data: str | None, node: str) -> None:
    """Let the agent of NODE (as alpha) reach leader and etcd again."""
    with at(config, coordinator) as cluster:
        if data is not None:
            cluster.heal_data(node, data)
            click.echo(f"nodes {node} and {data} are to reach each other on the data network again")
            return
        cluster.heal(node)
    click.echo(f"node {node} is to reach leader and store again")
