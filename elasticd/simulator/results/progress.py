"""The progress of a run: steps and their tokens, with those that a restart takes back."""

from __future__ import annotations


class Trained:
    """`steps` updates applied, and the `tokens` in them. Steps may be fractions: a run in the mean."""

    def __init__(self) -> None:
        self.steps = 0.0
        self.tokens = 0.0
        self.lost = 0.0
        self._parts: list[tuple[float, int]] = []

    def add(self, steps: float, tokens: int) -> None:
        """`steps` of `tokens` each."""
        self._parts.append((steps, tokens))
        self.steps += steps
        self.tokens += steps * tokens

    def back_to(self, every: int) -> float:
        """Back to the last checkpoint, one every so many steps. Returns the steps that are lost."""
        lost = self.steps % every
        self.lost += lost
        self.steps -= lost
        left = lost
        while left > 0 and self._parts:
            steps, tokens = self._parts.pop()
            taken = min(steps, left)
            self.tokens -= taken * tokens
            left -= taken
            if steps > taken:
                self._parts.append((steps - taken, tokens))
        return lost
