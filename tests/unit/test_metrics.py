"""A scrape as text. Names and labels follow the conventions of Prometheus."""

import re
import shutil
from collections.abc import Callable, Iterable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from hangwatch import metrics
from hangwatch.config import Detector
from hangwatch.detector import job_watch
from hangwatch.detector.power_level import GpuPower
from hangwatch.detector.watch_parts import Silence
from hangwatch.metrics import collector
from hangwatch.metrics.view import LABEL_LENGTH, sentence_label
from hangwatch.model import (
    CheckResult,
    CheckStatus,
    CheckVerdict,
    Fault,
    Frame,
    GpuSample,
    GpuSweep,
    Incident,
    JobState,
    KernelCall,
    KernelFacts,
    Point,
    SamplerStatus,
    Signature,
    WorkerCall,
)
from hangwatch.state.board import Board, JobEntry, Snapshot
from hangwatch.state.status import build_status
from hangwatch.verdict.wording import stuck_on
from tests import hangs, samples
from tests.commands import finished

NOW = 1000.0
UNIX_NOW = samples.OPENED + 5.25


def board(**changes: object) -> Board:
    one = Board()
    incident = samples.loader_hang()
    gpus = tuple(
        GpuSample(
            index=i,
            uuid=uuid,
            name="NVIDIA H100 80GB HBM3",
            power_watts=115.0 + i,
            power_limit_watts=700.0,
            utilization_ratio=0.0 if i == 5 else 1.0,
            energy_joules=123456.5,
        )
        for i, uuid in enumerate(incident.job.gpu_uuids)
    )
    lost = Fault(subject="gpu 8", reason="GpuIsLost", detail="GPU is lost")
    watch = job_watch.begin_watch(incident.job, NOW - 900)
    power = GpuPower(recent=(115.0,), limit_watts=700.0, busy_watts=600.0)
    watch = job_watch.with_power(watch, gpus={incident.job.gpu_uuids[0]: power})
    watch = replace(watch, state=JobState.HUNG, since=NOW - 5, silence=Silence(since=NOW - 140))
    entry = JobEntry(job=incident.job, watch=watch, page=True, incident=incident)
    check = CheckResult(
        check="clock_skew",
        verdict=CheckVerdict(status=CheckStatus.OK, reason="Synchronised", message="the clock is right"),
        success=True,
        duration_seconds=0.01,
        ran_unix_seconds=1e9,
        points=(Point(name="clock_skew_offset_seconds", value=1e-6, help="Offset", labels=(("source", "kernel"),)),),
    )
    snapshot = Snapshot(
        sweep=GpuSweep(taken_monotonic_seconds=NOW - 1, taken_unix_seconds=1e9, gpus=gpus, faults=(lost,)),
        sampler=SamplerStatus(alive=True, restarts=1),
        jobs={incident.job.job_id: entry},
        checks={"clock_skew": check},
    )
    for name, key in (("captures", "frozen"), ("dump_failures", "PermissionDenied"), ("hook_runs", ("hung", "ok"))):
        snapshot = snapshot.count(name, key)
    one.set(**{name: getattr(snapshot, name) for name in snapshot.__struct_fields__} | changes)
    return one


def board_with(incident: Incident) -> Board:
    (entry,) = board().snapshot.jobs.values()
    return board(jobs={entry.job.job_id: replace(entry, incident=incident)})


def rank_rows(board: Board) -> list[str]:
    return [line for line in scrape(board).splitlines() if line.startswith("hangwatch_rank_activity{")]


def scrape(board: Board) -> str:
    own = CollectorRegistry()
    own.register(metrics.BoardCollector(board, lambda: NOW, Detector(), lambda: UNIX_NOW))
    return collector.render(own).decode()


def test_closed_incident_is_no_longer_exported() -> None:
    names = [
        f"hangwatch_incident_{name}{{" for name in ("info", "opened_timestamp_seconds", "timeout_timestamp_seconds")
    ]
    names.append("hangwatch_rank_activity{")
    assert [name in scrape(board()) for name in names] == [True] * 4
    after = scrape(board_with(replace(samples.loader_hang(), closed_unix_seconds=samples.OPENED + 60)))
    assert [name in after for name in names] == [False] * 4
    assert "hangwatch_job_state{" in after, "the job itself is still there"


@given(st.lists(st.integers(min_value=0, max_value=4194304), min_size=1, max_size=60))
def test_a_sentence_that_is_too_long_holds_no_other_number(pids: list[int]) -> None:
    """Do not cut inside a number: `pid 372` cut to `pid 37` names another process on the page."""
    told = sentence_label("rank 5, pid " + " and pid ".join(map(str, pids)) + " are blocked in read")
    assert len(told) <= LABEL_LENGTH
    assert set(re.findall(r"pid (\d+)", told)) <= set(map(str, pids))
    assert told.endswith(("…", "are blocked in read"))


def test_an_incident_says_where_its_report_is_served() -> None:
    """Add the URL of the report if the external URL of the daemon is configured."""
    assert 'url=""' in scrape(board())
    own = CollectorRegistry()
    own.register(
        metrics.BoardCollector(board(), lambda: NOW, Detector(), external_url="https://{node}.example.com:9836/")
    )
    found = re.search(r'hangwatch_incident_info\{.*url="([^"]*)"', generate_latest(own).decode())
    incident = samples.loader_hang()
    assert found and found[1] == f"https://{incident.node}.example.com:9836/incidents/{incident.incident_id}"


def test_whole_paths_are_in_the_incident_but_not_in_labels_and_status() -> None:
    """Keep the names of folders from users without rights on the job: they may be names of customers."""
    incident = samples.loader_hang()
    path = "/mnt/acme corp/b 7/data/shard-3"
    call = KernelCall(name="openat", says="openat() on", rounds=2, path=path)
    stuck, *others = incident.grouping.groups
    member = replace(stuck.members[0], kernel=KernelFacts(worker_call=WorkerCall(pid=9, call=call)))
    grouping = replace(incident.grouping, groups=(replace(stuck, members=(member, *stuck.members[1:])), *others))
    text = f'open("{path}") in rank 5'
    verdict = replace(incident.verdict, message=text, stuck_on=text, next_step=stuck_on.look_at(member))
    assert f"`hangwatch check storage --path '{path}'`" in verdict.next_step
    one = board_with(replace(incident, verdict=verdict, grouping=grouping))
    shown = f"{scrape(one)} {build_status(one.snapshot, 'n1', NOW).jobs[0].verdict}"
    assert "acme" not in shown and shown.count('open(\\"…/data/shard-3\\")') == 2
    assert shown.endswith('open("…/data/shard-3") in rank 5')
    assert "`hangwatch check storage --path FILE` with the path in the report" in shown


def test_what_a_rank_does_is_told_with_the_line_of_the_users_code() -> None:
    incident = samples.loader_hang()
    stuck = next(group for group in incident.grouping.groups if group.workers)
    worker = replace(stuck.workers[0], pid=52001, user_frame=Frame(function="read_shard", file="train.py", line=18))
    stopped = tuple(samples.change_parts(member, state="T") for member in stuck.members)
    at_worker = 'does="waits for its loader worker (pid 52001, in read_shard (train.py:18))"'
    is_stopped = 'does="is stopped (state T) by a debugger, a tracer or SIGSTOP'
    for changes, does in (({"workers": (worker,)}, at_worker), ({"members": stopped}, is_stopped)):
        groups = tuple(replace(group, **changes) if group is stuck else group for group in incident.grouping.groups)
        changed = board_with(replace(incident, grouping=replace(incident.grouping, groups=groups)))
        (row,) = (line for line in rank_rows(changed) if 'rank="7"' in line)
        assert does in row


@pytest.mark.parametrize("value", [0.0, -1.5, 1e21, float("inf"), float("nan")])
@pytest.mark.parametrize("label", ["plain", 'a "quoted" \\ path', "two\nlines", "\N{SNOWMAN}"])
def test_text_of_a_scrape_equals_that_of_the_client_library(value: float, label: str) -> None:
    families = [CounterMetricFamily("c", label, labels=["b", "a"]), GaugeMetricFamily("g", "text", labels=["b", "a"])]
    for family in families:
        family.add_metric([label, "x"], value)
        family.add_metric(["x", label], 1)
    histogram = HistogramMetricFamily("h", "text", buckets=[("1", 1.0), ("+Inf", value)], sum_value=value)
    gauge = GaugeMetricFamily("without_labels", "text", value=value)

    class Families(Collector):
        def collect(self) -> Iterable[Metric]:
            return [*families, histogram, gauge]

    registry = CollectorRegistry()
    registry.register(Families())
    assert collector.render(registry) == generate_latest(registry)


@pytest.mark.golden
def test_a_scrape(golden: Callable[[str, str], None]) -> None:
    text = re.sub(r'python="[^"]*",version="[^"]*"', 'python="3",version="0"', scrape(board()))
    golden("metrics.txt", text)


def test_the_text_is_valid_and_named_by_the_rules() -> None:
    families = list(text_string_to_metric_families(scrape(board())))
    assert len(families) > 30
    for family in families:
        assert family.name.startswith("hangwatch_"), family.name
        assert family.documentation, family.name
        for sample in family.samples:
            assert not {"host", "hostname", "node", "pid", "instance"} & set(sample.labels), sample
            assert all(len(value) <= LABEL_LENGTH + 10 for value in sample.labels.values()), sample


def test_promtool_has_nothing_to_say() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (apt-get install prometheus)")
    said = finished(promtool, "check", "metrics", input=scrape(board()))
    assert (said.returncode, said.stderr) == (0, "")


def test_only_the_current_state_of_a_job_is_a_series() -> None:
    lines = [line for line in scrape(board()).splitlines() if line.startswith("hangwatch_job_state{")]
    job = samples.loader_hang().job
    assert lines == [f'hangwatch_job_state{{job_id="{job.job_id}",job_key="{job.key}",state="hung"}} 1.0']


def test_ranks_are_shown_only_while_an_incident_is_open() -> None:
    assert rank_rows(board())
    assert not rank_rows(board(jobs={}))


def test_an_empty_board_is_a_valid_scrape() -> None:
    text = scrape(Board())
    assert "hangwatch_gpu_sampler_up 0.0" in text
    assert "hangwatch_gpu_power_watts{" not in text


def test_hostile_texts_stay_within_their_label() -> None:
    evil = 'a"b\\c\nhangwatch_fake 1\n' + "x" * 5000
    point = Point(name="evil_ratio", value=1.0, help="h", labels=(("who", evil),))
    verdict = CheckVerdict(status=CheckStatus.WARNING, reason="R", message=evil)
    result = replace(board().snapshot.checks["clock_skew"], check="evil", verdict=verdict, points=(point,))
    text = scrape(board(checks={"evil": result}))
    assert "\nhangwatch_fake 1" not in text
    assert max(map(len, text.splitlines())) < 2000
    assert list(text_string_to_metric_families(text))


@given(
    texts=st.lists(
        st.text(st.characters() | st.sampled_from('\x1b\x07\x00\n\u202e\udc80\\"'), max_size=20), min_size=3, max_size=3
    )
)
@example(texts=["\x1b]0;evil\x07", "\udc80", "\u202e"])
@example(texts=["\x1b", "\\x1b", ""])
def test_no_label_holds_what_a_terminal_acts_on(texts: list[str]) -> None:
    hang = samples.loader_hang()
    verdict = replace(hang.verdict, message=texts[1])
    entry, jobs = board().snapshot.jobs[hang.job.job_id], {}
    for place, job_id in enumerate(texts):
        job = replace(hang.job, job_id=job_id, user=texts[2])
        jobs[str(place)] = replace(entry, job=job, incident=replace(hang, job=job, verdict=verdict))
    text = scrape(board(jobs=jobs))
    assert all(line.isprintable() for line in text.split("\n"))
    assert list(text_string_to_metric_families(text))


def test_series_that_look_the_same_are_one() -> None:
    points = tuple(
        Point(name="mount_up", value=1.0, help="h", labels=(("mount", mount),)) for mount in ("/a\x1b", "/a\\x1b", "/b")
    )
    check = replace(board().snapshot.checks["clock_skew"], points=points)
    lines = [
        line for line in scrape(board(checks={"evil": check})).splitlines() if line.startswith("hangwatch_mount_up{")
    ]
    assert lines == ['hangwatch_mount_up{mount="/a\\\\x1b"} 1.0', 'hangwatch_mount_up{mount="/b"} 1.0']


def test_an_error_inside_costs_the_rest_of_one_scrape_and_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    text = scrape(board(checks={"broken": None}))
    assert "hangwatch_gpu_power_watts{" in text
    assert "hangwatch_export_errors_total 1.0" in text
    assert "please report" in caplog.text


def test_the_dump_histogram_is_cumulative() -> None:
    one = board()
    for seconds in (0.015, 0.015, 3.0, 99.0):
        one.set(dumps=one.snapshot.dumps.add(seconds))
    text = scrape(one)
    assert 'hangwatch_dump_seconds_bucket{le="0.02"} 2.0' in text
    assert 'hangwatch_dump_seconds_bucket{le="5.0"} 3.0' in text
    assert 'hangwatch_dump_seconds_bucket{le="+Inf"} 4.0' in text
    assert "hangwatch_dump_seconds_count 4.0" in text


def test_ranks_without_a_stack_are_gone_or_undumpable() -> None:
    rows = rank_rows(board_with(samples.blocked_in_kernel()))
    assert sum('activity="undumpable"' in row for row in rows) == 1


def test_rank_that_ended_after_the_named_rank_is_no_suspect_of_the_rules() -> None:
    """Export the rank that died first as waiting for nothing, and not the one that followed it."""
    (case,) = (one for one in hangs.CASES if one["name"] == "one rank died of an exception, another one followed it")
    grouping, verdict = hangs.judged(case)
    assert [rank.rank for rank in verdict.named] == [3]
    for named, suspects in ((verdict.named, {"3"}), ((), {"3", "5"})):
        incident = replace(samples.loader_hang(), grouping=grouping, verdict=replace(verdict, named=named))
        rows = [row for row in rank_rows(board_with(incident)) if '"gone"' in row]
        assert len(rows) == 2
        found = {re.findall(r'[{,]rank="(\d+)"', row)[0] for row in rows if 'waits_for="nothing"' in row}
        assert found == suspects


def test_stopped_rank_is_exported_as_waiting_for_nothing() -> None:
    # By its stack a stopped rank waits, and the fleet rule would count it as waiting. So export that it waits for
    # nothing.
    hang = samples.loader_hang()
    stopped = hang.grouping.change_members(lambda _, member: replace(member, signature=Signature.STOPPED))
    rows = rank_rows(board_with(replace(hang, grouping=stopped)))
    assert rows
    assert all('activity="stopped"' in row and 'waits_for="nothing"' in row for row in rows)


@pytest.mark.parametrize(("is_named", "waits_for"), [(True, "nothing"), (False, "unknown")])
def test_named_rank_in_unknown_code_is_exported_as_waiting_for_nothing(*, is_named: bool, waits_for: str) -> None:
    grouping = samples.loader_hang().grouping
    unknown = replace(grouping.groups[-1], activity="unknown", waits_for="unknown", fault=None, gone=False)
    ids = tuple(member.id for member in unknown.members)
    grouping = replace(grouping, groups=(*grouping.groups[:-1], unknown))
    incident = samples.change_parts(samples.loader_hang(), grouping=grouping, named=ids if is_named else ())
    rows = [row for row in rank_rows(board_with(incident)) if 'y="unknown"' in row]
    assert rows and all(f'waits_for="{waits_for}"' in row for row in rows)


def test_ranks_of_a_job_that_is_over_here_are_what_those_of_other_nodes_may_wait_for() -> None:
    rows = rank_rows(board_with(replace(samples.loader_hang(), state=JobState.OVER)))
    assert rows
    assert all('activity="over"' in row and 'waits_for="nothing"' in row for row in rows)


def test_two_jobs_that_share_a_gpu_give_no_series_twice() -> None:
    (entry,) = board().snapshot.jobs.values()
    text = scrape(board(jobs={"a": entry, "b": entry}))
    assert text.count("hangwatch_gpu_busy_power_watts{") == 1
    assert text.count("hangwatch_gpu_low_power_threshold_watts{") == 1


def test_task_that_outlasts_its_interval_is_counted() -> None:
    late = Snapshot().count("late_tasks", "discover").count("late_tasks", "discover")
    assert 'hangwatch_late_tasks_total{task="discover"} 2.0' in scrape(board(late_tasks=late.late_tasks))
