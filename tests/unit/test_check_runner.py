"""The runner of checks: errors inside a check, discovery of checks, settings, exit codes, text and JSON output."""

import json
import logging
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hangwatch import config, metrics
from hangwatch.checks.framework import contract, registry, result_table, runner
from hangwatch.checks.framework.contract import Check, Metric, Metrics, Sample, Settings
from hangwatch.model import CheckResult, CheckStatus, CheckVerdict, Fault, Point, ProcessId, Rank
from hangwatch.probes.node.machine import Node
from tests import checks_page
from tests.node_tree import job


class Reading(Sample, frozen=True):
    number: int


READS = (
    Metrics[Reading, Reading](
        Metric("reads_total", "reads", lambda reading: reading.number), labels={"disk": lambda _: "sda"}
    ),
)


def check_of(observe: Any, **others: Any) -> Check[Any, Any]:
    def judge(window: Sequence[Reading], settings: Settings) -> CheckVerdict:
        return contract.ok("Read", f"read {[sample.number for sample in window]}")

    plain = Check(observe, READS, judge, absent="no disk here", name="disk")
    return replace(plain, **others)


def run(check: Check[Any, Any], node: Node | None = None) -> CheckResult:
    return runner.run(check, node or Node(), Settings(), runner.Window(check))


def test_a_value_becomes_a_verdict_and_points() -> None:
    result = run(check_of(lambda node, settings: Reading(number=7)))
    assert result.success
    assert result.verdict.message == "read [7]"
    (point,) = result.points
    assert (point.name, point.value, point.labels) == ("reads_total", 7.0, (("disk", "sda"),))


def test_none_is_not_present_and_exports_nothing() -> None:
    result = run(check_of(lambda node, settings: None))
    assert (result.verdict.status, result.verdict.reason) == (CheckStatus.OK, "NotPresent")
    assert result.verdict.message == "no disk here"
    assert result.success and not result.points and not result.faults


def test_a_fault_is_unknown_and_counted() -> None:
    fault = Fault(subject="sda", reason="NoAnswer", detail="it does not answer", remedy="reseat it")
    result = run(check_of(lambda node, settings: fault))
    assert result.verdict == contract.unknown("NoAnswer", "sda: it does not answer", "reseat it")
    assert result.faults == (fault,)
    assert result.success, "the check did its work; the disk did not"


def test_a_part_that_did_not_answer_is_never_shown_as_well() -> None:
    fault = Fault(subject="sdb", reason="NoAnswer", detail="silent")
    result = run(check_of(lambda node, settings: Reading(number=1, faults=(fault,))))
    assert result.verdict.status is CheckStatus.UNKNOWN
    assert result.points, "what did answer is still exported"


def test_many_faults_are_one_sentence() -> None:
    faults = tuple(Fault(subject=f"sd{letter}", reason="NoAnswer", detail="silent") for letter in "abc")
    result = run(check_of(lambda node, settings: Reading(number=1, faults=faults)))
    assert result.verdict.message == "sda: silent, and 2 more did not respond"


def test_a_rank_is_named_by_its_local_rank_where_it_has_one() -> None:
    def named(rank_number: int | None, local_rank: int | None) -> tuple[str, ...]:
        found = Rank(id=ProcessId(pid=10, start_ticks=1), rank=rank_number, local_rank=local_rank)
        subject = SimpleNamespace(rank=contract.RankName.of_rank(job(job_key="k"), found))
        return tuple(read(subject) for read in contract.RANK.values())

    assert named(11, 3) == ("77", "k", "11", "3")
    assert named(11, None) == ("77", "k", "11", "11")
    assert named(None, 0) == ("77", "k", "", "0")
    assert named(None, None) == ("77", "k", "", "unknown")


def test_what_a_check_raises_costs_that_check_only(caplog: pytest.LogCaptureFixture) -> None:
    def observe(node: Node, settings: Settings) -> Reading:
        raise ZeroDivisionError("secret path /home/ada")

    with caplog.at_level(logging.ERROR):
        result = run(check_of(observe))
    assert not result.success
    assert (result.verdict.status, result.verdict.reason) == (CheckStatus.UNKNOWN, "CheckFailed")
    assert "secret" not in result.verdict.message + result.verdict.remedy, "a traceback is for the log"
    assert "ZeroDivisionError" in caplog.text


def test_the_window_grows_to_its_length_newest_last() -> None:
    numbers = iter(range(10))
    check = check_of(lambda node, settings: Reading(number=next(numbers)), window=3)
    window = runner.Window(check)
    results = [runner.run(check, Node(), Settings(), window) for _ in range(4)]
    assert [result.verdict.message for result in results] == [
        f"read {read}" for read in ([0], [0, 1], [0, 1, 2], [1, 2, 3])
    ]


def test_stalled_is_unknown_and_says_since_when() -> None:
    result = runner.stalled_result(check_of(lambda node, settings: None), 100.0, 145.0)
    assert (result.verdict.status, result.verdict.reason) == (CheckStatus.UNKNOWN, "Stalled")
    assert not result.success
    assert "has not returned for 45 s" in result.verdict.message
    assert result.ran_unix_seconds == 100.0


def test_one_blocked_check_holds_up_neither_the_others_nor_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()

    def block(node: Node, settings: Settings) -> None:
        released.wait(60)

    together = {
        "blocked": check_of(block, name="blocked"),
        "quick": check_of(lambda node, settings: Reading(number=1), name="quick"),
    }
    monkeypatch.setattr(registry, "checks", lambda: together)
    started = time.monotonic()
    results = runner.run_all(Node(), {}, deadline_seconds=3.0)
    took = time.monotonic() - started
    released.set()
    assert [(result.check, result.verdict.reason) for result in results] == [("blocked", "Stalled"), ("quick", "Read")]
    assert 2.9 < took < 30.0


def test_run_all_of_names_runs_these_only() -> None:
    results = runner.run_all(Node(), {}, ["memory_pressure", "xid"])
    assert [result.check for result in results] == ["memory_pressure", "xid"]


def test_a_check_that_is_switched_off_runs_only_by_its_name() -> None:
    settings = registry.settings_for(config.parse("[checks.xid]\nenabled = false\n", "h.toml"), "h.toml")
    everything = [result.check for result in runner.run_all(Node(), settings)]
    assert "xid" not in everything and "ranks" in everything
    assert [result.check for result in runner.run_all(Node(), settings, ["xid"])] == ["xid"]


def test_an_unknown_name_says_what_was_meant() -> None:
    with pytest.raises(registry.UnknownCheckError, match="did you mean 'clock_skew'"):
        registry.select(["clock_scew"])


# --- contract ------------------------------------------------------------------------------------------------------


RESERVED = ("hangwatch_", "job_", "check_", "incident_", "captures_", "dump_failures", "rank_activity", "build_")
NOT_BASE_UNITS = re.compile(
    r"(?<!_per)_(ms|us|ns|millis|micros|minutes|hours|percent|kb|mb|gb|kib|mib|gib|bits|mhz|ghz|mw|kw|milliwatts|second|byte|watt)"
    r"(_total)?$"
)


def test_every_check_of_this_tree_keeps_the_contract() -> None:
    found = registry.checks()
    assert len(found) >= 14
    for check in found.values():
        assert issubclass(check.settings, Settings) and check.settings().enabled is True
        assert 5 <= check.every_seconds <= 300 and check.window >= 1


METRICS = [entry for check in registry.checks().values() for entry in checks_page.list_metrics(check)]


@pytest.mark.parametrize(("metric", "labels"), METRICS, ids=[metric.name for metric, _ in METRICS])
def test_metric_of_a_check_keeps_the_rules_of_names_and_labels(metric: Metric[Any], labels: Sequence[str]) -> None:
    assert re.fullmatch(r"[a-z][a-z0-9_]*", metric.name)
    assert not metric.name.startswith((*RESERVED, "rank_collective_")) and metric.name not in metrics.declare()
    assert not NOT_BASE_UNITS.search(metric.name), "must end in seconds, bytes, watts, hertz, celsius or ratio"
    assert contract.JOB.keys().isdisjoint(labels) or contract.JOB.keys() <= set(labels), (
        "about jobs: the labels of contract.JOB"
    )


@pytest.mark.parametrize("name", ["delay_ms", "power_milliwatts", "wait_minutes_total"])
def test_unit_that_is_no_base_unit_is_found(name: str) -> None:
    assert NOT_BASE_UNITS.search(name)


def test_a_metric_belongs_to_one_check() -> None:
    names = [metric.name for metric, _ in METRICS]
    assert len(names) == len(set(names))


def test_a_point_has_the_labels_of_its_metric() -> None:
    reads = Metrics[Reading, Reading](Metric("reads", "reads", lambda _: {("sda", "1"): 1}, by=("disk",)))
    with pytest.raises(ValueError, match=r"shorter than|longer than"):
        list(reads.points(Reading(number=1)))


def test_checks_never_import_one_another() -> None:
    folder = Path(registry.__file__).parents[1]
    names = set(registry.checks())
    for name in names:
        text = (folder / f"{name}.py").read_text()
        for other in names - {name}:
            assert f"hangwatch.checks.{other}" not in text and f"checks import {other}" not in text


# --- findings ------------------------------------------------------------------------------------------------------

VERDICTS = st.builds(
    CheckVerdict,
    status=st.sampled_from(list(CheckStatus)),
    reason=st.sampled_from(["A", "B"]),
    message=st.text(min_size=1, max_size=5),
    remedy=st.text(max_size=3),
)


@given(st.lists(VERDICTS, max_size=8))
def test_worst_never_hides_the_most_severe(findings: list[CheckVerdict]) -> None:
    healthy = contract.ok("Well", "all is well")
    verdict = contract.worst(findings, healthy)
    assert verdict.status == max((finding.status for finding in findings), default=CheckStatus.OK)
    if findings:
        first = max(findings, key=lambda finding: finding.status)
        assert first.message in verdict.message
    else:
        assert verdict is healthy


def test_worst_counts_what_it_does_not_show() -> None:
    findings = [contract.warning("Bad", f"number {number}", "do it") for number in range(5)]
    verdict = contract.worst(findings, contract.ok("Well", ""))
    assert verdict.message == "number 0; number 1; number 2; and 2 more"
    assert verdict.remedy == "do it"


@given(st.lists(st.integers(min_value=0, max_value=1 << 40), min_size=1, max_size=20))
def test_growth_is_never_negative_and_adds_up_without_resets(counts: list[int]) -> None:
    readings = [{"errors": count} for count in counts]
    grown = contract.counter_growth(readings)["errors"]
    assert grown >= 0
    if counts == sorted(counts):
        assert grown == counts[-1] - counts[0]


def test_growth_counts_on_after_a_wrap() -> None:
    assert contract.counter_growth([{"errors": 250}, {"errors": 255}, {"errors": 3}]) == {"errors": 8}


# --- settings ------------------------------------------------------------------------------------------------------


def test_settings_are_decoded_by_check() -> None:
    settings = config.parse("[checks.clock_skew]\nwarning_seconds = 0.2\n", "h.toml")
    decoded = registry.settings_for(settings, "h.toml")
    assert decoded["clock_skew"].warning_seconds == 0.2  # type: ignore[attr-defined]
    assert set(decoded) == set(registry.checks())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[checks.clock_scew]\n", ["h.toml", "[checks.clock_scew]", "did you mean 'clock_skew'"]),
        (
            "[checks.clock_skew]\nwarning_second = 1\n",
            ["h.toml", "[checks.clock_skew]", "did you mean 'warning_seconds'"],
        ),
        (
            "[checks.clock_skew]\nwarning_seconds = 'a'\n",
            ["h.toml", "[checks.clock_skew]", "warning_seconds", "number"],
        ),
        ("[checks.clock_skew]\nwarning_seconds = -1\n", ["h.toml", "warning_seconds", "above 0"]),
        ("[checks.clock_skew]\nenabled = 1\n", ["h.toml", "enabled", "true or false"]),
    ],
)
def test_a_wrong_section_names_file_section_and_key(text: str, words: list[str]) -> None:
    with pytest.raises(config.ConfigError) as raised:
        registry.settings_for(config.parse(text, "h.toml"), "h.toml")
    for word in words:
        assert word in str(raised.value)


def test_the_sample_configuration_holds_every_check_and_can_be_read_back() -> None:
    text = config.sample({name: check.settings for name, check in registry.checks().items()})
    read = registry.settings_for(config.parse(text, "sample"), "sample")
    assert read == {name: check.settings() for name, check in registry.checks().items()}


# --- forms ---------------------------------------------------------------------------------------------------------


def result_of(name: str, status: CheckStatus, **others: Any) -> CheckResult:
    verdict = CheckVerdict(status=status, reason="Because", message=f"{name} said so", remedy="do that")
    return CheckResult(
        check=name, verdict=verdict, success=True, duration_seconds=0.25, ran_unix_seconds=1.7e9, **others
    )


@pytest.mark.parametrize(
    ("statuses", "fail_on", "code"),
    [
        ([], None, 0),
        (["OK", "OK"], None, 0),
        (["OK", "UNKNOWN"], None, 3),
        (["UNKNOWN", "WARNING"], None, 1),
        (["WARNING", "CRITICAL", "UNKNOWN"], None, 2),
        (["UNKNOWN"], "warning", 0),
        (["WARNING"], "warning", 1),
        (["CRITICAL"], "warning", 2),
        (["WARNING", "UNKNOWN"], "critical", 0),
        (["CRITICAL"], "critical", 2),
    ],
)
def test_exit_codes(statuses: list[str], fail_on: Any, code: int) -> None:
    results = [result_of(name, CheckStatus[name]) for name in statuses]
    assert result_table.exit_code(results, fail_on) == code


def test_the_table_shows_the_worst_first_and_faults_when_asked() -> None:
    fault = Fault(subject="sdb", reason="NoAnswer", detail="silent", remedy="reseat")
    results = [result_of("a", CheckStatus.OK), result_of("b", CheckStatus.CRITICAL, faults=(fault,))]
    header, *rows = result_table.report_table(results)
    assert header[:3] == ("check", "status", "reason")
    assert [row[:2] for row in rows] == [("b", "CRITICAL"), ("a", "OK")]
    assert rows[0][4] == "do that"
    verbose = result_table.report_table(results, verbose=True)
    assert verbose[2] == ("", "", "NoAnswer", "sdb: silent", "reseat")
    assert "0.25 s" in verbose[1][3]


def verdict_of(status: CheckStatus, reason: str, message: str) -> CheckVerdict:
    return CheckVerdict(status=status, reason=reason, message=message, remedy="" if status is CheckStatus.OK else "go")


def test_checks_with_nothing_to_look_at_are_one_row_and_what_many_say_is_said_once() -> None:
    no_gpu = verdict_of(CheckStatus.OK, "NotPresent", "this node has no NVIDIA GPU")
    no_job = verdict_of(CheckStatus.OK, "NotPresent", "no training job runs on this node")
    wedged = verdict_of(CheckStatus.UNKNOWN, "NoAnswer", "driver: silent")
    verdicts = {"a": no_job, "b": no_gpu, "c": wedged, "d": wedged, "e": no_gpu}
    results = [
        msgspec.structs.replace(result_of(name, CheckStatus.OK), verdict=verdict) for name, verdict in verdicts.items()
    ]
    assert result_table.report_table(results)[1:] == [
        ("c", "UNKNOWN", "NoAnswer", "driver: silent", "go"),
        ("d", "UNKNOWN", "NoAnswer", "as c", ""),
        (
            "3 others",
            "OK",
            "NotPresent",
            "do not apply: this node has no NVIDIA GPU (b, e); no training job runs on this node (a)",
            "",
        ),
    ]
    assert [row[0] for row in result_table.report_table(results, verbose=True)[1:]] == ["c", "d", "a", "b", "e"]
    assert result_table.report_table(results[:1])[1:] == [("a", "OK", "NotPresent", no_job.message, "")]


def test_verbose_table_has_rows_of_the_check_else_its_metrics() -> None:
    power = Point("gpu_power_ratio", 0.25, "help", (("gpu", "0"), ("uuid", "GPU-0")))
    results = [
        result_of("a", CheckStatus.OK, table=(("head",), ("row",))),
        result_of("b", CheckStatus.OK, table=(("head",),)),
        result_of("c", CheckStatus.OK, points=(power,)),
        result_of("d", CheckStatus.OK),
    ]
    assert result_table.verbose_tables(results) == [
        ("a", (("head",), ("row",))),
        ("c", (("metric", "of", "value"), ("gpu_power_ratio", "gpu=0 uuid=GPU-0", "0.25"))),
    ]


SCHEMA = Path(__file__).parents[2] / "docs" / "check.schema.json"


@pytest.mark.golden
def test_the_page_of_checks_in_docs_is_current(golden: Callable[[str, str], None]) -> None:
    golden("../../../docs/checks.md", checks_page.page(registry.checks()))


def test_the_page_of_checks_names_every_check_setting_and_metric() -> None:
    page = checks_page.page(registry.checks())
    for name, check in registry.checks().items():
        assert f"## {name}\n" in page
        assert all(f"`hangwatch_{metric.name}" in page for metric, _ in checks_page.list_metrics(check))
        assert all(f"| `{field.name}` |" in page for field in msgspec.structs.fields(check.settings))
    assert "WARNING, CRITICAL: `MasterSilent`" in " ".join(page.split())


def test_json_meets_the_schema_in_docs() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    results = runner.run_all(Node(), {})
    report = json.loads(result_table.to_json(results, "node1", "critical"))
    jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text())).validate(report)
    assert {entry["check"] for entry in report["checks"]} == set(registry.checks())
    assert report["exit_code"] == result_table.exit_code(results, "critical")
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**report, "status": "FINE"}, json.loads(SCHEMA.read_text()))


def test_json_is_not_broken_by_infinity() -> None:
    point = Point(name="fd_process_hard_limit", value=float("inf"), help="")
    text = result_table.to_json([result_of("a", CheckStatus.OK, points=(point,))], "node1")
    assert msgspec.json.decode(text)["checks"][0]["points"][0]["value"] is None
