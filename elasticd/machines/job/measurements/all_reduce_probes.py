"""The seconds of an all-reduce among the workers themselves, asked for before a job's first plan.

Until steps have shown it, the planner would take the links' configured speed for it. An all-reduce of a few
hundred kilobytes takes several times as long as that: the hosts' own time is most of it. So the workers of a
few nodes make some, each between two pieces of computation, as in a step.
"""

from __future__ import annotations

import math
from collections import defaultdict
from statistics import median

import msgspec
from elasticd_planner.cost.model_profile import ModelProfile

from elasticd.machines.job.state.job_state import Worker
from elasticd.machines.job.state.parts.job_start import Rehearsal
from elasticd.machines.job.state.transaction import Transaction
from elasticd.wire.worker import Rehearse, Rehearsed

#: Nodes whose workers are asked: what it takes on one of them, it takes on the others.
NODES = 2
#: Bytes of an all-reduce that is rehearsed, at most.
LARGEST_BYTES = 1 << 26
#: Seconds of one that are believed, at most.
LONGEST_SECONDS = 60.0


def awaited(turn: Transaction, profile: ModelProfile) -> bool:
    """Returns True if answers may still come, for which the first plan waits. The first time this asks for
    them."""
    job = turn.job
    if job.learned.profile is not None or job.plan is not None:
        return False
    if job.start.rehearsal is None:
        _ask(turn, profile)
    rehearsal = turn.job.start.rehearsal
    assert rehearsal is not None
    if turn.now >= rehearsal.until:
        return False
    return any(not worker.left for worker in job.workers.values() if worker.device in rehearsal.awaited)


def _ask(turn: Transaction, profile: ModelProfile) -> None:
    groups = _groups(turn)
    awaited = set[str]()
    for members in groups:
        widths = _widths(profile, len(members))
        size = round(profile.boundary_bytes * profile.tokens)
        if not widths or not 0 < size <= LARGEST_BYTES:
            continue
        order = Rehearse(members=tuple(worker.device for worker in members), widths=widths, size=size)
        awaited.add(members[0].device)
        for worker in members:
            turn.send(worker.node, worker.client, order)
    until = turn.now + turn.settings.probe_seconds
    turn.change("start", rehearsal=Rehearsal(until=until, awaited=frozenset(awaited)))


def _groups(turn: Transaction) -> list[list[Worker]]:
    """The workers of the first few nodes that have two or more, by device."""
    by_node: dict[str, list[Worker]] = defaultdict(list)
    for _, worker in sorted(turn.job.workers.items()):
        if worker.rehearses and not worker.left:
            by_node[worker.node].append(worker)
    return [members for _, members in sorted(by_node.items()) if len(members) > 1][:NODES]


def _widths(profile: ModelProfile, most: int) -> tuple[int, ...]:
    """Powers of two, and all of the node: of those that a group may have, and of which nothing is known."""
    if not profile.block.collectives:
        return ()
    known = profile.collective_seconds.keys() | profile.collective_token_seconds.keys()
    most = min(most, profile.share_units)
    widths = {*(1 << n for n in range(1, most.bit_length())), most}
    allowed = set(profile.widths) or widths
    return tuple(sorted(width for width in widths & allowed - known if width > 1))


def rehearsed(turn: Transaction, worker: Worker, body: Rehearsed) -> None:
    """A group's answer; what is no time is not believed."""
    rehearsal = turn.job.start.rehearsal
    if rehearsal is None or worker.device not in rehearsal.awaited:
        return
    by_width = dict(rehearsal.found)
    for width, seconds in body.seconds.items():
        if width > 1 and 0 < seconds <= LONGEST_SECONDS and math.isfinite(seconds):
            by_width[width] = (*by_width.get(width, ()), seconds)
    left = rehearsal.awaited - {worker.device}
    turn.change("start", rehearsal=msgspec.structs.replace(rehearsal, awaited=left, found=by_width))


def learn(turn: Transaction, profile: ModelProfile) -> None:
    """The job's first profile, with what was rehearsed."""
    rehearsal = turn.job.start.rehearsal
    known = profile.collective_seconds.keys() | profile.collective_token_seconds.keys()
    by_width = rehearsal.found if rehearsal is not None else {}
    seconds = {width: median(each) for width, each in sorted(by_width.items()) if width not in known}
    collectives = {**profile.collective_seconds, **seconds}
    profile = msgspec.structs.replace(profile, collective_seconds=collectives)
    turn.change("learned", profile=profile, rehearsed=frozenset(seconds))
    if seconds:
        words = ", ".join(f"{each * 1e3:.2f} ms among {width}" for width, each in seconds.items())
        turn.note("rehearsed", f"an all-reduce takes {words}", seconds=seconds)
