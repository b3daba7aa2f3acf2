"""Samples of texts with images for small vision-language models of transformers, and what plain torch computes
of them with the whole model in one process."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from elasticd.models.huggingface.anatomy import arguments
from elasticd.models.huggingface.batches import shifted
from elasticd.models.huggingface.encoder import features_of
from elasticd.models.huggingface.image_batches import sample_of
from elasticd.models.huggingface.small_images import IMAGE_TOKEN, TEXT, images_of
from elasticd.models.huggingface.vision_language import beside_tokens, seam_of
from elasticd.models.huggingface.vision_language_proof import takes_by_sample
from tests.runtime.image_model import Captions


class Pictured:
    """Samples as a processor gives them, each a function of its index; as many images as `Captions` have."""

    def __init__(self, model: Any) -> None:
        inner = model.get_submodule(seam_of(model)[0])
        self.counts = Captions().counts
        self._forms = [item for item, _ in islice(images_of(inner, model.config), 2)]
        self._by_sample = takes_by_sample(inner, self._forms[0])
        with torch.no_grad():
            outputs = [
                features_of(inner, form, by_sample=self._by_sample).pooler_output for form in self._forms
            ]
        each = [x if isinstance(x, Tensor) else torch.cat(list(x)) for x in outputs]
        self._rows = [x.flatten(0, -2).shape[0] for x in each]
        seam: Any = type("Seam", (), {"base": seam_of(model)[0]})
        self._types, self._of_images = beside_tokens(model, seam)

    def __len__(self) -> int:
        return len(self.counts["images"])

    def __getitem__(self, index: int) -> dict[str, Any]:
        return sample_of(self.encoded(index))

    def rows_of(self, image: dict[str, Tensor]) -> int:
        """The rows that the encoder makes of one of the images."""
        kinds = [{name: x.shape for name, x in form.items()} for form in self._forms]
        return self._rows[kinds.index({name: x.shape for name, x in image.items()})]

    def encoded(self, index: int) -> dict[str, Tensor]:
        """What a processor gives of one text with its images."""
        seeds = torch.Generator().manual_seed(index)
        kinds = [int(torch.randint(2, (1,), generator=seeds)) for _ in range(self.counts["images"][index])]
        ids = torch.randint(2, TEXT, (1, 6 + index % 3), generator=seeds)
        for kind in kinds:
            rows = torch.full((1, self._rows[kind]), IMAGE_TOKEN)
            ids = torch.cat((ids[:, :3], rows, torch.full((1, 1), 7), ids[:, 3:]), 1)
        given: dict[str, Tensor] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        given["labels"] = torch.where(ids == IMAGE_TOKEN, -100, ids)
        given |= {name: (ids == IMAGE_TOKEN).long() for name in self._types}
        images = [
            {
                n: torch.randn(x.shape, generator=seeds, dtype=x.dtype) if x.is_floating_point() else x
                for n, x in f.items()
            }
            for f in (self._forms[kind] for kind in kinds)
        ]
        joined = {name: torch.cat([image[name] for image in images]) for name in (images[0] if images else {})}
        return given | {name: x[None] if self._by_sample else x for name, x in joined.items()}

    def whole(self, index: int) -> dict[str, Tensor]:
        """What the whole model's forward is called with."""
        given = self.encoded(index)
        return {name: x for name, x in given.items() if name not in ("labels", "attention_mask")}


def in_one_process(
    model: Any, data: Pictured, steps: Iterable[Sequence[int]], **settings: float
) -> tuple[list[float], dict[str, Tensor]]:
    """Trains a copy of the whole model with AdamW, sample by sample. Returns the losses, and the weights by
    their names in the model."""
    own = copy.deepcopy(model)
    optimizer = torch.optim.AdamW([p for p in own.parameters() if p.requires_grad], **settings)  # type: ignore[arg-type]
    losses = []
    for indices in steps:
        optimizer.zero_grad(set_to_none=True)
        total, count = torch.zeros((), dtype=torch.float64), 0
        for index in indices:
            targets = shifted(data.encoded(index)["labels"])
            logits = own(**data.whole(index), **arguments(own)).logits
            total = total + torch.nn.functional.cross_entropy(logits[0], targets[0], reduction="sum")
            count += int((targets != -100).sum())
        (total / count).backward()
        optimizer.step()
        losses.append(float(total.detach()) / count)
    return losses, {
        name: parameter.detach() for name, parameter in own.named_parameters(remove_duplicate=False)
    }
