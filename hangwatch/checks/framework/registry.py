"""Find the checks: every module in checks/ must hold a `CHECK`; subfolders are not searched."""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from hangwatch import config
from hangwatch.checks.framework.contract import AnyCheck, Check, Settings, breaches
from hangwatch.errors import UserError
from hangwatch.formats import toml_file

PACKAGE = "hangwatch.checks"


class ContractError(UserError):
    """A file in checks/ that is no check; the message names the file and what is wrong with it."""


class UnknownCheckError(UserError):
    """A check that does not exist was asked for; the message names those that do."""


@cache
def checks() -> dict[str, AnyCheck]:
    """All checks by name. Raises ContractError, naming every file that breaks the contract."""
    found: dict[str, AnyCheck] = {}
    wrong: list[str] = []
    for module in pkgutil.iter_modules([str(Path(__file__).parents[1])]):
        if module.ispkg:
            continue
        candidate = getattr(importlib.import_module(f"{PACKAGE}.{module.name}"), "CHECK", None)
        problems = breaches(module.name, candidate)
        wrong += [f"hangwatch/checks/{module.name}.py: {problem}" for problem in problems]
        if isinstance(candidate, Check) and not problems:
            found[module.name] = candidate
    wrong += _shared_metrics(found.values())
    if wrong:
        raise ContractError("\n".join(wrong))
    return dict(sorted(found.items()))


def _shared_metrics(all_checks: Iterable[AnyCheck]) -> list[str]:
    """A metric belongs to one check: two with the same name would be one family with two meanings."""
    owner: dict[str, str] = {}
    wrong = []
    for check in all_checks:
        for metric in check.metrics:
            first = owner.setdefault(metric.name, check.name)
            if first != check.name:
                wrong.append(f"hangwatch/checks/{check.name}.py: metric {metric.name!r} belongs to {first}.py")
    return wrong


def select(names: Iterable[str]) -> list[AnyCheck]:
    """The checks of these names, all when there is no name. Raises UnknownCheckError."""
    by_name = checks()
    wanted = list(names) or list(by_name)
    for name in wanted:
        if name not in by_name:
            raise UnknownCheckError(f"there is no check {name!r}\n  {_hint(name, by_name)}")
    return [by_name[name] for name in wanted]


def settings_for(settings: config.Settings, source: str, text: str = "") -> dict[str, Settings]:
    """The settings of every check by name; `source` is the file named in errors, `text` what it holds, for the lines.

    Raises config.ConfigError for sections that are no check's, and for keys and values that their checks do not take.
    """
    by_name = checks()
    problems: list[str] = []
    for name in settings.checks:
        if name not in by_name:
            line = toml_file.line_of(text, ("checks", name))
            where = f"{source}{f':{line}' if line else ''}: [checks.{name}]"
            problems.append(f"{where}: there is no check {name!r}\n  {_hint(name, by_name)}")
    found: dict[str, Settings] = {}
    for name, check in by_name.items():
        try:
            found[name] = config.decode(settings.checks.get(name, {}), check.settings, source, ("checks", name), text)
        except config.ConfigError as error:
            problems += error.problems
    if problems:
        raise config.ConfigError(*problems[: toml_file.MOST_PROBLEMS])
    return found


def _hint(name: str, existing: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(existing), n=1)
    return (f"did you mean {near[0]!r}? " if near else "") + f"checks: {', '.join(existing)}"
