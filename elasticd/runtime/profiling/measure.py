"""All the timings of a model: every case once a round, in an order that changes, medians over the rounds.

A round holds every section, width and token count, the optimizer and the whole model, so that a machine that
becomes slower meanwhile makes all of them slower alike, and ratios stay true.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import msgspec
import torch
from elasticd_planner.cost.model_profile import derive
from elasticd_planner.profiling.samples import (
    Collective,
    Samples,
    SectionSample,
    Update,
    Whole,
    experts_name,
    kind_name,
)
from elasticd_planner.readable import counted
from elasticd_planner.spec.model import ModelSpec, apportion
from elasticd_planner.value import refuse
from torch import Tensor, nn

from elasticd.runtime.accelerator import Accelerator
from elasticd.runtime.engine.mixed_precision import Precision, converted
from elasticd.runtime.model.bundle import entering, going_back, sizes, tensors
from elasticd.runtime.model.model import Loss, Model
from elasticd.runtime.profiling.even_experts import entering_experts, even, experts_of, lone_experts
from elasticd.runtime.profiling.loading import MakeBatch
from elasticd.runtime.reference.parts import (
    Passes,
    ProfiledPart,
    Values,
    both_passes,
    part_of,
    timed,
    whole_model,
)
from elasticd.wire.profiler import WIDTHS, Request

#: Rounds before those that count: allocations, autotuning, first gradients, optimizer state.
WARM_UP = 2

#: The whole model is compared where its parameters and gradients take at most this part of free memory.
_MOST_MEMORY = 0.5


@dataclass(kw_only=True)
class _Case:
    """One thing to time, and its times so far (those of the warm-up are dropped)."""

    run: Callable[[], Passes]
    times: list[Passes] = field(default_factory=list)

    def forward(self) -> float:
        return median(passes.forward for passes in self.times)

    def backward(self) -> float:
        return median(passes.backward for passes in self.times)

    def seconds(self) -> float:
        return median(passes.forward + passes.backward for passes in self.times)

    def noise(self) -> float:
        middle = self.seconds()
        return median(abs(passes.forward + passes.backward - middle) for passes in self.times) / middle


@dataclass(frozen=True, kw_only=True)
class _Point:
    """A section at one width and token count, with its cases: as it is and with recomputation."""

    part: ProfiledPart
    tokens: int
    plain: _Case
    again: _Case | None
    kept: int
    kept_again: int
    working: int

    def timing(self) -> SectionSample:
        return SectionSample(
            section=self.part.label,
            width=self.part.width,
            share=self.part.share,
            tokens=self.tokens,
            forward=self.plain.forward(),
            backward=self.plain.backward(),
            recomputed=self.again.seconds() if self.again is not None else None,
            kept=self.kept,
            kept_recomputed=self.kept_again,
            working=self.working,
            noise=self.plain.noise(),
        )


@dataclass(frozen=True)
class _Updates:
    """AdamW over a part's parameters. Its rate is zero: the arithmetic is the same, the values stay."""

    optimizer: torch.optim.Optimizer
    size: int  #: [bytes] of the parameters
    masters: int  #: [bytes] of master weights, which are state too; 0: there are none
    case: _Case

    def update(self) -> Update:
        state = [v for held in self.optimizer.state.values() for v in held.values() if isinstance(v, Tensor)]
        moments = sum(v.nbytes for v in state if v.dim() > 0)
        return Update(size=self.size, state=moments + self.masters, seconds=self.case.seconds())


def with_widths(model: Model, request: Request) -> Request:
    """The request with the widths to measure, where it names none. Raises Invalid for a width that the model's
    units cannot be cut in."""
    units = derive(model.spec, request.sample_tokens, 1).share_units
    widths = request.widths or tuple(width for width in WIDTHS if width <= units)
    if max(widths) > units:
        refuse(
            f"--widths: a TP group of {max(widths)} has no plan for {model.name}, which its rules cut in "
            f"{counted(units, 'unit')}: name widths up to {units}, or leave --widths out"
        )
    return msgspec.structs.replace(request, widths=widths)


def measure(
    model: Model,
    request: Request,
    accelerator: Accelerator,
    make_batch: MakeBatch,
    loss: Loss | None,
    progress: Callable[[float], None],
    collectives: tuple[Collective, ...] = (),
    precision: Precision | None = None,
) -> Samples:
    """Runs all cases, those of a job with a `precision` in its types."""
    final = loss if loss is None or precision is None else _of_output(loss, precision)
    units = derive(model.spec, request.sample_tokens, 1).share_units
    values = Values(model, accelerator)
    by_width = {
        width: [*_parts(model, apportion(units, (1,) * width), values, final, precision)]
        for width in sorted(set(request.widths))
    }
    batches = {
        tokens: converted(make_batch(tokens // request.sample_tokens, request.sample_tokens), accelerator.put)
        for tokens in sorted(set(request.tokens))
    }
    narrow, most = by_width[min(by_width)], max(batches)
    entered = {
        tokens: precision.entering(batch) if precision is not None else batch
        for tokens, batch in batches.items()
    }
    given = {tokens: _entering(narrow, tokens, batch, request.items) for tokens, batch in entered.items()}
    bundle_bytes = _bundle_bytes(model.spec, given[most], most)
    points = [*_points(by_width, batches, given, accelerator)]
    experts = _experts(model, by_width, given)
    points += [point for own in experts for point in _points(own.by_width, batches, own.given, accelerator)]
    updates = [
        _updates(parts[1], accelerator, precision) for parts in by_width.values()
    ]  # the first kind of block
    skipped = _too_large(model, request, accelerator)
    compared = sorted(batches)[len(batches) // 2]
    whole = None
    if not skipped:
        made = whole_model(model, Values(model, accelerator, keep=False))
        for section, module in made.modules.items():
            even(module, model.sections[section])
        _add_up(made.modules.values(), precision)
        whole = _case(
            accelerator, lambda: both_passes(made.passes, entered[compared], batches[compared], final)
        )
    del values
    cases = [*(c for p in points for c in (p.plain, p.again) if c is not None), *(u.case for u in updates)]
    _rounds([*cases, *([whole] if whole is not None else [])], request.repeats, progress)
    return Samples(
        model=model.spec,
        sample_tokens=request.sample_tokens,
        device=accelerator.name,
        threads=torch.get_num_threads(),
        torch=str(torch.__version__),
        repeats=request.repeats,
        timings=tuple(point.timing() for point in points),
        updates=tuple(each.update() for each in updates),
        collectives=collectives,
        whole=Whole(tokens=compared, seconds=whole.seconds()) if whole is not None else None,
        skipped=skipped,
        loss=loss is not None,
        numbers=precision.numbers if precision is not None else None,
        bundle_bytes=bundle_bytes,
        items=request.items,
        chosen=max((own.chosen for own in experts), default=0),
        experts=max((own.count for own in experts), default=0),
    )


def _rounds(cases: list[_Case], repeats: int, progress: Callable[[float], None]) -> None:
    """Every case once a round. The order is drawn by a seed: the same on each run, another in each round."""
    order, draw = list(cases), random.Random(0)
    for turn in range(WARM_UP + repeats):
        draw.shuffle(order)
        for case in order:
            passes = case.run()
            if turn >= WARM_UP:
                case.times.append(passes)
        progress((turn + 1) / (WARM_UP + repeats))


def _parts(
    model: Model, shares: tuple[int, ...], values: Values, loss: Loss | None, precision: Precision | None
) -> Iterator[ProfiledPart]:
    """The sections of one width: embed, a block of each kind, head."""
    sections = {"embed": "embed"}
    for kind in range(len(model.spec.kinds)):
        sections[f"blocks.{model.spec.layers.index(kind)}"] = kind_name(model.spec, kind)
    for section, label in (sections | {"head": "head"}).items():
        part = part_of(model, section, label, shares, values, loss if section == "head" else None)
        even(part.module, model.sections[section])
        _add_up([part.module], precision)
        yield part


@dataclass(frozen=True, kw_only=True)
class _Experts:
    """The experts of a kind of block."""

    count: int
    chosen: int  #: of them for a row
    by_width: dict[int, list[ProfiledPart]]
    given: dict[int, list[Any]]  #: what they are called with, by tokens


def _experts(
    model: Model, by_width: Mapping[int, Sequence[ProfiledPart]], given: Mapping[int, Sequence[Any]]
) -> list[_Experts]:
    """The experts of each kind of block whose experts can be measured by themselves."""
    found = []
    for kind in range(len(model.spec.kinds)):
        stacked = lone_experts(model.sections[f"blocks.{model.spec.layers.index(kind)}"])
        if stacked is None:
            continue
        at, label = 1 + kind, experts_name(model.spec, kind)
        narrow = by_width[min(by_width)][at]
        entered = {
            tokens: [entering_experts(stacked, narrow, entering(each[at]))] for tokens, each in given.items()
        }
        found.append(
            _Experts(
                count=stacked.count,
                chosen=entered[max(entered)][0]["index"].shape[1],
                by_width={width: [experts_of(stacked, own[at], label)] for width, own in by_width.items()},
                given=entered,
            )
        )
    return found


def _of_output(loss: Loss, precision: Precision) -> Loss:
    """The loss as a job calls it: with the head's output in the type of master weights."""
    return lambda output, batch: loss(precision.leaving(output), batch)


def _add_up(modules: Iterable[nn.Module], precision: Precision | None) -> None:
    """See `Precision.add_up`."""
    for module in modules if precision is not None else ():
        assert precision is not None
        precision.add_up(module.parameters())


def _entering(parts: Sequence[ProfiledPart], tokens: int, batch: Any, items: str) -> list[Any]:
    """The inputs of each section: the batch, and then what those before it make, with a block of each kind.

    Of named tensors it is known which need a gradient.
    """
    given = [batch]
    for part in parts[:-1]:
        given.append(entering(part.forward(given[-1])))
    samples, length = sizes(given[1], of_item=bool(items))
    if samples * length != tokens:
        refuse(f"a batch of {tokens} tokens gave an activation of {samples} samples of {length}")
    return given


def _bundle_bytes(spec: ModelSpec, given: Sequence[Any], tokens: int) -> float:
    """See `ModelProfile`: what comes of a block, on average over the blocks."""
    made = [given[2 + kind] for kind in spec.layers]
    if all(isinstance(bundle, Tensor) for bundle in made):
        return 0.0
    both = [x for bundle in made for x in (*tensors(bundle), *going_back(bundle).values())]
    return sum(x.nbytes for x in both) / 2 / len(made) / tokens


def _points(
    by_width: Mapping[int, Sequence[ProfiledPart]],
    batches: Mapping[int, Any],
    entered: Mapping[int, Sequence[Any]],
    accelerator: Accelerator,
) -> Iterator[_Point]:
    for tokens, batch in batches.items():
        for parts in by_width.values():
            for part, given in zip(parts, entered[tokens], strict=True):
                yield _point(part, tokens, given, batch, accelerator)


def _point(part: ProfiledPart, tokens: int, given: Any, batch: Any, accelerator: Accelerator) -> _Point:
    block = part.label.startswith("block")
    run, kept_bytes = partial(part.passes, given, batch, accelerator), part.kept(given, batch)
    return _Point(
        part=part,
        tokens=tokens,
        plain=_Case(run=run),
        again=_Case(run=partial(run, recompute=True)) if block else None,
        kept=kept_bytes,
        kept_again=part.kept(given, batch, recompute=True) if block else 0,
        working=part.working(given, batch, kept_bytes) if block or part.label == "head" else 0,
    )


def _updates(part: ProfiledPart, accelerator: Accelerator, precision: Precision | None) -> _Updates:
    """The optimizer of a part, on its parameters or on master weights of them."""
    parameters = list(part.module.parameters())
    size = sum(parameter.nbytes for parameter in parameters)
    if separate := precision is not None and precision.separate:
        parameters = [nn.Parameter(parameter.detach().to(precision.master)) for parameter in parameters]
    optimizer = torch.optim.AdamW(parameters, lr=0.0)

    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    masters = sum(parameter.nbytes for parameter in parameters) if separate else 0
    return _Updates(optimizer, size, masters, _case(accelerator, optimizer.step))


def _case(accelerator: Accelerator, work: Callable[[], object]) -> _Case:
    """A case without a backward pass of its own."""
    return _Case(run=lambda: Passes(timed(accelerator, work)[1], 0.0))


def _too_large(model: Model, request: Request, accelerator: Accelerator) -> str:
    """Why the whole model is not compared; empty where it is."""
    if not request.whole:
        return "not asked for"
    size, free = derive(model.spec, request.sample_tokens, 1).parameter_bytes, accelerator.free_bytes()
    if 2 * size > _MOST_MEMORY * free:
        return f"its parameters and gradients take {2 * size / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free"
    return ""
