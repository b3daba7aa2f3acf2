"""The releases that this one works together with, kept so that tests can run them.

`tests/releases/VERSION/` holds, of each: `COMMIT`, the commit that it was built from; its wheel, made of that
commit by `python -m tests.releases.build VERSION`; `train.py`, a script as its users wrote it; golden bytes.
"""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent
#: Versions, the oldest first.
RELEASED: tuple[str, ...] = tuple(
    sorted(
        (path.parent.name for path in FOLDER.glob("*/COMMIT")),
        key=lambda version: tuple(int(part) for part in version.split(".")),
    )
)


def commit(version: str) -> str:
    """The commit that is this release, in full."""
    return (FOLDER / version / "COMMIT").read_text().strip()


def wheel(version: str) -> Path:
    """Its wheel: all four packages, without what they need."""
    return FOLDER / version / f"elasticd-{version}-py3-none-any.whl"


def script(version: str) -> Path:
    """A training script as its users wrote it."""
    return FOLDER / version / "train.py"
