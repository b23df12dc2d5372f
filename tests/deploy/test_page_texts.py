"""The page of six verdicts, as webhook, Slack and PagerDuty get it: real Prometheus, Alertmanager and their templates."""

import json
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
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
from tests.deploy.promql import RULES, SITE_RULES
from tests.deploy.test_alertmanager import Inbox, with_its_own_templates
from tests.servers import RealAlertmanager, RealPrometheus, TextExporter
from tests.unit.test_report_text import SIX_HANGS, dumped

ENDS_ITSELF = "loader"  # when this job became quiet is known, and so when its collective timeout ends it
NOW, UNIX_NOW = 1000.0, samples.OPENED + 5.25
pytestmark = pytest.mark.timeout(300)


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
