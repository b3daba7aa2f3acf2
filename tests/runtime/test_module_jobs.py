"""A `Job` of a model of two modules, in one process: losses, checkpoints, evaluations, and what is refused."""

from __future__ import annotations

import copy
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from elasticd_planner.spec.batch import Sampler
from safetensors.torch import load_file
from torch import nn

import elasticd
from elasticd.models.decoder import next_token_loss
from elasticd.runtime.model.validation import ModelError
from tests.cli.support import call, refused
from tests.runtime import image_model
from tests.runtime.image_model import (
    BATCH,
    RULES,
    SEED,
    UNITS,
    VISION,
    Captions,
    model_of,
    pipeline,
    plan_of,
    stage,
)
from tests.runtime.test_modules import ADAM, STEPS, reference, sections


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
    made = {
        "model": model_of(*copy.deepcopy(sections())),
        "loss": next_token_loss,
        "optimizer": lambda named: torch.optim.AdamW(named, **ADAM),
        "dataset": Captions(),
        "checkpointing": elasticd.CheckpointingOptions(folder=folder, every=every),
    }
    return elasticd.Job(global_batch=BATCH, seed=SEED, **made | changes)


def losses(job: elasticd.Job, steps: int = STEPS) -> list[float]:
    return [step.loss for step in job.steps(steps)]


def test_it_trains_as_plain_torch_does() -> None:
    expected, weights = reference()
    trained = job()
    found = []
    for step in trained.steps(STEPS):
        found.append(step.loss)
        whole = trained.state_dict()
    assert found == pytest.approx(expected, abs=1e-12)
    own = trained.parameters()
    assert own.keys() == weights.keys()
    assert max(float((value - weights[name]).abs().max()) for name, (_, value) in own.items()) < 1e-12
    place = trained.place("vision")
    assert place is not None
    assert (place.stage, trained.stages) == (0, 1)
    assert "vision.head" in trained.modules()
    assert isinstance(whole, dict)
    assert whole.keys() == weights.keys()
    assert torch.equal(whole["vision.embed.project.weight"], own["vision.embed.project.weight"][1])


def test_a_run_goes_on_from_its_newest_checkpoint(tmp_path: Path) -> None:
    expected, _ = reference()
    assert losses(job(tmp_path / "c", every=1), 2) == pytest.approx(expected[:2], abs=1e-12)
    whole = export(tmp_path)
    names = {
        f"vision.{name}" for name in ("embed.project.weight", "blocks.1.attention.q.weight", "head.out.bias")
    }
    assert names | {"language.head.output.weight"} <= whole.keys()
    alone = export(tmp_path, "--module", "vision")
    assert alone.keys() == {name.removeprefix("vision.") for name in whole if name.startswith("vision.")}
    assert all(torch.equal(value, whole[f"vision.{name}"]) for name, value in alone.items())
    parts = nn.ModuleDict({"embed": image_model.Patches(), "head": image_model.Projector()})
    assert not parts.load_state_dict(alone, strict=False).missing_keys
    wrong = ("checkpoint", "export", str(tmp_path / "c"), str(tmp_path / "x"), "--module", "sound")
    assert "has no module 'sound'; it has: language, vision" in refused(*wrong)
    assert losses(job(tmp_path / "c")) == pytest.approx(expected[2:], abs=1e-12)


def export(folder: Path, *options: str) -> dict[str, torch.Tensor]:
    """The newest checkpoint in a file."""
    out = folder / "out.safetensors"
    done = call("checkpoint", "export", str(folder / "c"), str(out), *options)
    assert done.exit_code == 0, done.output
    return load_file(out)


def beside(*encoders: tuple[str, str]) -> elasticd.Model:
    """The language model with these modules of items, by name."""
    vision, language = copy.deepcopy(sections())
    parts = {
        name: elasticd.Module(
            embed=own[0],
            blocks=own[1:-1],
            head=own[-1],
            width=VISION.width,
            rules=RULES,
            units=UNITS,
            items=items,
            name=name,
        )
        for name, items in encoders
        for own in (copy.deepcopy(vision),)
    }
    parts["language"] = elasticd.Module(
        embed=language[0],
        blocks=language[1:-1],
        head=language[-1],
        rules=RULES,
        units=UNITS,
        takes={items: name for name, items in encoders},
        name="language",
    )
    return elasticd.Model(modules=parts)


class WithSounds(Captions):
    """With items of another module, of which no sample has any."""

    def __init__(self) -> None:
        super().__init__()
        self.counts |= {"sounds": [0] * len(self)}


def test_a_checkpoint_of_other_modules_is_refused_by_their_names(tmp_path: Path) -> None:
    """One is renamed, one is added, and one is lost."""
    assert len(losses(job(tmp_path / "c", every=1), 1)) == 1
    _, language = copy.deepcopy(sections())
    others: dict[str, dict[str, Any]] = {
        "the modules encoder, language": {"model": beside(("encoder", "images"))},
        "the modules audio, language, vision": {
            "model": beside(("vision", "images"), ("audio", "sounds")),
            "dataset": WithSounds(),
        },
        "one module": {
            "model": elasticd.Model(embed=language[0], blocks=language[1:-1], head=language[-1]),
            "check": False,
        },
    }
    for said, changes in others.items():
        with pytest.raises(SystemExit) as refused:
            losses(job(tmp_path / "c", **changes))
        assert f"it has the modules language, vision, and the script's model has {said}" in str(refused.value)
        assert "name another folder, or train as before" in str(refused.value)


def test_a_buffer_outside_of_the_state_dict_may_change_in_an_evaluation() -> None:
    vision, language = copy.deepcopy(sections())
    head = language[-1]
    head.register_buffer("calls", torch.zeros(1), persistent=False)

    class Counting(type(head)):  # type: ignore[misc]
        def forward(self, x: torch.Tensor) -> Any:
            if not self.training:
                self.calls += 1
            return super().forward(x)

    head.__class__ = Counting
    held_out = elasticd.EvaluationOptions(held_out={"held": Captions()})
    trained = job(model=model_of(vision, language), evaluation=held_out)
    for _ in trained.steps(2):
        assert trained.evaluate("held") is not None


def test_an_evaluation_is_that_of_one_process() -> None:
    trained = job(evaluation=elasticd.EvaluationOptions(held_out={"held": Captions()}))
    for _ in trained.steps(1):
        found = trained.evaluate("held")
    modules = {
        name: [section for path, section in trained.modules().items() if path.startswith(name)]
        for name in ("vision", "language")
    }
    total, count = 0.0, 0
    with torch.no_grad():
        for index in range(len(Captions())):
            sample = Captions()[index]
            rows = []
            for image in sample["images"]:
                x: Any = image[None]
                for section in modules["vision"]:
                    x = section(x)
                rows.append(x[0])
            x = {"inputs": sample["inputs"][None], "images": torch.cat(rows) if rows else None}
            for section in modules["language"]:
                x = section(x)
            loss, targets = next_token_loss(x, {"targets": sample["targets"][None]})
            total, count = total + float(loss), count + int(targets)
    assert found.loss == pytest.approx(total / count, abs=1e-12)
    assert found.samples == len(Captions())


class Uncounted:
    """It does not say how many images its samples have."""

    def __len__(self) -> int:
        return len(Captions())

    def __getitem__(self, index: int) -> dict[str, Any]:
        return Captions()[index]


class Samples(Captions):
    """Captions whose samples are something else."""

    def __init__(self, make: Callable[[dict[str, Any]], Any]) -> None:
        super().__init__()
        self.make = make

    def __getitem__(self, index: int) -> Any:
        return self.make(super().__getitem__(index))


class Unknown(Captions):
    """A dataset that does not know how many images a sample has."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = {"images": [*self.counts["images"][:3], -1, *self.counts["images"][4:]]}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"dataset": Uncounted()}, "give it an attribute counts"),
        ({"dataset": Unknown()}, "counts say that sample 3 has -1 images: the number of each must be known"),
        (
            {"dataset": torch.utils.data.Subset(Captions(), range(4))},
            "Subset does not pass on that of the dataset that it is made of, nor rows and part",
        ),
        (
            {"dataset": Samples(lambda sample: tuple(sample.values()))},
            "must be a mapping with a list under 'images'",
        ),
        ({"dataset": Samples(lambda sample: sample | {"images": None})}, "must be a mapping with a list under"),
        (
            {"dataset": Samples(lambda sample: sample | {"images": sample["images"][1:]})},
            "the dataset's counts say",
        ),
        (
            {"dataset": Samples(lambda sample: sample | {"images": [object() for _ in sample["images"]]})},
            "images[0] must be a tensor, or a mapping of tensors",
        ),
        (
            {"evaluation": elasticd.EvaluationOptions(held_out={"held": Uncounted()})},
            "held-out set 'held': the dataset does not say how many images",
        ),
        (
            {
                "parallelism": elasticd.ParallelismOptions(
                    plan=plan_of([pipeline(1, stage(0, 3, ("a/0", 1)))], [pipeline(5, stage(0, 5, ("a/0", 1)))])
                )
            },
            "module vision: the plan has 3 blocks in each pipeline, and the model has 2",
        ),
        (
            {
                "parallelism": elasticd.ParallelismOptions(
                    plan=plan_of(
                        [pipeline(1, stage(0, 2, ("a/0", 1)))],
                        [pipeline(5, stage(0, 5, ("a/0", 1)))],
                        trainable=False,
                    )
                )
            },
            "the plan says that vision is frozen, and in the model it is trained",
        ),
    ],
    ids=[
        "counts",
        "unknown counts",
        "subset",
        "tuples",
        "no list",
        "too few",
        "no tensors",
        "held-out counts",
        "blocks",
        "frozen",
    ],
)
def test_what_several_modules_do_not_go_with_is_refused_with_the_remedy(
    changes: dict[str, Any], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refusal:
        job(**changes)
    assert said in f"{refusal.value} {capfd.readouterr().err}"


class Blind(image_model.Merge):
    """It leaves out the rows of images."""

    def forward(self, batch: Mapping[str, Any]) -> torch.Tensor:
        return super().forward({**batch, "images": None})


def test_an_embed_that_does_not_use_what_the_module_takes_is_refused(
    capfd: pytest.CaptureFixture[str],
) -> None:
    vision, language = copy.deepcopy(sections())
    with pytest.raises(SystemExit) as refusal:
        job(model=model_of(vision, [Blind(), *language[1:]]))
    said = f"{refusal.value} {capfd.readouterr().err}"
    assert "module 'language' takes 'vision' as 'images', and no parameter of vision gets a gradient" in said
    assert "let the embed of language use batch['images']" in said
    frozen = copy.deepcopy(sections()[0])
    job(model=model_of(frozen, [Blind(), *copy.deepcopy(language[1:])], frozen=True))  # there is none to get


class Measured(Captions):
    """Captions of known lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.lengths = [len(self[index]["inputs"]) for index in range(len(self))]


def test_a_job_packs_samples_with_images_and_trains_like_one_process() -> None:
    """It has tried before whether a row's sequences see each other, with rows of images at their tokens."""
    made = job(dataset=Measured(), data=elasticd.DataOptions(packing=elasticd.Packing()))
    assert losses(made) == pytest.approx(reference()[0], abs=1e-12)


class Centred(nn.Module):
    """Sees every token of a row."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(1, keepdim=True)


@pytest.mark.filterwarnings("ignore:.*tensor-parallel rules")
def test_a_job_that_cannot_pack_is_refused_with_the_remedy(capfd: pytest.CaptureFixture[str]) -> None:
    """No mask says which tokens take rows of images; or a block sees the sequences of a row for one."""
    vision, language = copy.deepcopy(sections())
    unplaced = model_of(vision, language)
    assert unplaced.graph is not None
    unplaced.graph.modules["language"].places = {}
    mixing = model_of(vision, [*language[:2], nn.Sequential(language[2], Centred()), *language[3:]], rules={})
    for model, said in (
        (unplaced, "give the module 'language' places={'images': function}"),
        (mixing, "blocks.1.1 (Centred) takes the sequences of a packed row for one"),
    ):
        with pytest.raises(SystemExit) as refusal:
            job(model=model, dataset=Measured(), data=elasticd.DataOptions(packing=elasticd.Packing()))
        assert said in f"{refusal.value} {capfd.readouterr().err}"


def encoder(**said: Any) -> elasticd.Module:
    vision = image_model.vision_sections()
    return elasticd.Module(embed=vision[0], blocks=vision[1:-1], head=vision[-1], width=16, **said)


def decoder(**said: Any) -> elasticd.Module:
    language = image_model.language_sections()
    return elasticd.Module(embed=language[0], blocks=language[1:-1], head=language[-1], **said)


@pytest.mark.filterwarnings("ignore:.*tensor-parallel rules")
@pytest.mark.parametrize(
    ("modules", "said"),
    [
        (lambda: {"a": encoder(items="images"), "b": decoder(takes={"images": "c"})}, "'b' takes 'c', and the"),
        (lambda: {"a": encoder(items="images"), "b": decoder()}, "module 'a' feeds nothing"),
        (lambda: {"a": encoder(), "b": decoder(takes={"images": "a"})}, "2 modules run on samples"),
        (lambda: {"b": decoder(takes={"images": "b"})}, "b -> b is a cycle"),
        (
            lambda: {"a": encoder(items="images", takes={"x": "b"}), "b": decoder()},
            "join the two in one module",
        ),
        (
            lambda: {
                "a": encoder(items="images"),
                "b": decoder(takes={"images": "a"}, places={"clips": image_model.is_image}),
            },
            "places are given of 'clips', and the module takes images",
        ),
        (lambda: {"a.b": encoder(items="images"), "b": decoder(takes={"images": "a.b"})}, "without dots"),
        (lambda: {"a": nn.Linear(2, 2), "b": decoder()}, "make it an elasticd.Module"),
    ],
    ids=["stranger", "idle", "two losses", "itself", "encoder of encoders", "places", "dots", "no module"],
)
def test_modules_that_make_no_model_are_refused_with_the_remedy(modules: Any, said: str) -> None:
    with pytest.raises(ModelError, match=said):
        elasticd.Model(modules=modules())


@pytest.mark.filterwarnings("ignore:.*tensor-parallel rules")
def test_what_modules_must_not_share_is_refused() -> None:
    given = encoder(items="images")
    with pytest.raises(ModelError, match="takes 'vision' as images and as again: take it once"):
        elasticd.Model(
            modules={"vision": given, "language": decoder(takes={"images": "vision", "again": "vision"})}
        )
    shared = nn.Linear(16, 24)
    vision, language = image_model.vision_sections(), image_model.language_sections()
    vision[-1].out, language[0].out = shared, shared
    one = elasticd.Module(embed=vision[0], blocks=vision[1:-1], head=vision[-1], width=16, items="images")
    two = elasticd.Module(embed=language[0], blocks=language[1:-1], head=language[-1], takes={"images": "one"})
    with pytest.raises(ModelError, match=r"is the same parameter as one\.head\.out"):
        elasticd.Model(modules={"one": one, "two": two})


def test_samples_that_the_script_gives_are_refused_and_indices_taken() -> None:
    expected, _ = reference()
    trained = job()
    data = Captions()
    assert trained.next(2) is not None
    with pytest.raises(ValueError, match="as indices of the dataset"):
        trained.step([data[index] for index in range(BATCH)])
    sampler = Sampler(size=len(data), global_batch=BATCH, seed=SEED)
    step = trained.step(sampler.samples(0))
    assert step is not None
    assert step.loss == pytest.approx(expected[0], abs=1e-12)


def test_a_model_needs_sections_or_modules() -> None:
    with pytest.raises(ModelError, match="embed, blocks and head, or several modules"):
        elasticd.Model()
