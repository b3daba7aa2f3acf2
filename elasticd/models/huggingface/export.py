"""A trained model as a folder of transformers, from which `from_pretrained` loads it.

Names, ties, shards and the conversions to the format of the hub are transformers' own: they are worked out on
the model without storage (`skeleton`), and then for the values of a shard after the other. So no more than the
values of a shard are in memory. What no section holds, as modules that forward does not call, has the values
that the model came with.
"""

from __future__ import annotations

import copy
import json
import logging
import re
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from elasticd.runtime.model.pretrained import ReadValues

log = logging.getLogger(__name__)

#: What is not copied of a base's folder: weights in all formats, what is written anew, what tells of the base.
NOT_COPIED = re.compile(
    r".*\.(safetensors|bin|pt|pth|ckpt|h5|msgpack|gguf|onnx|part)|.*\.index\.json|config\.json"
    r"|generation_config\.json|README\.md|\..*"
)
#: Files of weights that an earlier save may have left.
_SHARDS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")


@dataclass(frozen=True, kw_only=True)
class Shard:
    """A file of weights."""

    file: str
    #: Names in the model that are read for this file; those of a group are converted at once, and what later
    #: files have of them is kept.
    groups: tuple[tuple[str, ...], ...]
    keys: tuple[str, ...]  #: the names that the file has


@dataclass(frozen=True, kw_only=True)
class HfExporter:
    """Writes a model of transformers: a `Pretrained`."""

    skeleton: Any  #: the model without storage, ties kept
    paths: Mapping[str, str]  #: by full name of a section's child in elasticd: its path in the model
    ties: Mapping[str, str]  #: by full name of a tied parameter: the name that its value has
    owners: Mapping[str, str]  #: by name in the model: the full name of the value in elasticd
    values: Mapping[str, Tensor] = field(default_factory=dict)  #: by name in the model: what no section holds

    @classmethod
    def of(cls, model: Any, sections: Iterable[tuple[str, Any]], ties: Mapping[str, str]) -> HfExporter:
        """Of a model that elasticd trains, with its sections by full name and the ties between them."""
        paths = {
            f"{section}.{child}": path
            for section, module in sections
            for child, path in getattr(module, "paths", {}).items()
        }
        return cls.with_paths(model, paths, ties)

    @classmethod
    def with_paths(cls, model: Any, paths: Mapping[str, str], ties: Mapping[str, str]) -> HfExporter:
        """Of a model whose modules have these paths."""
        named = model.state_dict(keep_vars=True)
        owners: dict[str, str] = {}
        for ours, theirs in paths.items():
            for name in named:
                if name.startswith(f"{theirs}."):
                    full = f"{ours}{name.removeprefix(theirs)}"
                    owners.setdefault(name, ties.get(full, full))
        values = {
            name: value.detach()
            for name, value in named.items()
            if name not in owners and isinstance(value, Tensor) and not value.is_meta
        }
        skeleton = without_storage(model)
        return cls(skeleton=skeleton, paths=dict(paths), ties=dict(ties), owners=owners, values=values)

    @property
    def adapted(self) -> bool:
        """It has no adapters."""
        return False

    def wanted(self, merge: bool) -> Sequence[str]:
        """The full names of the values that are written."""
        return tuple(self.owners.values())

    def describe(self) -> str:
        """The class, the configurations and the paths, as JSON."""
        kind = type(self.skeleton)
        generation = getattr(self.skeleton, "generation_config", None)
        return json.dumps(
            {
                "module": kind.__module__,
                "class": kind.__qualname__,
                "config": self.skeleton.config.to_dict(),
                "generation_config": None if generation is None else generation.to_dict(),
                "paths": dict(self.paths),
                "ties": dict(self.ties),
            },
            default=str,
        )

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
        """Writes the folder: see `Pretrained.save`. There is nothing to merge."""
        shards, index = self.plan(dtypes, max_shard_size)
        failure, left = "", dict[str, Tensor]()
        for shard in shards:
            wanted = [self.owners[n] for group in shard.groups for n in group if n in self.owners]
            values = dict(read(wanted))
            if not writes or failure:
                continue
            try:
                folder.mkdir(parents=True, exist_ok=True)
                for group in shard.groups:
                    left |= self._converted({name: self._value(name, values) for name in group})
                values.clear()
                write_shard(folder / shard.file, {key: left.pop(key).contiguous() for key in shard.keys})
            except Exception as error:  # also what nobody thought of: the others wait for this rank's word
                failure = failure_of(error, folder / shard.file)
                left.clear()
        if writes and not failure:
            try:
                self._write_rest(folder, shards, index, dtypes, base)
            except Exception as error:
                failure = failure_of(error, folder)
        return failure

    def plan(
        self, dtypes: Mapping[str, torch.dtype], max_shard_size: int | str
    ) -> tuple[list[Shard], dict[str, Any]]:
        """The files in the order in which they are written, and the index of several."""
        from huggingface_hub import split_torch_state_dict_into_shards

        saved = self._saved(dtypes)
        groups = self._groups(saved)
        converted = self._converted(dict(saved))
        split = split_torch_state_dict_into_shards(
            converted, filename_pattern="model{suffix}.safetensors", max_shard_size=max_shard_size
        )
        made_by = {key: group for group, keys in groups.items() for key in keys}
        pending, shards = dict.fromkeys(groups), []
        for file, keys in split.filename_to_tensors.items():
            needed = dict.fromkeys(made_by[key] for key in keys)
            shards.append(
                Shard(file=file, groups=tuple(group for group in needed if group in pending), keys=tuple(keys))
            )
            for group in needed:
                pending.pop(group, None)
        index = {
            "metadata": {"total_parameters": self.skeleton.num_parameters(), **split.metadata},
            "weight_map": split.tensor_to_filename,
        }
        return shards, index if split.is_sharded else {}

    def _saved(self, dtypes: Mapping[str, torch.dtype]) -> dict[str, Tensor]:
        """The tensors that transformers saves of the model, without storage: each tied parameter once."""
        from transformers.modeling_utils import remove_tied_weights_from_state_dict

        tensors: dict[str, Tensor] = {}
        for name, value in self.skeleton.state_dict().items():
            if name in self.owners or name in self.values:
                dtype = dtypes.get(self.owners.get(name, ""), value.dtype)
                tensors[name] = torch.empty(value.shape, dtype=dtype, device="meta")
            else:
                log.warning("%s is left out: nothing is known of its values", name)
        for name in self.skeleton._keys_to_ignore_on_save or ():
            tensors.pop(name, None)
        return dict(remove_tied_weights_from_state_dict(tensors, self.skeleton))

    def _groups(self, saved: Mapping[str, Tensor]) -> dict[tuple[str, ...], tuple[str, ...]]:
        """Names in the model that are converted together, and the names in the files that come of them: one by
        one where a conversion says so, else a module after the other, else all at once."""
        expected = {key: value.shape for key, value in self._converted(dict(saved)).items()}
        if expected.keys() == saved.keys():
            return {(name,): (name,) for name in saved}
        groups: dict[tuple[str, ...], tuple[str, ...]] = {}
        for names in self._by_module(saved):
            single = {(name,): self._keys_of([name], saved, expected) for name in names}
            if all(single.values()) and _covers(single.values(), self._keys_of(names, saved, expected)):
                groups |= {group: keys for group, keys in single.items() if keys}
            elif keys := self._keys_of(names, saved, expected):
                groups[tuple(names)] = keys
        if not _covers(groups.values(), tuple(expected)):
            return {tuple(saved): tuple(expected)}
        return groups

    def _by_module(self, saved: Mapping[str, Tensor]) -> list[list[str]]:
        """Names by the section's child that holds them; those of none by themselves."""
        by_module: dict[str, list[str]] = {}
        for name in saved:
            holders = [path for path in self.paths.values() if name.startswith(f"{path}.")]
            by_module.setdefault(max(holders, key=len, default=name), []).append(name)
        return list(by_module.values())

    def _keys_of(
        self, names: Sequence[str], saved: Mapping[str, Tensor], expected: Mapping[str, torch.Size]
    ) -> tuple[str, ...]:
        """The names in the files that come of these alone; none where they cannot be converted alone."""
        try:
            tensors = self._converted({name: saved[name] for name in names})
        except Exception:  # whatever a conversion raises that lacks one of its tensors
            return ()
        return tuple(tensors) if all(expected.get(key) == value.shape for key, value in tensors.items()) else ()

    def _converted(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Tensors by their names in the model as the hub has them: transformers' own conversion."""
        from transformers.core_model_loading import revert_weight_conversion

        return dict(revert_weight_conversion(self.skeleton, tensors))

    def _value(self, name: str, values: dict[str, Tensor]) -> Tensor:
        return values[self.owners[name]] if name in self.owners else self.values[name]

    def _write_rest(
        self,
        folder: Path,
        shards: Sequence[Shard],
        index: Mapping[str, Any],
        dtypes: Mapping[str, torch.dtype],
        base: Path | None,
    ) -> None:
        """Everything but the weights; removes files of weights that an earlier save left."""
        files = {shard.file for shard in shards}
        for path in folder.iterdir():
            if _SHARDS.fullmatch(path.name) and path.name not in files:
                path.unlink()
        listed = folder / "model.safetensors.index.json"
        if index:
            listed.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
        else:
            listed.unlink(missing_ok=True)
        base = base or Path(self.skeleton.name_or_path or "/dev/null")
        for path in sorted(base.iterdir()) if base.is_dir() and not base.samefile(folder) else ():
            if path.is_file() and not NOT_COPIED.fullmatch(path.name):
                shutil.copyfile(path, folder / path.name)
        config = copy.deepcopy(self.skeleton.config)
        config.dtype = str(self._dtype(dtypes)).removeprefix("torch.")
        config.architectures = [type(self.skeleton).__name__]
        config.save_pretrained(folder)
        if self.skeleton.can_generate():
            self.skeleton.generation_config.save_pretrained(folder)
        if getattr(self.skeleton, "is_remote_code", bool)():
            saver: Any = sys.modules["transformers.dynamic_module_utils"]
            saver.custom_object_save(self.skeleton, folder, config=config)

    def _dtype(self, dtypes: Mapping[str, torch.dtype]) -> torch.dtype:
        """The type that the folder's model is of, as transformers takes it: that of its first parameter."""
        named = (name for name, _ in self.skeleton.named_parameters() if name in self.owners)
        types = (dtypes[self.owners[name]] for name in named if self.owners[name] in dtypes)
        return next((dtype for dtype in types if dtype.is_floating_point), self.skeleton.dtype)


def _covers(parts: Any, whole: Sequence[str]) -> bool:
    """Returns True if parts have each name of the whole once."""
    names = [key for part in parts for key in part]
    return len(names) == len(whole) and set(names) == set(whole)


def failure_of(error: Exception, path: Path) -> str:
    """Why a file or folder cannot be written, in words for all ranks; a traceback of what is no error of the
    disk is logged."""
    if isinstance(error, OSError):
        return f"{error.strerror or error} ({path})"
    log.error("cannot write %s", path, exc_info=error)
    return f"{type(error).__name__}: {error} ({path})"


def write_shard(path: Path, tensors: dict[str, Tensor]) -> None:
    """Writes a file of weights, which has its name when it is whole.

    Raises:
        OSError: it cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    part = path.with_name(f"{path.name}.part")
    try:
        save_file(tensors, part, metadata={"format": "pt"})
        part.rename(path)
    except SafetensorError as error:  # safetensors' own error for what a disk refuses
        raise OSError(str(error)) from error
    finally:
        part.unlink(missing_ok=True)


def without_storage(model: Any) -> Any:
    """A copy of a model on the meta device, ties kept. Buffers keep their values."""
    memo: dict[int, object] = {
        id(parameter): nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
        for parameter in model.parameters()
    }
    return copy.deepcopy(model, memo)
