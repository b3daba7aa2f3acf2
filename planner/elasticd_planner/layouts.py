"""From a plan to layouts: which device holds which box of each parameter and of its gradient.

Holdings are made per distinct (section, stage) on demand and kept, so that asking for one parameter of one
layer costs that layer alone.
"""

from __future__ import annotations

from collections.abc import Iterator

from elasticd_planner.boxes import Box, Holding, TensorLayout
from elasticd_planner.plan import Plan, Stage
from elasticd_planner.rules import ModelSpec, Parameter, member_box


class Layouts:
    """The layouts of one module's tensors under one plan."""

    def __init__(self, spec: ModelSpec, plan: Plan, module: int = 0) -> None:
        self.spec, self.plan, self.module = spec, plan, module
        self._owners: dict[str, list[tuple[str, Parameter]]] = {}
        for section in spec.sections(0, len(spec.layers)):
            for parameter in spec.section(section):
                owner = spec.owner(f"{section}.{parameter.name}")
                self._owners.setdefault(owner, []).append((section, parameter))
        self._stages: dict[str, list[tuple[int, int, Stage]]] = {}
        for p, pipeline in enumerate(plan.modules[module].pipelines):
            for s, stage in enumerate(pipeline.stages):
                for section in spec.sections(stage.start, stage.stop):
                    self._stages.setdefault(section, []).append((p, s, stage))
        self._parameters: dict[str, TensorLayout] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Full names of all parameters in the model's order; aliases of tied ones are left out."""
        return tuple(self._owners)

    def parameter(self, name: str) -> TensorLayout:
        """Who holds which box of a parameter (and of its master weight and moments, without ZeRO)."""
        if name not in self._parameters:
            holdings = dict.fromkeys(Holding(device=device, box=box) for device, box, _ in self._holders(name))
            self._parameters[name] = self._layout(name, tuple(holdings))
        return self._parameters[name]

    def gradient(self, name: str) -> TensorLayout:
        """Who holds which term of a parameter's gradient after the backward pass.

        Replicas of one stage that hold the same gradient carry one term's name, others one of their own:
        copies on different stages (tied parameters) and in different pipelines always add.
        """
        holdings: dict[tuple[str, Box], Holding] = {}
        for device, box, term in self._holders(name):
            # A device that has a parameter in two sections (tied, one stage) holds the sum of both terms.
            holdings.setdefault((device, box), Holding(device=device, box=box, partial=term))
        return self._layout(name, tuple(holdings.values()))

    def of(self, device: str) -> dict[str, Box]:
        """The box of every parameter that one device holds."""
        place = self.plan.places.get(device)
        if place is None or place.module != self.module:
            return {}
        stage = self.plan.stage(place)
        return {
            self.spec.owner(f"{section}.{parameter.name}"): member_box(
                self.spec, parameter, stage.shares, place.position
            )
            for section in self.spec.sections(stage.start, stage.stop)
            for parameter in self.spec.section(section)
        }

    def _layout(self, name: str, holdings: tuple[Holding, ...]) -> TensorLayout:
        parameter = self._owners[name][0][1]
        return TensorLayout(name=name, shape=parameter.shape, dtype=parameter.dtype, holdings=holdings)

    def _holders(self, name: str) -> Iterator[tuple[str, Box, str]]:
        """(device, box, gradient term) of every copy, section by section."""
        for section, parameter in self._owners[name]:
            for p, s, stage in self._stages.get(section, ()):
                for position, device in enumerate(stage.devices):
                    term = f"{p}.{s}" if parameter.replicas == "same" else f"{p}.{s}.{position}"
                    yield device, member_box(self.spec, parameter, stage.shares, position), term
