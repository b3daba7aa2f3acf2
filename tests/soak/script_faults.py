"""Faults of the user's own code, by order: the script that the soak trains looks for them in its folder.

The soak writes `fault-DEVICE`. The script's loss, its dataset and the body of its loop look whether one is
there for them, and the first to see it renames it to `taken-NUMBER`, so that it befalls one process, once.
Nothing of elasticd knows of it: what follows is what any code of a user could do.
"""

from __future__ import annotations

import ctypes
import time
from contextlib import suppress
from pathlib import Path
from typing import Literal

import msgspec
from elasticd_planner.value import Value

Place = Literal["loss", "script", "loader", "evaluation"]


class Injected(Exception):
    """The exception that planted code raises."""


class Planted(Value, frozen=True, kw_only=True):
    """number: that no other has. place: whose turn it is. how: "sleep", "lock" (in C, and no other thread of
    Python runs), for `seconds`; or "raise", with `text`."""

    number: int
    place: Place
    how: Literal["sleep", "lock", "raise"]
    seconds: float = 0.0
    text: str = ""


def plant(folder: Path, device: str, planted: Planted) -> None:
    """From now on the device's process finds it."""
    beside = folder / f"planting-{planted.number}"
    beside.write_bytes(msgspec.json.encode(planted))
    beside.rename(_path(folder, device))


def withdraw(folder: Path, device: str) -> None:
    """Nobody is to find it any more; who found it before has taken it."""
    _path(folder, device).unlink(missing_ok=True)


def taken(folder: Path, number: int) -> bool:
    """Returns True if a process found it."""
    return (folder / f"taken-{number}").exists()


class Finder:
    """In a worker: befalls its process with what is planted for its device, once it is known which that is."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path: Path | None = None

    def know(self, device: str) -> None:
        """This process drives the device."""
        self._path = _path(self._folder, device)

    def at(self, place: Place) -> None:
        """Called by the script at this place. Raises `Injected` where that is what was planted."""
        if self._path is None or not self._path.exists():
            return
        with suppress(FileNotFoundError):  # withdrawn meanwhile
            planted = msgspec.json.decode(self._path.read_bytes(), type=Planted)
            if planted.place == place:
                self._path.rename(self._folder / f"taken-{planted.number}")
                befall(planted)


def befall(planted: Planted) -> None:
    """Does it, here and now."""
    if planted.how == "raise":
        raise Injected(planted.text)
    if planted.how == "sleep":
        time.sleep(planted.seconds)
    else:
        hold_lock(planted.seconds)


def hold_lock(seconds: float) -> None:
    """Waits in C without giving the interpreter's lock away, as a badly written extension would. A signal ends
    `poll`: then it is called again."""
    library, until = ctypes.PyDLL(None), time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        library.poll(None, 0, int(1000 * left) + 1)


def _path(folder: Path, device: str) -> Path:
    return folder / f"fault-{device.replace('/', ':')}"
