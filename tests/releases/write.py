"""Writes the golden bytes of the release that is being made: `python -m tests.releases.write`.

A line is the tag of a message or stored value and the text of a sample. Every later release decodes it
(`test_golden`). Where the text leaves defaults out, and for a file of which a reader keeps less, the line also
has all fields of the decoded value, as "full". The program writes the file again, with --anew, as often as
messages change before the release. The file stays as it is once the commit of the release is named beside it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from elasticd.version import __version__
from tests.releases import kept
from tests.releases.samples import Golden, goldens

FOLDER = Path(__file__).parent
NAME = "golden.jsonl"


def under_way() -> str:
    """The release that is being made."""
    return __version__.partition(".dev")[0]


def files() -> list[Path]:
    """The golden files of all releases, the oldest first."""
    found = FOLDER.glob(f"*/{NAME}")
    return sorted(found, key=lambda path: tuple(int(part) for part in path.parent.name.split(".")))


def read(path: Path) -> list[Golden]:
    """The lines of a golden file."""
    lines = [msgspec.json.decode(line, type=dict[str, str]) for line in path.read_bytes().splitlines()]
    return [Golden(line["tag"], line["text"].encode(), line.get("full", "").encode()) for line in lines]


def written() -> bytes:
    """The golden file of this release."""
    return b"".join(_line(golden) for golden in goldens())


def _line(golden: Golden) -> bytes:
    line = {"tag": golden.tag, "text": golden.text.decode()}
    if golden.full:
        line["full"] = golden.full.decode()
    return msgspec.json.encode(line) + b"\n"


def write(path: Path, *, anew: bool) -> int:
    """How many lines were written. Raises FileExistsError for a file that is there, unless `anew`."""
    path.parent.mkdir(exist_ok=True)
    if path.exists() and not anew:
        raise FileExistsError(path)
    text = written()
    path.write_bytes(text)
    return text.count(b"\n")


def main() -> int:
    release = under_way()
    path = FOLDER / release / NAME
    if release in kept.RELEASED:
        print(f"{release} is released, and its file stays as it is: raise elasticd/version.py", file=sys.stderr)
        return 1
    try:
        count = write(path, anew="--anew" in sys.argv[1:])
    except FileExistsError:
        print(f"{path.relative_to(FOLDER)} is there already: say --anew to write it again", file=sys.stderr)
        return 1
    print(f"{path.relative_to(FOLDER)}: {count} lines")
    return 0


if __name__ == "__main__":
    sys.exit(main())
