"""The job of benchmarks/load.py: a plan over all devices as a store would hold it, and its workers' reports."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from elasticd_planner.cost.model_profile import derive
from elasticd_planner.problem import Problem
from elasticd_planner.spec.cluster import Cluster, Device, Node
from elasticd_planner.spec.measurement import Measurement
from elasticd_planner.spec.plan import ModulePlan, Pipeline, Plan, Stage, Strategy

from elasticd.codec.message import Message, encode
from elasticd.coordinator.store_transactions import StoreTransactions
from elasticd.machines.job.state.events import Write
from elasticd.records import HistoryRecord, JobSpec, Keys, NodeRecord, PlanRecord
from elasticd.simulator.scenarios.model_shapes import PRESETS, model_spec
from elasticd.store.protocol import Store
from elasticd.wire.coordinator import AgentHello, FromClient
from elasticd.wire.worker import Hello, Report

JOB = "load"
MODEL = model_spec("llama-70b", PRESETS["llama-70b"])
TOKENS = 4096
#: Pipelines of so many stages, each as wide as a node.
STAGES = 10
SECONDS_A_TOKEN = 1e-8


class Job:
    """`nodes` nodes of `devices` devices each, all in the plan; nodes must be a multiple of `STAGES`."""

    def __init__(self, nodes: int, devices: int) -> None:
        if nodes % STAGES:
            raise SystemExit(f"--agents {nodes} must be a multiple of {STAGES}")
        self.nodes = tuple(
            Node(
                name=f"n{n}",
                devices=tuple(Device(name=f"n{n}/{i}", memory=80 << 30) for i in range(devices)),
            )
            for n in range(nodes)
        )
        self._layers = len(MODEL.layers) // STAGES
        self.batch = nodes // STAGES
        self.spec = JobSpec(
            job=JOB,
            model=MODEL,
            global_batch=self.batch,
            micro_batch=1,
            samples=1 << 40,
            sample_tokens=float(TOKENS),
            seed=0,
        )
        self.world_size = nodes * devices
        self.plan = self._plan()

    def _plan(self) -> Plan:
        lines = [self.nodes[at : at + STAGES] for at in range(0, len(self.nodes), STAGES)]
        pipelines = tuple(
            Pipeline(
                stages=tuple(
                    Stage(
                        start=self._layers * s,
                        stop=self._layers * (s + 1),
                        devices=tuple(device.name for device in node.devices),
                        shares=(1,) * len(node.devices),
                    )
                    for s, node in enumerate(line)
                ),
                micro_batches=1,
            )
            for line in lines
        )
        names = [device.name for node in self.nodes for device in node.devices]
        return Plan(
            number=1,
            strategies=(Strategy(modules=(ModulePlan(module="model", pipelines=pipelines),)),),
            micro_batch=1,
            global_batch=self.batch,
            binding={name: f"i-{name}" for name in names},
        )

    def records(self) -> Write:
        """What a leader would have written: the plan is in force, from a profile that was fitted."""
        profile = derive(MODEL, float(TOKENS), 1)
        profile = msgspec.structs.replace(
            profile,
            fitted=True,
            collective_seconds={len(self.nodes[0].devices): 1e-4},  # so that nothing is left to be fitted
            block=msgspec.structs.replace(profile.block, seconds=SECONDS_A_TOKEN),
        )
        problem = Problem(
            cluster=Cluster(nodes=self.nodes), profile=profile, global_batch=self.batch, micro_batch=1
        )
        history = HistoryRecord(number=1, plan=self.plan, problem=problem, reason="for the benchmark")
        return Write(job=JOB, records=(self.spec, history, PlanRecord(plan=self.plan, epoch=1, step=0)))

    def greetings(self, node: Node) -> Iterator[bytes]:
        """An agent's hello, and its workers'."""
        record = NodeRecord(node=node.name, devices=node.devices, address="127.0.0.1", agent=f"a-{node.name}")
        yield encode(AgentHello(record=record))
        for rank, device in enumerate(node.devices):
            hello = Hello(job=JOB, local_rank=rank, world_size=self.world_size, pid=1000 + rank, spec=self.spec)
            yield encode(self._up(device.name, hello))

    def reports(self, node: Node) -> list[Template]:
        """Of each of the node's devices, a step's report."""
        work = float(TOKENS * self._layers) / len(node.devices)
        found = []
        for device in node.devices:
            first = device.name == self.plan.members[0]
            measured = Measurement(
                device=device.name,
                plan=1,
                step=_STEP,
                tokens=TOKENS,
                block_seconds=work * SECONDS_A_TOKEN,
                block_work=work,
                forward_seconds=work * SECONDS_A_TOKEN / 3,
                backward_seconds=work * SECONDS_A_TOKEN * 2 / 3,
                tensor_seconds=0.01,
                boundary_seconds=0.02,
                reduce_seconds=0.03,
                vote_seconds=0.001,
                input_seconds=_TIME,
                step_seconds=1.0,
                micro_batches=1,
                squares=float(TOKENS * TOKENS),
                longest=TOKENS,
                lengths={48: 1},
                memory_bytes=1 << 35,
            )
            report = Report(measurement=measured, loss=2.5 if first else None, tokens=TOKENS if first else None)
            found.append(Template(encode(self._up(device.name, report))))
        return found

    def _up(self, device: str, body: Hello | Report) -> Message:
        return FromClient(client=f"w-{device}", job=JOB, device=device, incarnation=f"i-{device}", body=body)


def write(store: Store, keys: Keys, asked: Write) -> None:
    """Has the store hold what a leader would have written."""
    for ops in StoreTransactions(keys, store.limits).transactions(asked):
        store.transact((), ops)


#: Values that a template holds the place of, and how wide the place is: JSON lets blanks stand before a number.
_STEP, _TIME = 987_654_321, 987_654.321_098
_WIDE_STEP, _WIDE_TIME = 9, 17


class Template:
    """A report of any step, its bytes always as many; `input_seconds` says when it was sent."""

    def __init__(self, text: bytes) -> None:
        at, place = (text.partition(key)[0] for key in (b"%d" % _STEP, repr(_TIME).encode()))
        assert len(at) < len(place) < len(text), "a report has its step before its times"
        middle = text[len(at) + len(b"%d" % _STEP) : len(place)]
        self._format = b"%b%%%dd%b%%%d.6f%b" % (
            _quoted(at),
            _WIDE_STEP,
            _quoted(middle),
            _WIDE_TIME,
            _quoted(text[len(place) + len(repr(_TIME)) :]),
        )

    def at(self, step: int, seconds: float) -> bytes:
        return self._format % (step, seconds)


def _quoted(text: bytes) -> bytes:
    return text.replace(b"%", b"%%")
