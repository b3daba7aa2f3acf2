"""The description of a model: local modules of a stage, first values, and what is refused."""

from __future__ import annotations

import pytest
import torch
from elasticd_planner.spec.box import Box
from elasticd_planner.spec.plan import Stage
from torch import nn

import elasticd
from elasticd.models import Decoder, DecoderConfig
from elasticd.runtime.model.local_model import local_model
from elasticd.runtime.model.model import Model, ModelError
from elasticd.runtime.model.tp_rules import Column, UnitsOf

CONFIG = DecoderConfig(vocabulary=16, width=16, layers=3, heads=4, kv_heads=2, hidden=12)


def decoder() -> Model:
    with torch.device("meta"):
        return Decoder(CONFIG).describe()


def test_a_member_holds_its_slices_and_knows_its_units() -> None:
    stage = Stage(start=0, stop=2, devices=("a/0", "a/1"), shares=(3, 1))
    local = local_model(decoder(), stage, 0)
    assert list(local.modules) == ["embed", "blocks.0", "blocks.1"]
    attention = local.modules["blocks.1"].attention
    assert (attention.heads, attention.kv_heads) == (3, 3)  # a kv-head for each: the cut is inside a group
    assert attention.q.weight.shape == (12, 16)
    other = local_model(decoder(), stage, 1).modules["blocks.0"].attention
    assert (other.heads, other.kv_heads) == (1, 1)
    assert (other.q.out_features, other.o.in_features) == (4, 4)
    assert local.parameters["embed.tokens.weight"].boxes == (Box(start=(0, 0), stop=(12, 16)),)


def test_a_tied_head_is_one_parameter_where_both_are_held() -> None:
    whole = local_model(decoder(), Stage(start=0, stop=3, devices=("a/0",), shares=(1,)), 0)
    assert whole.modules["head"].output.weight is whole.modules["embed"].tokens.weight
    assert "head.output.weight" not in whole.parameters
    last = local_model(decoder(), Stage(start=2, stop=3, devices=("a/0",), shares=(1,)), 0)
    assert last.modules["head"].output.weight is last.parameters["embed.tokens.weight"][1]


def test_first_values_do_not_depend_on_the_layout() -> None:
    model = decoder()
    whole = model.first_value("blocks.1.attention.q.weight", Box.whole((16, 16)), seed=1)
    part = model.first_value("blocks.1.attention.q.weight", Box(start=(4, 0), stop=(9, 16)), seed=1)
    assert torch.equal(whole[4:9], part)
    assert not torch.equal(whole, model.first_value("blocks.2.attention.q.weight", Box.whole((16, 16)), seed=1))
    assert not torch.equal(whole, model.first_value("blocks.1.attention.q.weight", Box.whole((16, 16)), seed=2))


def test_the_description_holds_no_weights() -> None:
    model = Decoder(CONFIG).describe()
    assert all(p.is_meta for section in model.sections.values() for p in section.parameters())


def frozen(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


class Scaled(nn.Module):
    """A linear layer with a buffer, which forward reads."""

    def __init__(self, width: int, *, persistent: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.register_buffer("gain", torch.arange(1.0, width + 1), persistent=persistent)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.gain


def test_frozen_parameters_and_buffers_are_described_and_made_as_such() -> None:
    model = plain(blocks=[frozen(nn.Linear(4, 4)), Scaled(4)])
    kinds = {parameter.name: parameter.kind for kind in model.spec.kinds for parameter in kind}
    assert kinds == {
        "weight": "frozen",
        "bias": "frozen",
        "linear.weight": "trained",
        "linear.bias": "trained",
        "gain": "buffer",
    }
    local = local_model(model, Stage(start=0, stop=2, devices=("a/0",), shares=(1,)), 0)
    assert not local.parameters["blocks.0.weight"][1].requires_grad
    assert set(local.buffers) == {"blocks.1.gain"}
    assert local.modules["blocks.1"].get_buffer("gain") is local.buffers["blocks.1.gain"]
    local.buffers["blocks.1.gain"].data = model.first_value("blocks.1.gain", Box.whole((4,)), seed=0)
    assert local.modules["blocks.1"].gain.tolist() == [1, 2, 3, 4]
    assert set(local.modules["blocks.1"].state_dict()) == {"linear.weight", "linear.bias", "gain"}


def test_a_buffer_that_is_not_persistent_stays_as_the_module_made_it() -> None:
    model = plain(blocks=[Scaled(4, persistent=False)])
    assert "gain" not in {parameter.name for parameter in model.spec.kinds[0]}
    local = local_model(model, Stage(start=0, stop=1, devices=("a/0",), shares=(1,)), 0)
    assert local.modules["blocks.0"].gain.tolist() == [1, 2, 3, 4]


def test_a_buffer_of_two_submodules_stays_one() -> None:
    first, second = Scaled(4), Scaled(4)
    second.gain = first.gain
    model = plain(blocks=[nn.Sequential(first, second)])
    assert [rule.name for rule in model.spec.kinds[0] if rule.kind == "buffer"] == ["0.gain"]
    local = local_model(model, Stage(start=0, stop=1, devices=("a/0",), shares=(1,)), 0)
    ours = local.buffers["blocks.0.0.gain"]
    assert local.modules["blocks.0"].get_buffer("0.gain") is ours
    assert local.modules["blocks.0"].get_buffer("1.gain") is ours


SHARED = nn.Linear(4, 4)


def plain(**changes: object) -> Model:
    given: dict[str, object] = {
        "embed": nn.Embedding(8, 4),
        "blocks": [nn.Linear(4, 4)],
        "head": nn.Linear(4, 8),
        "width": 4,
        "init": lambda name, shape, generator: torch.zeros(shape),
    }
    return Model(**{**given, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"blocks": []}, "blocks must be a non-empty list"),
        ({"rules": {"blocks.*.wieght": Column("columns")}}, r"'blocks.\*.wieght' matches no parameter"),
        ({"ties": {"head.weight": "embed.weights"}}, "'embed.weights' is not a parameter"),
        ({"head": nn.BatchNorm1d(4)}, "head is a BatchNorm1d: its statistics"),
        ({"head": Scaled(4, persistent=False).to("meta")}, r"head.gain is a buffer without values"),
        ({"units": {"heads": UnitsOf(2, attribute="blocks.*.heads")}}, "is no attribute"),
        ({"units": {"heads": UnitsOf(3, attribute="blocks.*.out_features")}}, "= 4 is no multiple of 3"),
        ({"units": {"heads": UnitsOf()}}, "no rule uses them"),
        ({"blocks": [nn.Sequential(nn.Linear(4, 4), nn.AlphaDropout(0.1))]}, "blocks.0.1 is a AlphaDropout"),
        ({"blocks": [nn.Sequential(SHARED, SHARED)]}, "inside blocks.0: use one name"),
        (
            {"rules": {"head.weight": Column("rows")}, "units": {"rows": UnitsOf(3)}},
            "does not divide",
        ),
    ],
)
def test_what_cannot_be_trained_is_refused_by_name(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plain(**changes)


def test_an_init_of_the_wrong_shape_is_named() -> None:
    model = plain(init=lambda name, shape, generator: torch.zeros(1))
    with pytest.raises(ModelError, match=r"init\('head.weight'\) gave shape \(1,\), not \(8, 4\)"):
        model.first_value("head.weight", Box.whole((8, 4)), seed=0)


def test_sizes_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="must divide into 3 heads"):
        DecoderConfig(width=16, heads=3)
    with pytest.raises(ValueError, match="groups for 3 kv-heads"):
        DecoderConfig(width=16, heads=4, kv_heads=3)


def test_the_old_name_of_from_hf_says_the_new_one() -> None:
    with pytest.raises(AttributeError, match=r"elasticd\.from_hf"):
        Model.from_hf(nn.Linear(2, 2))


@pytest.mark.parametrize(("former", "name"), [("Add", "PartialGrad"), ("Slice", "Sharded")])
def test_the_former_names_of_rules_are_accepted_with_a_warning(former: str, name: str) -> None:
    with pytest.warns(DeprecationWarning, match=f"refused from 0.3 on: write elasticd.{name}"):
        assert getattr(elasticd, former) is getattr(elasticd, name)
