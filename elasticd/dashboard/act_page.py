"""The requests to the leader that the page offers: each with its command line, and with the reason where it may
not.

An act is passed on with the viewer's own credential: the leader decides, not the dashboard. What is said here
of who may do what only spares a viewer the attempt.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import quote

import msgspec
from elasticd_planner.value import Value

from elasticd.dashboard import views
from elasticd.dashboard.known import KnownCluster
from elasticd.wire.api_types import CHAOS_OFF, Settings

#: Seconds for a last checkpoint where none are given, as on the command line.
STOP_SECONDS = 600.0


class ActFields(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of `POST /api/act/NAME`: the fields that the act names, and no others."""

    node: str = ""
    other: str = ""
    device: str = ""
    job: str = ""
    key: str = ""
    value: bool | int | float | str | None = None  # of config: null takes the file's value again
    factor: float = 1.0
    seconds: float | None = None  # None: what the command line has for it
    confirm: str = ""  # the word that the act asks for


class ActRequest(Value, frozen=True, kw_only=True):
    """A request to the leader."""

    path: str
    body: dict[str, Any]
    command: str  # the equal command line


class _Act(Value, frozen=True, kw_only=True):
    words: str
    command: str
    fields: tuple[str, ...]
    make: Callable[[ActFields, str], ActRequest]
    confirm: str = ""
    chaos: bool = False


class Unusable(ValueError):
    """A body that the act cannot use; the message says what would be right."""


def _line(*words: object) -> str:
    return shlex.join(str(word) for word in words)


def _drain(on: bool) -> Callable[[ActFields, str], ActRequest]:
    def make(wanted: ActFields, by: str) -> ActRequest:
        undo = () if on else ("--undo",)
        return ActRequest(
            path=f"/v1/nodes/{quote(wanted.node, safe='')}/drain",
            body={"on": on},
            command=_line("elasticd", "drain", *undo, wanted.node),
        )

    return make


def _pause(on: bool) -> Callable[[ActFields, str], ActRequest]:
    def make(wanted: ActFields, by: str) -> ActRequest:
        values = {"policy.paused": True if on else None}
        return ActRequest(
            path="/v1/config",
            body={"values": values, "by": by},
            command=_line("elasticd", "pause" if on else "resume"),
        )

    return make


def _config(wanted: ActFields, by: str) -> ActRequest:
    unset = wanted.value is None
    text = str(wanted.value).lower() if isinstance(wanted.value, bool) else str(wanted.value)
    words = ("unset", wanted.key) if unset else ("set", wanted.key, text)
    return ActRequest(
        path="/v1/config",
        body={"values": {wanted.key: wanted.value}, "by": by},
        command=_line("elasticd", "config", *words),
    )


def _stop(wanted: ActFields, by: str) -> ActRequest:
    seconds = STOP_SECONDS if wanted.seconds is None else wanted.seconds
    if seconds <= 0:
        raise Unusable(
            f"seconds = {seconds:g} leaves no time for a last checkpoint: give more, or ask for stop-now"
        )
    return _stopped(wanted, by, seconds, "--wait", f"{seconds:g}")


def _stop_now(wanted: ActFields, by: str) -> ActRequest:
    return _stopped(wanted, by, 0.0, "--now")


def _stopped(wanted: ActFields, by: str, seconds: float, *options: str) -> ActRequest:
    return ActRequest(
        path=f"/v1/jobs/{quote(wanted.job, safe='')}/stop",
        body={"by": by, "seconds": seconds},
        command=_line("elasticd", "stop", *options, wanted.job),
    )


def _checkpoint(wanted: ActFields, by: str) -> ActRequest:
    return ActRequest(
        path=f"/v1/jobs/{quote(wanted.job, safe='')}/checkpoint",
        body={"by": by},
        command=_line("elasticd", "checkpoint", "now", wanted.job),
    )


def _forget(wanted: ActFields, by: str) -> ActRequest:
    return ActRequest(
        path=f"/v1/jobs/{quote(wanted.job, safe='')}/forget",
        body={"by": by},
        command=_line("elasticd", "forget", wanted.job),
    )


def _chaos(action: str) -> Callable[[ActFields, str], ActRequest]:
    def make(wanted: ActFields, by: str) -> ActRequest:
        factor = (f"{wanted.factor:g}",) if action == "slow" else ()
        body = {"action": action, "device": wanted.device, "factor": wanted.factor}
        return ActRequest(
            path="/v1/chaos",
            body=body if action == "slow" else {"action": action, "device": wanted.device},
            command=_line("elasticd", "chaos", action, wanted.device, *factor),
        )

    return make


def _cut(action: str) -> Callable[[ActFields, str], ActRequest]:
    def make(wanted: ActFields, by: str) -> ActRequest:
        lasts = ("--for", f"{wanted.seconds:g}") if wanted.seconds and action == "cut" else ()
        data = ("--data", wanted.other) if wanted.other else ()
        body = {"action": action, "node": wanted.node, "other": wanted.other}
        if action == "cut":
            body = {**body, "seconds": wanted.seconds or 0.0}  # type: ignore[dict-item]
        return ActRequest(
            path="/v1/chaos",
            body=body,
            command=_line("elasticd", "chaos", action, *lasts, *data, wanted.node),
        )

    return make


#: All acts, by name, in the order of the page.
ACTS: Mapping[str, _Act] = {
    "drain": _Act(
        words="Let all plans leave a node, so that it can be stopped. Nothing stalls.",
        command="elasticd drain NODE",
        fields=("node",),
        make=_drain(on=True),
    ),
    "undrain": _Act(
        words="Let plans use a drained node again.",
        command="elasticd drain --undo NODE",
        fields=("node",),
        make=_drain(on=False),
    ),
    "pause": _Act(
        words="Let running plans stay as they are; faults and drains are still answered.",
        command="elasticd pause",
        fields=(),
        make=_pause(on=True),
    ),
    "resume": _Act(
        words="Let plans be replaced by better ones again.",
        command="elasticd resume",
        fields=(),
        make=_pause(on=False),
    ),
    "config": _Act(
        words="Change a key of detection or policy at once; null takes the file's value again.",
        command="elasticd config set KEY VALUE",
        fields=("key", "value"),
        make=_config,
    ),
    "checkpoint": _Act(
        words="Have a job make a checkpoint now. An event tells of it once it is whole.",
        command="elasticd checkpoint now JOB",
        fields=("job",),
        make=_checkpoint,
    ),
    "stop": _Act(
        words="End a job. Its workers have so many seconds for a last checkpoint.",
        command="elasticd stop --wait SECONDS JOB",
        fields=("job", "seconds"),
        make=_stop,
        confirm="job",
    ),
    "stop-now": _Act(
        words="End a job at once, without a last checkpoint: what it trained since the newest one is lost.",
        command="elasticd stop --now JOB",
        fields=("job",),
        make=_stop_now,
        confirm="job",
    ),
    "forget": _Act(
        words="Delete all that the cluster keeps of a job that is over. Checkpoints on disk stay.",
        command="elasticd forget JOB",
        fields=("job",),
        make=_forget,
        confirm="job",
    ),
    "chaos-slow": _Act(
        words="Slow a device down: so many times the time for the same work.",
        command="elasticd chaos slow DEVICE FACTOR",
        fields=("device", "factor"),
        make=_chaos("slow"),
        chaos=True,
    ),
    "chaos-recover": _Act(
        words="Let a device run at its normal speed again.",
        command="elasticd chaos recover DEVICE",
        fields=("device",),
        make=_chaos("recover"),
        chaos=True,
    ),
    "chaos-kill": _Act(
        words="Kill the worker of a device, by SIGKILL.",
        command="elasticd chaos kill DEVICE",
        fields=("device",),
        make=_chaos("kill"),
        confirm="device",
        chaos=True,
    ),
    "chaos-freeze": _Act(
        words="Let the worker of a device stand still, by SIGSTOP.",
        command="elasticd chaos freeze DEVICE",
        fields=("device",),
        make=_chaos("freeze"),
        confirm="device",
        chaos=True,
    ),
    "chaos-thaw": _Act(
        words="Let the frozen worker of a device go on.",
        command="elasticd chaos thaw DEVICE",
        fields=("device",),
        make=_chaos("thaw"),
        chaos=True,
    ),
    "chaos-cut": _Act(
        words="Cut a node's agent off from leader and etcd, or with OTHER the data network between two nodes.",
        command="elasticd chaos cut [--for SECONDS] [--data OTHER] NODE",
        fields=("node", "other", "seconds"),
        make=_cut("cut"),
        confirm="node",
        chaos=True,
    ),
    "chaos-heal": _Act(
        words="End a cut.",
        command="elasticd chaos heal [--data OTHER] NODE",
        fields=("node", "other"),
        make=_cut("heal"),
        chaos=True,
    ),
}
#: Fields that may be left out.
_OPTIONAL = ("value", "seconds", "factor", "other")


def act_list(known: KnownCluster, viewer: views.Viewer) -> views.ActList:
    """The requests that this viewer can make now."""
    cluster = known.cluster
    live = tuple(sorted(name for name, job in cluster.jobs.items() if not job.over))
    over = tuple(sorted(name for name, job in cluster.jobs.items() if job.over))
    nodes = tuple(sorted(cluster.nodes))
    devices = tuple(device.name for name in nodes for device in cluster.nodes[name].devices)
    keys = tuple(sorted(cluster.settings.values)) if cluster.settings is not None else ()
    choices = {"node": nodes, "other": nodes, "device": devices, "key": keys}
    acts = []
    for name, act in ACTS.items():
        own_choices = {**choices, "job": over if name == "forget" else live}
        why = refusal(known, viewer, name)
        acts.append(
            views.Act(
                name=name,
                words=act.words,
                command=act.command,
                fields=act.fields,
                allowed=not why,
                why_not=why,
                confirm=act.confirm,
                choices={each: own_choices[each] for each in act.fields if each in own_choices},
            )
        )
    return views.ActList(viewer=viewer, acts=tuple(acts))


def refusal(known: KnownCluster, viewer: views.Viewer, name: str) -> str:
    """Why an act cannot be asked for now, or nothing."""
    act = ACTS[name]
    if viewer.role != "operator":
        return "it needs the token of an operator: sign in with one"
    if not known.reachable:
        return "nobody leads now, or the dashboard cannot reach who does: wait, or start a coordinator"
    if act.chaos and not known.cluster.chaos:
        return CHAOS_OFF
    if name in ("pause", "resume") and known.cluster.paused == (name == "pause"):
        return "replanning is paused already" if name == "pause" else "replanning is not paused"
    if name in ("pause", "resume", "config") and known.cluster.store_away:
        return "etcd does not answer, and a change is kept there: try again when it is back"
    return ""


def request(name: str, wanted: ActFields, by: str) -> ActRequest:
    """The request to the leader. Raises `Unusable`, also where the confirmation is not the word asked for."""
    act = ACTS[name]
    given = msgspec.structs.asdict(wanted)
    for field in act.fields:
        if field not in _OPTIONAL and not given[field]:
            raise Unusable(f"{name} needs {field}: give it in the body, as {{{field!r}: ...}}")
    if act.confirm and wanted.confirm != given[act.confirm]:
        raise Unusable(
            f"{name} harms what it is about: repeat {act.confirm} {given[act.confirm]!r} in the field confirm"
        )
    return act.make(wanted, by)


def config_view(settings: Settings | None) -> views.ConfigView:
    """Detection and policy, with their changes, newest first."""
    if settings is None:
        return views.ConfigView(values=(), history=())
    values = tuple(
        views.ConfigValue(key=key, value=value, changed=key in settings.changed)
        for key, value in sorted(settings.values.items())
    )
    changes = []
    before: dict[str, bool | int | float | str] = {}
    for record in settings.history:
        changes.append(
            views.ConfigChange(
                number=record.number,
                time=record.at,
                by=record.by,
                set={key: value for key, value in record.values.items() if before.get(key) != value},
                unset=tuple(sorted(before.keys() - record.values.keys())),
            )
        )
        before = record.values
    return views.ConfigView(values=values, history=tuple(reversed(changes)))
