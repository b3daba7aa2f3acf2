"""The lengths of the data's sequences: a lasting change of them is another problem to plan for.

How much longer a token takes in a longer sequence the shapes only guess. The steps by which a shift was seen
know it: what they took is what the profile says from then on.
"""

from __future__ import annotations

import msgspec
from elasticd_planner.detection.data_shift import watch
from elasticd_planner.detection.lengths import attention_rise, evaluated
from elasticd_planner.profiling.fit import remeasured
from elasticd_planner.spec.measurement import Measurement
from elasticd_planner.spec.packed_sequences import PackedSequences
from elasticd_planner.spec.sequence_lengths import Lengths, even
from elasticd_planner.spec.step_measurements import Step

from elasticd.machines.job.measurements import step_prediction
from elasticd.machines.job.state.job_state import JobState
from elasticd.machines.job.state.transaction import Transaction
from elasticd.records import JobSpec

#: How far measured lengths may be from those that the first profile was made for.
OFF = 0.1
#: How many times longer than the longest sequence so far one of a stream may be that still comes.
_MARGIN = 2


def reported(turn: Transaction, measurement: Measurement) -> None:
    """Takes in the longest sequence that a worker knows of. Every report has it, so that a new leader learns
    what came before it was one."""
    longest = max(measurement.longest, measurement.longest_so_far)
    if longest > turn.job.data.longest:
        turn.change("data", longest=longest)


def measured(turn: Transaction, step: Step) -> None:
    """Takes in the lengths of a whole step. Where they have shifted, the profile is evaluated anew for what
    they are now; a plan for it is asked for as for any other profile."""
    job = turn.job
    state, shift = watch(job.data.shifts, step.step, step.lengths, turn.settings.detect)
    turn.change("data", shifts=state)
    spec = job.pipeline_spec
    if job.learned.profile is None or spec is None:
        return
    before = job.data.lengths or _assumed(spec)
    if shift is not None:
        after, reason = shift.after, shift.reason
    elif (
        job.data.lengths is None
        and state.lengths is not None
        and len(state.recent) >= turn.settings.detect.refine_after_steps
    ):
        after, reason = state.lengths, f"the data's lengths were measured: {state.lengths}; assumed, {before}"
    else:
        return
    turn.change("data", lengths=after)
    if shift is None and not _off(before, after):
        return
    rise = attention_rise(spec.model, job.detection.rates.curve)
    profile = evaluated(job.learned.profile, before, after, rise, rows=spec.packed is not None)
    if profile.fitted and job.pipeline_plan is not None:
        alike = [step for step in job.steps.last_steps if _is_like(step, after)]
        profile = remeasured(profile, job.pipeline_plan.loss_view, alike, job.detection.rates.rates)
    turn.change("learned", profile=profile, sampled=(), first_step=None)
    seconds = step_prediction.predict_anew(turn, packed(turn.job))
    step_prediction.keep_profile(turn)
    turn.note(
        "shifted",
        reason,
        step=step.step,
        mean=after.mean,
        longest=after.longest,
        plan=turn.job.number,
        step_seconds=seconds,
    )


def packed(job: JobState) -> PackedSequences | None:
    """The sequences of a step to plan for: those of the spec, with the lengths that were measured, and never
    a shorter longest one than that of any step so far. None where the job pads them.

    What a checkpoint knows of may come again, or was left out of the data since: it is likely, no more. Of a
    stream nothing was known beforehand: once it is measured, twice the longest so far is likely.
    """
    spec = job.pipeline_spec
    if spec is None or spec.packed is None:
        return None
    sequences, lengths, longest = spec.packed, job.data.lengths, job.data.longest
    likely = sequences.likely
    if lengths is not None and not sequences.sample:
        likely = min(likely, _MARGIN * longest)
    sequences = msgspec.structs.replace(sequences, likely=max(likely, job.data.likely))
    if longest > sequences.longest:
        sequences = msgspec.structs.replace(sequences, longest=longest, sample="")
    if lengths is None or not _off(sequences.lengths, lengths):
        return sequences
    return msgspec.structs.replace(sequences, lengths=lengths)


def _assumed(spec: JobSpec) -> Lengths:
    """The lengths that the first profile is made for."""
    return spec.packed.lengths if spec.packed is not None else even(spec.sample_tokens)


def _is_like(step: Step, after: Lengths) -> bool:
    """Returns True if a step's lengths are such as these."""
    return step.lengths is not None and abs(step.lengths.effective / after.effective - 1) <= OFF


def _off(before: Lengths, after: Lengths) -> bool:
    pairs = (
        (before.mean, after.mean),
        (before.effective, after.effective),
        (before.longest, after.longest),
    )
    return any(abs(new / old - 1) > OFF for old, new in pairs)
