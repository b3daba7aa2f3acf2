"""`elasticd plan`: a problem in, a picture and figures out; what moves; and what is refused."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from elasticd.cli import plan
from elasticd.cli.app import elasticd
from elasticd.cli.moves import answered

EXAMPLE = Path(__file__).parents[2] / "examples/problems/mixed.json"
PROBLEM: dict[str, Any] = {
    "cluster": {"nodes": [{"name": f"n{i}", "devices": 4, "memory_mib": 80000} for i in range(3)]},
    "model": {"name": "m", "layers": 24, "tp_full": 4, "tp_slowdown": {"4": 1.0, "2": 1.9, "1": 3.7}},
    "batch": {"global_batch": 32, "micro_batch": 1},
    "rates": {"n0/1": 3.0},
}


def run(*arguments: str, **options: Any) -> Result:
    return CliRunner().invoke(elasticd, ["plan", *arguments], env={"COLUMNS": "120"}, **options)


def written(path: Path, **changes: Any) -> str:
    path.write_text(json.dumps({**PROBLEM, **changes}))
    return str(path)


def test_the_answer_as_json_has_figures_and_a_plan_that_covers_the_model(tmp_path: Path) -> None:
    result = run(written(tmp_path / "p.json"), "--json")
    assert result.exit_code == 0, result.output
    answer = json.loads(result.output)
    figures, plan = answer["figures"], answer["plan"]
    assert figures["bound"] <= figures["step"]
    assert figures["gap"] == pytest.approx(figures["step"] / figures["bound"] - 1)
    pipelines = plan["modules"][0]["pipelines"]
    assert sum(pipeline["micro_batches"] for pipeline in pipelines) == 32
    for pipeline in pipelines:
        layers = [tuple(stage["layers"]) for stage in pipeline["stages"]]
        assert layers[0][0] == 0
        assert layers[-1][1] == 24
        assert all(before[1] == after[0] for before, after in pairwise(layers))
        for stage in pipeline["stages"]:
            assert sum(stage["shares"]) == pytest.approx(1)


def test_the_page_shows_what_the_command_prints_of_its_example() -> None:
    page = (EXAMPLE.parents[2] / "docs/planner.md").read_text().split("## A healthy cluster in ten lines")[1]
    shown = page.split("and ends with\n\n")[1].split("\n\n")[0].splitlines()
    result = run(str(EXAMPLE.with_name("healthy.json")))
    assert result.exit_code == 0, result.output
    assert len(shown) == 4
    assert [line for line in shown if line.strip() not in result.output] == []


def test_the_picture_names_slow_devices_what_limits_and_the_gap(tmp_path: Path) -> None:
    result = run(written(tmp_path / "p.json"), "--objective", "steady")
    assert result.exit_code == 0, result.output
    assert "n0/1" in result.output
    assert "3x" in result.output
    assert "limited by" in result.output
    assert "best possible" in result.output or "proved optimal" in result.output


def test_a_problem_may_come_on_standard_input() -> None:
    assert run("-", "--json", input=json.dumps(PROBLEM)).exit_code == 0


def test_the_difference_of_a_plan_to_itself_is_empty_and_to_another_is_not(tmp_path: Path) -> None:
    for name, rates in (("old", {}), ("new", {"n0/1": 3.0})):
        text = run(written(tmp_path / "p.json", rates=rates), "--json").output
        (tmp_path / name).write_text(text)
    same = run("--diff", str(tmp_path / "old"), str(tmp_path / "old"))
    assert same.exit_code == 0
    assert "0.00" in same.output
    assert "n0/1" not in same.output
    assert "n0/1" in run("--diff", str(tmp_path / "old"), str(tmp_path / "new")).output


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"batch": {"global_batch": 0, "micro_batch": 1}}, "global_batch"),
        ({"rates": {"n9/0": 2.0}}, "n9/0"),
        ({"modle": {}}, "modle"),
        ({"model": {**PROBLEM["model"], "layers": "many"}}, "layers"),
    ],
)
def test_a_malformed_problem_names_key_and_value(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    result = run(written(tmp_path / "p.json", **changes))
    assert result.exit_code == 1
    assert said in result.output
    assert "Traceback" not in result.output


def test_files_that_are_not_there_or_no_answers_are_named(tmp_path: Path) -> None:
    missing = run(str(tmp_path / "none.json"))
    assert missing.exit_code == 1
    assert "cannot read" in missing.output
    (tmp_path / "x").write_text("{}")
    other = run("--diff", str(tmp_path / "x"), str(tmp_path / "x"))
    assert other.exit_code == 1
    assert "is no answer of elasticd plan --json" in other.output


def test_memory_that_does_not_suffice_is_refused_with_the_shortfall(tmp_path: Path) -> None:
    memory = {"layer_mib_by_stage": [90000.0], "embedding_mib": 0, "fixed_mib": 0, "reserve_mib": 0}
    result = run(written(tmp_path / "p.json", model={**PROBLEM["model"], "memory": memory}))
    assert result.exit_code == 1
    assert "more on" in result.output


TIMED: dict[str, Any] = {
    "cluster": {"nodes": [{"name": f"n{i}", "devices": 1, "memory_mib": 1000} for i in range(4)]},
    "model": {
        "name": "m",
        "layers": 8,
        "times": {"block": {"seconds_per_token": 1e-3, "tp_slowdown": {"1": 1.0}}},
        "state": {"block": {"whole_bytes": 2**20}, "optimizer": 2.0},
    },
    "batch": {"global_batch": 8, "micro_batch": 1, "sequence": 10},
    "pins": {"dp": 1, "zero": 0},
    "rates": {},
}


def test_stages_are_interleaved_where_one_asks_and_the_answer_is_read_back(tmp_path: Path) -> None:
    problem = written(tmp_path / "p.json", **TIMED)
    plain, interleaved = run(problem, "--json"), run(problem, "--json", "--interleave", "2")
    assert interleaved.exit_code == 0, interleaved.output
    (tmp_path / "old").write_text(plain.output)
    (tmp_path / "new").write_text(interleaved.output)
    assert "later" not in plain.output
    steps = [json.loads(text)["figures"]["step"] for text in (plain.output, interleaved.output)]
    assert steps[1] < 0.9 * steps[0]
    shown = run(problem, "--interleave", "2").output
    assert "0, 4 (2)" in shown
    moved = run("--diff", str(tmp_path / "old"), str(tmp_path / "new")).output
    assert "layers 0-1" in moved
    assert "layers 0, 4" in moved
    assert "in all 6.00 of 8 layers" in moved
    stays = run(problem, "--interleave", "2", "--json", "--current", str(tmp_path / "new"))
    assert json.loads(stays.output)["current"]["moved_bytes"] == 0


#: Two devices in a group, whose blocks keep most of what they keep whole.
GROUPED: dict[str, Any] = {
    "cluster": {"nodes": [{"name": "n", "devices": 2, "memory_mib": 100}]},
    "model": {
        "name": "m",
        "layers": 8,
        "units": 8,
        "times": {
            "block": {"seconds_per_token": 1e-3, "tp_slowdown": {"2": 1.0}, "collectives": 4},
            "boundary_bytes": 4096,
        },
        "state": {"block": {"cut_bytes": 2**20, "whole_activation": 2**16}, "optimizer": 2.0},
    },
    "batch": {"global_batch": 2, "micro_batch": 1, "sequence": 200},
    "pins": {"tp": 2, "dp": 1, "zero": 0},
    "rates": {},
}


def test_groups_have_slices_of_the_tokens_as_the_pin_says_and_the_answer_is_read_back(tmp_path: Path) -> None:
    """Whole activations take 100 MiB of a member, slices half of that; the links' share of a step grows."""

    def answer(pin: Any, memory: int = 1000) -> Any:
        cluster = {"nodes": [{"name": "n", "devices": 2, "memory_mib": memory}]}
        pins = GROUPED["pins"] | ({"sequence_parallel": pin} if pin is not None else {})
        return run(written(tmp_path / "p.json", **(GROUPED | {"pins": pins, "cluster": cluster})), "--json")

    def stage(result: Any) -> Any:
        return json.loads(result.output)["plan"]["modules"][0]["pipelines"][0]["stages"][0]

    for pin, memory, sliced in [(None, 1000, False), (False, 1000, False), ("plan", 1000, False)]:
        assert stage(answer(pin, memory)).get("sequence_parallel", False) is sliced
    always = answer(True)
    assert stage(always)["sequence_parallel"] is True
    steps = [json.loads(result.output)["figures"]["step"] for result in (answer(None), always)]
    assert steps[0] < steps[1]
    assert answer(None, 100).exit_code == 1, "it does not fit"
    needed = answer("plan", 100)
    assert stage(needed)["sequence_parallel"] is True
    assert json.loads(needed.output)["figures"]["step"] == pytest.approx(steps[1])
    (tmp_path / "old").write_text(needed.output)
    assert answered((tmp_path / "old").read_bytes(), "old").plan.pipelines[0].stages[0].sequence_parallel
    shown = run(str(tmp_path / "p.json"), "--current", str(tmp_path / "old"))
    assert "0.00 GiB move" in shown.output


def test_interleaved_stages_are_refused_where_nothing_says_what_they_take(tmp_path: Path) -> None:
    result = run(written(tmp_path / "p.json"), "--interleave", "2")
    assert result.exit_code == 1
    assert "pins.interleave goes with model.times" in result.output
    assert "--interleave goes with a problem" in run("--interleave", "2").output


def test_pipelines_are_joined_as_lanes_where_one_asks_and_the_answer_is_read_back(tmp_path: Path) -> None:
    problem = written(tmp_path / "p.json", **{**TIMED, "pins": {"dp": 4, "zero": 0}})
    plain, joined = run(problem, "--json"), run(problem, "--json", "--lanes", "2")
    assert joined.exit_code == 0, joined.output
    (tmp_path / "old").write_text(plain.output)
    (tmp_path / "new").write_text(joined.output)
    assert "lanes" not in plain.output
    first = json.loads(joined.output)["plan"]["modules"][0]["pipelines"][0]
    assert first["rows"] == [2, 2]
    assert [(stage["lanes"], stage["shares"]) for stage in first["stages"]] == [([1, 1], [1.0, 1.0])]
    steps = [json.loads(text)["figures"]["step"] for text in (plain.output, joined.output)]
    assert steps[0] == steps[1]
    shown = run(problem, "--lanes", "2").output
    for words in ("0, lane 0", "1, lane 1", "limited by pipeline 0, lane 0, stage 0: 8 layers on n0/0"):
        assert words in shown
    assert "in all 0.00 of 32 layers" in run("--diff", str(tmp_path / "old"), str(tmp_path / "new")).output
    stays = json.loads(run(problem, "--lanes", "2", "--json", "--current", str(tmp_path / "new")).output)
    assert stays["current"]["moved_bytes"] == 0
    assert stays["plan"]["modules"] == json.loads(joined.output)["plan"]["modules"]


def test_lanes_are_joined_in_units_too_and_go_with_a_problem(tmp_path: Path) -> None:
    result = run(written(tmp_path / "p.json", rates={}), "--lanes", "3")
    assert result.exit_code == 0, result.output
    assert "0, lane 2" in result.output
    assert "--lanes goes with a problem" in run("--lanes", "2").output
    wrong = run(written(tmp_path / "p.json", pins={"lanes": 0}))
    assert wrong.exit_code == 1
    assert "lanes 0 must be positive" in wrong.output


def test_an_answer_whose_lanes_do_not_add_up_is_refused(tmp_path: Path) -> None:
    problem = written(tmp_path / "p.json", **{**TIMED, "pins": {"dp": 4, "zero": 0}})
    answer = json.loads(run(problem, "--json", "--lanes", "2").output)
    answer["plan"]["modules"][0]["pipelines"][0]["rows"] = [3, 2]
    (tmp_path / "x").write_text(json.dumps(answer))
    result = run(problem, "--current", str(tmp_path / "x"))
    assert result.exit_code == 1
    assert "rows (3, 2) must say how many of its 4 micro-batches each of 2 lanes has" in result.output


def test_a_steps_rows_are_drawn_by_lane_and_cut_sequences_have_a_letter(tmp_path: Path) -> None:
    lengths = tmp_path / "lengths.json"
    lengths.write_text(json.dumps({"lengths": [40_000, *[500] * 40], "linear": 49152, "tokens": 16_000}))
    given = written(tmp_path / "p.json", rates={})
    result = run(given, "--lanes", "16", "--batch", str(lengths))
    assert result.exit_code == 0, result.output
    drawn = [line for line in result.output.splitlines() if line.startswith("pipeline ")]
    assert len([line for line in drawn if "lane" in line and "A" in line]) > 1, "the long one is on several"
    assert "sequences 41   tokens 60,000" in result.output
    assert "busiest lane over even work" in result.output
    answer = json.loads(run(given, "--lanes", "16", "--batch", str(lengths), "--json").output)
    pieces = [p for rows in answer["batch"]["pipelines"] for row in rows for lane in row for p in lane]
    assert sum(p["stop"] - p["start"] for p in pieces if p["sample"] == 0) == 20_000
    assert answer["batch"]["summary"]["cut"] == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[]", "the file of lengths has no sequence"),
        ("[0, 4]", "sample 0 has 0 tokens"),
        ('{"length": [4]}', "It must have the lengths of a step's sequences"),
        ('{"lengths": [90000], "tokens": 100}', "has 90000 tokens, and no pipeline's lanes hold more"),
    ],
)
def test_a_file_of_lengths_that_cannot_be_dealt_is_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "lengths.json").write_text(text)
    result = run(written(tmp_path / "p.json"), "--batch", str(tmp_path / "lengths.json"))
    assert result.exit_code == 1
    assert said in result.output.replace("\n", " ")


def small() -> dict[str, Any]:
    """The example of several kinds of devices with fewer of them: it has many settings to search."""
    problem = json.loads(EXAMPLE.read_text())
    nodes = problem["cluster"]["nodes"][::2]
    problem["cluster"]["nodes"] = [{**node, "devices": 2, "island": 2} for node in nodes]
    problem["model"]["layers"] = 4
    problem["rates"] = {}
    return problem


def test_a_search_says_after_some_seconds_on_standard_error_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "QUIET_SECONDS", 0.0)
    monkeypatch.setattr(plan, "LINE_SECONDS", 0.005)
    (tmp_path / "p.json").write_text(json.dumps(small()))
    result = run(str(tmp_path / "p.json"))
    assert result.exit_code == 0, result.output
    lines = result.stderr.splitlines()
    assert all(line.startswith("planning for ") for line in lines)
    told = [
        re.search(r"best so far (\S+) s a step, bound (\S+); (\d+) of at most (\d+)", line) for line in lines
    ]
    known = [[float(number) for number in found.groups()] for found in told if found]
    assert known, lines
    assert all(best >= bound and tried <= settings for best, bound, tried, settings in known)
    assert [best for best, *_ in known] == sorted((best for best, *_ in known), reverse=True)
    assert "planning for" not in result.stdout
    assert run(str(tmp_path / "p.json"), "--json").stderr == "", "nothing for programs"


def test_a_search_that_is_over_sooner_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "QUIET_SECONDS", 3600.0)
    assert run(written(tmp_path / "p.json")).stderr == ""


def modules_problem(path: Path) -> str:
    """A language model and an encoder on four devices, one of them slow."""

    def model(name: str, layers: int, seconds: float) -> dict[str, Any]:
        block = {"seconds_per_token": seconds, "tp_slowdown": {"1": 1.0}}
        return {"name": name, "layers": layers, "times": {"block": block, "boundary_bytes": 8192}}

    vision = {"name": "vision", "items": "images", "items_a_sample": 1.5, "rows_an_item": 576}
    problem = {
        "cluster": {"nodes": [{"name": "n0", "devices": 4, "memory_mib": 80000}]},
        "model": model("lm", 8, 1e-6),
        "batch": {"global_batch": 8, "micro_batch": 1, "sequence": 4096},
        "rates": {"n0/3": 2.0},
        "module": "language",
        "modules": [{**vision, "model": model("vit", 4, 1e-6)}],
    }
    path.write_text(json.dumps(problem))
    return str(path)


def test_modules_are_planned_and_shown_one_by_one_and_devices_with_all_their_places(tmp_path: Path) -> None:
    problem = modules_problem(tmp_path / "p.json")
    result = run(problem)
    assert result.exit_code == 0, result.output
    assert "module vision   takes images, at most" in result.output
    assert "in images" in result.output, "lanes of images have weights, not micro-batches"
    assert "module language" in result.output
    places = result.output.partition("devices\n")[2]
    assert {line.split()[0] for line in places.splitlines() if line.startswith("n0/")} == {
        f"n0/{i}" for i in range(4)
    }
    again = run(problem, "--json")
    answer = json.loads(again.output)
    assert [module["module"] for module in answer["plan"]["modules"]] == ["vision", "language"]
    (tmp_path / "a.json").write_text(again.output)
    near = run(problem, "--current", str(tmp_path / "a.json"), "--json")
    assert near.exit_code == 0, near.output
    moved = json.loads(near.output)
    assert moved["plan"]["modules"] == answer["plan"]["modules"]
    assert moved["current"]["value"] == pytest.approx(answer["figures"]["step"])


MODULES = Path(__file__).parents[2] / "examples/problems/vision_language.json"


def test_the_order_of_all_modules_is_drawn_on_one_axis_a_row_for_each_device() -> None:
    result = run(str(MODULES))
    assert result.exit_code == 0, result.output
    _, _, order = result.output.partition("order of a mean step")
    head, *rows = order.strip().splitlines()
    assert "v vision, l language" in head
    assert [row.split()[0] for row in rows] == ["n0/0", "n0/1", "n1/0", "n1/1"]
    for row in rows:
        passes = row.split(maxsplit=1)[1]
        assert set(passes) <= set("vVlL·")
        assert {"l", "L"} <= set(passes)
    assert rows[2].split()[1] == rows[3].split()[1], "a TP group passes together"
    assert "limited by n" in result.output
    assert "language" in result.output.partition("limited by")[2].splitlines()[0]
    loads = [float(load) for load in re.findall(r"weight .* (\d+)%", result.output)]
    assert len(loads) == 4
    assert max(loads) == 100


def test_a_steps_items_are_dealt_and_played(tmp_path: Path) -> None:
    path = tmp_path / "items.json"
    path.write_text(json.dumps({"images": [[2048, 256]] * 8 + [2] * 4 + [0] * 4}))
    shown = run(str(MODULES), "--batch", str(path)).output
    assert "images 24   rows 26,624   lanes 4   busiest lane over the mean" in shown
    assert len(re.findall(r"^vision lane \d n\d/\d +[█▓]+$", shown, re.MULTILINE)) == 4
    assert "order of this step" in shown
    answer = json.loads(run(str(MODULES), "--batch", str(path), "--json").output)
    groups = [group for lanes in answer["batch"]["modules"]["vision"] for lane in lanes for group in lane]
    assert sorted(group[4] for group in groups) == sorted([2048, 256] * 8 + [1024] * 8)
    path.write_text(json.dumps({"images": [0] * 16}))
    without = json.loads(run(str(MODULES), "--batch", str(path), "--json").output)["batch"]
    assert without["seconds"] < answer["batch"]["seconds"]
    assert all(device["vision"] == 0 for device in without["devices"].values() if "vision" in device)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "[2, 0]",
            'It must have the items of each sample of a step, their number or the rows of each, as {"images"',
        ),
        ('{"images": [1, 2]}', "it has the images of 2 samples, and a step 16: give one entry for each"),
        ('{"clips": [1]}', "no module takes 'clips'; there are: images"),
        (json.dumps({"images": [-1] * 16}), "images are counted from 0, and have at least one row each"),
    ],
)
def test_a_file_of_items_that_is_none_of_the_problem_is_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "items.json").write_text(text)
    result = run(str(MODULES), "--batch", str(tmp_path / "items.json"))
    assert result.exit_code == 1
    assert said in " ".join(result.output.split())


def test_modules_are_of_problems_in_seconds(tmp_path: Path) -> None:
    seconds = json.loads(Path(modules_problem(tmp_path / "s.json")).read_text())
    result = run(written(tmp_path / "p.json", modules=seconds["modules"]))
    assert result.exit_code
    assert "modules go with model.times" in result.output
