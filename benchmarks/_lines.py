"""Lines of code of the files that a change touches, after over before."""

from __future__ import annotations

import ast
import io
import subprocess
import tokenize
from collections.abc import Collection, Iterator

from _results import ROOT, Row, row

#: Where the product's code is; tests, benchmarks, examples and docs are not counted.
PRODUCT = ("elasticd", "agent", "planner", "migration")
_NO_CODE = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
)


def line_rows(before: str, others: Collection[str]) -> Iterator[Row]:
    """All files of the product that differ from the commit `before`, new and deleted ones, too, but for
    `others`, which changed for other reasons."""
    changed = _git("diff", "--name-only", "--no-renames", before, "--", *PRODUCT).split()
    paths = [path for path in changed if path.endswith(".py") and path not in others]
    old = sum(code_lines(_git("show", f"{before}:{path}")) for path in paths if _was(before, path))
    new = sum(code_lines((ROOT / path).read_text()) for path in paths if (ROOT / path).exists())
    yield row(f"lines of code of the {len(paths)} files that differ from {before}: before", old, "lines")
    yield row(f"lines of code of the {len(paths)} files that differ from {before}: after", new, "lines")
    over = new / old
    yield row(
        f"lines of code of the {len(paths)} files that differ from {before}: after over before",
        over,
        "x",
        goal="<= 1",
        met=over <= 1,
    )


def lines_of(paths: Collection[str], commit: str = "") -> int:
    """Lines of code of files and of folders, of a commit or now. A path that is not there has none."""
    if commit:
        listed = _git("ls-tree", "-r", "--name-only", commit, "--", *paths).split()
    else:
        listed = _git("ls-files", "--cached", "--others", "--exclude-standard", "--", *paths).split()
    files = [path for path in listed if path.endswith(".py") and (commit or (ROOT / path).exists())]
    return sum(
        code_lines(_git("show", f"{commit}:{path}") if commit else (ROOT / path).read_text()) for path in files
    )


def code_lines(text: str) -> int:
    """Without blank lines, comments and docstrings."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = {
        line
        for node in ast.walk(ast.parse(text))
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None
        for line in range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)
    }
    code = {
        line
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type not in _NO_CODE
        for line in range(token.start[0], token.end[0] + 1)
    }
    return len(code - docstrings)


def _was(commit: str, path: str) -> bool:
    return bool(_git("ls-tree", "--name-only", commit, "--", path))


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", str(ROOT), *arguments], check=True, capture_output=True, text=True
    ).stdout
