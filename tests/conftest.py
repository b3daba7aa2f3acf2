"""For all tests: what daemons remember over restarts goes to a folder of the test's own, not the user's, and
the default socket is never the user's.
Property tests have no deadline: other work on the machine must not fail them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.etcds import shared_etcd  # noqa: F401

settings.register_profile("elasticd", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("elasticd")


@pytest.fixture(scope="session", autouse=True)
def state_of_the_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """For the daemons of fixtures that several tests share; and an agent's default socket for all of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("runtime")))
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(autouse=True)
def state_of_the_test(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test may have an etcd of its own under a name that others used."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
