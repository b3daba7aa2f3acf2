"""Changes of the tree since a row was measured, as git tells them."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path

from _results import ROOT


class Changes:
    """The changes between commits and the tree at hand. `known` is False in a tree without git."""

    def __init__(self, root: Path = ROOT) -> None:
        self._root = root
        self.known = self._git("rev-parse", "--verify", "--quiet", "HEAD") is not None
        self.since = cache(self._since)

    def _since(self, commit: str | None, paths: tuple[str, ...]) -> str:
        """The reason why a row of this commit that measures `paths` is stale; "" where nothing of them changed.

        Files that differ from the last commit count as a change: nobody can check out again the tree that such
        figures are of.
        """
        if not self.known:
            return ""
        if commit is None:
            return "measured in a tree without git"
        if commit.endswith("+"):
            return f"measured in a tree with changes beside {commit[:-1]}"
        if self._git("merge-base", "--is-ancestor", commit, "HEAD") is None:
            return f"measured at {commit}, which is no commit before this one"
        if not paths:
            return "its part does not say what it measures"
        log = self._git("log", "--format=%h %cs", f"{commit}..HEAD", "--", *paths) or ""
        changes = log.splitlines()
        if changes:
            many = "1 change" if len(changes) == 1 else f"{len(changes)} changes"
            return f"measured at {commit}, {many} since, the last {changes[0]}"
        if self._git("status", "--porcelain", "--untracked-files=no", "--", *paths):
            return f"measured at {commit}, files changed since"
        return ""

    def head(self, paths: tuple[str, ...]) -> str:
        """The commit of the tree; "" where files of `paths` differ from it, or git does not know."""
        if not self.known or self._git("status", "--porcelain", "--", *paths):
            return ""
        return self._git("rev-parse", "--short=12", "HEAD") or ""

    def _git(self, *arguments: str) -> str | None:
        """The output of a git command; None where it fails or git is not there."""
        command = ["git", "-C", str(self._root), *arguments]
        try:
            return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            return None
