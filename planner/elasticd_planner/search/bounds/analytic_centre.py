"""Prices that a growing list of cuts allows: the analytic centre of what is left of a box.

A cut is a row g with g x > 0 wanted. The centre of all x in (0, 1)^n that keep every cut is far from all of
them, so that the next cut takes a good part away: a cutting-plane method that needs a few cuts for each price,
wherever it starts. Newton's method finds it from the last one, with slacks s = G x that need not hold yet.
"""

from __future__ import annotations

import numpy as np

from elasticd_planner.numeric import Floats

#: Newton steps at most, the part of the way to the nearest wall that one goes, and the change of a price at
#: which they end.
STEPS, SHORT, STILL = 60, 0.95, 0.1

#: Slack that a new cut starts with.
START = 0.05


def centre(cuts: Floats, start: Floats) -> Floats | None:
    """The analytic centre of x in (0, 1)^n with `cuts` x > 0, [cut, price]; None where none is found. `start`:
    any x inside the box. Rows are scaled to a largest entry of 1."""
    rows = cuts / np.maximum(np.abs(cuts).max(axis=1, keepdims=True, initial=0.0), 1e-300)
    x, slack = start.copy(), np.maximum(rows @ start, START)
    for _ in range(STEPS):
        if not (x < 1).all() or not slack.all():  # cuts that contradict push prices into the walls
            return None
        off = rows @ x - slack
        slope, curve, push = 1 / (1 - x) - 1 / x, 1 / x**2 + 1 / (1 - x) ** 2, 1 / slack**2
        matrix = (rows.T * push) @ rows
        matrix[np.diag_indices_from(matrix)] += curve
        try:
            move = np.linalg.solve(matrix, -slope - rows.T @ (push * off - 1 / slack))
        except np.linalg.LinAlgError:
            return None
        ease = rows @ move + off
        if not np.isfinite(move).all():
            return None
        most = max(
            float((-move / x).max()), float((move / (1 - x)).max()), float((-ease / slack).max(initial=0.0))
        )
        length = min(1.0, SHORT / most) if most > 0 else 1.0
        x, slack = x + length * move, slack + length * ease
        if length == 1.0 and float(np.abs(move / x).max()) < STILL:
            return x
    return None
