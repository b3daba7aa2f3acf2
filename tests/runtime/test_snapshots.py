"""Ranks that go on from snapshots train like one process that nothing happened to, in float64."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from elasticd_migration.local_state import LocalState
from elasticd_planner.layout.layouts import Layouts
from elasticd_planner.spec.plan import Plan, StatePolicy

from elasticd.codec.message import Message
from elasticd.records import Proposal, Recovery
from elasticd.runtime.comm.groups import PlanGroups
from elasticd.runtime.engine.engine import Engine, StepDone, first_state
from elasticd.runtime.snapshot.memory_file import BadSnapshot, read
from elasticd.runtime.snapshot.restore import Snapshots
from elasticd.runtime.snapshot.snapshotter import Snapshotter
from elasticd.runtime.switch.move import move, prepare
from elasticd.wire.snapshots import Held, Snapped
from elasticd.wire.worker import Welcome
from tests import sizes
from tests.runtime import gang
from tests.runtime.test_engine_parity import SEED, plan_of, stage, unpaced
from tests.runtime.test_zero import STEPS, check, recipe

#: The step that is gone back to, and the one that the survivors had come to.
BACK, AHEAD = 2, 3

#: a/1 is gone after the old plan, c/0 joins for the new one. b/0 stands in for two.
OLD = plan_of(
    (5, [stage(0, 4, ("a/0", 3), ("a/1", 5)), stage(4, 6, ("b/0", 1))]), (3, [stage(0, 6, ("b/1", 1))])
)
NEW = plan_of(
    (4, [stage(0, 3, ("b/0", 2), ("c/0", 1)), stage(3, 6, ("a/0", 1))]), (4, [stage(0, 6, ("b/1", 1))])
)
STANDS = {"a/0": "a/0", "a/1": "b/0", "b/0": "b/0", "b/1": "c/0"}
POLICIES = {
    "plain to zero 2": (StatePolicy(), StatePolicy(zero=2, replicas=2)),
    "zero 1 to plain": (StatePolicy(zero=1, replicas=1), StatePolicy()),
}


class Shelf:
    """The agents: snapshots as files in a folder that all see."""

    def __init__(self, folder: str, device: str) -> None:
        self._folder, self._device = Path(folder), device
        self.snapshotter: Snapshotter | None = None

    def tell(self, message: Message, fd: int | None = None) -> None:
        assert isinstance(message, Snapped)
        assert fd is not None
        held = message.held
        assert (message.plan is not None) == (held.device == OLD.members[0])
        half = self._path(held).with_suffix(".half")
        half.write_bytes(os.pread(fd, held.size, 0))
        half.rename(self._path(held))

    def has(self, step: int) -> bool:
        """Of this device."""
        return any(self._folder.glob(f"{self._device.replace('/', ':')}-*-{step}.snap"))

    def _path(self, held: Held) -> Path:
        return self._folder / f"{held.device.replace('/', ':')}-{held.plan}-{held.step}.snap"

    def fetch(self, wanted: Held) -> tuple[Held, int]:
        path = self._path(wanted)
        wait(path.exists)
        size = path.stat().st_size
        return Held(**{**{f: getattr(wanted, f) for f in wanted.__struct_fields__}, "size": size}), os.open(
            path, os.O_RDONLY
        )


def wait(condition: Any, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def worker(device: str, store: Any, folder: str, old: Plan, new: Plan) -> dict[str, Any]:
    made, shelf = recipe(), Shelf(folder, device)
    done: list[StepDone] = []
    engine = None
    if device in old.members:
        engine = first(device, store, old)
        snapshotter = Snapshotter(
            1, "job", lambda: Welcome(device=device, incarnation="1f", address="127.0.0.1"), shelf.tell
        )
        for step in range(AHEAD):
            if step + 1 == BACK:
                wait(lambda: snapshotter.ready(old.number, BACK))
            done.append(
                engine.step(step, lambda: 0, snapshot=lambda step=step: snapshotter.ready(old.number, step + 1))
            )
            snapshotter.voted(step + 1, done[-1].outcome.snapshot, engine.layouts, engine.state)
            assert all(done[-1].outcome.snapshot) or step + 1 != BACK
        engine.settle()
        wait(lambda: shelf.has(BACK))  # what is on its way is dropped at the end
        snapshotter.end()
    if device not in new.members:
        return {"losses": [d.outcome.vote.loss for d in done]}
    sources = dict.fromkeys(STANDS.values(), "1f")
    recovery = Recovery(fence=1, step=BACK, sources=sources, snapshots=STANDS)
    proposal = Proposal(number=2, epoch=1, plan=new, old=old, recovery=recovery)
    keeping = replace(made, snapshots=Snapshots(job="job", fetch=shelf.fetch))
    prepared = prepare(
        proposal,
        keeping,
        device,
        unpaced,
        lambda part: PlanGroups(f"plan/2/{part}", device, "127.0.0.1", store),
    )
    side = move(prepared, engine, AHEAD, made)
    assert side.step == BACK
    engine = prepared.engine
    assert engine is not None
    again = [engine.step(step, lambda: 0) for step in range(BACK, STEPS)]
    engine.settle()
    gradients = [p.grad is not None for _, (_, p) in engine.module.local.parameters.items()]
    return {
        "first": [d.outcome.vote.loss for d in done],
        "losses": [d.outcome.vote.loss for d in again],
        "norms": [d.outcome.vote.norm for d in again],
        "held": held_by(engine.state()),
        "gradients left": any(gradients),
        "bytes": (side.bytes_sent, side.bytes_lacking),
    }


def first(device: str, store: Any, plan: Plan) -> Engine:
    made = recipe()
    layouts = Layouts(made.model.spec, plan)
    plan_groups = PlanGroups("plan/1", device, "127.0.0.1", store)
    engine = Engine(made, layouts, plan_groups, unpaced)
    engine.adopt(first_state(made.model, layouts, device, SEED))
    return engine


def held_by(state: LocalState) -> dict[Any, Any]:
    return {
        (item.name, item.role): [
            (shard.box.start, shard.box.stop, {k: p.detach().cpu().numpy() for k, p in shard.planes.items()})
            for shard in tensor.shards
        ]
        for item, tensor in state.tensors.items()
    }


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", sizes.beside(["plain to zero 2"], POLICIES))
def test_other_ranks_go_on_from_what_all_had_two_steps_ago(name: str, tmp_path: Path) -> None:
    before, after = POLICIES[name]
    old, new = OLD.replace(state=before), NEW.replace(number=2, state=after)
    names = tuple(dict.fromkeys((*old.members, *new.members)))
    results = gang.run(__file__, "worker", names, str(tmp_path), old, new, seconds=280)
    head = results["a/1"]["losses"][:BACK]
    survivors = {device: results[device] for device in new.members}
    assert survivors["b/1"]["first"][:BACK] == head
    lost = results["a/1"]["losses"][BACK:]
    assert survivors["a/0"]["losses"][: len(lost)] == pytest.approx(lost, abs=1e-10), "the same steps once more"
    for result in survivors.values():
        result["losses"] = [*head, *result["losses"]]
        del result["first"]
    norms = survivors["a/0"]["norms"]
    whole = {device: {**result, "norms": norms} for device, result in survivors.items()}
    check(new, whole, since=BACK)


def test_a_snapshot_of_another_step_is_refused(tmp_path: Path) -> None:
    from tests.checkpoints.support import THREE
    from tests.migration.ranks import local
    from tests.runtime.test_memory_file import WHOLE, shares, written

    device = THREE.plan.members[0]
    file, size = written(local(WHOLE, THREE, device), shares(THREE)[device], step=7)
    assert read(file.fd, size)[0].step == 7
    stands = dict.fromkeys(THREE.plan.members, device)
    recovery = Recovery(fence=1, step=8, sources={}, snapshots=stands)

    def fetch(wanted: Held) -> tuple[Held, int]:
        assert wanted.incarnation == "aa"
        held = Held(**{**{f: getattr(wanted, f) for f in wanted.__struct_fields__}, "size": size})
        return held, os.dup(file.fd)

    with pytest.raises(BadSnapshot, match="step 7"):
        Snapshots(job="job", fetch=fetch).state(THREE.plan, recovery, device)
