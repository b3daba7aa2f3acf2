"""The progress bar: step, loss, tokens/s, plan and phase; and a line for everything that happens."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from elasticd.demo.scenario import DemoScenario
from elasticd.demo.story import DemoPhase
from elasticd.machines.job.state.events import SLOWDOWN_KINDS
from elasticd.wire.api_types import JobStatus
from elasticd.wire.event_record import EventRecord

#: The events that a viewer wants to read of; the rest is in the record.
_TOLD = frozenset({*SLOWDOWN_KINDS, "fitted", "proposed", "recorded", "kept_plan", "aborted", "stopped"})


class DemoProgress(Progress):
    """rich's bar, as a context manager. Where the output is no terminal, the lines alone remain."""

    def __init__(self, console: Console, scenario: DemoScenario) -> None:
        super().__init__(
            TextColumn("{task.fields[phase]:<10}"),
            BarColumn(bar_width=24),
            TextColumn(
                "step {task.completed}/{task.total}  loss {task.fields[loss]}  "
                "{task.fields[speed]} tokens/s  plan {task.fields[plan]}"
            ),
            console=console,
            transient=True,
        )
        self._bar = self.add_task("demo", total=scenario.steps, phase="starting", loss="-", speed="-", plan="-")
        self._began = time.monotonic()
        self._told = 0

    def say(self, text: str) -> None:
        """One line above the bar, with the seconds since the start."""
        line = f"{time.monotonic() - self._began:6.1f} s  {text}"
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def show(self, job: JobStatus | None, phase: DemoPhase, events: Sequence[EventRecord]) -> None:
        """The bar as of now, and lines for the events that are new."""
        for event in events[self._told :]:
            if event.kind in _TOLD:
                self.say(event.text)
        self._told = len(events)
        if job is None:
            return
        self.update(
            self._bar,
            completed=job.step,
            phase=phase.value,
            loss="-" if job.loss is None else f"{job.loss:.3f}",
            speed="-" if job.tokens_per_second is None else f"{job.tokens_per_second:,.0f}",
            plan="-" if job.plan is None else str(job.plan.number),
        )
