"""In which order tests start, so that no core is idle at the end: the longest first, each to a free process.

`tests/durations.json` says how long tests took; `make durations` measures it anew. A test that takes `ALONE`
seconds or more is dealt by itself. The others of its file are dealt together, and so are all tests that share a
fixture of their module, which would otherwise be made once for each process. pytest-xdist deals the groups
(`--dist loadgroup`); this file only names and orders them.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

DURATIONS = Path(__file__).with_name("durations.json")
#: Seconds from which a test is dealt by itself, and from which its duration is kept.
ALONE = 0.7
#: Seconds that a test counts for of which nothing is known.
UNKNOWN = 0.02
#: Scopes of fixtures that are made once for several tests of a file.
_SHARED = ("module", "class", "package")


def known() -> dict[str, float]:
    """Seconds by test, as they were last measured."""
    return dict(json.loads(DURATIONS.read_text())) if DURATIONS.exists() else {}


def write(measured: Mapping[str, float]) -> None:
    """Keeps what matters for the order, rounded, so that a new measurement changes few lines."""
    kept = {name: round(seconds, 1) for name, seconds in sorted(measured.items()) if seconds >= ALONE}
    DURATIONS.write_text(json.dumps(kept, indent=0) + "\n")


def arrange(items: Sequence[pytest.Item], seconds: Mapping[str, float]) -> list[pytest.Item]:
    """The tests in the order in which they are to start; those that go together bear one mark `xdist_group`."""
    groups: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        groups[_group(item, seconds)].append(item)
    for name, members in groups.items():
        for item in members:
            item.add_marker(pytest.mark.xdist_group(name))
    longest = sorted(groups.values(), key=lambda members: -sum(_seconds(item, seconds) for item in members))
    return [item for members in longest for item in members]


def _group(item: pytest.Item, seconds: Mapping[str, float]) -> str:
    """What a test is dealt together with. No name holds an "@" or a "]", which xdist splits at."""
    file = item.nodeid.partition("::")[0]
    if not _shares_fixture(item) and _seconds(item, seconds) >= ALONE:
        return item.nodeid.replace("@", " ").replace("]", ")")
    return file


def _shares_fixture(item: pytest.Item) -> bool:
    """Whether the test uses a fixture of this file, or of a conftest, that is made once for several tests."""
    info = getattr(item, "_fixtureinfo", None)
    if info is None:
        return False
    return any(
        definition.scope in _SHARED for found in info.name2fixturedefs.values() for definition in found[-1:]
    )


def _seconds(item: pytest.Item, seconds: Mapping[str, float]) -> float:
    return seconds.get(item.nodeid, UNKNOWN)
