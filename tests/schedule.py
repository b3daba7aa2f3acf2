"""In which order tests start, so that no core is idle at the end: the longest first, each to a free process.

The longest tests are those of whole clusters, each with several processes of its own. Where three or more
processes of pytest run, one of them takes the shortest tests first. Clusters alone would be too much for the
cores at the beginning, and a cluster that waits for a core costs more processor than one that does not.

`tests/durations.json` says how long tests took; `make durations` measures it anew. A test that takes `ALONE`
seconds or more is dealt by itself. The others of its file are dealt together; so are all tests of a file with a
fixture of module scope, which would otherwise be made once for each process.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from xdist.scheduler import LoadScopeScheduling

ROOT = Path(__file__).resolve().parent.parent
DURATIONS = Path(__file__).with_name("durations.json")
#: Seconds from which a test is dealt by itself, and from which its duration is kept.
ALONE = 0.7
#: Seconds that a test counts for of which nothing is known.
UNKNOWN = 0.02


@cache
def known() -> dict[str, float]:
    """Seconds by test, as they were last measured."""
    return dict(json.loads(DURATIONS.read_text())) if DURATIONS.exists() else {}


def write(measured: Mapping[str, float]) -> None:
    """Keeps what matters for the order, rounded, so that a new measurement changes few lines."""
    kept = {name: round(seconds, 1) for name, seconds in sorted(measured.items()) if seconds >= ALONE}
    DURATIONS.write_text(json.dumps(kept, indent=0) + "\n")


def order(names: Iterable[str], seconds: Mapping[str, float], root: Path = ROOT) -> list[str]:
    """Tests, by their node ids, in the order in which they are to start."""
    groups: dict[str, list[str]] = defaultdict(list)
    for name in names:
        groups[group(name, seconds, root)].append(name)
    total = {key: sum(seconds.get(name, UNKNOWN) for name in members) for key, members in groups.items()}
    return [name for key in sorted(groups, key=lambda key: -total[key]) for name in groups[key]]


def group(name: str, seconds: Mapping[str, float], root: Path = ROOT) -> str:
    """What a test is dealt together with: its file, or nothing but itself."""
    file = name.partition("::")[0]
    alone = seconds.get(name, UNKNOWN) >= ALONE and not _shares_fixtures(root / file)
    return name if alone else file


@cache
def _shares_fixtures(file: Path) -> bool:
    """The process that deals tests has only their names, so the text decides."""
    return 'scope="module"' in file.read_text()


class LongestFirst(LoadScopeScheduling):  # type: ignore[misc]
    """Deals groups in the order that the processes of pytest-xdist found them in, which is `order`."""

    def _split_scope(self, nodeid: str) -> str:
        return group(nodeid, known())

    def _assign_work_unit(self, node: Any) -> None:
        if len(self.nodes) > 2 and node is self.nodes[-1]:
            self.workqueue.move_to_end(next(reversed(self.workqueue)), last=False)
        super()._assign_work_unit(node)
