"""From measurements to plans: rates, the fitted profile, requests to the planner, and whether to move."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

import msgspec
from elasticd_planner.cost.model_profile import ModelProfile, derive, suited
from elasticd_planner.detection.expert_work import with_work
from elasticd_planner.detection.lengths import attention_rise, evaluated, item_rise
from elasticd_planner.detection.module_work import as_one
from elasticd_planner.detection.stragglers import Observed, expectation, observe
from elasticd_planner.layout.module_passes import ROWS
from elasticd_planner.placement.state_movement import bytes_to_move, expert_bytes_beyond_shares
from elasticd_planner.policy.policy import Decision, decide, measured_price
from elasticd_planner.policy.stability import payoff_horizon, settled
from elasticd_planner.problem import JobProblem, ModuleProblem, Problem, RefusalCause, SearchSpace
from elasticd_planner.profiling.fit import fit, fit_modules
from elasticd_planner.profiling.section_bytes import with_bytes
from elasticd_planner.readable import counted, readable_seconds
from elasticd_planner.spec.cluster import Cluster, Device, Node, node_of
from elasticd_planner.spec.expert_load import ExpertLoad
from elasticd_planner.spec.mesh import JobPlan, MeshPlan
from elasticd_planner.spec.packed_sequences import PackedSequences
from elasticd_planner.spec.plan import Plan
from elasticd_planner.spec.sequence_lengths import even
from elasticd_planner.spec.step_measurements import NONE_REPORTED, Step
from elasticd_planner.value import Invalid

from elasticd.codec.safe_text import shortened
from elasticd.machines.job import mesh_plans
from elasticd.machines.job.faults import user_exceptions
from elasticd.machines.job.faults.network_partition import stepped, unplanned, usable
from elasticd.machines.job.lifecycle.drain import ending, saving, to_leave, words
from elasticd.machines.job.lifecycle.job_end import stop
from elasticd.machines.job.measurements import (
    all_reduce_probes,
    data_lengths,
    expert_rows,
    idle_probes,
    item_counts,
    lane_shares,
    step_prediction,
)
from elasticd.machines.job.state.events import Planned, RequestPlan
from elasticd.machines.job.state.job_state import JobPhase, JobState, Worker
from elasticd.machines.job.state.parts.job_steps import JobProgress, LeftOut
from elasticd.machines.job.state.parts.plan_requests import Asked, Basis, Deferred, Remedy
from elasticd.machines.job.state.transaction import Transaction
from elasticd.machines.job.switch import no_capacity, propose
from elasticd.records import AnyJobSpec, JobSpec, MeshJobSpec
from elasticd.wire.worker import Report

#: What is left after a step of the weight that the slowest one before it has.
FADING = 0.9
#: Seconds to which it is known when the last report came: thousands come in a moment.
FINE_SECONDS = 0.01
#: Whole steps that are kept of the plan in force.
MOST_RECENT = 3
#: Steps that some members have not reported are kept until this many newer ones have begun.
MOST_PARTIAL = 64
#: Characters that are kept of why steps change no weight, whatever a worker says.
MOST_WHY = 200
#: Items of a sample where the dataset has none: a planner divides by it.
_FEW = 0.01


def measured(turn: Transaction, worker: Worker, report: Report) -> None:
    """One rank's step. What the members measured of a step counts once all have reported it."""
    job, measurement = turn.job, report.measurement
    if report.loss is not None or report.tokens is not None:  # rank 0's, which speaks for the step
        done = measurement.step + 1  # a step's index is the number of updates before it
        slowest = max(measurement.step_seconds, FADING * job.steps.progress.slowest)
        progress = JobProgress(step=done, at=turn.now, slowest=slowest)
        turn.change("steps", progress=progress, batch=measurement.batch)
        _left_out(turn, report)
        if measurement.plan == job.number:
            stepped(turn)
            if job.phase is JobPhase.RUNNING and job.reason:  # a hang that was none
                turn.set(reason="")
    if turn.now - turn.job.steps.progress.at > FINE_SECONDS:
        turn.change("steps", progress=msgspec.structs.replace(turn.job.steps.progress, at=turn.now))
    data_lengths.reported(turn, measurement)
    expert_rows.reported(turn, measurement)
    plan = job.plan
    if plan is None or measurement.plan != plan.number or measurement.device not in plan.binding:
        return
    if measurement.step not in job.steps.gathered and isinstance(plan, Plan):
        _fit(turn, plan)
    step = job.steps.gathered.get(measurement.step, NONE_REPORTED).after(measurement)
    gathered = {
        number: reported
        for number, reported in {**job.steps.gathered, measurement.step: step}.items()
        if number > measurement.step - MOST_PARTIAL
    }
    if step.count < len(plan.binding):
        turn.change("steps", gathered=gathered)
        return
    del gathered[measurement.step]
    turn.change("steps", gathered=gathered)
    _observe(turn, plan, step.whole(plan.number, measurement.step, plan.members))


def _left_out(turn: Transaction, report: Report) -> None:
    """Tells of steps that change no weight: of the first, at every tenfold of them, and when they end."""
    before, step = turn.job.steps.left_out, report.measurement.step
    if not report.left_out:
        if before is not None:
            turn.change("steps", left_out=None)
            text = f"step {step} changed weights again, after {counted(before.count, 'step')} that changed none"
            turn.note("no_progress", text, step=step, count=0)
        return
    first = step - report.left_out + 1
    now = LeftOut(first=first, count=report.left_out, why=shortened(report.left_out_why, MOST_WHY))
    turn.change("steps", left_out=now)
    if before is None or before.first != first or len(str(before.count)) != len(str(now.count)):
        turn.note("no_progress", now.words, step=first, count=now.count)


def _judged(turn: Transaction, plan: JobPlan, step: Step) -> Observed:
    """The slowdowns after a whole step."""
    job, detect = turn.job, turn.settings.detect
    if isinstance(plan, Plan) and expert_rows.unjudged(turn, plan):
        return job.detection.rates, ()
    if job.learned.profile is None or not isinstance(plan, Plan):
        return observe(job.detection.rates, step, detect)
    if len(plan.modules) == 1:
        return observe(job.detection.rates, step, detect, expectation(job.learned.profile, plan))
    rates = job.detection.rates
    profiles, sigma = _profiles(turn, plan, job.learned.profile), max(detect.noise, rates.noise)
    resizing = item_counts.resizing(job)
    spec = job.pipeline_spec
    step = as_one(step, plan, profiles, rates.rates, sigma, _rises(spec), resizing, _timed(spec))
    return observe(rates, step, detect)


def _rises(spec: JobSpec | None) -> dict[str, float]:
    """By module by what a token costs more for each token of its sequence or item."""
    modules = spec.modules if spec is not None else ()
    return {each.name: item_rise(each.model) if each.items else attention_rise(each.model) for each in modules}


def _timed(spec: JobSpec | None) -> list[str]:
    """The modules whose profiles were measured before the job."""
    if spec is None:
        return []
    return [each.name for each in spec.modules if (each.profile if each.items else spec.profile) is not None]


def _profiles(turn: Transaction, plan: Plan, profile: ModelProfile) -> dict[str, ModelProfile]:
    """Of all modules of a plan of several, by name; `profile` is that of the module with the loss."""
    others = {module.name: module.profile for module in turn.job.learned.modules}
    return {**others, plan.loss_module.module: profile}


def _observe(turn: Transaction, plan: JobPlan, step: Step) -> None:
    """A whole step: who became slow or recovered, and one more sample for the profile's fit."""
    if isinstance(plan, Plan):
        step = with_work(step, expert_rows.work(turn, plan))  # a device with more rows is not slower
    last = tuple(known for known in turn.job.steps.last_steps if known.plan == plan.number)
    turn.change("steps", last_steps=(*last, step)[-MOST_RECENT:])
    if isinstance(plan, Plan):
        item_counts.measured(turn, plan, step)  # a device is judged by profiles of the items that there are
    rates, changes = _judged(turn, plan, step)
    turn.change("detection", rates=rates)
    data_lengths.measured(turn, step)
    idle_probes.told(turn, changes)
    if not isinstance(plan, Plan):
        return
    lane_shares.measured(turn, plan, step)
    profile = turn.job.learned.profile
    if profile is None or turn.job.learned.taught_by == plan.number or not _teaches(turn, plan, profile):
        return
    # The first step of a plan has the cost of everything that is done once; a step before a rate changed was
    # made at others than those that the fit would take it for.
    earlier = tuple(sample for sample in turn.job.learned.sampled if sample.plan == plan.number)
    first = turn.job.learned.first_step if turn.job.learned.first_step is not None else step.step
    sampled = () if changes or step.step == first else (*earlier, step)
    turn.change("learned", first_step=first, sampled=sampled)


def _fit(turn: Transaction, plan: Plan) -> None:
    """Fits the profile once there are steps enough. The first report of the next step brings it about: the last
    one of a step brings about its judgement, which is enough for one message."""
    profile, sampled = turn.job.learned.profile, turn.job.learned.sampled
    if profile is None or len(sampled) < turn.settings.fit_steps or sampled[-1].plan != plan.number:
        return
    turn.change("learned", sampled=(), first_step=None)
    try:
        packed = data_lengths.packed(turn.job)
        links = step_prediction.links_of(turn.settings)
        if len(plan.modules) > 1:
            profile = _fit_modules(turn, plan, profile, sampled, packed)
        else:
            load = expert_rows.in_force(turn)
            profile = fit(profile, plan, sampled, links, turn.job.detection.rates.rates, packed, load)
    except Invalid as error:  # what the workers measured makes no sense
        turn.note("refused", f"the profile stays as it is: {error}", number=plan.number)
        return
    guessed = turn.job.prediction_guessed
    turn.change(
        "learned",
        profile=profile,
        taught_by=plan.number,
        rehearsed=turn.job.learned.rehearsed - plan.loss_view.tp_widths,
    )
    before, seconds = turn.job.predicted_seconds, step_prediction.predict_anew(turn, packed)
    step_prediction.keep_profile(turn)
    text = f"profile fitted from {len(sampled)} steps of plan {plan.number}"
    if before is not None and seconds is not None:
        word = "guessed" if guessed else "predicted"
        text += f": a step was {word} to take {readable_seconds(before)}, and is now predicted to take "
        text += readable_seconds(seconds)
    block = profile.block.seconds
    turn.note("fitted", text, number=plan.number, block_seconds=block, step_seconds=seconds)


def _fit_modules(
    turn: Transaction,
    plan: Plan,
    profile: ModelProfile,
    steps: tuple[Step, ...],
    packed: PackedSequences | None,
) -> ModelProfile:
    """Fits the profiles of all modules. Returns that of the module with the loss. Raises Invalid as `fit`."""
    job, settings, loss = turn.job, turn.settings, plan.loss_module.module
    load = expert_rows.in_force(turn)

    def modules(profiles: Mapping[str, ModelProfile]) -> tuple[ModuleProblem, ...]:
        return tuple(msgspec.structs.replace(each, profile=profiles[each.name]) for each in job.learned.modules)

    def predicted(profiles: Mapping[str, ModelProfile]) -> float:
        own, others = profiles[loss], modules(profiles)
        return step_prediction.modules_seconds(
            plan, settings, own, others, job.detection.rates.rates, load, packed
        )

    links, known = step_prediction.links_of(settings), _profiles(turn, plan, profile)
    fitted = fit_modules(known, plan, steps, links, predicted, job.detection.rates.rates)
    turn.change("learned", modules=modules(fitted))
    return fitted[loss]


def _teaches(turn: Transaction, plan: Plan, profile: ModelProfile) -> bool:
    """Returns True if steps of `plan` tell what the profile only guesses: seconds, before the first fit, or
    those of an all-reduce in groups as wide as the plan's, which may have been rehearsed, but not in steps."""
    if not profile.fitted or not all(module.profile.fitted for module in turn.job.learned.modules):
        return True
    known = profile.collective_seconds.keys() - turn.job.learned.rehearsed
    return profile.block.collectives > 0 and not plan.loss_view.tp_widths <= known


def request(turn: Transaction) -> None:
    """Asks for a plan where one is due: for the start, and whenever rates, profile or devices are not those
    of the last decision. A request about others is stale, and this one takes its place. Until the profile is
    fitted a running plan stays: derived seconds cannot tell whether a move pays. It also stays while replanning
    is paused, and where the job keeps its plan."""
    job = turn.job
    if job.ending.failing or job.spec is None or not all_there(turn):
        return
    if job.ending.stopping and job.phase is not JobPhase.RECOVERING:
        return
    if job.phase is JobPhase.PLANNING:
        if idle_probes.awaited(turn):
            return
        spec = job.pipeline_spec
        guessed = _guessed(turn, spec) if spec is not None and job.learned.profile is None else None
        if guessed is not None and all_reduce_probes.awaited(turn, guessed):
            return
    idle_probes.judge(turn)
    try:
        _request(turn)
    except Invalid as error:
        stop(turn, f"job {job.job} cannot be planned: {error}")


def _request(turn: Transaction) -> None:
    job = turn.job
    assert job.spec is not None
    profile = _profile(turn)
    known = profile.fitted if profile is not None else mesh_plans.is_measured(job)
    stays = job.plan is not None and (not known or _kept(turn))
    if stays and job.phase is not JobPhase.RECOVERING and not to_leave(turn):
        if job.spec.keep_plan and known and job.phase is JobPhase.RUNNING:
            _told_kept(turn, _basis(turn, _devices(turn), profile))
        return
    devices = _devices(turn)
    if not devices:
        turn.drop_request()  # the last of them began to drain meanwhile
        return
    basis = _basis(turn, devices, profile)
    if job.planning.asked is not None:
        if job.planning.asked.basis == basis:
            return
    elif turn.now < _due(job, basis):
        return
    elif basis == job.planning.decided:
        if not ripe(job) or job.planning.deferred is None or job.planning.deferred.basis != basis:
            return
        if expert_rows.newest(turn, job) in (None, job.learned.experts):
            _weigh(turn, job.plan, job.planning.deferred)
            return
    expert_rows.renewed(turn)  # whatever else it is asked for
    basis = _basis(turn, devices, profile)
    problem = _problem(turn, basis, job.spec)
    token = job.planning.token + 1
    turn.change("planning", asked=Asked(token=token, basis=basis, problem=problem), token=token, deferred=None)
    turn.effects.append(RequestPlan(job=job.job, token=token, problem=problem))
    slow = ", ".join(f"{device} {rate:.2f}x" for device, rate in sorted(basis.rates.items()))
    turn.note(
        "planning", f"planning for {counted(len(devices), 'device')}, slow: {slow or 'none'}", rates=basis.rates
    )


def _profile(turn: Transaction) -> ModelProfile | None:
    """The profile to plan with, the first one made now; None of a job on a mesh."""
    spec = turn.job.pipeline_spec
    if spec is None:
        return None
    if turn.job.learned.profile is None:
        all_reduce_probes.learn(turn, _guessed(turn, spec))
    if spec.modules and not turn.job.learned.modules:  # it is new, or its last leader knew none of them
        turn.change("learned", modules=_guessed_modules(turn, spec))
    assert turn.job.learned.profile is not None
    return turn.job.learned.profile


def _kept(turn: Transaction) -> bool:
    """Returns True if no plan is replaced by a better one, but only where its devices are lost or are to
    leave."""
    spec = turn.job.spec
    return turn.settings.policy.paused or (spec is not None and spec.keep_plan)


def _told_kept(turn: Transaction, basis: Basis) -> None:
    """Says once for each basis that no plan is asked for."""
    if basis == turn.job.planning.decided:
        return
    turn.change("planning", decided=basis)
    number = turn.job.number
    reason = "the job keeps its plan (ParallelismOptions.keep_plan)"
    turn.note("kept_plan", f"plan {number} stays: {reason}", number=number, reason=reason, again_in=None)


def first_profile(spec: JobSpec, flops: float, memory_bandwidth: float = 0.0) -> ModelProfile:
    """Profile by what was measured of the model before the job; else by its shapes, with the bytes that a
    worker measured. `flops` [1/s] and `memory_bandwidth` [bytes/s, 0: not known]: of a device."""
    profile = spec.profile
    if profile is None:
        profile = derive(
            spec.model,
            spec.sample_tokens,
            spec.micro_batch,
            flops=flops,
            memory_bandwidth=memory_bandwidth,
        )
        if spec.measured_bytes is not None:
            profile = with_bytes(profile, spec.measured_bytes)
    profile = suited(profile, spec.numbers, len(spec.recomputed) / profile.layers)
    if spec.packed is None:
        return profile
    before, rise = even(spec.sample_tokens), attention_rise(spec.model)
    return evaluated(profile, before, spec.packed.lengths, rise, rows=True)


def _guessed(turn: Transaction, spec: JobSpec) -> ModelProfile:
    return first_profile(spec, turn.settings.flops, turn.settings.memory_bandwidth)


def _guessed_modules(turn: Transaction, spec: JobSpec) -> tuple[ModuleProblem, ...]:
    return module_problems(spec, turn.settings.flops, turn.settings.memory_bandwidth)


def module_problems(spec: JobSpec, flops: float, memory_bandwidth: float = 0.0) -> tuple[ModuleProblem, ...]:
    """The modules of items of a job before its first step, by what was measured of them before the job, else by
    their shapes; none of a job of one module.

    Args:
        spec: the record of the job.
        flops: of a device [1/s].
        memory_bandwidth: of a device [bytes/s]; 0 where it is not known.
    """
    return tuple(
        ModuleProblem(
            name=module.name,
            profile=suited(
                module.profile
                or derive(
                    module.model,
                    module.rows_an_item or ROWS,
                    1,
                    flops=flops,
                    memory_bandwidth=memory_bandwidth,
                ),
                spec.numbers,
            ),
            items=module.items,
            items_a_sample=max(module.items_a_sample, _FEW),
            rows_an_item=module.rows_an_item or ROWS,
            output_bytes=module.output_bytes,
            trained=any(parameter.kind == "trained" for parameter in module.model.parameters.values()),
        )
        for module in spec.modules
        if module.items
    )


def loss_module(spec: JobSpec) -> str:
    """The name of the module with the loss in plans of a job."""
    return next((module.name for module in spec.modules if not module.items), "model")


def problem_now(turn: Transaction) -> JobProblem | None:
    """The problem that a plan would be made for now; None before the first was."""
    job, devices = turn.job, _devices(turn)
    if job.spec is None or not devices or (job.learned.profile is None and job.pipeline_spec is not None):
        return None
    return _problem(turn, _basis(turn, devices, job.learned.profile), job.spec)


def _basis(turn: Transaction, devices: tuple[Device, ...], profile: ModelProfile | None) -> Basis:
    """Chunks make a search several times as long: not while survivors stand still. They are asked for again
    once the job runs."""
    rates = turn.job.detection.rates.rates
    names = {device.name for device in devices} if rates else set()
    slow = {name: rate for name, rate in rates.items() if name in names}
    if profile is None:
        return Basis(devices=devices, rates=slow, profile=None)
    chunks = 1 if turn.job.phase is JobPhase.RECOVERING else turn.settings.policy.interleave
    packed = data_lengths.packed(turn.job)
    lanes = turn.settings.policy.lanes or (len(devices) if packed is not None and packed.cut else 1)
    return Basis(
        devices=devices,
        rates=slow,
        profile=profile,
        interleave=chunks,
        lanes=lanes,
        packed=packed,
        modules=_modules(turn, profile),
        experts=_experts(turn),
    )


def _experts(turn: Transaction) -> ExpertLoad | None:
    """The load by which experts are placed, with the copies that the policy allows now."""
    load, policy = turn.job.learned.experts, turn.settings.policy
    if load is None or policy.experts != "load":
        return None
    return msgspec.structs.replace(load, replicas=policy.expert_replicas)


def _modules(turn: Transaction, profile: ModelProfile) -> tuple[ModuleProblem, ...]:
    """The modules of items. Those that no steps have taught take as many times longer than by their shapes as
    the module with the loss does."""
    spec = turn.job.pipeline_spec
    if spec is None or not spec.modules:
        return ()
    pace = profile.block.seconds / _guessed(turn, spec).block.seconds
    listed = turn.job.learned.modules or _guessed_modules(turn, spec)
    return tuple(module if module.profile.fitted else _paced(module, pace) for module in listed)


def _paced(module: ModuleProblem, pace: float) -> ModuleProblem:
    profile = module.profile
    sections = {
        name: section.scaled(pace)
        for name, section in (("embed", profile.embed), ("block", profile.block), ("head", profile.head))
    }
    return msgspec.structs.replace(module, profile=msgspec.structs.replace(profile, **sections))


def _problem(turn: Transaction, basis: Basis, spec: AnyJobSpec) -> JobProblem:
    if isinstance(spec, MeshJobSpec):
        return mesh_plans.problem(turn, basis, spec, _cluster(turn, basis.devices))
    assert basis.profile is not None
    return Problem(
        module=loss_module(spec),
        modules=basis.modules,
        cluster=_cluster(turn, basis.devices),
        profile=basis.profile,
        global_batch=spec.global_batch,
        micro_batch=spec.micro_batch,
        rates=basis.rates,
        current=turn.job.pipeline_plan,
        given=spec.plan if turn.job.plan is None else None,
        only_given=spec.keep_plan,
        packed=basis.packed,
        experts=basis.experts,
        search_space=SearchSpace(
            states=(spec.state,),
            interleave=basis.interleave,
            lanes=basis.lanes,
            recompute=spec.recompute,
            sequence_parallel=spec.sequence_parallel,
        ),
    )


def _due(job: JobState, basis: Basis) -> float:
    """When a plan may be made from `basis`: one that others were given up for waits longer."""
    setback = job.planning.setback
    return max(
        job.planning.not_before, setback.until if setback is not None and setback.basis == basis else 0.0
    )


def first_plan(turn: Transaction, event: Planned) -> None:
    """The planner's answer while the job waits for its first plan: proposed, or the job ends."""
    if (asked := _answered(turn, event)) is None:
        return
    if plan := event.plan:
        again = "the job was started again: " if turn.job.start.earlier else ""
        propose(turn, plan, asked.problem, f"{again}{plan.reason or 'the first plan'}")
        return
    why = event.refusal
    stop(turn, f"there is no plan for this job: {why}{remedy(turn.job.spec, event.cause)}")


def next_plan(turn: Transaction, event: Planned) -> None:
    """The planner's answer while a plan runs: weighed against it."""
    if ending(turn) or (_kept(turn) and not to_leave(turn)):
        if turn.job.planning.asked is not None and turn.job.planning.asked.token == event.token:
            turn.change(
                "planning", asked=None
            )  # paused meanwhile: asked again once that ends; nobody is left to switch in an end
        return
    if (asked := _answered(turn, event)) is None:
        return
    job = turn.job
    if event.answer is None or event.plan is None:
        text = f"plan {job.number} stays, there is no other: {event.refusal}"
        turn.note("refused", text, number=job.number)
        return
    step = job.detection.rates.step
    _weigh(turn, job.plan, Deferred(basis=asked.basis, problem=asked.problem, answer=event.answer, step=step))


def recovery_plan(turn: Transaction, event: Planned) -> None:
    """The planner's answer after a fence: kept until the survivors have said what they hold."""
    if (asked := _answered(turn, event)) is None:
        return
    if plan := event.plan:
        turn.change("planning", remedy=Remedy(basis=asked.basis, problem=asked.problem, plan=plan))
        return
    why = event.refusal
    if not unplanned(turn, why) and not user_exceptions.unplanned(turn, why):
        no_capacity(turn, why)


def _answered(turn: Transaction, event: Planned) -> Asked | None:
    """The request that this answers, if it is the newest; it is decided by now."""
    asked = turn.job.planning.asked
    if asked is None or asked.token != event.token:
        return None
    turn.change("planning", asked=None, decided=asked.basis)
    return asked


def remedy(spec: AnyJobSpec | None, cause: RefusalCause) -> str:
    """The advice for a job that has no plan for this cause ("": there is none)."""
    if not isinstance(spec, JobSpec) or spec.recompute or cause != "memory":
        return ""
    return ', or let blocks recompute their activations: ParallelismOptions(recompute="plan")'


def ripe(job: JobState) -> bool:
    """Returns True if an answer that was worth no switch may have become worth one, since its basis has
    held."""
    return job.planning.deferred is not None and job.detection.rates.step >= job.planning.deferred.step


def _weigh(turn: Transaction, plan: JobPlan | None, found: Deferred) -> None:
    """An answer against the running plan: proposed, kept for later, or done with."""
    new = found.answer.plan
    assert plan is not None
    assert new is not None
    decision = _worth_it(turn, plan, new, found)
    if decision.replan:
        turn.change("planning", deferred=None)
        propose(turn, new, found.problem, decision.reason)
        return
    step = turn.job.detection.rates.step
    if decision.again_in is None:
        turn.change("planning", deferred=None, stability=settled(turn.job.planning.stability, step))
    else:
        turn.change("planning", deferred=msgspec.structs.replace(found, step=step + decision.again_in))
    reason = decision.reason
    turn.note(
        "kept_plan",
        f"plan {plan.number} stays: {reason}",
        number=plan.number,
        reason=reason,
        again_in=decision.again_in,
    )


def _worth_it(turn: Transaction, plan: JobPlan, new: JobPlan, found: Deferred) -> Decision:
    job, policy = turn.job, turn.settings.policy
    if leave := to_leave(turn):
        return Decision(replan=True, reason=words(turn, leave))
    if isinstance(new, MeshPlan):
        assert isinstance(plan, MeshPlan)
        return mesh_plans.worth_it(turn, plan, new, found.answer.current_seconds, found.basis)
    assert isinstance(plan, Plan)
    assert isinstance(found.problem, Problem)
    best_still = Decision(replan=False, reason="it is the best plan still")
    if new.strategies == plan.strategies:
        return best_still
    seconds = new.prediction.step_seconds if new.prediction is not None else math.inf
    decision = decide(
        policy,
        found.answer.current_seconds,
        seconds,
        _bytes_to_move(found.problem, plan, new),
        price=measured_price(policy, job.switching.moved),
        payoff=payoff_horizon(
            job.planning.stability, found.basis.rates, job.detection.rates.step, policy.horizon_steps
        ),
    )
    if new.strategies[0].untimed != plan.strategies[0].untimed:
        return decision
    if not decision.replan and decision.again_in is None:
        return best_still
    reason = f"the same layout, with passes in the order of the times that they take now: {decision.reason}"
    return msgspec.structs.replace(decision, reason=reason)


def _bytes_to_move(problem: Problem, old: Plan, new: Plan) -> int:
    """Of all modules."""
    load = problem.experts
    experts = 0 if load is None else expert_bytes_beyond_shares(problem.profile, load, old, new)
    return (
        experts
        + bytes_to_move(problem.profile, old.loss_view, new.loss_view)
        + sum(
            bytes_to_move(module.profile, old.view(module.name), new.view(module.name))
            for module in problem.modules
        )
    )


def all_there(turn: Transaction) -> bool:
    """Returns True if a proposal could be prepared now: all members reported, on nodes that can be reached."""
    job = turn.job
    if job.takeover.settle_until is not None and job.phase in (JobPhase.RUNNING, JobPhase.RECOVERING):
        return False
    nodes = {worker.node for worker in job.workers.values()}
    if job.phase is JobPhase.RECOVERING:  # who is lost, is lost
        return any(map(turn.here, nodes))
    return job.all_reported and all(map(turn.here, nodes))


def _devices(turn: Transaction) -> tuple[Device, ...]:
    """The devices that have a worker of this job, by name, but for those that are to be left."""
    if turn.job.phase is JobPhase.RECOVERING and ending(turn):
        return _last_devices(turn)
    workers = turn.job.workers.values()
    there = {worker.device for worker in workers if worker.left_at is None and not worker.draining}
    counts = Counter([worker.node for worker in workers])
    known = {name: turn.nodes[name] for name in counts if name in turn.nodes}
    nodes = usable(turn, {name: counts[name] for name, node in known.items() if not node.record.draining})
    devices = [device for node in sorted(nodes) for device in turn.nodes[node].record.devices]
    if turn.job.phase is JobPhase.RUNNING:  # elsewhere speed matters more than how fast a newcomer is
        there -= idle_probes.awaited(turn)
    stay = tuple(device for device in devices if device.name in there)
    if not stay and turn.job.phase is JobPhase.RECOVERING:
        return _held(turn, there & {worker.device for worker in turn.job.holders})  # all are on drained nodes
    return stay


def _last_devices(turn: Transaction) -> tuple[Device, ...]:
    """The devices whose workers recover to make a last checkpoint: those that hold the state, by name. A worker
    that stands by is about to leave."""
    return _held(turn, {worker.device for worker in turn.job.holders} if saving(turn) else set[str]())


def _held(turn: Transaction, there: set[str]) -> tuple[Device, ...]:
    """Those of `there` that can be used, by name, drained or not."""
    nodes = usable(turn, dict(Counter(node_of(device) for device in there)))
    listed = [
        device for node in sorted(nodes & turn.nodes.keys()) for device in turn.nodes[node].record.devices
    ]
    return tuple(device for device in listed if device.name in there)


def _cluster(turn: Transaction, devices: tuple[Device, ...]) -> Cluster:
    nodes: dict[str, list[Device]] = {}
    for device in devices:
        usable = msgspec.structs.replace(device, memory=turn.settings.usable(device.memory))
        nodes.setdefault(node_of(device.name), []).append(usable)
    return Cluster(
        nodes=tuple(Node(name=name, devices=tuple(held)) for name, held in nodes.items()),
        inside=turn.settings.inside,
        between=turn.settings.between,
        levels=turn.settings.levels,
    )
