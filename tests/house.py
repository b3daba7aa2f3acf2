"""The house rules over imports: who may import whom, what is pure, what a trainer must not carry.

`violations(module, source)` judges one module from its text alone, so that it is itself tested on
snippets that break each rule. `reachable` follows imports over the tree, for what a module
brings along without naming it.
"""

import ast
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {
    "elasticd_planner": ROOT / "planner/elasticd_planner",
    "elasticd_migration": ROOT / "migration/elasticd_migration",
    "elasticd": ROOT / "elasticd",
    "elasticd_agent": ROOT / "agent/elasticd_agent",
}
MAY_IMPORT = {
    "elasticd_planner": {"elasticd_planner"},
    "elasticd_migration": {"elasticd_planner", "elasticd_migration"},
    "elasticd": {"elasticd_planner", "elasticd_migration", "elasticd"},
    "elasticd_agent": {"elasticd_planner", "elasticd", "elasticd_agent"},
}
TRAINER = ("elasticd.runtime", "elasticd.models", "elasticd.rendezvous")
MOVERS = tuple(
    f"elasticd_migration.{name}" for name in ("state", "settings", "transport", "side", "exchange", "execute")
)
USES_TORCH = (*MOVERS, *TRAINER)
# Import names of what the extra `daemon` brings, by distribution; a test keeps this true to pyproject.toml.
DAEMON_EXTRA = {
    "click": "click",
    "cryptography": "cryptography",
    "etcd3": "etcd3",
    "grpcio": "grpc",
    "httpx": "httpx",
    "nvidia-ml-py": "pynvml",
    "prometheus-client": "prometheus_client",
    "protobuf": "google.protobuf",
    "psutil": "psutil",
    "rich": "rich",
    "starlette": "starlette",
    "uvicorn": "uvicorn",
    "websockets": "websockets",
}
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
IMPURE_BUILTINS = {"open", "print", "input", "exec", "eval", "__import__", "breakpoint"}
# What a pure machine of elasticd must not lean on: IO, clocks, and whoever wraps the machine.
AROUND_MACHINES = tuple(
    f"elasticd.{part}"
    for part in [
        "store",
        "coordinator",
        "runtime",
        "models",
        "rendezvous",
        "cli",
        "simulator",
        "chaos",
        "clock",
    ]
)


@dataclass(frozen=True, kw_only=True)
class Import:
    """One imported name, dotted and absolute; `lazy` when importing the module does not run it."""

    target: str
    line: int
    lazy: bool


def within(name: str, *parents: str) -> bool:
    return any(name == parent or name.startswith(parent + ".") for parent in parents)


def is_pure(module: str) -> bool:
    planned = within(module, "elasticd_migration") and not within(module, *MOVERS)
    # The planning child reads and writes standard streams around the planner, which stays pure.
    child = module == "elasticd_planner.__main__"
    return planned or (within(module, "elasticd_planner", "elasticd.machines") and not child)


def imports(module: str, source: str, *, package: bool = False) -> Iterator[Import]:
    """Every import in `source`; of `from a import b` both `a` and `a.b`, since `b` may be a module."""
    home = module.split(".") if package else module.split(".")[:-1]

    def walk(node: ast.AST, lazy: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(target=alias.name, line=node.lineno, lazy=lazy)
        elif isinstance(node, ast.ImportFrom):
            above = home[: len(home) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            for target in [base, *(f"{base}.{alias.name}" for alias in node.names)]:
                yield Import(target=target, line=node.lineno, lazy=lazy)
        elif isinstance(node, ast.Call) and _imports_by_name(node):
            yield Import(target=str(ast.literal_eval(node.args[0])), line=node.lineno, lazy=lazy)
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            for stmt in node.body:
                yield from walk(stmt, True)
            for stmt in node.orelse:
                yield from walk(stmt, lazy)
            return
        inside = lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            yield from walk(child, inside)

    yield from walk(ast.parse(source), False)


def _imports_by_name(call: ast.Call) -> bool:
    named = ast.unparse(call.func).rsplit(".", 1)[-1] in ("import_module", "__import__")
    return named and bool(call.args) and isinstance(call.args[0], ast.Constant)


def violations(module: str, source: str, *, package: bool = False) -> list[str]:
    """What in the text of `module` breaks the house rules; one line each, and none for a good module."""
    found = [
        f"{module}:{item.line}: imports {item.target}: {why}"
        for item in imports(module, source, package=package)
        for why in _forbidden(module, item)
    ]
    if is_pure(module):
        found += [f"{module}:{line}: {what} in a pure module" for line, what in _impure(ast.parse(source))]
    return list(dict.fromkeys(found))


def _forbidden(module: str, item: Import) -> Iterator[str]:
    target, top = item.target, item.target.split(".")[0]
    own = module.split(".")[0]
    if top in MAY_IMPORT and top not in MAY_IMPORT[own]:
        yield f"{own} may import only {', '.join(sorted(MAY_IMPORT[own]))} of ours"
    if top == "torch" and not within(module, *USES_TORCH):
        yield f"torch only in {', '.join(USES_TORCH)}"
    if is_pure(module):
        yield from _forbidden_to_pure(module, item, top)
    if within(module, "elasticd.coordinator") and within(target, "elasticd.runtime"):
        yield "coordinator and runtime never import each other"
    if within(module, "elasticd.runtime"):
        if within(target, "elasticd.coordinator", "elasticd.store", "elasticd.cli"):
            yield "runtime imports no coordinator, store or command line"
        if within(target, "asyncio", "http.server", "socketserver"):
            yield "no event loop or server in the trainer"
    if (within(module, *TRAINER) or module == "elasticd") and within(target, *DAEMON_EXTRA.values()):
        yield "a trainer's environment does not carry the extra 'daemon'"
    if within(module, "elasticd.runtime.telemetry") and within(target, "elasticd.runtime.emulation"):
        yield "telemetry measures; it knows nothing of the emulation"
    if within(module, "elasticd_agent") and within(target, *TRAINER, "elasticd.coordinator"):
        yield "the agent carries neither trainer nor coordinator"
    if module != "elasticd" and re.fullmatch(r"elasticd\.[A-Z]\w*", target):
        yield "the public names are for users and load torch: import it from its own module"


def _forbidden_to_pure(module: str, item: Import, top: str) -> Iterator[str]:
    if top == "networkx" and within(module, "elasticd_planner"):
        if not item.lazy:
            yield "networkx is slow to import: inside the function that needs it"
    elif top in sys.stdlib_module_names:
        if top not in PURE_STDLIB:
            yield "a pure module has no clock, IO, environment, randomness, logging or threads"
    elif top not in MAY_IMPORT and top not in ("numpy", "msgspec"):
        yield "a pure module uses the standard library, numpy and msgspec"
    if within(item.target, "numpy.random") and item.target.split(".")[-1] not in {"random", *KEYED_RANDOM}:
        yield "no randomness in a decision"
    if within(item.target, *MOVERS):
        yield "a pure module does not lean on torch"
    if within(module, "elasticd.machines") and within(item.target, *AROUND_MACHINES):
        yield "IO is around a machine, never under it"


def _impure(tree: ast.AST) -> Iterator[tuple[int, str]]:
    keyed: set[int] = set()  # the nodes `np.random` in what is seen, from outside in, to be fine
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in IMPURE_BUILTINS:
            yield node.lineno, f"{node.func.id}()"
        if isinstance(node, ast.Call) and not (node.args or node.keywords):
            if _numpy_random(node.func):
                yield node.lineno, "numpy.random without a key"
        elif isinstance(node, ast.Attribute) and _numpy_random(node) and node.attr in KEYED_RANDOM:
            keyed.add(id(node.value))
        elif isinstance(node, ast.Attribute) and _is_numpy_random(node) and id(node) not in keyed:
            yield node.lineno, "numpy.random without a key"


def _is_numpy_random(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and ast.unparse(node) in ("np.random", "numpy.random")


def _numpy_random(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and _is_numpy_random(node.value)


def sources() -> dict[str, Path]:
    """The modules of our packages by dotted name."""
    return {
        ".".join([top, *path.relative_to(folder).with_suffix("").parts]).removesuffix(".__init__"): path
        for top, folder in PACKAGES.items()
        for path in sorted(folder.rglob("*.py"))
    }


def reachable(start: str, graph: Mapping[str, set[str]]) -> set[str]:
    """What importing `start` brings: its imports, theirs, and every parent package on the way (each runs)."""
    seen: set[str] = set()
    todo = [start]
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        todo += graph.get(name, set())
        todo += [name.rsplit(".", 1)[0]] if "." in name else []
    return seen


MODULES = sources()
