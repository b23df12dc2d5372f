"""The tables of docs/verdicts.md are made from the rules. `make golden` renews them."""

import re
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from hangwatch.stacks import activity_table
from hangwatch.verdict import check_first, findings, kinds, recommendation, rules
from hangwatch.verdict.wording.sentences import SENTENCES

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "verdicts.md"
RUNBOOK = DOCS / "runbooks/HangwatchTrainingHung.md"
KINDS = {"ranks": "ranks", "gpu": "GPU", "lock": "lock", "thread": "thread"}
HALF_OF = {
    "dumped": "half of the others with a stack",
    "others": "half of the others that answered",
    "answered": "half of all that answered",
}
OTHERS = {
    ("ranks",): "wait for ranks",
    ("gpu",): "wait for the GPU",
    ("ranks", "gpu"): "wait for ranks or GPU",
    ("ranks", "gpu", "lock"): "wait for ranks, GPU or a lock",
    ("lock",): "wait for a lock",
    ("work",): "have GPUs at work",
}
OUTNUMBER = {
    "as many": "≥ suspects",
    "more": "> suspects, or 1 to 1",
    "twice": "≥ twice the suspects",
    "three times": "≥ three times the suspects",
}


def accusing_rules() -> Iterable[str]:
    yield "| kind | suspects: ranks that | others wait for | at least that many do | confidence begins |"
    yield "|---|---|---|---|---|"
    for rule in rules.RULES:
        kinds = "anything" if rule.waiting == findings.ANYTHING else " or ".join(KINDS[kind] for kind in rule.waiting)
        yield (
            f"| `{rule.kind}` | {rule.description} | {kinds} | {HALF_OF[rule.half_of]}; {OUTNUMBER[rule.outnumber]} "
            f"| {rule.confidence.value} |"
        )


def ranks_to_check() -> Iterable[str]:
    yield "| suspects: ranks that | the others | that many do | named, low, if the machine agrees |"
    yield "|---|---|---|---|"
    for rule in check_first.CHECK_FIRST:
        others = "do anything" if rule.waiting == findings.ANYTHING else OTHERS[rule.waiting]
        yield f"| {rule.description} | {others} | {OUTNUMBER[rule.outnumber]} | {'yes' if rule.may_name else 'no'} |"


def activities() -> Iterable[str]:
    yield "| waits for | activities |"
    yield "|---|---|"
    by_kind: dict[str, list[str]] = {}
    for name in activity_table.built_in().activities:
        by_kind.setdefault(activity_table.find_activity(name).waits_for, []).append(f"`{name}`")
    for kind, names in by_kind.items():
        yield f"| `{kind}` | {', '.join(names)} |"


def actions() -> Iterable[str]:
    yield "| action | if | why |"
    yield "|---|---|---|"
    for row in recommendation.load().values():
        yield f"| `{row.action}` | {row.reason.format(target=row.noun)} | {row.why} |"


@pytest.mark.golden
@pytest.mark.parametrize("table", [accusing_rules, ranks_to_check, activities, actions])
def test_the_page_prints_what_the_rules_are(
    table: Callable[[], Iterable[str]], golden_part: Callable[[Path, str, Iterable[str]], None]
) -> None:
    golden_part(PAGE, table.__name__, table())


def next_steps() -> Iterable[str]:
    yield "| verdict | it means | do first |"
    yield "|---|---|---|"
    for kind, step in kinds.load().items():
        means, first = (
            re.sub(r"\{pid\}", "PID", text).replace("|", "\\|").replace("docs/runbooks/", "")
            for text in (step.means, step.first)
        )
        yield f"| `{kind}` | {means} | {first} |"


@pytest.mark.golden
def test_the_runbook_prints_what_the_report_says(golden_part: Callable[[Path, str, Iterable[str]], None]) -> None:
    golden_part(RUNBOOK, "next_steps", next_steps())


def test_every_kind_of_verdict_has_a_next_step_of_one_line() -> None:
    used = {rule.kind for rule in rules.RULES}
    used |= set(re.findall(r"^\| `([A-Z]\w+)` \|", PAGE.read_text(), re.MULTILINE))
    used |= set(re.findall(r"`([A-Z][a-z]+[A-Z]\w+|Moving|Suspended|Over|Serving|Crashed|Cycle)`", PAGE.read_text()))
    used -= {"ThreadPoolExecutor", "Rank"}
    assert used - set(kinds.load()) == set()
    for kind, step in kinds.load().items():
        assert "\n" not in step.first, kind
        assert len(step.first) < 160, kind


def test_table_of_sentences_has_a_row_for_each_rule_and_kind() -> None:
    of_rules = {rule.sentence or rule.kind for rule in (*rules.RULES, *check_first.CHECK_FIRST)}
    assert of_rules | set(kinds.load()) - {"Crashed", "LogsOnly"} <= set(SENTENCES)


def test_rules_over_nodes_give_way_to_the_kinds_that_the_kernel_shows() -> None:
    by_kernel = "|".join(sorted(kind for kind, row in kinds.load().items() if row.by_kernel))
    assert set(
        re.findall(r'verdict=~"([^"]*)"', (DOCS.parent / "deploy/prometheus/hangwatch.rules.yaml").read_text())
    ) == {by_kernel}, f'write verdict=~"{by_kernel}" in hangwatch.rules.yaml, in each place that lists these kinds'
