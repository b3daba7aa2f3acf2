"""In which order tests start, so that no core is idle at the end: the longest first, each to a free process.

The longest tests are those of whole clusters, each with several processes of its own; most of the time they
wait, for a lease or a paced step. The shortest compute all the time. So of three or more processes of pytest
almost half take the shortest tests first. Clusters alone would be too much for the cores where they start, and
leave them idle where they wait; a cluster that waits for a core costs more processor than one that does not.

`tests/durations.json` says how long tests took; `make durations` measures it anew. A test that takes `ALONE`
seconds or more is dealt by itself. The others of its file are dealt together; so are the tests of a file that
use a fixture of module scope, which would otherwise be made once for each process.

A test that takes more than `LONGEST` seconds is made shorter, moved to `make test-all`, or listed in `LONG`.
"""

from __future__ import annotations

import ast
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
#: Seconds that a test of `make test` takes at most, where all its processes of pytest run.
LONGEST = 30.0
#: Tests that may take longer. Each is the only proof of what a whole cluster does over many steps or starts.
LONG = frozenset(
    {
        "tests/chaos/test_soak.py::test_a_real_job_goes_on_through_random_faults[fixed]",
        "tests/dashboard/browser/test_pages.py::test_slow_device_is_shown_and_replanned_around_without_a_reload",
        "tests/integration/test_experts_live.py"
        "::test_experts_move_while_a_job_trains_and_the_one_device_that_has_some_dies",
        "tests/integration/test_live.py::test_a_device_dies_another_comes_and_one_is_drained",
        "tests/integration/test_mixed_releases.py"
        "::test_every_part_of_a_cluster_is_upgraded_while_its_job_trains_on[0.1.0]",
        "tests/integration/test_restart_mode.py"
        "::test_slow_node_is_left_out_where_going_on_without_it_is_faster_and_stands_by",
        "tests/integration/test_data_shift.py"
        "::test_a_job_switches_when_its_data_shifts_and_back_and_never_for_a_shift_that_pays_nothing",
        "tests/integration/test_zero_switches.py"
        "::test_state_policies_switch_in_place_and_training_stays_that_of_one_process",
    }
)


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
    """What a test is dealt together with: others of its file, or nothing but itself."""
    file, _, rest = name.partition("::")
    if rest.partition("[")[0].rpartition("::")[2] in _sharing(root / file):
        return f"{file}::"
    return name if seconds.get(name, UNKNOWN) >= ALONE else file


@cache
def _sharing(file: Path) -> frozenset[str]:
    """The tests of a file that use a fixture of module scope, directly or through another fixture.

    The process that deals tests has only their names, so the text decides.
    """
    text = file.read_text()
    if 'scope="module"' not in text:
        return frozenset()
    functions = {n.name: n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef)}
    decorators = {name: " ".join(map(ast.unparse, node.decorator_list)) for name, node in functions.items()}
    shared = {name for name, text in decorators.items() if "scope='module'" in text}
    if any("autouse" in decorators[name] for name in shared):
        return frozenset(functions)
    names = {name: _names(node) for name, node in functions.items()}
    while more := {name for name, used in names.items() if used & shared} - shared:
        shared |= more
    return frozenset(shared)


def _names(function: ast.FunctionDef) -> set[str]:
    """What a function takes; and the fixtures that it, or a mark of it, names in a string."""
    strings = {node.value for node in ast.walk(function) if isinstance(node, ast.Constant)}
    return {argument.arg for argument in function.args.args} | {s for s in strings if isinstance(s, str)}


def too_long(names: Iterable[str], seconds: Mapping[str, float]) -> list[str]:
    """Those of these tests that take longer than `LONGEST` and are not in `LONG`."""
    return sorted(name for name in names if seconds.get(name, UNKNOWN) > LONGEST and name not in LONG)


class LongestFirst(LoadScopeScheduling):  # type: ignore[misc]
    """Deals groups in the order that the processes of pytest-xdist found them in, which is `order`."""

    def _split_scope(self, nodeid: str) -> str:
        return group(nodeid, known(), self.config.rootpath)

    def _assign_work_unit(self, node: Any) -> None:
        if self.nodes.index(node) > len(self.nodes) // 2:
            self.workqueue.move_to_end(next(reversed(self.workqueue)), last=False)
        super()._assign_work_unit(node)

    def _reschedule(self, node: Any) -> None:
        """A process runs a test once it knows the next one, or that there is none: it is told of the end, too.

        One that takes the place of a process that died is asked for its tests first.
        """
        if node not in self.registered_collections:
            return
        super()._reschedule(node)
        if not self.workqueue and not node.shutting_down:
            node.shutdown()

    def remove_node(self, node: Any) -> str | None:
        """Takes away a process that ended or died; the test that it died in has failed and is not run again."""
        work = self.assigned_work.pop(node)
        left = [(scope, name) for scope, tests in work.items() for name, done in tests.items() if not done]
        if not left:
            return None
        scope, died = left[0]
        work[scope][died] = True
        self.workqueue.update({scope: tests for scope, tests in work.items() if not all(tests.values())})
        for other in self.nodes:
            self._reschedule(other)
        return died
