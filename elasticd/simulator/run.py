"""One simulation: the cluster comes up, the job trains, the script happens, until it is over."""

from __future__ import annotations

from collections.abc import Callable

from elasticd_planner.cluster import Device
from elasticd_planner.profiled import ProfileCost

from elasticd.machines.job.effects import Note
from elasticd.machines.job.state import OVER, Settings
from elasticd.messages import Down, ToLeader
from elasticd.records import JobSpec, Keys
from elasticd.simulator.baselines import baselines
from elasticd.simulator.engine import FAULT, Engine
from elasticd.simulator.faults import Fault
from elasticd.simulator.gang import Gang, whole_steps
from elasticd.simulator.leader import Leader
from elasticd.simulator.nodes import Node, read_for_all
from elasticd.simulator.planning import Planner
from elasticd.simulator.record import Happening, Outcome, Stretch, Totals, rounded
from elasticd.simulator.scenario import Scenario
from elasticd.simulator.truth import Floats, Truth
from elasticd.store.memory import MemoryServer, MemoryStore

JOB = "job"
KEYS = Keys(cluster="simulated")

#: Seconds that a dead leader's key outlives it.
LEASE_SECONDS = 5.0

#: Events on the timeline; what each of a thousand workers says of a switch becomes one line.
_TOLD = {
    "planning",
    "proposed",
    "recorded",
    "aborted",
    "slow",
    "recovered",
    "kept_plan",
    "refused",
    "fitted",
    "job_gathered",
    "finished",
    "stopped",
    "worker_lost",
}


#: Told after each stretch how much of the scenario is done, from 0 to 1: for people who wait.
Progress = Callable[[float], None]


class Simulation:
    """Everything of one run. `play` may be called once."""

    def __init__(self, scenario: Scenario, progress: Progress | None = None) -> None:
        self.scenario = scenario
        self._progress = progress
        self.engine = Engine()
        self.planner = Planner(scenario.times)
        self.cluster = scenario.cluster.cluster()
        self.profile = scenario.truth()
        self.truth = Truth(
            self.cluster,
            self.profile,
            seed=scenario.seed,
            noise=scenario.times.noise,
            overhead=scenario.times.overhead,
        )
        self.timeline: list[Happening] = []
        self.stretches: list[Stretch] = []
        self._cost = ProfileCost(self.profile)
        self._server = MemoryServer(self.engine)
        self._by_step = sorted((f for f in scenario.faults if f.step is not None), key=lambda f: f.step or 0)
        self._by_time = sorted(
            (f for f in scenario.faults if f.seconds is not None), key=lambda f: f.seconds or 0.0
        )
        self._quiet = 0
        self._planning_seconds = 0.0
        model = scenario.model
        self.gang = Gang(
            self.engine,
            self.truth,
            scenario.times,
            steps=scenario.steps,
            tokens_per_step=model.tokens * model.global_batch,
            limit=self._limit,
            trained=self._trained,
        )
        self.nodes = [Node(node, self.gang, self._up) for node in self.cluster.nodes]
        self._node = {node.name: node for node in self.nodes}
        self.settings = Settings(
            detect=scenario.detect,
            policy=scenario.policy,
            flops=scenario.cluster.assumed,
            inside=scenario.cluster.inside,
            between=scenario.cluster.between,
        )
        self._leaders = 0
        self._out_of_time = False
        self._cut: set[str] = set()
        self._bounds: dict[bytes, float] = {}
        self.leader = self._elected()

    def play(self) -> Outcome:
        """The scenario from beginning to end, and the baselines on it."""
        scenario = self.scenario
        read_for_all(MemoryStore(self._server), KEYS, self.nodes, self._later)
        for fault in self._by_time:
            self.engine.call_at(fault.seconds or 0.0, lambda f=fault: self._strike(f), FAULT)  # type: ignore[misc]
        if scenario.seconds is not None:
            self.engine.call_at(scenario.seconds, self._end)
        self._start()
        self.engine.run(self._ended)
        model = scenario.model
        return Outcome(
            scenario=scenario.name,
            seed=scenario.seed,
            devices=len(self.cluster.devices),
            model=model.name,
            tokens_per_step=model.tokens * model.global_batch,
            timeline=tuple(self.timeline),
            stretches=tuple(self.stretches),
            totals=(self._totals(), *baselines(scenario, self.cluster, self.profile, self.planner)),
            stopped=self.gang.stopped,
        )

    # -- beginning and end ---------------------------------------------------------------------------------

    def _start(self) -> None:
        """Agents link up, torchruns join; the machines do the rest."""
        model = self.scenario.model
        spec = JobSpec(
            job=JOB,
            model=model.spec(),
            global_batch=model.global_batch,
            micro_batch=model.micro_batch,
            samples=1 << 40,
            sample_tokens=float(model.tokens),
            seed=self.scenario.seed,
        )
        for node in self.nodes:
            node.link(True)
        for index, node in enumerate(self.nodes):
            node.torchrun(spec, 1000 * (index + 1), len(self.nodes))

        while self._by_step and not self._by_step[0].step:
            self._strike(self._by_step.pop(0))

    def _end(self) -> None:
        self.gang.end()
        self._out_of_time = True

    def _ended(self) -> bool:
        """Out of time; or trained to the end, and the leader knows."""
        job = self.leader.job(JOB)
        return self._out_of_time or (self.gang.over_at is not None and job is not None and job.phase in OVER)

    def _totals(self) -> Totals:
        gang = self.gang
        seconds = gang.over_at if gang.over_at is not None else self.engine.now()
        return Totals(
            name="elasticd",
            seconds=rounded(seconds),
            steps=gang.step,
            tokens_per_second=rounded(gang.step * self._tokens() / seconds) if seconds else 0.0,
            switches=gang.switches,
            pause_seconds=rounded(gang.pause_seconds),
            planning_seconds=rounded(self._planning_seconds + self.leader.planning_seconds),
            bytes_moved=gang.bytes_moved,
        )

    def _tokens(self) -> int:
        return self.scenario.model.tokens * self.scenario.model.global_batch

    # -- messages ------------------------------------------------------------------------------------------

    def _later(self, call: Callable[[], None]) -> object:
        return self.engine.after(self.scenario.times.message, call)

    def _up(self, node: str, message: ToLeader) -> None:
        leader = self.leader
        self._later(lambda: leader.heard(node, message) if leader.alive else None)

    def _down(self, node: str, message: Down) -> None:
        self._later(lambda: self._node[node].down(message))

    def _tell(self, note: Note) -> None:
        if note.kind in _TOLD:
            self._quiet = 0
            self._happened(note.kind, note.text, note.data)

    def _happened(self, kind: str, text: str, data: dict[str, object] | None = None) -> None:
        self.timeline.append(
            Happening(
                seconds=rounded(self.engine.now()), step=self.gang.step, kind=kind, text=text, data=data or {}
            )
        )

    # -- the script ----------------------------------------------------------------------------------------

    def _strike(self, fault: Fault) -> None:
        self._quiet = 0
        data = {"fault": fault.kind, "where": fault.device or fault.node, "factor": fault.factor}
        self._happened("fault", fault.text, data)
        if fault.kind == "takeover":
            self._take_over()
        elif fault.kind == "unlink":
            self._cut.add(fault.node)
            self._node[fault.node].link(False)
            self.leader.lost(fault.node)
        elif fault.kind == "relink":
            self._cut.discard(fault.node)
            self._node[fault.node].link(self.leader.alive)
        else:
            self._pace(fault)

    def _pace(self, fault: Fault) -> None:
        names = [fault.device] if fault.device else [d.name for d in self._node_devices(fault.node)]
        self.truth.slow(names, fault.factor if fault.kind == "slow" else 1.0)

    def _node_devices(self, name: str) -> tuple[Device, ...]:
        return next(node.devices for node in self.cluster.nodes if node.name == name)

    def _elected(self) -> Leader:
        self._leaders += 1
        return Leader(
            self.engine,
            self._server,
            KEYS,
            self.settings,
            self.planner,
            name=f"c{self._leaders}",
            send=self._down,
            tell=self._tell,
        )

    def _take_over(self) -> None:
        """The leader dies; another begins when its lease has run out, and the agents return to that one."""
        old = self.leader
        if not old.alive:
            return  # the next one is on its way
        old.die()
        self._planning_seconds += old.planning_seconds
        for node in self.nodes:
            node.link(False)

        def follow() -> None:
            old.expire()
            self.leader = self._elected()
            self._happened("takeover", f"another coordinator leads, epoch {self.leader.state.epoch}")
            for node in self.nodes:
                node.link(node.name not in self._cut)

        self.engine.after(LEASE_SECONDS, follow)

    # -- training ------------------------------------------------------------------------------------------

    def _limit(self, seconds: float) -> int:
        """How many steps of `seconds` need not be played: nothing is under way, nothing is about to happen."""
        settle = self.scenario.settle
        if settle is None or self._quiet < settle or not self.leader.idle(JOB):
            return 0
        now, step = self.engine.now(), self.gang.step
        times = [f.seconds for f in self._by_time if f.seconds is not None and f.seconds > now]
        if self.scenario.seconds is not None:
            times.append(self.scenario.seconds)
        steps = [self._by_step[0].step - step] if self._by_step and self._by_step[0].step is not None else []
        if self.scenario.steps is not None:
            steps.append(self.scenario.steps - step)
        return min(*steps, *(whole_steps(at - now, seconds) for at in times), 1 << 40)

    def _trained(self, steps: int, seconds: float, factors: Floats) -> None:
        """After each stretch: it is recorded, and what the script has for this step happens."""
        assert self.gang.plan is not None
        now = self.engine.now()
        self.stretches.append(
            Stretch(
                start=rounded(now - seconds),
                stop=rounded(now),
                first_step=self.gang.step - steps,
                steps=steps,
                plan=self.gang.plan.number,
                bound=rounded(self._bound(factors)),
            )
        )
        self._quiet += 1
        if self._progress is not None:
            scenario = self.scenario
            self._progress(
                self.gang.step / scenario.steps if scenario.steps else now / (scenario.seconds or now)
            )
        while self._by_step and (self._by_step[0].step or 0) <= self.gang.step:
            self._strike(self._by_step.pop(0))

    def _bound(self, factors: Floats) -> float:
        """Seconds that no plan can beat while devices are so slow."""
        key = factors.tobytes()
        if key not in self._bounds:
            model = self.scenario.model
            count = model.global_batch // model.micro_batch
            self._bounds[key] = self._cost.bound(factors.tolist(), count)
        return self._bounds[key]


def simulate(scenario: Scenario, progress: Progress | None = None) -> Outcome:
    """Plays a scenario: the same outcome for the same scenario, to the byte."""
    return Simulation(scenario, progress).play()
