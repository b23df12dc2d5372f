"""Which configuration a command goes by."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import click

from hangwatch import config
from hangwatch.errors import TemporaryError, UserError
from hangwatch.formats import toml_file

if TYPE_CHECKING:
    from hangwatch.checks.framework.contract import Settings as CheckSettings

DEFAULT_CONFIG = Path("/etc/hangwatch/hangwatch.toml")

Proof: TypeAlias = Callable[[config.Settings, str], object]

config_option = click.option(
    "--config",
    "config_path",
    type=click.Path(path_type=Path, dir_okay=False),
    help=f"TOML file; without it {DEFAULT_CONFIG} where that exists, else the defaults.",
)


def settings_from(path: Path | None) -> tuple[config.Settings, str]:
    """The settings and the name to show for where they come from. Raises ConfigError."""
    path = _used(path)
    return (config.load(path), str(path)) if path is not None else (config.Settings(), "the defaults")


def settings_with_checks(
    path: Path | None, proofs: Mapping[str, Proof] | None = None
) -> tuple[config.Settings, str, dict[str, CheckSettings]]:
    """The same, and the settings of every check.

    `proofs` are what else refuses settings, by the section that each reads. Raises ConfigError, which tells all that is
    wrong at once, a section being proven where its keys are right; and what a proof raises.
    """
    from hangwatch.checks.framework import registry

    path = _used(path)
    source, text = (str(path), config.read(path)) if path is not None else ("the defaults", "")
    problems: list[str] = []
    wrong: frozenset[str] = frozenset()
    checks: dict[str, CheckSettings] = {}
    try:
        settings = config.parse(text, source)
    except config.ConfigError as error:
        if not isinstance(error.rest, config.Settings):
            raise
        problems, wrong, settings = [*error.problems], error.sections, error.rest
    try:
        checks = registry.settings_for(settings, source, text)
    except config.ConfigError as error:
        problems += error.problems
    for section, prove in (proofs or {}).items():
        try:
            if section not in wrong:
                prove(settings, source)
        except config.ConfigError as error:
            problems += error.problems
        except UserError as error:
            problems.append(str(error))
        except TemporaryError:
            if not problems:
                raise
    if problems:
        raise config.ConfigError(*problems[: toml_file.MOST_PROBLEMS])
    return settings, source, checks


def _used(path: Path | None) -> Path | None:
    return DEFAULT_CONFIG if path is None and DEFAULT_CONFIG.exists() else path
