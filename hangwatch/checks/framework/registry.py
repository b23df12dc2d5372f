"""Discovery of the checks. Every module in checks/ must define `CHECK`. Subfolders are not searched."""

import importlib
import pkgutil
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path

from hangwatch import config
from hangwatch.checks.framework.contract import AnyCheck, Check, Settings
from hangwatch.errors import UserError
from hangwatch.formats import toml_file

PACKAGE = "hangwatch.checks"


class UnknownCheckError(UserError):
    """A request for a check that does not exist. The message lists the existing checks."""


class ContractError(UserError):
    """A module in checks/ that is no check, or that declares a metric of another one. The message names the file."""


@cache
def checks() -> dict[str, AnyCheck]:
    """Return all checks by name, sorted. Raises ContractError; the message names each file with a problem."""
    by_name: dict[str, AnyCheck] = {}
    owners: dict[str, str] = {}
    problems: list[str] = []
    for module in pkgutil.iter_modules([str(Path(__file__).parents[1])]):
        if module.ispkg:
            continue
        values = vars(importlib.import_module(f"{PACKAGE}.{module.name}"))
        check = values.get("CHECK")
        if not isinstance(check, Check):
            problems.append(f"hangwatch/checks/{module.name}.py: has no CHECK = Check(...)")
            continue
        problems += [
            f"hangwatch/checks/{module.name}.py: metric {metric.name!r} belongs to {owner}.py"
            for metrics in check.metrics
            for metric in metrics.metrics
            if (owner := owners.setdefault(metric.name, module.name)) != module.name
        ]
        by_name[module.name] = replace(check, name=module.name)
    if problems:
        raise ContractError("\n".join(problems))
    return dict(sorted(by_name.items()))


def select(names: Iterable[str]) -> list[AnyCheck]:
    """Return the checks with these names, or all checks if `names` is empty. Raises UnknownCheckError."""
    by_name = checks()
    wanted = list(names) or list(by_name)
    for name in wanted:
        if name not in by_name:
            raise UnknownCheckError(f"there is no check {name!r}\n  {_hint(name, by_name)}")
    return [by_name[name] for name in wanted]


def settings_for(settings: config.Settings, source: str, text: str = "") -> dict[str, Settings]:
    """Return the settings of every check by name. Raises config.ConfigError.

    An error names the file `source` and a line of its content `text`: a section of an unknown check, or a key or
    value that the check rejects.
    """
    by_name = checks()
    problems: list[str] = []
    for name in settings.checks:
        if name not in by_name:
            line = toml_file.line_of(text, ("checks", name))
            where = f"{source}{f':{line}' if line else ''}: [checks.{name}]"
            problems.append(f"{where}: there is no check {name!r}\n  {_hint(name, by_name)}")
    decoded: dict[str, Settings] = {}
    for name, check in by_name.items():
        try:
            decoded[name] = config.decode(settings.checks.get(name, {}), check.settings, source, ("checks", name), text)
        except config.ConfigError as error:
            problems += error.problems
    if problems:
        raise config.ConfigError(*problems[: toml_file.MOST_PROBLEMS])
    return decoded


def _hint(name: str, existing: Iterable[str]) -> str:
    import difflib  # only for a wrong name

    near = difflib.get_close_matches(name, list(existing), n=1)
    return (f"did you mean {near[0]!r}? " if near else "") + f"checks: {', '.join(existing)}"
