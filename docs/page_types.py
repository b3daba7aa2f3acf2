"""The values of the dashboard's API as types of TypeScript, by which `npm run check` checks the pages."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Iterator
from typing import Any

import msgspec

from elasticd.dashboard import views

#: Types of TypeScript for those of JSON.
_PLAIN = {str: "string", int: "number", float: "number", bool: "boolean", type(None): "null", Any: "any"}
_HEAD = (
    "// Written by docs/draw.py from elasticd/dashboard/views.py. Do not edit.\n"
    "// `optional?`: left out where it has its default value.\n"
)


def declarations() -> str:
    """An interface for each value, in the order of the module."""
    values = [
        value
        for value in vars(views).values()
        if inspect.isclass(value) and issubclass(value, msgspec.Struct) and value.__module__ == views.__name__
    ]
    return "\n".join([_HEAD, *(f"{line}" for value in values for line in _interface(value))])


def _interface(value: type[msgspec.Struct]) -> Iterator[str]:
    hints = typing.get_type_hints(value)
    summary = inspect.cleandoc(value.__doc__ or "").splitlines()[0]
    yield f"/** {summary} */"
    yield f"export interface {value.__name__} {{"
    for field in msgspec.structs.fields(value):
        left_out = "?" if value.__struct_config__.omit_defaults and not field.required else ""
        yield f"  {field.encode_name}{left_out}: {_type(hints[field.name])};"
    yield "}\n"


def _type(hint: Any) -> str:
    """The TypeScript of a type. Raises `TypeError` for one that no value has so far."""
    if hint in _PLAIN:
        return _PLAIN[hint]
    if inspect.isclass(hint) and issubclass(hint, msgspec.Struct):
        return hint.__name__
    origin, given = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return " | ".join(f'"{each}"' for each in given)
    if origin in (typing.Union, types.UnionType):
        return " | ".join(dict.fromkeys(_type(each) for each in given))
    if origin is dict:
        return f"Record<{_type(given[0])}, {_type(given[1])}>"
    if origin is tuple and given[-1] is Ellipsis:
        inner = _type(given[0])
        return f"({inner})[]" if " | " in inner else f"{inner}[]"
    if origin is tuple:
        return f"[{', '.join(map(_type, given))}]"
    raise TypeError(f"no type of TypeScript is known for {hint}")
