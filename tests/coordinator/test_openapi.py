"""The REST's OpenAPI document holds for whatever is asked, of a real leader; it lists every route there is."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import cast

import httpx2
import msgspec
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import ignored_auth, positive_data_acceptance
from starlette.routing import Route

from elasticd.config.security import SecuritySection
from elasticd.coordinator.http.api import ApiRoutes, Served
from elasticd.coordinator.http.app import application
from elasticd.coordinator.http.chaos import ChaosRoutes
from elasticd.coordinator.http.openapi import document
from elasticd.coordinator.http.routing import ApiRoute, endpoints
from elasticd.machines.job.state.events import AgentUp
from elasticd.wire.api_types import ClusterStatus, Refusal
from tests import sizes
from tests.coordinator.agents import config
from tests.coordinator.elsewhere import Leader, leading
from tests.coordinator.secured import OPERATOR, tokens
from tests.machines.cast import node_record

EXAMPLES = sizes.examples(12)


def prepared(security: SecuritySection) -> Iterator[Leader]:
    """A leader that knows two nodes, one of which is away, and a job that gathers."""
    with leading(msgspec.structs.replace(config(), security=security)) as leader:

        def fill() -> None:
            ours = leader.coordinator.leading
            for node in ("alpha", "beta"):
                ours.apply(AgentUp(record=node_record(node)))

        leader.call(fill)
        yield leader


@pytest.fixture(scope="module")
def open_leader() -> Iterator[Leader]:
    yield from prepared(SecuritySection())


@pytest.fixture(scope="module")
def secured_leader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Leader]:
    yield from prepared(tokens(tmp_path_factory.mktemp("tokens")))


#: Well-formed requests may be refused: a device that is not there, a value that changes nothing. Who is let in
#: has tests of its own (test_auth).
UNASKED = [positive_data_acceptance, ignored_auth]
bounded = settings(
    max_examples=EXAMPLES, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
#: What the document lists, for a leader that is not there: a declaration needs none.
DECLARED = (*endpoints(ApiRoutes(cast(Served, None))), *endpoints(ChaosRoutes(cast(Served, None))))
#: A recording and the live feed go on until the caller goes (tests/simulation/test_replay.py, test_live_feed).
OPERATIONS = [
    pytest.param(known, id=f"{known.method} {known.path}")
    for known in DECLARED
    if known.name not in ("record", "live_feed")
]
TAKING = [pytest.param(known, id=f"{known.method} {known.path}") for known in DECLARED if known.body]


def fuzzed(leader: Leader, known: ApiRoute, token: str, mode: GenerationMode) -> int:
    """Asks as the leader's own document says, or, in the negative mode, against it; each answer is checked.
    The number of calls."""
    headers = {"authorization": f"Bearer {token}"} if token else {}
    schema = schemathesis.openapi.from_asgi("/v1/openapi.json", leader.app, headers=headers)
    calls = 0

    @given(case=schema[known.path][known.method].as_strategy(generation_mode=mode))
    @bounded
    def holds(case: schemathesis.Case) -> None:
        nonlocal calls
        calls += 1
        case.call_and_validate(headers=headers, timeout=300, excluded_checks=UNASKED)

    holds()
    return calls


@pytest.mark.parametrize("token", ["", OPERATOR], ids=["open", "secured"])
@pytest.mark.parametrize("known", OPERATIONS)
def test_every_answer_is_one_that_the_document_promises(
    open_leader: Leader, secured_leader: Leader, known: ApiRoute, token: str
) -> None:
    leader = secured_leader if token else open_leader
    assert fuzzed(leader, known, token, GenerationMode.POSITIVE) >= 1


@pytest.mark.parametrize("known", TAKING)
def test_bodies_against_the_document_are_refused_as_it_says(open_leader: Leader, known: ApiRoute) -> None:
    assert fuzzed(open_leader, known, "", GenerationMode.NEGATIVE) >= EXAMPLES // 2


def test_fuzzing_left_a_leader_that_leads(open_leader: Leader) -> None:
    assert open_leader.call(open_leader.coordinator.ready) == ""
    shown = open_leader.run(open_leader.coordinator.status())
    assert {node.node for node in shown.nodes} == {"alpha", "beta"}


def test_document_has_every_route_with_its_methods(open_leader: Leader) -> None:
    app = application(open_leader.coordinator, requests_per_second=1e9)
    served = {
        (route.path, method.lower())
        for route in app.routes
        if isinstance(route, Route)
        for method in (route.methods or set()) - {"HEAD"}
    }
    drawn = document(DECLARED, asks=False)["paths"]
    assert served == {(path, method) for path, methods in drawn.items() for method in methods}


def test_a_method_that_a_path_lacks_is_answered_with_those_that_it_has(open_leader: Leader) -> None:
    async def ask() -> httpx2.Response:
        there = httpx2.ASGITransport(app=open_leader.app)
        async with httpx2.AsyncClient(transport=there, base_url="http://leader") as client:
            return await client.delete("/v1/config")

    answer = asyncio.run(ask())
    assert answer.status_code == 405
    assert {"GET", "POST"} <= set(answer.headers["allow"].split(", "))


def test_who_asks_for_no_tokens_documents_none() -> None:
    assert "securitySchemes" not in document(DECLARED, asks=False)["components"]
    paths = document(DECLARED, asks=True)["paths"]
    assert paths["/v1/config"]["post"]["security"] == [{"token": []}, {"certificate": []}]
    assert "security" not in paths["/livez"]["get"]
    assert "viewer or operator" in paths["/v1/status"]["get"]["description"]


def test_types_of_answers_are_those_of_the_values() -> None:
    components = document(DECLARED, asks=False)["components"]["schemas"]
    assert set(components[ClusterStatus.__name__]["required"]) == {"cluster", "leader", "nodes", "jobs"}
    assert components[Refusal.__name__]["properties"] == {"error": {"type": "string"}}
