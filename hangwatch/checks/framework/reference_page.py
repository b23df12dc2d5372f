"""Generates docs/checks.md from the docstrings, settings, metrics and reasons of the checks."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import get_args, get_type_hints

import msgspec
from msgspec import Meta

from hangwatch.checks.framework.contract import AnyCheck

INTRODUCTION = """# The checks

This page lists every check, its settings, reasons and metrics. It is generated from the code by `make golden`.

`hangwatch check` runs all checks once, `hangwatch check NAME...` runs the named ones. The daemon runs each check at its
own interval, and again 30 s after a job starts. Each check returns a status, a reason and a sentence, also if the node
is healthy. If it is not, the check also says what to type. `hangwatch status` shows the age of each result.

* `NotPresent` (OK): this node does not have what the check examines.
* `CheckFailed`, `Stalled` (UNKNOWN): the check itself failed, or did not return in time.
* UNKNOWN: the state could not be determined. It does not mean a fault.

The table that `hangwatch check` prints folds all `NotPresent` results into one row, and repeats no finding that two
checks share. `--verbose` shows all of them.

Exit codes: 0 OK, 1 WARNING, 2 CRITICAL, 3 UNKNOWN, by the most severe check (order: CRITICAL, WARNING, UNKNOWN, OK).
With `--fail-on critical` every other status, also UNKNOWN, exits with 0. `--json` prints the results as
[check.schema.json](check.schema.json) describes them.
"""
LEVELS = {"ok": "OK", "unknown": "UNKNOWN", "warning": "WARNING", "critical": "CRITICAL", "level": "WARNING, CRITICAL"}


def page(checks: Mapping[str, AnyCheck]) -> str:
    """Return the whole page in Markdown."""
    overview = ["| check | every | subject |", "|---|---|---|"]
    for name, check in checks.items():
        overview.append(f"| [{name}](#{name}) | {check.every_seconds:g} s | {_docstring(check).splitlines()[0]} |")
    sections = [line for check in checks.values() for line in _section(check)]
    return "\n".join([INTRODUCTION, *overview, "", *sections]).rstrip() + "\n"


def _section(check: AnyCheck) -> Iterator[str]:
    yield f"## {check.name}\n"
    yield f"{_docstring(check)}\n"
    yield f"Runs every {check.every_seconds:g} s. Not present if {check.absent}.\n"
    yield from ["| status | reasons |", "|---|---|"]
    for status, reasons in reasons_of(inspect.getsource(_module(check))).items():
        yield f"| {status} | {', '.join(f'`{reason}`' for reason in reasons)} |"
    yield from ["", f"Settings, `[checks.{check.name}]`:", "", "| key | default | meaning |", "|---|---|---|"]
    yield from _settings(check.settings)
    if check.metrics:
        yield from ["", "| metric | kind | meaning |", "|---|---|---|"]
    for metric in check.metrics:
        labels = f"{{{', '.join(metric.labels)}}}" if metric.labels else ""
        yield f"| `hangwatch_{metric.name}{labels}` | {metric.kind} | {metric.help} |"
    yield ""


def _settings(section: type[msgspec.Struct]) -> Iterator[str]:
    hints = get_type_hints(section, include_extras=True)
    for field in msgspec.structs.fields(section):
        metas = [meta for meta in get_args(hints[field.name])[1:] if isinstance(meta, Meta)]
        meaning = next((meta.description for meta in metas if meta.description), "")
        yield f"| `{field.name}` | `{msgspec.json.encode(field.default).decode()}` | {meaning} |"


def reasons_of(source: str) -> dict[str, list[str]]:
    """Return the reasons in a check's source by status: the first argument of `ok`, `warning`, `critical`, ..."""
    reasons: dict[str, set[str]] = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in LEVELS and node.args:
            reason = node.args[0]
            if isinstance(reason, ast.Constant) and isinstance(reason.value, str):
                reasons.setdefault(LEVELS[node.func.id], set()).add(reason.value)
    return {level: sorted(reasons[level]) for level in LEVELS.values() if level in reasons}


def _docstring(check: AnyCheck) -> str:
    return inspect.getdoc(_module(check)) or ""


def _module(check: AnyCheck) -> ModuleType:
    return sys.modules[check.judge.__module__]
