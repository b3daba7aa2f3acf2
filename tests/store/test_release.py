"""The release of an etcd: asked of a real one, and what is known against some."""

from __future__ import annotations

import logging
import re

import pytest

from elasticd.store import etcd_release
from elasticd.store.protocol import StoreUnavailable
from tests.etcds import SharedEtcd


class Etcd:
    """A store that only says its release, or does not answer."""

    def __init__(self, said: str) -> None:
        self._said = said

    def release(self) -> str:
        if not self._said:
            raise StoreUnavailable("it is away")
        return self._said


def test_a_real_etcd_says_its_release(shared_etcd: SharedEtcd) -> None:
    with shared_etcd.store() as store:
        assert re.fullmatch(r"\d+\.\d+\.\d+", store.release())


@pytest.mark.parametrize(
    ("number", "said"),
    [
        ("3.5.0", "can lose committed changes"),
        ("3.5.2", "can lose committed changes"),
        ("3.5.3", "during defragmentation"),
        ("3.5.4", "a single member"),
        ("3.5.5", "during defragmentation"),
    ],
)
def test_releases_with_known_bugs_are_named_with_what_to_run(number: str, said: str) -> None:
    found = etcd_release.objection(number)
    assert said in found
    assert found.startswith(f"etcd {number}: ")
    assert found.endswith("Run 3.5.6 or newer")


@pytest.mark.parametrize("number", ["3.4.23", "3.5.6", "3.5.17", "3.6.0", "", "unknown", "9" * 5000 + ".0.0"])
def test_nothing_is_said_of_others(number: str) -> None:
    assert etcd_release.objection(number) == ""


def test_a_daemon_logs_it_once_and_goes_on_without_an_answer(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for said in ("3.5.1", "3.5.6", ""):
            etcd_release.warn(Etcd(said).release)
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == ["etcd 3.5.1"]
