"""What the pages have of other projects is what its lock says; every module of theirs is fetched at once."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TOOLS, STATIC = ROOT / "elasticd/dashboard/tools", ROOT / "elasticd/dashboard/static"
_FORBIDDEN = r"\sstyle=|innerHTML|outerHTML|insertAdjacentHTML|unsafeHTML|document\.write|eval\("
MADE = json.loads((TOOLS / "vendor.json").read_text())


def test_each_vendored_file_has_the_hash_that_it_was_made_with() -> None:
    found = {name: hashlib.sha256((ROOT / name).read_bytes()).hexdigest() for name in MADE["files"]}
    assert found == MADE["files"], "changed by hand: npm ci && npm run vendor in dashboard/tools"
    kept = {path.name for path in (STATIC / "vendor").iterdir() if not path.name.endswith(".d.ts")}
    assert kept == {Path(name).name for name in MADE["files"] if "/static/vendor/" in name}


def test_vendored_packages_are_those_of_the_lock_and_their_licences_are_there() -> None:
    lock = json.loads((TOOLS / "package-lock.json").read_text())["packages"]
    assert {name: lock[f"node_modules/{name}"]["version"] for name in MADE["packages"]} == MADE["packages"]
    licences = (STATIC / "vendor/LICENCES.txt").read_text()
    for name, version in MADE["packages"].items():
        if name != "axe-core":  # of the tests alone; its licence lies beside it
            assert f"{name} {version}\n" in licences


def test_every_module_is_fetched_at_once_and_nothing_is_inline() -> None:
    page = (STATIC / "index.html").read_text()
    named = set(re.findall(r'"/static/HASH/([^"]+\.js)"', page))
    assert named == {str(path.relative_to(STATIC)) for path in STATIC.rglob("*.js")}
    assert not re.findall(r"<style|style=|<script(?![^>]*src=)|\bon\w+=", page)


def test_templates_have_no_inline_style_and_no_way_around_escaping() -> None:
    """The policy refuses them in a browser; here they are found before."""
    for path in STATIC.rglob("*.js"):
        if path.parent.name != "vendor":
            assert not (found := re.findall(_FORBIDDEN, path.read_text())), (path, found)
