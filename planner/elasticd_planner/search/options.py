"""Search options: the settings a search may choose besides the layout, and the order in which it tries them.

A setting is a micro-batch size, a state policy (ZeRO), recomputation, sequence parallelism and, with ZeRO, the
number of pipelines, on which memory depends. Each setting is a search of its own with its own cost model.
Settings are listed with the simplest first.

Order of trial. Up to EXACT_DEVICES devices every setting whose lower bound is below the best plan so far is
enumerated, until the budget of all enumerations is spent. Otherwise one thing is changed at a time, since
settings are many and a search is long: the running plan's setting first, then micro-batch sizes, recomputation
and sequence parallelism under the preferred state policy, then the other policies, then the former once more.
With ZeRO the number of pipelines climbs from that of the best plan so far as long as that helps. Each setting
but the first is searched briefly, near the best plan's form; the winner is searched thoroughly at the end, of
few devices also the next best. Every tried setting yields a real plan. The order is deterministic: ties go to
the setting listed first.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import msgspec

from elasticd_planner.cost.model import CostModel
from elasticd_planner.cost.pipeline_time import Steady
from elasticd_planner.cost.profile_cost import ProfileCost
from elasticd_planner.numeric import EQUAL
from elasticd_planner.problem import Answer, Problem, Refusal, SearchSpace
from elasticd_planner.search.infeasible import explain_infeasible, most_copies, shortage
from elasticd_planner.search.large import SMALL, LargeSearch
from elasticd_planner.search.refine import Refiner
from elasticd_planner.search.regular import NEAR, RegularLayout, regular_layouts, regular_seconds
from elasticd_planner.search.task import Task, UnitProblem, alive
from elasticd_planner.spec.cluster import NORMAL, rate_of
from elasticd_planner.spec.plan import Plan, StatePolicy
from elasticd_planner.value import Value

#: Up to this many devices every number of pipelines is a setting; above, numbers that divide the devices about
#: evenly.
ALL_NUMBERS = 12

#: So many settings of regular layouts are searched.
REGULAR = 6

#: A setting that is this much slower (as a fraction) when it is searched briefly may turn out to be the best:
#: of 16 drawn healthy jobs one whose plan was 0.9 % slower became 0.1 % quicker.
NEARLY = 0.01

#: A plan's number of pipelines, and the TP size of most of its devices.
Form = tuple[int, int]

#: Samples of a micro-batch, whether stages recompute, whether they have sequence parallelism.
Way = tuple[int, bool, bool]


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One choice of what a plan is made under. pipelines: None where the search is free to choose."""

    micro_batch: int
    state: StatePolicy
    recompute: bool
    sequence_parallel: bool
    pipelines: int | None

    @property
    def way(self) -> Way:
        """What of it is tried together under each state policy."""
        return self.micro_batch, self.recompute, self.sequence_parallel

    def problem(self, problem: Problem) -> Problem:
        """The problem with this setting alone."""
        profile = problem.profile
        if self.micro_batch != problem.micro_batch:
            profile = profile.sized(profile.tokens / problem.micro_batch * self.micro_batch)
        search_space = SearchSpace(
            states=(self.state,),
            recompute=self.recompute and problem.search_space.recompute,
            sequence_parallel=self.sequence_parallel and problem.search_space.sequence_parallel,
            fixed_tp=problem.search_space.fixed_tp,
            fixed_dp=self.pipelines,
        )
        return msgspec.structs.replace(
            problem, profile=profile, micro_batch=self.micro_batch, search_space=search_space
        )

    def __str__(self) -> str:
        words = [f"micro-batches of {self.micro_batch}"]
        if self.state.zero:
            count = self.state.replicas or 0
            words.append(f"ZeRO {self.state.zero} with {count} replica{'s' if count > 1 else ''}")
        if self.recompute:
            words.append("recomputation")
        if self.sequence_parallel:
            words.append("sequence parallelism")
        if self.pipelines is not None:
            words.append(f"{self.pipelines} pipeline{'s' if self.pipelines > 1 else ''}")
        return ", ".join(words)


def task_of(problem: Problem, *, members: int | None = None, hopeful: bool = False) -> Task:
    """What the search is given of a problem with one setting. members: devices that replicas are spread over
    (None: all that are alive). hopeful: for bounds, with the memory of recomputation and sequence parallelism
    and the time without, since stages that have room leave them out."""
    search_space = problem.search_space
    profile = problem.profile
    if hopeful and search_space.recompute is True:
        profile = msgspec.structs.replace(profile, recompute_factor=1.0)
    micro_batches = problem.global_batch // problem.micro_batch
    units = isinstance(problem, UnitProblem)
    cost: CostModel
    if isinstance(problem, UnitProblem):
        cost = problem.table
    else:
        cost = ProfileCost(
            profile,
            state=search_space.states[0],
            recompute=bool(search_space.recompute),
            pipelines=search_space.fixed_dp or 1,
            members=members or len(alive(problem)),
            near=problem.cluster.within or problem.cluster.inside,
            sequence_parallel=bool(search_space.sequence_parallel),
            hopeful=hopeful and search_space.sequence_parallel is True,
        )
    return Task(
        cluster=problem.cluster,
        rates=problem.rates,
        cost=cost if problem.objective == "step" else cost.timed(Steady()),
        layers=profile.layers,
        micro_batches=micro_batches,
        deep=units,
        fixed_tp=search_space.fixed_tp,
        fixed_dp=search_space.fixed_dp,
    )


def listed(problem: Problem) -> Iterator[Setting]:
    """Every setting that the problem's search space allows, simpler ones first."""
    search_space = problem.search_space
    again, sliced = (
        (False, True) if may is True else (bool(may),)
        for may in (search_space.recompute, search_space.sequence_parallel)
    )
    plain = any(not state.zero for state in search_space.states)
    for recompute, slices, state in product(again, sliced, search_space.states):
        for size in search_space.micro_batches or (problem.micro_batch,):
            for number in _numbers(problem, size, state, plain):
                yield Setting(
                    micro_batch=size,
                    state=state,
                    recompute=recompute,
                    sequence_parallel=slices,
                    pipelines=number,
                )


def current_setting(problem: Problem) -> Setting | None:
    """What the current plan was made under; None where it is not of this problem's batch."""
    plan = problem.current
    if plan is None or plan.global_batch != problem.global_batch:
        return None
    return setting_of(plan, problem)


def setting_of(plan: Plan, problem: Problem) -> Setting:
    """What a plan of this problem's batch is made under."""
    return Setting(
        micro_batch=plan.micro_batch,
        state=plan.state,
        recompute=any(stage.recompute for _, _, stage in plan.walk()),
        sequence_parallel=problem.search_space.sequence_parallel == "always"
        or any(stage.sequence_parallel for _, _, stage in plan.walk()),
        pipelines=len(plan.by_lane) if plan.state.zero else problem.search_space.fixed_dp,
    )


def _numbers(problem: Problem, size: int, state: StatePolicy, plain: bool) -> Iterable[int | None]:
    """Numbers of pipelines that are settings of their own: with ZeRO, since memory depends on them. One
    pipeline with one replica is what there is without ZeRO."""
    if problem.search_space.fixed_dp is not None or not state.zero:
        return (problem.search_space.fixed_dp,)
    devices = len(alive(problem))
    most = min(devices, problem.global_batch // size)
    first = 2 if plain and state.replicas == 1 else 1
    if devices <= ALL_NUMBERS:
        return range(first, most + 1)
    parts = {base << k for base in (1, 3) for k in range(devices.bit_length())}
    return sorted({devices // part for part in parts if first <= devices // part <= most})


class Settings:
    """The settings of a problem and their bounds."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.listed = tuple(listed(problem))
        self._searches: dict[Way, LargeSearch] = {}
        self._bounds: dict[Setting, float] = {}
        self._refiners: dict[Setting, Refiner] = {}
        self.slow = any(rate_of(problem.rates, device.name) > NORMAL for device in alive(problem))

    @cached_property
    def regular(self) -> dict[Setting, list[RegularLayout]]:
        """The best regular layouts by setting, the setting of the quickest first."""
        layouts: dict[Setting, list[RegularLayout]] = {}
        refiners = [self.refiner(setting) for setting in self.listed]
        for layout in regular_layouts(refiners, [setting.way for setting in self.listed]):
            layouts.setdefault(self.listed[layout.setting], []).append(layout)
        return layouts

    def healthy(self, limit: float) -> dict[Setting, float]:
        """Seconds of the quickest regular layout of each setting if no device were slow, with the memory of
        recomputation and sequence parallelism and the time without; the limit where none takes less."""
        rates = {name: rate for name, rate in self.problem.rates.items() if math.isinf(rate)}
        problem = msgspec.structs.replace(self.problem, rates=rates)
        tasks = (task_of(setting.problem(problem), hopeful=True) for setting in self.listed)
        refiners = [Refiner(task) for task in tasks]
        seconds = regular_seconds(refiners, [setting.way for setting in self.listed], limit)
        return dict(zip(self.listed, seconds, strict=True))

    def refiner(self, setting: Setting) -> Refiner:
        """The refiner of a setting's pipelines, with the results of all its searches."""
        if setting not in self._refiners:
            self._refiners[setting] = Refiner(task_of(setting.problem(self.problem)))
        return self._refiners[setting]

    def bound(self, setting: Setting) -> float:
        """Seconds that no plan of a setting can beat; inf where its pipelines cannot hold the model at all."""
        return self._bound(setting, math.inf)

    def _bound(self, setting: Setting, known: float) -> float:
        """The same; where it is no less than known seconds, some that are no less either."""
        if setting not in self._bounds:
            bound = self._time_bound(setting)
            if bound >= known:
                return bound
            number = setting.pipelines
            room = number is None or number <= most_copies(self._hopeful(setting))
            self._bounds[setting] = bound if room else math.inf
        return self._bounds[setting]

    def _hopeful(self, setting: Setting) -> Task:
        return task_of(setting.problem(self.problem), hopeful=True)

    def _time_bound(self, setting: Setting) -> float:
        """Whatever memory asks: by groups (`LargeSearch.bound`), by all work over all speed, and by the way of
        one micro-batch through the quickest group that there is."""
        task = self._hopeful(setting)
        if setting.way not in self._searches:
            self._searches[setting.way] = LargeSearch(task)
        wide = self._searches[setting.way]
        paces = [pace for kind in wide.kinds for pace, groups, _ in kind.paces if groups == 1]
        if not paces:
            return math.inf  # no TP group of an allowed size can be made
        quickest = max(paces)
        if setting.pipelines is None:
            low, numbers = LargeSearch(task).lower(), [1, min(wide.devices, task.micro_batches)]
        else:
            low, numbers = wide.bound(setting.pipelines, task.fixed_tp), [setting.pipelines]
        after = min(
            task.cost.after(d, max(1, wide.devices // d), link) for d in numbers for link in task.cluster.links
        )
        low += after if setting.pipelines is not None else 0.0
        return max(low, task.work_bound, task.layers / quickest + after)

    def closed(self, answer: Answer, tried: int) -> Answer:
        """The answer with the bound over all settings."""
        plan = answer.plan
        if plan is None or plan.prediction is None or len(self.listed) == 1:
            return answer
        seconds = plan.prediction.step_seconds
        least = seconds
        for setting in self.listed:
            least = min(least, self._bound(setting, least))
        made = plan.replace(prediction=msgspec.structs.replace(plan.prediction, bound_seconds=least))
        return msgspec.structs.replace(answer, plan=made, candidates=tried)

    def refusal(self, refused: Sequence[Answer]) -> Refusal:
        """Why no setting has a plan: of those that ask the least memory the one that comes nearest."""
        if len(self.listed) == 1 and refused:
            task = task_of(self.listed[0].problem(self.problem))
            own = Refusal(refused[0].refusal, refused[0].cause)
            return own if own.text else explain_infeasible(task, micro_batch=self.listed[0].micro_batch)
        size = min(setting.micro_batch for setting in self.listed)
        again = any(setting.recompute for setting in self.listed)
        sliced = any(setting.sequence_parallel for setting in self.listed)
        fewest = min(setting.pipelines or 1 for setting in self.listed)
        found = []
        for setting in self.listed:
            lean = setting.way == (size, again, sliced)
            if lean and (setting.pipelines or 1) == fewest:
                problem = setting.problem(self.problem)
                short = shortage(task_of(problem))
                found += [(*short, str(setting), setting)] if short is not None else []
        nearest = min(found, key=lambda entry: entry[:3])[3] if found else self.listed[0]
        task = task_of(nearest.problem(self.problem))
        return explain_infeasible(task, setting=str(nearest))


class SearchProgress(Value, frozen=True, kw_only=True):
    """The state of a search that goes on."""

    best: float  # seconds (or units) of a step under the best plan so far; inf: none was found yet
    bound: float  # seconds that no plan can beat
    tried: int  # settings that were searched
    settings: int  # that there are; those that cannot beat the best plan are left out in the end


#: Hears of a search, after each of its settings.
Watch = Callable[[SearchProgress], None]

#: Searches a setting (like a plan of this form, or thoroughly) and says its seconds, inf where there is no
#: plan, and the form of its plan.
Evaluate = Callable[[Setting, Form | None], tuple[float, Form | None]]


def form(plan: Plan) -> Form:
    """How many pipelines a plan has, and the size of most of its devices' groups."""
    pipelines = plan.by_lane
    sizes = Counter(len(stage.devices) for p in pipelines for stage in p.stages for _ in stage.devices)
    return len(pipelines), sizes.most_common(1)[0][0]


class OptionOrder:
    """One search over settings. slack: how much worse than the best (as a fraction) a plan may be and still
    count. watch: hears how far it is."""

    def __init__(
        self, settings: Settings, evaluate: Evaluate, *, slack: float, watch: Watch | None = None
    ) -> None:
        self.settings, self._evaluate, self.slack, self._watch = settings, evaluate, slack, watch
        self._known: dict[Setting, float] = {}
        self.best: tuple[float, Setting] | None = None
        self.form: Form | None = None
        self._healthy: dict[Setting, float] | None = None  # seconds without slow devices, by setting

    def every(self, ended: Callable[[], bool]) -> bool:
        """All settings, best bound first, but for those that cannot beat the best. Whether these were all:
        not where it `ended` before."""
        listed = self.settings.listed
        ranked = sorted((self.settings.bound(setting), i) for i, setting in enumerate(listed))
        for bound, index in ranked:
            if self._over(bound):
                return True
            if ended():
                return False
            self._try(listed[index], None)
        return True

    def some(self) -> None:
        """The settings of the best regular layouts; one thing at a time from there, if a device is slow or none
        of these layouts fits."""
        for setting in list(self.settings.regular)[:REGULAR]:
            self._try(setting, self.settings.regular[setting][0].form)
        if self.best is None or self.settings.slow:
            self._climb()
        for setting in self._finalists():
            del self._known[setting]
            self._try(setting, None)

    def _finalists(self) -> list[Setting]:
        """The best setting; of few devices, where groups of mixed sizes change most, also the next best with
        another number of pipelines, where it is near."""
        if self.best is None:
            return []
        seconds, best = self.best
        limit = seconds * (1 + NEARLY) if len(alive(self.settings.problem)) <= SMALL else 0.0
        near = [setting for setting in self._known if self._known[setting] <= limit]
        others = [setting for setting in near if setting.pipelines != best.pipelines]
        return [best, *sorted(others, key=self._known.__getitem__)[:1]]

    def _climb(self) -> None:
        """One thing at a time."""
        listed = self.settings.listed
        current = current_setting(self.settings.problem)
        if current in listed:
            self._try(current, None)
        states = tuple(dict.fromkeys(setting.state for setting in listed))
        ways = tuple(dict.fromkeys(setting.way for setting in listed))
        bounds = {way: min(self.settings.bound(s) for s in self._of(way, states[0])) for way in ways}
        ranked = sorted(ways, key=lambda way: (bounds[way], ways.index(way)))
        for way in ranked:
            self._policy(way, states[0])
        chosen = self._way(ways)
        for state in states[1:]:
            self._policy(chosen, state)
        if len(states) > 1 and self.best is not None:
            state = self.best[1].state
            near = [way for way in ranked if chosen[0] <= 2 * way[0] <= 4 * chosen[0]]
            for way in near:
                self._policy(way, state)

    def _way(self, ways: Sequence[Way]) -> Way:
        """Micro-batches and recomputation of the best plan; where none fits, what asks the least memory."""
        if self.best is not None:
            return self.best[1].way
        return min(way[0] for way in ways), any(way[1] for way in ways), any(way[2] for way in ways)

    def _of(self, way: Way, state: StatePolicy) -> list[Setting]:
        return [s for s in self.settings.listed if (s.way, s.state) == (way, state)]

    def _policy(self, way: Way, state: StatePolicy) -> None:
        """The settings of one policy: the number of pipelines climbs from that of the best plan."""
        listed = [
            setting
            for setting in self._of(way, state)
            if self._promising(setting) and math.isfinite(self.settings.bound(setting))
        ]
        if not listed:
            return
        wanted = self.form[0] if self.form is not None else 1
        start = min(range(len(listed)), key=lambda i: (abs((listed[i].pipelines or wanted) - wanted), i))
        now = self._try(listed[start], self.form)
        for step in (1, -1):
            at, seconds = start + step, now
            while 0 <= at < len(listed):
                found = self._try(listed[at], self.form)
                if found >= seconds and math.isfinite(seconds):
                    break
                at, seconds = at + step, found

    def _promising(self, setting: Setting) -> bool:
        """Returns whether to search a setting, by the regular layouts that it would have if no device were
        slow: not where they take longer than the best plan does here, by more than `NEAR`; nor one that saves
        memory where they do as well without. Where the TP size is given, the groups of nodes with slow devices
        may have others, so that regular layouts say nothing of the first."""
        if self.best is None:
            return True
        limit = self.best[0] * (1 + max(NEAR, self.slack))
        if self._healthy is None:
            self._healthy = self.settings.healthy(limit)
        seconds = self._healthy[setting]
        if seconds >= limit and not self.settings.problem.search_space.fixed_tp:
            return False
        frugal = setting.recompute, setting.sequence_parallel
        return not any(
            self._healthy[other] <= seconds * (1 + EQUAL) and math.isfinite(self._known[other])
            for other in self._known
            if (other.micro_batch, other.state, other.pipelines)
            == (setting.micro_batch, setting.state, setting.pipelines)
            and (other.recompute, other.sequence_parallel) < frugal
        )

    def _over(self, bound: float) -> bool:
        """Whether a setting of this bound need not be tried."""
        if not math.isfinite(bound):
            return True
        return self.best is not None and bound > self.best[0] * (1 + self.slack) * (1 + EQUAL)

    def _try(self, setting: Setting, like: Form | None) -> float:
        if setting in self._known:
            return self._known[setting]
        if self._over(self.settings.bound(setting)):
            return math.inf
        if like is not None and setting.pipelines is not None:
            like = (setting.pipelines, like[1])
        seconds, found = self._evaluate(setting, like)
        self._known[setting] = seconds
        if math.isfinite(seconds) and (self.best is None or seconds < self.best[0] * (1 - EQUAL)):
            self.best, self.form = (seconds, setting), found
        if self._watch is not None:
            self._watch(self._progress())
        return seconds

    def _progress(self) -> SearchProgress:
        best = self.best[0] if self.best is not None else math.inf
        listed = self.settings.listed
        bound = min(best, *map(self.settings.bound, listed))
        return SearchProgress(best=best, bound=bound, tried=len(self._known), settings=len(listed))
