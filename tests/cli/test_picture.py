"""The picture of a plan: what each cell says, at any width of the terminal."""

from __future__ import annotations

import io

import pytest
from elasticd_planner.placement.state_movement import strategy
from elasticd_planner.spec.plan import Pipeline, Plan, Stage, StatePolicy
from rich.console import Console

from elasticd.cli.picture import named, picture


def node(number: int, places: tuple[int, ...] = tuple(range(8))) -> tuple[str, ...]:
    return tuple(f"n{number}/{place}" for place in places)


def stage(start: int, stop: int, devices: tuple[str, ...], shares: tuple[int, ...] = (), **more: bool) -> Stage:
    return Stage(start=start, stop=stop, devices=devices, shares=shares or (8,) * len(devices), **more)


#: 64 devices, uneven shares, idle devices, recomputation, ZeRO.
PLAN = Plan(
    number=3,
    strategies=(
        strategy(
            (
                Pipeline(
                    stages=(
                        stage(0, 22, node(0)),
                        stage(22, 38, node(1), (9, 9, 9, 3, 9, 9, 8, 8), recompute=True),
                        stage(38, 60, node(2)),
                        stage(60, 80, node(3)),
                    ),
                    micro_batches=33,
                ),
                Pipeline(
                    stages=(
                        stage(0, 14, node(4, (1, 2, 3, 4, 5, 6, 7))),
                        stage(14, 38, node(5)),
                        stage(38, 60, node(6)),
                        stage(60, 80, node(7, (0, 1, 3, 5, 6, 7))),
                    ),
                    micro_batches=31,
                ),
            ),
            "model",
        ),
    ),
    micro_batch=1,
    global_batch=64,
    state=StatePolicy(zero=1, replicas=2),
    idle=("n4/0", "n7/2", "n7/4"),
)
RATES = {"n1/3": 2.57, "n4/0": 5.42}
TIMES = [[1.0, 1.1, 1.0, 0.9], [0.95, 1.12, 1.05, 1.0]]


def shown(width: int, times: list[list[float]] | None = TIMES) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(picture(PLAN, RATES, times))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_all_of_a_plan_is_there_at_any_width(width: int) -> None:
    text = shown(width)
    assert "…" not in text, "nothing is cut off"
    assert max(map(len, text.splitlines())) <= width
    for words in (
        *("0-21 (22)", "22-37 (16) recompute", "60-79 (20)", "n1/0-2 14.1%", "n1/3 2.57x 4.7%", "n7/0-1,3,5-7"),
        *("91%", "100%", "ZeRO 1, 2 replicas", "idle n4/0 5.42x + n7/2,4"),
    ):
        assert words in " ".join(text.split()), words
    assert text.count("33") == 1


def test_stages_are_beside_each_other_where_there_is_room() -> None:
    wide, narrow = shown(120), shown(60)
    line = next(line for line in wide.splitlines() if "0-21 (22)" in line)
    assert "60-79 (20)" in line
    line = next(line for line in narrow.splitlines() if "0-21 (22)" in line)
    assert "60-79 (20)" not in line


def test_without_times_there_is_no_load() -> None:
    assert "█" not in shown(120, None)


def test_neighbours_are_shortened_and_slow_ones_named() -> None:
    names = ("n0/0", "n0/1", "n0/2", "n0/7", "n1/0", "n1/1", "n1/4")
    assert named(names, {"n0/2": 2.57}) == "n0/0-1 + n0/2 2.57x + n0/7 + n1/0-1,4"


def test_each_lane_has_a_row_of_its_own() -> None:
    stages = (
        Stage(start=0, stop=50, devices=("n0/0", "n0/1", "n1/0"), shares=(3, 1, 1), lanes=(2, 1)),
        Stage(start=50, stop=80, devices=("n0/2", "n1/1"), shares=(1, 1), lanes=(1, 1)),
    )
    lanes = Pipeline(stages=stages, micro_batches=48, rows=(31, 17))
    other = Pipeline(stages=(stage(0, 80, node(2)),), micro_batches=16)
    plan = PLAN.replace(strategies=(strategy((lanes, other), "model"),), idle=(), state=StatePolicy())
    for width in (60, 120):
        console = Console(file=io.StringIO(), width=width, highlight=False)
        console.print(picture(plan, {}, [[1.0, 0.5], [1.0, 1.0], [1.0]]))
        assert isinstance(console.file, io.StringIO)
        text = console.file.getvalue()
        rows = [line for line in text.splitlines() if "lane" in line or "16" in line]
        assert [words in row for words, row in zip(("31", "17", "16"), rows, strict=True)] == [True] * 3
        for words in ("0, lane 0", "0, lane 1", "n0/0 75.0%", "n1/0", "55%"):
            assert words in " ".join(text.split()), words
