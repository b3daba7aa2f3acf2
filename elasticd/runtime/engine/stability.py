"""Steps whose update is left out: because their gradient is not finite, or because its norm is a spike.

Every rank decides from the vote, which is the same on all of them, and from the guard's own numbers, which are
a part of the job's state: so all leave out the same updates, and stop after the same step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from msgspec.structs import replace

from elasticd.records import Vote
from elasticd.runtime.exits import script_options

Action = Literal["skip", "roll back", "stop"]

#: Updates left out in a row until people are told; of a gradient that overflowed more, since a loss scale that
#: begins too large explains those for a while.
TOLD, TOLD_OVERFLOWS = 3, 30
#: Updates until the mean of the norms says what is usual, and its weight of the newest one.
_USUAL_AFTER, _NEWEST = 20, 0.05

_NOT_FINITE, _OVERFLOWED = "its loss is not finite", "its gradient is not finite"


@script_options
@dataclass(frozen=True, kw_only=True)
class StabilityOptions:
    """Steps that would harm the weights: the argument `stability` of `elasticd.Job`.

    The update of a step whose gradient is not finite (infinite or NaN) is always left out, on all devices.

    Raises:
        ValueError: a field is out of its range.
    """

    #: A gradient of a norm above this many times the mean of the last norms is a spike, and its update is left
    #: out, too. None: none is.
    spike: float | None = None
    #: "skip": the next step is made. "roll back": the job goes back to its newest snapshot, or to a checkpoint
    #: that is newer, and leaves out the updates from there up to that of the step. "stop": the job saves the
    #: state before the step, and stops. The last two not for an overflow that a loss scale halves itself for.
    action: Action = "skip"
    #: Updates left out in a row after which the job saves its state and stops. None: it never does.
    stop_after: int | None = 100

    def __post_init__(self) -> None:
        if self.spike is not None and not self.spike > 1:
            raise ValueError(f"stability: spike is {self.spike!r}; it must be above 1, as 10")
        if self.action not in get_args(Action):
            known = ", ".join(map(repr, get_args(Action)))
            raise ValueError(f"stability: action is {self.action!r}; it must be one of {known}")
        if self.stop_after is not None and self.stop_after < 1:
            raise ValueError(f"stability: stop_after is {self.stop_after!r}; it must be at least 1, or None")

    def check(self, every: int | None) -> None:
        """Raises ValueError where a job could not go back.

        Args:
            every: steps from one snapshot, or checkpoint, to the next; None: there are none.
        """
        if self.action == "roll back" and every is None:
            raise ValueError(
                "stability: action 'roll back' goes back to snapshots: CheckpointingOptions(snapshot_every=10)"
            )


class StabilityGuard:
    """Judges each vote. Its numbers are the same on every rank, and in the job's state."""

    def __init__(self, options: StabilityOptions, *, scaled: bool) -> None:
        """
        Args:
            options: the job's.
            scaled: the loss has a scale, which is halved after a gradient that is not finite.
        """
        self._options, self._scaled = options, scaled
        self.left_out = 0  # updates left out in a row, up to the last step
        self.first = self.last = -1  # indices of the first and the last of them
        self.why = ""  # of the last of them
        self._harmful = False  # that one would have harmed the weights
        self._through = -1  # index of the last step whose update is left out since the job went back
        self._mean, self._updates = 0.0, 0  # of the norms of updates that were made; how many were

    def judged(self, vote: Vote) -> Vote:
        """The vote, without its update if that is a spike, or is left out since the job went back."""
        left_out = vote.step <= self._through or self._is_spike(vote)
        return replace(vote, apply=False) if vote.apply and left_out else vote

    def leave_out(self, through: int) -> None:
        """Has the updates of all steps up to this index left out: the job went back from it, or could not."""
        self._through = max(self._through, through)
        if self.last <= self._through:
            self._harmful = False

    def after(self, vote: Vote) -> None:
        """Counts a step once its update is made or left out. A sound one, which is left out because the job
        went back, does not count."""
        if vote.apply:
            self._begin()
            if vote.norm is not None:
                weight = max(_NEWEST, 1.0 / (self._updates + 1))
                self._mean += weight * (vote.norm - self._mean)
                self._updates += 1
            return
        sound = (
            bool(vote.count) and vote.loss is not None and vote.norm is not None and not self._is_spike(vote)
        )
        if sound and vote.step <= self._through:
            return
        self.first, self.last = self.first if self.left_out else vote.step, vote.step
        self.left_out += 1
        self.why = self._why(vote)
        overflow = self.why == _OVERFLOWED and self._scaled
        self._harmful = bool(vote.count) and not overflow and vote.step > self._through

    @property
    def told(self) -> int:
        """`left_out`, once they are so many that people are told; else 0."""
        return self.left_out if self.left_out >= self.limit else 0

    @property
    def limit(self) -> int:
        """Updates left out in a row at which people are told."""
        return TOLD_OVERFLOWS if self.why == _OVERFLOWED else TOLD

    @property
    def back_reason(self) -> str:
        """Why the job is to go back before its next step; empty: it goes on."""
        if self._options.action != "roll back" or not (self.left_out and self._harmful):
            return ""
        return f"step {self.last} would have harmed the weights: {self.why}"

    @property
    def stop_reason(self) -> str:
        """Why the job is to stop before its next step; empty: it goes on."""
        most = self._options.stop_after
        if self.left_out and self._harmful and self._options.action == "stop":
            return f"step {self.last} would have harmed the weights: {self.why}"
        if most is not None and self.left_out >= most:
            return (
                f"{self.left_out} steps in a row changed no weight, from step {self.first} on; of the last, "
                f"{self.why}. StabilityOptions(stop_after=...) sets how many may"
            )
        return ""

    def state_dict(self) -> dict[str, Any]:
        """Its numbers."""
        return {
            "left_out": self.left_out,
            "first": self.first,
            "last": self.last,
            "why": self.why,
            "harmful": self._harmful,
            "mean": self._mean,
            "updates": self._updates,
            "through": self._through,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state_dict` gave."""
        self._mean, self._updates = float(state["mean"]), int(state["updates"])
        self.left_out, self.first, self.why = int(state["left_out"]), int(state["first"]), str(state["why"])
        self._harmful = bool(state["harmful"])
        self._through = int(state.get("through", -1))
        self.last = int(state.get("last", self.first + self.left_out - 1))

    def restart(self) -> None:
        """Begins to count again where the job had stopped: it goes on from a checkpoint."""
        if self.stop_reason:
            self._begin()

    def _begin(self) -> None:
        """No update is left out."""
        self.left_out, self.first, self.last, self.why, self._harmful = 0, -1, -1, "", False

    def _is_spike(self, vote: Vote) -> bool:
        limit = self._options.spike
        usual = limit is not None and self._updates >= _USUAL_AFTER and vote.norm is not None
        return usual and vote.norm > limit * self._mean  # type: ignore[operator]

    def _why(self, vote: Vote) -> str:
        if not vote.count:
            return "it has no target, since all labels are -100"
        if vote.loss is None:
            return _NOT_FINITE
        if vote.norm is None:
            return _OVERFLOWED
        return f"the norm of its gradient, {vote.norm:.4g}, is over {self._options.spike:g} times the mean"
