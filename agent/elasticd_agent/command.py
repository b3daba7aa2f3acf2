"""The command `elasticd-agent`: its options, its signals, and errors as one message."""

from __future__ import annotations

import asyncio
import logging
import resource
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from urllib.parse import urlsplit

import click
from elasticd_planner.value import Invalid
from msgspec import structs

from elasticd.backoff import jittered
from elasticd.config.credentials import credentials
from elasticd.config.tree import Config, ConfigError, load, reloaded, with_overrides
from elasticd.records import Keys
from elasticd.store.compat import EtcdClientMissing
from elasticd.store.leader import read_leader
from elasticd.store.protocol import Store, StoreError, StoreReplaced
from elasticd.store.state_file import StateError, StateFile
from elasticd.system import network_addresses
from elasticd.system.logs import set_up
from elasticd.system.sd_notify import SdNotifier
from elasticd.version import __version__
from elasticd.wire.unix_socket import PacketError, SocketTaken
from elasticd_agent.daemon import Agent, AgentError, check_store
from elasticd_agent.hardware.devices import ProbeError
from elasticd_agent.registration import NodeTaken

#: Seconds for a leader to be there, whose route gives this node's address; then etcd's route does.
LEADER_SECONDS = 5.0
_LOOK_SECONDS = 0.2

_log = logging.getLogger(__name__)

_EXPECTED = (
    AgentError,
    ConfigError,
    EtcdClientMissing,
    Invalid,
    NodeTaken,
    PacketError,
    ProbeError,
    SocketTaken,
    StateError,
    StoreError,
)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="elasticd-agent")
@click.option("--config", "path", metavar="FILE", help="TOML configuration (default: $ELASTICD_CONFIG).")
@click.option("--node", metavar="NAME", help="This node's name (default: the host's).")
@click.option("--socket", metavar="PATH", help="Where trainers on this node find the agent.")
@click.option(
    "--address",
    metavar="HOST",
    help="Where workers of this node listen for others (default: its address on the route to the leader).",
)
@click.option("--devices", type=click.IntRange(min=1), help="How many devices (default: ask the machine).")
@click.option("--memory", metavar="SIZE", help="Memory of each device, as '8 GiB' (default: ask).")
@click.option("--etcd", metavar="HOST:PORT,...", help="etcd's endpoints.")
@click.option("--cluster", metavar="NAME", help="The cluster's name.")
@click.option(
    "--log-format", type=click.Choice(["text", "json"]), help="Lines for people, or a JSON object each."
)
@click.option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]), help="Default: info.")
def command(
    path: str | None,
    node: str | None,
    socket: str | None,
    address: str | None,
    devices: int | None,
    memory: str | None,
    etcd: str | None,
    cluster: str | None,
    log_format: str | None,
    log_level: str | None,
) -> None:
    """Run the elasticd agent of this node, until Ctrl-C or SIGTERM. Training workers are left alone."""
    options = {
        "agent.node": node,
        "agent.socket": socket,
        "agent.address": address,
        "agent.devices": devices,
        "agent.memory": memory,
        "etcd.endpoints": etcd,
        "cluster.name": cluster,
        "log.format": log_format,
        "log.level": log_level,
    }
    try:
        settings = with_overrides(load(path), options)
        set_up(settings.log, {"cluster": settings.cluster.name, "node": settings.agent.node})
        asyncio.run(run(lambda: with_overrides(load(path), options)))
    except _EXPECTED as error:
        raise click.ClickException(str(error)) from None


def _raise_descriptor_limit() -> None:
    """Lets this process have as many descriptors as it may: a shell gives 1024, and each worker, torchrun and
    snapshot of a node takes some."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def run(read: Callable[[], Config]) -> None:
    """Serve on the running loop until SIGINT or SIGTERM; SIGHUP has the configuration read anew."""
    from elasticd.store import etcd_release
    from elasticd.store.configured import etcd_options
    from elasticd.store.etcd import EtcdStore

    config = read()
    _raise_descriptor_limit()
    memory = StateFile(config.agent.state, config.cluster.name, "agent", config.agent.node)
    credentials(config.security)  # what is wrong with them is said before etcd is asked
    store = EtcdStore(etcd_options(config), known=memory.identity)
    try:
        supervisor = SdNotifier()
        loop = asyncio.get_running_loop()
        running, ending = asyncio.current_task(), False

        def end() -> None:
            """Before the agent is there this breaks the start off."""
            nonlocal ending
            ending = True
            assert running is not None
            running.cancel()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, end)
        try:
            await check_store(store, config.etcd.endpoints)
            await asyncio.to_thread(etcd_release.warn, store.release)
            located = await with_address(config, store)
        except asyncio.CancelledError:
            if ending:
                return
            raise
        agent = Agent(located, store, memory=memory, supervisor=supervisor)
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, agent.stop)

        def reload() -> None:
            nonlocal config
            supervisor.reloading()
            config = reloaded(config, read, ("chaos",))  # as the file has it, where an address may be left out
            agent.reconfigure(structs.replace(located, chaos=config.chaos))
            supervisor.ready("the configuration was read anew")

        loop.add_signal_handler(signal.SIGHUP, reload)
        await agent.run()
    except StoreReplaced as error:
        raise AgentError(memory.refusal(error)) from error
    finally:
        store.close()


async def with_address(config: Config, store: Store) -> Config:
    """The configuration with this node's address in it: the file's, else that of the route to the leader. The
    leader is waited for a little. Raises StoreError and AgentError."""
    from elasticd.store.session import host_of

    if config.agent.address is not None:
        return config
    key, deadline = Keys(cluster=config.cluster.name).leader, time.monotonic() + LEADER_SECONDS
    try:
        while (leader := await asyncio.to_thread(read_leader, store, key)) is None:
            if time.monotonic() >= deadline:
                break
            await asyncio.sleep(jittered(_LOOK_SECONDS))
    except ValueError as error:
        raise AgentError(f"{error}: another program's key? choose another [cluster] name") from error
    host = urlsplit(leader.value).hostname if leader is not None else None
    stores = [host_of(endpoint) for endpoint in config.etcd.endpoints]
    address, why = await asyncio.to_thread(network_addresses.chosen, host, stores)
    text = "workers of this node listen for others at %s, by %s; [agent] address names another one"
    _log.info(text, address, why)
    return structs.replace(config, agent=structs.replace(config.agent, address=address))
