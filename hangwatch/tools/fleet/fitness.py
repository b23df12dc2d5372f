"""Findings on many nodes: results of checks from each node's report, and differences between the nodes. Pure."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

import msgspec
from msgspec.structs import replace

from hangwatch import words
from hangwatch.checks.clock_skew import STEP_TIME
from hangwatch.checks.clock_skew import Settings as ClockSettings
from hangwatch.checks.framework.node_facts import Facts
from hangwatch.checks.framework.result_table import EXIT_CODES, CheckSummary, Status
from hangwatch.model import Value, list_by_key
from hangwatch.tools.fleet.cross_node import ClockOffset
from hangwatch.tools.fleet.node_replies import AnswerError, ReplyCollector, parse_answer

CLOCKS = ClockSettings()
MOST_CHECKS = 1000
MOST_FACTS = 1000
MOST_VALUES = 8
_MOST_CHARACTERS = 600
_NAME_CHARACTERS = 100
_NODES_CHARACTERS = 200
_SEVERITY = {status.name: int(status) for status in EXIT_CODES}
_LONG_TEXTS = dict.fromkeys(("message", "detail", "remedy"), _MOST_CHARACTERS)

T = TypeVar("T")


class NodeReport(msgspec.Struct, frozen=True):
    """The fields of `hangwatch check --json` that are read. The decoder limits their sizes."""

    schema_version: int
    checks: tuple[CheckSummary, ...]
    began_unix_seconds: float
    printed_unix_seconds: float
    facts: Facts


class Finding(CheckSummary, frozen=True):
    """A result of a check or comparison (`check` is its name) on one or more nodes."""

    nodes: tuple[str, ...]


class FactValue(Value, frozen=True):
    """One value of a fact, and the nodes that have it."""

    value: str
    nodes: tuple[str, ...]


class Difference(Value, frozen=True):
    """A fact that differs between nodes, its most common value first. `job` is null for a fact about nodes."""

    fact: str
    job: str | None
    values: tuple[FactValue, ...]


def collect_replies() -> ReplyCollector[NodeReport]:
    """Return a collector of the replies of all nodes to `hangwatch check --json`."""
    return ReplyCollector(_report, frozenset(EXIT_CODES.values()), CLOCKS.warning_seconds)


def _report(printed: bytes, _node: str) -> NodeReport:
    report = parse_answer(printed, NodeReport, "its answer is not the output of `hangwatch check --json`: {error}")
    if report.schema_version != 1:
        raise AnswerError("runs a newer hangwatch than this node: upgrade hangwatch on this node")
    facts = len(report.facts.node) + sum(len(job.versions) for job in report.facts.jobs)
    if len(report.checks) > MOST_CHECKS or facts > MOST_FACTS or len(report.facts.jobs) > MOST_FACTS:
        raise AnswerError(f"its answer has more than {MOST_CHECKS} checks or {MOST_FACTS} facts; it is ignored")
    return _bounded(report)


def _bounded(value: T, characters: int = _NAME_CHARACTERS) -> T:
    """Return a value with its texts cut: sentences to `_MOST_CHARACTERS`, all others to `_NAME_CHARACTERS`."""
    bounded: Any = value
    if isinstance(value, str):
        bounded = words.elided(value, characters)
    elif isinstance(value, dict):
        bounded = {_bounded(name): _bounded(inner) for name, inner in value.items()}
    elif isinstance(value, tuple):
        bounded = tuple(map(_bounded, value))
    elif isinstance(value, msgspec.Struct):
        fields = {name: getattr(value, name) for name in value.__struct_fields__}
        bounded = replace(
            value, **{name: _bounded(inner, _LONG_TEXTS.get(name, characters)) for name, inner in fields.items()}
        )
    return cast(T, bounded)


def findings(reports: Mapping[str, NodeReport], *, every_wording: bool = False) -> list[Finding]:
    """Return the check results that are not OK. Equal results of several nodes are one finding.

    Results with the same check, status and reason are equal, even if their messages have other numbers: the finding
    has the most common message. With `every_wording`, each message is a separate finding.
    """
    nodes_of = list_by_key(
        (result if every_wording else (result.check, result.status, result.reason), (node, result))
        for node, report in reports.items()
        for result in report.checks
        if result.status != "OK"
    )
    return [_fold_equal(results) for results in nodes_of.values()]


def _fold_equal(results: Sequence[tuple[str, CheckSummary]]) -> Finding:
    wordings = Counter(result.message for _, result in results)
    message, _ = wordings.most_common(1)[0]
    first = next(result for _, result in results if result.message == message)
    others = len(wordings) - 1
    more = f" (and {words.count(others, 'similar message')}: --verbose)" if others else ""
    return Finding.copy_from(first, nodes=tuple(sorted(node for node, _ in results)), message=message + more)


def differences(reports: Mapping[str, NodeReport]) -> list[Difference]:
    """Return the facts with different values on different nodes. Nodes that do not report a fact are ignored.

    Facts about a job are compared only between the nodes of that job.
    """
    nodes_by_value: dict[tuple[str, str | None, str], dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for node, report in reports.items():
        for name, value in report.facts.node.items():
            nodes_by_value[name, None, ""][value].append(node)
        for job in report.facts.jobs:
            for name, value in job.versions.items():
                nodes_by_value[name, job.job, job.key][value].append(node)
    return [
        Difference(
            fact=name,
            job=job,
            values=tuple(
                FactValue(value=value, nodes=tuple(sorted(set(nodes))))
                for value, nodes in sorted(nodes_of.items(), key=lambda item: (-len(item[1]), item[0]))
            ),
        )
        for (name, job, _), nodes_of in nodes_by_value.items()
        if len(nodes_of) > 1
    ]


def difference_finding(difference: Difference) -> Finding:
    """Return a finding about the nodes that differ from the majority; about all nodes if there is no majority."""
    most, *others = difference.values
    node_count = sum(len(held.nodes) for held in difference.values)
    odd = sorted({node for held in others for node in held.nodes})
    name = difference.fact.replace("_", " ") + ("" if difference.job is None else f" of job {difference.job}")
    texts = [f"{held.value} on {_nodes(held.nodes)}" for held in difference.values[:MOST_VALUES]]
    more = len(difference.values) - MOST_VALUES
    is_majority = 2 * len(most.nodes) > node_count
    return Finding(
        nodes=tuple(odd if is_majority else sorted({*odd, *most.nodes})),
        check="same_on_all_nodes",
        status="WARNING",
        reason="Differs",
        message=f"{name} {', '.join(texts)}" + (f" and {words.count(more, 'more value')}" if more > 0 else ""),
        remedy=f"change {_nodes(odd)} to {most.value}" if is_majority else "use the same value on all nodes",
    )


def clock_findings(clocks: Iterable[ClockOffset]) -> list[Finding]:
    """Return a finding for each clock that differs from the clock of the node that ran the command."""
    return [
        Finding(
            nodes=(offset.node,),
            check="clocks",
            status="CRITICAL" if abs(offset.seconds) >= CLOCKS.critical_seconds else "WARNING",
            reason="ClockDiffers",
            message=f"the clock is at least {words.duration(abs(offset.seconds))} "
            f"{'ahead of' if offset.seconds > 0 else 'behind'} the clock of the node that ran this command",
            remedy=STEP_TIME,
        )
        for offset in clocks
    ]


def absent_findings(replies: ReplyCollector[NodeReport]) -> list[Finding]:
    """Return findings about nodes that failed or did not respond."""
    failed = [Finding("answer", "UNKNOWN", "NoAnswer", why, "", tuple(sorted(nodes))) for why, nodes in replies.failed]
    if not replies.silent:
        return failed
    return [
        *failed,
        Finding(
            check="answer",
            status="UNKNOWN",
            reason="Unanswered",
            message="did not respond by the deadline, or cannot be reached",
            remedy="",
            nodes=tuple(sorted(replies.silent)),
        ),
    ]


def sort_findings(unsorted_findings: Iterable[Finding]) -> list[Finding]:
    """Return the findings, sorted by severity (most severe first), then by check."""
    return sorted(
        unsorted_findings,
        key=lambda finding: (-_SEVERITY[finding.status], finding.check, finding.reason, finding.nodes),
    )


def worst_status(listed_findings: Iterable[Finding]) -> Status:
    """Return the most severe status. Return OK if there is no finding."""
    return max((finding.status for finding in listed_findings), key=_SEVERITY.__getitem__, default="OK")


def _nodes(nodes: Iterable[str]) -> str:
    return words.elided(words.fold_nodes(nodes), _NODES_CHARACTERS)
