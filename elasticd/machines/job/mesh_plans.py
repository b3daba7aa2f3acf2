"""Plans of a job on a mesh: what they are made from, and whether a new one is worth its switch.

Nothing is known of the model but its tensors. A sample's seconds are measured: before a step was, a plan stays
unless its devices are lost, or are to leave. Slowdowns are judged as those of any other job
(`detection.stragglers`), so that neither noise nor one slow step changes a share.
"""

from __future__ import annotations

from statistics import median

from elasticd_migration.reshard import bytes_lacking
from elasticd_planner.cost.model_profile import ADAMW_STATE
from elasticd_planner.layout.layouts import Item
from elasticd_planner.layout.mesh_layouts import MeshLayouts
from elasticd_planner.policy.policy import Decision, Price, decide, measured_price
from elasticd_planner.policy.stability import payoff_horizon
from elasticd_planner.problem import MeshProblem
from elasticd_planner.spec.cluster import NORMAL, Cluster
from elasticd_planner.spec.mesh import MeshModel, MeshPlan
from elasticd_planner.spec.model import item_size

from elasticd.machines.job.state.job_state import JobState
from elasticd.machines.job.state.parts.plan_requests import Basis
from elasticd.machines.job.state.transaction import Transaction
from elasticd.records import MeshJobSpec


def is_measured(job: JobState) -> bool:
    """Returns True if a whole step of the plan in force was measured."""
    return bool(job.steps.last_steps) and job.steps.last_steps[-1].plan == job.number


def problem(turn: Transaction, basis: Basis, spec: MeshJobSpec, cluster: Cluster) -> MeshProblem:
    """A mesh for these devices, at the slowdowns and the seconds of a sample that were measured."""
    sample_seconds, other_seconds = _seconds(turn.job)
    return MeshProblem(
        cluster=cluster,
        meshes=spec.model.meshes,
        global_batch=spec.global_batch,
        rates=basis.rates,
        current=turn.job.plan if isinstance(turn.job.plan, MeshPlan) else None,
        sample_seconds=sample_seconds,
        other_seconds=other_seconds,
    )


def worth_it(
    turn: Transaction, plan: MeshPlan, new: MeshPlan, current_seconds: float | None, basis: Basis
) -> Decision:
    """Compares the saving of `new` with the price of the switch. Where shares alone change, nothing is made and
    nothing moves, so that the switch is free."""
    job, policy = turn.job, turn.settings.policy
    if new.same_mesh(plan) and new.samples == plan.samples:
        return Decision(replan=False, reason="it is the best plan still")
    if new.prediction is None:
        return Decision(replan=False, reason="no step was measured yet")
    price, moved = measured_price(policy, job.switching.moved), 0
    if new.same_mesh(plan):
        price = Price(pause_seconds=0.0, bandwidth=price.bandwidth)
    elif isinstance(job.spec, MeshJobSpec):
        moved = bytes_to_move(job.spec.model, plan, new)
    return decide(
        policy,
        current_seconds,
        new.prediction.step_seconds,
        moved,
        price=price,
        payoff=payoff_horizon(
            job.planning.stability, basis.rates, job.detection.rates.step, policy.horizon_steps
        ),
    )


def bytes_to_move(model: MeshModel, old: MeshPlan, new: MeshPlan) -> int:
    """Bytes of state that the members of `new` lack, if a parameter's state is as large as Adam's."""
    before, after = MeshLayouts(model, old.replace(binding={})), MeshLayouts(model, new)
    types, sizes = {tensor.name: item_size(tensor.dtype) for tensor in model.tensors}, dict[Item, int]()
    for item in after.items:
        sizes[item] = round(types[item.name] * (ADAMW_STATE if item.role == "state" else 1))
    return sum(bytes_lacking(before, after, sizes).values())


def _seconds(job: JobState) -> tuple[float, float]:
    """Seconds of a sample on a normal device, and of a step beside its slowest lane's computation; zeros before
    a step was measured."""
    rates, samples, others = job.detection.rates.rates, list[float](), list[float]()
    for step in job.steps.last_steps:
        columns = (step.column(name).tolist() for name in ("block_seconds", "block_work"))
        rows = zip(step.devices, *columns, strict=True)
        timed = [row for row in rows if row[1] > 0 and row[2] > 0]
        samples += [seconds / work / rates.get(device, NORMAL) for device, seconds, work in timed]
        if timed:
            longest = max(seconds for _, seconds, _ in timed)
            others.append(max(0.0, float(max(step.column("step_seconds"))) - longest))
    return (median(samples), median(others)) if samples else (0.0, 0.0)
