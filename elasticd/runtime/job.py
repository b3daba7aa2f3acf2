"""The training loop: `elasticd.Job`, which is all that a training script needs to know."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from elasticd_planner.batch import Sampler
from elasticd_planner.boxes import Box
from elasticd_planner.plan import Plan, StatePolicy
from elasticd_planner.profiles import ModelProfile
from elasticd_planner.value import Invalid
from torch import Tensor

from elasticd.messages import (
    Finished,
    Goodbye,
    Hello,
    Leaving,
    Published,
    Report,
    ToWorker,
    Welcome,
)
from elasticd.packets import SLOT_VARIABLE, default_path
from elasticd.records import JobSpec, Vote
from elasticd.runtime import parent
from elasticd.runtime.control import AgentKeyValue, Control
from elasticd.runtime.data import Collate, Dataset, length_of, pad, sample_tokens
from elasticd.runtime.emulation import Pacer
from elasticd.runtime.endings import Departed, JobOver, JobStopped
from elasticd.runtime.engine import Engine, MakeOptimizer, MakeScheduler, Recipe, StepDone
from elasticd.runtime.groups import Cancelled, PeerLost
from elasticd.runtime.loading import offered
from elasticd.runtime.model import Model
from elasticd.runtime.notice import Notice
from elasticd.runtime.reader import SampleError
from elasticd.runtime.saver import Keeping, Saver
from elasticd.runtime.snapper import Snapper
from elasticd.runtime.stage import Loss
from elasticd.runtime.standing_in import Snapshots
from elasticd.runtime.switching import Switcher
from elasticd.runtime.vote import LedgerError
from elasticd.snapshots import Freed

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Step:
    """A finished step, the same on every rank: `loss` is the mean over all targets of the global batch, `norm`
    the gradient's before clipping, `samples` the dataset indices that were trained on (the vote compared what
    travelled through every rank with them), `plan` the number of the plan that it ran under."""

    index: int
    loss: float
    norm: float
    tokens: int
    samples: tuple[int, ...]
    plan: int
    applied: bool


class Job:
    """Trains `model` under whatever plan the coordinator has in force, switching in place.

    model: an `elasticd.Model`. loss(output, batch) -> (sum, count) over a micro-batch; sums are divided once
    by the global count. optimizer(named parameters) makes a torch optimizer with element-wise state; it is
    called after every switch with every trained parameter by name: the slices that this device steps on, which
    may be several of one parameter, and an empty tensor for what others step on. Its state and its groups'
    settings are restored, so group parameters by name. scheduler(optimizer) makes a learning-rate scheduler,
    which is stepped after every step and carried over switches. zero: 1 keeps optimizer state on `replicas`
    (default 1) of a parameter's holders, on as many nodes, instead of on all; 2 gradients too. dataset:
    map-style, a sample is a mapping of 1-D tensors; collate makes a batch of samples (default: padding).
    global_batch samples make a step, taken micro_batch at a time. clip: the largest norm of the gradient.
    length(index): a sample's tokens, where samples are of unequal length (default: dataset.lengths[index], if
    there are any). Then samples of like length share a micro-batch, and all micro-batches are of like work,
    whatever the number of samples in each. readers: threads that read samples ahead; 0: the training thread
    reads them. Of a sample that cannot be read its index is named; the state before it is saved, and all end.
    checkpoint: a folder that all nodes share. A state is saved there every checkpoint_every steps and at the
    end, without holding training up; the newest `keep` stay, and those of each checkpoint_keep_every-th step.
    A job that is started anew with the same folder goes on from the newest that is sound, under any layout.
    snapshot_every: the state after every so many steps is also copied into memory of two nodes' agents, without
    holding training up: what no living worker has is gone on from there, and the steps since are given again.
    profile: a file of `elasticd profile` for this model, for a first plan from measured seconds, not guesses.
    grace: seconds from SIGTERM until this process ends, whatever it is at. Meanwhile its state moves to the
    others; then the script ends by a SystemExit with code 0. torchrun kills 30 s after it sent the signal on.

    Start the script with `elasticd run`, or with `torchrun --rdzv-backend=elasticd`. Raises SystemExit with one
    line where the job cannot start or go on.
    """

    def __init__(
        self,
        *,
        model: Model,
        loss: Loss,
        optimizer: MakeOptimizer,
        dataset: Dataset,
        global_batch: int,
        micro_batch: int = 1,
        seed: int = 0,
        clip: float | None = None,
        collate: Collate = pad,
        length: Callable[[int], int] | None = None,
        readers: int = 1,
        scheduler: MakeScheduler | None = None,
        zero: int = 0,
        replicas: int | None = None,
        profile: str | os.PathLike[str] | None = None,
        checkpoint: str | os.PathLike[str] | None = None,
        checkpoint_every: int = 1000,
        keep: int = 3,
        checkpoint_keep_every: int | None = None,
        snapshot_every: int | None = None,
        grace: float = 25.0,
    ) -> None:
        try:
            name = _environment("TORCHELASTIC_RUN_ID")
            parent.end_with(os.getppid())
            if remedy := parent.without_restarts(os.environ):
                log.warning(remedy)
            keeping = _keeping(checkpoint, checkpoint_every, keep, checkpoint_keep_every)
            if readers < 0:
                raise ValueError(f"readers must not be negative, not {readers}")
            tokens = sample_tokens(dataset)
            spec = JobSpec(
                job=name,
                model=model.spec,
                global_batch=global_batch,
                micro_batch=micro_batch,
                samples=len(dataset),
                sample_tokens=tokens,
                seed=seed,
                state=StatePolicy(zero=zero, replicas=1 if zero and replicas is None else replicas),
                profile=_profile(profile, model, tokens, micro_batch) if profile is not None else None,
                first=model.first(),
            )
            self._sampler = Sampler(size=len(dataset), global_batch=global_batch, seed=seed)
            self._snapper = self._make_snapper(snapshot_every, name) if snapshot_every is not None else None
            self._control = Control(default_path(), _hello(spec, keeping))
        except (ValueError, TypeError, RuntimeError, ConnectionError) as error:
            raise JobStopped(f"elasticd: {error}") from error
        recipe = Recipe(
            model=model,
            loss=loss,
            optimizer=optimizer,
            dataset=dataset,
            collate=collate,
            sampler=self._sampler,
            clip=clip,
            length=length_of(dataset) if length is None else length,
            readers=readers,
            scheduler=scheduler,
            checkpoints=keeping.folder if keeping is not None else None,
            snapshots=Snapshots(job=name, fetch=self._control.fetch),
        )
        self._saver = self._make_saver(keeping, spec) if keeping is not None else None
        self._start(recipe, seed, grace)

    def _start(self, recipe: Recipe, seed: int, grace: float) -> None:
        """From here on the agent is heard."""
        self._taken = False
        self._pacer = Pacer(self._control.welcome.pace)
        store = AgentKeyValue(self._control)
        self._switcher = Switcher(recipe, self._control, store, self._pacer, seed)
        self._control.start(self._hear)
        self._notice = Notice(grace, self._told_to_go)
        self._notice.install()

    def _told_to_go(self) -> None:
        """On the notice's thread."""
        log.warning("%s is told to go: it stays until the others have what it holds", self.device)
        self._control.send(Leaving(reason="SIGTERM"))
        self._switcher.told_to_go()

    def _make_saver(self, keeping: Keeping, spec: JobSpec) -> Saver:
        return Saver(keeping, spec, self.device, self._control.send, lambda: self._control.lost)

    def _make_snapper(self, every: int, name: str) -> Snapper:
        return Snapper(every, name, lambda: self._control.welcome, lambda m, fd: self._control.send(m, fd=fd))

    def _hear(self, message: ToWorker) -> None:
        """On the control thread."""
        match message:
            case Published(name=name):
                if self._saver is not None:
                    self._saver.published(name)
            case Freed(plan=plan, step=step):
                if self._snapper is not None:
                    self._snapper.freed(plan, step)
            case Welcome():
                if self._snapper is not None:
                    self._snapper.welcomed()
            case _:
                self._switcher.handle(message)

    @property
    def device(self) -> str:
        """This worker's device, "node/index"."""
        return self._control.welcome.device

    @property
    def plan(self) -> Plan | None:
        """The plan in force; None while this device stands by."""
        return self._switcher.engine.plan if self._switcher.engine else None

    @property
    def rank(self) -> int | None:
        """The rank under the plan in force (torchrun's RANK is stale after the first switch)."""
        return self._switcher.engine.rank if self._switcher.engine else None

    @property
    def world_size(self) -> int | None:
        return len(self.plan.members) if self.plan else None

    def parameters(self) -> dict[str, tuple[Box, Tensor]]:
        """The parameters held here under the plan in force, by full name: the box of the global tensor that
        this device holds, and its values (not a copy). Empty while this device stands by."""
        engine = self._switcher.engine
        held = engine.local.parameters if engine is not None else {}
        return {name: (box, parameter.detach()) for name, (box, parameter) in held.items()}

    def steps(self, total: int) -> Iterator[Step]:
        """Trains until `total` updates were made, and gives each step after it is done.

        A device that the plan does not use waits here; when it is used, the steps go on from there. A job's
        steps are taken once: raises RuntimeError the second time."""
        if self._taken:
            raise RuntimeError("a Job's steps are taken once: ask for all of them in one call of steps()")
        self._taken = True
        try:
            try:
                yield from self._steps(total)
            except JobOver:
                yield from self._missed()  # the last, it may be
        except Departed:
            self._leave("it was told to go, and the job goes on without it")
            raise
        except BaseException as error:
            self._end_copies()
            self._notice.restore()
            if isinstance(error, GeneratorExit):
                self._leave("the script left the loop before the last step")
            raise
        self._leave("")

    def _end_copies(self) -> None:
        for maker in (self._saver, self._snapper):
            if maker is not None:
                maker.end()

    def _leave(self, reason: str) -> None:
        self._end_copies()
        self._switcher.end()
        self._notice.restore()
        self._control.close(Goodbye(reason=reason))

    def _steps(self, total: int) -> Iterator[Step]:
        switcher, saver = self._switcher, self._saver
        while True:
            if switcher.engine is None and saver is not None:
                saver.left()
            engine = switcher.wait()
            yield from self._missed()
            try:
                done, made = None, switcher.step
                if made < total:
                    done = self._train(engine, made, last=made + 1 >= total)
                    made += 1
                if made >= total:
                    self._finish(engine, made)
                switcher.step = made  # until here the vote alone tells of it, to whoever loses the others
            except (PeerLost, Cancelled) as error:
                switcher.bereaved(error)
                continue
            except LedgerError as error:  # the same on every rank
                raise JobStopped(f"elasticd: {error}") from error
            if done is not None:
                self._report(done, first=engine.rank == 0)
            if made >= total:
                self._control.send(Finished(step=made))
            if done is not None:
                yield self._step(engine.plan.number, done.outcome.vote)
            if done is None or made >= total:
                return
            switcher.voted(done.outcome.prepared)

    def _missed(self) -> Iterator[Step]:
        for plan, vote in self._switcher.taken():
            yield self._step(plan, vote)

    def _step(self, plan: int, vote: Vote) -> Step:
        return Step(
            index=vote.step,
            loss=vote.loss,
            norm=vote.norm,
            tokens=vote.tokens,
            samples=self._sampler.samples(vote.step),
            plan=plan,
            applied=vote.apply,
        )

    def _train(self, engine: Engine, step: int, *, last: bool) -> StepDone:
        """One step, and what is kept of the state after it: no snapshot of the last."""
        saver, snapper = self._saver, self._snapper if not last else None
        try:
            done = engine.step(
                step,
                self._switcher.prepared,
                lambda: saver.word if saver else 0,
                lambda: snapper is not None and snapper.ready(engine.plan.number, step + 1),
            )
        except SampleError as error:  # on every rank, and nothing of the step is in the state
            self._finish(engine, step)
            raise JobStopped(f"elasticd: {error}") from error
        if saver is not None:
            saver.voted(step + 1, done.outcome.saving, engine.layouts, engine.state)
        if snapper is not None:
            snapper.voted(step + 1, done.outcome.snapshot, engine.layouts, engine.state)
        return done

    def _finish(self, engine: Engine, step: int) -> None:
        """After the last step, by all members of the plan: also of one that recovered from it."""
        if self._saver is not None and step > 0 and not self._switcher.untouched:
            self._saver.finish(step, engine.gather, engine.layouts, engine.state)
        engine.settle()

    def _report(self, done: StepDone, *, first: bool) -> None:
        paced, overruns = self._pacer.take()
        self._control.send(
            Report(
                measurement=done.measurement,
                loss=done.outcome.loss if first else None,
                tokens=done.outcome.tokens if first else None,
                paced=paced,
                overruns=overruns,
            )
        )


def _keeping(
    folder: str | os.PathLike[str] | None, every: int, keep: int, keep_every: int | None
) -> Keeping | None:
    if folder is None:
        return None
    return Keeping(folder=Path(folder).absolute(), every=every, keep=keep, keep_every=keep_every)


def _hello(spec: JobSpec, keeping: Keeping | None) -> Hello:
    """What this worker says of itself first. Raises ValueError where torchrun did not start it."""
    return Hello(
        job=spec.job,
        # A torchrun for one device of several calls its worker's rank 0, whichever device that is.
        local_rank=int(os.environ.get(SLOT_VARIABLE) or _environment("LOCAL_RANK")),
        world_size=int(_environment("WORLD_SIZE")),
        pid=os.getpid(),
        spec=spec,
        checkpoints=offered(keeping.folder, spec) if keeping is not None else (),
    )


def _profile(path: str | os.PathLike[str], model: Model, tokens: float, micro_batch: int) -> ModelProfile:
    """Raises ValueError, with the file's name, where it cannot be read or is no profile of this model."""
    from elasticd_planner.given import given_profile  # of no use to jobs without a profile

    try:
        return given_profile(Path(path).read_bytes(), model.spec, tokens, micro_batch)
    except OSError as error:
        raise ValueError(f"profile {os.fspath(path)} cannot be read: {error.strerror}") from None
    except Invalid as error:
        raise ValueError(f"profile {os.fspath(path)}: {error}") from None


def _environment(name: str) -> str:
    value = os.environ.get(name)
    if value is None:
        raise ValueError(
            f"{name} is not set: start the script with torchrun --rdzv-backend=elasticd --rdzv-id=JOB ..."
        )
    return value
