"""One simulation: the cluster comes up, the job trains, the script happens, until it is over."""

from __future__ import annotations

from collections.abc import Callable

from elasticd_planner.spec.cluster import Node as NodeShape

from elasticd.machines.job.state.events import SLOWDOWN_KINDS, CoordinatorNote
from elasticd.machines.job.state.job_state import OVER, JobPhase, JobSettings
from elasticd.records import Keys
from elasticd.simulator.cluster.fault_events import FaultScript
from elasticd.simulator.cluster.launcher import Launcher
from elasticd.simulator.cluster.leader import SimulatedLeader
from elasticd.simulator.cluster.nodes import Node, read_for_all
from elasticd.simulator.cluster.worker import SimulationError
from elasticd.simulator.cluster.workers import Began, WorkerGroup, whole_steps
from elasticd.simulator.engine import EventEngine
from elasticd.simulator.planning import Planner
from elasticd.simulator.results.baselines import baselines, truth_of
from elasticd.simulator.results.progress import Trained
from elasticd.simulator.results.result import Happening, Outcome, Stretch, Totals, rounded
from elasticd.simulator.results.throughput_bound import Bounds
from elasticd.simulator.scenarios.scenario import Scenario
from elasticd.store.memory import MemoryServer, MemoryStore
from elasticd.wire.coordinator import ToClient, ToLeader

KEYS = Keys(cluster="simulated")

#: Seconds that a dead leader's key outlives it.
LEASE_SECONDS = 5.0

#: Seconds for which a job may wait for nodes that nothing brings.
VAIN_SECONDS = 60.0

#: Seconds without a step, or a change of the cluster, in which a job that does not wait must make one.
STUCK_SECONDS = 7200.0

#: Events on the timeline; what each of a thousand workers says of a switch becomes one line.
_TOLD = {
    "planning",
    "proposed",
    "recorded",
    "aborted",
    "fenced",
    "waiting",
    *SLOWDOWN_KINDS,
    "shifted",
    "kept_plan",
    "put_off",
    "refused",
    "fitted",
    "job_gathered",
    "finished",
    "stopped",
    "worker_lost",
    "node_down",
}

#: Told after each stretch how much of the scenario is done, from 0 to 1: for people who wait.
Progress = Callable[[float], None]


class Simulation:
    """Everything of one run. `play`, or `run`, may be called once. `planner` is asked by elasticd and the
    baselines; `server` holds what the leaders wrote."""

    def __init__(
        self, scenario: Scenario, progress: Progress | None = None, planner: Planner | None = None
    ) -> None:
        self.scenario = scenario
        self._progress = progress
        self.engine = EventEngine()
        self.planner = planner or Planner(scenario.times)
        self.cluster = scenario.cluster.cluster()
        self.truth = truth_of(scenario)
        model, times = scenario.model, scenario.times
        self.bounds = Bounds(self.cluster, model.global_batch, model.micro_batch, times.overhead)
        self.timeline: list[Happening] = []
        self.stretches: list[Stretch] = []
        self.trained = Trained()
        self.server = MemoryServer(self.engine)
        self._quiet, self._told_at = 0, 0.0
        self._down_seconds = 0.0
        self._out_of_time = False
        self._leaders: list[SimulatedLeader] = []
        self.worker_group = WorkerGroup(
            self.engine,
            self.truth,
            scenario,
            limit=self._limit,
            trained=self._trained,
            starved=lambda device: self.script.starve(device),
            recovered=self._recovered,
        )
        self.nodes = [self._built(node) for node in self.cluster.nodes]
        self._node = {node.name: node for node in self.nodes}
        self.settings = JobSettings(
            detect=scenario.detect,
            policy=scenario.policy,
            flops=scenario.cluster.assumed,
            inside=scenario.cluster.inside,
            between=scenario.cluster.between,
            levels=scenario.cluster.levels,
        )
        self.leader = self._elected()
        self.launcher = Launcher(scenario, self.worker_group, self.nodes, self.trained, self._happened)
        self.script = FaultScript(
            scenario,
            self.worker_group,
            self._node,
            self.launcher,
            lambda: self.leader,
            self.take_over,
            self._happened,
        )

    def play(self) -> Outcome:
        """The scenario from beginning to end, and the baselines on it."""
        self.run()
        scenario, model = self.scenario, self.scenario.model
        return Outcome(
            scenario=scenario.name,
            seed=scenario.seed,
            devices=len(self.cluster.devices),
            model=model.name,
            timeline=tuple(self.timeline),
            stretches=tuple(self.stretches),
            totals=(self._totals(), *baselines(scenario, self.bounds, self.planner)),
            stopped=self.stopped,
        )

    def run(self) -> None:
        """elasticd's part alone."""
        scenario = self.scenario
        read_for_all(MemoryStore(self.server), KEYS, self.nodes, self._later)
        if scenario.seconds is not None:
            self.engine.call_at(scenario.seconds, self._end)
        self.script.before()
        for node in self.nodes:
            node.link(self.script.linked(node))
        self.launcher.start()
        self.script.begin()
        self.engine.run(self._ended)

    def _built(self, shape: NodeShape) -> Node:
        return Node(shape, self.worker_group, self._up, self._refused)

    # -- beginning and end ---------------------------------------------------------------------------------

    def _end(self) -> None:
        self.worker_group.end()
        self._out_of_time = True

    def _ended(self) -> bool:
        """Out of time; or trained to the end, and the leader knows; or stopped, and nothing starts it again."""
        if self._out_of_time:
            return True
        job, now = self.leader.job(self.launcher.job), self.engine.now()
        if self.launcher.pending:
            return False
        brings_nodes = self.script.brings_nodes(now)
        if self.launcher.needs_nodes:
            return not brings_nodes
        if not brings_nodes and now - self._told_at > VAIN_SECONDS and self._waits():
            return True
        if not brings_nodes and now - self._told_at > STUCK_SECONDS and not self.worker_group.over:
            raise SimulationError(f"the job stands still after {self.worker_group.step} steps")
        return job is not None and job.phase in OVER and self.worker_group.over

    def _waits(self) -> str:
        return self.leader.waits(self.launcher.job)

    @property
    def stopped(self) -> str:
        """Why the job does not go on; nothing where it has ended well, or would have been started again."""
        if not self._out_of_time and (why := self._waits()):
            return f"it waits for capacity, its state is safe: {why}"
        job = self.leader.job(self.launcher.job)
        over = job is not None and job.phase is JobPhase.STOPPED and not self.launcher.pending
        return job.reason if over and job is not None else ""

    def _totals(self) -> Totals:
        worker_group, trained = self.worker_group, self.trained
        seconds = (
            worker_group.over_at if worker_group.over_at is not None and not self.stopped else self.engine.now()
        )
        if self.stopped and self.stretches:
            self._down_seconds += seconds - self.stretches[-1].stop
        return Totals(
            name="elasticd",
            seconds=rounded(seconds),
            steps=rounded(trained.steps),
            tokens_per_second=rounded(trained.tokens / seconds) if seconds else 0.0,
            switches=worker_group.switches,
            pause_seconds=rounded(worker_group.pause_seconds),
            plans=sum(leader.plans for leader in self._leaders),
            planning_seconds=rounded(sum(leader.planning_seconds for leader in self._leaders)),
            bytes_moved=worker_group.bytes_moved,
            recoveries=worker_group.recoveries,
            recovery_seconds=rounded(worker_group.recovery_seconds),
            restarts=self.launcher.restarts,
            down_seconds=rounded(self._down_seconds),
            lost_steps=rounded(trained.lost),
        )

    # -- messages ------------------------------------------------------------------------------------------

    def _later(self, call: Callable[[], None]) -> object:
        return self.engine.after(self.scenario.times.message, call)

    def _up(self, node: str, message: ToLeader) -> None:
        leader = self.leader
        self._later(lambda: leader.heard(node, message) if leader.alive else None)

    def _down(self, node: str, message: ToClient) -> None:
        self._later(lambda: self._node[node].down(message))

    def _refused(self, node: str, reason: str) -> None:
        """A torchrun, or a worker, was turned away: it ends."""
        self._happened("turned_away", f"node {node}: {reason}", {"node": node})
        self._later(lambda: self._node[node].end("turned away"))

    def _publish(self, note: CoordinatorNote) -> None:
        joins = note.kind == "joined" and note.data.get("node") in self._node
        if note.kind not in _TOLD and not (joins and self._node[note.data["node"]].asks):
            return
        self._happened(note.kind, note.text, note.data)
        if note.kind == "stopped" and note.job == self.launcher.job:
            self.launcher.stopped()

    def _happened(self, kind: str, text: str, data: dict[str, object] | None = None) -> None:
        self._quiet, self._told_at = 0, self.engine.now()
        self.timeline.append(
            Happening(
                seconds=rounded(self.engine.now()),
                step=self.worker_group.step,
                kind=kind,
                text=text,
                data=data or {},
            )
        )

    def _recovered(self, number: int, seconds: float) -> None:
        text = f"plan {number} goes on from step {self.worker_group.step}, {seconds:.1f} s after the last one"
        self._happened("resumed", text, {"number": number, "seconds": rounded(seconds)})

    # -- the leader ----------------------------------------------------------------------------------------

    def _elected(self) -> SimulatedLeader:
        leader = SimulatedLeader(
            self.engine,
            self.server,
            KEYS,
            self.settings,
            self.planner,
            name=f"c{len(self._leaders) + 1}",
            send=self._down,
            tell=self._publish,
        )
        self._leaders.append(leader)
        return leader

    def take_over(self) -> None:
        """The leader dies; another begins when its lease has run out, and the agents return to that one."""
        old = self.leader
        if not old.alive:
            return  # the next one is on its way
        old.die()
        for node in self.nodes:
            node.link(False)

        def follow() -> None:
            old.expire()
            self.leader = self._elected()
            self._happened("takeover", f"another coordinator leads, epoch {self.leader.state.epoch}")
            for node in self.nodes:
                node.link(self.script.linked(node))

        self.engine.after(LEASE_SECONDS, follow)

    # -- training ------------------------------------------------------------------------------------------

    def _limit(self, seconds: float) -> int:
        """The number of steps of `seconds` that need not be played: nothing is under way, nothing is about to
        happen."""
        settle, scenario = self.scenario.settle, self.scenario
        if settle is None or self._quiet < settle or not self.leader.idle(self.launcher.job):
            return 0
        now, step = self.engine.now(), self.worker_group.step
        times = self.script.times(now)
        if scenario.seconds is not None:
            times.append(scenario.seconds)
        steps = [at - step for at in (self.script.next_step, scenario.steps) if at is not None]
        return min(*steps, *(whole_steps(at - now, seconds) for at in times), 1 << 40)

    def _trained(self, began: Began, steps: int) -> None:
        """After each stretch: it is recorded, and what the script has for this step happens."""
        assert self.worker_group.plan is not None
        now = self.engine.now()
        if self.stretches and self.stretches[-1].start_number != self.worker_group.life:
            self._down_seconds += began.now - self.stretches[-1].stop
        self.trained.add(steps, began.tokens)
        self.stretches.append(
            Stretch(
                start=rounded(began.now),
                stop=rounded(now),
                first_step=self.worker_group.step - steps,
                steps=steps,
                tokens=began.tokens,
                start_number=self.worker_group.life,
                plan=self.worker_group.plan.number,
                bound=rounded(self.bounds.seconds(began.speeds, began.profile, began.modules)),
            )
        )
        self._quiet, self._told_at = self._quiet + 1, now
        if self._progress is not None:
            scenario = self.scenario
            self._progress(
                self.worker_group.step / scenario.steps if scenario.steps else now / (scenario.seconds or now)
            )
        self.script.at_step(self.worker_group.step)


def simulate(scenario: Scenario, progress: Progress | None = None) -> Outcome:
    """Plays a scenario: the same outcome for the same scenario, to the byte."""
    return Simulation(scenario, progress).play()
