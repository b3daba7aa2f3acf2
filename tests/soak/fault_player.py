"""Plays a script of faults on a real cluster: each when its step is done, as soon as the job can survive it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec
import psutil
from elasticd_planner.spec.cluster import node_of
from elasticd_planner.value import refuse

from elasticd.chaos.faults import Fault
from elasticd.client import CannotReach
from elasticd.machines.job.copies.holdings import lost_boxes
from elasticd.records import Fence, MeshJobSpec, decode, decode_spec
from elasticd.system.child_processes import ProcessError
from elasticd.testing.cluster import TIMEOUT_SECONDS
from elasticd.wire.api_types import JobStatus
from tests.soak.chaos_cluster import JOB, ChaosCluster
from tests.soak.network_cut import NetworkCut, pair_of
from tests.soak.script_faults import Place, Planted, plant, taken, withdraw

#: What a real cluster can be done; a partition needs its network, a shift a dataset of its own.
KINDS = (
    *("slow", "recover", "kill", "freeze", "thaw", "cut", "heal", "restart", "takeover"),
    *("hang", "pause", "raise", "sever", "unmet"),
)
#: What may cost the job the copies of state that its devices hold.
_COSTLY = ("kill", "freeze", "hang")
#: Of the user's code, planted for the script to find.
_PLANTED = ("hang", "pause", "raise")
#: Seconds that a fault is held back while the job could not survive it.
_HOLD_SECONDS = 40.0
#: Seconds in which a signal that was ordered shows; in which a fault that was planted is found: a rank without
#: the last stage has no loss, and one that stands by makes no step.
_SIGNAL_SECONDS, _FIND_SECONDS = 20.0, 4.0
#: Seconds after another fault of its device or node in which a pause may end with a fence.
_EXCUSED_SECONDS = 20.0


class StandsStill(Exception):
    """The job makes no step for longer than any fault explains."""


class LedgerSteps:
    """The number of steps that the workers' scripts were given, by their ledgers in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, int] = {}
        self.done = 0
        self.moved = time.monotonic()

    def look(self) -> int:
        """Reads what was added to the ledgers; how many steps the scripts were given so far."""
        for path in self._folder.glob("ledger-*.jsonl"):
            size = path.stat().st_size
            if size == self._read.get(path):
                continue
            with path.open("rb") as file:
                file.seek(max(0, size - 4096))
                lines = file.read().splitlines(keepends=True)
            self._read[path] = size
            for line in reversed(lines):
                if line.startswith(b'{"step": ') and line.endswith(b"\n"):
                    done = int(line[9 : line.index(b",")]) + 1
                    if done > self.done:
                        self.done, self.moved = done, time.monotonic()
                    break
        return self.done


@dataclass(kw_only=True)
class Played:
    """The course of the script: the faults that happened, and those that were held back, and why. false: who
    was fenced off while it was merely between two steps."""

    happened: list[Fault] = field(default_factory=list)
    held_back: list[str] = field(default_factory=list)
    false: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Pause:
    """A worker between two steps, until then; `fences`: how many there were when it began."""

    device: str
    incarnation: str
    until: float
    fences: int

    def false(self, fences: Sequence[Fence], struck: float) -> str:
        """The fault of the fences so far: nobody is fenced off for being between two steps. struck: until when
        another fault of its device or node lasted, which is a reason."""
        named = (each for each in fences[self.fences :] if each.gone.get(self.device) == self.incarnation)
        fence = next(named, None)
        if fence is None or struck >= self.until - _EXCUSED_SECONDS:
            return ""
        return f"{self.device} was fenced off while it was between two steps: {fence.reason}"


class FaultPlayer:
    """`still`: seconds without a step after which the job counts as standing still; `elsewhere`: what cannot
    strike where it should strikes another device or node; `tell` gets a line for each fault."""

    def __init__(
        self,
        cluster: ChaosCluster,
        steps: LedgerSteps,
        *,
        still: float = TIMEOUT_SECONDS,
        elsewhere: bool = False,
        tell: Callable[[str], None] = print,
    ) -> None:
        self._elsewhere = elsewhere
        self._cluster, self._steps, self._still, self._tell = cluster, steps, still, tell
        self.played = Played()
        self._frozen: dict[str, float] = {}
        self._cut: dict[str, float] = {}
        self._killed: dict[str, str] = {}
        self._hung: dict[str, float] = {}
        self._away: dict[str, float] = {}
        self._pauses: list[Pause] = []
        self._struck: dict[str, float] = {}
        self._planted = 0
        self._cuts = NetworkCut(cluster.spaces, self._pids)

    def play(self, script: Iterable[Fault]) -> Played:
        """All of it, by step. Raises StandsStill, and ProcessError where a launcher ended before the job."""
        faults = list(script)
        for fault in faults:
            if fault.step is None or fault.kind not in KINDS or (fault.kind == "kill" and fault.node):
                refuse(f"{fault.text} at {fault.when}: a real cluster is done {', '.join(KINDS)}, at steps")
        for fault in sorted(faults, key=lambda fault: fault.step or 0):
            self.wait(lambda at=fault.step: self._steps.look() >= at)  # type: ignore[misc]
            self._strike(fault)
        self.wait(lambda: not (self._frozen or self._hung or self._away or self._pauses or self._cuts))
        return self.played

    def wait(self, condition: Callable[[], bool], seconds: float | None = None) -> bool:
        """Until it is true: whether it was within `seconds`. What lasts is ended in time meanwhile."""
        deadline = time.monotonic() + seconds if seconds is not None else None
        while not condition():
            self._cluster.tend()
            self._thaw()
            self._end_others()
            self._steps.look()
            if ended := self._cluster.ended_launchers():
                exits = ", ".join(f"{name} ({code})" for name, code in ended.items())
                raise ProcessError(f"launchers ended before the last fault, with exit code: {exits}")
            if deadline is not None and time.monotonic() > deadline:
                return False
            if time.monotonic() - self._steps.moved > self._still:
                raise StandsStill(f"no step after {self._steps.done} for {self._still:g} s")
            time.sleep(0.05)
        return True

    def _strike(self, fault: Fault) -> None:
        why = ["nobody leads"]
        struck: list[Fault] = []

        def strikes() -> bool:
            for one in self._alike(fault) if self._elsewhere else (fault,):
                try:
                    why[0] = self._against(one)
                    if not why[0] and self._do(one):
                        struck.append(one)
                        return True
                except CannotReach as error:
                    why[0] = str(error)
            return False

        if not self.wait(strikes, _HOLD_SECONDS):
            self.played.held_back.append(f"{fault.text}: {why[0]}")
            self._tell(f"held back: {fault.text}: {why[0]}")
            return
        self.played.happened += struck
        if struck[0].kind not in ("pause", "slow", "recover", "thaw", "heal"):
            for place in {struck[0].device, struck[0].node, struck[0].peer} - {""}:
                self._struck[place] = time.monotonic() + struck[0].lasts
        self._tell(f"{len(self.played.happened)}, step {self._steps.done}: {struck[0].text}")

    def _alike(self, fault: Fault) -> list[Fault]:
        """The same fault, and then at the other places that it could be at."""
        names = self._cluster.shape.names if fault.device else self._cluster.shape.nodes
        place = fault.device or fault.node
        if not place:
            return [fault]
        at = names.index(place)
        turned = (*names[at:], *names[:at])
        if fault.peer:
            pairs = [(node, peer) for node in turned for peer in turned if node != peer]
            pairs.sort(key=lambda both: both != (fault.node, fault.peer))
            return [msgspec.structs.replace(fault, node=node, peer=peer) for node, peer in pairs]
        return [
            msgspec.structs.replace(fault, **{"device" if fault.device else "node": name}) for name in turned
        ]

    # -- what the job can survive ------------------------------------------------------------------------------

    def _against(self, fault: Fault) -> str:
        """Why not now: the job would lose the last copy of a part of its state, or nobody would be hit."""
        job = self._cluster.job()
        if job is None or job.plan is None:
            return "nobody knows of the job"
        lost = set(fault.devices(self._cluster.shape.names)) if fault.kind in _COSTLY else set()
        if fault.kind in ("kill", "freeze", *_PLANTED) and not self._pid(job, fault.device):
            return f"{fault.device} has no worker"
        if fault.kind in _PLANTED and (busy := self._busy(fault.device)):
            return busy
        apart = self._cut_now() or self._away or self._cuts.nodes
        if fault.kind == "raise" and (apart or self._cluster.unmet()):
            return "a node is away, whose devices could not try the step"  # the job may end, as it should
        if fault.kind in ("raise", "unmet") and not self._met(job, fault.node) - {fault.device}:
            return "no other device could try a step that fails"
        if fault.kind in ("restart", "unmet") and not self._cluster.has_agent(fault.node):
            return "it has no agent"
        if fault.kind == "sever" and pair_of(fault) in self._cuts:
            return "it is cut already"
        frozen_there = any(device.startswith(f"{fault.node}/") for device in self._frozen)
        if fault.kind in ("restart", "unmet") and frozen_there:
            return "its agent is to thaw a worker"
        if fault.kind == "cut" and fault.node in self._cut_now():
            return "it is cut already"
        if lost:
            spec = decode_spec(self._written("spec")[-1])
            if isinstance(spec, MeshJobSpec) and job.snapshot is not None:
                return ""  # what nobody holds is read from a snapshot, or all go back to it
            for kept in self._sides(self._healthy(job) - lost):
                if gone := lost_boxes(spec.specs, job.plan, kept):
                    return f"{gone} would be lost"
        return ""

    def _sides(self, kept: set[str]) -> list[set[str]]:
        """The members of each set that may be all that is left: of nodes that are apart, one goes on without
        the other."""
        return [kept, *({d for d in kept if node_of(d) != node} for node in self._cuts.nodes)]

    def _met(self, job: JobStatus, node: str) -> set[str]:
        """The healthy members that a new leader would meet, though the agent of `node` goes away."""
        away = {*self._away, node}
        return {device for device in self._healthy(job) if node_of(device) not in away}

    def _busy(self, device: str) -> str:
        """Why nothing can be planted there now."""
        if device in self._frozen or device in self._hung:
            return f"{device} stands still"
        return f"{device} is between two steps" if any(p.device == device for p in self._pauses) else ""

    def _healthy(self, job: JobStatus) -> set[str]:
        """The members that hold state and that no fault is known to have hit. Those whose agent cannot be
        reached count: the leader may fence them off only where others hold all that they do."""
        assert job.plan is not None
        fences, here = self._written("fence"), {member.device: member.incarnation for member in job.members}
        gone = decode(fences[-1], Fence).gone if fences else {}  # device to incarnation
        return {
            device
            for device, incarnation in job.plan.binding.items()
            if here.get(device, incarnation) == incarnation
            and incarnation not in (self._killed.get(device), gone.get(device))
            and device not in self._frozen
            and device not in self._hung
        } & set(job.plan.members)

    def _cut_now(self) -> set[str]:
        return {node for node, until in self._cut.items() if time.monotonic() < until}

    def _written(self, part: Literal["spec", "fence"]) -> list[bytes]:
        """All that was ever put under one of the job's keys."""
        key = self._cluster.keys.job(JOB, part)
        seen = list(self._cluster.seen)
        return [event.item.value for event in seen if event.key == key and event.kind == "put"]

    # -- doing it ----------------------------------------------------------------------------------------------

    def _do(self, fault: Fault) -> bool:
        cluster = self._cluster
        match fault.kind:
            case "slow":
                cluster.chaos().slow(fault.device, fault.factor)
            case "recover":
                cluster.chaos().recover(fault.device)
            case "kill" | "freeze":
                return self._signal(fault)
            case "hang" | "pause" | "raise":
                return self._plant(fault)
            case "sever":
                return self._cuts.cut(fault)
            case "unmet":
                cluster.stop_agent(fault.node)
                self._away[fault.node] = time.monotonic() + fault.lasts
                cluster.kill_leader()
            case "thaw":
                self._frozen[fault.device] = time.monotonic()
            case "cut":
                cluster.chaos().cut(fault.node, fault.lasts)
                self._cut[fault.node] = time.monotonic() + (fault.lasts or TIMEOUT_SECONDS)
            case "heal":
                cluster.chaos().heal(fault.node)
                self._cut[fault.node] = time.monotonic()
            case "restart":
                cluster.restart_agent(fault.node)
            case _:
                cluster.kill_leader()
        return True

    def _signal(self, fault: Fault) -> bool:
        """Returns True if it was seen to arrive: nothing that did not happen counts as a fault."""
        job = self._cluster.job()
        assert job is not None
        pid = self._pid(job, fault.device)
        if not pid:
            return False  # it died just now, or a new leader has not met it
        chaos = self._cluster.chaos()
        (chaos.kill if fault.kind == "kill" else chaos.freeze)(fault.device)
        now = time.monotonic()
        if fault.kind == "freeze":
            self._frozen[fault.device] = now + (fault.lasts or TIMEOUT_SECONDS)
        deadline = now + _SIGNAL_SECONDS
        while time.monotonic() < deadline:
            status = _status(pid)
            if status == psutil.STATUS_STOPPED and fault.kind == "freeze":
                return True
            if status in ("", psutil.STATUS_ZOMBIE):
                if fault.kind == "freeze":
                    self._frozen.pop(fault.device, None)
                    return False
                self._killed[fault.device] = next(m.incarnation for m in job.members if m.pid == pid)
                return True
            time.sleep(0.01)
        return False

    def _plant(self, fault: Fault) -> bool:
        """Returns True if the device's process found it, in time."""
        job, folder = self._cluster.job(), self._cluster.folder
        assert job is not None
        incarnation = next((m.incarnation for m in job.members if m.device == fault.device), "")
        if not incarnation:
            return False  # it was lost just now
        self._planted += 1
        number, fences = self._planted, len(self._written("fence"))
        plant(folder, fault.device, _of_code(fault, number))
        is_taken = self.wait(lambda: taken(folder, number), _FIND_SECONDS)
        withdraw(folder, fault.device)
        if not is_taken and not taken(folder, number):
            return False
        until = time.monotonic() + fault.lasts
        if fault.kind == "hang":
            self._hung[fault.device] = until
        elif fault.kind == "raise":
            self._killed[fault.device] = incarnation
        else:
            self._pauses.append(Pause(device=fault.device, incarnation=incarnation, until=until, fences=fences))
        return True

    def _end_others(self) -> None:
        """Ends the faults that last and are over: hangs, pauses, agents that are away, cuts of the data
        network."""
        now = time.monotonic()
        self._hung = {device: until for device, until in self._hung.items() if now < until}
        for node, until in list(self._away.items()):
            if now >= until:
                self._cluster.start_agent(node)
                del self._away[node]
        self._cuts.heal()
        for pause in [each for each in self._pauses if now >= each.until]:
            self._pauses.remove(pause)
            self._judge(pause)

    def _judge(self, pause: Pause) -> None:
        node = node_of(pause.device)
        struck = max(self._struck.get(pause.device, 0.0), self._struck.get(node, 0.0))
        fences = [decode(each, Fence) for each in self._written("fence")]
        if fence := pause.false(fences, struck):
            self.played.false.append(fence)

    def _pids(self, node: str) -> list[int]:
        job = self._cluster.job()
        members = job.members if job is not None else ()
        return [member.pid for member in members if node_of(member.device) == node]

    def _thaw(self) -> None:
        """Until it is seen to go on: an order is lost where its agent or the leader ends before it is carried
        out, and where it comes before a `freeze` that was late."""
        for device, until in list(self._frozen.items()):
            if time.monotonic() < until:
                continue
            with suppress(CannotReach):
                job = self._cluster.job()
                if job is None:
                    continue
                self._cluster.chaos().thaw(device)
                pid = self._pid(job, device)
                if self._gone_on(pid, _SIGNAL_SECONDS):
                    del self._frozen[device]

    def _gone_on(self, pid: int, seconds: float) -> bool:
        """Returns True if the process is not stopped any more, or is none, within so many seconds."""
        deadline = time.monotonic() + seconds
        while pid and _status(pid) == psutil.STATUS_STOPPED:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return True

    def _pid(self, job: JobStatus, device: str) -> int:
        """The process that drives a device, 0 without one that lives."""
        pid = next((m.pid for m in job.members if m.device == device), 0)
        return pid if pid and _status(pid) not in ("", psutil.STATUS_ZOMBIE) else 0


def _of_code(fault: Fault, number: int) -> Planted:
    """The code that is planted for a fault. The text of an exception has no digits, which the leader takes for
    what differs between two devices."""
    way = fault.way
    if fault.kind == "raise":
        words = "".join("abcdefghij"[int(digit)] for digit in str(number))
        place: Place = "loss" if way == "loss" else "script"
        return Planted(number=number, place=place, how="raise", text=f"planted: {words}")
    place = ("loader" if way == "loader" else "script") if fault.kind == "pause" else "loss"
    return Planted(number=number, place=place, how="lock" if way == "lock" else "sleep", seconds=fault.lasts)


def _status(pid: int) -> str:
    try:
        return str(psutil.Process(pid).status())
    except psutil.NoSuchProcess:
        return ""
