"""The OpenAPI document of the REST, drawn from the endpoints' declarations and the types of their values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from elasticd.coordinator.http.routing import JSON, ApiRoute, Parameter
from elasticd.version import __version__
from elasticd.wire.api_types import Refusal

#: Why an endpoint is refused, by status.
_WHY = {
    400: "The body or a parameter is wrong: what would be right.",
    401: "This coordinator asks for a token, and none, or one that it does not know, was shown.",
    403: "The token's role may not do this, a page of another site asks for a change, or it is turned off.",
    404: "There is nothing of this name.",
    408: "The body did not come in time.",
    409: "It cannot be done now: why.",
    413: "The body is too large.",
    429: "Too many requests come from this address.",
    503: "Not now: why.",
}
#: How a caller shows who he is.
_SCHEMES = {
    "token": {"type": "http", "scheme": "bearer", "description": "A token of one of the coordinator's files."},
    "certificate": {"type": "mutualTLS", "description": "A certificate of the coordinator's client_ca."},
}


def document(declared: Sequence[ApiRoute], *, asks: bool) -> dict[str, Any]:
    """OpenAPI 3.1. `asks`: whether this coordinator asks who somebody is."""
    kinds = [known.answer for known in declared if known.media == JSON]
    kinds += [known.body for known in declared if known.body is not None]
    kinds += [parameter.kind for known in declared for parameter in (*known.placed, *known.asked)]
    references, components = msgspec.json.schema_components(
        [*kinds, Refusal], ref_template="#/components/schemas/{name}"
    )
    schemas = list(zip([*kinds, Refusal], references, strict=True))
    paths: dict[str, Any] = {}
    for known in declared:
        paths.setdefault(known.path, {})[known.method.lower()] = _operation(known, schemas, asks=asks)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "elasticd coordinator",
            "version": __version__,
            "summary": "What the leading coordinator knows, and what it can be asked to do.",
        },
        "paths": paths,
        "components": {"schemas": components, **({"securitySchemes": _SCHEMES} if asks else {})},
    }


def _operation(known: ApiRoute, schemas: list[tuple[Any, Any]], *, asks: bool) -> dict[str, Any]:
    def schema(kind: Any) -> Any:
        return next(document_schema for other, document_schema in schemas if other is kind)

    words = known.words
    if known.roles:
        words += f"\n\nWhere tokens are asked for: {' or '.join(known.roles)}."
    answer = schema(known.answer) if known.media == JSON else {"type": "string"}
    answers: dict[str, Any] = {"200": _content("Done." if known.body else "The answer.", known.media, answer)}
    for status in known.statuses:
        answers[str(status)] = _content(_WHY[status], JSON, schema(Refusal))
        if status == 429:
            answers["429"]["headers"] = {"Retry-After": {"schema": {"type": "integer"}}}
    operation: dict[str, Any] = {
        "operationId": known.name,
        "summary": known.words.splitlines()[0],
        "description": words,
        "responses": answers,
    }
    if known.placed or known.asked:
        placed = [_parameter(one, "path", schema(one.kind)) for one in known.placed]
        operation["parameters"] = placed + [_parameter(one, "query", schema(one.kind)) for one in known.asked]
    if known.body is not None:
        content = {JSON: {"schema": schema(known.body), "example": msgspec.to_builtins(known.example)}}
        operation["requestBody"] = {"required": True, "content": content}
    if asks and known.roles:
        operation["security"] = [{"token": []}, {"certificate": []}]
    return operation


def _content(words: str, media: str, schema: Any) -> dict[str, Any]:
    return {"description": words, "content": {media: {"schema": schema}}}


def _parameter(known: Parameter, place: str, schema: Any) -> dict[str, Any]:
    parameter: dict[str, Any] = {"name": known.name, "in": place, "required": place == "path", "schema": schema}
    if place == "query":
        parameter["schema"] = {**schema, "default": known.default}
    return parameter
