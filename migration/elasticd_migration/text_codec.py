"""Settings and small states as text, bit by bit: of parameter groups, schedulers, a gradient scaler.

What torch's `state_dict`s of those are made of is written as JSON with tags; never pickle. Equal values have
equal texts, so that ranks can compare what they have.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import numpy as np
import torch

#: A tensor among settings is a learning rate or a scale, no state.
MOST_ELEMENTS = 1024


class NotPlain(TypeError):
    """A value that no text stands for; the message says where it lies."""


def to_text(value: object, what: str = "value", most: int = MOST_ELEMENTS) -> str:
    """Raises `NotPlain` for anything but numbers (NumPy's too), strings, bytes, None, tensors and arrays of up
    to `most` elements, and lists, tuples and mappings of those; `what` names the value in the message."""
    return msgspec.json.encode(_written(value, what, most)).decode()


def from_text(text: str, device: torch.device | None = None) -> Any:
    """Reads the text of `to_text`; a tensor that was on an accelerator is put on `device`."""
    return _read(msgspec.json.decode(text), device or torch.device("cpu"))


def plain(value: object) -> object:
    """A number of NumPy as the number of Python that it is; anything else as it is."""
    return value.item() if isinstance(value, np.number | np.bool_) else value


def _written(value: object, what: str, most: int) -> Any:
    value = plain(value)
    if value is None or isinstance(value, bool | str) or type(value) is int:
        return value
    if isinstance(value, float):
        return {"float": float(value).hex()}
    if isinstance(value, torch.Tensor):
        if value.numel() > most:
            raise NotPlain(f"{what}: a tensor of {value.numel()} elements is no setting")
        raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        dtype = str(value.dtype).removeprefix("torch.")
        return {"tensor": [dtype, list(value.shape), value.device.type, bytes(raw.tolist()).hex()]}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        if value.size > most:
            raise NotPlain(f"{what}: an array of {value.size} elements is no setting")
        return {"array": [value.dtype.str, list(value.shape), np.ascontiguousarray(value).tobytes().hex()]}
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, list):
        return [_written(item, f"{what}[{i}]", most) for i, item in enumerate(value)]
    if isinstance(value, tuple):
        return {"tuple": [_written(item, f"{what}[{i}]", most) for i, item in enumerate(value)]}
    if isinstance(value, dict):
        pairs = [
            [_written(k, f"{what} key", most), _written(v, f"{what}[{k!r}]", most)] for k, v in value.items()
        ]
        return {"counter" if isinstance(value, Counter) else "dict": pairs}
    raise NotPlain(f"{what}: a {type(value).__name__} cannot be carried to other ranks")


def _read(written: Any, device: torch.device) -> Any:
    if isinstance(written, list):
        return [_read(item, device) for item in written]
    if not isinstance(written, dict):
        return written
    ((tag, body),) = written.items()
    if tag == "float":
        return float.fromhex(body)
    if tag == "bytes":
        return bytes.fromhex(body)
    if tag == "tensor":
        dtype, shape, kind, raw = body
        flat = torch.frombuffer(bytearray.fromhex(raw), dtype=torch.uint8) if raw else torch.empty(0)
        tensor = flat.view(getattr(torch, dtype)) if raw else flat.to(getattr(torch, dtype))
        return tensor.reshape(shape).to("cpu" if kind == "cpu" else device)
    if tag == "array":
        dtype, shape, raw = body
        return np.frombuffer(bytearray.fromhex(raw), dtype=dtype).reshape(shape)
    if tag == "tuple":
        return tuple(_read(item, device) for item in body)
    pairs = {_read(key, device): _read(item, device) for key, item in body}
    return Counter(pairs) if tag == "counter" else pairs
