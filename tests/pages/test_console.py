"""A page that shows other lines than come is found; what differs from run to run is not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.pages.console import blocks, compare, pattern
from tests.pages.terminals import Session

PAGE = """
# A page

<!-- varies: step \\d+ -->

```console one
$ echo hello
hello
$ printf 'a\\nb\\nc\\nd\\n'
a
...
d
```

```console two runs on
$ echo ready; trap 'echo caught; exit 3' INT; while :; do echo "step $SECONDS"; read -t 0.05 x <> <(:); done
ready
...
```

```console two goes on
...
step 0
...
^C
...
caught
```
"""


def page_of(folder: Path, text: str) -> Path:
    page = folder / "page.md"
    page.write_text(text)
    return page


def played(folder: Path, text: str, seconds: float = 60.0) -> list[str]:
    with Session(folder, os.environ, seconds) as session:
        return session.play(page_of(folder, text))


def test_a_page_is_played_in_its_terminals(tmp_path: Path) -> None:
    assert played(tmp_path, PAGE) == []


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ("hello\nhello", "hello\nhullo", "hullo"),
        ("echo hello\nhello", "echo hello", "(nothing more)"),
        ("...\nd\n", "...\ne\n", "e"),
        ("a\n...\nd\n", "a\nd\n", "d"),
        ("caught\n", "caught it\n", "caught it"),
        ("ready\n", "", ""),
    ],
)
def test_a_line_that_does_not_come_is_named(tmp_path: Path, old: str, new: str, found: str) -> None:
    assert old in PAGE
    wrong = played(tmp_path, PAGE.replace(old, new, 1), seconds=5.0)
    if found:
        assert len(wrong) == 1
        assert f"the page shows\n    {found}\n" in wrong[0]
    else:
        assert wrong == []


@pytest.mark.parametrize(
    ("shown", "printed", "same"),
    [
        ("took 1.5 s", "took 12 s", True),
        ("took 1.5 s", "took 1.5 steps", False),
        ("loss 2.4810", "loss 2.4808", True),
        ("loss 2.4810", "loss 2.4813", False),
        ("at http://127.0.0.1:7471", "at http://127.0.0.1:80", True),
        ("a   b", "a b", True),
        ("its logs are in ...", "its logs are in /a/b", True),
        ("its logs are in ...", "its log is in /a/b", False),
        ("memory 3.2 MiB", "memory 3.2 GiB", True),
        ("06:12:59  slow", "16:00:00  slow", True),
        ("worker vm/0 pid 12", "worker vm/1 pid 12", False),
    ],
)
def test_what_differs_from_run_to_run_is_documented(shown: str, printed: str, same: bool) -> None:
    assert (pattern(shown).fullmatch(printed) is not None) is same


def test_nothing_stands_for_missing_lines() -> None:
    assert compare(["a", "...", "b"], ["a", "b"])[0] is None
    assert compare(["...", "b"], ["a"])[0] is not None
    assert compare([], ["a"])[0] is not None
    assert compare(["a"], ["a", "b"], ended=False) == (None, 1)


@pytest.mark.parametrize("text", ["```console\n$ x\n```\n", "```console one\nno command\n```\n"])
def test_a_block_of_another_form_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ValueError, match="block"):
        list(blocks(page_of(tmp_path, text)))
