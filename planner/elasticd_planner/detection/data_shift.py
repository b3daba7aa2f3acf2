"""Data shifts: lasting changes of the sequence lengths, told apart from noise.

Theory of operation. A step's batch has a mean length, and an effective one (the length of the sequence that a
token is in): what time follows. The logarithms of both are compared with those of the reference, the lengths
that held when the last shift was reported, by the sequential test of stragglers (`cusum`), up and down. Their
noise is that of the batches, and is measured. The reference is fixed, so that a slow drift is a shift once it
is far enough. All devices see the same shift, so it is never taken for a slow one: residuals are over the
fleet's cost.

    learning --(`refine_after_steps` steps)----------> settling
    settling --(`KEPT` steps)------------------------> watching
    any of them --(test passed)----------------------> learning; the shift is reported with the lengths so far
    learning --(as many steps, the report was off)---> settling; the shift is reported again as learned
"""

from __future__ import annotations

import math
from statistics import median

import msgspec

from elasticd_planner.detection.cusum import NONE, CusumState, CusumTest, trimmed
from elasticd_planner.detection.fleet_baseline import noise
from elasticd_planner.detection.settings import DetectSettings
from elasticd_planner.spec.sequence_lengths import Lengths
from elasticd_planner.value import Value

#: Steps whose lengths are kept, and how far the told lengths may be off before they are told again.
KEPT = 32
OFF = 0.1

#: What new lengths must show at least, of the settings' shift: once the reference is known well, and before.
ENOUGH = 0.75
COARSE = 1.5

#: Spread of the batches' lengths that is expected at least.
SPREAD = 0.05


class Shift(Value, frozen=True, kw_only=True):
    """A lasting change of the sequence lengths."""

    step: int  # the lengths have changed by this step
    before: Lengths
    after: Lengths
    reason: str  # for people


class Signal(Value, frozen=True, kw_only=True):
    """A logarithm of the sequence lengths that is tested for a shift, step by step."""

    last: float | None = None  # its value in the last step
    noise: float = 0.0  # its standard deviation from step to step
    seen: int = 0  # steps that the noise was measured in
    cusum_up: CusumState = NONE  # evidence that it has grown
    cusum_down: CusumState = NONE  # evidence that it has become smaller

    def after(self, value: float, expected: float, settings: DetectSettings) -> tuple[Signal, int]:
        """The signal after one more step, and for how many steps it has shifted (0: not at all)."""
        heard = noise(self.noise, self.seen, None if self.last is None else abs(value - self.last))
        sigma = max(SPREAD, heard)
        test = CusumTest.of(math.log1p(settings.shift), sigma, settings.false_alarms, settings.min_steps)
        up, down = test.add(self.cusum_up, value - expected), test.add(self.cusum_down, expected - value)
        made = Signal(last=value, noise=heard, seen=self.seen + 1, cusum_up=up, cusum_down=down)
        return made, next((each.since for each in (up, down) if test.passed(each)), 0)

    def anew(self) -> Signal:
        """The signal without evidence; its noise is known still."""
        return Signal(last=self.last, noise=self.noise, seen=self.seen)


class ShiftState(Value, frozen=True, kw_only=True):
    """The knowledge of a job's sequence lengths."""

    step: int = -1  # the last step
    reference: Lengths | None = None  # what a shift is measured against; None until some steps were seen
    fixed: bool = False  # the reference comes from enough steps to stay
    recent: tuple[Lengths, ...] = ()  # the last steps since the last shift
    mean: Signal = Signal()  # the logarithm of the mean length
    effective: Signal = Signal()  # the logarithm of the effective length

    @property
    def lengths(self) -> Lengths | None:
        """The lengths to plan with, from the steps since the last shift; None before the first step."""
        return _typical(self.recent) if self.recent else None


def watch(
    state: ShiftState, step: int, lengths: Lengths | None, settings: DetectSettings
) -> tuple[ShiftState, Shift | None]:
    """Judges the lengths of one step (None: not measured). A step that is not newer changes nothing."""
    if lengths is None or step <= state.step:
        return state, None
    reference = state.reference or lengths
    mean, one = state.mean.after(math.log(lengths.mean), math.log(reference.mean), settings)
    effective, other = state.effective.after(
        math.log(lengths.effective), math.log(reference.effective), settings
    )
    recent = (*state.recent, lengths)[-KEPT:]
    state = msgspec.structs.replace(state, step=step, recent=recent, mean=mean, effective=effective)
    since = max(one, other)
    return _shifted(state, reference, since, settings) if since else _learned(state, settings)


def _shifted(
    state: ShiftState, reference: Lengths, since: int, settings: DetectSettings
) -> tuple[ShiftState, Shift | None]:
    """After `since` steps of evidence: a shift, if the lengths differ enough."""
    state = msgspec.structs.replace(state, mean=state.mean.anew(), effective=state.effective.anew())
    recent = state.recent[-since:]
    found = _typical(recent)
    enough = ENOUGH if state.fixed else COARSE
    if not _off(reference, found, enough * settings.shift, longest=False):
        return state, None
    shift = Shift(step=state.step, before=reference, after=found, reason=_reason(reference, found))
    return msgspec.structs.replace(state, reference=found, fixed=False, recent=recent), shift


def _learned(state: ShiftState, settings: DetectSettings) -> tuple[ShiftState, Shift | None]:
    """The reference from up to `KEPT` steps; a shift after `refine_after_steps` of them, if it was off."""
    count, before, least = len(state.recent), state.reference, min(settings.refine_after_steps, KEPT)
    if state.fixed or count < least:
        return state, None
    found = _typical(state.recent)
    state = msgspec.structs.replace(state, reference=found, fixed=count == KEPT)
    if before is None or count != least or not _off(before, found, OFF):
        return state, None
    return state, Shift(step=state.step, before=before, after=found, reason=_reason(before, found))


def _typical(recent: tuple[Lengths, ...]) -> Lengths:
    """Typical lengths of several steps: the median of a few, since the first may be from before the shift."""
    middle = median if len(recent) <= 5 else trimmed
    mean = math.exp(middle([math.log(each.mean) for each in recent]))
    effective = math.exp(middle([math.log(each.effective) for each in recent]))
    longest = max(each.longest for each in recent[1:] or recent)
    effective = max(effective, mean)
    return Lengths(mean=mean, effective=effective, longest=max(longest, effective))


def _off(told: Lengths, found: Lengths, part: float, *, longest: bool = True) -> bool:
    """Returns True if lengths are off by more than the fraction `part`, up or down."""
    most = math.log1p(part)
    return (
        abs(math.log(found.mean / told.mean)) > most
        or abs(math.log(found.effective / told.effective)) > most
        or (longest and math.log(found.longest / told.longest) > most)
    )


def _reason(before: Lengths, after: Lengths) -> str:
    return f"the data's lengths shifted: {after}; before, {before}"
