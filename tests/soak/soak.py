"""The soak: a small real job and hundreds of random faults, then everything that must hold is checked.

    python -m tests.soak.soak --seed 7 --faults 200

The seed makes the script of faults; when each of them meets the job is up to the machine. The exit code is 1
where anything that must hold does not.
"""

from __future__ import annotations

import json
import secrets
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Literal

import click
import msgspec
from elasticd_planner.spec.batch import Sampler
from elasticd_planner.value import Value

from elasticd.store.protocol import WatchEvent
from elasticd.system.child_processes import ProcessError, Processes
from elasticd.testing.network_namespaces import refusal
from elasticd.testing.waiting import until
from tests.soak import ledger
from tests.soak.chaos_cluster import JOB, ChaosCluster, Shape
from tests.soak.fault_player import FaultPlayer, LedgerSteps, Played, StandsStill
from tests.soak.fault_script import Faults
from tests.soak.history import History, JobHistory
from tests.soak.random_faults import LIVE_WEIGHTS, Soaking, draw

#: Steps that each fault adds to the run, because those that are held back come later than the script says.
HELD_STEPS = 10
#: Seconds of a sample's forward pass in a loop of its own, whose snapshots take some 50 ms from step to step.
LIVE_SECONDS = 0.012
#: The job that is trained.
Form = Literal["padded", "packed", "modules", "experts", "live"]
#: Of the script that is trained; it imports torch, which we do not.
SAMPLES = Sampler(size=1000, global_batch=8, seed=5)


class Report(Value, frozen=True, kw_only=True):
    """What was done and found. kinds: faults that happened, by kind; apart: the largest relative difference of
    a loss from that of the undisturbed run, None where that was not made; again: steps that were made and then
    made again, since the job went back, None where it cannot; ended: daemons that ended by themselves."""

    seed: int
    faults: int
    kinds: dict[str, int]
    held_back: tuple[str, ...]
    steps: int
    seconds: float
    plans: int
    fences: int
    leaders: int
    processes: int
    apart: float | None
    again: int | None = None
    wrong: tuple[str, ...]
    ended: tuple[str, ...]

    @property
    def text(self) -> str:
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(self.kinds.items()))
        apart = "compared with no undisturbed run"
        if self.apart is not None:
            apart = f"losses within {self.apart:.1e} of the undisturbed run"
        if self.again is not None:
            apart = f"{apart}; {self.again} steps made again"
        lines = [
            f"seed {self.seed}: {self.faults} faults ({kinds}) in {self.steps} steps and {self.seconds:.0f} s; "
            f"{len(self.held_back)} held back",
            f"{self.plans} plans, {self.fences} fences, {self.leaders} leaders, {self.processes} processes of "
            f"workers; {apart}",
            *(f"ended by itself: {line}" for line in self.ended),
            *(f"WRONG: {line}" for line in self.wrong[:50]),
            "all that must hold does" if not self.wrong else f"{len(self.wrong)} things are wrong",
        ]
        return "\n".join(lines)


def soak(
    script: Faults,
    shape: Shape,
    folder: Path,
    seed: int,
    still: float,
    rest: int,
    *,
    separate: bool = False,
    form: Form = "padded",
) -> Report:
    """Runs the job under the script and checks it.

    Args:
        script: the faults.
        shape: of the cluster.
        folder: keeps logs and ledgers.
        seed: of the script.
        still: seconds without a step after which the soak ends.
        rest: steps after the last fault.
        separate: each node is in a network namespace.
        form: packed: sequences in packed rows, cut over lanes; modules: a model of two; experts: a mixture of
            experts; live: a loop of its own
            over FSDP2, with a snapshot each step.

    Raises:
        ProcessError: the cluster does not come up.
    """
    began = time.monotonic()
    training = Path(__file__).with_name("worker.py")
    steps = max(fault.step or 0 for fault in script) + rest + HELD_STEPS * len(list(script))
    options = ("--steps", str(steps), *(("--zero", str(shape.zero)) if shape.zero else ()))
    options += (f"--{form}",) * (form != "padded")
    processes, wrong = Processes(folder), list[str]()
    with (
        tempfile.TemporaryDirectory(prefix="elasticd-soak-") as sockets,
        processes.interruptible(),
        processes,
        ChaosCluster(shape, processes, folder, Path(sockets), separate=separate) as cluster,
    ):
        cluster.start_job(training, *options)
        made = LedgerSteps(folder)
        live = FaultPlayer(
            cluster, made, still=still, elsewhere=True, tell=lambda line: print(line, flush=True)
        )
        try:
            # All workers import torch at once: on a busy machine that takes longer than any step.
            until(made.look, lambda: f"a first step within {10 * still:g} s", seconds=10 * still)
            live.play(script)
            print("all faults are done; the job is to end by itself", flush=True)
            # However long that takes on few or slow devices, but not without a step for `still` seconds.
            live.wait(lambda: made.look() >= steps)
            codes = cluster.end_codes(10 * still)
            wrong += [f"{name} ended with {code}" for name, code in codes.items() if code]
        except (StandsStill, ProcessError, AssertionError) as error:
            wrong.append(f"after {len(live.played.happened)} faults: {error}")
            _keep_status(cluster, folder)
        seen = list(cluster.seen)
        seconds = time.monotonic() - began
        _keep_records(seen, folder)
        if not wrong:
            print("training the same without any fault", flush=True)
            cluster.wait(cluster.start_plain(training, *options), 3600)
    return _report(seed, live.played, steps, seconds, seen, folder, wrong, cluster, goes_back=form == "live")


def _keep_status(cluster: ChaosCluster, folder: Path) -> None:
    job = cluster.job()
    if job is not None:
        print(f"the job's phase: {job.phase}, step {job.step}: {job.reason}", flush=True)
    try:
        (folder / "status.json").write_bytes(cluster.api().status_json())
        events = [f"{e.time:.3f} {e.kind}: {e.text}" for e in cluster.api().events()]
        (folder / "events.txt").write_text("\n".join(events))
    except Exception as error:  # whatever it is, what was found before matters more
        print(f"no status to keep: {error}", flush=True)


def _keep_records(seen: list[WatchEvent], folder: Path) -> None:
    with (folder / "records.jsonl").open("w") as file:
        for event in seen:
            value = event.item.value.decode(errors="replace") if event.kind == "put" else ""
            line = {"revision": event.mod_revision, "key": event.key, "kind": event.kind, "value": value}
            file.write(json.dumps({**line, "created": event.item.create_revision}) + "\n")


def _report(
    seed: int,
    played: Played,
    steps: int,
    seconds: float,
    seen: list[WatchEvent],
    folder: Path,
    wrong: list[str],
    cluster: ChaosCluster,
    *,
    goes_back: bool,
) -> Report:
    history = History(cluster.keys)
    history.read(seen)
    job = history.jobs.get(JOB, JobHistory())
    ledgers = ledger.read(folder)
    wrong = [*wrong, *played.false, *history.wrong]
    plain = ledger.read_plain(folder / "plain.jsonl") if (folder / "plain.jsonl").exists() else []
    if plain:
        wrong += ledger.check(
            ledgers, job.plans, job.fenced_off, steps, SAMPLES.samples, plain, goes_back=goes_back
        )
    return Report(
        seed=seed,
        faults=len(played.happened),
        kinds=dict(Counter(fault.kind for fault in played.happened)),
        held_back=tuple(played.held_back),
        steps=steps,
        seconds=round(seconds, 1),
        plans=len(job.plans),
        fences=len(job.gone),
        leaders=len(history.leaders),
        processes=len(ledgers),
        apart=ledger.furthest(ledgers, plain) if plain else None,
        again=ledger.made_again(ledgers, job.plans) if goes_back else None,
        wrong=tuple(wrong),
        ended=tuple(cluster.ended),
    )


@click.command()
@click.option("--seed", type=click.IntRange(min=0), help="Of the script (default: a new one, printed).")
@click.option("--faults", type=click.IntRange(min=1), default=200, show_default=True, help="How many.")
@click.option("--nodes", type=click.IntRange(min=1), default=2, show_default=True)
@click.option("--devices", type=click.IntRange(min=1), default=2, show_default=True, help="Of each node.")
@click.option("--zero", type=click.IntRange(0, 2), default=0, show_default=True, help="ZeRO's stage.")
@click.option("--memory", type=click.IntRange(min=1), default=1 << 30, help="Bytes of a device, emulated.")
@click.option("--out", type=click.Path(path_type=Path), help="Keep logs, ledgers and records here.")
@click.option(
    "--still", type=click.FloatRange(min=1), default=120.0, show_default=True, help="Seconds without a step."
)
@click.option(
    "--gap", type=click.IntRange(min=1), default=6, show_default=True, help="Most steps between faults."
)
@click.option(
    "--rest",
    type=click.IntRange(min=1),
    default=160,
    show_default=True,
    help="Steps after the last fault, in which all is to come to rest.",
)
@click.option("--only", multiple=True, type=click.Choice([*LIVE_WEIGHTS]), help="Draw these kinds alone.")
@click.option(
    "--packed/--padded",
    default=None,
    help="Sequences in packed rows, cut over lanes, or padded (default: drawn by the seed).",
)
@click.option("--modules", is_flag=True, help="A model of two modules, an encoder of images and a decoder.")
@click.option("--experts", is_flag=True, help="A mixture of experts, placed in TP groups by their load.")
@click.option("--live", is_flag=True, help="A loop of its own over FSDP2, kept alive by elasticd.live.")
@click.option(
    "--separate/--together",
    default=None,
    help="Each node in a network namespace, so that the data network breaks in silence (default: for root).",
)
def command(
    seed: int | None,
    faults: int,
    nodes: int,
    devices: int,
    zero: int,
    memory: int,
    out: Path | None,
    still: float,
    gap: int,
    rest: int,
    only: tuple[str, ...],
    packed: bool | None,
    modules: bool,
    experts: bool,
    live: bool,
    separate: bool | None,
) -> None:
    """Trains a small job on real processes, under random faults, and checks what must hold."""
    seed = secrets.randbelow(1_000_000) if seed is None else seed
    names = ("alpha", "beta", "gamma", "delta", *(f"n{index}" for index in range(4, nodes)))[:nodes]
    shape = Shape(nodes=names, devices=devices, zero=zero, memory=memory)
    if live:
        shape = msgspec.structs.replace(shape, forward=LIVE_SECONDS, backward=2 * LIVE_SECONDS)
    weights = {kind: LIVE_WEIGHTS[kind] for kind in only} or LIVE_WEIGHTS
    script = draw(Soaking(count=faults, most=gap, weights=weights), shape.names, seed)
    if [packed, modules, experts, live].count(True) > 1:
        raise click.UsageError(
            "--packed, --modules, --experts and --live are forms of the job: give one of them"
        )
    if live and zero:
        raise click.UsageError("a loop of its own is sharded by FSDP2: leave out --zero")
    form: Form = "live" if live else "experts" if experts else "modules" if modules else "padded"
    if packed or (packed is None and form == "padded" and seed % 2 == 1):
        form = "packed"
    print(f"soak: --seed {seed} --faults {faults} --nodes {nodes} --devices {devices} --{form}", flush=True)
    folder = out or Path(tempfile.mkdtemp(prefix="elasticd-soak-"))
    folder.mkdir(parents=True, exist_ok=True)
    if separate is None:
        separate = not refusal()
    if not separate:
        print("the data network breaks by connections that are shut", flush=True)
    report = soak(script, shape, folder, seed, still, rest, separate=separate, form=form)
    (folder / "report.json").write_bytes(msgspec.json.encode(report))
    print(report.text, flush=True)
    if out is None and not report.wrong:
        shutil.rmtree(folder)
    else:
        print(f"kept in {folder}", flush=True)
    sys.exit(1 if report.wrong else 0)


if __name__ == "__main__":
    command(prog_name="python -m tests.soak.soak")
