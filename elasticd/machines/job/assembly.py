"""Assembly of a job: torchruns join, their workers say hello.

A torchrun has a place: its node's name, or, where each device has a torchrun of its own, the device's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
from elasticd_planner.profiling.samples import ModelBytes
from elasticd_planner.readable import counted
from elasticd_planner.spec import mesh
from elasticd_planner.spec.cluster import node_of

from elasticd.codec.decoding import shown
from elasticd.machines.job.faults.user_exceptions import MOST_KIND, MOST_TEXT, MOST_THROWN, MOST_TRACEBACK
from elasticd.machines.job.faults.user_exceptions import same as _alike
from elasticd.machines.job.lifecycle.drain import only_drained
from elasticd.machines.job.lifecycle.job_end import AGAIN, ANEW, affirm, stop
from elasticd.machines.job.lifecycle.stop_request import BY_REQUEST
from elasticd.machines.job.lost_workers import lost
from elasticd.machines.job.state.job_state import JobPhase, JobState, Worker, stranger
from elasticd.machines.job.state.parts.job_start import Joiner
from elasticd.machines.job.state.transaction import Transaction
from elasticd.records import AnyJobSpec, JobSpec, MeshJobSpec, ModuleSpec, Thrown
from elasticd.version import __version__
from elasticd.wire.coordinator import FromClient, Unread, WorkerLost
from elasticd.wire.rendezvous import Join, Joined, Leave, WorkerFailure
from elasticd.wire.worker import Closed, Hello, Rejected

#: Places that are there which a sentence names.
MOST_NAMED = 8


def join(turn: Transaction, node: str, up: FromClient, body: Join) -> None:
    """A torchrun asks to take part in a job whose nodes are still being counted."""
    if wrong := _disagreement(turn, _place(node, body), body):
        turn.send(node, up.client, Rejected(reason=wrong))
    elif not failed_to_start(turn, _place(node, body), body.failure, node, up):
        if _place(node, body) not in turn.job.start.joiners:
            turn.change("start", arrived=turn.now)
        remember(turn, node, up, body)
        turn.change("start", fresh=turn.job.start.fresh or body.fresh)


def join_assembling(turn: Transaction, node: str, up: FromClient, body: Join) -> None:
    """A torchrun asks while workers are starting: one of those that take part, whose answer was lost or which
    was started again, or one that comes late. A new leader counts the nodes again."""
    job, place = turn.job, _place(node, body)
    if job.start.joined and failed_to_start(turn, place, body.failure, node, up):
        return
    job = turn.job
    if place in job.start.joined:
        if not _has_workers(turn, place):
            remember(turn, node, up, body)
            _answered(turn, place)
    elif job.start.joined:
        join_late(turn, node, up, body)
    else:
        join(turn, node, up, body)


def join_after_end(turn: Transaction, node: str, up: FromClient, body: Join) -> None:
    """A torchrun asks to take part in a job that is over."""
    job = turn.job
    if job.reason:  # nothing was finished: whoever asks again has failed
        turn.send(node, up.client, Rejected(reason=f"job {job.job} is over: {job.reason}"))
        return
    text = f"job {job.job} is over: it finished after {counted(job.steps.progress.step, 'step')}; {ANEW}"
    turn.send(node, up.client, Closed(reason=text))


def _place(node: str, body: Join) -> str:
    return node if body.slot is None else f"{node}/{body.slot}"


def join_late(turn: Transaction, node: str, up: FromClient, body: Join) -> None:
    """The job runs already: a node comes along, or a torchrun starts its workers again. It is answered once the
    first plan runs, and once a new leader knows which workers there are: `answer_late`."""
    job, place = turn.job, _place(node, body)
    known = job.start.joiners.get(place)
    if known is not None and known.pid != body.pid and _has_workers(turn, place):
        turn.send(node, up.client, Rejected(reason=_runs_already(turn, place)))
        return
    if place not in job.start.joined:
        others = {*job.start.joined} or _places_of_members(turn, by_device=body.slot is not None)
        waiting = {*job.start.joiners} if job.starting else set[str]()
        if len({other for other in others | waiting if _there(turn, other)} - {place}) >= body.max_nodes:
            turn.send(node, up.client, Rejected(reason=_full(turn)))
            return
        if not job.starting:  # else the others are waited for alone
            joined = job.start.joined or tuple(sorted(others))
            turn.change("start", joined=joined if place in joined else (*joined, place))
    remember(turn, node, up, body)


def answer_late(turn: Transaction) -> None:
    """Lets those start their workers who came late, and have none. These stand by, and the next plan may use
    them. Before the first plan those alone that the job waits for."""
    job = turn.job
    if job.ending.stopping or job.ending.failing:
        return
    for place, joiner in job.start.joiners.items():
        # One that has workers may only have been heard of again; if it has not, its workers are about to end.
        if not joiner.answered and not _has_workers(turn, place):
            if place not in turn.job.start.joined:
                if job.starting:
                    continue
                turn.change("start", joined=(*turn.job.start.joined, place))
            turn.note("joined", f"{_called(place)} joins", node=joiner.node)
            _answered(turn, place)


def _answered(turn: Transaction, place: str) -> None:
    """Tells a torchrun to start its workers."""
    joiner, joined = turn.job.start.joiners[place], turn.job.start.joined
    turn.change(
        "start", joiners={**turn.job.start.joiners, place: msgspec.structs.replace(joiner, answered=True)}
    )
    if not _has_workers(turn, place):  # one that has them was answered by a leader before
        turn.send(joiner.node, joiner.client, Joined(node_rank=joined.index(place), nodes=len(joined)))


def remember(turn: Transaction, node: str, up: FromClient, body: Join) -> None:
    """A torchrun takes part, or waits for that."""
    joiner = Joiner(
        node=node, client=up.client, pid=body.pid, min_nodes=body.min_nodes, max_nodes=body.max_nodes
    )
    turn.change("start", joiners={**turn.job.start.joiners, _place(node, body): joiner}, abandoned=False)


def _called(place: str) -> str:
    return f"device {place}" if "/" in place else f"node {place}"


def _runs_already(turn: Transaction, place: str) -> str:
    job = turn.job.job
    return (
        f"job {job} runs already, on {_called(place)} too: end it first (elasticd stop {job}), or give this "
        "one another name"
    )


def _full(turn: Transaction) -> str:
    others = ", ".join(sorted({*turn.job.start.joined} or _places_of_members(turn, by_device=False)))
    return (
        f"job {turn.job.job} already has all the nodes that --nnodes lets it have ({others}): start all with "
        "a larger most, or give this one another name"
    )


def _gathering(turn: Transaction) -> bool:
    """Returns True if nodes are still being counted. A leader that took over while workers were starting counts
    again, from what the agents repeat."""
    job = turn.job
    return job.phase is JobPhase.GATHERING or (job.phase is JobPhase.ASSEMBLING and not job.start.joined)


def _has_workers(turn: Transaction, place: str) -> bool:
    return any(place in (worker.node, worker.device) for worker in turn.job.workers.values())


def _places_of_members(turn: Transaction, *, by_device: bool) -> set[str]:
    return {device if by_device else node_of(device) for device in _bound(turn)}


def _bound(turn: Transaction) -> dict[str, str]:
    """The devices of the plan in force and of the proposed one, with the incarnation where one is bound."""
    return {
        device: plan.binding.get(device, "")
        for plan in turn.job.plans
        for device in (*plan.members, *plan.idle)
    }


def _there(turn: Transaction, place: str) -> bool:
    """Returns True if a torchrun has its place still: not if it went with its node, or left with its
    workers."""
    if _has_workers(turn, place):
        return True
    if place in turn.job.start.joiners:
        node = turn.job.start.joiners[place].node
        return node not in turn.nodes or turn.here(node)
    bound = {device: one for device, one in _bound(turn).items() if place in (device, node_of(device))}
    return any(not one or turn.job.losses.gone.get(device) != one for device, one in bound.items()) or not bound


def _disagreement(turn: Transaction, place: str, body: Join) -> str:
    if not 1 <= body.min_nodes <= body.max_nodes:
        return f"--nnodes={body.min_nodes}:{body.max_nodes}: the least must be between 1 and the most"
    for other, joiner in turn.job.start.joiners.items():
        if other == place:
            continue
        if ("/" in other) != ("/" in place):
            return (
                f"job {turn.job.job}: {_called(other)} and {_called(place)} cannot join both: start all with "
                "`elasticd run`, or all with one torchrun a node"
            )
        if (joiner.min_nodes, joiner.max_nodes) != (body.min_nodes, body.max_nodes):
            return (
                f"job {turn.job.job}: {_called(place)} has --nnodes={body.min_nodes}:{body.max_nodes}, "
                f"{_called(other)} --nnodes={joiner.min_nodes}:{joiner.max_nodes}: start all with the same"
            )
    return ""


def leave(turn: Transaction, node: str, up: FromClient, body: Leave) -> None:
    """A torchrun ends. What that means for its workers, their own ends tell; before they are there it
    means that they never come."""
    job = turn.job
    joiners = ((place, joiner) for place, joiner in job.start.joiners.items() if joiner.node == node)
    place = next((place for place, joiner in joiners if joiner.client == up.client), node)
    if place in job.start.joined and failed_to_start(turn, place, body.failure, node, up):
        return
    if _gathering(turn):
        forget(turn, node, up.client)
        turn.change("start", abandoned=not turn.job.start.joiners)
        if body.signal and not turn.job.start.joiners and turn.job.phase is JobPhase.GATHERING:
            _stopped_by_signal(turn, body)
    elif place in job.start.joined:
        _gone(turn, place, body)
    elif place in job.start.joiners:  # which would have come late
        turn.change(
            "start", joiners={other: known for other, known in job.start.joiners.items() if other != place}
        )


def failed_to_start(
    turn: Transaction, place: str, failure: WorkerFailure | None, node: str = "", up: FromClient | None = None
) -> bool:
    """The worker of a torchrun failed before the first plan. Whether the job ends by it: elasticd refused its
    script, or the script failed before in the same way, there or on another device."""
    job = turn.job
    if failure is None or not (job.starting or _gathering(turn)):
        return False
    thrown = Thrown(
        device=place,
        step=job.steps.progress.step,
        kind=failure.kind[:MOST_KIND],
        text=failure.text[:MOST_TEXT],
        traceback=failure.traceback[-MOST_TRACEBACK:],
    )
    before = next((other for other in job.ending.thrown if _alike(other, thrown)), None)
    turn.change("ending", thrown=(*job.ending.thrown, thrown)[-MOST_THROWN:])
    what = f"the script failed on {place} before the first plan: {failure.line}"
    turn.note("raised", what, device=place, exception=failure.kind, message=failure.text, code=failure.code)
    if failure.refusal:
        stop(turn, failure.text if not failure.kind else failure.line)
    elif before is not None and failure.code > 0:
        stop(turn, f"{what}, {'as before' if before.device == place else f'as on {before.device}'}")
    if turn.over and up is not None:
        turn.send(node, up.client, Rejected(reason=f"job {job.job} is over: {turn.job.reason}"))
    return turn.over


def _gone(turn: Transaction, place: str, body: Leave) -> None:
    """A torchrun ended while the job lives: its place is free for another. Before the first plan the job waits
    for those that are left, if they are enough."""
    job = turn.job
    joiner = job.start.joiners.get(place)
    joined = tuple(other for other in job.start.joined if other != place)
    joiners = {other: known for other, known in job.start.joiners.items() if other != place}
    if not job.starting:
        turn.change("start", joined=joined, joiners=joiners)
        return
    least = joiner.min_nodes if joiner is not None else len(job.start.joined)
    if body.how == "finished" and not job.workers:
        turn.change("start", joined=joined, joiners=joiners)
        if not joined:
            stop(turn, "its script ended with exit code 0 before a first step: nothing was trained")
        return
    if len(joined) < least and body.signal:
        _stopped_by_signal(turn, body)
        return
    if len(joined) < least:
        how = f": {body.failure.line}" if body.failure is not None else ""
        stop(turn, f"torchrun on {_called(place)} ended before all workers were there{how}")
        return
    each = job.start.world_size // len(job.start.joined) if job.start.world_size else None
    turn.change("start", joined=joined, joiners=joiners, world_size=each * len(joined) if each else None)


def _stopped_by_signal(turn: Transaction, body: Leave) -> None:
    """A user ended the torchruns of a job before it began: nothing has failed."""
    stop(turn, f"{BY_REQUEST}{shown(body.signal)} before its first step", orderly=True, requested=True)


def forget(turn: Transaction, node: str, client: str | None = None) -> None:
    """The joiners of a node are gone, with its agent; or one of them, by itself."""
    if not _gathering(turn):
        return
    joiners = {
        place: joiner
        for place, joiner in turn.job.start.joiners.items()
        if joiner.node != node or client not in (None, joiner.client)
    }
    turn.change("start", joiners=joiners)


def complete(turn: Transaction) -> None:
    """Starts the job once enough nodes have been there for a while, or the most are."""
    job = turn.job
    if not _gathering(turn):
        return
    first = next(iter(job.start.joiners.values()), None)
    if first is None or len(job.start.joiners) < first.min_nodes:
        turn.change("start", enough_since=None)
        if first is not None and job.phase is JobPhase.GATHERING:
            _wait_for_more(turn, first.min_nodes)
        return
    since = turn.now if job.start.enough_since is None else job.start.enough_since
    turn.change("start", enough_since=since)
    early = turn.now - since < turn.settings.gather_seconds or turn.now < job.takeover.patient_until
    if len(job.start.joiners) < first.max_nodes and early:
        return
    names = tuple(sorted(job.start.joiners)[: first.max_nodes])
    if job.phase is JobPhase.GATHERING:
        turn.enter(JobPhase.ASSEMBLING)
    turn.set(reason="")
    turn.change("start", joined=names)
    what = "devices" if "/" in names[0] else "nodes"
    turn.note("job_gathered", f"{len(names)} {what} take part: {', '.join(names)}", nodes=list(names))
    for name in sorted(job.start.joiners)[first.max_nodes :]:
        turn.send(job.start.joiners[name].node, job.start.joiners[name].client, Rejected(reason=_full(turn)))
    for name in names:
        _answered(turn, name)


def _wait_for_more(turn: Transaction, least: int) -> None:
    """Says in the job's status which places it waits for, and once in an event."""
    job = turn.job
    if turn.now - job.since < turn.settings.gather_seconds:
        return
    there = sorted(job.start.joiners)
    what = "devices" if "/" in there[0] else "nodes"
    names = f"{', '.join(there[:MOST_NAMED])}{', ...' if len(there) > MOST_NAMED else ''}"
    lacking, verb = least - len(there), "is" if len(there) == 1 else "are"
    there_are = f"waits for {lacking} of {least} {what} ({names} {verb} there)"
    starting = "they may be starting; else " if "/" in there[0] else ""
    text = f"{there_are}: {starting}give the same command on the other nodes"
    if not job.reason:
        turn.note("waiting", text, there=there, least=least)
    turn.set(reason=text)


def hello(turn: Transaction, node: str, up: FromClient, body: Hello) -> None:
    """A worker is there: a new one, or one whose agent says again what it said (to a new leader, too)."""
    job = turn.job
    if job.losses.gone.get(up.device) == up.incarnation:
        return  # fenced off: it comes again as another once it hears of that
    if why := uninvited(job, node, up.device):
        turn.send(node, up.client, Rejected(reason=why))
        return
    if _is_known(turn, node, up, body):
        return
    if (known := job.workers.get(up.device)) is not None:  # one process a device: its agent lets in no second
        before = known.incarnation
        gone = WorkerLost(
            job=job.job, device=up.device, incarnation=before, clean=False, how="another took its place"
        )
        lost(turn, node, gone)
        if turn.over:  # without that process the job could not go on
            hello_after_end(turn, node, up, body)
            return
        job = turn.job
    refusal = _unwelcome(turn, up, body)
    if refusal:
        turn.send(node, up.client, Rejected(reason=refusal))
        if job.phase is JobPhase.ASSEMBLING:  # one of those that all others wait for: they would wait for ever
            stop(turn, refusal)
        return
    spec = with_known_bytes(body.spec, job.spec)
    if job.spec is None or _measured_bytes(spec) != _measured_bytes(job.spec):
        turn.write(spec)
    turn.set(spec=spec)
    turn.change("start", world_size=job.start.world_size or body.world_size, arrived=turn.now)
    turn.change("data", likely=max(job.data.likely, body.longest))
    turn.worker(new_worker(turn, node, up, body))
    turn.change("detection", probes=job.detection.probes.forgotten(up.device))
    if job.phase not in (JobPhase.GATHERING, JobPhase.ASSEMBLING):
        turn.change("planning", decided=None)
        how = "is back" if job.is_member(up.device, up.incarnation) else "stands by"
        turn.note("joined", f"worker {up.device} {how}", device=up.device)


def hello_after_end(turn: Transaction, node: str, up: FromClient, body: Hello) -> None:
    """A worker says hello to a job that is over. A member of its last plan lives still, and the job is not
    forgotten before that ends; any other is turned away."""
    job = turn.job
    affirm(turn)
    if job.losses.gone.get(up.device) == up.incarnation or _is_known(turn, node, up, body):
        return
    if job.is_member(up.device, up.incarnation):
        turn.worker(new_worker(turn, node, up, body))
    else:
        turn.send(node, up.client, Rejected(reason=f"job {job.job} is over; {AGAIN}"))


def _is_known(turn: Transaction, node: str, up: FromClient, body: Hello) -> bool:
    """Returns True if this worker is known already; it can be reached through this agent from now on."""
    known = turn.job.worker(up.device, up.incarnation)
    if known is None:
        return False
    turn.worker(
        known,
        node=node,
        client=up.client,
        pid=body.pid,
        orphan=False,
        frozen="",
        halted=None,
        computes_on=body.computes_on,
    )
    return True


def new_worker(turn: Transaction, node: str, up: FromClient, body: Hello) -> Worker:
    """The worker that says this hello."""
    return Worker(
        device=up.device,
        incarnation=up.incarnation,
        node=node,
        client=up.client,
        pid=body.pid,
        checkpoints=body.checkpoints,
        probe_by=turn.now + turn.settings.probe_seconds if body.probes else None,
        rehearses=body.rehearses,
        closes=body.closes,
        saves_now=body.saves_now,
        computes_on=body.computes_on,
    )


def uninvited(job: JobState, node: str, device: str) -> str:
    """Why a job that has not begun does not take a worker, or nothing. Its workers train what the first of them
    says, and one that does not fit stops it: so only those come that its torchruns start. An agent says that a
    torchrun joins before what its workers say, to a new leader, too."""
    if job.phase not in (JobPhase.GATHERING, JobPhase.ASSEMBLING) or job.joins(node, device):
        return ""
    return (
        f"worker {device} is none of those that job {job.job} waits for: no torchrun of node {node} takes part "
        f"in it; start it with 'elasticd run --job {job.job}'"
    )


def unread(turn: Transaction, node: str, message: Unread) -> None:
    """A worker is there, or a torchrun, whose opening this release cannot decode. A worker that a plan binds
    trains on, and what it trains the store knows: it is met. Any other one cannot take part, and is told so; of
    a torchrun's whose workers are there nothing new is to be known."""
    job = turn.job
    if message.device and job.binds(message.device, message.incarnation):
        known = job.worker(message.device, message.incarnation)
        known = known or stranger(message.device, message.incarnation)
        turn.worker(known, node=node, client=message.client, orphan=False, frozen="", halted=None)
        return
    if not message.device and _has_workers(turn, node if message.slot < 0 else f"{node}/{message.slot}"):
        return
    why = cannot_read(message)
    turn.send(node, message.client, Rejected(reason=why))
    if message.device and job.phase is JobPhase.ASSEMBLING and job.joins(node, message.device):
        stop(turn, why)


def cannot_read(message: Unread) -> str:
    """The refusal for a worker or torchrun whose opening this release cannot decode."""
    what = f"worker {message.device}" if message.device else "this torchrun"
    return (
        f"the coordinator, of elasticd {__version__}, cannot decode the hello of {what}"
        f"{_of_release(message.release)}: {message.reason}; install the same release of elasticd everywhere"
    )


def assemble(turn: Transaction) -> None:
    """The first plan is due once all workers that torchrun started are there, each at its node's agent."""
    job = turn.job
    if not job.start.world_size or len(job.workers) < job.start.world_size:
        return
    if not any(worker.orphan for worker in job.workers.values()):
        turn.enter(JobPhase.PLANNING, reason="")


def count_again(turn: Transaction) -> None:
    """Counts the nodes again where no first plan can be made, as a user drains the nodes of all workers, and
    torchruns of others wait."""
    job = turn.job
    late = any(
        not joiner.answered and not _has_workers(turn, place) for place, joiner in job.start.joiners.items()
    )
    if late and only_drained(turn):
        turn.enter(JobPhase.ASSEMBLING, reason="")
        turn.change("start", joined=(), world_size=None, enough_since=None)


def _unwelcome(turn: Transaction, up: FromClient, body: Hello) -> str:
    """Why this worker cannot take part, or nothing."""
    job = turn.job
    if body.spec.job != job.job:
        return f"worker {up.device} is of job {body.spec.job}, not {job.job}: start it under that name"
    theirs = body.spec
    if job.spec is not None and job.spec.peers != theirs.peers:
        return (
            f"worker {up.device}{_of_release(body.release)} exchanges version {theirs.peers} of votes and "
            f"state with other ranks, job {job.job} version {job.spec.peers}: install the release that the "
            "other workers of the job run, or start all of the job again with one release"
        )
    if job.spec is not None and job.plan is not None:  # its first values are not used any more
        theirs = msgspec.structs.replace(theirs, first=job.spec.first)
    if job.spec is not None and (wrong := difference(job.spec, theirs)):
        return (
            f"worker {up.device} trains something else than job {job.job}: {wrong}; "
            "start all nodes with the same script and options"
        )
    # After a first plan that failed those are counted that live: workers that start then say other numbers.
    counted_alike = job.phase in (JobPhase.GATHERING, JobPhase.ASSEMBLING) and job.highest == job.start.earlier
    if counted_alike and job.start.world_size is not None and body.world_size != job.start.world_size:
        return (
            f"worker {up.device} was started as one of {body.world_size}, the others as one of "
            f"{job.start.world_size}: start all nodes with the same --nnodes and --nproc-per-node"
        )
    return ""


def _of_release(release: str) -> str:
    return f" (elasticd {shown(release)})" if release else ""


def with_known_bytes(spec: AnyJobSpec, earlier: AnyJobSpec | None) -> AnyJobSpec:
    """A worker's spec with what the first worker of the job that says it is believed in: the bytes that one
    worker measures, and the rows of an item, which may be drawn with each reading."""
    if not isinstance(earlier, JobSpec) or not isinstance(spec, JobSpec):
        return spec
    of_items = {module.name: module for module in earlier.modules}
    modules = tuple(
        msgspec.structs.replace(module, rows_an_item=known.rows_an_item, output_bytes=known.output_bytes)
        for module in spec.modules
        for known in (of_items.get(module.name, module),)
    )
    known = spec.measured_bytes if earlier.measured_bytes is None else earlier.measured_bytes
    return msgspec.structs.replace(spec, measured_bytes=known, modules=modules)


def _measured_bytes(spec: AnyJobSpec) -> ModelBytes | None:
    return spec.measured_bytes if isinstance(spec, JobSpec) else None


def difference(ours: AnyJobSpec, theirs: AnyJobSpec) -> str:
    """The difference between the training of two specs, in words; an empty string if they train alike,
    whichever release wrote them."""
    differences = list[str]()
    if type(ours) is not type(theirs):
        loops = "elasticd.live's loop of its own", "an elasticd.Job"
        mine, other = loops if isinstance(ours, MeshJobSpec) else loops[::-1]
        return f"it trains in {other}, not in {mine}"
    for name in ours.__struct_fields__:
        mine, other = getattr(ours, name), getattr(theirs, name)
        if name == "modules":
            differences += _module_differences(mine, other)
        if mine == other or name in ("version", "peers", "measured_bytes", "modules"):
            continue
        if name == "profile":
            differences.append("the profile differs: give every node the same file")
        elif name == "plan":
            differences.append("the plan that it gives differs: make the same one on every node")
        elif name == "first":
            differences.append(
                "its model starts from other values: call torch.manual_seed with the same seed on every rank "
                "before the model is made, or give init="
            )
        elif isinstance(ours, MeshJobSpec) and name == "model":
            differences.append(mesh.difference(mine, other))
        elif name == "model":
            parts = [part for part in mine.__struct_fields__ if getattr(mine, part) != getattr(other, part)]
            differences.append(f"the model differs in {', '.join(parts)}")
        else:
            differences.append(f"{name} is {other}, not {mine}")
    return ", ".join(differences)


def _module_differences(ours: Sequence[ModuleSpec], theirs: Sequence[ModuleSpec]) -> Iterator[str]:
    """The differences of the modules of two specs, in words. The rows of an item may differ."""
    names = [[module.name for module in modules] for modules in (ours, theirs)]
    if names[0] != names[1]:
        yield f"its modules are {', '.join(names[1])}, not {', '.join(names[0])}"
        return
    for mine, other in zip(ours, theirs, strict=True):
        for name in mine.__struct_fields__:
            was, now = getattr(mine, name), getattr(other, name)
            if was == now or name in ("rows_an_item", "output_bytes"):
                continue
            values = "" if name == "model" else f": {now}, not {was}"
            yield f"module {mine.name} differs in {name}{values}"
