"""The queries of rules and dashboards, and the metric names in them."""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from tests.servers import run

ROOT = Path(__file__).parent.parent.parent
RULES = ROOT / "deploy/prometheus/hangwatch.rules.yaml"
SITE_RULES = ROOT / "deploy/prometheus/hangwatch-site.rules.yaml"
GRAFANA = ROOT / "grafana"
DASHBOARDS = ("fleet", "node", "job")

# Labels and metrics that Prometheus itself adds to each target, and its series of alerts.
FROM_PROMETHEUS = frozenset({"up", "scrape_duration_seconds", "ALERTS"})

FROM_THE_SITE = frozenset({"hangwatch:site:info"})

_TEXT = re.compile(r"\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'")
_LABELS = re.compile(r"\{[^{}]*\}|\b(?:by|on|without|ignoring|group_left|group_right)\s*\([^()]*\)")
_NAME = re.compile(r"(?<![\w:$])(?:(?:hangwatch|process|scrape)[_:][\w:]+|up|ALERTS)\b(?!\s*\()")
_TWO_NAMES = re.compile(r"""\{__name__=~["']([\w:]+)[|]([\w:]+)["'],""")
_IN_TEMPLATE = re.compile(r"(printf )?\"((?:[^\"\\]|\\.)*)\"[^|{}]*\| query")


class Query(NamedTuple):
    """A query: its place in the rules or dashboards, its expression, and if it is a range query."""

    where: str
    expr: str
    is_range: bool = False


def promtool(tests: Sequence[dict[str, Any]], folder: Path) -> str:
    """Run these tests of our rules with promtool. Return its failures, which are empty if all tests pass."""
    path = folder / "cases.yaml"
    content = {"rule_files": [str(RULES)], "evaluation_interval": tests[0]["interval"], "tests": list(tests)}
    path.write_text(yaml.safe_dump(content))
    done = run("promtool", "test", "rules", path)
    return "" if done.returncode == 0 else done.stdout + done.stderr


def metric_names(expr: str) -> set[str]:
    """Return the names of the metrics and recording rules in a PromQL expression."""
    return set(_NAME.findall(_LABELS.sub(" ", _TEXT.sub(" ", _TWO_NAMES.sub(r"\1 or \2{", expr)))))


def rules(text: str) -> list[dict[str, Any]]:
    """Return all rules of a rule file, in order."""
    return [rule for group in yaml.safe_load(text)["groups"] for rule in group["rules"]]


def rule_queries(text: str) -> Iterator[Query]:
    """Yield the expressions of all rules, and the queries in their annotations."""
    for rule in rules(text):
        where = f"rule {rule.get('alert') or rule['record']}"
        yield Query(where, rule["expr"])
        for name, template in rule.get("annotations", {}).items():
            for found in _IN_TEMPLATE.finditer(template):
                yield Query(f"{where}, {name}", found.group(2).replace("%q", '"x"').replace('\\"', '"'))


def sample(metric: str, value: float = 1, **labels: str) -> dict[str, Any]:
    """Return a sample in the form of promtool's tests."""
    return {
        "labels": metric + "{" + ",".join(f'{name}="{text}"' for name, text in labels.items()) + "}",
        "value": value,
    }


def dashboard(name: str) -> dict[str, Any]:
    """Return a dashboard in the JSON that Grafana imports."""
    return dict(json.loads((GRAFANA / f"{name}.json").read_text()))


def panels(board: dict[str, Any]) -> list[dict[str, Any]]:
    """Return all panels of a dashboard, including rows and the panels in them."""
    return [one for panel in board["panels"] for one in (panel, *panel.get("panels", ()))]


def dashboard_queries(board: dict[str, Any]) -> Iterator[Query]:
    """Yield the queries of all panels and annotations. Variables are not replaced."""
    for panel in panels(board):
        for target in panel.get("targets", ()):
            yield Query(
                f"{board['uid']}, panel {panel['title']!r}, {target['refId']}",
                target["expr"],
                bool(target.get("range")),
            )
    for one in board["annotations"]["list"]:
        if "expr" in one:
            yield Query(f"{board['uid']}, annotation {one['name']!r}", one["expr"], is_range=True)


def variable_queries(board: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield (variable, expression, label) of every variable that queries Prometheus."""
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            asked = variable["query"]["query"]
            if found := re.fullmatch(r"query_result\((.+)\)", asked):
                yield variable["name"], found.group(1), variable["name"]
                continue
            found = re.fullmatch(r"label_values\((.+), (\w+)\)", asked)
            assert found, f"{board['uid']}: variable {variable['name']} is no label_values(metric, label)"
            yield variable["name"], found.group(1), found.group(2)


def filled(expr: str, variables: dict[str, str]) -> str:
    """Return the expression with these values instead of Grafana's variables."""
    for name, value in {"__rate_interval": "30s", "__range": "5m", "__interval": "5s", **variables}.items():
        expr = re.sub(rf"\$(\{{{name}\}}|{name}\b)", value.replace("\\", r"\\"), expr)
    assert "$" not in expr.replace("$)", ""), f"a variable is left: {expr}"
    return expr


def unknown_names(exported: Iterable[str], rules_text: str, boards: Iterable[dict[str, Any]]) -> list[str]:
    """Return the names in rules and dashboards that are neither exported nor recorded, each with its place."""
    known = {
        *exported,
        *FROM_PROMETHEUS,
        *FROM_THE_SITE,
        *(rule["record"] for rule in rules(rules_text) if "record" in rule),
    }
    asked = [(query.where, query.expr) for query in rule_queries(rules_text)]
    for board in boards:
        asked += [(query.where, query.expr) for query in dashboard_queries(board)]
        asked += [(f"{board['uid']}, variable {name}", expr) for name, expr, _ in variable_queries(board)]
    return [f"{where}: {name}" for where, expr in asked for name in sorted(metric_names(expr) - known)]
