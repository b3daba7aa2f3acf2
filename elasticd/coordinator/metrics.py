"""The leader's metrics for Prometheus: what it counts, and its state at the moment in which it is asked.

Names, units and labels are documented where they are made: `GET /metrics` shows the words beside each. A
coordinator that stands by serves nothing, so a query over all of them has one series of each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from elasticd.codec.decoding import skipped
from elasticd.coordinator.connections import Connections
from elasticd.machines.coordinator.machine import State
from elasticd.machines.job.state.job_state import JobState, Phase

#: What the bodies of `GET /metrics` are, for the header.
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

#: Seconds: the loop is to stay below 0.05, and a thousand agents below 0.1 at the 99th percentile.
_HANDLING = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)


class Metrics:
    """What one leader counts from its start on."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._kinds: dict[str, Counter] = {}
        self._messages = Counter(
            "elasticd_agent_messages", "Messages of agents, by type.", ["type"], registry=self._registry
        )
        self._refused = Counter(
            "elasticd_refused",
            "Connections, requests and messages that were refused: unreadable; silent: nothing was asked, "
            "or no hello came; hello: of a version too far, a name that is taken or of another node; "
            "impostor: an agent that changed its name; unauthenticated; forbidden; origin: a page of another "
            "site; oversized; slow: a body that did not come; rate: too often; crowded: too many connections.",
            ["reason"],
            registry=self._registry,
        )
        self._events = Counter(
            "elasticd_events", "Events of the journal, by kind.", ["kind"], registry=self._registry
        )
        self._requests = Counter(
            "elasticd_http_requests", "REST requests, by status.", ["status"], registry=self._registry
        )
        self._handling = Histogram(
            "elasticd_message_handling_seconds",
            "Seconds from a message's arrival until all that follows from it was done.",
            buckets=_HANDLING,
            registry=self._registry,
        )

    def message(self, kind: str, seconds: float) -> None:
        """Counts a message of an agent, and the seconds that it took."""
        counted = self._kinds.get(kind)
        if counted is None:
            counted = self._kinds[kind] = self._messages.labels(kind)
        counted.inc()
        self._handling.observe(seconds)

    def refused(self, reason: str) -> None:
        """`reason` is one of a few words, not a text."""
        self._refused.labels(reason).inc()

    def event(self, kind: str) -> None:
        """Counts an event of the journal."""
        self._events.labels(kind).inc()

    def request(self, status: int) -> None:
        """Counts a REST request by its HTTP status."""
        self._requests.labels(str(status)).inc()

    def text(self, state: State, connections: Connections, store_away: bool) -> bytes:
        """The exposition: counters, then `state`."""
        registry = CollectorRegistry()
        registry.register(_Now(state, connections, store_away))
        return generate_latest(self._registry) + generate_latest(registry)


class _Now(Collector):
    """The state at the moment of the question."""

    def __init__(self, state: State, connections: Connections, store_away: bool) -> None:
        self._state, self._connections, self._away = state, connections, store_away

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("elasticd_leader_epoch", "This leader's epoch.", value=self._state.epoch)
        yield GaugeMetricFamily(
            "elasticd_store_away", "1 while etcd does not answer and decisions wait.", value=self._away
        )
        yield GaugeMetricFamily(
            "elasticd_agents_connected", "Agents with a connection.", value=len(self._connections)
        )
        yield from self._devices()
        yield _skipped()
        for name, words, labels, values in _JOB_GAUGES:
            family = GaugeMetricFamily(f"elasticd_job_{name}", words, labels=["job", *labels])
            for job in self._state.jobs.values():
                for more, value in values(job):
                    family.add_metric([job.job, *more], value)
            yield family

    def _devices(self) -> Iterator[Metric]:
        nodes = sorted(self._state.nodes.values(), key=lambda node: node.record.node)
        connected = GaugeMetricFamily(
            "elasticd_node_connected", "1 while the node's agent is connected.", labels=["node"]
        )
        draining = GaugeMetricFamily(
            "elasticd_node_draining", "1 while the node's devices are to be left.", labels=["node"]
        )
        rate = GaugeMetricFamily(
            "elasticd_device_rate",
            "How many times slower than normal a device computes (1 is normal).",
            labels=["node", "device"],
        )
        memory = GaugeMetricFamily(
            "elasticd_device_memory_bytes", "A device's memory in bytes.", labels=["node", "device"]
        )
        rates = {device: rate for job in self._state.jobs.values() for device, rate in job.rates.rates.items()}
        for node in nodes:
            connected.add_metric([node.record.node], node.connected)
            draining.add_metric([node.record.node], node.record.draining)
            for device in node.record.devices:
                rate.add_metric([node.record.node, device.name], rates.get(device.name, 1.0))
                memory.add_metric([node.record.node, device.name], device.memory)
        yield from (connected, draining, rate, memory)


def _skipped() -> Metric:
    """Of this process, also from before it led."""
    family = CounterMetricFamily(
        "elasticd_skipped",
        "What was skipped as this release does not know it, by kind. message: of an unknown type; content: a "
        "message of a known type that cannot be decoded; field: in messages that were looked at, one of each "
        "type a second at most; key: of etcd; record: what is stored at a known key; setting: of the "
        "configuration in etcd. All of them are normal while releases are mixed.",
        labels=["kind"],
    )
    for kind, times in skipped().items():
        family.add_metric([kind], times)
    return family


_Values = Iterable[tuple[tuple[str, ...], float]]


def _phase(job: JobState) -> _Values:
    return [((phase.value,), float(job.phase is phase)) for phase in Phase]


def _step(job: JobState) -> _Values:
    return [((), job.progress.step)]


def _step_seconds(job: JobState) -> _Values:
    return [((), job.progress.seconds)] if job.progress.seconds else []


def _predicted(job: JobState) -> _Values:
    plan = job.plan
    return [((), plan.prediction.step_seconds)] if plan is not None and plan.prediction is not None else []


def _loss(job: JobState) -> _Values:
    return [((), job.progress.loss)] if job.progress.loss is not None else []


def _tokens(job: JobState) -> _Values:
    return [((), job.progress.tokens_per_second)] if job.progress.tokens_per_second is not None else []


def _number(job: JobState) -> _Values:
    return [((), job.number)]


def _members(job: JobState) -> _Values:
    return [((), len(job.plan.members) if job.plan is not None else 0)]


def _standby(job: JobState) -> _Values:
    return [((), len(job.plan.idle) if job.plan is not None else 0)]


def _moved(job: JobState) -> _Values:
    return [((), job.moved[-1].pause_seconds)] if job.moved else []


def _snapshot(job: JobState) -> _Values:
    return [((), job.snapshots.whole.step)] if job.snapshots.whole is not None else []


_JOB_GAUGES = (
    ("phase", "1 for the phase that the job is in.", ("phase",), _phase),
    ("step", "Updates that were applied, as rank 0 last reported.", (), _step),
    ("step_seconds", "Seconds of wall time of the newest step.", (), _step_seconds),
    ("predicted_step_seconds", "Seconds a step that the plan in force was predicted to take.", (), _predicted),
    ("loss", "Mean loss of the newest step.", (), _loss),
    ("tokens_per_second", "Tokens a second of the newest step, all ranks.", (), _tokens),
    ("plan_number", "The number of the plan in force, 0 without one.", (), _number),
    ("members", "Devices that the plan in force uses.", (), _members),
    ("standby", "Devices that the plan in force leaves idle.", (), _standby),
    ("last_switch_seconds", "Seconds for which the last switch of plans held the job up.", (), _moved),
    ("snapshot_step", "The newest step whose state is kept in the agents' memory.", (), _snapshot),
)
