"""The profile of a job's model, as its steps have taught it."""

from __future__ import annotations

from elasticd_planner.cost.model_profile import ModelProfile
from elasticd_planner.problem import ModuleProblem
from elasticd_planner.spec.expert_load import ExpertLoad
from elasticd_planner.spec.step_measurements import Step
from elasticd_planner.value import Value

from elasticd.machines.job.state.parts.expert_rows import ExpertRows


class StepPrediction(Value, frozen=True, kw_only=True):
    """The seconds of a step under a plan, by a profile that is newer than the plan."""

    number: int  # of the plan
    seconds: float  # of a step, at the slowdowns that the plan was made for


class LearnedProfile(Value, frozen=True, kw_only=True):
    """The seconds and bytes of the model, and the steps that they are fitted from."""

    #: seconds and bytes of the model, as far as they are known; of several modules, of the one with the loss
    profile: ModelProfile | None = None
    modules: tuple[ModuleProblem, ...] = ()  # likewise of the modules of items, and the items of samples
    expert_rows: ExpertRows = ExpertRows()  # measured
    experts: ExpertLoad | None = None  # the load that plans are made for (None: experts go by shares)
    first_step: int | None = None  # of the plan in force: steps after it are sampled for the fit
    rehearsed: frozenset[int] = frozenset()  # widths whose all-reduce is known from the rehearsal alone
    taught_by: int = 0  # number of the plan that the profile was last fitted to
    prediction: StepPrediction | None = None  # by the newest profile (None: that of the plan is)
    sampled: tuple[Step, ...] = ()  # steps for the fit of the profile
