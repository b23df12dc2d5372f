"""The Alertmanager example: amtool accepts it. A real Alertmanager shows its routes, receivers and inhibition."""

import copy
import datetime
import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from msgspec.structs import replace
from prometheus_client import CollectorRegistry, generate_latest

from hangwatch import metrics
from hangwatch.config import Detector
from hangwatch.detector import job_watch
from hangwatch.detector.watch_parts import Silence
from hangwatch.model import Incident, JobState, TimelineEntry
from hangwatch.state.board import Board, JobEntry
from tests import hangs, samples
from tests.conftest import wait_for
from tests.deploy import promql
from tests.deploy.promql import ROOT, RULES, SITE_RULES
from tests.servers import RealAlertmanager, RealPrometheus, TextExporter, WebhookReceiver, run
from tests.unit.test_report_text import SIX_HANGS, dumped

EXAMPLE = ROOT / "deploy/prometheus/alertmanager.example.yaml"
TEMPLATES = EXAMPLE.parent / "hangwatch.tmpl"
ALL_RECEIVERS = re.sub("#(slack|pagerduty) ", "", EXAMPLE.read_text())
CONFIG: dict[str, Any] = yaml.safe_load(ALL_RECEIVERS)
RUNBOOKS = "https://git.example.com/hangwatch/blob/main/docs/runbooks"
ALERTS = {rule["alert"]: rule["labels"]["severity"] for rule in promql.rules(RULES.read_text()) if "alert" in rule}


@pytest.mark.parametrize("text", [EXAMPLE.read_text(), ALL_RECEIVERS])
def test_amtool_takes_the_example(text: str, tmp_path: Path) -> None:
    (tmp_path / EXAMPLE.name).write_text(text)
    (tmp_path / TEMPLATES.name).write_text(TEMPLATES.read_text())
    done = run("amtool", "check-config", tmp_path / EXAMPLE.name)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 templates" in done.stdout and CONFIG["templates"] == [TEMPLATES.name]


def test_page_test_goes_through_the_shipped_example_and_to_a_webhook(receiver: WebhookReceiver, tmp_path: Path) -> None:
    """Run the example as it is shipped, without a secret file. Only the address of its webhook is another."""
    shipped = yaml.safe_load(EXAMPLE.read_text().replace("http://127.0.0.1:5001", receiver.url))
    assert "_file" not in str(shipped)
    shipped["templates"] = [str(TEMPLATES)]
    with RealAlertmanager(tmp_path, shipped) as alertmanager:
        for url, path in ((alertmanager.url, "/on-call"), (f"{receiver.url}/hook", "/hook")):
            done = run("make", "-C", ROOT, "page-test", f"PYTHON={sys.executable}", f"URL={url}")
            assert done.returncode == 0, done.stderr
            (page,) = receiver.wait(path)["alerts"]
            assert page["annotations"]["summary"].endswith(": rank 3 on gpu-07: open data/shard-3")
    assert (
        "not sent: "
        in run("make", "-C", ROOT, "page-test", f"PYTHON={sys.executable}", f"URL={alertmanager.url}").stderr
    )


def test_the_example_holds_no_secret() -> None:
    # Secrets are in files, and all addresses are examples.
    text = EXAMPLE.read_text()
    for receiver in CONFIG["receivers"]:
        for kind, entries in receiver.items():
            for entry in entries if kind.endswith("_configs") else ():
                assert not {"routing_key", "service_key", "api_url", "bearer_token"} & set(entry), kind
    assert text.count("https://") == text.count(".example.com/")


@pytest.mark.parametrize("alert", ALERTS)
def test_every_alert_has_the_receiver_of_its_severity(alert: str) -> None:
    severity = ALERTS[alert]
    labels = [f"alertname={alert}", f"severity={severity}"]
    labels += ["job_id=J1"] if alert.startswith("HangwatchTraining") else ["instance=node-a"]
    done = run("amtool", "config", "routes", "test", f"--config.file={EXAMPLE}", *labels)
    expected = {"critical": "on-call", "warning": "chat", "none": "discard"}[severity]
    assert (done.returncode, done.stdout.split()) == (0, [expected]), done.stdout + done.stderr


@pytest.mark.parametrize("alert", [name for name in ALERTS if name.startswith("HangwatchTraining")])
def test_what_is_said_of_a_job_is_a_message_of_its_own(alert: str) -> None:
    """Send the crash of a job at once, not 15 minutes later together with another job."""
    labels = {"alertname": alert, "severity": ALERTS[alert], "job_id": "J1"}

    def is_met(matcher: str) -> bool:
        name, how, wanted = re.fullmatch(r'(\w+)(=~|!=|=)"(.*)"', matcher).groups()  # type: ignore[union-attr]
        value = labels.get(name, "")
        return {"=": value == wanted, "!=": value != wanted, "=~": bool(re.fullmatch(wanted, value))}[how]

    route = next(route for route in CONFIG["route"]["routes"] if all(map(is_met, route["matchers"])))
    assert route["group_by"] == ["job_id", "job_key"]


def on_loopback(receiver: WebhookReceiver, quicker: bool = True) -> dict[str, Any]:
    """Return the example's routes and inhibition. Each receiver is a webhook on loopback."""
    config = {**copy.deepcopy(CONFIG), "templates": [str(TEMPLATES)]}
    config["receivers"] = [
        {"name": one["name"], "webhook_configs": [{"url": f"{receiver.url}/{one['name']}", "send_resolved": True}]}
        if one["name"] != "discard"
        else one
        for one in config["receivers"]
    ]
    if quicker:
        _hurry(config)
    return config


def _hurry(config: dict[str, Any]) -> None:
    """Shorten the intervals of the configuration, so that repeated notifications come soon."""
    for route in (config["route"], *config["route"]["routes"]):
        for key in ("group_wait", "group_interval"):
            if key in route:
                route[key] = "0s" if route[key] == "0s" else "1s"
    config["route"]["group_wait"] = config["route"]["group_interval"] = "1s"


def with_its_own_templates(inbox: WebhookReceiver, folder: Path) -> dict[str, Any]:
    """Return the example with its receivers and templates. Only their addresses and secrets are replaced."""
    config = {**copy.deepcopy(CONFIG), "templates": [str(TEMPLATES)]}
    _hurry(config)
    secrets = {"routing_key_file": "key", "api_url_file": f"{inbox.url}/slack"}
    for kind in ("pagerduty_configs", "slack_configs", "webhook_configs"):
        for entry in (entry for one in config["receivers"] for entry in one.get(kind, ())):
            for key, secret in secrets.items():
                if key in entry:
                    (folder / key).write_text(secret)
                    entry[key] = str(folder / key)
            if kind == "pagerduty_configs":
                entry["url"] = f"{inbox.url}/pagerduty"
            elif kind == "webhook_configs":
                entry.update(url=f"{inbox.url}/tickets", http_config={})
    return config


class Inbox(WebhookReceiver):
    """A fake PagerDuty and a fake Slack in one server. Each responds as the real service does."""

    def answer(self, path: str, body: bytes) -> tuple[int, str, bytes]:
        super().answer(path, body)
        return (202 if path == "/pagerduty" else 200), "text/plain", b"ok"


def alert(name: str, ended: bool = False, **labels: str) -> dict[str, Any]:
    now = datetime.datetime.now(datetime.timezone.utc)
    return {
        "labels": {"alertname": name, "severity": ALERTS[name], **labels},
        "annotations": {
            "summary": f"{name} {labels}",
            "description": f"what {name} means",
            "runbook_url": f"{RUNBOOKS}/{name}.md",
        },
        "startsAt": (now - datetime.timedelta(seconds=60 if ended else 0)).isoformat(),
        "endsAt": (now + datetime.timedelta(seconds=-1 if ended else 600)).isoformat(),
    }


@pytest.fixture
def receiver() -> Iterator[WebhookReceiver]:
    with WebhookReceiver() as one:
        yield one


@pytest.fixture
def alertmanager(receiver: WebhookReceiver, tmp_path: Path) -> Iterator[RealAlertmanager]:
    with RealAlertmanager(tmp_path, on_loopback(receiver)) as one:
        yield one


def test_a_job_pages_once_and_resolves_once(alertmanager: RealAlertmanager, receiver: WebhookReceiver) -> None:
    # Prometheus repeats its alerts, but each job has one page and one resolution. Jobs of two owners with the same
    # name are two jobs.
    jobs = [{"job_id": "J1", "job_key": "k1"}, {"job_id": "J1", "job_key": "other"}, {"job_id": "J2", "job_key": "k2"}]
    alertmanager.post([alert("HangwatchTrainingHung", **job) for job in jobs])
    wait_for(lambda: len(receiver.received("/on-call")) == 3, "a page for each job")
    first = [page["groupLabels"] for page in receiver.received("/on-call")]
    assert sorted(first, key=lambda labels: labels["job_key"]) == sorted(jobs, key=lambda labels: labels["job_key"])

    alertmanager.post([alert("HangwatchTrainingHung", **jobs[0])])  # Prometheus repeats it
    alertmanager.post([alert("HangwatchTrainingHung", ended=True, **jobs[0])])
    resolved = receiver.wait("/on-call", "resolved")
    assert resolved["groupLabels"] == jobs[0]
    pages = [page for page in receiver.received("/on-call") if page["status"] == "firing"]
    assert len(pages) == 3


def test_a_page_is_sent_without_waiting(receiver: WebhookReceiver, tmp_path: Path) -> None:
    """Use the intervals of the example, not the shortened ones."""
    with RealAlertmanager(tmp_path, on_loopback(receiver, quicker=False)) as alertmanager:
        alertmanager.post(
            [
                alert("HangwatchTrainingHung", job_id="J1"),
                alert("HangwatchNodeUnhealthy", instance="node-a", check="xid"),
            ]
        )
        receiver.wait("/on-call", deadline_seconds=14)  # doubled; the default group_wait is 30 s
        assert receiver.received("/chat") == []


def test_hung_job_keeps_warnings_of_its_nodes_back(alertmanager: RealAlertmanager, receiver: WebhookReceiver) -> None:
    # The page must be sent first: a node's warning waits for its group, two minutes in the example.
    alertmanager.post([alert("HangwatchTrainingHung", job_id="J1")])
    alertmanager.post([alert("HangwatchNodeHasHungJob", instance="node-a", job="hangwatch")])
    receiver.wait("/on-call")
    alertmanager.post(
        [
            alert("HangwatchNodeUnhealthy", instance="node-a", check="xid"),
            alert("HangwatchNodeUnhealthy", instance="node-b", check="xid"),
            alert("HangwatchDown", instance="node-a"),
        ]
    )
    wait_for(lambda: len(receiver.received("/chat")) >= 2, "the warnings that are sent")
    told = {
        (one["labels"]["alertname"], one["labels"]["instance"])
        for message in receiver.received("/chat")
        for one in message["alerts"]
    }
    assert told == {("HangwatchNodeUnhealthy", "node-b"), ("HangwatchDown", "node-a")}
    kept = [one["labels"] for one in alertmanager.alerts() if one["status"]["state"] == "suppressed"]
    assert [(labels["alertname"], labels["instance"]) for labels in kept] == [("HangwatchNodeUnhealthy", "node-a")]
    assert len(receiver.received("/on-call")) == 1

    # The job is healthy again: the warning that still fires is sent now.
    alertmanager.post([alert("HangwatchNodeHasHungJob", ended=True, instance="node-a", job="hangwatch")])
    wait_for(
        lambda: any(
            one["labels"].get("instance") == "node-a" and one["labels"]["alertname"] == "HangwatchNodeUnhealthy"
            for message in receiver.received("/chat")
            for one in message["alerts"]
        ),
        "the warning that was kept back",
    )


def test_one_message_per_trouble_of_many_nodes(alertmanager: RealAlertmanager, receiver: WebhookReceiver) -> None:
    sick = {("xid", "node-a"), ("xid", "node-b"), ("storage", "node-a")}
    alertmanager.post([alert("HangwatchNodeUnhealthy", instance=node, check=check) for check, node in sorted(sick)])
    wait_for(lambda: len(receiver.received("/chat")) >= 2, "a message for each check")
    messages = {
        message["groupLabels"]["check"]: {alert["labels"]["instance"] for alert in message["alerts"]}
        for message in receiver.received("/chat")
    }
    assert messages == {"xid": {"node-a", "node-b"}, "storage": {"node-a"}}


def test_pages_have_words_also_while_one_alert_of_a_job_takes_the_place_of_another(tmp_path: Path) -> None:
    """Render the texts that PagerDuty and Slack receive, with the templates of the example."""

    def list_pages() -> list[tuple[str, str, str]]:
        events = [(one["event_action"], one.get("payload", {})) for one in inbox.received("/pagerduty")]
        return [
            (action, payload.get("summary", ""), payload.get("custom_details", {}).get("runbook", ""))
            for action, payload in events
        ]

    def shown() -> list[tuple[str, str]]:
        return [(one["title"], one["title_link"]) for two in inbox.received("/slack") for one in two["attachments"]]

    with Inbox() as inbox, RealAlertmanager(tmp_path, with_its_own_templates(inbox, tmp_path)) as alertmanager:
        hung, stalled = (
            f"{name} {{'job_id': 'J1'}}" for name in ("HangwatchTrainingHung", "HangwatchTrainingStalledLong")
        )
        alertmanager.post([alert("HangwatchTrainingHung", job_id="J1")])
        wait_for(lambda: list_pages() and shown(), "the page")
        assert list_pages() == [("trigger", hung, f"{RUNBOOKS}/HangwatchTrainingHung.md")]
        assert shown() == [(hung, f"{RUNBOOKS}/HangwatchTrainingHung.md")]

        alertmanager.post(
            [
                alert("HangwatchTrainingHung", ended=True, job_id="J1"),
                alert("HangwatchTrainingStalledLong", job_id="J1"),
            ]
        )
        wait_for(lambda: len(list_pages()) > 1 and len(shown()) > 1, "the page that takes its place")
        assert list_pages()[1:] == [("trigger", stalled, f"{RUNBOOKS}/HangwatchTrainingStalledLong.md")]
        assert shown()[1:] == [(stalled, f"{RUNBOOKS}/HangwatchTrainingStalledLong.md")]

        alertmanager.post([alert("HangwatchTrainingStalledLong", ended=True, job_id="J1")])
        wait_for(lambda: len(list_pages()) > 2 and len(shown()) > 2, "the resolution")
        assert list_pages()[2][0] == "resolve"
        assert shown()[2:] == [(f"Resolved: {stalled}", f"{RUNBOOKS}/HangwatchTrainingStalledLong.md")]


def test_page_has_all_links_and_hostile_names_mention_nobody_in_slack(tmp_path: Path) -> None:
    # The name of a function contains a Slack mention. Slack must show it as text: any user chooses such names.
    hostile = "rank 3 is in <!channel> & `x` (train.py)"
    report, dashboard = "https://gpu-07:9836/incidents/I7", "https://grafana.example.com/d/x?var-job_key=k1"
    page = alert("HangwatchTrainingHung", job_id="J1", job_key="k1")
    page["annotations"] |= {"summary": hostile, "description": f"```\n{hostile}"}
    page["annotations"] |= {"incident_url": report, "dashboard_url": dashboard}
    with Inbox() as inbox, RealAlertmanager(tmp_path, with_its_own_templates(inbox, tmp_path)) as alertmanager:
        alertmanager.post([page])
        wait_for(lambda: inbox.received("/pagerduty") and inbox.received("/slack"), "the page")
        event, message = inbox.received("/pagerduty")[0], inbox.received("/slack")[0]
    (shown,) = message["attachments"]
    told = hostile.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    runbook = f"{RUNBOOKS}/HangwatchTrainingHung.md"
    found = re.search(r"<(http[^|>]*)\|Silence this job>", shown["text"])
    assert found and found[1].endswith("/#/silences/new?filter=%7Bjob_key%3D%22k1%22%7D")
    silence = found[1]
    assert (shown["title"], shown["title_link"]) == (told, report)
    links = f"<{report}|Report> · <{dashboard}|Dashboard> · <{runbook}|Runbook> · <{silence}|Silence this job>"
    assert shown["text"].strip() == f"```'''\n{told}```\n{links}"
    assert (event["payload"]["summary"], event["client_url"]) == (hostile, report)
    assert {one["text"]: one["href"] for one in event["links"]} == {"Runbook": runbook, "Silence this job": silence}
    assert event["payload"]["custom_details"]["dashboard"] == dashboard


def test_resolved_page_is_in_the_past_tense_and_has_no_link_that_nobody_can_open(tmp_path: Path) -> None:
    page, ended = (alert("HangwatchTrainingHung", ended, job_id="J1", job_key="k1") for ended in (False, True))
    page["startsAt"] = ended["startsAt"]
    page["annotations"] |= {
        "summary": "llama (uid 7) has hung for 12 min: rank 3 on a",
        "description": "Stuck on: open()\nDo first: look at shard-3\nEnds itself: 03:45\nSince: 03:15",
        "runbook_url": "docs/runbooks/HangwatchTrainingHung.md",
    }
    with Inbox() as inbox, RealAlertmanager(tmp_path, with_its_own_templates(inbox, tmp_path)) as alertmanager:
        alertmanager.post([page])
        wait_for(lambda: inbox.received("/slack"), "the page")
        alertmanager.post([page | {"endsAt": ended["endsAt"]}])
        wait_for(lambda: len(inbox.received("/slack")) == 2, "the resolution")
        fired, resolved = (message["attachments"][0] for message in inbox.received("/slack"))
    assert "title_link" not in fired or fired["title_link"] == ""
    assert "Runbook" not in fired["text"]
    assert fired["text"].startswith("```Stuck on: open()\nDo first: look at shard-3\n")
    assert resolved["title"] == "Resolved: llama (uid 7) hung for 12 min: rank 3 on a"
    assert resolved["text"].startswith("```Was stuck on: open()\nSince: 03:15```")


ENDS_ITSELF = "loader"  # when this job became quiet is known, and so when its collective timeout ends it
NOW, UNIX_NOW = 1000.0, samples.OPENED + 5.25


def incident(name: str) -> Incident:
    """Return the incident of a known hang, as a job of its own."""
    (case,) = (case for case in hangs.CASES if case["name"] == SIX_HANGS[name])
    found = dumped(case)
    return replace(found, job=replace(found.job, job_id=name, job_key=f"key-{name}"), node="node0")


def scrape() -> str:
    """Return the metrics of a node on which all six jobs are hung."""
    jobs, board = {}, Board()
    for name in SIX_HANGS:
        found = incident(name)
        if name == ENDS_ITSELF:
            quiet = TimelineEntry(unix_seconds=time.time() - 60, state=JobState.QUIET, message="quiet")
            found = replace(found, timeline=(quiet,))
        watch = job_watch.begin_watch(found.job, NOW - 900)
        watch = replace(watch, state=JobState.HUNG, since=NOW - 600, silence=Silence(since=NOW - 720))
        jobs[found.job.key] = JobEntry(job=found.job, watch=watch, page=True, incident=found)
    board.set(jobs=jobs)
    own = CollectorRegistry()
    own.register(
        metrics.BoardCollector(board, lambda: NOW, Detector(), lambda: UNIX_NOW, external_url="https://{node}:9836")
    )
    return generate_latest(own).decode()


def bodies(inbox: Inbox, name: str) -> dict[str, Any] | None:
    """Return the three bodies of the page of one job; None while one is missing."""
    slack = [one for two in inbox.received("/slack") for one in two["attachments"] if f"key-{name}" in json.dumps(one)]
    duty = [one for one in inbox.received("/pagerduty") if f"key-{name}" in json.dumps(one)]
    hooks = [one for one in inbox.received("/tickets") if one["groupLabels"]["job_key"] == f"key-{name}"]
    if not (slack and duty and hooks):
        return None
    payload = duty[0]["payload"]
    return {
        "webhook": hooks[0]["alerts"][0]["annotations"],
        "slack": {key: slack[0][key] for key in ("title", "title_link", "text")},
        "pagerduty": {"client_url": duty[0]["client_url"], "summary": payload["summary"], **payload["custom_details"]},
    }


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Return the bodies of the pages of all six jobs."""
    folder = tmp_path_factory.mktemp("pages")
    with (
        Inbox() as inbox,
        TextExporter(scrape()) as exporter,
        RealAlertmanager(folder / "am", with_its_own_templates(inbox, folder)) as alertmanager,
        RealPrometheus(
            folder / "prom",
            {"node0": exporter.address},
            rules=[RULES, SITE_RULES],
            alertmanager=alertmanager.address,
        ),
    ):
        return wait_for(
            lambda: found if all((found := {name: bodies(inbox, name) for name in SIX_HANGS}).values()) else None,
            "six pages",
        )  # type: ignore[return-value]


@pytest.mark.golden
@pytest.mark.parametrize("name", SIX_HANGS)
def test_golden_page(name: str, pages: dict[str, dict[str, Any]], golden: Callable[[str, str], None]) -> None:
    text = json.dumps(pages[name], indent=1, ensure_ascii=False).replace("\\n", "\n    ")
    text = re.sub(r"(Since|Ends itself): [\d: -]+ UTC", r"\1: 2026-03-14 03:15:00 UTC", text)
    golden(f"page-{name}.txt", re.sub(r"http://[\w.:-]+/#", "http://alertmanager/#", text) + "\n")


@pytest.mark.parametrize("name", SIX_HANGS)
def test_page_begins_with_what_the_job_is_stuck_on(name: str, pages: dict[str, dict[str, Any]]) -> None:
    page, verdict = pages[name], incident(name).verdict
    titles = (page["webhook"]["summary"], page["slack"]["title"], page["pagerduty"]["summary"])
    assert max(map(len, titles)) <= 120
    lines = page["webhook"]["description"].splitlines()
    step = verdict.next_step.replace("`hangwatch ", "`sudo hangwatch ")
    assert lines[:2] == [f"Stuck on: {verdict.stuck_on}", f"Do first: {step}"]
    assert lines[2].startswith("Ends itself: ") == (name == ENDS_ITSELF)
    assert page["slack"]["text"].startswith("```Stuck on: ")
    shown = {int(rank) for rank in re.findall(r"^  rank (\d+) on", page["webhook"]["description"], re.MULTILINE)}
    assert shown <= {rank.rank for rank in verdict.named}, "the page names a rank that the verdict does not name"
