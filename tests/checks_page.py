"""The page docs/checks.md, from the docstrings, settings, metrics and reasons of the checks. `make golden` writes it."""

import ast
import inspect
import sys
import textwrap
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any, get_args, get_type_hints

import msgspec
from msgspec import Meta

from hangwatch.checks.framework.contract import AnyCheck, Metric

INTRODUCTION = """# The checks

This page lists the checks of a node for operators. `make golden` generates it from the code.

`hangwatch check` runs all checks once. `hangwatch check NAME...` runs the named checks. The daemon runs each check at
its interval. Each result has a status, a reason, a sentence, and what to type. Every section `[checks.NAME]` also has:

| key | default | meaning |
|---|---|---|
| `enabled` | `true` | false: the check runs only if `hangwatch check` names it |

Every check can have these reasons:

| reason | status | meaning |
|---|---|---|
| `NotPresent` | OK | this node and its jobs have nothing to check; hangwatch checks again 30 s after a job starts |
| `Vanished` | WARNING; `gpu_health`, `infiniband`: CRITICAL | a GPU, link or port of an earlier run is absent |
| `CheckFailed`, `Stalled` | UNKNOWN | the check itself failed, or did not return |

On a terminal, checks with nothing to check share one line, and so do equal findings. `--verbose` shows each.
The exit code is that of the most severe check: 2 CRITICAL, 1 WARNING, 3 UNKNOWN, 0 OK.
With `--fail-on critical`, any other status exits 0. [check.schema.json](check.schema.json) describes `--json`.
A metric that ends in `_total` is a counter, any other a gauge.
"""
LEVELS = {"ok": "OK", "unknown": "UNKNOWN", "warning": "WARNING", "critical": "CRITICAL", "level": "WARNING, CRITICAL"}


def page(checks: Mapping[str, AnyCheck]) -> str:
    """Return the whole page in Markdown."""
    overview = ["| check | every | subject |", "|---|---|---|"]
    for name, check in checks.items():
        overview.append(f"| [{name}](#{name}) | {check.every_seconds:g} s | {_docstring(check).splitlines()[0]} |")
    sections = [line for check in checks.values() for line in _section(check)]
    return "\n".join([INTRODUCTION, *overview, "", *sections]).rstrip() + "\n"


def list_metrics(check: AnyCheck) -> list[tuple[Metric[Any], tuple[str, ...]]]:
    """Return the metrics of a check, each with the names of its labels."""
    return [(metric, (*group.labels, *metric.by)) for group in check.metrics for metric in group.metrics]


def _section(check: AnyCheck) -> Iterator[str]:
    yield f"## {check.name}\n"
    if detail := "\n".join(_docstring(check).splitlines()[1:]).strip():
        yield f"{detail}\n"
    if check.absent != AnyCheck.absent:
        yield f"Nothing to check: {check.absent}.\n"
    statuses = reasons_of(inspect.getsource(_module(check))).items()
    line = "; ".join(f"{status}: {', '.join(f'`{reason}`' for reason in reasons)}" for status, reasons in statuses)
    yield textwrap.fill(line, 120)
    if settings := list(_settings(check.settings)):
        yield from ["", "| key | default | meaning |", "|---|---|---|", *settings]
    if check.metrics:
        yield from ["", "| metric | meaning |", "|---|---|"]
    for metric, labels in list_metrics(check):
        named = f"{{{', '.join(labels)}}}" if labels else ""
        yield f"| `hangwatch_{metric.name}{named}` | {metric.help} |"
    yield ""


def _settings(section: type[msgspec.Struct]) -> Iterator[str]:
    hints = get_type_hints(section, include_extras=True)
    for field in msgspec.structs.fields(section):
        if field.name == "enabled" and field.default is True:  # INTRODUCTION describes this default
            continue
        metas = [meta for meta in get_args(hints[field.name])[1:] if isinstance(meta, Meta)]
        meaning = next((meta.description for meta in metas if meta.description), "")
        yield f"| `{field.name}` | `{msgspec.json.encode(field.default).decode()}` | {meaning} |"


def reasons_of(source: str) -> dict[str, list[str]]:
    """Return by status the first arguments of calls of `ok`, `unknown`, `warning`, `critical` and `level`."""
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
