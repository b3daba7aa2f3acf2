"""The slowdown of each lane, agreed from what all ranks measured: a state machine over the steps of a plan.

After a step every rank has the same numbers from the vote: of each lane the seconds that it computed, and the
work that it had. Seconds over work, relative to the median lane, is how slow a lane is, whatever its share was,
so that shares which follow it do not change it. Levels are logarithms (base 2, in 4096ths).

  jump    Two steps in a row beyond 30 % of what is agreed, on one side: their mean is agreed at once.
  return  A jump towards faster takes more steps in a row where the lane has lately become slow again after one:
          twice as many each time, up to 64; a single slow step counts as one of them, two in a row begin anew.
          Of n lanes, k that are x times as slow make steps x times as long with full shares; with those of
          their slowness, when they are normal, n x / ((n - k) x + k) times as long. The first, for the steps
          that shares need to follow, loses as much as the second for x (n - k) / k times as many steps: so long
          lanes that oscillate are waited for at most, as in ski rental. k are the lanes that are waited for in
          the same step: those of a node recover together.
  drift   The mean of the last eight steps, without the largest and the least: agreed when it is out of the dead
          band around what is agreed for two steps in a row. The band is 5 %, or nine times the mean distance of
          such means where these are noisy, as when a lane's slowness wanders.

All arithmetic is in integers after one division of floats, so that every rank has the same state, to the bit. A
state begins anew with each plan, with what the planner knows of its lanes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
from msgspec import structs

from elasticd_planner.batching.lane_tree import NORMAL
from elasticd_planner.numeric import Ints
from elasticd_planner.value import Value, refuse

#: Steps of a logarithm.
_UNIT = 4096
#: Slowdowns that are agreed: from a quarter of a normal lane's time to sixteen times it.
LEAST, MOST = 16, 1024
#: Moves by 30 % and by 5 %, as logarithms.
_JUMP, _BAND = 1550, 288
#: How many steps are averaged, and how many in a row have to agree.
_KEPT, _STEPS = 8, 2
#: Steps until shares follow a lane: two that show it, and the one that is dealt already.
_LAG = 3
#: A lane that is slow within so many steps of a jump towards faster has become so again; and the most that one
#: is waited for.
_AGAIN = 64
#: The slow mean and the deviation from it: the weight of a step is one part in so many; both are in 256ths.
_SLOW, _FINE = 64, 256
#: The dead band of a noisy lane, in mean distances of its means; and the most that one of them counts (10 %).
_NOISY, _MOST_NOISE = 9, 563


class LaneState(Value, frozen=True, kw_only=True):
    """The knowledge of one lane."""

    agreed: int  # its level
    levels: tuple[int, ...] = ()  # of its last steps
    out: int = 0  # for so many steps in a row the mean was above (or, negative, below) the dead band
    noise: int = 0  # mean distance of the mean of eight steps from what was agreed [256ths of a level]
    steps: int = 0  # that the noise is of, up to the most that count
    settling: int = 0  # for so many steps more its mean may still be under way to where it moves
    wait: int = _STEPS  # so many steps in a row have to agree that it is far faster, if that is worth it
    faster: tuple[int, ...] = ()  # the levels of those that do, so far, and of single ones that do not
    since: int | None = None  # steps since it jumped towards faster; None: not since it last jumped to slower


class SlowdownState(Value, frozen=True, kw_only=True):
    """The agreed state of all lanes of a module, in their order."""

    lanes: tuple[LaneState, ...]

    @classmethod
    def begin(cls, slowdown: Sequence[int]) -> SlowdownState:
        """Lanes of which these slowdowns are known [64ths of a normal lane's time]."""
        if not slowdown or min(slowdown) < 1:
            refuse(f"slowdowns must be at least 1, of one lane at least, not {tuple(slowdown)}")
        levels = [_level_of(min(MOST, max(LEAST, each))) for each in slowdown]
        return cls(lanes=tuple(LaneState(agreed=level) for level in levels))

    @property
    def slowdown(self) -> tuple[int, ...]:
        """The agreed slowdown of each lane [64ths of a normal lane's time]."""
        return tuple(_slowdown_of(lane.agreed) for lane in self.lanes)


class SlowdownChange(Value, frozen=True, kw_only=True):
    """A slowdown that was agreed anew."""

    lane: int
    before: int  # [64ths]
    after: int  # [64ths]
    jumped: bool  # two steps in a row were far off; else a mean has drifted


def step(
    state: SlowdownState, seconds: Sequence[float], work: Sequence[float]
) -> tuple[SlowdownState, tuple[SlowdownChange, ...]]:
    """The state after one more step, and what was agreed anew.

    Args:
        state: before.
        seconds: that each lane computed, without communication [lanes].
        work: that each lane had, in any unit that is the same for all [lanes]. A lane without work or time is
            left as it is.

    Raises:
        Invalid: there are not as many numbers as lanes.
    """
    if not len(seconds) == len(work) == len(state.lanes):
        refuse(f"{len(seconds)} seconds and {len(work)} works for {len(state.lanes)} lanes")
    spent, had = np.array(seconds, dtype=np.float64), np.array(work, dtype=np.float64)
    with np.errstate(all="ignore"):  # what is no time of any work is left out
        each = spent / had
    known = np.flatnonzero((spent > 0) & (had > 0) & (each > 0) & np.isfinite(each))
    if not len(known):
        return state, ()
    levels = log2(each[known])
    levels -= np.sort(levels)[(len(levels) - 1) // 2]
    lanes, changes = list(state.lanes), []
    waiting = sum(
        _far_faster(lanes[place], level) for place, level in zip(known.tolist(), levels.tolist(), strict=True)
    )
    for place, level in zip(known.tolist(), levels.tolist(), strict=True):
        before = lanes[place]
        after, jumped = _after(before, level, len(known), waiting)
        lanes[place] = after
        old, new = _slowdown_of(before.agreed), _slowdown_of(after.agreed)
        if old != new:
            changes.append(SlowdownChange(lane=place, before=old, after=new, jumped=jumped))
    return SlowdownState(lanes=tuple(lanes)), tuple(changes)


def _after(lane: LaneState, level: int, lanes: int, waiting: int) -> tuple[LaneState, bool]:
    """A lane, of so many, after a step of this level, and whether it has jumped. `waiting`: how many lanes are
    far faster than agreed in this step."""
    if lane.since is not None:
        lane = structs.replace(lane, since=min(_AGAIN, lane.since + 1))
    if _far_faster(lane, level):
        faster = (*lane.faster, level)
        worth = _LAG * _slowdown_of(lane.agreed) * (lanes - waiting) // (waiting * NORMAL)
        sure = len(faster) >= max(_STEPS, min(lane.wait, worth))
        if not sure or not all(_far_faster(lane, each) for each in faster[-_STEPS:]):
            return structs.replace(lane, faster=faster[-_AGAIN:]), False
        return structs.replace(_jumped(lane, faster[-_STEPS:]), since=0), True
    levels = (*lane.levels, level)[-2 * _KEPT :]
    single = lane.faster and _far_faster(lane, lane.faster[-1])
    lane, last = structs.replace(lane, faster=(*lane.faster, level) if single else ()), levels[-_STEPS:]
    if len(last) == _STEPS and min(last) > lane.agreed + _JUMP:
        wait = lane.wait  # of a slowdown in several jumps the first counts
        if lane.since is not None:
            wait = min(2 * wait, _AGAIN) if lane.since < _AGAIN else _STEPS
        return structs.replace(_jumped(lane, last), wait=wait, since=None), True
    if len(levels) < _KEPT:
        return structs.replace(lane, levels=levels), False
    noise, steps = lane.noise, lane.steps
    # Of a mean before this one, and not of those around a move: a move that is under way is not taken for
    # noise.
    if len(levels) == 2 * _KEPT and not lane.settling:
        off = min(abs(_mean(levels[:_KEPT]) - lane.agreed), _MOST_NOISE) * _FINE
        steps = min(_SLOW, steps + 1)
        noise += (off - noise) // steps
    middle = _mean(levels[-_KEPT:])
    band = _BAND if lane.settling else max(_BAND, _NOISY * noise // _FINE)
    side = _side(middle - lane.agreed, band)
    out = side + (lane.out if lane.out * side > 0 else 0)
    adopted = abs(out) == _STEPS
    made = structs.replace(
        lane,
        agreed=middle if adopted else lane.agreed,
        levels=levels,
        out=0 if adopted else out,
        noise=noise,
        steps=steps,
        settling=2 * _KEPT if adopted else max(0, lane.settling - 1),
    )
    return made, False


def _far_faster(lane: LaneState, level: int) -> bool:
    return level < lane.agreed - _JUMP


def _jumped(lane: LaneState, last: Sequence[int]) -> LaneState:
    """A lane that is as its last steps say: what came before says nothing of it any more."""
    return structs.replace(lane, agreed=sum(last) // _STEPS, levels=tuple(last), faster=(), out=0, settling=0)


def _mean(levels: Sequence[int]) -> int:
    """Without the largest and the least."""
    return (sum(levels) - max(levels) - min(levels)) // (len(levels) - 2)


def _side(off: int, limit: int) -> int:
    """1 above a limit, -1 below its negative, else 0."""
    return (off > limit) - (off < -limit)


def log2(values: Sequence[float] | np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> Ints:
    """The logarithms of positive numbers in 4096ths, rounded down, bit by bit: the same on every machine, which
    a library's are not."""
    mantissa, exponent = np.frexp(np.asarray(values, dtype=np.float64))
    part = (mantissa * 2.0**31).astype(np.uint64)  # [1, 2) in parts of 2^30
    found = exponent.astype(np.int64) - 1
    for _ in range(_UNIT.bit_length() - 1):
        part = part * part >> np.uint64(30)
        bit = part >> np.uint64(31)
        part >>= bit
        found = 2 * found + bit.astype(np.int64)
    return found


_LEVELS: list[int] = log2(np.arange(LEAST, MOST + 1) / NORMAL).tolist()


def _level_of(slowdown: int) -> int:
    return _LEVELS[slowdown - LEAST]


def _slowdown_of(level: int) -> int:
    """The slowdown that is nearest to a level."""
    at = bisect_left(_LEVELS, level)
    if at == len(_LEVELS):
        return MOST
    if at and level - _LEVELS[at - 1] < _LEVELS[at] - level:
        at -= 1
    return LEAST + at
