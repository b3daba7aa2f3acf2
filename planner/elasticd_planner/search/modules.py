"""Plans of several modules: the module with the loss is planned as ever, and those of items are filled in.

1. *The module with the loss* is planned on all devices, and with some left to items alone: the slowest devices,
then whole nodes; its regular layouts are candidates, too. Where modules of items do not fit beside it on each
device, it is planned once more with less memory.
2. *A module of items* is whole on devices where it fits, one lane each, and `item_lanes` says how many items
each takes. Where it fits no device it gets plans of its own in the memory that is left.
3. *The best candidates* of those that share devices and of those that share none are played (`module_cost`),
and of the best one a few pairs of `ahead` and `lead` for which there is memory. Of near-equal ones the one is
taken that moves the fewest bytes.

Where sequences are packed, rows have as many tokens as memory leaves beside modules of items: these are placed
beside the fewest tokens that hold the longest sequence, and then rows grow (`module_rows`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product

import msgspec

from elasticd_planner.cost.memory import fits
from elasticd_planner.cost.model_profile import with_room
from elasticd_planner.layout.optimizer_sharding import with_carriers
from elasticd_planner.numeric import EQUAL
from elasticd_planner.placement.state_movement import bytes_to_move
from elasticd_planner.problem import Answer, ModuleProblem, Problem, Refusal, SearchSpace
from elasticd_planner.readable import readable
from elasticd_planner.search import given_plan
from elasticd_planner.search.item_flow import serving
from elasticd_planner.search.item_lanes import ItemLane, filled, weights
from elasticd_planner.search.module_bound import ROUNDED, ModuleBound
from elasticd_planner.search.module_cost import ModuleCosts, item_profile
from elasticd_planner.search.options import Form, form
from elasticd_planner.search.recompute import flagged
from elasticd_planner.search.sequence_parallel import sliced
from elasticd_planner.search.task import EXACT_DEVICES, UnitProblem, alive
from elasticd_planner.spec.cluster import NORMAL, Cluster, Rates, node_of, rate_of
from elasticd_planner.spec.packed_sequences import PackedSequences
from elasticd_planner.spec.plan import (
    Edge,
    ModulePlan,
    Pipeline,
    Plan,
    Prediction,
    Stage,
    StatePolicy,
    Strategy,
)
from elasticd_planner.spec.plan_summary import describe, some

#: Plans a problem of one module: with the form of a good plan, or None; and whether briefly.
Search = Callable[[Problem, Form | None, bool], Answer]

#: The plans of the best regular layouts of such a problem.
Regular = Callable[[Problem], list[Plan]]

#: The parts of all devices that are left to items, besides none and one device.
LEFT = (1 / 16, 1 / 8, 1 / 4)

#: So many candidates are played at most of those whose modules share devices, and of those whose modules share
#: none: passes of items may be too long for what the other passes leave, which only the played order shows.
PLAYED = 8

#: Candidates are played with the first `lead`, and the best one with the others, too; and with these `ahead`
#: [micro-batches] besides all of them.
AHEADS, LEADS = (16, 8, 4, 2, 1), (3, 1, 0, 8)

#: A step with more micro-batches and items than these is played with fewer pairs.
MANY = 2048

#: A rank makes an order of about so many passes of the module with the loss at most.
ORDER_PASSES = 16_384

#: The part by which a step of packed rows may take less than its estimate, which is of no dealt sequences; and
#: by which it may take longer in the memory that modules of items leave before layouts for that are tried.
ROWS_OFF, TIGHT_ROWS = 0.1, 0.02

#: Lanes of items serve each of so many pipelines alone where that saves this part of a step. So many plans are
#: tried, the best ones.
NEAR_PIPELINES, NEARER, NEARBY = 16, 0.01, 1

#: How often lanes are filled anew without those that have not the memory for their items.
REFILLED = 8

#: How many times more room for activations a module of items gets in plans of its own.
ROOMS = (1.0, 2.0, 4.0, 8.0)

#: For that plan memory is counted in so many parts of the most that is left, and there are so many items for
#: each device at most: how its lanes share them is decided after.
COARSE, MICRO_BATCHES = 8, 2


def answer(problem: Problem, search: Search, regular: Regular, number: int, tolerance: float) -> Answer:
    """The best plan found of all modules of a problem, or a refusal that says what would help."""
    if isinstance(problem, UnitProblem):
        return Answer(plan=None, refusal="modules of items need seconds: give the problem model.times")
    planner = ModulePlanner(problem=problem, search=search, regular=regular, number=number, tolerance=tolerance)
    if problem.given is None:
        return planner.answer()
    return given_plan.answer(
        problem, planner.as_given, lambda searched: answer(searched, search, regular, number, tolerance)
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A plan that may be the best, not played yet."""

    plan: Plan
    seconds: float  # of its passes, by what devices are busy
    squeezed: bool = False  # a device that has a place otherwise has not the memory for it
    apart: bool = False  # a module of items has a plan of its own: it fits no device
    left: int | None = None  # devices that were left to items, where the search was brief


@dataclass(frozen=True, kw_only=True)
class ModulePlanner:
    """One problem of several modules being planned."""

    problem: Problem
    search: Search
    regular: Regular
    number: int
    tolerance: float
    tried: list[Answer] = field(default_factory=list)  # of the module with the loss; first on all devices
    refused: list[str] = field(default_factory=list)  # why a module of items has no place
    #: By module, cluster, state policy and room: plans of modules of items by themselves.
    own_plans: dict[tuple[str, Cluster, StatePolicy, float], tuple[Plan | None, str]] = field(
        default_factory=dict
    )

    @cached_property
    def costs(self) -> ModuleCosts:
        """What plans of the problem cost."""
        return ModuleCosts(self.problem)

    def answer(self) -> Answer:
        """The plan, or why there is none."""
        distinct = {each.plan.strategies: each for each in reversed([*self.candidates()])}
        estimated = ((self._estimate(each), each) for each in distinct.values())
        candidates = sorted(estimated, key=lambda pair: pair[0])
        running = self._running()
        now = None if running is None else _seconds(running)
        count = sum(each.candidates for each in self.tried) + len(candidates)
        if not candidates:
            return Answer.refused(self._refusal(), current_seconds=now, candidates=count)
        slack = self.tolerance if self.problem.current is not None else 0.0
        current = [] if running is None else [running, self._predicted(self.costs.timed(self._roomy(running)))]
        options = [*self._options(candidates, slack), *current]
        limit = _seconds(min(options, key=_seconds)) * (1 + slack) * (1 + EQUAL)
        near = [option for option in options if _seconds(option) <= limit]
        chosen = min(near, key=lambda option: (self._moved(option), _seconds(option)))
        return Answer(plan=self._finished(chosen), current_seconds=now, candidates=count)

    def _options(self, candidates: Sequence[tuple[float, Candidate]], slack: float) -> list[Plan]:
        """Plans to choose from: the most promising candidates, with their estimates, and variants of them.

        Those are left out whose estimate, which no order of their passes beats, is above the best so far and
        the slack, and those that are found to take longer as they are played. Where modules share devices and
        where they share none the most promising one is played first.
        """
        off = ROUNDED if self.costs.rows is None else ROWS_OFF
        least, counts, firsts, others = math.inf, Counter[bool](), list[int](), list[int]()
        for at, (_, candidate) in enumerate(candidates):
            shares = _shares_devices(candidate.plan)
            counts[shares] += 1
            if counts[shares] <= PLAYED:
                (firsts if counts[shares] == 1 else others).append(at)

        def hopeless(at: int) -> bool:
            return candidates[at][0] * (1 - off) > least * (1 + slack)

        played: dict[int, Plan] = {}
        for at in (*firsts, *others):
            if not hopeless(at):
                plan = self.played(candidates[at][1].plan, least * (1 + slack) * (1 + EQUAL))
                if math.isfinite(_seconds(plan)):
                    played[at], least = plan, min(least, _seconds(plan))
        best = min(sorted(played), key=lambda at: _seconds(played[at]))
        again = [
            self.played(plan, least * (1 + slack) * (1 + EQUAL)) for plan in self._again(candidates[best][1])
        ]
        least = min([least, *map(_seconds, again)])
        # Of passes of microseconds, which are whole ones, an estimate may be above what is played.
        options = [*again, *(played[at] for at in sorted(played) if at == best or not hopeless(at))]
        options += [near for plan in sorted(options, key=_seconds)[:NEARBY] for near in self._near(plan)]
        return [*options, *self._pairs(min(options, key=_seconds))]

    def as_given(self, given: Plan) -> Plan | str:
        """A plan from elsewhere as it is, with a prediction and reason; or why it cannot be."""
        names = sorted(module.module for module in given.modules)
        if names != sorted([self.problem.module, *self.costs.modules]):
            return f"its modules are {', '.join(names)}, and those of the job are others"
        given = self._carried(given.replace(idle=(), carriers=(), binding={}))
        if (rows := self.costs.rows) is not None:
            given = self.costs.roomy(rows.packed_plan(given))
            if not rows.holds(given.loss_view):
                return rows.too_long(given.loss_view)
        plan = self._predicted(self.costs.timed(given))
        assert plan.prediction is not None
        if wrong := given_plan.lacking(plan.prediction.memory, self.problem.cluster):
            most = self._aheads(given)[0]
            further = any(module.ahead > most for module in given.modules)
            nearer = self.costs.memory(with_pair(given, most, 0)) if further else {}
            if nearer and fits(nearer, self.problem.cluster):
                wrong += (
                    f"; it fits where modules of items are at most {most} micro-batches ahead: ahead={most}"
                )
            return wrong
        finished = self._finished(plan)
        return finished.replace(reason=f"given by the job: {finished.reason}")

    # Candidates.

    def _estimate(self, candidate: Candidate) -> float:
        """Seconds of a step of a candidate, before it is played."""
        return candidate.seconds + self.costs.after_seconds(candidate.plan)

    def candidates(self) -> Iterator[Candidate]:
        """Plans for each number of devices that are left to items: these alone take items, or all do. Regular
        layouts of the module with the loss come first, on all devices: beside items another one than that of
        the module by itself may be the quickest. Of many devices the others are like the quickest of them."""
        usable = [device.name for device in alive(self.problem)]
        many, regular = len(usable) > EXACT_DEVICES, self._regular_plans({})
        many &= self.costs.rows is None  # searches of packed plans are not brief
        like = form(regular[0]) if many and regular else None
        shared = [each for layout in regular for each in self.placed(layout, usable)]
        if all(each.squeezed for each in shared):
            for recompute in self._recomputes:
                for layout in self._regular_plans(self._item_bytes(usable, recompute=recompute)):
                    shared += self.placed(layout, usable)
        for each in shared:
            yield replace(each, left=0 if many else None)
        for count in _counts(len(usable)):
            left = left_devices(self.problem, count)
            brief = like is not None and many
            loss = self.loss_plan(left, {}, like, brief=brief)
            if loss is None:
                continue
            like = form(loss)
            if count:
                for each in self.placed(loss, left):
                    yield replace(each, left=count if brief else None)
            shared = list(self.placed(loss, usable))
            for each in shared:
                yield replace(each, left=count if brief else None)
            if all(each.squeezed for each in shared):
                for recompute in self._recomputes:
                    tight = self.loss_plan(left, self._item_bytes(usable, recompute=recompute), None)
                    yield from [] if tight is None else self.placed(tight, usable)

    def _regular_plans(self, used: Mapping[str, int]) -> list[Plan]:
        """Those of the module with the loss on all devices, with less memory."""
        problem = self._loss_problem([], used)
        return [] if problem is None else self.regular(problem)

    def _again(self, found: Candidate) -> Iterator[Plan]:
        """A candidate of a brief search with the plan that a thorough one finds of the module with the loss."""
        if found.left is None:
            return
        left = left_devices(self.problem, found.left)
        loss = self.loss_plan(left, {}, form(found.plan.loss_view))
        if loss is not None and loss.pipelines != found.plan.loss_view.pipelines:
            shares = _shares_devices(found.plan)
            devices = [device.name for device in alive(self.problem)] if shares else left
            yield from (each.plan for each in self.placed(loss, devices))

    def loss_plan(
        self, left: Sequence[str], used: Mapping[str, int], like: Form | None, *, brief: bool = False
    ) -> Plan | None:
        """The plan of the module with the loss on other devices than these, with less memory."""
        problem = self._loss_problem(left, used)
        if problem is None:
            return None
        found = self.search(problem, like, brief)
        self.tried.append(found)
        return found.plan

    def _loss_problem(self, left: Sequence[str], used: Mapping[str, int]) -> Problem | None:
        """The problem of the module with the loss on other devices than these; None where nothing is left."""
        cluster = self.problem.cluster.without(left, used)
        if cluster is None:
            return None
        names = {device.name for device in cluster.devices}
        return msgspec.structs.replace(
            self.problem,
            cluster=cluster,
            rates={name: rate for name, rate in self.problem.rates.items() if name in names},
            modules=(),
            given=None,
            current=_view(self.problem.current, self.problem.module),
        )

    @property
    def _recomputes(self) -> tuple[bool, ...]:
        """The choices of recomputation in modules of items that may be tried, the quicker one first."""
        asked = self.problem.search_space.recompute
        return (True,) if asked == "always" else (False, True) if asked else (False,)

    def _item_bytes(self, devices: Sequence[str], *, recompute: bool) -> dict[str, int]:
        """Bytes that modules of items need on each device where all have a lane with two items; of a module
        that fits no device its part of what it needs in all."""
        used = 0
        for module in self.problem.modules:
            lanes = [self._whole(module, device, recompute=recompute) for device in devices]
            plan = self._plan(
                [ModulePlan(module=module.name, pipelines=tuple(lanes), items=module.items)], None
            )
            size = max(self.costs.item_memory(plan, plan.modules[0], [2] * len(devices)).values())
            fitting = size < min(self.problem.cluster.memory.values())
            used += size if fitting else 2 * size // len(devices)
        return dict.fromkeys(devices, used)

    def placed(self, loss: Plan, devices: Sequence[str]) -> Iterator[Candidate]:
        """The plan with modules of items on these devices beside the module with the loss, if they fit. Where
        one of them has a plan of its own: with more and more room for its items, and with stages that need the
        least memory, so that they may be further ahead."""
        for recompute in self._recomputes:
            seen = list[Candidate]()
            for room, lean in product(ROOMS, (False, True)):
                found = self._beside(loss, devices, recompute=recompute, room=room, lean=lean)
                if found is not None and all(found.plan.strategies != each.plan.strategies for each in seen):
                    seen.append(found)
                    yield found
                if found is not None and not found.apart:
                    break
            if seen and not seen[0].squeezed:
                return

    def _beside(
        self, loss: Plan, devices: Sequence[str], *, recompute: bool, room: float, lean: bool
    ) -> Candidate | None:
        rows, full = self.costs.rows, loss
        if rows is not None:
            loss = rows.lean(loss)
        made = Candidate(plan=self._plan([], loss), seconds=self.costs.passes_seconds(self._plan([], full)))
        needs = sorted(self.problem.modules, key=lambda each: -self.costs.item_work(each) * each.items_a_sample)
        for module in needs:
            free = [device for device in devices if device not in loss.carriers]
            found = self._with(made, loss, module, free, recompute=recompute, room=room, lean=lean)
            if found is None:
                return None
            made = found
        if rows is None:
            return made
        seconds = self.costs.passes_seconds(self.costs.roomy(with_pair(made.plan, 1, 0)).loss_view)
        alone = self.costs.passes_seconds(self._plan([], full))
        return replace(made, squeezed=made.squeezed or seconds > alone * (1 + TIGHT_ROWS))

    def _with(
        self,
        before: Candidate,
        loss: Plan,
        module: ModuleProblem,
        devices: Sequence[str],
        *,
        recompute: bool,
        room: float,
        lean: bool,
    ) -> Candidate | None:
        """The plan with a module of items more."""
        left = dict(self.problem.cluster.memory)
        for device, size in self.costs.memory(before.plan).items():
            left[device] -= size
        lanes = [self._whole(module, device, recompute=recompute) for device in devices if left[device] > 0]
        found = self._filled(before, loss, module, lanes, left)
        if found is None and (not recompute or self.problem.search_space.recompute == "always"):
            found = self._apart(before, loss, module, devices, left, room, lean=lean)
        return found

    def _whole(self, module: ModuleProblem, device: str, *, recompute: bool = False) -> Pipeline:
        profile = module.profile
        stage = Stage(
            start=0,
            stop=profile.layers,
            devices=(device,),
            shares=(profile.share_units,),
            recompute=recompute and module.trained,
        )
        return Pipeline(stages=(stage,), micro_batches=1)

    def _filled(
        self,
        before: Candidate,
        loss: Plan,
        module: ModuleProblem,
        lanes: Sequence[Pipeline],
        left: Mapping[str, int],
    ) -> Candidate | None:
        """The module on those of these lanes that have the memory for their items; None where none has."""
        busy = self.costs.busy(before.plan)
        # A mean step may have none, and lanes need their weights all the same.
        items = self.costs.step_items(module) or module.items_a_sample * loss.global_batch
        for turn in range(REFILLED):
            if not lanes:
                return None
            own = ModulePlan(
                module=module.name, pipelines=tuple(lanes), items=module.items, trainable=module.trained
            )
            times = self.costs.lane_seconds(self._plan([own], None))
            listed = [
                ItemLane(pipeline=lane, seconds=tuple((forward + backward).tolist()))
                for lane, (forward, backward) in zip(lanes, times, strict=True)
            ]
            filling = filled(listed, busy, items, before.seconds)
            shares = weights(filling.items)
            own = msgspec.structs.replace(
                own,
                pipelines=tuple(
                    msgspec.structs.replace(lane, micro_batches=share)
                    for lane, share in zip(lanes, shares, strict=True)
                    if share
                ),
            )
            made = self._plan([*_items_of(before.plan), own], loss)
            needed = self.costs.item_memory(made, own)
            short = {device for device, size in needed.items() if size > left[device]}
            if not short:
                squeezed = before.squeezed or turn > 0
                return Candidate(plan=made, seconds=filling.seconds, squeezed=squeezed, apart=before.apart)
            lanes = [
                lane
                for lane in lanes
                if not short & {device for stage in lane.stages for device in stage.devices}
            ]
        return None

    def _apart(
        self,
        before: Candidate,
        loss: Plan,
        module: ModuleProblem,
        devices: Sequence[str],
        left: Mapping[str, int],
        room: float,
        *,
        lean: bool,
    ) -> Candidate | None:
        """The module in a plan of its own, in what memory is left of these devices, with so many times the room
        for activations. lean: its stages recompute and are sequence parallel where they may."""
        found, refusal = self._own_plan(loss, module, devices, left, room)
        if found is not None:
            lanes = found.by_lane
            if lean:
                space = self.problem.search_space
                lanes = flagged(lanes, on=True) if space.recompute and module.trained else lanes
                lanes = sliced(lanes, on=True) if space.sequence_parallel else lanes
            made = self._filled(before, loss, module, lanes, left)
            if made is not None:
                return replace(made, squeezed=True, apart=True)
            refusal = "what it keeps of the items that are needed ahead does not fit"
        self.refused.append(f"module {module.name} beside {self.problem.module}: {refusal}")
        return None

    def _own_plan(
        self,
        loss: Plan,
        module: ModuleProblem,
        devices: Sequence[str],
        left: Mapping[str, int],
        room: float,
    ) -> tuple[Plan | None, str]:
        """The plan of a module of items by itself, or why there is none."""
        memory = self.problem.cluster.memory
        coarse = max(1, max(left.values()) // COARSE)  # devices that are nearly alike count as alike
        used = {device: memory[device] - size // coarse * coarse for device, size in left.items()}
        others = [device.name for device in self.problem.cluster.devices if device.name not in set(devices)]
        cluster = self.problem.cluster.without(others, used)
        if cluster is None:
            return None, "it has no memory beside the module with the loss"
        key = module.name, cluster, loss.state, room
        if key not in self.own_plans:
            space, names = self.problem.search_space, {device.name for device in cluster.devices}
            items = module.items_a_sample * loss.global_batch
            problem = Problem(
                cluster=cluster,
                profile=with_room(item_profile(module), room),
                global_batch=max(1, min(round(items), MICRO_BATCHES * len(names))),
                micro_batch=1,
                rates={name: rate for name, rate in self.problem.rates.items() if name in names},
                search_space=SearchSpace(
                    states=(loss.state,),
                    recompute=space.recompute if module.trained else False,
                    sequence_parallel=space.sequence_parallel,
                ),
            )
            plan = next(iter(self.regular(problem)), None)
            answer = self.search(problem, None, False) if plan is None else Answer(plan=plan)
            self.own_plans[key] = answer.plan, answer.refusal
        return self.own_plans[key]

    def _plan(self, items: Sequence[ModulePlan], loss: Plan | None) -> Plan:
        """The plan of modules of items and the module with the loss (None: it is left out)."""
        modules = list(items)
        if loss is not None:
            modules.append(msgspec.structs.replace(loss.modules[-1], module=self.problem.module))
        order = {module.name: place for place, module in enumerate(self.problem.modules)}
        modules.sort(key=lambda each: order.get(each.module, len(order)))
        edges = () if loss is None else tuple(Edge(source=m.module, target=self.problem.module) for m in items)
        of = self.problem if loss is None else loss
        plan = Plan(
            number=self.number,
            strategies=(Strategy(modules=tuple(modules), edges=edges),),
            state=self.problem.search_space.states[0] if loss is None else loss.state,
            micro_batch=of.micro_batch,
            global_batch=of.global_batch,
            carriers=() if loss is None else loss.carriers,
        )
        return plan.replace(idle=self._idle(plan))

    def _carried(self, plan: Plan) -> Plan:
        """The plan with its idle devices, those of them as carriers that the replicas of the module with the
        loss need."""
        plan = plan.replace(idle=self._idle(plan))
        if not plan.state.replicas:
            return plan
        carriers = with_carriers(plan.loss_view.replace(idle=plan.idle)).carriers
        idle = tuple(device for device in plan.idle if device not in carriers)
        return plan.replace(carriers=carriers, idle=idle)

    def _idle(self, plan: Plan) -> tuple[str, ...]:
        used = {*plan.members}
        return tuple(device.name for device in self.problem.cluster.devices if device.name not in used)

    # Played plans.

    def played(self, plan: Plan, limit: float = math.inf) -> Plan:
        """The plan with times, a prediction, and the largest `ahead` that memory allows. Of a large one each
        lane of items serves some pipelines alone, so that the order of each rank is short. A plan that takes
        longer than the limit may have inf seconds."""
        loss = plan.loss_module.pipelines
        count = sum(2 * pipeline.micro_batches * len(pipeline.stages) for pipeline in loss)
        if (groups := min(len(loss), math.ceil(count / ORDER_PASSES))) > 1:
            plan = self._serving(plan, groups)
        aheads = self._aheads(plan)
        return self._predicted(self._paired(plan, aheads[0], min(LEADS[0], aheads[0])), limit)

    def _serving(self, plan: Plan, groups: int) -> Plan:
        """The plan whose lanes of items serve groups of pipelines."""
        modules = []
        for module in plan.modules:
            if module.items:
                given = self.costs.modules[module.module]
                size = self.costs.output_bytes(given)
                module = serving(plan, module, self.problem.cluster, groups, size)
            modules.append(module)
        return plan.with_modules(modules)

    def _near(self, plan: Plan) -> Iterator[Plan]:
        """The same plan with lanes of items that serve each pipeline alone, where links make that faster."""
        pipelines = len(plan.loss_module.pipelines)
        if 1 < pipelines <= NEAR_PIPELINES and not any(_serves(plan)):
            limit = (1 - NEARER) * _seconds(plan)
            near = self._predicted(self.costs.timed(self._serving(plan, pipelines)), limit)
            if _seconds(near) < limit:
                yield near

    def _aheads(self, plan: Plan) -> list[int]:
        """Numbers of micro-batches that memory allows, all of them first. Where one fits, smaller ones do."""
        every = max(lane.micro_batches for lane in plan.view(self.problem.module).by_lane)
        listed = [every, *(ahead for ahead in AHEADS if ahead < every)]
        if self.costs.rows is not None:
            return self._aheads_of_rows(plan, listed) or [1]
        for at, ahead in enumerate(listed):
            if fits(self.costs.memory(with_pair(plan, ahead, 0)), self.problem.cluster):
                return listed[at:]
        return [1]

    def _aheads_of_rows(self, plan: Plan, listed: Sequence[int]) -> list[int]:
        """Those of packed rows, first those whose items leave rows their tokens."""
        pairs = [(ahead, self._roomy(with_pair(plan, ahead, 0))) for ahead in listed]
        seconds = {
            ahead: self.costs.passes_seconds(made.loss_view)
            for ahead, made in pairs
            if fits(self.costs.memory(made), self.problem.cluster)
        }
        limit = min(seconds.values(), default=0.0) * (1 + TIGHT_ROWS)
        return sorted(seconds, key=lambda ahead: (seconds[ahead] > limit, -ahead))

    def _roomy(self, plan: Plan) -> Plan:
        return plan if self.costs.rows is None else self.costs.roomy(plan)

    def _paired(self, plan: Plan, ahead: int, lead: int) -> Plan:
        """The plan with this pair, and with the times of its passes."""
        return self.costs.timed(self._roomy(with_pair(plan, ahead, lead)))

    def _pairs(self, plan: Plan) -> Iterator[Plan]:
        """The same plan with each `lead`, and with other `ahead` under the best of these."""
        aheads = self._aheads(plan)
        leads: tuple[int, ...] = LEADS
        count = plan.global_batch * (1 + sum(module.items_a_sample for module in self.problem.modules))
        if count > MANY:
            aheads, leads = aheads[:1], LEADS[:2]
        if not _shares_devices(plan) and self.costs.rows is None:
            leads = leads[:1]  # items wait for no other passes on their devices, whatever it is
        alone = self.costs.passes_seconds(plan.loss_view) + self.costs.after_seconds(plan)
        if _seconds(plan) <= alone * (1 + ROUNDED):
            return  # modules of items take no time of the step
        best, most = plan, aheads[0]
        for lead in leads[1:]:
            if lead <= most:
                # It moves as many bytes as the best one: what is no faster is of no use.
                limit = _seconds(best) * (1 - EQUAL)
                other = self._predicted(self._paired(plan, most, lead), limit)
                best = other if _seconds(other) < limit else best
                yield other
        lead = _items_of(best)[0].lead
        if self.costs.rows is None:
            others = [(ahead, min(lead, ahead)) for ahead in aheads[2:5:2]]
        else:  # what is kept of items ahead is taken from rows
            others = [(ahead, each) for ahead in aheads[1:] for each in sorted({min(lead, ahead), 1})]
        for ahead, each in others:
            yield self._predicted(self._paired(plan, ahead, each), _seconds(best) * (1 - EQUAL))

    def _predicted(self, plan: Plan, limit: float = math.inf) -> Plan:
        seconds, memory = self.costs.seconds(plan, limit), self.costs.memory(plan)
        return plan.replace(prediction=Prediction(step_seconds=seconds, bound_seconds=0.0, memory=memory))

    def _running(self) -> Plan | None:
        """The current plan as it runs, with its own times and a prediction; None where it cannot run, or is of
        another problem."""
        plan, problem = self.problem.current, self.problem
        if plan is None or (plan.global_batch % problem.micro_batch, plan.global_batch) != (
            0,
            problem.global_batch,
        ):
            return None
        layers = {problem.module: problem.profile.layers}
        layers |= {module.name: module.profile.layers for module in problem.modules}
        if {module.module: module.pipelines[0].layers for module in plan.modules} != layers:
            return None
        if given_plan.missing(plan, problem) or plan.packed != (problem.packed is not None):
            return None
        if self.costs.rows is not None and not self.costs.rows.holds(plan.loss_view):
            return None
        plan = plan.replace(number=self.number, idle=self._idle(plan), binding={})
        seconds, memory = self.costs.running_seconds(plan), self.costs.memory(plan)
        prediction = Prediction(step_seconds=seconds, bound_seconds=0.0, memory=memory)
        return plan.replace(prediction=prediction) if fits(memory, problem.cluster) else None

    def _moved(self, plan: Plan) -> int:
        """Bytes that move from the current plan, of all modules."""
        if self.problem.current is None:
            return 0
        profiles = {self.problem.module: self.problem.profile}
        profiles |= {module.name: item_profile(module) for module in self.problem.modules}
        return sum(
            bytes_to_move(profile, _view(self.problem.current, name), plan.view(name))
            for name, profile in profiles.items()
        )

    def _finished(self, plan: Plan) -> Plan:
        assert plan.prediction is not None
        first = self.tried[0].plan if self.tried else None
        alone = first.prediction if first is not None else None
        bound = ModuleBound(self.problem, self.costs, alone).seconds(plan.prediction.step_seconds)
        prediction = msgspec.structs.replace(plan.prediction, bound_seconds=bound)
        reason = reason_of(plan, self.problem.rates, self.problem.packed)
        return plan.replace(number=self.number, prediction=prediction, reason=reason)

    def _refusal(self) -> Refusal:
        first = self.tried[0] if self.tried else None
        if first is None or first.plan is None:
            dead = Refusal("no device to plan for: every device is dead; add a node")
            return dead if first is None else Refusal(first.refusal, first.cause)
        sizes = ", ".join(
            f"{module.name} needs {readable(round(self.costs.state_bytes(module)))} of state"
            for module in self.problem.modules
        )
        reasons = "; ".join(dict.fromkeys(self.refused)) or "no device has room for a whole one"
        return Refusal(
            f"modules of items do not fit beside {self.problem.module}: {sizes}; {reasons}; add a node"
        )


def reason_of(plan: Plan, rates: Rates, packed: PackedSequences | None = None) -> str:
    """A plan of several modules in one sentence for each of them.

    Args:
        plan: it.
        rates: slowdowns of devices.
        packed: see `describe`.
    """
    parts = []
    for module in plan.modules:
        if not module.items:
            parts.append(f"{module.module}: {describe(plan.view(module.module), rates, packed)}")
            continue
        lanes = module.by_lane
        devices = [device for lane in lanes for stage in lane.stages for device in stage.devices]
        count = f"{len(lanes)} lane{'s' if len(lanes) > 1 else ''} on {some(devices)}"
        parts.append(
            f"{module.module}: {count}, at most {module.ahead} micro-batches ahead, lead {module.lead}"
        )
    text = "; ".join(parts)
    return text + (f"; idle: {some(plan.idle)}" if plan.idle else "")


def _seconds(plan: Plan) -> float:
    assert plan.prediction is not None
    return plan.prediction.step_seconds


def _view(plan: Plan | None, name: str) -> Plan | None:
    """The plan of a module alone, where there is such a module."""
    if plan is None or all(module.module != name for module in plan.modules):
        return None
    return plan.view(name)


def _serves(plan: Plan) -> Iterator[tuple[int, ...]]:
    return (lane.serves for module in plan.modules for lane in module.pipelines)


def _items_of(plan: Plan) -> list[ModulePlan]:
    return [module for module in plan.modules if module.items]


def with_pair(plan: Plan, ahead: int, lead: int) -> Plan:
    """The plan with this `ahead` and `lead` in all modules of items."""
    return plan.with_modules(
        msgspec.structs.replace(module, ahead=ahead, lead=lead) if module.items else module
        for module in plan.modules
    )


def _shares_devices(plan: Plan) -> bool:
    """Whether a device computes in two modules."""
    return sum(len(plan.view(module.module).members) for module in plan.modules) > len(plan.members) - len(
        plan.carriers
    )


def _counts(devices: int) -> list[int]:
    """Numbers of devices that are left to items."""
    counts = {0, 1, *(round(devices * part) for part in LEFT)}
    return sorted(count for count in counts if count < devices)


def left_devices(problem: Problem, count: int) -> list[str]:
    """So many devices that are left to items: the slowest first, then those of whole nodes, the last nodes
    first, and of these such as have a slow device already."""
    rates, nodes = problem.rates, [node.name for node in problem.cluster.nodes]
    slow = {node_of(device.name) for device in alive(problem) if rate_of(rates, device.name) > NORMAL}

    def place(device: str) -> tuple[float, bool, int]:
        node = node_of(device)
        return -rate_of(rates, device), node not in slow, -nodes.index(node)

    return sorted((device.name for device in alive(problem)), key=place)[:count]
