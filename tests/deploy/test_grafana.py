"""The dashboards equal their source and are valid for Grafana. Every query has a result."""

import contextlib
import itertools
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from msgspec.structs import replace
from prometheus_client import CollectorRegistry, Metric, start_http_server
from prometheus_client.registry import Collector

from hangwatch.checks import gpu_speed
from hangwatch.checks.framework import contract
from hangwatch.collectives.arrival import ArrivalOrder
from hangwatch.detector import job_watch
from hangwatch.detector.progress_gaps import FEWEST_GAPS, HourOfGaps, ProgressRecord, RankProgress
from hangwatch.model import CheckResult, CheckStatus, CheckVerdict, Group, Grouping, Incident, Job, JobState
from hangwatch.model.flight_records import ProgressCounter
from hangwatch.state.board import JobEntry, Snapshot
from hangwatch.verdict.diagnosis import Diagnosis
from tests import samples
from tests.conftest import wait_for
from tests.deploy import promql
from tests.deploy.daemon_on_simulated_node import hangwatch_on
from tests.deploy.promql import DASHBOARDS, GRAFANA, RULES
from tests.servers import RealPrometheus
from tests.simulated.node import SimulatedNode
from tests.unit.test_waitfor import done, standing, waits

# Grafana's names of the units in these dashboards.
UNITS = {"none", "watt", "percentunit", "bytes", "hertz", "celsius", "s"}
NODE = "node-1"


@pytest.fixture(scope="module", params=DASHBOARDS)
def board(request: pytest.FixtureRequest) -> dict[str, Any]:
    return promql.dashboard(request.param)


@pytest.mark.golden
@pytest.mark.parametrize("name", DASHBOARDS)
def test_the_files_are_what_the_source_builds(name: str) -> None:
    pytest.importorskip("grafana_foundation_sdk", reason="needs grafana-foundation-sdk, which needs Python 3.11")
    from grafana.source.__main__ import DASHBOARDS as SOURCES
    from grafana.source.panels import as_json

    built = as_json(SOURCES[name]())
    if os.environ.get("HANGWATCH_RENEW_GOLDEN"):
        (GRAFANA / f"{name}.json").write_text(built)
    assert (GRAFANA / f"{name}.json").read_text() == built, "run `python -m grafana.source`"


def test_uids_differ_and_links_lead_to_dashboards_and_variables_that_exist() -> None:
    boards = {one["uid"]: one for one in map(promql.dashboard, DASHBOARDS)}
    assert len(boards) == len(DASHBOARDS)
    links = [
        link["url"]
        for one in boards.values()
        for panel in promql.panels(one)
        for override in panel.get("fieldConfig", {}).get("overrides", ())
        for prop in override["properties"]
        if prop["id"] == "links"
        for link in prop["value"]
    ]
    assert links
    for link in links:
        form = r"/d/([\w-]+)\?var-(\w+)=\$\{__(?:value\.raw|data\.fields\.\w+)\}&\$\{__url_time_range\}"
        uid, variable = re.fullmatch(form, link).groups()  # type: ignore[union-attr]
        assert variable in {one["name"] for one in boards[uid]["templating"]["list"]}, link


def test_the_link_of_an_alert_opens_the_dashboard_of_its_job() -> None:
    found = set(re.findall(r"/d/([\w-]+)\?var-(\w+)=\{\{ \$labels\.(\w+) \}\}", RULES.read_text()))
    ((uid, variable, label),) = found
    boards = {one["uid"]: one for one in map(promql.dashboard, DASHBOARDS)}
    assert label == variable and variable in {one["name"] for one in boards[uid]["templating"]["list"]}


def test_on_a_node_hangwatch_itself_comes_last_and_is_folded() -> None:
    # An on-call engineer looks for the job first. So the daemon's cost and the runs of checks come last and are
    # folded.
    last = promql.dashboard("node")["panels"][-1]
    assert (last["type"], last["title"], last["collapsed"]) == ("row", "hangwatch itself", True)
    assert last["panels"][-1]["title"] == "Runs of the checks"


def test_ids_are_unique_and_panels_do_not_overlap(board: dict[str, Any]) -> None:
    panels = promql.panels(board)
    ids = [panel["id"] for panel in panels]
    assert len(set(ids)) == len(ids)
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] >= 0 and place["w"] > 0 and place["h"] > 0 and place["x"] + place["w"] <= 24, panel["title"]
    for one, other in itertools.combinations(panels, 2):
        a, b = one["gridPos"], other["gridPos"]
        apart = (
            a["x"] + a["w"] <= b["x"]
            or b["x"] + b["w"] <= a["x"]
            or a["y"] + a["h"] <= b["y"]
            or b["y"] + b["h"] <= a["y"]
        )
        assert apart, f"{one['title']!r} and {other['title']!r} overlap"


def test_units_are_known_and_every_number_has_one(board: dict[str, Any]) -> None:
    for panel in promql.panels(board):
        defaults = panel.get("fieldConfig", {}).get("defaults", {})
        if panel["type"] in ("timeseries", "stat"):
            assert defaults.get("unit") in UNITS, panel["title"]
        for override in panel.get("fieldConfig", {}).get("overrides", ()):
            for prop in override["properties"]:
                assert prop["id"] != "unit" or prop["value"] in UNITS, panel["title"]


def test_panel_has_description_legend_and_chosen_datasource(board: dict[str, Any]) -> None:
    chosen = {"type": "prometheus", "uid": "${datasource}"}
    (source,) = [one for one in board["templating"]["list"] if one["type"] == "datasource"]
    assert source["name"] == "datasource" and source["query"] == "prometheus"
    for panel in promql.panels(board):
        if panel["type"] == "row":
            continue
        assert panel["description"] and panel["datasource"] == chosen, panel["title"]
        assert panel["targets"], panel["title"]
        references = [target["refId"] for target in panel["targets"]]
        assert len(set(references)) == len(references), panel["title"]
        for target in panel["targets"]:
            assert target["legendFormat"], panel["title"]
            assert target["datasource"] == chosen, panel["title"]
    for one in (*board["annotations"]["list"], *board["templating"]["list"]):
        assert (
            one["type"] == "datasource"
            if "type" in one and one.get("name") == "datasource"
            else one["datasource"] == chosen
        )


def test_what_every_exporter_has_is_asked_of_hangwatch_alone(board: dict[str, Any]) -> None:
    """Another exporter has the same `instance` if it is the name of the node."""
    for query in promql.dashboard_queries(board):
        for labels in re.findall(r"(?:(?<![\w:])(?:process|scrape)_\w+|(?<![\w:])up)(\{.*?\})?", query.expr):
            assert 'job=~"(.+/)?hangwatch"' in labels, query


def test_variables_that_queries_use_are_defined(board: dict[str, Any]) -> None:
    defined = {one["name"] for one in board["templating"]["list"]}
    for query in promql.dashboard_queries(board):
        used = set(re.findall(r"\$\{?(\w+)", query.expr)) - {"__rate_interval", "__range", "__interval"}
        assert used <= defined, query


def test_every_column_and_override_belongs_to_a_field_that_the_table_has(board: dict[str, Any]) -> None:
    for panel in promql.panels(board):
        if panel["type"] != "table":
            continue
        steps = {step["id"]: step["options"] for step in panel["transformations"]}
        names = steps["filterFieldsByName"]["include"]["names"]
        assert set(names) == set(steps["organize"]["renameByName"]) == set(steps["organize"]["indexByName"])
        headings = set(steps["organize"]["renameByName"].values())
        for override in panel["fieldConfig"]["overrides"]:
            assert override["matcher"]["options"] in headings, panel["title"]
        fields = set(re.findall(r"__data\.fields\.(\w+)", json.dumps(panel["fieldConfig"]["overrides"])))
        assert fields <= headings, f"{panel['title']}: a link needs the column {fields - headings}"


def test_a_job_is_asked_for_by_its_key_and_shown_with_its_owner(board: dict[str, Any]) -> None:
    """Select and count jobs by key, because jobs of two owners may have the same name."""
    for query in promql.dashboard_queries(board):
        assert not re.search(r"\{[^{}]*\bjob_id\b", query.expr), query
        for labels in re.findall(r"\b(?:on|by) ?\(([^()]*)\)", query.expr):
            names = {name.strip() for name in labels.split(",")}
            assert "job_id" not in names or "job_key" in names, query
    for panel in promql.panels(board):
        for target in panel.get("targets", ()):
            assert "{{job_id}}" not in target["legendFormat"] or "{{owner}}" in target["legendFormat"], panel["title"]
    (variable,) = [one for one in board["templating"]["list"] if one["name"] == "job_key"]
    # Grafana reads a result of query_result() in this way: the first match of each group counts.
    text = '{job_key="6d1c0f5a9e27b384",title="llama of user ada (100, uid 1001)"} 1 1700000000000'
    regex = variable["regex"].removeprefix("/").removesuffix("/g").replace("(?<", "(?P<")
    found = [match.groupdict() for match in re.finditer(regex, text)]
    assert next(one["value"] for one in found if one["value"]) == "6d1c0f5a9e27b384"
    assert next(one["text"] for one in found if one["text"]) == "llama of user ada (100, uid 1001)"


def test_the_provisioning_example_points_at_the_dashboards() -> None:
    (source,) = yaml.safe_load((GRAFANA / "provisioning/datasources/prometheus.yaml").read_text())["datasources"]
    assert source["type"] == "prometheus"
    (provider,) = yaml.safe_load((GRAFANA / "provisioning/dashboards/hangwatch.yaml").read_text())["providers"]
    assert provider["type"] == "file" and provider["options"]["path"]


OF_JOB = 'job="hangwatch",job_id="J1",job_key="k1"'
SERIES = {
    # Both ranks hold the first GPU, like ranks that never chose a GPU. It draws 100 W, the second GPU 300 W.
    f'hangwatch_job_gpu_info{{{OF_JOB},instance="node-1",rank="0",uuid="GPU-0"}}': "1x60",
    f'hangwatch_job_gpu_info{{{OF_JOB},instance="node-1",rank="1",uuid="GPU-0"}}': "1x60",
    f'hangwatch_job_gpu_info{{{OF_JOB},instance="node-1",rank="1",uuid="GPU-1"}}': "1x60",
    'hangwatch_gpu_power_watts{job="hangwatch",instance="node-1",uuid="GPU-0"}': "100x60",
    'hangwatch_gpu_power_watts{job="hangwatch",instance="node-1",uuid="GPU-1"}': "300x60",
    'hangwatch_gpu_low_power_threshold_watts{job="hangwatch",instance="node-1",uuid="GPU-0"}': "150x60",
    'hangwatch_gpu_low_power_threshold_watts{job="hangwatch",instance="node-1",uuid="GPU-1"}': "150x60",
    # On node-2, a launcher waits for others and has no program yet. The node does not respond after 50 s.
    f'hangwatch_job_info{{{OF_JOB},instance="node-1",owner="uid 7",title="llama (uid 7, train.py)"}}': "1x60",
    f'hangwatch_job_info{{{OF_JOB},instance="node-2",owner="uid 7",title="llama (uid 7)"}}': "1x10 stale",
    'up{job="hangwatch",instance="node-1"}': "1x60",
    'up{job="hangwatch",instance="node-2"}': "1x10 0x50",
    f'hangwatch_job_ranks{{{OF_JOB},instance="node-1"}}': "1x60",
    f'hangwatch_job_ranks{{{OF_JOB},instance="node-2"}}': "1x10 stale",
    f'hangwatch_job_state{{{OF_JOB},instance="node-1",state="waits_elsewhere"}}': "1x60",
    f'hangwatch_job_state{{{OF_JOB},instance="node-2",state="hung"}}': "1x10 stale",
    f'hangwatch_job_page{{{OF_JOB},instance="node-2",state="hung"}}': "1x10 stale",
}


@pytest.mark.parametrize(
    ("name", "panel", "value"),
    [
        ("job", "Power of the job", 400),
        ("job", "GPUs with low power", 0.5),
        ("fleet", "GPUs with low power, by job", 0.5),
        ("fleet", "Hung jobs", 1),
        ("fleet", "Stalled jobs", 0),
        ("job", "job_key", 1),  # while both nodes respond: one row in the list of jobs
    ],
)
def test_a_gpu_of_two_ranks_counts_once_and_so_does_a_job(name: str, panel: str, value: float, tmp_path: Path) -> None:
    board = promql.dashboard(name)
    exprs = [
        target["expr"] for one in promql.panels(board) if one["title"] == panel for target in one.get("targets", ())
    ]
    exprs += [f"count({expr})" for variable, expr, _ in promql.variable_queries(board) if variable == panel]
    expr = promql.filled(exprs[0], {"node": ".*", "job_key": ".*" if name == "fleet" else "k1"})
    when = "40s" if panel == "job_key" else "100s"
    asked = {"expr": f"max({expr})", "eval_time": when, "exp_samples": [{"labels": "{}", "value": value}]}
    series = [{"series": one, "values": values} for one, values in SERIES.items()]
    case = {"interval": "5s", "input_series": series, "promql_expr_test": [asked]}
    assert promql.promtool([case], tmp_path) == ""


def test_a_clock_that_is_behind_is_in_sight() -> None:
    (clock,) = [
        one for one in promql.panels(promql.dashboard("fleet")) if one["title"].startswith("Clock offset of each node")
    ]
    assert "min" not in clock["fieldConfig"]["defaults"]


def test_a_panel_without_data_says_why_there_may_be_none(board: dict[str, Any]) -> None:
    for panel in promql.panels(board):
        if panel["type"] != "row":
            assert panel["fieldConfig"]["defaults"]["noValue"], panel["title"]


class Collectives(Collector):
    """A node's series from flight recorders, and the clock of a GPU, which simulated nodes do not have."""

    def __init__(self, entry: JobEntry) -> None:
        rank = contract.RankName.of_rank(entry.job, entry.job.ranks[0])
        speed = gpu_speed.GpuSpeed(index=0, uuid="GPU-0", rank=rank, clock_hertz=1.0, usual_hertz=1.0)
        (clock,) = gpu_speed.METRICS[0].points(gpu_speed.Sample(monotonic_seconds=0.0, gpus=(speed,)))
        verdict = CheckVerdict(status=CheckStatus.OK, reason="ClocksAlike", message="")
        result = CheckResult(
            check="gpu_speed",
            verdict=verdict,
            success=True,
            duration_seconds=0.0,
            ran_unix_seconds=0.0,
            points=(clock,),
        )
        self._snapshot = Snapshot(jobs={entry.job.key: entry}, checks={"gpu_speed": result})

    def collect(self) -> Iterator[Metric]:
        families = samples.metric_families(self._snapshot)
        parts = ("_collective", "_gap_seconds", "_suspected_info", "_lateness_seconds", "_clock_ratio")
        return (family for family in families if any(part in family.name for part in parts))


def suspected(job: Job, incident: Incident) -> JobEntry:
    """Return a job that is suspected because it enqueues no collective. It also has an incident."""
    ranks = {rank.id: RankProgress(counter=ProgressCounter(total=9), increased_at=0.0) for rank in job.ranks}
    hour = HourOfGaps(hour=0, counts={0: FEWEST_GAPS}, longest_seconds=1.0)
    progress = ProgressRecord(ranks=ranks, progressed_at=0.0, gaps=FEWEST_GAPS, hours=(hour,))
    look = Diagnosis(
        capture=samples.loader_hang().captures[0],
        grouping=incident.grouping,
        verdict=samples.loader_hang().verdict,
        judged_unix_seconds=0.0,
    )
    watch = replace(job_watch.begin_watch(job, 0.0), state=JobState.SUSPECTED, progress=progress)
    order = ArrivalOrder(reason="NoneLate", lateness_seconds={rank.id: 0.001 for rank in job.ranks})
    return JobEntry(job=job, watch=watch, incident=incident, suspected=look, arrival_order=order)


@contextlib.contextmanager
def recording(job: Job) -> Iterator[int]:
    """Serve series of a second node, in which rank 4 waits for rank 5, and 5 for no record. Yield the port."""
    members = (standing(4, waits(3, "1")), standing(5, done(2, "1")))
    group = Group(key="w", activity="recv", waits_for="ranks", members=members)
    incident = replace(samples.all_waiting(), job=job, grouping=Grouping(groups=(group,), world_size=6))
    own = CollectorRegistry()
    own.register(Collectives(suspected(job, incident)))
    server, thread = start_http_server(0, addr="127.0.0.1", registry=own)
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class Watched:
    """A hung job of four ranks, and a Prometheus that has its series."""

    def __init__(self, prometheus: RealPrometheus, job_id: str) -> None:
        self.prometheus = prometheus
        (info,) = prometheus.query(f'max by (job_id, job_key, owner) (hangwatch_job_info{{job_id="{job_id}"}})')
        self.job = info["metric"]
        self.variables = {"node": NODE, "job_key": self.job["job_key"], "gpu": ".*"}

    def empty(self, query: promql.Query) -> bool:
        expr = promql.filled(query.expr, self.variables)
        if query.is_range:
            return not self.prometheus.query_range(expr, 10)
        return not self.prometheus.query(expr)


@pytest.fixture(scope="module")
def hung(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    folder: Path = tmp_path_factory.mktemp("hung")
    with SimulatedNode(4) as node, hangwatch_on(node, folder / "hangwatch", NODE) as daemon:
        wait_for(lambda: daemon.board.snapshot.jobs, "a job", 60)
        (job,) = (entry.job for entry in daemon.board.snapshot.jobs.values())
        with recording(job) as port:
            targets = {NODE: f"127.0.0.1:{daemon.port}", "node-2": f"127.0.0.1:{port}"}
            yield from _hung(folder, node, targets)


def _hung(folder: Path, node: SimulatedNode, targets: dict[str, str]) -> Iterator[Watched]:
    # scrape_seconds is also the limit of a scrape
    with RealPrometheus(folder / "prometheus", targets, rules=[RULES], scrape_seconds=3.0) as prometheus:
        wait_for(lambda: prometheus.query('hangwatch_job_state{state="training"} == 1'), "a job that trains", 60)
        wait_for(lambda: prometheus.query("hangwatch_gpu_low_power_threshold_watts"), "a low-power threshold", 30)
        node.order(1, "loader")
        page = 'ALERTS{alertname="HangwatchTrainingHung",alertstate="firing"}'
        wait_for(lambda: prometheus.query(page), "the page", 60)
        yield Watched(prometheus, node.run_id)


def test_every_query_of_a_dashboard_returns_data(hung: Watched, board: dict[str, Any]) -> None:
    queries = list(promql.dashboard_queries(board))
    assert len(queries) > 10
    missing = [query for query in queries if hung.empty(query)]
    # Some values appear only after a later scrape (a rate, a rule evaluated after the page), within seconds.
    missing = [query for query in missing if not wait_for_data(hung, query)]
    assert not missing, "\n".join(f"{query.where}: {query.expr}" for query in missing)


def test_every_variable_has_values(hung: Watched, board: dict[str, Any]) -> None:
    for name, selector, label in promql.variable_queries(board):
        expr = promql.filled(selector, hung.variables)
        found = {series["metric"].get(label) for series in hung.prometheus.query(expr)}
        assert found - {None, ""}, f"variable {name}: {expr} has no label {label}"


def test_every_column_of_a_table_is_a_label_of_what_its_query_returns(hung: Watched, board: dict[str, Any]) -> None:
    for panel in promql.panels(board):
        if panel["type"] != "table":
            continue
        labels = {"Value", *(f"Value #{target['refId']}" for target in panel["targets"])}
        for target in panel["targets"]:
            for series in hung.prometheus.query(promql.filled(target["expr"], hung.variables)):
                labels |= set(series["metric"])
        names = next(step for step in panel["transformations"] if step["id"] == "filterFieldsByName")
        assert set(names["options"]["include"]["names"]) <= labels, panel["title"]


def test_every_label_of_a_legend_is_one_of_its_series(hung: Watched, board: dict[str, Any]) -> None:
    for panel in promql.panels(board):
        for target in panel.get("targets", ()):
            wanted = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            for series in hung.prometheus.query(promql.filled(target["expr"], hung.variables)):
                assert wanted <= set(series["metric"]), f"{panel['title']}: {target['legendFormat']}"


def test_the_page_names_the_rank_that_was_planted(hung: Watched) -> None:
    def page() -> dict[str, Any] | None:
        return next((a for a in hung.prometheus.alerts() if a["labels"]["alertname"] == "HangwatchTrainingHung"), None)

    alert = wait_for(page, "HangwatchTrainingHung")
    assert {name: alert["labels"][name] for name in ("job_id", "job_key")} == {
        name: hung.job[name] for name in ("job_id", "job_key")
    }
    assert f"({hung.job['owner']}, tests.simulated.worker)" in alert["annotations"]["summary"]
    named = wait_for(
        lambda: (found := page()) and re.search(r"rank (\d+) on (\S+)", found["annotations"]["summary"]),
        "a name in the page",
    )
    assert named.groups() == ("1", NODE)


def wait_for_data(hung: Watched, query: promql.Query) -> bool:
    try:
        wait_for(lambda: not hung.empty(query), query.where, 10)
    except pytest.fail.Exception:
        return False
    return True


def test_a_dashboard_is_plain_json(board: dict[str, Any]) -> None:
    # A dashboard has no `id` of an instance and no `__inputs`. So Grafana can import it by hand, by provisioning
    # and by its sidecar.
    assert "id" not in board or board["id"] is None
    assert "__inputs" not in json.dumps(board)
