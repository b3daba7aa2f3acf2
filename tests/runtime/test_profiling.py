"""What is measured of a model: real local modules, exact bytes, and a whole model that its sections predict."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from elasticd_planner.cost.model_profile import derive
from elasticd_planner.cost.profile_cost import ProfileCost
from elasticd_planner.profiling.sample_profile import measured_profile
from elasticd_planner.profiling.samples import Samples
from elasticd_planner.spec.cluster import Link
from elasticd_planner.value import Invalid
from torch import Tensor, nn

from elasticd import Rule
from elasticd.models import Decoder, DecoderConfig, next_token_loss
from elasticd.runtime.accelerator import CPU, NoDevice, placed
from elasticd.runtime.engine.mixed_precision import Precision
from elasticd.runtime.model.model import Model, split_name
from elasticd.runtime.profiling.loading import CannotLoad, batch_of, load, loss_of
from elasticd.runtime.profiling.measure import measure, with_widths
from elasticd.runtime.reference.parts import ProfiledPart, Values, both_passes, part_of, whole_model
from elasticd.wire.profiler import Request
from tests.models import mixture
from tests.runtime import bundled

CONFIG = DecoderConfig(vocabulary=32, width=32, layers=3, heads=4, kv_heads=2, hidden=48)


def decoder() -> Model:
    with torch.device("meta"):
        return Decoder(CONFIG).describe()


def ids(samples: int = 2, tokens: int = 16) -> dict[str, Tensor]:
    drawn = torch.randint(0, 32, (samples, tokens), generator=torch.Generator().manual_seed(1))
    return {"inputs": drawn, "targets": drawn.roll(-1, 1)}


def part(section: str, shares: tuple[int, ...], loss: bool = False) -> ProfiledPart:
    model = decoder()
    return part_of(model, section, section, shares, Values(model, CPU), next_token_loss if loss else None)


def test_a_part_holds_the_first_members_slices_with_their_first_values() -> None:
    held = part("blocks.1", (2, 1, 1))
    assert held.share == 0.5
    assert held.width == 3
    weight = held.module.attention.q.weight
    assert weight.shape == (16, 32)
    whole = part("blocks.1", (1,)).module.attention.q.weight
    assert torch.equal(weight, whole[:16])
    assert whole.std() > 0


@pytest.mark.parametrize("section", ["embed", "blocks.0", "head"])
@pytest.mark.parametrize("shares", [(1,), (2, 2), (2, 1, 1)])
def test_a_part_passes_alone_in_the_shapes_of_the_whole(section: str, shares: tuple[int, ...]) -> None:
    held, batch = part(section, shares, loss=section == "head"), ids()
    entering = batch if section == "embed" else torch.randn(2, 16, 32)
    passes = held.passes(entering, batch, CPU)
    assert passes.forward > 0
    assert passes.backward > 0
    assert all(parameter.grad is not None for parameter in held.module.parameters())
    out = held.module(entering)
    assert out.shape == (2, 16, 32)  # the head's logits are whole after the gather, and 32 wide as well


class _Plain(nn.Module):
    """Keeps what is counted by hand: its input (for the weight's gradient) and tanh's output."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


def test_kept_bytes_are_counted_by_storage_without_parameters() -> None:
    block = _Plain()
    held = ProfiledPart(label="block", width=1, share=1.0, module=block, passed=block)
    x = torch.randn(2, 4, 8)
    size = x.numel() * 4
    assert held.kept(x, None) == 2 * size
    assert held.kept(x, None, recompute=True) == size
    linear = nn.Linear(8, 16, bias=False)
    head = ProfiledPart(label="head", width=1, share=1.0, module=linear, passed=linear)
    assert head.kept(x, None) == size + 2 * 4 * 16 * 4  # its logits, which some loss will keep


def test_working_bytes_are_what_both_passes_have_beside_what_is_kept() -> None:
    """Of a block its derivative, and the weight's gradient before it is added up; of a head its loss's, too."""
    block = _Plain()
    held = ProfiledPart(label="block", width=1, share=1.0, module=block, passed=block)
    x = torch.randn(64, 4, 8)
    size = x.numel() * 4
    working = held.working(x, None, held.kept(x, None))
    assert size <= working <= 4 * size
    assert all(parameter.grad is None for parameter in block.parameters())
    linear = nn.Linear(8, 512, bias=False)

    def loss(logits: Tensor, batch: Any) -> tuple[Tensor, int]:
        return nn.functional.cross_entropy(
            logits.flatten(0, 1), batch.flatten(), reduction="sum"
        ), batch.numel()

    targets = torch.zeros(64, 4, dtype=torch.int64)
    head = ProfiledPart(label="head", width=1, share=1.0, module=linear, passed=linear, loss=loss)
    logits, kept = 64 * 4 * 512 * 4, head.kept(x, targets)
    alive = kept + head.working(x, targets, kept)
    assert 4 * logits <= alive <= 4.2 * logits, "logits, their log-softmax, and the gradients of both"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_working_bytes_hold_neither_parameters_nor_gradients_that_were_there(dtype: torch.dtype) -> None:
    """Of three large matrices and few tokens: the gradient of one matrix, and with master weights its copy in
    their type. All parameters' views, and the gradients that it is added to, are state."""
    block = nn.Sequential(*(nn.Linear(256, 256, bias=False, dtype=dtype) for _ in range(3)))
    Precision(compute=dtype).add_up(block.parameters())
    held = ProfiledPart(label="block", width=1, share=1.0, module=block, passed=block)
    x = torch.randn(1, 2, 256, dtype=dtype)
    working, elements = held.working(x, None, held.kept(x, None)), 256 * 256
    gradient = elements * dtype.itemsize + (4 * elements if dtype is torch.bfloat16 else 0)
    assert gradient <= working <= gradient + 8 * x.nbytes


def test_recomputation_gives_the_same_gradients() -> None:
    held, x = part("blocks.0", (1,)), torch.randn(2, 16, 32)
    grads = []
    for recompute in (False, True):
        held.module.zero_grad()
        torch.manual_seed(0)  # the gradient that is given
        held.passes(x, None, CPU, recompute=recompute)
        grads.append([parameter.grad.clone() for parameter in held.module.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_the_whole_model_makes_the_gradients_of_plain_torch() -> None:
    model, batch = decoder(), ids()
    local = whole_model(model, Values(model, CPU))
    whole = local.modules
    both_passes(local.passes, batch, batch, next_token_loss)
    plain = Decoder(CONFIG)
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            section, _, rest = name.partition(".")
            if section == "blocks":
                index, _, rest = rest.partition(".")
                section = f"blocks.{index}"
            parameter.copy_(whole[section].get_parameter(rest))
    next_token_loss(plain(batch), batch)[0].backward()
    mine = whole["blocks.2"].feed_forward.down.weight.grad
    torch.testing.assert_close(mine, plain.blocks[2].feed_forward.down.weight.grad)
    tied = whole["embed"].tokens.weight.grad
    torch.testing.assert_close(tied, plain.embed.tokens.weight.grad)


def request(**changes: object) -> Request:
    values: dict[str, object] = {
        "target": "a.py:b",
        "widths": (1, 2),
        "tokens": (32, 256, 2048),
        "sample_tokens": 32,
        "repeats": 3,
        "threads": 1,
    }
    return Request(**{**values, **changes})  # type: ignore[arg-type]


def test_everything_is_measured_and_fitted() -> None:
    model = decoder()
    parts: list[float] = []
    made = measure(model, request(), CPU, batch_of_ids, next_token_loss, parts.append)
    points = {(t.section, t.width, t.tokens) for t in made.timings}
    expected = {(s, w, t) for s in ("embed", "block", "head") for w in (1, 2) for t in (32, 256, 2048)}
    assert points == expected
    assert parts == sorted(parts)
    assert parts[-1] == 1
    block = derive(model.spec, 32, 1).block
    assert made.updates[0].size == block.parameter_bytes
    assert made.updates[0].state == 2 * block.parameter_bytes
    assert made.whole is not None
    found = measured_profile(made)
    assert found.profile.block.seconds > 0
    assert found.profile.block.recomputed_activation == 32 * 4  # the block's input alone
    kept = {t.width: t.kept for t in made.timings if t.section == "block" and t.tokens == 2048}
    assert kept[1] > kept[2] > 0
    assert found.profile.block.cut_working + found.profile.block.whole_working > 0


def batch_of_ids(samples: int, tokens: int) -> dict[str, Tensor]:
    return ids(samples, tokens)


def test_sections_that_give_named_tensors_are_measured() -> None:
    tokens = 40
    made = measure(
        bundled.make_recipe().model,
        request(widths=(1, 2), tokens=(20, tokens), sample_tokens=10),
        CPU,
        batch_of_bundles,
        bundled.loss,
        lambda part: None,
    )
    assert {t.section for t in made.timings} == {"embed", "block.0", "block.1", "head"}
    assert made.whole is not None
    positions, hidden, gates, real = 8 * tokens, 8 * tokens * bundled.WIDTH, 8 * tokens * 3, tokens
    table, busy = 8 * 64 * bundled.WIDTH, 8 * 2
    there, back = positions + 2 * hidden + real + table + gates + busy, 2 * hidden + gates
    assert made.bundle_bytes == pytest.approx((there + back) / 2 / tokens)
    found = measured_profile(with_times_that_grow(made)).profile
    assert found.bundle_bytes == made.bundle_bytes
    link = Link(bandwidth=1e6, latency=0.0)
    seconds = ProfileCost(profile=msgspec.structs.replace(found, tokens=tokens)).boundary(link)
    assert seconds == pytest.approx((there + back) / 1e6)


@pytest.mark.parametrize("rules", [mixture.RULES, mixture.COLUMNS])
def test_experts_have_equal_rows_and_are_measured_by_themselves(rules: dict[str, Rule]) -> None:
    """A router that sends all rows to two experts: in a profile each of the eight has as many."""
    torch.manual_seed(0)
    whole = mixture.Mixture(lambda scores: torch.tensor([[0, 1]]).expand(len(scores), 2))
    units = {}
    if rules is mixture.RULES:
        units = mixture.UNITS
    else:
        for block in whole.blocks:
            block.experts.bias = None
    rows: dict[int, list[int]] = {}  # by members
    forward = mixture.StackedExperts.forward

    def counted(experts: mixture.StackedExperts, given: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        # Cut expert by expert it is called with k = 1, and the numbers of the member's own.
        rows[experts.count] = torch.bincount(index.flatten(), minlength=experts.count).tolist()
        return forward(experts, given, index, weights)

    asked = request(widths=(1, 2), tokens=(20, 40), sample_tokens=10)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mixture.StackedExperts, "forward", counted)
        made = measure(whole.describe(rules=rules, units=units), asked, CPU, batch_of_ids, None, lambda _: None)
    assert {each for own in rows.values() for each in own} <= {5, 10}, "of 20 and 40 tokens, two of eight each"
    assert {*rows} == ({8, 4} if rules is mixture.RULES else {8})
    assert {(t.section, t.width) for t in made.timings if t.section == "experts"} == {
        ("experts", 1),
        ("experts", 2),
    }
    slow = [
        msgspec.structs.replace(t, forward=4e-7 * t.tokens, backward=8e-7 * t.tokens)
        if t.section == "experts"
        else t
        for t in with_times_that_grow(made).timings
    ]
    found = measured_profile(msgspec.structs.replace(made, timings=tuple(slow))).profile.experts
    assert found is not None
    assert found.part == pytest.approx(0.4)
    assert (found.chosen, found.count) == (2, 8)


def with_times_that_grow(made: Samples) -> Samples:
    """`made` with times by tokens alone: those of a few dozen tokens of a small block are lost in the noise."""
    return msgspec.structs.replace(
        made,
        timings=tuple(
            msgspec.structs.replace(timing, forward=1e-6 * timing.tokens, backward=2e-6 * timing.tokens)
            for timing in made.timings
        ),
    )


def batch_of_bundles(samples: int, tokens: int) -> dict[str, Tensor]:
    drawn = torch.randint(0, bundled.VOCABULARY, (samples, tokens), generator=torch.Generator().manual_seed(1))
    return {"inputs": drawn, "targets": drawn.roll(-1, 1)}


def test_the_whole_model_of_named_tensors_makes_the_gradients_of_plain_torch() -> None:
    model, batch = bundled.make_recipe().model, batch_of_bundles(2, 10)
    local = whole_model(model, Values(model, CPU))
    sections = local.modules
    both_passes(local.passes, batch, batch, bundled.loss)
    plain = bundled.Whole()
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            section, rest = split_name(name)
            parameter.copy_(sections[section].get_parameter(rest))
    bundled.loss(plain(batch), batch)[0].backward()
    for name, parameter in plain.named_parameters():
        section, rest = split_name(name)
        torch.testing.assert_close(sections[section].get_parameter(rest).grad, parameter.grad, msg=name)


def test_widths_that_the_model_can_have_are_measured_unless_one_that_it_cannot_is_named() -> None:
    assert with_widths(decoder(), request(widths=())).widths == (1, 2, 4)
    without_rules = Model(embed=nn.Embedding(4, 4), blocks=[nn.Linear(4, 4)], head=nn.Linear(4, 4))
    assert with_widths(without_rules, request(widths=())).widths == (1,)
    with pytest.raises(Invalid, match=r"--widths: a TP group of 5 has no plan .* cut in 4 units: .* up to 4"):
        with_widths(decoder(), request(widths=(5,)))


def test_tokens_that_are_no_whole_samples_are_refused() -> None:
    with pytest.raises(Invalid, match="100 tokens are no whole samples of 32"):
        request(tokens=(64, 100))


def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(NoDevice, match="device 'tpu'"):
        placed("tpu", {})


USER = """
    import elasticd
    from torch import nn
    def given(layers): ...
    def broken(): return 1 // 0
    def wrong(): return nn.Linear(1, 1)
    def plain(embed=None):
        return elasticd.Model(embed=embed or nn.Embedding(9, 4), blocks=[nn.Linear(4, 4)], head=nn.Linear(4, 9),
                              width=4, init=lambda name, shape, generator: None)
    def odd(): return plain(nn.Linear(4, 4))
    made = plain()
    number = 3
"""


@pytest.fixture
def user(tmp_path: Path) -> Path:
    path = tmp_path / "user_model.py"
    path.write_text(textwrap.dedent(USER))
    return path


def test_a_model_or_its_function_is_found(user: Path) -> None:
    for name in ("plain", "made"):
        module, model = load(f"{user}:{name}")
        assert model.layers == 1
    batch = batch_of(module, "", model)(2, 8)
    assert batch["inputs"].shape == (2, 8)
    assert int(batch["inputs"].max()) < 9
    assert loss_of(module, "") is None


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("given", "must be a function without arguments: missing a required argument: 'layers'"),
        ("broken", r"broken in .* failed: ZeroDivisionError: .*user_model.py, line 5\)"),
        ("wrong", "is of type Linear: it must be an elasticd.Model"),
        ("number", "is of type int: it must be"),
        ("modle", "has no 'modle'; it has: broken, given"),
    ],
)
def test_what_is_no_model_is_refused(user: Path, name: str, message: str) -> None:
    with pytest.raises(CannotLoad, match=message):
        load(f"{user}:{name}")


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("train.py", "must be FILE.py:NAME"),
        ("nowhere.py:model", "there is no file nowhere.py"),
        ("no_such_module_here:model", "neither a file nor a module"),
    ],
)
def test_a_file_that_is_not_there_is_named(target: str, message: str) -> None:
    with pytest.raises(CannotLoad, match=message):
        load(target)


def test_a_model_without_an_embedding_asks_for_batches(user: Path) -> None:
    module, model = load(f"{user}:odd")
    with pytest.raises(CannotLoad, match=r"no nn\.Embedding.*--batch"):
        batch_of(module, "", model)
    with pytest.raises(CannotLoad, match="number is of type int"):
        batch_of(module, "number", model)
