"""Randomness as a function: a dropout's mask is keyed by (seed, step, sample, site, element).

So a slice of a mask is the mask of the slice, a repeated step draws the same, and no layout changes what is
dropped. Bits come from SplitMix64 (Steele, Lea and Flood, 2014), one round for each dimension's index; integer
arithmetic alone, the same on every device.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from elasticd.runtime.accelerator import generators, put
from elasticd.runtime.exits import ScriptRefusal
from elasticd.runtime.model.graph_breaks import breaks_graphs
from elasticd.runtime.model.host_generators import (
    HostStates,
    host_seeds,
    host_states,
    restore_host_states,
    seed_host,
)
from elasticd.runtime.model.torch_draws import TorchDraws

log = logging.getLogger(__name__)

#: Held around generators' states, which threads of one process share. torch's `get_state` keeps the generator's
#: mutex while it makes a tensor; where Python collects garbage there (before 3.12), another thread may get the
#: interpreter's lock and wait for that mutex with it, for ever. A model calls `get_state`, too
#: (torch.utils.checkpoint), without this lock: so no thread beside the one that trains asks torch's generators
#: for their states, and ranks in threads of one process collect no garbage.
STATES = threading.RLock()

_GOLDEN, _FIRST, _SECOND = (
    value - (1 << 64) for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
#: The place where draws are those of one sample, the same under every layout.
DATASET = "dataset"
#: The step by which draws of an evaluation are keyed, whenever it is made.
EVALUATION = -1
#: Bits of a uniform draw.
_BITS = 24


class ModelRng:
    """Keys the random draws of a local model.

    `begin` sets seed and step; `samples` is set before each forward and backward pass. In a step the generators
    are saved once (`kept`), and each place of a pass has a seed (`around`, `keyed`). A dropout that a section
    calls several times in a pass drops something else in each call, by the call's number.
    `torch.utils.checkpoint` repeats calls in another order; for each it restores the state of torch's
    generator, which has a mark (`next_mark`) of the call that comes next.
    """

    #: Of a packed row, whose activations are [1, tokens, ...]: the place in `samples` of each token's sample,
    #: and its position in that sample, both [tokens] on the activation's device. None: samples are padded.
    tokens: tuple[Tensor, Tensor] | None
    #: The places that drew from a generator without a key; None: nobody asks, and it is not looked at.
    drew: set[str] | None
    #: A forward pass of a section may be repeated: it communicates with nobody.
    repeats: bool
    keeps: bool  #: the generators' states are restored at the end of a pass around this one
    generators: list[torch.Generator]  #: torch's, of which those are

    def __init__(self) -> None:
        self._seed = self._step = self._dataset = 0
        self.tokens, self.drew, self.repeats = None, None, False
        self._samples: Sequence[int] | None = None
        self._of_pass: Any = None  # the hash of seed, step and samples; None: not made yet
        self.keeps, self.generators = False, []
        self._passes = 0  # of sections, since `begin`
        self._calls: Counter[str] | None = None  # by site in the pass of a section; None: outside of any
        # By site and mark the number of a call that is not the first in its pass.
        self._later: dict[str, dict[int, int]] = {}

    def begin(self, seed: int, step: int, *, dataset: int | None = None) -> None:
        """Keys the draws of a step: the same seed and step give the same draws.

        Args:
            seed: of the module's draws.
            step: its index.
            dataset: the seed of the dataset's draws, the same for all modules; None: `seed`.
        """
        self._dataset = seed if dataset is None else dataset
        self._seed, self._step, self._passes, self._of_pass = seed, step, 0, None
        self._later.clear()

    @property
    def samples(self) -> Sequence[int] | None:
        """The ids of the samples in the pass; None: they are counted from 0."""
        return self._samples

    @samples.setter
    def samples(self, ids: Sequence[int] | None) -> None:
        self._samples, self._of_pass = ids, None

    def keys(self, site: str, samples: int) -> list[int]:
        """The keys of a call of a dropout, one for each sample.

        Args:
            site: the full name of the dropout.
            samples: how many are expected, the size of its input's first dimension.

        Raises:
            ValueError: the pass has another number of samples.
            ScriptRefusal: the call is repeated, and nothing says which one it is.
        """
        ids = range(samples) if self._samples is None else self._samples
        if len(ids) != samples:
            raise ValueError(
                f"{site}: a dropout's input must have the samples as its first dimension: "
                f"{samples} there, {len(ids)} samples"
            )
        number = self.called(site)
        return [_key(self._seed, self._step, i, site, number) for i in ids]

    def called(self, site: str) -> int:
        """The number of a call of a dropout in the pass of its section. Outside of a pass the call is one that
        torch.utils.checkpoint repeats in the backward pass, or the only one."""
        mark = next_mark()
        later = self._later.get(site)
        if self._calls is None and later is not None and not mark:
            raise ScriptRefusal(
                f"{site}: this nn.Dropout is called several times in a pass, and a backward pass repeats a "
                "call that the state of torch's generator does not name: give each call an nn.Dropout of its "
                "own, or leave torch.utils.checkpoint its preserve_rng_state=True"
            )
        if self._calls is None:
            return later.get(mark, 1) if later is not None else 1
        self._calls[site] += 1
        if self._calls[site] > 1:
            self._later.setdefault(site, {})[mark] = self._calls[site]
        return self._calls[site]

    def on(self, keys: Sequence[Sequence[int]], device: torch.device) -> Tensor:
        """Keys of samples [draws, samples] on a device; of a packed row those of its tokens [draws, tokens]."""
        put_there = put(torch.tensor(keys, dtype=torch.int64), device)
        if self.tokens is None:
            return put_there
        sample, position = self.tokens
        return _mixed(put_there[:, sample] + (position + 1) * _GOLDEN)

    def around(
        self,
        section: str,
        module: nn.Module,
        check: Callable[[Any, Any], None] = lambda entered, output: None,
    ) -> Callable[..., Any]:
        """A section with its draws keyed: called in place of the module for every forward pass, also for those
        of recomputation. Where no dropout is, seeds are enough (`SeededSection`).

        Args:
            section: its name.
            module: called for a pass.
            check: called with the input and the output of a pass that gave no tensor.
        """
        dropouts = [each for each in module.modules() if isinstance(each, Dropout)]
        if not dropouts:
            return SeededSection(self, section, module, check)

        def dropping(entered: Any) -> Any:
            with self.section(section):
                self._give_keys(dropouts, entered)
                try:
                    output = module(entered)
                finally:
                    for each in dropouts:
                        each.ready = None
            if not isinstance(output, Tensor):
                check(entered, output)
            return output

        return dropping

    def _give_keys(self, dropouts: Sequence[Dropout], entered: Any) -> None:
        """Gives the dropouts of a section the keys of their first call in a pass: they go to the device in one
        copy, and a graph of torch.compile takes them as it takes the activation."""
        drawing = [each for each in dropouts if each.training and each.p > 0]
        device = next((x.device for x in _tensors_of((entered,))), None)
        if self._samples is None or not drawing or device is None:
            return
        keys = [[_key(self._seed, self._step, i, each.site, 1) for i in self._samples] for each in drawing]
        for each, row in zip(drawing, self.on(keys, device), strict=True):
            each.ready = row
            if self._calls is not None:
                self._calls[each.site] = 1

    @contextmanager
    def section(self, place: str) -> Iterator[None]:
        """`keyed`, and calls of dropouts are counted from 1 on: the forward pass of a section."""
        with self.keyed(place):
            self._calls = Counter()
            self._passes += 1
            set_mark((_TAG << 48) + (self._passes << 20) % (1 << 48))
            try:
                yield
            finally:
                self._calls = None

    def keyed(self, place: str, samples: Sequence[int] | None = None) -> AbstractContextManager[None]:
        """Inside, draws that no site keys (F.dropout, torch.rand) are a function of step, samples and place.

        So members of a TP group draw the same, and so does recomputation. It holds for torch's generators of
        the CPU and of the accelerator in use, Python's and NumPy's, whose states are restored afterwards, or at
        the end of the `kept` around it. Every pass is keyed, because whether one draws may depend on the step,
        the samples, or a probability that the user changes.

        Args:
            place: the section, "loss", "collate" or `DATASET`.
            samples: ids of the samples, of draws that communicate with nobody; None: those of the pass.
        """
        if samples is None and self.keeps and self.drew is None:
            seed_all(self.seed_of(f"{place}/0".encode()), self.generators)
            return nullcontext()
        return self._keyed(place, samples)

    def seed_of(self, place: bytes) -> int:
        """The seed of a place in the pass, which is `_key` of seed, step, samples and place.

        Args:
            place: its name, "/", and 0.
        """
        if self._of_pass is None:
            ids = "all" if self._samples is None else ",".join(map(str, self._samples))
            self._of_pass = hashlib.blake2b(f"{self._seed}/{self._step}/{ids}/".encode(), digest_size=8)
        digest = self._of_pass.copy()
        digest.update(place)
        return int.from_bytes(digest.digest(), "little") & _SEEDS

    def seed_torch(self, place: bytes) -> None:
        """Seeds torch's generators for a place, as `seed_of` has it, that draws from no others as far as is
        known."""
        seed_torch(self.seed_of(place), self.generators)

    @contextmanager
    def _keyed(self, place: str, samples: Sequence[int] | None) -> Iterator[None]:
        # What needs no other rank is done by one thread at a time: ranks in threads share the generators.
        alone = nullcontext() if samples is None else STATES
        if samples is None:
            seed = self.seed_of(f"{place}/0".encode())
        else:
            own = self._dataset if place == DATASET else self._seed
            seed = _key(own, self._step, ",".join(map(str, samples)), place, 0) & _SEEDS
        with self.kept(), alone:
            seed_all(seed, self.generators)
            seeded = states() if self.drew is not None and place != DATASET else None
            try:
                yield
            finally:
                if self.drew is not None and seeded is not None and states() != seeded:
                    self.drew.add(place)

    @property
    def may_leave_seeds_out(self) -> bool:
        """True if passes of sections that draw nothing need no seeds: they can be repeated."""
        return self.repeats and self.keeps and self.drew is None

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Restores the states of all generators at the end, once for all that is keyed inside."""
        if self.keeps:
            yield
            return
        self.keeps, self.generators = True, generators()
        try:
            with kept_states():
                yield
        finally:
            self.keeps = False


#: Passes of a section that are watched for draws from the host's generators before their seeds are left out.
_WATCHED = 3


class SeededSection:
    """A section without dropouts: the generators are seeded before each of its forward passes.

    To seed generators takes longer than a small section's own calls, and few sections draw from them. So once
    some passes drew from neither Python's generator nor NumPy's, a pass begins without those seeds. If it draws
    from them after all, it is repeated with the seeds, and so each later pass has them from the beginning: what
    is drawn is the same in any case. A pass that cannot be repeated has them, too: it communicates, or changes
    its input in place. Passes of several sections that drew from torch's generators neither have no seed at
    all, and are repeated together (`UnseededPasses`).
    """

    def __init__(
        self, drawing: ModelRng, section: str, module: nn.Module, check: Callable[[Any, Any], None]
    ) -> None:
        """As `ModelRng.around`."""
        self._drawing, self._module, self._check = drawing, module, check
        self._section, self._place = section, f"{section}/0".encode()
        self._watched = 0  # passes that were watched; none drew from the host's generators
        self._always = False  # one did, or changed its input
        self._from_torch = False  # one drew from torch's generators, or that is not known
        self._unseeded = False  # passes begin without the seeds of the host
        self._tensors = True  # all that were watched gave a tensor

    @property
    def draws_nothing(self) -> bool:
        """True if passes were watched, and none drew from any generator."""
        return self._unseeded and not self._from_torch

    def __call__(self, entered: Any) -> Any:
        """A forward pass.

        Raises:
            ScriptRefusal: it draws from the host's generators for the first time, and has changed its input.
        """
        drawing, changes = self._drawing, host_seeds.changes
        if not drawing.keeps or drawing.drew is not None:
            with drawing.keyed(self._section):
                output = self._module(entered)
        elif self._unseeded and host_seeds.undrawn():
            drawing.seed_torch(self._place)
            again = entered if type(entered) is Tensor else _again(entered)
            versions = _versions(again)
            output = self._module(entered)
            if not host_seeds.undrawn() and changes == host_seeds.changes:
                output = self._repeat(again, versions)
        else:
            seed_all(drawing.seed_of(self._place), drawing.generators)
            output = self._module(entered) if self._always else self._watch(entered)
        if not isinstance(output, Tensor):
            self._check(entered, output)
        return output

    @property
    def unseeded(self) -> Callable[[Any], Any]:
        """A forward pass without seeds: the module itself, unless its outputs are to be checked."""
        return self._module if self._tensors else self._checked

    def _checked(self, entered: Any) -> Any:
        output = self._module(entered)
        if not isinstance(output, Tensor):
            self._check(entered, output)
        return output

    def _watch(self, entered: Any) -> Any:
        """A pass after all seeds, which shows which of them it needs."""
        again = _again(entered)
        versions, changes = _versions(again), host_seeds.changes
        before, seedings = states(), _changes
        output = self._module(entered)
        self._tensors = self._tensors and isinstance(output, Tensor)
        drew = not host_seeds.undrawn() and changes == host_seeds.changes
        self._from_torch |= states() != before or seedings != _changes
        self._always = drew or again is None or _versions(again) != versions
        self._watched += 1
        self._unseeded = self._watched >= _WATCHED and self._drawing.repeats and not self._always
        return output

    def _repeat(self, entered: Any, versions: int | list[int]) -> Any:
        """A pass once more, after all seeds."""
        self._always, self._unseeded = True, False
        _refuse_changed(self._section, entered, versions)
        seed_all(self._drawing.seed_of(self._place), self._drawing.generators)
        return self._module(entered)


class UnseededPasses:
    """Forward passes of sections, each of which draws nothing as far as is known, without any seed.

    Make one before them. The generators are looked at once, after them: if one of the sections drew after all,
    the passes are repeated with seeds.
    """

    def __init__(self, drawing: ModelRng, sections: str, entered: Any) -> None:
        """
        Args:
            drawing: keeps the generators' states around them.
            sections: their names, for people.
            entered: what the first one is called with.
        """
        self._sections, self._again = sections, _again(entered)
        self._versions, self._generators = _versions(self._again), drawing.generators
        if not host_seeds.undrawn():  # after a seed a few words of the host's generators say whether one draws
            seed_all(drawing.seed_of(f"{sections}/0".encode()), drawing.generators)
        self._changes, self._torchs = _changes, _places(drawing.generators)

    @property
    def drew(self) -> bool:
        """True if somebody drew since, or if nobody can tell because generators were seeded meanwhile."""
        if not host_seeds.undrawn() or self._changes != _changes:
            return True
        return _places(self._generators) != self._torchs

    def entered(self) -> Any:
        """The input that the passes are to be repeated with.

        Raises:
            ScriptRefusal: they changed it.
        """
        _refuse_changed(self._sections, self._again, self._versions)
        return self._again


def _refuse_changed(section: str, entered: Any, versions: int | list[int]) -> None:
    """Raises ScriptRefusal where a pass, which is to be repeated, changed what it was called with."""
    if entered is None or _versions(entered) != versions:
        raise ScriptRefusal(
            f"{section} draws random numbers for the first time, and changes its input in place: make a new "
            "tensor of the input"
        )


def _again(entered: Any) -> Any:
    """The arguments for a second pass; None: it cannot be copied."""
    return dict(entered) if type(entered) is dict else entered if isinstance(entered, Tensor) else None


def _versions(entered: Any) -> int | list[int]:
    """The number of times that each tensor was changed in place."""
    if isinstance(entered, Tensor):
        return 0 if entered.is_inference() else entered._version
    return [tensor._version for tensor in _tensors_of((entered,)) if not tensor.is_inference()]


#: Bytes of the state of torch's generator on the CPU that have the seed by which it was begun. No draw depends
#: on them, and a seed of ours is less than 2^62, so that they have room for a mark: a tag, 28 bits with the
#: number of the pass, and 20 with the number of the call in it, over all dropouts.
_MARKED, _TAG = 8, 0x6B65


def next_mark() -> int:
    """The mark in the state of torch's generator, which gets that of the next call; 0: there is none."""
    mark: int = torch.default_generator.initial_seed()
    if mark >> 48 != _TAG:
        return 0
    set_mark(mark + 1)
    return mark


def set_mark(mark: int) -> None:
    """Puts a mark into the state of torch's generator. What it draws stays the same."""
    with STATES:
        state = torch.default_generator.get_state()
        state.numpy()[:_MARKED].view(np.int64)[0] = mark
        torch.default_generator.set_state(state)


#: The largest seed.
_SEEDS = 2**62 - 1
#: How often generators were seeded or restored here, and the last seed.
_changes = _seeded = 0


def seed_all(seed: int, torchs: Iterable[torch.Generator] | None = None) -> None:
    """Seeds torch's generators, Python's and NumPy's.

    Args:
        seed: less than 2^62, so that torch's generator has room for a mark.
        torchs: torch's; None: those of the CPU and of the accelerator in use.
    """
    global _changes, _seeded
    with STATES:
        _changes, _seeded = _changes + 1, seed
        for generator in generators() if torchs is None else torchs:
            generator.manual_seed(seed)
        seed_host(seed)


def seed_torch(seed: int, torchs: Iterable[torch.Generator]) -> None:
    """Seeds some of torch's generators alone. `seed`: as that of `seed_all`."""
    global _changes, _seeded
    with STATES:
        _changes, _seeded = _changes + 1, seed
        for generator in torchs:
            generator.manual_seed(seed)


def states() -> list[object]:
    """All that draws depend on, to be compared: the mark of a call is left out."""
    with STATES:
        host, *others = [generator.get_state() for generator in generators()]
    return [*(state.numpy().tobytes() for state in (host[_MARKED:], *others)), *_other_states()]


#: Bytes of the state of torch's generator on the CPU that have its words. Before them are the places of the
#: next ones, and behind them is a second normal draw, which waits for the next call.
_WORDS = slice(24, 24 + 624 * 8)


def _places(torchs: Iterable[torch.Generator]) -> list[bytes]:
    """Of the states of torch's generators, the host's first, a few bytes that each draw changes."""
    with STATES:
        host, *others = [generator.get_state().numpy() for generator in torchs]
    parts = host[_MARKED : _WORDS.start + 16], host[_WORDS.stop :]
    return [part.tobytes() for part in (*parts, *others)]


def _other_states() -> HostStates:
    """Those of Python's generator and of NumPy's."""
    with STATES:
        return host_states()


@dataclass
class Draws:
    """Says whether somebody drew between two moments."""

    drew: bool = False
    of_thread: bool = False  #: the watched thread drew, whatever others did


@contextmanager
def watching() -> Iterator[Draws]:
    """Notes whether somebody drew inside. If generators were seeded or restored here meanwhile, nobody can
    tell, and the answer is no: hold `STATES` around it to be sure."""
    changes, before, draws = _changes, states(), Draws()
    yield draws
    draws.drew = states() != before and changes == _changes  # in this order: others seed meanwhile


@contextmanager
def watching_thread() -> Iterator[Draws]:
    """`watching` on a thread beside the one that trains. Draws from torch's generators are those of this
    thread, seen as its operations are called, whatever others do meanwhile."""
    changes, before, draws = _changes, (_others_seed(), *_other_states()), Draws()
    with TorchDraws() as torchs:
        yield draws
    draws.of_thread = torchs.drew
    draws.drew = torchs.drew or ((_others_seed(), *_other_states()) != before and changes == _changes)


def _others_seed() -> int:
    """The seed of torch's generator, which is read without its mutex; 0: one of ours, or with a mark."""
    seed: int = torch.default_generator.initial_seed()
    return 0 if seed == _seeded or seed >> 48 == _TAG else seed


@contextmanager
def kept_states() -> Iterator[None]:
    """Restores the states of torch's default generators, Python's and NumPy's at the end."""
    global _changes
    with STATES:
        saved = [(generator, generator.get_state()) for generator in generators()]
        python_and_numpy = host_states()
    try:
        yield
    finally:
        with STATES:
            _changes += 1
            for generator, state in saved:
                generator.set_state(state)
            restore_host_states(python_and_numpy)


@contextmanager
def begun_at(seed: int) -> Iterator[None]:
    """Inside, all generators were seeded and no other thread changes them; afterwards they are as they were."""
    with STATES, kept_states():
        seed_all(seed)
        yield


def _tensors_of(args: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors that a section is called with: one, or a bundle, or those of a batch."""
    for arg in args:
        if isinstance(arg, Tensor):
            yield arg
        elif isinstance(arg, Mapping):
            yield from _tensors_of(arg.values())


def _key(*parts: object) -> int:
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little", signed=True)


#: By how many bits each part of a round shifts, and what it multiplies by.
_ROUND = ((30, _FIRST), (27, _SECOND), (31, None))


def _mixed(x: Tensor) -> Tensor:
    for shift, factor in _ROUND:
        x = _mixed_once(x, shift, factor)
    return x


def _mixed_once(x: Tensor, shift: int, factor: int | None) -> Tensor:
    x = x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))
    return x if factor is None else x * factor


def kept(
    keys: Sequence[int], shape: Sequence[int], start: Sequence[int], p: float, device: torch.device
) -> Tensor:
    """A dropout mask, true with probability 1 - p (SplitMix64, Steele, Lea and Flood, 2014).

    Args:
        keys: of each sample.
        shape: of the box of each sample's mask.
        start: where the box begins in the full mask.
        p: the probability of False.
        device: of the mask.

    Returns:
        [samples, *shape], bool.
    """
    return _kept(put(torch.tensor(keys, dtype=torch.int64), device), shape, start, _least(p))


def _least(p: float) -> int:
    """The least draw that is kept."""
    return round(p * (1 << _BITS))


def _kept(state: Tensor, shape: Sequence[int], start: Sequence[int], least: int) -> Tensor:
    # Not `_mixed`: a function's argument stays alive as long as its caller has it, and is as large as the mask.
    for size, first in zip(shape, start, strict=True):
        index = torch.arange(first + 1, first + size + 1, dtype=torch.int64, device=state.device)
        state = state.unsqueeze(-1) + index * _GOLDEN
        for shift, factor in _ROUND:
            state = _mixed_once(state, shift, factor)
    return ((state >> (64 - _BITS)) & ((1 << _BITS) - 1)) >= least


def dropped(x: Tensor, keys: Tensor, start: Sequence[int], least: int, scale: float) -> Tensor:
    """x [samples, ...] x its mask x the scale, by the keys of its samples [samples]."""
    return x * _kept(keys, x.shape[1:], start, least) * scale


_Dropped = Callable[[Tensor, Tensor, Sequence[int], int, float], Tensor]


def fused() -> _Dropped:
    """`dropped` as one kernel, instead of more than thirty, made by torch.compile: every operation is on
    integers until the last, so that its masks are the same to the bit."""
    compiled: _Dropped = torch.compile(dropped, dynamic=True)
    return compiled


@lru_cache(maxsize=8)
def _dropped_on(kind: str) -> _Dropped:
    """`fused` where torch.compile makes kernels of a type of device, as long as it succeeds; else `dropped`."""
    if kind == "cpu" or importlib.util.find_spec("triton") is None:
        return dropped
    made: list[_Dropped] = []

    def call(x: Tensor, keys: Tensor, start: Sequence[int], least: int, scale: float) -> Tensor:
        try:
            made[:] = made or [fused()]
            return made[0](x, keys, start, least, scale)
        except Exception as error:
            log.warning("dropouts are made of many kernels: torch.compile made no one of them: %s", error)
            made[:] = [dropped]
            return dropped(x, keys, start, least, scale)

    return call


@dataclass(frozen=True, kw_only=True)
class DropoutCut:
    """The cut of a dropout's input in a TP group."""

    dim: int  # the dimension of the input
    first: int  # the first of this member's units
    units: int  # its number of units; each has the same number of elements along `dim`

    def start(self, size: int) -> int:
        """The index in the full input of the first of `size` elements that this member has along `dim`."""
        return self.first * (size // self.units) if self.units else 0


class Dropout(nn.Module):
    """Drops elements of a tensor [samples, ...] with probability p, the same under every layout.

    It takes the place of every nn.Dropout of a model. `site` names it; `cut` says where its input is cut in a
    TP group, if it is. Otherwise the input may be a slice of the tokens: `first_token` says by their number
    which the first one is. `ready` has the keys of the first call in the pass of its section, [samples]; of a
    packed row [tokens], because each of its tokens is dropped as in its sample."""

    def __init__(self, p: float, site: str = "") -> None:
        super().__init__()
        self.p, self.site = p, site
        self.drawing = ModelRng()
        self.cut: DropoutCut | None = None
        self.first_token: Callable[[int], int] | None = None
        self.ready: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Sets elements to 0 with probability p and scales the others by 1 / (1 - p), in training mode.

        Args:
            x: [samples, ...], of the samples that `drawing` names; of a packed row [1, tokens, ...].

        Raises:
            ValueError: `x` has another number of samples, or of tokens in a row, than `drawing`.
        """
        if not self.training or self.p == 0:
            return x
        start = [0] * (x.dim() - 1)
        if self.cut is not None:
            dim = self.cut.dim % x.dim()
            start[dim - 1] = self.cut.start(x.shape[dim])
        elif self.first_token is not None and x.dim() > 1:
            start[0] = self.first_token(x.shape[1])
        keys, self.ready = self.ready, None
        if keys is not None and not torch.compiler.is_compiling():
            next_mark()
        scale = 1 / (1 - self.p) if self.p < 1 else 0.0
        drop = dropped if torch.compiler.is_compiling() else _dropped_on(x.device.type)
        if self.drawing.tokens is not None:
            keys = self._of_tokens(x, keys, start[0] if start else 0)
            return drop(x[0], keys, start[1:], _least(self.p), scale)[None]
        if keys is None or keys.shape[0] != x.shape[0]:
            keys = self._next_keys(x.shape[0], x.device)
        return drop(x, keys.to(x.device), start, _least(self.p), scale)

    def _of_tokens(self, x: Tensor, keys: Tensor | None, first: int) -> Tensor:
        """The keys of those tokens of a packed row, from the `first` on, that `x` [1, tokens, ...] has."""
        if keys is None:
            keys = self._next_keys(-1, x.device)
        here = x.shape[1] if self.first_token is not None and x.dim() > 1 else keys.shape[0]
        if x.dim() < 2 or tuple(x.shape[:2]) != (1, here) or here > keys.shape[0] - first:
            raise ValueError(
                f"{self.site}: a dropout's input must be [1, tokens, ...] of the {keys.shape[0]} tokens of a "
                f"packed row, not {tuple(x.shape)}"
            )
        return keys[first : first + x.shape[1]].to(x.device)

    @breaks_graphs
    def _next_keys(self, samples: int, device: torch.device) -> Tensor:
        drawing = self.drawing
        if drawing.tokens is not None:
            samples = len(drawing.samples or ())
        return drawing.on([drawing.keys(self.site, samples)], device)[0]

    def extra_repr(self) -> str:
        """The probability, for `print(model)`."""
        return f"p={self.p}"
