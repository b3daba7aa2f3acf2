"""A trained LoRA adapter as PEFT writes it, or merged into its base as a folder of transformers.

Names and files are PEFT's own: `get_peft_model_state_dict` says on the model without storage which values an
adapter's file has; a merged weight is that of PEFT's `merge`, computed a module after the other.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from elasticd.models.huggingface.adapters import Adapters, adapters_of, is_lora, named_forms, stand_in
from elasticd.models.huggingface.export import NOT_COPIED, HfExporter, failure_of, write_shard
from elasticd.runtime.model.pretrained import ReadValues

#: PEFT's names of its files.
_WEIGHTS, _CONFIG = "adapter_model.safetensors", "adapter_config.json"
#: Of the names in an adapter's file, which are those of a PeftModel.
_PREFIX = "base_model.model."


@dataclass(frozen=True, kw_only=True)
class PeftPretrained:
    """Writes the adapter of a model: a `Pretrained`."""

    skeleton: Any  #: the model of transformers with its adapter, without storage
    adapters: Adapters
    whole: HfExporter  #: of all parameters, by their names with adapters

    @classmethod
    def of(
        cls, model: Any, adapters: Adapters, sections: Iterable[tuple[str, Any]], ties: Mapping[str, str]
    ) -> PeftPretrained:
        """Of a model that elasticd trains, with its sections by full name and the ties between them."""
        whole = HfExporter.of(model, sections, ties)
        return cls(skeleton=whole.skeleton, adapters=adapters, whole=whole)

    @property
    def adapted(self) -> bool:
        """It has an adapter."""
        return True

    def wanted(self, merge: bool) -> Sequence[str]:
        """The full names of the values that are written: those of the adapter, or all in force."""
        if merge:
            return Merged.of(self).wanted
        return tuple(self.whole.owners[name] for name in self.kept.values())

    @property
    def names_of_base(self) -> dict[str, str]:
        """By full name of a value in force that is no adapter's: its name in the base model."""
        owners, places = self.whole.owners, Merged.of(self).places
        return {owners[f"{path}.{leaf}"]: plain for plain, (path, leaf) in places.items()}

    def describe(self) -> str:
        """The model and the adapter's configuration, as JSON."""
        description = json.loads(self.whole.describe())
        config = self.adapters.config.to_dict()
        description["adapter"] = {"name": self.adapters.name, "config": config}
        return json.dumps(description, default=_plain)

    @property
    def kept(self) -> dict[str, str]:
        """By name in the adapter's file: the name in the model, of what PEFT saves."""
        from peft import get_peft_model_state_dict

        named = dict(self.skeleton.state_dict())
        names = {id(value): name for name, value in named.items()}
        saved = get_peft_model_state_dict(
            self.skeleton,
            state_dict=named,
            adapter_name=self.adapters.name,
            save_embedding_layers=self.adapters.saves_embeddings,
        )
        return {f"{_PREFIX}{key}": names[id(value)] for key, value in saved.items()}

    def save(
        self,
        folder: Path,
        read: ReadValues,
        *,
        dtypes: Mapping[str, torch.dtype],
        writes: bool,
        base: Path | None,
        max_shard_size: int | str,
        merge: bool = False,
    ) -> str:
        """Writes the adapter, or with `merge` the whole model: see `Pretrained.save`."""
        if merge:
            merged = Merged.of(self)
            return merged.plain.save(
                folder,
                lambda names: merged.values(names, read, writes),
                dtypes=merged.dtypes(dtypes),
                writes=writes,
                base=base,
                max_shard_size=max_shard_size,
            )
        kept = self.kept
        values = read([self.whole.owners[name] for name in kept.values()])
        if not writes:
            return ""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            tensors = {key: values[self.whole.owners[name]].contiguous() for key, name in kept.items()}
            write_shard(folder / _WEIGHTS, _apart(tensors))
            self._write_rest(folder, base)
        except Exception as error:  # also what nobody thought of: the others wait for this rank's word
            return failure_of(error, folder)
        return ""

    def _write_rest(self, folder: Path, base: Path | None) -> None:
        config = copy.copy(self.adapters.config)
        config.inference_mode = True
        if config.base_model_name_or_path is None:
            config.base_model_name_or_path = str(base or self.skeleton.name_or_path or "") or None
        mapping = None
        if config.task_type is None:
            kind = type(self.skeleton)
            mapping = {"base_model_class": kind.__name__, "parent_library": kind.__module__}
        config.save_pretrained(folder, auto_mapping_dict=mapping)
        for path in sorted(base.iterdir()) if base is not None and not base.samefile(folder) else ():
            if path.is_file() and not NOT_COPIED.fullmatch(path.name):
                shutil.copyfile(path, folder / path.name)


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of which no two share memory, as safetensors asks."""
    seen: set[int] = set()
    by_name: dict[str, Tensor] = {}
    for key, value in tensors.items():
        by_name[key] = value.clone() if value.data_ptr() in seen else value
        seen.add(by_name[key].data_ptr())
    return by_name


@dataclass(frozen=True, kw_only=True)
class Merged:
    """A model whose adapter is merged into its base."""

    plain: HfExporter  #: of the base's class
    adapted: PeftPretrained
    #: By name in the plain model: the path of its module with adapters, and the parameter's name in it.
    places: Mapping[str, tuple[str, str]]
    _last: dict[str, dict[str, Tensor]] = field(default_factory=dict)  # of the module merged last

    @classmethod
    def of(cls, adapted: PeftPretrained) -> Merged:
        """Of a model with an adapter."""
        skeleton = adapted.skeleton
        places = {
            f"{plain}.{leaf}": (actual, leaf)
            for plain, actual, module in named_forms(skeleton)
            for leaf in stand_in(module)[0].state_dict(keep_vars=True)
            if "." not in leaf
        }
        with torch.device("meta"):
            model: Any = type(skeleton)(_config(skeleton))
        model.generation_config, model.name_or_path = skeleton.generation_config, skeleton.name_or_path
        owners = {name: name for name in model.state_dict() if name in places}
        plain = HfExporter(skeleton=model, paths={}, ties={}, owners=owners)
        return cls(plain=plain, adapted=adapted, places=places)

    def dtypes(self, dtypes: Mapping[str, torch.dtype]) -> dict[str, torch.dtype]:
        """The types of the merged values: those of the base."""
        owners = self.adapted.whole.owners
        named = {name: owners.get(f"{path}.{leaf}", "") for name, (path, leaf) in self.places.items()}
        return {name: dtypes[full] for name, full in named.items() if full in dtypes}

    @property
    def wanted(self) -> tuple[str, ...]:
        """The full names of all values that are merged or taken as they are."""
        owners, needed = self.adapted.whole.owners, dict[str, None]()
        for path, leaf in self.places.values():
            outer = path.removesuffix(".base_layer")
            layer = self.adapted.skeleton.get_submodule(outer)
            inside = layer.state_dict() if is_lora(layer) else ()
            names = [f"{outer}.{key}" for key in inside] or [f"{path}.{leaf}"]
            needed |= dict.fromkeys(owners[name] for name in names if name in owners)
        return tuple(needed)

    def values(self, names: Sequence[str], read: ReadValues, writes: bool) -> Mapping[str, Tensor]:
        """Merged values by their names in the plain model, a module after the other."""
        return dict(self._values(names, read, writes))

    def _values(self, names: Sequence[str], read: ReadValues, writes: bool) -> Iterator[tuple[str, Tensor]]:
        owners = self.adapted.whole.owners
        for name in names:
            path, leaf = self.places[name]
            outer = path.removesuffix(".base_layer")
            layer: Any = self.adapted.skeleton.get_submodule(outer)
            if not is_lora(layer):
                full = owners[f"{path}.{leaf}"]
                values = read([full])
                if writes:
                    yield name, values[full]
                continue
            held = [key for key in layer.state_dict() if f"{outer}.{key}" in owners]
            values = read([owners[f"{outer}.{key}"] for key in held])
            if writes:
                own = {key: values[owners[f"{outer}.{key}"]] for key in held}
                yield name, _merged(layer, own)[leaf]


def _merged(layer: Any, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The base's parameters after PEFT's own merge."""
    copied = copy.deepcopy(layer).to_empty(device="cpu")
    for key, value in values.items():
        copied.get_parameter(key).data = value.clone()
    with torch.no_grad():
        copied.merge()
    return dict(copied.get_base_layer().state_dict())


def _config(skeleton: Any) -> Any:
    """The configuration of the merged model: a head or an embedding that was adapted or trained apart from its
    partner is not tied to it any more."""
    config = copy.deepcopy(skeleton.config)
    ends = skeleton.get_input_embeddings(), skeleton.get_output_embeddings()
    weights = [getattr(stand_in(end)[0], "weight", None) for end in ends]
    if weights[0] is not weights[1] or any(map(is_lora, ends)):
        for part in (config, config.get_text_config()):
            if getattr(part, "tie_word_embeddings", False):
                part.tie_word_embeddings = False
    return config


def _plain(value: Any) -> Any:
    """Of a LoraConfig's values what JSON does not have."""
    if isinstance(value, set | frozenset):
        return sorted(value)
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) else str(value)  # type: ignore[arg-type]


def with_adapter(base: Any, said: Mapping[str, Any]) -> tuple[Any, Adapters]:
    """A base with the adapter that `PeftPretrained.describe` described."""
    import peft

    config = peft.PeftConfig.from_peft_type(**said["config"])
    model = peft.inject_adapter_in_model(config, base, adapter_name=said["name"])
    adapters = adapters_of(model)
    assert adapters is not None
    return model, adapters
