"""A job as a new leader finds it in the store."""

from __future__ import annotations

import msgspec
from elasticd_planner.detection.stragglers import DeviceRate, RateState
from elasticd_planner.policy.stability import Stability
from elasticd_planner.problem import JobProblem, MeshProblem, Problem
from elasticd_planner.spec.mesh import JobPlan

from elasticd.machines.job.state.events import Stored
from elasticd.machines.job.state.job_state import OVER, JobPhase, JobSettings, JobState, fresh
from elasticd.machines.job.state.parts.device_detection import DeviceDetection
from elasticd.machines.job.state.parts.job_checkpoints import JobCheckpoints
from elasticd.machines.job.state.parts.job_data import JobData
from elasticd.machines.job.state.parts.job_ending import JobEnding
from elasticd.machines.job.state.parts.job_start import JobStart
from elasticd.machines.job.state.parts.job_steps import JobProgress, JobSteps
from elasticd.machines.job.state.parts.learned_profile import LearnedProfile, StepPrediction
from elasticd.machines.job.state.parts.losses import Losses
from elasticd.machines.job.state.parts.plan_requests import Basis, PlanRequests
from elasticd.machines.job.state.parts.takeover import Takeover
from elasticd.machines.job.state.snapshot_sets import SnapshotSets
from elasticd.records import Fence, ProfileRecord, Proposal


def restored(stored: Stored, now: float, settings: JobSettings) -> JobState:
    """The job as a new leader finds it in the store. What only agents know comes as they reconnect."""
    if all(record is None for record in (stored.spec, stored.plan, stored.proposal, stored.fence, stored.done)):
        # Nothing but the history of earlier starts: its torchruns gather.
        begun_again = fresh(stored.job, JobPhase.GATHERING, now)
        return msgspec.structs.replace(begun_again, highest=stored.highest).changed(
            "start", earlier=stored.highest
        )
    plan = stored.plan.plan if stored.plan is not None else None
    proposal = stored.proposal
    if proposal is not None and plan is not None and proposal.number <= plan.number:
        proposal = None
    phase, reason = _restored_phase(stored, proposal)
    last = stored.done or stored.plan
    fence = _unresolved(stored)
    problem = stored.history.problem if stored.history is not None else None
    planned = problem if isinstance(problem, Problem) else None
    gone = stored.fence.gone if stored.fence is not None else {}
    return JobState(
        job=stored.job,
        phase=phase,
        since=now - stored.over_seconds,
        reason=reason,
        spec=stored.spec,
        plan=plan,
        proposal=None if phase in OVER else proposal,
        highest=max(
            stored.highest,
            stored.fence.number if stored.fence is not None else 0,
            plan.number if plan is not None else 0,
            stored.proposal.number if stored.proposal is not None else 0,
        ),
        snapshots=SnapshotSets(
            begun={plan.number: stored.plan.step} if plan is not None and stored.plan else {}
        ),
        start=JobStart(earlier=stored.highest if plan is None and proposal is None else 0),
        planning=PlanRequests(
            decided=_restored_basis(problem)
            if phase in (JobPhase.RUNNING, JobPhase.PROPOSED, JobPhase.ABORTING)
            else None,
            stability=Stability(planned=dict(problem.rates) if problem is not None else {}),
        ),
        learned=_restored_profile(stored.profile, planned),
        data=JobData(lengths=stored.profile.lengths if stored.profile is not None else None),
        steps=JobSteps(
            progress=JobProgress(step=last.step if last is not None else 0, at=now, slowest=_step_seconds(plan))
        ),
        detection=DeviceDetection(rates=_restored_rates(problem)),
        losses=Losses(fence=None if phase in OVER else fence, gone=gone),
        takeover=Takeover(
            settle_until=None if phase in OVER else now + settings.reconnect_seconds,
            patient_until=now + settings.reconnect_seconds,
            unmet={} if phase in OVER else _unmet(plan, proposal, gone),
        ),
        checkpoints=JobCheckpoints(
            published=stored.checkpoints.published if stored.checkpoints is not None else ()
        ),
        ending=JobEnding(
            done_epoch=stored.done.epoch if stored.done is not None else 0,
            orderly=stored.done is not None and stored.done.orderly,
            requested=stored.done is not None and stored.done.requested,
            thrown=stored.fence.thrown if stored.fence is not None else (),
        ),
    )


def _unmet(plan: JobPlan | None, proposal: Proposal | None, gone: dict[str, str]) -> dict[str, str]:
    """By device the incarnations that may hold a copy; of two of one device, the later one."""
    plans = (plan, proposal.plan if proposal is not None else None)
    bound = {device: one for plan in plans if plan is not None for device, one in plan.binding.items()}
    return {device: one for device, one in bound.items() if gone.get(device) != one}


def _step_seconds(plan: JobPlan | None) -> float:
    """The seconds that a step may take, until the first is reported."""
    prediction = plan.prediction if plan is not None else None
    return prediction.step_seconds if prediction is not None else 0.0


def _unresolved(stored: Stored) -> Fence | None:
    """The fence that no plan was recorded after."""
    fence, plan = stored.fence, stored.plan
    settled = fence is None or (plan is not None and plan.plan.number > fence.number)
    return None if settled else fence


def _restored_phase(stored: Stored, proposal: Proposal | None) -> tuple[JobPhase, str]:
    if stored.done is not None:
        return (JobPhase.STOPPED if stored.done.reason else JobPhase.DONE), stored.done.reason
    fence = _unresolved(stored)
    if proposal is not None and proposal.status == "open" and (fence is None or proposal.number > fence.number):
        return JobPhase.PROPOSED, ""
    if fence is not None:
        return JobPhase.RECOVERING, fence.reason
    if proposal is not None:
        return JobPhase.ABORTING, proposal.reason
    return (JobPhase.RUNNING if stored.plan is not None else JobPhase.ASSEMBLING), ""


def _restored_profile(taught: ProfileRecord | None, planned: Problem | None) -> LearnedProfile:
    """The profile that steps taught; else the one that the last plan was made with."""
    experts = planned.experts if planned is not None else None
    if taught is not None:
        return LearnedProfile(
            profile=taught.profile,
            modules=taught.modules,
            experts=experts,
            taught_by=taught.taught_by,
            prediction=_restored_prediction(taught),
        )
    if planned is not None:
        return LearnedProfile(profile=planned.profile, modules=planned.modules, experts=experts)
    return LearnedProfile()


def _restored_prediction(taught: ProfileRecord) -> StepPrediction | None:
    if taught.step_seconds is None:
        return None
    return StepPrediction(number=taught.plan, seconds=taught.step_seconds)


def _restored_rates(problem: JobProblem | None) -> RateState:
    """The rates that the last plan was made for: until they are measured anew, nothing says otherwise."""
    rates = problem.rates if problem is not None else {}
    return RateState(devices={name: DeviceRate(rate=rate) for name, rate in rates.items()})


def _restored_basis(problem: JobProblem | None) -> Basis | None:
    if problem is None:
        return None
    if isinstance(problem, MeshProblem):
        return Basis(devices=problem.cluster.devices, rates=dict(problem.rates), profile=None)
    return Basis(
        devices=problem.cluster.devices,
        rates=dict(problem.rates),
        profile=problem.profile,
        modules=problem.modules,
        interleave=problem.search_space.interleave,
        lanes=problem.search_space.lanes,
        experts=problem.experts,
    )
