"""`elasticd --help`: each command once, in groups, with the whole of its first sentence."""

from __future__ import annotations

from elasticd.cli.app import elasticd, summary
from tests.cli.support import call


def test_help_has_every_command_once_in_a_group_and_no_summary_is_cut() -> None:
    _, *groups = call("--help").output.split("\n\n")
    text = "\n".join(groups[groups.index(next(group for group in groups if group.startswith("Run:"))) :])
    headings = [line for line in text.splitlines() if line and not line.startswith(" ")]
    assert headings == ["Run:", "Look:", "Operate:", "Offline tools:"]
    names = [line.split()[0] for line in text.splitlines() if line.startswith("  ") and line[2] != " "]
    assert sorted(names) == sorted(elasticd.commands)
    flowing = " ".join(text.split())
    for command in elasticd.commands.values():
        assert f"{command.name} {summary(command)}" in flowing
        assert len(summary(command).split()) > 1


def test_summary_is_the_first_sentence() -> None:
    assert summary(elasticd.commands["check"]).endswith("outputs and gradients with one process")
    assert "TOML" not in summary(elasticd.commands["chaos"])
