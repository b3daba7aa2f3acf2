"""The seconds of a step under the plan in force, predicted anew whenever the model's profile changes.

A plan has the prediction of the profile that it was made from. That of a first plan is mostly a guess by the
model's shapes, until steps were measured.
"""

from __future__ import annotations

import math

from elasticd_planner.profiling.fit import predicted_seconds
from elasticd_planner.spec.cluster import Cluster
from elasticd_planner.spec.packed_sequences import PackedSequences

from elasticd.machines.job.state.job_state import JobSettings, StepPrediction
from elasticd.machines.job.state.transaction import Turn
from elasticd.records import ProfileRecord


def links_of(settings: JobSettings) -> Cluster:
    """A cluster of no device: all that a fit or a prediction asks of a cluster is its links."""
    return Cluster(nodes=(), inside=settings.inside, between=settings.between, levels=settings.levels)


def predict_anew(turn: Turn, packed: PackedSequences | None) -> float | None:
    """Predicts a step of the plan in force by the newest profile, at the slowdowns that the plan was made for.

    Args:
        packed: the sequences of a step, where the job packs them.

    Returns:
        Seconds; None where there is no plan, or where the plan cannot hold the sequences.
    """
    job = turn.job
    if job.plan is None or job.profile is None or not job.profile.fitted:
        return None
    links, slowdowns = links_of(turn.settings), job.stability.planned
    seconds = predicted_seconds(job.profile, job.plan.loss_view, links, slowdowns, packed)
    if not math.isfinite(seconds):
        return None
    turn.set(prediction=StepPrediction(number=job.number, seconds=seconds))
    return seconds


def keep_profile(turn: Turn) -> None:
    """Writes the newest profile, with what it predicts: the next leader goes on from it."""
    job = turn.job
    if job.profile is None:
        return
    known = job.prediction if job.prediction is not None and job.prediction.number == job.number else None
    turn.write(
        ProfileRecord(
            profile=job.profile,
            taught_by=job.taught_by,
            lengths=job.lengths,
            plan=job.number,
            step_seconds=known.seconds if known is not None else None,
        )
    )
