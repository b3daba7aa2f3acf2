"""The configuration that can be changed while running: detection and policy, over what the file says.

A change is checked as the file is, written to etcd with its history, and only then followed. A new leader
follows what it finds there, over its own file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import msgspec
from elasticd_planner.detection.stragglers import DetectSettings
from elasticd_planner.policy.policy import PolicySettings
from elasticd_planner.value import Value

from elasticd.codec.decoding import shown, skip
from elasticd.config.tree import Config, ConfigError, section
from elasticd.machines.job.state.events import Configured
from elasticd.records import ConfigRecord, Keys, decode_at
from elasticd.store.protocol import KeyValue
from elasticd.version import __version__
from elasticd.wire.api_types import Settings

Scalar = bool | int | float | str
T = TypeVar("T")
#: Changes that are kept.
MOST_HISTORY = 256
#: The sections whose keys can be changed.
SECTIONS: dict[str, type[msgspec.Struct]] = {"detect": DetectSettings, "policy": PolicySettings}
# Dotted keys as records have them, which every release reads, and as this release calls them.
_KEYS = {
    f"{name}.{field.encode_name}": f"{name}.{field.name}"
    for name, kind in SECTIONS.items()
    for field in msgspec.structs.fields(kind)
}
_STORED = {key: stored for stored, key in _KEYS.items()}


class ConfigChanges(Value, frozen=True, kw_only=True):
    """Detection and policy: the file's values, and what was changed while running."""

    detect: DetectSettings  # as in the file
    policy: PolicySettings  # as in the file
    history: tuple[ConfigRecord, ...] = ()  # changes, oldest first; the last is in force

    @property
    def values(self) -> dict[str, Scalar]:
        """The values that differ from the file, by dotted key."""
        return _renamed(self.history[-1].values, _KEYS) if self.history else {}

    def effective(self) -> tuple[DetectSettings, PolicySettings]:
        """The settings in force. A key that this release lacks is skipped with one log line, and kept for the
        release that wrote it. Raises ConfigError for a value that this release does not take."""
        return _over(self.detect, self.policy, _known(self.values))

    def changed(self, asked: Mapping[str, Any], at: float, by: str) -> ConfigChanges:
        """With `asked` on top: None takes the file's value again. Raises ConfigError with what would be right,
        and where nothing would change."""
        values = self.values
        for key in asked:
            if key_now(key) != key and key_now(key) in asked:
                raise ConfigError(f"{key} and {key_now(key)} are one key: give {key_now(key)} alone")
        asked = _renamed(asked, _KEYS)
        for key, value in asked.items():
            check_key(key)
            if value is None:
                if key not in values and key not in (known := self.shown().values):
                    raise ConfigError(f"there is no key {key!r}; there are: {', '.join(sorted(known))}")
                values.pop(key, None)
            else:
                values[key] = value
        _over(self.detect, self.policy, _known(values) | {key: values[key] for key in asked if key in values})
        if values == self.values:
            raise ConfigError(f"nothing to change: {', '.join(asked) or 'no key was given'} is so already")
        number = self.history[-1].number + 1 if self.history else 1
        record = ConfigRecord(number=number, values=_renamed(values, _STORED), at=at, by=by)
        return msgspec.structs.replace(self, history=(*self.history, record)[-MOST_HISTORY:])

    def event(self, words: str) -> Configured:
        """For the machine."""
        detect, policy = self.effective()
        return Configured(detect=detect, policy=policy, changes=words)

    def shown(self) -> Settings:
        """The answer of `GET /v1/config`."""
        detect, policy = self.effective()
        values = {
            f"{name}.{key}": value
            for name, in_force in zip(SECTIONS, (detect, policy), strict=True)
            for key, value in msgspec.structs.asdict(in_force).items()
        }
        history = (msgspec.structs.replace(r, values=_renamed(r.values, _KEYS)) for r in self.history)
        return Settings(values=values, changed=self.values, history=tuple(history))


def of(config: Config, keys: Keys, items: Iterable[KeyValue]) -> ConfigChanges:
    """Returns the changes by the file and the store. Raises ConfigError for a record that this program cannot
    read."""
    folder = f"{keys.config}-history/"
    entries = sorted(
        (item for item in items if not keys.note_unknown(item.key) and item.key.startswith(folder)),
        key=lambda item: item.key,
    )
    try:
        history = tuple(decode_at(item.key, item.value, ConfigRecord) for item in entries)
        changes = ConfigChanges(detect=config.detect, policy=config.policy, history=history)
        changes.effective()
    except (msgspec.DecodeError, ConfigError) as error:
        raise ConfigError(
            f"what was changed of the configuration (under {keys.config} in etcd) cannot be used: {error}; "
            "delete these keys, or run the release that wrote them"
        ) from error
    return changes


def key_now(key: str) -> str:
    """A dotted key as this release calls it."""
    return _KEYS.get(key, key)


def check_key(key: str) -> None:
    """Raises ConfigError where no running coordinator can change it."""
    name, _, field = key.partition(".")
    if name not in SECTIONS or not field:
        raise ConfigError(
            f"{key!r} cannot be changed while running: give a key of section detect or policy, as "
            "policy.horizon_steps; the rest is in the file"
        )


def _renamed(values: Mapping[str, T], names: Mapping[str, str]) -> dict[str, T]:
    return {names.get(key, key): value for key, value in values.items()}


def _known(values: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """Those whose keys this release has; each other key is logged once."""
    known: dict[str, Scalar] = {}
    for key, value in values.items():
        if key in _STORED:
            known[key] = value
        else:
            skip(
                "setting",
                ("config", key),
                f"the configuration in the store has a key {shown(key)!r}, which elasticd {__version__} does "
                "not know: it is skipped and kept",
            )
    return known


def _over(
    detect: DetectSettings, policy: PolicySettings, values: Mapping[str, Any]
) -> tuple[DetectSettings, PolicySettings]:
    bodies: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
    for key, value in values.items():
        check_key(key)
        name, _, field = key.partition(".")
        bodies[name][field] = value
    return (
        section("detect", detect, bodies["detect"], "config", strict=False),
        section("policy", policy, bodies["policy"], "config", strict=False),
    )
