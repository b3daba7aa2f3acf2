"""`elasticd up`: all that one machine needs, until Ctrl-C: etcd, a coordinator, an agent."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from elasticd.cli.options import config_option
from elasticd.cli.reach import CannotReach, leader_url
from elasticd.config import CONFIG_VARIABLE, Config, load
from elasticd.packets import default_path
from elasticd.processes import Child, Interrupted, ProcessError, Processes
from elasticd.remembered import default_folder
from elasticd.store.server import EtcdServer, EtcdServerError

START_SECONDS = 60.0
#: Seconds between two looks at what runs.
_LOOK = 0.5


@click.command()
@config_option
@click.option("--devices", type=click.IntRange(min=1), help="How many devices (default: ask the machine).")
@click.option("--memory", metavar="SIZE", help="Memory of each device, as '8 GiB' (default: ask).")
@click.option("--folder", metavar="FOLDER", help="For etcd's data and the logs (default: with the state).")
def up(config: str | None, devices: int | None, memory: str | None, folder: str | None) -> None:
    """Run etcd, a coordinator and an agent on this machine, until Ctrl-C.

    For one machine. What a cluster needs is in docs/operations.md. What etcd remembers is kept for the next
    time; training workers are left alone when this ends.
    """
    settings = load(config)
    place = Path(folder) if folder is not None else default_folder() / f"up-{settings.cluster.name}"
    try:
        place.mkdir(parents=True, exist_ok=True, mode=0o700)
        with EtcdServer(place) as etcd, Processes(place) as processes, processes.interruptible():
            named = config or os.environ.get(CONFIG_VARIABLE)
            written = _configuration(place, named, etcd.endpoint)
            children = _start(processes, written, devices, memory)
            _wait(processes, children, load(written))
            click.echo(_advice(load(written), written, devices))
            while True:
                for child in children:
                    processes.alive(child)
                processes.pause(_LOOK)
    except Interrupted:
        click.echo("ended")
    except (ProcessError, EtcdServerError) as error:
        raise click.ClickException(str(error)) from None
    except OSError as error:
        raise click.ClickException(
            f"{place} cannot be used ({error.strerror or error}): name another folder with --folder"
        ) from None


def _configuration(place: Path, named: str | None, endpoint: str) -> Path:
    """The user's own file, with our etcd in it, so that every command finds all of it by one name."""
    written = place / "elasticd.toml"
    text = Path(named).read_text() if named is not None else ""
    lines, inside = [], False
    for line in text.splitlines():
        if line.strip().startswith("["):
            inside = line.strip().startswith("[etcd]")
        if not inside:
            lines.append(line)
    written.write_text("\n".join([*lines, "[etcd]", f'endpoints = ["{endpoint}"]', ""]))
    return written


def _start(processes: Processes, written: Path, devices: int | None, memory: str | None) -> list[Child]:
    named = ("--config", str(written))
    options = [*(("--devices", str(devices)) if devices else ()), *(("--memory", memory) if memory else ())]
    return [
        processes.start("coordinator", [sys.executable, "-m", "elasticd", "coordinator", *named]),
        processes.start("agent", [sys.executable, "-m", "elasticd_agent", *named, *options]),
    ]


def _wait(processes: Processes, children: list[Child], settings: Config) -> None:
    """Until a leader is there and the agent has its socket."""
    processes.until(lambda: _url(settings), "the coordinator's election", START_SECONDS, needs=children)
    socket = Path(settings.agent.socket or default_path())
    processes.until(socket.is_socket, "the agent's start", START_SECONDS, needs=children)


def _advice(settings: Config, written: Path, devices: int | None) -> str:
    """What to do next."""
    named = f" --socket {settings.agent.socket}" if settings.agent.socket else ""
    count = f" --devices {devices}" if devices else ""
    return (
        f"etcd at {settings.etcd.endpoints[0]}, coordinator at {leader_url(settings)}, "
        f"agent at {settings.agent.socket or default_path()}\n"
        "in another terminal:\n"
        f"  export ELASTICD_CONFIG={written}\n"
        f"  elasticd run --job my-job{named}{count} train.py\n"
        "  elasticd top\n"
        "Ctrl-C ends all three; training workers are left alone"
    )


def _url(settings: Config) -> str | None:
    try:
        return leader_url(settings)
    except CannotReach:
        return None
