"""The seed of what tests draw under `--full`: one for all processes of a session, which prints it."""

from __future__ import annotations

import secrets
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, help="of what tests draw under --full (default: another each time)")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if not config.getoption("--full"):
        return
    if config.getoption("--seed") is None:
        given: dict[str, Any] = getattr(config, "workerinput", {})
        config.option.seed = given.get("seed", secrets.randbelow(1_000_000))
    if config.getoption("--hypothesis-seed") is None:
        config.option.hypothesis_seed = str(config.option.seed)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """xdist gives its processes the arguments of the command, which have no seed where one was drawn."""
    node.workerinput["seed"] = node.config.option.seed
