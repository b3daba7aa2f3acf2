"""A switch: a row for each rank, with when it was prepared and when it ran the new plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from elasticd_planner.spec.cluster import node_of
from elasticd_planner.spec.mesh import JobPlan

from elasticd.dashboard import views
from elasticd.dashboard.cluster_page import event_row
from elasticd.wire.event_record import EventRecord
from elasticd.wire.live_types import RankNews

#: Kinds of events that belong to a switch.
KINDS = ("proposed", "prepared", "swapped", "recorded", "aborted", "fenced")
#: Links that are listed, and events.
MOST_LINKS, MOST_EVENTS = 64, 64


def nothing(job: str) -> views.SwitchView:
    """There was no switch yet."""
    return views.SwitchView(
        job=job,
        number=0,
        phase="none",
        sentence="there was no switch yet",
        proposed=None,
        recorded=None,
        step=None,
        pause=None,
        recovery=False,
        ranks=(),
        links=(),
        events=(),
    )


def switch_view(
    job: str,
    number: int,
    plan: JobPlan | None,
    before: JobPlan | None,
    said: Sequence[RankNews],
    told: Sequence[EventRecord],
) -> views.SwitchView:
    """The switch to plan `number`. plan: that plan, and `before` the one that it takes the place of, as far as
    they
    are known. said: what ranks said of it. told: events with this number, oldest first."""
    own_events = [event for event in told if event.kind in KINDS and event.data.get("number") == number]
    at = {event.kind: event.time for event in reversed(own_events)}
    proposed = at.get("proposed", min((rank.at for rank in said), default=None))
    ranks = _ranks(plan, before, said, proposed)
    new = [rank for rank in ranks if rank.rank >= 0] or ranks
    phase, sentence = _phase(number, new, at)
    recorded = next((event for event in own_events if event.kind == "recorded"), None)
    step = recorded.data.get("step") if recorded is not None else None
    pauses = [rank.pause for rank in ranks if rank.pause is not None]
    return views.SwitchView(
        job=job,
        number=number,
        phase=phase,  # type: ignore[arg-type]
        sentence=sentence,
        proposed=proposed,
        recorded=at.get("recorded"),
        step=step if isinstance(step, int) else None,
        pause=max(pauses) if pauses else None,
        recovery=_recovers(told, number),
        ranks=tuple(ranks),
        links=_links(said),
        events=tuple(event_row(event) for event in own_events[-MOST_EVENTS:]),
    )


def _recovers(told: Sequence[EventRecord], number: int) -> bool:
    """Returns True if a fence came between the plan before and this one."""
    fenced = False
    for event in told:
        if event.kind == "fenced":
            fenced = True
        elif event.kind == "recorded" and event.data.get("number") != number:
            fenced = False
        elif event.kind == "proposed" and event.data.get("number") == number:
            return fenced
    return False


def _ranks(
    plan: JobPlan | None, before: JobPlan | None, said: Sequence[RankNews], proposed: float | None
) -> list[views.RankProgress]:
    members = plan.members if plan is not None else ()
    rank_of = {device: rank for rank, device in enumerate(members)}
    devices = [*members, *(device for device in (before.members if before is not None else ()))]
    devices = list(dict.fromkeys([*devices, *(rank.device for rank in said)]))
    words: dict[str, dict[str, RankNews]] = {}
    for news in said:
        words.setdefault(news.device, {})[news.what] = news
    began = proposed or 0.0
    rows = []
    for device in devices:
        own_words = words.get(device, {})
        prepared, swapped = own_words.get("prepared"), own_words.get("swapped")
        rows.append(
            views.RankProgress(
                device=device,
                rank=rank_of.get(device, -1),
                prepared=max(0.0, prepared.at - began) if prepared is not None else None,
                moved=max(0.0, swapped.at - began) if swapped is not None else None,
                pause=swapped.pause if swapped is not None else None,
                bytes_sent=swapped.bytes_sent if swapped is not None else None,
                bytes_lacking=swapped.bytes_lacking if swapped is not None else None,
                kept="kept" in own_words,
            )
        )
    return sorted(rows, key=lambda row: (row.rank < 0, row.rank, row.device))


def _phase(number: int, ranks: Sequence[views.RankProgress], at: dict[str, float]) -> tuple[str, str]:
    count = len(ranks)
    prepared = sum(rank.prepared is not None or rank.moved is not None for rank in ranks)
    moved = sum(rank.moved is not None for rank in ranks)
    waits = [rank.device for rank in ranks if rank.prepared is None and rank.moved is None]
    behind = [rank.device for rank in ranks if rank.moved is None]
    if "aborted" in at and "recorded" not in at:
        return "aborted", f"plan {number} was given up; the plan before goes on"
    if "recorded" in at and (moved >= count or not moved):
        return "done", f"plan {number} is in force"
    if moved:
        return "moving", f"{moved} of {count} ranks run plan {number}; the others: {_some(behind)}"
    if prepared >= count and count:
        return "voting", f"all {count} ranks are prepared: the next vote switches to plan {number}"
    text = f"{prepared} of {count} ranks are prepared for plan {number}"
    return "preparing", f"{text}; it waits for {_some(waits)}"


def _some(devices: Sequence[str]) -> str:
    more = f" and {len(devices) - 3} more" if len(devices) > 3 else ""
    return (", ".join(devices[:3]) or "nobody") + more


def _links(said: Sequence[RankNews]) -> tuple[views.Transfer, ...]:
    """Bytes from node to node."""
    counts: Counter[tuple[str, str]] = Counter()
    for rank in said:
        for source, size in rank.flows.items():
            counts[node_of(source), node_of(rank.device)] += size
    return tuple(
        views.Transfer(source=source, target=target, bytes=size)
        for (source, target), size in counts.most_common(MOST_LINKS)
    )
