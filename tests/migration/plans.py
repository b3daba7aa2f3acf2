"""A small model, and random plans for it, that together show every shape a layout can take."""

from elasticd_planner.plan import ModulePlan, Pipeline, Plan, Stage, Strategy
from elasticd_planner.rules import Cut, ModelSpec, Parameter, Units
from hypothesis import strategies as st

DEVICES = tuple(f"n{node}/{local}" for node in range(3) for local in range(3))
LAYERS = 3


def _parameter(name: str, *shape: int, cut: tuple[int, str] | None = None, **rest: str) -> Parameter:
    rule = Cut(dim=cut[0], units=cut[1]) if cut else None
    dtype, replicas = rest.get("dtype", "float32"), rest.get("replicas", "same")
    return Parameter(name=name, shape=shape, dtype=dtype, cut=rule, replicas=replicas)  # type: ignore[arg-type]


# Four query heads over two kv-heads: TP of three or four splits a kv group. The head is tied to the
# embedding; widths are mixed, one parameter has no dimensions, and one is large enough to be sent by itself.
SPEC = ModelSpec(
    name="tiny",
    embed=(_parameter("tokens.weight", 80, 160, cut=(0, "vocabulary")),),
    kinds=(
        (
            _parameter("norm.weight", 4, dtype="bfloat16"),
            _parameter("scale"),
            _parameter("q.weight", 8, 4, cut=(0, "heads")),
            _parameter("k.weight", 4, 4, cut=(0, "kv_heads"), replicas="add"),
            _parameter("o.weight", 4, 8, cut=(1, "heads"), dtype="float64"),
            _parameter("down.weight", 3, 12, cut=(1, "columns")),
        ),
    ),
    layers=(0,) * LAYERS,
    head=(
        _parameter("norm.weight", 4, dtype="bfloat16"),
        _parameter("output.weight", 80, 160, cut=(0, "vocabulary")),
    ),
    units=(
        Units(kind="heads", count=4),
        Units(kind="kv_heads", count=2, follows="heads"),
        Units(kind="columns", count=6),
        Units(kind="vocabulary", count=8),
    ),
    ties=(("head.output.weight", "embed.tokens.weight"),),
    width=4,
)

Shape = list[tuple[int, list[tuple[str, int]]]]  # stages: number of layers, (device, share)


def plan(number: int, *pipelines: Shape, binding: dict[str, str] | None = None) -> Plan:
    """A plan with a pipeline for each list of (layers, [(device, share), ...])."""
    made = []
    for stages in pipelines:
        start, cut = 0, []
        for layers, group in stages:
            devices, shares = zip(*group, strict=True)
            cut.append(Stage(start=start, stop=start + layers, devices=devices, shares=shares))
            start += layers
        made.append(Pipeline(stages=tuple(cut), micro_batches=1))
    module = ModulePlan(module="model", pipelines=tuple(made))
    return Plan(
        number=number,
        strategies=(Strategy(modules=(module,)),),
        micro_batch=1,
        global_batch=len(made),
        binding=binding or {},
    )


@st.composite
def plans(draw: st.DrawFn, number: int) -> Plan:
    """Any number of pipelines, stages, TP widths and shares, over any of the devices in any order."""
    free = list(draw(st.permutations(DEVICES)))
    pipelines: list[Shape] = []
    for _ in range(draw(st.integers(1, 3))):
        stages: Shape = []
        left = LAYERS
        most = draw(st.integers(1, 3))
        while left:
            last = len(stages) == most - 1 or len(free) <= 3 - len(pipelines)
            layers = left if last else draw(st.integers(1, left))
            width = draw(st.integers(1, max(1, min(4, len(free) - 4))))
            stages.append((layers, [(free.pop(), draw(st.integers(1, 3))) for _ in range(width)]))
            left -= layers
        pipelines.append(stages)
    return plan(number, *pipelines)
