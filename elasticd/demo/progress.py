"""The progress bar: step, loss, tokens/s, plan and phase; and a line for everything that happens."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn
from rich.progress import Progress as Bar

from elasticd.client import JobStatus
from elasticd.coordinator.events.event_log import EventRecord
from elasticd.demo.scenario import DemoScenario
from elasticd.demo.story import DemoPhase

#: The events that a viewer wants to read of; the rest is in the record.
_TOLD = frozenset({"slow", "recovered", "fitted", "proposed", "recorded", "kept_plan", "aborted", "stopped"})


class DemoProgress:
    """A context manager around rich's bar. Where the output is no terminal, the lines alone remain."""

    def __init__(self, console: Console, scenario: DemoScenario) -> None:
        self._console, self._steps = console, scenario.steps
        self._bar = Bar(
            TextColumn("{task.fields[phase]:<10}"),
            BarColumn(bar_width=24),
            TextColumn(
                "step {task.completed}/{task.total}  loss {task.fields[loss]}  "
                "{task.fields[speed]} tokens/s  plan {task.fields[plan]}"
            ),
            console=console,
            transient=True,
        )
        self._task: TaskID
        self._began = time.monotonic()
        self._told = 0

    def __enter__(self) -> DemoProgress:
        self._bar.start()
        self._task = self._bar.add_task(
            "demo", total=self._steps, phase="starting", loss="-", speed="-", plan="-"
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def say(self, text: str) -> None:
        """One line above the bar, with the seconds since the start."""
        line = f"{time.monotonic() - self._began:6.1f} s  {text}"
        self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def show(self, job: JobStatus | None, phase: DemoPhase, events: Sequence[EventRecord]) -> None:
        """The bar as of now, and lines for the events that are new."""
        for event in events[self._told :]:
            if event.kind in _TOLD:
                self.say(event.text)
        self._told = len(events)
        if job is None:
            return
        self._bar.update(
            self._task,
            completed=min(self._steps, job.step),
            phase=phase.value,
            loss="-" if job.loss is None else f"{job.loss:.3f}",
            speed="-" if job.tokens_per_second is None else f"{job.tokens_per_second:,.0f}",
            plan="-" if job.plan is None else str(job.plan.number),
        )
