"""`elasticd checkpoint`: what lies in a folder of checkpoints, whether it is sound, and one file of it all."""

from __future__ import annotations

import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path

import click
from rich.text import Text

from elasticd.checkpoints.checksums import Damaged
from elasticd.checkpoints.export import CannotExport
from elasticd.checkpoints.export import export as write
from elasticd.checkpoints.folder import Found, damages, is_name, look, scan, sound
from elasticd.checkpoints.manifest import MANIFEST
from elasticd.cli.console import command_console
from elasticd.cli.job_argument import job_with_plans
from elasticd.cli.options import asking, json_option, plain_table, write_json
from elasticd.client import ApiClient, CannotReach, asker
from elasticd.codec.safe_text import in_one_line
from elasticd.extras import need

#: Bytes of a file of weights, at most.
_SHARD = "5GB"
#: Seconds between two looks for a checkpoint that was asked for.
_POLL_SECONDS = 0.5


@click.group()
def checkpoint() -> None:
    """Ask a job for a checkpoint; list, verify and export those in a folder, which needs no cluster."""


@checkpoint.command()
@asking
@click.option(
    "--wait",
    type=click.FloatRange(min=0, max=86_400),
    default=600.0,
    show_default=True,
    help="Longest time until it is whole on disk; 0: do not wait.",
)
@click.argument("job", required=False)
def now(api: ApiClient, wait: float, job: str | None) -> None:
    """Have JOB make a checkpoint now, and wait until it is whole.

    Without JOB it is the one that runs. Training goes on while it is written. Where one is being written
    already, the next follows it.
    """
    last = max((event.id for event in api.events()), default=0)
    status = api.status()
    job = job or job_with_plans(status, None, quiet=False)
    asked = status.job(job)
    step = asked.step if asked is not None else 0
    api.checkpoint(job, by=asker())
    click.echo(waited(api, job, last, step, wait) if wait else f"job {job} was asked for a checkpoint")


def waited(api: ApiClient, job: str, last: int, step: int, seconds: float) -> str:
    """Waits for a checkpoint that a job was asked for; what its event says.

    Args:
        api: the coordinator's.
        job: its name.
        last: id of the last event before it was asked.
        step: that the job was at then.
        seconds: the longest time.

    Raises:
        CannotReach: there is none in time, or the job ended.
        ClickException: it could not be made.
    """
    deadline = time.monotonic() + seconds
    while True:
        job_status = api.status().job(job)  # before events are read: one of its last steps may tell of it
        if job_status is not None:
            step = min(step, job_status.step)  # it may roll back
        if (checkpoint := _made(api, job, last, step)) is not None:
            return checkpoint
        if job_status is None or job_status.over:
            raise CannotReach(f"job {job} has ended: 'elasticd checkpoint list FOLDER' says what it left")
        if time.monotonic() >= deadline:
            raise CannotReach(
                f"job {job} has made no checkpoint within {seconds:g} s of being asked: 'elasticd logs {job}' "
                "says what it is at; ask again if it lost a worker meanwhile"
            )
        time.sleep(_POLL_SECONDS)


def _made(api: ApiClient, job: str, after: int, step: int) -> str | None:
    """The text of the first event after this one that tells of a checkpoint of the job, of this step or later.
    Raises `ClickException` where it tells that one could not be made."""
    for event in api.events(after):
        if event.job != job or event.data.get("step", 0) < step:
            continue
        if event.kind == "checkpoint":
            return in_one_line(event.text)
        if event.kind == "checkpoint_failed" and not event.data.get("skipped"):
            raise click.ClickException(in_one_line(event.text))
    return None


@checkpoint.command(name="list")
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@json_option("One JSON array.")
def list_(folder: Path, as_json: bool) -> None:
    """List the checkpoints of a folder, the newest first.

    What their files hold is not read: `verify` does that.
    """
    checkpoints = scan(folder)
    if as_json:
        write_json([_as_json(item) for item in checkpoints])
        return
    console = command_console()
    if not checkpoints:
        console.print(f"no checkpoint in {folder}")
        return
    table = plain_table("checkpoint", ">step", ">plan", ">devices", ">size", "written", whole=1)
    for item in checkpoints:
        table.add_row(*_row(item))
    console.print(table)
    for item in checkpoints:
        if item.damage:
            click.echo(f"damaged: {item.damage}")


def _as_json(item: Found) -> dict[str, object]:
    manifest = item.manifest
    row: dict[str, object] = {"name": item.name, "step": item.step, "plan": item.plan, "damage": item.damage}
    if manifest is not None:
        row |= {"bytes": manifest.bytes, "serial": manifest.serial, "origin": manifest.origin}
    return row


def _row(item: Found) -> tuple[str | Text, ...]:
    if item.damage or item.manifest is None:
        return item.name, str(item.step), str(item.plan), "", Text("damaged", style="red"), ""
    written = datetime.fromtimestamp((item.path / MANIFEST).stat().st_mtime)
    return (
        item.name,
        str(item.step),
        str(item.plan),
        str(len(item.manifest.origin.binding)),
        _size(item.manifest.bytes),
        f"{written:%Y-%m-%d %H:%M}",
    )


def _size(size: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} TiB"


@checkpoint.command()
@click.argument("path", type=click.Path(exists=True, file_okay=False, path_type=Path))
@json_option("By the name of each checkpoint, what is damaged.")
def verify(path: Path, as_json: bool) -> None:
    """Read every byte of a checkpoint, or of all in a folder, and compare it with its checksums.

    Exits with 1 where anything is damaged.
    """
    one = (path / MANIFEST).exists() or is_name(path.name)
    checkpoints = (look(path),) if one else scan(path)
    if not checkpoints:
        raise click.ClickException(f"no checkpoint in {path}")
    damage: dict[str, list[str]] = {}
    for item in checkpoints:
        wrong = damage[item.name] = [*damages(item.path)]
        if not as_json:
            click.echo("\n  ".join((f"{item.name}: " + ("damaged" if wrong else "sound"), *wrong)))
    if as_json:
        write_json(damage)
    damaged = sum(map(bool, damage.values()))
    if damaged:
        raise click.ClickException(f"{damaged} of {len(checkpoints)} damaged")


@checkpoint.command()
@click.argument("path", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("out", type=click.Path(dir_okay=False, path_type=Path), required=False)
@click.option("--moments", is_flag=True, help="The optimizer's state too, as optimizer.state.NAME.PLANE.")
@click.option("--module", default="", metavar="NAME", help="Of a model of several modules that one alone.")
@click.option(
    "--hf",
    "folder",
    metavar="DIR",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write a folder that from_pretrained of transformers loads, in place of OUT.",
)
@click.option(
    "--base",
    metavar="FOLDER",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="With --hf: the folder of the model that was trained, whose tokenizer is copied.",
)
@click.option("--merge", is_flag=True, help="With --hf: LoRA adapters are merged into the base model.")
@click.option("--max-shard-size", metavar="SIZE", default=_SHARD, help="With --hf: of a file of weights.")
def export(
    path: Path,
    out: Path | None,
    moments: bool,
    module: str,
    folder: Path | None,
    base: Path | None,
    merge: bool,
    max_shard_size: str,
) -> None:
    """Write a checkpoint's parameters and buffers into one safetensors file, or a folder of transformers.

    PATH is a checkpoint, or a folder of checkpoints, whose newest is taken. Names of a model of several modules
    begin with the module's, as in vision.blocks.0.weight; --module vision writes blocks.0.weight and so on.
    """
    newest = _newest(path)
    if newest.damage or newest.manifest is None:
        raise click.ClickException(newest.damage)
    if folder is not None:
        if out is not None or moments:
            raise click.UsageError("--hf DIR writes a folder in place of OUT, without moments: leave these out")
        if module:
            raise click.UsageError(f"--hf DIR writes the whole model: leave --module {module} out, or name OUT")
        need("transformers", "elasticd checkpoint export --hf")
        command = [sys.executable, "-m", "elasticd.models.huggingface", str(newest.path), str(folder)]
        command += ["--base", str(base)] if base is not None else []
        command += ["--merge"] if merge else []
        sys.exit(subprocess.run([*command, "--max-shard-size", max_shard_size], check=False).returncode)
    if out is None:
        raise click.UsageError("name the file, OUT, or with --hf DIR the folder to write")
    try:
        size = write(newest.path, newest.manifest, out, moments=moments, module=module)
    except (Damaged, CannotExport, OSError) as error:
        raise click.ClickException(str(error)) from None
    click.echo(f"{out}: {_size(size)}, step {newest.step}")


def _newest(path: Path) -> Found:
    """The checkpoint at this path, or the newest sound one of a folder."""
    if not (path / MANIFEST).exists() and not is_name(path.name) and (kept := sound(scan(path))):
        return kept[0]
    return look(path)
