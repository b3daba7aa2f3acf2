"""Every script of `tests/scripts/corpus` through its layouts: what became of it beside plain torch.

A script that docs/training.md has trained goes through three layouts on a real cluster, with a worker that is
killed and a switch; one that is refused runs in one process. A script is wrong in silence if it ends well with
other losses or weights than plain torch has.
"""

from __future__ import annotations

from collections.abc import Iterator

from _results import Row, row

from tests.scripts import disturbed
from tests.scripts.test_corpus import NAMES, REFUSED

#: The layouts of a script that trains: two stages, one device, a TP group or two unequal replicas.
LAYOUTS = 3
SMALLEST = ("one_cycle", "plateau")


def rows(smallest: bool) -> Iterator[Row]:
    names = SMALLEST if smallest else NAMES
    became: dict[str, list[str]] = {}
    for name in names:
        verdict = disturbed.judged(name)
        became.setdefault(verdict, []).append(name)
        print(f"{name}: {verdict}", flush=True)
    layouts = {name: 1 if name in REFUSED else LAYOUTS for name in names}
    wrong, failed = became.get(disturbed.WRONG, []), became.get(disturbed.FAILED, [])
    right = sum(layouts[name] for name in names if name not in (*wrong, *failed))
    every = sum(layouts.values())
    what = "scripts of the corpus x layouts"
    yield row(f"{what}: equal to plain torch or refused", right, "", goal=f">= {every}", met=right == every)
    yield row(f"{what}: wrong in silence", len(wrong), "scripts", goal="<= 0", met=not wrong)
    yield row("scripts that train wrongly in silence, by name", ", ".join(wrong) or "none", "")
    yield row("scripts that fail without the documented message, by name", ", ".join(failed) or "none", "")
    yield row("scripts of the corpus", len(names), "scripts")
    yield row("of them refused by the documented message", len(became.get(disturbed.REFUSED, [])), "scripts")
