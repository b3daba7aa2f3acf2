"""Every plan of a small problem under every setting, by the formulas of docs/planner.md alone.

Of the planner it uses the values (Problem, Plan) and the schedule's own end; costs are written out anew.
"""

import math
from collections.abc import Iterator
from itertools import product

import msgspec
import numpy as np
from elasticd_planner.cost.model_profile import SectionProfile
from elasticd_planner.cost.schedule_timeline import one_f_one_b_seconds
from elasticd_planner.problem import Problem
from elasticd_planner.spec.cluster import Link
from elasticd_planner.spec.plan import ModulePlan, Pipeline, Plan, Stage, StatePolicy, Strategy

from tests.planner import brute


def best(problem: Problem) -> float:
    """The least step time of all plans that fit, under all settings; inf where none does."""
    return min((seconds(plan, problem) for plan in every(problem) if fits(plan, problem)), default=math.inf)


def every(problem: Problem) -> Iterator[Plan]:
    search_space = problem.search_space
    for size in search_space.micro_batches or (problem.micro_batch,):
        for plan in brute.every(msgspec.structs.replace(problem, micro_batch=size)):
            for state in search_space.states:
                for pipelines in _flagged(plan.pipelines, problem):
                    yield Plan(
                        number=0,
                        strategies=(Strategy(modules=(ModulePlan(module="m", pipelines=pipelines),)),),
                        micro_batch=size,
                        global_batch=plan.global_batch,
                        state=state,
                        carriers=_carriers(problem, plan, state),
                    )


def _carriers(problem: Problem, plan: Plan, state: StatePolicy) -> tuple[str, ...]:
    """Replicas are to lie on as many nodes: where those that compute are on fewer, all devices of other nodes
    carry some, the largest of these nodes first."""
    used = {name.split("/")[0] for name in plan.members}
    others = [[d.name for d in node.devices] for node in problem.cluster.nodes if node.name not in used]
    others.sort(key=len, reverse=True)
    return tuple(sorted(name for node in others[: max(0, (state.replicas or 0) - len(used))] for name in node))


def _flagged(pipelines: tuple[Pipeline, ...], problem: Problem) -> Iterator[tuple[Pipeline, ...]]:
    may = {False: (False,), True: (False, True), "always": (True,)}
    space = problem.search_space
    choices = [
        product(may[space.recompute], may[space.sequence_parallel] if len(stage.devices) > 1 else (False,))
        for pipeline in pipelines
        for stage in pipeline.stages
    ]
    for flags in product(*choices):
        left = list(flags)
        yield tuple(
            Pipeline(
                stages=tuple(_with(stage, *left.pop(0)) for stage in pipeline.stages),
                micro_batches=pipeline.micro_batches,
            )
            for pipeline in pipelines
        )


def _with(stage: Stage, recompute: bool, sequence_parallel: bool) -> Stage:
    return msgspec.structs.replace(stage, recompute=recompute, sequence_parallel=sequence_parallel)


def link(problem: Problem, devices: tuple[str, ...]) -> Link:
    """The slowest link among devices: network, node, island."""
    cluster = problem.cluster
    names = {name.split("/")[0] for name in devices}
    if len(names) > 1:
        return cluster.between
    node = next(node for node in cluster.nodes if node.name in names)
    inside = node.inside or cluster.inside
    if node.island and len({int(name.split("/")[1]) // node.island for name in devices}) == 1:
        return node.within or cluster.within or inside
    return inside


def seconds(plan: Plan, problem: Problem) -> float:
    model = problem.profile
    pipelines = plan.pipelines
    slowest = 0.0
    for pipeline in pipelines:
        work, forward, hops = [], [], []
        for index, stage in enumerate(pipeline.stages):
            again = model.recompute_factor if stage.recompute else 1.0
            once = (1.5 if stage.recompute else 1.0) + (0.25 if stage.sequence_parallel else 0.0)
            block = _section(model.block, stage, plan, problem, again, once)
            spent = stage.layers * block
            if index == 0:
                spent += _section(model.embed, stage, plan, problem)
            if index == len(pipeline.stages) - 1:
                spent += _section(model.head, stage, plan, problem)
            else:
                following = pipeline.stages[index + 1]
                hop = link(problem, (*stage.devices, *following.devices))
                hops.append(hop.seconds(model.boundary_bytes * tokens(plan, problem)))
            work.append(spent)
            forward.append(spent * model.forward / again)
        ahead = np.array(forward)
        end = one_f_one_b_seconds(ahead, np.array(work) - ahead, np.array(hops), pipeline.micro_batches)
        slowest = max(slowest, float(end))
    return slowest + after(plan, problem)


def tokens(plan: Plan, problem: Problem) -> float:
    return problem.profile.tokens / problem.micro_batch * plan.micro_batch


def _section(
    section: SectionProfile, stage: Stage, plan: Plan, problem: Problem, again: float = 1.0, once: float = 1.0
) -> float:
    model, width = problem.profile, len(stage.devices)
    slowdown = section.slowdown.get(width, 1.0)
    slowest = max(
        problem.rates.get(name, 1.0)
        * (section.fixed_seconds + tokens(plan, problem) * section.seconds * slowdown * stage.fraction(i))
        for i, name in enumerate(stage.devices)
    )
    wait = 0.0
    if width > 1:
        size = model.boundary_bytes * tokens(plan, problem) / width
        wait = 2 * (width - 1) * link(problem, stage.devices).seconds(size)
    return slowest * again + section.collectives * wait * once


def after(plan: Plan, problem: Problem) -> float:
    model, count = problem.profile, len(plan.pipelines)
    replicas = plan.state.replicas or count
    over, extra = min(replicas, count), max(0, replicas - count)
    fewest = min(sum(len(s.devices) for s in p.stages) for p in plan.pipelines)
    hop = link(problem, plan.members)
    gradients, parameters = model.parameter_bytes * model.gradient_factor, model.parameter_bytes
    reduce = (count - 1 + over - 1) * hop.seconds(gradients / fewest / count)
    reduce += extra * hop.seconds(gradients / len(plan.members)) if extra else 0.0
    gather = (count - over) * hop.seconds(parameters / fewest / count)
    owned = parameters * model.optimizer_factor * (over / count / fewest + extra / len(plan.members))
    return reduce + gather + owned * model.optimizer_seconds + model.overhead_seconds


def fits(plan: Plan, problem: Problem) -> bool:
    return all(need <= problem.cluster.device(name).memory for name, need in memory(plan, problem).items())


def memory(plan: Plan, problem: Problem) -> dict[str, int]:
    model, count = problem.profile, len(plan.pipelines)
    policy: StatePolicy = plan.state
    replicas = policy.replicas or count
    part, extra = min(1.0, replicas / count), max(0, replicas - count)
    needed = {}
    for pipeline in plan.pipelines:
        depth = len(pipeline.stages)
        for index, stage in enumerate(pipeline.stages):
            alive = min(pipeline.micro_batches, depth - index)
            for position, name in enumerate(stage.devices):
                share = stage.fraction(position)

                def held(section: SectionProfile, share: float = share) -> float:
                    return section.cut_bytes * share + section.whole_bytes

                def kept(section: SectionProfile, share: float = share, whole: float = 1.0) -> float:
                    per_token = section.cut_activation * share + section.whole_activation * whole
                    return per_token * tokens(plan, problem)

                parameters = stage.layers * held(model.block)
                whole = share if stage.sequence_parallel else 1.0
                activations = stage.layers * kept(model.block, whole=whole)
                once = 0.0
                if stage.recompute:
                    each = model.block.recomputed_activation * whole
                    activations = stage.layers * each * tokens(plan, problem)
                    once = kept(model.block, whole=whole)
                if stage.sequence_parallel:
                    once += model.boundary_bytes * tokens(plan, problem)
                for section, here in ((model.embed, index == 0), (model.head, index == depth - 1)):
                    parameters += held(section) if here else 0.0
                    activations += kept(section) if here else 0.0
                moments = parameters * part * model.optimizer_factor
                each = 1 + model.gradient_factor + model.optimizer_factor  # value, gradient and moments
                others = extra * model.parameter_bytes / len(plan.members) * each
                sent = parameters * part if part < 1 else 0.0
                size = parameters * (1 + model.gradient_factor) + moments + sent + others
                needed[name] = math.ceil(size + activations * alive + once + model.fixed_bytes)
    if plan.carriers:
        computing, carrying = ({n.split("/")[0] for n in names} for names in (plan.places, plan.carriers))
        copies = min(replicas - len(computing), len(carrying))
        state = model.parameter_bytes * (1 + model.gradient_factor + model.optimizer_factor)
        needed |= dict.fromkeys(plan.carriers, math.ceil(copies * state / len(plan.carriers)))
    return needed
