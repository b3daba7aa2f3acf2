"""`Stream`, an iterable dataset: the plan's first rank alone reads it, and sends each rank its samples of a
step.

The position is the dataset's own `state_dict()` after the last sample of a step. Every member receives it with
the samples of the step. It becomes part of the state when the step is applied, so it moves with switches,
snapshots and checkpoints; a later first rank loads it and reads on from there. The samples of a step that a
fault undid are read again from the position before it, unless the reader still has them.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import msgspec
import torch
from elasticd_migration.text_codec import from_text, to_text
from elasticd_planner.spec.batch import BatchLengths, BatchPlan, ids_of
from elasticd_planner.spec.plan import Plan
from msgspec import structs
from torch import Tensor

from elasticd.runtime.comm.groups import Group
from elasticd.runtime.data.collate import untokenized
from elasticd.runtime.data.packing import Packing, deal, row_tokens
from elasticd.runtime.data.prefetch import UNREAD, SampleError, SampleKey, index_of
from elasticd.runtime.model.batch_format import BatchFormat
from elasticd.runtime.model.rng import watching_thread
from elasticd.runtime.threads import DaemonThreads
from elasticd.system.user_line import described

log = logging.getLogger(__name__)

#: Tags of messages beside those of stages and of ZeRO.
_SIZE, _HANDED = (1 << 24) + 16, (1 << 24) + 17
#: The most elements of a position, which may hold the state of a random generator.
_MOST_ELEMENTS = 1 << 20
#: Steps that are read once more, alone, since somebody drew while they were read ahead: the stream, or the body
#: of the loop. After so many, further draws from Python's generator and NumPy's are taken for the loop's.
_DOUBTS = 4
_TENSOR, _TUPLE = 1, 2


class StatefulIterable(Protocol):
    """An iterable with a position, such as torchdata's `StatefulDataLoader` with `batch_size=None`.

    `state_dict` gives the position of the newest iteration; after `load_state_dict` the next iteration starts
    there. An iteration that begins after the end of another one is the next pass over the data.
    """

    def __iter__(self) -> Iterator[Any]: ...
    def state_dict(self) -> dict[str, Any]:
        """The position of the newest iteration."""

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Makes the next iteration start at a position."""


@dataclass(frozen=True, kw_only=True)
class Stream:
    """An iterable dataset for `elasticd.Job(dataset=...)`.

    Raises:
        TypeError: the dataset has no `state_dict` and `load_state_dict`.
        ValueError: `tokens` is not positive.
    """

    dataset: StatefulIterable
    tokens: float  #: of a sample, about, on average: for the first plan, before which no sample is read

    def __post_init__(self) -> None:
        lacks = [
            name for name in ("__iter__", "state_dict", "load_state_dict") if not hasattr(self.dataset, name)
        ]
        if lacks:
            raise TypeError(
                f"a stream's dataset has no {lacks[0]}: without state_dict and load_state_dict samples would "
                "be lost or repeated after a fault; use torchdata's StatefulDataLoader, or a map-style dataset"
            )
        if self.tokens <= 0:
            raise ValueError(f"tokens of a stream's sample must be positive, not {self.tokens}")


class _Handed(msgspec.Struct, frozen=True, kw_only=True):
    """The message to a member before a step."""

    tokens: tuple[int, ...] = ()  # of each sample of the global batch
    position: str = ""  # of the dataset after the step
    samples: dict[int, Any] = {}  # those that this member needs, by id
    failed: int = 0  # 1 + id of a sample that could not be read; 0: none
    why: str = ""  # the error of that sample
    problem: str = UNREAD  # what is wrong with it


@dataclass(frozen=True, kw_only=True)
class _Read:
    """The samples of a step, as they were read."""

    before: str | None  #: position before the step; None: the beginning
    after: str  #: position after the step
    samples: Sequence[Any]
    failed: int = 0  #: 1 + id of a sample that could not be read; 0: none
    error: Exception | None = None  #: of that sample
    drew: bool = False  #: somebody drew from a generator that the whole process shares
    alone: bool = False  #: nobody else drew: the training thread waited meanwhile, or the draw was seen here


class Streamed:
    """The `Feed` of a stream, dealt by length. Sample i of step s has the id s x global batch + i."""

    ahead = here = False

    def __init__(
        self,
        stream: Stream,
        global_batch: int,
        linear: int,
        readers: int = 1,
        packing: Packing | None = None,
        reads: BatchFormat | None = None,
    ) -> None:
        self._source = _Source(stream.dataset, global_batch, threaded=readers > 0, reads=reads)
        self._batch, self._linear, self._packing = global_batch, linear, packing
        self._held: Mapping[int, Any] = {}
        self._tokens: tuple[int, ...] = ()
        self.longest = 0

    def want(self, keys: Sequence[SampleKey]) -> None:
        """Does nothing: the samples of a step come when it begins."""

    def take(self, key: SampleKey) -> Any:
        """A sample of the step that has begun.

        Raises:
            SampleError: this rank did not receive it.
        """
        try:
            return self._held[index_of(key)]
        except KeyError:
            raise SampleError(index_of(key), "it was not handed to this rank") from None

    def samples(self, step: int) -> tuple[int, ...]:
        """The ids of a step."""
        return tuple(range(step * self._batch, (step + 1) * self._batch))

    @property
    def packed(self) -> bool:
        """True if sequences are packed."""
        return self._packing is not None

    def dealing(self, plan: Plan, step: int, slowdown: Sequence[int] | None = None) -> Callable[[], BatchPlan]:
        """A function that deals the samples of the step that has begun."""
        lengths = BatchLengths(tokens=self._tokens, linear=self._linear)
        return partial(deal, self._packing, plan, step, self.samples(step), lengths, slowdown)

    def begin(
        self,
        step: int,
        plan: Plan,
        everyone: Group,
        carried: str | None,
        slowdown: Sequence[int] | None = None,
    ) -> str | None:
        """Reads a step's samples from the position `carried`, or receives them; gives the next position. The
        rank that reads knows the cause of a SampleError."""
        cause: BaseException | None = None
        if everyone.rank == 0:
            mine, cause = self._hand_out(step, plan, everyone, carried, slowdown)
        else:
            size = everyone.receive(torch.empty(1, dtype=torch.int64), 0, _SIZE, "input")
            raw = everyone.receive(torch.empty(int(size), dtype=torch.uint8), 0, _HANDED, "input")
            mine = _decoder.decode(raw.numpy().tobytes())
        self.longest = max(self.longest, *(mine.tokens or (0,)))
        if mine.failed:
            raise SampleError(mine.failed - 1, mine.why, mine.problem) from cause
        self._tokens, self._held = mine.tokens, mine.samples
        return mine.position

    def _hand_out(
        self, step: int, plan: Plan, everyone: Group, carried: str | None, slowdown: Sequence[int] | None
    ) -> tuple[_Handed, BaseException | None]:
        read = self._source.take(step, carried)
        if read.error is not None:
            return _failed(everyone, _Handed(failed=read.failed, why=described(read.error))), read.error
        ids = self.samples(step)
        by_id = dict(zip(ids, read.samples, strict=True))
        self._tokens = tuple(map(_tokens if self._packing is None else row_tokens, read.samples))
        try:
            dealt = self.dealing(plan, step, slowdown)()
        except SampleError as error:  # a sample goes into no row
            said = _Handed(tokens=self._tokens, failed=error.index + 1, why=error.why, problem=error.problem)
            return _failed(everyone, said), error.__cause__
        mine, *others = (
            _Handed(
                tokens=self._tokens,
                position=read.after,
                samples={index: by_id[index] for index in _read_by(plan, device, dealt)},
            )
            for device in plan.members
        )
        for rank, handed in enumerate(others, start=1):
            _send(everyone, rank, handed)
        return mine, None


def _failed(everyone: Group, said: _Handed) -> _Handed:
    """Tells all other members of a sample that this step cannot be made of."""
    for rank in range(1, everyone.size):
        _send(everyone, rank, said)
    return said


def _read_by(plan: Plan, device: str, dealt: BatchPlan) -> tuple[int, ...]:
    """The samples that a device needs: those of its lane on the first and last stage."""
    place = plan.places.get(device)
    if place is None:
        return ()
    stages = plan.pipeline(place).stages
    if place.stage not in (0, len(stages) - 1):
        return ()
    return ids_of(piece for micro in dealt.of(place) for piece in micro)


def _send(everyone: Group, rank: int, handed: _Handed) -> None:
    sent = structs.replace(handed, samples={index: _sendable(each) for index, each in handed.samples.items()})
    raw = torch.frombuffer(bytearray(msgspec.msgpack.encode(sent, enc_hook=_packed)), dtype=torch.uint8)
    everyone.send(torch.tensor([raw.numel()]), rank, _SIZE, "input")
    everyone.send(raw, rank, _HANDED, "input")


def _packed(value: Any) -> Any:
    if isinstance(value, Tensor):
        raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        dtype = str(value.dtype).removeprefix("torch.")
        return msgspec.msgpack.Ext(_TENSOR, msgspec.msgpack.encode((dtype, list(value.shape), raw)))
    raise NotImplementedError(f"a {type(value).__name__} in a sample")


def _sendable(part: Any) -> Any:
    """A part of a sample as it is encoded: another rank gets the same types as the one that reads.

    Raises:
        TypeError: it would get another type.
    """
    if part is None or isinstance(part, Tensor | bool | int | float | str | bytes):
        return part
    if isinstance(part, Mapping):
        return {key: _sendable(inner) for key, inner in part.items()}
    if type(part) is list:
        return list(map(_sendable, part))
    if type(part) is tuple:
        inner = msgspec.msgpack.encode(list(map(_sendable, part)), enc_hook=_packed)
        return msgspec.msgpack.Ext(_TUPLE, inner)
    raise TypeError(
        f"it has a {type(part).__name__}: a sample of a stream is a mapping of tensors, numbers, text, bytes, "
        "lists and tuples, which other ranks are sent"
    )


def _unpacked(code: int, data: memoryview) -> Any:
    if code == _TUPLE:
        return tuple(msgspec.msgpack.decode(data, ext_hook=_unpacked))
    dtype, shape, raw = msgspec.msgpack.decode(bytes(data))
    flat = torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
    return flat.view(getattr(torch, dtype)).reshape(shape)


_decoder = msgspec.msgpack.Decoder(_Handed, ext_hook=_unpacked)


def _tokens(sample: Any) -> int:
    return int(next(value.numel() for value in sample.values() if isinstance(value, Tensor)))


def _checked(sample: Any) -> Any:
    """The sample as a dict.

    Raises:
        TypeError: it cannot be sent to other ranks.
    """
    if not isinstance(sample, Mapping) or not any(isinstance(value, Tensor) for value in sample.values()):
        raise TypeError(
            untokenized(sample)
            or f"it is a {type(sample).__name__}: a sample must be a mapping of 1-D tensors, as in "
            '{"inputs": ..., "targets": ...}'
        )
    rest = {key: _sendable(part) for key, part in sample.items() if not isinstance(part, Tensor)}
    msgspec.msgpack.encode(rest, enc_hook=_packed)  # which refuses a number of more than 64 bits
    return dict(sample)


class _Source:
    """Reads a stream on the first rank, a step ahead in a thread of its own."""

    def __init__(
        self, dataset: StatefulIterable, batch: int, *, threaded: bool, reads: BatchFormat | None = None
    ) -> None:
        self._dataset, self._batch, self._reads = dataset, batch, reads
        self._submit: Callable[[Callable[[], _Read]], Future[_Read]] = (
            DaemonThreads("stream") if threaded else _at_once
        )
        self._threaded, self._doubts = threaded, 0
        self._last: _Read | None = None
        self._next: Future[_Read] | None = None
        # Only the reading thread uses these.
        self._iterator: Iterator[Any] | None = None
        self._first: str | None = None
        self._at: str | None = None
        self._rewinds: Sequence[Callable[[], None]] = ()

    def take(self, step: int, position: str | None) -> _Read:
        """The samples of a step that begins at `position`. Samples that are still here are not read again."""
        last = self._last
        if last is not None and last.before == position and not last.failed:
            return last
        ahead = self._next.result() if self._next is not None and last is not None else None
        if ahead is None or ahead.before != position or ahead.failed or self._in_doubt(ahead):
            ahead = self._submit(lambda: self._read(step, position, alone=True)).result()
        self._last, self._next = ahead, None
        if ahead.drew and ahead.alone and self._threaded:
            log.info(
                "the stream draws from a generator that the whole process shares (torch's, Python's or "
                "NumPy's): it is not read ahead any more; give it a generator of its own to have it read ahead"
            )
            self._threaded, self._submit = False, _at_once
        if self._threaded and not ahead.failed:
            self._next = self._submit(lambda: self._read(step + 1, ahead.after))
        return ahead

    def _in_doubt(self, ahead: _Read) -> bool:
        """Returns whether a step that was read ahead is to be read again, to see who drew."""
        if not ahead.drew or ahead.alone or self._doubts >= _DOUBTS:
            return False
        self._doubts += 1
        return True

    def _read(self, step: int, position: str | None, *, alone: bool = False) -> _Read:
        """Reads a step's samples, on the reading thread."""
        with watching_thread() as draws:
            read = self._samples(step, position)
        return replace(read, drew=draws.drew, alone=alone or draws.of_thread)

    def _samples(self, step: int, position: str | None) -> _Read:
        found: list[Any] = []
        try:
            if self._iterator is None or self._at != position:
                self._go_to(position)
            while len(found) < self._batch:
                sample = self._one()
                found.append(_checked(sample if self._reads is None else self._reads.sample(sample)))
            state = to_text(self._dataset.state_dict(), "state_dict() of the dataset", _MOST_ELEMENTS)
        except Exception as error:
            self._iterator = None
            failed = step * self._batch + len(found) + 1
            return _Read(before=position, after="", samples=(), failed=failed, error=error)
        # The state carries text of `text_codec`; so this is the text of a text.
        self._at = to_text(msgspec.json.encode([step + 1, state]).decode())
        return _Read(before=position, after=self._at, samples=found)

    def _go_to(self, position: str | None) -> None:
        if self._first is None:
            self._first = to_text(self._dataset.state_dict(), "state_dict() of the dataset", _MOST_ELEMENTS)
            self._rewinds = tuple(_rewinds(self._dataset))
            if position is None:  # as it was given
                self._iterator = iter(self._dataset)
                return
        text = self._first
        if position is not None:
            _, text = msgspec.json.decode(from_text(position), type=tuple[int, str])
        self._dataset.load_state_dict(from_text(text))
        self._iterator = iter(self._dataset)

    def _one(self) -> Any:
        assert self._iterator is not None
        for sample in self._iterator:
            return sample
        for rewind in self._rewinds:
            rewind()
        self._iterator = iter(self._dataset)  # the next pass
        for sample in self._iterator:
            return sample
        raise RuntimeError("the dataset gives no sample")


def _rewinds(dataset: Any) -> Iterator[Callable[[], None]]:
    """Functions that have the next pass of a dataset begin at its beginning, where it would not: Hugging Face's
    begin each pass where the first one after `load_state_dict` began. Called before any pass."""
    while dataset is not None:
        if type(dataset).__module__.partition(".")[0] == "datasets":
            yield partial(_load, dataset, dataset.state_dict())
        dataset = getattr(dataset, "dataset", None)  # of a loader


def _load(dataset: StatefulIterable, state: dict[str, Any]) -> None:
    dataset.load_state_dict(copy.deepcopy(state))


def _at_once(work: Callable[[], _Read]) -> Future[_Read]:
    future: Future[_Read] = Future()
    future.set_result(work())
    return future


def first_samples(stream: Stream, count: int) -> list[Any]:
    """Up to `count` samples of a stream, for `elasticd check`."""
    iterable: Iterable[Any] = stream.dataset
    return [sample for sample, _ in zip(iterable, range(count), strict=False)]
