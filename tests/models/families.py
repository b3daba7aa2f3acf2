"""Every `...ForCausalLM` of the installed transformers: trained like one process, or refused by name.

`python -m tests.models.families` tries them all and writes the table of docs/huggingface.md.
"""

from __future__ import annotations

import copy
import functools
import importlib
import multiprocessing
import re
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import elasticd
from elasticd.models import next_token_loss
from elasticd.models.huggingface import refuse_at_sight, their_name, tiny_config
from elasticd.models.huggingface.anatomy import arguments, logits_of, text_of
from elasticd.models.huggingface.fused_experts import CutIn
from elasticd.models.huggingface.proof import (
    MOST,
    NEAR,
    changed_alone,
    copy_of,
    fill,
    refuse_other_tokens,
)
from elasticd.runtime.model.tp_rules import Column
from elasticd.runtime.model.validation import ModelError
from tests.models.layouts import Training, alone, furthest, plan_of, stage, under
from tests.models.texts import Text

PAGE = Path(__file__).resolve().parents[2] / "docs" / "huggingface.md"
START, END = "<!-- families: written by tests/models/families.py -->\n", "<!-- end of families -->\n"
LIMIT = 180.0  # seconds for a class

#: The families that `make test` tries.
USUAL = (
    *("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", "Gemma2", "Gemma3", "Granite", "Cohere", "Cohere2", "Phi"),
    *("Phi3", "Olmo2", "StableLm", "Starcoder2", "GPTNeoX", "OPT", "Glm", "SmolLM3"),
)
#: Those with experts that it tries.
USUAL_WITH_EXPERTS = ("Mixtral", "Qwen2Moe", "Qwen3Moe", "GptOss", "DeepseekV3", "Glm4Moe", "Olmoe")
#: What some default configurations leave open.
LACKING = {
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts_per_tok": 2,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "default_language": "en_XX",
}
#: Causal language models that are not called so.
OTHERS = ("GPT2LMHeadModel",)


@dataclass(frozen=True, kw_only=True)
class Family:
    """What becomes of a class, and why: `trains`, `refused`, or `not made` where its default configuration
    gives no small model. cut: what a TP group cuts. packs: whether its sequences can be packed, or what keeps
    them from it."""

    name: str
    outcome: str
    why: str = ""
    cut: str = ""
    packs: str = ""

    def row(self) -> str:
        return f"| {self.name} | {self.outcome} | {self.cut} | {self.packs} | {self.why} |\n"


class Whole(nn.Module):
    """The model as it is, called as transformers wants it."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return logits_of(self.model(input_ids=batch["inputs"], **arguments(self.model)))


@functools.cache
def classes() -> dict[str, str]:
    """The names of the classes, and of the modules that have them."""
    return dict(_classes())


def _classes() -> Iterator[tuple[str, str]]:
    import transformers

    folder = Path(transformers.__file__).parent / "models"
    for path in sorted(folder.glob("*/modeling_*.py")):
        for name in re.findall(r"^class (\w+)\(", path.read_text(), re.MULTILINE):
            if (name.endswith("ForCausalLM") and name != "AutoModelForCausalLM") or name in OTHERS:
                yield name, f"transformers.models.{path.parent.name}.{path.stem}"


def found(name: str) -> Any:
    """The class of that name."""
    return getattr(importlib.import_module(classes()[name]), name)


def small_config(kind: Any) -> Any:
    """Its default configuration made small; as a decoder, where it is an encoder and can be one."""
    config = _small_default(kind)
    return tiny_config.remade(config, {"is_decoder": True}) if is_encoder(kind) else config


@functools.cache
def is_encoder(kind: Any) -> bool:
    """Whether a model of the default configuration attends to later tokens, and may be made a decoder."""
    config = _small_default(kind)
    if tiny_config.values_of(config).get("is_decoder") is not False:
        return False
    try:
        refuse_other_tokens(copy_of(kind, config))
    except ModelError:
        return True
    return False


def _small_default(kind: Any) -> Any:
    config = tiny_config.small(kind.config_class())
    values = tiny_config.values_of(config)
    lacking = {name: size for name, size in LACKING.items() if values.get(name, size) is None}
    return tiny_config.remade(config, lacking)


def made(kind: Any, config: Any) -> Any:
    """A small model with random weights: in double precision, where its own code has that."""
    torch.manual_seed(0)
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in kind(config).parameters())
    assert size <= MOST, f"{size / 1e6:.0f} million parameters"
    small = copy_of(kind, config)
    model = small.model.to(small.logits.dtype)
    fill(model, 1.0)
    return model


def tried(kind: Any, experts: CutIn = "columns") -> Family:
    """Trains a small model of the class under a plan with a TP group and two stages, and in one piece. experts:
    what its experts are cut in."""
    name = kind.__name__
    try:
        with torch.device("meta"):
            refuse_at_sight(kind(_small_default(kind)))
        model = made(kind, small_config(kind))
    except ModelError as error:
        return Family(name=name, outcome="refused", why=said(error))
    except Exception as error:
        return Family(name=name, outcome="not made", why=said(error))
    try:
        described = elasticd.from_hf(model, experts=experts)
    except ModelError as error:
        return Family(name=name, outcome="refused", why=said(error))
    near = NEAR[described.dtype]
    loss, weight = apart(model, described)
    assert loss < near, f"{name}: the loss is {loss:.1e} off"
    assert weight < (near, ""), f"{name}: {weight[1]} is {weight[0]:.1e} off"
    notes = ["to rounding"] * ("equal to the bit" not in described.proved)
    notes += ["with is_decoder=True"] * is_encoder(kind)
    notes += ["experts whole"] * (has_experts(model) and "experts" not in cut(described))
    found = packs(described)
    return Family(name=name, outcome="trains", why=", ".join(notes), cut=cut(described), packs=found)


#: Classes of modules that send a token to some of several experts, by the last words of their names.
EXPERTS = re.compile(r"Expert|Mo[eE](Block)?$|MoA$")


def has_experts(model: nn.Module) -> bool:
    return any(EXPERTS.search(type(module).__name__) for module in model.modules())


def packs(described: elasticd.Model) -> str:
    """Whether sequences can be packed, or what keeps them from it."""
    if not described.unpackable:
        return "yes"
    why = described.unpackable.partition("not packed: ")[2].partition(" takes the sequences of a packed row")[0]
    return f"no: {_short(why.replace('|', '/'))}"


def double_throughout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models in double precision compute in that throughout: norms and rotary tables of transformers go through
    float32 otherwise."""
    to, single = torch.Tensor.to, torch.Tensor.float
    monkeypatch.setattr(torch.Tensor, "float", lambda x: x if x.dtype == torch.float64 else single(x))

    def double(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        wanted = {torch.float32} & {*args, *kwargs.values()} if x.dtype == torch.float64 else ()
        return x if wanted else to(x, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", double)


def apart(model: Any, described: elasticd.Model) -> tuple[float, tuple[float, str]]:
    """How far a loss and a weight are from one process's after a step."""
    layers, wide = described.layers, bool(described.rules)
    first, last = [("a/0", 2), ("a/1", 1)][: 1 + wide], [("b/0", 1), ("b/1", 2)][: 1 + wide]
    stages = [stage(0, 1, *first), stage(1, layers, *last)] if layers > 1 else [stage(0, 1, *first)]
    rows = min(model.get_input_embeddings().weight.shape[0], text_of(model.config).vocab_size)
    training = Training(model=described, loss=next_token_loss, dataset=Text(rows), steps=1)
    expected = alone(training, Whole(copy.deepcopy(model)))
    here = under(training, plan_of((2, stages), micro_batch=4), threads=len(stages) > 1 or wide)
    names = {full: f"model.{their_name(described, full)}" for full in here[1]}
    return abs(here[0][0] / expected[0][0] - 1), furthest(here, expected, names)


#: Numbers that change what a model gives wherever it has them.
ACT = re.compile(r".*(softcap|multiplier|logits?_scal|query_pre_attn|rope_theta|eps$|sliding_window).*")


def every_number(kind: Any) -> None:
    """Changes each number of the configuration by itself: the sections follow, and caps and scales act."""
    base = small_config(kind)
    first = copy_of(kind, base)
    for name, value in tiny_config.numbers(base).items():
        exact = changed_alone(kind, base, name, value)
        if exact is None:
            continue
        changed = copy_of(kind, tiny_config.with_numbers(base, {name: value}))
        acts = not torch.equal(changed.logits, first.logits)
        assert acts or not ACT.fullmatch(name), f"{name} of {kind.__name__} does not act on the small copy"


def cut(described: elasticd.Model) -> str:
    """What of a layer a TP group cuts."""
    columns = [pattern for pattern, rule in described.rules.items() if isinstance(rule, Column)]
    inner = [pattern for pattern in columns if pattern.startswith("blocks.") and ".experts." not in pattern]
    words = {"attention" if re.search("attn|attention", pattern) else "feed-forward" for pattern in inner}
    words |= {"experts"} & {word for pattern in described.rules for word in pattern.split(".")}
    return ", ".join([*sorted(words), *["vocabulary"] * any(map(re.compile(r"head\.").match, columns))])


def said(error: Exception) -> str:
    """An error in a row of the table."""
    text = " ".join(str(error).split()).replace("|", "/").removesuffix(f": {_REMEDY}")
    text = text.removesuffix(f", or {_REMEDY}")
    return _short(text if isinstance(error, ModelError) else f"{type(error).__name__}: {text}")


def _short(text: str, most: int = 200) -> str:
    return text if len(text) <= most else f"{text[:most].rpartition(' ')[0]} ..."


_REMEDY = "describe it with elasticd.Model(embed=..., blocks=..., head=...)"


def rows() -> dict[str, str]:
    """The table's rows by class."""
    page = PAGE.read_text()
    table = page[page.index(START) + len(START) : page.index(END)].splitlines(keepends=True)
    table = [row for row in table if row.startswith("| ") and not row.startswith("| class |")]
    return {row.split("|")[1].strip(): row for row in table}


def apart_from_others(name: str, experts: CutIn = "columns") -> Family | str:
    """A class tried in a fork of this process, which is killed after LIMIT seconds: what became of it, or what
    went wrong."""
    forks = multiprocessing.get_context("fork")
    ours, its = forks.Pipe(duplex=False)
    child = forks.Process(target=_tell, args=(name, experts, its))
    child.start()
    its.close()
    try:
        told: Family | str = ours.recv() if ours.poll(LIMIT) else f"no result after {LIMIT:.0f} s"
        return told
    except EOFError:
        child.join()
        return f"its process ended with {child.exitcode}"
    finally:
        child.kill()
        child.join()


def _tell(name: str, experts: CutIn, to: Any) -> None:
    try:
        to.send(tried(found(name), experts))
    except Exception as error:
        to.send(f"{type(error).__name__}: {error}")


def main() -> int:
    """Tries all classes, or those that are named, and writes the row of each. A class that trains otherwise
    than one process has none."""
    torch.set_num_threads(1)
    tried(found("LlamaForCausalLM"))  # so that the forks need not import what torch imports when it is used
    every = sorted(classes())
    wrong = 0
    for name in sys.argv[1:] or every:
        family = apart_from_others(name)
        row = {} if isinstance(family, str) else {name: family.row()}
        wrong += not row
        print(row.get(name, f"{name}: WRONG: {family}\n"), end="", flush=True)
        _write({known: row for known, row in rows().items() if known in every and known != name} | row)
    return min(1, wrong)


def renew(names: Collection[str], families: Iterable[Family]) -> None:
    """Writes the rows of some classes anew; one of which no family is known has none."""
    kept = {known: row for known, row in rows().items() if known not in names}
    _write(kept | {family.name: family.row() for family in families})


def _write(known: dict[str, str]) -> None:
    """The page with these rows, and how many there are of each outcome."""
    page = PAGE.read_text()
    outcomes = Counter(row.split("|")[2].strip() for row in known.values())
    counted = ", ".join(f"{outcomes[outcome]} {outcome}" for outcome in ("trains", "refused", "not made"))
    head = f"Of {len(known)} classes: {counted}.\n\n"
    head += "| class | outcome | a TP group cuts | packs | why |\n|---|---|---|---|---|\n"
    table = head + "".join(known[name] for name in sorted(known))
    start, end = page.index(START) + len(START), page.index(END)
    PAGE.write_text(page[:start] + table + page[end:])


if __name__ == "__main__":
    sys.exit(main())
