"""How many classes of transformers go in, train a step in two layouts, and come back from their folder.

Each class that docs/huggingface.md takes is made small with random weights, trained for a step on one device
and in two stages with TP groups, written as `save_pretrained` writes it, and loaded again. It counts
if transformers finds each name in the files and nothing else, if weights and logits are those of the job's
model to the bit, and if devices that read the folder box by box get the same.
"""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from _results import Row, row

import elasticd
from tests.models import exported, families

#: Fused parameters in parts, stacked experts.
_SMALLEST = ("GPT2LMHeadModel", "MixtralForCausalLM")


def rows(smallest: bool) -> Iterator[Row]:
    """The classes that come back, of those that are accepted."""
    accepted = [name for name, line in families.rows().items() if line.split("|")[2].strip() == "trains"]
    names = [name for name in accepted if name in _SMALLEST] if smallest else accepted
    right = 0
    for name in names:
        apart = _apart(name)
        right += not apart
        if apart:
            print(f"{name}: {apart[0]}", flush=True)
    said = "classes of transformers in, trained a step in two layouts, out, loaded: logits equal to the bit"
    yield row(said, right, "classes", goal=f"all {len(names)}", met=right == len(names))
    yield row(
        "classes of transformers that are accepted",
        len(accepted),
        "classes",
        goal=">= 135",
        met=len(accepted) >= 135,
    )


def _apart(name: str) -> list[str]:
    """What of one class does not come back."""
    found: list[str] = []
    with warnings.catch_warnings(), tempfile.TemporaryDirectory(prefix="elasticd-classes-") as folder:
        warnings.simplefilter("ignore")
        kind = families.found(name)
        model = families.made(kind, families.small_config(kind)).float()
        described = elasticd.from_hf(model)
        for layout, plan in exported.layouts(described).items():
            out = Path(folder) / layout
            job = exported.with_weights(
                model, exported.trained(model, described, plan, out, max_shard_size="40KB")
            )
            found += [*exported.apart_in_boxes(described, job, out), *exported.apart(job, out)]
    return found
