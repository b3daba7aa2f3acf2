"""Plans from annotations of parameters, and annotations of a plan's parameters.

`plan_of` is HSPMD's specialisation (Hetu v2, arXiv 2504.20490), from what a user says of parameters
to what each device runs. The n-th group of each annotation is in the n-th pipeline. Consecutive blocks on the
same groups are one stage. Parts of the dimension that a parameter's rule cuts are the shares of a TP group, in
whole units of the rule. What a plan cannot be is refused with the name of the parameter.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from elasticd_planner.layout.annotations import Annotation, Axis, Parts, State, count_of, weights_of
from elasticd_planner.spec.model import ModelSpec, Parameter, apportion, unit_range
from elasticd_planner.spec.plan import ModulePlan, Pipeline, Plan, StatePolicy, Strategy
from elasticd_planner.value import Invalid, refuse


class _TPGroup(NamedTuple):
    """Devices of one stage and their shares."""

    devices: tuple[str, ...]
    shares: tuple[int, ...]

    def __str__(self) -> str:
        shares = f" in shares {self.shares}" if len(set(self.shares)) > 1 else ""
        return f"({', '.join(self.devices)}){shares}"


#: The TP groups that hold a section, one for each pipeline.
_Groups = tuple[_TPGroup, ...]


def plan_of(
    spec: ModelSpec,
    annotations: Mapping[str, Annotation],
    micro_batches: Sequence[int],
    *,
    micro_batch: int = 1,
    state: StatePolicy | None = None,
    number: int = 1,
    reason: str = "from annotations",
) -> Plan:
    """The plan that annotations of a model's parameters describe.

    Args:
        spec: the model.
        annotations: by pattern of full parameter names. "*" stands for anything, and digits in a range for each
            number of it: "blocks.0-11.*". Of several patterns that match a name the first counts. In a state
            "tp" stands for the dimension that a parameter's rule cuts, and for copies where it has no rule.
        micro_batches: of a step, for each pipeline.
        micro_batch: samples of a micro-batch.
        state: the layout of optimizer state. None: it is where the parameters are.
        number: of the plan.
        reason: for people: why there is this plan.

    Raises:
        Invalid: a parameter has no annotation, or a pattern matches none; a parameter is split along a
            dimension that its rule does not cut, in more parts than there are units, or is a term of a sum;
            parameters of one block are on different TP groups; the embedding is not on the first block's
            devices, or the head not on the last one's; a block is missing in a pipeline. The message names the
            parameter.
    """
    sections = _sections(spec, annotations)
    blocks = [sections[f"blocks.{layer}"] for layer in range(len(spec.layers))]
    first, last = blocks[0], blocks[-1]
    for section, beside, layer in (("embed", first, 0), ("head", last, len(blocks) - 1)):
        held = sections.get(section, beside)
        if held != beside:
            refuse(
                f"{section} is on {_listed(held)}, and block {layer} on {_listed(beside)}; a plan has them on "
                "the same stage"
            )
    for layer, block in enumerate(blocks):
        if len(block) != len(first):
            refuse(
                f"block {layer} has {len(block)} groups, and block 0 has {len(first)}; each pipeline has all "
                "blocks"
            )
    if len(micro_batches) != len(first):
        refuse(f"micro_batches has {len(micro_batches)} entries, and there are {len(first)} pipelines")
    pipelines = tuple(
        _pipeline(p, [block[p] for block in blocks], count) for p, count in enumerate(micro_batches)
    )
    return Plan(
        number=number,
        strategies=(Strategy(modules=(ModulePlan(module="model", pipelines=pipelines),)),),
        micro_batch=micro_batch,
        global_batch=sum(micro_batches) * micro_batch,
        state=state or StatePolicy(),
        reason=reason,
    )


def annotations_of(spec: ModelSpec, plan: Plan) -> dict[str, Annotation]:
    """The annotations of a plan's parameters and buffers by full name: `plan_of` makes the plan of them again.

    Each pipeline is a group, and so is each lane of a pipeline: lanes come back as pipelines. A parameter whose
    units follow others (kv-heads) is split along "tp".
    """
    found: dict[str, Annotation] = {}
    for section in spec.sections(0, len(spec.layers)):
        stages = [
            next(
                stage
                for stage in pipeline.stages
                for start, stop in stage.chunks
                if section in spec.sections(start, stop)
            )
            for pipeline in plan.by_lane
        ]
        for parameter in spec.section(section):
            axis = _axis_of(spec, parameter)
            states = [_state(axis, stage.shares) for stage in stages]
            found[f"{section}.{parameter.name}"] = Annotation(
                groups=[stage.devices for stage in stages], states=states
            )
    return found


def _axis_of(spec: ModelSpec, parameter: Parameter) -> Axis:
    if parameter.cut is None:
        return "same"
    return "tp" if spec.units_of(parameter.cut.units).follows else parameter.cut.dim


def _state(axis: Axis, shares: Sequence[int]) -> State:
    if len(shares) == 1:
        return {}
    even = axis == "same" or len(set(shares)) == 1
    return {axis: len(shares) if even else weights_of(tuple(shares))}


def _listed(groups: _Groups) -> str:
    return " and ".join(map(str, groups))


# -- which annotation a parameter has ------------------------------------------------------------------------


def _pattern(text: str) -> tuple[re.Pattern[str], list[range]]:
    """A pattern of names as an expression, and the range of each number in it."""
    ranges, parts, end = [], [], 0
    for found in re.finditer(r"(?<![^.])(\d+)-(\d+)(?![^.])", text):
        ranges.append(range(int(found[1]), int(found[2]) + 1))
        parts += [_starred(text[end : found.start()]), r"(\d+)"]
        end = found.end()
    return re.compile("".join([*parts, _starred(text[end:])])), ranges


def _starred(text: str) -> str:
    return ".*".join(map(re.escape, text.split("*")))


def _matched(
    spec: ModelSpec, annotations: Mapping[str, Annotation]
) -> Iterator[tuple[str, str, Parameter, Annotation]]:
    """Every parameter and buffer: its section, its full name, and the first annotation that matches it."""
    patterns = [(text, *_pattern(text), annotation) for text, annotation in annotations.items()]
    used: set[str] = set()
    for section in spec.sections(0, len(spec.layers)):
        for parameter in spec.section(section):
            name = f"{section}.{parameter.name}"
            for text, expression, ranges, annotation in patterns:
                match = expression.fullmatch(name)
                if match and all(int(n) in among for n, among in zip(match.groups(), ranges, strict=True)):
                    used.add(text)
                    yield section, name, parameter, annotation
                    break
            else:
                if parameter.kind != "buffer":
                    refuse(f"{name}: no annotation; none of the patterns {[*annotations]} matches it")
    for text in annotations:
        if text not in used:
            refuse(
                f"annotation {text!r} is of no parameter: none has such a name, or another pattern has it first"
            )


# -- from annotations to the TP groups of each section -------------------------------------------------------


def _sections(spec: ModelSpec, annotations: Mapping[str, Annotation]) -> dict[str, _Groups]:
    """The TP groups that hold each section, as its cut parameters say; whole ones must agree with them."""
    cut: dict[str, tuple[str, _Groups]] = {}
    whole: list[tuple[str, str, Annotation]] = []
    for section, name, parameter, annotation in _matched(spec, annotations):
        groups = _groups(spec, name, parameter, annotation)
        if groups is None:
            whole.append((section, name, annotation))
            continue
        before, known = cut.setdefault(section, (name, groups))
        if known != groups:
            refuse(
                f"{name} is on {_listed(groups)}, and {before} of the same section on {_listed(known)}; a "
                "section is on one TP group in each pipeline"
            )
    elsewhere = {frozenset(d for g in groups for d in g.devices): groups for _, groups in cut.values()}
    found = {section: groups for section, (_, groups) in cut.items()}
    for section, name, annotation in whole:
        if section not in found:
            devices = annotation.devices
            alone = tuple(_TPGroup((device,), (1,)) for device in devices)
            found[section] = elsewhere.get(frozenset(devices), alone)
        _check_whole(name, annotation, found[section])
    return found


def _check_whole(name: str, annotation: Annotation, groups: _Groups) -> None:
    held = Counter(annotation.devices)
    computing = Counter(device for group in groups for device in group.devices)
    if held != computing:
        unlike = sorted((held - computing) + (computing - held))
        refuse(
            f"{name} is on other devices than its section, which is on {_listed(groups)}: {unlike[0]} differs"
        )


def _groups(spec: ModelSpec, name: str, parameter: Parameter, annotation: Annotation) -> _Groups | None:
    """The TP groups that an annotation splits a parameter over; None where it has copies alone."""
    if annotation.across != "same" and len(annotation.groups) > 1:
        refuse(
            f"{name}: its groups are {annotation.across!r}, and those of a parameter are pipelines, each of "
            'which has all of it: across="same"'
        )
    found: list[_TPGroup] = []
    split = False
    for group, state in zip(annotation.groups, annotation.states, strict=True):
        axis = _split_axis(name, parameter, state)
        if axis is None:
            found += [_TPGroup((device,), (1,)) for device in group]
            continue
        split = True
        _check_units(spec, name, parameter, axis, state[axis])
        inner = [each for each, parts in state.items() if count_of(parts) > 1 or each == axis][-1] == axis
        width, copies = count_of(state[axis]), len(group) // count_of(state[axis])
        for copy in range(copies):
            devices = group[copy * width : (copy + 1) * width] if inner else group[copy::copies]
            found.append(_TPGroup(tuple(devices), weights_of(state[axis])))
    return tuple(found) if split or all(len(group) == 1 for group in annotation.groups) else None


def _split_axis(name: str, parameter: Parameter, state: State) -> Axis | None:
    """The one axis along which a state splits a parameter."""
    if "sum" in state and state["sum"] != 1:
        refuse(f"{name}: a parameter is no sum; {dict(state)} is the state of a gradient")
    split = [axis for axis, parts in state.items() if axis not in ("same", "sum") and count_of(parts) > 1]
    if not split:
        return None
    if len(split) > 1:
        refuse(f"{name} is split along dimensions {split}, and a rule cuts one")
    (axis,) = split
    if axis == "tp":
        return axis
    if parameter.cut is None:
        refuse(
            f"{name} is split along dimension {axis}, and it has no rule to compute with a part of it: give it "
            f'"same": {count_of(state[axis])}, or a rule'
        )
    if axis != parameter.cut.dim:
        refuse(f"{name} is split along dimension {axis}, its rule cuts dimension {parameter.cut.dim}")
    return axis


def _check_units(spec: ModelSpec, name: str, parameter: Parameter, axis: Axis, parts: Parts) -> None:
    if parameter.cut is None:  # whole in the TP group that "tp" tells
        return
    units, shares = spec.units_of(parameter.cut.units), weights_of(parts)
    lead = spec.units_of(units.follows) if units.follows else units
    if lead.count < len(shares):
        refuse(f"{name}: {lead.count} {lead.kind} cannot be split into {len(shares)} parts")
    if units.follows is None or axis == "tp":
        return
    held = [len(unit_range(spec, units.kind, shares, position)) for position in range(len(shares))]
    if units.count < len(shares) or list(apportion(units.count, shares)) != held or sum(held) != units.count:
        refuse(
            f"{name}: its {units.count} {units.kind} follow {units.follows}, so that {len(shares)} devices "
            f"hold {held} of them, some of them twice; write 'tp' for the dimension"
        )


# -- from sections to stages ---------------------------------------------------------------------------------


def _pipeline(p: int, groups: Sequence[_TPGroup], micro_batches: int) -> Pipeline:
    """Consecutive blocks on one group are a stage; groups that take turns are interleaved stages."""
    runs = [(group, len(list(blocks))) for group, blocks in groupby(groups)]
    depth = len(dict.fromkeys(group for group, _ in runs))
    shares: dict[tuple[str, ...], tuple[int, ...]] = {}
    for block, group in enumerate(groups):
        if shares.setdefault(group.devices, group.shares) != group.shares:
            refuse(f"pipeline {p}: {group} has other shares of block {block} than of those before")
    if len(runs) % depth or any(group != runs[number % depth][0] for number, (group, _) in enumerate(runs)):
        listed = ", ".join(f"{count} on {group}" for group, count in runs)
        refuse(
            f"pipeline {p} has its blocks in this order: {listed}; either the blocks of each TP group are "
            "consecutive, or all groups take turns in one order"
        )
    layers = [count for _, count in runs]
    try:
        stages = [(group.devices, group.shares) for group, _ in runs[:depth]]
        return Pipeline.from_layers(stages, layers[:depth], micro_batches).with_layers(layers)
    except Invalid as error:
        refuse(f"pipeline {p}: {error}")
