"""A forecast of a load of experts follows a load that drifts, and takes the chance out of one that does not."""

import numpy as np
from elasticd_planner.placement.expert_forecast import NEWEST, ExpertForecast

EXPERTS = 16


def test_before_a_report_there_is_none_and_the_first_one_is_it() -> None:
    assert ExpertForecast().rows == {}
    first = ExpertForecast().after({0: (3.0, 1.0)})
    assert (first.rows, first.reports, first.reports_in_mean) == ({0: (3.0, 1.0)}, 1, 1)


def test_a_steady_load_of_few_rows_gets_a_slow_mean_and_one_that_drifts_a_quick_one() -> None:
    rng = np.random.default_rng(0)
    weights = rng.dirichlet(np.ones(EXPERTS))
    steady, drifting, logs = ExpertForecast(), ExpertForecast(), np.log(weights)
    for _ in range(40):
        logs = logs + rng.normal(0, 0.2, EXPERTS)
        moved = np.exp(logs) / np.exp(logs).sum()
        steady = steady.after({2: tuple(rng.multinomial(500, weights).tolist())})
        drifting = drifting.after({2: tuple(rng.multinomial(100_000, moved).tolist())})
    assert steady.reports_in_mean == 2 / NEWEST[0] - 1
    assert drifting.reports_in_mean == 1
    assert np.abs(np.array(steady.rows[2]) / 500 - weights).max() < 0.03
    assert np.abs(np.array(drifting.rows[2]) / 100_000 - moved).max() < 0.01


def test_a_block_that_is_new_to_it_is_as_reported() -> None:
    known = ExpertForecast().after({0: (3.0, 1.0)}).after({0: (1.0, 3.0), 1: (5.0, 0.0)})
    assert known.rows == {0: (2.0, 2.0), 1: (5.0, 0.0)}
