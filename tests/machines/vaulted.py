"""A world whose agents keep snapshots: each worker's on its own node and on the next, until a newer set is
whole."""

from __future__ import annotations

from elasticd_planner.spec.plan import Plan

from elasticd.machines.job.state.events import AgentUp, CoordinatorSend, Effect, Received
from elasticd.machines.job.state.job_state import JobSettings
from elasticd.records import Proposal
from elasticd.wire.snapshots import Held, SnapshotInventory, SnapshotSetComplete
from tests.machines.cast import JOB, FakeWorker, node_record
from tests.machines.world import World

#: No room for replicas on the test's model: whoever dies takes a part of the state along.
TIGHT = 3_000_000


class Vaulted(World):
    """`every`: steps from one snapshot to the next; `vaults`: what each node's agent holds, and `brought` the
    plans that first ranks gave to it. `quiet` agents send nothing to their peers."""

    def __init__(
        self,
        nodes: tuple[str, ...] = ("alpha", "beta"),
        settings: JobSettings | None = None,
        memory: int = TIGHT,
        every: int = 1,
    ) -> None:
        self.every = every
        self.vaults: dict[str, dict[Held, None]] = {name: {} for name in nodes}
        self.brought: dict[str, dict[int, Plan]] = {name: {} for name in nodes}
        self.quiet: set[str] = set()
        self.gone_back: list[int] = []
        super().__init__(nodes, settings, memory)
        self.inbox.clear()
        for name in nodes:
            self.records[name] = node_record(name, memory=memory, snapshots=f"{name}:1")
            self.say(AgentUp(record=self.records[name]))

    # -- agents --------------------------------------------------------------------------------------------

    def say_keeps(self, node: str) -> None:
        if node not in self.cut:
            plans = tuple(self.brought[node].values())
            body = SnapshotInventory(job=JOB, snapshots=tuple(self.vaults[node]), plans=plans)
            self.say(Received(node=node, message=body))

    def reconnect(self, node: str) -> None:
        super().reconnect(node)
        if JOB in self.state.jobs or self.vaults[node]:
            self.say_keeps(node)

    def snapshot(self) -> None:
        """Each member's share goes into its own agent's memory, and from there to the next node's."""
        plan = next((p for p in self._plans() if p.number == self._running()), None)
        if plan is None:
            return
        nodes = sorted(plan.nodes)
        for device in plan.members:
            worker = self.workers[device]
            if worker.alive and worker.plan == plan.number:
                held = Held(
                    job=JOB,
                    device=device,
                    incarnation=worker.incarnation,
                    plan=plan.number,
                    step=self.steps,
                    node=worker.node,
                    size=100,
                )
                self._keep(worker, held, plan if device == plan.members[0] else None, nodes)

    def _keep(self, worker: FakeWorker, held: Held, plan: Plan | None, nodes: list[str]) -> None:
        peer = nodes[(nodes.index(worker.node) + 1) % len(nodes)]
        for node in dict.fromkeys((worker.node, worker.node if worker.node in self.quiet else peer)):
            self.vaults[node][held] = None
            if plan is not None:
                self.brought[node][plan.number] = plan
            self.say_keeps(node)

    def _running(self) -> int:
        return max((worker.plan for worker in self.workers.values() if worker.alive), default=0)

    def _execute(self, effect: Effect) -> None:
        if isinstance(effect, CoordinatorSend) and isinstance(effect.message, SnapshotSetComplete):
            self._freed(effect.node, effect.message)
        else:
            super()._execute(effect)

    def _freed(self, node: str, whole: SnapshotSetComplete) -> None:
        """Older ones go. Nobody may be told so of a set that is not whole."""
        holders: dict[str, set[str]] = {}
        for name, vault in self.vaults.items():
            for held in vault:
                if (held.plan, held.step) == (whole.plan, whole.step):
                    holders.setdefault(held.device, set()).add(name)
        plan = next(
            plan for known in self.brought.values() for plan in known.values() if plan.number == whole.plan
        )
        least = 2 if len(plan.nodes) > 1 else 1
        if not self.lost_nodes:
            assert all(len(holders.get(device, ())) >= least for device in plan.members), "it is whole"
        vault = self.vaults[node]
        self.vaults[node] = {h: None for h in vault if (h.plan, h.step) >= (whole.plan, whole.step)}
        if len(self.vaults[node]) < len(vault):
            self.say_keeps(node)

    @property
    def lost_nodes(self) -> set[str]:
        return {name for name in self.records if name in self.cut}

    # -- the job ---------------------------------------------------------------------------------------------

    def train(self, steps: int = 1) -> None:
        for _ in range(steps):
            before = self.steps
            super().train(1)
            if self.steps > before and self.steps % self.every == 0:
                self.snapshot()
                self.settle()

    def _vote(self) -> None:
        """A recovery from older state goes back to its step, once all are ready."""
        proposal = self.proposal()
        if proposal is not None and self._older(proposal) and self._ready(proposal):
            assert proposal.recovery is not None
            step = proposal.recovery.step if proposal.old is not None else int(proposal.checkpoints[0][5:13])
            self.gone_back.append(self.steps - step)
            self.steps = step
        super()._vote()

    def _older(self, proposal: Proposal) -> bool:
        recovery = proposal.recovery
        return recovery is not None and (proposal.old is None or recovery.all_read(proposal.old))

    def _ready(self, proposal: Proposal) -> bool:
        workers = [self.workers[device] for device in self._members(proposal)]
        ready = all(w.alive and w.prepared == proposal.number != w.aborted for w in workers)
        return proposal.status == "open" and ready and any(w.plan < proposal.number for w in workers)

    def kill_all(self) -> None:
        for device, worker in self.workers.items():
            if worker.alive:
                self.kill(device)

    def lose(self, node: str) -> None:
        """A whole node is gone, with its agent and what that held."""
        for worker in self.workers.values():
            if worker.node == node:
                worker.alive = False
        self.cut.add(node)
        self.vaults[node].clear()
