"""The optimizer and scheduler of a script beside those whose state a checkpoint has.

As in torch's `load_state_dict` state and settings are those that were saved, so what a script changed of them
has no effect, which is said. State of another class is refused: nothing in it would mean the same.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from elasticd_migration.schema import MASTER
from elasticd_migration.text_codec import from_text, to_text

from elasticd.checkpoints.manifest import Manifest
from elasticd.runtime.engine.engine import KINDS, SCHEDULER_STATE
from elasticd.runtime.model.optimizer_check import AVERAGE, ScriptOptimizer, refuse_kinds
from elasticd.system.logs import is_first_worker

log = logging.getLogger(__name__)

#: Differences that a message names.
_MOST_NAMED = 4


def other_optimizer(own: ScriptOptimizer, manifest: Manifest) -> str:
    """Why a job with this optimizer cannot go on from a checkpoint; empty: it can. Warns of settings that the
    script has and that do not count."""
    saved = {name: from_text(group.settings) for group in manifest.groups for name in group.names}
    entries = manifest.tensors.get("state", {}).values()
    names = {plane.name for entry in entries for plane in entry.planes} - {MASTER, AVERAGE}
    names |= {scalar.name for entry in entries for scalar in entry.scalars}
    if why := _other_kind(own, manifest, saved, names):
        return why
    changes = list(dict.fromkeys(_changes(own.settings, saved)))
    missing = own.keeps - names - {AVERAGE}
    if names and missing and not changes:
        kind = own.kinds["optimizer"]
        return f"it lacks {min(missing)!r}, which the script's {kind} keeps for its parameters"
    if is_first_worker():
        for text in _notes(own, manifest, changes):
            log.warning(text)
    return ""


def _other_kind(
    own: ScriptOptimizer, manifest: Manifest, saved: Mapping[str, Mapping[str, Any]], names: set[str]
) -> str:
    if KINDS in manifest.extras:
        try:
            refuse_kinds(from_text(manifest.extras[KINDS]), own.kinds)
        except ValueError as error:
            return str(error)
        return ""
    # Of elasticd 0.1, which saves no classes: others have other settings, and keep something else.
    for name, settings in own.settings.items():
        if names and own.keeps - {AVERAGE} != names and set(settings) - set(saved.get(name, settings)):
            return f"its optimizer keeps {', '.join(sorted(names))}, not {', '.join(sorted(own.keeps))}"
    return ""


def _changes(own: Mapping[str, Mapping[str, Any]], saved: Mapping[str, Mapping[str, Any]]) -> Iterable[str]:
    for name, settings in own.items():
        for key, value in settings.items():
            was = saved.get(name, {}).get(key, value)
            if to_text(was) != to_text(value):
                yield f"{key.removeprefix('initial_')} {_short(was)} (the script has {_short(value)})"


def _notes(own: ScriptOptimizer, manifest: Manifest, changes: list[str]) -> Iterable[str]:
    if changes:
        yield (
            "settings of the optimizer are those of the checkpoint, as in torch's load_state_dict: "
            + _listed(changes)
        )
    text = manifest.extras.get(SCHEDULER_STATE)
    if text is None and "scheduler" in own.kinds:
        yield f"the checkpoint has no scheduler's state: {own.kinds['scheduler']} begins at its first step"
    if text is not None and "scheduler" not in own.kinds:
        yield "the checkpoint has a scheduler's state, and the job no scheduler: the learning rate stays"
    if text is None or "scheduler" not in own.kinds:
        return
    saved = from_text(text)
    changed = [
        f"{key} {_short(saved[key])} (the script has {_short(value)})"
        for key, value in own.schedule.items()
        if key in saved and key != "base_lrs" and to_text(saved[key]) != to_text(value)
    ]
    if changed:
        kind = own.kinds["scheduler"]
        yield f"{kind} goes on with the checkpoint's state, as in torch's load_state_dict: {_listed(changed)}"


def _listed(texts: list[str]) -> str:
    return ", ".join(texts[:_MOST_NAMED]) + (", ..." if len(texts) > _MOST_NAMED else "")


def _short(value: object) -> str:
    text = f"{value:g}" if isinstance(value, float) else repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
