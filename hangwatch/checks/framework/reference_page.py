"""docs/checks.md, from the checks themselves: their docstrings, settings, metrics, and the reasons that they give."""

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

This page is made from the code by `make golden`; a test fails while it is not current.

`hangwatch check` runs all of them once, `hangwatch check NAME...` those named; the daemon runs each on its own beat.
Every check has a verdict, a sentence that explains it also when all is well, and says what to type when it is not.
`NotPresent` (OK) means that this node has nothing of the kind: the daemon looks again half a minute after a job came,
so that no such sentence stands beside it for long. `status` says how long ago each looked. `CheckFailed` and `Stalled`
(UNKNOWN) mean that the check itself failed, or did not come back. UNKNOWN is neither well nor sick. On the screen those
with nothing of the kind are one line, and what several have found is said once; `--verbose` shows each of them.

Exit codes: 0 OK, 1 WARNING, 2 CRITICAL, 3 UNKNOWN, by the most severe check (CRITICAL, WARNING, UNKNOWN, OK);
`--fail-on critical` exits 0 for anything less, UNKNOWN included. `--json` prints the form that
[check.schema.json](check.schema.json) describes.
"""
LEVELS = {"ok": "OK", "unknown": "UNKNOWN", "warning": "WARNING", "critical": "CRITICAL", "level": "WARNING, CRITICAL"}


def page(checks: Mapping[str, AnyCheck]) -> str:
    """The whole page, in Markdown."""
    overview = ["| check | every | what it looks at |", "|---|---|---|"]
    for name, check in checks.items():
        overview.append(f"| [{name}](#{name}) | {check.every_seconds:g} s | {_docstring(check).splitlines()[0]} |")
    sections = [line for check in checks.values() for line in _section(check)]
    return "\n".join([INTRODUCTION, *overview, "", *sections]).rstrip() + "\n"


def _section(check: AnyCheck) -> Iterator[str]:
    yield f"## {check.name}\n"
    yield f"{_docstring(check)}\n"
    yield f"Runs every {check.every_seconds:g} s. Absent: {check.absent}.\n"
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
    """The reasons that a check's source gives, by status: the first argument of `ok`, `warning`, `critical`, ..."""
    found: dict[str, list[str]] = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in LEVELS and node.args:
            reason = node.args[0]
            if isinstance(reason, ast.Constant) and isinstance(reason.value, str):
                found.setdefault(LEVELS[node.func.id], []).append(reason.value)
    return {level: sorted(set(found[level])) for level in LEVELS.values() if level in found}


def _docstring(check: AnyCheck) -> str:
    return inspect.getdoc(_module(check)) or ""


def _module(check: AnyCheck) -> ModuleType:
    return sys.modules[check.judge.__module__]
