"""The bytes of state that move between two plans, and the places of devices that make these few.

The planner has a profile, not the model's layouts: bytes are counted by sections and share units. The
migration counts exactly.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from elasticd_planner.cost.model_profile import ModelProfile, SectionProfile
from elasticd_planner.cost.profile_cost import to_units
from elasticd_planner.cost.zero_cost import Zero
from elasticd_planner.spec.expert_load import ExpertLoad, held_by_device
from elasticd_planner.spec.plan import ModulePlan, Pipeline, Plan, Span, Strategy


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """The holdings of a device: layers [start, stop), in an interleaved pipeline `later` ones too, share units
    [low, high), embed and head."""

    start: int
    stop: int
    low: int
    high: int
    embed: bool
    head: bool
    later: tuple[Span, ...] = ()

    @property
    def spans(self) -> tuple[Span, ...]:
        """The layers that it holds, one span for each chunk."""
        return ((self.start, self.stop), *self.later)

    @property
    def layers(self) -> int:
        """The number of layers that it holds."""
        return sum(stop - start for start, stop in self.spans)

    def common(self, start: int, stop: int, later: Sequence[Span] = ()) -> int:
        """The number of layers that it has of [start, stop) and `later` ones."""
        if not self.later and not later:
            return max(0, min(self.stop, stop) - max(self.start, start))
        spans = ((start, stop), *later)
        return sum(max(0, min(b, d) - max(a, c)) for a, b in self.spans for c, d in spans)


Holders = dict[str, Held]

#: So many devices are assigned exactly and with a preference among equal ones.
FEW = 8


def holders(plan: Plan | None, units: int) -> Holders:
    """The part of the module with the loss that each member of a plan holds."""
    return held_by(plan.loss_view.pipelines if plan is not None else (), units)


def held_by(pipelines: Sequence[Pipeline], units: int) -> Holders:
    """The holdings of each device of some pipelines, shares counted in `units`."""
    held: Holders = {}
    for lane in (lane for pipeline in pipelines for lane in pipeline.by_lane):
        for stage in lane.stages:
            low = 0
            for device, share in zip(stage.devices, to_units(stage.shares, units), strict=True):
                held[device] = Held(
                    start=stage.start,
                    stop=stage.stop,
                    low=low,
                    high=low + share,
                    embed=stage.start == 0,
                    head=stage is lane.stages[-1],
                    later=stage.later,
                )
                low += share
    return held


def bytes_to_move(profile: ModelProfile, old: Plan | None, new: Plan) -> int:
    """Bytes of parameters and optimizer state that the members of `new` lack under `old`, of the module with
    the loss."""
    return round(sum(bytes_by_member(profile, old, new).values()))


def bytes_by_member(
    profile: ModelProfile, old: Plan | None, new: Plan, sources: Collection[str] | None = None
) -> dict[str, float]:
    """The same by member, where `sources` alone hold what they held under `old` (None: all do). With ZeRO
    about: a member has its part of the state of what it computes with, and keeps what it had of it; copies that
    exceed the holders are spread evenly."""
    before = holders(old, profile.share_units)
    if sources is not None:
        before = {device: held for device, held in before.items() if device in sources}
    after = holders(new, profile.share_units)
    was, now = (_zero(plan) if plan is not None else None for plan in (old, new))
    assert now is not None
    grown = max(0.0, now.part - was.part) if was is not None else now.part
    copies = max(0, now.extra - was.extra) if was is not None else now.extra
    spread = copies * profile.parameter_bytes * profile.optimizer_factor / now.members
    found = dict.fromkeys(new.members, spread)
    for device, held in after.items():
        lack = lacking(profile, before.get(device), held)
        kept = lacking(profile, None, held) - lack
        found[device] += lack + profile.optimizer_factor * (lack * now.part + kept * grown)
    return found


def expert_bytes_beyond_shares(profile: ModelProfile, load: ExpertLoad, old: Plan, new: Plan) -> int:
    """Bytes of experts that devices lack beyond those that `bytes_to_move` counts by shares (below 0: fewer),
    of the module with the loss."""
    before, after = held_by_device(old.loss_view, load), held_by_device(new.loss_view, load)
    was, now = holders(old, profile.share_units), holders(new, profile.share_units)
    beyond = 0.0
    for device, blocks in after.items():
        for block, own in blocks.items():
            had = before.get(device, {}).get(block, ())
            units = _lacking_units(was[device] if had else None, now[device])
            by_share = len(load.rows[block]) * units / profile.share_units
            beyond += len({*own} - {*had}) - by_share
    return round(beyond * load.expert_bytes * (1 + profile.optimizer_factor * _zero(new).part))


def _lacking_units(old: Held | None, new: Held) -> int:
    kept = max(0, min(old.high, new.high) - max(old.low, new.low)) if old is not None else 0
    return new.high - new.low - kept


def _zero(plan: Plan) -> Zero:
    return Zero(policy=plan.state, pipelines=len(plan.loss_view.by_lane), members=max(1, len(plan.members)))


def lacking(profile: ModelProfile, old: Held | None, new: Held) -> float:
    """Bytes of parameters that one device lacks; gradients are made anew and never move."""
    wanted = new.high - new.low

    def lack(section: SectionProfile, has: bool) -> float:
        per_unit = (section.cut_bytes + section.grouped_bytes) / profile.share_units
        return per_unit * _lacking_units(old, new) if has else per_unit * wanted + section.whole_bytes

    tied = profile.tied_bytes > 0
    common = old.common(new.start, new.stop, new.later) if old else 0
    total = common * lack(profile.block, True) + (new.layers - common) * lack(profile.block, False)
    had_embed = old is not None and (old.embed or (tied and old.head))
    if new.embed or (tied and new.head):
        total += lack(profile.embed, had_embed)
    if new.head and not tied:
        total += lack(profile.head, old is not None and old.head)
    return total


def estimate(profile: ModelProfile, old: Held | None, new: Held) -> float:
    """Bytes lacking if the order in the group can be chosen so that old units are kept."""
    if old is None:
        return lacking(profile, None, new)
    size = new.high - new.low
    high = min(old.low + size, profile.share_units)
    return lacking(profile, old, replace(new, low=high - size, high=high))


def assign(costs: Sequence[Sequence[float]]) -> tuple[int, ...]:
    """The row (device) of each column (slot) with the least total; of equal ones the first by rows. Subsets
    of rows are bits: exact, and quick for as few devices as an enumeration can have."""
    if len(costs) > FEW:
        return _matching(costs)
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for column in range(len(costs[0])):
        grown: dict[int, tuple[float, tuple[int, ...]]] = {}
        for used, (total, rows) in best.items():
            for row, row_costs in enumerate(costs):
                if not used >> row & 1:
                    option = (total + row_costs[column], (*rows, row))
                    key = used | 1 << row
                    if key not in grown or option < grown[key]:
                        grown[key] = option
        best = grown
    return min(best.values())[1]


def _matching(costs: Sequence[Sequence[float]]) -> tuple[int, ...]:
    """The same by shortest augmenting paths (Kuhn 1955, in the form of Jonker and Volgenant 1987): exact in
    O(n^3), without preference among equal ones."""
    table = np.array(costs, dtype=np.float64).T  # [slot, device]
    slots, devices = table.shape
    price_slot, price_device = np.zeros(slots + 1), np.zeros(devices + 1)
    owner = np.zeros(devices + 1, dtype=np.int64)  # slot (from 1) of each device (from 1); 0: free
    for slot in range(1, slots + 1):
        owner[0] = slot
        at = 0
        least = np.full(devices + 1, np.inf)
        came = np.zeros(devices + 1, dtype=np.int64)
        used = np.zeros(devices + 1, dtype=bool)
        while owner[at]:
            used[at] = True
            row = int(owner[at])
            slack = table[row - 1] - price_slot[row] - price_device[1:]
            closer = ~used[1:] & (slack < least[1:])
            least[1:][closer] = slack[closer]
            came[1:][closer] = at
            following = int(np.where(used, np.inf, least)[1:].argmin()) + 1
            delta = least[following]
            price_slot[owner[used]] += delta
            price_device[used] -= delta
            least[~used] -= delta
            at = following
        while at:
            before = int(came[at])
            owner[at] = owner[before]
            at = before
    chosen = [0] * slots
    for device in range(1, devices + 1):
        if owner[device]:
            chosen[int(owner[device]) - 1] = device - 1
    return tuple(chosen)


def strategy(pipelines: Sequence[Pipeline], module: str = "model") -> Strategy:
    """A plain language model: one module."""
    return Strategy(modules=(ModulePlan(module=module, pipelines=tuple(pipelines)),))
