"""The leader's Prometheus metrics: counters, and gauges of its state at the time of the scrape.

A coordinator that stands by serves no metrics, so a query over all coordinators finds each series once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from elasticd.codec.decoding import skipped
from elasticd.coordinator.events.job_times import CAUSES, OTHER, REASONS, REPEATED, ClockReading
from elasticd.explain.training_speed import TrainingSpeed
from elasticd.machines.coordinator.machine import CoordinatorState
from elasticd.machines.job.lifecycle import phase_time
from elasticd.machines.job.measurements.module_times import module_times
from elasticd.machines.job.state.job_state import OVER, JobPhase, JobState, NodeState
from elasticd.wire.api_types import RestartStatus

#: The content type of `GET /metrics`.
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

#: Upper bounds in seconds. The loop is to stay below 0.05, a thousand agents below 0.1 at the 99th percentile.
_HANDLING = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)


class Family(NamedTuple):
    """A metric of `GET /metrics`."""

    type: str  # counter, gauge or histogram
    labels: tuple[str, ...]
    help: str  # its meaning and unit


#: The label of each series beside its own: one Prometheus may scrape several clusters.
CLUSTER = "cluster"
#: By name; a counter's samples have `_total` behind it. docs/reference/metrics.md is written from this table.
FAMILIES = {
    "elasticd_agent_messages": Family("counter", ("type",), "Messages from agents, by type."),
    "elasticd_refused": Family(
        "counter",
        ("reason",),
        "Connections, requests and messages that were refused, by reason. unreadable: no valid message; "
        "silent: no request or no hello in time; hello: another protocol version, a name that is taken, or "
        "the name of another node; impostor: an agent that changed its name; foreign: a message about another "
        "node's device or about a job without this node; writes: a node that has too much written to etcd; "
        "failed: a message on which elasticd itself failed; unauthenticated; forbidden; origin: a page of "
        "another site; oversized; slow: a body that did not arrive in time; rate: too many requests or "
        "messages; crowded: too many connections; handshake: TLS that failed; revoked: a connection whose "
        "token is not known any more.",
    ),
    "elasticd_events": Family("counter", ("kind",), "Events of the leader, by kind."),
    "elasticd_http_requests": Family("counter", ("status",), "REST requests, by HTTP status."),
    "elasticd_message_handling_seconds": Family(
        "histogram", (), "Seconds from the arrival of an agent's message until everything it causes is done."
    ),
    "elasticd_leader_epoch": Family("gauge", (), "Epoch of this leader; it grows with each leader."),
    "elasticd_store_away": Family("gauge", (), "1 while etcd does not answer and decisions wait, else 0."),
    "elasticd_live_listeners": Family(
        "gauge", (), "Programs that listen to all that the leader tells: each dashboard is one."
    ),
    "elasticd_agents_connected": Family("gauge", (), "Agents that are connected to the leader."),
    "elasticd_node_connected": Family("gauge", ("node",), "1 while the node's agent is connected, else 0."),
    "elasticd_node_draining": Family("gauge", ("node",), "1 while the node is drained, else 0."),
    "elasticd_device_slowdown": Family(
        "gauge", ("node", "device"), "How many times longer the device takes than a normal one; 1 is normal."
    ),
    "elasticd_device_rate": Family(
        "gauge", ("node", "device"), "The same as elasticd_device_slowdown, under its name before release 0.2."
    ),
    "elasticd_device_memory_bytes": Family("gauge", ("node", "device"), "Memory of the device in bytes."),
    "elasticd_link_slowdown": Family(
        "gauge", ("link",), "How many times slower than its peers a link between two nodes is; 1 is normal."
    ),
    "elasticd_device_memory_used_bytes": Family(
        "gauge",
        ("node", "device"),
        "Memory in use in bytes: of an NVIDIA device, or the resident memory of a CPU device's worker.",
    ),
    "elasticd_device_utilisation": Family(
        "gauge",
        ("node", "device"),
        "Part of the last seconds in which the device computed, 0 to 1; of a CPU device the processor time of "
        "its worker, above 1 where that had several processors.",
    ),
    "elasticd_device_temperature_celsius": Family("gauge", ("node", "device"), "Temperature of the device."),
    "elasticd_device_throttled": Family(
        "gauge", ("node", "device"), "1 while the device's clocks are held down, else 0."
    ),
    "elasticd_device_ecc_uncorrected": Family(
        "gauge", ("node", "device"), "ECC errors since the device's reset that could not be corrected."
    ),
    "elasticd_device_xids": Family(
        "gauge", ("node", "device"), "Error reports (XID) of the device's driver that the agent remembers."
    ),
    "elasticd_node_pressure": Family(
        "gauge",
        ("node", "resource"),
        "Part of the last ten seconds in which work on the node waited for cpu, memory or io, 0 to 1.",
    ),
    "elasticd_skipped": Family(
        "counter",
        ("kind",),
        "Data of other releases that was skipped, by kind. message: of an unknown type; content: a message of "
        "a known type that cannot be decoded; field: an unknown field (one message of each type a second is "
        "looked at); key: in etcd; record: under a known key in etcd; setting: of the configuration in etcd. "
        "This is normal while releases are mixed.",
    ),
    "elasticd_job_phase": Family(
        "gauge",
        ("job", "phase"),
        "1 for the phase that the job is in, 0 for the others; a job in restart mode is gathering, running, "
        "done or stopped.",
    ),
    "elasticd_job_failed": Family(
        "gauge", ("job",), "1 where the job has stopped and nobody asked for it, else 0."
    ),
    "elasticd_job_step": Family("gauge", ("job",), "Optimizer steps that are done, as rank 0 last reported."),
    "elasticd_job_step_seconds": Family(
        "gauge",
        ("job",),
        "Seconds of the newest step itself, from its begin to its end, without what the script does between "
        "two steps.",
    ),
    "elasticd_job_wall_step_seconds": Family(
        "gauge",
        ("job",),
        "Seconds of wall time a step, in the mean over the newest ten: from the end of one step to the end of "
        "the next.",
    ),
    "elasticd_job_predicted_step_seconds": Family(
        "gauge",
        ("job",),
        "Seconds of a step itself under the plan in force, as predicted by the newest profile of the model.",
    ),
    "elasticd_job_loss": Family("gauge", ("job",), "Mean loss of the newest step."),
    "elasticd_job_tokens_per_second": Family(
        "gauge", ("job",), "Tokens of all ranks over wall time, of the newest ten steps."
    ),
    "elasticd_job_module_compute_seconds": Family(
        "gauge",
        ("job", "module"),
        "Computation of a module on its busiest device, in the newest step, of a model of several modules.",
    ),
    "elasticd_job_module_items": Family(
        "gauge", ("job", "module"), "Items (images) of a sample in the mean of the last steps, by their module."
    ),
    "elasticd_job_experts_uneven": Family(
        "gauge",
        ("job",),
        "The busiest device's time for its experts over the least possible, less 1, of the worst TP group.",
    ),
    "elasticd_job_plan_number": Family("gauge", ("job",), "Number of the plan in force, 0 without one."),
    "elasticd_job_members": Family(
        "gauge", ("job",), "Devices that the plan in force uses, or a job in restart mode."
    ),
    "elasticd_job_restarts": Family(
        "gauge", ("job",), "How often all workers of a job in restart mode were started again."
    ),
    "elasticd_job_standby": Family(
        "gauge", ("job",), "Standby devices: those that the plan in force leaves idle."
    ),
    "elasticd_job_last_switch_seconds": Family(
        "gauge", ("job",), "Pause of the job in its last switch in seconds."
    ),
    "elasticd_job_ettr": Family(
        "gauge",
        ("job",),
        "Effective training time ratio: the part of the wall time since the first step that the leader knows "
        "of that went into steps of the surviving history; 1 is best.",
    ),
    "elasticd_job_goodput": Family(
        "gauge",
        ("job",),
        "The same, where a step counts for what it takes at the healthy speed: the median of the fastest plan.",
    ),
    "elasticd_job_stalled_seconds": Family(
        "gauge",
        ("job",),
        "Seconds since the end of the newest step; of a job that has a plan, and has made no step that the "
        "leader knows of, since the begin of its phase.",
    ),
    "elasticd_job_waiting_seconds": Family(
        "gauge",
        ("job",),
        "Seconds for which a job has waited, in any phase but running, for torchruns, workers, members or "
        "devices, since the last of them came; 0 where nobody waits.",
    ),
    "elasticd_job_steps_without_update": Family(
        "gauge",
        ("job",),
        "Steps in a row, up to the newest one, that changed no weight: their loss or gradient was not finite, "
        "or was a spike; 0 below 3 (of gradients that overflow: 30).",
    ),
    "elasticd_job_stopping_seconds": Family(
        "gauge",
        ("job",),
        "Seconds since somebody asked for the job's end that has not come; 0 where nobody did.",
    ),
    "elasticd_job_checkpoint_age_seconds": Family(
        "gauge",
        ("job",),
        "Seconds since the newest checkpoint of a job that runs, or since its first step where it has a folder "
        "for checkpoints and has made none.",
    ),
    "elasticd_job_lost_seconds": Family(
        "counter",
        ("job", "cause"),
        "Wall time that no step of the surviving history took, by cause: recovery, switch, repeated steps, "
        "waiting, checkpoint, between steps.",
    ),
    "elasticd_job_repeated_steps": Family(
        "counter", ("job",), "Steps that were done again after the job went back to an older state."
    ),
    "elasticd_job_moved_bytes": Family(
        "counter", ("job",), "Bytes of state that were sent in switches, checksums included."
    ),
    "elasticd_job_replans": Family(
        "counter",
        ("job", "reason"),
        "Plans that were proposed, by reason: start, slow, recovered, fault, drain, joined, shifted, settings, "
        "other.",
    ),
    "elasticd_job_hung_workers": Family(
        "gauge", ("job",), "Workers whose main thread stands still and that do not wait for others."
    ),
    "elasticd_job_snapshot_step": Family(
        "gauge", ("job",), "Newest step whose state is in a complete snapshot."
    ),
}


#: The samples of a family: the values of its labels, and the value.
_Values = tuple[str, Iterable[tuple[tuple[str, ...], float]]]


class LeaderReading(NamedTuple):
    """A leader's state as a scrape shows it, read in the leader's loop: the text is made beside it."""

    state: CoordinatorState
    agents: int = 0  # connected
    store_away: bool = False  # etcd does not answer
    clocks: Mapping[str, ClockReading] = MappingProxyType({})  # where the time of jobs went, by job
    now: float = 0.0  # [unix seconds] of the scrape
    at: float = 0.0  # [seconds] of the machine's clock
    listeners: int = 0  # of the live feed
    restarts: Sequence[RestartStatus] = ()  # jobs in restart mode


class LeaderMetrics:
    """Metrics of one leader, and its counters from its start on."""

    def __init__(self, cluster: str) -> None:
        self._cluster = cluster
        self._registry = CollectorRegistry()
        self._kinds: dict[str, Counter] = {}
        self._messages = self._counter("elasticd_agent_messages")
        self._refused = self._counter("elasticd_refused")
        self._events = self._counter("elasticd_events")
        self._requests = self._counter("elasticd_http_requests")
        handling = "elasticd_message_handling_seconds"
        histogram = Histogram(
            *(handling, FAMILIES[handling].help, (CLUSTER,)), buckets=_HANDLING, registry=self._registry
        )
        self._handling = histogram.labels(cluster)

    def _counter(self, name: str) -> Counter:
        known = FAMILIES[name]
        return Counter(name, known.help, (CLUSTER, *known.labels), registry=self._registry)

    def message(self, kind: str, seconds: float) -> None:
        """Counts a message of an agent, and the seconds that it took."""
        counted = self._kinds.get(kind)
        if counted is None:
            counted = self._kinds[kind] = self._messages.labels(self._cluster, kind)
        counted.inc()
        self._handling.observe(seconds)

    def refused(self, reason: str) -> None:
        """`reason`: one of the words in the help text."""
        self._refused.labels(self._cluster, reason).inc()

    def event(self, kind: str) -> None:
        """Counts an event of the journal."""
        self._events.labels(self._cluster, kind).inc()

    def request(self, status: int) -> None:
        """Counts a REST request by its HTTP status."""
        self._requests.labels(self._cluster, str(status)).inc()

    def text(self, reading: LeaderReading) -> bytes:
        """The exposition: counters, then the gauges of what was read of the leader."""
        registry = CollectorRegistry()
        registry.register(_Now(self._cluster, reading))
        return generate_latest(self._registry) + generate_latest(registry)


class _Now(Collector):
    """The leader's state at the time of the scrape."""

    def __init__(self, cluster: str, reading: LeaderReading) -> None:
        self._cluster, self._reading = cluster, reading

    def collect(self) -> Iterator[Metric]:
        for name, values in self._families():
            yield _family(self._cluster, name, values)

    def _families(self) -> Iterator[_Values]:
        reading, state = self._reading, self._reading.state
        nodes = sorted(state.nodes.values(), key=lambda node: node.record.node)
        devices = [(node.record.node, device) for node in nodes for device in node.record.devices]
        slow = state.slowdowns
        slowdowns = [((node, device.name), slow.get(device.name, 1.0)) for node, device in devices]
        yield "elasticd_leader_epoch", [((), state.epoch)]
        yield "elasticd_store_away", [((), reading.store_away)]
        yield "elasticd_live_listeners", [((), reading.listeners)]
        yield "elasticd_agents_connected", [((), reading.agents)]
        yield "elasticd_node_connected", [((node.record.node,), node.connected) for node in nodes]
        yield "elasticd_node_draining", [((node.record.node,), node.record.draining) for node in nodes]
        yield "elasticd_device_slowdown", slowdowns
        yield "elasticd_device_rate", slowdowns
        memory = [((node, device.name), device.memory) for node, device in devices]
        yield "elasticd_device_memory_bytes", memory
        links = {name: state.links.rate(name) for name in state.links.probes}
        yield "elasticd_link_slowdown", [((name,), rate) for name, rate in sorted(links.items())]
        yield from _of_health(nodes)
        # Of this process, also from before it led.
        yield "elasticd_skipped", [((kind,), times) for kind, times in skipped().items()]
        of_jobs: dict[str, list[tuple[tuple[str, ...], float]]] = {
            name: [] for name in FAMILIES if name.startswith("elasticd_job_")
        }
        for job in state.jobs.values():
            for name, labels, value in _of_job(job, reading):
                of_jobs[name].append(((job.job, *labels), value))
        for restarting in reading.restarts:
            for name, labels, value in _gauges_of_restarts(restarting):
                of_jobs[name].append(((restarting.job, *labels), value))
        yield from of_jobs.items()


def _family(cluster: str, name: str, values: Iterable[tuple[tuple[str, ...], float]]) -> Metric:
    known = FAMILIES[name]
    kind = CounterMetricFamily if known.type == "counter" else GaugeMetricFamily
    family = kind(name, known.help, labels=(CLUSTER, *known.labels))
    for labels, value in values:
        family.add_metric((cluster, *labels), value)
    return family


def _of_health(nodes: Sequence[NodeState]) -> Iterator[_Values]:
    """The readings of agents about nodes and devices, as far as the system offers it."""
    seen = [(node.record.node, node.health) for node in nodes if node.health is not None]
    known = [(node, device) for node, health in seen for device in health.devices]
    used = [((n, d.name), d.memory_used) for n, d in known if d.memory_used is not None]
    yield "elasticd_device_memory_used_bytes", used
    busy = [((n, d.name), d.utilisation) for n, d in known if d.utilisation is not None]
    yield "elasticd_device_utilisation", busy
    devices = [(node, device) for node, device in known if device.pid is None]
    hot = [((n, d.name), d.temperature) for n, d in devices if d.temperature is not None]
    yield "elasticd_device_temperature_celsius", hot
    yield "elasticd_device_throttled", [((n, d.name), bool(d.throttled)) for n, d in devices]
    ecc = [((n, d.name), d.uncorrected) for n, d in devices if d.uncorrected is not None]
    yield "elasticd_device_ecc_uncorrected", ecc
    yield "elasticd_device_xids", [((n, d.name), len(d.xids)) for n, d in devices]
    waits = [((n, what), part) for n, health in seen for what, part in sorted(health.pressure.items())]
    yield "elasticd_node_pressure", waits


def _of_job(job: JobState, reading: LeaderReading) -> Iterator[tuple[str, tuple[str, ...], float]]:
    """The metrics of a job: the name of a metric, its labels behind the job, its value. Of a job that is over
    its end, its last step and its counters are left: it has no speed, no devices, and waits for nobody."""
    clock = reading.clocks.get(job.job)
    yield from _end_of(job)
    yield from _counters_of(clock)
    newest = clock.speed.newest if clock is not None and clock.speed is not None else None
    if newest is not None and newest.loss is not None:
        yield "elasticd_job_loss", (), newest.loss
    if job.phase not in OVER:
        yield from _gauges_of(job)
        yield from _modules_of(job)
        yield from _speed_of(clock.speed if clock is not None else None)
        yield from _waits_of(job, clock, reading)
        if clock is not None:
            yield from _times_of(job, clock, reading.now)


def _modules_of(job: JobState) -> Iterator[tuple[str, tuple[str, ...], float]]:
    """The metrics of the modules of a model of several, and of experts."""
    for each in module_times(job):
        yield "elasticd_job_module_compute_seconds", (each.module,), each.seconds
        if each.items:
            yield "elasticd_job_module_items", (each.module,), each.items_a_sample
    if job.learned.expert_rows.mean:
        yield "elasticd_job_experts_uneven", (), job.learned.expert_rows.uneven


def _waits_of(
    job: JobState, clock: ClockReading | None, reading: LeaderReading
) -> Iterator[tuple[str, tuple[str, ...], float]]:
    """The waits of a job that is not over: hung workers, steps without an update, seconds in a phase."""
    hung = sum(worker.halted is not None and not worker.halted.waits for worker in job.workers.values())
    yield "elasticd_job_hung_workers", (), hung
    yield (
        "elasticd_job_steps_without_update",
        (),
        job.steps.left_out.count if job.steps.left_out is not None else 0,
    )
    yield "elasticd_job_waiting_seconds", (), phase_time.waited_seconds(job, reading.at)
    if clock is not None and clock.time is not None:
        yield "elasticd_job_stalled_seconds", (), max(0.0, reading.now - clock.time.last)
    elif job.plan is not None:
        yield "elasticd_job_stalled_seconds", (), max(0.0, reading.at - job.since)


def _times_of(job: JobState, clock: ClockReading, now: float) -> Iterator[tuple[str, tuple[str, ...], float]]:
    """The parts of the wall time of a job that is not over."""
    asked = clock.stop_asked_at if job.ending.stopping else None
    yield "elasticd_job_stopping_seconds", (), max(0.0, now - asked) if asked is not None else 0.0
    if (since := _checkpointed(job, clock)) is not None:
        yield "elasticd_job_checkpoint_age_seconds", (), max(0.0, now - since)
    if (time := clock.time) is not None:
        for name, value in (("ettr", time.ettr), ("goodput", time.goodput)):
            if (part := value(now)) is not None:
                yield f"elasticd_job_{name}", (), part


def _counters_of(clock: ClockReading | None) -> Iterator[tuple[str, tuple[str, ...], float]]:
    """Counters of losses, and of the cost of switches, since the job began."""
    if clock is None:
        return
    if (time := clock.time) is not None:
        yield "elasticd_job_repeated_steps", (), time.repeated
        for cause in (*CAUSES, REPEATED, OTHER):
            yield "elasticd_job_lost_seconds", (cause,), time.lost.get(cause, 0.0)
    yield "elasticd_job_moved_bytes", (), clock.moved_bytes
    for reason in (*REASONS, "other"):
        yield "elasticd_job_replans", (reason,), clock.replans.get(reason, 0)


def _speed_of(speed: TrainingSpeed | None) -> Iterator[tuple[str, tuple[str, ...], float]]:
    """The newest step, and how fast the job trains."""
    if speed is None:
        return
    values = {
        "elasticd_job_step_seconds": speed.newest.seconds or None,
        "elasticd_job_wall_step_seconds": speed.wall_seconds,
        "elasticd_job_tokens_per_second": speed.tokens_per_second,
    }
    yield from ((name, (), value) for name, value in values.items() if value is not None)


def _checkpointed(job: JobState, clock: ClockReading) -> float | None:
    """When the newest checkpoint was made (unix seconds), or the first step of a job that could make one."""
    if clock.checkpoint_at is not None:
        return clock.checkpoint_at
    able = any(worker.saves_now for worker in job.workers.values())
    return clock.time.began if able and clock.time is not None else None


def _gauges_of_restarts(job: RestartStatus) -> Iterator[tuple[str, tuple[str, ...], float]]:
    """The metrics of a job in restart mode, as `_of_job`."""
    phase = {"finished": JobPhase.DONE, "failed": JobPhase.STOPPED}.get(job.phase) or JobPhase(job.phase)
    for other in JobPhase:
        yield "elasticd_job_phase", (other.value,), float(phase is other)
    yield "elasticd_job_failed", (), float(phase is JobPhase.STOPPED and not job.stopped_by)
    yield "elasticd_job_restarts", (), job.restarts
    yield "elasticd_job_members", (), len(job.members)
    if job.step:
        yield "elasticd_job_step", (), job.step
        yield "elasticd_job_step_seconds", (), job.step_seconds


def _end_of(job: JobState) -> Iterator[tuple[str, tuple[str, ...], float]]:
    """The phase of a job, whether it failed, and how far it came."""
    for phase in JobPhase:
        yield "elasticd_job_phase", (phase.value,), float(job.phase is phase)
    wanted = job.ending.orderly or job.ending.requested
    failed = job.phase is JobPhase.STOPPED and not wanted
    yield "elasticd_job_failed", (), float(failed)
    yield "elasticd_job_step", (), job.steps.progress.step


def _gauges_of(job: JobState) -> Iterator[tuple[str, tuple[str, ...], float]]:
    """The plan of a job that is not over, and what it keeps."""
    plan = job.plan
    values = {
        "elasticd_job_predicted_step_seconds": None if job.prediction_guessed else job.predicted_seconds,
        "elasticd_job_plan_number": job.number,
        "elasticd_job_members": len(plan.members) if plan is not None else 0,
        "elasticd_job_standby": len(plan.idle) if plan is not None else 0,
        "elasticd_job_last_switch_seconds": job.switching.moved[-1].pause_seconds
        if job.switching.moved
        else None,
        "elasticd_job_snapshot_step": job.snapshots.whole.step if job.snapshots.whole is not None else None,
    }
    yield from ((name, (), value) for name, value in values.items() if value is not None)
