"""First values of a model: as it was made, from a mapping, by its modules' own reset; and fused parts."""

from __future__ import annotations

import pytest
import torch
from elasticd_planner.spec.box import Box
from elasticd_planner.spec.plan import Stage
from torch import nn

import elasticd
from elasticd import Column, Row, Sharded, UnitsOf
from elasticd.runtime.model.local_model import local_model
from elasticd.runtime.model.model import ModelError
from elasticd.runtime.model.rng import Dropout, DropoutCut

RULES = {
    "blocks.*.0.*": Column("columns"),
    "blocks.*.1": Sharded("columns", dim=-1),
    "blocks.*.2.*": Row("columns"),
}


class Plain(nn.Module):
    """A parameter of its own, and no reset_parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(4))


def described(device: str = "cpu", **changes: object) -> elasticd.Model:
    with torch.device(device):
        given: dict[str, object] = {
            "embed": nn.Embedding(8, 4),
            "blocks": [nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 4)) for _ in range(2)],
            "head": nn.Linear(4, 8),
            "rules": RULES,
        }
    return elasticd.Model(**{**given, **changes})  # type: ignore[arg-type]


def group(*shares: int) -> Stage:
    return Stage(start=0, stop=2, devices=tuple(f"a/{i}" for i in range(len(shares))), shares=shares)


def test_modules_with_values_start_as_they_are() -> None:
    block = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 4))
    model = described(blocks=[block])
    part = model.first_value("blocks.0.0.weight", Box(start=(2, 0), stop=(5, 4)), seed=0)
    assert torch.equal(part, block[0].weight[2:5])
    assert part.untyped_storage().nbytes() == part.nbytes, "only the box is kept"


def test_modules_on_meta_reset_themselves_alike_in_every_layout() -> None:
    whole = described("meta").first_value("blocks.1.0.weight", Box.whole((6, 4)), seed=5)
    part = described("meta").first_value("blocks.1.0.weight", Box(start=(1, 0), stop=(3, 4)), seed=5)
    assert torch.equal(whole[1:3], part)
    assert whole.abs().max() <= 0.5, "as nn.Linear starts: uniform in 1 / sqrt(4)"
    assert not torch.equal(whole, described("meta").first_value("blocks.0.0.weight", Box.whole((6, 4)), seed=5))


def test_what_cannot_reset_itself_is_named() -> None:
    with torch.device("meta"):
        head = Plain()
    with pytest.raises(ModelError, match=r"head.gain has no first value: Plain .* give Model\(init=...\)"):
        described("meta", head=head).first_value("head.gain", Box.whole((4,)), seed=0)


def test_a_mapping_gives_first_values_by_full_name() -> None:
    model = described("meta", init={"head.weight": torch.arange(32.0).view(8, 4)})
    assert model.first_value("head.weight", Box(start=(7, 0), stop=(8, 4)), seed=0).tolist() == [
        [28, 29, 30, 31]
    ]
    with pytest.raises(ModelError, match=r"init has no value for head.bias; it has head.weight"):
        model.first_value("head.bias", Box.whole((8,)), seed=0)


def test_dropouts_are_keyed_by_place_and_know_their_cut() -> None:
    local = local_model(described(), group(1, 2), 1)
    dropout = local.modules["blocks.1"].get_submodule("1")
    assert isinstance(dropout, Dropout)
    assert (dropout.site, dropout.cut) == ("blocks.1.1", DropoutCut(dim=-1, first=2, units=4))


def test_fused_parts_are_cut_one_by_one() -> None:
    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads = 4
            self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    block = Fused()
    model = described(
        embed=nn.Embedding(8, 8),
        blocks=[block],
        rules={"blocks.*.qkv.*": Column("heads", parts=3), "blocks.*.out.*": Row("heads")},
        units={"heads": UnitsOf(attribute="blocks.*.heads")},
    )
    local = local_model(model, Stage(start=0, stop=1, devices=("a/0", "a/1"), shares=(3, 1)), 1)
    (box,), held = local.parameters["blocks.0.qkv.weight"]
    held.data = model.first_value("blocks.0.qkv.weight", box, seed=0)
    local.parameters["blocks.0.qkv.bias"][1].data.zero_()
    mine = local.modules["blocks.0"].qkv(torch.eye(8)).T
    expected = block.qkv.weight.view(3, 4, 2, 8)[:, 3].reshape(6, 8)
    assert local.modules["blocks.0"].heads == 1
    assert torch.allclose(mine, expected, atol=1e-6)


@pytest.mark.parametrize(
    ("wrapped", "message"),
    [
        (lambda m: torch.compile(m), "embed is compiled by torch.compile: give elasticd the plain module"),
        (lambda m: nn.DataParallel(m), "embed is wrapped in DataParallel"),
        (lambda m: nn.LazyLinear(4), "embed.weight has no shape yet"),
        (lambda m: nn.Sequential(m, nn.InstanceNorm1d(4, track_running_stats=True)), "embed.1 keeps running"),
        (lambda m: nn.Sequential(m, nn.Embedding(4, 4, max_norm=1.0)), "embed.1 has max_norm"),
        (lambda m: nn.Embedding(4, 4, scale_grad_by_freq=True), "embed has scale_grad_by_freq: gradients"),
        (lambda m: nn.Embedding(4, 4, sparse=True), "embed has sparse=True: sparse gradients are not reduced"),
    ],
)
def test_wraps_and_what_no_layout_trains_alike_are_refused(wrapped: object, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        described(embed=wrapped(nn.Embedding(8, 4)))  # type: ignore[operator]


def test_ddp_and_fsdp_are_refused_by_name() -> None:
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.nn.parallel import DistributedDataParallel

    for kind, said in (
        (DistributedDataParallel, "DistributedDataParallel"),
        (FullyShardedDataParallel, r"ParallelismOptions\(zero=1\)"),
        (FSDPModule, "fully_shard"),
    ):
        bases = (kind,) if issubclass(kind, nn.Module) else (kind, nn.Embedding)
        wrapped = object.__new__(type("Wrapped", bases, {}))
        nn.Module.__init__(wrapped)
        with pytest.raises(ModelError, match=said):
            described(embed=wrapped, width=4)


def test_a_model_without_rules_says_that_it_is_not_cut() -> None:
    with pytest.warns(UserWarning, match="no tensor-parallel rules for its blocks: TP groups are not wider"):
        described(rules={})


def test_own_first_values_have_a_digest_that_tells_seeds_apart() -> None:
    torch.manual_seed(1)
    one = described().first()
    torch.manual_seed(1)
    assert described().first() == one != ""
    torch.manual_seed(2)
    assert described().first() != one
    assert described("meta").first() == described(init=lambda name, shape, g: torch.zeros(shape)).first() == ""
