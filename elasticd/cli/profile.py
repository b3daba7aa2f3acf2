"""`elasticd profile`: measures what a model's sections cost on this device, and says how good the fit is."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec
from elasticd_planner.profiling.samples import Samples
from elasticd_planner.value import FILE_VERSION
from rich.console import Console
from rich.table import Table
from rich.text import Text

from elasticd.cli.console import command_console
from elasticd.cli.options import json_option, plain_table
from elasticd.extras import install, need
from elasticd.wire.profiler import WIDTHS, Answer, Describe, Described, Done, Failed, Progress, Request

if TYPE_CHECKING:
    from elasticd_planner.profiling.regression import SectionFit
    from elasticd_planner.profiling.sample_profile import MeasuredProfile
    from elasticd_planner.spec.model import ModelSpec

#: Tokens of a sample of FILE.py:NAME where none are named.
_SAMPLE_TOKENS = 256

#: Seconds that the process that measures may take to end.
_EXIT_TIMEOUT_SECONDS = 10.0

#: Errors from here on are shown in colour: plans made of such figures deserve a second look.
_LARGE = 0.15

#: Noise from here on is told.
_NOISY = 0.1


class _Counts(click.ParamType):  # type: ignore[type-arg]
    """Whole numbers with commas between them."""

    name = "N,N,..."

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            counts = tuple(int(part) for part in str(value).split(","))
        except ValueError:
            counts = ()
        if not counts or min(counts) < 1:
            self.fail(f"{value!r} must be positive whole numbers with commas between them, as in 1,2,4")
        return counts


@click.command()
@click.argument("target", metavar="SCRIPT|FILE.py:NAME")
@click.argument("arguments", nargs=-1, metavar="[-- ARGUMENTS...]")
@click.option(
    "--widths",
    type=_Counts(),
    help="Sizes of TP groups.  [default: 1, 2 and 4, as far as the model's rules cut it]",
)
@click.option(
    "--tokens",
    type=_Counts(),
    help="Tokens of micro-batches, multiples of --sample-tokens.  [default: 1, 2, 4 and 8 samples]",
)
@click.option(
    "--sample-tokens",
    type=click.IntRange(min=1),
    help="Tokens of one sample.  [default: those of the script's samples; of FILE.py:NAME 256]",
)
@click.option(
    "--repeats", type=click.IntRange(min=3), default=20, show_default=True, help="Times of each case."
)
@click.option("--device", default="cpu", show_default=True, help="cpu, cuda or cuda:N.")
@click.option(
    "--threads",
    type=click.IntRange(min=1),
    help="Of torch.  [default: $OMP_NUM_THREADS, else 1, as torchrun starts its workers]",
)
@click.option(
    "--loss",
    default="",
    metavar="NAME",
    help="loss(output, batch) in FILE.py: part of the head.  [default: none; of a script its Job's]",
)
@click.option(
    "--batch",
    default="",
    metavar="NAME",
    help="batch(samples, tokens) in FILE.py.  [default: random ids; of a script its Job's samples]",
)
@click.option("--collectives", is_flag=True, help="All-reduces too, among gloo processes of this machine.")
@click.option("--no-whole", is_flag=True, help="Do not compare with the whole model in one piece.")
@json_option("The profile as one JSON object.")
@click.option("--out", metavar="PROFILE.json", help="Write the profile there.")
def profile(
    target: str,
    arguments: tuple[str, ...],
    widths: tuple[int, ...] | None,
    tokens: tuple[int, ...] | None,
    sample_tokens: int | None,
    threads: int | None,
    no_whole: bool,
    as_json: bool,
    out: str | None,
    **asked: Any,
) -> None:
    """Measure a model's sections on this device, fit, and print the error of the fit.

    SCRIPT is run with its ARGUMENTS up to its elasticd.Job, whose model, loss and samples are measured, of
    several modules each by itself. Or NAME
    is an elasticd.Model in FILE.py (or package.module), or a function without arguments that makes one, and the
    file is imported. The profile is what `elasticd plan` takes as `model`, and elasticd.Job as `profile`.
    """
    from elasticd_planner.profiling.sample_profile import measured_profile

    is_script = ":" not in target
    _check_target(target, is_script, arguments, asked)
    if out is not None:
        _write(out, "", "a")  # before the minutes that measuring takes
    request = Request(
        target=target,
        arguments=arguments if is_script else None,
        widths=widths or (),
        tokens=tokens or (),
        sample_tokens=sample_tokens or (0 if is_script else _SAMPLE_TOKENS),
        threads=threads or _threads(),
        whole=not no_whole,
        **asked,  # the other options have the names of the request's fields
    )
    with command_console(stderr=True).status(f"measuring {target}") as status:  # silent where nobody looks
        done = measure(request, lambda part: status.update(f"measuring {target}: {part:.0%}"))
    measured = {each.name: (each.samples, measured_profile(each.samples)) for each in done.modules}
    measured[done.module] = done.samples, measured_profile(done.samples)
    text = profile_text(done, {name: fitted for name, (_, fitted) in measured.items()})
    if out is not None:
        _write(out, text)
    if as_json:
        sys.stdout.write(text)
    else:
        for name, (samples, fitted) in measured.items():
            if done.modules:
                command_console().print(Text.assemble(("module ", "dim"), (name, "bold")))
            show(samples, fitted, command_console())


def _check_target(target: str, is_script: bool, arguments: tuple[str, ...], asked: dict[str, Any]) -> None:
    """Raises ClickException where the target is not there, or what was asked for is not of its kind."""
    if not is_script:
        if arguments:
            raise click.UsageError(f"{arguments[0]!r} is too much: only a SCRIPT has arguments")
        return
    if not os.path.exists(target):
        raise click.ClickException(
            f"{target} is not there: name a training script, or a model as FILE.py:NAME or package.module:NAME"
        )
    for option in ("loss", "batch"):
        if asked[option]:
            raise click.UsageError(
                f"--{option} is for a model as FILE.py:NAME; the Job of a SCRIPT has its own loss and samples"
            )


def _write(out: str, text: str, mode: str = "w") -> None:
    """Writes the text to the file `out`, or appends it (`mode` a). Raises ClickException where that fails."""
    try:
        with Path(out).open(mode) as file:
            file.write(text)
    except FileNotFoundError:
        raise click.ClickException(f"cannot write {out}: there is no folder {Path(out).parent}") from None
    except OSError as error:
        raise click.ClickException(f"cannot write {out}: {error.strerror}") from None


def _threads() -> int:
    threads = os.environ.get("OMP_NUM_THREADS", "")
    return int(threads) if threads.isdigit() and int(threads) else 1


def measure(request: Request, progress: Callable[[float], None]) -> Done:
    """Asks a process that carries torch. Raises ClickException where it cannot measure."""
    need("torch", "elasticd profile")
    measurement = _asked(request, progress)
    assert isinstance(measurement, Done)
    return measurement


def described(target: str, command: str) -> dict[str, ModelSpec]:
    """The model of FILE.py:NAME by module, which a process that carries torch imports.

    Args:
        target: FILE.py:NAME.
        command: what needs torch for it.

    Raises:
        ClickException: there is none.
    """
    need("torch", command)
    description = _asked(Describe(target=target), lambda part: None)
    assert isinstance(description, Described)
    return description.modules


def _asked(request: Request | Describe, progress: Callable[[float], None]) -> Done | Described:
    command = [sys.executable, "-m", "elasticd.runtime.profiling"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(msgspec.json.encode(request) + b"\n")
        process.stdin.flush()
        for line in process.stdout:
            answer = msgspec.json.decode(line, type=Answer)
            if isinstance(answer, Progress):
                progress(answer.part)
            elif isinstance(answer, Failed):
                raise click.ClickException(answer.reason)
            else:
                assert isinstance(answer, Done | Described)
                return answer
        code = process.wait()
        raise click.ClickException(
            f"the process that measures ended with {code} and no answer"
            + (f": is torch installed? ({install('train')})" if code == 1 else "")
        )
    except BrokenPipeError:
        raise click.ClickException(f"the process that measures ended with {process.wait()}") from None
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """It ends by itself when its standard input is closed, and its own processes with it."""
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(BrokenPipeError):
                pipe.close()
    try:
        process.wait(_EXIT_TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def profile_text(done: Done, measured: Mapping[str, MeasuredProfile]) -> str:
    """The profile as the JSON of a file. Beside the model's times it has on what they were measured, the errors
    of each section and of the whole model, and the model's parameters (`spec`). Of several modules `model` is
    that of the one with the loss, which `module` names, and `modules` has those of items as a problem has them.

    Args:
        done: all samples.
        measured: the fit of each module, by name.
    """
    from elasticd_planner.problem_files.times import entry_of

    own = measured[done.module]
    answer: dict[str, Any] = {"type": "profile", "version": FILE_VERSION, "model": entry_of(own.profile)}
    fit = _fit(done.samples, own)
    if not done.modules:
        answer |= {"fit": fit, "spec": done.samples.model}
        return _json(answer)
    fit["modules"] = {each.name: _fit(each.samples, measured[each.name]) for each in done.modules}
    answer["module"] = done.module
    answer["modules"] = [
        {
            "name": each.name,
            "items": each.items,
            "items_a_sample": each.items_a_sample,
            "rows_an_item": each.rows_an_item,
            "trained": each.trained,
            "model": entry_of(measured[each.name].profile),
        }
        for each in done.modules
    ]
    specs = {each.name: each.samples.model for each in done.modules} | {done.module: done.samples.model}
    return _json(answer | {"fit": fit, "specs": specs})


def _json(answer: dict[str, Any]) -> str:
    return msgspec.json.format(msgspec.json.encode(answer), indent=2).decode() + "\n"


def _fit(samples: Samples, measured: MeasuredProfile) -> dict[str, Any]:
    """On what a module was measured, and the errors of the fit."""
    return {
        **{name: getattr(samples, name) for name in ("device", "threads", "torch", "repeats", "sample_tokens")},
        "sections": measured.fits,
        "whole_seconds": samples.whole.seconds if samples.whole is not None else None,
        "predicted_seconds": measured.predicted,
    }


# -- for people ------------------------------------------------------------------------------------------------


def show(samples: Samples, measured: MeasuredProfile, console: Console) -> None:
    """The coefficients by section and width with the errors of the fit, and what is beside them."""
    name = Text.assemble(
        (samples.model.name, "bold"), f": {len(samples.model.layers)} layers on {samples.device}"
    )
    if samples.device == "cpu":
        name.append(f", {samples.threads} thread{'s' if samples.threads > 1 else ''}")
    console.print(name)
    sizes = sorted({timing.tokens for timing in samples.timings})
    of = f"samples of {samples.sample_tokens} tokens"
    if samples.items:
        of = f"single {samples.items} of {', '.join(map(str, sizes))} rows"
    how = f"torch {samples.torch}, {of}, medians of {samples.repeats}"
    console.print(Text(how, style="dim"))
    console.print(_table(measured.fits))
    for line in _notes(samples, measured):
        console.print(line)


def _table(fits: tuple[SectionFit, ...]) -> Table:
    times = (">TP", ">fixed ms", ">µs/token", ">slowdown")
    table = plain_table("section", *times, ">error", ">worst", ">held out", ">worst", ">noise")
    for fit in fits:
        coefficients = fit.coefficients
        for i, (width, errors) in enumerate(fit.errors.items()):
            first = i == 0
            held = fit.held_out if first else None
            table.add_row(
                fit.section if first else "",
                str(width),
                f"{1e3 * coefficients.fixed:.3f}" if first else "",
                f"{1e6 * coefficients.per_token:.3f}" if first else "",
                f"{coefficients.slowdown[width]:.2f}",
                _error(errors.median),
                _error(errors.worst),
                _error(held.median) if held else "",
                _error(held.worst) if held else "",
                f"{fit.noise:.1%}" if first else "",
            )
    return table


def _error(value: float) -> Text:
    return Text(f"{value:.1%}", style="yellow" if value >= _LARGE else "")


def _notes(samples: Samples, measured: MeasuredProfile) -> list[Text]:
    profile, block = measured.profile, measured.profile.block
    lines = [
        Text.assemble(
            ("a block: ", "dim"),
            f"forward is {profile.forward:.0%}; with recomputation {profile.recompute_factor:.2f}x as long",
        ),
        Text.assemble(
            ("kept of a token: ", "dim"),
            f"{block.cut_activation:,.0f} bytes cut, {block.whole_activation:,.0f} whole; "
            f"recomputed {block.recomputed_activation:,.0f}",
        ),
        Text.assemble(("AdamW: ", "dim"), f"{1e9 * profile.optimizer_seconds:.3f} ns a byte of its state"),
    ]
    if (experts := profile.experts) is not None:
        text = f"{experts.part:.0%} of a mean block, each row in {experts.chosen} of {experts.count}"
        lines.append(Text.assemble(("experts: ", "dim"), text))
    for width, fixed in profile.collective_seconds.items():
        each = profile.collective_token_seconds[width]
        text = f"{1e3 * fixed:.3f} ms + {1e6 * each:.3f} µs/token on this machine"
        lines.append(Text.assemble((f"all-reduce of {width}: ", "dim"), text))
    widths, units = sorted({timing.width for timing in samples.timings}), profile.share_units
    if units < WIDTHS[-1]:
        cut = f"its rules cut it in {units} parts" if units > 1 else "it has no rules for TP groups"
        text = f"{', '.join(map(str, widths))} measured; {samples.model.name} can have {units} at most: {cut}"
        lines.append(Text.assemble(("widths: ", "dim"), text))
    noise = max(fit.noise for fit in measured.fits)
    if noise >= _NOISY:
        text = f"times vary by {noise:.0%} between repeats: measure on a quieter machine"
        lines.append(Text(text, style="yellow"))
    if not samples.loss and not samples.items:
        lines.append(Text("the head is without its loss: name it with --loss", style="dim"))
    whole = samples.whole
    if whole is None:
        lines.append(Text.assemble(("whole model: ", "dim"), f"not compared: {samples.skipped}"))
    elif measured.predicted is None:
        lines.append(Text.assemble(("whole model: ", "dim"), "not compared: width 1 was not measured"))
    else:
        lines.append(
            Text.assemble(
                ("whole model: measured / predicted by the fit ", "dim"),
                (f"{whole.seconds / measured.predicted:.3f}", "bold"),
                f"   ({1e3 * whole.seconds:,.1f} ms, {whole.tokens} tokens)",
            )
        )
    return lines
