"""Buffers that forward must leave alone: each replica has a copy of them, and changed copies would differ.

Which micro-batches a copy sees depends on the layout, so no layout could give what one process gives. A buffer
may be replaced by an equal one. One that is not in the state dict, such as a table of positions, may also be
replaced by a larger or smaller one that agrees with it where both have values. Of those in the state dict the
values are compared, too, in the first steps and now and then: a write through `.data` leaves no other trace.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from elasticd.runtime.model.validation import ModelError

#: Steps of which each compares the values of buffers in the state dict, and how often later ones do.
_FIRST, _SELDOM = 3, 100
#: Elements up to which a buffer's values are compared.
_MOST_COMPARED = 1 << 20


class _Seen(NamedTuple):
    """A buffer as it was when last looked at; `values` of one that is in the state dict and not large."""

    tensor: Tensor
    version: int
    values: Tensor | None


class BufferCheck:
    """The buffers of the local modules, by section."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = modules
        self._owners = self._with_buffers()
        self._seen: dict[str, _Seen] = {}
        self._checks = 0

    def note(self) -> None:
        """Takes the present values as right."""
        self._seen = {name: _seen(buffer, persistent) for name, buffer, persistent in self._buffers()}

    def check(self, *, training: bool = True) -> None:
        """Compares the buffers with those of the last call.

        Args:
            training: False after an evaluation, which may change buffers that are not in the state dict.

        Raises:
            ModelError: a buffer changed.
        """
        self._checks += 1
        values = self._checks <= _FIRST or self._checks % _SELDOM == 0
        if values:
            self._owners = self._with_buffers()  # forward may have made some
        for name, buffer, persistent in self._buffers():
            seen = self._seen.get(name)
            looked = persistent or training
            if seen is not None and looked and _changed(buffer, seen, persistent, values):
                raise ModelError(
                    f"{name}: forward changes this buffer, so that replicas' copies would differ: keep it "
                    "constant, or compute what changes from the batch"
                )
            if seen is None or buffer is not seen.tensor or buffer._version != seen.version:
                self._seen[name] = _seen(buffer, persistent)

    def _buffers(self) -> Iterator[tuple[str, Tensor, bool]]:
        """Of each its name, itself, and whether it is in the state dict."""
        for path, owner in self._owners:
            for name, buffer in owner._buffers.items():
                if buffer is not None:
                    yield f"{path}.{name}", buffer, name not in owner._non_persistent_buffers_set

    def _with_buffers(self) -> list[tuple[str, nn.Module]]:
        """The modules with buffers, and their names. To walk the tree of modules takes 12 us a block, which no
        step should pay."""
        return [
            (path, owner)
            for section, module in self._modules.items()
            for path, owner in module.named_modules(prefix=section)
            if owner._buffers
        ]


def _seen(buffer: Tensor, persistent: bool) -> _Seen:
    kept = buffer.detach().clone() if persistent and buffer.numel() <= _MOST_COMPARED else None
    return _Seen(buffer, buffer._version, kept)


def _changed(buffer: Tensor, seen: _Seen, persistent: bool, values: bool) -> bool:
    """values: whether they are compared where nothing else tells of a change."""
    replaced, written = buffer is not seen.tensor, seen.tensor._version != seen.version
    if not persistent:
        return written or (replaced and not _agree(buffer, seen.tensor))
    if seen.values is None:
        return written or (replaced and not _same(buffer, seen.tensor))
    return (replaced or written or values) and not _same(buffer, seen.values)


def _agree(one: Tensor, other: Tensor) -> bool:
    """Returns True if they hold the same where both have values."""
    if one.dim() != other.dim():
        return False
    common = tuple(slice(min(sizes)) for sizes in zip(one.shape, other.shape, strict=True))
    return torch.equal(one[common], other[common])


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one, other)
