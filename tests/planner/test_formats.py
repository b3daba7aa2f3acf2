"""Problems as files: what is read, what is refused and how, what is answered."""

import json
import math
from typing import Any

import pytest
from elasticd_planner.problem_files.convert import cost_of, rates_of
from elasticd_planner.problem_files.file_format import answer, load
from elasticd_planner.problem_files.solve import solve
from elasticd_planner.value import Invalid

from tests.planner.tables import REFERENCE, golden


def changed(path: str, value: Any) -> str:
    """A golden problem with one key set."""
    text = json.loads(json.dumps(REFERENCE["problems"]["70b"]))
    *parents, last = path.split(".")
    at: Any = text
    for name in parents:
        at = at[int(name)] if name.isdigit() else at.setdefault(name, {})
    at[last] = value
    return json.dumps(text)


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("batch.global_batch", "64", ["batch.global_batch", "'64'"]),
        ("batch.global_batch", 0, ["batch", "global_batch 0"]),
        ("batch.micro_batch", 7, ["micro-batches of 7", "64"]),
        ("batch.samples", 3, ["samples"]),
        ("model.layers", -2, ["model", "layers -2"]),
        ("model.tp_slowdown", {}, ["tp_slowdown"]),
        ("model.tp_slowdown", {"x": 1.0}, ["tp_slowdown"]),
        ("model.memory.layer_mib_by_stage", [], ["layer_mib_by_stage"]),
        ("cluster.nodes.1.devices", 0, ["cluster.nodes[1]", "devices 0"]),
        ("cluster.nodes.1.memory_mib", "big", ["cluster.nodes[1].memory_mib", "'big'"]),
        ("cluster.nodes.1.name", "n0", ["'n0' is there twice"]),
        ("cluster.nodes", [], ["nodes is empty"]),
        ("pins.tp", 3, ["pins.tp 3", "[1, 2, 4, 8]"]),
        ("pins.dp", 65, ["pins.dp 65", "64 micro-batches"]),
        ("rates.n9/0", 2.0, ["'n9/0' is not a device"]),
        ("rates.n0/0", 0.0, ["n0/0 0.0", "slower than normal"]),
        ("colour", "red", ["colour"]),
    ],
)
def test_what_is_wrong_is_named_with_key_and_value(path: str, value: Any, words: list[str]) -> None:
    with pytest.raises(Invalid) as caught:
        load(changed(path, value))
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_no_json_is_refused() -> None:
    with pytest.raises(Invalid, match="no JSON"):
        load("{")


def test_a_dead_device_is_null_and_a_fast_node_divides_its_rates() -> None:
    text = json.loads(changed("cluster.nodes.1.speed", 2.0))
    text["rates"] = {"n0/3": None, "n1/0": 3.0}
    rates = rates_of(load(json.dumps(text)))
    assert math.isinf(rates["n0/3"])
    assert rates["n1/0"] == 1.5
    assert rates["n1/1"] == 0.5
    assert "n2/0" not in rates


def test_the_cost_is_that_of_the_format() -> None:
    cost = cost_of(golden("70b", uneven=True))
    from elasticd_planner.spec.cluster import Link

    assert cost.group([1.0, 1.0], (1, 1), Link()).block == 3.66
    assert cost.group([1.0, 5.42], (54, 10), Link()).block == pytest.approx(3.66 * 2 * 54.2 / 64)
    one = cost.memory(20, (1,) * 8, 0, first=True, last=False, in_flight=4)
    assert one == pytest.approx(((20 * 2110 + 600) * 8 / 8 + 4700 + 4096) * 2**20)
    deep = cost.memory(1, (1,), 0, first=False, last=False, in_flight=30)
    assert deep == pytest.approx((2895 * 8 + 4700 + 4096) * 2**20)


def test_the_answer_has_the_keys_of_the_format() -> None:
    problem = golden("70b", {"n0/0": 2.57})
    planned = solve(problem)
    made = json.loads(json.dumps(answer(planned, 0.25)))
    assert set(made["figures"]) == {"steady", "step", "bound", "gap", "ideal"}
    assert made["planning_seconds"] == 0.25
    assert "TP8" in made["reason"]
    (module,) = made["plan"]["modules"]
    assert module["module"] == "model"
    assert sum(p["micro_batches"] for p in module["pipelines"]) == 64
    for pipeline in module["pipelines"]:
        at = 0
        for stage in pipeline["stages"]:
            assert sum(stage["shares"]) == pytest.approx(1)
            assert len(stage["shares"]) == len(stage["devices"])
            assert stage["layers"][0] == at
            at = stage["layers"][1]
        assert at == 80
    used = {d for p in module["pipelines"] for s in p["stages"] for d in s["devices"]}
    assert len(used) + len(made["plan"]["idle"]) == 64
    assert not used & set(made["plan"]["idle"])
    healthy = solve(golden("70b")).figures
    assert healthy is not None
    assert made["figures"]["ideal"] == pytest.approx(healthy.step * 64 / (63 + 1 / 2.57))


def test_a_refused_problem_has_no_answer_but_its_reason() -> None:
    text = json.loads(changed("cluster.nodes", [{"name": "n0", "devices": 8, "memory_mib": 20000}]))
    text["pins"] = {}
    planned = solve(load(json.dumps(text)))
    with pytest.raises(Invalid, match=r"does not fit: the nearest plan needs .* GiB more on n0/"):
        answer(planned, 0.0)
