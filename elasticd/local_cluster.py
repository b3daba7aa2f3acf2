"""The cluster that `elasticd up` runs on this machine: commands that are given no configuration use it.

While it runs, `elasticd up` keeps a link to its configuration in the user's state folder. The link's name is
the mark of that process, so a link that a killed one left behind counts for nothing.
"""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from elasticd.config.tree import CONFIG_VARIABLE, Config, ConfigError, load
from elasticd.store.state_file import StateError, default_folder
from elasticd.system import process_mark


def settings(path: str | None) -> Config:
    """The configuration of a command: the file at `path`, else `$ELASTICD_CONFIG`, else that of the one
    `elasticd up` that runs here, else the defaults. Raises ConfigError."""
    if path is not None or os.environ.get(CONFIG_VARIABLE):
        return load(path)
    cluster = running()
    if len(cluster) > 1:
        listed = "\n".join(f"  {one}" for one in cluster)
        raise ConfigError(
            f"several 'elasticd up' run on this machine: name one by --config or ${CONFIG_VARIABLE}:\n{listed}"
        )
    return load(cluster[0] if cluster else None)


def running() -> list[Path]:
    """The configuration of each `elasticd up` of this user that runs on this machine."""
    with suppress(OSError, StateError):
        links = [link for link in _links().iterdir() if process_mark.alive(link.name) and link.exists()]
        return sorted(link.resolve() for link in links)
    return []


@contextmanager
def announced(configuration: Path) -> Iterator[None]:
    """Commands find this configuration until the end. Raises OSError."""
    folder = _links()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    for left in folder.iterdir():
        if not process_mark.alive(left.name):
            left.unlink(missing_ok=True)
    link = folder / (process_mark.mark(os.getpid()) or str(os.getpid()))
    link.symlink_to(configuration.resolve())
    try:
        yield
    finally:
        link.unlink(missing_ok=True)


@contextmanager
def alone(folder: Path) -> Iterator[bool]:
    """Yields True if no other process holds `folder`, which is ours until the end then. Raises OSError."""
    with (folder / "lock").open("wb") as file:
        ours = True
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            ours = False
        yield ours


def taken(host: str, port: int) -> str:
    """Why nothing could be served at this address, or nothing."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind((host, port))
        except OSError as error:
            return error.strerror or str(error)
    return ""


def _links() -> Path:
    return default_folder() / "up"
