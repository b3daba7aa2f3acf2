"""Mixtures of experts: which classes of transformers train exactly, and how exactly under which layout.

make bench NAME=experts                            # a quarter of an hour, most of it for the classes
make bench NAME=experts ARGS='--only parity'       # a part; the results keep the others as they are
"""

from __future__ import annotations

import copy
import os
import statistics
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import _expert_exchange
import _expert_loads as expert_loads
import _expert_step
from _frame import PLANNER, PRODUCT, TRAINING, Part, module_rows, run
from _results import Row, row

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from elasticd.models import next_token_loss
from elasticd.models.huggingface.fused_experts import CutIn
from tests.accelerators import test_experts as test_accelerators
from tests.models import families, mixture, test_balance, test_experts
from tests.models.layouts import Training
from tests.models.texts import Text
from tests.runtime import gang, test_expert_exchange

#: The classes of transformers 5.23 with experts, that an earlier release of elasticd refused for these.
CLASSES = (
    *("AXK1", "AXK2", "Afmoe", "AriaText", "BailingHybrid", "Beam", "Cohere2Moe", "DeepseekV2", "DeepseekV3"),
    *("DeepseekV32", "DeepseekV4", "Dots1", "Dots3Note", "Ernie4_5_Moe", "ExaoneMoe", "FlexOlmo", "Flint"),
    *("Glm4Moe", "Glm4MoeLite", "GlmMoeDsa", "GptOss", "GraniteMoe", "GraniteMoeHybrid", "GraniteMoeSWA"),
    *("GraniteMoeShared", "HYV3", "HYV4", "HunYuanMoEV1", "Inkling", "Inkling2", "Jamba", "JetMoe"),
    *("KimiLinear", "Kolibri1", "Laguna", "Llama4", "LongcatFlash", "Mellum", "MiMoV2Flash", "MiniMax"),
    *("MiniMaxM2", "MiniMaxM3VL", "Mistral4", "Mixtral", "NemotronH", "Olmoe", "Phimoe", "Qwen2Moe"),
    *("Qwen3Moe", "Qwen3Next", "Qwen3_5Moe", "SolarOpen", "Zaya"),
)
#: Steps that are compared.
STEPS = 3
#: Seconds for a class: Kimi's recurrence takes minutes without its kernels.
LIMIT_SECONDS = 1800.0


def class_rows(classes: int = len(CLASSES)) -> Iterator[Row]:
    """A step in two stages, each a TP group, against plain torch: losses and weights within 1e-6. Of all
    classes it writes their rows in docs/huggingface.md, which are of columns."""
    names = [f"{name}ForCausalLM" for name in CLASSES[:classes]]
    trains: set[str] = set()
    table: dict[str, families.Family] = {}
    wrong = failed = 0
    families.LIMIT = LIMIT_SECONDS
    families.tried(families.found("LlamaForCausalLM"))  # so that the forks need not import torch's parts
    for cut_in, least in zip(get_args(CutIn), (42, 41), strict=True):
        cut = 0
        for name in names:
            family = families.apart_from_others(name, cut_in)
            if isinstance(family, str):
                apart = family.startswith("AssertionError")  # of `tried`: a loss or a weight is off
                wrong += apart
                failed += not apart
                print(f"{name}, {cut_in}: {family}", flush=True)
                continue
            if cut_in == "columns":
                table[name] = family
            if family.outcome == "trains":
                trains.add(name)
                cut += "experts" in family.cut
        title = f"of the {len(names)} classes with experts: these are cut, in {cut_in} where that can be"
        yield row(title, cut, "classes", goal=f">= {least}", met=cut >= least)
    if classes == len(CLASSES):
        families.renew(names, table.values())
    title = f"of the {len(names)} classes with experts: train"
    yield row(title, len(trains), "classes", goal=">= 46", met=len(trains) >= 46)
    yield row("of these, trained otherwise than in one process", wrong, "classes", goal="0", met=not wrong)
    title = "of these, neither trained nor refused by from_hf, such as one expert for a TP group of 2"
    yield row(title, failed, "classes")


def parity_rows(cases: int = len(test_balance.FAMILIES)) -> Iterator[Row]:
    """Weights and balances after some steps; double precision throughout, and margins of the routers' choices
    asserted. The last of so many cases."""
    worst: dict[str, list[float]] = {}
    balances: list[float] = []
    for kind, name in test_balance.FAMILIES[-cases:]:
        gap, balance = test_balance.of_family(kind, name)
        worst.setdefault("DeepseekV3" if kind == "DeepseekV3" else "three", []).append(gap)
        balances.append(balance)
    layouts, goal = len(test_balance.OF_FAMILIES), f"<= {test_balance.NEAR:g}"
    steps = f"after {test_balance.STEPS} steps with a balance loss against one process"
    titles = {
        "three": f"weights {steps}, worst of Mixtral, Qwen3-MoE, GPT-OSS x {layouts} layouts but one (GPT-OSS "
        "takes no cut sequences, and these have no loss of samples)",
        "DeepseekV3": f"weights and biases of routers {steps}, worst of DeepSeek-V3 x {layouts} layouts",
    }
    for which, gaps in worst.items():
        yield row(titles[which], max(gaps), "", goal=goal, met=max(gaps) <= test_balance.NEAR)
    title = "balance losses of these steps against one process, worst"
    yield row(title, max(balances), "", goal=goal, met=max(balances) <= test_balance.NEAR)


def placed_rows(cases: int = len(test_experts.PLACED)) -> Iterator[Row]:
    """Experts that the plan places: parity of a mixture by hand, and what lanes that share experts send."""
    worst = 0.0
    for name in [*test_experts.PLACED][:cases]:
        for choose in (None, test_experts.only_first):
            torch.manual_seed(0)
            whole = mixture.Mixture(choose).double()
            model = copy.deepcopy(whole).describe()
            dataset = Text(mixture.VOCABULARY)
            training = replace(Training(model=model, loss=next_token_loss, dataset=dataset), steps=STEPS)
            gap, _ = test_experts.apart(training, whole, test_experts.PLACED[name], lambda full: full)
            worst = max(worst, gap)
    title = (
        f"weights after {STEPS} steps against one process, a mixture by hand, worst of {cases} layouts with "
        "placed experts, with routers' choices and with all rows to two experts"
    )
    yield row(title, worst, "", goal=f"<= {test_experts.NEAR:g}", met=worst <= test_experts.NEAR)
    sent, least = test_expert_exchange.sent_and_least(1024)
    title = "bytes of rows to experts of other lanes and back over distinct (row, device) x width of 1,024"
    yield row(title, sent / least, "", goal="<= 1.02", met=sent <= 1.02 * least)


def placement_rows(
    steps: int = 400,
    sizes: Sequence[tuple[int, int]] = expert_loads.SIZES,
    drifts: Sequence[float] = (0.01, 0.03),
) -> Iterator[Row]:
    """Placements of drifting Zipf loads, made every 20 steps as a leader forecasts them; EPLB's beside."""
    for stays, kind in ((False, "loads that become even"), (True, "loads that stay uneven")):
        scores = [
            expert_loads.score(experts, devices, slow, drift, steps, stays=stays)
            for experts, devices in sizes
            for drift in drifts
            for slow in (1.0, 2.0)
        ]
        exact = max(score.exact for score in scores)
        title = f"{kind}: busiest device over bound on the steps that made the placement, D - 1 replicas, worst"
        yield row(title, exact, "", kind="simulated", goal="<= 1.001", met=exact <= 1.001)
        later = max(score.later for score in scores)
        title = f"{kind}: the same on later steps, mean of each, worst"
        yield row(title, later, "", kind="simulated", goal="<= 1.10", met=later <= 1.10)
        slow = max(score.later / score.eplb for score in scores if score.slow > 1)
        title = f"{kind}: the same over that of EPLB's placement, one device 2 x slow, worst"
        yield row(title, slow, "", kind="simulated", goal="<= 0.60", met=slow <= 0.60)
        alike = max(score.later / score.eplb for score in scores if score.slow == 1)
        title = f"{kind}: the same over that of EPLB's placement with D copies, devices alike, worst"
        yield row(title, alike, "", kind="simulated", goal="<= 1.03", met=alike <= 1.03)
        even = min(score.contiguous for score in scores)
        yield row(f"{kind}: the same with contiguous experts, least", even, "", kind="simulated")
        moved = max(score.moved for score in scores if score.drift == min(drifts) and score.size == sizes[0])
        title = f"{kind}: experts moved a placement, 64 on 8, drift 0.01"
        yield row(title, moved, "experts", kind="simulated", goal="<= 4", met=moved <= 4)


def trained_rows(
    windows: Sequence[tuple[str, int, int]] = expert_loads.WINDOWS,
    sizes: Sequence[tuple[int, int]] = expert_loads.SIZES,
) -> Iterator[Row]:
    """Placements of the loads of a router in training, made every 20 steps as the leader forecasts them. Goals
    are those of a trained router, whose load drifts; the first steps of a new one are beside."""
    torch.set_num_threads(1)
    loads = {size: [*expert_loads.trained(size[0], windows[-1][2])] for size in sizes}
    names = " and ".join(f"{experts} on {devices}" for experts, devices in sizes)
    for kind, start, stop in windows:
        scores = [
            expert_loads.score(experts, devices, slow, 0.0, stop, loads=loads[experts, devices][start:stop])
            for experts, devices in sizes
            for slow in (1.0, 2.0)
        ]
        words = f"loads of {kind}, steps {start} to {stop}, {names}"
        alike = max(score.later / score.eplb for score in scores if score.slow == 1)
        slow = max(score.later / score.eplb for score in scores if score.slow > 1)
        of_eplb = f"{words}: the same over that of EPLB's placement"
        later = max(score.later for score in scores)
        for title, value, most in (
            (f"{words}: busiest device over bound on later steps, mean of each, worst", later, 1.10),
            (f"{of_eplb}, one device 2 x slow, worst", slow, 0.60),
            (f"{of_eplb} with D copies, devices alike, worst", alike, 1.03),
        ):
            judged = {"goal": f"<= {most:.2f}", "met": value <= most} if kind != windows[0][0] else {}
            yield row(title, value, "", **judged)
        even = min(score.contiguous for score in scores)
        yield row(f"{words}: the same with contiguous experts, least", even, "")
        moved = max(score.moved for score in scores)
        yield row(f"{words}: experts moved a placement, most", moved, "experts")


def peers_rows(steps: int = 20) -> Iterator[Row]:
    """Four processes over gloo: rows to experts and back by us and by transformers' `AllToAllEP`, in turn."""
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder) / "store")
        found = gang.run(_expert_exchange.__file__, "worker", _expert_exchange.DEVICES, file, 512, 256, steps)
    least, goal = sum(each["least"] for each in found.values()), 1.02
    title = "bytes of rows to experts of three other processes and back over distinct (row, device) x width"
    ratio = sum(each["ours"] for each in found.values()) / least
    yield row(title, ratio, "", goal=f"<= {goal}", met=ratio <= goal)
    yield row(f"{title}: AllToAllEP", sum(each["theirs"] for each in found.values()) / least, "")
    taken = {
        name: [max(each["seconds"][name][step] for each in found.values()) for step in range(2, steps)]
        for name in ("ours", "theirs")
    }
    ratios = [one / other for one, other in zip(taken["ours"], taken["theirs"], strict=True)]
    ratio = statistics.median(ratios)
    title = (
        "seconds of a layer of experts on 4 processes over those of transformers' AllToAllEP, median of pairs"
    )
    yield row(title, ratio, "", goal="<= 1.10", met=ratio <= 1.10)


def step_rows(steps: int = 12) -> Iterator[Row]:
    """Four processes over gloo: steps of a small Qwen3-MoE by us and by transformers' own experts, in turn."""
    with tempfile.TemporaryDirectory() as folder:
        _expert_step.model().save_pretrained(folder)
        found = gang.run(_expert_step.__file__, "worker", _expert_step.DEVICES, folder, steps, seconds=400)
    taken = {
        name: [max(each["seconds"][name][step] for each in found.values()) for step in range(2, steps)]
        for name in ("ours", "theirs")
    }
    ratio = statistics.median(one / other for one, other in zip(taken["ours"], taken["theirs"], strict=True))
    title = "seconds of a step of a Qwen3-MoE on 4 processes over those of transformers' own experts and FSDP"
    yield row(f"{title}, median of pairs", ratio, "", goal="<= 1.10", met=ratio <= 1.10)


def waits_rows() -> Iterator[Row]:
    """Two processes with an emulated accelerator each, which counts what its host waits for; the experts' own
    code makes no wait."""
    for name, waits in test_accelerators.most_waits().items():
        goal = 0 if name == test_accelerators.COLUMNS else 1
        title = f"host waits a sparse block and pass: {name}"
        yield row(title, waits, "", goal=f"<= {goal}", met=waits <= goal)


PARTS = {
    "waits": Part(waits_rows, TRAINING, {}),
    "step": Part(step_rows, TRAINING, {"steps": 3}),
    "peers": Part(peers_rows, TRAINING, {"steps": 4}),
    "emulated": Part(module_rows("_expert_emulated"), TRAINING, {"smallest": True}),
    "all": Part(module_rows("_all_at_once"), TRAINING, {"smallest": True}),
    "moves": Part(module_rows("_expert_moves"), PRODUCT, {"smallest": True}),
    "plans": Part(module_rows("_expert_plans"), PLANNER, {"smallest": True}),
    "placement": Part(
        placement_rows,
        ("planner/elasticd_planner/placement",),
        {"steps": 60, "sizes": ((64, 8),), "drifts": (0.01,)},
    ),
    "trained": Part(trained_rows, PRODUCT, {"windows": (("a", 0, 30), ("b", 30, 60)), "sizes": ((16, 4),)}),
    "placed": Part(placed_rows, TRAINING, {"cases": 1}),
    "parity": Part(parity_rows, TRAINING, {"cases": 2}),
    "classes": Part(class_rows, TRAINING, {"classes": 2}),
}

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.exit(run("experts", __doc__, PARTS))
