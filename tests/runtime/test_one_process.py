"""`python train.py`: a Job without agent and launcher trains in one process, as plain torch does."""

from __future__ import annotations

import gc
import json
import math
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import elasticd
from elasticd.annotations import Annotation, plan_of
from elasticd.checkpoints.disk import LocalDisk
from elasticd.checkpoints.folder import damages, scan
from elasticd.models import Decoder, next_token_loss
from elasticd.runtime.accelerator import CPU
from elasticd.runtime.comm.groups import Cancelled
from elasticd.runtime.engine.engine import Engine
from elasticd.runtime.exits import JobStopped
from elasticd.runtime.model.validation import ModelError
from elasticd.system import process_mark
from elasticd.testing.waiting import until
from tests import forkserver
from tests.integration import train
from tests.sizes import beside

STEPS = 7


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A process that nobody launched, on a node without an agent."""
    for name in ("TORCHELASTIC_RUN_ID", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ELASTICD_SOCKET", str(tmp_path / "none.sock"))
    monkeypatch.setenv("ELASTICD_DEVICE", "cpu")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, "signals are left as they were"


def job(folder: Path | None = None, *, every: int = 100, **changes: Any) -> elasticd.Job:
    with torch.device("meta"):
        model = Decoder(replace(train.CONFIG, layers=changes.pop("layers", 3))).describe()
    made = {
        "loss": next_token_loss,
        "optimizer": train.optimizer,
        "dataset": train.Text(),
        "micro_batch": train.MICRO,
        "clip": train.CLIP,
        "scheduler": train.scheduler,
        "checkpointing": elasticd.CheckpointingOptions(folder=folder, every=every),
        "check": False,  # so that calls and lines can be counted
    }
    return elasticd.Job(model=model, global_batch=train.BATCH, seed=train.SEED, **made | changes)


def losses(job: elasticd.Job, steps: int = STEPS) -> list[float]:
    return [step.loss for step in job.steps(steps)]


def test_it_trains_as_plain_torch_does_and_says_in_one_line_that_it_is_alone(
    capfd: pytest.CaptureFixture[str],
) -> None:
    reference, weights = train.reference(STEPS)
    trained = job()
    assert losses(trained) == pytest.approx(reference, abs=1e-10)
    apart = [float((value - weights[name]).abs().max()) for name, (_, value) in trained.parameters().items()]
    assert len(apart) == len(weights)
    assert max(apart) <= 1e-10
    out = capfd.readouterr()
    assert out.err == "elasticd: one process on cpu, without an agent; begins at step 0\n"
    assert out.out == ""


def test_a_step_of_the_own_modules_is_compared_first_and_changes_nothing(
    capfd: pytest.CaptureFixture[str],
) -> None:
    reference, _ = train.reference(STEPS)
    assert losses(job(check=True)) == pytest.approx(reference, abs=1e-10)
    first, second = capfd.readouterr().err.splitlines()
    assert first.startswith(
        "elasticd: a step of your own modules and one of the copies that train agree: loss 3."
    )
    assert first.endswith("s; Job(check=False) leaves it out")
    assert "begins at step 0" in second


@pytest.mark.parametrize(
    "changes",
    [
        {"micro_batch": 6},
        {"parallelism": elasticd.ParallelismOptions(recompute="plan", sequence_parallel="plan")},
        {"parallelism": elasticd.ParallelismOptions(recompute=True, zero=1)},
        {"dataset": train.Known(), "data": elasticd.DataOptions(packing=elasticd.Packing())},
        {"dataset": train.Known(), "data": elasticd.DataOptions(packing=elasticd.Packing(tokens=40, cut=True))},
        {"layers": 1},
    ],
    ids=["one micro-batch", "what a plan may", "ZeRO", "packed", "cut", "one block"],
)
def test_whatever_a_job_asks_for_the_losses_are_the_same(changes: dict[str, Any]) -> None:
    reference, _ = train.reference(STEPS, replace(train.CONFIG, layers=changes.get("layers", 3)))
    assert losses(job(**changes)) == pytest.approx(reference, abs=1e-10)


@pytest.mark.parametrize("check", [True, False])
def test_a_loss_that_returns_a_mean_is_refused_with_what_to_write(check: bool) -> None:
    def mean(logits: Any, batch: Any) -> Any:
        return next_token_loss(logits, batch)[0]

    with pytest.raises((ModelError, JobStopped), match="the sum over targets and their count"):
        losses(job(loss=mean, check=check))


def test_a_run_goes_on_from_its_newest_checkpoint_in_the_same_process(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    reference, _ = train.reference(STEPS)
    assert losses(job(tmp_path / "c", every=2), 3) == pytest.approx(reference[:3], abs=1e-10)
    assert [item.step for item in scan(tmp_path / "c")] == [3, 2]
    assert all(damages(item.path) == () for item in scan(tmp_path / "c"))
    capfd.readouterr()
    assert losses(job(tmp_path / "c")) == pytest.approx(reference[3:], abs=1e-10)
    assert f"continues from step 3 of {tmp_path / 'c'}\n" in capfd.readouterr().err
    assert losses(job(tmp_path / "c")) == [], "all steps are made"


def test_the_state_of_this_device_is_read_again_after_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan's groups may be shut while a device is still waited for."""
    trained, faults, lost = (
        job(layers=1),
        [Cancelled("shut while the device was waited for")],
        list[Exception](),
    )
    delivered = Engine.delivered_state

    def delivered_state(engine: Engine) -> Any:
        if faults:
            raise faults.pop()
        return delivered(engine)

    monkeypatch.setattr(Engine, "delivered_state", delivered_state)
    monkeypatch.setattr(trained._switcher, "peers_lost", lost.append)
    for _ in trained.steps(2):
        state = trained.state_dict(sharded=True)
    assert [str(error) for error in lost] == ["shut while the device was waited for"]
    assert set(state) >= set(trained.parameters())
    faults.append(Cancelled("shut at the end"))
    assert set(trained.state_dict(sharded=True)) == set(state), "after the loop there is nothing to recover"


def test_a_loop_of_ones_own_evaluation_and_a_full_state_dict(tmp_path: Path) -> None:
    plain = train.Plain()
    held_out = [train.Text()[i] for i in range(900, 910)]
    trained = job(
        evaluation=elasticd.EvaluationOptions(held_out=held_out), parallelism=elasticd.ParallelismOptions()
    )
    while (index := trained.next(2)) is not None:
        samples = [(7 * index + i) % 1000 for i in range(train.BATCH)]
        step = trained.step(samples)
        assert step is not None
        assert step.loss == pytest.approx(plain.step(samples), abs=1e-10)
        if index == 0:
            found = trained.evaluate()
            assert found is not None
            batch = train.pad(held_out)
            total, count = next_token_loss(plain.model(batch), batch)
            assert found.loss == pytest.approx(float(total.detach()) / count, abs=1e-10)
            state = trained.state_dict()
            assert state is not None
            expected = dict(plain.model.named_parameters())
            assert all(
                torch.allclose(state[name], value.detach(), atol=1e-10) for name, value in expected.items()
            )  # type: ignore[arg-type]


def signalled(job: elasticd.Job, steps: list[int], at: int, *numbers: signal.Signals) -> None:
    """Trains, and gets these signals in the loop's body after a step."""
    for step in job.steps(100):
        steps.append(step.index)
        for number in numbers if step.index == at else ():
            os.kill(os.getpid(), number)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)], ids=str
)
def test_a_signal_ends_the_script_after_its_step_with_a_last_checkpoint(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], number: signal.Signals, code: int
) -> None:
    steps = list[int]()
    with pytest.raises(SystemExit) as end:
        signalled(job(tmp_path / "c"), steps, 2, number)
    assert (end.value.code, steps) == (code, [0, 1, 2, 3])
    (newest,) = scan(tmp_path / "c")
    assert newest.step == 4
    said = capfd.readouterr().err.splitlines()[1:]
    assert said == [
        f"elasticd: {'Ctrl-C' if number == signal.SIGINT else number.name}: "
        "ends after this step, with a checkpoint; again: at once",
        f"elasticd: ended by {number.name}; {tmp_path / 'c'} has {newest.name}",
    ]
    reference, _ = train.reference(STEPS)
    assert losses(job(tmp_path / "c")) == pytest.approx(reference[4:], abs=1e-10)


def test_in_an_interactive_session_ctrl_c_goes_back_to_the_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "ps1", "In [1]: ", raising=False)
    with pytest.raises(KeyboardInterrupt, match="step-00000002"):
        signalled(job(tmp_path / "c"), [], 0, signal.SIGINT)
    assert len(losses(job(tmp_path / "c"), 5)) == 3, "and a new Job trains on"


@pytest.mark.parametrize("keeps", [True, False], ids=["twice", "without checkpoints"])
def test_ctrl_c_twice_or_without_checkpoints_interrupts_at_once(tmp_path: Path, keeps: bool) -> None:
    steps = list[int]()
    with pytest.raises(KeyboardInterrupt):
        signalled(job(tmp_path / "c" if keeps else None), steps, 1, *[signal.SIGINT] * (1 + keeps))
    assert steps == [0, 1]
    assert list(scan(tmp_path / "c")) == []
    assert len(losses(job(), 2)) == 2


def test_an_exception_in_a_step_leaves_a_checkpoint_of_the_step_before(tmp_path: Path) -> None:
    calls = list[int]()

    def loss(output: torch.Tensor, batch: Any) -> Any:
        calls.append(1)
        if len(calls) == failing:
            raise ValueError("mine")
        return next_token_loss(output, batch)

    failing = 0
    failed = job(tmp_path / "c", loss=loss)
    failing = len(calls) + 2 * 3 + 1  # it is tried before the first step; a step has three micro-batches
    with pytest.raises(ValueError, match="mine"):
        losses(failed)
    reference, _ = train.reference(STEPS)
    assert losses(job(tmp_path / "c")) == pytest.approx(reference[2:], abs=1e-10)


def test_a_script_whose_body_raises_ends_with_its_traceback_and_a_last_checkpoint(tmp_path: Path) -> None:
    environment = dict(os.environ)
    options = {"out": str(tmp_path), "steps": 100, "job": {"checkpointing": {"folder": str(tmp_path / "c")}}}
    samples = next(iter(train_samples(2)))
    environment["OPTIONS"] = json.dumps(options | {"fail": ("body", samples, "")})
    process = forkserver.start(Path(train.__file__), environment=environment, output=tmp_path / "log")
    assert process.wait(120) == 1, (tmp_path / "log").read_text()
    log = (tmp_path / "log").read_text()
    raised, saved = log.splitlines()[-2:]
    assert f"ValueError: sample {samples} is bad" in raised
    assert saved == f"elasticd: 3 steps are saved in {tmp_path / 'c'}: the same command goes on from there"
    assert [item.step for item in scan(tmp_path / "c")] == [3], log


def train_samples(step: int) -> tuple[int, ...]:
    from elasticd_planner.spec.batch import Sampler

    return Sampler(size=len(train.Text()), global_batch=train.BATCH, seed=train.SEED).samples(step)


def test_a_script_that_does_not_finish_its_loop_ends(tmp_path: Path) -> None:
    """Not by the fork server, whose processes end without what the interpreter does last."""
    script = tmp_path / "script.py"
    script.write_text(
        "from tests.runtime.test_one_process import job\nsteps = iter(job().steps(9))\nprint(next(steps).index)"
    )
    environment = dict(os.environ, PYTHONPATH=str(Path(__file__).resolve().parents[2]), OMP_NUM_THREADS="1")
    command = [sys.executable, str(script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150, check=False)
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr


def test_a_job_that_has_ended_lets_its_model_and_state_go() -> None:
    trained = job()
    gone, engines = weakref.ref(trained), list[Any]()
    for step in trained.steps(2):
        if step.index == 0:
            engines.append(weakref.ref(trained._switcher.engine))
    del trained, step
    gc.collect()
    assert gone() is None
    assert engines[0]() is None
    assert len(losses(job(), 2)) == 2


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is 2: start the script with 'elasticd run --job NAME SCRIPT'"),
        ({"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}, "TORCHELASTIC_RUN_ID is not set"),
        ({"WORLD_SIZE": "1", "LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "none"}, "no agent listens at"),
    ],
)
def test_a_process_that_was_launched_never_trains_alone(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], words: str
) -> None:
    monkeypatch.setattr("elasticd.runtime.control.parent_death.end_with", lambda parent: None)
    monkeypatch.setattr("elasticd.runtime.control.agent_client._CONNECT_SECONDS", 0.0)
    monkeypatch.delenv(process_mark.VARIABLE, raising=False)  # another test may have set it
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(elasticd.JobStopped, match=words):
        job()


def test_a_model_that_does_not_fit_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(CPU), "total_bytes", lambda self: 1 << 16)
    with pytest.raises(
        elasticd.JobStopped, match=r"one process cannot train this job: does not fit.*elasticd run"
    ):
        job()


@pytest.mark.parametrize(
    ("wrong", "words"),
    [(lambda loss: loss * math.nan, "its loss is not finite"), (lambda loss: loss * 0, "")],
    ids=["nan", "finite"],
)
def test_steps_that_change_no_weight_are_warned_of_once(
    wrong: Callable[[torch.Tensor], torch.Tensor], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    def loss(output: torch.Tensor, batch: Any) -> Any:
        total, count = next_token_loss(output, batch)
        return wrong(total), count

    assert len(losses(job(loss=loss), 5)) == 5
    said = [record.getMessage() for record in caplog.records if "changed no weight" in record.getMessage()]
    assert len(said) == bool(words)
    assert all(f"the last 3 steps changed no weight: of step 2, {words}" in line for line in said)


def test_a_plan_of_several_devices_is_for_a_cluster(capfd: pytest.CaptureFixture[str]) -> None:
    with torch.device("meta"):
        model = Decoder(train.CONFIG).describe()
    two = Annotation(groups=[("n0/0", "n0/1")], states=[{"tp": 2}])
    given = plan_of(model, {"*": two}, micro_batches=[3], micro_batch=2)
    reference, _ = train.reference(2)
    trained = job(parallelism=elasticd.ParallelismOptions(plan=given, keep_plan=True))
    assert losses(trained, 2) == pytest.approx(reference, abs=1e-10)


def test_checkpoints_that_cannot_be_read_end_the_script(tmp_path: Path) -> None:
    losses(job(tmp_path / "c"), 2)
    (found,) = scan(tmp_path / "c")
    for path in found.path.iterdir():
        if path.suffix != ".json" and path.stat().st_size > 1000:
            path.write_bytes(b"\0" * path.stat().st_size)
    with pytest.raises(elasticd.JobStopped, match="checkpoints"):
        losses(job(tmp_path / "c"))


def test_a_last_checkpoint_that_is_not_made_fails_the_job_after_the_last_steps_body(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(disk: LocalDisk, path: Path) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(LocalDisk, "create", full)
    trained, seen = job(tmp_path), []

    def script() -> None:
        for step in trained.steps(2):
            seen.append(step.index)
            assert trained.state_dict(), "the script can still save by itself"

    with pytest.raises(SystemExit) as end:
        script()
    assert seen == [0, 1]
    assert str(end.value) == (
        f"elasticd: no checkpoint after 2 steps, the last: could not write: no space left in {tmp_path}"
    )


def test_after_the_loop_an_exception_of_a_measure_is_the_scripts_own() -> None:
    def raises(output: Any, batch: Any) -> Any:
        raise ValueError("no such class")

    held_out = elasticd.HeldOut(dataset=train.Text(), measures={"accuracy": raises})
    trained = job(evaluation=elasticd.EvaluationOptions(held_out=held_out))
    for _ in trained.steps(1):
        pass
    with pytest.raises(ValueError, match="no such class"):
        trained.evaluate()
    engine = trained._switcher.engine
    assert engine is not None
    engine.check()  # where a device is waited for, this is asked: it raises for a plan that is over
    assert trained.state_dict(), "and the state is there"


def test_a_job_that_its_script_stops_makes_one_more_step_and_its_checkpoint(tmp_path: Path) -> None:
    trained, seen = job(tmp_path), []
    for step in trained.steps(50):
        seen.append(step.index)
        if step.index == 2:
            trained.stop()
    assert seen == [0, 1, 2, 3]
    assert scan(tmp_path)[0].step == 4
    with pytest.raises(RuntimeError, match="call it in the body of the loop"):
        trained.stop()
    assert trained.state_dict(), "the state is there after the loop"


def test_a_folder_that_cannot_be_written_to_is_refused_before_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        elasticd.JobStopped, match=f"no checkpoint can be written to {tmp_path}/file/c: Not a dir"
    ):
        job(tmp_path / "file/c")
    job(tmp_path / "new/c")
    assert not list((tmp_path / "new/c").glob("step-*")), (
        "it is there from the start, and nothing is left in it"
    )


def test_behind_a_with_the_checkpoint_of_a_loop_that_was_left_is_there(tmp_path: Path) -> None:
    with job(tmp_path, layers=1) as trained:
        for step in trained.steps(50):
            if step.index == 2:
                break
    assert [found.step for found in scan(tmp_path)] == [3]

    def raising() -> None:
        with job(tmp_path / "raises", layers=1) as trained:
            for _ in trained.steps(50):
                raise ValueError("mine")

    for _ in range(2):
        with pytest.raises(ValueError, match="mine"):
            raising()
    assert [found.step for found in scan(tmp_path / "raises")] == [2, 1]
    with job(layers=1) as trained:
        assert len(losses(trained, 2)) == 2
    with job(tmp_path / "own", layers=1) as trained:
        while (index := trained.next(50)) is not None:
            trained.step(list(range(train.BATCH)))
            if index == 1:
                break
    assert [found.step for found in scan(tmp_path / "own")] == [2]


def test_a_loop_that_is_left_by_break_leaves_a_checkpoint_of_all_its_steps(tmp_path: Path) -> None:
    trained = job(tmp_path, layers=1)
    for step in trained.steps(50):
        if step.index == 2:
            break
    until(lambda: scan(tmp_path) and scan(tmp_path)[0].step == 3)
    assert damages(scan(tmp_path)[0].path) == ()


class Raises:
    """Raises what a user's own code may raise, in a dataset, a `collate` or an optimizer."""

    def __init__(self, first: int) -> None:
        self.texts, self.first = train.Text(), first

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> Any:
        return self.texts[index] if index < self.first else float("")


#: A child by fork in the loop's body ends as a script does, by an exception or without one.
FORKS = """
import os, sys
from pathlib import Path
from tests.runtime.test_one_process import job
ends = {"exits": lambda: sys.exit(0), "raises": lambda: 1 / 0, "is done": lambda: None}[sys.argv[2]]
found = []
for step in job(Path(sys.argv[1])).steps(3):
    if step.index == 0:
        child = os.fork()
        if not child:
            ends()
            break
        os.waitpid(child, 0)
        found = [name for name in os.listdir(sys.argv[1]) if not name.startswith(".")]
else:
    print("saved by the child:", found, "last step:", step.index)
"""


@pytest.mark.parametrize("how", beside(["raises"], ["exits", "raises", "is done"]))
def test_a_child_by_fork_has_no_part_in_the_job(how: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKS, str(tmp_path), how],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.stdout.splitlines() == ["saved by the child: [] last step: 2"], done.stderr[-3000:]
    assert done.returncode == 0


def test_a_job_that_was_closed_has_no_next_step() -> None:
    made = job()
    assert made.next(3) == 0
    made.close()
    assert made.next(3) is None


def test_a_script_gives_the_batches_of_all_its_steps_or_of_none() -> None:
    """So all ranks, one that joins as well, know the next step's batch before it begins, or none does."""
    batch = range(train.BATCH)
    own = job()
    assert own.next(3) == 0
    assert own.step(batch) is not None
    with pytest.raises(RuntimeError, match="taken once"):
        next(own.steps(3))
    own.close()
    sampled = job()
    steps = sampled.steps(3)
    assert next(steps).index == 0
    with pytest.raises(RuntimeError, match=r"ask job\.next"):
        sampled.step(batch)
    with pytest.raises(RuntimeError, match="taken once"):
        sampled.next(3)
    with pytest.raises(RuntimeError, match=r"ask job\.next"):
        sampled.step(batch)
    assert [step.index for step in steps] == [1, 2]


@pytest.mark.parametrize("total", [-1, float("nan")])
def test_a_total_below_zero_is_refused(total: float) -> None:
    """It would end the job as finished."""
    with pytest.raises(ValueError, match=f"the total of steps is {total}; it must be 0 or more updates"):
        next(iter(job().steps(total)))  # type: ignore[arg-type]


@pytest.mark.parametrize("total", ["10", None, True])
def test_a_total_that_is_no_number_is_refused_by_name(total: Any) -> None:
    with pytest.raises(TypeError, match=f"the total of steps is {total!r}; it must be a number of updates"):
        next(iter(job().steps(total)))


def test_an_error_of_the_users_own_code_keeps_its_traceback_and_its_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pytest.raises(ValueError, match="could not convert string to float") as raised:
        job(dataset=Raises(0))
    assert raised.traceback[-1].path == Path(__file__)

    line = r"ValueError: could not convert string to float: '' \(.*test_one_process.py, line \d+\)"
    later = Raises(len(train.Text()))
    running = job(dataset=later)
    later.first = 0
    with pytest.raises(JobStopped, match=rf"sample \d+ of the dataset could not be read: {line}"):
        [*running.steps(STEPS)]

    with pytest.raises(JobStopped, match="cannot train on: local/0: " + line):
        [*job(optimizer=lambda named: float("")).steps(STEPS)]
    assert "Traceback" in caplog.text
