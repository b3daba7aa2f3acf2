"""A small model of two modules, by hand: an encoder of images, and a decoder that takes what it makes. With
samples of 0 to 3 images of several sizes, and what plain torch computes of them in one process."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from elasticd_planner.spec.batch import Sampler
from elasticd_planner.spec.plan import Edge, ModulePlan, Pipeline, Plan, Stage, StatePolicy, Strategy
from torch import Tensor, nn

from elasticd.models.decoder import Block, DecoderConfig, Head, next_token_loss
from elasticd.runtime.model.model import Model, Module
from elasticd.runtime.model.tp_rules import Column, Row, Rule, UnitsOf

F64, PATCH, IMAGE = torch.float64, 6, 1
VISION = DecoderConfig(vocabulary=8, width=16, layers=2, heads=4, kv_heads=2, hidden=20, dtype=F64)
TEXT = DecoderConfig(vocabulary=32, width=24, layers=5, heads=6, kv_heads=3, hidden=28, dtype=F64)
BATCH, SEED = 5, 3
#: Images of the samples of three steps, in their order: the second step has none.
COUNTS = [2, 0, 1, 3, 1, *[0] * BATCH, 0, 1, 0, 0, 2]


class Patches(nn.Module):
    """An image [1, rows, PATCH] as an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(PATCH, VISION.width, dtype=F64)

    def forward(self, image: Tensor) -> Tensor:
        projected: Tensor = self.project(image)
        return projected


class Projector(nn.Module):
    """To the decoder's width."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(VISION.width, TEXT.width, dtype=F64)

    def forward(self, x: Tensor) -> Tensor:
        projected: Tensor = self.out(x)
        return projected


class Merge(nn.Module):
    """Tokens, of which those of images are replaced by the rows of the images."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(TEXT.vocabulary, TEXT.width, dtype=F64)

    def forward(self, batch: Mapping[str, Any]) -> Tensor:
        x: Tensor = self.tokens(batch["inputs"])
        if batch["images"] is None:
            return x
        return x.masked_scatter((batch["inputs"] == IMAGE)[..., None], batch["images"])


RULES = {
    "blocks.*.attention.q.weight": Column("heads"),
    "blocks.*.attention.[kv].weight": Column("kv_heads"),
    "blocks.*.attention.o.weight": Row("heads"),
    "blocks.*.feed_forward.gate.weight": Column("columns"),
    "blocks.*.feed_forward.up.weight": Column("columns"),
    "blocks.*.feed_forward.down.weight": Row("columns"),
}
UNITS = {
    "heads": UnitsOf(attribute="blocks.*.attention.heads"),
    "kv_heads": UnitsOf(follows="heads", attribute="blocks.*.attention.kv_heads"),
}
WORDS = {"embed.tokens.weight": Row("vocabulary"), "head.output.weight": Column("vocabulary", gather=True)}


def is_image(sample: Mapping[str, Tensor]) -> Tensor:
    """The tokens of a sample that take rows of its images."""
    return sample["inputs"] == IMAGE


def vision_sections() -> list[nn.Module]:
    return [Patches(), *(Block(VISION) for _ in range(VISION.layers)), Projector()]


def language_sections() -> list[nn.Module]:
    return [Merge(), *(Block(TEXT) for _ in range(TEXT.layers)), Head(TEXT)]


def model_of(
    vision: list[nn.Module],
    language: list[nn.Module],
    *,
    frozen: bool = False,
    rules: Mapping[str, Rule] = RULES,
    units: Mapping[str, UnitsOf] = UNITS,
) -> Model:
    """The two modules as elasticd trains them."""
    if frozen:
        for section in vision:
            section.requires_grad_(requires_grad=False)
    encoder = Module(
        embed=vision[0],
        blocks=vision[1:-1],
        head=vision[-1],
        width=VISION.width,
        rules=rules,
        units=units,
        items="images",
        name="vision",
    )
    decoder = Module(
        embed=language[0],
        blocks=language[1:-1],
        head=language[-1],
        rules=dict(rules) | WORDS,
        units=units,
        takes={"images": "vision"},
        places={"images": is_image},
        name="language",
    )
    return Model(modules={"vision": encoder, "language": decoder})


class Captions:
    """Samples whose images have different numbers of rows, each a function of its index."""

    counts: dict[str, list[int]]  #: by kind of item, of each sample

    def __init__(self) -> None:
        sampler = Sampler(size=len(COUNTS), global_batch=BATCH, seed=SEED)
        order = [index for step in range(len(COUNTS) // BATCH) for index in sampler.samples(step)]
        by_index = dict(zip(order, COUNTS, strict=True))
        self.counts = {"images": [by_index[index] for index in range(len(COUNTS))]}

    def __len__(self) -> int:
        return len(self.counts["images"])

    def __getitem__(self, index: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(index)
        sizes = torch.randint(2, 6, (self.counts["images"][index],), generator=generator).tolist()
        images = [torch.randn(size, PATCH, generator=generator, dtype=F64) for size in sizes]
        ids = torch.randint(2, TEXT.vocabulary, (7 + index % 3 + sum(sizes),), generator=generator)
        ids[3 : 3 + sum(sizes)] = IMAGE
        targets = torch.roll(ids, -1)
        targets[ids == IMAGE] = -100
        return {"inputs": ids, "targets": targets, "images": images}


class OneProcess:
    """Trains copies of the sections in plain torch, sample by sample."""

    named: dict[str, nn.Parameter]  #: by their names in the model of several modules

    def __init__(
        self,
        vision: list[nn.Module],
        language: list[nn.Module],
        optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW,
        *,
        clip: float | None = None,
        **settings: float,
    ) -> None:
        self._parts = {"vision": copy.deepcopy(vision), "language": copy.deepcopy(language)}
        self.named = {
            f"{module}.{section}.{name}": parameter
            for module, sections in self._parts.items()
            for section, part in zip(
                ["embed", *(f"blocks.{i}" for i in range(len(sections) - 2)), "head"], sections, strict=True
            )
            for name, parameter in part.named_parameters()
        }
        self._trained = [p for p in self.named.values() if p.requires_grad]
        self._stepped, self._clip = optimizer(self._trained, **settings), clip

    def step(self, batch: Iterable[Mapping[str, Any]]) -> float:
        """Makes an update. Returns the loss before it."""
        self._stepped.zero_grad(set_to_none=True)
        total, count = torch.zeros((), dtype=F64), 0
        for sample in batch:
            rows: list[Any] = []
            for image in sample["images"]:
                x: Any = image[None]
                for section in self._parts["vision"]:
                    x = section(x)
                rows.append(x)
            x = {"inputs": sample["inputs"][None], "images": _rows_of(rows)}
            for section in self._parts["language"]:
                x = section(x)
            loss, targets = next_token_loss(x, {"targets": sample["targets"][None]})
            total, count = total + loss, count + int(targets)
        if total.requires_grad:  # else the decoder is frozen, and no sample has an image
            (total / count).backward()
        if self._clip is not None:
            torch.nn.utils.clip_grad_norm_(self._trained, self._clip)
        self._stepped.step()
        return float(total.detach()) / count


def in_one_process(
    vision: list[nn.Module],
    language: list[nn.Module],
    batches: Iterable[list[dict[str, Any]]],
    optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW,
    **settings: float,
) -> tuple[list[float], dict[str, Tensor]]:
    """Trains copies of the sections. Returns the losses and the weights by name."""
    one = OneProcess(vision, language, optimizer, **settings)
    losses = [one.step(batch) for batch in batches]
    return losses, {name: parameter.detach() for name, parameter in one.named.items()}


def _rows_of(images: list[Any]) -> Any:
    """What the encoder made of all images, one behind the other; None: there are none."""
    if not images or isinstance(images[0], Tensor):
        return torch.cat(images, 1)[0] if images else None
    return {name: torch.cat([each[name] for each in images], 1)[0] for name in images[0]}


def stage(start: int, stop: int, *members: tuple[str, int], **said: Any) -> Stage:
    devices, shares = (tuple(each) for each in zip(*members, strict=True))
    return Stage(start=start, stop=stop, devices=devices, shares=shares, **said)


def pipeline(count: int | tuple[int, ...], *stages: Stage) -> Pipeline:
    rows = count if isinstance(count, tuple) else (count,)
    return Pipeline(stages=stages, micro_batches=sum(rows), rows=rows)


def plan_of(
    vision: list[Pipeline],
    language: list[Pipeline],
    *,
    ahead: int = 1,
    lead: int = 0,
    zero: int = 0,
    micro_batch: int = 1,
    trainable: bool = True,
) -> Plan:
    modules = (
        ModulePlan(
            module="vision",
            pipelines=tuple(vision),
            items="images",
            ahead=ahead,
            lead=lead,
            trainable=trainable,
        ),
        ModulePlan(module="language", pipelines=tuple(language)),
    )
    strategy = Strategy(modules=modules, edges=(Edge(source="vision", target="language"),))
    state = StatePolicy(zero=zero, replicas=1 if zero else None)
    return Plan(number=1, strategies=(strategy,), micro_batch=micro_batch, global_batch=BATCH, state=state)
