"""The plot of a run: throughput over time, what the planner predicted, and what happened when."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from elasticd.demo.record import DemoRecord
from elasticd.machines.job.state.events import SLOWDOWN_KINDS
from elasticd.wire.step_record import StepRecord

_MARKS = {
    "chaos": "tab:red",
    "slow": "tab:orange",
    "faster": "tab:orange",
    "recovered": "tab:orange",
    "corrected": "tab:orange",
    "recorded": "tab:green",
}


def plot(record: DemoRecord, path: Path) -> None:
    """Writes a PNG to `path`."""
    import matplotlib

    matplotlib.use("Agg")  # no display is needed, and none is looked for
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(11, 5), layout="constrained")
    start = record.steps[0].time - record.steps[0].seconds
    times = [step.time - start for step in record.steps]
    axes.step(times, [speed(step) for step in record.steps], where="pre", color="tab:blue", label="measured")
    for index, (left, right, predicted) in enumerate(predictions(record, start)):
        label = "predicted by the planner" if not index else None
        axes.plot([left, right], [predicted, predicted], "--", color="black", linewidth=1, label=label)
    for at, kind, text in marks(record, start):
        axes.axvline(at, color=_MARKS[kind], linewidth=1, alpha=0.8)
        foot = axes.get_xaxis_transform()
        axes.text(at, 0.02, f" {text}", rotation=90, fontsize=8, va="bottom", transform=foot)
    axes.set_xlabel("seconds since the first step")
    axes.set_ylabel("tokens/s (devices' speed is emulated)")
    axes.set_title("elasticd: a job replans around a slowed worker, in place")
    axes.set_ylim(bottom=0)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def speed(step: StepRecord) -> float:
    """Tokens per second of one step."""
    return (step.tokens or 0) / step.seconds


def predictions(record: DemoRecord, start: float) -> Iterator[tuple[float, float, float]]:
    """From, to (seconds), predicted tokens/s: of each plan that was made from measurements."""
    history = {entry.number: entry for entry in record.history}
    for number, steps in groupby(record.steps, key=lambda step: step.plan):
        ran = list(steps)
        entry = history.get(number)
        if entry is None or entry.plan.prediction is None or not entry.problem.profile.fitted:
            continue
        predicted = (ran[0].tokens or 0) / entry.plan.prediction.step_seconds
        yield ran[0].time - ran[0].seconds - start, ran[-1].time - start, predicted


def marks(record: DemoRecord, start: float) -> Iterator[tuple[float, str, str]]:
    """Seconds, kind and words of the events that the plot shows."""
    device, factor = record.scenario.slow_device, record.scenario.factor
    interventions = iter((f"{device} slowed {factor:g}x", f"{device} recovers"))
    for event in record.events:
        at = event.time - start
        if event.kind == "chaos":
            yield at, "chaos", next(interventions, "chaos")
        elif event.kind in SLOWDOWN_KINDS:
            yield at, event.kind, "detected"
        elif event.kind == "recorded" and at > 0:
            yield at, "recorded", f"plan {event.data['number']}"
