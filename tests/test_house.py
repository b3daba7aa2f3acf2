"""The linters catch each kind of breach; torch and the daemon's packages stay away; versions are in range.

`make lint` checks the tree itself; here are breaches that it must find.
"""

import ast
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from elasticd.extras import EXTRAS
from tests import house, house_names
from tests.house import (
    CONTRACTS,
    PACKAGES,
    PROJECT,
    ROOT,
    USES_TORCH,
    defined_twice,
    modules,
    violations,
    within,
    without_docstring,
)

#: The files that private parts of torch are behind (CONTRIBUTING, 8).
PRIVATE_TORCH = {
    "elasticd/rendezvous/torch_state.py",
    "elasticd/runtime/checkpoint/dcp_format.py",
    "elasticd/runtime/comm/device_communicators.py",
    "elasticd/runtime/comm/groups.py",
    "elasticd/runtime/comm/nccl.py",
    "elasticd/runtime/engine/compiled_blocks.py",
    "elasticd/runtime/live/pointwise_sharding.py",
    "elasticd/runtime/live/world.py",
    "elasticd/runtime/model/torch_draws.py",
    "elasticd/runtime/parallel/attention_kernels.py",
    "elasticd/runtime/reference/live_bytes.py",
}
MODULES = modules()
TRAINER = [name for name in USES_TORCH if within(name, "elasticd")]
# Import names of what the extra `daemon` brings, by distribution.
DAEMON_EXTRA = {
    "click": "click",
    "cryptography": "cryptography",
    "etcd3": "etcd3",
    "grpcio": "grpc",
    "httpx2": "httpx2",
    "networkx": "networkx",
    "nvidia-ml-py": "pynvml",
    "prometheus-client": "prometheus_client",
    "protobuf": "google",
    "psutil": "psutil",
    "rich": "rich",
    "starlette": "starlette",
    "uvicorn": "uvicorn",
    "websockets": "websockets",
}

# Modules that many examples are about.
APP = "elasticd.coordinator.http.app"
COST = "elasticd_planner.cost.model"
JOB = "elasticd.runtime.api.job"
STEP_TIMES = "elasticd.runtime.telemetry.step_times"
SWITCH = "elasticd.machines.worker.switch"

# Breaches of the contracts in pyproject.toml: the contract, a module, what it imports, the text of the import.
BREACHES = [
    ("direction", COST, "elasticd_migration.reshard", "import {}"),
    ("direction", COST, "elasticd.config.tree", "def f():\n    import {}"),
    ("direction", "elasticd_migration.reshard", "elasticd.config.tree", "import {}"),
    ("direction", "elasticd.simulator.run", "elasticd_agent.daemon", "from elasticd_agent import daemon"),
    ("torch", COST, "torch", "import {}"),
    ("torch", "elasticd_migration.reshard", "torch", "import {}.distributed"),
    ("torch", "elasticd_migration.reshard", "elasticd_migration.local_state", "from .local_state import State"),
    ("torch", "elasticd.config.tree", "torch", "def f():\n    import {}"),
    ("torch", "elasticd", "torch", "from {} import nn"),
    ("torch", "elasticd.chaos.client", JOB, "import {}"),
    ("torch", "elasticd_agent.hardware.devices", "torch", "import {}"),
    ("trainer", JOB, "asyncio", "import {}"),
    ("trainer", JOB, "http", "from {}.server import HTTPServer"),
    ("trainer", JOB, "socketserver", "import {}"),
    *(("trainer", "elasticd.models.decoder", name, "import {}") for name in DAEMON_EXTRA.values()),
    ("trainer", "elasticd.rendezvous.handler", "google", "def f():\n    import {}.protobuf"),
    ("trainer", "elasticd", "rich", "import {}.progress"),
    # The job imports the messages' base class, and so what that one imports.
    ("trainer", "elasticd.codec.message", "websockets", "import {}"),
    ("daemons", JOB, APP, "from elasticd.coordinator.http import app"),
    ("daemons", JOB, "elasticd.store", "def f():\n    from elasticd import store"),
    ("daemons", "elasticd.rendezvous.handler", "elasticd.cli", "from .. import cli"),
    ("coordinator", APP, "elasticd.runtime", "from ... import runtime"),
    ("coordinator", APP, JOB, "if TYPE_CHECKING:\n    import {}"),
    ("dashboard", "elasticd.dashboard.known", "elasticd.coordinator.leader", "import {}"),
    ("commands", "elasticd.cli.why", "elasticd.coordinator.status", "import {}"),
    ("agent-migration", "elasticd_agent.store_watch", "elasticd_migration.reshard", "import {}"),
    ("agent", "elasticd_agent.store_watch", JOB, "from elasticd.runtime.api import job"),
    ("agent", "elasticd_agent.store_watch", APP, "import {}"),
    ("machines", SWITCH, "elasticd.store.memory", "import {}"),
    ("machines", SWITCH, "elasticd.clock", "from ...clock import WallClock"),
    ("telemetry", STEP_TIMES, "elasticd.runtime.telemetry.emulation", "from . import emulation"),
    ("public", APP, "elasticd", "from elasticd import Job"),
    ("rooms", "elasticd.store.memory", APP, "import {}"),
    ("rooms", "elasticd.records", "elasticd.wire", "def f():\n    import {}"),
    ("machines-rooms", "elasticd.machines.job.replan", SWITCH, "import {}"),
    ("job-rooms", "elasticd.machines.job.state.events", "elasticd.machines.job.replan", "import {}"),
    ("coordinator-rooms", "elasticd.coordinator.leader", APP, "import {}"),
    ("http-files", "elasticd.coordinator.http.routing", APP, "import {}"),
    ("runtime-rooms", "elasticd.runtime.comm.groups", "elasticd.runtime.engine.vote", "import {}"),
    ("runtime-engine", "elasticd.runtime.engine.vote", "elasticd.runtime.engine.engine", "import {}"),
    ("rendezvous-files", "elasticd.rendezvous.live_mode", "elasticd.rendezvous.restart_mode", "import {}"),
    ("checkpoint-files", "elasticd.checkpoints.disk", "elasticd.checkpoints.manifest", "import {}"),
    ("simulator-rooms", "elasticd.simulator.devices.device_model", "elasticd.simulator.run", "import {}"),
    ("agent-rooms", "elasticd_agent.snapshots.store", "elasticd_agent.daemon", "import {}"),
    ("planner-rooms", "elasticd_planner.spec.plan", COST, "import {}"),
    ("planner-search", "elasticd_planner.search.task", "elasticd_planner.search.planner", "import {}"),
    ("migration-files", "elasticd_migration.rounds", "elasticd_migration.migrate", "import {}"),
    ("planner-public", COST, "elasticd_planner", "from elasticd_planner import Plan"),
    ("harness", "elasticd.chaos.client", "tests", "from {} import soak"),
    ("testing", "elasticd.cli", "elasticd.testing", "from elasticd import testing"),
]  # fmt: skip
# Two files of one room that import each other.
CIRCLE = [
    ("elasticd.runtime.comm.groups", "import elasticd.runtime.comm.sockets"),
    ("elasticd.runtime.comm.sockets", "import elasticd.runtime.comm.groups"),
]
KEPT = [
    ("elasticd.config.tree", "import tomllib"),
    ("elasticd.codec.message", "import struct"),
    (
        "elasticd",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from elasticd.runtime.api.job import Job\n"
        "    from elasticd.models.huggingface import from_hf",
    ),
    (
        "elasticd.annotations",
        "def redistribute():\n    from torch import Tensor\n    from elasticd.runtime.comm import groups",
    ),
    ("elasticd_migration.migrate", "import time\nimport torch.distributed as dist"),
    ("elasticd_migration.migrate.verify", "import torch"),
    (
        SWITCH,
        "from elasticd.records import Vote\nfrom elasticd_migration.reshard import Round",
    ),
    (
        JOB,
        "import torch\nfrom elasticd.codec import message\nfrom elasticd.runtime.telemetry import emulation",
    ),
    ("elasticd.models.decoder", "from elasticd.machines.worker import switch\nimport socket"),
    ("elasticd.models.huggingface", "import torch"),
    ("elasticd.store.memory", "import etcd3\nimport grpc"),
    (APP, "import asyncio\nfrom starlette.applications import Starlette"),
    ("elasticd.rendezvous.handler", "from torch.distributed.elastic.rendezvous import RendezvousHandler"),
    ("elasticd_agent.daemon", "import asyncio\nfrom elasticd.machines.agent import machine\nimport websockets"),
    ("elasticd_planner.search.item_flow", "def flow():\n    import networkx"),
    ("elasticd.coordinator.events.event_log", ""),
    ("elasticd.cli.config", "import elasticd.coordinator.live_config"),
    ("elasticd.cli.coordinator", "import elasticd.coordinator.daemon"),
    (
        "elasticd.cli.recorded_history",
        "import elasticd.coordinator.events.event_log\nimport elasticd.coordinator.live_feed",
    ),
]


def lint_small_tree(root: Path, sources: list[tuple[str, str]]) -> tuple[int, str]:
    """Run lint-imports, as `make lint` does, on a tree of a few small modules: its exit status and its report.

    The tree has each module that a contract names, what the design allows, and then `sources` (module, text).
    """
    texts = dict.fromkeys([*PACKAGES, "tests"], "")
    for contract in CONTRACTS.values():
        for key in ("source_modules", "forbidden_modules", "protected_modules", "allowed_importers"):
            texts |= {
                name: ""
                for name in contract.get(key, [])
                if within(name, *PACKAGES, "tests") and "*" not in name
            }
        for layer, container in itertools.product(contract.get("layers", []), contract.get("containers", [])):
            texts |= {f"{container}.{name}": "" for name in re.findall(r"\w+", layer)}
    for name, text in [*KEPT, *sources]:
        texts |= {parent: texts.get(parent, "") for parent in parents(name)}
        texts[name] = texts.get(name, "") + text + "\n"
    packages = {parent for name in texts for parent in parents(name)} | set(PACKAGES)
    for name, text in texts.items():
        path = root.joinpath(*name.split("."))
        path = path / "__init__.py" if name in packages else path.with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    done = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache", "--config", ROOT / "pyproject.toml"],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root), "COLUMNS": "300"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def parents(module: str) -> list[str]:
    """The packages around `module`, outermost first."""
    parts = module.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]


def test_each_breach_of_a_contract_is_found_by_lint_imports(tmp_path: Path) -> None:
    assert {"circles", *(contract for contract, *_ in BREACHES)} == set(CONTRACTS)
    breaches = [(module, how.format(imported)) for _, module, imported, how in BREACHES]
    status, report = lint_small_tree(tmp_path, [*breaches, *CIRCLE])
    assert status == 1, report
    sections = {  # the name of a broken contract, a line of dashes, the chains of imports
        contract["id"]: report.partition(f"\n{contract['name']}\n---")[2].partition("\n---")[0]
        for contract in CONTRACTS.values()
    }
    missed = [
        (contract, module, imported)
        for contract, module, imported, _ in BREACHES
        if f" {module} -> {imported} (l." not in sections[contract]
    ]
    assert missed == [], (missed, report)
    assert ".sockets -> .groups (1 import)" in sections["circles"], report


def test_imports_that_the_design_allows_keep_every_contract(tmp_path: Path) -> None:
    status, report = lint_small_tree(tmp_path, [])
    assert status == 0, report


CAUGHT = [
    (COST, "import time", "no clock"),
    (COST, "from random import Random", "no clock"),
    (COST, "from concurrent.futures import Future", "no clock"),
    (COST, "import scipy", "numpy and msgspec"),
    (COST, "import networkx", "slow to import"),
    (COST, "try:\n    import networkx\nexcept ImportError:\n    pass", "slow to import"),
    (COST, "import numpy as np\nx = np.random.rand()", "numpy.random without a key"),
    (COST, "import numpy as np\nx = np.random.rand(3)", "numpy.random without a key"),
    (COST, "import numpy as np\nrng = np.random.default_rng()", "without a key"),
    (COST, "from numpy.random import shuffle", "no randomness"),
    (COST, "def f(p):\n    return open(p)", "open() in a pure"),
    (COST, "def f(p):\n    import os", "no clock"),
    (COST, "x = __import__('os')", "by its name in quotes"),
    ("elasticd_migration.rounds", "import logging", "no clock"),
    ("elasticd.machines", "import os", "no clock"),
    (SWITCH, "import asyncio", "no clock"),
    (SWITCH, "import networkx", "numpy and msgspec"),
    ("elasticd.runtime.control.agent_client", "x = importlib.import_module('grpc')", "by its name in quotes"),
]  # fmt: skip
ALLOWED = [
    (COST, "import math\nimport numpy as np\nimport msgspec\nfrom .boxes import Box"),
    (COST, "from .time import time\nfrom . import os"),
    ("elasticd_planner.spec.batch", "import numpy as np\nr = np.random.Generator(np.random.Philox(key=[1]))"),
    ("elasticd_planner.search.planner", "def f():\n    import networkx as nx\n    return nx.Graph()"),
    ("elasticd_planner.search.planner", "if TYPE_CHECKING:\n    import networkx"),
    ("elasticd_planner.__main__", "import sys\nprint(sys.stdin.read())"),
    ("elasticd_migration.reshard", "from elasticd_planner.spec.box import Box\nimport enum"),
    ("elasticd_migration.migrate", "import time\nimport torch.distributed as dist"),
    ("elasticd_migration.migrate.verify", "import torch"),
    (SWITCH, "from elasticd.codec.message import Vote\nfrom elasticd_migration.rounds import Round"),
    (JOB, "import threading\nprint(open('x'))"),
    (JOB, "import importlib\nx = importlib.import_module(name)"),
]  # fmt: skip


def test_breach_of_purity_is_caught_and_what_the_design_allows_is_let_through() -> None:
    for module, source, message in CAUGHT:
        found = violations(module, source)
        assert any(message in line for line in found), (module, source, found)
    for module, source in ALLOWED:
        assert violations(module, source) == [], (module, source)


def test_file_without_a_docstring_is_found_in_every_folder(tmp_path: Path) -> None:
    bare = ["elasticd/runtime/__init__.py", "agent/elasticd_agent/a.py", "benchmarks/_b.py", "examples/c.py"]
    for name in [*bare, "tests/empty/__init__.py"]:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x = 1  # not a docstring\n" if name in bare else "")
    (tmp_path / "tests/test_d.py").write_text('# A licence may come first.\n"""What this is for."""\n')
    found = {line.split(":")[0] for line in without_docstring(tmp_path)}
    assert found == {*bare, "tests/empty/__init__.py"}


def test_cuda_is_in_one_file() -> None:
    for source in (
        "import torch\ndef f(x):\n    return x.is_cuda",
        "import torch\nif True:\n    torch.cuda.synchronize()",
        "import torch\nx = 1\nfrom torch.cuda import Event",
        "import torch\nx = 1\nimport torch.cuda",
        "import torch\ndef f(x):\n    return x.cuda()",
    ):
        (found,) = violations("elasticd.runtime.engine.engine", source)
        assert found.startswith("elasticd.runtime.engine.engine:3: "), found
        assert "ask elasticd.runtime.accelerator" in found
        assert violations("elasticd.runtime.accelerator", source) == []
    assert violations("elasticd.cli.run", "import torch\nx = torch.accelerator\ny = cuda.cuda") == []


def test_public_class_name_of_two_files_of_one_package_is_found() -> None:
    sources = {
        "elasticd.config.tree": "class Line: ...\nclass _Own: ...\nclass Once: ...",
        "elasticd.store.memory": "import math\ndef f():\n    class Line: ...\nclass _Own: ...",
        "elasticd.store": "from elasticd.config.tree import Once\nRecord = int",
        "elasticd.clock": "if math:\n    class Clock: ...\nelse:\n    class Clock: ...\nclass Record: ...",
        "elasticd_planner.cost.model": "class Line: ...",
    }
    assert defined_twice(sources) == [
        "elasticd.config.tree:1: class Line is also in elasticd.store.memory:3",
        "elasticd.store.memory:3: class Line is also in elasticd.config.tree:1",
    ]


def test_main_class_that_shares_no_word_with_its_file_is_found() -> None:
    body = "\n    x: int = 0" * 40
    sources = {
        "elasticd.store.lease": f"class Vault:{body}",
        "elasticd.store.session": f"class StoreVault:{body}\nclass Other:{body}",
        "elasticd.agent.registration": f"class Registrar:{body}",
        "elasticd.agent.heartbeat": f"class Heartbeats:{body}\nclass Small: ...",
        "elasticd.config.tree": "\n".join(f"class Part{number}:{body}" for number in range(5)),
        "elasticd.names": "class Short: ...\nclass _Vault:" + body,
    }
    assert list(house_names.misnamed(sources)) == [
        "elasticd.store.lease:1: class Vault: name it as its file, or the file as its class"
    ]


def test_a_test_file_is_named_after_a_source_a_folder_or_what_it_imports(tmp_path: Path) -> None:
    texts = {
        "store/test_lease.py": "",
        "store/test_lease_races.py": "",
        "store/test_lost_lease.py": "",
        "store/test_elections.py": "from elasticd.store import (\n    elect,\n)\n",
        "store/test_fakes.py": "from tests.store.fake import Fake\n",
        "store/test_vault.py": "import asyncio\nfrom elasticd.store import lease\nVault = lease\n",
        "store/fake.py": "",
        "test_releases.py": "",
    }
    for name, text in texts.items():
        path = tmp_path / "tests" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    stray = house_names.stray_tests(tmp_path, [tmp_path / "elasticd/store/lease.py"])
    assert [line.partition(":")[0] for line in stray] == ["tests/store/test_vault.py", "tests/test_releases.py"]


def test_names_and_sentences_of_each_rule_are_counted_by_package() -> None:
    source = '''"""Whether it rains."""
#: Seconds of a lap.
LAP = 3.0
#: Bytes of a page.
PAGE_BYTES = 4096
PATIENCE = 2
#: Laps.
LAPS = 4
def tell(given): "What it is."
def _words_of(word): found = [made for made in given]
def spell(foundation): "Tells nothing: whether, who."
fits = "fit" in answer.refusal or why.startswith("fits") or "a" in str(error) or "b" in words or text.index("c")
'''
    counted = house_names.counts({"elasticd.store.etcd": source, "elasticd.cli": "x = 1"})
    assert counted == {
        "docstrings": {"elasticd.store": 2},
        "participles": {"elasticd.store": 3},
        "hearing": {"elasticd.store": 2},
        "units": {"elasticd.store": 2},
        "sentences": {"elasticd.store": 3},
    }
    allowed = {rule: {"elasticd.store": 2 + (rule == "sentences")} for rule in house_names.RULES}
    (line,) = house_names.grown({"elasticd.store.etcd": source}, allowed)
    assert line.startswith("elasticd.store: 3 values named by how they came about")
    assert "2 are allowed" in line


def test_house_program_ends_with_1_and_names_the_breaches(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "cost.py"
    monkeypatch.setattr(house, "modules", lambda: {"elasticd_planner.cost.model": module})
    monkeypatch.setattr(house, "without_docstring", lambda root: [])
    monkeypatch.setattr(house_names, "grown", lambda sources, allowed: [])
    monkeypatch.setattr(house_names, "stray_tests", lambda root, sources: [])
    module.write_text("import math\n")
    assert house.main() == 0
    module.write_text("import math\nimport time\n")
    assert house.main() == 1
    assert "elasticd_planner.cost.model:2: imports time: a pure module has no clock" in capsys.readouterr().out
    module.write_text("import math\n")
    monkeypatch.setattr(house, "without_docstring", lambda root: ["bare.py:1: say what it is for"])
    assert house.main() == 1
    assert "bare.py:1" in capsys.readouterr().out


def run_python(code: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


def test_packages_and_every_torch_free_module_leave_torch_alone() -> None:
    """Torch is installed here, so an import of it, or an attempt at one, leaves it in sys.modules."""
    names = [name for name in MODULES if not within(name, *USES_TORCH)]
    assert set(PACKAGES) <= set(names)
    run_python(
        f"import importlib, sys\nfor name in {names}:\n    importlib.import_module(name)\n"
        "    if 'torch' in sys.modules: sys.exit(f'{name} imports torch')"
    )


def test_trainer_runs_where_the_daemon_extra_is_not_installed() -> None:
    names = ["elasticd", *(name for name in MODULES if within(name, *TRAINER))]
    absent = sorted(DAEMON_EXTRA.values())
    run_python(
        f"import importlib, sys\nsys.modules.update(dict.fromkeys({absent}))\n"
        f"for name in {names}: importlib.import_module(name)"
    )


def project() -> dict[str, list[Requirement]]:
    """Requirements of pyproject.toml by extra; '' holds what is always needed."""
    table = PROJECT["project"]
    groups = {"": table["dependencies"], **table["optional-dependencies"]}
    return {extra: [Requirement(line) for line in lines] for extra, lines in groups.items()}


def constraints() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def test_protobuf_and_grpcio_have_no_upper_pin() -> None:
    pinned = [r for lines in project().values() for r in lines if r.name in ("protobuf", "grpcio")]
    assert len(pinned) == 2
    assert {clause.operator for requirement in pinned for clause in requirement.specifier} <= {">=", ">"}


def test_daemon_extra_is_what_the_trainer_is_forbidden_to_import() -> None:
    assert {requirement.name for requirement in project()["daemon"]} == set(DAEMON_EXTRA)
    assert {name for name, extra in EXTRAS.items() if extra == "daemon"} == set(DAEMON_EXTRA.values())
    assert set(EXTRAS.values()) <= set(project())
    standard = {"asyncio", "http", "socketserver"}
    assert set(CONTRACTS["trainer"]["forbidden_modules"]) - standard == set(DAEMON_EXTRA.values())


def test_tested_versions_lie_in_the_ranges_that_the_project_asks_for() -> None:
    tested = {canonicalize_name(name): version for name, version in constraints().items()}
    assert tested[canonicalize_name("torch")] == "2.13.0"
    asked = [r for lines in project().values() for r in lines if r.name != "elasticd"]
    assert {canonicalize_name(r.name) for r in asked} <= set(tested)
    assert [r.name for r in asked if tested[canonicalize_name(r.name)] not in r.specifier] == []


def test_every_package_says_that_it_is_typed() -> None:
    assert [package for package, folder in PACKAGES.items() if not (folder / "py.typed").is_file()] == []


def private_names_of_torch(source: str) -> set[str]:
    """The private names of torch that a file imports or reaches, but for `_foreach_` functions."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names if alias.name.partition(".")[0] == "torch"}
        elif isinstance(node, ast.Attribute) and (dotted := ast.unparse(node)).startswith("torch."):
            names.add(dotted)
    return {name for name in names if re.search(r"\._(?!_|foreach_)", name) and " " not in name}


def test_private_names_of_torch_are_behind_the_files_that_contributing_names() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    users = {
        path.relative_to(ROOT).as_posix()
        for folder in ("elasticd", "agent", "planner", "migration")
        for path in (ROOT / folder).rglob("*.py")
        if private_names_of_torch(path.read_text())
    }
    assert users == PRIVATE_TORCH
    assert all(path.removeprefix("elasticd/").rpartition("/")[2] in page for path in users)
    assert private_names_of_torch("from torch._C import x\nimport torch._dynamo\ntorch._inductor.config.y")
