"""The loss of a causal language model of transformers: cross entropy, summed over the targets."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor
from torch.nn import functional as F

from elasticd.models.huggingface.batches import IGNORED, TARGETS
from elasticd.runtime.model.validation import ModelError


def causal_lm_loss(logits: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, int | Tensor]:
    """The model's own loss for a part of a global batch.

    The sum over all parts divided by their count is `model(**batch).loss` of the whole batch, also where that
    is computed in parts with `num_items_in_batch`, as the Trainer of transformers does it.

    Args:
        logits: [samples, tokens, vocabulary].
        batch: with labels, as `HfBatches` has read it; or with "targets" at the place of their logits.

    Returns:
        The sum over the targets that are not -100, and how many they are: on an accelerator a tensor.

    Raises:
        ModelError: the batch has neither.
    """
    targets = batch.get(TARGETS, batch.get("targets"))
    if targets is None:
        raise ModelError(
            f"the batch has no labels, but {', '.join(map(str, batch))}: "
            "DataCollatorForLanguageModeling(tokenizer, mlm=False) makes them of the tokens"
        )
    if logits.dtype.itemsize < 4:
        logits = logits.float()  # as the model's own loss does
    total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
    count = (targets != IGNORED).sum()
    return total, int(count) if count.device.type == "cpu" else count
