"""The house rules about names and sentences.

A file's main class shares a word with its file, and a test file's name with what it tests. Of the other rules
`tests/house_names.toml` has the breaches that are left, by package, which may only shrink:
`python -m tests.house_names` writes them anew for who mended some.
"""

import ast
import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

#: Lines from which on a public class may be the main class of its file, and the file's lines for one of them.
MAIN_LINES, MAIN_SHARE = 40, 4
#: Letters that two words of one root have in common at their beginning ("registrar", "registration").
ROOT_LETTERS = 6
#: Breaches that are left, by rule and package.
ALLOWED = Path(__file__).with_suffix(".toml")
RULES = {
    "docstrings": "docstrings that begin with what, who, whether, how, where or that",
    "participles": "values named by how they came about (found, made, given, ...)",
    "hearing": "functions named by verbs of hearing (publish, describe, send, on_message, events_of say more)",
    "units": "constants of seconds or bytes without the unit in their name",
    "sentences": "sentences for people that are searched (decide by a value: a cause, a kind, a device)",
}
#: Names of sentences for people, and the methods of text that search them.
SENTENCES = {"reason", "why", "refusal", "sentence", "text", "error"}
SEARCHES = {"startswith", "endswith", "find", "index", "count"}
PARTICIPLES = {"found", "made", "came", "mine", "told", "said", "given"}
_BEGINS = re.compile(r"(What|Whether|Who|Whom|Whose|How|Where|That)\b")
_HEARING = re.compile(r"_*(?:\w+_)?(?:tell|tells|told|say|says|said|hear|hears|heard|word|words)(?:_\w+)?")
_UNIT = re.compile(r"(^|_)(SECONDS?|MS|NS|MINUTES|HOURS|DAYS?|BYTES|[KMG]I?B|BITS|PER_SECOND)($|_)|_A_SECOND$")
_WAIT = re.compile(r"(^|_)(PATIENCE|GRACE|SILENCE|PAUSE|TICK|POLL|TIMEOUT)$")
_MEASURED = re.compile(r"(no more |at most |at least |the )?(seconds|bytes)\b", re.IGNORECASE)
_IMPORT = re.compile(
    r"^(?:from|import) ((?:elasticd|tests|benchmarks|examples)\w*\b(?:[^(\n]*\([^)]*\)|[^\n]*))", re.MULTILINE
)
_ENDINGS = ("ings", "ing", "ers", "ors", "ies", "er", "or", "ed", "es", "s", "y", "e")


def main_class(tree: ast.Module) -> ast.ClassDef | None:
    """Returns the largest public class of a module, or None if it is small, by itself or beside the rest."""
    lines = max((node.end_lineno or 0 for node in tree.body), default=0)
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]
    largest = max(classes, key=_lines, default=None)
    if largest is None or _lines(largest) < max(MAIN_LINES, lines / MAIN_SHARE):
        return None
    return largest


def share_a_word(name: str, module: str) -> bool:
    """Returns True if a class's name has a word of its file's name or of its folder's, in any ending."""
    ours, theirs = _roots(name), _roots(" ".join(module.split(".")[-2:]))
    return any(_same_root(one, other) for one in ours for other in theirs)


def misnamed(sources: Mapping[str, str]) -> Iterator[str]:
    """The main classes that share no word with their file or folder."""
    for module, source in sources.items():
        if (main := main_class(ast.parse(source))) is not None and not share_a_word(main.name, module):
            yield f"{module}:{main.lineno}: class {main.name}: name it as its file, or the file as its class"


def stray_tests(root: Path, sources: Iterable[Path]) -> Iterator[str]:
    """The test files that are named after something that does not exist.

    Args:
        root: the repository; its tests are in `tests`.
        sources: files that may be tested.

    Yields:
        A line for each test file whose name neither begins nor ends with the name of a source or of a folder,
        nor shares a word with anything that it imports.
    """
    tests = sorted((root / "tests").rglob("*.py"))
    places = [path.relative_to(root).with_suffix("") for path in (*sources, *tests)]
    stems = {part.strip("_") for place in places for part in place.parts if not part.startswith("test_")}
    for path in tests:
        words = path.stem.split("_")[1:]
        if not path.name.startswith("test_") or _runs(words) & stems:
            continue
        imported = _roots(" ".join(_IMPORT.findall(path.read_text())))
        if not any(_same_root(one, other) for one in _roots(" ".join(words)) for other in imported):
            yield f"{path.relative_to(root)}: name it as the file that it tests"


def _runs(words: Sequence[str]) -> set[str]:
    """The words that a name begins and ends with, joined."""
    ends = range(1, len(words) + 1)
    return {"_".join(words[:end]) for end in ends} | {"_".join(words[-end:]) for end in ends}


def _lines(node: ast.ClassDef) -> int:
    return (node.end_lineno or 0) - node.lineno + 1


def _roots(name: str) -> set[str]:
    return {_root(word.lower()) for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)}


def _root(word: str) -> str:
    for ending in _ENDINGS:
        if word.endswith(ending) and len(word) - len(ending) >= 3:
            return word.removesuffix(ending)
    return word


def _same_root(one: str, other: str) -> bool:
    shared = min(len(one), len(other), ROOT_LETTERS)
    return one == other or (shared >= 4 and one[:shared] == other[:shared])


def counts(sources: Mapping[str, str]) -> dict[str, Counter[str]]:
    """Counts the breaches of the rules that are not yet kept everywhere.

    Args:
        sources: texts of modules by dotted name.

    Returns:
        By rule and package: docstrings that begin with what, who, whether and the like; assignments and
        parameters with a participle for a name; functions named by verbs of hearing; numbers of seconds or
        bytes without unit; searches of sentences for people.
    """
    breaches: dict[str, Counter[str]] = {rule: Counter() for rule in RULES}
    for module, source in sources.items():
        package, tree = package_of(module), ast.parse(source)
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                breaches["docstrings"][package] += bool(_BEGINS.match(ast.get_docstring(node) or ""))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                breaches["hearing"][package] += bool(_HEARING.fullmatch(node.name))
            if isinstance(node, ast.arg):
                breaches["participles"][package] += node.arg in PARTICIPLES
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                breaches["participles"][package] += node.id in PARTICIPLES
            breaches["sentences"][package] += _searches(node)
        breaches["units"][package] += sum(1 for _ in unitless(tree, source))
    return {rule: +by_package for rule, by_package in breaches.items()}


def _searches(node: ast.AST) -> bool:
    """Returns True for `part in event.text`, `reason.startswith(part)` and `"part" in str(error)`."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and isinstance(node.ops[0], ast.In | ast.NotIn):
        return _is_sentence(node.comparators[0])
    called = node.func if isinstance(node, ast.Call) else None
    return isinstance(called, ast.Attribute) and called.attr in SEARCHES and _is_sentence(called.value)


def _is_sentence(node: ast.expr) -> bool:
    """Returns True for a field or a text that people read; a plain name `text` may be any text."""
    if isinstance(node, ast.Attribute):
        return node.attr in SENTENCES
    if isinstance(node, ast.Call):
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        inner = node.func.value if isinstance(node.func, ast.Attribute) else None
        return (name == "str" and bool(node.args) and _is_sentence(node.args[0])) or (
            inner is not None and _is_sentence(inner)
        )
    return isinstance(node, ast.Name) and node.id in SENTENCES - {"text"}


def unitless(tree: ast.Module, source: str) -> Iterator[str]:
    """The numeric constants of a module that are seconds or bytes, by name or comment, without that in the
    name."""
    lines = source.splitlines()
    for node in tree.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if not (isinstance(target, ast.Name) and target.id.isupper()) or _UNIT.search(target.id):
            continue
        value = getattr(node, "value", None)
        if value is None or not re.fullmatch(r"[-\d._e*<+ ()/]+", ast.unparse(value)):
            continue
        above = lines[node.lineno - 2].strip() if node.lineno > 1 else ""
        comment = (
            above.lstrip("#: ") if above.startswith("#") else lines[node.lineno - 1].partition("#")[2].strip()
        )
        if _WAIT.search(target.id) or _MEASURED.match(comment):
            yield target.id


def grown(sources: Mapping[str, str], allowed: Mapping[str, Mapping[str, int]]) -> Iterator[str]:
    """The packages with more breaches of a rule than are `allowed`."""
    for rule, by_package in counts(sources).items():
        for package, now in sorted(by_package.items()):
            if now > (most := allowed.get(rule, {}).get(package, 0)):
                yield f"{package}: {now} {RULES[rule]}, and {most} are allowed: see CONTRIBUTING, Prose"


def package_of(module: str) -> str:
    """Returns the package that breaches of a module are counted in: "elasticd.runtime",
    "elasticd_planner.search"."""
    return ".".join(module.split(".")[:2])


def main() -> None:
    """Lower the counts that are allowed to those of the tree; without a file, write them."""
    from tests import house

    sources = {name: path.read_text() for name, path in house.modules().items()}
    allowed = tomllib.loads(ALLOWED.read_text()) if ALLOWED.exists() else None
    lines: list[str] = []
    for rule, by_package in counts(sources).items():
        lines.append(f"[{rule}]")
        for package, now in sorted(by_package.items()):
            most = now if allowed is None else min(now, allowed[rule].get(package, 0))
            lines += [f'"{package}" = {most}'] if most else []
        lines.append("")
    ALLOWED.write_text("\n".join(lines))


if __name__ == "__main__":
    main()
