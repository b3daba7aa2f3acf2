"""The soak in the simulator: the same scripts against the real state machines, over thousands of seeds.

    python -m tests.soak.simulated --seeds 2000
    python -m tests.soak.simulated --seed 17        # replays one, and prints all that happened

Each seed draws a script, plays it on a small modelled cluster, and checks what must hold of the records, of the
steps, and of the answers that users were given (`tests.soak.deciding`). Without noise, so that one planner's
answers serve many seeds.
"""

from __future__ import annotations

import logging
import secrets
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import pairwise

import click
import msgspec
import numpy as np
from elasticd_planner.value import Value

from elasticd.simulator.planning import Planner
from elasticd.simulator.run import KEYS, Simulation
from elasticd.simulator.scenarios.model_shapes import Shapes
from elasticd.simulator.scenarios.scenario import ClusterShape, ItemModule, Scenario, Times, Training
from elasticd.store.memory import MemoryStore
from elasticd.store.protocol import WatchEvent, WatchItem
from tests.soak.deciding import Deciding
from tests.soak.fault_script import Faults
from tests.soak.faulty_store import StoreFaults
from tests.soak.history import History
from tests.soak.random_faults import ITEM_WEIGHTS, WEIGHTS, Soaking, draw

#: What may cost workers their place; a node whose agent alone is cut off or gone trains on.
HARMFUL = ("kill", "freeze", "partition")
#: Steps after the last fault.
REST_STEPS = 20
#: Quick, and with much to happen while little time passes.
TIMES = Times(planning=0.2, planning_per_device=0.0, prepare=1.0, pause=0.2, patience=60.0, noise=0.0)


class Play(Value, frozen=True, kw_only=True):
    """What became of a seed: `stopped` says why the job did not go on, if it did not."""

    seed: int
    faults: int
    leaders: int
    answers: dict[str, int]  # of users' calls, by what they were told
    steps: int
    plans: int
    fences: int
    restarts: int
    stopped: str
    wrong: tuple[str, ...]


def cluster(nodes: int, devices: int) -> ClusterShape:
    """Devices that hold the whole model each."""
    return ClusterShape(nodes=nodes, devices=devices, memory=2**30, flops=1e12, assumed=1.3e12)


def encoders(seed: int, modules: bool | None = None) -> tuple[ItemModule, ...]:
    """The encoders of a seed's job beside its model: one or two, or none.

    Args:
        seed: draws them.
        modules: True: every job has some; False: none has; None: one of three.
    """
    rng = np.random.default_rng([seed, 7])
    own = rng.uniform() < 1 / 3 if modules is None else modules
    return tuple(
        ItemModule(
            name=name,
            items=items,
            shapes=Shapes(
                layers=int(rng.integers(1, 5)), width=128, heads=2, hidden=int(rng.choice([256, 2048]))
            ),
            items_a_sample=round(float(rng.uniform(0.2, 4)), 2),
            rows=int(rng.choice([64, 512])),
            trained=bool(rng.uniform() < 0.8),
        )
        for name, items in (("vision", "images"), ("audio", "clips"))[: int(rng.integers(1, 3)) if own else 0]
    )


def scenario(script: Faults, shape: ClusterShape, seed: int, modules: tuple[ItemModule, ...] = ()) -> Scenario:
    """The script on a small model, every step played."""
    shapes = Shapes(layers=4, width=256, heads=4, kv_heads=2, hidden=704)
    model = Training(name="soak", shapes=shapes, tokens=512, global_batch=8, modules=modules)
    if modules:  # that hold the items of any shift
        shape = msgspec.structs.replace(shape, memory=2**33)
    faults = tuple(script)
    steps = max((fault.step or 0 for fault in faults), default=0) + REST_STEPS
    return Scenario(
        name="soak", cluster=shape, model=model, seed=seed, steps=steps, settle=None, faults=faults, times=TIMES
    )


def play(given: Scenario, planner: Planner | None = None, faults: StoreFaults | None = None) -> Play:
    """Plays and checks a scenario. With `faults` of the store leaders write as the daemon does, and users ask
    them for decisions."""
    if faults is None:
        return checked(Simulation(given, planner=planner))
    return checked(Deciding(given, planner or Planner(given.times), faults))


def checked(simulation: Simulation) -> Play:
    """Plays a simulation, and checks it. An error of it, or of a machine in it, is among what is wrong."""
    given = simulation.scenario
    seen: list[WatchEvent] = []
    wrong: list[str] = []
    deciding = simulation if isinstance(simulation, Deciding) else None

    def see(item: WatchItem) -> None:
        if isinstance(item, WatchEvent):
            seen.append(item)
        else:
            wrong.append("the store forgot records before they were read")

    MemoryStore(simulation.server).watch(KEYS.root, deciding.first_revision if deciding else 1, see)
    try:
        simulation.run()
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        wrong.append(f"{type(error).__name__}: {error} ({where.filename.rpartition('/')[2]}:{where.lineno})")
    history = History(KEYS)
    history.read(seen)
    wrong += history.wrong
    wrong += _steps(simulation, history, given) if not wrong else []
    wrong += deciding.wrong if deciding is not None else []
    return Play(
        seed=given.seed,
        faults=len(given.faults),
        leaders=len(history.leaders),
        answers=dict(Counter(call.answer for call in deciding.calls)) if deciding is not None else {},
        steps=simulation.worker_group.step,
        plans=sum(len(job.plans) for job in history.jobs.values()),
        fences=sum(len(job.gone) for job in history.jobs.values()),
        restarts=simulation.launcher.restarts,
        stopped=simulation.stopped if not wrong else "",
        wrong=tuple(wrong),
    )


def _steps(simulation: Simulation, history: History, given: Scenario) -> list[str]:
    """Every step once, in order, under the plan that is recorded for it; a job that ended has made all."""
    wrong = []
    for before, after in pairwise(simulation.stretches):
        if after.start_number == before.start_number and after.first_step != before.first_step + before.steps:
            wrong.append(f"step {after.first_step} follows on step {before.first_step + before.steps - 1}")
    for stretch in simulation.stretches:
        if stretch.step_seconds < stretch.bound * (1 - 1e-4):
            wrong.append(
                f"step {stretch.first_step} took {stretch.step_seconds} s, and no plan beats {stretch.bound}"
            )
        job = "job" if stretch.start_number == 1 else f"job-{stretch.start_number}"
        if not history.jobs[job].runs(stretch.plan, stretch.first_step):
            wrong.append(f"step {stretch.first_step} ran under plan {stretch.plan}: {history.jobs[job].plans}")
    harmless = not {fault.kind for fault in given.faults} & set(HARMFUL)
    if harmless and any(job.gone for job in history.jobs.values()):
        wrong.append("somebody was fenced off though every worker lived and reached every other")
    if not simulation.stopped and simulation.worker_group.step != given.steps:
        wrong.append(f"the job ended after {simulation.worker_group.step} of {given.steps} steps")
    return wrong


#: Of the store, and of a leader that dies more often than in the soak of processes.
FAULTS, TAKEOVERS = StoreFaults(), 4.0


@click.command()
@click.option("--first", type=click.IntRange(min=0), help="The first seed (default: any, printed).")
@click.option("--seeds", type=click.IntRange(min=1), default=200, show_default=True, help="How many.")
@click.option("--seed", type=click.IntRange(min=0), help="Replay this one, and print all that happened.")
@click.option("--faults", type=click.IntRange(min=1), default=12, show_default=True, help="Of each script.")
@click.option("--nodes", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--devices", type=click.IntRange(min=1), default=2, show_default=True, help="Of each node.")
@click.option("--modules/--one-module", default=None, help="Jobs of several modules alone, or of one.")
@click.option("--only", multiple=True, help="Draw these kinds alone.")
def command(
    first: int | None,
    seeds: int,
    seed: int | None,
    faults: int,
    nodes: int,
    devices: int,
    only: tuple[str, ...],
    modules: bool | None,
) -> None:
    """Plays random scripts of faults in the simulator, and checks what must hold."""
    if seed is not None:
        first, seeds = seed, 1
    first = secrets.randbelow(1_000_000) if first is None else first
    print(f"simulated soak: --first {first} --seeds {seeds} --faults {faults}", flush=True)
    logging.disable(logging.WARNING)  # of a store that is away, by each leader
    began, done = time.monotonic(), list[Play]()
    shape = cluster(nodes, devices)
    for play in plays(
        range(first, first + seeds), faults, shape, only, _tell if seed is not None else None, modules
    ):
        done.append(play)
        for line in play.wrong[:3]:
            print(f"WRONG: seed {play.seed}: {line}", flush=True)
    sys.exit(_sum_up(done, time.monotonic() - began))


def plays(
    seeds: Iterable[int],
    faults: int,
    shape: ClusterShape | None = None,
    only: Collection[str] = (),
    told: Callable[[Deciding], None] | None = None,
    modules: bool | None = None,
) -> Iterator[Play]:
    """Plays seeds, with users and faults of the store.

    Args:
        seeds: each draws a script, and all else that is by chance.
        faults: of each script.
        shape: of the cluster; None: three nodes of two devices.
        only: kinds of faults that are drawn; none: all.
        told: is handed each simulation once it has been played.
        modules: whether jobs are of several modules; None: one of three is.
    """
    shape, planner = shape or cluster(3, 2), Planner(TIMES)
    names = [device.name for device in shape.cluster().devices]
    weights = {**WEIGHTS, "takeover": TAKEOVERS}
    for number in seeds:
        beside = encoders(number, modules)
        own = {**weights, **({"shift": ITEM_WEIGHTS["shift"]} if beside else {})}
        soaking = Soaking(count=faults, most=8, weights={kind: own[kind] for kind in only or own})
        script = draw(soaking, names, number)
        simulation = Deciding(scenario(script, shape, number, beside), planner, FAULTS)
        played = checked(simulation)
        if told is not None:
            told(simulation)
        yield played


def _tell(simulation: Deciding) -> None:
    """Prints all that happened, in its order, and what users were told."""
    for event in simulation.timeline:
        print(f"{event.seconds:9.2f} s  step {event.step:4}  {event.kind}: {event.text}")
    for call in simulation.calls:
        print(f"{call.by} asked the leader of term {call.term} for {call.what} {call.about}: {call.answer}")


def _sum_up(plays: list[Play], seconds: float) -> int:
    """Prints what became of all seeds. Returns the exit code."""
    wrong = [one.seed for one in plays if one.wrong]
    ends = Counter("stopped" if one.stopped else "finished" for one in plays if not one.wrong)
    answers = sum((Counter(one.answers) for one in plays), Counter[str]())
    counts = {
        name: sum(getattr(one, name) for one in plays)
        for name in ("faults", "plans", "fences", "restarts", "leaders")
    }
    print(f"{len(plays)} seeds in {seconds:.0f} s, {dict(ends)}; answers to users {dict(answers)}")
    print(", ".join(f"{count} {name}" for name, count in counts.items()))
    print(f"{len(wrong)} seeds with something wrong: {wrong[:20]}")
    return 1 if wrong else 0


if __name__ == "__main__":
    command(prog_name="python -m tests.soak.simulated")
