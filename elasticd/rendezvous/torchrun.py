"""The torchrun of `elasticd run`: torch's own, which ends a script that would only fail again.

    python -m elasticd.rendezvous.torchrun [options of torchrun] -- SCRIPT ...

Theory of operation. torch's agent starts workers that failed again, up to `--max-restarts`. That helps where a
process was killed. A script that elasticd refuses, or that raises the same exception twice, fails each time. So
the agent's look at its workers passes by here: it tells the rendezvous handler how they failed, and takes the
restarts that are left away where another one is of no use. At the end the launcher reads why it came
(`elasticd.system.torchrun_outcome`), and the exit code is the script's.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import time
from types import FrameType
from typing import Any

from torch.distributed import run
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher import api

from elasticd.rendezvous.device_slots import launched_slots
from elasticd.rendezvous.errors import ModeSwitch, RendezvousOver, RendezvousRefusal
from elasticd.rendezvous.output_link import OutputLink
from elasticd.rendezvous.worker_failure import alike, cause, failure_of
from elasticd.rendezvous.worker_output import WorkerOutput
from elasticd.system.end_signals import NOTICES
from elasticd.system.output_options import options_of
from elasticd.system.torchrun_outcome import REFUSAL, STOP, TorchrunOutcome, write_outcome
from elasticd.wire.rendezvous import WorkerFailure
from elasticd.wire.unix_socket import default_path

#: Seconds after which a worker that fails as the one before it has been of use: it may be started again.
USEFUL_SECONDS = 3600.0
#: Seconds for workers to end that have done nothing yet.
_SHORT_SECONDS = 3


class TorchrunAgent(LocalElasticAgent):
    """torch's agent. `failure`: of the last worker that failed; `final`: it would fail again."""

    failure: WorkerFailure | None = None
    final = False
    #: The agent of this process, once torch has made it.
    made: TorchrunAgent | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        TorchrunAgent.made = self
        self._began = time.monotonic()
        self._starts = 0

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._began = time.monotonic()
        started: dict[int, Any] = super()._start_workers(worker_group)
        self._starts += 1
        handler: Any = worker_group.spec.rdzv_handler
        handler.workers_started(len(started), worker_group.workers[0].world_size, self._starts - 1)
        return started

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        handler: Any = worker_group.spec.rdzv_handler
        if result.state is WorkerState.FAILED:
            failures = {rank: self._failure_of(failure) for rank, failure in result.failures.items()}
            before, self.failure = self.failure, cause(failures.values())
            short = time.monotonic() - self._began < USEFUL_SECONDS
            repeated = handler.ends_repeated and short and alike(before, self.failure)
            self.final = self.failure.refusal or repeated
            if self.final:
                self._remaining_restarts = 0
            local_rank = next(
                failed.local_rank for rank, failed in result.failures.items() if failures[rank] is self.failure
            )
            handler.worker_failed(
                self.failure, self._device_of(local_rank), final=self._remaining_restarts == 0
            )
        elif result.state is WorkerState.SUCCEEDED:
            self.failure = None
            handler.workers_finished()
        return result

    def _device_of(self, local_rank: int) -> str:
        assert isinstance(self._logs_specs, WorkerOutput)
        return self._logs_specs.device(local_rank)

    def _failure_of(self, failure: ProcessFailure) -> WorkerFailure:
        assert isinstance(self._logs_specs, WorkerOutput)
        data = failure.error_file_data
        refusal, stop = (
            ("", "") if not isinstance(data, dict) else (data.get(key, "") for key in (REFUSAL, STOP))
        )
        words = self._logs_specs.last_words(failure.local_rank)
        return failure_of(words, failure.exitcode, refusal=str(refusal), stop=str(stop))

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        error, handler = sys.exception(), self._worker_group.spec.rdzv_handler
        if isinstance(error, ModeSwitch):
            timeout = _SHORT_SECONDS  # they wait inside torch, where no handler of theirs runs
        elif isinstance(error, SignalException):
            handler.ends_by(error.sigval)  # type: ignore[attr-defined]
        super()._shutdown(death_sig, timeout)


def parsed(arguments: list[str]) -> argparse.Namespace:
    """torchrun's options, with the script and its own arguments from behind the first "--".

    torchrun itself looks for its options among the script's arguments, abbreviated ones too, and fills in what
    looks like a macro of its own: the script gets them as they are.
    """
    border = arguments.index("--")
    script, *its_arguments = (argument.replace("$", "$$") for argument in arguments[border + 1 :])
    options: argparse.Namespace = run.parse_args([*arguments[:border], "script"])  # type: ignore[no-untyped-call]
    options.training_script, options.training_script_args = script, its_arguments
    return options


def _on_end_signal(number: int, frame: FrameType | None) -> None:
    """As torch's own handler, which is there once workers are."""
    raise SignalException(f"{signal.Signals(number).name} before there are workers", signal.Signals(number))


def main(arguments: list[str] | None = None) -> int:
    """Runs until the workers are through; the exit code, which is the script's where that failed."""
    if "LOGLEVEL" not in os.environ:  # the launcher says in a line how it ended
        logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    options = parsed(sys.argv[1:] if arguments is None else arguments)
    config, command, script = run.config_from_args(options)
    output = config.logs_specs = WorkerOutput(
        OutputLink(options.rdzv_endpoint or default_path(), options.rdzv_id),
        options.rdzv_id,
        launched_slots(os.environ),
        options_of(os.environ),
        log_dir=options.log_dir,
        redirects=Std.from_str(options.redirects),
        tee=Std.from_str(options.tee),
    )
    api.LocalElasticAgent = TorchrunAgent  # type: ignore[attr-defined]  # torch has no other place for it
    outcome, code = TorchrunOutcome(), 0
    for number in NOTICES:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _on_end_signal)
    try:
        api.elastic_launch(config, command)(*script)
    except ModeSwitch:
        outcome, code = TorchrunOutcome(restart_mode=True), 1
    except RendezvousOver as over:
        outcome = TorchrunOutcome(reason=str(over))
    except RendezvousRefusal as refusal:
        outcome, code = TorchrunOutcome(reason=str(refusal).removeprefix("elasticd: "), final=True), 1
    except ChildFailedError:
        code = 1
    except SignalException as ended:
        code = 128 + ended.sigval
    output.finish()
    agent = TorchrunAgent.made
    if code and agent is not None and agent.failure is not None and not outcome.restart_mode:
        failure = agent.failure
        final = agent.final or outcome.final
        outcome = TorchrunOutcome(reason=outcome.reason, failure=failure, final=final)
        if code == 1:
            code = failure.code if failure.code > 0 else 128 - failure.code
    write_outcome(outcome)
    return code


if __name__ == "__main__":
    sys.exit(main())
