"""The house holds: imports keep to the one direction, requirements to their ranges, files to their size."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.house import (
    DAEMON_EXTRA,
    MODULES,
    PACKAGES,
    ROOT,
    TRAINER,
    USES_TORCH,
    imports,
    reachable,
    violations,
    within,
)


@pytest.fixture(scope="module")
def graph() -> dict[str, set[str]]:
    return {
        name: {
            item.target
            for item in imports(name, path.read_text(), package=path.name == "__init__.py")
            if not item.lazy
        }
        for name, path in MODULES.items()
    }


@pytest.mark.parametrize("name", MODULES)
def test_module_keeps_to_the_one_direction(name: str) -> None:
    path = MODULES[name]
    assert violations(name, path.read_text(), package=path.name == "__init__.py") == []


@pytest.mark.parametrize("name", [name for name in MODULES if not within(name, *USES_TORCH)])
def test_torch_is_not_brought_along_where_it_is_not_allowed(name: str, graph: dict[str, set[str]]) -> None:
    assert not [reached for reached in reachable(name, graph) if within(reached, "torch", *USES_TORCH)]


@pytest.mark.parametrize("name", ["elasticd", *(name for name in MODULES if within(name, *TRAINER))])
def test_trainer_brings_no_daemon_package_along(name: str, graph: dict[str, set[str]]) -> None:
    assert not [got for got in reachable(name, graph) if within(got, *DAEMON_EXTRA.values())]


CAUGHT = [
    ("elasticd_planner.cost", "import torch", "torch only in"),
    ("elasticd_planner.cost", "from elasticd_migration import rounds", "may import only"),
    ("elasticd_planner.cost", "def f():\n    import elasticd.config", "may import only"),
    ("elasticd_planner.cost", "import time", "no clock"),
    ("elasticd_planner.cost", "from random import Random", "no clock"),
    ("elasticd_planner.cost", "from concurrent.futures import Future", "no clock"),
    ("elasticd_planner.cost", "import scipy", "numpy and msgspec"),
    ("elasticd_planner.cost", "import networkx", "slow to import"),
    (
        "elasticd_planner.cost",
        "try:\n    import networkx as nx\nexcept ImportError:\n    pass",
        "slow to import",
    ),
    ("elasticd_planner.cost", "import numpy as np\nx = np.random.rand()", "numpy.random without a key"),
    ("elasticd_planner.cost", "import numpy as np\nrng = np.random.default_rng()", "without a key"),
    ("elasticd_planner.cost", "from numpy.random import shuffle", "no randomness"),
    ("elasticd_planner.cost", "def f(p):\n    return open(p)", "open() in a pure"),
    ("elasticd_planner.cost", "x = __import__('os')", "no clock"),
    ("elasticd_migration.reshard", "import torch", "torch only in"),
    ("elasticd_migration.reshard", "from .state import ModelState", "does not lean on torch"),
    ("elasticd_migration.rounds", "import logging", "no clock"),
    ("elasticd_migration.execute", "from elasticd.runtime import groups", "may import only"),
    ("elasticd.machines.switch", "import asyncio", "no clock"),
    ("elasticd.machines.switch", "from elasticd.store.memory import MemoryStore", "IO is around"),
    ("elasticd.machines.switch", "from ..clock import WallClock", "IO is around"),
    ("elasticd.machines.switch", "from elasticd_migration.execute import run", "does not lean on torch"),
    ("elasticd.coordinator.daemon", "from ..runtime.vote import fold", "never import each other"),
    ("elasticd.coordinator.daemon", "from .. import runtime", "never import each other"),
    (
        "elasticd.coordinator.daemon",
        "if TYPE_CHECKING:\n    import elasticd.runtime.job",
        "never import each other",
    ),
    ("elasticd.coordinator.planning", "import torch.distributed", "torch only in"),
    ("elasticd.coordinator.daemon", "from elasticd import Job", "public names"),
    ("elasticd.runtime.job", "from elasticd.coordinator.server import app", "no coordinator"),
    ("elasticd.runtime.job", "def f():\n    from elasticd import store", "no coordinator, store"),
    ("elasticd.runtime.control", "import asyncio", "no event loop"),
    ("elasticd.runtime.control", "from http.server import HTTPServer", "no event loop"),
    ("elasticd.runtime.control", "import etcd3", "extra 'daemon'"),
    ("elasticd.runtime.control", "import importlib\nx = importlib.import_module('grpc')", "extra 'daemon'"),
    ("elasticd.runtime.telemetry", "from elasticd.runtime.emulation import Pace", "knows nothing"),
    ("elasticd.runtime.telemetry", "from . import emulation", "knows nothing"),
    ("elasticd.models.decoder", "import rich.progress", "extra 'daemon'"),
    ("elasticd.rendezvous", "import websockets", "extra 'daemon'"),
    ("elasticd.cli.demo", "import torch", "torch only in"),
    ("elasticd.simulator.engine", "from elasticd_agent import daemon", "may import only"),
    ("elasticd_agent.daemon", "import torch", "torch only in"),
    ("elasticd_agent.probe", "def f():\n    import torch", "torch only in"),
    ("elasticd_agent.watch", "import elasticd_migration.reshard", "may import only"),
    ("elasticd_agent.workers", "from elasticd.runtime.control import Socket", "neither trainer"),
]


@pytest.mark.parametrize(("module", "source", "message"), CAUGHT)
def test_breach_is_caught(module: str, source: str, message: str) -> None:
    found = violations(module, source)
    assert found
    assert any(message in line for line in found), found


def test_breach_in_the_package_itself_is_caught() -> None:
    assert "torch only in" in violations("elasticd", "from torch import nn", package=True)[0]
    assert "extra 'daemon'" in violations("elasticd", "from .x import y\nimport rich", package=True)[0]
    assert "never import" in violations("elasticd.coordinator", "from ..runtime import job", package=True)[0]


ALLOWED = [
    ("elasticd_planner.cost", "import math\nimport numpy as np\nimport msgspec\nfrom .boxes import Box"),
    ("elasticd_planner.batch", "import numpy as np\nr = np.random.Generator(np.random.Philox(key=[1, 2]))"),
    ("elasticd_planner.search", "def f():\n    import networkx as nx\n    return nx.Graph()"),
    (
        "elasticd_migration.reshard",
        "from elasticd_planner.boxes import Box\nfrom collections.abc import Iterator",
    ),
    ("elasticd_migration.execute", "import time\nimport torch.distributed as dist"),
    ("elasticd_migration.execute.verify", "import torch"),
    (
        "elasticd.machines.switch",
        "from elasticd.messages import Vote\nfrom elasticd_migration.rounds import Round",
    ),
    ("elasticd.runtime.job", "import threading\nimport torch\nfrom elasticd.runtime import emulation"),
    ("elasticd.runtime.control", "from elasticd.machines import worker\nimport socket"),
    ("elasticd.store.etcd", "import etcd3\nimport grpc"),
    ("elasticd.coordinator.server", "import asyncio\nfrom starlette.applications import Starlette"),
    ("elasticd.rendezvous", "from torch.distributed.elastic.rendezvous import RendezvousHandler"),
    ("elasticd_agent.daemon", "import asyncio\nfrom elasticd.machines import agent\nimport websockets"),
]


@pytest.mark.parametrize(("module", "source"), ALLOWED)
def test_what_the_design_allows_is_let_through(module: str, source: str) -> None:
    assert violations(module, source) == []


def test_what_is_brought_along_is_followed_through_parents_but_not_into_functions() -> None:
    texts = {
        "a.b": "from c import d",
        "a": "import e",
        "c.d": "def f():\n    import torch",
        "c": "",
        "e": "import g",
    }
    graph = {
        name: {item.target for item in imports(name, text) if not item.lazy} for name, text in texts.items()
    }
    assert {"a", "a.b", "c", "c.d", "e", "g"} == reachable("a.b", graph)


def run_python(code: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


def import_without(absent: list[str], names: list[str]) -> None:
    """Import `names` in a process of their own in which the packages `absent` cannot be imported."""
    run_python(
        f"import importlib, sys\nsys.modules.update(dict.fromkeys({absent}))\n"
        f"for name in {names}: importlib.import_module(name)"
    )


@pytest.mark.parametrize("package", PACKAGES)
def test_import_of_the_package_leaves_torch_alone(package: str) -> None:
    run_python(f"import sys, {package}; sys.exit('torch' in sys.modules and 'torch was imported')")


def test_every_torch_free_module_runs_where_torch_is_not_installed() -> None:
    names = [name for name in MODULES if not within(name, *USES_TORCH)]
    import_without(["torch"], names)


def test_trainer_runs_where_the_daemon_extra_is_not_installed() -> None:
    names = ["elasticd", *(name for name in MODULES if within(name, *TRAINER))]
    import_without(sorted(DAEMON_EXTRA.values()), names)


def project() -> dict[str, list[Requirement]]:
    """Requirements of pyproject.toml by extra; '' holds what is always needed."""
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = {"": table["dependencies"], **table["optional-dependencies"]}
    return {extra: [Requirement(line) for line in lines] for extra, lines in groups.items()}


def constraints() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def test_protobuf_and_grpcio_have_no_upper_pin() -> None:
    pinned = [r for lines in project().values() for r in lines if r.name in ("protobuf", "grpcio")]
    assert len(pinned) == 2
    assert {clause.operator for requirement in pinned for clause in requirement.specifier} <= {">=", ">"}


def test_daemon_extra_is_what_the_import_rules_say() -> None:
    assert {requirement.name for requirement in project()["daemon"]} == set(DAEMON_EXTRA)


def test_tested_versions_lie_in_the_ranges_that_the_project_asks_for() -> None:
    tested = {canonicalize_name(name): version for name, version in constraints().items()}
    assert tested[canonicalize_name("torch")] == "2.13.0"
    asked = [r for lines in project().values() for r in lines if r.name != "elasticd"]
    assert {canonicalize_name(r.name) for r in asked} <= set(tested)
    assert [r.name for r in asked if tested[canonicalize_name(r.name)] not in r.specifier] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_package_says_that_it_is_typed(package: str) -> None:
    assert (PACKAGES[package] / "py.typed").is_file()


KEPT = [
    *MODULES.values(),
    *(path for folder in ("tests", "benchmarks", "examples") for path in sorted((ROOT / folder).rglob("*.py"))),
]


@pytest.mark.parametrize("path", KEPT, ids=lambda path: str(path.relative_to(ROOT)))
def test_module_has_a_docstring_and_at_most_400_lines(path: Path) -> None:
    text = path.read_text()
    assert ast.get_docstring(ast.parse(text)), "say in a first line what the file is for"
    assert len(text.splitlines()) <= 400, "split it by what it holds"
