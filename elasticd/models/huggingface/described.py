"""A model of transformers as a checkpoint describes it, without storage, for an export."""

from __future__ import annotations

import importlib
import json

import torch

from elasticd.models.huggingface.export import HfExporter
from elasticd.models.huggingface.peft_export import PeftPretrained, with_adapter
from elasticd.runtime.model.pretrained import Pretrained
from elasticd.runtime.model.validation import ModelError


def from_description(text: str) -> Pretrained:
    """The model that `describe` described.

    Raises:
        ModelError: transformers does not have its class.
    """
    description = json.loads(text)
    if not description["module"].startswith("transformers."):
        raise ModelError(
            f"{description['class']} of {description['module']} is no class of transformers: let the job "
            "write the folder, job.save_pretrained(...)"
        )
    kind = getattr(importlib.import_module(description["module"]), description["class"])
    config = kind.config_class.from_dict(description["config"])
    with torch.device("meta"):
        model = kind(config)
    if description["generation_config"] is not None:
        model.generation_config = type(model.generation_config).from_dict(description["generation_config"])
    if "adapter" not in description:
        return HfExporter.with_paths(model, description["paths"], description["ties"])
    model, adapters = with_adapter(model, description["adapter"])
    whole = HfExporter.with_paths(model, description["paths"], description["ties"])
    return PeftPretrained(skeleton=whole.skeleton, adapters=adapters, whole=whole)
