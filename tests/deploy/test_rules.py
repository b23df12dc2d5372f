"""The alert rules: promtool accepts them. Every alert has three test cases, and its runbook and metrics exist."""

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from hangwatch.checks.framework import registry
from hangwatch.metrics.collective_progress import RANKS_OF_A_SERIES
from hangwatch.model import CheckStatus
from hangwatch.stacks import activity_table
from hangwatch.verdict import timeout_forecast
from tests.deploy import promql
from tests.deploy.promql import FROM_THE_SITE, ROOT, RULES, SITE_RULES
from tests.servers import run

CASES = Path(__file__).parent / "promtool"
ALERTS = [rule for rule in promql.rules(RULES.read_text()) if "alert" in rule]
UNHEALTHY = "HangwatchNodeUnhealthy"
RUNBOOK = ROOT / f"docs/runbooks/{UNHEALTHY}.md"
ALERT_NAMES = [rule["alert"] for rule in ALERTS]
TIMELINES = [case for path in CASES.glob("*.yaml") for case in yaml.safe_load(path.read_text())["tests"]]


def test_rules_read_each_rank_of_a_series() -> None:
    assert RULES.read_text().count('"more_ranks"') == 2 * (RANKS_OF_A_SERIES - 1)


def test_promtool_takes_the_rules() -> None:
    done = run("promtool", "check", "rules", "--lint=all", "--lint-fatal", RULES, SITE_RULES)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_file_of_a_site_records_what_the_rules_ask_of_it() -> None:
    """Set exactly the labels in the site file that the rules read, and describe each of them."""
    (rule,) = promql.rules(SITE_RULES.read_text())
    asked = set(re.findall(r"hangwatch:site:info\{(\w+)!=''\}", RULES.read_text()))
    assert {rule["record"]} == FROM_THE_SITE
    assert set(rule["labels"]) | {"namespace"} == asked == {"runbooks", "grafana", "namespace"}
    assert all(f"#   {name} " in SITE_RULES.read_text() for name in asked)


def test_rules_prefer_a_timeout_that_the_ranks_recorded() -> None:
    wanted = f"hangwatch:incident_timeout:min{{job_key=%q,source='{timeout_forecast.RECORDED}'}} or on ()"
    assert wanted in RULES.read_text()


def test_promtool_takes_the_example_configuration() -> None:
    done = run("promtool", "check", "config", RULES.parent / "prometheus.example.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stdout + done.stderr


@pytest.mark.parametrize("is_reversed", [False, True], ids=["in order", "in reverse"])
@pytest.mark.parametrize("path", sorted(CASES.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_alerts_fire_and_resolve(path: Path, tmp_path: Path, is_reversed: bool) -> None:
    """Without an order promtool evaluates the groups in any order, as Prometheus does."""
    groups = [group["name"] for group in yaml.safe_load(RULES.read_text())["groups"]]
    order = ", ".join(groups[::-1] if is_reversed else groups)
    text = path.read_text().replace("../../../", f"{ROOT}/")
    (tmp_path / path.name).write_text(f"group_eval_order: [{order}]\n{text}")
    done = run("promtool", "test", "rules", tmp_path / path.name)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("alert", ALERT_NAMES)
def test_every_alert_has_its_three_cases(alert: str) -> None:
    # Each alert has a test case in which it is first silent, then fires, and then is silent again.
    series = []
    for case in TIMELINES:
        checks = sorted(
            (check for check in case.get("alert_rule_test", ()) if check["alertname"] == alert),
            key=lambda check: _seconds(check["eval_time"]),
        )
        series.append("".join("F" if check["exp_alerts"] else "-" for check in checks))
    assert any(re.search("-+F+-+", states) for states in series), f"{alert}: {series}"


@pytest.mark.parametrize("rule", ALERTS, ids=ALERT_NAMES)
def test_every_alert_says_what_where_and_what_to_do(rule: dict[str, Any]) -> None:
    annotations = rule["annotations"]
    links = {"dashboard_url", "incident_url"} if rule["alert"].startswith("HangwatchTraining") else set()
    assert set(annotations) == {"summary", "description", "runbook_url", *links}
    assert rule["labels"]["severity"] in {"critical", "warning", "none"}
    site = '{{ with "hangwatch:site:info{runbooks!=\'\'}" | query }}{{ . | first | label "runbooks" }}/{{ end }}'
    base = "" if rule["labels"]["severity"] == "none" else site  # an alert that is never sent has no such query
    assert annotations["runbook_url"].startswith(f"{base}docs/")
    page = ROOT / annotations["runbook_url"].removeprefix(base).partition("#")[0].partition("{{ end }}")[0]
    assert page == ROOT / f"docs/runbooks/{rule['alert']}.md"
    text = page.read_text()
    for heading in ("## What it means", "## First three commands", "## What to do", "## How it resolves"):
        assert heading in text, f"{page.name} has no {heading!r}"
    assert text.startswith(f"# {rule['alert']}\n")


def test_a_critical_alert_is_about_one_job_and_has_no_node_in_its_labels() -> None:
    # Each job has one page: a label that differs between nodes would give one page per node.
    for rule in ALERTS:
        if rule["labels"]["severity"] == "critical":
            assert "instance" not in rule["labels"]
            assert not re.search(r"by \([^)]*\b(instance|rank)\b", rule["expr"]), rule["alert"]


def test_a_job_is_told_by_its_key_and_never_by_its_name_alone() -> None:
    # Any user may copy a job's name, and two clusters may both have a job "100".
    for query in promql.rule_queries(RULES.read_text()):
        for labels in re.findall(r"\b(?:on|by|group_left|group_right) ?\(([^()]*)\)", query.expr):
            names = {name.strip() for name in labels.split(",")}
            assert "job_id" not in names or "job_key" in names, query
        assert not re.search(r"\{[^{}]*\bjob_id\b", query.expr), query


def test_the_fleet_rule_knows_what_every_activity_waits_for() -> None:
    # The rule reads from a rank's series what the rank waits for. So a new activity is only a row of
    # activities.toml, and the rule does not change.
    recorded = {rule["record"]: rule["expr"] for rule in promql.rules(RULES.read_text()) if "record" in rule}
    fleet = recorded["hangwatch:waiting_ranks:count"] + recorded["hangwatch:apart_rank:held"]
    kinds = {kind for found in re.findall(r'waits_for=~?"([^"]*)"', fleet) for kind in found.split("|")}
    assert kinds | {"unknown"} == {
        activity_table.find_activity(name).waits_for for name in activity_table.built_in().activities
    }
    assert "activity=" not in fleet


def test_the_alerts_name_checks_that_exist() -> None:
    named = {
        check
        for rule in ALERTS
        for matcher in re.findall(r'check[!=]~?"([^"]*)"', rule["expr"])
        for check in matcher.split("|")
    }
    assert named <= set(registry.checks()), f"no such check: {named - set(registry.checks())}"


def test_every_check_that_is_critical_has_exactly_one_alert(tmp_path: Path) -> None:
    # promtool runs the rules on every existing check, so a new check needs no new rule.
    alerts = [
        ("HangwatchCannotDump", {}) if check == "dump_rights" else (UNHEALTHY, {"check": check})
        for check in registry.checks()
    ]
    labels = {"severity": "warning", "job": "hangwatch", "instance": "node-a"}
    series = [
        {"series": f'hangwatch_check_status{{job="hangwatch",instance="node-a",check="{check}"}}', "values": "3x60"}
        for check in registry.checks()
    ]
    query = f'ALERTS{{alertname=~"{UNHEALTHY}|HangwatchCannotDump",alertstate="firing"}}'
    expected = [
        promql.sample("ALERTS", alertname=name, alertstate="firing", **check, **labels) for name, check in alerts
    ]
    case = {
        "interval": "15s",
        "input_series": series,
        "promql_expr_test": [{"expr": query, "eval_time": "10m", "exp_samples": expected}],
    }
    assert promql.promtool([case], tmp_path) == ""


@pytest.mark.golden
def test_the_runbook_of_checks_says_which_alert_when(golden_part: Callable[[Path, str, Iterable[str]], None]) -> None:
    golden_part(RUNBOOK, "alerts", alert_rows())


def alert_rows() -> Iterator[str]:
    """Yield the branches of the rule for unhealthy nodes as rows of a Markdown table: check, status, hold."""
    (expr,) = (rule["expr"] for rule in ALERTS if rule["alert"] == UNHEALTHY)
    branches = re.findall(r'check(=~?|!~)"([^"]*)"\}(?:\[(\d+)m:15s\]\))? >= ([23])', expr)
    assert len(branches) == expr.count("hangwatch_check_status{")
    yield "| check | alerts from | after |"
    yield "|---|---|---|"
    for operator, names, minutes, least in branches:
        which = "every other" if operator == "!~" else ", ".join(f"`{name}`" for name in names.split("|"))
        hold = f"{minutes} minute{'s' * (minutes != '1')}" if minutes else "at once"
        yield f"| {which} | {CheckStatus(int(least)).name} | {hold} |"


def test_the_sections_of_the_runbook_of_checks_are_checks() -> None:
    (rule,) = (rule for rule in ALERTS if rule["alert"] == UNHEALTHY)
    assert rule["annotations"]["runbook_url"].endswith("#{{ $labels.check }}")
    sections = re.findall(r"^### (\w+)$", RUNBOOK.read_text(), re.MULTILINE)
    assert sections and set(sections) <= set(registry.checks())


def _seconds(text: str) -> float:
    number, unit = re.fullmatch(r"(\d+)([smh])", text).groups()  # type: ignore[union-attr]
    return float(number) * {"s": 1, "m": 60, "h": 3600}[unit]
