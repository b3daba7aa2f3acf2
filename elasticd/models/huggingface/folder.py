"""A folder of transformers as the first values of a model: each device reads the boxes that it holds.

The model is made on the meta device (`model_on_meta`). Which tensors of the files a parameter comes from, under
which names and by which conversion, is transformers' own affair: its renamings and converters are asked once.
A parameter that is only renamed is read slice by slice. One that is converted, as experts that are stacked, is
made as a whole and then sliced, so that the tensors of one conversion are the most that is in memory.
"""

from __future__ import annotations

import copy
import hashlib
import importlib
import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from elasticd_migration.exchange import checksum
from elasticd_planner.spec.box import Box
from elasticd_planner.spec.model import Parameter
from torch import Tensor, nn

from elasticd.runtime.model.model import Model
from elasticd.runtime.model.validation import ModelError

INDEX, WEIGHTS = "model.safetensors.index.json", "model.safetensors"
#: Of a folder that holds an adapter of PEFT.
ADAPTER = "adapter_config.json"


def folder_of(name: str | Path) -> Path:
    """A folder of this name, or that of the hub's cache, where it is downloaded to if need be.

    Raises:
        ModelError: there is none.
    """
    path = Path(name)
    if path.is_dir():
        return path
    from huggingface_hub import snapshot_download

    try:
        patterns = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
        return Path(snapshot_download(str(name), allow_patterns=patterns))
    except Exception as error:  # whatever the hub's client raises
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise ModelError(f"{name} is no folder, and the hub gives none of that name ({why})") from error


def model_on_meta(source: Any, dtype: torch.dtype | None = None) -> Any:
    """A causal or vision-language model without storage, as `from_pretrained` would make it.

    Args:
        source: a folder of transformers, or a configuration.
        dtype: of its parameters; None: as the configuration says.

    Raises:
        ModelError: transformers makes no causal language model of it.
    """
    import transformers

    folder = source if isinstance(source, Path) else None
    if folder is not None and (folder / ADAPTER).exists() and not (folder / "config.json").exists():
        raise ModelError(
            f"{folder} is an adapter of PEFT: give from_hf its model, "
            f"PeftModel.from_pretrained(base, {str(folder)!r}, is_trainable=True)"
        )
    try:
        config: Any = (
            copy.deepcopy(source) if folder is None else transformers.AutoConfig.from_pretrained(folder)
        )
        names = getattr(config, "architectures", None) or [""]
        kind = _class_of(config, names[0])
        chosen = dtype or getattr(config, "dtype", None) or torch.get_default_dtype()
        with torch.device("meta"):
            model: Any = kind._from_config(config, dtype=chosen)
    except (OSError, ValueError, KeyError, ImportError, TypeError) as error:
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise ModelError(f"transformers makes no causal language model of {source}: {why}") from error
    _keep_in_single(model, model.dtype)
    if folder is not None and (folder / "generation_config.json").exists():
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    return model


def _class_of(config: Any, name: str) -> Any:
    """The class of this name, or the vision-language or causal language model of a configuration."""
    import transformers

    if re.search("CausalLM|LMHead|ForConditionalGeneration", name):
        own = type(config).__module__.replace("configuration_", "modeling_")
        for module in (transformers, importlib.import_module(own)):
            if (kind := getattr(module, name, None)) is not None:
                return kind
    if getattr(config, "vision_config", None) is not None:  # its text model alone may be one, too
        kinds: Any = transformers.AutoModelForImageTextToText._model_mapping
        if type(config) in kinds:
            return kinds[type(config)]
    kinds = transformers.AutoModelForCausalLM._model_mapping
    return kinds[type(config)]


def _keep_in_single(model: Any, dtype: torch.dtype) -> None:
    """Parameters that transformers keeps in another type than the model's."""
    from transformers.core_model_loading import build_glob_alternation

    if plan := model._get_dtype_plan(dtype):
        pattern, by_group, _ = build_glob_alternation(list(plan))
        for name, parameter in model.named_parameters():
            match = pattern.search(name)
            if match is not None and match.lastgroup is not None:
                parameter.data = parameter.data.to(plan[by_group[match.lastgroup]])


@dataclass(frozen=True, kw_only=True)
class _Source:
    """The tensors of the files that a name in the model comes from."""

    keys: tuple[str, ...]
    patterns: tuple[str, ...]  #: of the converter's, by which each was found
    #: transformers' own, which makes of them this and perhaps other names; None: it is the one tensor.
    converter: Any = None


class FolderWeights:
    """The values of a model of transformers in a folder's files: a `BoxReader`."""

    bytes_read: int  #: of all tensors and slices so far
    most_read: int  #: [bytes] the most that was in memory at once, for one parameter

    def __init__(
        self,
        folder: Path,
        model: Any,
        their_name: Callable[[str], str],
        others: Callable[[str], Tensor | None] = lambda name: None,
    ) -> None:
        """
        Args:
            folder: has model.safetensors, or an index of several files.
            model: the model without storage.
            their_name: the name in the model of a parameter or buffer of elasticd's.
            others: the value of one that is in no file, an adapter's, by the same name; None: a file has it.

        Raises:
            ModelError: there are no such files.
        """
        self._folder, self._model, self._their_name, self._others = folder, model, their_name, others
        self._files = _files(folder)
        self._open: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._converted: tuple[_Source, dict[str, Tensor]] | None = None
        self._sources = self._find_sources()
        self._names = _tied(model)
        self.bytes_read = self.most_read = 0

    def digest(self) -> str:
        """The same where two folders have the same files, as far as names, shapes, sizes and the beginning of
        each tensor tell."""
        digest = hashlib.blake2b(digest_size=16)
        for file in sorted(set(self._files.values())):
            digest.update(f"{file} {(self._folder / file).stat().st_size}\n".encode())
        for key in sorted(self._files):
            tensor = self._slice(key)
            shape = tensor.get_shape()
            first = checksum(tensor[:1].contiguous()) if shape else ""
            digest.update(f"{key} {shape} {tensor.get_dtype()} {first}\n".encode())
        return digest.hexdigest()

    def refuse_others(self, described: Model) -> None:
        """Raises ModelError where the files lack a value of the model, or have one of another shape."""
        names = [
            f"{section}.{parameter.name}"
            for section in described.sections
            for parameter in described.spec.section(section)
            if f"{section}.{parameter.name}" not in described.ties
            and not _has_value(described, section, parameter)
            and self._others(f"{section}.{parameter.name}") is None
        ]
        missing = [self._their_name(name) for name in names if self._source(self._their_name(name)) is None]
        if missing:
            raise ModelError(
                f"{self._folder} lacks {missing[0]} ({len(missing)} of {len(names)} values of "
                f"{type(self._model).__name__}): is it the folder of this model?"
            )
        for name in names:
            shape, wanted = self.shape(name), described.module_shape(name)
            if shape is not None and shape != wanted:
                raise ModelError(
                    f"{self._their_name(name)} in {self._folder} is of shape {list(shape)}, and the model's of "
                    f"{list(wanted)}: is it the folder of this model?"
                )

    def has(self, name: str) -> bool:
        """Returns True if the files have a value."""
        return self._source(self._their_name(name)) is not None

    def read(self, name: str, box: Box) -> Tensor:
        """A box of a parameter or buffer, in the type that the file has.

        Raises:
            ModelError: no file has it.
        """
        slices = tuple(slice(start, stop) for start, stop in zip(box.start, box.stop, strict=True))
        other = self._others(name)
        if other is not None:
            return other[slices]
        theirs = self._their_name(name)
        origin = self._source(theirs)
        if origin is None:
            raise ModelError(f"{self._folder} has no {theirs}: is it the folder of this model?")
        target, source = origin
        with self._lock:
            if source.converter is not None:
                return self._whole(target, source)[slices]
            key = source.keys[0]
            part: Tensor = self._slice(key)[slices] if slices else self._tensor(key)  # without: a number
            self._count(part.nbytes, part.nbytes)
            return part

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The shape that the files say, of what is only renamed; None: it is made by a conversion."""
        source = self._source(self._their_name(name))
        if source is None or source[1].converter is not None:
            return None
        return tuple(self._slice(source[1].keys[0]).get_shape())

    def _source(self, theirs: str) -> tuple[str, _Source] | None:
        """The source of a name, or of one that is tied to it."""
        for name in self._names.get(theirs, (theirs,)):
            if name in self._sources:
                return name, self._sources[name]
        return None

    def _find_sources(self) -> dict[str, _Source]:
        """By name in the model: the tensors of the files that make it, as `from_pretrained` finds them."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import (
            WeightConverter,
            WeightRenaming,
            dot_natural_key,
            rename_source_key,
        )

        model, known = self._model, self._model.state_dict()
        mapping = get_model_conversion_mapping(model)
        renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
        converters = [each for each in mapping if isinstance(each, WeightConverter)]
        by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
        prefix = model.base_model_prefix
        collected: dict[str, tuple[Any, list[tuple[str, str]]]] = {}
        for key in sorted(self._files, key=dot_natural_key):
            name, pattern = rename_source_key(key, renamings, converters, prefix, known)
            if name not in known and key in known:
                name, pattern = rename_source_key(key, [], [], base_model_prefix=prefix, meta_state_dict=known)
            if name in known:
                converter = by_pattern[pattern] if pattern is not None else None
                collected.setdefault(name, (converter, []))[1].append((key, pattern or ""))
        # As from_pretrained notes it: a folder that is written is of the format of that which was read.
        used = [each for each in mapping if each.was_used()]
        model._weight_conversions = used or (
            [] if get_model_conversion_mapping(model, add_legacy=False) else None
        )
        return dict(self._targets(collected))

    def _targets(self, collected: Mapping[str, tuple[Any, list[tuple[str, str]]]]) -> dict[str, _Source]:
        sources: dict[str, _Source] = {}
        for name, (converter, pairs) in collected.items():
            source = _Source(
                keys=tuple(key for key, _ in pairs),
                patterns=tuple(pattern for _, pattern in pairs),
                converter=converter,
            )
            # One that makes several is known by the first; which others, its patterns say.
            for target in [name] if converter is None else _targets_of(name, converter, self._model):
                sources[target] = source
        return sources

    def _whole(self, target: str, source: _Source) -> Tensor:
        """The result of a conversion, of which the last is kept: others of its targets follow."""
        if self._converted is None or self._converted[0] is not source:
            self._converted = None
            tensors = [self._tensor(key) for key in source.keys]
            size = sum(tensor.nbytes for tensor in tensors)
            self._converted = source, _convert(source, tensors, target, self._model)
            self._count(size, size + sum(each.nbytes for each in self._converted[1].values()))
        whole = self._converted[1]
        if target not in whole:
            raise ModelError(f"the conversion of {', '.join(source.keys[:2])} makes no {target}")
        return whole[target]

    def _count(self, read: int, held: int) -> None:
        self.bytes_read += read
        self.most_read = max(self.most_read, held)

    def _handle(self, key: str) -> Any:
        from safetensors import safe_open

        file = self._files[key]
        if file not in self._open:
            self._open[file] = safe_open(self._folder / file, framework="pt")
        return self._open[file]

    def _slice(self, key: str) -> Any:
        return self._handle(key).get_slice(key)

    def _tensor(self, key: str) -> Tensor:
        tensor: Tensor = self._handle(key).get_tensor(key)
        return tensor


def _has_value(described: Model, section: str, parameter: Parameter) -> bool:
    """Returns True if a buffer has its value already."""
    return parameter.kind == "buffer" and not described.sections[section].get_buffer(parameter.name).is_meta


def _targets_of(name: str, converter: Any, model: Any) -> list[str]:
    """The names in the model that a converter makes, the first of which is known."""
    first, *others = converter.target_patterns
    if not others or first not in name:
        return [name]
    return [name.replace(first, pattern, 1) for pattern in converter.target_patterns]


def _convert(source: _Source, tensors: Sequence[Tensor], target: str, model: Any) -> dict[str, Tensor]:
    """transformers' own conversion."""
    converter = copy.deepcopy(source.converter)
    first = next(iter(_first_of(target, converter)))
    for key, pattern, tensor in zip(source.keys, source.patterns, tensors, strict=True):
        converter.add_tensor(first, key, pattern, tensor)
    results = converter.convert(first, model=model, config=model.config)
    return {name: value[0] if isinstance(value, list) else value for name, value in results.items()}


def _first_of(target: str, converter: Any) -> list[str]:
    """The name by which a converter is known: that of its first target."""
    first = converter.target_patterns[0]
    for pattern in converter.target_patterns:
        if pattern in target:
            return [target.replace(pattern, first, 1)]
    return [target]


def _files(folder: Path) -> dict[str, str]:
    """The file of each tensor."""
    if (folder / INDEX).exists():
        weights: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
        lacking = sorted({file for file in weights.values() if not (folder / file).exists()})
        if lacking:
            raise ModelError(f"{folder / INDEX} names {lacking[0]}, which is not there")
        return weights
    if not (folder / WEIGHTS).exists():
        raise ModelError(
            f"{folder} has neither {WEIGHTS} nor {INDEX}: write it anew with save_pretrained, which makes "
            "safetensors"
        )
    from safetensors import safe_open

    with safe_open(folder / WEIGHTS, framework="pt") as file:
        return dict.fromkeys(file.keys(), WEIGHTS)


def _tied(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Of each parameter that has several names in the model all of them, its own first."""
    named = dict(model.named_parameters(remove_duplicate=False))
    by_parameter: dict[int, list[str]] = {}
    for name, parameter in named.items():
        by_parameter.setdefault(id(parameter), []).append(name)
    return {
        name: (name, *(other for other in names if other != name))
        for names in by_parameter.values()
        for name in names
        if len(names) > 1
    }
