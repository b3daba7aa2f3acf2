"""A data network that is broken, while agents, leader and store reach each other: who can go on with whom.

Members that lose each other recover together: mostly a connection broke, and a new one stands. While such a
fault lasts, or the job's steps have stopped, the agents try whom they reach, round after round. Where a pair of
nodes fails twice in a row, the job goes on with the largest set of nodes that reach each other and hold all
state; the others are fenced off. Their devices stand by, and are used again once they have reached the others
for a while. Where no such set is, the job waits, and ends when the network does not heal. Members that cannot
go on together although their agents reach each other try again ever more rarely, and not for ever.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from typing import Any

import msgspec
from elasticd_planner.spec.cluster import node_of

from elasticd.machines.job.copies.rollback import older_state, waits
from elasticd.machines.job.lifecycle.fence import fault
from elasticd.machines.job.lifecycle.job_end import stop
from elasticd.machines.job.state.data_network import Out, nodes_name
from elasticd.machines.job.state.job_state import JobPhase, Worker, incarnations
from elasticd.machines.job.state.reachable_nodes import Pair, together, words
from elasticd.machines.job.state.transaction import Transaction, doubled
from elasticd.wire.coordinator import TryReach, Unreached

#: Seconds for which a round's answers are waited for.
ANSWER_SECONDS = 3.0
#: Seconds between two rounds, doubled for each in which all reached all, up to the most; and between two while
#: the job runs without some nodes.
PAUSE_SECONDS, MOST_PAUSE_SECONDS, OUT_SECONDS = 1.0, 60.0, 10.0
#: Seconds that a proposal is open until agents try whether its members reach each other.
PATIENT_SECONDS = 5.0
#: Seconds before the next regroup in a row, doubled from the third on, up to the most.
AGAIN_SECONDS, MOST_AGAIN_SECONDS = 1.0, 60.0
#: Regroups in a row without a step, after which the job ends.
MOST_REGROUPS = 8
#: Seconds that a network has to heal where no nodes that reach each other can go on.
HEALING_SECONDS = 60.0


def regroup(turn: Transaction, why: str, *, at_once: bool = False) -> None:
    """Its members stand still though nobody is lost: they are to recover together, each time after a longer
    pause, but for the first time `at_once`."""
    count = turn.job.network.regroups + 1
    if count > MOST_REGROUPS:
        apart = turn.job.network.apart()
        which = f"; {words(apart)}" if apart else "; their agents reach each other"
        stop(
            turn, f"its members could not go on together {MOST_REGROUPS} times in a row{which}; at last: {why}"
        )
        return
    fault(turn, {}, why)
    pause = doubled(AGAIN_SECONDS, max(1, count - 1), MOST_AGAIN_SECONDS)
    _changed(turn, regroups=count)
    turn.change("planning", not_before=0.0 if at_once and count == 1 else turn.now + pause)


def stepped(turn: Transaction) -> None:
    """The members made a step together."""
    if turn.job.network.regroups:
        _changed(turn, regroups=0)


def heard(turn: Transaction, node: str, body: Unreached) -> None:
    """An agent tried whom it reaches."""
    network = turn.job.network
    if node in network.asked and body.round == network.round:
        others = [other for other in body.nodes if other != node and other in turn.nodes]
        turn.set(network=network.answered(node, others))


def due(turn: Transaction) -> None:
    """Ends a round, acts on what is known, and begins the next."""
    network = turn.job.network
    under_way = network.asked and turn.now - network.asked_at < ANSWER_SECONDS
    if not under_way and (network.asked or network.heard):
        turn.set(network=network.closed())
    if turn.job.network.failed:
        _judge(turn)
    _ask(turn)


def _judge(turn: Transaction) -> None:
    """Closes what pairs that are apart can never bring to an end. While survivors say what they hold, nothing
    is under way: `divided` looks when all have."""
    job = turn.job
    if job.phase is JobPhase.RUNNING or (job.phase is JobPhase.PROPOSED and _stands_still(turn)):
        apart = job.network.apart(_nodes(job.plan.members if job.plan is not None else ()))
        if apart and _stands_still(turn):
            regroup(turn, f"{words(apart)}, and the job's steps have stopped", at_once=True)
    elif job.phase is JobPhase.PROPOSED and job.proposal is not None:
        recovery, old = job.proposal.recovery, job.proposal.old
        sources = recovery.sources if recovery is not None else old.members if old is not None else ()
        apart = job.network.apart(_nodes((*sources, *job.proposal.plan.members)))
        if apart:
            turn.give_up(words(apart))


def _stands_still(turn: Transaction) -> bool:
    """Returns True if members of a plan that was running have lost each other, or made no step for too long."""
    job = turn.job
    if job.losses.fence is not None or job.plan is None:
        return False
    since = max(job.steps.progress.at, job.since if job.phase is JobPhase.RUNNING else 0.0)
    late = turn.now - since > turn.settings.hang_seconds + 2 * job.steps.progress.slowest
    return late or any(worker.peers_lost_at is not None for worker in job.workers.values())


def _ask(turn: Transaction) -> None:
    """Begins a round where one is due."""
    job, network = turn.job, turn.job.network
    if network.asked or turn.now < network.next_at:
        return
    there = sorted({worker.node for worker in job.workers.values() if not worker.left})
    addresses = {name: turn.nodes[name].record.reach for name in there if turn.here(name)}
    addresses = {name: address for name, address in addresses.items() if address}
    asked, pause = _asked(turn, addresses)
    if not asked or len(addresses) < 2:
        return
    number = network.round + 1
    for node in asked:
        others = {name: address for name, address in addresses.items() if name != node}
        turn.order(node, TryReach(job=job.job, round=number, targets=others))
    _changed(turn, round=number, asked=tuple(asked), asked_at=turn.now, heard={}, next_at=turn.now + pause)


def _asked(turn: Transaction, nodes: Collection[str]) -> tuple[list[str], float]:
    """The nodes that are to test which nodes they reach, and seconds until the next round."""
    job, network = turn.job, turn.job.network
    long = job.phase is JobPhase.PROPOSED and turn.now - job.since >= PATIENT_SECONDS
    held_up = job.phase is JobPhase.RECOVERING and bool(network.apart())  # whatever the recovery began with
    if network.regroups or long or held_up or _stands_still(turn):
        return [*nodes], doubled(PAUSE_SECONDS, network.quiet + 1, MOST_PAUSE_SECONDS)
    troubled = {*network.out} | {node for both in network.apart() for node in both}
    if job.planning.setback is not None:  # a plan with other nodes was given up: maybe nobody reaches them
        troubled |= {*nodes}
    if job.plan is not None:  # its members reach each other, as they train
        troubled -= _nodes(job.plan.members)
    if network.quiet:
        _changed(turn, quiet=0)
    return [node for node in nodes if node in troubled], OUT_SECONDS


def divided(turn: Transaction, owners: Iterable[Worker], restores: Callable[[frozenset[str]], bool]) -> bool:
    """All that live have said what they hold. Has a plan made for those who can go on, and then fences off the
    others; whether there was something to do, or to wait for. restores: whether the copies on these nodes are a
    whole state."""
    job, owners = turn.job, list(owners)
    network, held = job.network, {worker.node for worker in owners}
    apart = network.apart(held)
    if not apart:
        if network.chosen or network.unplanned or network.hopeless_since is not None:
            _changed(turn, chosen=(), unplanned={}, hopeless_since=None)
        return _replanned(turn)
    devices = Counter(worker.node for worker in job.workers.values() if worker.node in held and not worker.left)
    chosen = together(devices, apart, lambda nodes: network.untried(nodes) and restores(nodes))
    if chosen is None and older_state(turn):
        chosen = together(devices, apart, network.untried)
    if chosen is None:
        _hopeless(turn, apart)
    elif network.chosen != tuple(sorted(chosen)):
        _changed(turn, chosen=tuple(sorted(chosen)))
        turn.change("planning", remedy=None, decided=None)
    elif job.planning.remedy is not None and _nodes(job.planning.remedy.plan.members) & (held - chosen):
        turn.change("planning", remedy=None, decided=None)  # it was asked for before
    elif job.planning.remedy is not None:
        gone = incarnations(worker for worker in owners if worker.node not in chosen)
        _leave_out(turn, held - chosen)
        fault(turn, gone, f"{words(apart)}: the job goes on with {nodes_name(chosen)}")
    return True


def unplanned(turn: Transaction, why: str) -> bool:
    """There is no plan for the devices at hand: the next smaller set of nodes is tried, if this one was chosen
    from parts of a network. Whether it was."""
    network = turn.job.network
    if not network.chosen:
        return False
    _changed(turn, chosen=(), unplanned={**network.unplanned, nodes_name(network.chosen): why})
    return True


def _changed(turn: Transaction, **changes: Any) -> None:
    turn.set(network=msgspec.structs.replace(turn.job.network, **changes))


def _replanned(turn: Transaction) -> bool:
    """Returns True if the plan at hand has nodes that the survivors do not reach: another is made, without
    them."""
    remedy = turn.job.planning.remedy
    if remedy is None:
        return False
    nodes = _nodes(remedy.plan.members)
    if nodes == usable(turn, dict.fromkeys(nodes, 1)):
        return False
    turn.change("planning", remedy=None, decided=None)
    return True


def _leave_out(turn: Transaction, nodes: Iterable[str]) -> None:
    """Each further time they are left out for twice as long, until they were with the others for the longest of
    such times."""
    network, settings = turn.job.network, turn.settings
    out = dict(network.out)
    for node in nodes:
        again = node in out and turn.now - out[node].until < settings.most_retry_seconds
        times = out[node].times + 1 if again else 1
        seconds = doubled(settings.retry_seconds, times, settings.most_retry_seconds)
        out[node] = Out(times=times, until=turn.now + seconds)
    _changed(turn, out=out)


def _hopeless(turn: Transaction, apart: frozenset[Pair]) -> None:
    network = turn.job.network
    since = turn.now if network.hopeless_since is None else network.hopeless_since
    _changed(turn, hopeless_since=since)
    why = f"{words(apart)}, and no nodes that do hold all of the state"
    if network.unplanned:
        text = "; ".join(
            f"there is no plan for {nodes}: {reason}" for nodes, reason in network.unplanned.items()
        )
        why = f"{words(apart)}, and the job cannot go on with a part of them: {text}"
    if turn.now - since >= HEALING_SECONDS:
        stop(turn, f"{why}: it was waited for {HEALING_SECONDS:g} s")
    else:
        waits(turn, f"{why}; the job goes on once they do, or ends after {HEALING_SECONDS:g} s")


def usable(turn: Transaction, devices: dict[str, int]) -> set[str]:
    """Those of these nodes, with so many devices each, that a plan may use together: all that reach the nodes
    that hold state, and each other."""
    job, network = turn.job, turn.job.network
    if not network.failed and not network.out:
        return {*devices}
    bound = job.bound(job.plan)
    must = {worker.node for worker in bound if not worker.left} & devices.keys()
    if network.chosen and job.phase is JobPhase.RECOVERING:
        must &= {*network.chosen}
    waiting = {node for node, out in network.out.items() if turn.now < out.until} - must
    if job.phase is JobPhase.RECOVERING:  # what is left is needed
        waiting = set()
    free = {node: count for node, count in devices.items() if node not in must and node not in waiting}
    apart = network.apart(devices)
    barred = {node for both in apart if {*both} & must for node in both}
    free = {node: count for node, count in free.items() if node not in barred}
    return must | (together(free, apart, lambda nodes: True) or frozenset())


def _nodes(devices: Iterable[str]) -> set[str]:
    return {node_of(device) for device in devices}
