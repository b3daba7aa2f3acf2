"""The house rules that ruff and import-linter cannot say: purity, CUDA in one file, docstrings, class names.

`python -m tests.house` prints each breach on a line and ends with 1 where there is one; `make lint` runs it.
The rules about who may import whom are contracts of import-linter, in pyproject.toml.
"""

import ast
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from tests import house_names

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {
    "elasticd_planner": ROOT / "planner/elasticd_planner",
    "elasticd_migration": ROOT / "migration/elasticd_migration",
    "elasticd": ROOT / "elasticd",
    "elasticd_agent": ROOT / "agent/elasticd_agent",
}
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
CONTRACTS: dict[str, Any] = {
    contract["id"]: contract for contract in PROJECT["tool"]["importlinter"]["contracts"]
}
USES_TORCH = tuple(CONTRACTS["torch"]["allowed_importers"])
# The part of the standard library without clock, IO, environment, randomness, logging and threads.
# fmt: off
PURE_STDLIB = {
    "__future__", "abc", "array", "base64", "binascii", "bisect", "cmath", "collections", "contextlib",
    "copy", "dataclasses", "decimal", "difflib", "enum", "fractions", "functools", "graphlib", "hashlib",
    "heapq", "itertools", "json", "keyword", "math", "numbers", "operator", "pprint", "re", "reprlib",
    "statistics", "string", "struct", "textwrap", "types", "typing", "unicodedata", "weakref", "zlib",
}
# fmt: on
# Of numpy.random what draws by a key; the rest draws from the machine or a hidden state.
KEYED_RANDOM = {"Generator", "Philox", "PCG64", "SeedSequence", "default_rng"}
# The only modules that tell one type of device from another: the devices themselves, and NVIDIA's library.
ACCELERATOR, LIBRARY = "elasticd.runtime.accelerator", "elasticd.runtime.comm.nccl"
IMPURE_BUILTINS = {"open", "print", "input", "exec", "eval", "__import__", "breakpoint"}
#: Files that tests are named after, beside the packages' modules.
TESTED_TOO = (
    "benchmarks/*.py",
    "docs/*.md",
    "elasticd/dashboard/static/**/*.js",
    "elasticd/dashboard/tools/*.mjs",
    "examples/*.py",
)


@dataclass(frozen=True, kw_only=True)
class Import:
    """One imported name of another package, dotted; `lazy` when importing the module does not run it."""

    target: str
    line: int
    lazy: bool


def within(name: str, *parents: str) -> bool:
    """Whether the dotted `name` is one of `parents` or inside one."""
    return any(name == parent or name.startswith(parent + ".") for parent in parents)


def is_pure(module: str) -> bool:
    """Whether the design asks `module` to be free of clock, IO, environment, randomness and logging."""
    if module == "elasticd_planner.__main__":
        return False  # the planning child reads and writes standard streams around the planner
    pure = within(module, "elasticd_planner", "elasticd_migration", "elasticd.machines")
    return pure and not within(module, *USES_TORCH)


def imports(tree: ast.AST, *, lazy: bool = False) -> Iterator[Import]:
    """Every absolute import under `tree`; `from a import b` gives `a` and `a.b`, since `b` may be a module."""
    if isinstance(tree, ast.Import):
        for alias in tree.names:
            yield Import(target=alias.name, line=tree.lineno, lazy=lazy)
    elif isinstance(tree, ast.ImportFrom) and tree.module and not tree.level:
        for target in [tree.module, *(f"{tree.module}.{alias.name}" for alias in tree.names)]:
            yield Import(target=target, line=tree.lineno, lazy=lazy)
    inside = lazy or isinstance(tree, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    if isinstance(tree, ast.If) and not tree.orelse:
        inside = inside or ast.unparse(tree.test).endswith("TYPE_CHECKING")
    for child in ast.iter_child_nodes(tree):
        yield from imports(child, lazy=inside)


def violations(module: str, source: str) -> list[str]:
    """The breaches in the text of one module of our packages, one line each."""
    tree = ast.parse(source)
    found = [
        (node.lineno, "imports a module by its name in quotes: write `import`")
        for node in _hidden_imports(tree)
    ]
    if module not in (ACCELERATOR, LIBRARY):
        found += [(line, f"{what}: ask {ACCELERATOR}, which knows all devices") for line, what in _cuda(tree)]
    if is_pure(module):
        for item in imports(tree):
            found += [(item.line, f"imports {item.target}: {why}") for why in _forbidden_to_pure(module, item)]
        found += [(line, f"{what} in a pure module") for line, what in _impure(tree)]
    return [f"{module}:{line}: {what}" for line, what in dict.fromkeys(found)]


def _hidden_imports(tree: ast.AST) -> Iterator[ast.Call]:
    """The calls that import a module by its name in quotes, which import-linter does not see."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = getattr(node.func, "attr", None) or getattr(node.func, "id", None)
            if called in ("import_module", "__import__"):
                yield node


def _cuda(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """What torch has for one type of device alone, the first of each line."""
    found: dict[int, str] = {}
    for item in imports(tree):
        if within(item.target, "torch.cuda"):
            found.setdefault(item.line, item.target)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "cuda":
            found.setdefault(node.lineno, ".cuda()")
        if isinstance(node, ast.Attribute) and node.attr == "is_cuda":
            found.setdefault(node.lineno, "is_cuda")
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.cuda":
            found.setdefault(node.lineno, "torch.cuda")
    yield from sorted(found.items())


def _forbidden_to_pure(module: str, item: Import) -> Iterator[str]:
    top = item.target.split(".")[0]
    if top == "networkx" and within(module, "elasticd_planner"):
        if not item.lazy:
            yield "networkx is slow to import: inside the function that needs it"
    elif top in sys.stdlib_module_names:
        if top not in PURE_STDLIB:
            yield "a pure module has no clock, IO, environment, randomness, logging or threads"
    elif top not in PACKAGES and top not in ("numpy", "msgspec"):
        yield "a pure module uses the standard library, numpy and msgspec"
    if within(item.target, "numpy.random") and item.target.split(".")[-1] not in {"random", *KEYED_RANDOM}:
        yield "no randomness in a decision"


def _impure(tree: ast.AST) -> Iterator[tuple[int, str]]:
    keyed: set[int] = set()  # nodes `np.random` that are followed by a keyed name
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in IMPURE_BUILTINS:
            yield node.lineno, f"{node.func.id}()"
        if isinstance(node, ast.Call) and not (node.args or node.keywords):
            if isinstance(node.func, ast.Attribute) and _is_numpy_random(node.func.value):
                yield node.lineno, "numpy.random without a key"
        elif isinstance(node, ast.Attribute) and _is_numpy_random(node.value) and node.attr in KEYED_RANDOM:
            keyed.add(id(node.value))
        elif _is_numpy_random(node) and id(node) not in keyed:
            yield node.lineno, "numpy.random without a key"


def _is_numpy_random(node: ast.AST) -> TypeGuard[ast.Attribute]:
    named = isinstance(node, ast.Attribute) and node.attr == "random" and isinstance(node.value, ast.Name)
    return named and node.value.id in ("np", "numpy")


def modules() -> dict[str, Path]:
    """The modules of our packages by dotted name."""
    return {
        ".".join([top, *path.relative_to(folder).with_suffix("").parts]).removesuffix(".__init__"): path
        for top, folder in PACKAGES.items()
        for path in sorted(folder.rglob("*.py"))
    }


def without_docstring(root: Path) -> list[str]:
    """The Python files of packages, tests, benchmarks and examples in `root` that have no docstring.

    ruff's D100 and D104 pass over files whose name begins with an underscore, so this looks at every file.
    """
    folders = [*(folder.relative_to(ROOT) for folder in PACKAGES.values()), "tests", "benchmarks", "examples"]
    paths = [path for folder in folders for path in sorted((root / folder).rglob("*.py"))]
    return [
        f"{path.relative_to(root)}:1: say in a first line what the file is for"
        for path in paths
        if not ast.get_docstring(ast.parse(path.read_text()))
    ]


def defined_twice(sources: Mapping[str, str]) -> list[str]:
    """The public class names that more than one of these modules (texts by dotted name) of a package define."""
    homes: dict[tuple[str, str], list[str]] = {}
    for module, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault((module.split(".")[0], node.name), []).append(f"{module}:{node.lineno}")
    return [
        f"{place}: class {name} is also in {' and '.join(other for other in places if other != place)}"
        for (_, name), places in homes.items()
        for place in places
        if len({each.partition(":")[0] for each in places}) > 1
    ]


def main() -> int:
    """Print every breach in the tree; 1 where there is one."""
    sources = {name: path.read_text() for name, path in modules().items()}
    found = without_docstring(ROOT) + defined_twice(sources)
    found += house_names.misnamed(sources)
    found += house_names.stray_tests(
        ROOT, [*modules().values(), *(path for pattern in TESTED_TOO for path in ROOT.glob(pattern))]
    )
    found += house_names.grown(sources, tomllib.loads(house_names.ALLOWED.read_text()))
    for name, source in sources.items():
        found += violations(name, source)
    print("\n".join(found) or "House rules: kept.")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
