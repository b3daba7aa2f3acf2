"""Every figure that is shown of a job is that of the job: `known_truth` says what the truth is."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dashboard.known_truth import compare_all, known_job


@pytest.mark.full  # a minute in quiet; a busy machine has other speeds than it emulates
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_figure_of_status_metrics_pages_commands_and_report_is_the_jobs(tmp_path: Path) -> None:
    with known_job(tmp_path) as (job, comparison):
        compare_all(job, comparison)
    assert len(comparison.figures) > 150
    assert not comparison.different, "\n".join(comparison.different)
