"""The documentation is true where a test can tell."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_the_diagrams_are_those_of_the_machines_tables() -> None:
    command = [sys.executable, str(ROOT / "docs/draw.py"), "--check"]
    check = subprocess.run(command, capture_output=True, text=True)
    assert check.returncode == 0, check.stderr


def test_every_module_that_the_map_names_exists_and_none_is_missing_from_it() -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    section = page[page.index("## The map") : page.index("## The walk")]
    folders = ("planner/elasticd_planner", "migration/elasticd_migration")
    files = {path.stem for folder in folders for path in (ROOT / folder).glob("*.py")}
    named = set(re.findall(r"`([a-z_]+)`", section))
    assert files - {"__init__", "__main__"} <= named


def test_relative_links_lead_somewhere() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
