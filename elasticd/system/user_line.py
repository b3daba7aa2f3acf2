"""The line of the user's own code that a message is about: errors and warnings name it, not a library's."""

from __future__ import annotations

import site
import sys
import sysconfig
from pathlib import Path
from traceback import extract_tb

#: Installed packages and the standard library.
_LIBRARIES = tuple(
    {
        *(
            str(Path(sysconfig.get_paths()[name])) + "/"
            for name in ("stdlib", "platstdlib", "purelib", "platlib")
        ),
        *(f"{folder}/" for folder in (*site.getsitepackages(), site.getusersitepackages())),
    }
)
#: elasticd's own package, wherever it is installed.
_ELASTICD = f"{Path(__file__).resolve().parents[1]}/"
#: Files of elasticd's other packages, which a clone has in folders of its own.
_PACKAGES = ("/elasticd_planner/", "/elasticd_migration/", "/elasticd_agent/")


def user_line(error: BaseException) -> str:
    """The place in the user's own code, as "train.py, line 12"; of a library where no other code ran.

    The innermost call that is neither in an installed package nor in the standard library nor in elasticd.
    """
    frames = extract_tb(error.__traceback__)
    if isinstance(error, SyntaxError) and error.filename is not None:
        return f"{error.filename}, line {error.lineno}"
    if not frames:
        return ""
    frame = next((frame for frame in reversed(frames) if _is_users(frame.filename)), frames[-1])
    return f"{frame.filename}, line {frame.lineno}"


def raised_by_user(error: BaseException) -> bool:
    """Returns True if the user's own code raised this error, or called the library that did; not elasticd."""
    for frame in reversed(extract_tb(error.__traceback__)):
        if _is_users(frame.filename):
            return True
        if _is_elasticds(frame.filename):
            return False
    return False


def described(error: BaseException) -> str:
    """The error as "ValueError: no", with the place in the user's own code if that raised it."""
    text = f"{type(error).__name__}: {error}"
    return f"{text} ({user_line(error)})" if raised_by_user(error) else text


def warning_level() -> int:
    """The `stacklevel` with which `warnings.warn`, called by this function's caller, names the user's line."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and not _is_users(frame.f_code.co_filename):
        frame, level = frame.f_back, level + 1
    return level


def _is_users(name: str) -> bool:
    return not (name.startswith(("<", *_LIBRARIES)) or _is_elasticds(name))


def _is_elasticds(name: str) -> bool:
    return name.startswith(_ELASTICD) or any(package in name for package in _PACKAGES)
