"""`elasticd completion`: what a shell needs to complete our commands and options."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print a script for SHELL; as in: eval "$(elasticd completion bash)"."""
    completion_class = get_completion_class(shell)
    assert completion_class is not None, "click knows these three"
    click.echo(completion_class(context.find_root().command, {}, "elasticd", "_ELASTICD_COMPLETE").source())
