"""A dropout's mask is a function of seed, step, sample, place and element."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from elasticd_planner.spec.batch import SequencePiece
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from elasticd.runtime.accelerator import CPU
from elasticd.runtime.exits import ScriptRefusal
from elasticd.runtime.model import rng
from elasticd.runtime.model.rng import Dropout, DropoutCut, ModelRng, kept
from elasticd.runtime.parallel.packed_row import PackedRow
from elasticd.runtime.reference.live_bytes import LiveBytes


@given(
    st.integers(-(2**63), 2**63 - 1),
    st.tuples(st.integers(0, 9), st.integers(0, 9)),
    st.tuples(st.integers(1, 5), st.integers(1, 5)),
)
def test_a_slice_of_a_mask_is_the_mask_of_the_slice(
    key: int, start: tuple[int, int], size: tuple[int, int]
) -> None:
    whole = kept([key], (14, 14), (0, 0), 0.5, CPU.device)
    part = kept([key], size, start, 0.5, CPU.device)
    assert torch.equal(part, whole[:, start[0] : start[0] + size[0], start[1] : start[1] + size[1]])


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_as_many_are_dropped_as_asked_for_and_neighbours_are_independent(p: float) -> None:
    mask = kept(range(64), (64, 64), (0, 0), p, CPU.device).double()
    assert float(mask.mean()) == pytest.approx(1 - p, abs=0.004)
    centred = mask - mask.mean()
    for dim in range(3):
        shifted = centred.roll(1, dim)
        assert abs(float((centred * shifted).mean() / centred.var())) < 0.01


def masked(samples: list[int], step: int = 0, site: str = "a", seed: int = 0) -> torch.Tensor:
    dropout = Dropout(0.5, site)
    dropout.drawing.begin(seed, step)
    dropout.drawing.samples = samples
    out: torch.Tensor = dropout(torch.ones(len(samples), 64))
    return out


def test_a_mask_belongs_to_the_sample_not_to_its_batch() -> None:
    assert torch.equal(masked([7, 3, 5])[1], masked([3])[0])
    for other in (masked([4]), masked([3], step=1), masked([3], site="b"), masked([3], seed=1)):
        assert not torch.equal(other[0], masked([3])[0])


def test_what_is_kept_is_scaled_and_evaluation_drops_nothing() -> None:
    assert sorted(masked([1]).unique().tolist()) == [0.0, 2.0]
    assert torch.equal(Dropout(0.5).eval()(torch.ones(2, 3)), torch.ones(2, 3))


def test_an_input_without_the_samples_first_is_refused() -> None:
    dropout = Dropout(0.5, "blocks.0.dropout")
    dropout.drawing.samples = [1, 2]
    with pytest.raises(ValueError, match=r"blocks.0.dropout: .* the samples as its first"):
        dropout(torch.ones(3, 4))


class Draws(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand_like(x)


def test_other_draws_are_a_function_of_step_and_samples_and_leave_the_users_generator_alone() -> None:
    drawing = ModelRng()
    drawing.drew = set()
    modules = {
        section: drawing.around(section, module)
        for section, module in (("blocks.0", Draws()), ("blocks.1", nn.Linear(3, 3)))
    }
    drawing.samples = [1, 2]
    before = torch.get_rng_state()
    first = modules["blocks.0"](torch.zeros(2, 3))
    modules["blocks.1"](torch.zeros(2, 3))
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(first, modules["blocks.0"](torch.zeros(2, 3)))
    drawing.begin(0, 1)
    assert not torch.equal(first, modules["blocks.0"](torch.zeros(2, 3)))
    assert drawing.drew == {"blocks.0"}


class DrawsInTraining(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(x, 0.5, self.training)


def test_a_pass_of_an_evaluation_says_nothing_of_what_training_draws() -> None:
    drawing, module = ModelRng(), DrawsInTraining()
    passed = drawing.around("blocks.0", module)
    drawing.samples = [1, 2]
    module.eval()
    assert torch.equal(passed(torch.ones(2, 30)), torch.ones(2, 30))
    module.train()
    before = torch.get_rng_state()
    first = passed(torch.ones(2, 30))
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(first, passed(torch.ones(2, 30)))


class Later(nn.Module):
    """Draws from the host's generators once it is to; gives what it drew beside its input."""

    def __init__(self, draw: Callable[[], float], *, in_place: bool = False) -> None:
        super().__init__()
        self.draw, self.draws, self.in_place, self.calls = draw, False, in_place, 0

    def forward(self, bundle: Any) -> Any:
        self.calls += 1
        x = bundle if isinstance(bundle, torch.Tensor) else bundle.pop("hidden")
        if self.in_place:
            x += 1
        x = x + self.draw() if self.draws else x * 1
        return x if isinstance(bundle, torch.Tensor) else {"hidden": x}


def keyed_passes(
    module: Later, draws: list[bool], entered: torch.Tensor, *, repeats: bool = True
) -> tuple[list[Any], list[int]]:
    """The outputs of passes of two sections, of which the first draws in some, and its calls in each."""
    drawing = ModelRng()
    drawing.repeats = repeats
    drawing.begin(1, 2)
    passed, after = drawing.around("blocks.0", module), drawing.around("blocks.1", nn.Identity())
    outputs, calls = [], []
    with drawing.kept():
        for sample, module.draws in enumerate(draws):
            drawing.samples, before = [sample], module.calls
            x = entered.clone()
            outputs.append(passed({"hidden": x} if module.draw is random.random else x))
            after(torch.zeros(1))
            calls.append(module.calls - before)
    return outputs, calls


HOST_DRAWS: list[Callable[[], float]] = [
    random.random,
    lambda: random.gauss(0, 1),  # keeps a second one
    lambda: float(np.random.standard_normal()),  # likewise
    lambda: float(np.random.rand(624 * 2).sum()),  # the place of the next word is the same after it
]


@pytest.mark.parametrize("draw", HOST_DRAWS)
def test_a_section_that_draws_late_by_the_hosts_generators_draws_as_if_it_had_all_seeds_always(
    draw: Callable[[], float],
) -> None:
    when = [False] * 5 + [True, False, True, True]
    entered = torch.arange(3.0)
    outputs, calls = keyed_passes(Later(draw), when, entered)
    expected, once = keyed_passes(Later(draw), when, entered, repeats=False)
    assert [str(each) for each in outputs] == [str(each) for each in expected]
    assert calls == [1, 1, 1, 1, 1, 2, 1, 1, 1], "only the first pass that draws is repeated"
    assert once == [1] * len(when)


def test_a_section_that_draws_nothing_by_the_hosts_generators_has_not_their_seeds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seeded: list[int] = []
    seed_host = rng.seed_host
    monkeypatch.setattr(rng, "seed_host", lambda seed: (seeded.append(seed), seed_host(seed)))
    keyed_passes(Later(random.random), [False] * 10, torch.zeros(2))
    assert len(seeded) == 6, "three passes of each section are watched"
    keyed_passes(Later(random.random), [False] * 10, torch.zeros(2), repeats=False)
    assert len(seeded) == 6 + 20


TORCH_DRAWS: list[Callable[[], object]] = [
    lambda: torch.rand(1),
    lambda: torch.randn(1),  # keeps a second one, which the next call takes
    lambda: torch.randn(1, dtype=torch.float64),
    lambda: torch.randint(5, (1,)),
    lambda: torch.rand(624),  # the place of the next word is the same after it
    lambda: torch.randperm(3),
    lambda: torch.bernoulli(torch.tensor(0.5)),
]


@pytest.mark.parametrize("draw", [*TORCH_DRAWS, *HOST_DRAWS])
def test_each_draw_between_two_looks_is_seen(draw: Callable[[], object]) -> None:
    drawing = ModelRng()
    with drawing.kept():
        for seeded in (True, False):
            if seeded:
                rng.seed_all(5)
            for _ in range(4):
                passes = rng.UnseededPasses(drawing, "blocks.0", torch.zeros(1))
                assert not passes.drew
                draw()
                assert passes.drew


def test_a_draw_between_sections_is_none_of_the_next_section() -> None:
    drawing, module = ModelRng(), Later(lambda: random.gauss(0, 1))
    drawing.repeats = True
    passed = drawing.around("blocks.0", module)
    with drawing.kept():
        for _ in range(4):
            passed(torch.zeros(1))
        random.gauss(0, 1)
        module.draws = True
        first = passed(torch.zeros(1))
        assert torch.equal(first, passed(torch.zeros(1)))
    assert module.calls == 6


def test_a_section_that_changes_its_input_in_place_is_never_repeated() -> None:
    when = [False] * 5 + [True]
    outputs, calls = keyed_passes(Later(lambda: random.gauss(0, 1), in_place=True), when, torch.zeros(2))
    expected, _ = keyed_passes(
        Later(lambda: random.gauss(0, 1), in_place=True), when, torch.zeros(2), repeats=False
    )
    assert [str(each) for each in outputs] == [str(each) for each in expected]
    assert calls == [1] * 6


def test_a_pass_that_draws_for_the_first_time_and_changes_its_input_is_refused() -> None:
    drawing, module = ModelRng(), Later(random.random)
    drawing.repeats = True
    passed = drawing.around("blocks.0", module)
    with drawing.kept():
        for _ in range(4):
            passed(torch.zeros(1))
        module.draws = module.in_place = True
        with pytest.raises(
            ScriptRefusal, match=r"^blocks.0 draws random numbers for the first time.* make a new tensor"
        ):
            passed(torch.zeros(1))


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(*shape, device=CPU.device)


def rowed(pieces: list[SequencePiece], x: torch.Tensor, cut: DropoutCut | None = None) -> torch.Tensor:
    """What a dropout makes of a packed row."""
    row = PackedRow(pieces, CPU.device)
    dropout = Dropout(0.5, "a")
    dropout.cut = cut
    dropout.drawing.samples = [piece.sample for piece in pieces]
    dropout.drawing.tokens = row.sample_of_token, row.positions
    out: torch.Tensor = dropout(x)
    return out


def test_a_packed_row_has_the_masks_of_its_samples_one_after_the_other() -> None:
    padded = Dropout(0.5, "a")
    padded.drawing.samples = [7, 3]
    apart = padded(ones(2, 9, 5))
    row = rowed([SequencePiece.whole(7, 9), SequencePiece.whole(3, 4)], ones(1, 13, 5))
    assert torch.equal(row[0], torch.cat([apart[0], apart[1, :4]]))
    pieces = [SequencePiece.whole(7, 9), SequencePiece.whole(3, 4)]
    cut = rowed(pieces, ones(1, 13, 2), cut=DropoutCut(dim=-1, first=3, units=2))
    assert torch.equal(cut, row[..., 3:])


def test_a_cut_of_units_of_several_elements_has_its_part_of_the_mask() -> None:
    """Heads of four numbers: the second head's mask begins at the fifth number."""
    whole, part = Dropout(0.5, "a"), Dropout(0.5, "a")
    part.cut = DropoutCut(dim=-1, first=1, units=2)
    for dropout in (whole, part):
        dropout.drawing.samples = [7, 3]
    assert torch.equal(part(ones(2, 9, 8)), whole(ones(2, 9, 16))[..., 4:12])


def test_a_piece_of_a_sequence_has_its_part_of_the_mask() -> None:
    whole = rowed([SequencePiece.whole(7, 9)], ones(1, 9, 5))
    part = rowed([SequencePiece(3, 8, 0, 4), SequencePiece(7, 9, 1, 3)], ones(1, 12, 5))
    assert torch.equal(part[0, 8:], whole[0, [1, 2, 6, 7]])


def test_a_dropout_of_other_tokens_than_those_of_the_row_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a: a dropout's input must be \[1, tokens, ...\] of the 9 tokens"):
        rowed([SequencePiece.whole(7, 9)], ones(1, 4, 10, 10))


def test_a_mask_takes_three_integers_an_element_also_after_a_graph_that_failed(compiler: None) -> None:
    """From then on Python keeps a function's arguments alive until it returns (torch 2.13 leaves its hook)."""

    def failing(graph: object, inputs: object) -> None:
        raise RuntimeError("no code")

    with pytest.raises(Exception, match="no code"):
        torch.compile(lambda x: x + 1, backend=failing, fullgraph=True)(torch.ones(1))
    with LiveBytes() as live:
        kept([1, 2], (64, 32), (0, 0), 0.5, CPU.device)
    assert live.most <= 3.1 * 8 * 2 * 64 * 32
