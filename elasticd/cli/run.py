"""`elasticd run`: starts a job on this node, a torchrun for each device, so that one death costs one device."""

from __future__ import annotations

import os
import re
import sys
import time
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Literal

import click
import msgspec

from elasticd.extras import need
from elasticd.local_cluster import settings
from elasticd.names import name_refusal
from elasticd.system.output_options import BOTH, OutputOptions
from elasticd.wire.unix_socket import SOCKET_VARIABLE

#: How often torchrun starts a device's worker again.
MAX_RESTARTS = 10


@click.command(context_settings={"allow_interspersed_args": False})
@click.option(
    "--job",
    metavar="NAME",
    help="The job's name, the same on every node (default, on one node: the script's with the time).",
)
@click.option(
    "--nnodes",
    default="1",
    show_default=True,
    metavar="MIN[:MAX]",
    help="Nodes, as torchrun takes them: the job starts with the least, and goes on with up to the most.",
)
@click.option(
    "--devices",
    type=click.IntRange(min=1),
    metavar="N",
    help="Workers of each node, the same number on every node (default: one for each GPU that torch sees).",
)
@click.option(
    "--socket",
    metavar="PATH",
    help=f"The agent's socket (default: ${SOCKET_VARIABLE}, else as the configuration says).",
)
@click.option(
    "--max-restarts",
    type=click.IntRange(min=0),
    default=MAX_RESTARTS,
    show_default=True,
    metavar="N",
    help="How often a device's worker is started again.",
)
@click.option(
    "--mode",
    type=click.Choice(["auto", "live", "restart"]),
    default="auto",
    show_default=True,
    help="live: the script makes an elasticd.Job or an elasticd.live. restart: it makes neither, and all "
    "workers start again when one fails. auto: live, and restart once the script asks for torch's own process "
    "group.",
)
@click.option(
    "--device-ids",
    metavar="I,J,...",
    help="The devices by their numbers on the node, as in 'elasticd status' (default: free ones).",
)
@click.option(
    "--log-dir",
    metavar="DIR",
    help="Write the output of each worker to a file there as well, a new one for each start of a worker.",
)
@click.option(
    "--redirects",
    "-r",
    metavar="STREAMS",
    help="Streams that go to the files alone: 0 none, 1 stdout, 2 stderr, 3 both.",
)
@click.option(
    "--tee", "-t", metavar="STREAMS", help="Streams that go to files and the terminal (with --log-dir: 3)."
)
@click.option(
    "--label/--no-label",
    default=None,
    help="Begin each line with the worker's device, as [node/0] (default: where there are several workers).",
)
@click.option("--module", "-m", is_flag=True, help="SCRIPT is the name of a module, as with python -m.")
@click.option(
    "--fresh",
    is_flag=True,
    help="Train from the beginning, whatever checkpoints there are; they stay until newer ones replace them.",
)
@click.argument("script", metavar="SCRIPT")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(
    job: str | None,
    nnodes: str,
    devices: int | None,
    socket: str | None,
    max_restarts: int,
    mode: Literal["auto", "live", "restart"],
    device_ids: str | None,
    log_dir: str | None,
    redirects: str | None,
    tee: str | None,
    label: bool | None,
    module: bool,
    fresh: bool,
    script: str,
    arguments: tuple[str, ...],
) -> None:
    """Train with SCRIPT on this node's devices, until the job is over.

    Each device gets a torchrun of its own. A plain torchrun ends all workers of its node when one of them dies;
    so the others live on, and the dead one's device joins again with a new worker. The exit code is 0 if any
    worker saw the end of the job, else that of the first torchrun that failed.

    Ctrl-C, SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 let the workers leave in good order: with a last checkpoint, if
    the job keeps any. A second one ends them at once. The exit code is then 128 + the signal's number.

    Each worker sees one GPU, as cuda:0, and its LOCAL_RANK is 0. With several workers each computes with one
    thread, unless $OMP_NUM_THREADS says otherwise.

    A script without elasticd.Job and elasticd.live runs in restart mode: one torchrun for this node's devices,
    as scripts for torchrun expect it. The same command starts a job again that failed or was stopped, from its
    newest checkpoint.
    """
    from elasticd.system.torchrun_launcher import THREADS_VARIABLE, Launch, launch

    least, most = _nodes(nnodes)
    _find(script, module)
    name = _name(job, script.rpartition(".")[2] if module else Path(script).stem, most)
    need("torch", "elasticd run")
    output = _output(log_dir, redirects, tee)
    ids = _device_ids(device_ids, devices)
    gpus, spare = _chosen_gpus(devices, ids)
    count = devices or len(ids or gpus)
    what = Launch(
        job=name,
        least=least,
        most=most,
        devices=count,
        gpus=gpus,
        socket=_agent(socket),
        max_restarts=max_restarts,
        mode=mode,
        fresh=fresh,
        command=(script, *arguments),
        module=module,
        slots=ids if not gpus else None,
        named=ids is not None,
        spare=spare,
        output=msgspec.structs.replace(output, label=(count > 1) if label is None else label),
    )
    if what.devices > 1 and THREADS_VARIABLE not in os.environ:
        click.echo(
            f"elasticd: each of the {what.devices} workers computes with one thread, as with torchrun; set "
            f"{THREADS_VARIABLE} for another number",
            err=True,
        )
    if job is None:
        click.echo(f"elasticd: job {name}", err=True)
    sys.exit(launch(what))


def _find(script: str, module: bool) -> None:
    """Raises ClickException for a script that is not there, and a module that is in no package there."""
    if not module and not os.path.exists(script):
        raise click.ClickException(
            f"{script} is not there: name the training script, and its options behind it (-m for a module)"
        )
    places = [os.getcwd(), *os.environ.get("PYTHONPATH", "").split(os.pathsep), *sys.path]
    if module and PathFinder.find_spec(script.partition(".")[0], places) is None:
        raise click.ClickException(
            f"there is no module {script} here: name it as with python -m, in the folder that has its package"
        )


def _name(job: str | None, script: str, most: int) -> str:
    """The job's name: as the user says, or the script's with the time. Raises BadParameter."""
    if job is None:
        if most > 1:
            raise click.BadParameter("a job on several nodes needs a name, the same on each: --job NAME")
        stem = re.sub(r"[^A-Za-z0-9._-]+", "-", script).strip("-._")[:64] or "job"
        return f"{stem}-{time.strftime('%m%d-%H%M%S')}"
    if not job.strip():
        raise click.BadParameter("--job is empty: name the job, or leave the option out")
    if why := name_refusal("--job", job):
        raise click.BadParameter(why)
    if job == "none":
        raise click.BadParameter("--job none: that is torch's name for jobs without one, choose another")
    return job


def _device_ids(text: str | None, devices: int | None) -> tuple[int, ...] | None:
    """The numbers in --device-ids. Raises BadParameter."""
    if text is None:
        return None
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names or not all(name.isdecimal() for name in names) or len({*map(int, names)}) < len(names):
        raise click.BadParameter(f"--device-ids {text} must be numbers of different devices, as 2,3")
    if devices is not None and devices != len(names):
        raise click.BadParameter(
            f"--device-ids names {len(names)} devices, and --devices {devices}: leave one out"
        )
    return tuple(map(int, names))


def _chosen_gpus(devices: int | None, ids: tuple[int, ...] | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The GPUs of the workers, and those that may be used in their place where another job has them. Raises
    BadParameter for an id of which this process sees no GPU, and as `_gpus`."""
    gpus = _gpus(devices or (len(ids) if ids is not None else None))
    seen = _seen_gpus() if gpus else ()
    if ids is None or not gpus:
        return gpus, tuple(name for name in seen if name not in gpus)
    if lacking := [str(index) for index in ids if str(index) not in seen]:
        raise click.BadParameter(
            f"--device-ids: there is no GPU {', '.join(lacking)}; there are {', '.join(seen)}"
        )
    return tuple(map(str, ids)), ()


def _output(log_dir: str | None, redirects: str | None, tee: str | None) -> OutputOptions:
    """The destination of the workers' output, as torchrun's options of the same names say. Raises
    BadParameter."""
    away = _streams("--redirects", redirects or "0")
    both = _streams("--tee", tee or ("0" if redirects else "3"))
    if log_dir is None:
        if redirects or tee:
            raise click.BadParameter("--redirects and --tee write files: say where by --log-dir DIR")
        return OutputOptions()
    shown = BOTH & ~away | both
    return OutputOptions(shown=shown, folder=os.path.abspath(log_dir), filed=away | both)


def _streams(option: str, text: str) -> int:
    if text not in ("0", "1", "2", "3"):
        raise click.BadParameter(f"{option} {text} must be 0 (none), 1 (stdout), 2 (stderr) or 3 (both)")
    return int(text)


def _agent(socket: str | None) -> str | None:
    """The address of the agent, if that is not the default: by the option, by the environment, or by the
    configuration, as other commands find it."""
    if socket is not None or os.environ.get(SOCKET_VARIABLE):
        return socket
    return settings(None).agent.socket


def _nodes(text: str) -> tuple[int, int]:
    least, _, most = text.partition(":")
    try:
        bounds = int(least), int(most or least)
    except ValueError:
        raise click.BadParameter(f"--nnodes {text} must be a number or MIN:MAX, as 2:8") from None
    if not 1 <= bounds[0] <= bounds[1]:
        raise click.BadParameter(f"--nnodes {text}: the least must be between 1 and the most")
    return bounds


def _gpus(devices: int | None) -> tuple[str, ...]:
    """The GPUs of `devices` workers (None: one for each GPU), by CUDA's names. There are none where torch sees
    none, or where ELASTICD_DEVICE names the device: workers take what it says, or are refused with the remedy.

    Raises ClickException where there are fewer than `devices`: two workers would share one.
    """
    from elasticd.system.torch_build import DEVICE_VARIABLE
    from elasticd.system.torchrun_launcher import GPUS_VARIABLE, visible

    asked = os.environ.get(DEVICE_VARIABLE, "")
    if devices is not None and (asked == "cpu" or ":" in asked):
        return ()
    named = visible(os.environ)
    gpus = _seen_gpus()
    if devices is None and not gpus:
        raise click.ClickException("torch sees no GPU on this node: say how many workers by --devices N")
    if devices is None or devices <= len(gpus) or not gpus:
        return gpus[:devices]
    if named is not None:
        raise click.ClickException(
            f"--devices {devices} needs as many GPUs, and {GPUS_VARIABLE}={os.environ[GPUS_VARIABLE]} names "
            f"{len(gpus)}: ask for {len(gpus)} at most, or set it to nothing to train on the CPU"
        )
    raise click.ClickException(
        f"--devices {devices} needs as many GPUs, and this node has {len(gpus)}: ask for {len(gpus)} at "
        f"most, or set {DEVICE_VARIABLE}=cpu to train on the CPU"
    )


def _seen_gpus() -> tuple[str, ...]:
    """The GPUs that this process may use, by CUDA's names."""
    from elasticd.system.torchrun_launcher import visible

    named = visible(os.environ)
    return named if named is not None else tuple(map(str, range(_counted())))


def _counted() -> int:
    """The number of GPUs that the workers' torch sees. Without a driver there are none, and nobody is asked."""
    from elasticd.system.torch_build import CannotTell, driver_is_there, torch_build

    if not driver_is_there():
        return 0
    try:
        return len(torch_build().devices)
    except CannotTell:
        return 0
