"""Snapshots as they come: an agent says which it holds, and all hear which older ones are not needed any
more."""

from __future__ import annotations

import msgspec
from elasticd_planner.spec.mesh import JobPlan

from elasticd.machines.job.state.snapshot_sets import Moment
from elasticd.machines.job.state.transaction import Transaction
from elasticd.wire.snapshots import SnapshotInventory, SnapshotSetComplete

#: Seconds between two notes of a whole set: one is made every few steps, and `status` shows the newest.
NOTE_SECONDS = 10.0


def keeps(turn: Transaction, node: str, body: SnapshotInventory) -> None:
    """All that an agent holds of this job. Said again it changes nothing. A node that has no part in the job
    has no say in this: its agent repeats it once a worker of the job says hello there."""
    sender = turn.nodes.get(node)
    if sender is None or not turn.job.has_part(sender.record):
        return
    snapshots = [held for held in body.snapshots if held.job == turn.job.job]
    turn.set(snapshots=turn.job.snapshots.replaced(node, snapshots, body.plans))
    sets = turn.job.snapshots
    before = sets.whole
    # A first rank's agent brings the plan, maybe after all others have said what they hold.
    for moment in sorted(sets.kept[node], reverse=True):
        if before is not None and moment <= before:
            break
        plan = plan_of(turn, moment.plan)
        if plan is not None and sets.is_whole(moment, plan, _takers(turn)):
            _whole(turn, moment, plan)
            return
    if before is not None and any(moment < before for moment in sets.kept[node]):
        turn.order(node, _complete(turn, before))  # it missed the word, or a leader before this one gave it


def _whole(turn: Transaction, moment: Moment, plan: JobPlan) -> None:
    snapshots = turn.job.snapshots
    turn.set(snapshots=msgspec.structs.replace(snapshots, whole=moment))
    for node in sorted(snapshots.kept):
        if snapshots.kept[node]:
            turn.order(node, _complete(turn, moment))
    if snapshots.told_at is None or turn.now - snapshots.told_at >= NOTE_SECONDS:
        turn.set(snapshots=msgspec.structs.replace(turn.job.snapshots, told_at=turn.now))
        nodes = snapshots.holding(moment)
        text = f"the state of step {moment.step} is kept in memory on {', '.join(nodes)}"
        held = [each for node in nodes for each in snapshots.kept[node][moment]]
        cost = {
            "bytes": max(each.size for each in held),
            "seconds": max(each.seconds for each in held),
            "every": max(each.every for each in held),
        }
        turn.note("snapshot", text, number=plan.number, step=moment.step, nodes=nodes, **cost)


def _complete(turn: Transaction, moment: Moment) -> SnapshotSetComplete:
    return SnapshotSetComplete(job=turn.job.job, plan=moment.plan, step=moment.step)


def plan_of(turn: Transaction, number: int) -> JobPlan | None:
    """The plan of this number, if this leader knows it: from the store, or with a snapshot."""
    known = next((plan for plan in turn.job.candidates if plan.number == number), None)
    return known or turn.job.snapshots.plans.get(number)


def _takers(turn: Transaction) -> set[str]:
    return {name for name, node in turn.nodes.items() if node.record.snapshots}


def secured(turn: Transaction, plan: JobPlan) -> Moment | None:
    """The newest moment of `plan` whose snapshots can be read now, each on some node, if there is one."""
    for moment in turn.job.snapshots.moments():
        if moment.plan == plan.number:
            copies = turn.job.snapshots.copies(moment, plan, turn.connected)
            if all(device in copies for device in plan.members):
                return moment
    return None


def words(moment: Moment, nodes: list[str]) -> str:
    """The place of a set, for people."""
    return f"snapshots of step {moment.step} in memory on {', '.join(nodes)}"
