"""Sixteen devices and one more for images: Qwen3.5-VL 27B in Megatron-LM's disjoint layout.

Language: TP 4, PP 2, two copies on 16 devices. *Baseline*: the encoder is a part of stage 0, whose layers are
as many as those of stage 1, on each rank of its TP groups with all images of the copy. *Theirs*: a 17th device
encodes. Its authors publish 23.0 to 44.7 % more tokens a second for each active device, in 12 cells that they
do not describe. Those here are sequences of 4,096 tokens, 32 in a step, of which images are so large a part
that the baseline is slowed down as theirs is: images of 1,024 patches, a token for four of them, those of a
sequence encoded together. Encoders recompute: else neither would fit. An H100 in bf16.

The baseline's slowdown is less than the least that is published, 1.16 to 1.24. What limits it here: stage 1 has
the head of 248,320 rows and takes 0.203 s for a sequence, stage 0 0.185 s, so that the first 9 % of images cost
the baseline nothing; what comes after the passes (0.18 s) and the fill of the pipeline are on both sides. With
more images the single device of theirs is full before 1.25 is reached (at 90 % it encodes 3.98 s of 4.17 s). A
baseline whose stages are level, or whose images are dearer in stage 0 than alone, would be nearer.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
from _module_published import FLOPS, GIGABYTES, STATE, encoder
from _results import Row, row
from elasticd_planner.cost.model_profile import Numbers, derive, suited
from elasticd_planner.cost.schedule_timeline import one_f_one_b_seconds
from elasticd_planner.problem import ModuleProblem, Problem, SearchSpace
from elasticd_planner.search.module_cost import ModuleCosts, predicted_seconds
from elasticd_planner.search.planner import plan
from elasticd_planner.spec.plan import Edge, ModulePlan, Pipeline, Plan, Stage, Strategy

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.planner.real_models import Sizes, cluster_of, decoder

#: A decoder of 27B, whose attention is taken for full attention.
SIZES = Sizes(5120, 64, 24, 4, 256, 17408, 248320)
SAMPLES, TP, STAGES, COPIES = 32, 4, 2, 2
#: Tokens of a sequence, and patches for each token of an image.
SEQUENCE, MERGED = 4096, 4
#: Parts of a sequence that are images.
CELLS = (0.6, 0.7, 0.8, 0.9)
#: Published throughput of each active device over the baseline's, and how far off it may be here.
PUBLISHED, OFF, GOAL = (1.23, 1.447), 0.10, 1.10


def disjoint_rows(cells: int = len(CELLS)) -> Iterator[Row]:
    """Throughput of each active device over the baseline's: of their layout, and of our plan."""
    theirs, ours = [], []
    for part in CELLS[:cells]:
        problem, here = cell(part), f"16 + 1 devices, images are {part:.0%} of tokens"
        base = baseline_seconds(problem) * TP * STAGES * COPIES
        disjoint = layout(problem)
        theirs.append(base / (predicted_seconds(disjoint, problem) * len(disjoint.members)))
        yield row(f"{here}: one device for images over the baseline", theirs[-1], "", kind="simulated")
        answer = plan(problem)
        assert answer.plan is not None, answer.refusal
        assert answer.plan.prediction is not None
        ours.append(base / (answer.plan.prediction.step_seconds * len(answer.plan.members)))
        print(f"{here}: {answer.plan.reason}", file=sys.stderr)
        yield row(f"{here}: our plan over the baseline", ours[-1], "", kind="simulated")
    low, high = PUBLISHED[0] - OFF, PUBLISHED[1] + OFF
    near = low <= min(theirs) and max(theirs) <= high
    title = (
        f"16 + 1 devices: one device for images over the baseline, {PUBLISHED[0]} to {PUBLISHED[1]} published"
    )
    value = f"{min(theirs):.2f} to {max(theirs):.2f}"
    yield row(title, value, "", kind="simulated", goal=f"{low:.2f} to {high:.2f}", met=near)
    title = "16 + 1 devices: our plan over the baseline, throughput of each active device, least"
    met = near and min(ours) >= GOAL
    yield row(title, min(ours), "", kind="simulated", goal=f">= {GOAL:.2f}", met=met)


def cell(part: float) -> Problem:
    """17 devices, of which the last is alone on its node."""
    profile = suited(derive(decoder("27B", SIZES), SEQUENCE, 1, FLOPS), Numbers(compute="bfloat16"))
    return Problem(
        cluster=cluster_of((8, 8, 1), gigabytes=GIGABYTES, inside=450.0, between=50.0),
        profile=msgspec.structs.replace(profile, widths=(1, 2, 4, 8)),
        global_batch=SAMPLES,
        micro_batch=1,
        search_space=SearchSpace(states=(STATE,), recompute=True, sequence_parallel=True),
        module="language",
        modules=(
            ModuleProblem(
                name="vision",
                profile=encoder("0.4B"),
                items="images",
                items_a_sample=1.0,
                rows_an_item=MERGED * part * SEQUENCE,
            ),
        ),
    )


def layout(problem: Problem) -> Plan:
    """Their layout: TP groups of neighbours, the copies, then the stages; the encoder on the last device."""
    devices, profile = tuple(device.name for device in problem.cluster.devices), problem.profile
    groups = [devices[at : at + TP] for at in range(0, TP * STAGES * COPIES, TP)]
    half = profile.layers // STAGES
    pipelines = tuple(
        Pipeline(
            stages=tuple(
                Stage(
                    start=stage * half,
                    stop=(stage + 1) * half,
                    devices=groups[stage * COPIES + copy],
                    shares=(profile.share_units // TP,) * TP,
                    sequence_parallel=True,
                )
                for stage in range(STAGES)
            ),
            micro_batches=SAMPLES // COPIES,
        )
        for copy in range(COPIES)
    )
    encoded = problem.modules[0].profile
    stage = Stage(
        start=0, stop=encoded.layers, devices=devices[-1:], shares=(encoded.share_units,), recompute=True
    )
    vision = ModulePlan(
        module="vision",
        pipelines=(Pipeline(stages=(stage,), micro_batches=1),),
        items="images",
        ahead=SAMPLES // COPIES,
        lead=1,
    )
    strategy = Strategy(
        modules=(vision, ModulePlan(module="language", pipelines=pipelines)),
        edges=(Edge(source="vision", target="language"),),
    )
    return Plan(number=1, strategies=(strategy,), micro_batch=1, global_batch=SAMPLES, state=STATE)


def baseline_seconds(problem: Problem) -> float:
    """A step where each rank of stage 0 encodes all images of its copy before its layers, and after them."""
    costs, disjoint = ModuleCosts(problem), layout(problem)
    view = disjoint.view("language")
    (encode, encode_back), *_ = costs.lane_seconds(disjoint.view("vision"))
    forward, backward = costs.lane_seconds(view)[0]
    border = costs.cost(view).boundary(problem.cluster.reach(view.members[:: TP * COPIES])) / 2
    forward[0], backward[0] = forward[0] + encode.sum(), backward[0] + encode_back.sum()
    passes = one_f_one_b_seconds(forward, backward, [border] * (STAGES - 1), SAMPLES // COPIES)
    return float(passes) + costs.after_seconds(disjoint)
