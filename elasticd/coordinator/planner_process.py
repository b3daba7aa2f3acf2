"""Plans in a child process: the planner may take seconds, the coordinator's loop never waits for it.

The child reads Problems as lines of JSON and answers each with one. A job asks one at a time: a newer request
ends the child of the older one, and so does `cancel`. A child that answered waits for the next problem, and
the first is started ahead: to start Python and import the planner takes longer than a small plan, and takes
the processor from the survivors of a fault and from the switch that follows.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable

import msgspec
import psutil
from elasticd_planner.problem import Answer, JobAnswer, JobProblem, MeshAnswer, MeshProblem

from elasticd.codec.decoding import decode_stored, shown
from elasticd.machines.job.state.events import Planned

COMMAND = (sys.executable, "-m", "elasticd_planner")

#: A planner that has not answered after this many seconds is ended, and its request failed.
PLANNER_TIMEOUT_SECONDS = 120.0

#: Seconds after a request whose child was ended until the next is started ahead.
RESTART_SECONDS = 0.5

#: Bytes of memory above which a child that answered is ended: a large search leaves much behind.
LARGE_BYTES = 512 << 20

#: Bytes of an answer, or of what a child says on standard error, that are taken in.
ANSWER_BYTES = 1 << 30

_log = logging.getLogger(__name__)


class Planning:
    """Runs planners; `answer` is called on the loop with each result that is still wanted. With `warm` a child
    is there for the next request from then on."""

    def __init__(
        self,
        answer: Callable[[Planned], None],
        *,
        command: tuple[str, ...] = COMMAND,
        patience: float = PLANNER_TIMEOUT_SECONDS,
    ) -> None:
        self._answer = answer
        self._command = command
        self._patience = patience
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._spare: asyncio.Future[Process] | None = None
        self._later: asyncio.TimerHandle | None = None

    def warm(self) -> None:
        """Starts a child ahead, if there is none."""
        if self._spare is None:
            self._spare = asyncio.create_task(start(self._command), name="a planner started ahead")

    def request(self, job: str, token: int, problem: JobProblem) -> None:
        """Has a job planned, in place of what was asked for it before; the answer comes as `Planned`."""
        self.cancel(job)
        task = asyncio.create_task(self._run(job, token, problem), name=f"planning {job} {token}")
        self._tasks[job] = task
        task.add_done_callback(lambda done: self._forget(job, done))

    def cancel(self, job: str) -> None:
        """Ends the planner of this job, if one runs; its answer is not given any more."""
        task = self._tasks.pop(job, None)
        if task is not None:
            task.cancel()

    async def close(self) -> None:
        """Ends all planners and waits until their processes are gone."""
        tasks = list(self._tasks.values())
        for job in list(self._tasks):
            self.cancel(job)
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._later is not None:
            self._later.cancel()
        spare, self._spare = self._spare, None
        if spare is not None:
            spare.cancel()
            with contextlib.suppress(asyncio.CancelledError, PlannerFailed):
                await ended(await spare)

    def _forget(self, job: str, task: asyncio.Task[None]) -> None:
        if self._tasks.get(job) is task:
            del self._tasks[job]

    async def _run(self, job: str, token: int, problem: JobProblem) -> None:
        try:
            async with asyncio.timeout(self._patience):
                answer = await self._asked(problem)
            self._answer(Planned(job=job, token=token, answer=answer))
        except TimeoutError:
            error = f"the planner did not answer within {self._patience:g} s"
            self._answer(Planned(job=job, token=token, error=error))
        except PlannerFailed as failure:
            self._answer(Planned(job=job, token=token, error=str(failure)))
        except Exception as error:  # a defect: the job that asked is told, and does not wait for ever
            _log.exception("elasticd failed on planning job %s, which keeps its plan; please report it", job)
            why = f"{type(error).__name__}: {shown(str(error))}"
            self._answer(Planned(job=job, token=token, error=why))
        finally:
            if self._spare is None:
                if self._later is not None:
                    self._later.cancel()
                self._later = asyncio.get_running_loop().call_later(RESTART_SECONDS, self.warm)

    async def _asked(self, problem: JobProblem) -> JobAnswer:
        """Of the child that waits; of another where that one is not there, or fails: it may have been ended
        while it waited."""
        spare, self._spare = self._spare, None
        if spare is not None:
            with contextlib.suppress(PlannerFailed):
                return await self._answered(problem, await spare)
        return await self._answered(problem, await start(self._command))

    async def _answered(self, problem: JobProblem, child: Process) -> JobAnswer:
        answer = await ask(problem, child)
        if self._spare is None and _memory(child) <= LARGE_BYTES:
            self._spare = asyncio.get_running_loop().create_future()
            self._spare.set_result(child)
        else:
            await ended(child)
        return answer


def _memory(child: Process) -> int:
    """Its bytes, 0 where it is gone."""
    try:
        return int(psutil.Process(child.pid).memory_info().rss)
    except psutil.Error:
        return 0


class PlannerFailed(Exception):
    """The child ended without an answer; the message has the end of what it said."""


async def start(command: tuple[str, ...] = COMMAND) -> Process:
    """A planner that waits for its problem. Raises PlannerFailed."""
    try:
        return await asyncio.create_subprocess_exec(
            *command,
            stdin=PIPE,
            stdout=PIPE,
            stderr=PIPE,
            limit=ANSWER_BYTES,
            start_new_session=True,  # the terminal's Ctrl-C is ours, who end the child
        )
    except OSError as error:
        raise PlannerFailed(f"the planner {command[0]} did not start: {error}") from error


async def ended(child: Process) -> None:
    """Returns when the child is gone, by force if need be."""
    if child.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        await asyncio.shield(child.wait())


async def ask(problem: JobProblem, child: Process) -> JobAnswer:
    """The answer of a planner process, which waits for another problem then. It is ended where this fails, or
    is cancelled. Raises PlannerFailed."""
    assert child.stdin is not None
    assert child.stdout is not None
    assert child.stderr is not None
    try:
        text = await asyncio.to_thread(msgspec.json.encode, problem)
        with contextlib.suppress(ConnectionError):  # it is gone, and said why
            child.stdin.write(text + b"\n")
            await child.stdin.drain()
        if not (line := await child.stdout.readline()):
            lines = (await child.stderr.read()).decode(errors="replace").strip().splitlines()
            raise PlannerFailed(f"the planner ended with {await child.wait()}: {(lines or ['nothing'])[-1]}")
        if isinstance(problem, MeshProblem):
            return await asyncio.to_thread(decode_stored, line, MeshAnswer)
        return await asyncio.to_thread(decode_stored, line, Answer)
    except msgspec.DecodeError as error:
        await ended(child)
        raise PlannerFailed(f"the planner's answer cannot be read: {error}") from error
    except BaseException:
        await ended(child)
        raise
