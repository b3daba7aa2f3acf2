"""`elasticd run`: starts a job on this node, a torchrun for each device, so that one death costs one device."""

from __future__ import annotations

import os
import subprocess
import sys

import click

from elasticd.packets import SOCKET_VARIABLE

#: How often torchrun starts a device's worker again.
MAX_RESTARTS = 10


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--job", required=True, metavar="NAME", help="The job's name, the same on every node.")
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
    help="Devices of each node, on all the same (default: the GPUs that torch sees).",
)
@click.option("--socket", metavar="PATH", help=f"The agent's socket (default: ${SOCKET_VARIABLE}).")
@click.option(
    "--max-restarts",
    type=click.IntRange(min=0),
    default=MAX_RESTARTS,
    show_default=True,
    metavar="N",
    help="How often a device's worker is started again.",
)
@click.argument("script", metavar="SCRIPT")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(
    job: str,
    nnodes: str,
    devices: int | None,
    socket: str | None,
    max_restarts: int,
    script: str,
    arguments: tuple[str, ...],
) -> None:
    """Train with SCRIPT on this node's devices, until the job is over.

    Each device gets a torchrun of its own. A plain torchrun ends all workers of its node when one of them dies;
    so the others live on, and the dead one's device joins again with a new worker. The exit code is 0 if any
    worker saw the end of the job, else that of the first torchrun that failed.
    """
    from elasticd.launching import Launch, launch

    least, most = _nodes(nnodes)
    if not os.path.exists(script):
        raise click.ClickException(
            f"{script} is not there: name the training script, and its options behind it"
        )
    sys.exit(
        launch(
            Launch(
                job=job,
                least=least,
                most=most,
                devices=devices or _gpus(),
                socket=socket,
                max_restarts=max_restarts,
                command=(script, *arguments),
            )
        )
    )


def _nodes(text: str) -> tuple[int, int]:
    least, _, most = text.partition(":")
    try:
        found = int(least), int(most or least)
    except ValueError:
        raise click.BadParameter(f"--nnodes {text} must be a number or MIN:MAX, as 2:8") from None
    if not 1 <= found[0] <= found[1]:
        raise click.BadParameter(f"--nnodes {text}: the least must be between 1 and the most")
    return found


def _gpus() -> int:
    """Asked of the interpreter that the workers will run in: this program stays free of torch."""
    asked = subprocess.run(
        [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"], capture_output=True, text=True
    )
    count = int(asked.stdout) if asked.returncode == 0 else 0
    if not count:
        raise click.ClickException("torch sees no GPU on this node: say how many workers by --devices N")
    return count
