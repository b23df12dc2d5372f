"""All metric names in rules and dashboards are names that a real hangwatch exports."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import hangwatch
from hangwatch.checks.framework import registry
from tests.checks_page import list_metrics
from tests.conftest import wait_for
from tests.deploy import promql
from tests.deploy.promql import DASHBOARDS, ROOT, RULES
from tests.servers import get

# A daemon on a node without GPUs and jobs. Metric families without samples still have a name and type.
DAEMON = """
import sys
from pathlib import Path
from hangwatch.daemon import Daemon
from hangwatch.tools.demo import playback as play
from hangwatch.tools.demo.simulated_gpus import SimulatedGpus

daemon = Daemon(play.settings(Path(sys.argv[1])), SimulatedGpus(), check_settings={})
daemon.start()
print(daemon.port, flush=True)
sys.stdin.read()
daemon.stop()
"""

# The metrics of the checks, which this daemon does not run.
OF_CHECKS = {f"hangwatch_{metric.name}" for check in registry.checks().values() for metric, _ in list_metrics(check)}
_TYPE = re.compile(r"^# TYPE (\S+) (\w+)$", re.MULTILINE)


def exported_by(code: Path, state: Path) -> set[str]:
    """Run hangwatch from this copy of the code. Return the names of the samples on its /metrics page."""
    with subprocess.Popen(
        [sys.executable, "-c", DAEMON, str(state)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=code,
        env={"PYTHONPATH": str(code), "PATH": "/usr/bin:/bin"},
    ) as daemon:
        assert daemon.stdin and daemon.stdout and daemon.stderr
        port = daemon.stdout.readline().strip()
        assert port, daemon.stderr.read()
        url = f"http://127.0.0.1:{port}/metrics"
        text = wait_for(lambda: (page := get(url)[1].decode()) and "gpu_sample_age" in page and page, "the first sweep")
        daemon.stdin.close()
        daemon.wait(30)
    names = set()
    for name, kind in _TYPE.findall(text):
        names |= {f"{name}_{part}" for part in ("bucket", "sum", "count")} if kind == "histogram" else {name}
    return names | OF_CHECKS


def boards() -> list[dict[str, object]]:
    return [promql.dashboard(name) for name in DASHBOARDS]


def test_all_names_are_exported_or_recorded(tmp_path: Path) -> None:
    exported = exported_by(ROOT, tmp_path)
    assert promql.unknown_names(exported, RULES.read_text(), boards()) == []


@pytest.mark.parametrize(
    ("metric", "where"),
    [
        ("job_activity_ranks", ("rule hangwatch:job_activity_ranks:sum", "hangwatch-node")),
        ("job_state", ("rule hangwatch:job_state:code", "hangwatch-fleet", "rule HangwatchTrainingStalled")),
        ("check_status", ("rule HangwatchNodeUnhealthy", "hangwatch-fleet", "hangwatch-node")),
    ],
)
def test_a_metric_that_is_renamed_in_the_code_is_noticed(metric: str, where: tuple[str, ...], tmp_path: Path) -> None:
    """Rename a metric in a copy of the code. The comparison must then find the old name in the files of `where`."""
    code = tmp_path / "code"
    shutil.copytree(Path(hangwatch.__file__).parent, code / "hangwatch", ignore=shutil.ignore_patterns("__pycache__"))
    files = {path: path.read_text() for path in (code / "hangwatch/metrics").glob("*.py")}
    ((source, before),) = ((path, text) for path, text in files.items() if f'"{metric}"' in text)
    source.write_text(before.replace(f'"{metric}"', f'"{metric}_renamed"'))

    exported = exported_by(code, tmp_path / "state")
    assert f"hangwatch_{metric}_renamed" in exported
    unknown = promql.unknown_names(exported, RULES.read_text(), boards())
    assert all(line.endswith(f": hangwatch_{metric}") for line in unknown)
    for place in where:
        assert any(line.startswith(place) for line in unknown), (place, unknown)


def test_a_recording_rule_that_is_renamed_is_noticed(tmp_path: Path) -> None:
    rules = RULES.read_text().replace("record: hangwatch:odd_rank:held", "record: hangwatch:odd_rank:kept")
    known = {name for query in promql.rule_queries(rules) for name in promql.metric_names(query.expr)}
    unknown = promql.unknown_names(known - {"hangwatch:odd_rank:held"}, rules, boards())
    assert any(line.startswith("hangwatch-fleet, panel 'Odd ranks'") for line in unknown)
    assert any(line.startswith("rule HangwatchTrainingHung, summary") for line in unknown)


@pytest.mark.parametrize(
    ("expr", "names"),
    [
        ('hangwatch_job_state{state="up"} == 1', {"hangwatch_job_state"}),
        ("sum by (hangwatch_x) (rate(process_cpu_seconds_total[5m]))", {"process_cpu_seconds_total"}),
        ('a or on (up) {__name__=~"hangwatch_a|hangwatch:b:kept",c="up"}', {"hangwatch_a", "hangwatch:b:kept"}),
        ('up{job=~"(.+/)?hangwatch"} == 0', {"up"}),
        ("x{a=\"hangwatch_no\", b='process_no'} / $up", set()),
        ('ALERTS{alertname="up"}', {"ALERTS"}),
    ],
)
def test_names_are_found_in_promql(expr: str, names: set[str]) -> None:
    assert promql.metric_names(expr) == names


def test_queries_in_annotations_are_found() -> None:
    found = [
        query for query in promql.rule_queries(RULES.read_text()) if query.where.endswith(("summary", "description"))
    ]
    names = {name for query in found for name in promql.metric_names(query.expr)}
    assert {"hangwatch:odd_rank:held", "hangwatch_incident_info", "hangwatch_check_info"} <= names
