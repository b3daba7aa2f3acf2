"""The seconds of a step under the plan in force, predicted anew whenever the model's profile changes.

A plan has the prediction of the profile that it was made from. That of a first plan is mostly a guess by the
model's shapes, until steps were measured.
"""

from __future__ import annotations

import math

import msgspec
from elasticd_planner.cost.model_profile import ModelProfile
from elasticd_planner.problem import ModuleProblem, Problem
from elasticd_planner.profiling.fit import predicted_seconds
from elasticd_planner.search import module_cost
from elasticd_planner.spec.cluster import Cluster, Device, Node, Rates, node_of
from elasticd_planner.spec.expert_load import ExpertLoad
from elasticd_planner.spec.packed_sequences import PackedSequences
from elasticd_planner.spec.plan import Plan

from elasticd.machines.job.measurements import expert_rows
from elasticd.machines.job.state.job_state import JobSettings
from elasticd.machines.job.state.parts.learned_profile import StepPrediction
from elasticd.machines.job.state.transaction import Transaction
from elasticd.records import ProfileRecord


def links_of(settings: JobSettings) -> Cluster:
    """A cluster of no device: all that a fit or a prediction asks of a cluster is its links."""
    return Cluster(nodes=(), inside=settings.inside, between=settings.between, levels=settings.levels)


def modules_seconds(
    plan: Plan,
    settings: JobSettings,
    profile: ModelProfile,
    modules: tuple[ModuleProblem, ...],
    slowdowns: Rates,
    load: ExpertLoad | None,
    packed: PackedSequences | None,
) -> float:
    """Seconds of a step of a plan of several modules.

    Args:
        plan: of all modules.
        settings: with the links.
        profile: of the module with the loss.
        modules: the others.
        slowdowns: of devices.
        load: of the experts of the module with the loss; None: it has none, or they are as even as shares.
        packed: the sequences of a step, where the job packs them.
    """
    devices: dict[str, list[Device]] = {}
    for device in plan.members:
        devices.setdefault(node_of(device), []).append(Device(name=device, memory=1))
    nodes = tuple(Node(name=name, devices=tuple(held)) for name, held in devices.items())
    problem = Problem(
        cluster=msgspec.structs.replace(links_of(settings), nodes=nodes),
        profile=profile,
        global_batch=plan.global_batch,
        micro_batch=plan.micro_batch,
        rates={device: rate for device, rate in slowdowns.items() if device in plan.members},
        module=plan.loss_module.module,
        modules=modules,
        experts=load,
        packed=packed,
    )
    return module_cost.predicted_seconds(plan, problem)


def predict_anew(turn: Transaction, packed: PackedSequences | None) -> float | None:
    """Predicts a step of the plan in force by the newest profile, at the slowdowns that the plan was made for.

    Args:
        packed: the sequences of a step, where the job packs them.

    Returns:
        Seconds; None where there is no plan, or where the plan cannot hold the sequences.
    """
    job = turn.job
    plan = job.pipeline_plan
    if plan is None or job.learned.profile is None or not job.learned.profile.fitted:
        return None
    links, slowdowns, load = links_of(turn.settings), job.planning.stability.planned, expert_rows.in_force(turn)
    if len(plan.modules) > 1:
        seconds = modules_seconds(
            plan, turn.settings, job.learned.profile, job.learned.modules, slowdowns, load, packed
        )
    else:
        seconds = predicted_seconds(job.learned.profile, plan, links, slowdowns, packed, load)
    if not math.isfinite(seconds):
        return None
    turn.change("learned", prediction=StepPrediction(number=job.number, seconds=seconds))
    return seconds


def keep_profile(turn: Transaction) -> None:
    """Writes the newest profile, with what it predicts: the next leader goes on from it."""
    job = turn.job
    if job.learned.profile is None:
        return
    known = (
        job.learned.prediction
        if job.learned.prediction is not None and job.learned.prediction.number == job.number
        else None
    )
    turn.write(
        ProfileRecord(
            profile=job.learned.profile,
            taught_by=job.learned.taught_by,
            lengths=job.data.lengths,
            plan=job.number,
            step_seconds=known.seconds if known is not None else None,
            modules=job.learned.modules,
        )
    )
