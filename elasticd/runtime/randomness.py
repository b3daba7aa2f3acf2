"""Randomness as a function: a dropout's mask is keyed by (seed, step, sample, site, element).

So a slice of a mask is the mask of the slice, a repeated step draws the same, and no layout changes what is
dropped. Bits come from SplitMix64 (Steele, Lea and Flood, 2014), one round for each dimension's index; integer
arithmetic alone, the same on every device.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor, nn

_GOLDEN, _FIRST, _SECOND = (
    value - (1 << 64) for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
#: Bits of a uniform draw.
_BITS = 24


class Drawing:
    """What the draws of a local model are keyed by now. Whoever runs passes sets seed and step, and before each
    forward or backward pass its samples; None: the samples are counted from 0."""

    def __init__(self) -> None:
        self.seed = self.step = 0
        self.samples: Sequence[int] | None = None
        self.drew: set[str] = set()
        self._calls: Counter[str] = Counter()
        self._quiet: set[str] = set()

    def begin(self, seed: int, step: int) -> None:
        self.seed, self.step = seed, step

    def forget(self, section: str = "") -> None:
        """The sites of a section are drawn at for the first time again."""
        for site in [site for site in self._calls if site.startswith(section)]:
            del self._calls[site]

    def keys(self, site: str, samples: int) -> list[int]:
        """The keys of the next draw at a site, one for each sample."""
        ids = range(samples) if self.samples is None else self.samples
        if len(ids) != samples:
            raise ValueError(
                f"{site}: a dropout's input must have the samples as its first dimension: "
                f"{samples} there, {len(ids)} samples"
            )
        self._calls[site] += 1
        return [_key(self.seed, self.step, i, site, self._calls[site]) for i in ids]

    def watch(self, section: str, module: nn.Module) -> None:
        """Makes draws that no site keys (F.dropout, torch.rand) in a section's forward a function of the plan,
        the step and the samples: members of a TP group draw the same. A section that drew nothing in its
        first pass of training is left alone."""
        saved: list[Tensor] = []

        def before(*_: object) -> None:
            self.forget(f"{section}.")
            if section not in self._quiet:
                ids = "all" if self.samples is None else ",".join(map(str, self.samples))
                saved[:] = [torch.default_generator.get_state()]
                _seed(_key(self.seed, self.step, ids, section, 0) & (2**62 - 1))
                saved.append(torch.default_generator.get_state())

        def after(ran: nn.Module, *_: object) -> None:
            if section not in self._quiet and saved:
                if not torch.equal(torch.default_generator.get_state(), saved[1]):
                    self.drew.add(section)
                elif ran.training:  # an evaluation draws nothing, whatever training does
                    self._quiet.add(section)
                torch.default_generator.set_state(saved[0])
                saved.clear()

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after, always_call=True)


def _seed(seed: int) -> None:
    """As torch.manual_seed does for the CPU, and for CUDA where it is in use: there it formats a stack for each
    kind of device that is not."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)


def _key(*parts: object) -> int:
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little", signed=True)


def _mixed(x: Tensor) -> Tensor:
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _FIRST
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _SECOND
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def kept(keys: Sequence[int], shape: Sequence[int], start: Sequence[int], p: float, device: object) -> Tensor:
    """A mask [samples, *shape], true with probability 1 - p: the box of each sample's mask that begins at
    `start`."""
    state = torch.tensor(keys, dtype=torch.int64).to(device=device)  # type: ignore[call-overload]
    for size, first in zip(shape, start, strict=True):
        index = torch.arange(first + 1, first + size + 1, dtype=torch.int64, device=state.device)
        state = _mixed(state.unsqueeze(-1) + index * _GOLDEN)
    return ((state >> (64 - _BITS)) & ((1 << _BITS) - 1)) >= round(p * (1 << _BITS))


class Dropout(nn.Module):
    """Drops elements of a tensor [samples, ...] with probability p, the same under every layout.

    It takes the place of every nn.Dropout of a model. `site` names it; `cut` is the dimension along which its
    input is cut in a TP group, if it is, and the global index of the first element there."""

    def __init__(self, p: float, site: str = "") -> None:
        super().__init__()
        self.p, self.site = p, site
        self.drawing = Drawing()
        self.cut: tuple[int, int] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        start = [0] * (x.dim() - 1)
        if self.cut is not None:
            dim, first = self.cut
            start[dim % x.dim() - 1] = first
        mask = kept(self.drawing.keys(self.site, x.shape[0]), x.shape[1:], start, self.p, x.device)
        return x * mask * (1 / (1 - self.p) if self.p < 1 else 0.0)

    def extra_repr(self) -> str:
        return f"p={self.p}"
