"""The house rules about names: a file's main class shares a word with its file."""

import ast
import re
from collections.abc import Iterator, Mapping

#: Lines from which on a public class may be the main class of its file, and the file's lines for one of them.
MAIN_LINES, MAIN_SHARE = 40, 4
#: Letters that two words of one root have in common at their beginning ("registrar", "registration").
ROOT_LETTERS = 6
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
