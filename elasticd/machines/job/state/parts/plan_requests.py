"""Requests to the planner: what they are made from, and their answers that wait."""

from __future__ import annotations

import msgspec
from elasticd_planner.cost.model_profile import ModelProfile
from elasticd_planner.policy.stability import Stability
from elasticd_planner.problem import JobAnswer, JobProblem, ModuleProblem
from elasticd_planner.spec.cluster import Device
from elasticd_planner.spec.expert_load import ExpertLoad
from elasticd_planner.spec.mesh import JobPlan
from elasticd_planner.spec.packed_sequences import PackedSequences
from elasticd_planner.value import Value


class Basis(Value, frozen=True, kw_only=True):
    """The basis of a plan, beside the job's spec: another basis asks for another decision."""

    devices: tuple[Device, ...]  # that the plan may use
    rates: dict[str, float]  # slowdown of stragglers, by device
    profile: ModelProfile | None  # seconds and bytes of the model (None: of a job on a mesh none is known)
    interleave: int = 1  # chunks of layers that a device may have
    lanes: int = 1  # lanes that a pipeline may have
    packed: PackedSequences | None = None  # the sequences of a step, of a job that packs them
    modules: tuple[ModuleProblem, ...] = ()  # of items, of a job of several modules
    experts: ExpertLoad | None = None  # by which experts are placed


class Asked(Value, frozen=True, kw_only=True):
    """A plan that is being made."""

    token: int  # number of the request, which the answer repeats
    basis: Basis  # what it is made from
    problem: JobProblem  # as the planner has it


class Deferred(Value, frozen=True, kw_only=True):
    """An answer of the planner that is worth a switch once its basis has held for longer."""

    basis: Basis  # what it was made from
    problem: JobProblem  # as the planner had it
    answer: JobAnswer  # the plan
    step: int  # index of the step at which it is weighed again


class Remedy(Value, frozen=True, kw_only=True):
    """A plan for the survivors, made while they say what they hold."""

    basis: Basis  # what it was made from
    problem: JobProblem  # as the planner had it
    plan: JobPlan  # the plan


class Setback(Value, frozen=True, kw_only=True):
    """Plans from one basis that were given up in a row."""

    basis: Basis  # what they were made from
    times: int  # how many
    until: float  # when the next may be made from it


class PlanRequests(Value, frozen=True, kw_only=True):
    """The next request: its time and its basis; and answers that wait."""

    decided: Basis | None = None  # what the last decision was made from; None: one is due
    not_before: float = 0.0  # when the next plan may be made
    setback: Setback | None = None  # when it may be made from a basis whose plans were given up
    asked: Asked | None = None  # the plan that is being made
    deferred: Deferred | None = None  # an answer that waits for more steps
    #: how long conditions last; a new leader learns it anew
    stability: Stability = msgspec.field(default_factory=Stability)
    remedy: Remedy | None = None  # the plan that is to follow the fence
    token: int = 0  # requests to the planner so far
