"""Models as the simulator knows them: shapes alone, under the names that scenarios use."""

from __future__ import annotations

from typing import Literal

from elasticd_planner.spec.model import Cut, ModelSpec, Parameter, Units
from elasticd_planner.value import Value, refuse


class Shapes(Value, frozen=True, kw_only=True):
    """A Llama-style decoder by its sizes: grouped-query attention, a gated MLP, a head of its own."""

    layers: int
    width: int
    heads: int
    hidden: int
    kv_heads: int | None = None
    vocabulary: int = 32_000
    dtype: str = "bfloat16"
    experts: int = 0  # of `hidden` columns each, in every block; 0: one MLP in place of them
    chosen: int = 2  # experts of a row

    def __post_init__(self) -> None:
        if self.experts and not 1 <= self.chosen <= self.experts:
            refuse(f"chosen = {self.chosen} must be from 1 to the {self.experts} experts")
        if self.experts < 0:
            refuse(f"experts = {self.experts} must not be negative")
        sizes = (self.layers, self.width, self.heads, self.hidden, self.vocabulary, self.groups)
        if min(sizes) < 1 or self.width % self.heads or self.heads % self.groups:
            refuse(
                "layers, width, heads, hidden, vocabulary and kv_heads must be positive, width divide by heads "
                f"and heads by kv_heads, not {self}"
            )

    @property
    def groups(self) -> int:
        """The number of key and value heads: `kv_heads`, or `heads` where it is not given."""
        return self.heads if self.kv_heads is None else self.kv_heads


#: Sizes near those of the planning problems with a known answer: 32, 70 and 110 billion parameters.
PRESETS = {
    "llama-32b": Shapes(layers=60, width=6656, heads=52, hidden=17_920),
    "llama-70b": Shapes(layers=80, width=8192, heads=64, kv_heads=8, hidden=28_672),
    "llama-110b": Shapes(layers=80, width=8192, heads=64, kv_heads=8, hidden=49_152, vocabulary=152_064),
}


def model_spec(name: str, shapes: Shapes, *, trained: bool = True) -> ModelSpec:
    """The description of this model that a job gives its coordinator; not `trained`: all of it is frozen."""
    kind: Literal["trained", "frozen"] = "trained" if trained else "frozen"

    def matrix(part: str, rows: int, columns: int, dim: int, units: str, add: bool = False) -> Parameter:
        return Parameter(
            name=part,
            shape=(rows, columns),
            dtype=shapes.dtype,
            kind=kind,
            cut=Cut(dim=dim, units=units),
            replicas="add" if add else "same",
        )

    def experts(part: str, rows: int, columns: int) -> Parameter:
        shape = (shapes.experts, rows, columns)
        cut = Cut(dim=0, units="experts")
        return Parameter(
            name=part, shape=shape, dtype=shapes.dtype, kind=kind, cut=cut, replicas="add", experts=True
        )

    width, hidden, kv = shapes.width, shapes.hidden, shapes.width // shapes.heads * shapes.groups
    vocabulary = matrix("weight", shapes.vocabulary, width, 0, "vocabulary")
    norm = Parameter(name="norm", shape=(width,), dtype=shapes.dtype, kind=kind)
    block = (
        norm,
        matrix("q", width, width, 0, "heads"),
        matrix("k", kv, width, 0, "kv_heads", add=True),
        matrix("v", kv, width, 0, "kv_heads", add=True),
        matrix("o", width, width, 1, "heads"),
        Parameter(name="mlp_norm", shape=(width,), dtype=shapes.dtype, kind=kind),
        *(
            (experts("gate", hidden, width), experts("up", hidden, width), experts("down", width, hidden))
            if shapes.experts
            else (
                matrix("gate", hidden, width, 0, "columns"),
                matrix("up", hidden, width, 0, "columns"),
                matrix("down", width, hidden, 1, "columns"),
            )
        ),
    )
    return ModelSpec(
        name=name,
        embed=(vocabulary,),
        kinds=(block,),
        layers=(0,) * shapes.layers,
        head=(norm, vocabulary),
        units=(
            Units(kind="heads", count=shapes.heads),
            Units(kind="kv_heads", count=shapes.groups, follows="heads"),
            Units(kind="experts", count=shapes.experts)
            if shapes.experts
            else Units(kind="columns", count=hidden),
            Units(kind="vocabulary", count=shapes.vocabulary),
        ),
        width=width,
        dtype=shapes.dtype,
    )
