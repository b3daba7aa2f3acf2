"""Batches of transformers' collators, as the sections of a model read them.

A batch has `input_ids` (or `inputs`, elasticd's older name), and may have

    labels           compared with the logits as the model's own loss does it, shifted by one token for most;
                     -100 is left out. The sections get them shifted, as `shift_labels`, transformers' own name
                     for that: a packed row, or a part of a sequence, does not have the next token's label
    attention_mask   1 of tokens, 0 of padding
    position_ids     of each token

Padding at the end of a sample reaches no other token, and a mask that says no more than that is left out. Any
other mask, and positions that are not counted from 0, go through all stages beside the activation
(`LAYER_INPUTS`), where the model's own forward takes them in every section. Which of the two a model takes so
is tried on its small copy (`proof`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from elasticd.runtime.data.collate import Unlike, is_text

#: The names of the tokens, the first of which is transformers' own.
IDS = ("input_ids", "inputs")
#: The name of labels that are the targets of the logits at their place.
TARGETS = "shift_labels"
#: What a batch has for every layer beside the activation: tensors by name.
LAYER_INPUTS = "layer_inputs"
#: Targets that the loss leaves out.
IGNORED = -100
#: What may go to every layer.
FOR_LAYERS = ("attention_mask", "position_ids")


@dataclass(frozen=True, kw_only=True)
class HfBatches:
    """Reads the batches of one model: a `BatchFormat`."""

    model: str  #: the name of its class, for messages
    takes: frozenset[str]  #: the parameters of its forward
    shifts: bool  #: whether the target of a token is the next token's label
    #: Of `FOR_LAYERS` those that the model's stages take, by name; of the others why they do not.
    layers: frozenset[str]
    lacks: Mapping[str, str]
    #: Whether positions that are counted from 0 are those that the model takes by itself.
    counts_from_zero: bool = True
    #: Whether padding at the begin of a sample changes what its tokens give, where no positions are given.
    absolute: bool = False
    tokens_known: int | None = None  #: rows of the embedding; None: not looked at
    targets_known: int | None = None  #: logits of a token; None: not looked at
    own_loss: bool = True  #: the model's own loss compares the labels with the logits of each token
    longest: int | None = None  #: tokens of a sample, at most; None: the model has no limit
    beside: frozenset[str] = frozenset()  #: what else the embedding takes of a batch

    def for_other_loss(self) -> HfBatches:
        """Leaves labels to a loss that is not the model's own."""
        return dataclasses.replace(self, own_loss=False, targets_known=None)

    def alone(self) -> HfBatches:
        """Refuses batches that need a mask or positions in every layer."""
        why = "sequence parallelism passes the activation alone"
        return dataclasses.replace(self, layers=frozenset(), lacks=dict.fromkeys(FOR_LAYERS, why))

    def tokens(self, sample: Any) -> int:
        """The tokens of a sample, by its `input_ids`; else by the first part that is no text."""
        if not isinstance(sample, Mapping):
            return 0
        ids = next((sample[name] for name in IDS if name in sample), None)
        parts = [sample[name] for name in sample] if ids is None else [ids]
        tensors = (_tensor(part) for part in parts)
        return next((each.shape[-1] for each in tensors if each is not None and each.dim()), 0)

    def sample(self, sample: Any) -> Any:
        """Lists of numbers as tensors, without text; positions that the model takes by itself are left out."""
        if not isinstance(sample, Mapping):
            return sample
        parts = {
            name: part if (tensor := _tensor(part)) is None else tensor
            for name, part in sample.items()
            if not is_text(part)
        }
        positions = parts.get("position_ids")
        if isinstance(positions, Tensor) and self.counts_from_zero and _counted(positions):
            del parts["position_ids"]
        return parts

    def row(self, sample: Any) -> Any:
        """The parts of a sample that have an entry for each token, labels shifted inside the sample.

        Raises:
            Unlike: it is padded at its begin, or has positions of its own.
        """
        parts = self.sample(sample)
        return self._row(parts) if isinstance(parts, Mapping) else parts

    def _row(self, parts: Mapping[str, Any]) -> dict[str, Tensor]:
        """The row of a sample as `sample` gives it."""
        parts = {name: part for name, part in parts.items() if isinstance(part, Tensor) and part.dim()}
        if not any(name in parts for name in IDS):
            raise Unlike(0, self._no_tokens(parts))
        if self.counts_from_zero and "position_ids" in parts:
            raise Unlike(0, "position_ids are counted from 0 in each packed sequence: leave them out")
        row = self._with_targets(parts)
        ids = next(row[name] for name in IDS if name in row)
        self._refuse_values(ids[None], {key: value[None] for key, value in row.items()})
        mask = row.pop("attention_mask", None)
        if mask is not None and not _is_padding_alone(mask[None], _of_one(row)):
            raise Unlike(
                0,
                "attention_mask leaves out tokens that others see, or that have a label: packed sequences need "
                "no padding, so give them without",
            )
        return row

    def batch(self, batch: Any) -> Any:
        """The batch with `shift_labels`, and with what every layer takes under `LAYER_INPUTS`.

        Raises:
            Unlike: the model's stages cannot take what the batch says.
        """
        if not isinstance(batch, Mapping):
            raise Unlike(
                0,
                f"a batch of {self.model} is a mapping with input_ids, as transformers' collators give it, not "
                f"a {type(batch).__name__}",
            )
        ids = next((batch[name] for name in IDS if name in batch), None)
        if not isinstance(ids, Tensor) or ids.dim() != 2:
            raise Unlike(0, self._no_tokens(batch) if ids is None else _not_two_dimensions(ids))
        for name in batch:
            known = (*IDS, *FOR_LAYERS, *self.beside, "labels", TARGETS, "return_dict")
            if name in self.takes and name not in known:
                raise Unlike(
                    0,
                    f"{name}, which the forward of {self.model} takes, reaches no stage: leave it out "
                    f"(dataset.remove_columns({name!r}), or the collator's option)",
                )
        inputs = self._with_targets(batch)
        self._refuse_values(ids, inputs)
        layers = self._for_layers(inputs, ids)
        return inputs | ({LAYER_INPUTS: layers} if layers else {})

    def item_places(self, batch: Any) -> Mapping[str, Tensor]:
        """None: the samples of a text model have no items."""
        return {}

    def has_targets(self, batch: Any) -> bool:
        """Returns True if a batch that was read has what the model's own loss compares the logits with."""
        return TARGETS in batch or "targets" in batch

    def _with_targets(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        inputs = dict(batch)
        labels = inputs.get("labels")
        if TARGETS not in inputs and isinstance(labels, Tensor):
            inputs[TARGETS] = shifted(labels) if self.shifts else labels
        return inputs

    def _refuse_values(self, ids: Tensor, batch: Mapping[str, Any]) -> None:
        """Raises Unlike for tokens, labels or lengths that the model does not have."""
        if self.longest is not None and ids.shape[1] > self.longest:
            raise Unlike(0, f"{ids.shape[1]} tokens, and {self.model} has {self.longest} positions: cut it")
        labels = batch.get(TARGETS)
        if self.own_loss and isinstance(labels, Tensor) and labels.shape != ids.shape:
            raise Unlike(0, f"labels {list(labels.shape)} are not of the shape of input_ids, {list(ids.shape)}")
        for name, values, rows in (
            ("input_ids", ids, self.tokens_known),
            ("labels", labels, self.targets_known),
        ):
            if not isinstance(values, Tensor) or rows is None or values.is_floating_point():
                continue
            wrong = (values < 0) | (values >= rows)
            if name == "labels":
                wrong = wrong & (values != IGNORED)
            if bool(wrong.any()):
                place = int(wrong.flatten(1).any(1).nonzero()[0])
                raise Unlike(
                    place,
                    f"{name} has {int(values[wrong][0])}, and {self.model} has {rows} tokens: is the tokenizer "
                    "the model's? model.resize_token_embeddings(len(tokenizer)) adds tokens",
                )

    def _for_layers(self, batch: Mapping[str, Any], ids: Tensor) -> dict[str, Tensor]:
        """The arguments of the layers beside the activation."""
        mask, positions = batch.get("attention_mask"), batch.get("position_ids")
        needed: dict[str, Tensor] = {}
        if mask is not None:
            if not isinstance(mask, Tensor) or mask.shape != ids.shape:
                raise Unlike(0, f"attention_mask must have the shape of input_ids, {list(ids.shape)}")
            if not _is_padding_alone(mask, batch.get(TARGETS, batch.get("targets"))):
                needed["attention_mask"] = mask.long()
        if positions is not None and "position_ids" in self.takes:
            if not isinstance(positions, Tensor) or positions.shape[-1] != ids.shape[1]:
                raise Unlike(0, f"position_ids must have the shape of input_ids, {list(ids.shape)}")
            seen = None if needed else mask
            if not (self.counts_from_zero and _counted(positions, seen)):
                needed["position_ids"] = positions.long()
        elif positions is not None and not _counted(positions, mask):
            raise Unlike(0, f"the forward of {self.model} takes no position_ids: leave them out")
        for name in needed:
            if name not in self.layers:
                needs = _NEEDED[name]
                if name == "position_ids" and not self.counts_from_zero:
                    needs = "position_ids are in the batch"
                raise Unlike(0, f"{needs}, and {self.lacks[name]}: {_REMEDIES[name]}")
        padded = "attention_mask" in needed and bool((needed["attention_mask"][:, 0] == 0).any())
        if padded and self.absolute and "position_ids" not in needed:
            raise Unlike(
                0,
                f"padding at the begin of a sample moves its tokens to other positions in {self.model}, so a "
                f"layout would change what they give: {_REMEDIES['attention_mask']}, or give position_ids",
            )
        return needed

    def _no_tokens(self, batch: Mapping[str, Any]) -> str:
        return f"there are no input_ids; the keys are {', '.join(map(str, batch)) or 'none'}"


_NEEDED = {
    "attention_mask": "attention_mask leaves out tokens before others, or tokens that have a label",
    "position_ids": "position_ids are not counted from 0",
}
_REMEDIES = {
    "attention_mask": "pad at the end (tokenizer.padding_side = 'right') with labels of -100",
    "position_ids": "leave them out",
}


def shifted(labels: Tensor) -> Tensor:
    """The target of each token [..., tokens]: the label of the next one. The last one has none."""
    return torch.nn.functional.pad(labels, (0, 1), value=IGNORED)[..., 1:].contiguous()


def _is_padding_alone(mask: Tensor, targets: Any) -> bool:
    """Returns True if a mask [samples, tokens] leaves out only tokens at the end of samples, which have no
    target."""
    left_out = mask == 0
    if not bool(left_out.any()):
        return True
    if bool((left_out[:, :-1] & ~left_out[:, 1:]).any()):  # a token follows
        return False
    if not isinstance(targets, Tensor) or targets.shape != mask.shape:
        return True
    return bool((targets[left_out] == IGNORED).all())


def _counted(positions: Tensor, mask: Tensor | None = None) -> bool:
    """Returns True if positions are 0, 1, 2, ..., as far as a mask leaves tokens in."""
    alike = positions == torch.arange(positions.shape[-1])
    if mask is not None and mask.shape == positions.shape:
        alike = alike | (mask == 0)
    return bool(alike.all())


def _of_one(row: Mapping[str, Any]) -> Tensor | None:
    targets = row.get(TARGETS, row.get("targets"))
    return targets[None] if isinstance(targets, Tensor) else None


def _tensor(part: Any) -> Tensor | None:
    """A tensor, an array or a list of numbers as a tensor; None: it is something else."""
    if isinstance(part, Tensor):
        return part
    if isinstance(part, np.ndarray | list) and len(part) and not is_text(part):
        try:
            return torch.as_tensor(part)
        except (TypeError, ValueError, RuntimeError):
            return None
    return None


def _not_two_dimensions(ids: Any) -> str:
    shape = list(ids.shape) if isinstance(ids, Tensor) else f"a {type(ids).__name__}"
    return f"input_ids must be a tensor [samples, tokens], not {shape}: let the collator return tensors"
