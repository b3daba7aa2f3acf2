"""Buffers that forward must leave alone: each replica has a copy of them, and changed copies would differ.

Which micro-batches a copy sees depends on the layout, so no layout could give what one process gives. A buffer
may be replaced by an equal one. One that is not in the state dict, such as a table of positions, may also be
replaced by a larger one that begins with what it held.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from elasticd.runtime.accepted import ModelError


class _Seen(NamedTuple):
    """A buffer as it was when it was last looked at."""

    tensor: Tensor
    version: int


class Constants:
    """The buffers of the local modules, by section."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = modules
        self._seen: dict[str, _Seen] = {}

    def note(self) -> None:
        """They are what they should be."""
        self._seen = {name: _Seen(buffer, buffer._version) for name, buffer, _ in self._buffers()}

    def check(self) -> None:
        """Raises ModelError for a buffer that is not what it was at the last look."""
        for name, buffer, persistent in self._buffers():
            now, seen = _Seen(buffer, buffer._version), self._seen.get(name)
            if seen is None or (now.tensor is seen.tensor and now.version == seen.version):
                self._seen[name] = now  # forward may make one
                continue
            replaced = now.tensor is not seen.tensor and seen.tensor._version == seen.version
            if not replaced or not _continues(buffer, seen.tensor, grows=not persistent):
                raise ModelError(
                    f"{name}: forward changes this buffer, so that replicas' copies would differ: keep it "
                    "constant, or compute what changes from the batch"
                )
            self._seen[name] = now

    def _buffers(self) -> Iterator[tuple[str, Tensor, bool]]:
        """Of each its name, itself, and whether it is in the state dict."""
        for section, module in self._modules.items():
            for path, owner in module.named_modules(prefix=section):
                for name, buffer in owner.named_buffers(recurse=False):
                    yield f"{path}.{name}", buffer, name not in owner._non_persistent_buffers_set


def _continues(new: Tensor, old: Tensor, *, grows: bool) -> bool:
    """Whether a buffer begins with what another holds, and is no larger unless it `grows`."""
    if new.shape == old.shape:
        return torch.equal(new, old)
    fits = grows and new.dim() == old.dim() and all(n >= o for n, o in zip(new.shape, old.shape, strict=True))
    return fits and torch.equal(new[tuple(slice(size) for size in old.shape)], old)
