"""For all tests: how much is tried (`tests.sizes`), in which order (`tests.schedule`), and what is kept apart.

What daemons remember over restarts goes to a folder of the test's own, not the user's, and the default socket
is never the user's. Property tests have no deadline: other work on the machine must not fail them.
"""

from __future__ import annotations

import gc
import itertools
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
from hypothesis import HealthCheck, settings

from elasticd.machines.job import machine
from tests import forkserver, rewriting, schedule, seeds, sizes
from tests.compiling import _graphs_are_of_one_test, compiler, drop_traces, traced  # noqa: F401
from tests.etcds import shared_etcd  # noqa: F401

COMMON = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
#: `make test` draws the same examples each time, a quarter of them.
settings.register_profile("quick", COMMON, derandomize=True, database=None, max_examples=25)
settings.register_profile("full", COMMON, print_blob=True)

_durations: dict[str, float] = {}
FAILED = machine.failed


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    group = parser.getgroup("elasticd")
    group.addoption("--full", action="store_true", help="all sizes, seeds and matrices: 'make test-all'")
    group.addoption("--write-durations", action="store_true", help=f"write {schedule.DURATIONS.name}")
    pluginmanager.register(seeds)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    sizes.choose(config.getoption("--full"))
    settings.load_profile("full" if config.getoption("--full") else "quick")
    drop_traces()


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    config = session.config
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as of a command that a shell runs in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        rewriting.rewrite_all(config, sorted(rewriting.ROOT.rglob("test_*.py")))
        if len(specs := config.option.tx) > 1 and os.environ.get("OMP_NUM_THREADS") == "1":
            from tests import collected  # where pytest-xdist is, which others need not import

            arguments = [str(argument) for argument in config.invocation_params.args]
            config.add_cleanup(collected.Collected(arguments, len(specs)).close)


@pytest.hookimpl(hookwrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is imported and collected lives to the end: the garbage collector does not look at it again."""
    gc.disable()
    yield
    gc.freeze()
    gc.enable()


def pytest_report_header(config: pytest.Config) -> str:
    if config.getoption("--full"):
        return f"all sizes and seeds; again with the same: make test-all SEED={config.option.seed}"
    return "representatives of each behaviour; all sizes and seeds: make test-all"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    kept, left_out = sizes.skip_full(items)
    config.hook.pytest_deselected(items=left_out)
    places = {name: at for at, name in enumerate(schedule.order((i.nodeid for i in kept), schedule.known()))}
    items[:] = sorted(kept, key=lambda item: places[item.nodeid])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """For `--dist loadscope --no-loadscope-reorder`; other ways of dealing are xdist's own."""
    return schedule.LongestFirst(config, log) if config.getvalue("dist") == "loadscope" else None


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _durations[report.nodeid] = _durations.get(report.nodeid, 0.0) + report.duration


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.config.getoption("--write-durations") and not hasattr(session.config, "workerinput"):
        schedule.write(_durations)


def _raise(job: object, event: object, error: Exception, *given: object) -> NoReturn:
    raise error


@pytest.fixture(autouse=True, scope="session")
def _defects_are_raised() -> Iterator[None]:
    """A leader outlives what its machine fails on; a test does not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "failed", _raise)
        yield


@pytest.fixture
def defects_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a leader does."""
    monkeypatch.setattr(machine, "failed", FAILED)


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """Of what a test draws: another each time in `make test-all`, which prints it."""
    return int(request.config.getoption("--seed") or 0)


@pytest.fixture(scope="session", autouse=True)
def no_process_is_left() -> Iterator[None]:
    """Whoever forks a process ends it."""
    yield
    assert not (left := forkserver.end_all()), f"these were still running after the tests: {left}"


@pytest.fixture(scope="session", autouse=True)
def state_of_the_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Iterator[Path]]:
    """For the daemons of fixtures that several tests share; and an agent's default socket for all of them. The
    value: folders that no test had yet (`mktemp` would read the names of all that were, before each test)."""
    folder = tmp_path_factory.mktemp("state")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("runtime")))
        patch.setenv("XDG_STATE_HOME", str(folder))
        yield (folder / f"of-test-{number}" for number in itertools.count())


@pytest.fixture(autouse=True)
def state_of_the_test(state_of_the_session: Iterator[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test may have an etcd of its own under a name that others used."""
    folder = next(state_of_the_session)
    folder.mkdir()
    monkeypatch.setenv("XDG_STATE_HOME", str(folder))


@pytest.fixture(autouse=True)
def sigterm_is_no_jobs() -> Iterator[None]:
    """After SIGTERM a job ends its process within its grace: here that of other tests."""
    yield
    sigterm = sys.modules.get("elasticd.runtime.control.preemption_notice")
    assert sigterm is None or sigterm._present is None, "a job of this test still waits for SIGTERM"
