"""`elasticd demo`: a real job replans around a slowed worker; the exit code says whether all figures hold."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from elasticd.cli import INTERRUPTED
from elasticd.cli.console import command_console


@click.command()
@click.option("--out", metavar="DIR", default="demo-report", show_default=True, help="Where the report goes.")
@click.option("--steps", type=click.IntRange(min=1), help="Steps of the job (default: what the story takes).")
def demo(out: str, steps: int | None) -> None:
    """Train a real model on emulated devices, slow one of them down, and watch the job replan.

    Starts a real etcd, a coordinator, two agents and two torchruns on this machine, and ends them all. Takes
    less than three minutes on two cores.
    """
    import msgspec

    from elasticd.client import CannotReach
    from elasticd.demo.run import Folders, run
    from elasticd.demo.scenario import DemoError, DemoScenario
    from elasticd.demo.show import show
    from elasticd.store.server import EtcdServerError
    from elasticd.system.child_processes import Interrupted, ProcessError

    console = command_console(markup=True)
    scenario = DemoScenario() if steps is None else DemoScenario(steps=steps)
    folders = Folders(out=Path(out))
    try:
        record = run(scenario, folders, console)
    except Interrupted:
        console.print("interrupted: every process that the demo started was ended")
        sys.exit(INTERRUPTED)
    except (CannotReach, DemoError, EtcdServerError, ProcessError) as error:
        raise click.ClickException(f"{error}\nlogs: {folders.logs}") from None
    (folders.out / "record.json").write_bytes(msgspec.json.encode(record))
    sys.exit(show(record, folders.out, console))
