"""A job whose truth is known, and every figure that is shown of it beside that truth.

The speeds of its devices are emulated, its sequences have one length, its loop has a body of 0.3 s, one of its
two devices becomes three times slower, and a switch of plans answers that. The script writes down by its own
clock when each step began and ended. Figures of `status --json`, of the commands' text, of `/metrics`, of the
pages' JSON and of a report are compared with what the script saw, each by its name.
"""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import httpx2
from click.testing import CliRunner
from elasticd_planner.spec.plan import ModulePlan, Pipeline, Plan, Prediction, Stage, Strategy

from elasticd.cli.app import elasticd
from elasticd.config.credentials import Credentials
from elasticd.config.tree import with_overrides
from elasticd.dashboard.daemon import Dashboard
from elasticd.explain.training_speed import SPEED_STEPS
from elasticd.machines.job.state.job_state import JobSettings
from elasticd.testing.waiting import until
from tests.coordinator.test_metrics import samples
from tests.dashboard import known_truth_job
from tests.dashboard.known_truth_job import BATCH, BODY, LENGTH, MICRO
from tests.integration.cluster import JOB, Cluster

#: Emulated seconds of a token in the forward pass of a block; backward takes twice as long.
FORWARD = 2e-4
MEMORY = 1 << 30
SLOW_DEVICE, SLOWDOWN = "a/1", 3.0
TOKENS = BATCH * LENGTH
#: Seconds of a micro-batch in a block, there and back.
BLOCK = 3 * FORWARD * MICRO * LENGTH
#: The guess of the first plan, and the prediction of the second one: 4 micro-batches through 2 stages, each of
#: which takes as long as 3 blocks.
GUESS, PREDICTED = 0.015, (BATCH // MICRO + 1) * 3 * BLOCK
#: Steps that the first plan has, from the start and before the device is slowed; that the second one has.
FIRST_STEPS, SECOND_STEPS = 14, 24


def _plan(cut: int, seconds: float) -> Plan:
    """Two stages: the first rank is not the last stage, which knows the loss first."""
    stages = (
        Stage(start=0, stop=cut, devices=("a/0",), shares=(1,)),
        Stage(start=cut, stop=4, devices=("a/1",), shares=(1,)),
    )
    pipeline = Pipeline(stages=stages, micro_batches=BATCH // MICRO)
    return Plan(
        number=0,
        strategies=(Strategy(modules=(ModulePlan(module="model", pipelines=(pipeline,)),)),),
        micro_batch=MICRO,
        global_batch=BATCH,
        prediction=Prediction(step_seconds=seconds, bound_seconds=seconds),
    )


PLANS = {"": _plan(2, GUESS), SLOW_DEVICE: _plan(3, PREDICTED)}


class StepTruth(NamedTuple):
    """A step as the script saw it."""

    step: int
    plan: int
    loss: float
    tokens: int
    began: float  # unix seconds: the loop's body has ended
    ended: float  # unix seconds: the loop has the step
    rank: int

    @property
    def seconds(self) -> float:
        """Of the step itself."""
        return self.ended - self.began


class Figure(NamedTuple):
    """A figure that is shown, and what is true."""

    name: str  # where it stands, and what it is
    shown: Any
    true: Any
    agrees: bool

    @property
    def words(self) -> str:
        """For people."""
        return f"{self.name}: shown {self.shown!r}, true {self.true!r}"


class Comparison:
    """Figures, as they are compared."""

    def __init__(self) -> None:
        self.figures: list[Figure] = []

    def same(self, name: str, shown: Any, true: Any) -> None:
        """They are equal."""
        self.figures.append(Figure(name, shown, true, shown == true))

    def near(self, name: str, shown: float | None, true: float, part: float = 0.05, more: float = 0.02) -> None:
        """They differ by this part of the truth and by `more` at most: what two clocks of a busy machine do."""
        agrees = shown is not None and abs(shown - true) <= part * abs(true) + more
        self.figures.append(Figure(name, shown, true, agrees))

    def holds(self, name: str, agrees: bool, shown: Any, true: str) -> None:
        """Something is true of what is shown."""
        self.figures.append(Figure(name, shown, true, agrees))

    @property
    def different(self) -> list[str]:
        """Those that differ, in words."""
        return [figure.words for figure in self.figures if not figure.agrees]


class KnownJob:
    """The cluster, the dashboard before it, and what the script wrote down."""

    def __init__(self, cluster: Cluster, dashboard: Dashboard, history: Path) -> None:
        self.cluster, self.url, self.history = cluster, dashboard.url, history
        self._client = httpx2.Client(
            base_url=dashboard.url, trust_env=False, timeout=60, verify=Credentials().verifying()
        )

    @property
    def truth(self) -> list[StepTruth]:
        """The steps as the first rank's script saw them."""
        lines = (self.cluster.folder / "truth-a:0").read_text().splitlines()
        return [StepTruth(**json.loads(line)) for line in lines]

    def page(self, path: str) -> Any:
        """What a page asks for."""
        answer = self._client.get(path)
        assert answer.status_code == 200, answer.text
        return answer.json()

    @property
    def metrics(self) -> dict[Any, float]:
        """The leader's, by name and labels."""
        return samples(self.cluster.coordinator.leading.exposition().decode())

    def says(self, *command: str) -> str:
        """What a command prints."""
        done = CliRunner(env={"COLUMNS": "200"}).invoke(
            elasticd, [*command, "--coordinator", self.cluster.coordinator.url]
        )
        assert done.exit_code == 0, (command, done.output, done.exception)
        return done.output

    def report(self) -> Any:
        """The values in a report's file, by the path that a page asks for."""
        file = self.history.with_name("report.html")
        self.says("report", "--out", str(file), "--history", str(self.history), JOB)
        text = file.read_text()
        found = re.search(r'<script type="application/json" id="recording">(.*?)</script>', text, re.DOTALL)
        assert found is not None
        return json.loads(found[1])


@contextmanager
def known_job(folder: Path) -> Iterator[tuple[KnownJob, Comparison]]:
    """The job after its end, with the figures that were compared while it ran."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    def call(work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result(60)

    settings = JobSettings(retry_seconds=0.5)
    try:
        with Cluster({"a": 2}, plans=PLANS, settings=settings, forward=FORWARD, memory=MEMORY) as cluster:
            options = {"dashboard.port": 0, "dashboard.history": str(folder / "history.db")}
            dashboard = Dashboard(with_overrides(cluster.config, options), cluster.coordinator.url)
            call(dashboard.start())
            try:
                job, comparison = KnownJob(cluster, dashboard, folder / "history.db"), Comparison()
                cluster.run(Path(known_truth_job.__file__))
                _trained(job, comparison)
                yield job, comparison
            finally:
                call(dashboard.stop())
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)


def _trained(job: KnownJob, comparison: Comparison) -> None:
    """Trains from the start to the end, and looks in between."""
    cluster = job.cluster
    cluster.runs(1, FIRST_STEPS)
    until(lambda: cluster.events("fitted"), cluster.events)
    compare_prediction(job, comparison)
    cluster.pace(SLOW_DEVICE, SLOWDOWN)
    cluster.runs(2, SECOND_STEPS)
    until(lambda: cluster.events("gained"), cluster.events)
    compare_slowdowns(job, comparison)
    compare_top(job, comparison)
    compare_running(job, comparison)
    steps = cluster.finish()
    assert set(cluster.wait(300).values()) == {0}
    until(
        lambda: job.page(f"/api/jobs/{JOB}/steps")["step"][-1:] == [steps - 1],
        lambda: job.page(f"/api/jobs/{JOB}/steps")["step"][-3:],
    )
    until(lambda: job.page(f"/api/jobs/{JOB}")["head"]["phase"] == "done")


# -- what is compared ------------------------------------------------------------------------------------------


def compare_prediction(job: KnownJob, comparison: Comparison) -> None:
    """While the first plan runs, after its profile was fitted: nothing shows the guess as the prediction."""

    def newest() -> float | None:
        found: float | None = job.page("/api/cluster")["jobs"][0]["predicted"]
        return found

    true = median(step.seconds for step in job.truth[1:])
    until(lambda: (found := newest()) is not None and found < 2 * TOKENS / true, newest)
    told = _status(job)["predicted_seconds"]
    comparison.near("status --json: predicted_seconds", told, true, 0.1)
    labels = (("job", JOB),)
    comparison.same("/metrics: predicted", job.metrics["elasticd_job_predicted_step_seconds", labels], told)
    comparison.near("cluster page: predicted", newest(), TOKENS / true, 0.15)
    text = job.says("status")
    comparison.holds(
        "status: predicted", f"{told:.3f} s a step predicted (0.015 s when" in text, text, f"{told:.3f}"
    )
    plan = job.page(f"/api/jobs/{JOB}/plans/1")["row"]
    comparison.near("plan page: predicted", plan["predicted_seconds"], true, 0.1)
    comparison.near("plan page: first predicted", plan["first_predicted_seconds"], GUESS, 0.0, 1e-6)
    comparison.same("plan page: guessed", plan["guessed"], False)
    text = job.says("why", "--job", JOB)
    comparison.holds(
        "why: predicted", f"predicted {told:.3f} s a step; 0.015 s when" in text, text, f"{told:.3f}"
    )
    ratios = [float(ratio) for ratio in re.findall(r"([\d.]+) times the prediction", text)]
    near = all(0.5 < ratio < 2 for ratio in ratios)
    comparison.holds("why: nothing is compared with the guess", near, text, "a ratio near 1")


def compare_slowdowns(job: KnownJob, comparison: Comparison) -> None:
    """While the job measures them."""
    (node,) = json.loads(job.says("status", "--json"))["nodes"]
    for device in node["devices"]:
        slow = SLOWDOWN if device["name"] == SLOW_DEVICE else 1.0
        comparison.near(f"status --json: rate of {device['name']}", device["rate"], slow, 0.1)
        comparison.near(f"status --json: pace of {device['name']}", device["pace"], slow, 0.0)
        comparison.same(f"status --json: memory of {device['name']}", device["memory"], MEMORY)
    metrics = job.metrics
    for name in ("a/0", "a/1"):
        device = (("device", name), ("node", "a"))
        slow = SLOWDOWN if name == SLOW_DEVICE else 1.0
        comparison.near(f"/metrics: slowdown of {name}", metrics["elasticd_device_slowdown", device], slow, 0.1)
        comparison.same(f"/metrics: memory of {name}", metrics["elasticd_device_memory_bytes", device], MEMORY)
    for name in ("a/0", "a/1"):
        view = job.page(f"/api/devices/{name}")
        slow = SLOWDOWN if name == SLOW_DEVICE else 1.0
        comparison.near(f"device page: slowdown of {name}", view["cell"].get("slowdown", 1.0), slow, 0.1)
        computed = view["parts"]["forward"] + view["parts"]["backward"]
        comparison.near(f"device page: computation of {name}", computed, 4 * 3 * BLOCK, _late(job.truth))


def compare_top(job: KnownJob, comparison: Comparison) -> None:
    """While the second plan runs: the screen that shows what runs."""
    screen, truth = job.says("top", "--once"), job.truth
    wall = wall_seconds(truth)
    comparison.near("top: steps/s", _after(screen, "steps/s"), 1 / wall, 0.1, 0.03)
    comparison.near("top: tokens/s", _after(screen, "tokens/s"), TOKENS / wall, 0.1)
    losses = {f"{step.loss:.4f}" for step in truth[-3:]}
    comparison.holds("top: loss", any(loss in screen for loss in losses), screen, f"one of {losses}")


def compare_all(job: KnownJob, comparison: Comparison) -> None:
    """Every figure of a job that is over."""
    truth = job.truth
    report = job.report()
    for where, ask in (("page", job.page), ("report", report.__getitem__)):
        _compare_job_page(where, ask, truth, comparison)
        _compare_steps(where, ask, truth, comparison)
        _compare_plans(where, ask, truth, comparison)
        _compare_devices(where, ask, comparison)
    _compare_status(job, truth, comparison)
    _compare_metrics(job, truth, comparison)
    _compare_text(job, truth, comparison)
    _compare_events(job, comparison)


def wall_seconds(truth: Sequence[StepTruth]) -> float:
    """Of wall time a step, of the newest steps."""
    last = truth[-SPEED_STEPS - 1 :]
    return (last[-1].ended - last[0].ended) / (len(last) - 1)


def own_seconds(truth: Sequence[StepTruth], plan: int) -> float:
    """Of a step itself under a plan: the median, without the first one, which waits for the switch."""
    return median(step.seconds for step in [step for step in truth if step.plan == plan][1:])


def _late(truth: Sequence[StepTruth]) -> float:
    """By which part emulated times may be off: a machine that is too busy for them makes steps longer."""
    return 0.1 + 2 * max(0.0, max(step.seconds for step in truth[-3:]) / PREDICTED - 1)


def _status(job: KnownJob) -> Any:
    (found,) = json.loads(job.says("status", "--json"))["jobs"]
    return found


def _compare_status(job: KnownJob, truth: Sequence[StepTruth], comparison: Comparison) -> None:
    found, last = _status(job), truth[-1]
    comparison.same("status --json: step", found["step"], last.step + 1)
    comparison.same("status --json: loss", found["loss"], last.loss)
    wall = wall_seconds(truth)
    comparison.near("status --json: tokens_per_second", found["tokens_per_second"], TOKENS / wall)
    comparison.near("status --json: wall_seconds", found["wall_seconds"], wall)
    comparison.near("status --json: step_seconds", found["step_seconds"], last.seconds, 0.1)
    comparison.near("status --json: predicted_seconds", found["predicted_seconds"], PREDICTED, 0.0, 1e-6)
    comparison.same("status --json: plan", found["plan"]["number"], last.plan)


def compare_running(job: KnownJob, comparison: Comparison) -> None:
    """While the second plan runs: metrics of a job that is not over."""
    metrics, truth = _of_job(job.metrics), job.truth
    wall, own = wall_seconds(truth), own_seconds(truth, 2)
    comparison.near("/metrics: tokens_per_second", metrics("tokens_per_second"), TOKENS / wall, 0.1)
    comparison.near("/metrics: wall_step_seconds", metrics("wall_step_seconds"), wall, 0.1)
    comparison.near("/metrics: step_seconds", metrics("step_seconds"), own, 0.2)
    predicted = metrics("predicted_step_seconds")
    comparison.near("/metrics: predicted_step_seconds", predicted, PREDICTED, 0.0, 1e-6)
    comparison.same("/metrics: plan_number", metrics("plan_number"), 2)
    comparison.same("/metrics: members", metrics("members"), 2)
    comparison.same("/metrics: standby", metrics("standby"), 0)
    comparison.near("/metrics: last_switch_seconds", metrics("last_switch_seconds"), _pause(job), 0.0, 1e-6)
    _compare_time("/metrics", metrics("ettr"), metrics("goodput"), truth, comparison)


def _of_job(metrics: Mapping[Any, float]) -> Callable[..., float | None]:
    """Finds a metric of the job by the rest of its name, and its other labels."""

    def of(name: str, **more: str) -> float | None:
        return metrics.get((f"elasticd_job_{name}", tuple(sorted((("job", JOB), *more.items())))))

    return of


def _compare_metrics(job: KnownJob, truth: Sequence[StepTruth], comparison: Comparison) -> None:
    of, last = _of_job(job.metrics), truth[-1]
    comparison.same("/metrics: step", of("step"), last.step + 1)
    comparison.same("/metrics: loss", of("loss"), last.loss)
    for name in ("tokens_per_second", "ettr", "members", "predicted_step_seconds", "stalled_seconds"):
        comparison.same(f"/metrics: {name} of a job that is over", of(name), None)
    lost = of("lost_seconds_total", cause="between steps")
    comparison.near("/metrics: lost between steps", lost, _bodies(truth), 0.1, 0.02 * len(truth))
    comparison.near(
        "/metrics: lost in switches", of("lost_seconds_total", cause="switch"), _pause(job), 0.5, 0.15
    )
    comparison.same("/metrics: repeated steps", of("repeated_steps_total"), 0)
    sent = sum(event["data"]["bytes_sent"] for event in job.cluster.events("swapped"))
    comparison.same("/metrics: moved bytes", of("moved_bytes_total"), sent)
    for reason, count in (("start", 1), ("slow", 1), ("recovered", 0)):
        comparison.same(f"/metrics: replans, {reason}", of("replans_total", reason=reason), count)


def _compare_time(
    where: str,
    ettr: float | None,
    goodput: float | None,
    truth: Sequence[StepTruth],
    comparison: Comparison,
) -> None:
    """The part of the wall time in steps; each but the last is followed by the loop's body."""
    wall = truth[-1].ended - truth[0].began
    begun = truth[0].ended - own_seconds(truth, 1)  # before it the job had no plan
    comparison.near(f"{where}: ETTR", ettr, 1 - _bodies(truth) / (truth[-1].ended - begun), 0.05, 0.03)
    comparison.holds(
        f"{where}: goodput", goodput is not None and goodput <= (ettr or 0.0), goodput, f"<= {ettr}"
    )
    assert wall > 0


def _bodies(truth: Sequence[StepTruth]) -> float:
    """Seconds of the loop's bodies between the first and the last step."""
    return sum(after.began - before.ended for before, after in pairwise(truth))


def _pause(job: KnownJob) -> float:
    """Of the switch, as its ranks measured it."""
    swapped = [event["data"] for event in job.cluster.events("swapped") if event["data"]["number"] == 2]
    return max(float(data["pause_seconds"]) for data in swapped)


Ask = Callable[[str], Any]


def _compare_row(
    where: str, row: Mapping[str, Any], truth: Sequence[StepTruth], comparison: Comparison
) -> None:
    last, wall = truth[-1], wall_seconds(truth)
    comparison.same(f"{where}: step", row["step"], last.step + 1)
    comparison.same(f"{where}: loss", row["loss"], last.loss)
    comparison.near(f"{where}: tokens/s", row["tokens_per_second"], TOKENS / wall)
    comparison.near(f"{where}: tokens/s within steps", row["within_steps"], TOKENS / last.seconds, 0.1, 10.0)
    comparison.near(f"{where}: predicted tokens/s", row["predicted"], TOKENS / PREDICTED, 0.02)
    # All that the two devices compute, by 1/slowdown: 4 micro-batches of 3 blocks, and of 1 block at a third.
    bound = (4 * 3 * BLOCK + 4 * BLOCK) / (1 + 1 / SLOWDOWN)
    comparison.near(f"{where}: bound", row["bound"], TOKENS / bound, _late(truth))
    of_bound = row["within_steps"] / (row["bound"] or 1.0)
    comparison.holds(f"{where}: of bound", of_bound <= 1 + 1e-9, f"{of_bound:.0%}", "at most 100 %")
    comparison.same(f"{where}: plan", row["plan"], last.plan)
    comparison.same(f"{where}: devices", (row["devices"], row["standby"]), (2, 0))


def _compare_job_page(where: str, ask: Ask, truth: Sequence[StepTruth], comparison: Comparison) -> None:
    (row,) = ask("/api/cluster")["jobs"]
    _compare_row(f"cluster {where}", row, truth, comparison)
    view = ask(f"/api/jobs/{JOB}")
    _compare_row(f"job {where}", view["head"], truth, comparison)
    _compare_time(f"job {where}", view["head"]["ettr"], view["head"]["goodput"], truth, comparison)
    if where == "page":  # of a job that is over a report knows neither lengths nor stages
        comparison.same("job page: stages", len(view["stages"]), 2)
        lengths = view["lengths"]
        comparison.same("job page: mean length", lengths["mean"], LENGTH)
        comparison.same("job page: shortest length", lengths["shortest"], LENGTH)
        comparison.same("job page: longest length", lengths["longest"], LENGTH)
        comparison.same("job page: lengths", lengths["now"], [[LENGTH, LENGTH, BATCH]])
    batch = view["batch"]
    comparison.same(f"job {where}: batch", (batch["samples"], batch["micro_batch"]), (BATCH, MICRO))
    lost = {each["cause"]: each["seconds"] for each in view["lost"]}
    between = lost["between steps"]
    comparison.near(f"job {where}: lost between steps", between, _bodies(truth), 0.1, 0.02 * len(truth))
    comparison.near(
        f"job {where}: healthy seconds of a step",
        view["healthy_seconds"],
        min(own_seconds(truth, plan) for plan in (1, 2)),
        0.1,
    )
    comparison.same(f"job {where}: repeated steps", view["repeated_steps"], 0)
    whole = view["productive_seconds"] + sum(lost.values())
    comparison.near(f"job {where}: wall time", view["wall_seconds"], whole, 0.001)
    for stage in view["stages"]:
        spent = sum(stage["seconds"].values())
        comparison.near(f"job {where}: parts of stage {stage['stage']}", spent, stage["total"], 0.02)
        computed = stage["seconds"]["forward"] + stage["seconds"]["backward"]
        name = f"job {where}: computation of stage {stage['stage']}"
        comparison.near(
            name, computed, 4 * 3 * BLOCK, _late(truth)
        )  # three blocks, or one at a third of the speed


def _compare_steps(where: str, ask: Ask, truth: Sequence[StepTruth], comparison: Comparison) -> None:
    columns = ask(f"/api/jobs/{JOB}/steps")
    comparison.same(f"throughput {where}: steps", columns["step"], [step.step for step in truth])
    comparison.same(f"throughput {where}: plans", columns["plan"], [step.plan for step in truth])
    comparison.same(f"throughput {where}: losses", columns["loss"], [step.loss for step in truth])
    speeds = columns["tokens_per_second"][1:]
    walls = [TOKENS / (after.ended - before.ended) for before, after in pairwise(truth)]
    off = [abs(shown / true - 1) for shown, true in zip(speeds, walls, strict=True)]
    comparison.holds(f"throughput {where}: over wall time", median(off) < 0.05, speeds, f"{walls}")
    above = [
        step
        for step, own, bound in zip(columns["step"], columns["within_steps"], columns["bound"], strict=True)
        if bound is not None and own > bound * (1 + 1e-9)
    ]
    comparison.same(f"throughput {where}: steps above their bound", above, [])
    fitted = [
        predicted
        for step, plan, predicted in zip(columns["step"], columns["plan"], columns["predicted"], strict=True)
        if plan == 1 and step >= FIRST_STEPS - 1
    ]
    # The profile is fitted to these steps, of which a busy machine makes some longer: it lies among them.
    taught = [TOKENS / step.seconds for step in truth[1:FIRST_STEPS]]
    comparison.holds(
        f"throughput {where}: predicted, once fitted",
        0.9 * min(taught) <= median(fitted) <= 1.1 * max(taught),
        median(fitted),
        f"{min(taught):.0f} to {max(taught):.0f}",
    )


def _compare_plans(where: str, ask: Ask, truth: Sequence[StepTruth], comparison: Comparison) -> None:
    rows = {row["number"]: row for row in ask(f"/api/jobs/{JOB}/plans")["plans"]}
    comparison.same(f"plans {where}: numbers", sorted(rows), [1, 2])
    for number, row in rows.items():
        own = own_seconds(truth, number)
        comparison.near(f"plans {where}: plan {number} took", row["measured_seconds"], own, 0.1)
        count = sum(step.plan == number for step in truth)
        comparison.same(f"plans {where}: steps of plan {number}", row["steps"], count)
    first, second = rows[1], rows[2]
    healthy = own_seconds(truth[:FIRST_STEPS], 1)
    comparison.near(f"plans {where}: plan 1 predicted", first["predicted_seconds"], healthy, 0.1)
    comparison.near(f"plans {where}: plan 2 predicted", second["predicted_seconds"], PREDICTED, 0.0, 1e-6)
    switch = ask(f"/api/jobs/{JOB}/switch")
    comparison.same(f"switch {where}: pause", switch["pause"], second["pause_seconds"])
    comparison.same(f"switch {where}: step", switch["step"], min(step.step for step in truth if step.plan == 2))
    view = ask(f"/api/jobs/{JOB}/plans/2")
    comparison.holds(
        f"plan {where}: the gain's pause",
        f"the switch took {switch['pause']:.3f} s" in view["why"],
        view["why"],
        f"{switch['pause']:.3f} s",
    )
    diff = view["diff"]
    comparison.same(f"plan {where}: bytes sent", diff["bytes_sent"], second["bytes_sent"])


def _compare_devices(where: str, ask: Ask, comparison: Comparison) -> None:
    for name in ("a/0", "a/1"):
        view = ask(f"/api/devices/{name}")
        told = view["cell"].get("slowdown", 1.0)
        comparison.same(f"device {where}: slowdown of {name}, which no job measures any more", told, 1.0)
        comparison.same(f"device {where}: memory of {name}", view["memory"], MEMORY)
        comparison.same(f"device {where}: its last step, of a job that is over", view["parts"], {})
    kinds = [event["kind"] for event in ask("/api/events")["events"]]
    comparison.holds(f"events {where}: prepared once for each plan", kinds.count("prepared") == 2, kinds, "2")


def _compare_text(job: KnownJob, truth: Sequence[StepTruth], comparison: Comparison) -> None:
    last, wall = truth[-1], wall_seconds(truth)
    line = next(line for line in map(str.split, job.says("jobs").splitlines()) if line[:2] == [JOB, "done"])
    comparison.same("jobs: step", line[2], str(last.step + 1))
    comparison.same("jobs: loss", line[3], f"{last.loss:.4f}")
    comparison.near("jobs: tokens/s", _number(line[4]), TOKENS / wall)
    screen = job.says("status", "--all")
    comparison.near("status: tokens/s", _after(screen, "tokens/s"), TOKENS / wall)
    comparison.near("status: loss", _after(screen, "loss"), last.loss, 0.0, 1e-4)
    comparison.near("status: wall time a step", _after(screen, "wall time a step"), wall)
    comparison.near("status: the step itself", _after(screen, "the step itself"), last.seconds, 0.1)
    screen = job.says("why", "--job", JOB, "2")
    own = own_seconds(truth, 2)
    comparison.near("why: predicted", _after(screen, "predicted"), PREDICTED, 0.0, 1e-3)
    comparison.near("why: took", _after(screen, "took"), own, 0.1)
    comparison.near("why: times the prediction", _after(screen, "steps;"), own / PREDICTED, 0.1)
    comparison.near("why: the switch took", _after(screen, "the switch took"), _pause(job), 0.0, 1e-3)
    rows = [line.split() for line in job.says("history", JOB).splitlines()]
    predicted = {row[0]: row[1] for row in rows if row[:1] in (["1"], ["2"])}
    healthy = own_seconds(truth[:FIRST_STEPS], 1)
    comparison.near("history: plan 1 predicted", _number(predicted["1"]), healthy, 0.1)
    for record in json.loads(job.says("history", JOB, "--json")):
        true = healthy if record["number"] == 1 else PREDICTED
        name = f"history --json: plan {record['number']} predicted"
        comparison.near(name, record["predicted_seconds"], true, 0.1)
    comparison.near("history: plan 2 predicted", _number(predicted["2"]), PREDICTED, 0.0, 1e-3)


def _compare_events(job: KnownJob, comparison: Comparison) -> None:
    (gained,) = job.cluster.events("gained")
    comparison.near("events: the pause of the gain", gained["data"]["pause"], _pause(job), 0.0, 1e-9)
    prepared = [event["data"]["number"] for event in job.cluster.events("prepared")]
    comparison.same("events: prepared once for each plan", prepared, [1, 2])
    changes = {event["kind"] for event in job.cluster.events("slow", "faster", "recovered", "corrected")}
    comparison.holds(
        "events: nothing recovered", "recovered" not in changes, sorted(changes), "slow, corrected"
    )


def _number(text: str) -> float:
    return float(text.replace(",", ""))


def _after(text: str, words: str) -> float | None:
    """The number that follows these words."""
    found = re.search(rf"{re.escape(words)}\s+([\d.,]*\d)", text)
    return _number(found[1]) if found else None


__all__: Sequence[str] = ["BODY", "Comparison", "KnownJob", "compare_all", "known_job"]
