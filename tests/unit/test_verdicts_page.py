"""docs/verdicts.md prints its tables from the rules themselves; `make golden` renews them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

import pytest

from hangwatch.hang import activity, culprit

PAGE = Path(__file__).parents[2] / "docs" / "verdicts.md"
KINDS = {"ranks": "ranks", "gpu": "GPU", "lock": "lock", "thread": "thread"}
HALF_OF = {"others": "half of the other ranks that answered", "answered": "half of all ranks that answered"}
OUTNUMBER = {
    "as many": "as many as the suspects",
    "more": "more than the suspects, or one against one",
    "three times": "three times the suspects",
}


def accusing_rules() -> Iterable[str]:
    yield "| kind | ranks that | others wait for | those are at least | confidence begins |"
    yield "|---|---|---|---|---|"
    for rule in culprit.RULES:
        kinds = " or ".join(KINDS[kind] for kind in rule.waiting)
        yield (
            f"| `{rule.kind}` | {rule.who} | {kinds} | {HALF_OF[rule.half_of]}, and {OUTNUMBER[rule.outnumber]} "
            f"| {rule.confidence.value} |"
        )


def activities() -> Iterable[str]:
    yield "| waits for | activities |"
    yield "|---|---|"
    by_kind: dict[str, list[str]] = {}
    for name in activity.names():
        by_kind.setdefault(activity.known(name).waits_for, []).append(f"`{name}`")
    for kind, names in by_kind.items():
        yield f"| `{kind}` | {', '.join(names)} |"


@pytest.mark.golden
@pytest.mark.parametrize("table", [accusing_rules, activities])
def test_the_page_prints_what_the_rules_are(table: object) -> None:
    assert callable(table)
    begin, end = (f"<!-- {table.__name__}: {word} -->" for word in ("begin, printed by `make golden`", "end"))
    text = PAGE.read_text()
    printed = f"{begin}\n" + "\n".join(table()) + f"\n{end}"
    renewed, places = re.subn(f"{re.escape(begin)}.*?{re.escape(end)}", lambda _: printed, text, flags=re.DOTALL)
    assert places == 1, f"{PAGE}: the marks {begin} and {end} are missing"
    if os.environ.get("HANGWATCH_RENEW_GOLDEN"):
        PAGE.write_text(renewed)
    assert renewed == PAGE.read_text(), f"{PAGE} differs from the rules: run `make golden` and read the diff"
