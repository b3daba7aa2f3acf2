"""The plot of a simulation: throughput over time beside the bound, with what happened when."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from elasticd_planner.value import Invalid

from elasticd.extras import need
from elasticd.simulator.results.result import Happening, Outcome

#: What the plot marks, and how.
_MARKS = {
    "fault": ("tab:red", "the script"),
    "slow": ("tab:orange", "detected"),
    "faster": ("tab:orange", "detected"),
    "recovered": ("tab:orange", "detected"),
    "corrected": ("tab:orange", "detected"),
    "fenced": ("tab:purple", "a fault is known"),
    "recorded": ("tab:green", "a new plan runs"),
}
#: More marks than this are no help to anybody: then only the plans' changes are marked, and what the script did
#: by ticks below the curves.
_MOST_MARKS = 40
#: The least distance between two labels, as a part of the width.
_APART = 0.018


class CannotPlot(Invalid):
    """No plot can be made; the message says why and what to do."""


def plot(outcome: Outcome, path: Path) -> None:
    """Writes an SVG or PNG, by the path's suffix. Raises CannotPlot, and ExtraMissing without matplotlib."""
    if path.suffix.lower() not in (".svg", ".png"):
        raise CannotPlot(f"cannot plot to {path}: name a file that ends in .svg or .png")
    need("matplotlib", "a plot")
    import matplotlib

    matplotlib.use("Agg")  # no display is needed, and none is looked for
    from matplotlib import pyplot

    with matplotlib.rc_context({"svg.hashsalt": "elasticd"}):
        figure, axes = pyplot.subplots(figsize=(11, 5.4), layout="constrained")
        unit, name = _unit(outcome)
        times, speeds, bounds = zip(*_curve(outcome), strict=True)
        at = [time / unit for time in times]
        axes.plot(at, [s / 1e3 for s in bounds], color="black", linewidth=1, linestyle="--", label="the bound")
        axes.plot(at, [s / 1e3 for s in speeds], color="tab:blue", linewidth=1.5, label="elasticd")
        _still(outcome, axes)
        last = max(at[-1], 1e-9)
        axes.set_xlim(0, last)
        axes.set_ylim(0, 1.05 * max(*bounds, *speeds, 1.0) / 1e3)
        _mark(outcome, axes, unit, last)
        axes.set_xlabel(f"{name} (simulated)")
        axes.set_ylabel("thousand tokens a second (simulated)")
        figure.suptitle(f"{outcome.scenario}: {outcome.model} on {outcome.devices} devices", fontsize="large")
        figure.legend(loc="outside lower center", ncols=4, frameon=False)
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
        speed, bound = stretch.tokens / stretch.step_seconds, stretch.tokens / stretch.bound
        if stretch.start > last + 1e-3:
            yield last, 0.0, bound
            yield stretch.start, 0.0, bound
        yield stretch.start, speed, bound
        yield stretch.stop, speed, bound
        last = stretch.stop
    if not outcome.stretches:
        yield 0.0, 0.0, 0.0


def _still(outcome: Outcome, axes: Any) -> None:
    """The other runs' means, as lines: they run in a time of their own."""
    styles = {"no reaction": ":", "restart without the slow nodes": "-."}
    for totals in outcome.totals:
        style = styles.get(totals.name)
        if style is not None:
            label = f"{totals.name} (mean)"
            axes.axhline(
                totals.tokens_per_second / 1e3, color="tab:gray", linestyle=style, linewidth=1, label=label
            )


def _mark(outcome: Outcome, axes: Any, unit: float, last: float) -> None:
    """Marks the times of the script's events, by name where there is room for names."""
    events = [event for event in outcome.timeline if event.kind in _MARKS]
    faults = [event for event in events if event.kind == "fault"]
    many = len(events) > _MOST_MARKS
    if many:
        events = [event for event in events if event.kind == "recorded"]
        at = [event.seconds / unit for event in faults]
        color, label = _MARKS["fault"]
        axes.plot(at, [0.012] * len(at), "|", color=color, label=label, transform=axes.get_xaxis_transform())
    labelled: set[str] = set()
    for kind, seconds in dict.fromkeys((event.kind, event.seconds) for event in events):
        color, label = _MARKS[kind]
        axes.axvline(
            seconds / unit,
            color=color,
            linewidth=0.8,
            alpha=0.6,
            zorder=0,
            label=None if label in labelled else label,
        )
        labelled.add(label)
    if not many:
        _name(faults, axes, unit, last)


def _name(faults: list[Happening], axes: Any, unit: float, last: float) -> None:
    """Above the plot what the script did; of what comes at about one time the first, and how many more."""
    groups: list[list[Happening]] = []
    for event in faults:
        if groups and (event.seconds - groups[-1][0].seconds) / unit < _APART * last:
            groups[-1].append(event)
        else:
            groups.append([event])
    for group in groups:
        more = f", and {len(group) - 1} more" if len(group) > 1 else ""
        axes.annotate(
            group[0].text + more,
            (group[0].seconds / unit, 1.0),
            xycoords=axes.get_xaxis_transform(),
            xytext=(2, 3),
            textcoords="offset points",
            rotation=20,
            fontsize="small",
            color=_MARKS["fault"][0],
            ha="left",
            va="bottom",
        )
