"""The verdict of a layout's step on the rules: which parameter went wrong, by which rule, what would be
right."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from elasticd_planner.spec.box import Box
from torch import Tensor

from elasticd.runtime.engine.recipe import Recipe
from elasticd.runtime.model.model import Model, split_name
from elasticd.runtime.model.rng import Dropout
from elasticd.runtime.model.tp_rules import PartialGrad
from elasticd.runtime.model.validation import ModelError
from elasticd.runtime.reference.comparison import NotCompared, difference, refuse_differences
from elasticd.runtime.reference.trial import Member, Trial

#: Relative differences that rounding explains, by type of the parameters.
_ROUNDING = {torch.float64: 1e-6, torch.float32: 2e-3, torch.float16: 0.1, torch.bfloat16: 0.2}


#: Instead of draws without a key.
_SECTION = "use nn.Dropout, which is keyed by step, sample and place"
_COLLATE = "draw in __getitem__ of the dataset, where draws are keyed by step and sample"


def findings(model: Model, alone: Trial, other: Trial, *, outputs: bool) -> Iterator[str]:
    """One line for each thing that is wrong, the first causes first; none where all is as in one process.
    outputs: those of sections can be compared, since all samples went through together."""
    if other.failed is not None:
        yield _failure(model, *other.failed)
        return
    (one,) = alone.members.values()
    for place in sorted(one.drew):
        yield (
            f"{place}: draws random numbers that no other layout repeats (F.dropout, torch.rand, np.random): "
            f"{_COLLATE if place == 'collate' else _SECTION}"
        )
    if one.drew:
        return
    near = _ROUNDING.get(model.dtype, 1e-2)
    wrong = list(_outputs(model, alone, other, near)) if outputs else []
    wrong = wrong or list(_gradients(model, alone, other, near))
    yield from wrong or _updates(model, alone, other, near)
    if not math.isclose(alone.loss, other.loss, rel_tol=near):
        yield f"the loss is {other.loss:.6g}, not {alone.loss:.6g}" + (
            "" if wrong else ", though all else agrees"
        )


def _outputs(model: Model, alone: Trial, other: Trial, near: float) -> Iterator[str]:
    """The first section whose output went wrong."""
    (one,) = alone.members.values()
    for section in model.sections:
        found = [m.outputs[section] for m in other.members.values() if section in m.outputs]
        for name, expected in one.outputs[section].items():
            here, output = [out[name] for out in found], f"output {name!r}" if name else "output"
            if any(out.shape != expected.shape for out in here):
                shapes = sorted({tuple(out.shape) for out in here})
                yield (
                    f"{section}: its {output} is of shape {shapes[0]}, not {tuple(expected.shape)}: what a "
                    f"Column rule cut, a Row rule must sum (or gather=True). {_rules(model, section)}"
                )
                return
            worst = max((difference(out, expected) for out in here), default=0.0)
            if worst > near:
                yield (
                    f"{section}: its {output} differs from one process's by {worst:.1e} of its size, and its "
                    f"input did not. {_rules(model, section)}{_dropouts(model, section)}"
                )
                return


def _updates(model: Model, alone: Trial, other: Trial, near: float) -> Iterator[str]:
    """The first parameter that the optimizer moved elsewhere, though its gradient agrees. Elements whose
    gradient is nearly zero are left out: its sign, which Adam's first step follows, may be rounding."""
    (one,) = alone.members.values()
    scales = _scales(model, one)
    for name, (right,) in one.updates.items():
        whole = right.by
        gradient = one.gradients[name][0].reduced if name in one.gradients else None
        clear = torch.ones_like(whole, dtype=torch.bool)
        if gradient is not None:
            clear = gradient.abs() > 2 * near * scales[name]
        for moved in (moved for m in other.members.values() for moved in m.updates.get(name, ())):
            place = moved.box.slices(Box.whole(tuple(whole.shape)))
            gap = ((moved.by - whole[place]).abs() - right.grain[place]) * clear[place]
            apart = float(gap.max()) if gap.numel() else 0.0
            scale = float(whole.abs().max())
            if apart > near * scale:
                off = apart / max(scale, 1e-300)
                yield f"{name}: its gradient is right, the optimizer's update is off by {off:.1e} of its size"
                return


def _gradients(model: Model, alone: Trial, other: Trial, near: float) -> Iterator[str]:
    """Of gradients that went wrong, those of the last section: the backward pass carries them to the rest."""
    (one,) = alone.members.values()
    scales = _scales(model, one)
    wrong: dict[str, list[str]] = {}
    for name, (whole,) in one.gradients.items():
        for line in _gradient(model, name, whole.reduced, other, near, scales[name]):
            wrong.setdefault(split_name(name)[0], []).append(line)
    for section in reversed(model.sections):
        if section in wrong:
            yield from wrong[section]
            return


def _scales(model: Model, one: Member) -> dict[str, float]:
    """The scale that each gradient is measured by: its largest element; where that is zero but for rounding, as
    of a bias of keys, its section's other gradients, of which rounding is the larger a part the coarser the
    type is."""
    rounding = max(1e-3, 8 * torch.finfo(model.dtype).eps)
    largest = {name: float(held.reduced.abs().max()) for name, (held,) in one.gradients.items()}
    sections: dict[str, float] = {}
    for name, size in largest.items():
        sections[split_name(name)[0]] = max(sections.get(split_name(name)[0], 0.0), size)
    return {name: max(size, rounding * sections[split_name(name)[0]]) for name, size in largest.items()}


def _gradient(model: Model, name: str, whole: Tensor, other: Trial, near: float, scale: float) -> Iterator[str]:
    held = [part for member in other.members.values() for part in member.gradients.get(name, ())]
    apart = 0.0
    for part in held:
        expected = whole[part.box.slices(Box.whole(tuple(whole.shape)))]
        apart = max(apart, float((part.reduced - expected).abs().max()) if expected.numel() else 0.0)
    if apart <= near * scale:
        return
    rule, said = model.rule(name), _said(model, name)
    alike = [part for part in held if part.box.shape == tuple(whole.shape)]
    terms = [part.term for part in alike]
    if isinstance(rule, PartialGrad) and terms and all(difference(term, whole) <= near for term in terms):
        ratio = float((alike[0].reduced * whole).sum() / whole.square().sum())
        yield (
            f"{name}: {said} adds what is the same: every member has the whole gradient, so that it came out "
            f"{ratio:.2f} times too large. Leave the rule out"
        )
    elif rule is None and len(terms) > 1 and difference(torch.stack(terms).sum(0), whole) <= near:
        yield (
            f"{name}: has no rule, but members hold terms of its gradient, which must be added: give it "
            "PartialGrad()"
        )
    else:
        off = apart / max(scale, 1e-300)
        yield f"{name}: {said} gives a gradient that is off by {off:.1e} of its size"


def _failure(model: Model, where: str, error: BaseException) -> str:
    rules = _rules(model, where) if where else "It failed outside of the model's modules."
    text = str(error).splitlines()[0] if str(error) else ""
    return (
        f"{where or 'the step'} failed with {type(error).__name__}: {text}. {rules} A Row rule takes an input "
        "that is cut, a Column rule a whole one; sizes must come from attributes that `units` names"
    )


def _rules(model: Model, path: str) -> str:
    """The rules of a module, and of what is in it."""
    section, inner = split_name(path)
    found = {}
    for owner, rules in model.owners(section).items():
        if owner == inner or owner.startswith(f"{inner}.") or not inner:
            for leaf in rules:
                full = f"{section}.{owner}.{leaf}" if owner else f"{section}.{leaf}"
                found[model.pattern(full)] = _said(model, full)
    if not found:
        return "No rule is about it."
    return "Its rules: " + "; ".join(found.values()) + "."


def _dropouts(model: Model, section: str) -> str:
    found = [
        path
        for path, module in model.sections[section].named_modules(prefix=section)
        if isinstance(module, Dropout) and module.p > 0 and model.rule(path) is None
    ]
    if not found:
        return ""
    return f" Where the input of {', '.join(found)} is cut, it needs Sharded(units, dim=...)."


def _said(model: Model, name: str) -> str:
    rule = model.rule(name)
    if rule is None:
        return "no rule"
    fields = ", ".join(repr(v) if k == "units" else f"{k}={v!r}" for k, v in vars(rule).items() if v)
    fields = fields.replace(", parts=1", "")
    return f"the rule {model.pattern(name)!r}: {type(rule).__name__}({fields})"


def own_modules_agree(recipe: Recipe, samples: int, say: Callable[[str], None]) -> bool:
    """Compares a step of the user's own modules with one of the engine, and says what came of it.

    Returns:
        False if they differ.
    """
    try:
        refuse_differences(recipe, samples)
        say("ok    your own modules, without the engine")
    except NotCompared as why:
        say(f"note  not tried: your own modules, without the engine ({why})")
    except ModelError as error:
        say(f"WRONG your own modules, without the engine\n      {error}")
        return False
    return True
