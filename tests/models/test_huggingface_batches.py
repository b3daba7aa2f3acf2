"""Models of transformers train on the batches of transformers' collators as plain transformers does."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import elasticd
from elasticd.models import next_token_loss
from elasticd.models.huggingface import their_name
from elasticd.models.huggingface.batches import LAYER_INPUTS, HfBatches
from elasticd.runtime.api.hello import check_batch_format, loss_of
from elasticd.runtime.checking import __main__ as trial
from elasticd.runtime.data.collate import Unlike, pad
from elasticd.runtime.data.options import DataOptions
from elasticd.runtime.data.packing import Packing
from elasticd.runtime.engine.recipe import Recipe
from tests import sizes
from tests.models.chats import VOCABULARY, Chats, tokenizer
from tests.models.families import double_throughout
from tests.models.layouts import BATCH, SEED, Training, furthest, layouts_of, optimizer, plan_of, under
from tests.runtime.test_engine_parity import stage as lanes

transformers = pytest.importorskip("transformers")

LAYERS = 4
PLANS = layouts_of(LAYERS)
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}


def qwen2(**more: Any) -> Any:
    torch.manual_seed(0)
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SIZES | more)).double()


def gpt2() -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=32,
        n_layer=LAYERS,
        n_head=8,
        n_positions=64,
        attn_pdrop=0.0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return transformers.GPT2LMHeadModel(config).double()


def seq2seq(side: str = "right") -> Callable[[Sequence[Any]], Any]:
    return transformers.DataCollatorForSeq2Seq(tokenizer(side), label_pad_token_id=-100)


def language_modeling(side: str = "right") -> Callable[[Sequence[Any]], Any]:
    collate = transformers.DataCollatorForLanguageModeling(tokenizer(side), mlm=False)

    def without_labels(samples: Sequence[Any]) -> Any:  # which it makes of the tokens
        return collate([{k: v for k, v in each.items() if k != "labels"} for each in samples])

    return without_labels


def with_padding(samples: Sequence[Any]) -> Any:
    """DataCollatorWithPadding, with labels that a user makes of the mask."""
    collate = transformers.DataCollatorWithPadding(tokenizer())
    batch = collate([{k: v for k, v in each.items() if k != "labels"} for each in samples])
    batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    return batch


def left_with_positions(samples: Sequence[Any]) -> Any:
    batch = seq2seq("left")(samples)
    batch["position_ids"] = (batch["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    return batch


class Even:
    """Samples of one length, for collators that do not pad."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = torch.randint(3, VOCABULARY, (9,), generator=torch.Generator().manual_seed(index)).tolist()
        return {"input_ids": ids, "labels": [-100] * (index % 4) + ids[index % 4 :]}


COLLATORS: dict[str, Callable[[Sequence[Any]], Any]] = {
    "DataCollatorForSeq2Seq": seq2seq(),
    "DataCollatorForLanguageModeling": language_modeling(),
    "DataCollatorWithPadding": with_padding,
    "left padding": seq2seq("left"),
    "left padding, position_ids": left_with_positions,
    "elasticd's own": pad,
}
MODELS = {"Qwen2": qwen2, "GPT2": gpt2}


@functools.cache
def described_of(kind: str) -> elasticd.Model:
    return elasticd.from_hf(MODELS[kind]())


def plain(model: Any, training: Training, micro_batch: int = 2) -> tuple[list[float], dict[str, Tensor]]:
    """Plain transformers: the model's own loss over micro-batches, divided as the Trainer has it divided."""
    collate = seq2seq() if training.collate is pad else training.collate
    update, sampler, losses = optimizer(model.named_parameters()), training.recipe().sampler, []
    for step in range(training.steps):
        samples = [training.dataset[i] for i in sampler.samples(step)]
        batches = [collate(samples[i : i + micro_batch]) for i in range(0, len(samples), micro_batch)]
        count = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
        update.zero_grad()
        terms = [model(**batch, num_items_in_batch=count).loss for batch in batches]
        sum(terms).backward()  # type: ignore[union-attr]
        update.step()
        losses.append(float(sum(float(term.detach()) for term in terms)))
    return losses, {name: p.detach() for name, p in model.named_parameters()}


def compared(model: Any, training: Training, plan: Any, near: float = 1e-12) -> None:
    expected, found = plain(copy.deepcopy(model), training), under(training, plan)
    assert found[0] == pytest.approx(expected[0], abs=near)
    names = {full: their_name(training.model, full) for full in found[1]}
    assert furthest(found, expected, names) < (near, "")


@pytest.mark.parametrize(
    ("kind", "collator", "layout"),
    sizes.beside(
        [
            ("Qwen2", "DataCollatorForSeq2Seq", "tp3 uneven beside a pipeline"),
            ("Qwen2", "left padding", "tp1 to tp4 and back"),
            ("GPT2", "left padding, position_ids", "replicas"),
        ],
        [
            (kind, collator, layout)
            for kind in MODELS
            for collator in COLLATORS
            for layout in PLANS
            if (kind, collator) != ("GPT2", "left padding")  # refused
        ],
    ),
)
def test_batches_of_collators_train_as_in_plain_transformers(
    kind: str, collator: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    double_throughout(monkeypatch)
    model, described = MODELS[kind](), described_of(kind)
    training = Training(
        model=described, loss=loss_of(described, None), dataset=Chats(), collate=COLLATORS[collator]
    )
    compared(model, training, PLANS[layout])


#: Two lanes of one pipeline: a row of one holds 8 tokens, and most sequences have more.
LANES = plan_of(((4, 4), [lanes(0, LAYERS, ("a/0", 1), ("a/1", 1), lanes=(1, 1))]))


@pytest.mark.parametrize("packing", [Packing(tokens=40, cut=False), Packing(tokens=8, least=1)])
def test_packed_chats_train_on_answers_alone_as_each_sequence_by_itself(
    packing: Packing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sequence that is cut over lanes needs the label of a token that another lane has."""
    double_throughout(monkeypatch)
    model, described = qwen2(), described_of("Qwen2")
    training = Training(model=described, loss=loss_of(described, None), dataset=Chats(), packing=packing)
    compared(model, training, LANES if packing.cut else PLANS["tp3 uneven beside a pipeline"])


def test_a_sequence_that_is_cut_has_the_next_tokens_label_on_another_lane() -> None:
    """Guards the test above: most sequences are cut there."""
    described = described_of("Qwen2")
    training = Training(
        model=described, loss=next_token_loss, dataset=Chats(), packing=Packing(tokens=8, least=1)
    )
    dealt = training.recipe().feed.dealing(LANES, 0)()
    pieces = [piece for row in dealt.pipelines[0] for lane in row.lanes for piece in lane]
    assert sum(piece.tokens < piece.length for piece in pieces) >= 8


# -- what is refused, and what is read ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def described() -> elasticd.Model:
    return described_of("Qwen2")


@pytest.fixture
def reads(described: elasticd.Model) -> HfBatches:
    assert isinstance(described.reads, HfBatches)
    return described.reads


def recipe(described: elasticd.Model, dataset: Any, **data: Any) -> Recipe:
    return Recipe(
        model=described,
        loss=loss_of(described, None),
        optimizer=optimizer,
        dataset=dataset,
        global_batch=BATCH,
        seed=SEED,
        data=DataOptions(**data),
    )


def test_labels_are_shifted_as_the_model_does_it(reads: HfBatches) -> None:
    batch = reads.batch({"input_ids": torch.tensor([[5, 6, 7]]), "labels": torch.tensor([[5, -100, 7]])})
    assert batch["shift_labels"].tolist() == [[-100, 7, -100]]
    given = {"input_ids": torch.tensor([[5, 6]]), "shift_labels": torch.tensor([[6, 9]])}
    assert reads.batch(given)["shift_labels"].tolist() == [[6, 9]]


def test_a_mask_of_padding_at_the_end_passes_to_no_layer(reads: HfBatches) -> None:
    batch = seq2seq()([Chats()[0], Chats()[4]])
    assert 0 in batch["attention_mask"]
    assert LAYER_INPUTS not in reads.batch(batch)


def test_a_mask_that_leaves_out_a_token_with_a_label_passes_to_every_layer(reads: HfBatches) -> None:
    batch = seq2seq()([Chats()[0], Chats()[4]])
    batch["labels"] = batch["input_ids"]
    assert list(reads.batch(batch)[LAYER_INPUTS]) == ["attention_mask"]
    assert list(reads.batch(left_with_positions([Chats()[0], Chats()[4]]))[LAYER_INPUTS]) == [
        "attention_mask",
        "position_ids",
    ]


def test_positions_that_are_counted_from_0_pass_to_no_layer(reads: HfBatches) -> None:
    ids = torch.tensor([[5, 6, 7], [5, 6, 0]])
    given = {"input_ids": ids, "position_ids": torch.tensor([[0, 1, 2], [0, 1, 1]])}
    assert LAYER_INPUTS in reads.batch(given)
    given["attention_mask"] = torch.tensor([[1, 1, 1], [1, 1, 0]])
    assert LAYER_INPUTS not in reads.batch(given)


@pytest.mark.parametrize(
    ("batch", "why"),
    [
        ((torch.ones(1, 3),), "is a mapping with input_ids"),
        ({"ids": torch.ones(1, 3)}, "there are no input_ids; the keys are ids"),
        ({"input_ids": [[1, 2]]}, "let the collator return tensors"),
        (
            {"input_ids": torch.ones(1, 3), "inputs_embeds": torch.ones(1, 3, 4)},
            "inputs_embeds, which the forward",
        ),
        ({"input_ids": torch.ones(1, 3), "attention_mask": torch.ones(1, 1, 3, 3)}, "must have the shape"),
    ],
)
def test_a_batch_that_no_stage_can_take_is_refused_by_its_key(reads: HfBatches, batch: Any, why: str) -> None:
    with pytest.raises(Unlike, match=why):
        reads.batch(batch)


def test_padding_at_the_begin_is_refused_where_only_the_activation_passes(
    described: elasticd.Model, reads: HfBatches
) -> None:
    batch = seq2seq("left")([Chats()[0], Chats()[4]])
    with pytest.raises(Unlike, match=r"sequence parallelism .*tokenizer.padding_side = 'right'"):
        reads.alone().batch(batch)
    bloom = transformers.BloomForCausalLM(
        transformers.BloomConfig(
            vocab_size=41, hidden_size=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2
        )
    )
    refused = elasticd.from_hf(bloom).reads
    assert refused is not None
    with pytest.raises(Unlike, match=r"tokenizer.padding_side = .right."):
        refused.batch(batch)


@pytest.mark.parametrize(
    ("sample", "why"),
    [
        ({"input_ids": [1, 2, 3], "attention_mask": [0, 1, 1]}, "packed sequences need no padding"),
        ({"input_ids": [1, 2, 3], "position_ids": [4, 5, 6]}, "counted from 0 in each packed sequence"),
        ({"words": "a b"}, "there are no input_ids"),
    ],
)
def test_a_sample_that_goes_into_no_packed_row_is_refused(reads: HfBatches, sample: Any, why: str) -> None:
    with pytest.raises(Unlike, match=why):
        reads.row(sample)


def test_text_and_numbers_of_a_sample_stay_out_of_a_packed_row(reads: HfBatches) -> None:
    row = reads.row(Chats(prompt="hello", source="web", number=3)[0])
    assert set(row) == {"input_ids", "labels", "shift_labels"}


def test_text_that_a_collator_cannot_batch_is_named_when_the_job_is_made(described: elasticd.Model) -> None:
    dataset = Chats(prompt="hello", turns=["a", "b"])
    with pytest.raises(ValueError, match=r"text under prompt, turns.*remove_columns\(\['prompt', 'turns'\]\)"):
        check_batch_format(recipe(described, dataset, collate=seq2seq()))
    check_batch_format(recipe(described, dataset))  # elasticd's own collate leaves it out


def test_a_batch_without_labels_is_refused_when_the_job_is_made(described: elasticd.Model) -> None:
    without = transformers.DataCollatorWithPadding(tokenizer())
    dataset = [{k: v for k, v in each.items() if k != "labels"} for each in Chats(4)]
    with pytest.raises(ValueError, match="needs labels, and a batch has input_ids, attention_mask"):
        check_batch_format(recipe(described, dataset, collate=without))


def test_the_tokens_of_samples_that_a_collator_makes_are_counted_in_its_batch(
    described: elasticd.Model,
) -> None:
    words = ["w3 w4 w5", "w3 w4 w5 w6 w7"] * 8

    def collate(texts: Sequence[str]) -> Any:
        ids = [[int(word[1:]) for word in text.split()] for text in texts]
        return tokenizer().pad({"input_ids": ids, "labels": ids}, return_tensors="pt")

    made = recipe(described, [words[0]] * 16, collate=collate)
    assert made.tokens == 3
    check_batch_format(made)


def test_a_model_whose_loss_is_its_own_needs_a_loss_from_the_job() -> None:
    model = qwen2()
    model.loss_function = lambda *_, **__: None
    with pytest.raises(ValueError, match=r"the job has no loss.*Give Job\(loss=...\)"):
        loss_of(elasticd.from_hf(model), None)


def test_a_model_that_shifts_no_labels_is_read_so() -> None:
    config = transformers.BartConfig(
        vocab_size=41,
        d_model=32,
        decoder_layers=2,
        decoder_ffn_dim=44,
        decoder_attention_heads=4,
        is_decoder=True,
        is_encoder_decoder=False,
        dropout=0.0,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=2,
        forced_eos_token_id=None,
    )
    model = transformers.BartForCausalLM(config).double()
    described = elasticd.from_hf(model)
    ids = torch.tensor([[5, 6, 7, 8]])
    assert described.reads is not None
    batch = described.reads.batch({"input_ids": ids, "labels": ids})
    total, count = loss_of(described, None)(model(input_ids=ids).logits, batch)
    assert float(total / count) == pytest.approx(float(model(input_ids=ids, labels=ids).loss), rel=1e-6)


def test_columns_of_a_dataset_of_datasets_train(
    described: elasticd.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets")
    double_throughout(monkeypatch)
    dataset = datasets.Dataset.from_list(list(Chats(prompt="hello"))).remove_columns(["prompt"])
    training = Training(model=described, loss=loss_of(described, None), dataset=dataset, collate=seq2seq())
    compared(qwen2(), training, PLANS["replicas"])


def words_to_batch(texts: Sequence[str]) -> Any:
    ids = [[int(word[1:]) for word in text.split()] for text in texts]
    return tokenizer().pad({"input_ids": ids, "labels": ids}, return_tensors="pt")


@pytest.mark.parametrize(
    ("dataset", "collate"), [(Chats(), seq2seq()), (["w3 w4 w5 w6 w7 w8 w9"] * 16, words_to_batch)]
)
def test_check_tries_packed_rows_with_the_jobs_collate(
    described: elasticd.Model, dataset: Any, collate: Any
) -> None:
    lines: list[str] = []
    assert trial.compared(recipe(described, dataset, collate=collate), lines.append)
    assert "ok    packed rows: each sequence by itself" in lines
    assert not any("not tried" in line for line in lines)


def test_check_says_once_that_packed_rows_were_not_tried(
    described: elasticd.Model, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: Any) -> Any:
        raise RuntimeError("of another device")

    lines: list[str] = []
    made = recipe(described, Chats(), collate=seq2seq())
    monkeypatch.setattr("elasticd.runtime.parallel.sequence_mixing._watched", fails)
    assert trial.compared(made, lines.append)
    (said,) = [line for line in lines if "packed rows" in line]
    assert said == "note  not tried: packed rows (embed: RuntimeError: of another device)"
    assert "packed" not in caplog.text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"input_ids": [401, 3]},
            r"input_ids has 401, and Qwen2ForCausalLM has \d+ tokens: .*resize_token_embeddings",
        ),
        ({"labels": [3, 401]}, r"labels has 401, and Qwen2ForCausalLM has \d+ tokens"),
        ({"labels": [3]}, r"labels \[2, 1\] are not of the shape of input_ids, \[2, 2\]"),
        ({"labels": None}, "needs labels, and a batch has input_ids: "),
    ],
    ids=["token", "label", "shape", "none"],
)
def test_what_the_model_does_not_have_is_named_before_the_job_starts(change: Any, message: str) -> None:
    sample = {"input_ids": [1, 3], "labels": [1, 3]} | change
    asked = recipe(elasticd.from_hf(qwen2()), [sample, sample])
    with pytest.raises(ValueError, match=message):
        check_batch_format(asked)


def test_labels_of_another_loss_may_be_anything() -> None:
    sample = {"input_ids": [1, 3], "labels": 4000}
    described = elasticd.from_hf(qwen2())
    other = dataclasses.replace(recipe(described, [sample, sample]), loss=next_token_loss)
    check_batch_format(other)
    with pytest.raises(ValueError, match=r"labels \[2\] are not of the shape of input_ids"):
        check_batch_format(recipe(described, [sample, sample]))


def test_the_sample_that_is_wrong_is_named() -> None:
    described = elasticd.from_hf(qwen2())
    assert described.reads is not None
    ids = torch.tensor([[1, 2], [3, 500], [500, 1]])
    with pytest.raises(Unlike, match="input_ids has 500") as caught:
        described.reads.batch({"input_ids": ids})
    assert caught.value.place == 1


def test_padding_at_the_begin_is_refused_where_it_moves_positions_and_taken_with_position_ids() -> None:
    described = elasticd.from_hf(gpt2())
    reads = described.reads
    assert isinstance(reads, HfBatches)
    ids, mask = torch.tensor([[0, 5, 6], [7, 8, 9]]), torch.tensor([[0, 1, 1], [1, 1, 1]])
    batch = {"input_ids": ids, "labels": ids.masked_fill(mask == 0, -100), "attention_mask": mask}
    with pytest.raises(Unlike, match=r"padding at the begin of a sample moves its tokens .* GPT2LMHeadModel"):
        reads.batch(batch)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    assert reads.batch(batch | {"position_ids": positions})[LAYER_INPUTS].keys() == {
        "attention_mask",
        "position_ids",
    }
    rotary = elasticd.from_hf(qwen2()).reads
    assert rotary is not None
    assert LAYER_INPUTS in rotary.batch(batch)


def test_samples_longer_than_the_table_of_positions_are_refused() -> None:
    reads = elasticd.from_hf(gpt2()).reads
    assert reads is not None
    with pytest.raises(Unlike, match="65 tokens, and GPT2LMHeadModel has 64 positions"):
        reads.batch({"input_ids": torch.ones(1, 65, dtype=torch.long)})
    longer = elasticd.from_hf(qwen2()).reads
    assert longer is not None
    longer.batch({"input_ids": torch.ones(1, 65, dtype=torch.long)})  # rotary
