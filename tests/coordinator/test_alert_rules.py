"""Alert rules fire for what is wrong, and never for a job that is over: Prometheus itself says so."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from elasticd.machines.job.state.job_state import JobPhase
from tests.coordinator.test_metrics import exposed

RULES = Path(__file__).resolve().parents[2] / "docs" / "grafana" / "alerts.yaml"
#: What is expected of the exposition for so many minutes, which are more than any rule waits for.
MINUTES = 180

pytestmark = pytest.mark.skipif(
    shutil.which("promtool") is None,
    reason="promtool of Prometheus is not installed (apt-get install prometheus)",
)


def fired(folder: Path, text: str) -> set[str]:
    """The alerts that fire at the end where a leader says this all the time."""
    series = []
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ", ".join(f"{name}={json.dumps(value)}" for name, value in sample.labels.items())
            series.append({"series": f"{sample.name}{{{labels}}}", "values": f"{sample.value}x{MINUTES}"})
    alerts = re.findall(r"- alert: (\w+)", RULES.read_text())
    nothing = [{"eval_time": f"{MINUTES}m", "alertname": alert, "exp_alerts": []} for alert in alerts]
    test = {"interval": "1m", "input_series": series, "alert_rule_test": nothing}
    file = folder / "test.json"
    file.write_text(json.dumps({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": [test]}))
    command = ["promtool", "test", "rules", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    found = set(re.findall(r"alertname: (\w+), time", done.stdout + done.stderr))
    assert (done.returncode == 0) == (not found), done.stdout + done.stderr
    return found


@pytest.mark.parametrize(
    ("phase", "orderly", "alerts"),
    [
        (JobPhase.RUNNING, False, {"ElasticdLowETTR"}),
        (JobPhase.DONE, False, set()),
        (JobPhase.STOPPED, True, set()),
        (JobPhase.STOPPED, False, {"ElasticdJobFailed"}),
    ],
)
def test_a_job_that_is_over_alarms_nobody_unless_it_failed(
    tmp_path: Path, phase: JobPhase, orderly: bool, alerts: set[str]
) -> None:
    assert fired(tmp_path, exposed(phase, 111.5, orderly=orderly)) == alerts
