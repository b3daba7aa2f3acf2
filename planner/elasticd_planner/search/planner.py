"""The planner's entry point: a problem in, the best plan or the reason why there is none out."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice, product

import msgspec

from elasticd_planner.cost.memory import fits, memory_by_device
from elasticd_planner.cost.model import stage_times
from elasticd_planner.cost.table_cost import TableCost
from elasticd_planner.layout.optimizer_sharding import with_carriers
from elasticd_planner.numeric import EQUAL, Floats
from elasticd_planner.placement.state_movement import bytes_to_move
from elasticd_planner.placement.stay_close import BETWEEN, WHOLE, nearest, rebalance_shares
from elasticd_planner.placement.tp_rank_order import relax_shares, reorder_tp_ranks
from elasticd_planner.problem import Answer, JobAnswer, JobProblem, MeshProblem, Problem, Refusal, with_current
from elasticd_planner.search import experts, given_plan, interleave, lanes, modules, packed
from elasticd_planner.search.balance.micro_batch_split import split_micro_batches
from elasticd_planner.search.device_swaps import swapped
from elasticd_planner.search.exhaustive import Combination, ExhaustiveSearch, place
from elasticd_planner.search.infeasible import impossible_pin
from elasticd_planner.search.large import LargeSearch
from elasticd_planner.search.mesh import plan_mesh
from elasticd_planner.search.options import (
    Form,
    OptionOrder,
    Setting,
    Settings,
    Watch,
    current_setting,
    form,
    setting_of,
    task_of,
)
from elasticd_planner.search.recompute import SelectiveRecompute, flagged
from elasticd_planner.search.refine import Refiner
from elasticd_planner.search.regroup import regrouped
from elasticd_planner.search.regular import RegularLayout
from elasticd_planner.search.sequence_parallel import sliced, where_needed
from elasticd_planner.search.task import (
    ENUMERATED,
    ENUMERATED_PACKED,
    ENUMERATED_SETTINGS,
    EXACT_DEVICES,
    Chained,
    Task,
    UnitProblem,
    alive,
    dealt,
    plan_of,
)
from elasticd_planner.spec.cluster import NORMAL, node_of, rate_of
from elasticd_planner.spec.plan import Pipeline, Plan, Prediction, Strategy
from elasticd_planner.spec.plan_summary import describe

#: Plans this close to the best (as a fraction) count as equal; the one that moves the fewest bytes is taken.
TOLERANCE = 0.005

#: Of near-equal plans, how many are placed and compared by bytes: of one combination, and in all.
COMPARED_EACH, COMPARED = 64, 400

#: How often a plan is made again with fewer members to spread replicas over.
AGAIN = 4

#: A plan's pipelines on other devices, where its step is faster there.
Swaps = dict[tuple[tuple[Strategy, ...], int | None], tuple[Pipeline, ...] | None]


def answer(problem: JobProblem, number: int = 0) -> JobAnswer:
    """The best plan of a problem of either kind, or why there is none."""
    return plan_mesh(problem, number) if isinstance(problem, MeshProblem) else plan(problem, number)


def plan(
    problem: Problem,
    number: int = 0,
    tolerance: float = TOLERANCE,
    *,
    like: Form | None = None,
    brief: bool = False,
    watch: Watch | None = None,
    known: list[Settings] | None = None,
) -> Answer:
    """The plan with the least step time, under the best of the settings that the problem's search space allows.

    Up to EXACT_DEVICES devices it is the best of all plans, beyond it the best that the search finds. Where
    stages may be interleaved, it is what the best plain plan becomes with interleaved stages (`interleave`);
    where pipelines may have lanes, pipelines of equal borders are joined (`lanes`). Where sequences are packed,
    it is the best for these (`packed`), of stages that are not interleaved. Of several modules it is the best
    that `modules` finds. Where a load of experts is known, they are placed by it (`experts`).

    Args:
        problem: a job's problem in seconds, or a `UnitProblem`.
        number: the number of the new plan.
        tolerance: plans within this fraction of the best count as equal to it if there is a current plan; the
            one that moves the fewest bytes from the current plan is taken.
        like: the form of a good plan: plans of this form are searched first, and no others if there is one.
        brief: the plan of that form is for comparison with others. More than EXACT_DEVICES devices are not
            exchanged any more, and no regular layouts are tried.
        watch: hears after each setting how far the search is, of a problem that is neither packed nor given.
        known: settings of this problem and others, with the results of their searches; its own are added.

    Returns:
        The plan with its prediction and reason, or a refusal that says what does not fit and what would help.
        Of a problem with a given plan that plan. Where its devices are not there, or have not the memory: a
        plan near to it, or a refusal if no other will do.
    """
    found = _unplaced(problem, number, tolerance, like=like, brief=brief, watch=watch, known=known)
    return found if problem.given is not None else experts.answer(problem, found, tolerance)


def _unplaced(
    problem: Problem,
    number: int,
    tolerance: float,
    *,
    like: Form | None,
    brief: bool,
    watch: Watch | None,
    known: list[Settings] | None,
) -> Answer:
    """The plan with experts divided by shares, of a search that knows no load of them."""

    def dense(view: Problem, near: Form | None) -> Answer:
        return _plain(view, number, tolerance, like=near, looked_at=ENUMERATED_PACKED)

    if problem.experts is not None:
        problem = msgspec.structs.replace(problem, experts=None)
    if problem.modules:
        problem, of_views = msgspec.structs.replace(problem, objective="step"), list[Settings]()

        def alone(view: Problem, near: Form | None, brief: bool) -> Answer:
            return plan(view, number, tolerance, like=near, brief=brief, known=of_views)

        def regular(view: Problem) -> list[Plan]:
            if view.packed is None:
                return _regular(view, of_views)
            return packed.regular_plans(view, dense, _regular, number)

        return modules.answer(problem, alone, regular, number, tolerance)
    if problem.packed is not None:
        return packed.answer(problem, dense, _regular, number, tolerance)
    if problem.given is not None:

        def as_given(given: Plan) -> Plan | str:
            alone = setting_of(given, problem).problem(problem)
            return Planner(problem=alone, number=number, tolerance=tolerance).as_given(given)

        return given_plan.answer(problem, as_given, lambda searched: plan(searched, number, tolerance))
    apart = with_current(problem, lanes.apart)
    plain = with_current(apart, interleave.plain)
    found = [_plain(plain, number, tolerance, like=like, brief=brief, watch=watch, known=known)]
    found += [_plain(other, number, tolerance) for other in interleave.other_numbers(apart, found[0])]
    return lanes.answer(problem, interleave.best(apart, found, tolerance))


def _settings(problem: Problem, known: list[Settings] | None) -> Settings:
    """The settings of a problem: those that are known, or new ones."""
    settings = next((settings for settings in known or () if settings.problem == problem), None) or Settings(
        problem
    )
    if known is not None and settings not in known:
        known.append(settings)
    return settings


def _regular(problem: Problem, known: list[Settings] | None = None) -> list[Plan]:
    """The plans of the best regular layouts, the quickest first."""
    settings = _settings(problem, known)
    if impossible_pin(task_of(settings.listed[0].problem(problem))):
        return []
    return [
        plan
        for setting, layouts in settings.regular.items()
        for plan in Planner(
            problem=setting.problem(problem),
            regular=tuple(layouts),
            refiners={None: settings.refiner(setting)},
        ).regular_plans
    ]


def _plain(
    problem: Problem,
    number: int,
    tolerance: float,
    *,
    like: Form | None = None,
    brief: bool = False,
    watch: Watch | None = None,
    looked_at: int = ENUMERATED,
    known: list[Settings] | None = None,
) -> Answer:
    """The plan of stages that are not interleaved. looked_at: what enumerations may look at."""
    if all(math.isinf(rate_of(problem.rates, device.name)) for device in problem.cluster.devices):
        return Answer(plan=None, refusal="no device to plan for: every device is dead; add a node")
    settings = _settings(problem, known)
    brief &= like is not None and len(settings.listed) == 1 and len(alive(problem)) > EXACT_DEVICES
    wrong = impossible_pin(task_of(settings.listed[0].problem(problem)))
    if wrong:
        return Answer(plan=None, refusal=wrong)
    slack = tolerance if problem.current is not None else 0.0
    made: list[_Made] = []
    refused: list[Answer] = []
    # What enumerations may still look at, of all settings together.
    left = [looked_at if len(settings.listed) == 1 else min(looked_at, ENUMERATED_SETTINGS)]
    refiners: dict[Setting, dict[int | None, Refiner]] = {}
    swaps: dict[Setting, Swaps] = {}

    def evaluate(setting: Setting, like: Form | None) -> tuple[float, Form | None]:
        given = setting.problem(problem)
        planning = Planner(
            problem=given,
            number=number,
            tolerance=tolerance,
            like=like,
            known=_least(made),
            left=left,
            regular=() if brief else tuple(settings.regular.get(setting, ())),
            brief=brief,
            refiners=refiners.setdefault(setting, {None: settings.refiner(setting)}),
            swaps=swaps.setdefault(setting, {}),
        )
        planning, answer = planning.fitting()
        if answer.plan is None or answer.plan.prediction is None:
            refused.append(answer)
            return math.inf, None
        seconds = answer.plan.prediction.step_seconds
        moved = planning.distance(answer.plan)[:2] if problem.current is not None else (0, False)
        listed = settings.listed.index(setting)
        made.append(_Made(answer=answer, seconds=seconds, moved=moved, place=listed))
        return seconds, form(answer.plan)

    walk = OptionOrder(settings, evaluate, slack=slack, watch=watch)
    if len(settings.listed) == 1:
        evaluate(settings.listed[0], like)
    elif len(alive(problem)) > EXACT_DEVICES or not walk.every(lambda: left[0] <= 0):
        walk.some()
    tried = sum(answer.candidates for answer in (*refused, *(one.answer for one in made)))
    running = current_setting(problem)
    now = Planner(problem=running.problem(problem)).now() if running is not None else None
    if not made:
        return Answer.refused(settings.refusal(refused), current_seconds=now, candidates=tried)
    limit = _least(made) * (1 + slack) * (1 + EQUAL)
    near = [one for one in made if one.seconds <= limit]
    chosen = min(near, key=lambda one: (one.moved, round(one.seconds, 12), one.place))
    return msgspec.structs.replace(settings.closed(chosen.answer, tried), current_seconds=now)


@dataclass(frozen=True, kw_only=True)
class _Made:
    """The best plan of one setting: what it moves, and the setting's place in the order of preference."""

    answer: Answer
    seconds: float
    moved: tuple[int, bool]
    place: int


def _least(made: Sequence[_Made]) -> float:
    return min((one.seconds for one in made), default=math.inf)


@dataclass(frozen=True, kw_only=True)
class Planner:
    """One problem being planned. known: seconds of a plan of another setting, which one of this must beat.
    left: what enumerations may still look at, in one place for all settings. brief: devices are not exchanged.
    refiners: by `members`, those of all searches of one setting. swaps: what these found on other devices, by
    plan and `members`."""

    problem: Problem
    number: int = 0
    tolerance: float = TOLERANCE
    members: int | None = None
    like: Form | None = None
    known: float = math.inf
    left: list[int] = field(default_factory=lambda: [ENUMERATED])
    regular: tuple[RegularLayout, ...] = ()
    brief: bool = False
    refiners: dict[int | None, Refiner] = field(default_factory=dict)
    swaps: Swaps = field(default_factory=dict)

    def with_less(self, answer: Answer, pipelines: tuple[Pipeline, ...]) -> Answer:
        """The answer with the same layers under less recomputation or sequence parallelism, unless that is
        slower."""
        assert answer.plan is not None
        fewer = self.finished(self.made(pipelines, chosen=True))
        if self.task.seconds(fewer) > self.task.seconds(answer.plan) * (1 + EQUAL):
            return answer
        return msgspec.structs.replace(answer, plan=fewer)

    def fitting(self) -> tuple[Planner, Answer]:
        """The answer, with recomputation and sequence parallelism off where memory allows; made again with
        fewer members to spread replicas over where it leaves so many devices idle that these do not fit."""
        planning = self
        few = len(alive(self.problem)) <= EXACT_DEVICES and not self.task.crosses_nodes
        for _ in range(AGAIN):
            answer = planning.answer() if few and self.left[0] > 0 else planning.wide()
            if answer.plan is None:
                return planning, answer
            space = self.problem.search_space
            if space.recompute is True:
                kept = SelectiveRecompute(task=planning.task).pipelines(answer.plan.pipelines)
                answer = planning.with_less(answer, kept)
            if space.sequence_parallel is True:
                assert answer.plan is not None
                cost = planning.task.cost.under(answer.plan)
                kept = where_needed(answer.plan.pipelines, cost, self.problem.cluster)
                answer = planning.with_less(answer, kept)
            assert answer.plan is not None
            if planning.fits(answer.plan):
                better = answer.plan if self.brief else planning.swapped(answer.plan)
                return planning, msgspec.structs.replace(answer, plan=better)
            planning = replace(planning, members=len(answer.plan.members))
        refusal = Refusal("does not fit: replicas of the state find no room beside it; add a node", "memory")
        return planning, Answer.refused(
            refusal,
            current_seconds=answer.current_seconds,
            candidates=answer.candidates,
        )

    def swapped(self, chosen: Plan) -> Plan:
        """The chosen plan on other devices where its step is faster there, with a current plan by more than the
        tolerance; else as it is."""
        key = chosen.strategies, self.members
        if key not in self.swaps:
            self.swaps[key] = swapped(self.task, chosen, self.known)
        pipelines = self.swaps[key]
        if pipelines is None:
            return chosen
        better = self.finished(self.made(pipelines, chosen=True))
        limit = self.task.seconds(chosen) * (1 - EQUAL)
        faster = self.task.seconds(better) * (1 + self.slack) < limit
        return better if faster and self.fits(better) else chosen

    def answer(self) -> Answer:
        """The answer for few devices: of all plans, or of those that the search finds too, where there are too
        many to look at all."""
        current = self.current
        options = [current] if current is not None and self.fits(current) else []
        options += self.regular_plans
        known = min(map(self.task.seconds, options), default=math.inf)
        exact = ExhaustiveSearch(self.task, slack=self.slack, best=min(known, self.known), budget=self.left[0])
        combinations = exact.run()
        self.left[0] -= exact.spent
        found = [*islice(self.candidates(exact, combinations), COMPARED), *self.regular_plans]
        if not exact.complete:
            searched = self.wide().plan
            found += [searched] if searched is not None else []
        proved = exact.best if exact.complete and self._proves(exact) else None
        return self._answered(found, exact.candidates + len(found), proved)

    def _proves(self, exact: ExhaustiveSearch) -> bool:
        """Returns True if an enumeration proves that no plan is better than its best.

        A table's seconds are those of the formula. In the schedule's time it must have looked at all layers and
        shares, and no stage may leave out afterwards the recomputation or sequence parallelism that it counted
        with.
        """
        space, cost = self.problem.search_space, self.task.cost
        if isinstance(cost, TableCost):
            return True
        alike = len({rate_of(self.problem.rates, device.name) for device in alive(self.problem)}) == 1
        selective = True in (space.recompute, space.sequence_parallel)
        exactly = cost.timing.hidden > 0 and (alike or cost.exact_shares)
        return exact.proved and exactly and not selective

    @cached_property
    def regular_plans(self) -> list[Plan]:
        """Plans of the regular layouts, in the best order of stages and with the best layers."""
        listed = (self.refiner.pipelines(layout.chains) for layout in self.regular)
        plans = (self.made(pipelines) for pipelines in listed if pipelines is not None)
        return [plan for plan in plans if self.fits(plan)]

    @cached_property
    def task(self) -> Task:
        """The problem in the terms of the search."""
        return task_of(self.problem, members=self.members)

    @property
    def refiner(self) -> Refiner:
        """The refiner of this setting's pipelines, with the results of earlier searches."""
        if self.members not in self.refiners:
            self.refiners[self.members] = Refiner(self.task)
        return self.refiners[self.members]

    @cached_property
    def search(self) -> LargeSearch:
        """The search for any number of devices, which has the lower bound too."""
        return LargeSearch(self.task)

    def wide(self) -> Answer:
        """The answer for any number of devices."""
        search = self.search
        forms = tuple(dict.fromkeys(layout.form for layout in self.regular))
        found = search.run(self.like, brief=self.like is not None, forms=forms)
        finisher = self.refiner
        listed = [finisher.pipelines(one.pipelines) for one in search.near()] if found is not None else []
        options = list(self._kept(self.current, finisher)) if self.current is not None else []
        listed += [finisher.pipelines(layout.chains) for layout in self.regular]
        for best in (pipelines for pipelines in listed if pipelines is not None):
            near = nearest(best, search.kinds, self.problem.profile, self.problem.current)
            options += [self.made(near)]
        options += self._regrouped(options)
        return self._answered(options, search.candidates)

    def _regrouped(self, options: Sequence[Plan]) -> list[Plan]:
        """The best of these plans in other TP groups, where devices are unlike and that is faster; not while a
        setting is only tried."""
        unlike = any(rate_of(self.problem.rates, device.name) > NORMAL for device in alive(self.problem))
        if self.like is not None or not options or not unlike:
            return []

        def step_seconds(pipelines: Sequence[Pipeline]) -> float:
            plan = self.made(pipelines)
            return self.task.seconds(plan) if self.fits(plan) else math.inf

        best = min(options, key=self.task.seconds)
        pipelines = regrouped(self.task, self.refiner, best.pipelines, step_seconds)
        return [self.made(pipelines)] if pipelines is not None else []

    def _answered(self, options: Sequence[Plan], candidates: int, proved: float | None = None) -> Answer:
        """The best of these plans; of those that are near it the one that moves least from the current plan. Of
        no plans no answer, and `Settings.refusal` says why. `proved`: as in `finished`."""
        now = self.now()
        if not options:
            return Answer(plan=None, current_seconds=now, candidates=candidates)
        limit = min(map(self.task.seconds, options)) * (1 + self.slack) * (1 + EQUAL)
        close = [option for option in options if self.task.seconds(option) <= limit]
        chosen = min(close, key=self.distance) if self.current is not None else close[0]
        return Answer(plan=self.finished(chosen, proved), current_seconds=now, candidates=candidates)

    def _kept(self, current: Plan, finisher: Refiner) -> Iterator[Plan]:
        """The current plan's groups in their places: as they are, or with shares by their rates; with other
        micro-batches, and with other layers."""

        def plans(base: Plan, *, layers: bool = True) -> Iterator[Plan]:
            chains = [Chained(groups=p.stages, micro_batches=p.micro_batches) for p in base.pipelines]
            layered = finisher.pipelines(chains, keep=True) if layers else None
            made = [base, self.split_again(base), self.made(layered) if layered is not None else None]
            yield from (plan for plan in made if plan is not None and self.fits(plan))

        yield from plans(current)
        if isinstance(self.problem, UnitProblem):
            return  # its shares are of few kinds: equal, or in 64ths
        job, seen = self.problem, [current]
        for part in (*WHOLE, *BETWEEN):
            other = self.made(rebalance_shares(current.pipelines, job.rates, job.profile, part))
            if other not in seen:
                seen.append(other)
                yield from plans(other, layers=part in WHOLE)
                loose = self.made(relax_shares(other.pipelines, job))
                if job.profile.uneven and loose != other:
                    yield from plans(loose, layers=False)

    @property
    def slack(self) -> float:
        """How much worse than the best, as a fraction, a plan may be that moves fewer bytes."""
        return self.tolerance if self.current is not None else 0.0

    @cached_property
    def current(self) -> Plan | None:
        """The current plan under this problem's setting, if it is one of this problem: its members alive,
        batch, layers and number of pipelines equal."""
        plan = self.problem.current
        if plan is None or plan.pipelines[0].layers != self.problem.profile.layers:
            return None
        if self.task.fixed_dp not in (None, len(plan.pipelines)):
            return None
        usable = {device.name for device in alive(self.problem)}
        same = (plan.global_batch, plan.micro_batch) == (self.problem.global_batch, self.problem.micro_batch)
        if not (same and usable.issuperset(plan.members)):
            return None
        if not self._has_pinned_sizes(plan):
            return None
        space, pipelines = self.problem.search_space, plan.pipelines
        pipelines = pipelines if space.recompute else flagged(pipelines, on=False)
        return self.made(pipelines if space.sequence_parallel else sliced(pipelines, on=False))

    def _has_pinned_sizes(self, plan: Plan) -> bool:
        """Whether TP groups have allowed sizes, and on nodes of normal devices the pinned one."""
        stages = [stage for _, _, stage in plan.walk()]
        widths = {len(stage.devices) for stage in stages}
        return widths <= set(self.task.cost.widths(max(widths))) and all(
            self.task.may_have(len(stage.devices), map(node_of, stage.devices)) for stage in stages
        )

    def now(self) -> float | None:
        """Seconds of the current plan as it is, if it is one of this problem, and fits."""
        plan = self.problem.current
        if plan is None or self.current is None or not self.fits(plan):
            return None
        return self.task.seconds(plan)

    def candidates(self, exact: ExhaustiveSearch, combinations: Sequence[Combination]) -> Iterator[Plan]:
        """Plans near the best: first those made from the current one, which move the least."""
        current = self.current
        if current is not None and self.fits(current):
            yield current
            split = self.split_again(current)
            if split is not None and self.fits(split):
                yield split
        limit = exact.best * (1 + self.slack) * (1 + EQUAL)
        for combination in combinations:
            ranked = [
                exact.options(part, m, limit - combination.after)
                for part, m in zip(combination.parts, combination.micro_batches, strict=True)
            ]
            for options in islice(product(*ranked), COMPARED_EACH):
                given = (options, combination.micro_batches, exact.alike)
                yield self.made(place(*given, self.problem.profile, self.problem.current))

    def split_again(self, plan: Plan) -> Plan | None:
        """The same stages with the micro-batches divided anew: nothing moves."""
        curves, known = [], dict[tuple[bytes, ...], Floats]()
        pipelines = plan.pipelines
        for pipeline in pipelines:
            times = stage_times(pipeline, self.problem.cluster, self.problem.rates, self.task.cost)
            key = tuple(part.tobytes() for part in (times.forward, times.backward, times.boundary))
            if key not in known:  # most pipelines of a large job are alike
                known[key] = self.task.cost.timing.curve(times, self.task.micro_batches)
            curves.append(known[key])
        least = [len(pipeline.stages) for pipeline in pipelines] if self.task.deep else None
        given = split_micro_batches(curves, self.task.micro_batches, least)
        return None if given is None else self.made(dealt(pipelines, given))

    def made(self, pipelines: Sequence[Pipeline], *, chosen: bool = False) -> Plan:
        """A plan of these pipelines. Where the setting is to recompute, all their stages do if none does,
        unless that was `chosen`; likewise with sequence parallelism."""
        job = self.problem
        pipelines, space = reorder_tp_ranks(pipelines, job), job.search_space
        if space.recompute and not chosen and not any(s.recompute for p in pipelines for s in p.stages):
            pipelines = flagged(pipelines, on=True)
        has = any(s.sequence_parallel for p in pipelines for s in p.stages)
        if space.sequence_parallel == "always" or (space.sequence_parallel and not chosen and not has):
            pipelines = sliced(pipelines, on=True)
        return plan_of(job, pipelines, self.number)

    def fits(self, plan: Plan) -> bool:
        """Whether every member's memory suffices."""
        return fits(memory_by_device(plan, self.task.cost), self.problem.cluster)

    def distance(self, plan: Plan) -> tuple[int, bool, float]:
        """What near-equal plans are compared by: bytes to move, then whether anything changes, then seconds."""
        current = self.problem.current
        moved = bytes_to_move(self.problem.profile, current, plan)
        same = current is not None and plan.pipelines == current.pipelines
        return moved, not same, round(self.task.seconds(plan), 9)

    def finished(self, chosen: Plan, proved: float | None = None) -> Plan:
        """The chosen plan with its number, prediction and reason. `proved`: seconds that no plan beats, where
        an enumeration says so."""
        made = self.made(chosen.pipelines, chosen=True).replace(number=self.number)
        return self._predicted(made, describe(made, self.problem.rates, self.problem.packed), proved)

    def as_given(self, given: Plan) -> Plan | str:
        """A plan from elsewhere as it is, with a number, this problem's idle devices, prediction and reason; or
        where memory is short for it."""
        idle = tuple(d.name for d in self.problem.cluster.devices if d.name not in set(given.members))
        made = with_carriers(given.replace(number=self.number, idle=idle, binding={}))
        made = self._predicted(
            made, f"given by the job: {describe(made, self.problem.rates, self.problem.packed)}"
        )
        assert made.prediction is not None
        return given_plan.lacking(made.prediction.memory, self.problem.cluster) or made

    def _predicted(self, made: Plan, reason: str, proved: float | None = None) -> Plan:
        seconds = self.task.seconds(made)
        prediction = Prediction(
            step_seconds=seconds,
            bound_seconds=min(self.lower(seconds) if proved is None else proved, seconds),
            memory=memory_by_device(made, self.task.cost),
        )
        return made.replace(prediction=prediction, reason=reason)

    def lower(self, known: float) -> float:
        """Seconds that no plan of this setting can beat. `known`: those of a plan."""
        search = self.search
        if True in (self.problem.search_space.recompute, self.problem.search_space.sequence_parallel):
            search = LargeSearch(task_of(self.problem, members=self.members, hopeful=True))
        return max(search.task.work_bound, search.lower(known))
