"""`elasticd.live` in one process: the loop, the state as boxes, torch's worlds, and what is refused by name."""

from __future__ import annotations

import dataclasses
import gc
import pickle
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from elasticd_planner.layout.mesh_layouts import MeshLayouts
from elasticd_planner.spec.mesh import AllowedMesh, MeshModel, MeshPlan, MeshTensor, Placement
from torch import distributed as dist
from torch import nn
from torch.distributed import Work
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from elasticd import State, live
from elasticd.records import Vote
from elasticd.runtime.comm.groups import Cancelled, PeerLost, PlanGroups
from elasticd.runtime.comm.torch_store import TorchStore
from elasticd.runtime.exits import Drained, JobOver, JobStopped
from elasticd.runtime.live import world
from elasticd.runtime.live.collective_waits import CollectiveWaits
from elasticd.runtime.live.live_copy import LiveCopy
from elasticd.runtime.live.live_loop import LiveLoop
from elasticd.runtime.live.live_state import LiveRefusal, LiveTensors, SmallState, _parts
from elasticd.runtime.live.loop_step import LoopStep
from elasticd.runtime.live.start import default_snapshots
from elasticd.runtime.live.world import World, clear_caches, register
from elasticd.system.end_signals import ENDING
from elasticd.testing.waiting import until
from elasticd.wire.main_thread import OTHER, SCRIPT
from tests.integration.train_live import (
    BATCH,
    CLIP,
    MESHES,
    SEED,
    Text,
    build_of,
    loss_of,
    reference,
    resume_from,
    save,
    whole,
)
from tests.runtime.test_elementwise import Aside

STEPS = 4


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    if (left := world.current()) is not None:
        left.end()


def loop(build: Any, **changes: Any) -> LiveLoop:
    options = {"batch": BATCH, "steps": STEPS, "meshes": ("dp",), "data": Text(), "seed": SEED}
    return live(build, **{**options, **changes})


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "hsdp", "tp"])
def test_one_process_without_an_agent_trains_as_plain_torch(kind: str) -> None:
    running = loop(build_of(kind), meshes=MESHES[kind])
    losses = {}
    for step in running:
        with step:
            state = step.state
            step.loss = loss = loss_of(state.model, step.data)
            (loss * step.scale).backward()
            if kind != "tp":
                nn.utils.clip_grad_norm_(state.model.parameters(), CLIP)
            state.optimizer.step()
            state.scheduler.step()
            state.optimizer.zero_grad()
        losses[step.index] = step.total
    expected, weights, _ = reference(STEPS, kind)
    assert losses == pytest.approx(expected, abs=1e-13)
    for name, parameter in LiveTensors(running.state, running.plan.names).trained.items():
        torch.testing.assert_close(whole(parameter), weights[name], atol=1e-11, rtol=0)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_later_start_goes_on_from_a_checkpoint_of_torch(kind: str, tmp_path: Path) -> None:
    resume, began = resume_from(tmp_path), []
    for steps in (3, 6):  # the first start leaves a checkpoint of two steps behind, and a third step
        if (left := world.current()) is not None:
            left.end()
        running = loop(build_of(kind), meshes=MESHES[kind], steps=steps, resume=resume)
        for step in running:
            with step:
                if step.index == 2:
                    save(step.state, step.index, tmp_path)
                train(step)
            began.append(step.index)
    assert began == [0, 1, 2, 2, 3, 4, 5]
    same_as_plain_torch(running, 6)


def test_what_is_no_number_of_steps_is_refused_of_resume() -> None:
    def script() -> None:
        for _ in loop(build_of("ddp"), resume=lambda state: None):
            pass

    with pytest.raises(JobStopped, match="resume returned None: let it return the steps that were made"):
        script()


def test_samples_without_a_dataset_count_on_and_a_skipped_update_is_voted_at_the_end_of_the_body() -> None:
    seen = []
    for step in loop(build_of("ddp"), data=None, steps=3):
        with step:
            seen += step.indices
            assert not step.decided
        assert step.decided, "voted"
        assert (step.made, step.total) == (True, pytest.approx(float("nan"), nan_ok=True))
    assert seen == list(range(3 * BATCH))


def test_an_exception_of_the_body_comes_out_as_itself() -> None:
    def train() -> None:
        for step in loop(build_of("ddp")):
            with step:
                _ = 1 / 0

    with pytest.raises(ZeroDivisionError) as raised:
        train()
    assert raised.traceback[-1].name == "train"


def watched(step: LoopStep, weight: torch.Tensor) -> list[torch.Tensor]:
    """The values of a weight at each vote, as they come."""
    real, votes = step.copy.vote, list[torch.Tensor]()

    def vote(*given: Any) -> Any:
        votes.append(weight.detach().clone())
        step.copy.vote = real
        return real.vote(*given)

    step.copy.vote = SimpleNamespace(vote=vote)  # type: ignore[assignment]
    return votes


def test_the_update_is_made_after_the_vote_and_several_optimizers_have_one_vote() -> None:
    def build(mesh: Any) -> State:
        model = nn.Linear(4, 4)
        one = torch.optim.SGD([model.weight], lr=0.1)
        return State(model=model, optimizer=[one, torch.optim.AdamW([model.bias], lr=0.1)])

    for step in loop(build, data=None, steps=2):
        with step:
            one, other = step.state.optimizers
            weight = step.state.model.weight
            before, votes = weight.detach().clone(), watched(step, weight)
            step.loss = loss = step.state.model(torch.ones(1, 4)).square().mean()
            loss.backward()
            assert not step.decided
            one.step()
            assert step.decided
            assert not step.updated
            assert step.total == pytest.approx(float(loss.detach()))
            assert not torch.equal(before, weight)
            other.step()
            assert step.updated
        (at_the_vote,) = votes
        assert torch.equal(before, at_the_vote)


def test_a_step_that_is_not_entered_is_refused() -> None:
    with pytest.raises(RuntimeError, match="into `with step:`"):
        for _ in loop(build_of("ddp")):
            pass


def test_a_step_that_is_entered_within_itself_is_refused() -> None:
    def script() -> None:
        for step in loop(build_of("ddp")):
            with step, step:
                pass

    with pytest.raises(RuntimeError, match="step 0 is entered already"):
        script()


def test_what_gives_wrong_gradients_or_no_total_is_said_once(caplog: Any) -> None:
    for step in loop(build_of("ddp")):
        step._scale = 1.1  # as if another rank had fewer samples
        with step:
            loss = loss_of(step.state.model, step.data)
            (loss * (step.scale if step.index == 3 else 1.0)).backward()
            step.state.optimizer.step()
            if step.index:
                step.loss = loss
    said_once = [each.getMessage() for each in caplog.records if each.name.endswith("live_loop")]
    assert len(said_once) == 2, said_once
    assert "Multiply the loss with it before backward()" in said_once[0]
    assert "set it before optimizer.step()" in said_once[1]


def test_an_optimizer_may_have_others_make_its_update() -> None:
    class Both(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {})
            self.inner = torch.optim.SGD(self.param_groups[0]["params"], lr=0.1)

        def step(self, closure: Any = None) -> None:
            self.inner.step()

    for step in loop(stepped_by(Both), data=None, steps=2):
        with step:
            weight = step.state.model.weight
            before = weight.detach().clone()
            step.state.model(torch.ones(1, 4)).sum().backward()
            step.state.optimizer.step()
            assert step.updated
            assert not torch.equal(weight, before)


# -- a vote that this rank does not hear -----------------------------------------------------------------------


def unheard(running: LiveLoop, at: int, outcome: Callable[[], Vote | None]) -> Iterator[LoopStep]:
    """The steps; the first try of step `at` loses the others in its vote, whose outcome is `outcome`."""

    def lost(*_: Any) -> Any:
        raise PeerLost("the others are gone")

    tries = 0
    for step in running:
        if step.index == at:
            tries += 1
            assert tries <= 2, "the step comes again for ever"
            vote = step.copy.vote
            step.copy.vote = SimpleNamespace(vote=lost) if tries == 1 else vote  # type: ignore[assignment]
            running._switcher.outcome = lambda error: outcome()  # type: ignore[method-assign]
            yield step
            step.copy.vote = vote
        else:
            yield step


def raising(error: BaseException) -> Callable[[], Vote | None]:
    def outcome() -> Vote | None:
        raise error

    return outcome


def heard(at: int) -> Vote:
    return Vote(step=at, loss=1.0, norm=None, count=1.0, tokens=1, apply=True)


def train(step: LoopStep, between: Callable[[], object] = lambda: None) -> None:
    """A body as a script has it, and `between` after the update."""
    state = step.state
    step.loss = loss = loss_of(state.model, step.data)
    (loss * step.scale).backward()
    nn.utils.clip_grad_norm_(state.model.parameters(), CLIP)
    state.optimizer.step()
    between()
    state.scheduler.step()
    state.optimizer.zero_grad()


def same_as_plain_torch(running: LiveLoop, steps: int) -> None:
    _, weights, _ = reference(steps)
    for name, parameter in LiveTensors(running.state, running.plan.names).trained.items():
        torch.testing.assert_close(whole(parameter), weights[name], atol=1e-11, rtol=0)


def test_a_script_that_skips_a_batch_at_an_error_makes_it_again_where_a_peer_was_lost() -> None:
    """As scripts do at a batch that does not fit into memory. The gradients that it leaves are no refusal."""
    running, tries = loop(build_of("ddp"), steps=2), []
    for step in unheard(running, 1, lambda: None):
        with step:
            tries.append(step.index)
            if tries == [0, 1]:
                loss_of(step.state.model, step.data).backward()
                continue
            train(step)
    assert tries == [0, 1, 1]
    same_as_plain_torch(running, 2)


def test_the_last_step_counts_where_the_job_ended_before_this_rank_heard_its_vote() -> None:
    running, made = loop(build_of("ddp")), []
    for step in unheard(running, STEPS - 1, raising(JobOver("it is done"))):
        with step:
            train(step)
        made.append((step.index, step.made))
    assert made == [(index, True) for index in range(STEPS)]
    same_as_plain_torch(running, STEPS)


@pytest.mark.parametrize("end", [Drained("it drained"), JobStopped("it was stopped")])
def test_this_ranks_part_ends_at_the_loop_and_not_within_the_body(end: SystemExit) -> None:
    running, bodies, farewells = loop(build_of("ddp")), [], []
    running._control.close = farewells.append  # type: ignore[method-assign, assignment]

    def script() -> None:
        for step in unheard(running, 1, raising(end)):
            with step:
                train(step)
            bodies.append((step.index, step.made))

    with pytest.raises(type(end)) as raised:
        script()
    assert raised.value is end
    assert bodies == [(0, True), (1, False)], "code after the `with` ran"
    assert world.current() is None or not running._hooks
    if isinstance(end, Drained):
        (farewell,) = farewells
        assert farewell.drained
    same_as_plain_torch(running, 1)


def test_a_step_that_nobody_heard_decided_comes_again_as_it_was() -> None:
    """Scaler, scheduler and buffers, that the script moved before the vote, are what they were."""

    def build(mesh: Any) -> State:
        state = build_of("ddp")(mesh)
        for name, size in {"seen": 1, "bound": 1, "large": 1 << 15, "mean": 3, "variance": 3}.items():
            state.model.module.register_buffer(name, torch.zeros(size))
        return dataclasses.replace(state, extra={"count": Count()})

    running, rates, means = loop(build), [], []
    for step in unheard(running, 1, lambda: None):
        with step:
            own = step.state.model.module
            own.seen += 1
            own.bound = own.bound + 1
            own.large += 1
            # torch counts no writes to these
            nn.functional.batch_norm(torch.arange(6.0).view(2, 3), own.mean, own.variance, training=True)
            step.state.extra["count"].number += 1
            means.append(float(own.mean[0]))
            train(step)
            rates.append(step.state.scheduler.last_epoch)
    assert rates == [1, 2, 3, 4]
    own = running.state.model.module
    assert (own.seen, own.bound, own.large[0], own.large[-1]) == (STEPS,) * 4
    assert running.state.extra["count"].number == STEPS
    assert len({*means}) == STEPS
    assert means[1] == means[2], "of the try that was lost, and of the next one"
    same_as_plain_torch(running, STEPS)


def test_a_step_is_not_voted_for_whose_sums_on_a_device_were_aborted(monkeypatch: Any) -> None:
    """An aborted sum raises nothing, and is garbage."""
    running, bodies, told, rests = loop(build_of("ddp"), steps=3), [], [], []
    monkeypatch.setattr(running._switcher, "peers_lost", told.append)

    def aborted() -> None:
        raise Cancelled("the plan's groups are shut")

    for step in running:
        copy, vote, lost = step.copy, step.copy.vote, bodies == [(0, True)]
        if lost:
            monkeypatch.setattr(copy, "reduced_here", aborted)
            monkeypatch.setattr(copy, "rest", lambda: rests.append(1))
            copy.vote = None  # type: ignore[assignment]  # asked for nothing
        with step:
            train(step)
        bodies.append((step.index, step.made))
        if lost:
            assert copy.reduced is None
            monkeypatch.undo()
            monkeypatch.setattr(running._switcher, "peers_lost", told.append)
            copy.vote = vote
    assert bodies == [(0, True), (1, False), (1, True), (2, True)]
    assert [type(error) for error in told] == [Cancelled]
    assert rests == [1], "nothing writes to memory that is let go"
    same_as_plain_torch(running, 3)


@pytest.mark.parametrize("dead", [False, True])
def test_a_vote_waits_until_the_device_has_come_to_it_or_the_plan_is_shut(dead: bool) -> None:
    asked = []

    class Device:
        immediate = False

        def passed(self, check: Callable[[], None]) -> None:
            asked.append(1)
            check()

    copy: Any = SimpleNamespace(accelerator=Device(), interrupted=dead)
    if dead:
        with pytest.raises(Cancelled):
            LiveCopy.reduced_here(copy)
    else:
        LiveCopy.reduced_here(copy)
    assert asked


def test_a_large_buffer_is_copied_once_torch_counts_a_write_to_it() -> None:
    model = nn.Module()
    model.register_buffer("table", torch.zeros(1 << 15))
    model.register_buffer("small", torch.zeros(2))
    tensors = LiveTensors(State(model=model, optimizer=[]), ("dp",))

    def copies() -> list[torch.Tensor]:
        return [copy.copy for _, copy in tensors.buffers()]

    (first, small), (again, anew) = copies(), copies()
    assert again is first
    assert anew is not small, "torch may count no writes to it"
    model.table[3] = 1.0
    changed, _ = copies()
    assert (first[3], changed[3]) == (0.0, 1.0), "a copy is never written to"
    model.table = model.table + 1
    assert copies()[0][3] == 2.0
    model.table = torch.zeros(3)
    with pytest.raises(LiveRefusal, match=r"buffer table is torch.float32 \[3\] now, .*persistent=False"):
        copies()


def test_a_skipped_update_whose_vote_is_lost_comes_again_with_scaler_and_scheduler_as_they_were() -> None:
    def build(mesh: Any) -> State:
        state = build_of("ddp")(mesh)
        return dataclasses.replace(state, scaler=torch.amp.GradScaler("cpu", init_scale=1024.0))

    running, scales, votes = loop(build, steps=2), [], []
    for step in unheard(running, 1, lambda: None):
        with step:
            state, scaler = step.state, step.state.scaler
            loss = loss_of(state.model, step.data)
            scaler.scale(loss * step.scale).backward()
            if step.index:
                next(state.model.parameters()).grad.fill_(float("inf"))
            scaler.step(state.optimizer)
            scaler.update()
            state.scheduler.step()
            state.optimizer.zero_grad()
            assert step.decided == (step.index == 0), "a skipped update is voted at the end"
        votes.append(step.decided)
        scales.append((scaler.get_scale(), state.scheduler.last_epoch))
    assert votes == [True, False, True]
    assert scales == [(1024.0, 1), (1024.0, 1), (512.0, 2)]


def test_total_is_that_of_a_vote_which_another_rank_heard() -> None:
    """A scheduler that goes by the loss moves alike on all ranks."""
    totals = []
    for step in unheard(loop(build_of("ddp"), steps=2), 1, lambda: heard(1)):
        with step:
            train(step, lambda step=step: totals.append(step.total))
    assert totals[1] == 1.0


class Count:
    number = 0

    def state_dict(self) -> dict[str, int]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.number = state["number"]


def test_an_exception_of_the_scripts_own_comes_out_after_another_ranks_vote() -> None:
    running = loop(build_of("ddp"))

    def broken() -> None:
        raise ValueError("the script's own")

    def script() -> None:
        for step in unheard(running, 1, lambda: heard(1)):
            with step:
                train(step, broken if step.index == 1 else lambda: None)

    with pytest.raises(ValueError, match="own"):
        script()


class Gone(Work):
    """A collective of a group whose sockets are shut."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        self._tensor = tensor

    def result(self) -> list[torch.Tensor]:  # type: ignore[override]
        return [self._tensor]


def gone(*_: Any) -> Any:
    raise RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer")


@pytest.mark.parametrize("at", ["all_reduce", "full_tensor", "forward"])
def test_a_collective_that_fails_after_the_update_ends_no_step(at: str, monkeypatch: Any) -> None:
    """Of a loss for a log, of a DTensor, of the forward pass through DDP in an evaluation, whose waits are in
    C++: the last has the scheduler's step before it."""
    before = Work.wait, functional.wait_tensor
    monkeypatch.setattr(Work, "wait", gone)
    monkeypatch.setattr(functional, "wait_tensor", gone)
    running, results = loop(build_of("ddp")), []

    def fails() -> None:
        tensor = torch.ones(2)
        if at == "all_reduce":
            Work.wait(Gone(tensor))
        else:
            tensor = functional.wait_tensor(tensor)
        results.append(tensor)

    for step in running:
        with step:
            train(step, fails if at != "forward" else lambda: None)
            if at == "forward" and step.index == 1:
                gone()
        assert step.made
        if step.index == 1 and at != "forward":
            fails()  # also after the body
    assert all(tensor.isnan().all() for tensor in results)
    assert len(results) == (0 if at == "forward" else STEPS + 1)
    same_as_plain_torch(running, STEPS)
    assert Work.wait is gone
    assert before


def test_a_vote_at_the_end_of_a_body_that_fails_decides_nothing(monkeypatch: Any) -> None:
    """It waits as a collective after the update would, whose loss is NaN."""
    real = Work.wait
    monkeypatch.setattr(Work, "wait", lambda work, *given: (gone if isinstance(work, Gone) else real)(work))
    running, tries = loop(build_of("ddp"), steps=2), []
    monkeypatch.setattr(running._switcher, "outcome", lambda error: None)
    for step in running:
        vote = step.copy.vote
        with step:
            tries.append(step.index)
            if tries == [0, 1]:
                failing = SimpleNamespace(vote=lambda *_: Work.wait(Gone(torch.ones(1))))
                step.copy.vote = failing  # type: ignore[assignment]
            else:
                train(step)
        step.copy.vote = vote
    assert tries == [0, 1, 1]
    same_as_plain_torch(running, 2)


def test_an_error_of_what_a_failed_collective_left_ends_no_step(monkeypatch: Any, caplog: Any) -> None:
    """As of reading an object that another rank did not send. The fence comes much later."""
    monkeypatch.setattr(Work, "wait", gone)
    running, made = loop(build_of("ddp")), []
    for step in running:
        with step:
            train(step)
            if step.index == 1:
                Work.wait(Gone(torch.ones(2)))
                pickle.loads(b"")
        made.append(step.made)
    assert made == [True] * STEPS
    assert "ended the body of step 1 after its update: Connection closed by peer" in caplog.text
    same_as_plain_torch(running, STEPS)


def complete(mesh: Any) -> State:
    """A scheduler, an average and a scaler that move in each body."""
    state = build_of("ddp")(mesh)
    return dataclasses.replace(
        state,
        scheduler=torch.optim.lr_scheduler.ChainedScheduler([state.scheduler]),
        ema=torch.optim.swa_utils.AveragedModel(state.model.module),
        scaler=torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=3),
    )


def test_what_moves_in_each_body_moves_for_one_that_breaks_off_after_its_update() -> None:
    """A rank whose body came to its end has it."""

    def results(breaks: bool) -> list[Any]:
        for step in loop(complete):
            with step:
                state = step.state
                loss = loss_of(state.model, step.data)
                state.scaler.scale(loss * step.scale).backward()
                state.scaler.step(state.optimizer)
                if breaks and step.index == STEPS - 1:
                    gone()
                state.scheduler.step()
                state.ema.update_parameters(state.model.module)
                state.scaler.update()
                state.optimizer.zero_grad()
            assert step.made
        scaler, (rate,) = state.scaler.state_dict(), state.scheduler.get_last_lr()
        average = [*state.ema.parameters()]
        if (left := world.current()) is not None:
            left.end()
        return [scaler, rate, int(state.ema.n_averaged), *(each.sum().item() for each in average)]

    assert results(breaks=True) == results(breaks=False)


def moves_now_and_then(step: LoopStep) -> None:
    if step.index == 1:
        step.state.scheduler.step()


def moves_with_the_loss(step: LoopStep) -> None:
    step.state.scheduler.step(1.0)


@pytest.mark.parametrize(("moves", "at"), [(moves_now_and_then, 2), (moves_with_the_loss, 2), (train, 0)])
def test_a_body_that_breaks_off_is_torn_where_it_is_not_known_what_it_owes(
    moves: Callable[[LoopStep], None], at: int, monkeypatch: Any
) -> None:
    def build(mesh: Any) -> State:
        state = build_of("ddp")(mesh)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(state.optimizer)
        return dataclasses.replace(state, scheduler=plateau) if moves is moves_with_the_loss else state

    running, made = loop(build), []
    monkeypatch.setattr(running._switcher, "peers_lost", lambda error: setattr(running, "_exit", JobOver("")))
    for step in running:
        with step:
            if moves is train:
                train(step, gone)
            else:
                step.state.optimizer.step()
                if step.index == at:
                    gone()
                moves(step)
        made.append(step.made)
        if step.index == at:
            break
    assert made == [True] * at + [False]
    assert step.copy.health.torn


def test_a_body_that_breaks_off_between_two_updates_is_torn(monkeypatch: Any) -> None:
    """Also where no scheduler moves."""
    running, made = loop(linear, data=None), []
    monkeypatch.setattr(running._switcher, "peers_lost", lambda error: setattr(running, "_exit", JobOver("")))
    for step in running:
        with step:
            step.state.optimizer.step()
            if step.index == 2:
                gone()
            step.state.optimizer.step()
        made.append(step.made)
        if step.index == 2:
            break
    assert made == [True, True, False]
    assert step.copy.health.torn


def test_an_optimizer_does_not_step_on_what_a_failed_collective_left(monkeypatch: Any) -> None:
    """A second update in a body has gradients that were reduced after the vote."""
    monkeypatch.setattr(Work, "wait", gone)
    for step in loop(build_of("ddp")):
        with step:
            train(step)
            weight = next(step.state.model.parameters())
            weight.grad = torch.zeros_like(weight)
            Work.wait(Gone(weight.grad))
            step.state.optimizer.step()
        break
    assert (step.made, step.copy.health.torn) == (False, True)
    assert not weight.isnan().any()


def keeps_gradients(step: LoopStep) -> None:
    with step:
        loss_of(step.state.model, step.data).backward()


def steps_with_a_closure(step: LoopStep) -> None:
    with step:
        step.state.optimizer.step(lambda: loss_of(step.state.model, step.data))


def steps_within_backward(step: LoopStep) -> None:
    with step:
        weight = next(step.state.model.parameters())
        weight.register_post_accumulate_grad_hook(lambda _: step.state.optimizer.step())
        loss_of(step.state.model, step.data).backward()


def schedules_after_the_with(step: LoopStep) -> None:
    with step:
        train(step)
    step.state.scheduler.step()


def steps_by_another_optimizer(step: LoopStep) -> None:
    other = torch.optim.SGD(step.state.model.parameters(), lr=0.1)
    with step:
        loss_of(step.state.model, step.data).backward()
        other.step()


BODIES = {
    "an optimizer that the state lacks": (
        steps_by_another_optimizer,
        "SGD steps on .*give State those that step",
    ),
    "gradients for a later body": (keeps_gradients, "micro-batches"),
    "a closure": (steps_with_a_closure, r"step\(\) without one"),
    "an update within backward": (steps_within_backward, r"after backward\(\)"),
    "a scheduler after the body": (schedules_after_the_with, "Move it into the `with`"),
}


@pytest.mark.parametrize("name", BODIES)
def test_bodies_that_cannot_be_kept_alive_are_refused_by_name(name: str) -> None:
    body, message = BODIES[name]

    def script() -> None:
        for step in loop(build_of("ddp")):
            body(step)

    with pytest.raises(LiveRefusal, match=message):
        script()


def test_a_step_that_is_over_keeps_no_state_alive() -> None:
    kept: list[LoopStep] = []
    for step in loop(build_of("ddp")):
        with step:
            train(step)
        assert step.state.model is step.copy.user.model, "also after its body"
        kept.append(step)
    assert kept[-1].state.model is not None, "and after the loop"
    for step in kept[:-1]:
        with pytest.raises(RuntimeError, match="the loop gave last"):
            _ = step.state
        assert not any(isinstance(value, State | LiveTensors | SmallState) for value in vars(step).values())


def test_waits_for_collectives_are_told_and_those_of_other_threads_are_left_alone(monkeypatch: Any) -> None:
    monkeypatch.setattr(Work, "wait", gone)
    places: list[int] = []
    where = SimpleNamespace(place=SCRIPT, at=places.append)
    waits = CollectiveWaits(lambda error: True, where)  # type: ignore[arg-type]
    waits.install()
    raised: list[Exception] = []

    def elsewhere() -> None:
        try:
            Work.wait(Work())
        except RuntimeError as error:
            raised.append(error)

    try:
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert (len(raised), places) == (1, [])
        Work.wait(Gone(torch.ones(1)))
        assert places == [OTHER, SCRIPT]
    finally:
        waits.remove()


def test_a_loop_that_is_left_ends_at_once_and_torch_is_as_before() -> None:
    before = Work.wait, functional.wait_tensor, [signal.getsignal(each) for each in ENDING]
    for step in loop(build_of("ddp")):
        assert Work.wait is not before[0]
        assert [signal.getsignal(each) for each in ENDING] == before[2], "one process without checkpoints"
        with step:
            train(step)
        break
    del step
    until(lambda: Work.wait is before[0], lambda: "the loop is still there")
    assert functional.wait_tensor is before[1]


# -- state as boxes --------------------------------------------------------------------------------------------


def test_a_local_tensor_of_several_runs_is_cut_into_its_boxes() -> None:
    placements = (Placement(dim=0, strided=True), Placement(dim=0))
    tensor = MeshTensor(name="w", shape=(13, 3), dtype="float32", placements=(placements,))
    model = MeshModel(meshes=(AllowedMesh(names=("dp", "tp")),), tensors=(tensor,))
    members = tuple(f"a/{i}" for i in range(6))
    plan = MeshPlan(number=1, names=("dp", "tp"), shape=(3, 2), members=members, samples=(1, 1, 1))
    layouts, whole_tensor = MeshLayouts(model, plan), torch.arange(39.0).view(13, 3)
    several = 0
    for member in members:
        boxes = layouts.boxes(layouts.items[0], member)
        if not boxes:
            continue
        several += len(boxes) > 1
        local = torch.cat([whole_tensor[box.slices(box.whole((13, 3)))] for box in boxes])
        for box, part in zip(boxes, _parts(local, boxes), strict=True):
            assert torch.equal(part, whole_tensor[box.slices(box.whole((13, 3)))])
            assert part.untyped_storage().data_ptr() == local.untyped_storage().data_ptr()
    assert several


def in_world(work: Callable[[World], None]) -> None:
    register()
    store = TorchStore(dist.HashStore())  # type: ignore[attr-defined]
    groups = PlanGroups("one", "a/0", "127.0.0.1", store)
    made = World(groups, ("a/0",))
    made.enter()
    try:
        work(made)
    finally:
        made.end()
        gc.collect()
        groups.park().join()


def rich(mesh: Any) -> State:
    """Two groups, a frozen part, tied weights, a scalar, a buffer, an average, a scaler, two schedulers."""
    model = nn.Module()
    model.embed, model.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
    model.head.weight = model.embed.weight
    model.scale, model.frozen = nn.Parameter(torch.ones(())), nn.Linear(4, 4).requires_grad_(False)
    model.register_buffer("table", torch.arange(3.0))
    average = torch.optim.swa_utils.AveragedModel(model)
    decayed = {"params": [model.embed.weight], "weight_decay": 0.1}
    adam = torch.optim.AdamW([decayed, {"params": [model.scale], "weight_decay": 0.0}], lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(adam, 2)
    return State(
        model=model, optimizer=adam, scheduler=[schedule], ema=average, scaler=torch.amp.GradScaler("cpu")
    )


def rich_sharded(mesh: Any) -> State:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
    fully_shard(model, mesh=mesh)
    adam = torch.optim.AdamW(model.parameters(), lr=0.1)
    return State(model=model, optimizer=adam)


@pytest.mark.parametrize("build", [rich, rich_sharded])
def test_all_of_a_state_comes_back_bit_for_bit_into_what_another_build_made(build: Any) -> None:
    def work(made: World) -> None:
        mesh = made.mesh(("dp",), (1,))
        torch.manual_seed(0)
        one = LiveTensors(build(mesh), ("dp",))
        model = MeshModel(meshes=(AllowedMesh(names=("dp",)),), tensors=one.described())
        plan = MeshPlan(number=1, names=("dp",), shape=(1,), members=("a/0",), samples=(1,))
        layouts = MeshLayouts(model, plan)
        adam = one.state.optimizers[0]
        for _ in range(3):
            for parameter in one.trained.values():
                parameter.grad = torch.ones_like(parameter)
            adam.step()
            for scheduler in one.state.schedulers:
                scheduler.step()
            if one.state.ema is not None:
                one.state.ema.update_parameters(one.state.model)
        held = one.collected(layouts, "a/0")
        torch.manual_seed(1)
        other = LiveTensors(build(mesh), ("dp",))
        assert {id(p) for p in other.trained.values()} == {
            id(p) for p in other.state.model.parameters() if p.requires_grad
        }
        other.install(held, layouts, "a/0")
        again = other.collected(layouts, "a/0")
        assert again.schema() == held.schema()
        for item, tensor in held.tensors.items():
            for shard, copied in zip(tensor.shards, again.tensors[item].shards, strict=True):
                for name, plane in shard.planes.items():
                    assert torch.equal(plane, copied.planes[name]), (item, name)
                    same = (
                        plane.untyped_storage().data_ptr() == copied.planes[name].untyped_storage().data_ptr()
                    )
                    assert not same or item.role == "state", "values are copied, never adopted"
        for parameter, fresh in zip(one.trained.values(), other.trained.values(), strict=True):
            kept = other.state.optimizers[0].state[fresh]
            assert isinstance(kept["exp_avg"], DTensor) == isinstance(parameter, DTensor)
            assert kept["step"] == 3

    in_world(work)


def cut_twice(mesh: Any) -> State:
    model = nn.Linear(3, 13, bias=False)
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(0), Shard(0)]))
    return State(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))


def fsdp_over_tp(mesh: Any) -> State:
    model = nn.Sequential(nn.Linear(6, 13), nn.Linear(13, 5))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    return State(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize(("build", "refused"), [(cut_twice, True), (fsdp_over_tp, False)])
def test_boxes_are_those_of_torch_on_the_real_mesh(build: Any, refused: bool) -> None:
    """Boxes of a trial's placements on one device, and the tensors of a mesh of 3 x 2."""
    seen = []

    def trial(made: World) -> None:
        seen.extend(LiveTensors(build(made.mesh(("dp", "tp"), (1, 1))), ("dp", "tp")).described())

    in_world(trial)
    members = tuple(f"a/{i}" for i in range(6))
    model = MeshModel(meshes=(AllowedMesh(names=("dp", "tp")),), tensors=tuple(seen))
    plan = MeshPlan(number=1, names=("dp", "tp"), shape=(3, 2), members=members, samples=(1, 1, 1))
    layouts, found = MeshLayouts(model, plan), []
    for rank, member in enumerate(members):
        dist.init_process_group("fake", rank=rank, world_size=6, store=FakeStore())
        try:
            mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp", "tp"))
            tensors = LiveTensors(build(mesh), ("dp", "tp"))
            try:
                tensors.refuse_other_boxes(layouts, member)
            except LiveRefusal:
                found.append(rank)
        finally:
            dist.destroy_process_group()
            clear_caches()
    assert bool(found) == refused, found


def test_a_world_that_was_left_comes_back_with_its_groups() -> None:
    def work(first: World) -> None:
        mesh = first.mesh(("a", "b"), (1, 1))
        group = dist.new_group([0])
        count = len(dist.distributed_c10d._world.pg_map)
        first.leave()
        assert not dist.is_initialized()
        store = TorchStore(dist.HashStore())  # type: ignore[attr-defined]
        second = World(PlanGroups("two", "a/0", "127.0.0.1", store), ("a/0",))
        world.enter(second)
        second.mesh(("a",), (1,))
        world.enter(first)
        assert not second.entered
        assert len(dist.distributed_c10d._world.pg_map) == count
        tensor = torch.ones(2)
        dist.all_reduce(tensor, group=group)
        dist.all_reduce(tensor, group=mesh["b"].get_group())
        assert dist.get_rank(group) == 0
        second.end()
        gc.collect()
        second.groups.park().join()

    in_world(work)


def test_the_groups_of_a_world_are_let_go_once_no_module_holds_them() -> None:
    """Else the thread that collects the modules would wait for gloo."""

    def work(first: World) -> None:
        holder = nn.Module()
        holder.itself, holder.group = [holder], dist.new_group([0])
        for redistributed in (Shard(0), Shard(1)):  # torch's caches do not hold the mesh
            tensor = distribute_tensor(torch.ones(4, 3), first.mesh(("dp",), (1,)), [Shard(0)])
            (tensor + tensor).redistribute(placements=[redistributed]).full_tensor()
        del tensor
        first.leave()
        parked = first.groups.park()
        del holder
        parked.join(0.5)
        assert parked.is_alive()
        gc.collect()
        parked.join(30)
        assert not parked.is_alive()

    in_world(work)


def test_the_groups_of_a_world_are_kept_while_it_is_torchs() -> None:
    """A rank that was given up stands by with the last one: later its main thread would destroy them."""

    def work(first: World) -> None:
        parked = first.groups.park()
        parked.join(0.5)
        assert parked.is_alive()
        first.leave()
        parked.join(30)
        assert not parked.is_alive()

    in_world(work)


# -- refusals ------------------------------------------------------------------------------------------------


def linear(mesh: Any, **changes: Any) -> State:
    model = nn.Linear(2, 2)
    return State(**{"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), **changes})


class Half(torch.optim.SGD):
    """Steps on a whole parameter at once."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data.sub_(parameter.grad / parameter.grad.norm())


class OwnNorm(nn.modules.batchnorm._BatchNorm):
    def _check_input_dim(self, input: Any) -> None:
        pass


def normed(norm: nn.Module) -> Callable[[Any], State]:
    def build(mesh: Any) -> State:
        model = nn.Sequential(nn.Linear(2, 2), norm)
        return State(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))

    return build


def by_mesh(mesh: Any) -> State:
    model = nn.Linear(2, 2 + len(mesh.mesh_dim_names))
    return State(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))


def half(mesh: Any) -> State:
    model = nn.Linear(2, 2)
    return State(model=model, optimizer=Half(model.parameters(), lr=0.1))


def stranger(mesh: Any) -> State:
    return linear(mesh, optimizer=torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1))


class Preconditioned(torch.optim.Optimizer):
    """Keeps a matrix for each side of a parameter, as Shampoo does."""

    def __init__(self, params: Any, rate: float) -> None:  # `defaults` do not make it anew
        super().__init__(params, {"lr": rate})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                left = self.state[parameter].setdefault("left", torch.eye(len(parameter)))
                left += parameter.grad.flatten(1) @ parameter.grad.flatten(1).T
                with torch.no_grad():
                    parameter -= group["lr"] * torch.linalg.solve(left, parameter.grad)


class Renamed(torch.optim.SGD):
    """AdamW's like would be: made of other arguments than its defaults, and element-wise."""

    def __init__(self, params: Any, rate: float) -> None:
        super().__init__(params, lr=rate, momentum=0.9)


def stepped_by(make: Callable[[Any], Any]) -> Callable[[Any], State]:
    def build(mesh: Any) -> State:
        model = nn.Linear(4, 4, bias=False)
        return State(model=model, optimizer=make(model.parameters()))

    return build


def scheduled(mesh: Any) -> State:
    state = stepped_by(lambda params: Preconditioned(params, 0.1))(mesh)
    schedule = torch.optim.lr_scheduler.StepLR(state.optimizer, 2)
    return dataclasses.replace(state, scheduler=schedule)


def fsdp1(mesh: Any) -> State:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return linear(mesh, model=FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device("cpu")))


def stage(mesh: Any) -> State:
    from torch.distributed.pipelining import PipelineStage

    return linear(mesh, model=PipelineStage(nn.Linear(2, 2), 0, 1, torch.device("cpu")))


def unnamed(mesh: Any) -> State:
    model = nn.Linear(2, 2)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    return linear(mesh, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))


def summed(mesh: Any) -> State:
    model = nn.Linear(2, 2)
    model.weight = nn.Parameter(DTensor.from_local(model.weight.detach(), mesh, [Partial()], run_check=False))
    return linear(mesh, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))


def kept_group() -> Callable[[Any], State]:
    groups: list[Any] = []

    def build(mesh: Any) -> State:
        groups.append(dist.new_group([0]))
        model = nn.parallel.DistributedDataParallel(nn.Linear(2, 2), process_group=groups[0])
        return State(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))

    return build


class Warmup:
    """A learning rate whose object holds something that no text stands for."""

    def __init__(self) -> None:
        self.config = object()

    def __call__(self, step: int) -> float:
        return 1.0


def with_schedule(mesh: Any) -> State:
    state = linear(mesh)
    schedule = torch.optim.lr_scheduler.LambdaLR(state.optimizer, Warmup())
    return dataclasses.replace(state, scheduler=schedule)


class Loader:
    """As torchdata's StatefulDataLoader."""

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __len__(self) -> int:
        return 4

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


class WithExtra(nn.Linear):
    def get_extra_state(self) -> Any:
        return {"scale": 1.0}

    def set_extra_state(self, state: Any) -> None:
        pass


class Wrapped(torch.optim.Optimizer):
    """As libraries wrap optimizers: it has the attributes of another one."""

    def __init__(self, params: Any) -> None:
        self.inner = torch.optim.SGD(params, lr=0.1)
        self.defaults = self.inner.defaults

    @property
    def param_groups(self) -> Any:
        return self.inner.param_groups

    @property
    def state(self) -> Any:
        return self.inner.state


def on(device: str) -> Callable[[Any], State]:
    return lambda mesh: linear(mesh, model=nn.Linear(2, 2, device=device))


REFUSED = {
    "no state": (lambda mesh: nn.Linear(2, 2), {}, "let it return elasticd.State"),
    "batch norm": (normed(nn.BatchNorm1d(2)), {}, "use LayerNorm or GroupNorm"),
    "instance norm": (
        normed(nn.InstanceNorm1d(2, affine=True, track_running_stats=True)),
        {},
        "use LayerNorm or GroupNorm",
    ),
    "a batch norm of its own": (normed(OwnNorm(2)), {}, "use LayerNorm or GroupNorm"),
    "another model": (
        by_mesh,
        {"meshes": ("dp", "replicate, shard")},
        "weight is trained float32 .*on every mesh",
    ),
    "no part": (half, {}, "Half"),
    "a stranger's": (stranger, {}, r"make it of model.parameters\(\)"),
    "no mesh": (linear, {"meshes": ()}, "name the dimensions of a mesh"),
    "a mesh": (linear, {"meshes": ("dp=x",)}, "give a number of devices"),
    "a loader": (linear, {"data": torch.utils.data.DataLoader(Text())}, "data=loader.dataset"),
    "a stream": (linear, {"data": iter([])}, "give a map-style dataset"),
    "no build": (3, {}, "build is a int: give a function of a mesh that returns elasticd.State"),
    "no batch": (linear, {"batch": 0}, "batch is 0; it must be a whole number from 1 on"),
    "no samples": (linear, {"data": []}, "data is empty: it must hold at least one sample"),
    "a partial sum": (summed, {}, "weight is a partial sum on the mesh: parameters are sharded or replicated"),
    "no resume": (linear, {"resume": 3}, "resume is a int: give a function of the state"),
    "no steps": (linear, {"steps": -1}, "whole number from 0 on"),
    "FSDP1": (fsdp1, {}, "FSDP1 .*use torch.distributed.fsdp.fully_shard"),
    "a stage of a pipeline": (stage, {}, "PipelineStage: .*elasticd.Job has pipelines"),
    "no module": (lambda mesh: linear(mesh, model=[]), {}, r"model=\.\.\.\) is a list: .*ModuleDict"),
    "no optimizer": (lambda mesh: linear(mesh, optimizer=[3]), {}, "has a int: .*extra="),
    "Muon": (stepped_by(torch.optim.Muon), {}, "Muon .*element-wise optimizer such as AdamW"),
    "Adafactor": (stepped_by(torch.optim.Adafactor), {}, "Adafactor .*element-wise optimizer such as AdamW"),
    "L-BFGS": (stepped_by(torch.optim.LBFGS), {}, "LBFGS asks for a closure"),
    "Shampoo": (stepped_by(lambda params: Preconditioned(params, 0.1)), {}, "Preconditioned .*such as AdamW"),
    "Shampoo with a schedule": (scheduled, {}, "Preconditioned .*such as AdamW"),
    "ZeRO's": (
        stepped_by(lambda params: ZeroRedundancyOptimizer(params, torch.optim.AdamW)),
        {},
        "ZeroRedundancyOptimizer keeps state by rank.*use fully_shard",
    ),
    "a mesh without names": (
        unnamed,
        {},
        "weight is on a mesh of dimensions without names.*that it is called with",
    ),
    "a group of another world": (kept_group(), {"meshes": ("dp", "shard")}, "another world: make all groups"),
    "StatefulDataLoader": (linear, {"data": Loader()}, "Loader, whose position .*data=loader.dataset"),
    "meta": (on("meta"), {}, "to_empty"),
    "a schedule": (with_schedule, {}, r"state_dict\(\) of the scheduler 0.*: a object .*numbers, text"),
    "an optimizer with a count": (
        stepped_by(lambda params: Aside(params, lr=0.1)),
        {},
        "Aside goes on otherwise",
    ),
    "a wrapper": (stepped_by(Wrapped), {}, "Wrapped wraps another optimizer: .* the one that steps"),
    "extra state": (lambda mesh: linear(mesh, model=WithExtra(2, 2)), {}, r"WithExtra.*keep it in buffers"),
    "a lazy module": (normed(nn.LazyLinear(2)), {}, "1 .LazyLinear. .*without shapes: .*forward pass"),
    "extra": (lambda mesh: linear(mesh, extra={"sampler": 3}), {}, "without state_dict"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_kept_alive_is_refused_by_name(name: str) -> None:
    build, changes, message = REFUSED[name]
    with pytest.raises((JobStopped, ValueError), match=message):
        loop(build, **changes)


REPLICATED, CUT = Placement(), Placement(dim=0)


@pytest.mark.parametrize(
    ("mesh", "placements", "optimizers", "every"),
    [
        ("dp", (REPLICATED,), 1, None),
        ("dp", (REPLICATED,), 2, 1),
        ("shard", (CUT,), 1, 1),
        ("replicate, shard", (REPLICATED, CUT), 1, 1),
        ("replicate=2, shard", (REPLICATED, CUT), 1, None),
        ("replicate=1, shard", (REPLICATED, CUT), 1, 1),
    ],
)
def test_snapshots_are_made_where_a_death_may_leave_no_copy(
    mesh: str, placements: tuple[Placement, ...], optimizers: int, every: int | None
) -> None:
    """A dimension of replicas may have one device, where its size is not said."""
    tensor = MeshTensor(name="w", shape=(4,), dtype="float32", placements=(placements,))
    model = MeshModel(meshes=(AllowedMesh.from_text(mesh),), tensors=(tensor,))
    assert default_snapshots(model, optimizers) == every


@pytest.mark.parametrize(("names", "counted"), [(("dp", "tp"), [4, 0, 4, 0]), (("dp", "cp"), [4, 4, 4, 4])])
def test_losses_of_a_tp_group_count_once_and_those_of_context_parallel_ranks_each(
    names: tuple[str, str], counted: list[int]
) -> None:
    members = tuple(f"a/{i}" for i in range(4))
    plan = MeshPlan(number=1, names=names, shape=(2, 2), members=members, samples=(2, 2))
    weights, scales = [], []
    for member in members:
        everyone = SimpleNamespace(all_gather=lambda own: torch.tensor(counted, dtype=torch.float64))
        copy: Any = SimpleNamespace(plan=plan, device=member, user=linear(None), everyone=everyone)
        step = LoopStep(copy, 0, range(4), *[lambda *_: False] * 3)
        step.loss = 1.0
        scales.append(step.scale_of(4))
        weights.append(step.terms[1])
    assert weights == counted
    assert scales == [1.0] * 4


def test_an_optimizer_of_other_arguments_is_accepted() -> None:
    for step in loop(stepped_by(lambda params: Renamed(params, 0.1)), data=None, steps=2):
        with step:
            step.state.model(torch.ones(1, 4)).sum().backward()
            step.state.optimizer.step()


CHANGES: dict[str, tuple[Callable[[int], nn.Module], str]] = {
    "names": (lambda call: nn.ModuleDict({f"part{call}": nn.Linear(2, 2)}), "part1.weight is missing"),
    "shapes": (lambda call: nn.Linear(2, 2 + call), r"weight is trained float32 \[4, 2\] instead of"),
    "dtypes": (lambda call: nn.Linear(2, 2, dtype=[None, torch.float32, torch.float64][call]), "float64"),
    "kinds": (lambda call: nn.Linear(2, 2).requires_grad_(call == 1), "weight is frozen"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_build_that_makes_another_model_at_another_call_is_refused_before_the_first_step(name: str) -> None:
    model_of, message = CHANGES[name]
    calls, steps = [0], []

    def build(mesh: Any) -> State:
        calls[0] += 1
        model = model_of(calls[0])
        return State(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))

    def script() -> None:
        steps.extend(step.index for step in loop(build))

    with pytest.raises((JobStopped, LiveRefusal), match=rf"{message}.*a function of its mesh alone"):
        script()
    assert not steps


def test_trainers_of_other_libraries_are_refused() -> None:
    """transformers' Trainer sets the process up by accelerate."""
    accelerate = pytest.importorskip("accelerate")
    accelerate.PartialState(cpu=True)
    try:
        with pytest.raises((JobStopped, ValueError), match=r"accelerate .*elasticd.from_hf .*restart mode"):
            loop(linear)
    finally:
        accelerate.PartialState._reset_state()


def test_a_world_of_the_scripts_own_is_refused() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        with pytest.raises((JobStopped, ValueError), match="leave it out"):
            loop(linear)
    finally:
        dist.destroy_process_group()
