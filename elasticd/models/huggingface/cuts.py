"""The rules of a model's modules in a TP group, and the modules that have none."""

from __future__ import annotations

from dataclasses import dataclass, field

from elasticd.runtime.model.tp_rules import Rule, UnitsOf


@dataclass(kw_only=True)
class Cuts:
    """Rules by pattern, units by kind, and why groups of modules are whole."""

    rules: dict[str, Rule] = field(default_factory=dict)
    units: dict[str, UnitsOf] = field(default_factory=dict)
    whole: dict[str, str] = field(default_factory=dict)


class WholeGroup(Exception):
    """A group of modules is whole on every member of a TP group; the message says why."""
