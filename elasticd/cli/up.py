"""`elasticd up`: all that one machine needs, until Ctrl-C: etcd, a coordinator, an agent, a dashboard."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

import click

from elasticd.cli.options import config_option
from elasticd.client import ApiClient, CannotReach, leader_url
from elasticd.config.credentials import credentials
from elasticd.config.tree import (
    CONFIG_VARIABLE,
    DASHBOARD_PORT,
    DEFAULT_PORT,
    Config,
    ConfigError,
    load,
)
from elasticd.local_cluster import alone, announced, running, taken
from elasticd.store.server import EtcdServer, EtcdServerError
from elasticd.store.state_file import default_folder
from elasticd.system.child_processes import Child, Interrupted, ProcessError, Processes
from elasticd.wire.unix_socket import own_path

#: Seconds for a program to start; and for the agent to reach the coordinator, after both are there.
START_SECONDS, LINK_SECONDS = 60.0, 10.0
#: Seconds between two looks at what runs.
_LOOK_SECONDS = 0.5
#: A program that ended is started again, so many times within so many seconds.
_RESTARTS, _RESTARTS_SECONDS = 3, 60.0


@click.command()
@config_option
@click.option("--devices", type=click.IntRange(min=1), help="How many devices (default: ask the machine).")
@click.option("--memory", metavar="SIZE", help="Memory of each device, as '8 GiB' (default: ask).")
@click.option("--folder", metavar="FOLDER", help="For etcd's data and the logs (default: with the state).")
@click.option("--chaos", is_flag=True, help="Let 'elasticd chaos' harm this cluster, as [chaos] enabled does.")
def up(config: str | None, devices: int | None, memory: str | None, folder: str | None, chaos: bool) -> None:
    """Run etcd, a coordinator, an agent and the dashboard on this machine, until Ctrl-C.

    For one machine. What a cluster needs is in docs/operations.md. A program of these that ends is started
    again. What etcd remembers is kept for the next time; training workers are left alone when this ends. Until
    then the other commands find this cluster by themselves.
    """
    settings = load(config)
    place = Path(folder) if folder is not None else default_folder() / f"up-{settings.cluster.name}"
    try:
        place.mkdir(parents=True, exist_ok=True, mode=0o700)
        with alone(place) as ours:
            if not ours:
                raise click.ClickException(
                    f"another 'elasticd up' runs in {place}: end that one, or give this one a name of its own "
                    "in section [cluster], or another --folder"
                )
            _run(place, config or os.environ.get(CONFIG_VARIABLE), devices, memory, chaos)
    except Interrupted:
        click.echo("ended")
    except (ProcessError, EtcdServerError) as error:
        raise click.ClickException(str(error)) from None
    except OSError as error:
        raise click.ClickException(
            f"{place} cannot be used ({error.strerror or error}): name another folder with --folder"
        ) from None


def _run(place: Path, named: str | None, devices: int | None, memory: str | None, chaos: bool) -> None:
    """Until a process of ours ends again and again, or the user asks to: raises ProcessError or Interrupted,
    always."""
    started = time.monotonic()

    def progress(text: str) -> None:
        click.echo(f"{text} ({time.monotonic() - started:.1f} s)")

    click.echo(f"starting etcd, a coordinator, an agent and the dashboard; their logs are in {place}")
    with EtcdServer(place) as etcd, Processes(place) as processes, processes.interruptible():
        progress("etcd answers")
        written = _configuration(place, named, etcd.endpoint, chaos=chaos)
        settings = load(written)
        children = _start(processes, settings, written, devices, memory)
        _wait(processes, children, settings, progress)
        pages = _pages(processes, settings, written, place)
        with announced(written):
            devices = _devices(processes, settings, children)
            served = _served(processes, pages)
            click.echo(_advice(settings, written, devices, served))
            restarts = Restarts(processes)
            while True:
                if etcd.pid is None:
                    restarts.count("etcd", "")
                    etcd.start()
                children = [restarts.running(child) for child in children]
                if pages is not None and pages.code is not None:  # the cluster does without it
                    click.echo(f"the dashboard ended: {pages.said()}", err=True)
                    pages = None
                processes.pause(_LOOK_SECONDS)


class Restarts:
    """The programs that ended by themselves, each of which is started again a few times."""

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._ends: dict[str, list[float]] = {}  # by program, on the monotonic clock

    def running(self, child: Child) -> Child:
        """Returns the program as it runs, started again where it ended. Raises ProcessError as `count` does."""
        if child.code is None:
            return child
        self.count(child.name, child.said())
        return self._processes.start(child.name, child.command)

    def count(self, name: str, output: str) -> None:
        """Notes an end, and says so. Raises ProcessError where the program ends again and again.

        Args:
            name: of the program.
            output: the end of what it wrote.
        """
        now = time.monotonic()
        ends = [end for end in self._ends.get(name, []) if now - end < _RESTARTS_SECONDS]
        self._ends[name] = [*ends, now]
        if len(ends) >= _RESTARTS:
            raise ProcessError(
                f"{name} ended {len(ends) + 1} times in {_RESTARTS_SECONDS:.0f} s, and is not started again; "
                f"training workers go on, and come back to the next 'elasticd up':\n{output}"
            )
        click.echo(f"{name} ended and is started again; training goes on meanwhile", err=True)


def _pages(processes: Processes, settings: Config, written: Path, place: Path) -> Child | None:
    """Starts the dashboard, on a port of its own where its default one is taken."""
    section = settings.dashboard
    options = ["--config", str(written)]
    if section.port == DASHBOARD_PORT and taken(section.host, section.port):
        options += ["--port", "0"]
    if section.history is None:
        options += ["--history", str(place / "dashboard.db")]
    return processes.start("dashboard", [sys.executable, "-m", "elasticd", "dashboard", *options])


def _served(processes: Processes, pages: Child | None) -> str:
    """The dashboard's address, or the reason why it does not serve."""
    if pages is None:
        return "no dashboard"

    def said() -> str | None:
        address = re.search(r"^dashboard of \S+ at (\S+)$", pages.said(), re.MULTILINE)
        return address[1] if address is not None else None

    try:
        url = processes.until(said, "the start of the dashboard", START_SECONDS, needs=[pages])
    except ProcessError as error:
        return f"no dashboard: {error}"
    return f"dashboard at {url}"


def _configuration(place: Path, named: str | None, endpoint: str, *, chaos: bool) -> Path:
    """The user's own file, with our etcd in it, so that every command finds all of it by one name; with `chaos`
    its section [chaos] is on."""
    own = {"etcd": f'endpoints = ["{endpoint}"]', **({"chaos": "enabled = true"} if chaos else {})}
    written = place / "elasticd.toml"
    text = Path(named).read_text() if named is not None else ""
    lines, replaced = [], False
    for line in text.splitlines():
        if line.strip().startswith("["):
            replaced = line.strip()[1:].partition("]")[0].strip() in own
        if not replaced:
            lines.append(line)
    for section, body in own.items():
        lines += [f"[{section}]", body]
    written.write_text("\n".join([*lines, ""]))
    return written


def _start(
    processes: Processes, settings: Config, written: Path, devices: int | None, memory: str | None
) -> list[Child]:
    named = ("--config", str(written))
    options = [*(("--devices", str(devices)) if devices else ()), *(("--memory", memory) if memory else ())]
    host, port = settings.coordinator.host, settings.coordinator.port
    # Commands and agents find the coordinator by etcd, so a default port that somebody has is no obstacle.
    another = ("--port", "0") if port == DEFAULT_PORT and taken(host, port) else ()
    return [
        processes.start("coordinator", [sys.executable, "-m", "elasticd", "coordinator", *named, *another]),
        processes.start("agent", [sys.executable, "-m", "elasticd_agent", *named, *options]),
    ]


def _wait(
    processes: Processes, children: list[Child], settings: Config, progress: Callable[[str], None]
) -> None:
    """Until a leader is there and the agent has its socket; tells `progress` of both."""
    processes.until(lambda: _url(settings), "the coordinator's election", START_SECONDS, needs=children)
    progress("the coordinator leads")
    socket = Path(settings.agent.socket or own_path())
    processes.until(socket.is_socket, "the agent's start", START_SECONDS, needs=children)
    progress("the agent serves")


def _devices(processes: Processes, settings: Config, children: list[Child]) -> int:
    """The number of devices that the agent offers: those for `elasticd run`. 0 where nobody says so soon."""

    def seen() -> int | None:
        try:
            with ApiClient(leader_url(settings), credentials(settings.security)) as api:
                return sum(len(node.devices) for node in api.status().nodes) or None
        except (CannotReach, ConfigError):
            return None

    try:
        return processes.until(seen, "the agent's word to the coordinator", LINK_SECONDS, needs=children)
    except ProcessError:
        return 0  # tokens that let nobody look, say; a process that ended is noticed next


def _advice(settings: Config, written: Path, devices: int, pages: str) -> str:
    """The next commands to type."""
    count = f" --devices {devices}" if devices else ""
    several = len(running()) > 1
    chosen = (f"  export {CONFIG_VARIABLE}={written}    # several run: this one",) if several else ()
    lines = (
        f"etcd at {settings.etcd.endpoints[0]}, coordinator at {leader_url(settings)}, "
        f"agent at {settings.agent.socket or own_path()}",
        pages,
        f"configuration {written}; commands on this machine find it by themselves",
        "in another terminal:",
        *chosen,
        f"  elasticd run --job my-job{count} train.py",
        "  elasticd top",
        *(("  elasticd chaos slow DEVICE 3    # chaos is on",) if settings.chaos.enabled else ()),
        "Ctrl-C ends all of these; training workers are left alone",
    )
    return "\n".join(lines)


def _url(settings: Config) -> str | None:
    try:
        return leader_url(settings)
    except CannotReach:
        return None
