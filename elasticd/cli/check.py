"""`elasticd check`: tries a training script's model on several layouts and compares with one process."""

from __future__ import annotations

import os
import subprocess
import sys

import click

from elasticd.extras import need


class CannotCompare(click.ClickException):
    """There is nothing to compare; another exit code than where a layout is wrong."""

    exit_code = 2


@click.command(context_settings={"allow_interspersed_args": False})
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def check(script: str, arguments: tuple[str, ...]) -> None:
    """Try a script's model on small layouts and compare one step's outputs and gradients with one process.

    SCRIPT is run with its ARGUMENTS up to its elasticd.Job; no agent is needed. All layouts run in one process,
    in threads, on a few samples. What differs is named, with the rule that is wrong. Exit code 0: all are
    alike; 1: one is not; 2: nothing could be compared.
    """
    if not os.path.exists(script):
        raise CannotCompare(f"{script} is not there: name the training script, and its options behind it")
    need("torch", "elasticd check")
    command = [sys.executable, "-m", "elasticd.runtime.checking", script, *arguments]
    sys.exit(subprocess.run(command, check=False).returncode)
