"""Starts the torchruns of this node's part in a job, and waits for them all.

In the live mode each device has a torchrun of its own, which starts one worker, so that one death costs one
device. In the restart mode all workers start again together, so there is one torchrun, with all devices, as
scripts for torchrun expect. A job begins in the live mode; when a worker asks for torch's own process group its
script makes no `elasticd.Job`, and the job goes on in restart mode.

No torchrun outlives this process. torchrun itself sets what several workers of one node need only where it
starts several, so it is set here:

- Threads: `OMP_NUM_THREADS=1` where there are several workers and the user chose nothing, as torchrun does.
  Otherwise each worker would take as many threads as there are cores, and they would wait for each other.
- Devices, in the live mode: each worker sees its own GPU alone, as cuda:0, and its LOCAL_RANK is 0. That is
  what `torchrun --virtual-local-rank` gives its workers. Of which device of the node it is `$ELASTICD_SLOT`
  tells elasticd.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import msgspec

from elasticd.system import process_sessions, torch_build
from elasticd.system.end_signals import NOTICES, noted
from elasticd.system.launch_age import FRESH_VARIABLE, LAUNCHED_VARIABLE, launched_now
from elasticd.system.launch_events import LaunchLines, LaunchLink
from elasticd.system.output_options import OUTPUT_VARIABLE, OutputOptions
from elasticd.system.parent_death_signal import ECHO_SECONDS, ending_with_us
from elasticd.system.torchrun_outcome import OUTCOME_VARIABLE, TorchrunOutcome, note_end_signal, read_outcome
from elasticd.wire.launch import Following, Happened
from elasticd.wire.unix_socket import SLOT_VARIABLE, SLOTS_VARIABLE, default_path

#: The number of threads that a worker's torch computes with, and the GPUs that it may use, by CUDA's names.
THREADS_VARIABLE = "OMP_NUM_THREADS"
GPUS_VARIABLE = "CUDA_VISIBLE_DEVICES"
_ORDER_VARIABLE = "CUDA_DEVICE_ORDER"
#: Seconds from the signal that ends torchruns to SIGKILL; torchrun itself gives its workers 30.
TERMINATE_SECONDS = 40.0
_POLL_SECONDS = 0.1
#: Exit codes of torchruns that SIGTERM or SIGKILL ended.
STOPPED = (128 + signal.SIGTERM, -signal.SIGTERM, -signal.SIGKILL)
#: Seconds for the leader's word that the job is over, after its workers have ended.
END_SECONDS = 1.0
#: Seconds in which a second Ctrl-C is the first one's echo: some programs pass on what a terminal sends to all.
CTRL_C_SECONDS = 1.0
#: Seconds in which torchruns end that end for one reason. Only others that are left after them go on.
ALIKE_SECONDS = 2.0
#: Seconds for the other torchruns to end once one knows that its script makes no Job: no worker has trained.
_SWITCH_SECONDS = 5.0


#: auto: live, until the script is known to make no `elasticd.Job`; restart then.
Mode = Literal["auto", "live", "restart"]


@dataclass(frozen=True, kw_only=True)
class Launch:
    """The program to run: `command` is a script, or where `module` is set a module's name, and its options;
    nodes from `least` to `most`, of as many `devices` each. `gpus` names the GPU of each device, as CUDA does;
    it is empty on the CPU."""

    job: str
    least: int
    most: int
    devices: int
    gpus: tuple[str, ...]
    socket: str | None
    max_restarts: int
    command: tuple[str, ...]
    module: bool = False
    slots: tuple[int, ...] | None = None  # of the node's devices (None: as `gpus` are, or the first ones)
    named: bool = False  # the user names the devices: no others will do
    spare: tuple[
        str, ...
    ] = ()  # further GPUs of this node, which may be used in place of those that others use
    output: OutputOptions = field(default_factory=OutputOptions)
    mode: Mode = "auto"
    fresh: bool = False  # the job begins anew, whatever checkpoints there are
    launched: str = field(default_factory=launched_now)


@dataclass(frozen=True, kw_only=True)
class _Torchrun:
    """A torchrun, the file that it writes its outcome to, and the words for its devices."""

    process: subprocess.Popen[bytes]
    outcome: Path
    words: str


@dataclass(kw_only=True)
class _Ended:
    """Torchruns that have ended: the exit code and the outcome of each, by its index."""

    codes: dict[int, int] = field(default_factory=dict)
    outcomes: dict[int, TorchrunOutcome] = field(default_factory=dict)

    @property
    def stopped(self) -> bool:
        """True if signals ended all, as an agent sends them to torchruns in restart mode that a user stops."""
        return all(code in STOPPED for code in self.codes.values())

    @property
    def restart_mode(self) -> bool:
        return any(outcome.restart_mode for outcome in self.outcomes.values())


def launch(what: Launch) -> int:
    """Runs until all torchruns have ended; the exit code. A signal that asks us to end goes on to them as
    SIGTERM, and their workers leave in good order; a second one ends all at once."""
    news = _News(what)
    following = news.link.following()
    if following is None and news.link.refusal:
        _say(news.link.refusal)
        return 1
    try:
        what = _reserved(what, following, news.link)
    except CannotPlace as error:
        _say(str(error))
        return 1
    try:
        code, line = _launched(what, news)
        _say(line)
    finally:
        news.link.close()
    return code


class _News:
    """Tells the user, in a line each, what the leader says of the job; but not of its end, the last line."""

    def __init__(self, what: Launch) -> None:
        self._lines = LaunchLines()
        self._end = ""
        self.failed = False  # the leader said that the job ended, and in no good order
        self.stopping = False  # a user stopped the job
        self._over = threading.Event()
        self.link = LaunchLink(what.socket or default_path(), what.job, self._take)

    @property
    def begun(self) -> bool:
        """True if a plan was recorded since the launch."""
        return self._lines.begun

    def _take(self, event: Happened) -> None:
        line = self._lines.line(event)
        self.stopping = self.stopping or event.kind == "stopping"
        if event.kind in ("finished", "stopped"):
            self._end = line
            self.failed = event.kind == "stopped" and not event.data.get("orderly")
            self._over.set()
        elif line:
            _say(line)

    def end(self) -> str:
        """The end of the job in the words of the leader, now or within a moment; empty where it does not."""
        self._over.wait(END_SECONDS)
        return self._end


def _launched(what: Launch, news: _News) -> tuple[int, str]:
    """The exit code, and the last line for the user."""
    with noted(NOTICES) as signals, tempfile.TemporaryDirectory(prefix="elasticd-run-") as folder:
        ended = _run(what, what.mode, Path(folder), signals)
        if ended.restart_mode and not signals:
            makes = "the script makes no elasticd.Job or elasticd.live"
            _say(f"{makes}: it goes on in restart mode (--mode restart starts so)")
            if what.fresh:
                _say("--fresh has no say in the checkpoints of a script without a Job: those are its own")
            ended = _run(what, "restart", Path(folder), signals)
        end = news.end()
        if signals:
            name = signal.Signals(signals[0]).name
            return 128 + signals[0], end or f"job {what.job}: its workers on this node were ended by {name}"
        outcomes = list(ended.outcomes.values())
        failed = [code for code in ended.codes.values() if code]
        if news.stopping and ended.stopped:
            failed = []
        if len(failed) < len(ended.codes) and not (failed and news.failed):
            if not end and all(outcome.reason for outcome in outcomes):
                return 0, f"nothing to do: {outcomes[0].reason}"
            return 0, end or f"job {what.job}: its workers on this node ended"
        why = (end if news.begun else "") or _why(outcomes) or end
        return failed[0], why or f"job {what.job}: torchrun ended with code {failed[0]}"


def _run(what: Launch, mode: Mode, folder: Path, told: list[int]) -> _Ended:
    """Starts the torchruns of a mode, and waits for their end: of all, or of one whose job changes its mode."""
    torchruns: list[_Torchrun] = []
    try:
        for index in range(1 if mode == "restart" else what.devices):
            torchruns.append(_start(what, mode, index, folder))
        return _wait(torchruns, told)
    finally:
        _end(
            [torchrun.process for torchrun in torchruns],
            TERMINATE_SECONDS if mode != "auto" or told else _SWITCH_SECONDS,
        )


def _start(what: Launch, mode: Mode, index: int, folder: Path) -> _Torchrun:
    outcome = folder / f"{mode}-{index}.json"
    torchruns, workers = (1, what.devices) if mode == "restart" else (what.devices, 1)
    command = [
        *(sys.executable, "-m", "elasticd.rendezvous.torchrun"),
        f"--nnodes={what.least * torchruns}:{what.most * torchruns}",
        f"--nproc-per-node={workers}",
        f"--max-restarts={what.max_restarts}",
        f"--log-dir={folder / 'logs'}",
        "--rdzv-backend=elasticd",
        f"--rdzv-endpoint={what.socket or default_path()}",
        f"--rdzv-conf=mode={mode}",
        f"--rdzv-id={what.job}",
        *(("-m",) if what.module else ()),
        "--",
        *what.command,
    ]
    if mode == "restart":
        words, running = "this node", restart_environment(what, os.environ)
    else:
        words, running = f"device {slots(what)[index]}", environment(what, index, os.environ)
    running[OUTCOME_VARIABLE], running[LAUNCHED_VARIABLE] = str(outcome), what.launched
    running[OUTPUT_VARIABLE] = msgspec.json.encode(what.output).decode()
    running[FRESH_VARIABLE] = "1" if what.fresh else ""
    # A session of its own: the terminal's Ctrl-C is for us, who pass it on once.
    process = subprocess.Popen(ending_with_us(command), env=running, start_new_session=True)
    return _Torchrun(process=process, outcome=outcome, words=words)


class CannotPlace(Exception):
    """There are not enough free devices; the message says what to do."""


def _reserved(what: Launch, following: Following | None, link: LaunchLink) -> Launch:
    """The launch on devices that are its own from now on. Raises CannotPlace."""
    chosen = placed(what, following)
    while (following := link.take(slots(chosen))) is not None and _taken(what, following) & {*slots(chosen)}:
        before, chosen = chosen, placed(what, following)  # another launcher was faster
        if slots(chosen) == slots(before):  # GPUs whose numbers are unknown: there is no other choice
            raise CannotPlace(f"devices that this job needs are used: {_uses(what, following)}: end a job")
    return chosen


def placed(what: Launch, following: Following | None) -> Launch:
    """The launch on devices that no other job uses, in place of the node's first ones. Raises CannotPlace."""
    if following is None:
        return what
    _check_there(what, following)
    taken = _taken(what, following)
    if not taken & {*slots(what)}:
        return what
    if what.named:
        ids, used = ",".join(map(str, slots(what))), _uses(what, following)
        raise CannotPlace(f"--device-ids {ids}: used are {used}: name others, or end a job (elasticd stop)")
    if what.gpus:
        names = [name for name in (*what.gpus, *what.spare) if not (name.isdigit() and int(name) in taken)]
        free = len(names)
        changed = replace(what, gpus=tuple(names[: what.devices]))
    else:
        indices = [index for index in range(len(following.devices)) if index not in taken]
        free = len(indices)
        changed = replace(what, slots=tuple(indices[: what.devices]))
    if free >= what.devices:
        return changed
    remedy = (
        f"ask for --devices {free}, or end a job" if free else "end a job (elasticd stop), or use another node"
    )
    used = _uses(what, following)
    are = "is" if free == 1 else "are"
    raise CannotPlace(f"{what.devices} devices are asked for, and {free} {are} free: used are {used}: {remedy}")


def _taken(what: Launch, following: Following) -> set[int]:
    """The devices that other jobs use, by their numbers on the node."""
    return {int(name.rpartition("/")[2]) for name, job in following.used.items() if job != what.job}


def _uses(what: Launch, following: Following) -> str:
    """The same in words."""
    return ", ".join(f"{name} by job {job}" for name, job in sorted(following.used.items()) if job != what.job)


def _check_there(what: Launch, following: Following) -> None:
    """Raises CannotPlace where the node has too few devices, or not those that are named."""
    count = len(following.devices)
    lacking = ",".join(str(slot) for slot in slots(what) if slot >= count)
    if not lacking or not count:
        return
    node = following.devices[0].rpartition("/")[0]
    if what.named or what.gpus:
        there = f"0 to {count - 1}" if count > 1 else "0 alone"
        raise CannotPlace(f"{'--device-ids' if what.named else 'GPU'} {lacking}: {node} has {there}")
    raise CannotPlace(f"--devices {what.devices}: {node} has {count}: ask for --devices {count} at most")


def visible(ours: Mapping[str, str]) -> tuple[str, ...] | None:
    """The GPUs that this process may use; None where nothing limits them."""
    variable = ours.get(GPUS_VARIABLE)
    return None if variable is None else torch_build.visible(variable)


def slots(what: Launch) -> tuple[int, ...]:
    """Which of the node's devices each worker is, by the agent's numbers. The agent counts the GPUs of the
    whole node, so GPU 4 is device 4, even where it is the first that this job may use. GPUs with names of
    another kind are counted from 0."""
    if what.slots is not None:
        return what.slots
    if what.gpus and all(name.isdigit() for name in what.gpus):
        return tuple(int(name) for name in what.gpus)
    return tuple(range(what.devices))


def environment(what: Launch, index: int, ours: Mapping[str, str]) -> dict[str, str]:
    """Of the torchrun of this node's worker `index`, which hands it to its worker."""
    variables = {**ours, SLOT_VARIABLE: str(slots(what)[index])}
    variables.pop(SLOTS_VARIABLE, None)
    if what.gpus:
        # The agent's order is NVML's. CUDA's own default puts the fastest GPU first.
        queues = {torch_build.CONNECTIONS_VARIABLE: str(torch_build.CONNECTIONS)}
        variables = {_ORDER_VARIABLE: "PCI_BUS_ID", **queues, **variables, GPUS_VARIABLE: what.gpus[index]}
    if what.devices > 1:
        variables = {THREADS_VARIABLE: "1", **variables}
    return variables


def restart_environment(what: Launch, ours: Mapping[str, str]) -> dict[str, str]:
    """Of the one torchrun of this node in restart mode."""
    variables = {name: value for name, value in ours.items() if name != SLOT_VARIABLE}
    variables[SLOTS_VARIABLE] = ",".join(map(str, slots(what)))
    if what.gpus:
        variables = {_ORDER_VARIABLE: "PCI_BUS_ID", **variables, GPUS_VARIABLE: ",".join(what.gpus)}
    if what.devices > 1:
        variables = {THREADS_VARIABLE: "1", **variables}
    return variables


def _wait(torchruns: list[_Torchrun], told: list[int]) -> _Ended:
    ended, ending, out = _Ended(), _Ending(torchruns), dict[int, float]()
    while len(ended.codes) < len(torchruns) and not ended.restart_mode:
        ending.hear(told)
        now = time.monotonic()
        for index, torchrun in enumerate(torchruns):
            if index not in ended.codes and (code := torchrun.process.poll()) is not None:
                ended.codes[index] = code
                outcome = ended.outcomes[index] = read_outcome(torchrun.outcome)
                if code and not (outcome.restart_mode or outcome.final):  # else the others hear of it, too
                    out[index] = now + ALIKE_SECONDS
        for index in [index for index, due in out.items() if now > due and not told]:
            code, words = ended.codes[index], torchruns[index].words
            _say(f"{words} is out, torchrun ended with code {code}: the others go on")
            del out[index]
        time.sleep(_POLL_SECONDS)
    return ended


def _why(outcomes: list[TorchrunOutcome]) -> str:
    """Why all torchruns of this node failed: by a script that fails each time rather than by what followed."""
    failures = [outcome.failure for outcome in outcomes if outcome.failure is not None]
    failures.sort(key=lambda failure: (not failure.refusal, failure.lost_peer, not failure.kind))
    if failures and failures[0].refusal:
        return failures[0].line
    reason = next((outcome.reason for outcome in outcomes if outcome.reason), "")
    return reason or (f"a worker failed: {failures[0].line}" if failures else "")


class _Ending:
    """The end of all torchruns, as signals ask for it."""

    def __init__(self, torchruns: list[_Torchrun]) -> None:
        self._torchruns = torchruns
        self._heard, self._heard_at = 0, 0.0

    def hear(self, told: list[int]) -> None:
        """Takes the signals that came since."""
        for number in map(signal.Signals, told[self._heard :]):
            now = time.monotonic()
            if not self._heard:
                self._heard_at = now
                again = "Ctrl-C" if number is signal.SIGINT else "signal"
                _say(f"{number.name}: the workers save and leave; a second {again} ends them at once")
                for torchrun in self._torchruns:
                    note_end_signal(torchrun.outcome, number)
                for process in self._left():
                    process.terminate()
            elif now - self._heard_at > (CTRL_C_SECONDS if number is signal.SIGINT else ECHO_SECONDS):
                _say(f"{number.name} again: all workers are ended at once")
                self._at_once()
            self._heard += 1

    def _at_once(self) -> None:
        left = self._left()
        workers = {worker for process in left for worker in process_sessions.led_by_children(process.pid)}
        for process in left:
            process.kill()
        process_sessions.end(workers, 0.0)

    def _left(self) -> list[subprocess.Popen[bytes]]:
        return [known.process for known in self._torchruns if known.process.poll() is None]


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # nobody reads us any more, as after `| head`: the job goes on
        print(f"elasticd: {text}", file=sys.stderr, flush=True)


def _end(processes: list[subprocess.Popen[bytes]], seconds: float) -> None:
    """Ends those that are left, where something went wrong here or the mode changes: by their own ids."""
    left = [process for process in processes if process.poll() is None]
    for process in left:
        process.terminate()
    deadline = time.monotonic() + seconds
    for process in left:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
