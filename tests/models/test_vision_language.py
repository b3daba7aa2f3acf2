"""Vision-language models of transformers, split in two modules, give what they give in one piece."""

from __future__ import annotations

import copy
import dataclasses
import re
from typing import Any

import pytest
import torch
from elasticd_planner.spec.batch import SequencePiece

import elasticd
from elasticd.models.huggingface import split as splitting
from elasticd.models.huggingface.encoder import image_of
from elasticd.models.huggingface.image_batches import HfImageBatches, sample_of
from elasticd.models.huggingface.model_limits import limits_of
from elasticd.models.huggingface.split import split_model
from elasticd.models.huggingface.vision_language import (
    IMAGES,
    HfModule,
    Seam,
    flat,
    modules_of,
    nested,
    parameters_of,
)
from elasticd.models.huggingface.vision_language_model import _reads
from elasticd.models.huggingface.vision_language_proof import (
    Chain,
    ImageSample,
    compared_modules,
    joined_items,
    row_of_samples,
    samples_of,
    why_unpackable,
)
from elasticd.runtime.data.packing import pack
from elasticd.runtime.model import bundle as bundles
from elasticd.runtime.model.model import ModelError
from elasticd.runtime.parallel.packed_row import PackedRow, passing
from elasticd.runtime.reference.comparison import difference
from tests import sizes
from tests.models.double import DoubleThroughout

transformers = pytest.importorskip("transformers")
vision_language = pytest.importorskip("tests.models.vision_language")
made = vision_language.made


def copied(modules: dict[str, HfModule]) -> dict[str, HfModule]:
    """The modules as devices have them: copies of the sections, with the parameters of the model."""
    memo = {id(parameter): parameter for _, parameter in parameters_of(modules)}
    return {
        name: dataclasses.replace(
            module,
            embed=copy.deepcopy(module.embed, memo),
            blocks=[copy.deepcopy(block, memo) for block in module.blocks],
            head=copy.deepcopy(module.head, memo),
        )
        for name, module in modules.items()
    }


@pytest.mark.parametrize("name", sizes.beside(vision_language.MODELS[:-1], vision_language.MODELS))
def test_logits_and_gradients_are_those_of_the_whole_model(name: str) -> None:
    """Of samples with two images, none, one and three."""
    model = made(name)
    with DoubleThroughout():
        samples, seam, anatomy = samples_of(model)
        assert [len(sample.images) for sample in samples] == [2, 0, 1, 3]
        apart, _ = compared_modules(model, samples, seam, anatomy, copied(modules_of(model, anatomy, seam)))
    assert apart < 1e-12


def test_images_by_sample_are_taken_one_by_one() -> None:
    """The encoders of Idefics are called with [samples, images, ...], and find padding by its values."""
    model = made("Idefics3")
    with DoubleThroughout():
        split = split_model(model)
    assert split.apart < 1e-12
    assert split.proof.one_block == "it takes images by sample"
    pixels = torch.randn(1, 2, 3, 8, 8)
    mask = torch.ones(1, 2, 8, 8, dtype=torch.long)
    encoded = {"input_ids": torch.tensor([[5, 6]]), "pixel_values": pixels, "pixel_attention_mask": mask}
    images = sample_of(encoded)[IMAGES]
    assert [tuple(x.shape) for x in images[1].values()] == [(1, 3, 8, 8), (1, 8, 8)]
    again = image_of({name: x[None] for name, x in images[1].items()})
    assert all(torch.equal(again[name], x) for name, x in images[1].items())


@pytest.mark.parametrize("name", sizes.beside(["Qwen3VL"], vision_language.MODELS))
def test_every_parameter_is_in_one_module_and_has_its_name_in_the_model(name: str) -> None:
    model = made(name)
    split = split_model(model)
    named = dict(model.named_parameters(remove_duplicate=False))
    theirs = [split.their_name(full) for full, _ in parameters_of(split.modules)]
    assert sorted(theirs) == sorted(named)
    assert all(named[split.their_name(full)] is each for full, each in parameters_of(split.modules))
    assert (split.modules["vision"].items, split.modules["language"].takes) == (IMAGES, {IMAGES: "vision"})


def test_layers_that_no_image_reaches_are_frozen_by_name() -> None:
    """LLaVA takes the output of the encoder's last layer but one."""
    model = made("Llava", depth=6)
    split = split_model(model)
    names = {split.their_name(name).removeprefix("model.vision_tower.") for name in split.frozen}
    assert {name for name in names if not name.startswith("encoder.layers.5.")} == {
        "post_layernorm.weight",
        "post_layernorm.bias",
    }
    assert len(names) == 18
    assert "never used, and frozen: model.vision_tower.encoder.layers.5.*" in split.proved
    assert not model.model.vision_tower.encoder.layers[5].mlp.fc1.weight.requires_grad


def test_parameters_are_frozen_by_patterns(monkeypatch: pytest.MonkeyPatch) -> None:
    split = split_model(made("Qwen3VL"), frozen=["vision.*", "language.embed.*"])
    monkeypatch.setattr(splitting, "prove_modules", lambda *_: split.proof)  # of the same model
    trained = {name for name, parameter in parameters_of(split.modules) if parameter.requires_grad}
    assert not [name for name in trained if not name.startswith(("language.blocks.", "language.head."))]
    assert "language.head.norm.weight" in trained
    with pytest.raises(
        ModelError, match=r"frozen = 'visual\.\*' names no parameter: .* vision\. or language\."
    ):
        split_model(made("Qwen3VL"), frozen=["visual.*"])
    with pytest.raises(ModelError, match=r"all parameters of Qwen3VL.* are frozen"):
        split_model(made("Qwen3VL"), frozen=["*"])


def test_the_proof_holds_with_the_models_own_islands_of_single_precision() -> None:
    assert "0 to 3 images a sample within" in split_model(made("Gemma3")).proved


def test_what_is_added_between_layers_would_be_missed() -> None:
    """The comparison sees it where DeepStack's rows are lost."""
    model = made("Qwen3VL")
    samples, seam, anatomy = samples_of(model)
    assert "deep1" in vision_language.rows_of(modules_of(model, anatomy, seam)["vision"], samples[0].images[0])
    modules = modules_of(model, anatomy, seam)
    modules["language"].embed.register_forward_hook(
        lambda module, args, output: {n: x * 0.99 if "deepstack" in n else x for n, x in output.items()}
    )
    with pytest.raises(ModelError, match=r"logits of Qwen3VL.* with 2 images are .* off in its modules"):
        compared_modules(model, samples, seam, anatomy, modules)


def test_images_without_as_many_tokens_are_the_models_own_error() -> None:
    model = made("Llava")
    samples, seam, anatomy = samples_of(model)
    modules, sample = modules_of(model, anatomy, seam), samples[0]
    rows = vision_language.rows_of(modules["vision"], sample.images[0])  # one of two
    with pytest.raises(Exception, match="Image features and image tokens do not match"):
        modules["language"].embed({"input_ids": sample.ids, IMAGES: rows})


def test_grids_of_padded_samples_are_those_of_the_images() -> None:
    """A collator pads `image_grid_thw` [samples, images, 3] where samples have unlike numbers of images."""
    model = made("Qwen2_5_VL")
    samples, seam, anatomy = samples_of(model)
    modules, (two, one) = modules_of(model, anatomy, seam), (samples[0], samples[2])
    tokens = max(two.ids.shape[1], one.ids.shape[1])
    ids = torch.cat([torch.nn.functional.pad(each.ids, (0, tokens - each.ids.shape[1])) for each in (two, one)])
    grids = torch.zeros(2, 2, 3, dtype=torch.long)
    grids[0], grids[1, :1] = two.beside["image_grid_thw"], one.beside["image_grid_thw"]
    images = [vision_language.rows_of(modules["vision"], image) for image in (*two.images, *one.images)]
    rows = {"rows": torch.cat([each["rows"] for each in images])}
    found = modules["language"].embed({"input_ids": ids, IMAGES: rows, "image_grid_thw": grids})
    alone = [_embedded(modules, sample) for sample in (two, one)]
    for index, each in enumerate(alone):
        width = each["position_ids"].shape[-1]
        assert torch.equal(found["position_ids"][:, index, :width], each["position_ids"][:, 0])
        assert torch.equal(found["hidden"][index, :width], each["hidden"][0])


def _embedded(modules: dict[str, HfModule], sample: ImageSample) -> Any:
    rows = torch.cat([vision_language.rows_of(modules["vision"], image)["rows"] for image in sample.images])
    return modules["language"].embed({"input_ids": sample.ids, IMAGES: rows, **sample.beside})


@pytest.mark.parametrize("name", ["Llava", "Qwen3VL"])
def test_the_modules_are_those_of_a_model_of_several(name: str) -> None:
    """An item has a dimension of 1 before its own; the vision module gives [1, rows, width]."""
    split = split_model(made(name))
    item = samples_of(made(name))[0][2].images[0]
    x: Any = {key: value if name == "Llava" else value[None] for key, value in item.items()}
    for _, section in split.modules["vision"]:
        x = section(x)
    assert all(each.dim() == 3 and each.shape[0] == 1 for each in x.values())
    modules = {
        key: elasticd.Module(
            **{each: getattr(module, each) for each in ("embed", "blocks", "head", "width", "rules", "units")},
            items=module.items,
            takes=module.takes,
        )
        for key, module in split.modules.items()
    }
    assert elasticd.Model(modules=modules) is not None


def test_what_would_reach_no_section_is_refused_by_name() -> None:
    model = made("Qwen3VL")
    samples, seam, anatomy = samples_of(model)
    embed = modules_of(model, anatomy, seam)["language"].embed
    for name in ("pixel_values", "pixel_values_videos", "inputs_embeds"):
        with pytest.raises(ModelError, match=rf"^{name}, which the forward of Qwen3VL.* reaches no section"):
            embed({"input_ids": samples[1].ids, name: torch.zeros(1)})


#: Models whose samples are packed in one row.
PACKED = ("Qwen3VL", "Qwen2_5_VL", "Llava", "InternVL")


@pytest.mark.parametrize("name", sizes.beside(PACKED[:3], PACKED))
def test_samples_packed_in_one_row_give_what_each_gives_alone(name: str) -> None:
    """Logits and gradients of samples with two images, none, one and three."""
    model = made(name)
    with DoubleThroughout():
        samples, seam, anatomy = samples_of(model)
        modules, whole = copied(modules_of(model, anatomy, seam)), copy.deepcopy(model)
        own = torch.cat([whole(**sample.whole()).logits for sample in samples], 1)
        weights = torch.randn(own.shape, generator=torch.Generator().manual_seed(1), dtype=own.dtype)
        (own * weights).sum().backward()
        batch, row = row_of_samples(model, samples, seam)
        items = [Chain(modules["vision"], image) for each in samples for image in each.images]
        leaves: Any = [bundles.entering(item.output) for item in items]
        with passing(row):
            language = Chain(modules["language"], batch | {IMAGES: joined_items(leaves)})
            language.backward(weights)
        for item, each in zip(items, leaves, strict=True):
            item.backward(bundles.gradients(each))
    assert difference(language.output, own) < 1e-12
    theirs = dict(whole.named_parameters())
    largest = max(float(each.grad.abs().max()) for each in theirs.values() if each.grad is not None)
    for full, parameter in model.named_parameters():
        expected = theirs[full].grad
        assert (parameter.grad is None) == (expected is None), full
        if expected is not None:
            assert float((parameter.grad - expected).abs().max()) < 1e-12 * largest, full


@pytest.mark.parametrize("name", ["Qwen3VL", "Llava"])
def test_pieces_of_samples_take_their_entries_of_all_that_is_made_of_the_samples(name: str) -> None:
    """Rows of images go to the tokens that stand for them, whichever piece has these."""
    model = made(name)
    split, (samples, _, _) = split_model(model), samples_of(model)
    reads = _reads(model, split, limits_of(model))
    language, vision = split.modules["language"], split.modules["vision"]
    rows, images = [], []
    for sample in samples:
        grids = {each: sample.beside[each] for each in ("image_grid_thw",) if each in sample.beside}
        rows.append(reads.row({"input_ids": sample.ids[0], **grids}))
        images.append(joined_items([Chain(vision, image).output for image in sample.images]))
    pieces = [SequencePiece.whole(place, len(row["input_ids"])) for place, row in enumerate(rows)]
    whole = embedded_row(language, reads, rows, images, pieces)
    (long, *rest), three = pieces, pieces[3]
    lanes = (
        [long._replace(stop=3), rest[1], three._replace(start=4)],
        [three._replace(stop=4), long._replace(start=3), rest[0]],
    )
    covered = set[int]()
    starts = [sum(piece.length for piece in pieces[:place]) for place in range(len(pieces))]
    for lane in lanes:
        tokens = [starts[each.sample] + token for each in lane for span in each.spans for token in range(*span)]
        found = embedded_row(language, reads, rows, images, lane)
        assert found.keys() == whole.keys()
        for path, tensor in whole.items():
            if path.startswith("deepstack_visual_embeds"):  # of the tokens of images alone
                mask = whole["visual_pos_masks"][0]
                expected = tensor[[int(mask[:token].sum()) for token in tokens if mask[token]]]
            else:
                expected = tensor[..., tokens, :] if path == "hidden" else tensor[..., tokens]
            assert torch.equal(found[path], expected), path
        covered.update(tokens)
    assert covered == set(range(sum(piece.length for piece in pieces)))


def embedded_row(
    language: HfModule,
    reads: HfImageBatches,
    rows: list[dict[str, Any]],
    images: list[dict[str, Any] | None],
    pieces: list[SequencePiece],
) -> dict[str, Any]:
    """The embedding of a packed row of pieces, each with the rows of images that its tokens stand for."""
    taken = []
    for piece in pieces:
        places = reads.item_places(rows[piece.sample])[IMAGES]
        before = [0, *places.cumsum(0).tolist()]
        for start, stop in piece.spans:
            if (of := images[piece.sample]) is not None and before[stop] > before[start]:
                taken.append({name: x[before[start] : before[stop]] for name, x in of.items()})
    batch = pack([rows[piece.sample] for piece in pieces], pieces)
    given = {name: torch.cat([each[name] for each in taken]) for name in taken[0]}
    with torch.no_grad(), passing(PackedRow(pieces, torch.device("cpu"))):
        found: dict[str, Any] = language.embed(batch | {IMAGES: given})
    return found


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("Gemma3", "tokens of an image attend to later ones, and elasticd.attention is causal"),
        ("Qwen3_5", "the logits of a packed row are .* off"),
    ],
)
def test_models_whose_samples_cannot_be_packed_say_why(name: str, why: str) -> None:
    model = made(name)
    samples, seam, anatomy = samples_of(model)
    refused = why_unpackable(model, samples, seam, anatomy)
    assert re.fullmatch(f"samples of {name}.* can be padded, not packed in one row: {why}", refused)


@pytest.mark.parametrize("name", sizes.beside(["Mistral3", "PaliGemma"], ["Mistral3", "PaliGemma", "Glm4v"]))
def test_classes_are_in_the_docs_with_what_becomes_of_them(name: str) -> None:
    families = pytest.importorskip("tests.models.vision_families")
    known = families.rows()
    assert set(known) == set(families.classes())
    full = f"{name}ForConditionalGeneration"
    assert families.row(full) == known[full]


def test_a_model_without_the_seam_is_refused() -> None:
    with torch.device("meta"):
        model = transformers.Blip2ForConditionalGeneration(transformers.Blip2Config())
    with pytest.raises(
        ModelError, match=r"Blip2ForConditionalGeneration has no model inside that takes its enc"
    ):
        split_model(model)


def test_dropouts_of_functions_are_refused_by_name() -> None:
    model = made("Llava")
    model.config.vision_config.attention_dropout = 0.1
    with pytest.raises(
        ModelError, match=r"^vision_config/attention_dropout = 0.1 of Llava.* is drawn inside its fun"
    ):
        split_model(model)


def test_samples_that_act_on_each_other_are_refused() -> None:
    class Acting(transformers.LlavaForConditionalGeneration):  # type: ignore[misc, name-defined]
        """Each sample's logits have those of the others in them."""

        def forward(self, input_ids: Any = None, **kwargs: Any) -> Any:
            output = super().forward(input_ids=input_ids, **kwargs)
            output.logits = output.logits - output.logits.mean(0, keepdim=True) / 2
            return output

    model = made("Llava")
    acting = Acting(model.config).double().train()
    with pytest.raises(ModelError, match="what Acting gives for a sample depends on the others of the micro-b"):
        split_model(acting)


def test_the_width_of_an_encoder_is_that_of_its_activation() -> None:
    """Qwen2-VL's configuration calls it embed_dim, and the language model's hidden_size."""
    config = vision_language.made("Qwen2VL").config
    config.vision_config.embed_dim, config.vision_config.num_heads = 32, 2
    assert config.vision_config.hidden_size != 32
    with torch.device("meta"):
        model = transformers.Qwen2VLForConditionalGeneration(config)
    modules = split_model(model).modules
    assert modules["vision"].width == 32
    assert modules["language"].width == config.text_config.hidden_size


@pytest.mark.parametrize(
    ("path", "name"), [("model", "Llava"), ("model.vision_tower.encoder", "Llava"), ("model.visual", "Qwen3VL")]
)
def test_hooks_on_what_every_section_copies_are_refused(path: str, name: str) -> None:
    model = made(name)
    model.get_submodule(path).register_forward_hook(lambda *_: None)
    with pytest.raises(ModelError, match=rf"^{path} has hooks, which no stage could run"):
        split_model(model)


@pytest.mark.parametrize(
    ("path", "method"), [("model", "get_image_features"), ("model.vision_tower", "forward")]
)
def test_a_method_that_is_replaced_on_what_every_section_copies_is_refused(path: str, method: str) -> None:
    model = made("Llava")
    outer = model.get_submodule(path)
    setattr(outer, method, getattr(outer, method))
    with pytest.raises(ModelError, match=rf"^the {method} of {path} is replaced on the instance"):
        split_model(model)


TOWERS = {"None": lambda: None, "another": lambda: torch.nn.Linear(2, 2), "deleted": None}


@pytest.mark.parametrize("tower", TOWERS)
@pytest.mark.parametrize(("name", "path"), [("Qwen3VL", "visual"), ("Llava", "multi_modal_projector")])
def test_a_model_with_another_encoder_than_its_configuration_makes_is_refused(
    tower: str, name: str, path: str
) -> None:
    model, make = made(name), TOWERS[tower]
    if make is None:
        delattr(model.model, path)
    else:
        setattr(model.model, path, make())
    with pytest.raises(ModelError, match=rf"^model\.{path} of {name}.* is not what its configuration makes"):
        split_model(model)


def test_a_padded_micro_batch_gives_what_its_samples_give_by_themselves() -> None:
    model = made("Gemma3")
    with DoubleThroughout(), torch.no_grad():
        samples, seam, anatomy = samples_of(model)
        modules = modules_of(model, anatomy, seam)
        given = [{"input_ids": each.ids, "token_type_ids": each.beside["token_type_ids"]} for each in samples]
        padded = {
            name: torch.nn.utils.rnn.pad_sequence([each[name][0] for each in given], batch_first=True)
            for name in given[0]
        }
        items = [
            vision_language.rows_of(modules["vision"], image)["rows"]
            for each in samples
            for image in each.images
        ]
        x: Any = {**padded, IMAGES: torch.cat(items)}
        for _, section in modules["language"]:
            x = section(x)
        for row, sample in zip(x, samples, strict=True):
            own = model(**sample.whole(), use_cache=False).logits[0]
            assert float((row[: len(own)] - own).abs().max()) < 1e-12 * float(own.abs().max())


def test_a_model_on_the_meta_device_begins_by_its_own_init() -> None:
    with torch.device("meta"):
        model = transformers.LlavaForConditionalGeneration(made("Llava").config)
    split = split_model(model)
    init = split.init["vision"]
    assert init is not None
    name = "blocks.0.layer.mlp.fc1.weight"
    shape = dict(split.modules["vision"].blocks[0].named_parameters())[name.removeprefix("blocks.0.")].shape
    assert 0 < float(init(name, tuple(shape), torch.Generator().manual_seed(1)).std()) < 1


def test_arguments_are_put_together_as_they_were() -> None:
    x, y, z = (torch.tensor(float(i)) for i in range(3))
    given = {"a": x, "masks": {"full": y, "sliding": z}, "deep": [y, z], "cache": False, "none": None}
    assert nested(dict(flat(given))) == {name: given[name] for name in ("a", "masks", "deep")}


def test_the_seam_is_found_where_the_model_has_it() -> None:
    _, seam, anatomy = samples_of(made("Qwen3VL"))
    assert isinstance(seam, Seam)
    assert (seam.base, seam.language, seam.listed) == ("model", "model.language_model", True)
    assert anatomy.end == "model.language_model.norm"


def test_a_mask_that_some_layers_need_and_others_do_not_is_theirs_alone() -> None:
    """Under sdpa layers without a window get no mask, once samples are as long as the window of the others."""
    config = vision_language.made("Gemma3").config
    config._attn_implementation = "sdpa"
    model = transformers.Gemma3ForConditionalGeneration(config).double().train()
    with torch.no_grad():
        samples, seam, anatomy = samples_of(model)
        longest = max(each.ids.shape[1] for each in samples)
        assert longest > config.text_config.sliding_window
        ids = torch.randint(2, 20, (1, longest))
        module = modules_of(model, anatomy, seam)["language"]
        found = Chain(module, {"input_ids": ids, "images": None}).output
        own = model(input_ids=ids, use_cache=False).logits
    assert isinstance(found, torch.Tensor)
    assert difference(found, own) < 1e-5
