"""The plot of a simulation: throughput over time beside the bound, with what happened when."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from elasticd.simulator.record import Outcome, Stretch

#: What the plot marks, and how.
_MARKS = {
    "fault": ("tab:red", "the script"),
    "slow": ("tab:orange", "detected"),
    "recovered": ("tab:orange", "detected"),
    "recorded": ("tab:green", "switched"),
}
#: More marks than this are no help to anybody: then only the plans' changes are marked.
_MOST_MARKS = 40


class CannotPlot(ValueError):
    """No plot can be made; the message says why and what to do."""


def plot(outcome: Outcome, path: Path) -> None:
    """Writes an SVG or PNG, by the path's suffix. Raises CannotPlot."""
    if path.suffix.lower() not in (".svg", ".png"):
        raise CannotPlot(f"cannot plot to {path}: name a file that ends in .svg or .png")
    try:
        import matplotlib
    except ImportError as error:
        raise CannotPlot("a plot needs matplotlib: pip install 'elasticd[demo]'") from error
    matplotlib.use("Agg")  # no display is needed, and none is looked for
    from matplotlib import pyplot

    with matplotlib.rc_context({"svg.hashsalt": "elasticd"}):
        figure, axes = pyplot.subplots(figsize=(11, 5), layout="constrained")
        unit, name = _unit(outcome)
        times, speeds, bounds = zip(*_curve(outcome), strict=True)
        at = [time / unit for time in times]
        axes.plot(at, [s / 1e3 for s in bounds], color="black", linewidth=1, linestyle="--", label="the bound")
        axes.plot(at, [s / 1e3 for s in speeds], color="tab:blue", linewidth=1.5, label="elasticd")
        _still(outcome, axes)
        _mark(outcome, axes, unit)
        axes.set_xlabel(f"{name} (simulated)")
        axes.set_ylabel("thousand tokens/s (simulated)")
        axes.set_title(f"{outcome.scenario}: {outcome.model} on {outcome.devices} devices")
        axes.set_ylim(bottom=0)
        figure.legend(loc="outside lower center", ncols=4)
        try:
            figure.savefig(path, dpi=120, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)
        except OSError as error:
            raise CannotPlot(
                f"cannot plot to {path}: {error.strerror}; name a file that can be written"
            ) from error
        finally:
            pyplot.close(figure)


def _unit(outcome: Outcome) -> tuple[float, str]:
    last = outcome.stretches[-1].stop if outcome.stretches else 0.0
    return (3600.0, "hours") if last > 3 * 3600 else (1.0, "seconds")


def _curve(outcome: Outcome) -> Iterator[tuple[float, float, float]]:
    """Seconds, tokens/s, the bound's: two points a stretch, and nothing is trained in a gap between two."""
    last = 0.0
    for stretch in outcome.stretches:
        speed, bound = speeds(outcome, stretch)
        if stretch.start > last + 1e-3:
            yield last, 0.0, bound
            yield stretch.start, 0.0, bound
        yield stretch.start, speed, bound
        yield stretch.stop, speed, bound
        last = stretch.stop
    if not outcome.stretches:
        yield 0.0, 0.0, 0.0


def speeds(outcome: Outcome, stretch: Stretch) -> tuple[float, float]:
    """Tokens/s of a stretch, and what no plan could exceed meanwhile."""
    return outcome.tokens_per_step / stretch.step_seconds, outcome.tokens_per_step / stretch.bound


def _still(outcome: Outcome, axes: object) -> None:
    """The other runs' means, as lines: they run in a time of their own."""
    styles = {"no reaction": ":", "restart without the slow nodes": "-."}
    for totals in outcome.totals:
        style = styles.get(totals.name)
        if style is not None:
            label = f"{totals.name} (mean)"
            axes.axhline(  # type: ignore[attr-defined]
                totals.tokens_per_second / 1e3, color="tab:gray", linestyle=style, linewidth=1, label=label
            )


def _mark(outcome: Outcome, axes: object, unit: float) -> None:
    found = [event for event in outcome.timeline if event.kind in _MARKS]
    if len(found) > _MOST_MARKS:
        found = [event for event in found if event.kind == "recorded"]
    labelled: set[str] = set()
    for event in found[:_MOST_MARKS]:
        color, label = _MARKS[event.kind]
        axes.axvline(  # type: ignore[attr-defined]
            event.seconds / unit,
            color=color,
            linewidth=0.8,
            alpha=0.7,
            label=None if label in labelled else label,
        )
        labelled.add(label)
